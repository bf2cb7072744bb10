"""Algorithms are values: one loss, and presets that name an advantage, a weight, a surrogate and a correction."""

from jzero.algorithms.advantages import ADVANTAGES, Episodes, advantages, needs_critic
from jzero.algorithms.algorithm import Algorithm, needs_reference, shaped
from jzero.algorithms.corrections import CORRECTIONS, resolved
from jzero.algorithms.losses import KLS, SURROGATES, policy_loss, value_loss
from jzero.algorithms.presets import CHOICES, PRESETS, dr_grpo, grpo
from jzero.algorithms.ratios import RATIOS, Total
from jzero.algorithms.weights import WEIGHTS
