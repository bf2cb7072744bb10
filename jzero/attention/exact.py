"""Attention whose bits do not depend on which program computes it: the kernel of `model.exact`.

A query's output is the same, to the last bit, in a packed row of training, in the prefill of a
prompt and in a decoding slot. Three rules make it so (docs/exact.md):

* Keys are read in blocks of KEY_BLOCK by their position in their own sequence, wherever they lie:
  in a packed row behind other sequences, behind a shared prefix, or in pages.
* One softmax goes over the blocks in order (`fold_block`). A block of which a query sees nothing
  changes nothing: its weights are exactly 0, and the factor of the earlier sums is exactly 1.
* The products have at least QUERY_ROWS queries, and no sum over keys is left to the compiler: the
  weights of a block are added by halves.

Only the forward pass is held to this. The backward pass is that of `xla.py`. See `backend.py` for
the interface and the dimension letters. G = H / K query heads share a KV head.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from jzero.attention import xla
from jzero.attention.pools import decode_kv, one_row_per_head
from jzero.attention.xla import MASKED, OnlineSoftmax
from jzero.errors import UserError
from jzero.types import RowLayout

pool_rows = one_row_per_head
KEY_BLOCK = 64  # keys of a block, by their position in their sequence
QUERY_ROWS = 64  # products of fewer rows have other bits on CPUs, where YNNPACK computes them

Blocks = tuple[int | jax.Array, OnlineSoftmax]  # blocks done, and the softmax over them


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
    scores = products("md,pd->mp", queries, keys)
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
    mixed = products("mp,pd->md", weights.astype(values.dtype), values)
    return OnlineSoftmax(largest, kept_total + sum_by_halves(weights), kept_out + mixed)


def products(
    letters: str, rows: Float[Array, "R K m inner"], others: Float[Array, "R K ..."]
) -> Float[Array, "R K m outer"]:
    """Multiplies QUERY_ROWS rows at a time: every product has one shape, in every program."""
    R, K, m, inner = rows.shape

    def of_head(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        tiles, other = pair

        def of_tile(tile: jax.Array) -> jax.Array:
            return jnp.einsum(letters, tile, other, preferred_element_type=jnp.float32)

        return lax.map(of_tile, tiles)

    tiles = rows.reshape(R * K, m // QUERY_ROWS, QUERY_ROWS, inner)
    by_head = lax.optimization_barrier((tiles, others.reshape(R * K, *others.shape[2:])))
    out = lax.optimization_barrier(lax.map(of_head, by_head))
    return out.reshape(R, K, m, -1)


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
    """Puts the G * N queries of a KV head into the rows of products, a multiple of QUERY_ROWS."""
    R, N, H, D = q.shape
    G = H // kv_heads
    rows = q.reshape(R, N, kv_heads, G, D).transpose(0, 2, 3, 1, 4).reshape(R, kv_heads, G * N, D)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, -(G * N) % QUERY_ROWS), (0, 0)))


def by_token(rows: Float[Array, "R K m D"], num_heads: int, num_tokens: int) -> jax.Array:
    """Undoes `by_kv_head`: [R, K, m, D] -> [R, N, H, D]."""
    R, K, _, D = rows.shape
    G = num_heads // K
    rows = rows[:, :, : G * num_tokens].reshape(R, K, G, num_tokens, D)
    return rows.transpose(0, 3, 1, 2, 4).reshape(R, num_tokens, num_heads, D)


# -- packed rows -----------------------------------------------------------------------------------


def packed(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    segments: Int[Array, "B T"],
    layout: RowLayout,
    key_block: int = KEY_BLOCK,
) -> Float[Array, "B T H D"]:
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
    """Computes `xla.AttendRows`, one block of keys of one sequence of every row at a time.

    All queries of a row meet every block, as rows of one product; those of the row's other
    sequences see nothing of it.
    """
    N, H = q.shape[1:3]
    M, K = k.shape[1:3]
    prefix = M - N
    queries = by_kv_head(q, K)
    # Of the prefix, which is the beginning of each of the row's sequences.
    shared_tokens = (k_segments[:, :prefix] > 0).sum(axis=1)[:, None]  # [R, 1]

    def fold_sequence(carry: Blocks) -> Blocks:
        """Folds all blocks of sequence `number` of every row."""
        number, softmax = carry
        is_own = q_segments == number
        start = jnp.argmax(is_own, axis=1)[:, None]
        own_tokens = is_own.sum(axis=1)[:, None]
        num_tokens = jnp.where(own_tokens > 0, shared_tokens + own_tokens, 0)
        query_position = shared_tokens + jnp.arange(N) - start

        def fold(carry: Blocks) -> Blocks:
            block, softmax = carry
            position = block * key_block + jnp.arange(key_block)[None]
            place = prefix + start + position - shared_tokens
            place = jnp.where(position < shared_tokens, position, place)
            place = jnp.clip(place, 0, M - 1)[:, :, None, None]
            keys = jnp.take_along_axis(k, place, axis=1).swapaxes(1, 2)
            values = jnp.take_along_axis(v, place, axis=1).swapaxes(1, 2)
            is_key = position < num_tokens
            is_past = position[:, None] <= query_position[:, :, None]
            is_visible = is_own[:, :, None] & is_key[:, None] & is_past  # [R, N, block]
            softmax = fold_block(softmax, queries, keys, values, for_rows(is_visible, queries))
            return block + 1, softmax

        def has_block(carry: Blocks) -> jax.Array:
            block, _ = carry
            return block * key_block < num_tokens.max()

        _, softmax = lax.while_loop(has_block, fold, (jnp.int32(0), softmax))
        return number + 1, softmax

    def has_sequence(carry: Blocks) -> jax.Array:
        number, _ = carry
        return number <= q_segments.max()

    start: Blocks = (jnp.int32(1), empty_softmax(queries))
    _, softmax = lax.while_loop(has_sequence, fold_sequence, start)
    return by_token(normalized(softmax), H, N).astype(q.dtype)


def for_rows(
    is_visible: Bool[Array, "R N block"], queries: Float[Array, "R K m D"]
) -> Bool[Array, "R m block"]:
    """Repeats what the tokens see for the rows of `by_kv_head`; its padding sees nothing."""
    m, N = queries.shape[2], is_visible.shape[1]
    repeated = jnp.tile(is_visible, (1, m // N, 1))
    return jnp.pad(repeated, ((0, 0), (0, m - repeated.shape[1]), (0, 0)))


def attend_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_segments: jax.Array,
    k_segments: jax.Array,
    key_block: int,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    out: jax.Array = attend_rows(q, k, v, q_segments, k_segments, key_block)
    return out, (q, k, v, q_segments, k_segments)


def attend_backward(
    key_block: int, kept: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, None]:
    """Returns the gradients of q, k and v, by the plain form of the same attention."""
    q, k, v, q_segments, k_segments = kept

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return xla.attend_in_blocks(q, k, v, q_segments, k_segments)

    _, backward = jax.vjp(plain, q, k, v)
    return (*backward(gradient), None, None)


attend_rows.defvjp(attend_forward, attend_backward)


# -- paged decoding --------------------------------------------------------------------------------


def paged(
    q: Float[Array, "S H D"],
    k_pool: Shaped[Array, "K pages page D"],
    v_pool: Shaped[Array, "K pages page D"],
    table: Int[Array, "S max_pages"],
    lengths: Int[Array, " S"],
    shared: Int[Array, " blocks"],
    kv_heads: int = 0,
    key_block: int = KEY_BLOCK,
) -> Float[Array, "S H D"]:
    """Computes the attention of decoding; every slot reads all of its pages, shared or not.

    See `backend.Paged`. A block of keys is some whole pages, or a part of one page.
    """
    K, _, page_size, D = k_pool.shape
    check_page_size(page_size, key_block)
    queries = by_kv_head(q[:, None], K)
    pages_per_block = max(1, key_block // page_size)
    parts_of_page = max(1, page_size // key_block)
    rows_of_part = page_size // parts_of_page
    max_pages = table.shape[1]

    def read(pool: jax.Array, parts: jax.Array) -> jax.Array:  # [S, pages] -> [S, K, block, D]
        by_part = pool.reshape(K, -1, rows_of_part, D)[:, parts]
        return decode_kv(by_part.swapaxes(0, 1).reshape(len(q), K, key_block, D), q.dtype)

    def fold(carry: Blocks) -> Blocks:
        block, softmax = carry
        first_page = block * pages_per_block // parts_of_page
        # The last block may go on behind the table; the slot sees nothing of that.
        page = jnp.minimum(first_page + jnp.arange(pages_per_block), max_pages - 1)
        parts = table[:, page] * parts_of_page + block % parts_of_page
        position = block * key_block + jnp.arange(key_block)
        is_visible = (position < lengths[:, None])[:, None]  # [S, 1, block]
        is_visible = jnp.broadcast_to(is_visible, (len(q), queries.shape[2], key_block))
        keys, values = read(k_pool, parts), read(v_pool, parts)
        return block + 1, fold_block(softmax, queries, keys, values, is_visible)

    def has_block(carry: Blocks) -> jax.Array:
        block, _ = carry
        return block * key_block < lengths.max()

    start: Blocks = (jnp.int32(0), empty_softmax(queries))
    _, softmax = lax.while_loop(has_block, fold, start)
    return by_token(normalized(softmax), q.shape[1], 1)[:, 0]


def check_page_size(page_size: int, key_block: int = KEY_BLOCK) -> None:
    """Raises UserError if blocks of keys are neither whole pages nor parts of a page."""
    if key_block % page_size and page_size % key_block:
        raise UserError(
            f"rollout.page_size={page_size} and the blocks of {key_block} keys of model.exact do "
            f"not fit into each other: set rollout.page_size={key_block}"
        )
