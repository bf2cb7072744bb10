"""Which table the name in a field of `Algorithm` is looked up in.

The checks of the config read this: a field that is listed here may be any key of its table.
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
