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
from jaxtyping import Array, Float, Int, Num

from jzero.model.linear import (
    GROUPED_PRODUCT,
    LOW_RANK_PRODUCT,
    AdaptedWeight,
    FrozenWeight,
)
from jzero.model.quantized import QuantizedWeight

# (rows [M, inputs], weights [X, inputs, outputs], sizes i32[X], type of the result)
GroupedProduct = Callable[[jax.Array, jax.Array, jax.Array, DTypeLike], jax.Array]
GroupedWeight = FrozenWeight | AdaptedWeight  # of all groups

FEWEST_ROWS, MOST_ROWS = 8, 256  # of a block


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
    """Rows that follow each other and have one group."""

    group: jax.Array  # i32[]
    first_row: jax.Array  # i32[]
    num_rows: jax.Array  # i32[]: a block at the end of its group is not full


class Blocks(NamedTuple):
    """How sorted rows are cut into blocks, none of which has rows of two groups."""

    rows: int  # of a full block
    sizes: Int[Array, " X"]  # rows of every group
    first_rows: Int[Array, " X"]
    ends: Int[Array, " X"]  # the blocks of every group and of those before it

    def block(self, number: jax.Array) -> Block:
        """Returns one block. Groups without rows have none."""
        group = jnp.sum(self.ends <= number)
        blocks_before = jnp.where(group > 0, self.ends[group - 1], 0)
        rows_before = (number - blocks_before) * self.rows
        num_rows = jnp.minimum(self.rows, self.sizes[group] - rows_before)
        return Block(group, self.first_rows[group] + rows_before, num_rows)


def cut_into_blocks(num_rows: int, sizes: Int[Array, " X"]) -> Blocks:
    """Returns blocks of a power of two, so few rows that blocks which are not full cost little."""
    groups = len(sizes)
    fair_share = max(1, num_rows // (4 * groups))
    rows = min(max(1 << (fair_share.bit_length() - 1), FEWEST_ROWS), MOST_ROWS)
    return Blocks(
        rows=rows,
        sizes=sizes,
        first_rows=jnp.cumsum(sizes) - sizes,
        ends=jnp.cumsum(-(-sizes // rows)),
    )


def multiply_blocks(
    letters: str,
    rows: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    width: int,
    dtype: DTypeLike,
) -> Float[Array, "M width"]:
    """Multiplies every block by the weight of its group, which `letters` may transpose.

    Every block writes all of its rows. Those beyond the end of its group hold nonsense, until the
    next block, which begins there, overwrites them. Weights may be integers of 8 bits.
    """
    M = len(rows)
    blocks = cut_into_blocks(M, sizes)
    padded = jnp.pad(rows, ((0, blocks.rows), (0, 0)))

    def multiply(number: jax.Array, out: jax.Array) -> jax.Array:
        block = blocks.block(number)
        part = lax.dynamic_slice_in_dim(padded, block.first_row, blocks.rows)
        weight = weights[block.group].astype(rows.dtype)
        product = jnp.einsum(letters, part, weight, preferred_element_type=jnp.float32)
        return lax.dynamic_update_slice_in_dim(out, product.astype(out.dtype), block.first_row, 0)

    empty = jnp.zeros((M + blocks.rows, width), dtype)
    out = lax.fori_loop(0, blocks.ends[-1], multiply, empty)[:M]
    return jnp.where((jnp.arange(M) < sizes.sum())[:, None], out, 0)


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
    return multiply_blocks("ni,io->no", rows, weights, sizes, weights.shape[2], dtype)


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
    of_rows = multiply_blocks("no,io->ni", gradient, weights, sizes, weights.shape[1], rows.dtype)
    if jnp.issubdtype(weights.dtype, jnp.integer):
        return of_rows, None, None

    blocks = cut_into_blocks(len(rows), sizes)
    padding = ((0, blocks.rows), (0, 0))
    padded_rows, padded_gradient = jnp.pad(rows, padding), jnp.pad(gradient, padding)

    def add_block(number: jax.Array, of_weights: jax.Array) -> jax.Array:
        block = blocks.block(number)
        part = lax.dynamic_slice_in_dim(padded_rows, block.first_row, blocks.rows)
        of_part = lax.dynamic_slice_in_dim(padded_gradient, block.first_row, blocks.rows)
        is_own = (jnp.arange(blocks.rows) < block.num_rows)[:, None]
        change = jnp.einsum(
            "ni,no->io", part, jnp.where(is_own, of_part, 0), preferred_element_type=jnp.float32
        )
        return of_weights.at[block.group].add(change)

    zeros = jnp.zeros(weights.shape, jnp.float32)
    of_weights = lax.fori_loop(0, blocks.ends[-1], add_block, zeros)
    return of_rows, of_weights.astype(weights.dtype), None


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
