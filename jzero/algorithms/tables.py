"""The table for each field of `Algorithm` that is a name.

The config checks read TABLES: the value of a field must be a key of its table.
"""

from collections.abc import Mapping

from jzero.algorithms.advantages import ADVANTAGES
from jzero.algorithms.corrections import CORRECTIONS
from jzero.algorithms.kl import KL_ESTIMATORS
from jzero.algorithms.ratios import RATIOS
from jzero.algorithms.surrogates import SURROGATES
from jzero.algorithms.weights import WEIGHTS

TABLES: dict[str, Mapping[str, object]] = {
    "advantage": ADVANTAGES,
    "weight": WEIGHTS,
    "ratio": RATIOS,
    "surrogate": SURROGATES,
    "correction": CORRECTIONS,
    "kl_estimator": KL_ESTIMATORS,
    "kl_weight": WEIGHTS,
    "ce_weight": WEIGHTS,
}
