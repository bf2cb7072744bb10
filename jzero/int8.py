"""Rounding to 8 bits inside of jitted programs: symmetric integers with one scale for each part."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

LARGEST = 127  # -128 is not used: the range is symmetric


def round_to_int8(
    x: Float[Array, "..."], axes: tuple[int, ...]
) -> tuple[Shaped[Array, "..."], Float[Array, "..."]]:
    """Returns integers i8 in the shape of x, and f32 scales, whose product is x but for rounding.

    axes: what shares a scale, max|x| / 127 in fp32. The scales have 1 there. That of zeros is 0.
    """
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=axes, keepdims=True) / LARGEST
    quotient = x / jnp.where(scales > 0, scales, 1)
    integers = jnp.clip(jnp.round(quotient), -LARGEST, LARGEST)
    return integers.astype(jnp.int8), scales
