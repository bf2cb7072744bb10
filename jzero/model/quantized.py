"""Weights of linear layers in 8 bits: symmetric integers with one scale for each output channel.

    quantized = quantize(weight, num_inputs=1)           # of W [*inputs, *outputs], or a stack of W
    W = dequantize(quantized, jnp.bfloat16)              # scale * values

An output channel is one column of the matrix [inputs, outputs]. Its scale is max|W| / 127 over the
inputs, as in the vector-wise quantization of LLM.int8() (Dettmers et al. 2022, arXiv:2208.07339),
so that every weight is off by at most half a scale. No setting uses these functions yet.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8

LARGEST = 127  # -128 is not used: the range is symmetric


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedWeight:
    """Stands for scale * values. In the stack of all layers both arrays lead with an axis [L]."""

    values: Int8[Array, "..."]  # [*inputs, *outputs]
    scale: Float[Array, "..."]  # fp32; the shape of `values` with every axis of the inputs 1


def quantize(
    weight: Float[Array, "..."], num_inputs: int, is_stacked: bool = False
) -> QuantizedWeight:
    """Rounds a weight to the nearest multiples of its channels' scales.

    num_inputs: how many axes of the weight are inputs.
    is_stacked: whether an axis [L] of layers leads, each with scales of its own.
    A channel of zeros has the scale 0, and is exact.
    """
    first = int(is_stacked)
    weight = weight.astype(jnp.float32)
    inputs = tuple(range(first, first + num_inputs))
    scale = jnp.max(jnp.abs(weight), axis=inputs, keepdims=True) / LARGEST
    # The scale of subnormal numbers may be 0, or so coarse that a quotient exceeds 127.
    quotient = weight / jnp.where(scale > 0, scale, 1)
    values = jnp.clip(jnp.round(quotient), -LARGEST, LARGEST)
    return QuantizedWeight(values.astype(jnp.int8), scale)


def dequantize(weight: QuantizedWeight, dtype: DTypeLike) -> Float[Array, "..."]:
    """Returns scale * values, multiplied in fp32 and rounded to `dtype` once."""
    return (weight.scale * weight.values.astype(jnp.float32)).astype(dtype)
