"""Rounding to 8-bit numbers against a search of the nearest one, in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jzero.config.schema import EIGHT_BITS
from jzero.numerics.eight_bits import FORMATS, round_to_8_bits

pytestmark = pytest.mark.usefixtures("quick_compilation")

EVERY_FLOAT8 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
NUMBERS = {
    "int8": np.arange(-127.0, 128.0),
    "fp8": np.unique(EVERY_FLOAT8[np.isfinite(EVERY_FLOAT8)]),  # from -448 to 448
}


def loop(x: np.ndarray, number: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers and the scales of the rows of x, one number at a time."""
    values, scales = np.zeros(x.shape), np.zeros((len(x), 1))
    for row, numbers in enumerate(x):
        scale = np.float32(max(abs(numbers))) / np.float32(max(NUMBERS[number]))
        scales[row] = scale
        for column, value in enumerate(numbers):
            quotient = np.float64(value) / np.float64(scale) if scale else 0.0
            values[row, column] = NUMBERS[number][np.abs(NUMBERS[number] - quotient).argmin()]
    return values, scales


@pytest.mark.parametrize("number", EIGHT_BITS)
def test_values_are_rounded_to_the_nearest_number_times_a_scale(number: str) -> None:
    rng = np.random.default_rng(0)
    sizes = 10.0 ** rng.integers(-6, 6, (8, 1))
    x = (sizes * rng.standard_normal((8, 300))).astype(np.float32)
    x[3] = 0

    values, scales = jax.jit(lambda x: round_to_8_bits(x, (1,), FORMATS[number]))(x)

    expected_values, expected_scales = loop(x, number)
    assert values.dtype == FORMATS[number].dtype
    np.testing.assert_allclose(scales, expected_scales, rtol=2e-7)
    np.testing.assert_array_equal(np.asarray(values, np.float64), expected_values)
    assert np.asarray(scales)[3] == 0
    without = np.delete(np.abs(expected_values), 3, axis=0)
    assert (without.max(axis=1) == NUMBERS[number].max()).all()


@pytest.mark.parametrize("number", EIGHT_BITS)
def test_multiples_of_a_scale_are_exact(number: str) -> None:
    x = 0.25 * NUMBERS[number].astype(np.float32)[None]

    values, scales = round_to_8_bits(jnp.asarray(x), (1,), FORMATS[number])

    assert scales.tolist() == [[0.25]]
    np.testing.assert_array_equal(np.asarray(values, np.float32) * scales, x)


@pytest.mark.parametrize("number", EIGHT_BITS)
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 3e38])
def test_extreme_values_stay_finite(number: str, value: float) -> None:
    values, scales = round_to_8_bits(jnp.full((1, 3), value), (1,), FORMATS[number])

    product = np.asarray(values, np.float32) * np.asarray(scales)
    np.testing.assert_allclose(product, value, rtol=1e-6, atol=1e-38)


def test_every_format_is_a_choice_of_the_settings() -> None:
    assert tuple(FORMATS) == EIGHT_BITS
