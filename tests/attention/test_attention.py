"""Packed and paged attention against one dense softmax a query."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jzero import attention
from jzero.attention import xla
from jzero.types import RowLayout

H, K, D = 4, 2, 8
LAYOUTS = [RowLayout(0, 1, 24), RowLayout(8, 1, 16), RowLayout(8, 4, 12)]
packed = jax.jit(xla.packed, static_argnums=4)


def random_row(rng, length: int) -> np.ndarray:
    """Segments 1, 2, ... of random lengths, then padding."""
    ends = np.sort(rng.choice(np.arange(1, length), 3, replace=False))
    row = 1 + np.searchsorted(ends, np.arange(length), side="right")
    row[ends[-1] :] = 0
    return row


def random_inputs(layout: RowLayout, rows: int = 3):
    rng = np.random.default_rng(layout.tokens)
    T = layout.tokens
    q, k, v = (rng.standard_normal((rows, T, heads, D)).astype(np.float32) for heads in (H, K, K))
    segments = np.zeros((rows, T), np.int32)
    for row in segments:
        if layout.prefix:
            row[: rng.integers(1, layout.prefix + 1)] = 1  # one prompt, padded
        for start in range(layout.prefix, T, layout.slot):
            row[start : start + layout.slot] = random_row(rng, layout.slot)
    segments[-1, layout.prefix :] = 0  # a row without a response
    return q, k, v, segments


def mask_of(segments: np.ndarray, layout: RowLayout) -> np.ndarray:
    """bool[B, T, T]: which keys a query sees, one pair at a time, by the definition."""
    P, _, N = layout
    slot = lambda t: -1 if t < P else (t - P) // N
    mask = np.zeros((*segments.shape, layout.tokens), bool)
    for b, t, s in np.ndindex(mask.shape):
        shared = slot(s) == -1 and slot(t) >= 0
        own = slot(s) == slot(t) and segments[b, s] == segments[b, t]
        mask[b, t, s] = s <= t and segments[b, s] > 0 and (shared or own)
    return mask


def naive(q, k, v, segments, layout: RowLayout):
    """One dense softmax over every key of the row; zero for padding."""
    k, v = (jnp.repeat(x, H // K, axis=2) for x in (k, v))
    scores = jnp.where(
        mask_of(segments, layout)[:, None], jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(D), -1e30
    )
    out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v)
    return jnp.where((segments > 0)[..., None, None], out, 0)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_packed_and_its_gradients_equal_dense_attention(layout):
    q, k, v, segments = random_inputs(layout)
    real = (segments > 0)[..., None, None]
    weights = np.random.default_rng(1).standard_normal(q.shape) * real

    def run(attend):
        out, pullback = jax.vjp(lambda *qkv: attend(*qkv, segments, layout), q, k, v)
        return out * real, *pullback(jnp.asarray(weights, jnp.float32))

    got, want = jax.jit(lambda: (run(xla.packed), run(naive)))()
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
        assert (np.asarray(a)[segments == 0] == 0).all()  # padding takes and gives nothing


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2]], ids=str)
def test_blocks_of_queries_change_nothing(layout, monkeypatch):
    q, k, v, segments = random_inputs(layout)
    weights = np.random.default_rng(1).standard_normal(q.shape) * (segments > 0)[..., None, None]

    def run(*qkv):
        out, pullback = jax.vjp(lambda *qkv: xla.packed(*qkv, segments, layout), *qkv)
        return out, *pullback(jnp.asarray(weights, jnp.float32))

    whole = lambda *qkv: run(
        *qkv
    )  # one function for each setting: QUERY_BLOCK is read when it is traced
    blocks = lambda *qkv: run(*qkv)
    want = jax.jit(whole)(q, k, v)
    monkeypatch.setattr(xla, "QUERY_BLOCK", 4)
    assert "scan" in str(jax.make_jaxpr(blocks)(q, k, v)) and "scan" not in str(
        jax.make_jaxpr(whole)(q, k, v)
    )
    for a, b in zip(jax.jit(blocks)(q, k, v), want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_segment_sees_no_other(layout):
    q, k, v, segments = random_inputs(layout)
    before = np.asarray(packed(q, k, v, segments, layout))
    P, _, N = layout
    other = (
        (np.arange(layout.tokens) < P + N) & (np.arange(layout.tokens) >= P) & (segments == 1)
    )  # first of slot 0
    change = lambda x: np.where(
        (other | (segments == 0))[..., None, None], x + 3, x
    )  # and all padding
    after = np.asarray(packed(change(q), change(k), change(v), segments, layout))
    same = ~other & (segments > 0)
    assert same.any() and other.any()
    np.testing.assert_array_equal(after[same], before[same])
    assert not np.allclose(after[other], before[other])


def random_pool(page: int, lengths, storage):
    """Ragged sequences on shuffled pages; what no sequence holds is noise. -> dense k, v [S, T, K, D], pools, table."""
    rng = np.random.default_rng(page)
    S, T = len(lengths), int(max(lengths))
    per_slot = -(-T // page)
    kv = rng.standard_normal((2, S, T, K, D)).astype(np.float32)
    pools = rng.standard_normal((2, K, S * per_slot + 1, page, D)).astype(np.float32) * 100
    table = 1 + rng.permutation(S * per_slot).reshape(S, per_slot)
    table[np.arange(per_slot) * page >= lengths[:, None]] = 0
    for s, length in enumerate(lengths):
        at = np.arange(length)
        pools[:, :, table[s, at // page], at % page] = kv[:, s, :length].swapaxes(1, 2)
    pools = attention.encode_kv(jnp.asarray(pools), storage)
    return kv[0], kv[1], [pools[0], pools[1]], table


def naive_paged(q, k, v, lengths):
    out = []
    for s, length in enumerate(lengths):
        keys, values = (np.repeat(x[s, :length], H // K, axis=1) for x in (k, v))
        scores = np.einsum("hd,thd->ht", q[s], keys) / np.sqrt(D)
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        out.append(np.einsum("ht,thd->hd", probs / probs.sum(-1, keepdims=True), values))
    return np.stack(out)


LENGTHS = np.array([1, 33, 16, 4, 17, 40])
ALONE = np.zeros(len(LENGTHS), np.int32)  # blocks of one slot, nothing shared


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("storage", [jnp.float32, jnp.uint16], ids=["float32", "bfloat16 bits"])
def test_paged_equals_softmax(page, storage):
    k, v, pools, table = random_pool(page, LENGTHS, storage)
    q = np.random.default_rng(0).standard_normal((len(LENGTHS), H, D)).astype(np.float32)
    if storage == jnp.uint16:
        k, v = (np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32) for x in (k, v))
    got = jax.jit(xla.paged)(q, *pools, table, LENGTHS, ALONE)
    np.testing.assert_allclose(got, naive_paged(q, k, v, LENGTHS), atol=1e-5)


@pytest.mark.parametrize("page", [1, 4, 16])
def test_paged_reads_the_pages_that_neighbours_share_once(page):
    """Blocks of 3 and of 2 slots; the first tokens of a block are the same, and only their own table names the pages of
    all but its first slot past them. An idle slot (length 1) may sit among them."""
    for shared_tokens in ([16, 16], [16, 0, 0]):
        k, v, pools, table = random_pool(page, LENGTHS, jnp.float32)
        lengths, blocks = LENGTHS.copy(), len(shared_tokens)
        block = len(lengths) // blocks
        for b, tokens in enumerate(shared_tokens):
            members = range(b * block, (b + 1) * block)
            leader = max(members, key=lambda s: lengths[s])
            for s in members:
                if lengths[s] >= tokens:
                    k[s, :tokens], v[s, :tokens] = k[leader, :tokens], v[leader, :tokens]
                table[s, : tokens // page] = table[leader, : tokens // page]
        busy = lengths >= np.repeat(shared_tokens, block)
        q = np.random.default_rng(0).standard_normal((len(lengths), H, D)).astype(np.float32)
        shared = np.array(shared_tokens, np.int32) // page
        got = jax.jit(xla.paged)(q, *pools, table, lengths, shared)
        np.testing.assert_allclose(got[busy], naive_paged(q, k, v, lengths)[busy], atol=1e-5)
        assert busy.sum() >= 4 and np.isfinite(got).all()


def test_what_lies_behind_a_length_changes_nothing():
    _, _, pools, table = random_pool(4, LENGTHS, jnp.float32)
    q = np.random.default_rng(0).standard_normal((len(LENGTHS), H, D)).astype(np.float32)
    before = jax.jit(xla.paged)(q, *pools, table, LENGTHS, ALONE)
    last = table[np.arange(6), (LENGTHS - 1) // 4]
    for offset in range(1, 4):
        free = (LENGTHS - 1) % 4 + offset < 4
        pools = [
            pool.at[:, last[free], (LENGTHS[free] - 1) % 4 + offset].set(1e4) for pool in pools
        ]
    pools = [pool.at[:, 0].set(-1e4) for pool in pools]  # scratch
    np.testing.assert_array_equal(jax.jit(xla.paged)(q, *pools, table, LENGTHS, ALONE), before)


def test_bits_of_bfloat16_round_like_bfloat16():
    storage = attention.kv_storage("bfloat16", "cpu")
    assert storage == jnp.uint16 and attention.kv_storage("bfloat16", "tpu") == jnp.bfloat16
    assert attention.kv_storage("float32", "cpu") == jnp.float32
    x = jnp.asarray(
        np.random.default_rng(0).standard_normal(1000) * 10.0 ** np.arange(-20, 20).repeat(25),
        jnp.float32,
    )
    for dtype in (jnp.float32, jnp.bfloat16):
        got = attention.decode_kv(attention.encode_kv(x, storage), dtype)
        np.testing.assert_array_equal(got, x.astype(jnp.bfloat16).astype(dtype))


@pytest.mark.parametrize("storage", [jnp.float32, jnp.uint16], ids=["float32", "bfloat16 bits"])
def test_write_tokens_touches_its_rows_alone(storage):
    rng = np.random.default_rng(0)
    pool = attention.encode_kv(jnp.asarray(rng.standard_normal((K, 5, 4, D)), jnp.float32), storage)
    x = jnp.asarray(rng.standard_normal((3, K, D)), jnp.float32)
    pages, offsets = np.array([4, 0, 4]), np.array([3, 2, 0])
    want = np.array(pool)
    want[:, pages, offsets] = np.asarray(attention.encode_kv(x, storage)).swapaxes(0, 1)
    np.testing.assert_array_equal(jax.jit(attention.write)(pool, x, pages, offsets), want)


@pytest.mark.parametrize("storage", [jnp.float32, jnp.uint16], ids=["float32", "bfloat16 bits"])
def test_write_pages_touches_its_pages_alone(storage):
    rng = np.random.default_rng(0)
    pool = attention.encode_kv(jnp.asarray(rng.standard_normal((K, 5, 4, D)), jnp.float32), storage)
    x = jnp.asarray(rng.standard_normal((2, 4, K, D)), jnp.float32)
    want = np.array(pool)
    want[:, [3, 1]] = np.asarray(attention.encode_kv(x, storage)).transpose(2, 0, 1, 3)
    np.testing.assert_array_equal(jax.jit(attention.write)(pool, x, np.array([3, 1])), want)
