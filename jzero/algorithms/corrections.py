"""Moved from jzero.algorithms."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

from jzero.algorithms.algorithm import Algorithm
from jzero.algorithms.ratios import Total, bounded_exp, sequence_ratio

# Corrections for sampler and trainer disagreeing: d = log pi_old - log pi_sampler -> c. Low and high bound the ratio.
# 0 drops a token; the weights' denominators stay as they are.


def within(ratio: jax.Array, algorithm: Algorithm) -> jax.Array:
    """The ratio where it is in [low, high], else 0."""
    return jnp.where(
        (ratio >= algorithm.correction_low) & (ratio <= algorithm.correction_high), ratio, 0.0
    )


CORRECTIONS: dict[str, Callable[[jax.Array, Total, Algorithm], jax.Array]] = {
    # min(exp(d), high): truncated importance sampling (TIS, Yao et al. 2025)
    "token_truncate": lambda d, total, a: jnp.minimum(bounded_exp(d), a.correction_high),
    # exp(d) within [low, high], else 0 (masked importance sampling; AReaL, arXiv:2505.24298)
    "token_mask": lambda d, total, a: within(bounded_exp(d), a),
    # of prod exp(d) of the sequence, for each of its tokens; the mask is TRL's default
    "sequence_truncate": lambda d, total, a: jnp.minimum(bounded_exp(total(d)), a.correction_high),
    "sequence_mask": lambda d, total, a: within(bounded_exp(total(d)), a),
    # 1 for sequences whose geometric mean of exp(d) is within [low, high], else 0
    "geometric": lambda d, total, a: jnp.sign(within(sequence_ratio(d, total), a)),
}


def resolved(algorithm: Algorithm, eta: int) -> Algorithm:
    """With eta > 0 decoupled PPO (arXiv:2505.24298 eq. 5), unless a correction is named."""
    name = algorithm.correction or (
        "token_truncate" if eta and algorithm.old_policy == "trainer" else "none"
    )
    return replace(algorithm, correction="" if name == "none" else name)
