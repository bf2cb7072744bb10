"""Attention whose bits do not depend on which program computes it: the kernel of `model.exact`.

A query's output is the same, to the last bit, in a packed row of training, in the prefill of a
prompt and in a decoding slot. Three rules make it so (docs/exact.md):

* Keys are read in blocks of KEY_BLOCK by their position in their own sequence, wherever they lie:
  in a packed row behind other sequences, behind a shared prefix, or in pages.
* One softmax goes over the blocks in order (`fold_block`). A block of which a query sees nothing
  changes nothing: its weights are exactly 0, and the factor of the earlier sums is exactly 1.
* The products have QUERY_ROWS queries, and no sum over keys is left to the compiler: the weights of
  a block are added by halves.

Because of the second rule a block may be left out where no query of a tile sees it. A tile of a
packed row meets the blocks of its own sequences up to its last token, and a group of slots of
similar length meets the blocks of the longest of them.

Only the forward pass is held to these rules. The backward pass is in `exact_gradient.py`. See
`backend.py` for the interface and the dimension letters. G = H / K query heads share a KV head.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from jzero.attention import xla
from jzero.attention.exact_gradient import Kept, gradients_of_rows, needed_blocks
from jzero.attention.pools import decode_kv, from_rows, one_row_per_head
from jzero.attention.xla import MASKED, OnlineSoftmax
from jzero.errors import UserError
from jzero.products import product_in_fp32
from jzero.types import RowLayout

LANES = 128  # numbers of a row of a pool, where heads are smaller
KEY_BLOCK = 64  # keys of a block, by their position in their sequence
QUERY_ROWS = 16  # of every product: YNNPACK, which multiplies on CPUs, has others for 1 or 64 rows

# A row of queries is cut into so many tiles at most, and slots into so many groups. Each of them
# leaves out the blocks that it does not see, and each takes its turn: on accelerators, to which
# small products are a waste, more of them would cost more than they save.
MOST_TILES = 8
SLOT_GROUPS = 4
NO_SEQUENCE = jnp.iinfo(jnp.int32).max  # above every segment

Blocks = tuple[int | jax.Array, OnlineSoftmax]  # blocks done, and the softmax over them
# The sequence i32[R, 1] and the block i32[R, 1] that are next in every row, and the softmax so far.
TileCarry = tuple[jax.Array, jax.Array, OnlineSoftmax]


# -- sums and the softmax --------------------------------------------------------------------------


@jax.custom_vjp
def sum_by_halves(x: Float[Array, "*batch n"]) -> Float[Array, "*batch"]:
    """Sums over the last axis in an order that is written out: half plus half, down to one number.

    A compiler orders a plain sum as it likes, and in another program it likes another order.
    """
    x = lax.optimization_barrier(x)  # or a product in x would become part of the first addition
    while x.shape[-1] > 1:
        if x.shape[-1] % 2:
            x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)])
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def sum_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
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
) -> OnlineSoftmax:
    """Folds one block of keys of every row into the softmax, in fp32."""
    scale = queries.shape[-1] ** -0.5
    scores = products("zmd,zpd->zmp", queries, keys)
    is_visible = is_visible[:, None]
    scores = lax.optimization_barrier(jnp.where(is_visible, scores * scale, MASKED))
    largest = jnp.maximum(softmax.largest, scores.max(-1))
    weights = jnp.where(is_visible, jnp.exp(scores - largest[..., None]), 0)
    # Every product is rounded before it is added: whether the compiler fuses the two into one
    # operation, which rounds once, would depend on the program around them.
    rescale = jnp.exp(softmax.largest - largest)
    weights, kept_total, kept_out = lax.optimization_barrier(
        (weights, softmax.total * rescale, softmax.out * rescale[..., None])
    )
    mixed = products("zmp,zpd->zmd", weights.astype(values.dtype), values)
    return OnlineSoftmax(largest, kept_total + sum_by_halves(weights), kept_out + mixed)


def products(
    letters: str, rows: Float[Array, "R K m inner"], others: Float[Array, "R K ..."]
) -> Float[Array, "R K m outer"]:
    """Multiplies QUERY_ROWS rows of every KV head at a time: every product has one shape.

    Rows of padding are added for the product alone, and cut off again. How many heads there are
    changes no bit of a head.
    """
    R, K, m, inner = rows.shape
    padded = jnp.pad(rows, ((0, 0), (0, 0), (0, -m % QUERY_ROWS), (0, 0)))
    tiles = padded.reshape(R * K, -1, QUERY_ROWS, inner).swapaxes(0, 1)
    tiles, others = lax.optimization_barrier((tiles, others.reshape(R * K, *others.shape[2:])))

    def of_tile(tile: Float[Array, "heads rows inner"]) -> Float[Array, "heads rows outer"]:
        return product_in_fp32(letters, tile, others)

    out = lax.optimization_barrier(lax.map(of_tile, tiles))
    return out.swapaxes(0, 1).reshape(R, K, padded.shape[2], -1)[:, :, :m]


def empty_softmax(queries: Float[Array, "R K m D"]) -> OnlineSoftmax:
    """Returns the softmax over no keys."""
    return OnlineSoftmax(
        largest=jnp.full(queries.shape[:3], MASKED),
        total=jnp.zeros(queries.shape[:3]),
        out=jnp.zeros(queries.shape),
    )


def normalized(softmax: OnlineSoftmax) -> Float[Array, "R K m D"]:
    """Returns the mixed values; 0 for padding, which has seen no key."""
    total = jnp.where(softmax.total > 0, softmax.total, 1)
    return softmax.out / total[..., None]


def by_kv_head(q: Float[Array, "R N H D"], kv_heads: int) -> Float[Array, "R K m D"]:
    """Puts the m = G * N queries of a KV head into the rows of products."""
    R, N, H, D = q.shape
    G = H // kv_heads
    return q.reshape(R, N, kv_heads, G, D).transpose(0, 2, 3, 1, 4).reshape(R, kv_heads, G * N, D)


def by_token(rows: Float[Array, "R K m D"], num_tokens: int) -> Float[Array, "R N H D"]:
    """Undoes `by_kv_head` for N = `num_tokens` queries."""
    R, K, m, D = rows.shape
    by_head = rows.reshape(R, K, m // num_tokens, num_tokens, D)
    return by_head.transpose(0, 3, 1, 2, 4).reshape(R, num_tokens, -1, D)


# -- packed rows -----------------------------------------------------------------------------------


def packed(
    q: Float[Array, "B N H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    segments: Int[Array, "B T"],
    layout: RowLayout,
    key_block: int = KEY_BLOCK,
) -> Float[Array, "B N H D"]:
    """Computes packed attention; the tokens of a prefix lie at the prefix's beginning.

    See `backend.Packed`.
    """

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, q_segments: jax.Array, k_segments: jax.Array
    ) -> jax.Array:
        return attend_rows(q, k, v, q_segments, k_segments, key_block)

    return xla.packed(q, k, v, segments, layout, attend)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def attend_rows(
    q: Float[Array, "R N H D"],
    k: Float[Array, "R M K D"],
    v: Float[Array, "R M K D"],
    q_segments: Int[Array, "R N"],
    k_segments: Int[Array, "R M"],
    key_block: int,
) -> Float[Array, "R N H D"]:
    """Computes `xla.AttendRows` by tiles of queries, each over the blocks of keys that it sees."""
    out, _ = fold_rows(q, k, v, q_segments, k_segments, key_block)
    return out


def fold_rows(
    q: Float[Array, "R N H D"],
    k: Float[Array, "R M K D"],
    v: Float[Array, "R M K D"],
    q_segments: Int[Array, "R N"],
    k_segments: Int[Array, "R M"],
    key_block: int,
) -> tuple[Float[Array, "R N H D"], Float[Array, "tiles R K m"]]:
    """Returns what `attend_rows` does, and the log of the softmax's total by tile and KV head.

    In one turn of a tile every row folds one block of one of its sequences. The turns end when no
    row has a block left of which a query of the tile sees a key.
    """
    N, M, K = q.shape[1], k.shape[1], k.shape[2]
    prefix = M - N
    tile = tile_tokens(N)
    tiles = split_tokens(q, tile), split_tokens(q_segments, tile)
    # Of the prefix, which is the beginning of each of the row's sequences.
    shared_tokens = (k_segments[:, :prefix] > 0).sum(axis=1)[:, None]  # [R, 1]

    def attend_tile(inputs: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first_token, q_of_tile, segments = inputs
        queries = by_kv_head(q_of_tile, K)

        def fold(carry: TileCarry) -> TileCarry:
            number, block, softmax = carry
            start = jnp.argmax(q_segments == number, axis=1)[:, None]
            query_position = shared_tokens + first_token + jnp.arange(tile) - start
            query_position = jnp.where(segments == number, query_position, -1)

            position = block * key_block + jnp.arange(key_block)[None]
            place = prefix + start + position - shared_tokens
            place = jnp.where(position < shared_tokens, position, place)
            place = jnp.clip(place, 0, M - 1)[:, :, None, None]
            keys = jnp.take_along_axis(k, place, axis=1).swapaxes(1, 2)
            values = jnp.take_along_axis(v, place, axis=1).swapaxes(1, 2)
            is_visible = position[:, None] <= query_position[:, :, None]  # [R, tile, block]
            of_heads = jnp.tile(is_visible, (1, queries.shape[2] // tile, 1))
            softmax = fold_block(softmax, queries, keys, values, of_heads)

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
    """Returns the queries of a tile of a row of `num_tokens`: a multiple of KEY_BLOCK."""
    return KEY_BLOCK * max(1, -(-num_tokens // (KEY_BLOCK * MOST_TILES)))


def split_tokens(x: Shaped[Array, "R N ..."], tile: int) -> Shaped[Array, "tiles R tile ..."]:
    """Cuts rows into tiles, of which the last one is padded with zeros."""
    R, N, *rest = x.shape
    padded = jnp.pad(x, [(0, 0), (0, -N % tile)] + [(0, 0)] * len(rest))
    return padded.reshape(R, -1, tile, *rest).swapaxes(0, 1)


def join_tokens(
    tiles: Shaped[Array, "tiles R tile ..."], num_tokens: int
) -> Shaped[Array, "R N ..."]:
    """Undoes `split_tokens`."""
    _, R, _, *rest = tiles.shape
    return tiles.swapaxes(0, 1).reshape(R, -1, *rest)[:, :num_tokens]


def sequence_after(number: Int[Array, "R 1"], segments: Int[Array, "R tile"]) -> Int[Array, "R 1"]:
    """Returns the next larger segment of every row after `number`, or NO_SEQUENCE."""
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
) -> tuple[jax.Array, Kept]:
    out, log_totals = fold_rows(q, k, v, q_segments, k_segments, key_block)
    return out, Kept(q, k, v, q_segments, k_segments, out, log_totals)


def attend_backward(
    key_block: int, kept: Kept, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, None]:
    """Returns the gradients of q, k and v. Its blocks of keys are its own, not `key_block`."""
    needed = needed_blocks(kept)
    return (*gradients_of_rows(kept, gradient, needed), None, None)


attend_rows.defvjp(attend_forward, attend_backward)


# -- paged decoding --------------------------------------------------------------------------------


def pool_rows(num_heads: int, head_dim: int) -> tuple[int, int]:
    """Returns (rows, width) of a token: as many heads in a row as fit into LANES, where all do.

    A TPU would keep a pool of narrower rows in another layout than it gathers from.
    """
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
    key_block: int = KEY_BLOCK,
) -> Float[Array, "S H D"]:
    """Computes the attention of decoding; every slot reads all of its pages, shared or not.

    See `backend.Paged`. A block of keys is some whole pages, or a part of one page.
    """
    rows, _, page_size, width = k_pool.shape
    K, D = kv_heads, q.shape[2]
    check_page_size(page_size, key_block)
    S, max_pages = table.shape
    pages_per_block = max(1, key_block // page_size)
    parts_of_page = max(1, page_size // key_block)
    tokens_of_part = page_size // parts_of_page
    group = -(-S // SLOT_GROUPS)

    def read(pool: jax.Array, parts: jax.Array) -> jax.Array:  # [S, pages] -> [S, K, block, D]
        # A flat list of parts, as `pools.write` writes one: any other spelling of it makes XLA lay
        # out the whole pool anew.
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
            # The last block may go on behind the table; the slot sees nothing of that.
            page = jnp.minimum(first_page + jnp.arange(pages_per_block), max_pages - 1)
            parts = table[:, page] * parts_of_page + block % parts_of_page
            position = block * key_block + jnp.arange(key_block)
            is_visible = (position < lengths[:, None])[:, None]  # [S, 1, block]
            is_visible = jnp.broadcast_to(
                is_visible, (*is_visible.shape[:1], queries.shape[2], key_block)
            )
            keys, values = read(k_pool, parts), read(v_pool, parts)
            return block + 1, fold_block(softmax, queries, keys, values, is_visible)

        def has_block(carry: Blocks) -> jax.Array:
            block, _ = carry
            return block * key_block < lengths.max()

        start: Blocks = (jnp.int32(0), empty_softmax(queries))
        _, softmax = lax.while_loop(has_block, fold, start)
        return by_token(normalized(softmax), 1)[:, 0]

    # Slots of similar length are in a group, which has as many turns as its longest slot has
    # blocks. The last group is filled up with slots that are there already.
    order = jnp.argsort(lengths)
    order_of_groups = jnp.pad(order, (0, -S % group), mode="edge").reshape(-1, group)
    groups = q[order_of_groups], table[order_of_groups], lengths[order_of_groups]
    out = lax.map(attend_group, groups).reshape(-1, *q.shape[1:])
    return out[jnp.argsort(order)]


def check_page_size(page_size: int, key_block: int = KEY_BLOCK) -> None:
    """Raises UserError if blocks of keys are neither whole pages nor parts of a page."""
    if key_block % page_size and page_size % key_block:
        raise UserError(
            f"rollout.page_size={page_size} and the blocks of {key_block} keys of model.exact do "
            f"not fit into each other: set rollout.page_size={key_block}"
        )
