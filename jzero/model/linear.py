"""The product of activations with a weight of a layer.

    out = linear(x, weight)       # [N, inputs] -> [N, outputs]

A weight is an array [*inputs, *outputs], a frozen `QuantizedWeight` of 8 bits, or an
`AdaptedWeight`: an array or `QuantizedWeight`, frozen, with a low-rank adapter (LoRA, Hu et al.
2021, arXiv:2106.09685, eq. 3). A `BankedWeight` has many adapters, and every row of x uses one of
them or none. Layers do not depend on the kind of weight. A new kind is one more case of `linear`.

A layer calls `linear` as `Arithmetic.product`: with `model.exact` that is `exact.tiled_product`,
which calls `linear` for one tile of rows at a time.

`products` multiplies by several weights of the same inputs. A decoder on an accelerator fuses these
weights (fused QKV) into one `JoinedWeight`, and multiplies once.

An 8-bit weight is never dequantized for a product: its numbers are exact in every computation type,
so the product is with the numbers, and the scale of each channel multiplies the channel's output.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from jzero.model.quantized import QuantizedWeight, dequantize
from jzero.numerics.products import (
    is_narrow,
    linear_product,
    product_in_fp32,
    product_over_rows,
    rounded_linear_product,
)

# Names of values that the backward pass can keep; `qwen.REMAT` maps each setting to its names.
LOW_RANK_PRODUCT = "low rank product"  # x A [N, R]: narrow, so keeping it is almost free
LINEAR_OUTPUT = "linear output"  # [N, outputs]
GROUPED_PRODUCT = "grouped product"  # [N * experts of a token, outputs]


FrozenWeight: TypeAlias = Array | QuantizedWeight


Leaf = TypeVar("Leaf")
"""A jax.Array, or what describes one: its PartitionSpec, an array of NumPy."""


@partial(jax.tree_util.register_dataclass, data_fields=["keys"], meta_fields=["rate"])
@dataclass(frozen=True)
class Dropout:
    """Dropout on the inputs of an adapter (PEFT's lora_dropout), in an update.

    The keys are inputs of the program, so the backward pass draws the same inputs again.
    """

    keys: Key[Array, "... B"]  # one for each row; in the stack of all layers [L, B]
    rate: float  # probability that an input is dropped

    def kept(self, x: Float[Array, "N inputs"]) -> Bool[Array, "N inputs"]:
        """Draws which inputs are kept, for tokens that are ordered by row."""
        num_rows = len(self.keys)

        def draw(key: jax.Array) -> jax.Array:
            return jax.random.bernoulli(key, 1 - self.rate, (len(x) // num_rows, x.shape[1]))

        return jax.vmap(draw)(self.keys).reshape(x.shape)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "a", "b", "dropout"],
    meta_fields=["scale"],
)
@dataclass(frozen=True)
class AdaptedWeight:
    """A frozen weight W with an adapter. Represents W + scale * A B, which is never computed.

    In the stack of all layers every array leads with an axis [L]. Expert weights have a second
    leading axis [X] in all arrays.
    """

    weight: Float[Array, "..."] | QuantizedWeight  # [*inputs, *outputs], or [inputs, outputs]
    a: Float[Array, "... R"]  # [*inputs, R]
    b: Float[Array, "R ..."]  # [R, *outputs]
    scale: float  # alpha / R
    dropout: Dropout | None = None  # set by `with_dropout`, in an update

    def merged(self, num_stacked: int) -> Float[Array, "L ..."]:
        """Returns W + scale * A B of the stack of all layers, in fp32 and in the shape of W.

        num_stacked: number of leading stack axes: 1, or 2 for experts. NumPy arrays are merged by
        NumPy. An 8-bit W is scale * values.
        """
        weight = self.weight
        if isinstance(weight, QuantizedWeight):
            weight = dequantize(weight, np.float32)
        stacked, rank = self.a.shape[:num_stacked], self.a.shape[-1]
        # Flatten inputs and outputs, so that A B is one batched matrix product over the stack.
        a = self.a.reshape(*stacked, -1, rank)
        b = self.b.reshape(*stacked, rank, -1)
        if isinstance(a, np.ndarray):
            change = np.matmul(a, b)
        else:  # by default a TPU would multiply in bf16
            change = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
        return weight.astype(np.float32) + self.scale * change.reshape(weight.shape)


class RowAdapters(NamedTuple, Generic[Leaf]):
    """The adapter of every row of x, or of every sequence of a program."""

    slot: Leaf  # i32[N] in the bank; -1: the base without an adapter
    scale: Leaf  # f32[N] alpha / R of this adapter


@partial(jax.tree_util.register_dataclass, data_fields=["a", "b"], meta_fields=["first"])
@dataclass(frozen=True)
class BankedFactors:
    """The factors of n adapters of one rank. Unused slots are zeros.

    The slots are next to the ranks, so that one product serves all adapters of a group.
    """

    a: Float[Array, "... n R"]  # [*inputs, n, R]
    b: Float[Array, "n R ..."]  # [n, R, *outputs]
    first: int  # the bank's number of the first of these slots


@partial(jax.tree_util.register_dataclass, data_fields=["weight", "groups", "rows"], meta_fields=[])
@dataclass(frozen=True)
class BankedWeight:
    """A frozen weight W with many adapters (`decoder.adapter_bank`). It has no gradient.

    In the stack of all layers every array leads with an axis [L].
    """

    weight: FrozenWeight  # [*inputs, *outputs]
    groups: tuple[BankedFactors, ...]  # one for every shape of adapters
    rows: RowAdapters | None = None  # set by `choose_adapters`


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "bias"],
    meta_fields=["sizes", "shards"],
)
@dataclass(frozen=True)
class JoinedWeight:
    """Several weights fused into one, with their biases: one product instead of several.

    In a tree of parameters it replaces the first weight, and the other weights and all biases are
    `PartOfJoined`. Where devices split the outputs, each device has its part of every weight: the
    columns are ordered by shard, and within a shard by weight. In the stack of all layers the
    arrays lead with an axis [L]. The leaves may also be other values, such as shardings.
    """

    weight: PyTree  # [inputs, outputs of all], an array or a QuantizedWeight
    bias: PyTree  # [outputs of all], or None
    sizes: tuple[int, ...]  # the outputs of each weight
    shards: int  # parts of the outputs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PartOfJoined:
    """Placeholder for a weight or a bias that is part of a `JoinedWeight`. It has no array."""


LinearWeight: TypeAlias = FrozenWeight | AdaptedWeight
# (x [N, inputs], weight) -> [N, outputs]: `linear`, or an `Arithmetic.product` that calls it.
Product: TypeAlias = Callable[..., jax.Array]


def linear(
    x: Float[Array, "N inputs"],
    weight: LinearWeight | BankedWeight | JoinedWeight | PartOfJoined,
) -> Float[Array, "N outputs"]:
    """Multiplies x by a weight [*inputs, *outputs]: plain, 8-bit, or with adapters."""
    if isinstance(weight, JoinedWeight | PartOfJoined):  # a user-defined layer
        raise TypeError(
            "linear() got a weight that the decoder has fused with others. A layer has to multiply "
            "by the weights of a group in its SIDE_BY_SIDE with products(), or needs another "
            "SIDE_BY_SIDE, such as ()"
        )
    inputs = x.shape[1]
    if isinstance(weight, AdaptedWeight):
        rank = weight.b.shape[0]
        scale, kept = weight.scale, None
        if weight.dropout is not None:
            # The factor 1 / (1 - rate) is in the scale, where it is not rounded to the type of x.
            scale, kept = scale / (1 - weight.dropout.rate), weight.dropout.kept(x)
        # All kinds of weights are multiplied as matrices, so heads and other axes are flattened.
        out = adapted_product(
            x,
            as_matrix(weight.weight, inputs),
            weight.a.reshape(inputs, rank),
            weight.b.reshape(rank, -1),
            scale,
            kept,
        )
        return checkpoint_name(out, LINEAR_OUTPUT)
    if isinstance(weight, BankedWeight):
        return banked_product(x, weight)
    if isinstance(weight, QuantizedWeight):
        return checkpoint_name(quantized_product(x, weight.as_matrix(inputs)), LINEAR_OUTPUT)
    # A plain weight. Narrow types need the product that accumulates in fp32.
    matrix = weight.reshape(inputs, -1)
    if is_narrow(x) and x.dtype == matrix.dtype:
        return checkpoint_name(rounded_linear_product("ni,io->no", x, matrix), LINEAR_OUTPUT)
    if is_narrow(x):
        out = linear_product("ni,io->no", x, matrix).astype(x.dtype)
        return checkpoint_name(out, LINEAR_OUTPUT)
    return jnp.einsum("ni,io->no", x, matrix)


def products(
    x: Float[Array, "N inputs"],
    weights: Sequence[LinearWeight | JoinedWeight | PartOfJoined],
    product: Product = linear,
) -> list[Float[Array, "N outputs"]]:
    """Multiplies x by several weights: in one product if they are joined, else separately."""
    first = weights[0]
    if isinstance(first, JoinedWeight):
        assert len(first.sizes) == len(weights)
        out = product(x, first.weight)
        if first.bias is not None:
            out = out + first.bias
        return split_outputs(out, first.sizes, first.shards)
    return [product(x, weight) for weight in weights]


def plus_bias(
    x: Float[Array, "N heads D"], bias: Float[Array, "heads D"] | PartOfJoined
) -> Float[Array, "N heads D"]:
    """Adds a bias to a result of `products`, unless the joined product has added it already."""
    return x if isinstance(bias, PartOfJoined) else x + bias


# -- joined weights --------------------------------------------------------------------------------


def join_outputs(arrays: Sequence[Array], shards: int) -> Array:
    """Concatenates arrays [*rest, outputs] in the column order of a `JoinedWeight`.

    shards must divide the outputs of each array.
    """
    # Concatenating within each shard keeps every device's columns of all weights on that device.
    # [*rest, outputs] -> [*rest, shards, outputs / shards]
    by_shard = [array.reshape(*array.shape[:-1], shards, -1) for array in arrays]
    joined = jnp.concatenate(by_shard, axis=-1)
    return joined.reshape(*joined.shape[:-2], -1)


def split_outputs(array: Array, sizes: Sequence[int], shards: int) -> list[Array]:
    """Undoes `join_outputs`. sizes: the outputs of each array."""
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


# Residuals for the backward pass of a weight with an adapter: x, W, A, B, x A and the kept inputs.
Residuals: TypeAlias = tuple[
    jax.Array, FrozenWeight, jax.Array, jax.Array, jax.Array, jax.Array | None
]


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def adapted_product(
    x: Float[Array, "N inputs"],
    weight: FrozenWeight,  # [inputs, outputs]
    a: Float[Array, "inputs R"],
    b: Float[Array, "R outputs"],
    scale: float,
    kept: Bool[Array, "N inputs"] | None = None,
) -> Float[Array, "N outputs"]:
    """Computes x W + scale * (x A) B, where A sees 0 for the inputs of x that are not `kept`.

    The factors have the type of x, products accumulate in fp32, and the sum is rounded once. If x W
    were rounded to bf16 first, a change of less than half a unit in its last place would be lost.
    """
    out, _ = adapted_forward(x, weight, a, b, scale, kept)
    return out


def adapted_forward(
    x: Float[Array, "N inputs"],
    weight: FrozenWeight,  # [inputs, outputs]
    a: Float[Array, "inputs R"],
    b: Float[Array, "R outputs"],
    scale: float,
    kept: Bool[Array, "N inputs"] | None,
) -> tuple[Float[Array, "N outputs"], Residuals]:
    low_rank = product_in_fp32("ni,ir->nr", with_kept(x, kept), a).astype(x.dtype)
    low_rank = checkpoint_name(low_rank, LOW_RANK_PRODUCT)
    change = scale * product_in_fp32("nr,ro->no", low_rank, b)
    out = (times_weight(x, weight) + change).astype(x.dtype)
    return out, (x, weight, a, b, low_rank, kept)


def adapted_backward(
    scale: float, residuals: Residuals, gradient: Float[Array, "N outputs"]
) -> tuple[jax.Array | None, ...]:
    """Returns the gradients of x, W, A and B, and None for the kept inputs."""
    # Every product here has factors of the type of x: JAX's derivative would multiply fp32 by bf16,
    # which an accelerator does in fp32.
    x, weight, a, b, low_rank, kept = residuals
    dtype = x.dtype
    # dL/d(x A) is narrow and is used twice: for the gradients of x and of A.
    to_low_rank = (scale * product_in_fp32("no,ro->nr", gradient, b)).astype(dtype)
    through_adapter = with_kept(product_in_fp32("nr,ir->ni", to_low_rank, a), kept)
    through_weight = times_transposed_weight(gradient, weight)
    # No caller uses the gradient of a frozen W, so XLA removes the computation. An int8 W has no
    # gradient: JAX treats None as zeros.
    weight_gradient = None
    if not isinstance(weight, QuantizedWeight):
        weight_gradient = product_over_rows(x, gradient).astype(weight.dtype)
    return (
        (through_weight + through_adapter).astype(dtype),
        weight_gradient,
        product_over_rows(with_kept(x, kept), to_low_rank).astype(a.dtype),
        (scale * product_over_rows(low_rank, gradient)).astype(b.dtype),
        None,
    )


adapted_product.defvjp(adapted_forward, adapted_backward)


def with_kept(
    x: Float[Array, "N inputs"], kept: Bool[Array, "N inputs"] | None
) -> Float[Array, "N inputs"]:
    """Returns x with zeros where it is not kept. None: everything is kept."""
    return x if kept is None else jnp.where(kept, x, 0)


def with_dropout(layers: Mapping[str, PyTree], dropout: Dropout) -> dict[str, PyTree]:
    """Returns the parameters of all layers, with a separate dropout in every adapted weight.

    dropout: of the rows of a microbatch, with keys [B].
    """
    fold_in = jax.vmap(jax.random.fold_in, (0, None))
    dropped = dict(layers)
    # The place among all parameters of a layer does not depend on the targets of the adapter.
    for place, name in enumerate(sorted(layers)):
        weight = layers[name]
        if isinstance(weight, AdaptedWeight):
            keys = fold_in(dropout.keys, place)
            by_layer = jax.vmap(fold_in, (None, 0))(keys, jnp.arange(len(weight.a)))
            dropped[name] = replace(weight, dropout=replace(dropout, keys=by_layer))
    return dropped


# -- a weight with many adapters -------------------------------------------------------------------


def choose_adapters(layers: Mapping[str, PyTree], rows: RowAdapters) -> dict[str, PyTree]:
    """Returns the parameters of all layers, with the adapters of the rows in banked weights."""

    def with_rows(leaf: PyTree) -> PyTree:
        if not isinstance(leaf, BankedWeight):
            return leaf
        # The loop over the layers slices every array, so the rows have an axis of layers as well.
        num_layers = len(leaf.groups[0].a)
        by_layer = (jnp.broadcast_to(column, (num_layers, *column.shape)) for column in rows)
        return replace(leaf, rows=RowAdapters(*by_layer))

    return {name: with_rows(leaf) for name, leaf in layers.items()}


def banked_product(x: Float[Array, "N inputs"], weight: BankedWeight) -> Float[Array, "N outputs"]:
    """Computes x W + scale * (x A) B with the A, B and scale of every row.

    All adapters of a group are one product, in which a row keeps the ranks of its own adapter. The
    other ranks are zeros in the second product. This is more arithmetic than a gather of the
    factors, but it reads every factor once and not once for each row.
    """
    base, rows = times_weight(x, as_matrix(weight.weight, x.shape[1])), rows_of(weight)
    return plus_changes(base, x, rows, weight.groups).astype(x.dtype)


def plus_changes(
    base: Float[Array, "N outputs"],
    x: Float[Array, "N inputs"],
    rows: RowAdapters,
    groups: Sequence[BankedFactors],
) -> Float[Array, "N outputs"]:
    """Adds scale * (x A) B to x W in fp32, with the A, B and scale of every row."""
    for group in groups:
        num_slots, rank = group.b.shape[:2]
        low_rank = product_in_fp32("ni,ir->nr", x, group.a.reshape(x.shape[1], -1))
        is_own = rows.slot[:, None] == group.first + jnp.arange(num_slots)
        kept = jnp.where(is_own[..., None], low_rank.reshape(-1, num_slots, rank), 0)
        change = product_in_fp32(
            "nr,ro->no",
            kept.reshape(len(x), -1).astype(x.dtype),
            group.b.reshape(num_slots * rank, -1),
        )
        base = base + rows.scale[:, None] * change
    return base


class SlotFactors(NamedTuple):
    """The factors in the slots of a group, as matrices."""

    slots: Int[Array, " n"]
    a: Float[Array, "n inputs R"]
    b: Float[Array, "n R outputs"]


def slots_of(groups: Sequence[BankedFactors], inputs: int) -> list[SlotFactors]:
    """Returns the factors of every group of a bank."""
    slots = []
    for group in groups:
        num_slots, rank = group.b.shape[:2]
        a = jnp.swapaxes(group.a.reshape(inputs, num_slots, rank), 0, 1)
        b = group.b.reshape(num_slots, rank, -1)
        slots.append(SlotFactors(group.first + jnp.arange(num_slots), a, b))
    return slots


def separate_banked_product(
    x: Float[Array, "N inputs"],
    weight: FrozenWeight,
    rows: RowAdapters,
    groups: Sequence[SlotFactors],
) -> Float[Array, "N outputs"]:
    """Computes `banked_product` with the same products and sums as `adapted_product`.

    A row has the same bits as with its adapter only, if the ranks of the bank are not padded.

    weight: [inputs, outputs]. groups: as `slots_of` returns them.
    """
    return plus_separate_changes(times_weight(x, weight), x, rows, groups, x.dtype)


def plus_separate_changes(
    base: Float[Array, "N outputs"],
    x: Float[Array, "N inputs"],
    rows: RowAdapters,
    groups: Sequence[SlotFactors],
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "N outputs"]:
    """Computes `plus_changes` one adapter after the other, and rounds to `dtype`.

    groups: as `slots_of` returns them.
    """

    def use_slot(
        out: Float[Array, "N outputs"], factors: SlotFactors
    ) -> tuple[Float[Array, "N outputs"], None]:
        slot, a, b = factors
        low_rank = product_in_fp32("ni,ir->nr", x, a).astype(x.dtype)
        change = rows.scale[:, None] * product_in_fp32("nr,ro->no", low_rank, b)
        is_own = rows.slot[:, None] == slot
        return jnp.where(is_own, (base + change).astype(dtype), out), None

    out = base.astype(dtype)
    for group in groups:
        out, _ = jax.lax.scan(use_slot, out, group)
    return out


def rows_of(weight: BankedWeight) -> RowAdapters:
    """Returns the adapters of the rows of a product."""
    assert weight.rows is not None, "the program has not chosen the adapters of its rows"
    return weight.rows


# -- an 8-bit weight without an adapter -----------------------------------------------------------


@jax.custom_vjp
def quantized_product(
    x: Float[Array, "N inputs"], weight: QuantizedWeight
) -> Float[Array, "N outputs"]:
    """Computes x W, rounded once, for W = scale * values [inputs, outputs].

    JAX's derivative would store the integers in the type of the computation for the backward pass,
    of all layers with model.remat=none.
    """
    out, _ = quantized_forward(x, weight)
    return out


def quantized_forward(
    x: Float[Array, "N inputs"], weight: QuantizedWeight
) -> tuple[Float[Array, "N outputs"], QuantizedWeight]:
    return times_weight(x, weight).astype(x.dtype), weight


def quantized_backward(
    weight: QuantizedWeight, gradient: Float[Array, "N outputs"]
) -> tuple[jax.Array, None]:
    """Returns the gradient of x. A frozen W has none: JAX treats None as zeros."""
    return times_transposed_weight(gradient, weight).astype(gradient.dtype), None


quantized_product.defvjp(quantized_forward, quantized_backward)


# -- products --------------------------------------------------------------------------------------


def times_weight(x: Float[Array, "N inputs"], weight: FrozenWeight) -> Float[Array, "N outputs"]:
    """Computes x W in fp32, for W [inputs, outputs]."""
    if isinstance(weight, QuantizedWeight):
        values = weight.values.astype(x.dtype)  # exact: bf16 has all int8 and fp8 numbers
        return product_in_fp32("ni,io->no", x, values) * weight.scale
    return product_in_fp32("ni,io->no", x, weight)


def times_transposed_weight(
    gradient: Float[Array, "N outputs"], weight: FrozenWeight
) -> Float[Array, "N inputs"]:
    """Computes g W^T in fp32, for W [inputs, outputs]."""
    if isinstance(weight, QuantizedWeight):
        # The scale of a channel multiplies the channel's gradient, so the product is with the
        # integers.
        scaled = (gradient * weight.scale).astype(gradient.dtype)
        return product_in_fp32("no,io->ni", scaled, weight.values.astype(gradient.dtype))
    return product_in_fp32("no,io->ni", gradient, weight)
