"""Products of rows with the weights of their groups: row r of group g times W[g].

    out = PRODUCTS["blocks"](rows, weights, sizes)   # [M, I], [X, I, O], i32[X] -> [M, O]

The rows are sorted by group, `sizes` has the rows of every group, and what follows them belongs to
no group: its output is 0. `lax.ragged_dot` is this product on TPU and GPU. On a CPU XLA computes it
as a product with all weights, X times the work; there `block_product` multiplies blocks of
rows, each with the weight of its group. `tests/model/test_grouped_products.py` compares both with a
loop over groups.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jzero.model.linear import GROUPED_PRODUCT

GroupedProduct = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

FEWEST_ROWS, MOST_ROWS = 8, 256  # of a block


def ragged_product(
    rows: Float[Array, "M inputs"],
    weights: Float[Array, "X inputs outputs"],
    sizes: Int[Array, " X"],
) -> Float[Array, "M outputs"]:
    """Multiplies every row by the weight of its group with `lax.ragged_dot`.

    Platforms differ in what they return for rows without a group, so these are set to 0, and so is
    their gradient.
    """
    is_grouped = (jnp.arange(len(rows)) < sizes.sum())[:, None]
    rows = jnp.where(is_grouped, rows, 0)
    out = lax.ragged_dot(rows, weights, sizes, preferred_element_type=jnp.float32)
    return jnp.where(is_grouped, out.astype(rows.dtype), 0)


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
    letters: str, rows: jax.Array, weights: jax.Array, sizes: jax.Array, width: int
) -> Float[Array, "M width"]:
    """Multiplies every block by the weight of its group, which `letters` may transpose.

    Every block writes all of its rows. Those beyond the end of its group hold nonsense, until the
    next block, which begins there, overwrites them.
    """
    M = len(rows)
    blocks = cut_into_blocks(M, sizes)
    padded = jnp.pad(rows, ((0, blocks.rows), (0, 0)))

    def multiply(number: jax.Array, out: jax.Array) -> jax.Array:
        block = blocks.block(number)
        part = lax.dynamic_slice_in_dim(padded, block.first_row, blocks.rows)
        product = jnp.einsum(
            letters, part, weights[block.group], preferred_element_type=jnp.float32
        )
        return lax.dynamic_update_slice_in_dim(out, product.astype(out.dtype), block.first_row, 0)

    empty = jnp.zeros((M + blocks.rows, width), rows.dtype)
    out = lax.fori_loop(0, blocks.ends[-1], multiply, empty)[:M]
    return jnp.where((jnp.arange(M) < sizes.sum())[:, None], out, 0)


@jax.custom_vjp
def block_product(
    rows: Float[Array, "M inputs"],
    weights: Float[Array, "X inputs outputs"],
    sizes: Int[Array, " X"],
) -> Float[Array, "M outputs"]:
    """Multiplies every row by the weight of its group, a block of rows at a time.

    The number of blocks is data, so that rows without a group cost nothing. JAX cannot
    differentiate such a loop; its own derivative of one over all blocks would add an array as large
    as all weights for every block.
    """
    return multiply_blocks("ni,io->no", rows, weights, sizes, weights.shape[2])


Kept = tuple[jax.Array, jax.Array, jax.Array]  # the arguments of `block_product`


def block_product_forward(
    rows: Float[Array, "M inputs"],
    weights: Float[Array, "X inputs outputs"],
    sizes: Int[Array, " X"],
) -> tuple[Float[Array, "M outputs"], Kept]:
    """Returns the product, and what the backward pass reads."""
    return block_product(rows, weights, sizes), (rows, weights, sizes)


def block_product_backward(
    kept: Kept, gradient: Float[Array, "M outputs"]
) -> tuple[Float[Array, "M inputs"], Float[Array, "X inputs outputs"], None]:
    """Returns the gradients of the rows and of the weights. The sizes have none."""
    rows, weights, sizes = kept
    of_rows = multiply_blocks("no,io->ni", gradient, weights, sizes, weights.shape[1])

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


block_product.defvjp(block_product_forward, block_product_backward)


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
    weights: Float[Array, "X inputs outputs"],
    sizes: Int[Array, " X"],
) -> Float[Array, "M outputs"]:
    """Multiplies every row by the weight of its group. `kind` is a key of PRODUCTS."""
    return checkpoint_name(PRODUCTS[kind](rows, weights, sizes), GROUPED_PRODUCT)
