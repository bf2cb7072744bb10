"""Grouped matrix products on NVIDIA GPUs, as Triton kernels. See `grouped_products.py`.

    out = triton_product(rows, weights, sizes, jnp.bfloat16)     # [M, inputs], [X, inputs, outputs]

XLA for GPUs computes `lax.ragged_dot` as a product of all rows with the weights of all groups: X
times the operations, and a copy of the rows for every group. Here a program multiplies a tile of
rows of one group by a tile of columns of its weight. The rows of a group begin anywhere, so the
tiles are data: `tiles_of` places them before the kernel starts.

    out[r]  = rows[r] W[g]           multiply(rows, weights)
    d rows  = d out[r] W[g]^T        multiply(d out, weights, transposed=True)
    d W[g]  = rows[g]^T d out[g]     weight_gradient(rows, d out)

Sums are in fp32. 8-bit weights are converted to the type of the rows tile by tile.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from jzero.errors import UserError
from jzero.numerics.sizes import divide_up, power_of_two

FEWEST_ROWS, MOST_ROWS = 16, 128  # limits of the rows of a tile; Triton multiplies at least 16
COLUMNS = 128  # of a tile
INNER = 64  # terms of a sum that a program reads at a time, for types of 16 bits
MOST_NUMBERS = 2**31 - 1  # of an array
MOST_WARPS = 8  # of a program
STAGES = 3  # reads that are under way while a program multiplies


class Tiles(NamedTuple):
    """Tiles of rows of one group each. A tile without rows has start = end."""

    group: Int[Array, " tiles"]
    start: Int[Array, " tiles"]  # the first row
    end: Int[Array, " tiles"]  # one past the last row of the group


def tiles_of(sizes: Int[Array, " X"], num_rows: int, height: int) -> Tiles:
    """Returns tiles of `height` rows, of which each group has as many as it needs."""
    numbers = -(-sizes // height)  # of tiles of every group
    ends, last_tiles = jnp.cumsum(sizes), jnp.cumsum(numbers)
    number = jnp.arange(num_rows // height + len(sizes), dtype=jnp.int32)  # at most so many
    group = jnp.searchsorted(last_tiles, number, side="right").astype(jnp.int32)
    is_used = group < len(sizes)
    group = jnp.minimum(group, len(sizes) - 1)
    first_tile = last_tiles[group] - numbers[group]
    start = ends[group] - sizes[group] + (number - first_tile) * height
    return Tiles(group, start, jnp.where(is_used, ends[group], start))


def height_of_tiles(num_rows: int, num_groups: int) -> int:
    """Returns the number of rows of a tile: about as many as an average group has."""
    return min(max(power_of_two(divide_up(num_rows, num_groups)), FEWEST_ROWS), MOST_ROWS)


# -- kernels ---------------------------------------------------------------------------------------


def dot(
    a: jax.Array, b: jax.Array, transposes_a: bool = False, transposes_b: bool = False
) -> jax.Array:
    """Returns the product in fp32, without the shorter mantissas that GPUs have for fp32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plgpu.dot(a, b, transposes_a, transposes_b, precision=precision)


class Range(NamedTuple):
    """Indices of an axis, of which those from `end` on do not exist."""

    places: Int[Array, " n"]
    end: int | jax.Array


def part(ref: jax.Ref, first: Range, second: Range, *group: jax.Array) -> tuple:
    """Returns the reference to ref[group, first, second], and which of its indices exist."""
    mask = (first.places < first.end)[:, None] & (second.places < second.end)[None, :]
    return ref.at[(*group, first.places[:, None], second.places[None, :])], mask


def load(ref: jax.Ref, first: Range, second: Range, *group: jax.Array) -> jax.Array:
    """Returns ref[group, first, second], and 0 at indices that do not exist."""
    place, mask = part(ref, first, second, *group)
    # Triton converts no integer to float8.
    zero = 0 if jnp.issubdtype(ref.dtype, jnp.integer) else 0.0
    return plgpu.load(place, mask=mask, other=zero)


def store(values: jax.Array, ref: jax.Ref, first: Range, second: Range, *group: jax.Array) -> None:
    """Writes values to ref[group, first, second] where the indices exist."""
    place, mask = part(ref, first, second, *group)
    plgpu.store(place, values.astype(ref.dtype), mask=mask)


def multiply_kernel(
    group_ref: jax.Ref,  # i32[tiles]; the next two, too: see `Tiles`
    start_ref: jax.Ref,
    end_ref: jax.Ref,
    rows_ref: jax.Ref,  # [M, inputs]
    weights_ref: jax.Ref,  # [X, inputs, outputs], or [X, outputs, inputs] if transposed
    out_ref: jax.Ref,  # [M, outputs]
    *,
    height: int,
    transposed: bool,
) -> None:
    """Computes a tile of `multiply`: the ids of the program are its rows and its columns."""
    number, part_of_columns = pl.program_id(0), pl.program_id(1)
    group, start, end = group_ref[number], start_ref[number], end_ref[number]
    inputs, outputs = rows_ref.shape[1], out_ref.shape[1]
    width, inner = width_of(outputs), inner_of(rows_ref.dtype, inputs)

    @pl.when(start < end)
    def _() -> None:
        row = Range(start + jnp.arange(height), end)
        column = Range(part_of_columns * width + jnp.arange(width), outputs)

        def add(step: jax.Array, total: jax.Array) -> jax.Array:
            term = Range(step * inner + jnp.arange(inner), inputs)
            tile = load(rows_ref, row, term)
            axes = (column, term) if transposed else (term, column)
            weight = load(weights_ref, *axes, group)
            return total + dot(tile, weight.astype(tile.dtype), transposes_b=transposed)

        zeros = jnp.zeros((height, width), jnp.float32)
        total = lax.fori_loop(0, divide_up(inputs, inner), add, zeros)
        store(total, out_ref, row, column)


def gradient_kernel(
    first_ref: jax.Ref,  # i32[X] the first row of every group
    end_ref: jax.Ref,  # i32[X] one past its last row
    rows_ref: jax.Ref,  # [M, inputs]
    gradient_ref: jax.Ref,  # [M, outputs]
    out_ref: jax.Ref,  # [X, inputs, outputs]
    *,
    height: int,
) -> None:
    """Computes a tile of `weight_gradient`: the ids of the program are group, rows and columns.

    height: rows that the program reads at a time.
    """
    group = pl.program_id(0)
    first, end = first_ref[group], end_ref[group]
    inputs, outputs = rows_ref.shape[1], gradient_ref.shape[1]
    input_width, output_width = width_of(inputs), width_of(outputs)
    term = Range(pl.program_id(1) * input_width + jnp.arange(input_width), inputs)
    column = Range(pl.program_id(2) * output_width + jnp.arange(output_width), outputs)

    def add(step: jax.Array, total: jax.Array) -> jax.Array:
        row = Range(first + step * height + jnp.arange(height), end)
        tile, gradient = load(rows_ref, row, term), load(gradient_ref, row, column)
        return total + dot(tile, gradient, transposes_a=True)

    zeros = jnp.zeros((input_width, output_width), jnp.float32)
    total = lax.fori_loop(0, divide_up(end - first, height), add, zeros)
    store(total, out_ref, term, column, group)


def width_of(columns: int) -> int:
    """Returns the columns of a tile."""
    return min(max(power_of_two(columns), 16), COLUMNS)


def inner_of(dtype: DTypeLike, inputs: int) -> int:
    """Returns how many terms of a sum a program reads at a time."""
    return min(max(power_of_two(inputs), 16), INNER * 2 // jnp.dtype(dtype).itemsize)


def call(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    arguments: Sequence[jax.Array],
    out: jax.ShapeDtypeStruct,
    num_warps: int,
    interpret: bool,
) -> jax.Array:
    """Calls a kernel, whose programs read and write parts of whole arrays.

    Raises UserError for arrays whose places are no 32-bit numbers, as Triton computes them.
    """
    largest = max(array.size for array in (*arguments, out))
    if largest > MOST_NUMBERS:
        raise UserError(
            f"a product of experts has {largest / 1e9:.1f} billion numbers, and Triton's kernels "
            "count to 2.1: lower train.microbatch_tokens, or rollout.num_slots"
        )
    compiler_params = plgpu.CompilerParams(num_warps=num_warps, num_stages=STAGES)
    run = pl.pallas_call(
        kernel, out_shape=out, grid=grid, compiler_params=compiler_params, interpret=interpret
    )
    return run(*arguments)


# -- products --------------------------------------------------------------------------------------


def multiply(
    rows: Float[Array, "M inputs"],
    weights: Num[Array, "X inputs outputs"],
    sizes: Int[Array, " X"],
    dtype: DTypeLike,
    interpret: bool,
    transposed: bool = False,
) -> Float[Array, "M outputs"]:
    """Multiplies every row by the weight of its group, or by its transpose."""
    num_rows, outputs = len(rows), weights.shape[1 if transposed else 2]
    height = height_of_tiles(num_rows, len(sizes))
    tiles = tiles_of(sizes, num_rows, height)
    grid = (len(tiles.group), divide_up(outputs, width_of(outputs)))
    kernel = partial(multiply_kernel, height=height, transposed=transposed)
    result = jax.ShapeDtypeStruct((num_rows, outputs), dtype)
    num_warps = MOST_WARPS if height == MOST_ROWS else MOST_WARPS // 2
    out = call(kernel, grid, (*tiles, rows, weights), result, num_warps, interpret)
    # No tile has written the rows without a group.
    return jnp.where((jnp.arange(num_rows) < sizes.sum())[:, None], out, 0)


def weight_gradient(
    rows: Float[Array, "M inputs"],
    gradient: Float[Array, "M outputs"],
    sizes: Int[Array, " X"],
    dtype: DTypeLike,
    interpret: bool,
) -> Float[Array, "X inputs outputs"]:
    """Returns the gradient of the weight of every group, 0 for a group without rows."""
    inputs, outputs = rows.shape[1], gradient.shape[1]
    height = min(height_of_tiles(len(rows), len(sizes)), INNER)
    grid = (
        len(sizes),
        divide_up(inputs, width_of(inputs)),
        divide_up(outputs, width_of(outputs)),
    )
    ends = jnp.cumsum(sizes)
    result = jax.ShapeDtypeStruct((len(sizes), inputs, outputs), dtype)
    kernel = partial(gradient_kernel, height=height)
    arguments = (ends - sizes, ends, rows, gradient)
    return call(kernel, grid, arguments, result, MOST_WARPS, interpret)


def triton_product(
    rows: Float[Array, "M inputs"],
    weights: Num[Array, "X inputs outputs"],
    sizes: Int[Array, " X"],
    dtype: DTypeLike,
    interpret: bool = False,
) -> Float[Array, "M outputs"]:
    """Multiplies every row by the weight of its group. See `grouped_products`.

    interpret: compute on any device, slowly, as tests do.
    """
    return differentiable(dtype, interpret, rows, weights, sizes)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def differentiable(
    dtype: DTypeLike,
    interpret: bool,
    rows: Float[Array, "M inputs"],
    weights: Num[Array, "X inputs outputs"],
    sizes: Int[Array, " X"],
) -> Float[Array, "M outputs"]:
    """Computes `triton_product`. JAX does not differentiate kernels."""
    return multiply(rows, weights, sizes, dtype, interpret)


Kept = tuple[jax.Array, jax.Array, jax.Array]  # the arrays


def product_forward(
    dtype: DTypeLike,
    interpret: bool,
    rows: Float[Array, "M inputs"],
    weights: Num[Array, "X inputs outputs"],
    sizes: Int[Array, " X"],
) -> tuple[Float[Array, "M outputs"], Kept]:
    return multiply(rows, weights, sizes, dtype, interpret), (rows, weights, sizes)


def product_backward(
    dtype: DTypeLike, interpret: bool, kept: Kept, gradient: Float[Array, "M outputs"]
) -> tuple[Float[Array, "M inputs"], Float[Array, "X inputs outputs"] | None, None]:
    """Returns the gradients of rows and weights. Sizes and 8-bit weights have no gradient."""
    rows, weights, sizes = kept
    gradient = gradient.astype(rows.dtype)
    of_rows = multiply(gradient, weights, sizes, rows.dtype, interpret, transposed=True)
    if jnp.issubdtype(weights.dtype, jnp.integer):
        return of_rows, None, None
    return of_rows, weight_gradient(rows, gradient, sizes, weights.dtype, interpret), None


differentiable.defvjp(product_forward, product_backward)
