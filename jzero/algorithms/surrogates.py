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


def masked_gain(
    ratio: Tokens,
    advantages: Tokens,
    is_masked: TokenFlags,
) -> tuple[Tokens, TokenFlags]:
    """loss = -rho A, and 0 for masked tokens, which lose their gradient."""
    return jnp.where(is_masked, 0.0, -ratio * advantages), is_masked


def old_probs(logps: Tokens, ratio: Tokens) -> tuple[Tokens, Tokens]:
    """Returns pi and mu, the probabilities of every token now and under the old policy.

    `ratio` is pi / mu of the token itself. Both are constants: no gradient goes through a mask.
    """
    probs = jnp.exp(jax.lax.stop_gradient(logps))
    return probs, probs / jax.lax.stop_gradient(ratio)


def dppo_tv(
    logps: Tokens,
    ratio: Tokens,
    advantages: Tokens,
    algorithm: Algorithm,
) -> tuple[Tokens, TokenFlags]:
    """loss = -rho A, and 0 where pi has moved too far in the direction of the advantage.

    The distance is the total variation of two outcomes, this token or another one: a token is
    masked if A > 0 and pi - mu > clip_high, or if A <= 0 and mu - pi > clip_low.

    Source: DPPO with the binary TV divergence, arXiv:2602.04879.
    """
    probs, before = old_probs(logps, ratio)
    change = probs - before
    is_masked = jnp.where(
        advantages > 0, change > algorithm.clip_high, change < -algorithm.clip_low
    )
    return masked_gain(ratio, advantages, is_masked)


def dppo_kl(
    logps: Tokens,
    ratio: Tokens,
    advantages: Tokens,
    algorithm: Algorithm,
) -> tuple[Tokens, TokenFlags]:
    """loss = -rho A, and 0 where pi has moved too far in the direction of the advantage.

    The distance is the KL divergence of two outcomes, this token or another one:
    KL = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)). A token is masked if A > 0, pi > mu
    and KL > clip_high, or if A <= 0, pi < mu and KL > clip_low.

    Source: DPPO with the binary KL divergence, arXiv:2602.04879.
    """
    probs, before = old_probs(logps, ratio)
    divergence = binary_kl(before, probs)
    is_masked = jnp.where(
        advantages > 0,
        (divergence > algorithm.clip_high) & (probs > before),
        (divergence > algorithm.clip_low) & (probs < before),
    )
    return masked_gain(ratio, advantages, is_masked)


def binary_kl(p: Tokens, q: Tokens) -> Tokens:
    """Returns KL(p || q) of a coin that falls heads with probability p, or q.

    Probabilities are kept away from 0 and 1 by a little, so that the result is finite.
    """
    tiny = 1e-8
    heads = p * jnp.log((p + tiny) / (q + tiny))
    # 1 - p rounds to a negative number where p rounds to more than 1.
    p_tails = jnp.maximum(1 - p, 0.0)
    q_tails = jnp.maximum(1 - q, 0.0)
    tails = p_tails * jnp.log((p_tails + tiny) / (q_tails + tiny))
    return heads + tails


def ipo(
    logps: Tokens,
    ratio: Tokens,
    advantages: Tokens,
    algorithm: Algorithm,
) -> tuple[Tokens, TokenFlags]:
    """loss = -rho A, and 0 where pi - mu > clip_high or mu - pi > clip_low, whatever A is.

    Source: IPO of prime-rl, docs/algorithms.md.
    """
    probs, before = old_probs(logps, ratio)
    change = probs - before
    is_masked = (change > algorithm.clip_high) | (change < -algorithm.clip_low)
    return masked_gain(ratio, advantages, is_masked)


class Surrogate(NamedTuple):
    """A surrogate function, and what it does and needs."""

    compute: SurrogateFunction
    scales_with_advantage: bool = False  # its loss and gradient are 0 where the advantage is 0
    needs_token_ratio: bool = False  # it takes the old policy's probability from the token's ratio


SURROGATES: dict[str, Surrogate] = {
    "clip": Surrogate(clip, scales_with_advantage=True),
    "reinforce": Surrogate(reinforce, scales_with_advantage=True),
    "cispo": Surrogate(cispo, scales_with_advantage=True),
    "dppo_tv": Surrogate(dppo_tv, scales_with_advantage=True, needs_token_ratio=True),
    "dppo_kl": Surrogate(dppo_kl, scales_with_advantage=True, needs_token_ratio=True),
    "ipo": Surrogate(ipo, scales_with_advantage=True, needs_token_ratio=True),
}
