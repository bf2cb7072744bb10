"""The token losses of the Tinker API, chosen by a number, so that no loss compiles a program.

With p the model's probability of the target, q the given `logprobs`, r = p / q, and A the
`advantages`, the terms of a position are, from the API's documentation:

    cross_entropy        -sum over K of w log p     w may be fractional or negative
    importance_sampling  -r A
    ppo                  -min(r A, clip(r, low, high) A)        (Schulman et al. 2017, eq. 7)
    cispo                -stop_gradient(clip(r, low, high)) A log p    (CISPO, arXiv:2506.13585)
    dro                  -(A log p - beta / 2 (log p - log q)^2)       (arXiv:2405.19107)

A loss is the sum of its terms over all tokens. Nothing is divided by the number of tokens or
sequences. All log-probabilities have temperature 1.

dro has a penalty where A is 0, too. Clients send the tokens of a prompt with `advantages` and
`logprobs` of 0, and have no other mask for them: such positions have no loss.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jzero.algorithms.ratios import MAX_LOG_RATIO
from jzero.training.accumulation import Examples

KINDS = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")

# Losses of the API that are refused, and why.
REFUSED: Mapping[str, str] = {
    "stable_reinforce": "its formula is not published: set loss_fn=importance_sampling",
    "gspo": "its sequence_ratio_mask is not served: set loss_fn=ppo or importance_sampling",
}

DEFAULT_LOW, DEFAULT_HIGH = 0.8, 1.2  # bounds of the ratio
DEFAULT_BETA = 0.05


def token_loss(
    kind: Int[Array, ""], logps: Float[Array, "B T K"], examples: Examples[jax.Array]
) -> Float[Array, "B T"]:
    """Returns the loss terms of every position. `kind` is an index of KINDS."""
    first = logps[..., 0]
    advantages, old = examples.advantages, examples.sampler_logps
    # Clipped so that the ratio is finite; beyond e^20 there is no gradient.
    gap = jnp.clip(first - old, -MAX_LOG_RATIO, MAX_LOG_RATIO)

    def cross_entropy() -> jax.Array:
        # `where`: a target of weight 0 may have log-probability -inf.
        terms = jnp.where(examples.weights != 0, examples.weights * logps, 0)
        return -terms.sum(axis=-1)

    def importance_sampling() -> jax.Array:
        return -jnp.exp(gap) * advantages

    def ppo() -> jax.Array:
        ratio = jnp.exp(gap)
        clipped = jnp.clip(ratio, examples.low, examples.high)
        return -jnp.minimum(ratio * advantages, clipped * advantages)

    def cispo() -> jax.Array:
        clipped = jnp.clip(jnp.exp(gap), examples.low, examples.high)
        return -lax.stop_gradient(clipped) * advantages * first

    def dro() -> jax.Array:
        # The weights are 0 on prompts (`datums.read_datum`), which have no penalty.
        penalty = 0.5 * examples.beta * (first - old) ** 2
        return -(advantages * first - jnp.where(examples.weights[..., 0] != 0, penalty, 0))

    # All five are cheap next to the model, and one program serves them all.
    return lax.switch(kind, (cross_entropy, importance_sampling, ppo, cispo, dro))
