"""Corrections: factors for tokens whose sampler and trainer disagree about their probability.

The sampler computes in other precision and other kernels than the trainer, and an asynchronous
sampler may hold older weights. A correction function takes d = log pi_old - log pi_sampler of every
token of packed rows [B, T] and returns the factor c of the token's term in the loss. The factor is
a constant: no gradient goes through it. A factor of 0 drops the token from the sum, and the
denominators of the weights stay as they are.

`correction_low` and `correction_high` bound the ratio exp(d).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import jax.numpy as jnp

from jzero.algorithms.algorithm import Algorithm
from jzero.algorithms.ratios import SequenceSum, Tokens, bounded_exp, sequence_ratio

Correction: TypeAlias = Callable[[Tokens, SequenceSum, Algorithm], Tokens]


def zero_outside_bounds(ratio: Tokens, algorithm: Algorithm) -> Tokens:
    """Returns the ratio where it is in [correction_low, correction_high], and 0 elsewhere."""
    is_inside = (ratio >= algorithm.correction_low) & (ratio <= algorithm.correction_high)
    return jnp.where(is_inside, ratio, 0.0)


def token_truncate(d: Tokens, sequence_sum: SequenceSum, algorithm: Algorithm) -> Tokens:
    """c = min(exp(d), high): truncated importance sampling (TIS, Yao et al. 2025)."""
    return jnp.minimum(bounded_exp(d), algorithm.correction_high)


def token_mask(d: Tokens, sequence_sum: SequenceSum, algorithm: Algorithm) -> Tokens:
    """c = exp(d) if it is in [low, high], else 0: masked importance sampling.

    Source: AReaL, arXiv:2505.24298.
    """
    return zero_outside_bounds(bounded_exp(d), algorithm)


def sequence_truncate(d: Tokens, sequence_sum: SequenceSum, algorithm: Algorithm) -> Tokens:
    """c = min(prod exp(d), high), with the product over the token's sequence."""
    return jnp.minimum(bounded_exp(sequence_sum(d)), algorithm.correction_high)


def sequence_mask(d: Tokens, sequence_sum: SequenceSum, algorithm: Algorithm) -> Tokens:
    """c = prod exp(d) over the token's sequence if it is in [low, high], else 0 (TRL's default)."""
    return zero_outside_bounds(bounded_exp(sequence_sum(d)), algorithm)


def geometric(d: Tokens, sequence_sum: SequenceSum, algorithm: Algorithm) -> Tokens:
    """c = 1 if the geometric mean of exp(d) over the token's sequence is in [low, high], else 0."""
    return jnp.sign(zero_outside_bounds(sequence_ratio(d, sequence_sum), algorithm))


CORRECTIONS: dict[str, Correction] = {
    "token_truncate": token_truncate,
    "token_mask": token_mask,
    "sequence_truncate": sequence_truncate,
    "sequence_mask": sequence_mask,
    "geometric": geometric,
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
