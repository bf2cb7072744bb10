"""The product of activations with a weight: the one place where a layer multiplies by a weight.

    out = linear(x, layer.q.get_value())       # [N, inputs] -> [N, outputs]

A weight is an array [*inputs, *outputs], a frozen `QuantizedWeight` in 8 bits, or an
`AdaptedWeight`: one of these two, frozen, with a low-rank adapter beside it (LoRA, Hu et al. 2021,
arXiv:2106.09685, eq. 3). With `model.exact` it is a `TiledWeight` around one of them. Layers do not
know which of them they have. A new kind of weight is one more case of `linear`.

`products` multiplies by several weights of the same inputs. A decoder on an accelerator holds these
side by side, as one `JoinedWeight`, and multiplies once.

A weight in 8 bits is never restored: its integers are exact in every type of computation, so that
the product is with the integers, and the scale of a channel multiplies the channel's output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PyTree

from jzero.model.exact import in_tiles
from jzero.model.quantized import QuantizedWeight, dequantize
from jzero.products import is_narrow, linear_product, product_in_fp32, product_over_rows

# Names of values that the backward pass keeps; `qwen.REMAT` says which setting keeps which.
LOW_RANK_PRODUCT = "low rank product"  # x A [N, R]: narrow, so that keeping it is almost free
LINEAR_OUTPUT = "linear output"  # [N, outputs]
GROUPED_PRODUCT = "grouped product"  # [N * experts of a token, outputs]


@partial(jax.tree_util.register_dataclass, data_fields=["weight", "a", "b"], meta_fields=["scale"])
@dataclass(frozen=True)
class AdaptedWeight:
    """A frozen weight W with an adapter: stands for W + scale * A B, which is never computed.

    In the stack of all layers every array leads with an axis [L]. Weights of experts have one more
    axis behind it, [X], in all arrays.
    """

    weight: Float[Array, "..."] | QuantizedWeight  # [*inputs, *outputs], or [inputs, outputs]
    a: Float[Array, "... R"]  # [*inputs, R]
    b: Float[Array, "R ..."]  # [R, *outputs]
    scale: float  # alpha / R

    def merged(self, num_stacked: int) -> Float[Array, "L ..."]:
        """Returns W + scale * A B of the stack of all layers, in fp32 and in the shape of W.

        num_stacked: how many axes lead in every array: 1, or 2 of experts.
        NumPy arrays are merged by NumPy. A W in 8 bits is scale * values.
        """
        weight = self.weight
        if isinstance(weight, QuantizedWeight):
            weight = dequantize(weight, np.float32)
        stacked, rank = self.a.shape[:num_stacked], self.a.shape[-1]
        a = self.a.reshape(*stacked, -1, rank)
        b = self.b.reshape(*stacked, rank, -1)
        if isinstance(a, np.ndarray):
            change = np.matmul(a, b)
        else:  # by default a TPU would multiply in bf16
            change = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
        return weight.astype(np.float32) + self.scale * change.reshape(weight.shape)


@partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["shards"])
@dataclass(frozen=True)
class TiledWeight:
    """A weight whose products are computed for a tile of rows at a time, all of one shape.

    Only `model.exact` makes them (`exact.py`). The weight is not in 8 bits.
    """

    weight: Array | AdaptedWeight
    shards: int  # devices that rows are split over


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "bias"],
    meta_fields=["sizes", "shards"],
)
@dataclass(frozen=True)
class JoinedWeight:
    """Several weights side by side, with their biases: one product in place of several.

    In a tree of parameters it is in the place of the first weight, and the other weights and all
    biases are `PartOfJoined`. Where devices split the outputs, each has its part of every weight:
    the columns lie by shard, and in a shard by weight. In the stack of all layers the arrays lead
    with an axis [L]. They may be anything else, such as shardings.
    """

    weight: PyTree  # [inputs, outputs of all], an array or a QuantizedWeight
    bias: PyTree  # [outputs of all], or None
    sizes: tuple[int, ...]  # the outputs of each weight
    shards: int  # parts of the outputs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PartOfJoined:
    """Stands for a weight or a bias that is part of a `JoinedWeight`, and has no array itself."""


FrozenWeight: TypeAlias = Array | QuantizedWeight
LinearWeight: TypeAlias = FrozenWeight | AdaptedWeight | TiledWeight


def linear(
    x: Float[Array, "N inputs"], weight: LinearWeight | JoinedWeight | PartOfJoined
) -> Float[Array, "N outputs"]:
    """Multiplies x by a weight [*inputs, *outputs], in 8 bits or not, with an adapter or not."""
    if isinstance(weight, JoinedWeight | PartOfJoined):  # of a layer that somebody else wrote
        raise TypeError(
            "linear() got a weight that the decoder holds beside others. A layer multiplies by the "
            "weights of its SIDE_BY_SIDE with products(); a layer with other products has another "
            "SIDE_BY_SIDE, or ()"
        )
    if isinstance(weight, TiledWeight):
        out = in_tiles(linear, weight.shards, x, weight.weight)
        return checkpoint_name(out, LINEAR_OUTPUT)
    inputs = x.shape[1]
    if isinstance(weight, AdaptedWeight):
        rank = weight.b.shape[0]
        out = adapted_product(
            x,
            as_matrix(weight.weight, inputs),
            weight.a.reshape(inputs, rank),
            weight.b.reshape(rank, -1),
            weight.scale,
        )
        return checkpoint_name(out, LINEAR_OUTPUT)
    if isinstance(weight, QuantizedWeight):
        return checkpoint_name(quantized_product(x, weight.as_matrix(inputs)), LINEAR_OUTPUT)
    matrix = weight.reshape(inputs, -1)
    if is_narrow(x):
        out = linear_product("ni,io->no", x, matrix).astype(x.dtype)
        return checkpoint_name(out, LINEAR_OUTPUT)
    return jnp.einsum("ni,io->no", x, matrix)


def products(
    x: Float[Array, "N inputs"], weights: Sequence[LinearWeight | JoinedWeight | PartOfJoined]
) -> list[Float[Array, "N outputs"]]:
    """Multiplies x by several weights: by one after the other, unless they are joined."""
    first = weights[0]
    if isinstance(first, JoinedWeight):
        assert len(first.sizes) == len(weights)
        out = linear(x, first.weight)
        if first.bias is not None:
            out = out + first.bias
        return split_outputs(out, first.sizes, first.shards)
    return [linear(x, weight) for weight in weights]


def plus_bias(
    x: Float[Array, "N heads D"], bias: Float[Array, "heads D"] | PartOfJoined
) -> Float[Array, "N heads D"]:
    """Adds a bias to a result of `products`, unless it is in there already."""
    return x if isinstance(bias, PartOfJoined) else x + bias


# -- weights side by side --------------------------------------------------------------------------


def join_outputs(arrays: Sequence[Array], shards: int) -> Array:
    """Puts arrays [*rest, outputs] side by side, as the columns of a `JoinedWeight` lie.

    shards must divide the outputs of each array.
    """
    by_shard = [array.reshape(*array.shape[:-1], shards, -1) for array in arrays]
    joined = jnp.concatenate(by_shard, axis=-1)
    return joined.reshape(*joined.shape[:-2], -1)


def split_outputs(array: Array, sizes: Sequence[int], shards: int) -> list[Array]:
    """Returns what `join_outputs` has put side by side. sizes: the outputs of each array."""
    by_shard = array.reshape(*array.shape[:-1], shards, -1)
    ends = list(accumulate(size // shards for size in sizes))
    parts = jnp.split(by_shard, ends[:-1], axis=-1)
    return [part.reshape(*part.shape[:-2], -1) for part in parts]


# -- the shape of a weight -------------------------------------------------------------------------


def as_matrix(weight: FrozenWeight, inputs: int) -> FrozenWeight:
    """Returns a weight [*inputs, *outputs] as [inputs, outputs]."""
    if isinstance(weight, QuantizedWeight):
        return weight.as_matrix(inputs)
    return weight.reshape(inputs, -1)


# -- a weight with an adapter ----------------------------------------------------------------------


# What the backward pass of a weight with an adapter reads: x, W, A, B and x A.
Kept: TypeAlias = tuple[jax.Array, FrozenWeight, jax.Array, jax.Array, jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def adapted_product(
    x: Float[Array, "N inputs"],
    weight: FrozenWeight,  # [inputs, outputs]
    a: Float[Array, "inputs R"],
    b: Float[Array, "R outputs"],
    scale: float,
) -> Float[Array, "N outputs"]:
    """Computes x W + scale * (x A) B.

    Factors are in the type of x. Products accumulate in fp32, and the sum is rounded once: had x W
    been rounded to bf16 before, a change of less than half a unit of its last bit would be lost.
    """
    out, _ = adapted_forward(x, weight, a, b, scale)
    return out


def adapted_forward(
    x: Float[Array, "N inputs"],
    weight: FrozenWeight,  # [inputs, outputs]
    a: Float[Array, "inputs R"],
    b: Float[Array, "R outputs"],
    scale: float,
) -> tuple[Float[Array, "N outputs"], Kept]:
    """Returns the product, and what the backward pass reads."""
    low_rank = checkpoint_name(product_in_fp32("ni,ir->nr", x, a).astype(x.dtype), LOW_RANK_PRODUCT)
    change = scale * product_in_fp32("nr,ro->no", low_rank, b)
    out = (times_weight(x, weight) + change).astype(x.dtype)
    return out, (x, weight, a, b, low_rank)


def adapted_backward(
    scale: float, kept: Kept, gradient: Float[Array, "N outputs"]
) -> tuple[jax.Array | None, ...]:
    """Returns the gradients of x, W, A and B.

    JAX's own derivative would multiply fp32 by bf16, which an accelerator does in fp32. Nobody asks
    for the gradient of a frozen W, and XLA removes what nobody asks for. A W in 8 bits has none:
    for JAX, None is a gradient of zeros.
    """
    x, weight, a, b, low_rank = kept
    dtype = x.dtype
    to_low_rank = (scale * product_in_fp32("no,ro->nr", gradient, b)).astype(dtype)
    through_adapter = product_in_fp32("nr,ir->ni", to_low_rank, a)
    through_weight = times_transposed_weight(gradient, weight)
    of_weight = None
    if not isinstance(weight, QuantizedWeight):
        of_weight = product_over_rows(x, gradient).astype(weight.dtype)
    return (
        (through_weight + through_adapter).astype(dtype),
        of_weight,
        product_over_rows(x, to_low_rank).astype(a.dtype),
        (scale * product_over_rows(low_rank, gradient)).astype(b.dtype),
    )


adapted_product.defvjp(adapted_forward, adapted_backward)


# -- a weight in 8 bits without an adapter ---------------------------------------------------------


@jax.custom_vjp
def quantized_product(
    x: Float[Array, "N inputs"], weight: QuantizedWeight
) -> Float[Array, "N outputs"]:
    """Computes x W, rounded once, for W = scale * values [inputs, outputs].

    JAX's own derivative would keep the integers in the type of the computation for the backward
    pass: all layers of them with model.remat=none.
    """
    out, _ = quantized_forward(x, weight)
    return out


def quantized_forward(
    x: Float[Array, "N inputs"], weight: QuantizedWeight
) -> tuple[Float[Array, "N outputs"], QuantizedWeight]:
    """Returns the product, and what the backward pass reads."""
    return times_weight(x, weight).astype(x.dtype), weight


def quantized_backward(
    weight: QuantizedWeight, gradient: Float[Array, "N outputs"]
) -> tuple[jax.Array, None]:
    """Returns the gradient of x. That of W is None, which is zeros for JAX: W is frozen."""
    return times_transposed_weight(gradient, weight).astype(gradient.dtype), None


quantized_product.defvjp(quantized_forward, quantized_backward)


# -- products --------------------------------------------------------------------------------------


def times_weight(x: Float[Array, "N inputs"], weight: FrozenWeight) -> Float[Array, "N outputs"]:
    """Computes x W in fp32, for W [inputs, outputs]."""
    if isinstance(weight, QuantizedWeight):
        values = weight.values.astype(x.dtype)  # exact: bf16 has all integers up to 256
        return product_in_fp32("ni,io->no", x, values) * weight.scale
    return product_in_fp32("ni,io->no", x, weight)


def times_transposed_weight(
    gradient: Float[Array, "N outputs"], weight: FrozenWeight
) -> Float[Array, "N inputs"]:
    """Computes g W^T in fp32, for W [inputs, outputs].

    The scale of a channel multiplies the channel's gradient, which is rounded to its type again.
    """
    if isinstance(weight, QuantizedWeight):
        scaled = (gradient * weight.scale).astype(gradient.dtype)
        return product_in_fp32("no,io->ni", scaled, weight.values.astype(gradient.dtype))
    return product_in_fp32("no,io->ni", gradient, weight)
