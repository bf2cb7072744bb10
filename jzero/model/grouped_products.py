"""Grouped matrix products: row r of group g times W[g].

    out = PRODUCTS["blocks"](rows, weights, sizes, jnp.bfloat16)   # [M, I], [X, I, O], i32[X]

The rows are sorted by group, and `sizes` is the number of rows of every group. Rows after the last
group belong to no group: their output is 0. On a TPU this product is `lax.ragged_dot`. On other
devices, XLA computes `lax.ragged_dot` as a product with all weights, X times the work. So a GPU has
the kernels of `grouped_triton.py`, and on a CPU `block_product` multiplies blocks of rows, each by
the weight of its group. `tests/model/test_grouped_products.py` compares all three with a loop over
groups.

    out = grouped_product("blocks", rows, weight, sizes)

also takes the other kinds of weights of `linear.py`: 8-bit, and with an adapter for every group.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num, PyTree

from jzero.model.grouped_triton import triton_product
from jzero.model.linear import (
    GROUPED_PRODUCT,
    LOW_RANK_PRODUCT,
    AdaptedWeight,
    FrozenWeight,
)
from jzero.model.quantized import QuantizedWeight
from jzero.numerics.products import product_in_fp32, product_over_rows

# (rows [M, inputs], weights [X, inputs, outputs], sizes i32[X], type of the result)
GroupedProduct = Callable[[jax.Array, jax.Array, jax.Array, DTypeLike], jax.Array]
GroupedWeight = FrozenWeight | AdaptedWeight  # stacked over the groups

FEWEST_ROWS, MOST_ROWS = 8, 128  # limits of a block


def ragged_product(
    rows: Float[Array, "M inputs"],
    weights: Num[Array, "X inputs outputs"],
    sizes: Int[Array, " X"],
    dtype: DTypeLike,
) -> Float[Array, "M outputs"]:
    """Multiplies every row by the weight of its group with `lax.ragged_dot`.

    8-bit weights are converted to the type of the rows, which represents all their values exactly.
    """
    # Platforms differ in the output of rows without a group. Masking inputs and outputs sets both
    # the output and the gradient of these rows to 0.
    is_grouped = (jnp.arange(len(rows)) < sizes.sum())[:, None]
    rows = jnp.where(is_grouped, rows, 0)
    weights = weights.astype(rows.dtype)
    out = lax.ragged_dot(rows, weights, sizes, preferred_element_type=jnp.float32)
    return jnp.where(is_grouped, out.astype(dtype), 0)


# -- blocks of rows --------------------------------------------------------------------------------


class Block(NamedTuple):
    """Consecutive rows, of which some or all belong to one group."""

    start: jax.Array  # i32[], the number of the first row
    in_group: jax.Array  # bool[rows, 1]: the rows that belong to the group


class Blocks(NamedTuple):
    """How the rows of one group are cut into blocks."""

    rows: int  # rows of a block
    num_rows: int  # rows of all groups
    first: jax.Array  # i32[], the group's first row
    end: jax.Array  # i32[], one past its last row

    @property
    def number(self) -> jax.Array:
        return -(-(self.end - self.first) // self.rows)

    def block(self, number: jax.Array) -> Block:
        """Returns one block.

        The last block of a group may end with rows of the next group. A block at the end of all
        rows is moved back to fit, so it may start with rows that precede its range.
        """
        first = self.first + number * self.rows
        # [first, end) are the rows of the group; [start, start + rows) the rows that are computed.
        end = jnp.minimum(first + self.rows, self.end)
        start = jnp.minimum(first, self.num_rows - self.rows)
        places = start + jnp.arange(self.rows)
        in_group = (places >= first) & (places < end)
        return Block(start, in_group[:, None])

    def take(self, block: Block, rows: Float[Array, "M width"]) -> Float[Array, "rows width"]:
        return lax.dynamic_slice_in_dim(rows, block.start, self.rows)

    def put(
        self,
        block: Block,
        rows: Float[Array, "M width"],
        update: Float[Array, "rows width"],
    ) -> Float[Array, "M width"]:
        """Returns `rows` with the block's rows of the group replaced."""
        update = jnp.where(block.in_group, update.astype(rows.dtype), self.take(block, rows))
        return lax.dynamic_update_slice_in_dim(rows, update, block.start, 0)


def first_rows_of(sizes: Int[Array, " X"], group: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the first row of a group, and the row after its last one."""
    end = jnp.cumsum(sizes)[group]
    return end - sizes[group], end


def blocks_of_group(num_rows: int, sizes: Int[Array, " X"], group: jax.Array) -> Blocks:
    """Returns blocks of a power of two rows, small enough that partly filled blocks cost little."""
    # About four blocks for a group of average size, within the limits of a block.
    quarter_of_share = max(1, num_rows // (4 * len(sizes)))
    rows = min(max(1 << (quarter_of_share.bit_length() - 1), FEWEST_ROWS), MOST_ROWS, num_rows)
    return Blocks(rows, num_rows, *first_rows_of(sizes, group))


def for_groups_with_rows(
    sizes: Int[Array, " X"],
    compute: Callable[[jax.Array, PyTree], PyTree],
    start: PyTree,
) -> PyTree:
    """Loops over the groups that have rows: state = compute(group, state)."""
    # A loop over all groups would read all weights even when a few tokens are decoded.
    with_rows_first = jnp.argsort(sizes == 0, stable=True)

    def compute_next(number: jax.Array, state: PyTree) -> PyTree:
        return compute(with_rows_first[number], state)

    return lax.fori_loop(0, jnp.sum(sizes > 0), compute_next, start)


def block_product(
    rows: Float[Array, "M inputs"],
    weights: Num[Array, "X inputs outputs"],
    sizes: Int[Array, " X"],
    dtype: DTypeLike,
) -> Float[Array, "M outputs"]:
    """Multiplies every row by the weight of its group, a block of rows at a time."""
    return differentiable_blocks(dtype, rows, weights, sizes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def differentiable_blocks(
    dtype: DTypeLike,
    rows: Float[Array, "M inputs"],
    weights: Num[Array, "X inputs outputs"],
    sizes: Int[Array, " X"],
) -> Float[Array, "M outputs"]:
    """Computes `block_product`.

    The number of blocks is data, so rows without a group cost nothing. JAX cannot differentiate
    such a loop, and its derivative of a loop over all blocks would add an array as large as all
    weights for every block.
    """

    def multiply_group(group: jax.Array, out: jax.Array) -> jax.Array:
        blocks = blocks_of_group(len(rows), sizes, group)
        weight = weights[group].astype(rows.dtype)

        def multiply(number: jax.Array, out: jax.Array) -> jax.Array:
            block = blocks.block(number)
            product = product_in_fp32("ni,io->no", blocks.take(block, rows), weight)
            return blocks.put(block, out, product)

        return lax.fori_loop(0, blocks.number, multiply, out)

    empty = jnp.zeros((len(rows), weights.shape[2]), dtype)
    return for_groups_with_rows(sizes, multiply_group, empty)


Kept = tuple[jax.Array, jax.Array, jax.Array]  # the arguments of `block_product`


def block_product_forward(
    dtype: DTypeLike,
    rows: Float[Array, "M inputs"],
    weights: Num[Array, "X inputs outputs"],
    sizes: Int[Array, " X"],
) -> tuple[Float[Array, "M outputs"], Kept]:
    return block_product(rows, weights, sizes, dtype), (rows, weights, sizes)


def block_product_backward(
    dtype: DTypeLike,
    kept: Kept,
    gradient: Float[Array, "M outputs"],
) -> tuple[Float[Array, "M inputs"], Float[Array, "X inputs outputs"] | None, None]:
    """Returns the gradients of rows and weights. Sizes and int8 weights have no gradient."""
    rows, weights, sizes = kept
    gradient = gradient.astype(rows.dtype)
    has_gradient = not jnp.issubdtype(weights.dtype, jnp.integer)

    def add_group(
        group: jax.Array,
        so_far: tuple[jax.Array, jax.Array | None],
    ) -> tuple[jax.Array, jax.Array | None]:
        row_gradient, weight_gradients = so_far
        blocks = blocks_of_group(len(rows), sizes, group)
        weight = weights[group].astype(rows.dtype)

        def add_block(
            number: jax.Array,
            so_far: tuple[jax.Array, jax.Array | None],
        ) -> tuple[jax.Array, jax.Array | None]:
            row_gradient, weight_gradient = so_far
            block = blocks.block(number)
            part, part_gradient = blocks.take(block, rows), blocks.take(block, gradient)
            product = product_in_fp32("no,io->ni", part_gradient, weight)
            row_gradient = blocks.put(block, row_gradient, product)
            if weight_gradient is not None:
                # A block may contain rows of other groups, which must not add to this group's
                # gradient.
                group_gradient = jnp.where(block.in_group, part_gradient, 0)
                weight_gradient = weight_gradient + product_over_rows(part, group_gradient)
            return row_gradient, weight_gradient

        # The gradient of one group's weight accumulates in fp32 and is rounded once.
        zero_gradient = jnp.zeros(weight.shape, jnp.float32) if has_gradient else None
        row_gradient, weight_gradient = lax.fori_loop(
            0, blocks.number, add_block, (row_gradient, zero_gradient)
        )
        if weight_gradients is not None and weight_gradient is not None:
            rounded = weight_gradient.astype(weight_gradients.dtype)
            weight_gradients = weight_gradients.at[group].set(rounded)
        return row_gradient, weight_gradients

    start = jnp.zeros_like(rows), jnp.zeros_like(weights) if has_gradient else None
    row_gradient, weight_gradients = for_groups_with_rows(sizes, add_group, start)
    return row_gradient, weight_gradients, None


differentiable_blocks.defvjp(block_product_forward, block_product_backward)


# -- the table -------------------------------------------------------------------------------------


PRODUCTS: Mapping[str, GroupedProduct] = {
    "ragged": ragged_product,
    "blocks": block_product,
    "triton": triton_product,
}

# The product of each platform; all others use "blocks", because XLA:CPU takes about ten times as
# long for `lax.ragged_dot` (lab/speed.md).
PLATFORMS: Mapping[str, str] = {"tpu": "ragged", "gpu": "triton"}


def product_of_platform(platform: str) -> str:
    """Returns the key of PRODUCTS for devices of this platform."""
    return PLATFORMS.get(platform, "blocks")


def grouped_product(
    kind: str,
    rows: Float[Array, "M inputs"],
    weight: GroupedWeight,
    sizes: Int[Array, " X"],
) -> Float[Array, "M outputs"]:
    """Multiplies every row by the weight of its group. `kind` is a key of PRODUCTS.

    As in `linear`, sums are in fp32 and rounded once.
    """
    multiply = PRODUCTS[kind]
    if isinstance(weight, AdaptedWeight):
        # The same steps as in `linear.adapted_forward`, with the factors of each row's group.
        low_rank = checkpoint_name(multiply(rows, weight.a, sizes, rows.dtype), LOW_RANK_PRODUCT)
        change = weight.scale * multiply(low_rank, weight.b, sizes, jnp.float32)
        out = (times_frozen(multiply, rows, weight.weight, sizes) + change).astype(rows.dtype)
    elif isinstance(weight, QuantizedWeight):
        out = times_frozen(multiply, rows, weight, sizes).astype(rows.dtype)
    else:
        out = multiply(rows, weight, sizes, rows.dtype)
    return checkpoint_name(out, GROUPED_PRODUCT)


def times_frozen(
    multiply: GroupedProduct,
    rows: Float[Array, "M inputs"],
    weight: FrozenWeight,
    sizes: Int[Array, " X"],
) -> Float[Array, "M outputs"]:
    """Multiplies every row by the frozen weight of its group, plain or 8-bit, in fp32."""
    if not isinstance(weight, QuantizedWeight):
        return multiply(rows, weight, sizes, jnp.float32)
    products = multiply(rows, weight.values, sizes, jnp.float32)
    # Rows after the last group have products of 0, with any scale.
    scales = jnp.repeat(weight.scale[:, 0], sizes, axis=0, total_repeat_length=len(rows))
    return products * scales
