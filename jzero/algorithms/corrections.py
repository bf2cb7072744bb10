"""Corrections: importance weights for the mismatch between sampler and trainer.

The sampler uses another precision and other kernels than the trainer, and an asynchronous sampler
can have older weights. A correction takes d = log pi_old - log pi_sampler of every token of packed
rows [B, T]. From d it computes a ratio, for the token or for its sequence, and from the ratio the
factor c of the token's term in the loss. The factor is a constant: no gradient flows through it.
A factor of 0 drops the token from the sum without a change of the weights' denominators.

The numbers `low` and `high` of a correction bound the ratio.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp

from jzero.algorithms.algorithm import (
    Geometric,
    SequenceMask,
    SequenceTruncate,
    TokenMask,
    TokenTruncate,
)
from jzero.algorithms.ratios import (
    SequenceSum,
    Tokens,
    product_ratio,
    sequence_ratio,
    token_ratio,
)

CorrectionRatio: TypeAlias = Callable[[Tokens, SequenceSum], Tokens]
CorrectionFactor: TypeAlias = Callable[[Tokens, float, float], Tokens]


# The factor: (ratio, low, high) -> c.


def truncate(ratio: Tokens, low: float, high: float) -> Tokens:
    """c = min(ratio, high)."""
    return jnp.minimum(ratio, high)


def mask(ratio: Tokens, low: float, high: float) -> Tokens:
    """c = ratio if it is in [low, high], else 0."""
    is_inside = (ratio >= low) & (ratio <= high)
    return jnp.where(is_inside, ratio, 0.0)


def keep(ratio: Tokens, low: float, high: float) -> Tokens:
    """c = 1 if the ratio is in [low, high], else 0."""
    # A ratio is positive, so its sign is 1.
    return jnp.sign(mask(ratio, low, high))


class Correction(NamedTuple):
    """A correction: the function for the ratio, and the function from the ratio to the factor."""

    ratio: CorrectionRatio
    factor: CorrectionFactor


CORRECTIONS: dict[type, Correction] = {
    # Truncated importance sampling (TIS, Yao et al. 2025).
    TokenTruncate: Correction(token_ratio, truncate),
    # Masked importance sampling (AReaL, arXiv:2505.24298; IcePop, arXiv:2510.18855).
    TokenMask: Correction(token_ratio, mask),
    SequenceTruncate: Correction(product_ratio, truncate),
    # TRL's default.
    SequenceMask: Correction(product_ratio, mask),
    # Rejection by the geometric mean of exp(d) over the token's sequence.
    Geometric: Correction(sequence_ratio, keep),
}
