"""Moved from jzero.algorithms."""

import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from jzero.algorithms.advantages import ADVANTAGES
from jzero.algorithms.algorithm import Algorithm
from jzero.algorithms.corrections import CORRECTIONS
from jzero.algorithms.losses import KLS, SURROGATES
from jzero.algorithms.ratios import RATIOS
from jzero.algorithms.weights import WEIGHTS

CHOICES = {  # field of Algorithm -> what it may be
    "truncated": ("grade", "fixed", "mask"),
    "advantage": tuple(ADVANTAGES),
    "weight": tuple(WEIGHTS),
    "old_policy": ("trainer", "sampler"),
    "ratio": tuple(RATIOS),
    "surrogate": tuple(SURROGATES),
    "correction": ("", "none", *CORRECTIONS),
    "kl_estimator": tuple(KLS),
    "kl_weight": ("", *WEIGHTS),
}


PRESETS: dict[str, Callable[..., Algorithm]] = {
    name: partial(Algorithm, name=name, **values)
    for name, values in tomllib.loads(
        Path(__file__).with_name("presets.toml").read_text(encoding="utf-8")
    ).items()
}
grpo, dr_grpo = PRESETS["grpo"], PRESETS["dr_grpo"]
