"""Weights in 8 bits against a loop over columns, and the bound of their error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jzero.model.quantized import QuantizedWeight, dequantize, quantize

pytestmark = pytest.mark.usefixtures("quick_compilation")

# The shape of a weight, and how many of its axes are inputs.
SHAPES = [((6, 5), 1), ((4, 2, 3), 1), ((2, 3, 4), 2)]


def random_weight(shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    rng = np.random.default_rng(0)
    channels = 10.0 ** rng.integers(-4, 3, shape[-1])  # of very different sizes
    return (channels * rng.standard_normal(shape)).astype(jnp.dtype(dtype))


def columns(array: np.ndarray, num_outputs: int) -> np.ndarray:
    return array.reshape(-1, num_outputs)


@pytest.mark.parametrize(("shape", "num_inputs"), SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_column_is_rounded_by_its_own_scale(
    shape: tuple[int, ...], num_inputs: int, dtype: str
) -> None:
    weight = random_weight(shape, dtype)
    num_outputs = int(np.prod(shape[num_inputs:]))

    found = quantize(weight, num_inputs)

    assert found.values.dtype == jnp.int8
    assert found.scale.dtype == jnp.float32
    assert found.values.shape == shape
    assert found.scale.shape == (1,) * num_inputs + shape[num_inputs:]
    values, scales = columns(found.values, num_outputs), columns(found.scale, num_outputs)[0]
    expected = columns(weight.astype(np.float32), num_outputs)
    for column in range(num_outputs):
        largest = max(abs(number) for number in expected[:, column])
        scale = np.float32(largest) / np.float32(127)
        assert scales[column] == pytest.approx(scale, rel=1e-6)
        assert max(abs(values[:, column].astype(int))) == 127
        for number, value in zip(expected[:, column], values[:, column], strict=True):
            assert abs(number - float(scale) * value) <= 0.5 * scale * (1 + 1e-5)


def test_multiples_of_the_scale_are_exact() -> None:
    numbers = np.arange(-127, 128, dtype=np.float32)
    weight = np.stack([numbers, 0.5 * numbers, 0 * numbers, -numbers], axis=1)

    found = quantize(weight, num_inputs=1)

    np.testing.assert_array_equal(found.scale, [[1, 0.5, 0, 1]])
    np.testing.assert_array_equal(dequantize(found, jnp.float32), weight)


@pytest.mark.parametrize("smallest", [0.0, 1e-45, 1e-38])
def test_tiny_channels_stay_finite_and_small(smallest: float) -> None:
    weight = np.full((3, 2), smallest, np.float32)

    found = dequantize(quantize(weight, num_inputs=1), jnp.float32)

    assert np.isfinite(np.asarray(found)).all()
    np.testing.assert_allclose(found, weight, atol=1e-38)


def test_layers_of_a_stack_have_scales_of_their_own() -> None:
    layers = [random_weight((4, 2, 3)), 7 * random_weight((4, 2, 3))]

    stacked = quantize(np.stack(layers), num_inputs=1, num_stacked=1)

    for number, layer in enumerate(layers):
        alone = quantize(layer, num_inputs=1)
        of_stack = jax.tree.map(lambda leaf, number=number: leaf[number], stacked)
        assert isinstance(of_stack, QuantizedWeight)
        np.testing.assert_array_equal(of_stack.values, alone.values)
        np.testing.assert_array_equal(of_stack.scale, alone.scale)


def test_jax_restores_what_numpy_does() -> None:
    weight = quantize(random_weight((64, 32)), num_inputs=1)

    found = dequantize(jax.tree.map(jnp.asarray, weight), jnp.float32)

    np.testing.assert_array_equal(found, dequantize(weight, np.float32))


def test_what_is_dequantized_is_rounded_once() -> None:
    weight = quantize(random_weight((64, 32)), num_inputs=1)

    found = dequantize(weight, jnp.bfloat16)

    exact = weight.scale * weight.values.astype(np.float32)
    np.testing.assert_array_equal(found, exact.astype(jnp.bfloat16))
