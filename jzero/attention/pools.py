"""Pools of pages of keys and values: how they are stored and written.

A pool is [rows, pages, page_size, width]. XLA and the GPU's kernel keep one KV head in a row:
rows = K, width = D. The TPU's kernel asks for rows of 128 numbers, which hold several heads where
heads are small. The pages of all layers lie behind each other: the page axis is [L * pages].
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped


def one_row_per_head(num_heads: int, head_dim: int) -> tuple[int, int]:
    """Returns (rows, width) of a token in a pool where every KV head has a row of its own."""
    return num_heads, head_dim


def kv_storage(dtype: str, platform: str) -> DTypeLike:
    """Returns the element type of the pools for `rollout.kv_dtype` and a platform.

    On CPU bfloat16 is stored as its bits in uint16: XLA:CPU would convert a whole bfloat16 pool to
    fp32 and back around every write.
    """
    if dtype == "bfloat16" and platform == "cpu":
        return jnp.uint16
    return jnp.dtype(dtype)


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
    """Puts width // D neighboring heads into each row, and zeros where no head is."""
    *batch, K, D = x.shape
    heads_per_row = width // D
    missing_heads = rows * heads_per_row - K
    unused_columns = width - heads_per_row * D

    x = pad_end(x, missing_heads, 0)
    x = x.reshape(*batch, rows, heads_per_row * D)
    return pad_end(x, 0, unused_columns)


def from_rows(x: Float[Array, "*batch rows W"], K: int, D: int) -> Float[Array, "*batch K D"]:
    """Returns the heads that `to_rows` has put into rows."""
    *batch, rows, width = x.shape
    heads_per_row = width // D
    heads = x[..., : heads_per_row * D].reshape(*batch, rows * heads_per_row, D)
    return heads[..., :K, :]


def pad_end(x: jax.Array, rows: int, columns: int) -> jax.Array:
    """Appends zeros to the last two axes."""
    other_axes = [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, [*other_axes, (0, rows), (0, columns)])


def read(
    pool: Shaped[Array, "rows pages page width"],
    pages: Int[Array, " W"],
    kv_heads: int,
    head_dim: int,
    dtype: DTypeLike,
) -> Float[Array, "W page K D"]:
    """Returns whole pages of keys or values, as `write` has taken them."""
    by_row = jnp.moveaxis(decode_kv(pool[:, pages], dtype), 0, -2)
    return from_rows(by_row, kv_heads, head_dim)


def write(
    pool: Shaped[Array, "rows pages page width"],
    x: Float[Array, "..."],
    pages: Int[Array, " W"],
    offsets: Int[Array, " W"] | None = None,
) -> Shaped[Array, "rows pages page width"]:
    """Returns the pool with keys or values written into it.

    Without `offsets`, x [W, page, K, D] are whole pages for pages[W] of the pool. With `offsets`,
    x [W, K, D] are single tokens for the places (pages[W], offsets[W]).

    The pool is written as a flat list of entries, which are pages or tokens. Any other spelling
    makes XLA lay out the whole pool anew.
    """
    rows, _, page_size, width = pool.shape
    if offsets is None:
        entry_shape = (page_size, width)
        index_in_row = pages
    else:
        entry_shape = (width,)
        index_in_row = pages * page_size + offsets

    flat = pool.reshape(-1, *entry_shape)
    entries_per_row = len(flat) // rows
    index = jnp.arange(rows)[:, None] * entries_per_row + index_in_row[None]
    by_row = jnp.moveaxis(to_rows(x, rows, width), -2, 0)
    entries = encode_kv(by_row.reshape(-1, *entry_shape), pool.dtype)
    written = flat.at[index.ravel()].set(entries, mode="promise_in_bounds")
    return written.reshape(pool.shape)
