"""The kernels against the XLA definition, in interpret mode; and compiled, without their hardware."""

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

from jzero import attention
from jzero.attention import gpu, tpu, xla
from jzero.config import RolloutConfig
from jzero.distributed.mesh import make_mesh, param_shardings, train_mesh
from jzero.errors import UserError
from jzero.model.qwen import QwenConfig, abstract
from jzero.rollout.abstract_calls import abstract_calls
from jzero.rollout.engine import Engine
from jzero.types import RowLayout

MODELS = {  # query heads, KV heads, head dim
    "qwen2.5-0.5b": (14, 2, 64),
    "qwen2.5-1.5b": (12, 2, 128),
    "qwen2.5-3b": (16, 2, 128),
    "qwen2.5-7b": (28, 4, 128),
    "qwen3-0.6b and 1.7b": (16, 8, 128),
    "qwen3-4b and 8b": (32, 8, 128),
}
SHARDS = {
    "qwen2.5-0.5b over 2": (7, 1, 64),
    "three heads of 64": (6, 3, 64),
    "four in a row": (4, 4, 32),
}
LAYOUTS = [  # no length of which is a multiple of the blocks, but the last's
    RowLayout(0, 1, 300),
    RowLayout(0, 3, 75),
    RowLayout(70, 3, 90),
    RowLayout(33, 1, 101),
    RowLayout(130, 2, 20),
    RowLayout(128, 2, 128),
]


def row_of(rng, layout: RowLayout) -> np.ndarray:
    """Segments of a padded prompt, and in each slot up to three sequences and padding. Of three slots, one sequence
    fills each of the last two: their segments have the same number."""
    row = np.zeros(layout.tokens, np.int32)
    row[: rng.integers(1, layout.prefix + 1) if layout.prefix else 0] = 1
    for start in range(layout.prefix, layout.tokens, layout.slot):
        ends = np.sort(rng.choice(np.arange(1, layout.slot + 1), 3, replace=False))
        own = 1 + np.searchsorted(ends, np.arange(layout.slot), side="right")
        row[start : start + layout.slot] = np.where(np.arange(layout.slot) < ends[-1], own, 0)
    if layout.slots == 3:
        row[-2 * layout.slot :] = 1
    return row


def inputs_of(layout: RowLayout, heads: tuple[int, int, int], rows: int):
    """q, k, v, segments, and the cotangent of the output; the last row has no response."""
    rng = np.random.default_rng(layout.tokens)
    H, K, D = heads
    segments = np.stack([row_of(rng, layout) for _ in range(rows)])
    if rows > 1:
        segments[-1, layout.prefix :] = 0
    q, k, v, w = (
        rng.standard_normal((rows, layout.tokens, n, D)).astype(np.float32) for n in (H, K, K, H)
    )
    return q, k, v, segments, w * (segments > 0)[..., None, None]


quick = pytest.mark.usefixtures("quick_compilation")
slow = pytest.mark.slow


def in_default_suite(names: set[str], table: dict) -> list:
    """Returns the values of a table as test parameters; all but `names` need --slow."""
    return [
        pytest.param(value, id=name, marks=() if name in names else slow)
        for name, value in table.items()
    ]


def both_ways(packed, q, k, v, segments, w, layout: RowLayout):
    """Output (of real tokens) and gradients."""

    def run(q, k, v, w):
        out, pullback = jax.vjp(lambda *qkv: packed(*qkv, segments, layout), q, k, v)
        return jnp.where((segments > 0)[..., None, None], out, 0), out, *pullback(w)

    real, everything, *gradients = jax.jit(run)(q, k, v, w)
    assert np.isfinite(everything).all()
    return real, *gradients


def agree(packed, layout: RowLayout, heads, rows: int) -> None:
    inputs = inputs_of(layout, heads, rows)
    for a, b in zip(
        both_ways(packed, *inputs, layout), both_ways(xla.packed, *inputs, layout), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=2e-5)


splash = partial(tpu.packed, interpret=True)
cudnn_by_xla = partial(
    gpu.packed, implementation="xla"
)  # cuDNN has no CPU path: the same call with the same mask
PACKED = pytest.mark.parametrize("packed", [splash, cudnn_by_xla], ids=["tpu", "gpu"])


@quick
@pytest.mark.parametrize(
    "case",
    in_default_suite(
        {"qwen2.5-0.5b", "qwen2.5-3b"},
        dict(zip(MODELS, zip(MODELS.values(), LAYOUTS, strict=True), strict=True)),
    ),
)
def test_splash_equals_the_definition(case, monkeypatch):
    heads, layout = case
    monkeypatch.setattr(tpu, "BLOCKS", (128,))
    agree(splash, layout, heads, rows=1)


@quick
def test_one_block_of_splash_equals_the_definition():
    agree(splash, LAYOUTS[2], (4, 2, 16), rows=2)


@quick
@pytest.mark.parametrize("layout", LAYOUTS[:4], ids=str)
def test_the_mask_of_cudnn_equals_the_definition(layout):
    agree(cudnn_by_xla, layout, (4, 2, 16), rows=3)


@quick
@PACKED
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2]], ids=str)
def test_a_segment_sees_no_other(packed, layout, monkeypatch):
    monkeypatch.setattr(tpu, "BLOCKS", (128,))
    q, k, v, segments, _ = inputs_of(layout, (4, 2, 16), rows=1)
    run = jax.jit(lambda q, k, v: packed(q, k, v, segments, layout))
    at = np.arange(layout.tokens)
    first = (
        (at >= layout.prefix) & (at < layout.prefix + layout.slot) & (segments == 1)
    )  # sequence of the first slot
    change = lambda x: np.where(
        (first | (segments == 0))[..., None, None], x + 3, x
    )  # and all padding
    before, after = np.asarray(run(q, k, v)), np.asarray(run(change(q), change(k), change(v)))
    same = ~first & (segments > 0)
    assert same.any() and first.any()
    np.testing.assert_array_equal(after[same], before[same])
    assert not np.allclose(after[first], before[first])


@quick
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
        jax.eval_shape(
            lambda q: tpu.packed(
                q, q, q, jnp.ones(q.shape[:2], jnp.int32), RowLayout(0, 1, 1 << 16)
            ),
            q,
        )


# -- paged ----------------------------------------------------------------------------------------------------------

LENGTHS = np.array([1, 33, 16, 75], np.int32)
PAGE, WIDTH = 16, 5  # WIDTH: pages of a slot, which no block of pages divides


@pytest.fixture
def interpreted(monkeypatch):
    """The TPU's paged attention has no interpret argument. Several blocks a slot."""
    monkeypatch.setattr(pl, "pallas_call", partial(pl.pallas_call, interpret=True))
    monkeypatch.setattr(tpu, "COMPUTE_TOKENS", 2 * PAGE)
    monkeypatch.setattr(gpu, "COMPUTE_TOKENS", 2 * PAGE)
    monkeypatch.setattr(gpu, "SPLITS", 2)


def paged_inputs(heads, dtype, rows: tuple[int, int]):
    """q, k_pool, v_pool, table, lengths, shared, KV heads. What no sequence holds is noise."""
    H, K, D = heads
    rng = np.random.default_rng(H)
    S, R = len(LENGTHS), len(LENGTHS) * WIDTH + 1
    pages = rng.standard_normal((2, R, PAGE, K, D)).astype(np.float32)
    last = rng.standard_normal((2, S, K, D)).astype(np.float32)
    table = 1 + rng.permutation(S * WIDTH).reshape(S, WIDTH).astype(np.int32)
    at = table[np.arange(S), (LENGTHS - 1) // PAGE]

    def pool(pages, last):
        empty = jnp.zeros((rows[0], R, PAGE, rows[1]), dtype)
        written = attention.write(empty, pages, jnp.arange(R))
        return attention.write(written, last, at, (LENGTHS - 1) % PAGE)

    table[np.arange(WIDTH) * PAGE >= LENGTHS[:, None]] = 0
    q = rng.standard_normal((S, H, D)).astype(np.float32)
    return q, *map(jax.jit(pool), pages, last), table, LENGTHS, jnp.zeros(S, jnp.int32), K


def check_paged(heads, dtype, kernels: dict) -> None:
    """kernels: (paged, rows of its pool) -> tolerance."""
    H, K, D = heads
    *inputs, kv_heads = paged_inputs(heads, dtype, (K, D))
    want = jax.jit(xla.paged)(*inputs)
    for (paged, rows), tolerance in kernels.items():
        *inputs, kv_heads = paged_inputs(heads, dtype, rows)
        got = jax.jit(paged, static_argnums=6)(*inputs, kv_heads)
        assert got.shape == (len(LENGTHS), H, D) and got.dtype == jnp.float32
        np.testing.assert_allclose(got, want, atol=tolerance)


gpu_paged = partial(gpu.paged, interpret=True)


@quick
@pytest.mark.parametrize("heads", in_default_suite({"qwen2.5-0.5b", "qwen2.5-1.5b"}, MODELS))
def test_paged_kernels_equal_the_definition(heads, interpreted):
    """The GPU's multiplies in bfloat16: queries, weights and its output are rounded by 2^-9 of themselves. The TPU's
    rounds nothing but what the pool holds."""
    _, K, D = heads
    check_paged(
        heads, jnp.bfloat16, {(tpu.paged, tpu.pool_rows(K, D)): 1e-5, (gpu_paged, (K, D)): 2e-2}
    )


@quick
@pytest.mark.parametrize("heads", in_default_suite({"three heads of 64"}, SHARDS))
def test_rows_of_several_heads_equal_the_definition(heads, interpreted):
    check_paged(heads, jnp.bfloat16, {(tpu.paged, tpu.pool_rows(*heads[1:])): 1e-5})


@quick
def test_paged_kernels_with_a_float32_pool(interpreted):
    """The TPU's kernel rounds keys and values to bfloat16, whatever the pool holds."""
    check_paged((4, 2, 64), jnp.float32, {(tpu.paged, (1, 128)): 2e-2, (gpu_paged, (2, 64)): 1e-5})


def test_rows_of_the_tpu_pool_are_whole_lanes():
    assert [tpu.pool_rows(*x) for x in ((2, 64), (1, 64), (3, 64), (8, 128), (2, 32), (2, 80))] == [
        (1, 128), (1, 128), (2, 128), (8, 128), (1, 128), (2, 128)
    ]  # fmt: skip


def test_what_the_gpu_cannot_page_is_refused():
    with pytest.raises(ValueError, match=r"rollout.page_size=48.*model.attention=xla"):
        gpu.paged(
            jnp.zeros((1, 2, 64)),
            *jnp.zeros((2, 2, 4, 48, 64)),
            jnp.zeros((1, 1), jnp.int32),
            None,
            None,
            2,
        )


# -- the programs that use them -------------------------------------------------------------------------------------


def one_device_mesh():
    return make_mesh(jax.devices()[:1], {"slots": 1, "tensor": 1})


def test_a_backend_from_outside_is_one_entry_of_the_table(monkeypatch):
    mine = attention.Backend(xla.packed, xla.paged, xla.pool_rows, attention.write)
    monkeypatch.setitem(attention.BACKENDS, "mine", lambda: mine)
    assert attention.choose("mine", one_device_mesh()) is mine


@pytest.mark.parametrize(
    "name, message",
    [
        ("splash", "model.attention='splash' is not one of xla, tpu, gpu"),
        ("tpu", "model.attention=tpu does not run on a device of platform cpu"),
    ],
)
def test_a_backend_that_cannot_run_is_refused(name, message):
    with pytest.raises(UserError, match=message):
        attention.choose(name, one_device_mesh())


def test_the_mesh_chooses():
    mesh = make_mesh(jax.devices()[:1], {"slots": 1, "tensor": 1})
    assert (
        attention.choose("", mesh)
        == attention.choose("xla", mesh)
        == (xla.packed, xla.paged, xla.pool_rows, attention.write)
    )


@quick
@pytest.mark.parametrize("tensor", [pytest.param(1, marks=slow), 2])
def test_split_heads_equal_whole_ones(tensor):
    layout = LAYOUTS[2]
    mesh = train_mesh(1, 2, 2 * tensor, jax.devices()[: 4 * tensor])
    whole = both_ways(splash, *inputs_of(layout, (4, 2, 16), rows=2), layout)
    split = attention.split_over_mesh(
        splash, 2 * tensor, ("data", "fsdp"), mesh
    )  # the second: each KV head on two devices
    for a, b in zip(
        both_ways(split, *inputs_of(layout, (4, 2, 16), rows=2), layout), whole, strict=True
    ):
        np.testing.assert_allclose(a, b, atol=2e-5)


# -- compiled for hardware that is not there ------------------------------------------------------------------------

H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 } threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84978434048
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } device_description_str: "NVIDIA H100 80GB HBM3"
"""


@pytest.fixture
def tpus(monkeypatch):
    """Four v5e chips, for the compiler alone."""
    pytest.importorskip("libtpu", reason="libtpu, whose compiler it is, is not installed")
    for name, value in {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    }.items():
        monkeypatch.setenv(name, value)
    return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices


def abstract_packed(heads, layout: RowLayout, rows: int, of, bf16=jnp.bfloat16):
    """Arguments of `backward`, placed by `of`(heads named or None)."""
    H, K, D = heads
    kind = lambda n: jax.ShapeDtypeStruct((rows, layout.tokens, n, D), bf16, sharding=of("tensor"))
    return (
        kind(H),
        kind(K),
        kind(K),
        jax.ShapeDtypeStruct((rows, layout.tokens), jnp.int32, sharding=of(None)),
        kind(H),
    )


def backward(packed, layout: RowLayout):
    def run(q, k, v, segments, w):
        out, pullback = jax.vjp(lambda *qkv: packed(*qkv, segments, layout), q, k, v)
        return out, pullback(w)

    return jax.jit(run)


@pytest.mark.parametrize("model", ["qwen2.5-0.5b", pytest.param("qwen2.5-7b", marks=slow)])
def test_packed_compiles_for_tpu(model, tpus):
    layout = RowLayout(256, 4, 256)
    mesh = train_mesh(1, 2, 2, tpus)
    backend = attention.choose("", mesh)
    assert backend.packed is tpu.packed
    of = lambda heads: NamedSharding(
        mesh, P(("data", "fsdp"), None, heads) if heads else P(("data", "fsdp"))
    )
    arguments = abstract_packed(MODELS[model], layout, 4, of)
    text = (
        backward(attention.split_over_mesh(backend.packed, 2, ("data", "fsdp"), mesh), layout)
        .lower(*arguments)
        .compile()
        .as_text()
    )
    assert (
        text.count('custom_call_target="tpu_custom_call"') == 3
    )  # forward, and two of the backward pass
    assert "exponential" not in text  # no softmax but theirs
    assert not re.search("all-reduce|all-gather|all-to-all|collective", text)


@pytest.mark.parametrize(
    "tensor, heads",
    [
        (1, (14, 2, 64)),
        (2, (4, 4, 128)),
        pytest.param(2, (14, 2, 64), marks=slow),  # a head of 64 a device
        pytest.param(4, (4, 2, 128), marks=slow),  # fewer KV heads than devices
    ],
)
def test_decoding_compiles_for_tpu_without_a_copy_of_its_kv(tensor, heads, tpus):
    H, K, D = heads
    model = QwenConfig("qwen2", 256, 128, 256, 2, H, K, D, True, 10000.0, 1e-6)
    mesh = make_mesh(tpus, {"slots": 4 // tensor, "tensor": tensor})
    engine = Engine(
        model,
        RolloutConfig(num_slots=64, max_prompt_tokens=256, max_new_tokens=4096, decode_steps=8),
        mesh,
        (1,),
        "bfloat16",
    )
    params = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=where),
        abstract(model),
        param_shardings(model, mesh),
    )
    program, arguments = abstract_calls(engine, params, [])["generate"]
    compiled, state = program.lower(*arguments).compile(), arguments[1]
    text = compiled.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 1
    pool = np.prod(state.k_pool.sharding.shard_shape(state.k_pool.shape)) * 2
    assert state.k_pool.dtype == jnp.bfloat16
    assert compiled.memory_analysis().temp_size_in_bytes < 0.02 * 2 * pool


def test_attention_compiles_for_cuda(quick_compilation):
    pytest.importorskip(
        "jax_cuda12_plugin", reason="jax-cuda12-plugin, whose compiler it is, is not installed"
    )
    device = topologies.get_topology_desc(
        platform="cuda", target_config=H100, topology="1x1x1"
    ).devices[0]
    backend = attention.choose("", make_mesh([device], {"slots": 1, "tensor": 1}))
    assert backend.paged is gpu.paged
    place = SingleDeviceSharding(device)
    struct = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    pool = struct(jnp.bfloat16, 2, 100, 64, 64)
    arguments = (
        struct(jnp.bfloat16, 8, 14, 64),
        pool,
        pool,
        struct(jnp.int32, 8, 20),
        struct(jnp.int32, 8),
    )
    lowered = jax.jit(lambda *x: backend.paged(*x, None, 2)).lower(*arguments)
    assert "triton" in lowered.compile().as_text()
    try:
        arguments = abstract_packed(
            MODELS["qwen2.5-0.5b"], RowLayout(256, 4, 256), 2, lambda _: place
        )
        text = backward(backend.packed, RowLayout(256, 4, 256)).lower(*arguments).as_text()
    except RuntimeError as e:
        assert "cuDNN not found" in str(e)
        pytest.skip("Triton compiles; cuDNN is not installed")
    assert (
        len(re.findall(r"@__cudnn\$fmha\w*Softmax\(", text)) == 2
    )  # of the prefix, and of the slots
    assert len(re.findall(r"@__cudnn\$fmha\w*SoftmaxBackward\(", text)) == 2
    assert "exponential" not in text
