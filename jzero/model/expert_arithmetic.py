"""The arithmetic of MoE layers: PLAIN_EXPERTS, and EXACT_EXPERTS for `model.exact`.

With EXACT_EXPERTS the bits of a token do not depend on the other tokens. Like the layers, the
router multiplies a tile of rows at a time, and its sums have a fixed order.
Each expert computes its entire MLP for ROW_TILE rows at a time, in one loop over the blocks of all
experts, so the products of a row do not depend on the number of rows or on the other rows of its
block. The backward pass differentiates the plain grouped products.
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
    """The gated MLP weights of several experts, or of one expert without the leading axis."""

    gate: GroupedWeight  # [experts, E, F]
    up: GroupedWeight  # [experts, E, F]
    down: GroupedWeight  # [experts, F, E]


class ExpertArithmetic(NamedTuple):
    """How a layer computes its experts. Probabilities are in fp32.

    probabilities  (h [N, E], router [E, X]) -> the router's probabilities of all experts, f32[N, X]
    mlps           (product, rows [M, E], weights, sizes i32[X]) -> the MLP of its expert for every
                   row, [M, E]. The rows are sorted by expert; `product` is a key of
                   `grouped_products.PRODUCTS`.
    weighted_sum   (outputs [N, k, E], probabilities [N, k]) -> the sum over k, f32[N, E]
    """

    probabilities: Callable[[jax.Array, jax.Array], jax.Array]
    mlps: Callable[[str, jax.Array, ExpertMlps, jax.Array], jax.Array]
    weighted_sum: Callable[[jax.Array, jax.Array], jax.Array]


# -- plain -----------------------------------------------------------------------------------------


def router_probabilities(
    h: Float[Array, "N E"],
    router: Float[Array, "E X"],
) -> Float[Array, "N X"]:
    """Returns the router's probabilities of all experts."""
    # By default a TPU would multiply in bf16, which changes the choice of experts.
    logits = jnp.einsum(
        "ne,ex->nx",
        h.astype(jnp.float32),
        router.astype(jnp.float32),
        precision=lax.Precision.HIGHEST,
    )
    return jax.nn.softmax(logits)


def grouped_mlps(
    multiply: Callable[[jax.Array, GroupedWeight, jax.Array], jax.Array],
    sizes: Int[Array, " X"],
    rows: Float[Array, "M E"],
    weights: ExpertMlps,
) -> Float[Array, "M E"]:
    """Computes for every row the MLP of its expert, with products of all rows at once."""
    gate = jax.nn.silu(multiply(rows, weights.gate, sizes))
    up = multiply(rows, weights.up, sizes)
    return multiply(gate * up, weights.down, sizes)


def plain_mlps(
    product: str,
    rows: Float[Array, "M E"],
    weights: ExpertMlps,
    sizes: Int[Array, " X"],
) -> Float[Array, "M E"]:
    """Computes the MLPs with one grouped product for each weight."""
    return grouped_mlps(partial(grouped_product, product), sizes, rows, weights)


def plain_weighted_sum(
    by_token: Float[Array, "N k E"],
    probabilities: Float[Array, "N k"],
) -> Float[Array, "N E"]:
    """Sums the outputs of a token's experts, times their probabilities."""
    return jnp.einsum("nke,nk->ne", by_token.astype(jnp.float32), probabilities)


PLAIN_EXPERTS = ExpertArithmetic(router_probabilities, plain_mlps, plain_weighted_sum)


# -- exact -----------------------------------------------------------------------------------------


def exact_router_probabilities(
    h: Float[Array, "N E"],
    router: Float[Array, "E X"],
) -> Float[Array, "N X"]:
    """Computes `router_probabilities` in tiles of rows. N is a multiple of ROW_TILE."""

    def product(rows: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.einsum("ne,ex->nx", rows, weight, precision=lax.Precision.HIGHEST)

    in_fp32 = h.astype(jnp.float32), router.astype(jnp.float32)
    # One shard: this code runs where every device has only its own rows.
    logits: jax.Array = in_tiles(product, 1, *in_fp32)
    # The maximum cancels in the quotient, so its gradient is not needed.
    masses = jnp.exp(logits - lax.stop_gradient(logits.max(axis=-1, keepdims=True)))
    return masses / sum_by_halves(masses)[..., None]


def exact_weighted_sum(
    by_token: Float[Array, "N k E"],
    probabilities: Float[Array, "N k"],
) -> Float[Array, "N E"]:
    """Computes `plain_weighted_sum` in a fixed order of the sum and its roundings."""
    # The order of the k terms is fixed by halving, as for all sums of exact mode.
    terms = rounded(by_token.astype(jnp.float32) * probabilities[..., None])
    return sum_by_halves(jnp.swapaxes(terms, 1, 2))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def mlps_of_experts(
    product: str,
    rows: Float[Array, "M E"],
    weights: ExpertMlps,
    sizes: Int[Array, " X"],
) -> Float[Array, "M E"]:
    """Computes the MLPs for ROW_TILE rows at a time. M is at least ROW_TILE.

    product: for the backward pass, which differentiates `plain_mlps`.
    """

    def compute_expert(expert: jax.Array, out: jax.Array) -> jax.Array:
        first, end = first_rows_of(sizes, expert)
        # Blocks of ROW_TILE rows, not the block size of `block_product`, which depends on the
        # number of rows.
        blocks = Blocks(ROW_TILE, len(rows), first, end)
        expert_weights = jax.tree.map(lambda leaf: leaf[expert], weights)

        def compute_block(number: jax.Array, out: jax.Array) -> jax.Array:
            block = blocks.block(number)
            # Between the barriers every block is compiled to the same code.
            part = lax.optimization_barrier(blocks.take(block, rows))
            gate = jax.nn.silu(linear(part, expert_weights.gate))
            result = linear(gate * linear(part, expert_weights.up), expert_weights.down)
            return blocks.put(block, out, lax.optimization_barrier(result))

        return lax.fori_loop(0, blocks.number, compute_block, out)

    return for_groups_with_rows(sizes, compute_expert, jnp.zeros_like(rows))


Kept = tuple[jax.Array, ExpertMlps, jax.Array]  # the arguments of `mlps_of_experts`


def mlps_forward(
    product: str,
    rows: Float[Array, "M E"],
    weights: ExpertMlps,
    sizes: Int[Array, " X"],
) -> tuple[Float[Array, "M E"], Kept]:
    return mlps_of_experts(product, rows, weights, sizes), (rows, weights, sizes)


def mlps_backward(
    product: str,
    kept: Kept,
    gradient: Float[Array, "M E"],
) -> tuple[jax.Array, ExpertMlps, None]:
    rows, weights, sizes = kept
    mlps = partial(grouped_mlps, partial(grouped_product, product), sizes)
    _, backward = jax.vjp(mlps, rows, weights)
    return *backward(gradient), None


mlps_of_experts.defvjp(mlps_forward, mlps_backward)


def exact_mlps(
    product: str,
    rows: Float[Array, "M E"],
    weights: ExpertMlps,
    sizes: Int[Array, " X"],
) -> Float[Array, "M E"]:
    """Computes `plain_mlps` for ROW_TILE rows at a time."""
    out: jax.Array = mlps_of_experts(product, rows, weights, sizes)
    return out


EXACT_EXPERTS = ExpertArithmetic(exact_router_probabilities, exact_mlps, exact_weighted_sum)
