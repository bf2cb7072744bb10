"""A model whose linear layers are in 8 bits computes what that of the dequantized weights does.

The models have random weights, with an adapter and without.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_qwen
from test_adapters import CONFIGS, SETTINGS, hidden_states, loss, trained_adapter

from jzero.model import adapters, huggingface, qwen
from jzero.model.linear import AdaptedWeight, linear
from jzero.model.quantized import QuantizedWeight, dequantize, is_quantized, quantize

pytestmark = pytest.mark.usefixtures("quick_compilation")

every_config = pytest.mark.parametrize("name", CONFIGS)


def int8_params(config: qwen.QwenConfig) -> qwen.Params:
    """Returns a random model whose linear layers are in 8 bits."""

    def convert(weight: jax.Array, target: adapters.Target) -> QuantizedWeight:
        quantized = quantize(np.asarray(weight), len(target.inputs), len(target.stacked))
        return jax.tree.map(jnp.asarray, quantized)

    return adapters.map_linear(config, test_qwen.random_params(config), convert)


def dequantized(params: qwen.Params) -> qwen.Params:
    def convert(leaf: jax.Array | QuantizedWeight) -> jax.Array:
        return dequantize(leaf, jnp.float32) if is_quantized(leaf) else leaf

    return jax.tree.map(convert, params, is_leaf=is_quantized)


# -- the forward pass ------------------------------------------------------------------------------


@every_config
def test_logits_are_those_of_the_dequantized_weights(name: str) -> None:
    config = CONFIGS[name]
    params, adapter = int8_params(config), trained_adapter(config)
    assert {leaf for leaf, weight in params["layers"].items() if is_quantized(weight)} == {
        *adapters.linear_layers(config)
    }

    of_base = test_qwen.logits_of(config, params)
    joined = adapters.join(params, adapter, SETTINGS.scale)
    with_adapter = test_qwen.logits_of(config, joined)

    restored = dequantized(params)
    assert test_qwen.relative_error(of_base, test_qwen.logits_of(config, restored)) < 1e-5
    merged = adapters.merge(config, restored, adapter, SETTINGS.scale)
    assert test_qwen.relative_error(with_adapter, test_qwen.logits_of(config, merged)) < 1e-5
    assert test_qwen.relative_error(with_adapter, of_base) > 1e-2


@every_config
def test_the_error_of_8_bits_is_small(name: str) -> None:
    """A weight is off by at most 1/254 of its channel's largest: about 0.6 % of the rms."""
    config = CONFIGS[name]
    exact = test_qwen.logits_of(config, test_qwen.random_params(config))

    error = test_qwen.relative_error(test_qwen.logits_of(config, int8_params(config)), exact)

    rounded = test_qwen.logits_of(config, test_qwen.random_params(config), jnp.bfloat16)
    print(
        f"{name}: logits are off by {error:.2%} in 8 bits, and by "
        f"{test_qwen.relative_error(rounded, exact):.2%} if all is computed in bfloat16"
    )
    assert 1e-4 < error < 0.02


def test_an_untrained_adapter_changes_no_bit() -> None:
    config = CONFIGS["qwen3"]
    base = int8_params(config)
    adapter = adapters.init(config, SETTINGS, jax.random.key(1))

    found = hidden_states(config, adapters.join(base, adapter, SETTINGS.scale), "bfloat16")

    np.testing.assert_array_equal(found, hidden_states(config, base, "bfloat16"))


def test_a_cast_leaves_integers_and_scales_as_they_are() -> None:
    config = CONFIGS["qwen2"]
    joined = adapters.join(int8_params(config), trained_adapter(config), SETTINGS.scale)

    found = qwen.cast(joined, jnp.bfloat16)

    assert {leaf.dtype.name for leaf in jax.tree.leaves(found)} == {"bfloat16", "int8", "float32"}
    for name, weight in found["layers"].items():
        if isinstance(weight, AdaptedWeight):
            assert weight.weight is joined["layers"][name].weight
            assert weight.a.dtype == jnp.bfloat16
        else:
            assert weight.dtype == jnp.bfloat16


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("remat", ["none", "full"])
def test_gradients_of_an_adapter_are_those_on_the_dequantized_base(remat: str) -> None:
    """Some linear layers have no adapter: the gradient goes through them."""
    config = CONFIGS["qwen2"]
    base = int8_params(config)
    adapter = {"layers": dict(trained_adapter(config)["layers"])}
    for name in ("k", "o", "up"):
        del adapter["layers"][name]

    def adapted_loss(adapter: qwen.Params, base: qwen.Params) -> jax.Array:
        return loss(config, adapters.join(base, adapter, SETTINGS.scale), remat)

    found = jax.grad(adapted_loss)(adapter, base)

    expected = jax.grad(adapted_loss)(adapter, dequantized(base))
    jax.tree.map(assert_near, found, expected)


def assert_near(found: jax.Array, expected: jax.Array) -> None:
    assert test_qwen.relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("has_adapter", [True, False])
def test_the_backward_pass_keeps_the_integers_and_restores_no_weight(
    remat: str, has_adapter: bool
) -> None:
    rows, inputs, outputs, rank = 5, 8, 16, 3
    quantized = jax.tree.map(jnp.asarray, quantize(np.ones((inputs, outputs), np.float32), 1))

    def layer(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        weight = AdaptedWeight(quantized, a, b, 2.0) if has_adapter else quantized
        return jax.nn.silu(linear(jax.nn.silu(x), weight))

    x, a, b = (
        jnp.ones(shape, jnp.bfloat16) for shape in [(rows, inputs), (inputs, rank), (rank, outputs)]
    )
    _, backward = jax.vjp(qwen.REMAT[remat](layer), x, a, b)

    kept = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(backward)]
    assert ((inputs, outputs), jnp.int8) in kept
    assert ((inputs, outputs), jnp.bfloat16) not in kept
    assert not any(dtype == jnp.float32 and shape[0] == rows for shape, dtype in kept)


def test_no_program_holds_all_layers_dequantized() -> None:
    """Forward and backward pass of a model that keeps everything for the backward pass."""
    config = CONFIGS["qwen3"]
    base, adapter = int8_params(config), trained_adapter(config)

    def adapted_loss(adapter: qwen.Params, base: qwen.Params) -> jax.Array:
        return loss(config, adapters.join(base, adapter, SETTINGS.scale))

    text = jax.jit(jax.grad(adapted_loss)).lower(adapter, base).compile().as_text()

    stack = ",".join(map(str, base["layers"]["gate"].values.shape))
    assert f"s8[{stack}]" in text
    assert f"f32[{stack}]" not in text


# -- merging and files -----------------------------------------------------------------------------


def test_a_file_holds_the_dequantized_weights_or_the_original_ones(tmp_path) -> None:
    config = CONFIGS["qwen2"]
    base, adapter = int8_params(config), trained_adapter(config)
    original = test_qwen.random_params(config)
    joined = adapters.join(base, adapter, SETTINGS.scale)
    names = huggingface.flatten(original)

    def read_original(name: str) -> np.ndarray:
        return np.asarray(names[name])

    options = {"dtype": "float32", "hf_config_extra": {}}
    huggingface.save(tmp_path / "dequantized", config, joined, **options)
    huggingface.save(tmp_path / "original", config, joined, **options, read_original=read_original)

    for directory, weights in [("dequantized", dequantized(base)), ("original", original)]:
        expected = adapters.merge(config, weights, adapter, SETTINGS.scale)
        found = huggingface.load(tmp_path / directory, config)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), found, expected)
