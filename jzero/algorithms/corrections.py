"""Corrections: factors for tokens whose sampler and trainer disagree about their probability.

The sampler computes in other precision and other kernels than the trainer, and an asynchronous
sampler may hold older weights. A correction takes d = log pi_old - log pi_sampler of every token of
packed rows [B, T]. It makes a ratio of d, of the token alone or of its sequence, and of the ratio
the factor c of the token's term in the loss. The factor is a constant: no gradient goes through it.
A factor of 0 drops the token from the sum, and the denominators of the weights stay as they are.

`correction_low` and `correction_high` bound the ratio.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp

from jzero.algorithms.algorithm import Algorithm
from jzero.algorithms.ratios import SequenceSum, Tokens, bounded_exp, sequence_ratio, token_ratio

CorrectionRatio: TypeAlias = Callable[[Tokens, SequenceSum], Tokens]
CorrectionFactor: TypeAlias = Callable[[Tokens, Algorithm], Tokens]


# The ratio: (d, sequence_sum) -> the ratio that the bounds apply to.


def product_ratio(d: Tokens, sequence_sum: SequenceSum) -> Tokens:
    """Returns the product of exp(d) over the token's sequence."""
    return bounded_exp(sequence_sum(d))


# The factor: (ratio, algorithm) -> c.


def truncate(ratio: Tokens, algorithm: Algorithm) -> Tokens:
    """c = min(ratio, high)."""
    return jnp.minimum(ratio, algorithm.correction_high)


def mask(ratio: Tokens, algorithm: Algorithm) -> Tokens:
    """c = ratio if it is in [low, high], else 0."""
    is_inside = (ratio >= algorithm.correction_low) & (ratio <= algorithm.correction_high)
    return jnp.where(is_inside, ratio, 0.0)


def keep(ratio: Tokens, algorithm: Algorithm) -> Tokens:
    """c = 1 if the ratio is in [low, high], else 0."""
    return jnp.sign(mask(ratio, algorithm))


class Correction(NamedTuple):
    """A correction: the ratio of every token, and the factor that the ratio becomes."""

    ratio: CorrectionRatio
    factor: CorrectionFactor


CORRECTIONS: dict[str, Correction] = {
    # Truncated importance sampling (TIS, Yao et al. 2025).
    "token_truncate": Correction(token_ratio, truncate),
    # Masked importance sampling (AReaL, arXiv:2505.24298; IcePop, arXiv:2510.18855).
    "token_mask": Correction(token_ratio, mask),
    "sequence_truncate": Correction(product_ratio, truncate),
    # TRL's default.
    "sequence_mask": Correction(product_ratio, mask),
    # Rejection by the geometric mean of exp(d) over the token's sequence.
    "geometric": Correction(sequence_ratio, keep),
}


def resolve_correction(algorithm: Algorithm, max_staleness: int) -> Algorithm:
    """Returns the algorithm with the correction that it has in a run, "" for none.

    A run whose rollouts may be stale is decoupled PPO (AReaL, arXiv:2505.24298 eq. 5) unless it
    names a correction or uses the sampler's log-probs as the old policy's.
    """
    if algorithm.correction == "none":
        return replace(algorithm, correction="")
    if not algorithm.correction and max_staleness and algorithm.old_policy == "trainer":
        return replace(algorithm, correction="token_truncate")
    return replace(algorithm)
