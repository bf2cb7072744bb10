"""Products of rows with the weights of their groups: row r of group g times W[g].

    out = PRODUCTS["blocks"](rows, weights, sizes, jnp.bfloat16)   # of [M, I], [X, I, O] and i32[X]

The rows are sorted by group, `sizes` has the rows of every group, and what follows them belongs to
no group: its output is 0. `lax.ragged_dot` is this product on TPU and GPU. On a CPU XLA computes it
as a product with all weights, X times the work; there `block_product` multiplies blocks of
rows, each with the weight of its group. `tests/model/test_grouped_products.py` compares both with a
loop over groups.

    out = grouped_product("blocks", rows, weight, sizes)

also takes the other kinds of weights that `linear.py` knows: in 8 bits, and with an adapter for
every group.
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

from jzero.model.linear import (
    GROUPED_PRODUCT,
    LOW_RANK_PRODUCT,
    AdaptedWeight,
    FrozenWeight,
)
from jzero.model.quantized import QuantizedWeight
from jzero.products import product_in_fp32, product_over_rows

# (rows [M, inputs], weights [X, inputs, outputs], sizes i32[X], type of the result)
GroupedProduct = Callable[[jax.Array, jax.Array, jax.Array, DTypeLike], jax.Array]
GroupedWeight = FrozenWeight | AdaptedWeight  # of all groups

FEWEST_ROWS, MOST_ROWS = 8, 128  # of a block


def ragged_product(
    rows: Float[Array, "M inputs"],
    weights: Num[Array, "X inputs outputs"],
    sizes: Int[Array, " X"],
    dtype: DTypeLike,
) -> Float[Array, "M outputs"]:
    """Multiplies every row by the weight of its group with `lax.ragged_dot`.

    Platforms differ in what they return for rows without a group, so these are set to 0, and so is
    their gradient. Integers are converted to the type of the rows, which holds those of 8 bits.
    """
    is_grouped = (jnp.arange(len(rows)) < sizes.sum())[:, None]
    rows = jnp.where(is_grouped, rows, 0)
    weights = weights.astype(rows.dtype)
    out = lax.ragged_dot(rows, weights, sizes, preferred_element_type=jnp.float32)
    return jnp.where(is_grouped, out.astype(dtype), 0)


# -- blocks of rows --------------------------------------------------------------------------------


class Block(NamedTuple):
    """Rows that follow each other, some or all of which have one group."""

    start: jax.Array  # i32[], the number of the first row
    is_own: jax.Array  # bool[rows, 1]: which of the rows belong to the group


class Blocks(NamedTuple):
    """How the rows of one group are cut into blocks."""

    rows: int  # of a block
    num_rows: int  # of all groups
    first: jax.Array  # i32[], the number of the group's first row
    end: jax.Array  # i32[], behind its last row

    @property
    def number(self) -> jax.Array:
        return -(-(self.end - self.first) // self.rows)

    def block(self, number: jax.Array) -> Block:
        """Returns one block.

        The last block of a group may have rows of the next group behind its own, and one at the end
        of all rows is moved back, so that it has rows from before its own.
        """
        first = self.first + number * self.rows
        end = jnp.minimum(first + self.rows, self.end)
        start = jnp.minimum(first, self.num_rows - self.rows)
        places = start + jnp.arange(self.rows)
        is_own = (places >= first) & (places < end)
        return Block(start, is_own[:, None])

    def take(self, block: Block, rows: Float[Array, "M width"]) -> Float[Array, "rows width"]:
        """Returns the rows of a block."""
        return lax.dynamic_slice_in_dim(rows, block.start, self.rows)

    def put(
        self, block: Block, rows: Float[Array, "M width"], new: Float[Array, "rows width"]
    ) -> Float[Array, "M width"]:
        """Returns `rows` with those of the block's group replaced."""
        new = jnp.where(block.is_own, new.astype(rows.dtype), self.take(block, rows))
        return lax.dynamic_update_slice_in_dim(rows, new, block.start, 0)


def first_rows_of(sizes: Int[Array, " X"], group: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the number of the first row of a group, and that behind its last one."""
    end = jnp.cumsum(sizes)[group]
    return end - sizes[group], end


def blocks_of_group(num_rows: int, sizes: Int[Array, " X"], group: jax.Array) -> Blocks:
    """Returns blocks of a power of two, so few rows that blocks which are not full cost little."""
    quarter_of_share = max(1, num_rows // (4 * len(sizes)))
    rows = min(max(1 << (quarter_of_share.bit_length() - 1), FEWEST_ROWS), MOST_ROWS, num_rows)
    return Blocks(rows, num_rows, *first_rows_of(sizes, group))


def for_groups_with_rows(
    sizes: Int[Array, " X"], compute: Callable[[jax.Array, PyTree], PyTree], start: PyTree
) -> PyTree:
    """Loops over the groups that have rows: state = compute(group, state).

    Without this, decoding a few tokens would read the weights of all groups.
    """
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

    The number of blocks is data, so that rows without a group cost nothing. JAX cannot
    differentiate such a loop; its own derivative of one over all blocks would add an array as large
    as all weights for every block.
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
    """Returns the product, and what the backward pass reads."""
    return block_product(rows, weights, sizes, dtype), (rows, weights, sizes)


def block_product_backward(
    dtype: DTypeLike, kept: Kept, gradient: Float[Array, "M outputs"]
) -> tuple[Float[Array, "M inputs"], Float[Array, "X inputs outputs"] | None, None]:
    """Returns the gradients of the rows and of the weights. Sizes have none, nor have integers."""
    rows, weights, sizes = kept
    gradient = gradient.astype(rows.dtype)
    has_gradient = not jnp.issubdtype(weights.dtype, jnp.integer)

    def of_group(
        group: jax.Array, so_far: tuple[jax.Array, jax.Array | None]
    ) -> tuple[jax.Array, jax.Array | None]:
        of_rows, of_weights = so_far
        blocks = blocks_of_group(len(rows), sizes, group)
        weight = weights[group].astype(rows.dtype)

        def of_block(
            number: jax.Array, so_far: tuple[jax.Array, jax.Array | None]
        ) -> tuple[jax.Array, jax.Array | None]:
            of_rows, of_weight = so_far
            block = blocks.block(number)
            part, of_part = blocks.take(block, rows), blocks.take(block, gradient)
            of_rows = blocks.put(block, of_rows, product_in_fp32("no,io->ni", of_part, weight))
            if of_weight is not None:
                own = jnp.where(block.is_own, of_part, 0)
                of_weight = of_weight + product_over_rows(part, own)
            return of_rows, of_weight

        nothing = jnp.zeros(weight.shape, jnp.float32) if has_gradient else None
        of_rows, of_weight = lax.fori_loop(0, blocks.number, of_block, (of_rows, nothing))
        if of_weights is not None and of_weight is not None:
            of_weights = of_weights.at[group].set(of_weight.astype(of_weights.dtype))
        return of_rows, of_weights

    start = jnp.zeros_like(rows), jnp.zeros_like(weights) if has_gradient else None
    of_rows, of_weights = for_groups_with_rows(sizes, of_group, start)
    return of_rows, of_weights, None


differentiable_blocks.defvjp(block_product_forward, block_product_backward)


# -- the table -------------------------------------------------------------------------------------


PRODUCTS: Mapping[str, GroupedProduct] = {"ragged": ragged_product, "blocks": block_product}

# The product of each platform; every other one has "blocks". Devices that are described and not
# attached call CUDA "cuda".
PLATFORMS: Mapping[str, str] = {"tpu": "ragged", "gpu": "ragged", "cuda": "ragged"}


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

    Sums are in fp32 and rounded once, as those of `linear` are.
    """
    multiply = PRODUCTS[kind]
    if isinstance(weight, AdaptedWeight):
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
    """Multiplies every row by the weight of its group, which may be in 8 bits, in fp32."""
    if not isinstance(weight, QuantizedWeight):
        return multiply(rows, weight, sizes, jnp.float32)
    products = multiply(rows, weight.values, sizes, jnp.float32)
    # Rows that follow all groups have products of 0, with any scale.
    scales = jnp.repeat(weight.scale[:, 0], sizes, axis=0, total_repeat_length=len(rows))
    return products * scales
