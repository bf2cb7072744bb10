"""The experts of `model.exact`: the bits of a token do not depend on the tokens beside it.

The router multiplies as the layers do, a tile of rows at a time, and its sums are written out. An
expert computes its whole MLP for ROW_TILE rows at a time, in one loop over the blocks of all
experts, so that the products of a row are the same whatever the number of rows is, and whoever
shares its block. The backward pass is that of the products without this order.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jzero.attention.exact import sum_by_halves
from jzero.model.exact import ROW_TILE, in_tiles, rounded
from jzero.model.grouped_products import (
    Blocks,
    GroupedWeight,
    first_rows_of,
    for_groups_with_rows,
    grouped_product,
)
from jzero.model.linear import linear


class ExpertMlps(NamedTuple):
    """The weights of the gated MLPs of some experts; of one of them without the leading axis."""

    gate: GroupedWeight  # [experts, E, F]
    up: GroupedWeight  # [experts, E, F]
    down: GroupedWeight  # [experts, F, E]


def probabilities_of_experts(
    h: Float[Array, "N E"], router: Float[Array, "E X"]
) -> Float[Array, "N X"]:
    """Returns the router's probabilities of all experts, in fp32. N is a multiple of ROW_TILE.

    It runs where every device has rows of its own: they are one shard.
    """

    def product(rows: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.einsum("ne,ex->nx", rows, weight, precision=lax.Precision.HIGHEST)

    in_fp32 = h.astype(jnp.float32), router.astype(jnp.float32)
    logits: jax.Array = in_tiles(product, 1, *in_fp32)
    masses = jnp.exp(logits - lax.stop_gradient(logits.max(axis=-1, keepdims=True)))
    return masses / sum_by_halves(masses)[..., None]


def weighted_sum(
    by_token: Float[Array, "N k E"], probabilities: Float[Array, "N k"]
) -> Float[Array, "N E"]:
    """Adds up what the experts of a token returned, times their probabilities, in fp32."""
    terms = rounded(by_token.astype(jnp.float32) * probabilities[..., None])
    return sum_by_halves(jnp.swapaxes(terms, 1, 2))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def mlps_of_experts(
    product: str, rows: Float[Array, "M E"], weights: ExpertMlps, sizes: Int[Array, " X"]
) -> Float[Array, "M E"]:
    """Computes the MLP of its expert for every row. The rows are sorted by expert.

    product: a key of `grouped_products.PRODUCTS`, for the backward pass. M is at least ROW_TILE.
    """

    def of_expert(expert: jax.Array, out: jax.Array) -> jax.Array:
        first, end = first_rows_of(sizes, expert)
        blocks = Blocks(ROW_TILE, len(rows), first, end)
        own = jax.tree.map(lambda leaf: leaf[expert], weights)

        def of_block(number: jax.Array, out: jax.Array) -> jax.Array:
            block = blocks.block(number)
            # Between the barriers every block is the same program.
            part = lax.optimization_barrier(blocks.take(block, rows))
            gate = jax.nn.silu(linear(part, own.gate))
            new = linear(gate * linear(part, own.up), own.down)
            return blocks.put(block, out, lax.optimization_barrier(new))

        return lax.fori_loop(0, blocks.number, of_block, out)

    return for_groups_with_rows(sizes, of_expert, jnp.zeros_like(rows))


Kept = tuple[jax.Array, ExpertMlps, jax.Array]  # the arguments of `mlps_of_experts`


def mlps_forward(
    product: str, rows: Float[Array, "M E"], weights: ExpertMlps, sizes: Int[Array, " X"]
) -> tuple[Float[Array, "M E"], Kept]:
    """Returns the outputs, and what the backward pass reads."""
    return mlps_of_experts(product, rows, weights, sizes), (rows, weights, sizes)


def mlps_backward(
    product: str, kept: Kept, gradient: Float[Array, "M E"]
) -> tuple[jax.Array, ExpertMlps, None]:
    """Returns the gradients of the rows and the weights."""
    rows, weights, sizes = kept
    mlps = partial(grouped_mlps, partial(grouped_product, product), sizes)
    _, backward = jax.vjp(mlps, rows, weights)
    return *backward(gradient), None


mlps_of_experts.defvjp(mlps_forward, mlps_backward)


def grouped_mlps(
    multiply: Callable[[jax.Array, GroupedWeight, jax.Array], jax.Array],
    sizes: Int[Array, " X"],
    rows: Float[Array, "M E"],
    weights: ExpertMlps,
) -> Float[Array, "M E"]:
    """Computes the MLP of its expert for every row, with products of all rows at once."""
    gate = jax.nn.silu(multiply(rows, weights.gate, sizes))
    up = multiply(rows, weights.up, sizes)
    return multiply(gate * up, weights.down, sizes)
