"""Importance ratios of the policy to the old policy, for every token of packed rows [B, T].

A ratio function takes log pi - log pi_old of every token and a function that sums over sequences,
and returns the ratio rho of every token.
"""

from collections.abc import Callable
from typing import TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Float

# The same bound as in verl.
MAX_LOG_RATIO = 20.0  # log-ratios are clamped to +-20, so that exp stays finite in float32

Tokens: TypeAlias = Float[Array, "rows tokens"]

# Returns for every token the sum over the trained tokens of its sequence. A packed row has several
# sequences, so this cannot be a sum over an axis.
SequenceSum: TypeAlias = Callable[[Tokens], Tokens]

Ratio: TypeAlias = Callable[[Tokens, SequenceSum], Tokens]


def bounded_exp(log_ratio: Tokens) -> Tokens:
    """Returns exp(log_ratio), finite for every input."""
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def token_ratio(log_ratio: Tokens, sequence_sum: SequenceSum) -> Tokens:
    """rho_t = pi(a_t) / pi_old(a_t), separately for each token (PPO, arXiv:1707.06347 eq. 6)."""
    return bounded_exp(log_ratio)


def sequence_ratio(log_ratio: Tokens, sequence_sum: SequenceSum) -> Tokens:
    """rho_t = (prod_s pi(a_s) / pi_old(a_s))^(1/|o|): the geometric mean over the token's sequence.

    Source: GSPO, arXiv:2507.18071 eq. 7.
    """
    # A sequence without trained tokens has the sum 0.
    length = jnp.maximum(sequence_sum(jnp.ones_like(log_ratio)), 1.0)
    return bounded_exp(sequence_sum(log_ratio) / length)


def product_ratio(log_ratio: Tokens, sequence_sum: SequenceSum) -> Tokens:
    """rho_t = prod_s pi(a_s) / pi_old(a_s): the product over the token's sequence.

    This is the importance weight of the sequence, without normalization by its length. Source:
    VESPO, arXiv:2602.10693.
    """
    return bounded_exp(sequence_sum(log_ratio))


RATIOS: dict[str, Ratio] = {
    "token": token_ratio,
    "sequence": sequence_ratio,
    "product": product_ratio,
}
