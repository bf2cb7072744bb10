"""The operations of `model.exact`: their bits do not depend on the surrounding program.

With `model.exact` a token's log-probability is identical, to the last bit, in every program of a
run: the sampler's programs and the trainer's share one forward pass whose bits do not depend on how
many other tokens are computed together with a token. `arithmetic.EXACT` names all of its parts.
This module has the products, norms and sums of the layers; docs/models.md explains them.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PyTree, Shaped

from jzero.attention.exact import sum_by_halves
from jzero.model.delta_net import in_fp32
from jzero.model.linear import (
    LINEAR_OUTPUT,
    BankedFactors,
    BankedWeight,
    LinearWeight,
    RowAdapters,
    SlotFactors,
    as_matrix,
    linear,
    rows_of,
    separate_banked_product,
    slots_of,
)

# Rows of every product (`in_tiles`). With another number of rows, the libraries that XLA:CPU calls
# take other code paths, with other bits.
ROW_TILE = 64


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def in_tiles(
    product: Callable[[PyTree, PyTree], jax.Array],
    shards: int,
    x: PyTree[Shaped[Array, "N ..."]],
    weight: PyTree,
) -> Float[Array, "N outputs"]:
    """Computes product(x, weight) for ROW_TILE rows of each shard at a time.

    x is an array [N, inputs], or a tree of arrays [N, ...] with something else of every row. All
    products then have the same shape on every device. N is a multiple of shards * ROW_TILE, and
    the first N / shards rows are on the first shard. The backward pass differentiates the product
    of all rows at once: a weight gradient that is summed tile by tile would be rounded once per
    tile.
    """
    num_rows = len(jax.tree.leaves(x)[0])

    def split(x: Shaped[Array, "N ..."]) -> Shaped[Array, "tiles shards rows ..."]:
        return jnp.swapaxes(x.reshape(shards, -1, ROW_TILE, *x.shape[1:]), 0, 1)

    def join(rows: Shaped[Array, "shards rows ..."]) -> Shaped[Array, "N ..."]:
        return rows.reshape(-1, *rows.shape[2:])

    def multiply_tile(
        rows: PyTree[Shaped[Array, "shards rows ..."]],
    ) -> Float[Array, "shards rows outputs"]:
        return product(jax.tree.map(join, rows), weight).reshape(shards, ROW_TILE, -1)

    # Each step of the loop takes one tile of every shard. A loop over the tiles in row order would
    # move the rows of one device after the other to all devices.
    tiles = jax.tree.map(split, x)
    # The barriers keep a loop over a single tile the same product as a loop over several. Without
    # them, XLA would not compute rows of padding that are cut off later.
    out = lax.optimization_barrier(lax.map(multiply_tile, lax.optimization_barrier(tiles)))
    return jnp.swapaxes(out, 0, 1).reshape(num_rows, -1)


def in_tiles_forward(
    product: Callable[[PyTree, PyTree], jax.Array], shards: int, x: PyTree, weight: PyTree
) -> tuple[jax.Array, tuple[PyTree, PyTree]]:
    return in_tiles(product, shards, x, weight), (x, weight)


def in_tiles_backward(
    product: Callable[[PyTree, PyTree], jax.Array],
    shards: int,
    kept: tuple[PyTree, PyTree],
    gradient: jax.Array,
) -> tuple[PyTree, PyTree]:
    _, backward = jax.vjp(product, *kept)
    return backward(gradient)


in_tiles.defvjp(in_tiles_forward, in_tiles_backward)


def rounded(product: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns finite products unchanged, but keeps the compiler from fusing them into a sum.

    A CPU has a fused multiply-add, which rounds once. Whether the compiler uses it depends on the
    surrounding program; the maximum separates the product from the sum.
    """
    return jnp.maximum(product, jnp.finfo(product.dtype).min)


def tiled_product(
    shards: int, x: Float[Array, "N inputs"], weight: LinearWeight | BankedWeight
) -> Float[Array, "N outputs"]:
    """Computes `linear` for one tile of rows at a time. See `in_tiles`."""
    if isinstance(weight, BankedWeight):
        return tiled_banked_product(shards, x, weight)
    return checkpoint_name(in_tiles(linear, shards, x, weight), LINEAR_OUTPUT)


def tiled_banked_product(
    shards: int, x: Float[Array, "N inputs"], weight: BankedWeight
) -> Float[Array, "N outputs"]:
    """Computes `separate_banked_product` for one tile of rows, with their adapters, at a time."""
    # Only decoders have banks, and in their programs XLA splits no rows.
    assert shards == 1, f"{shards=}"

    # The factors of one slot are arrays of their own, as those of a single adapter are.
    slots = separate_slots(weight.groups, x.shape[1])
    matrix = as_matrix(weight.weight, x.shape[1])

    def multiply_tile(tile: tuple[jax.Array, RowAdapters]) -> jax.Array:
        rows, adapters = tile
        return separate_banked_product(rows, matrix, adapters, slots)

    def split(column: Shaped[Array, "N ..."]) -> Shaped[Array, "tiles rows ..."]:
        return column.reshape(-1, ROW_TILE, *column.shape[1:])

    # The barriers are those of `in_tiles`.
    tiles = lax.optimization_barrier(jax.tree.map(split, (x, rows_of(weight))))
    out = lax.optimization_barrier(lax.map(multiply_tile, tiles))
    return out.reshape(len(x), -1)


def separate_slots(groups: Sequence[BankedFactors], inputs: int) -> list[SlotFactors]:
    """Returns the factors of the slots of a bank, as arrays of their own."""
    return lax.optimization_barrier(slots_of(groups, inputs))


def pad_rows(multiple: int, x: Shaped[Array, "rows ..."]) -> Shaped[Array, "padded ..."]:
    """Appends rows of zeros until their number is a multiple of `multiple`."""
    missing = -len(x) % multiple
    return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))


def product_of_any_rows(
    shards: int,
    product: Callable[[PyTree, PyTree], jax.Array],
    x: PyTree,
    weight: PyTree,
) -> Float[Array, "*batch outputs"]:
    """Computes product(x, weight) in tiles, for any number of rows.

    x: an array [*batch, inputs], or a tree that begins with it and has arrays [*batch].
    """
    batch = jax.tree.leaves(x)[0].shape[:-1]

    def rows_of_tiles(x: Shaped[Array, "..."]) -> Shaped[Array, "N ..."]:
        return pad_rows(shards * ROW_TILE, x.reshape(-1, *x.shape[len(batch) :]))

    out: jax.Array = in_tiles(product, shards, jax.tree.map(rows_of_tiles, x), weight)
    return out[: math.prod(batch)].reshape(*batch, -1)


def single_output(x: Float[Array, "N inputs"], weight: Float[Array, "inputs 1"]) -> jax.Array:
    """Multiplies x by a weight with one output, as a sum that is written out. Returns [N, 1]."""
    # For one output, the compiler replaces the matrix product by a plain sum, in an order of its
    # choice.
    products = rounded(in_fp32(x) * in_fp32(weight[:, 0]))
    return sum_by_halves(products)[:, None].astype(x.dtype)


def exact_rms_norm(
    x: Float[Array, "*batch width"], scale: Float[Array, " width"], eps: float
) -> Float[Array, "*batch width"]:
    """Computes `arithmetic.rms_norm` with a sum whose order is written out."""
    x32 = x.astype(jnp.float32)
    # `rounded` and the barrier keep the compiler from fusing a product or a division with the
    # following sum into one rounding, which it does in some programs only.
    total = sum_by_halves(rounded(x32 * x32))[..., None]
    mean_square = lax.optimization_barrier(total / x.shape[-1])
    normed = x32 * lax.rsqrt(mean_square + eps)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)
