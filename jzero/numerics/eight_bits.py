"""Rounding to 8 bits inside jitted programs: 8-bit numbers, and one scale per group of values.

    values, scales = round_to_8_bits(x, axes=(0,), FORMATS["fp8"])       # values * scales is near x

int8 has integers, which are evenly spaced. fp8 is float8_e4m3fn: 4 bits of exponent and 3 of
mantissa, so its error is relative to each value (Micikevicius et al. 2022, arXiv:2209.05433).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped


class Format(NamedTuple):
    """A type of 8-bit numbers."""

    dtype: DTypeLike
    largest: float  # that the largest value of a group is rounded to


INT8 = Format(jnp.int8, 127)  # -128 is not used: the range is symmetric
FP8 = Format(jnp.float8_e4m3fn, 448)  # there are no infinities: larger numbers would become NaN
# By the values of rollout.weights, rollout.kv_dtype and model.base.
FORMATS = {"int8": INT8, "fp8": FP8}


def round_to_8_bits(
    x: Float[Array, "..."],
    axes: tuple[int, ...],
    number: Format,
) -> tuple[Shaped[Array, "..."], Float[Array, "..."]]:
    """Returns 8-bit numbers in the shape of x, and fp32 scales; their product is x up to rounding.

    axes: the axes that share a scale, max|x| / number.largest in fp32. The scales have length 1 on
    these axes. The scale of zeros is 0.
    """
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=axes, keepdims=True) / number.largest
    return round_quotient(x / jnp.where(scales > 0, scales, 1), number), scales


def round_quotient(quotient: Float[Array, "..."], number: Format) -> Shaped[Array, "..."]:
    """Rounds values that were divided by their scales to 8-bit numbers, to nearest and even."""
    # The scale of subnormal numbers may be 0, or so coarse that a quotient exceeds the range.
    quotient = jnp.clip(quotient, -number.largest, number.largest)
    if number == INT8:
        quotient = jnp.round(quotient)
    return quotient.astype(number.dtype)
