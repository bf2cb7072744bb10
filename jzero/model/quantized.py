"""8-bit weights of linear layers: 8-bit numbers with one scale for each output channel.

    quantized = quantize(weight, num_inputs=1)           # W [*inputs, *outputs], on the host
    W = dequantize(quantized, jnp.bfloat16)              # scale * values

An output channel is one column of the matrix [inputs, outputs]. With int8 its scale is
max|W| / 127 over the inputs, as in the vector-wise quantization of LLM.int8() (Dettmers et al.
2022, arXiv:2208.07339), so the error of every weight is at most half a scale. With fp8 (a decoder's
weights only) the scale is max|W| / 448, and the error is at most 1/16 of the weight, or 1/1024 of
the scale if that is more. `linear.py` multiplies by such weights without dequantizing them.
"""

from dataclasses import dataclass
from typing import Any, TypeGuard

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jzero.numerics.eight_bits import INT8, Format, round_to_8_bits


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedWeight:
    """Represents scale * values. In the stack of all layers both arrays lead with an axis [L].

    Expert weights have a second leading axis [X] in both arrays. The leaves may also be other
    values, such as shardings.
    """

    values: Any  # i8 or f8[*inputs, *outputs]
    scale: Any  # f32; the shape of `values`, with 1 for every input axis

    def as_matrix(self, inputs: int) -> "QuantizedWeight":
        """Returns the weight of one layer as values [inputs, outputs] and scale [1, outputs]."""
        return QuantizedWeight(self.values.reshape(inputs, -1), self.scale.reshape(1, -1))


def is_quantized(leaf: object) -> TypeGuard[QuantizedWeight]:
    """Returns whether a node of a tree of parameters is an 8-bit weight."""
    return isinstance(leaf, QuantizedWeight)


def quantize(weight: np.ndarray, num_inputs: int, num_stacked: int = 0) -> QuantizedWeight:
    """Rounds a weight on the host to int8: the nearest multiples of its channels' scales.

    num_inputs: number of input axes of the weight.
    num_stacked: number of leading axes, of layers or experts; each layer or expert has separate
        scales.
    A channel of zeros has the scale 0, and is exact.

    NumPy computes this instead of JAX, because a run that resumes has to get the same integers on
    every platform: accelerators do not round divisions as IEEE 754 requires.
    """
    stacked = weight.shape[:num_stacked]
    outputs = weight.shape[num_stacked + num_inputs :]
    values = np.empty(weight.shape, np.int8)
    scale = np.empty((*stacked, *[1] * num_inputs, *outputs), np.float32)
    for place in np.ndindex(stacked):  # one at a time, to save host memory
        quantized = quantize_matrix(weight[place], num_inputs)
        values[place] = quantized.values
        scale[place] = quantized.scale
    return QuantizedWeight(values, scale)


def quantize_matrix(weight: np.ndarray, num_inputs: int) -> QuantizedWeight:
    """Returns the int8 weight of one layer or expert, from [*inputs, *outputs]."""
    weight = np.asarray(weight, np.float32)
    inputs = tuple(range(num_inputs))
    scale = np.max(np.abs(weight), axis=inputs, keepdims=True) / np.float32(INT8.largest)
    # The scale of subnormal numbers may be 0, or so coarse that a quotient exceeds 127. Hence the
    # replacement of zero scales, and the clip.
    quotient = weight / np.where(scale > 0, scale, np.float32(1))
    values = np.clip(np.round(quotient), -INT8.largest, INT8.largest)
    return QuantizedWeight(values.astype(np.int8), scale)


def quantize_on_device(
    weight: Float[Array, "..."],
    num_inputs: int,
    num_stacked: int = 0,
    number: Format = INT8,
) -> QuantizedWeight:
    """Quantizes a weight inside a jitted program, if it needs not be reproducible.

    int8 values are those of `quantize`, except where a quotient lies halfway between two integers:
    there they may differ by one.
    """
    inputs = tuple(range(num_stacked, num_stacked + num_inputs))
    return QuantizedWeight(*round_to_8_bits(weight, inputs, number))


def dequantize(weight: QuantizedWeight, dtype: DTypeLike) -> Float[Array, "..."]:
    """Returns scale * values, multiplied in fp32 and rounded to `dtype` once.

    NumPy arrays are multiplied by NumPy.
    """
    return (weight.scale * weight.values.astype(np.float32)).astype(dtype)
