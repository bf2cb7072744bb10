"""Surrogates: the objective of one token, from its ratio and advantage, for packed rows [B, T].

A surrogate function takes the log-probs, the ratios and the advantages of every token, and returns
the loss of every token and whether its ratio was clipped.

The table also says of each surrogate whether it scales with the advantage: whether loss and
gradient of a token are exactly 0 where its advantage is 0. All of those here do. Sequences whose
advantages are all 0 then need no place in the update (`training.credit.can_have_gradient`). A
surrogate with a term besides the advantage, such as a squared log-ratio, does not.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jzero.algorithms.algorithm import Algorithm
from jzero.algorithms.ratios import Tokens

TokenFlags: TypeAlias = Bool[Array, "rows tokens"]
SurrogateFunction: TypeAlias = Callable[
    [Tokens, Tokens, Tokens, Algorithm], tuple[Tokens, TokenFlags]
]


def clip(
    logps: Tokens,
    ratio: Tokens,
    advantages: Tokens,
    algorithm: Algorithm,
) -> tuple[Tokens, TokenFlags]:
    """loss = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv:1707.06347 eq. 7).

    With `dual_clip` c the gain is at least c A where A < 0 (arXiv:1912.09729 eq. 5). A token counts
    as clipped if it has lost its gradient.
    """
    clipped_ratio = jnp.clip(ratio, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
    gain = jnp.minimum(ratio * advantages, clipped_ratio * advantages)
    is_clipped = clipped_ratio * advantages < ratio * advantages
    if algorithm.dual_clip:
        bound = jnp.where(advantages < 0, algorithm.dual_clip * advantages, -jnp.inf)
        is_clipped = is_clipped | (gain < bound)
        gain = jnp.maximum(gain, bound)
    return -gain, is_clipped


def reinforce(
    logps: Tokens,
    ratio: Tokens,
    advantages: Tokens,
    algorithm: Algorithm,
) -> tuple[Tokens, TokenFlags]:
    """loss = -A log pi, without a ratio (Williams 1992)."""
    return -advantages * logps, jnp.zeros(ratio.shape, bool)


def cispo(
    logps: Tokens,
    ratio: Tokens,
    advantages: Tokens,
    algorithm: Algorithm,
) -> tuple[Tokens, TokenFlags]:
    """loss = -stop_gradient(clip(rho)) A log pi, so that no token loses its gradient.

    Source: MiniMax-M1, arXiv:2506.13585 eq. 4.
    """
    clipped_ratio = jnp.clip(ratio, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
    loss = -jax.lax.stop_gradient(clipped_ratio) * advantages * logps
    return loss, clipped_ratio != ratio


class Surrogate(NamedTuple):
    """A surrogate function, and whether its loss and gradient are 0 where the advantage is 0."""

    compute: SurrogateFunction
    scales_with_advantage: bool = False


SURROGATES: dict[str, Surrogate] = {
    "clip": Surrogate(clip, scales_with_advantage=True),
    "reinforce": Surrogate(reinforce, scales_with_advantage=True),
    "cispo": Surrogate(cispo, scales_with_advantage=True),
}
