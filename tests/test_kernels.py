"""The kernels against the XLA definition, in interpret mode; and compiled, without their hardware."""

import importlib.util
import os
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jzero import attention, sharding
from jzero.attention import gpu, tpu, xla
from jzero.config import Rollout
from jzero.model.qwen import QwenConfig, abstract
from jzero.rollout.engine import Engine
from jzero.types import Layout

MODELS = {  # query heads, KV heads, head dim
    "qwen2.5-0.5b": (14, 2, 64),
    "qwen2.5-1.5b": (12, 2, 128),
    "qwen2.5-3b": (16, 2, 128),
    "qwen2.5-7b": (28, 4, 128),
    "qwen3-0.6b and 1.7b": (16, 8, 128),
    "qwen3-4b and 8b": (32, 8, 128),
}
SHARDS = {"qwen2.5-0.5b over 2": (7, 1, 64), "three heads of 64": (6, 3, 64), "four in a row": (4, 4, 32)}
LAYOUTS = [  # no length of which is a multiple of the blocks, but the last's
    Layout(0, 1, 300),
    Layout(0, 3, 75),
    Layout(70, 3, 90),
    Layout(33, 1, 101),
    Layout(130, 2, 20),
    Layout(128, 2, 128),
]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def row_of(rng, layout: Layout) -> np.ndarray:
    """Segments of a padded prompt, and in each slot up to three sequences and padding."""
    row = np.zeros(layout.tokens, np.int32)
    row[: rng.integers(1, layout.prefix + 1) if layout.prefix else 0] = 1
    for start in range(layout.prefix, layout.tokens, layout.slot):
        ends = np.sort(rng.choice(np.arange(1, layout.slot + 1), 3, replace=False))
        own = 1 + np.searchsorted(ends, np.arange(layout.slot), side="right")
        row[start : start + layout.slot] = np.where(np.arange(layout.slot) < ends[-1], own, 0)
    return row


def inputs_of(layout: Layout, heads: tuple[int, int, int], rows: int):
    """q, k, v, segments, and the cotangent of the output; the last row has no response."""
    rng = np.random.default_rng(layout.tokens)
    H, K, D = heads
    segments = np.stack([row_of(rng, layout) for _ in range(rows)])
    if rows > 1:
        segments[-1, layout.prefix :] = 0
    q, k, v, w = (rng.standard_normal((rows, layout.tokens, n, D)).astype(np.float32) for n in (H, K, K, H))
    return q, k, v, segments, w * (segments > 0)[..., None, None]


def both_ways(packed, q, k, v, segments, w, layout: Layout):
    """Output (of real tokens) and gradients."""

    def run(q, k, v, w):
        out, pullback = jax.vjp(lambda *qkv: packed(*qkv, segments, layout), q, k, v)
        return jnp.where((segments > 0)[..., None, None], out, 0), out, *pullback(w)

    real, everything, *gradients = jax.jit(run)(q, k, v, w)
    assert np.isfinite(everything).all()
    return real, *gradients


def agree(packed, layout: Layout, heads, rows: int) -> None:
    inputs = inputs_of(layout, heads, rows)
    for a, b in zip(both_ways(packed, *inputs, layout), both_ways(xla.packed, *inputs, layout), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


splash = partial(tpu.packed, interpret=True)
cudnn_by_xla = partial(gpu.packed, implementation="xla")  # cuDNN has no CPU path: the same call with the same mask
PACKED = pytest.mark.parametrize("packed", [splash, cudnn_by_xla], ids=["tpu", "gpu"])


@pytest.mark.parametrize("heads, layout", list(zip(MODELS.values(), LAYOUTS, strict=True)), ids=MODELS)
def test_splash_equals_the_definition(heads, layout, monkeypatch):
    monkeypatch.setattr(tpu, "BLOCKS", (128,))
    agree(splash, layout, heads, rows=1)


@layouts
def test_one_block_of_splash_equals_the_definition(layout):
    agree(splash, layout, (4, 2, 16), rows=2)


@layouts
def test_the_mask_of_cudnn_equals_the_definition(layout):
    agree(cudnn_by_xla, layout, (4, 2, 16), rows=3)


@PACKED
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2]], ids=str)
def test_a_segment_sees_no_other(packed, layout, monkeypatch):
    monkeypatch.setattr(tpu, "BLOCKS", (128,))
    q, k, v, segments, _ = inputs_of(layout, (4, 2, 16), rows=1)
    run = jax.jit(lambda q, k, v: packed(q, k, v, segments, layout))
    at = np.arange(layout.tokens)
    first = (at >= layout.prefix) & (at < layout.prefix + layout.slot) & (segments == 1)  # sequence of the first slot
    change = lambda x: np.where((first | (segments == 0))[..., None, None], x + 3, x)  # and all padding
    before, after = np.asarray(run(q, k, v)), np.asarray(run(change(q), change(k), change(v)))
    same = ~first & (segments > 0)
    assert same.any() and first.any()
    np.testing.assert_array_equal(after[same], before[same])
    assert not np.allclose(after[first], before[first])


@PACKED
def test_the_prefix_is_seen_and_only_up_to_its_padding(packed):
    layout = LAYOUTS[2]
    q, k, v, segments, _ = inputs_of(layout, (4, 2, 16), rows=1)
    run = jax.jit(lambda k: packed(q, k, v, segments, layout))
    before = np.asarray(run(k))
    body = (np.arange(layout.tokens) >= layout.prefix) & (segments[0] > 0)
    for token, seen in ((0, True), (segments[0, : layout.prefix].sum(), False)):
        changed = k.copy()
        changed[:, token] += 3
        differs = (np.asarray(run(changed)) != before).any(axis=(0, 2, 3))
        assert differs[body].all() if seen else not differs[segments[0] > 0].any()


def test_a_row_too_long_for_its_codes_is_refused():
    q = jax.ShapeDtypeStruct((1, 1 << 16, 2, 16), jnp.float32)
    with pytest.raises(ValueError, match="65536 tokens"):
        jax.eval_shape(lambda q: tpu.packed(q, q, q, jnp.ones(q.shape[:2], jnp.int32), Layout(0, 1, 1 << 16)), q)


# -- paged ----------------------------------------------------------------------------------------------------------

LENGTHS = np.array([1, 33, 16, 4, 17, 90], np.int32)
PAGE, WIDTH = 16, 7  # WIDTH: pages of a slot, of which no block of pages is a multiple


@pytest.fixture
def interpreted(monkeypatch):
    """The TPU's paged attention has no interpret argument."""
    monkeypatch.setattr(pl, "pallas_call", partial(pl.pallas_call, interpret=True))


def paged_inputs(heads, dtype, rows: tuple[int, int]):
    """q, k_pool, v_pool, table, lengths, shared, KV heads. Sequences by page, but their last token; the rest is noise."""
    H, K, D = heads
    rng = np.random.default_rng(H)
    S, R = len(LENGTHS), len(LENGTHS) * WIDTH + 1
    pages = rng.standard_normal((2, R, PAGE, K, D)).astype(np.float32)
    last = rng.standard_normal((2, S, K, D)).astype(np.float32)
    table = 1 + rng.permutation(S * WIDTH).reshape(S, WIDTH).astype(np.int32)
    at = table[np.arange(S), (LENGTHS - 1) // PAGE]

    def pool(pages, last):
        empty = jnp.zeros((rows[0], R, PAGE, rows[1]), dtype)
        written = attention.write_pages(empty, pages, jnp.arange(R))
        return attention.write_tokens(written, last, at, (LENGTHS - 1) % PAGE)

    table[np.arange(WIDTH) * PAGE >= LENGTHS[:, None]] = 0
    q = rng.standard_normal((S, H, D)).astype(np.float32)
    return q, *map(jax.jit(pool), pages, last), table, LENGTHS, jnp.zeros(S, jnp.int32), K


@pytest.mark.parametrize("heads", (MODELS | SHARDS).values(), ids=MODELS | SHARDS)
def test_paged_kernels_equal_the_definition(heads, interpreted, monkeypatch):
    monkeypatch.setattr(tpu, "COMPUTE_TOKENS", 2 * PAGE)  # several blocks a slot
    tolerance = {  # 2^-8 is one rounding to bfloat16
        # The TPU's kernel rounds keys and values to bfloat16, whatever the pool holds, and nothing else.
        (tpu.paged, jnp.bfloat16): 1e-5,
        (tpu.paged, jnp.float32): 2e-2,
        # The GPU's multiplies in the pool's type: q and the weights are rounded, too, and the output.
        (gpu.paged, jnp.bfloat16): 2e-2,
        (gpu.paged, jnp.float32): 1e-5,
    }
    H, K, D = heads
    for dtype in (jnp.bfloat16, jnp.float32):
        *inputs, kv_heads = paged_inputs(heads, dtype, (K, D))
        want = jax.jit(xla.paged)(*inputs)
        for paged, rows in ((tpu.paged, tpu.pool_rows(K, D)), (partial(gpu.paged, interpret=True), (K, D))):
            *inputs, kv_heads = paged_inputs(heads, dtype, rows)
            got = jax.jit(paged, static_argnums=6)(*inputs, kv_heads)
            assert got.shape == (len(LENGTHS), H, D) and got.dtype == jnp.float32
            np.testing.assert_allclose(got, want, atol=tolerance[getattr(paged, "func", paged), dtype])


def test_rows_of_the_tpu_pool_are_whole_lanes():
    assert [tpu.pool_rows(*x) for x in ((2, 64), (1, 64), (3, 64), (8, 128), (2, 32), (2, 80))] == [
        (1, 128), (1, 128), (2, 128), (8, 128), (1, 128), (2, 128)
    ]  # fmt: skip


def test_what_the_gpu_cannot_page_is_refused():
    with pytest.raises(ValueError, match=r"rollout.page=48.*model.attention=xla"):
        gpu.paged(jnp.zeros((1, 2, 64)), *jnp.zeros((2, 2, 4, 48, 64)), jnp.zeros((1, 1), jnp.int32), None, None, 2)


# -- the programs that use them -------------------------------------------------------------------------------------


def test_the_mesh_chooses():
    mesh = sharding.mesh(jax.devices()[:1], {"slots": 1, "tensor": 1})
    assert attention.choose("", mesh) == attention.choose("xla", mesh) == (xla.packed, xla.paged, xla.pool_rows)


TINY = QwenConfig("qwen2", 64, 32, 64, 2, 4, 2, 16, True, 10000.0, 1e-6)


@pytest.mark.parametrize("tensor", [1, 2])
def test_split_heads_equal_whole_ones(tensor):
    layout = LAYOUTS[2]
    mesh = sharding.train_mesh(1, 2, 2 * tensor, jax.devices()[: 4 * tensor])
    whole = both_ways(splash, *inputs_of(layout, (4, 2, 16), rows=2), layout)
    split = attention.split(splash, 2 * tensor, ("data", "fsdp"), mesh)  # the second: each KV head on two devices
    for a, b in zip(both_ways(split, *inputs_of(layout, (4, 2, 16), rows=2), layout), whole, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
