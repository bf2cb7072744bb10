"""Storage of the paged KV cache: pools of pages of keys and values.

A pool is [rows, pages, page_size, width]. XLA and the GPU's kernel keep one KV head in a row:
rows = K, width = D. The TPU's kernel requires rows of 128 numbers, which hold several heads if
heads are small. The page axis has the pages of all layers, layer after layer: [L * pages].

With rollout.kv_dtype=int8 or fp8 a pool is a `QuantizedPool`: 8-bit values, and one scale for each
head of each token.
"""

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from jzero.numerics.eight_bits import FORMATS, FP8, INT8, Format, round_to_8_bits

LARGEST = float(jnp.finfo(jnp.bfloat16).max)  # of a key or value


class QuantizedPool(NamedTuple):
    """An 8-bit pool: values * scales, with one scale for each KV head of each token.

    Tokens are the last axis of the scales, so that a kernel can multiply a head's scores by them
    without a transpose. The leaves can be shardings.
    """

    values: Any  # i8, f8 or the bits of f8, u8[rows, pages, page, width]
    scales: Any  # f32[rows, pages, heads of a row, page]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an unquantized pool with the same content."""
        return self.values.shape


Pool: TypeAlias = Shaped[Array, "rows pages page width"] | QuantizedPool

# On CPUs, the element types of pools of these values of rollout.kv_dtype.
STORED_BITS = {"bfloat16": jnp.uint16, "fp8": jnp.uint8}
# The 8-bit numbers of pools by the type of their elements.
STORED_NUMBERS = {
    np.dtype(jnp.int8): INT8,
    np.dtype(jnp.float8_e4m3fn): FP8,
    np.dtype(jnp.uint8): FP8,
}


def one_row_per_head(num_heads: int, head_dim: int) -> tuple[int, int]:
    """Returns (rows, width) of a token in a pool with one row for each KV head."""
    return num_heads, head_dim


def scales_shape(pool_shape: tuple[int, ...], head_dim: int) -> tuple[int, ...]:
    """Returns the shape of the scales of a QuantizedPool from the shape of its values."""
    rows, pages, page_size, width = pool_shape
    return rows, pages, width // head_dim, page_size


def kv_storage(dtype: str, platform: str) -> DTypeLike:
    """Returns the element type of the pools for `rollout.kv_dtype` and a platform.

    On CPU it is uint16 for bfloat16 and uint8 for fp8: pools store the bits.
    """
    # XLA:CPU would convert a complete bfloat16 pool to fp32 and back around every write, and a
    # pool of float8 to float16.
    if platform == "cpu" and dtype in STORED_BITS:
        return STORED_BITS[dtype]
    return jnp.dtype(FORMATS[dtype].dtype if dtype in FORMATS else dtype)


def number_of(storage: DTypeLike) -> Format | None:
    """Returns the 8-bit numbers of a `QuantizedPool`, by the element type of its values.

    None for the element type of another pool.
    """
    return STORED_NUMBERS.get(np.dtype(storage))


def quantize_kv(
    x: Float[Array, "... D"], storage: DTypeLike
) -> tuple[Shaped[Array, "... D"], Float[Array, "..."]]:
    """Rounds every head of every token to 8-bit numbers with its scale.

    The scale is the largest absolute value divided by the largest number.
    """
    values, scales = round_to_8_bits(x, (x.ndim - 1,), STORED_NUMBERS[np.dtype(storage)])
    if storage == jnp.uint8:
        values = lax.bitcast_convert_type(values, jnp.uint8)
    return values, scales[..., 0]


def dequantize_kv(
    values: Shaped[Array, "... D"], scales: Float[Array, "..."]
) -> Float[Array, "... D"]:
    """Returns values * scales in fp32: the inverse of `quantize_kv`."""
    if values.dtype == jnp.uint8:
        values = lax.bitcast_convert_type(values, FP8.dtype)
    return values.astype(jnp.float32) * scales[..., None]


def as_stored(
    x: Float[Array, "... D"], storage: DTypeLike, dtype: DTypeLike
) -> Float[Array, "... D"]:
    """Returns keys or values as read back from a pool: rounded to the pool's element type."""
    x = finite_or_zero(x)
    if number_of(storage) is not None:
        return dequantize_kv(*quantize_kv(x, storage)).astype(dtype)
    return decode_kv(encode_kv(x, storage), dtype)


def finite_or_zero(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns keys or values with zeros for those that are not finite.

    A sequence whose values overflow spoils its own answer. Its pages, and the scratch page, may
    later be read next to the tokens of another sequence: their weights are 0, but 0 * NaN is NaN.
    """
    return jnp.where(jnp.abs(x) <= LARGEST, x, 0)


def encode_kv(x: Float[Array, "..."], storage: DTypeLike) -> Shaped[Array, "..."]:
    """Converts keys or values to the element type of the pools."""
    if storage == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(storage)


def decode_kv(x: Shaped[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """Converts what `encode_kv` returned to `dtype`."""
    if x.dtype != jnp.uint16:
        return x.astype(dtype)
    # The bits of bfloat16 are the upper half of the bits of fp32.
    bits = x.astype(jnp.uint32) << 16
    return lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)


def to_rows(x: Float[Array, "*batch K D"], rows: int, width: int) -> Float[Array, "*batch rows W"]:
    """Puts width // D neighboring heads into each row, and fills the remainder with zeros."""
    *batch, K, D = x.shape
    heads_per_row = width // D
    # Heads that are missing in the last row, and lanes that are too few for another head.
    missing_heads = rows * heads_per_row - K
    unused_columns = width - heads_per_row * D

    x = pad_end(x, missing_heads, 0)
    x = x.reshape(*batch, rows, heads_per_row * D)
    return pad_end(x, 0, unused_columns)


def from_rows(x: Float[Array, "*batch rows W"], K: int, D: int) -> Float[Array, "*batch K D"]:
    """Returns the heads of rows: the inverse of `to_rows`."""
    *batch, rows, width = x.shape
    heads_per_row = width // D
    heads = x[..., : heads_per_row * D].reshape(*batch, rows * heads_per_row, D)
    return heads[..., :K, :]


def pad_end(x: jax.Array, rows: int, columns: int) -> jax.Array:
    """Appends zeros to the last two axes."""
    other_axes = [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, [*other_axes, (0, rows), (0, columns)])


def read_rows(
    pool: Pool, pages: Int[Array, " W"], dtype: DTypeLike
) -> Float[Array, "rows W page width"]:
    """Returns full pages of every row of a pool."""
    if not isinstance(pool, QuantizedPool):
        return decode_kv(pool[:, pages], dtype)
    values = pool.values[:, pages]
    scales = pool.scales[:, pages].swapaxes(2, 3)  # [rows, W, page, heads of a row]
    # [rows, W, page, width] -> [rows, W, page, heads of a row, D]
    heads = values.reshape(*scales.shape, -1)
    return dequantize_kv(heads, scales).astype(dtype).reshape(values.shape)


def read(
    pool: Pool, pages: Int[Array, " W"], kv_heads: int, head_dim: int, dtype: DTypeLike
) -> Float[Array, "W page K D"]:
    """Returns full pages of keys or values, in the form that `write` takes."""
    by_row = jnp.moveaxis(read_rows(pool, pages, dtype), 0, -2)
    return from_rows(by_row, kv_heads, head_dim)


def write(
    pool: Pool,
    x: Float[Array, "..."],
    pages: Int[Array, " W"],
    offsets: Int[Array, " W"] | None = None,
) -> Pool:
    """Returns the pool with keys or values written into it.

    Without `offsets`, x [W, page, K, D] has full pages for pages[W] of the pool. With `offsets`,
    x [W, K, D] has single tokens for the places (pages[W], offsets[W]). Values that are not finite
    are written as zeros.
    """
    x = finite_or_zero(x)
    if isinstance(pool, QuantizedPool):
        values, scales = quantize_kv(x, pool.values.dtype)
        return QuantizedPool(
            write_entries(pool.values, values_by_row(pool, values), pages, offsets),
            write_scales(pool.scales, scales, pages, offsets),
        )
    return write_entries(pool, encode_kv(values_by_row(pool, x), pool.dtype), pages, offsets)


def values_by_row(pool: Pool, x: Shaped[Array, "..."]) -> Shaped[Array, "rows ..."]:
    """Converts keys or values [..., K, D] to rows of a pool, with the row axis first."""
    rows, _, _, width = pool.shape
    return jnp.moveaxis(to_rows(x, rows, width), -2, 0)


def write_entries(
    pool: Shaped[Array, "rows pages page ..."],
    by_row: Shaped[Array, "rows W ..."],
    pages: Int[Array, " W"],
    offsets: Int[Array, " W"] | None,
) -> Shaped[Array, "rows pages page ..."]:
    """Writes converted keys or values into a pool; the entries are pages or tokens."""
    # The scatter goes into a flat list of entries. With any other formulation XLA changes the
    # layout of the complete pool.
    rows, _, page_size, *token_shape = pool.shape
    if offsets is None:
        entry_shape = (page_size, *token_shape)
        index_in_row = pages
    else:
        entry_shape = tuple(token_shape)
        index_in_row = pages * page_size + offsets

    flat = pool.reshape(-1, *entry_shape)
    entries_per_row = len(flat) // rows
    index = jnp.arange(rows)[:, None] * entries_per_row + index_in_row[None]
    entries = by_row.reshape(-1, *entry_shape)
    # Page tables name only pages of the pool, so the scatter needs no check of its indices.
    written = flat.at[index.ravel()].set(entries, mode="promise_in_bounds")
    return written.reshape(pool.shape)


def write_scales(
    pool: Float[Array, "rows pages heads page"],
    scales: Float[Array, "..."],
    pages: Int[Array, " W"],
    offsets: Int[Array, " W"] | None,
) -> Float[Array, "rows pages heads page"]:
    """Writes scales [W, page, K] of full pages, or [W, K] of single tokens. See `write`."""
    rows, num_pages, heads_per_row, page_size = pool.shape
    missing_heads = rows * heads_per_row - scales.shape[-1]
    padding = [(0, 0)] * (scales.ndim - 1)
    scales = jnp.pad(scales, [*padding, (0, missing_heads)])
    scales = scales.reshape(*scales.shape[:-1], rows, heads_per_row)
    if offsets is None:
        # [W, page, rows, heads] -> [rows, W, heads, page]: an entry has the scales of a page.
        entries = scales.transpose(2, 0, 3, 1).reshape(-1, heads_per_row, page_size)
        index = jnp.arange(rows)[:, None] * num_pages + pages[None]
    else:
        # [W, rows, heads] -> [rows, W, heads]: an entry is a single scale.
        entries = scales.swapaxes(0, 1).ravel()
        head = jnp.arange(heads_per_row)
        page_of_pool = jnp.arange(rows)[:, None] * num_pages + pages[None]
        row_of_scales = page_of_pool[:, :, None] * heads_per_row + head
        index = row_of_scales * page_size + offsets[None, :, None]
    flat = pool.reshape(-1, *entries.shape[1:])
    written = flat.at[index.ravel()].set(entries, mode="promise_in_bounds")
    return written.reshape(pool.shape)
