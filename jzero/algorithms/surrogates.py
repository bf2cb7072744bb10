"""Surrogates: the objective of one token, from its ratio and advantage, for packed rows [B, T].

A surrogate function takes the log-probs, the ratios and the advantages of every token, and its part
of the `Algorithm`. It returns the loss of every token and whether its ratio was clipped.

The table also marks the surrogates that scale with the advantage: the loss and gradient of a token
with an advantage of 0 are exactly 0. This holds for all surrogates below. The update can then leave
out sequences in which all advantages are 0 (`training.credit.can_have_gradient`). A surrogate with
an additional term, such as a squared log-ratio, does not scale with the advantage.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jzero.algorithms.algorithm import (
    CISPO,
    IPO,
    SAPO,
    VESPO,
    Clip,
    DppoKL,
    DppoTV,
    Reinforce,
)
from jzero.algorithms.ratios import Tokens

TokenFlags: TypeAlias = Bool[Array, "rows tokens"]
# The last argument is the part, with its numbers.
SurrogateFunction: TypeAlias = Callable[..., tuple[Tokens, TokenFlags]]


def importance_gain(ratio: Tokens, advantages: Tokens) -> Tokens:
    """gain = rho A: importance sampling (PPO, arXiv:1707.06347 eq. 6)."""
    return ratio * advantages


def clipped_gain(
    ratio: Tokens,
    advantages: Tokens,
    low: Tokens | float,
    high: Tokens | float,
) -> tuple[Tokens, TokenFlags]:
    """gain = min(rho A, clip(rho, low, high) A), and whether the clip removes the gradient.

    Source: PPO, arXiv:1707.06347 eq. 7.
    """
    gain = importance_gain(ratio, advantages)
    of_clipped = importance_gain(jnp.clip(ratio, low, high), advantages)
    return jnp.minimum(gain, of_clipped), of_clipped < gain


def clipped_weight(ratio: Tokens, low: Tokens | float, high: Tokens | float) -> Tokens:
    """Returns stop_gradient(clip(rho, low, high)), the weight of A log pi in CISPO."""
    return jax.lax.stop_gradient(jnp.clip(ratio, low, high))


def clip(
    logps: Tokens,
    ratio: Tokens,
    advantages: Tokens,
    part: Clip,
) -> tuple[Tokens, TokenFlags]:
    """loss = -min(rho A, clip(rho, 1 - low, 1 + high) A) (PPO, arXiv:1707.06347 eq. 7).

    With a bound c in `dual` the gain is at least c A if A < 0 (arXiv:1912.09729 eq. 5). A token
    counts as clipped if its gradient is 0 because of the clip.
    """
    gain, is_clipped = clipped_gain(ratio, advantages, 1 - part.low, 1 + part.high)
    if part.dual:
        # Without this bound the loss of a token with A < 0 grows with its ratio without limit.
        bound = jnp.where(advantages < 0, part.dual * advantages, -jnp.inf)
        is_clipped = is_clipped | (gain < bound)
        gain = jnp.maximum(gain, bound)
    return -gain, is_clipped


def reinforce(
    logps: Tokens,
    ratio: Tokens,
    advantages: Tokens,
    part: Reinforce,
) -> tuple[Tokens, TokenFlags]:
    """loss = -A log pi, without a ratio (Williams 1992)."""
    return -advantages * logps, jnp.zeros(ratio.shape, bool)


def cispo(
    logps: Tokens,
    ratio: Tokens,
    advantages: Tokens,
    part: CISPO,
) -> tuple[Tokens, TokenFlags]:
    """loss = -stop_gradient(clip(rho)) A log pi: clipped tokens keep a gradient.

    Source: MiniMax-M1, arXiv:2506.13585 eq. 4.
    """
    weight = clipped_weight(ratio, 1 - part.low, 1 + part.high)
    return -weight * advantages * logps, weight != ratio


def masked_gain(
    ratio: Tokens,
    advantages: Tokens,
    is_masked: TokenFlags,
) -> tuple[Tokens, TokenFlags]:
    """loss = -rho A, and 0 for masked tokens, which have no gradient."""
    return jnp.where(is_masked, 0.0, -importance_gain(ratio, advantages)), is_masked


def old_probs(logps: Tokens, ratio: Tokens) -> tuple[Tokens, Tokens]:
    """Returns the probabilities of every token under the policy, pi, and the old policy, mu.

    `ratio` is pi / mu of the token. Both results are constants: no gradient flows through a mask.
    """
    probs = jnp.exp(jax.lax.stop_gradient(logps))
    return probs, probs / jax.lax.stop_gradient(ratio)


def dppo_tv(
    logps: Tokens,
    ratio: Tokens,
    advantages: Tokens,
    part: DppoTV,
) -> tuple[Tokens, TokenFlags]:
    """loss = -rho A, and 0 for tokens with too large a change in the direction of the advantage.

    The distance is the total variation of two outcomes, this token or any other: a token is masked
    if A > 0 and pi - mu > high, or if A <= 0 and mu - pi > low.

    Source: DPPO with the binary TV divergence, arXiv:2602.04879.
    """
    probs, old = old_probs(logps, ratio)
    change = probs - old
    is_masked = jnp.where(advantages > 0, change > part.high, change < -part.low)
    return masked_gain(ratio, advantages, is_masked)


def dppo_kl(
    logps: Tokens,
    ratio: Tokens,
    advantages: Tokens,
    part: DppoKL,
) -> tuple[Tokens, TokenFlags]:
    """loss = -rho A, and 0 for tokens with too large a change in the direction of the advantage.

    The distance is the KL divergence of two outcomes, this token or any other:
    KL = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)). A token is masked if A > 0, pi > mu
    and KL > high, or if A <= 0, pi < mu and KL > low.

    Source: DPPO with the binary KL divergence, arXiv:2602.04879.
    """
    # A change against the direction of the advantage is never masked.
    probs, old = old_probs(logps, ratio)
    divergence = binary_kl(old, probs)
    is_masked = jnp.where(
        advantages > 0,
        (divergence > part.high) & (probs > old),
        (divergence > part.low) & (probs < old),
    )
    return masked_gain(ratio, advantages, is_masked)


def binary_kl(p: Tokens, q: Tokens) -> Tokens:
    """Returns KL(p || q) of Bernoulli distributions with success probabilities p and q."""
    tiny = 1e-8  # keeps the logarithms finite at probabilities of 0 and 1
    heads = p * jnp.log((p + tiny) / (q + tiny))
    # p can round to more than 1, and 1 - p would be negative.
    p_tails = jnp.maximum(1 - p, 0.0)
    q_tails = jnp.maximum(1 - q, 0.0)
    tails = p_tails * jnp.log((p_tails + tiny) / (q_tails + tiny))
    return heads + tails


def ipo(
    logps: Tokens,
    ratio: Tokens,
    advantages: Tokens,
    part: IPO,
) -> tuple[Tokens, TokenFlags]:
    """loss = -rho A, and 0 if pi - mu > high or mu - pi > low, for any A.

    Source: IPO of prime-rl, docs/algorithms.md.
    """
    probs, old = old_probs(logps, ratio)
    change = probs - old
    is_masked = (change > part.high) | (change < -part.low)
    return masked_gain(ratio, advantages, is_masked)


def sapo(
    logps: Tokens,
    ratio: Tokens,
    advantages: Tokens,
    part: SAPO,
) -> tuple[Tokens, TokenFlags]:
    """loss = -(4 / tau) sigmoid(tau (rho - 1)) A: a soft gate instead of a clipped ratio.

    tau is `tau_positive` if A > 0, else `tau_negative`. The derivative with respect to
    rho is -A at rho = 1 and decays to 0 on both sides, faster for larger tau. No token counts as
    clipped.

    Source: SAPO, arXiv:2511.20347, the gate f(rho).
    """
    tau = jnp.where(advantages > 0, part.tau_positive, part.tau_negative)
    gate = 4 / tau * jax.nn.sigmoid(tau * (ratio - 1))
    return -gate * advantages, jnp.zeros(ratio.shape, bool)


def vespo(
    logps: Tokens,
    ratio: Tokens,
    advantages: Tokens,
    part: VESPO,
) -> tuple[Tokens, TokenFlags]:
    """loss = -stop_gradient(phi(rho)) A log pi, with phi(rho) = rho^k exp(lambda (1 - rho)).

    phi is 1 at rho = 1 and 0 at both ends, so sequences with a very small or very large ratio have
    little weight. k and lambda are `k_positive` and `lambda_positive` if A >= 0, else
    `k_negative` and `lambda_negative`. No token counts as clipped.

    Source: VESPO, arXiv:2602.10693, where rho is the ratio of the sequence (ratio=product).
    """
    is_positive = advantages >= 0
    k = jnp.where(is_positive, part.k_positive, part.k_negative)
    rate = jnp.where(is_positive, part.lambda_positive, part.lambda_negative)
    # In log space, because the power and the exponential can overflow even if their product does
    # not.
    factor = jnp.exp(k * jnp.log(ratio) + rate * (1 - ratio))
    loss = -jax.lax.stop_gradient(factor) * advantages * logps
    return loss, jnp.zeros(ratio.shape, bool)


class Surrogate(NamedTuple):
    """A surrogate function and its properties."""

    compute: SurrogateFunction
    scales_with_advantage: bool = False  # loss and gradient are 0 if the advantage is 0
    needs_token_ratio: bool = False  # computes the old policy's probability from a token's ratio


SURROGATES: dict[type, Surrogate] = {
    Clip: Surrogate(clip, scales_with_advantage=True),
    Reinforce: Surrogate(reinforce, scales_with_advantage=True),
    CISPO: Surrogate(cispo, scales_with_advantage=True),
    DppoTV: Surrogate(dppo_tv, scales_with_advantage=True, needs_token_ratio=True),
    DppoKL: Surrogate(dppo_kl, scales_with_advantage=True, needs_token_ratio=True),
    IPO: Surrogate(ipo, scales_with_advantage=True, needs_token_ratio=True),
    SAPO: Surrogate(sapo, scales_with_advantage=True),
    VESPO: Surrogate(vespo, scales_with_advantage=True),
}
