"""Log-probabilities and entropies of tokens in fp32, without the logits of an entire batch at once.

The logits of one token are as long as the vocabulary: for 65,536 tokens and a vocabulary of 151,936
they would take 37 GiB. `token_logps` computes them for a chunk of tokens at a time, in the forward
and backward pass.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jzero.model import qwen
from jzero.model.arithmetic import PLAIN, Arithmetic
from jzero.model.softmax import LookUp, Placement, by_index, kept_logps, leave_in_place


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
    look_up: LookUp = by_index,
    kept: Int[Array, "B T K"] | None = None,
    arithmetic: Arithmetic = PLAIN,
) -> tuple[Float[Array, "B T"], ...]:
    """Computes log p(target) and the entropy of p = softmax(logits / temperature), both in fp32.

    With `kept`, returns three arrays: log q(target), the entropy of p, and log p(target). q is p
    restricted to the tokens in `kept`, which include the target; -1 is padding. If `kept` has no
    token at a position, q is p.

    Logits exist for about `chunk` tokens at a time. A chunk takes some positions of every row, at
    least one: chunks of the flattened [B * T] would undo a sharding of B.
    place, place_logits: sharding constraints on a chunk's hidden states [B, width, E] and on its
        logits [B, width, V].
    look_up: takes the logits of the targets.
    arithmetic: of the head's product and the softmax.
    """

    def score(
        hidden: Float[Array, "B width E"],
        targets: Int[Array, "B width"],
        kept: Int[Array, "B width K"] | None = None,
    ) -> tuple[Float[Array, "B width"], ...]:
        logits = qwen.head(config, params, place(hidden), dtype, arithmetic=arithmetic)
        if kept is None:
            return arithmetic.logps(logits, targets, temperature, place_logits, look_up)
        assert not arithmetic.is_exact, "the checks of the config refuse exact kept tokens"
        return kept_logps(logits, targets, kept, temperature, place_logits, look_up)

    arrays = (hidden, targets) if kept is None else (hidden, targets, kept)
    return in_chunks(score, arrays, chunk)


def in_chunks(
    score: Callable[..., tuple[jax.Array, ...]],
    arrays: tuple[jax.Array, ...],
    chunk: int,
) -> tuple[Float[Array, "B T"], ...]:
    """Applies `score` to chunks of columns of arrays [B, T, ...], of about `chunk` tokens each.

    score: takes some columns of the arrays, and returns arrays [B, columns].
    """
    B, T = arrays[0].shape[:2]
    # A chunk has columns of all B rows, so that a sharding of B stays intact.
    width = min(T, max(1, chunk // B))
    # A single chunk needs no loop, and its logits need not be recomputed.
    if width == T:
        return score(*arrays)

    # The backward pass recomputes a chunk's logits; otherwise the logits of all chunks would be
    # stored for it.
    score_again = qwen.keep_nothing(score)
    chunks = tuple(split_columns(array, width) for array in arrays)
    outputs = jax.lax.map(lambda columns: score_again(*columns), chunks)
    return tuple(join_columns(output, T) for output in outputs)


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
