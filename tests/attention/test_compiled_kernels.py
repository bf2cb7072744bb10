"""The kernels compiled for hardware that this machine does not have."""

import re
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jzero import attention
from jzero.attention import gpu, tpu
from jzero.attention.backend import Packed
from jzero.config import RolloutConfig
from jzero.decoder.abstract_calls import abstract_calls
from jzero.decoder.engine import Engine
from jzero.model import qwen
from jzero.model.architecture import ATTENTION, SLIDING
from jzero.numerics.eight_bits import FORMATS
from jzero.sharding.mesh import make_mesh, train_mesh
from jzero.sharding.publish import abstract_decoder_weights
from jzero.sharding.side_by_side import AS_TRAINED, WeightLayout
from jzero.types import RowLayout

Heads = tuple[int, int, int]  # (query heads, KV heads, head dim)

QWEN_05B: Heads = (14, 2, 64)
QWEN_7B: Heads = (28, 4, 128)
GEMMA_1B: Heads = (4, 1, 256)
LAYOUT = RowLayout(256, 4, 256)

H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84978434048
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def described_tpus(
    monkeypatch: pytest.MonkeyPatch, kind: str, topology: str
) -> Sequence[jax.Device]:
    """Returns devices of a topology that are described to the compiler alone."""
    pytest.importorskip("libtpu", reason="libtpu, whose compiler this is, is not installed")
    variables = {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": kind,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


@pytest.fixture
def tpus(monkeypatch: pytest.MonkeyPatch) -> Sequence[jax.Device]:
    """Returns four chips of v5e."""
    return described_tpus(monkeypatch, "v5litepod-8", "v5e:2x2")


@pytest.fixture
def tpu7x(monkeypatch: pytest.MonkeyPatch) -> Sequence[jax.Device]:
    """Returns the eight devices of four chips of TPU7x."""
    return described_tpus(monkeypatch, "tpu7x-8", "tpu7x:2x2x1")


@pytest.fixture
def h100() -> jax.Device:
    """Returns an H100 that is described to the compiler alone."""
    pytest.importorskip(
        "jax_cuda12_plugin", reason="jax-cuda12-plugin, whose compiler this is, is not installed"
    )
    described = {"target_config": H100, "topology": "1x1x1"}
    return topologies.get_topology_desc(platform="cuda", **described).devices[0]


def lower_with_gradients(
    packed: Packed, heads: Heads, rows: int, by_head: Sharding, by_row: Sharding
) -> jax.stages.Lowered:
    """Lowers packed attention, forward and backward, in bfloat16 for abstract rows of LAYOUT.

    by_head, by_row: where q, k and v lie, and where the segments lie.
    """
    H, K, D = heads
    tokens = LAYOUT.tokens
    q = jax.ShapeDtypeStruct((rows, tokens, H, D), jnp.bfloat16, sharding=by_head)
    kv = jax.ShapeDtypeStruct((rows, tokens, K, D), jnp.bfloat16, sharding=by_head)
    segments = jax.ShapeDtypeStruct((rows, tokens), jnp.int32, sharding=by_row)

    @jax.jit
    def run(
        q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, cotangent: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        def output(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return packed(q, k, v, segments, LAYOUT)

        out, pullback = jax.vjp(output, q, k, v)
        return out, pullback(cotangent)

    return run.lower(q, kv, kv, segments, q)


@pytest.mark.parametrize(
    "heads",
    [
        pytest.param(QWEN_05B, id="qwen2.5-0.5b"),
        pytest.param(QWEN_7B, id="qwen2.5-7b"),
    ],
)
def test_packed_compiles_for_tpu(heads: Heads, tpus: Sequence[jax.Device]) -> None:
    mesh = train_mesh(1, 2, 2, tpus)
    row_axes = ("data", "fsdp")
    backend = attention.choose("", mesh)
    packed = attention.split_over_mesh(backend.packed, 2, row_axes, mesh)

    lowered = lower_with_gradients(
        packed,
        heads,
        rows=4,
        by_head=NamedSharding(mesh, P(row_axes, None, "tensor")),
        by_row=NamedSharding(mesh, P(row_axes)),
    )
    program = lowered.compile().as_text()

    assert backend.packed is tpu.packed
    # The forward pass is one call, and the backward pass two.
    assert program.count('custom_call_target="tpu_custom_call"') == 3
    assert "exponential" not in program  # no softmax but that of the kernels
    assert not re.search("all-reduce|all-gather|all-to-all|collective", program)


def test_windows_compile_for_tpu(tpus: Sequence[jax.Device]) -> None:
    """Both kinds of layer are kernels, one of which runs."""
    mesh = train_mesh(1, 1, 1, tpus[:1])
    backend = attention.choose("", mesh, window=512)

    def packed(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segments: jax.Array,
        layout: RowLayout,
        window: attention.Window | None = None,
    ) -> jax.Array:
        size = 512 + segments.sum()  # not known when the kernel is compiled
        return backend.packed(q, k, v, segments, layout, attention.Window(size, segments))

    place = SingleDeviceSharding(tpus[0])
    lowered = lower_with_gradients(packed, GEMMA_1B, rows=4, by_head=place, by_row=place)
    program = lowered.compile().as_text()

    assert program.count('custom_call_target="tpu_custom_call"') == 6
    assert "exponential" not in program  # no softmax but that of the kernels


@pytest.mark.parametrize(
    ("tensor", "heads", "kernels", "kv_dtype"),
    [
        pytest.param(1, (14, 2, 64), "", "bfloat16", id="1 device"),
        pytest.param(1, (14, 2, 64), "tpu_fused", "bfloat16", id="1 device, fused"),
        pytest.param(1, (14, 2, 64), "tpu_fused", "int8", id="1 device, fused, 8 bits"),
        pytest.param(2, (28, 4, 128), "tpu_fused", "bfloat16", id="2 devices, fused"),
        pytest.param(2, (28, 4, 128), "tpu_fused", "int8", id="2 devices, fused, 8 bits"),
        pytest.param(2, (4, 4, 128), "", "bfloat16", id="2 devices"),
        pytest.param(2, (14, 2, 64), "", "bfloat16", id="a head of 64 a device"),
        pytest.param(4, (4, 2, 128), "", "bfloat16", id="fewer KV heads than devices"),
    ],
)
def test_decoding_compiles_for_tpu_without_a_copy_of_its_kv(
    tensor: int, heads: Heads, kernels: str, kv_dtype: str, tpus: Sequence[jax.Device]
) -> None:
    compiled, temporary_share = compile_decoding(
        dense_model(heads), tensor, kernels, kv_dtype, tpus
    )

    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 1
    assert temporary_share < 0.1


def test_decoding_in_fp8_compiles_for_tpu7x_without_a_copy_of_weights_or_kv(
    tpu7x: Sequence[jax.Device],
) -> None:
    """Weights become bfloat16 inside of the product, and pages inside of the kernel."""
    model = replace(dense_model(QWEN_05B), hidden_size=1024, intermediate_size=4096)

    compiled, temporary_share = compile_decoding(model, 1, "tpu_fused", "fp8", tpu7x[:4], "fp8")

    text = compiled.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 1
    assert "f8e4m3fn[1024,8192]" in text.replace("[1,1024,8192]", "[1024,8192]")
    assert temporary_share < 0.11
    # Two layers of gate and up in bfloat16 would take 32 MiB, and the KV cache has 13.
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 2**20


def test_decoding_with_windows_compiles_for_tpu_without_a_copy_of_its_kv(
    tpus: Sequence[jax.Device],
) -> None:
    """Layers with a window gather its pages, the others call the kernel."""
    model = replace(
        dense_model(GEMMA_1B),
        model_type="gemma3_text",
        layer_types=(SLIDING, ATTENTION),
        sliding_window=512,
        local_rope_theta=1e4,
    )

    compiled, temporary_share = compile_decoding(model, 1, "", "bfloat16", tpus)

    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 1
    assert temporary_share < 0.5  # the windows of one layer, 576 of 4,352 tokens, in fp32


def dense_model(heads: Heads) -> qwen.QwenConfig:
    """Returns a model of two layers."""
    num_heads, num_kv_heads, head_dim = heads
    return qwen.QwenConfig(
        model_type="qwen2",
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=True,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
    )


def compile_decoding(
    model: qwen.QwenConfig,
    tensor: int,
    kernels: str,
    kv_dtype: str,
    tpus: Sequence[jax.Device],
    weights: str = "native",
) -> tuple[jax.stages.Compiled, float]:
    """Returns the program of decoding, and its temporary bytes in bytes of its KV cache."""
    settings = RolloutConfig(
        num_slots=64,
        max_prompt_tokens=256,
        max_new_tokens=4096,
        decode_steps=8,
        kv_dtype=kv_dtype,
        page_size=tpu.LANES if kv_dtype in FORMATS else 64,
    )
    mesh = make_mesh(tpus, {"slots": 4 // tensor, "tensor": tensor})
    engine = Engine(model, settings, mesh, (1,), "bfloat16", kernels)
    layout = AS_TRAINED if weights == "native" else WeightLayout(joins=True)
    params = abstract_decoder_weights(model, mesh, "bfloat16", weights, layout)

    program, arguments = abstract_calls(engine, params, [])["generate"]
    compiled = program.lower(*arguments).compile()

    _, state, *_ = arguments
    arrays = jax.tree.leaves(state.k_pool)
    assert {array.dtype.name for array in arrays} <= {
        kv_dtype.replace("fp8", "float8_e4m3fn"),
        "float32",
    }
    bytes_of_pool = sum(
        array.dtype.itemsize * np.prod(array.sharding.shard_shape(array.shape)) for array in arrays
    )
    return compiled, compiled.memory_analysis().temp_size_in_bytes / bytes_of_pool


@pytest.mark.usefixtures("quick_compilation")
def test_paged_compiles_for_cuda(h100: jax.Device) -> None:
    backend = attention.choose("", make_mesh([h100], {"slots": 1, "tensor": 1}))

    def on_device(dtype: type, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(h100))

    @jax.jit
    def run(
        q: jax.Array, k_pool: jax.Array, v_pool: jax.Array, table: jax.Array, lengths: jax.Array
    ) -> jax.Array:
        shared = jnp.zeros(8, jnp.int32)
        return backend.paged(q, k_pool, v_pool, table, lengths, shared, 2)

    pool = on_device(jnp.bfloat16, 2, 100, 64, 64)
    lowered = run.lower(
        on_device(jnp.bfloat16, 8, 14, 64),
        pool,
        pool,
        on_device(jnp.int32, 8, 20),
        on_device(jnp.int32, 8),
    )

    assert backend.paged is gpu.paged
    assert "triton" in lowered.compile().as_text()


@pytest.mark.usefixtures("quick_compilation")
def test_packed_lowers_to_cudnn_for_cuda(h100: jax.Device) -> None:
    backend = attention.choose("", make_mesh([h100], {"slots": 1, "tensor": 1}))
    place = SingleDeviceSharding(h100)

    try:
        lowered = lower_with_gradients(
            backend.packed, QWEN_05B, rows=2, by_head=place, by_row=place
        )
    except RuntimeError as error:
        assert "cuDNN not found" in str(error)
        pytest.skip("cuDNN is not installed")
    program = lowered.as_text()

    # One call is for the prefix and one for the slots.
    assert len(re.findall(r"@__cudnn\$fmha\w*Softmax\(", program)) == 2
    assert len(re.findall(r"@__cudnn\$fmha\w*SoftmaxBackward\(", program)) == 2
    assert "exponential" not in program
