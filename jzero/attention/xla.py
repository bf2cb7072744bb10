"""Attention in plain XLA: the reference for tests of the kernels, and the backend for CPUs.

See `backend.py` for the interface and the dimension letters. G = H / K query heads share a KV head.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jzero.attention.backend import Window, given
from jzero.attention.pools import Pool, one_row_per_head, read, read_rows
from jzero.numerics.products import product_in_fp32
from jzero.types import RowLayout

MASKED = -1e30  # finite, so that a row without any visible key gives no NaN
# Checkpoint name of the arrays that are saved for the backward pass with every model.remat.
ATTENTION_OUTPUT = "attention output"
pool_rows = one_row_per_head
# Queries per block; the scores of one block exist at a time. Blocks of 64 skip a sixth of the pairs
# of query and key, and were not faster on CPUs (lab/log.md, 2026-11-24).
QUERY_BLOCK = 512
KEY_RANGES = 8  # maximum ranges of queries with different numbers of keys; each is compiled


def soft_capped(scores: Float[Array, "*batch"], cap: float) -> Float[Array, "*batch"]:
    """Bounds scores or logits to (-cap, cap) (arXiv:2408.00118, section 2.2); 0: unchanged."""
    return cap * jnp.tanh(scores / cap) if cap else scores


# -- packed rows -----------------------------------------------------------------------------------


class RowWindow(NamedTuple):
    """A `backend.Window` with the positions of the queries and of the keys of R rows."""

    size: Int[Array, ""]
    q_positions: Int[Array, "R N"]
    k_positions: Int[Array, "R M"]


class BlockTokens(NamedTuple):
    """The segments, positions and window of a block's queries and keys."""

    q_segments: Int[Array, "R N"]
    k_segments: Int[Array, "R M"]
    start: int | Int[Array, ""]  # index of the first query in its slot
    window: RowWindow | None


@runtime_checkable  # so that tests check annotations
class AttendRows(Protocol):
    """Attention of R rows of M tokens, one row for each slot.

    The first M - N tokens are shared keys (the prefix), the last N tokens are the queries. The
    function `visible` defines which keys a query sees.
    """

    def __call__(
        self,
        q: Float[Array, "R N H D"],
        k: Float[Array, "R M K D"],
        v: Float[Array, "R M K D"],
        q_segments: Int[Array, "R N"],
        k_segments: Int[Array, "R M"],
        window: RowWindow | None = None,
        /,
    ) -> Float[Array, "R N H D"]: ...


def packed(
    q: Float[Array, "B N H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    segments: Int[Array, "B T"],
    layout: RowLayout,
    window: Window | None = None,
    attend: AttendRows | None = None,
    soft_cap: float = 0.0,
) -> Float[Array, "B N H D"]:
    """Computes causal attention within segments; slots also see their row's prefix.

    Every slot becomes a separate row for `attend`, with the keys of its prefix before the keys of
    the slot. The prefix attends only to itself. Kernels pass another `attend`, which gets a window
    only if the model has windows, and bounds the scores by itself.
    """
    prefix, num_slots, slot_tokens = layout
    B, _, H, D = q.shape

    def to_slots(x: jax.Array) -> jax.Array:  # [B, N, ...] -> [B * slots, slot, ...]
        behind_prefix = x[:, x.shape[1] - num_slots * slot_tokens :]
        return behind_prefix.reshape(B * num_slots, slot_tokens, *x.shape[2:])

    def with_prefix(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [B * slots, prefix + slot, ...]
        if not prefix:
            return to_slots(x)
        # Every slot of a row gets a copy of the row's prefix.
        repeated = jnp.repeat(x[:, :prefix], num_slots, axis=0)
        return jnp.concatenate([repeated, to_slots(x)], axis=1)

    def attend_to_keys(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        q_segments: jax.Array,
        k_segments: jax.Array,
        window: RowWindow | None,
    ) -> jax.Array:
        kernel = partial(attend_in_blocks, soft_cap=soft_cap) if attend is None else attend
        return kernel(q, k, v, q_segments, k_segments, *given(window))

    body_window = head_window = None
    if window is not None:
        size, positions = window
        prefix_positions = positions[:, :prefix]
        body_window = RowWindow(size, to_slots(positions), with_prefix(positions))
        head_window = RowWindow(size, prefix_positions, prefix_positions)

    body = attend_to_keys(
        to_slots(q),
        with_prefix(k),
        with_prefix(v),
        to_slots(segments),
        with_prefix(segments),
        body_window,
    )
    body_tokens = num_slots * slot_tokens
    body = body.reshape(B, body_tokens, H, D)
    if q.shape[1] == body_tokens:  # no prefix, or a prefix without queries
        return body
    # The prefix is a causal sequence without shared keys.
    head = attend_to_keys(
        q[:, :prefix],
        k[:, :prefix],
        v[:, :prefix],
        segments[:, :prefix],
        segments[:, :prefix],
        head_window,
    )
    return jnp.concatenate([head, body], axis=1)


def visible(
    q_segments: Int[Array, "R N"],
    k_segments: Int[Array, "R M"],
    prefix: int,
    start: int | Int[Array, ""] = 0,
) -> Bool[Array, "R N M"]:
    """Returns a mask of the keys that each query sees.

    The M keys are `prefix` shared keys followed by the slot's keys; the queries are tokens
    start..start + N of the slot. A query sees the keys of its segment up to itself, and all shared
    keys except padding. Padding sees padding, at least itself, because kernels return NaN for a row
    without a visible key.
    """
    N, M = q_segments.shape[1], k_segments.shape[1]
    key = jnp.arange(M)
    is_in_segment = (q_segments[:, :, None] == k_segments[:, None]) & (key >= prefix)
    is_shared = (k_segments[:, None] > 0) & (key < prefix)
    is_allowed = is_in_segment | is_shared
    last_key = prefix + start + jnp.arange(N)[:, None]  # the key of the query's own token
    return is_allowed & (key <= last_key)


def attend_in_blocks(
    q: Float[Array, "R N H D"],
    k: Float[Array, "R M K D"],
    v: Float[Array, "R M K D"],
    q_segments: Int[Array, "R N"],
    k_segments: Int[Array, "R M"],
    window: RowWindow | None = None,
    soft_cap: float = 0.0,
) -> Float[Array, "R N H D"]:
    """Computes `AttendRows` for QUERY_BLOCK queries at a time; the last block can have fewer.

    Blocks save memory: the scores of all queries would be [R, H, N, M]. The backward pass
    recomputes the scores block by block.
    """
    N = q.shape[1]
    prefix = k.shape[1] - N
    if N <= QUERY_BLOCK:
        tokens = BlockTokens(q_segments, k_segments, 0, window)
        return attend_block(q, k, v, tokens, prefix, soft_cap)

    # The queries of a range skip all keys after the range: up to KEY_RANGES ranges leave out almost
    # half of all pairs.
    num_blocks = N // QUERY_BLOCK
    # Every range is a whole number of blocks; the queries after the last full block are one range.
    range_tokens = -(-num_blocks // KEY_RANGES) * QUERY_BLOCK
    end_of_blocks = num_blocks * QUERY_BLOCK
    starts = [*range(0, end_of_blocks, range_tokens)]
    if end_of_blocks < N:
        starts.append(end_of_blocks)
    outputs = []
    for start, end in zip(starts, [*starts[1:], N], strict=True):
        queries, keys = slice(start, end), slice(prefix + end)
        range_window = None
        if window is not None:
            range_window = RowWindow(
                window.size, window.q_positions[:, queries], window.k_positions[:, keys]
            )
        out = attend_range(
            q[:, queries],
            k[:, keys],
            v[:, keys],
            BlockTokens(q_segments[:, queries], k_segments[:, keys], start, range_window),
            prefix,
            soft_cap,
        )
        outputs.append(out)
    return jnp.concatenate(outputs, axis=1)


def attend_range(
    q: Float[Array, "R N H D"],
    k: Float[Array, "R M K D"],
    v: Float[Array, "R M K D"],
    tokens: BlockTokens,
    prefix: int,
    soft_cap: float,
) -> Float[Array, "R N H D"]:
    """Computes queries start..start + N of the slots, at most QUERY_BLOCK at a time."""
    R, N, H, D = q.shape
    block = min(N, QUERY_BLOCK)
    q_positions = None if tokens.window is None else tokens.window.q_positions

    def split(x: jax.Array) -> jax.Array:  # [R, N, ...] -> [blocks, R, block, ...]
        return x.reshape(R, N // block, block, *x.shape[2:]).swapaxes(0, 1)

    def attend_from(
        block_inputs: tuple[jax.Array, jax.Array, jax.Array | None, jax.Array],
    ) -> jax.Array:
        q, q_segments, q_positions, start = block_inputs
        window = tokens.window
        if window is not None and q_positions is not None:
            window = window._replace(q_positions=q_positions)
        block_tokens = BlockTokens(q_segments, tokens.k_segments, start, window)
        return attend_block(q, k, v, block_tokens, prefix, soft_cap)

    blocks = (
        split(q),
        split(tokens.q_segments),
        None if q_positions is None else split(q_positions),
        tokens.start + jnp.arange(0, N, block),
    )
    out = lax.map(attend_from, blocks)
    return out.swapaxes(0, 1).reshape(R, N, H, D)


def attend_block(
    q: Float[Array, "R N H D"],
    k: Float[Array, "R M K D"],
    v: Float[Array, "R M K D"],
    tokens: BlockTokens,
    prefix: int,
    soft_cap: float,
) -> Float[Array, "R N H D"]:
    """Computes queries start..start + N of the slots against every key, with an fp32 softmax."""
    R, N, H, D = q.shape
    K = k.shape[2]
    G = H // K

    # The G query heads of a KV head form one matrix product.
    # [R, N, H, D] -> [R, K, G, N, D]
    queries = q.reshape(R, N, K, G, D).transpose(0, 2, 3, 1, 4)
    queries = queries.reshape(R, K, G * N, D)
    keys = k.transpose(0, 2, 1, 3)
    values = v.transpose(0, 2, 1, 3)
    out: jax.Array = mix(queries, keys, values, tokens, prefix, soft_cap)
    # [R, K, G * N, D] -> [R, N, K, G, D]
    out = out.reshape(R, K, G, N, D).transpose(0, 3, 1, 2, 4)
    return out.reshape(R, N, H, D)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def mix(
    queries: Float[Array, "R K GN D"],
    keys: Float[Array, "R K M D"],
    values: Float[Array, "R K M D"],
    tokens: BlockTokens,
    prefix: int,
    soft_cap: float,
) -> Float[Array, "R K GN D"]:
    """Returns the values, weighted by the softmax of the scores. See `attend_block`.

    JAX's automatic derivative would recompute the softmax and the output. This derivative saves the
    output and the log sum exp of the scores of each query, and recomputes the weights from them
    (Dao et al. 2022, arXiv:2205.14135, algorithm 4).
    """
    out, _ = mix_forward(queries, keys, values, tokens, prefix, soft_cap)
    return out


def masked_scores(
    queries: Float[Array, "R K GN D"],
    keys: Float[Array, "R K M D"],
    tokens: BlockTokens,
    prefix: int,
    soft_cap: float,
) -> Float[Array, "R K GN M"]:
    """Returns the scores of all queries and keys in fp32."""
    R, K, GN, D = queries.shape
    q_segments, k_segments, start, window = tokens
    N, M = q_segments.shape[1], k_segments.shape[1]
    scores = product_in_fp32("rknd,rkmd->rknm", queries, keys)
    scores = soft_capped(scores.reshape(R, K, GN // N, N, M) * D**-0.5, soft_cap)
    is_visible = visible(q_segments, k_segments, prefix, start)
    if window is not None:
        # A token is in its own window, so a row without a visible key does not arise.
        distances = window.q_positions[:, :, None] - window.k_positions[:, None]
        is_visible &= distances < window.size
    is_visible = is_visible[:, None, None]
    return jnp.where(is_visible, scores, MASKED).reshape(R, K, GN, M)


def mix_forward(
    queries: Float[Array, "R K GN D"],
    keys: Float[Array, "R K M D"],
    values: Float[Array, "R K M D"],
    tokens: BlockTokens,
    prefix: int,
    soft_cap: float,
) -> tuple[Float[Array, "R K GN D"], tuple]:
    """Returns the output and the residuals for the backward pass."""
    scores = masked_scores(queries, keys, tokens, prefix, soft_cap)
    largest = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    summed = product_in_fp32("rknm,rkmd->rknd", weights.astype(values.dtype), values)
    out = checkpoint_name((summed / total).astype(values.dtype), ATTENTION_OUTPUT)
    log_total = checkpoint_name(largest + jnp.log(total), ATTENTION_OUTPUT)
    return out, (queries, keys, values, tokens, out, log_total)


def mix_backward(
    prefix: int, soft_cap: float, residuals: tuple, gradient: Float[Array, "R K GN D"]
) -> tuple[jax.Array | None, ...]:
    """Returns the gradients of queries, keys and values.

    With weights p, output o and the gradient g of o, the gradient of a score is p (g v - g o).
    With a soft cap, the chain rule adds the factor 1 - (score / cap)^2.
    """
    queries, keys, values, tokens, out, log_total = residuals
    scale = queries.shape[-1] ** -0.5
    scores = masked_scores(queries, keys, tokens, prefix, soft_cap)
    weights = jnp.exp(scores - log_total)
    weight_grads = product_in_fp32("rknd,rkmd->rknm", gradient, values)
    along_output = jnp.sum(
        gradient.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True
    )
    score_grads = weights * (weight_grads - along_output) * scale
    if soft_cap:
        # Masked scores are far below the bound, and have no weight.
        score_grads *= 1 - jnp.square(jnp.maximum(scores, -soft_cap) / soft_cap)
    score_grads = score_grads.astype(queries.dtype)
    query_grads = jnp.einsum("rknm,rkmd->rknd", score_grads, keys)
    key_grads = jnp.einsum("rknm,rknd->rkmd", score_grads, queries)
    value_grads = jnp.einsum("rknm,rknd->rkmd", weights.astype(values.dtype), gradient)
    return query_grads, key_grads, value_grads, None


mix.defvjp(mix_forward, mix_backward)


# -- paged decoding --------------------------------------------------------------------------------


class OnlineSoftmax(NamedTuple):
    """A softmax over the keys so far (Milakov and Gimelshein 2018, algorithm 3).

    R counts slots or blocks of slots; m counts the queries of a KV head in each of them.
    """

    largest: Float[Array, "R K m"]  # the largest score
    total: Float[Array, "R K m"]  # the sum of exp(score - largest)
    out: Float[Array, "R K m D"]  # the sum of exp(score - largest) * value


PageCarry = tuple[int | jax.Array, OnlineSoftmax]  # pages done, and the softmax over them


def fold_page(
    softmax: OnlineSoftmax,
    q: Float[Array, "R K m D"],
    keys: Float[Array, "K R page D"],
    values: Float[Array, "K R page D"],
    is_visible: Bool[Array, "R page"] | Bool[Array, "R m page"],
    soft_cap: float,
) -> OnlineSoftmax:
    scores = soft_capped(jnp.einsum("nkmd,knpd->nkmp", q, keys), soft_cap)
    if is_visible.ndim == 2:  # the same for all queries
        is_visible = is_visible[:, None]
    scores = jnp.where(is_visible[:, None], scores, MASKED)
    largest = jnp.maximum(softmax.largest, scores.max(-1))
    weights = jnp.exp(scores - largest[..., None])
    # The earlier sums are relative to the earlier largest score.
    rescale = jnp.exp(softmax.largest - largest)
    out = softmax.out * rescale[..., None] + jnp.einsum("nkmp,knpd->nkmd", weights, values)
    total = softmax.total * rescale + weights.sum(-1)
    return OnlineSoftmax(largest, total, out)


def paged(
    q: Float[Array, "S H D"],
    k_pool: Pool,
    v_pool: Pool,
    table: Int[Array, "S max_pages"],
    lengths: Int[Array, " S"],
    shared: Int[Array, " blocks"],
    kv_heads: int = 0,
    window: Int[Array, ""] | None = None,
    soft_cap: float = 0.0,
) -> Float[Array, "S H D"]:
    """Computes the attention of decoding in fp32, one page of every slot at a time.

    Prefix sharing: the pages that the slots of a block share are read once for the block, in one
    larger product of all its queries. Then every slot reads its private pages, from its window on,
    as many as the slot with the most. `kv_heads` is not used, because the pools have one row per KV
    head. See `backend.Paged` for the arguments.
    """
    S, H, D = q.shape
    K, _, page_size, _ = k_pool.shape
    G = H // K
    num_blocks = shared.shape[0]
    block = S // num_blocks
    max_pages = table.shape[1]
    # The query is the newest token, at position lengths - 1.
    first_visible = None if window is None else jnp.maximum(lengths - window, 0)

    def read(pool: Pool, pages: jax.Array) -> jax.Array:  # [R] -> [K, R, page, D]
        return read_rows(pool, pages, jnp.float32)

    def to_slots(x: jax.Array) -> jax.Array:  # [blocks, K, block * G, ...] -> [S, K, G, ...]
        x = x.reshape(num_blocks, K, block, G, *x.shape[3:]).swapaxes(1, 2)
        return x.reshape(S, K, G, *x.shape[4:])

    # Queries by slot [S, K, G, D] and by block of slots [blocks, K, block * G, D], already scaled.
    slot_queries = (q.astype(jnp.float32) * D**-0.5).reshape(S, K, G, D)
    block_queries = slot_queries.reshape(num_blocks, block, K, G, D).swapaxes(1, 2)
    block_queries = block_queries.reshape(num_blocks, K, block * G, D)

    # First the shared pages, by blocks.
    def has_shared_page(carry: PageCarry) -> jax.Array:
        number, _ = carry
        return number < shared.max()

    def fold_shared_page(carry: PageCarry) -> PageCarry:
        number, softmax = carry
        is_shared = jnp.broadcast_to((number < shared)[:, None], (num_blocks, page_size))
        if first_visible is not None:
            # The slots of a block have different windows, each for its G queries of a KV head.
            position = number * page_size + jnp.arange(page_size)
            is_recent = position >= first_visible[:, None]
            is_recent = is_recent.reshape(num_blocks, block, 1, page_size)
            is_recent = jnp.broadcast_to(is_recent, (num_blocks, block, G, page_size))
            is_shared = is_shared[:, None] & is_recent.reshape(num_blocks, block * G, page_size)
        # The first row of a block stands for all: the shared pages are the same in every row.
        pages = lax.dynamic_index_in_dim(table[::block], number, 1, keepdims=False)
        keys, values = read(k_pool, pages), read(v_pool, pages)
        return number + 1, fold_page(softmax, block_queries, keys, values, is_shared, soft_cap)

    empty = OnlineSoftmax(
        largest=jnp.full(block_queries.shape[:3], MASKED),
        total=jnp.zeros(block_queries.shape[:3]),
        out=jnp.zeros(block_queries.shape),
    )
    # One page of every slot at a time. Several pages or fewer slots at a time, or products over
    # slots, were not faster on CPUs (lab/log.md, 2026-11-20).
    start: PageCarry = (0, empty)
    _, by_block = lax.while_loop(has_shared_page, fold_shared_page, start)

    # Then the private pages of every slot.
    first_page = jnp.repeat(shared, block)
    if first_visible is not None:
        first_page = jnp.maximum(first_page, first_visible // page_size)
    max_tokens = (lengths - first_page * page_size).max()

    def has_private_page(carry: PageCarry) -> jax.Array:
        number, _ = carry
        return number * page_size < max_tokens

    def fold_private_page(carry: PageCarry) -> PageCarry:
        number, softmax = carry
        place = first_page + number
        # Slots that have read all of their pages continue with a fully masked page.
        place_in_table = jnp.minimum(place, max_pages - 1)
        pages = jnp.take_along_axis(table, place_in_table[:, None], axis=1)[:, 0]
        position = place[:, None] * page_size + jnp.arange(page_size)[None]
        is_visible = position < lengths[:, None]
        if first_visible is not None:
            is_visible &= position >= first_visible[:, None]
        keys, values = read(k_pool, pages), read(v_pool, pages)
        return number + 1, fold_page(softmax, slot_queries, keys, values, is_visible, soft_cap)

    start = (0, jax.tree.map(to_slots, by_block))
    _, by_slot = lax.while_loop(has_private_page, fold_private_page, start)
    return (by_slot.out / by_slot.total[..., None]).reshape(S, H, D)


def paged_with_windows(
    kernel: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    q: Float[Array, "S H D"],
    k_pool: Pool,
    v_pool: Pool,
    table: Int[Array, "S max_pages"],
    lengths: Int[Array, " S"],
    kv_heads: int,
    window: Int[Array, ""] | None,
    width: int,
    soft_cap: float,
) -> Float[Array, "S H D"]:
    """Computes the attention of decoding by a kernel that has no windows. See `backend.Paged`.

    kernel: computes layers without a window, from q, the table and the lengths.
    width: tokens in the window of each layer that has one; these layers do without the kernel.
    """
    if window is None:
        return kernel(q, table, lengths)

    def in_window(q: jax.Array, table: jax.Array, lengths: jax.Array) -> jax.Array:
        return paged_in_window(q, k_pool, v_pool, table, lengths, kv_heads, width, soft_cap)

    def without_window(q: jax.Array, table: jax.Array, lengths: jax.Array) -> jax.Array:
        return kernel(q, table, lengths).astype(jnp.float32)

    # All layers are one loop, so the kind of a layer is data.
    return lax.cond(window <= width, in_window, without_window, q, table, lengths)


def paged_in_window(
    q: Float[Array, "S H D"],
    k_pool: Pool,
    v_pool: Pool,
    table: Int[Array, "S max_pages"],
    lengths: Int[Array, " S"],
    kv_heads: int,
    width: int,
    soft_cap: float,
) -> Float[Array, "S H D"]:
    """Computes the attention of decoding for a window of `width` tokens, all pages at a time.

    Backends use it for layers with a window if their kernels have none: the pages that a window
    covers are few, so gathering them is cheap. Other pages are not read. See `backend.Paged`.
    """
    S, H, D = q.shape
    page_size = k_pool.shape[2]
    # A window of `width` tokens begins and ends inside of a page.
    num_pages = min(table.shape[1], -(-(width - 1) // page_size) + 1)
    first_visible = jnp.maximum(lengths - width, 0)[:, None]
    places = first_visible // page_size + jnp.arange(num_pages)
    pages = jnp.take_along_axis(table, jnp.minimum(places, table.shape[1] - 1), axis=1)
    position = (places[:, :, None] * page_size + jnp.arange(page_size)).reshape(S, -1)
    is_visible = (position >= first_visible) & (position < lengths[:, None])

    def read_window(pool: Pool) -> Float[Array, "S M K D"]:
        tokens = read(pool, pages.ravel(), kv_heads, D, q.dtype)
        return tokens.reshape(S, num_pages * page_size, kv_heads, D)

    keys, values = read_window(k_pool), read_window(v_pool)
    queries = q.reshape(S, kv_heads, H // kv_heads, D)
    scores = product_in_fp32("skgd,smkd->skgm", queries, keys) * D**-0.5
    scores = soft_capped(scores, soft_cap)
    weights = jax.nn.softmax(jnp.where(is_visible[:, None, None], scores, MASKED), axis=-1)
    out = product_in_fp32("skgm,smkd->skgd", weights.astype(q.dtype), values)
    return out.reshape(S, H, D)
