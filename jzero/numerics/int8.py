"""Rounding to int8 inside jitted programs: symmetric integers, one scale per group of values."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

LARGEST = 127  # -128 is not used: the range is symmetric


def round_to_int8(
    x: Float[Array, "..."],
    axes: tuple[int, ...],
) -> tuple[Shaped[Array, "..."], Float[Array, "..."]]:
    """Returns int8 integers in the shape of x, and fp32 scales; their product is x up to rounding.

    axes: the axes that share a scale, max|x| / 127 in fp32. The scales have length 1 on these axes.
    The scale of zeros is 0.
    """
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=axes, keepdims=True) / LARGEST
    quotient = x / jnp.where(scales > 0, scales, 1)
    integers = jnp.clip(jnp.round(quotient), -LARGEST, LARGEST)
    return integers.astype(jnp.int8), scales
