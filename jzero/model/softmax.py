"""Log-probabilities and entropies of tokens, computed from logits in fp32.

    logps, entropy = plain_logps(logits, tokens, temperature)
    logps, entropy = exact_logps(logits, tokens, temperature)     # the same bits in every program

Both are values of `Arithmetic.logps`. `logprobs.py` applies them to a batch whose logits do not fit
into memory at once.
"""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jzero.attention.exact import sum_by_halves

# Name of the values that a chunk of `logprobs.token_logps` keeps: two numbers per token.
SOFTMAX_STATISTICS = "softmax statistics"

Placement = Callable[[jax.Array], jax.Array]  # constrains the sharding of an array
LookUp = Callable[[jax.Array, jax.Array], jax.Array]  # (logits [*batch, V], tokens) -> [*batch]


def leave_in_place(x: jax.Array) -> jax.Array:
    """Returns `x` unchanged: the placement without a sharding constraint."""
    return x


def by_index(logits: Float[Array, "*batch V"], tokens: Int[Array, "*batch"]) -> jax.Array:
    """Returns the logits of the tokens [*batch]."""
    return jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]


def by_mask(logits: Float[Array, "*batch V"], tokens: Int[Array, "*batch"]) -> jax.Array:
    """Returns what `by_index` returns, by a sum over the vocabulary, which XLA can always split."""
    words = lax.broadcasted_iota(tokens.dtype, logits.shape, logits.ndim - 1)
    return jnp.where(words == tokens[..., None], logits, 0).sum(axis=-1)


def plain_logps(
    logits: Float[Array, "*batch V"],
    tokens: Int[Array, "*batch"],
    temperature: Float[Array, "*batch"] | float,
    place: Placement = leave_in_place,
    look_up: LookUp = by_index,
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """Computes log p(token) and the entropy of p = softmax(logits / temperature).

    place: a sharding constraint on the scaled logits.
    """
    scaled = place(logits / in_last_axis(temperature))
    logz, mean_logit = softmax_statistics(scaled)
    at_token = look_up(scaled, tokens)
    return at_token - logz, logz - mean_logit  # H(p) = log Z - sum_v p_v logit_v


def in_last_axis(temperature: Float[Array, "*batch"] | float) -> Float[Array, "*batch 1"] | float:
    """Returns temperatures that broadcast over the vocabulary."""
    return temperature[..., None] if isinstance(temperature, jax.Array) else temperature


def kept_logps(
    logits: Float[Array, "B T V"],
    tokens: Int[Array, "B T"],
    kept: Int[Array, "B T K"],
    temperature: float,
    place: Placement = leave_in_place,
    look_up: LookUp = by_index,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], Float[Array, "B T"]]:
    """Computes log q(token), the entropy of p, and log p(token) for p as in `plain_logps`.

    q is p restricted to the tokens in `kept`, which include the token; -1 is padding. If `kept` has
    no token at a position, q is p.
    """
    scaled = place(logits / temperature)
    logz, mean_logit = softmax_statistics(scaled)
    at_token = look_up(scaled, tokens)
    kept_logz = logz_of_kept(scaled, kept, logz)
    return at_token - kept_logz, logz - mean_logit, at_token - logz


def exact_logps(
    logits: Float[Array, "*batch V"],
    tokens: Int[Array, "*batch"],
    temperature: Float[Array, "*batch"] | float,
    place: Placement = leave_in_place,
    look_up: LookUp = by_index,
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """Computes `plain_logps` with log-probabilities of the same bits in every program.

    The entropies may differ. place: a sharding constraint on the logits.
    """
    logits = place(logits)
    scale = exact_scale(tokens, temperature)
    largest = lax.stop_gradient(logits.max(axis=-1))
    shifted = (logits - largest[..., None]) / scale[..., None]
    masses = jnp.exp(shifted)
    total = sum_by_halves(masses)
    at_token = look_up(logits, tokens)
    logps = (at_token - largest) / scale - jnp.log(total)
    # H(p) = log Z - sum_v p_v logit_v
    entropy = jnp.log(total) - jnp.sum(masses / total[..., None] * shifted, axis=-1)
    return logps, entropy


def exact_scale(
    tokens: Int[Array, "*batch"], temperature: Float[Array, "*batch"] | float
) -> Float[Array, "*batch"]:
    """Returns the temperatures as a divisor that is not a constant of the program."""
    # XLA replaces a division by a constant with a product by its reciprocal, which has other bits.
    # The condition keeps the scale from being a constant: tokens are never negative, but XLA cannot
    # infer that.
    return jnp.where(tokens < 0, 1.0, jnp.broadcast_to(jnp.float32(temperature), tokens.shape))


def plain_logps_of_many(
    logits: Float[Array, "*batch V"], tokens: Int[Array, "*batch K"]
) -> Float[Array, "*batch K"]:
    """Computes log p of K tokens of every position at temperature 1. Nothing has a gradient."""
    logz, _ = softmax_statistics(logits)
    return jnp.take_along_axis(logits, tokens, axis=-1) - logz[..., None]


def exact_logps_of_many(
    logits: Float[Array, "*batch V"], tokens: Int[Array, "*batch K"]
) -> Float[Array, "*batch K"]:
    """Computes `plain_logps_of_many` with the bits of `exact_logps`."""
    scale = exact_scale(tokens[..., 0], 1.0)[..., None]
    largest = logits.max(axis=-1)[..., None]
    total = sum_by_halves(jnp.exp((logits - largest) / scale))
    at_tokens = jnp.take_along_axis(logits, tokens, axis=-1)
    return (at_tokens - largest) / scale - jnp.log(total)[..., None]


@jax.custom_vjp
def softmax_statistics(
    logits: Float[Array, "*batch V"],
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """Returns log Z and sum_v p_v logit_v of p = softmax(logits), in one pass after the maximum.

    JAX's derivative would compute these sums again in the backward pass of a chunk. This derivative
    keeps both results (`SOFTMAX_STATISTICS`), and computes p from them and the logits.
    """
    statistics, _ = statistics_forward(logits)
    return statistics


# Residuals for the backward pass of `softmax_statistics`: the logits and both results.
Kept: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]


def statistics_forward(logits: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Kept]:
    # Subtracting the maximum keeps exp from overflowing.
    largest = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - largest)
    total = jnp.sum(weights, axis=-1)
    mean_logit = jnp.sum(weights * logits, axis=-1) / total
    logz = largest[..., 0] + jnp.log(total)
    logz = checkpoint_name(logz, SOFTMAX_STATISTICS)
    mean_logit = checkpoint_name(mean_logit, SOFTMAX_STATISTICS)
    return (logz, mean_logit), (logits, logz, mean_logit)


def statistics_backward(kept: Kept, gradients: tuple[jax.Array, jax.Array]) -> tuple[jax.Array]:
    """Returns the gradient of the logits.

    d log Z / d logit_v = p_v, and d mean_logit / d logit_v = p_v (1 + logit_v - mean_logit).
    """
    logits, logz, mean_logit = kept
    logz_gradient, mean_gradient = gradients
    probabilities = jnp.exp(logits - logz[..., None])
    change_of_mean = 1 + logits - mean_logit[..., None]
    return (probabilities * (logz_gradient[..., None] + mean_gradient[..., None] * change_of_mean),)


softmax_statistics.defvjp(statistics_forward, statistics_backward)


def logz_of_kept(
    logits: Float[Array, "B T V"],
    kept: Int[Array, "B T K"],
    logz: Float[Array, "B T"],
) -> Float[Array, "B T"]:
    """Returns log sum exp of the logits of the `kept` tokens, or `logz` where there are none."""
    is_token = kept >= 0
    has_token = is_token.any(axis=-1)
    kept_logits = jnp.take_along_axis(logits, jnp.maximum(kept, 0), axis=-1)
    # Without kept tokens, sum over all: the derivative of the log of an empty sum would be NaN.
    is_counted = is_token | ~has_token[..., None]
    kept_logz = jax.nn.logsumexp(kept_logits, axis=-1, where=is_counted)
    return jnp.where(has_token, kept_logz, logz)
