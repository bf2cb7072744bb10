"""Log-probabilities and entropies of tokens in fp32, without the logits of a whole batch at once.

The logits of one token are as long as the vocabulary: of 65,536 tokens and 151,936 words they would
take 37 GiB. `token_logps` computes them for a chunk of tokens at a time, forward and backward.
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
    """Returns `x` as it is: the placement where no sharding is asked for."""
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

    With `kept` returns three: log q(target), the entropy of p, and log p(target). q is p over the
    tokens of `kept` alone, among which the target is; -1 is no token. Where `kept` has no token, q
    is p.

    Logits exist for about `chunk` tokens at a time. A chunk takes some positions of every row, at
    least one: chunks of the flattened [B * T] would undo a sharding of B.
    place, place_logits: sharding constraints on a chunk's hidden states [B, width, E] and on its
    logits [B, width, V].
    exact: computes the bits that the sampler computes with the same setting.
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
    width = min(T, max(1, chunk // B))
    arrays = (hidden, targets) if kept is None else (hidden, targets, kept)
    if width == T:
        return score(*arrays)

    # The backward pass recomputes a chunk's logits, or all of them would be kept for it.
    score_again = qwen.keep_nothing(score)
    chunks = tuple(split_columns(array, width) for array in arrays)
    outputs = jax.lax.map(lambda columns: score_again(*columns), chunks)
    return tuple(join_columns(output, T) for output in outputs)


@jax.custom_vjp
def softmax_statistics(
    logits: Float[Array, "*batch V"],
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """Returns log Z and sum_v p_v logit_v of p = softmax(logits), in one pass behind the maximum.

    JAX's own derivative would make these sums again for the backward pass of a chunk. This one
    keeps both results (`qwen.SOFTMAX_STATISTICS`), from which and the logits it computes p.
    """
    statistics, _ = statistics_forward(logits)
    return statistics


# What the backward pass of `softmax_statistics` reads: the logits and both results.
Kept: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]


def statistics_forward(logits: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Kept]:
    """Returns the statistics, and what the backward pass reads."""
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
    of_logz, of_mean = gradients
    probabilities = jnp.exp(logits - logz[..., None])
    change_of_mean = 1 + logits - mean_logit[..., None]
    return (probabilities * (of_logz[..., None] + of_mean[..., None] * change_of_mean),)


softmax_statistics.defvjp(statistics_forward, statistics_backward)


def logz_of_kept(
    logits: Float[Array, "B T V"], kept: Int[Array, "B T K"], logz: Float[Array, "B T"]
) -> Float[Array, "B T"]:
    """Returns log sum exp of the logits of the tokens in `kept`, and `logz` where there is none."""
    is_token = kept >= 0
    has_token = is_token.any(axis=-1)
    kept_logits = jnp.take_along_axis(logits, jnp.maximum(kept, 0), axis=-1)
    # A sum over nothing would be log 0, whose derivative is not a number.
    is_counted = is_token | ~has_token[..., None]
    of_kept = jax.nn.logsumexp(kept_logits, axis=-1, where=is_counted)
    return jnp.where(has_token, of_kept, logz)


def split_columns(x: jax.Array, width: int) -> jax.Array:
    """Cuts [B, T, ...] into chunks of columns, [chunks, B, width, ...], padded at the end."""
    B, T, *rest = x.shape
    padding = [(0, 0), (0, -T % width)] + [(0, 0)] * len(rest)
    columns = jnp.pad(x, padding).reshape(B, -1, width, *rest)
    return jnp.moveaxis(columns, 1, 0)


def join_columns(x: Float[Array, "chunks B width"], length: int) -> Float[Array, "B T"]:
    """Puts the chunks of `split_columns` side by side again and drops the padding."""
    _, B, _ = x.shape
    return jnp.moveaxis(x, 0, 1).reshape(B, -1)[:, :length]
