"""Attention on TPUs: JAX's splash attention for packed rows, JAX's paged attention for decoding.

See `backend.py` for the interface. Neither kernel scales the queries, so this module does.

The pools are [rows, pages, page_size, 128 * n], because the paged kernel reads rows of 128 lanes.
If heads are smaller, a row has 128 // D neighboring KV heads.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Array, Bool, Float, Int, Shaped

from jzero.attention import xla
from jzero.attention.backend import Window
from jzero.errors import UserError
from jzero.types import RowLayout

LANES = 128  # numbers in a row of a TPU's vector registers
# Block sizes of splash for queries and keys, fastest first. 2048 does not fit into the scratch
# memory of a core. Small blocks pad less, but take more turns of the kernel (lab/log.md,
# 2026-11-24).
BLOCKS = (512, 384, 256, 128)
COMPUTE_TOKENS = 512  # tokens that paged attention reads at a time


# -- packed rows -----------------------------------------------------------------------------------


class RowMask(masks.Mask):
    """The mask of visible keys of a row's queries, in the two forms that splash requires.

    width: tokens of a sliding window, 0 without one. With a window, the padding of a prefix is at
        the beginning of the row (`prefix_to_slots`).

    Splash reads the mask itself, by blocks, to find the blocks that no query sees. These blocks
    follow from only the layout. Inside the other blocks, splash calls
    mask_function(q_sequence[query], key). q_sequence can hold arbitrary numbers, and `packed` puts
    the segments of the queries into it. Thus one call of splash handles a row with prefix and
    segments; the alternative would be three calls and a merge of their outputs.
    """

    def __init__(
        self, layout: RowLayout, first_query: int, queries: int, keys: int, width: int
    ) -> None:
        """first_query: the token of the first query."""
        self.layout = layout
        self.width = width
        self.first_query = first_query
        self.shape_of_row = queries, keys
        self.q_sequence = np.zeros(queries, np.int32)  # `packed` passes the real codes in each call
        self.mask_function = functools.partial(is_visible, layout.prefix)
        if width:
            self.mask_function = functools.partial(is_in_window, layout.prefix, width)

    @property
    def shape(self) -> tuple[int, int]:
        return self.shape_of_row

    def __getitem__(self, index: tuple[slice, slice]) -> Bool[np.ndarray, "queries keys"]:
        prefix, _, slot_tokens = self.layout
        num_queries, num_keys = self.shape
        query = (self.first_query + np.arange(num_queries))[index[0]][:, None]
        key = np.arange(num_keys)[index[1]]
        same_slot = (query - prefix) // slot_tokens == (key - prefix) // slot_tokens
        is_shared = key < prefix
        if self.width:
            # The window of a slot's first token is the longest that reaches into the prefix.
            last = np.minimum(query, prefix)
            is_shared = is_shared & (key > last - self.width)
            same_slot = same_slot & (key > query - self.width)
        return (key <= query) & (same_slot | is_shared)


def query_codes(segments: Int[Array, "B T"], layout: RowLayout) -> Int[Array, "B T"]:
    """Returns a code for every query: the start of its segment and its position.

    The upper 16 bits are the start, the lower 16 bits the position. A segment starts where the
    number in `segments` changes, and at the start of every slot.
    """
    prefix, _, slot_tokens = layout
    position = np.arange(segments.shape[1])
    starts_slot = (position >= prefix) & ((position - prefix) % slot_tokens == 0)
    starts = (segments != jnp.roll(segments, 1, axis=1)) | (position == 0) | starts_slot
    return lax.cummax(jnp.where(starts, position, 0), axis=1) << 16 | position


def is_visible(prefix: int, code: jax.Array, key: jax.Array) -> jax.Array:
    """Returns whether the query with `code` (`query_codes`) sees the key at position `key`.

    A query sees the keys from the start of its segment to itself. Queries outside the prefix also
    see the prefix.
    """
    start, position = lax.shift_right_logical(code, 16), code & 0xFFFF
    return (key <= position) & ((key >= start) | ((key < prefix) & (position >= prefix)))


def window_codes(segments: Int[Array, "B T"], layout: RowLayout, width: int) -> Int[Array, "B T"]:
    """Returns a code for every query: its place in its segment, at most `width`, and its position.

    The upper 16 bits are the place, the lower 16 bits the position.
    """
    codes = query_codes(segments, layout)
    start, position = lax.shift_right_logical(codes, 16), codes & 0xFFFF
    return jnp.minimum(position - start, width) << 16 | position


def is_in_window(prefix: int, width: int, code: jax.Array, key: jax.Array) -> jax.Array:
    """Returns whether the query with `code` (`window_codes`) sees the key at position `key`.

    The prefix ends where the slots begin, so the token at place p of a slot's segment is p + 1
    tokens after the last token of the prefix.
    """
    place, position = lax.shift_right_logical(code, 16), code & 0xFFFF
    in_segment = key >= position - jnp.minimum(place, width - 1)
    in_prefix = (key < prefix) & (position >= prefix) & (key > prefix + place - width)
    return (key <= position) & (in_segment | in_prefix)


def prefix_to_slots(
    x: Shaped[Array, "B T ..."], prefix: int, padding: Int[Array, " B"]
) -> Shaped[Array, "B T ..."]:
    """Moves the padding of every row's prefix from its end to its beginning."""
    moved = jax.vmap(functools.partial(jnp.roll, axis=0))(x[:, :prefix], padding)
    return jnp.concatenate([moved, x[:, prefix:]], axis=1)


@functools.cache
def splash_kernel(
    layout: RowLayout,
    first_query: int,
    queries: int,
    keys: int,
    block: int,
    num_heads: int,
    interpret: bool,
    width: int,
    soft_cap: float,
) -> splash.SplashAttentionKernel:
    """Returns splash attention for one row of a layout, for the queries from `first_query` on.

    width: tokens of a sliding window, 0 without one.
    """
    # The kernel is cached for later calls and must outlive the trace in which it is created, so its
    # arrays are NumPy arrays.
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
        mask = masks.MultiHeadMask([RowMask(layout, first_query, queries, keys, width)] * num_heads)
        sizes = splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        )
        # The output is not kept for the backward pass (`residual_checkpoint_name`): by XLA's
        # estimate for v6e, the copies into and out of the stack of all layers cost more than
        # computing it again (lab/log.md, 2026-11-23).
        kernel = splash.make_splash_mha(
            mask,
            block_sizes=sizes,
            attn_logits_soft_cap=soft_cap or None,
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )
        return jax.device_get(kernel)


def block_size(tokens: int) -> int:
    """Returns the block size of splash, for queries and keys, for rows of `tokens` tokens.

    It is the row's length, rounded up to full lanes, if that is at most the fastest block size.
    Otherwise it is the fastest block size that pads the row by at most an eighth, or by less than
    128 tokens.
    """
    # A short row is one block.
    whole_row = tokens + -tokens % LANES
    if whole_row <= BLOCKS[0]:
        return whole_row
    max_padding = max(tokens // 8, LANES - 1)
    return next(block for block in BLOCKS if -tokens % block <= max_padding)


def packed(
    q: Float[Array, "B N H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    segments: Int[Array, "B T"],
    layout: RowLayout,
    window: Window | None = None,
    interpret: bool = False,
    width: int = 0,
    soft_cap: float = 0.0,
) -> Float[Array, "B N H D"]:
    """Computes packed attention by splash. See `backend.Packed`.

    width: tokens in the window of each layer that has one. The mask of splash is static.
    """
    rows_in_window = functools.partial(
        packed_rows, layout=layout, interpret=interpret, width=width, soft_cap=soft_cap
    )
    rows_without_window = functools.partial(rows_in_window, width=0)
    if window is None:
        return rows_without_window(q, k, v, segments)
    assert 0 < width < 1 << 15, f"{width=}"
    prefix = layout.prefix
    padding = prefix - (segments[:, :prefix] > 0).sum(axis=1)
    has_prefix_queries = q.shape[1] == k.shape[1]

    def in_window(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        if not prefix:
            return rows_in_window(q, k, v, segments)
        k, v, segments = (prefix_to_slots(x, prefix, padding) for x in (k, v, segments))
        if not has_prefix_queries:
            return rows_in_window(q, k, v, segments)
        q = prefix_to_slots(q, prefix, padding)
        out = rows_in_window(q, k, v, segments)
        return prefix_to_slots(out, prefix, -padding)

    # All layers are one loop, so the kind of a layer is data.
    return lax.cond(window.size <= width, in_window, rows_without_window, q, k, v, segments)


def packed_rows(
    q: Float[Array, "B N H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    segments: Int[Array, "B T"],
    *,
    layout: RowLayout,
    interpret: bool,
    width: int,
    soft_cap: float,
) -> Float[Array, "B N H D"]:
    """Computes packed attention with a window of `width` tokens, or without one if it is 0.

    Each segment of a slot must be contiguous, which `training.packing` guarantees. Raises UserError
    for rows of 65,536 tokens or more, because `query_codes` has 16 bits for a position.
    """
    _, N, H, D = q.shape
    T = k.shape[1]
    first_query = T - N
    block = block_size(T)
    queries, length = N + -N % block, T + -T % block
    if length >= 1 << 16:
        raise UserError(
            f"a row of {T} tokens: splash attention supports fewer than 65536; "
            "set model.attention=xla, or train.pack to shorter lengths"
        )

    def by_head(x: Float[Array, "B tokens heads D"]) -> Float[Array, "B heads length D"]:
        missing = -x.shape[1] % block
        padded = jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0)))
        return padded.swapaxes(1, 2)

    def take_queries(x: Int[Array, "B length"]) -> Int[Array, "B queries"]:
        x = x[:, first_query:]
        missing = max(0, queries - x.shape[1])
        return jnp.pad(x, ((0, 0), (0, missing)))[:, :queries]

    # Rows are padded to full blocks. Padding has segment 0.
    segments = jnp.pad(segments, ((0, 0), (0, length - T)))
    codes = query_codes(segments, layout)
    if width:
        codes = window_codes(segments, layout, width)
    # Splash also masks keys with another segment id than the query. The ids distinguish only tokens
    # from padding: padding sees padding, at least itself, so every query has a visible key.
    is_token = (segments > 0).astype(jnp.int32)
    kernel = splash_kernel(
        layout, first_query, queries, length, block, H, interpret, width, soft_cap
    )
    # The block sizes include the backward pass, so all three mask infos exist.
    assert kernel.dq_mask_info is not None
    assert kernel.dkv_mask_info is not None
    infos = kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info

    def attend_row(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        code: jax.Array,
        is_query: jax.Array,
        is_token: jax.Array,
    ) -> jax.Array:
        mask_infos = [info._replace(q_sequence=code) for info in infos]
        row_kernel = splash.SplashAttentionKernel(*mask_infos, **kernel.kwargs)
        out = row_kernel(q, k, v, splash.SegmentIds(is_query, is_token))
        assert isinstance(out, jax.Array)  # splash returns a pair only when asked for residuals
        return out

    out = jax.vmap(attend_row)(
        by_head(q * D**-0.5),
        by_head(k),
        by_head(v),
        take_queries(codes.astype(jnp.int32)),
        take_queries(is_token),
        is_token,
    )
    return out.swapaxes(1, 2)[:, :N].astype(q.dtype)


# -- paged decoding --------------------------------------------------------------------------------


def pool_rows(num_heads: int, head_dim: int) -> tuple[int, int]:
    """Returns (rows, width) of a token: 128 // D heads in a row, or one head padded to 128 * n."""
    heads_per_row = max(1, LANES // head_dim)
    rows = -(-num_heads // heads_per_row)
    width = -(-heads_per_row * head_dim // LANES) * LANES
    return rows, width


def paged(
    q: Float[Array, "S H D"],
    k_pool: Shaped[Array, "rows pages page width"],
    v_pool: Shaped[Array, "rows pages page width"],
    table: Int[Array, "S max_pages"],
    lengths: Int[Array, " S"],
    shared: Int[Array, " blocks"],
    kv_heads: int,
    window: Int[Array, ""] | None = None,
    width: int = 0,
    soft_cap: float = 0.0,
) -> Float[Array, "S H D"]:
    """Computes the attention of decoding; every slot reads all of its pages, shared or not.

    Layers with a window of `width` tokens read its pages without the kernel. See `backend.Paged`.
    """

    def kernel(q: jax.Array, table: jax.Array, lengths: jax.Array) -> jax.Array:
        return paged_by_kernel(q, k_pool, v_pool, table, lengths, kv_heads, soft_cap)

    return xla.paged_with_windows(
        kernel, q, k_pool, v_pool, table, lengths, kv_heads, window, width, soft_cap
    )


def paged_by_kernel(
    q: Float[Array, "S H D"],
    k_pool: Shaped[Array, "rows pages page width"],
    v_pool: Shaped[Array, "rows pages page width"],
    table: Int[Array, "S max_pages"],
    lengths: Int[Array, " S"],
    kv_heads: int,
    soft_cap: float = 0.0,
) -> Float[Array, "S H D"]:
    """Computes the attention of decoding to all tokens."""
    S, H, D = q.shape
    rows, _, page_size, width = k_pool.shape
    n = max(1, width // D)  # KV heads in a row
    G = H // kv_heads  # query heads of a KV head

    # The kernel treats a row of the pool as one wide KV head. Therefore a query head is padded with
    # zeros outside its KV head's part of the row, so that other heads do not change its scores, and
    # the same part is taken from its output.
    # [S, H, D] -> [S, rows, n, G, D] -> [S, rows * n * G, width]
    q = (q.astype(jnp.float32) * D**-0.5).reshape(S, kv_heads, G, D)
    q = jnp.pad(q, ((0, 0), (0, rows * n - kv_heads), (0, 0), (0, 0)))
    q = q.reshape(S, rows, n, G, D)
    widened = [
        jnp.pad(q[:, :, i], ((0, 0), (0, 0), (0, 0), (i * D, width - (i + 1) * D)))
        for i in range(n)
    ]

    # The table is padded to a whole number of blocks.
    pages_per_block = min(table.shape[1], max(1, COMPUTE_TOKENS // page_size))
    missing_pages = -table.shape[1] % pages_per_block
    table = jnp.pad(table, ((0, 0), (0, missing_pages)))
    out = paged_attention(
        jnp.stack(widened, axis=2).reshape(S, rows * n * G, width),
        k_pool,
        v_pool,
        lengths.astype(jnp.int32),
        table,
        pages_per_compute_block=pages_per_block,
        attn_logits_soft_cap=soft_cap or None,
    )
    out = out.reshape(S, rows, n, G, width)
    parts = [out[:, :, i, :, i * D : (i + 1) * D] for i in range(n)]
    return jnp.stack(parts, axis=2).reshape(S, rows * n * G, D)[:, :H]
