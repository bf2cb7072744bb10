"""Attention of `model.exact` leaves out blocks of keys that no query sees, and no bit changes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jzero.attention import exact, xla
from jzero.attention.exact_gradient import gradients_of_rows, needed_blocks
from jzero.attention.xla import OnlineSoftmax
from jzero.types import RowLayout

H, K, D = 4, 2, 16
BLOCK = exact.KEY_BLOCK
PREFIX, OWN = 72, 200  # a row's tiles have 64 queries
M = PREFIX + OWN
PAGE = 32
SEQUENCES = 3  # of a row
LENGTHS = np.array([5, 64, 65, 200, 1, 130, 30])  # of slots
PAGES = 8  # of a slot
Row = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def random_heads(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def two_rows() -> Row:
    """Returns q, k, v and segments of two rows: sequences of many lengths, prefixes and padding."""
    segments = np.zeros((2, M), np.int32)
    segments[0, :70] = 1
    segments[1, :9] = 1
    for row, starts in enumerate([[0, 10, 75, 190], [0, 150, 151, 199]]):
        for number, (start, end) in enumerate(itertools.pairwise(starts), 1):
            segments[row, PREFIX + start : PREFIX + end] = number
    q, k, v = (
        random_heads(0, 2, OWN, H, D),
        random_heads(1, 2, M, K, D),
        random_heads(2, 2, M, K, D),
    )
    return q, k, v, jnp.asarray(segments[:, PREFIX:]), jnp.asarray(segments)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, own: jax.Array, all_: jax.Array) -> jax.Array:
    return exact.attend_rows(q, k, v, own, all_, BLOCK)


def meet_all_blocks(
    q: jax.Array, k: jax.Array, v: jax.Array, own: jax.Array, all_: jax.Array
) -> jax.Array:
    """Folds every block of every sequence of a row for all queries of the row at once."""
    padding = -OWN % BLOCK
    own = jnp.pad(own, ((0, 0), (0, padding)))
    queries = exact.by_kv_head(jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0))), K)
    shared = (all_[:, :PREFIX] > 0).sum(axis=1)[:, None]
    places = jnp.arange(OWN + padding)[None]
    blocks = -(-M // BLOCK)

    def fold(turn: jax.Array, softmax: OnlineSoftmax) -> OnlineSoftmax:
        is_own = own == 1 + turn // blocks
        start = jnp.argmax(is_own, axis=1)[:, None]
        position = turn % blocks * BLOCK + jnp.arange(BLOCK)[None]
        place = jnp.where(position < shared, position, PREFIX + start + position - shared)
        place = jnp.clip(place, 0, M - 1)[:, :, None, None]
        keys = jnp.take_along_axis(k, place, axis=1).swapaxes(1, 2)
        values = jnp.take_along_axis(v, place, axis=1).swapaxes(1, 2)
        is_past = position[:, None] <= (shared + places - start)[:, :, None]
        is_visible = jnp.tile(is_own[:, :, None] & is_past, (1, H // K, 1))
        return exact.fold_block(softmax, queries, keys, values, is_visible)

    softmax = lax.fori_loop(0, SEQUENCES * blocks, fold, exact.empty_softmax(queries))
    return exact.by_token(exact.normalized(softmax), OWN + padding)[:, :OWN]


def test_a_row_has_the_bits_of_one_that_meets_all_blocks() -> None:
    inputs = two_rows()
    np.testing.assert_array_equal(jax.jit(attend)(*inputs), jax.jit(meet_all_blocks)(*inputs))


def test_no_tile_of_a_row_reads_a_block_that_it_does_not_see() -> None:
    """A weight of 0 times a value that is no number is none: such values show what was read."""
    q, k, v, own, all_ = two_rows()
    # In the first row the first sequence. Tokens 64 and up share no tile with it.
    # In the second row the first sequence from its position 128 on, which is token 119: a block
    # that the tile of the tokens 0 to 63 does not see.
    places = jnp.arange(M) - PREFIX
    is_unread = (jnp.arange(2)[:, None] == 0) & (all_ == 1) & (places >= 0)
    is_unread |= (jnp.arange(2)[:, None] == 1) & (places >= 119)

    out = jax.jit(attend)(q, k, jnp.where(is_unread[:, :, None, None], jnp.nan, v), own, all_)

    assert jnp.isfinite(out[0, 64:]).all()
    assert jnp.isfinite(out[1, :64]).all()
    assert jnp.isnan(out[1, 119:150]).all()


@pytest.mark.usefixtures("quick_compilation")  # the values have a tolerance
def test_gradients_are_those_of_the_definition() -> None:
    q, k, v, own, all_ = two_rows()
    is_token = (own > 0)[:, :, None, None]

    def loss(attention: xla.AttendRows, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = attention(q, k, v, own, all_)
        return jnp.where(is_token, jnp.sin(3 * out), 0).sum()

    gradient = jax.jit(jax.grad(loss, argnums=(1, 2, 3)), static_argnums=0)

    ours, defined = gradient(attend, q, k, v), gradient(xla.attend_in_blocks, q, k, v)

    for x, y in zip(ours, defined, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_a_gradient_has_the_bits_of_one_that_meets_all_blocks() -> None:
    q, k, v, own, all_ = two_rows()
    _, kept = exact.attend_forward(q, k, v, own, all_, BLOCK)
    needed = needed_blocks(kept)
    gradient = random_heads(3, 2, OWN, H, D)
    compute = jax.jit(gradients_of_rows)

    ours, everything = compute(kept, gradient, needed), compute(kept, gradient, needed | True)

    # Of 4 tiles and 5 blocks: the prefix, and of its own keys those before and beside a tile.
    assert needed.sum() < needed.size
    for x, y in zip(ours, everything, strict=True):
        np.testing.assert_array_equal(x, y)


# -- slots -----------------------------------------------------------------------------------------


def slots() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns queries, the pools of keys and values, and a table of pages that nobody shares."""
    S = len(LENGTHS)
    q = random_heads(0, S, H, D)
    k_pool, v_pool = (random_heads(seed, K, S * PAGES, PAGE, D) for seed in (1, 2))
    table = np.random.default_rng(3).permutation(S * PAGES).reshape(S, PAGES)
    return q, k_pool, v_pool, jnp.asarray(table)


def decode(q: jax.Array, k_pool: jax.Array, v_pool: jax.Array, table: jax.Array) -> jax.Array:
    shared = jnp.zeros(len(q), jnp.int32)
    return exact.paged(q, k_pool, v_pool, table, jnp.asarray(LENGTHS), shared, len(k_pool))


def meet_all_pages(
    q: jax.Array, k_pool: jax.Array, v_pool: jax.Array, table: jax.Array
) -> jax.Array:
    """Folds all pages of every slot, with a tile of queries that is written out."""
    S = len(q)
    queries = exact.by_kv_head(q[:, None], K)
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, exact.QUERY_ROWS - H // K), (0, 0)))
    softmax: OnlineSoftmax = exact.empty_softmax(queries)

    def read(pool: jax.Array, pages: jax.Array) -> jax.Array:
        return pool[:, pages].swapaxes(0, 1).reshape(S, K, BLOCK, D)

    for block in range(PAGES * PAGE // BLOCK):
        pages = table[:, block * BLOCK // PAGE : (block + 1) * BLOCK // PAGE]
        is_visible = block * BLOCK + np.arange(BLOCK) < LENGTHS[:, None]
        is_visible = jnp.broadcast_to(is_visible[:, None], (S, queries.shape[2], BLOCK))
        keys, values = read(k_pool, pages), read(v_pool, pages)
        softmax = exact.fold_block(softmax, queries, keys, values, is_visible)
    return exact.by_token(exact.normalized(softmax)[:, :, : H // K], 1)[:, 0]


def test_slots_have_the_bits_of_slots_that_meet_all_pages() -> None:
    inputs = slots()
    np.testing.assert_array_equal(jax.jit(decode)(*inputs), jax.jit(meet_all_pages)(*inputs))


def test_short_slots_do_not_read_the_pages_of_longer_ones() -> None:
    """Seven slots are four groups by length: (1, 5), (30, 64), (65, 130) and (200)."""
    q, k_pool, v_pool, table = slots()
    unread = table[LENGTHS <= BLOCK, BLOCK // PAGE :]
    out = jax.jit(decode)(q, k_pool, v_pool.at[:, unread].set(jnp.nan), table)
    assert jnp.isfinite(out).all()


@pytest.mark.usefixtures("quick_compilation")
def test_slots_have_the_values_of_the_definition() -> None:
    q, k_pool, v_pool, table = slots()
    lengths, shared = jnp.asarray(LENGTHS), jnp.zeros(len(q), jnp.int32)
    defined = jax.jit(xla.paged)(q, k_pool, v_pool, table, lengths, shared)
    np.testing.assert_allclose(jax.jit(decode)(q, k_pool, v_pool, table), defined, atol=2e-6)


def test_a_layout_with_a_prefix_keeps_the_bits_of_a_sequence_alone() -> None:
    """A shared prefix and a tile that other sequences fill change no bit of a response."""
    q, k, v, _, all_ = two_rows()
    packed = jax.jit(exact.packed, static_argnums=4)
    q = jnp.concatenate([random_heads(4, 2, PREFIX, H, D), q], axis=1)
    in_row = packed(q, k, v, all_, RowLayout(PREFIX, 1, OWN))

    # The second sequence of the first row: 70 tokens of the prefix, and its own 65.
    places = np.r_[0:70, PREFIX + 10 : PREFIX + 75]
    alone = [x[:1, places] for x in (q, k, v)]
    segments = jnp.ones((1, len(places)), jnp.int32)
    by_itself = packed(*alone, segments, RowLayout(0, 1, len(places)))

    np.testing.assert_array_equal(in_row[0, places], by_itself[0])
