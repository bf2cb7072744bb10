"""Log-probabilities and entropies of tokens in fp32, without the logits of an entire batch at once.

The logits of one token are as long as the vocabulary: for 65,536 tokens and a vocabulary of 151,936
they would take 37 GiB. `token_logps` computes them for a chunk of tokens at a time, in the forward
and backward pass.
"""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jzero.model import qwen
from jzero.model.exact import ExactRows, exact_token_logps

Placement = Callable[[jax.Array], jax.Array]  # constrains the sharding of an array


def leave_in_place(x: jax.Array) -> jax.Array:
    """Returns `x` unchanged: the placement without a sharding constraint."""
    return x


def token_logps(
    config: qwen.QwenConfig,
    params: qwen.Params,
    hidden: Float[Array, "B T E"],
    targets: Int[Array, "B T"],
    *,
    temperature: float,
    chunk: int,
    dtype: DTypeLike,
    place: Placement = leave_in_place,
    place_logits: Placement = leave_in_place,
    kept: Int[Array, "B T K"] | None = None,
    exact: ExactRows | None = None,
) -> tuple[Float[Array, "B T"], ...]:
    """Computes log p(target) and the entropy of p = softmax(logits / temperature), both in fp32.

    With `kept`, returns three arrays: log q(target), the entropy of p, and log p(target). q is p
    restricted to the tokens in `kept`, which include the target; -1 is padding. If `kept` has no
    token at a position, q is p.

    Logits exist for about `chunk` tokens at a time. A chunk takes some positions of every row, at
    least one: chunks of the flattened [B * T] would undo a sharding of B.
    place, place_logits: sharding constraints on a chunk's hidden states [B, width, E] and on its
        logits [B, width, V].
    exact: computes the same bits as the sampler with this setting.
    """

    def score(
        hidden: Float[Array, "B width E"],
        targets: Int[Array, "B width"],
        kept: Int[Array, "B width K"] | None = None,
    ) -> tuple[Float[Array, "B width"], ...]:
        if exact is not None:
            assert kept is None, "the checks of the config refuse model.exact with kept tokens"
            logits = place_logits(qwen.head(config, params, place(hidden), dtype, exact=exact))
            return exact_token_logps(logits, targets, temperature)
        logits = place_logits(qwen.head(config, params, place(hidden), dtype) / temperature)
        logz, mean_logit = softmax_statistics(logits)
        target_logit = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        logp = target_logit - logz
        entropy = logz - mean_logit  # H(p) = log Z - sum_v p_v logit_v
        if kept is None:
            return logp, entropy
        return target_logit - logz_of_kept(logits, kept, logz), entropy, logp

    B, T = targets.shape
    # A chunk has columns of all B rows, so that a sharding of B stays intact.
    width = min(T, max(1, chunk // B))
    arrays = (hidden, targets) if kept is None else (hidden, targets, kept)
    # A single chunk needs no loop, and its logits need not be recomputed.
    if width == T:
        return score(*arrays)

    # The backward pass recomputes a chunk's logits; otherwise the logits of all chunks would be
    # stored for it.
    score_again = qwen.keep_nothing(score)
    chunks = tuple(split_columns(array, width) for array in arrays)
    outputs = jax.lax.map(lambda columns: score_again(*columns), chunks)
    return tuple(join_columns(output, T) for output in outputs)


@jax.custom_vjp
def softmax_statistics(
    logits: Float[Array, "*batch V"],
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """Returns log Z and sum_v p_v logit_v of p = softmax(logits), in one pass after the maximum.

    JAX's derivative would compute these sums again in the backward pass of a chunk. This derivative
    keeps both results (`qwen.SOFTMAX_STATISTICS`), and computes p from them and the logits.
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
    logz = checkpoint_name(logz, qwen.SOFTMAX_STATISTICS)
    mean_logit = checkpoint_name(mean_logit, qwen.SOFTMAX_STATISTICS)
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
    logits: Float[Array, "B T V"], kept: Int[Array, "B T K"], logz: Float[Array, "B T"]
) -> Float[Array, "B T"]:
    """Returns log sum exp of the logits of the `kept` tokens, or `logz` where there are none."""
    is_token = kept >= 0
    has_token = is_token.any(axis=-1)
    kept_logits = jnp.take_along_axis(logits, jnp.maximum(kept, 0), axis=-1)
    # Without kept tokens, sum over all: the derivative of the log of an empty sum would be NaN.
    is_counted = is_token | ~has_token[..., None]
    kept_logz = jax.nn.logsumexp(kept_logits, axis=-1, where=is_counted)
    return jnp.where(has_token, kept_logz, logz)


def split_columns(x: jax.Array, width: int) -> jax.Array:
    """Splits [B, T, ...] into chunks of columns, [chunks, B, width, ...], padded at the end."""
    B, T, *trailing = x.shape
    padding = [(0, 0), (0, -T % width)] + [(0, 0)] * len(trailing)
    columns = jnp.pad(x, padding).reshape(B, -1, width, *trailing)
    return jnp.moveaxis(columns, 1, 0)


def join_columns(x: Float[Array, "chunks B width"], length: int) -> Float[Array, "B T"]:
    """Undoes `split_columns`: concatenates the chunks and drops the padding."""
    _, B, _ = x.shape
    return jnp.moveaxis(x, 0, 1).reshape(B, -1)[:, :length]
