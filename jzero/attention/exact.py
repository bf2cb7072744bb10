"""Bitwise reproducible attention for `model.exact`: every program computes the same bits.

A query's output is identical, to the last bit, in a packed row of training, in the prefill of a
prompt and in a decoding slot. Three rules guarantee this (docs/models.md):

* Keys are read in blocks of KEY_BLOCK by their position in their sequence, independent of their
  storage: in a packed row after other sequences, after a shared prefix, or in pages.
* One online softmax processes the blocks in order (`fold_block`). A block without a visible key
  does not change a query's softmax: its weights are exactly 0, and the earlier sums are multiplied
  by exactly 1.
* All products have QUERY_ROWS queries, and the order of sums over keys is not left to the compiler:
  the weights of a block are added by halves.

The second rule permits skipping a block that no query of a tile sees. A tile of a packed row reads
the blocks of its sequences up to its last token. A group of decoding slots of similar length reads
as many blocks as its longest slot has.

Only the forward pass follows these rules. The backward pass is in `exact_gradient.py`. See
`backend.py` for the interface and the dimension letters. G = H / K query heads share a KV head.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from jzero.attention import xla
from jzero.attention.backend import Window
from jzero.attention.exact_gradient import Residuals, gradients_of_rows, needed_blocks
from jzero.attention.pools import decode_kv, from_rows, one_row_per_head
from jzero.attention.xla import MASKED, OnlineSoftmax, soft_capped
from jzero.errors import UserError
from jzero.numerics.products import product_in_fp32
from jzero.types import RowLayout

LANES = 128  # numbers in a row of a pool with heads smaller than this
KEY_BLOCK = 64  # keys of a block, by their position in their sequence
# Queries of every product. YNNPACK, which computes products on CPUs, has other kernels for 1 or 64.
QUERY_ROWS = 16

# A row of queries is cut into at most MOST_TILES tiles, and the slots into SLOT_GROUPS groups.
# Tiles and groups skip the blocks that they do not see, but run one after the other. On
# accelerators, where small products are inefficient, a larger number would cost more than it saves.
MOST_TILES = 8
SLOT_GROUPS = 4
NO_SEQUENCE = jnp.iinfo(jnp.int32).max  # above every segment

Blocks = tuple[int | jax.Array, OnlineSoftmax]  # number of blocks done, and their softmax
# The next sequence i32[R, 1] and the next block i32[R, 1] of every row, and the softmax so far.
TileCarry = tuple[jax.Array, jax.Array, OnlineSoftmax]


# -- sums and the softmax --------------------------------------------------------------------------


@jax.custom_vjp
def sum_by_halves(x: Float[Array, "*batch n"]) -> Float[Array, "*batch"]:
    """Sums over the last axis in a fixed order: half plus half, down to one number.

    The compiler chooses the order of a plain sum, and chooses differently in different programs.
    """
    # Without the barrier a product in x could be fused into the first addition.
    x = lax.optimization_barrier(x)
    while x.shape[-1] > 1:
        if x.shape[-1] % 2:
            x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)])
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def sum_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Residuals must be arrays: an empty one holds the length of the axis.
    return sum_by_halves(x), jnp.zeros((0, x.shape[-1]))


def sum_backward(like: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    shape = (*gradient.shape, like.shape[-1])
    return (jnp.broadcast_to(gradient[..., None], shape),)


sum_by_halves.defvjp(sum_forward, sum_backward)


def fold_block(
    softmax: OnlineSoftmax,
    queries: Float[Array, "R K m D"],
    keys: Float[Array, "R K block D"],
    values: Float[Array, "R K block D"],
    is_visible: Bool[Array, "R m block"],
    soft_cap: float = 0.0,
) -> OnlineSoftmax:
    """Folds one block of keys of every row into the softmax, in fp32."""
    scale = queries.shape[-1] ** -0.5
    scores = soft_capped(products("zmd,zpd->zmp", queries, keys) * scale, soft_cap)
    is_visible = is_visible[:, None]
    scores = lax.optimization_barrier(jnp.where(is_visible, scores, MASKED))
    largest = jnp.maximum(softmax.largest, scores.max(-1))
    # Exactly 0 for invisible keys, even if no key of the block is visible and all scores are equal.
    weights = jnp.where(is_visible, jnp.exp(scores - largest[..., None]), 0)
    # The barrier rounds every product before it is added. Otherwise the compiler could fuse product
    # and sum into one operation with a single rounding, depending on the surrounding program.
    rescale = jnp.exp(softmax.largest - largest)
    weights, kept_total, kept_out = lax.optimization_barrier(
        (weights, softmax.total * rescale, softmax.out * rescale[..., None])
    )
    mixed = products("zmp,zpd->zmd", weights.astype(values.dtype), values)
    return OnlineSoftmax(largest, kept_total + sum_by_halves(weights), kept_out + mixed)


def products(
    letters: str, rows: Float[Array, "R K m inner"], factors: Float[Array, "R K ..."]
) -> Float[Array, "R K m outer"]:
    """Multiplies QUERY_ROWS rows of every KV head at a time, so that all products have one shape.

    Rows are padded for the product, and the padding is cut off afterwards. The number of heads does
    not change the bits of a head.
    """
    R, K, m, inner = rows.shape
    padded = jnp.pad(rows, ((0, 0), (0, 0), (0, -m % QUERY_ROWS), (0, 0)))
    # [R, K, m, inner] -> [tiles, R * K, QUERY_ROWS, inner]
    tiles = padded.reshape(R * K, -1, QUERY_ROWS, inner).swapaxes(0, 1)
    tiles, factors = lax.optimization_barrier((tiles, factors.reshape(R * K, *factors.shape[2:])))

    def multiply_tile(tile: Float[Array, "heads rows inner"]) -> Float[Array, "heads rows outer"]:
        return product_in_fp32(letters, tile, factors)

    out = lax.optimization_barrier(lax.map(multiply_tile, tiles))
    return out.swapaxes(0, 1).reshape(R, K, padded.shape[2], -1)[:, :, :m]


def empty_softmax(queries: Float[Array, "R K m D"]) -> OnlineSoftmax:
    """Returns the softmax over no keys."""
    return OnlineSoftmax(
        largest=jnp.full(queries.shape[:3], MASKED),
        total=jnp.zeros(queries.shape[:3]),
        out=jnp.zeros(queries.shape),
    )


def normalized(softmax: OnlineSoftmax) -> Float[Array, "R K m D"]:
    """Returns the weighted mean of the values, or 0 for padding, which sees no key."""
    total = jnp.where(softmax.total > 0, softmax.total, 1)
    return softmax.out / total[..., None]


def by_kv_head(q: Float[Array, "R N H D"], kv_heads: int) -> Float[Array, "R K m D"]:
    """Groups queries by KV head: the m = G * N queries of a KV head become rows of products."""
    R, N, H, D = q.shape
    G = H // kv_heads
    # [R, N, K, G, D] -> [R, K, G, N, D] -> [R, K, m, D]
    return q.reshape(R, N, kv_heads, G, D).transpose(0, 2, 3, 1, 4).reshape(R, kv_heads, G * N, D)


def by_token(rows: Float[Array, "R K m D"], num_tokens: int) -> Float[Array, "R N H D"]:
    """Inverts `by_kv_head` for N = `num_tokens` queries."""
    R, K, m, D = rows.shape
    # [R, K, m, D] -> [R, K, G, N, D] -> [R, N, H, D]
    by_head = rows.reshape(R, K, m // num_tokens, num_tokens, D)
    return by_head.transpose(0, 3, 1, 2, 4).reshape(R, num_tokens, -1, D)


# -- packed rows -----------------------------------------------------------------------------------


def packed(
    q: Float[Array, "B N H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    segments: Int[Array, "B T"],
    layout: RowLayout,
    window: Window | None = None,
    key_block: int = KEY_BLOCK,
    soft_cap: float = 0.0,
) -> Float[Array, "B N H D"]:
    """Computes packed attention; the padding of a prefix must be at its end.

    See `backend.Packed`.
    """

    def attend(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        q_segments: jax.Array,
        k_segments: jax.Array,
        window: xla.RowWindow | None = None,
    ) -> jax.Array:
        return attend_rows(q, k, v, q_segments, k_segments, key_block, window, soft_cap)

    return xla.packed(q, k, v, segments, layout, window, attend=attend)


@partial(jax.custom_vjp, nondiff_argnums=(5, 7))
def attend_rows(
    q: Float[Array, "R N H D"],
    k: Float[Array, "R M K D"],
    v: Float[Array, "R M K D"],
    q_segments: Int[Array, "R N"],
    k_segments: Int[Array, "R M"],
    key_block: int,
    window: xla.RowWindow | None = None,
    soft_cap: float = 0.0,
) -> Float[Array, "R N H D"]:
    """Computes `xla.AttendRows`: each tile of queries reads only the key blocks that it sees."""
    out, _ = fold_rows(q, k, v, q_segments, k_segments, key_block, window, soft_cap)
    return out


def fold_rows(
    q: Float[Array, "R N H D"],
    k: Float[Array, "R M K D"],
    v: Float[Array, "R M K D"],
    q_segments: Int[Array, "R N"],
    k_segments: Int[Array, "R M"],
    key_block: int,
    window: xla.RowWindow | None = None,
    soft_cap: float = 0.0,
) -> tuple[Float[Array, "R N H D"], Float[Array, "tiles R K m"]]:
    """Returns the output of `attend_rows`, and log sum exp of the scores by tile and KV head.

    In one iteration of a tile every row folds one block of one of its sequences. The loop ends when
    no row has a block left with a key that a query of the tile sees. Blocks before a window are
    folded, too, and change nothing.
    """
    N, M, K = q.shape[1], k.shape[1], k.shape[2]
    prefix = M - N
    tile = tile_tokens(N)
    tiles = split_tokens(q, tile), split_tokens(q_segments, tile)
    # The tokens of the prefix, which is the beginning of each of the row's sequences.
    shared_tokens = (k_segments[:, :prefix] > 0).sum(axis=1)[:, None]  # [R, 1]

    def attend_tile(inputs: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first_token, q_tile, segments = inputs
        queries = by_kv_head(q_tile, K)

        def fold(carry: TileCarry) -> TileCarry:
            number, block, softmax = carry
            # Positions count from the start of the sequence, including the shared prefix. Queries
            # of other sequences get position -1 and see no key of this block.
            start = jnp.argmax(q_segments == number, axis=1)[:, None]
            query_position = shared_tokens + first_token + jnp.arange(tile) - start
            query_position = jnp.where(segments == number, query_position, -1)

            # Keys of the prefix are at the start of the row, the others in the sequence's slot
            # tokens. Places beyond the row are clipped; their keys are not visible.
            position = block * key_block + jnp.arange(key_block)[None]
            place = prefix + start + position - shared_tokens
            place = jnp.where(position < shared_tokens, position, place)
            place = jnp.clip(place, 0, M - 1)[:, :, None, None]
            keys = jnp.take_along_axis(k, place, axis=1).swapaxes(1, 2)
            values = jnp.take_along_axis(v, place, axis=1).swapaxes(1, 2)
            is_visible = position[:, None] <= query_position[:, :, None]  # [R, tile, block]
            if window is not None:
                is_visible &= query_position[:, :, None] - position[:, None] < window.size
            is_visible_by_head = jnp.tile(is_visible, (1, queries.shape[2] // tile, 1))
            softmax = fold_block(softmax, queries, keys, values, is_visible_by_head, soft_cap)

            # After the last block that the tile sees of a sequence comes the next sequence.
            last_position = query_position.max(axis=1, keepdims=True)
            is_last = (block + 1) * key_block > last_position
            number = jnp.where(is_last, sequence_after(number, segments), number)
            return number, jnp.where(is_last, 0, block + 1), softmax

        def has_block(carry: TileCarry) -> jax.Array:
            number, _, _ = carry
            return (number < NO_SEQUENCE).any()

        first = sequence_after(jnp.zeros_like(shared_tokens), segments)
        start: TileCarry = (first, jnp.zeros_like(first), empty_softmax(queries))
        _, _, softmax = lax.while_loop(has_block, fold, start)
        return by_token(normalized(softmax), tile), log_total(softmax)

    first_tokens = jnp.arange(0, len(tiles[0]) * tile, tile)
    out, log_totals = lax.map(attend_tile, (first_tokens, *tiles))
    return join_tokens(out, N).astype(q.dtype), log_totals


def tile_tokens(num_tokens: int) -> int:
    """Returns the tile size for rows of `num_tokens` queries: a multiple of KEY_BLOCK."""
    return KEY_BLOCK * max(1, -(-num_tokens // (KEY_BLOCK * MOST_TILES)))


def split_tokens(x: Shaped[Array, "R N ..."], tile: int) -> Shaped[Array, "tiles R tile ..."]:
    """Cuts rows into tiles and pads the last tile with zeros."""
    R, N, *trailing = x.shape
    missing = -N % tile
    padded = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * len(trailing))
    return padded.reshape(R, -1, tile, *trailing).swapaxes(0, 1)


def join_tokens(
    tiles: Shaped[Array, "tiles R tile ..."], num_tokens: int
) -> Shaped[Array, "R N ..."]:
    """Inverts `split_tokens`."""
    _, R, _, *trailing = tiles.shape
    return tiles.swapaxes(0, 1).reshape(R, -1, *trailing)[:, :num_tokens]


def sequence_after(number: Int[Array, "R 1"], segments: Int[Array, "R tile"]) -> Int[Array, "R 1"]:
    """Returns the smallest segment above `number` in every row, or NO_SEQUENCE."""
    return jnp.where(segments > number, segments, NO_SEQUENCE).min(axis=1, keepdims=True)


def log_total(softmax: OnlineSoftmax) -> Float[Array, "R K m"]:
    """Returns log sum exp of the scores; 0 for padding."""
    is_token = softmax.total > 0
    return jnp.where(is_token, softmax.largest + jnp.log(jnp.where(is_token, softmax.total, 1)), 0)


def attend_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_segments: jax.Array,
    k_segments: jax.Array,
    key_block: int,
    window: xla.RowWindow | None = None,
    soft_cap: float = 0.0,
) -> tuple[jax.Array, Residuals]:
    out, log_totals = fold_rows(q, k, v, q_segments, k_segments, key_block, window, soft_cap)
    return out, Residuals(q, k, v, q_segments, k_segments, out, log_totals, window)


def attend_backward(
    key_block: int, soft_cap: float, residuals: Residuals, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, None, None]:
    # The backward pass has blocks of another size, so `key_block` is not used.
    needed = needed_blocks(residuals)
    return (*gradients_of_rows(residuals, gradient, needed, soft_cap), None, None, None)


attend_rows.defvjp(attend_forward, attend_backward)


# -- paged decoding --------------------------------------------------------------------------------


def pool_rows(num_heads: int, head_dim: int) -> tuple[int, int]:
    """Returns (rows, width) of a token: LANES // D heads in a row if that divides K, else one."""
    # A TPU stores a pool of narrower rows in another layout than the gather reads.
    heads_per_row = max(1, LANES // head_dim)
    if num_heads % heads_per_row:
        return one_row_per_head(num_heads, head_dim)
    return num_heads // heads_per_row, heads_per_row * head_dim


def paged(
    q: Float[Array, "S H D"],
    k_pool: Shaped[Array, "rows pages page width"],
    v_pool: Shaped[Array, "rows pages page width"],
    table: Int[Array, "S max_pages"],
    lengths: Int[Array, " S"],
    shared: Int[Array, " blocks"],
    kv_heads: int,
    window: Int[Array, ""] | None = None,
    key_block: int = KEY_BLOCK,
    soft_cap: float = 0.0,
) -> Float[Array, "S H D"]:
    """Computes the attention of decoding; every slot reads all of its pages, shared or not.

    See `backend.Paged`. A block of keys is one or more full pages, or a part of one page.
    """
    rows, _, page_size, width = k_pool.shape
    K, D = kv_heads, q.shape[2]
    check_page_size(page_size, key_block)
    S, max_pages = table.shape
    # A block of keys is `pages_per_block` pages, or one of the `parts_of_page` parts of a page.
    pages_per_block = max(1, key_block // page_size)
    parts_of_page = max(1, page_size // key_block)
    tokens_of_part = page_size // parts_of_page
    group = -(-S // SLOT_GROUPS)

    def read(pool: jax.Array, parts: jax.Array) -> jax.Array:  # [S, pages] -> [S, K, block, D]
        # Gather from a flat list of parts, as `pools.write` does: with any other formulation XLA
        # changes the layout of the complete pool.
        flat = pool.reshape(-1, tokens_of_part, width)
        index = jnp.arange(rows)[:, None, None] * (len(flat) // rows) + parts
        by_token = jnp.moveaxis(flat[index], 0, -2).reshape(group, key_block, rows, width)
        return decode_kv(from_rows(by_token, K, D).swapaxes(1, 2), q.dtype)

    def attend_group(inputs: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, table, lengths = inputs
        queries = by_kv_head(q[:, None], K)

        def fold(carry: Blocks) -> Blocks:
            block, softmax = carry
            first_page = block * pages_per_block // parts_of_page
            # The last block can extend beyond the table. Positions there are masked below.
            page = jnp.minimum(first_page + jnp.arange(pages_per_block), max_pages - 1)
            parts = table[:, page] * parts_of_page + block % parts_of_page
            position = block * key_block + jnp.arange(key_block)
            is_visible = (position < lengths[:, None])[:, None]  # [S, 1, block]
            if window is not None:
                # The query is the newest token, at position lengths - 1.
                is_visible &= (position >= lengths[:, None] - window)[:, None]
            is_visible = jnp.broadcast_to(
                is_visible, (*is_visible.shape[:1], queries.shape[2], key_block)
            )
            keys, values = read(k_pool, parts), read(v_pool, parts)
            return block + 1, fold_block(softmax, queries, keys, values, is_visible, soft_cap)

        def has_block(carry: Blocks) -> jax.Array:
            block, _ = carry
            return block * key_block < lengths.max()

        start: Blocks = (jnp.int32(0), empty_softmax(queries))
        _, softmax = lax.while_loop(has_block, fold, start)
        return by_token(normalized(softmax), 1)[:, 0]

    # Slots are sorted so that the slots of a group have similar lengths: a group loops over as many
    # blocks as its longest slot has. The last group is filled up with copies of the last slot.
    order = jnp.argsort(lengths)
    group_order = jnp.pad(order, (0, -S % group), mode="edge").reshape(-1, group)
    groups = q[group_order], table[group_order], lengths[group_order]
    out = lax.map(attend_group, groups).reshape(-1, *q.shape[1:])
    return out[jnp.argsort(order)]


def check_page_size(page_size: int, key_block: int = KEY_BLOCK) -> None:
    """Raises UserError if blocks of keys are neither full pages nor equal parts of a page."""
    if key_block % page_size and page_size % key_block:
        raise UserError(
            f"rollout.page_size={page_size} must divide or be a multiple of the {key_block} keys "
            f"in a block of model.exact: set rollout.page_size={key_block}"
        )
