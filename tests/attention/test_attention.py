"""Packed and paged attention in XLA against one dense softmax per query."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.typing import DTypeLike

from jzero import attention
from jzero.attention import pools, xla
from jzero.attention.backend import Packed
from jzero.attention.pools import QuantizedPool
from jzero.types import RowLayout

# The tests of storage run with all optimizations: these may remove conversions to bfloat16.
quick = pytest.mark.usefixtures("quick_compilation")

H, K, D = 4, 2, 8
LAYOUTS = [RowLayout(0, 1, 24), RowLayout(8, 1, 16), RowLayout(8, 4, 12)]

packed = jax.jit(xla.packed, static_argnums=4)
paged = jax.jit(xla.paged)
write = jax.jit(attention.write)


# -- packed rows -----------------------------------------------------------------------------------


def random_slot(rng: np.random.Generator, length: int) -> np.ndarray:
    """Returns segments 1, 2 and 3 of random lengths, and padding behind them."""
    ends = np.sort(rng.choice(np.arange(1, length), 3, replace=False))
    segments = 1 + np.searchsorted(ends, np.arange(length), side="right")
    segments[ends[-1] :] = 0
    return segments


def random_inputs(
    layout: RowLayout, rows: int = 3
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns q, k, v and segments. The last row has a prompt and no response."""
    rng = np.random.default_rng(layout.tokens)
    T = layout.tokens
    q = rng.standard_normal((rows, T, H, D)).astype(np.float32)
    k = rng.standard_normal((rows, T, K, D)).astype(np.float32)
    v = rng.standard_normal((rows, T, K, D)).astype(np.float32)

    segments = np.zeros((rows, T), np.int32)
    for row in segments:
        if layout.prefix:
            prompt_tokens = rng.integers(1, layout.prefix + 1)
            row[:prompt_tokens] = 1
        for start in range(layout.prefix, T, layout.slot):
            row[start : start + layout.slot] = random_slot(rng, layout.slot)
    segments[-1, layout.prefix :] = 0
    return q, k, v, segments


def per_head(is_token: np.ndarray) -> np.ndarray:
    """Returns [B, T] as [B, T, 1, 1], which broadcasts over heads."""
    return is_token[..., None, None]


def mask_of(segments: np.ndarray, layout: RowLayout) -> np.ndarray:
    """Returns bool[B, T, T]: which keys a query sees, one pair at a time, by the definition."""
    in_prefix = -1

    def slot_of(token: int) -> int:
        if token < layout.prefix:
            return in_prefix
        return (token - layout.prefix) // layout.slot

    mask = np.zeros((*segments.shape, layout.tokens), bool)
    for row, query, key in np.ndindex(mask.shape):
        same_slot = slot_of(key) == slot_of(query)
        is_own = same_slot and segments[row, query] == segments[row, key]
        is_shared = slot_of(key) == in_prefix and slot_of(query) != in_prefix
        is_token = segments[row, key] > 0
        mask[row, query, key] = key <= query and is_token and (is_shared or is_own)
    return mask


def naive(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: np.ndarray,
    layout: RowLayout,
    soft_cap: float = 0.0,
) -> jax.Array:
    """Computes one dense softmax over every key of the row, and zeros for padding."""
    k = jnp.repeat(k, H // K, axis=2)
    v = jnp.repeat(v, H // K, axis=2)
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(D)
    if soft_cap:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(mask_of(segments, layout)[:, None], scores, -1e30)
    out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v)
    return jnp.where(per_head(segments > 0), out, 0)


def output_and_gradients(
    attend: Packed,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: np.ndarray,
    layout: RowLayout,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the output, and the gradients of q, k and v for random weights of its tokens."""

    def output(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(q, k, v, segments, layout)

    weights = np.random.default_rng(1).standard_normal(q.shape) * per_head(segments > 0)
    out, pullback = jax.vjp(output, q, k, v)
    return out, *pullback(jnp.asarray(weights, jnp.float32))


@quick
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("soft_cap", [0.0, 1.5], ids=["", "bounded"])
def test_packed_and_its_gradients_equal_dense_attention(layout: RowLayout, soft_cap: float) -> None:
    q, k, v, segments = random_inputs(layout)

    @jax.jit
    def by_both(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[tuple, tuple]:
        packed, defined = (partial(attend, soft_cap=soft_cap) for attend in (xla.packed, naive))
        in_slots = output_and_gradients(packed, q, k, v, segments, layout)
        dense = output_and_gradients(defined, q, k, v, segments, layout)
        return in_slots, dense

    (out, *gradients), (expected, *expected_gradients) = by_both(q, k, v)

    # What padding receives means nothing, so only the output of tokens is compared.
    np.testing.assert_allclose(out * per_head(segments > 0), expected, atol=1e-5)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(gradient, expected_gradient, atol=1e-5)
        gradient_of_padding = np.asarray(gradient)[segments == 0]
        assert (gradient_of_padding == 0).all()


@quick
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2]], ids=str)
@pytest.mark.parametrize(("block", "ranges"), [(4, 8), (4, 2), (5, 3)])
def test_blocks_of_queries_change_nothing(
    layout: RowLayout, block: int, ranges: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some blocks are of several ranges of keys, and the last one may be smaller."""
    q, k, v, segments = random_inputs(layout)

    # QUERY_BLOCK is read while a function is traced, and JAX traces a function once: each value
    # needs a function of its own.
    def at_once(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        return output_and_gradients(xla.packed, q, k, v, segments, layout)

    def in_blocks(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        return output_and_gradients(xla.packed, q, k, v, segments, layout)

    traced_at_once = jax.jit(at_once).trace(q, k, v)
    monkeypatch.setattr(xla, "QUERY_BLOCK", block)
    monkeypatch.setattr(xla, "KEY_RANGES", ranges)
    traced_in_blocks = jax.jit(in_blocks).trace(q, k, v)

    assert "scan" not in str(traced_at_once.jaxpr)
    assert "scan" in str(traced_in_blocks.jaxpr)
    expected = traced_at_once.lower().compile()(q, k, v)
    found = traced_in_blocks.lower().compile()(q, k, v)
    for array, expected_array in zip(found, expected, strict=True):
        np.testing.assert_allclose(array, expected_array, atol=1e-5)


@quick
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_segment_sees_no_other(layout: RowLayout) -> None:
    q, k, v, segments = random_inputs(layout)
    position = np.arange(layout.tokens)
    in_first_slot = (position >= layout.prefix) & (position < layout.prefix + layout.slot)
    is_first_segment = in_first_slot & (segments == 1)
    is_changed = per_head(is_first_segment | (segments == 0))  # padding too

    before = np.asarray(packed(q, k, v, segments, layout))
    changed = [np.where(is_changed, x + 3, x) for x in (q, k, v)]
    after = np.asarray(packed(*changed, segments, layout))

    is_other = ~is_first_segment & (segments > 0)
    assert is_other.any()
    assert is_first_segment.any()
    np.testing.assert_array_equal(after[is_other], before[is_other])
    assert not np.allclose(after[is_first_segment], before[is_first_segment])


# -- paged decoding --------------------------------------------------------------------------------

LENGTHS = np.array([1, 33, 16, 4, 17, 40])
NOTHING_SHARED = np.zeros(len(LENGTHS), np.int32)  # every slot is a block of its own

every_storage = pytest.mark.parametrize(
    "storage", [jnp.float32, jnp.uint16], ids=["float32", "bfloat16 bits"]
)


class PagedSequences(NamedTuple):
    """Sequences of LENGTHS, in dense arrays and on shuffled pages."""

    k: np.ndarray  # [S, longest, K, D]
    v: np.ndarray
    k_pool: jax.Array  # [K, pages, page, D]; what no sequence holds is large noise
    v_pool: jax.Array
    table: np.ndarray  # [S, pages of the longest]; 0 behind a sequence's last page


def random_sequences(page_size: int, storage: DTypeLike) -> PagedSequences:
    """Returns random sequences in pools of the element type `storage`."""
    rng = np.random.default_rng(page_size)
    S, T = len(LENGTHS), int(max(LENGTHS))
    max_pages = -(-T // page_size)
    k, v = rng.standard_normal((2, S, T, K, D)).astype(np.float32)
    pool_shape = (K, S * max_pages + 1, page_size, D)
    k_pool, v_pool = rng.standard_normal((2, *pool_shape)).astype(np.float32) * 100

    table = 1 + rng.permutation(S * max_pages).reshape(S, max_pages)
    table[np.arange(max_pages) * page_size >= LENGTHS[:, None]] = 0
    for slot, length in enumerate(LENGTHS):
        position = np.arange(length)
        pages = table[slot, position // page_size]
        k_pool[:, pages, position % page_size] = k[slot, :length].swapaxes(0, 1)
        v_pool[:, pages, position % page_size] = v[slot, :length].swapaxes(0, 1)

    return PagedSequences(
        k=k,
        v=v,
        k_pool=attention.encode_kv(jnp.asarray(k_pool), storage),
        v_pool=attention.encode_kv(jnp.asarray(v_pool), storage),
        table=table,
    )


def share_first_tokens(
    sequences: PagedSequences, shared_tokens: list[int], page_size: int
) -> np.ndarray:
    """Gives each block of neighboring slots the first tokens, and pages, of its longest sequence.

    Changes `sequences` in place. Returns which slots are as long as what their block shares. The
    others are idle: they have the block's pages in the table and do not fill them.
    """
    block_size = len(LENGTHS) // len(shared_tokens)
    for block, tokens in enumerate(shared_tokens):
        members = range(block * block_size, (block + 1) * block_size)
        longest = members[LENGTHS[members].argmax()]
        for slot in members:
            if LENGTHS[slot] >= tokens:
                sequences.k[slot, :tokens] = sequences.k[longest, :tokens]
                sequences.v[slot, :tokens] = sequences.v[longest, :tokens]
            pages = tokens // page_size
            sequences.table[slot, :pages] = sequences.table[longest, :pages]
    tokens_to_fill = np.repeat(shared_tokens, block_size)
    return tokens_to_fill <= LENGTHS


def random_queries() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.standard_normal((len(LENGTHS), H, D)).astype(np.float32)


def naive_paged(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Computes the softmax of each slot over its dense keys, one slot at a time."""
    outputs = []
    for slot, length in enumerate(LENGTHS):
        keys = np.repeat(k[slot, :length], H // K, axis=1)
        values = np.repeat(v[slot, :length], H // K, axis=1)
        scores = np.einsum("hd,thd->ht", q[slot], keys) / np.sqrt(D)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        probs = weights / weights.sum(-1, keepdims=True)
        outputs.append(np.einsum("ht,thd->hd", probs, values))
    return np.stack(outputs)


def round_to_bfloat16(x: np.ndarray) -> np.ndarray:
    return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)


@quick
@pytest.mark.parametrize("page_size", [1, 4, 16])
@every_storage
def test_paged_equals_softmax(page_size: int, storage: DTypeLike) -> None:
    k, v, k_pool, v_pool, table = random_sequences(page_size, storage)
    q = random_queries()

    out = paged(q, k_pool, v_pool, table, LENGTHS, NOTHING_SHARED)

    if storage == jnp.uint16:
        k, v = round_to_bfloat16(k), round_to_bfloat16(v)
    np.testing.assert_allclose(out, naive_paged(q, k, v), atol=1e-5)


@quick
@pytest.mark.parametrize("shared_tokens", [[16, 16], [16, 0, 0]], ids=str)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pages_that_neighbors_share_give_the_same_output(
    page_size: int, shared_tokens: list[int]
) -> None:
    sequences = random_sequences(page_size, jnp.float32)
    is_busy = share_first_tokens(sequences, shared_tokens, page_size)
    k, v, k_pool, v_pool, table = sequences
    q = random_queries()

    shared_pages = np.array(shared_tokens, np.int32) // page_size
    out = np.asarray(paged(q, k_pool, v_pool, table, LENGTHS, shared_pages))

    expected = naive_paged(q, k, v)
    np.testing.assert_allclose(out[is_busy], expected[is_busy], atol=1e-5)
    assert is_busy.sum() >= 4
    assert np.isfinite(out).all()


@quick
def test_what_lies_behind_a_length_changes_nothing() -> None:
    page_size = 4
    _, _, k_pool, v_pool, table = random_sequences(page_size, jnp.float32)
    q = random_queries()

    before = paged(q, k_pool, v_pool, table, LENGTHS, NOTHING_SHARED)
    changed_pools = []
    for pool in (k_pool, v_pool):
        changed = np.array(pool)
        for slot, length in enumerate(LENGTHS):
            last_page = table[slot, (length - 1) // page_size]
            tokens_on_it = (length - 1) % page_size + 1
            changed[:, last_page, tokens_on_it:] = 1e4
        changed[:, 0] = -1e4  # the page that the table names behind a sequence's last page
        changed_pools.append(changed)
    after = paged(q, *changed_pools, table, LENGTHS, NOTHING_SHARED)

    np.testing.assert_array_equal(after, before)


# -- storage of keys and values --------------------------------------------------------------------


def test_only_cpus_store_bfloat16_as_bits() -> None:
    assert attention.kv_storage("bfloat16", "cpu") == jnp.uint16
    assert attention.kv_storage("bfloat16", "tpu") == jnp.bfloat16
    assert attention.kv_storage("float32", "cpu") == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bits_of_bfloat16_round_like_bfloat16(dtype: DTypeLike) -> None:
    magnitudes = 10.0 ** np.arange(-20, 20).repeat(25)
    normal = np.random.default_rng(0).standard_normal(1000)
    x = jnp.asarray(normal * magnitudes, jnp.float32)

    decoded = attention.decode_kv(attention.encode_kv(x, jnp.uint16), dtype)

    np.testing.assert_array_equal(decoded, x.astype(jnp.bfloat16).astype(dtype))


def random_pool(rng: np.random.Generator, storage: DTypeLike) -> jax.Array:
    """Returns a pool of 5 pages of 4 tokens."""
    return attention.encode_kv(jnp.asarray(rng.standard_normal((K, 5, 4, D)), jnp.float32), storage)


@every_storage
def test_write_of_tokens_changes_their_places_alone(storage: DTypeLike) -> None:
    rng = np.random.default_rng(0)
    pool = random_pool(rng, storage)
    tokens = jnp.asarray(rng.standard_normal((3, K, D)), jnp.float32)
    pages = np.array([4, 0, 4])
    offsets = np.array([3, 2, 0])

    written = write(pool, tokens, pages, offsets)

    expected = np.array(pool)
    expected[:, pages, offsets] = np.asarray(attention.encode_kv(tokens, storage)).swapaxes(0, 1)
    np.testing.assert_array_equal(written, expected)


@every_storage
def test_write_of_pages_changes_these_pages_alone(storage: DTypeLike) -> None:
    rng = np.random.default_rng(0)
    pool = random_pool(rng, storage)
    tokens = jnp.asarray(rng.standard_normal((2, 4, K, D)), jnp.float32)
    pages = np.array([3, 1])

    written = write(pool, tokens, pages)

    by_head = np.asarray(attention.encode_kv(tokens, storage)).transpose(2, 0, 1, 3)
    expected = np.array(pool)
    expected[:, pages] = by_head
    np.testing.assert_array_equal(written, expected)


# -- 8 bits ----------------------------------------------------------------------------------------


# The types of the values of pools: with fp8 a CPU stores the bits.
in_8_bits = pytest.mark.parametrize("storage", [jnp.int8, jnp.float8_e4m3fn, jnp.uint8])


def pool_in_8_bits(pool: jax.Array, storage: DTypeLike) -> QuantizedPool:
    """Returns a pool [K, pages, page, D] in 8 bits, written page by page."""
    scales = jnp.zeros(pools.scales_shape(pool.shape, D), jnp.float32)
    empty = QuantizedPool(jnp.zeros(pool.shape, storage), scales)
    return write(empty, jnp.moveaxis(pool, 0, 2), np.arange(pool.shape[1]))


def loop_8_bits(numbers: np.ndarray, storage: DTypeLike) -> np.ndarray:
    """Returns the numbers of one head of one token after they were rounded to 8 bits."""
    if storage == jnp.int8:
        scale = np.float32(max(abs(numbers)) / 127)
        return np.array([round(number / scale) * scale for number in numbers], np.float32)
    scale = np.float32(max(abs(numbers)) / 448)
    rounded = (numbers / scale).astype(ml_dtypes.float8_e4m3fn)
    return rounded.astype(np.float32) * scale


@in_8_bits
def test_pools_in_8_bits_round_each_head_of_each_token_by_itself(storage: DTypeLike) -> None:
    rng = np.random.default_rng(0)
    sizes = 10.0 ** rng.integers(-3, 3, (3, K, 1))
    tokens = (rng.standard_normal((3, K, D)) * sizes).astype(np.float32)
    tokens[1, 0] = 0
    before = pool_in_8_bits(random_pool(rng, jnp.float32), storage)
    pages, offsets = np.array([4, 0, 4]), np.array([3, 2, 0])

    written = write(before, jnp.asarray(tokens), pages, offsets)

    found = np.array(pools.read(written, np.arange(5), K, D, jnp.float32))  # [pages, page, K, D]
    expected = np.array(pools.read(before, np.arange(5), K, D, jnp.float32))
    for token in range(3):
        for head in range(K):
            numbers = tokens[token, head]
            rounded = loop_8_bits(numbers, storage) if numbers.any() else numbers
            expected[pages[token], offsets[token], head] = rounded
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=0)
    # What prefill attends to is what decoding reads.
    stored = attention.as_stored(jnp.asarray(tokens), storage, jnp.float32)
    np.testing.assert_array_equal(found[pages, offsets], stored)


@in_8_bits
@pytest.mark.parametrize("page_size", [4, 8])
def test_paged_attention_reads_pools_in_8_bits(page_size: int, storage: DTypeLike) -> None:
    """The output is that of the rounded keys and values, in pools that are not in 8 bits."""
    sequences = random_sequences(page_size, jnp.float32)
    quantized = [pool_in_8_bits(pool, storage) for pool in (sequences.k_pool, sequences.v_pool)]
    num_pages = sequences.k_pool.shape[1]
    restored = [
        jnp.moveaxis(pools.read(pool, np.arange(num_pages), K, D, jnp.float32), 2, 0)
        for pool in quantized
    ]
    shared = np.zeros(1, np.int32)

    def attend(k_pool: pools.Pool, v_pool: pools.Pool) -> jax.Array:
        return xla.paged(
            jnp.asarray(random_queries()),
            k_pool,
            v_pool,
            jnp.asarray(sequences.table),
            jnp.asarray(LENGTHS),
            jnp.asarray(shared),
        )

    found = attend(*quantized)
    np.testing.assert_allclose(found, attend(*restored), atol=1e-5)
    error = np.abs(found - naive_paged(random_queries(), sequences.k, sequences.v)).max()
    assert 1e-4 < error < (0.05 if storage == jnp.int8 else 0.15)


@quick
def test_ranges_of_queries_meet_no_key_behind_them() -> None:
    """Of 8 ranges the scores are 1/8, 2/8, ... 8/8 of the keys: 56 % of all pairs."""
    tokens = 8 * xla.QUERY_BLOCK
    q = jnp.zeros((1, tokens, H, D))
    k = jnp.zeros((1, tokens, K, D))
    segments = jnp.ones((1, tokens), jnp.int32)
    jaxpr = str(jax.make_jaxpr(xla.attend_in_blocks)(q, k, k, segments, segments))
    rows = xla.QUERY_BLOCK * H // K
    products = {f"f32[1,{K},{rows},{(i + 1) * xla.QUERY_BLOCK}]" for i in range(8)}
    assert {name for name in products if name in jaxpr} == products
    assert f",{tokens},{tokens}]" not in jaxpr
