"""Attention on TPUs: JAX's splash attention for packed rows, its paged attention for decoding.

See `backend.py` for the interface. Neither kernel scales the queries, so this module does.

The pools are [rows, pages, page_size, 128 * n]: the paged kernel reads rows of 128 lanes. Where
heads are smaller, 128 // D neighboring KV heads lie in one row.
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

from jzero.errors import UserError
from jzero.types import RowLayout

LANES = 128  # numbers in a row of a TPU's vector registers
# Queries, and keys, that splash takes at a time, fastest first. 2048 does not fit the scratch
# memory of a core.
BLOCKS = (512, 384, 256, 128)
COMPUTE_TOKENS = 512  # tokens that paged attention reads at a time


# -- packed rows -----------------------------------------------------------------------------------


class RowMask(masks.Mask):
    """Says which keys the queries of a row see, in the two forms that splash asks for.

    Splash reads the mask itself, by blocks, to find the blocks that no query sees. These
    follow from the layout alone. Inside of the other blocks, splash calls
    mask_function(q_sequence[query], key). The numbers in q_sequence can be any, and `packed` puts
    the query's segment into them. So one call of splash serves a row with prefix and segments;
    the alternative would be three calls that are merged afterwards.
    """

    def __init__(self, layout: RowLayout, first_query: int, queries: int, keys: int) -> None:
        """The queries are those of the tokens from `first_query` on."""
        self.layout = layout
        self.first_query = first_query
        self.shape_of_row = queries, keys
        self.q_sequence = np.zeros(queries, np.int32)  # `packed` gives the real one in every call
        self.mask_function = functools.partial(is_visible, layout.prefix)

    @property
    def shape(self) -> tuple[int, int]:
        return self.shape_of_row

    def __getitem__(self, index: tuple[slice, slice]) -> Bool[np.ndarray, "queries keys"]:
        prefix, _, slot_tokens = self.layout
        num_queries, num_keys = self.shape
        query = (self.first_query + np.arange(num_queries))[index[0]][:, None]
        key = np.arange(num_keys)[index[1]]
        same_slot = (query - prefix) // slot_tokens == (key - prefix) // slot_tokens
        return (key <= query) & (same_slot | (key < prefix))


def query_codes(segments: Int[Array, "B T"], layout: RowLayout) -> Int[Array, "B T"]:
    """Returns a number for every query that holds where its segment starts and where it is.

    The upper 16 bits are the start, the lower 16 bits the position. A segment starts where the
    number in `segments` changes, and at the start of every slot.
    """
    prefix, _, slot_tokens = layout
    position = np.arange(segments.shape[1])
    starts_slot = (position >= prefix) & ((position - prefix) % slot_tokens == 0)
    starts = (segments != jnp.roll(segments, 1, axis=1)) | (position == 0) | starts_slot
    return lax.cummax(jnp.where(starts, position, 0), axis=1) << 16 | position


def is_visible(prefix: int, code: jax.Array, key: jax.Array) -> jax.Array:
    """Says whether a query with a number of `query_codes` sees the key at position `key`.

    It sees the keys from the start of its segment to itself and, outside of the prefix, the prefix.
    """
    start, position = lax.shift_right_logical(code, 16), code & 0xFFFF
    return (key <= position) & ((key >= start) | ((key < prefix) & (position >= prefix)))


@functools.cache
def splash_kernel(
    layout: RowLayout,
    first_query: int,
    queries: int,
    keys: int,
    block: int,
    num_heads: int,
    interpret: bool,
) -> splash.SplashAttentionKernel:
    """Returns splash attention for one row of a layout: of queries from `first_query` on.

    Its arrays are NumPy's: the kernel is kept for later calls, and must outlive the trace of the
    program in which it is made.
    """
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
        mask = masks.MultiHeadMask([RowMask(layout, first_query, queries, keys)] * num_heads)
        sizes = splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        )
        kernel = splash.make_splash_mha(
            mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret
        )
        return jax.device_get(kernel)


def block_size(tokens: int) -> int:
    """Returns the number of queries, and of keys, that splash takes at a time for rows of `tokens`.

    It is the whole row, in whole lanes, if that is no longer than the fastest block. Otherwise it
    is the fastest block whose padding adds at most an eighth to the row, or less than 128 tokens.
    """
    whole_row = tokens + -tokens % LANES
    if whole_row <= BLOCKS[0]:
        return whole_row
    most_padding = max(tokens // 8, LANES - 1)
    return next(block for block in BLOCKS if -tokens % block <= most_padding)


def packed(
    q: Float[Array, "B N H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    segments: Int[Array, "B T"],
    layout: RowLayout,
    interpret: bool = False,
) -> Float[Array, "B N H D"]:
    """Computes packed attention by splash, one row after the other. See `backend.Packed`.

    Each segment of a slot must be one run of tokens, as `training.packing` makes them.
    Raises UserError for rows of 65,536 tokens and more: `query_codes` has 16 bits for a position.
    """
    _, N, H, D = q.shape
    T = k.shape[1]
    first_query = T - N
    block = block_size(T)
    queries, length = N + -N % block, T + -T % block
    if length >= 1 << 16:
        raise UserError(
            f"a row of {T} tokens: splash attention takes fewer than 65536; "
            "set model.attention=xla, or train.pack_length to less"
        )

    def by_head(x: Float[Array, "B tokens heads D"]) -> Float[Array, "B heads length D"]:
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), (0, 0), (0, 0))).swapaxes(1, 2)

    def of_queries(x: Int[Array, "B length"]) -> Int[Array, "B queries"]:
        x = x[:, first_query:]
        return jnp.pad(x, ((0, 0), (0, max(0, queries - x.shape[1]))))[:, :queries]

    segments = jnp.pad(segments, ((0, 0), (0, length - T)))
    codes = query_codes(segments, layout)
    # Splash also masks by equal numbers of these segments: tokens see tokens, and padding sees
    # padding, at least itself, so no query is left without a key.
    is_token = (segments > 0).astype(jnp.int32)
    kernel = splash_kernel(layout, first_query, queries, length, block, H, interpret)
    # The block sizes include those of the backward pass, so all three are there.
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
        of_queries(codes.astype(jnp.int32)),
        of_queries(is_token),
        is_token,
    )
    return out.swapaxes(1, 2)[:, :N].astype(q.dtype)


# -- paged decoding --------------------------------------------------------------------------------


def pool_rows(num_heads: int, head_dim: int) -> tuple[int, int]:
    """Returns (rows, width) of a token: 128 // D heads in a row, or a head in a multiple of 128."""
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
) -> Float[Array, "S H D"]:
    """Computes the attention of decoding; every slot reads all of its pages, shared or not.

    The kernel treats a row of the pool as one wide KV head. A query head is therefore widened with
    zeros outside of its own KV head's part of the row, so that its scores are its own, and takes
    that part of the output. See `backend.Paged`.
    """
    S, H, D = q.shape
    rows, _, page_size, width = k_pool.shape
    n = max(1, width // D)  # KV heads in a row
    G = H // kv_heads  # query heads of a KV head

    # [S, H, D] -> [S, rows, n, G, D] -> [S, rows * n * G, width]
    q = (q.astype(jnp.float32) * D**-0.5).reshape(S, kv_heads, G, D)
    q = jnp.pad(q, ((0, 0), (0, rows * n - kv_heads), (0, 0), (0, 0)))
    q = q.reshape(S, rows, n, G, D)
    widened = [
        jnp.pad(q[:, :, i], ((0, 0), (0, 0), (0, 0), (i * D, width - (i + 1) * D)))
        for i in range(n)
    ]

    pages_per_block = min(table.shape[1], max(1, COMPUTE_TOKENS // page_size))
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages_per_block)))
    out = paged_attention(
        jnp.stack(widened, axis=2).reshape(S, rows * n * G, width),
        k_pool,
        v_pool,
        lengths.astype(jnp.int32),
        table,
        pages_per_compute_block=pages_per_block,
    )
    out = out.reshape(S, rows, n, G, width)
    parts = [out[:, :, i, :, i * D : (i + 1) * D] for i in range(n)]
    return jnp.stack(parts, axis=2).reshape(S, rows * n * G, D)[:, :H]
