"""Makes a token's log-probability identical, to the last bit, in every program of a run.

With `model.exact` the sampler's programs and the trainer's share one forward pass whose bits do not
depend on how many other tokens are computed together with a token. `attention/exact.py` is its
attention. This module has the other parts: the number of rows of a product, the product algorithm
on a TPU, and the softmax over the vocabulary. docs/models.md explains them.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PyTree, Shaped

from jzero.attention.exact import sum_by_halves

# Rows of every product (`in_tiles`). With another number of rows, the libraries that XLA:CPU calls
# take other code paths, with other bits.
ROW_TILE = 64

# On a TPU the default product of a row depends on the number of rows; this algorithm's does not.
TPU_PRODUCTS = "BF16_BF16_F32"


@dataclass(frozen=True)
class ExactRows:
    """How the products of an exact forward pass are computed."""

    shards: int = 1  # devices that XLA splits the rows over; each has ROW_TILE rows of a product
    precision: str = ""  # a value of jax.default_matmul_precision; "": the platform's default

    def pad(self, x: Shaped[Array, "rows ..."]) -> Shaped[Array, "padded ..."]:
        """Appends rows of zeros until every shard has complete tiles."""
        return jnp.pad(x, [(0, -len(x) % (self.shards * ROW_TILE))] + [(0, 0)] * (x.ndim - 1))

    def products(self) -> AbstractContextManager[object]:
        """Returns the context manager in which products have to be traced."""
        if not self.precision:
            return contextlib.nullcontext()
        return jax.default_matmul_precision(self.precision)


def compiler_options(exact: ExactRows | None) -> dict[str, bool | str] | None:
    """Returns the XLA options that a program of a run is compiled with; None: the defaults."""
    # By default XLA may leave out a rounding to bf16 and back where it finds one. Whether it finds
    # one depends on the program: for example, a CPU sends bf16 values to another device as fp32.
    return None if exact is None else {"xla_allow_excess_precision": False}


def exact_rows(mesh: Mesh, shards: int = 1) -> ExactRows:
    """Returns how a program on the devices of `mesh` computes products.

    shards: number of devices that XLA splits the rows over; 1 inside a shard_map over rows.
    """
    # Only TPUs need another algorithm than the default.
    is_tpu = mesh.devices.flat[0].platform == "tpu"
    return ExactRows(shards, TPU_PRODUCTS if is_tpu else "")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def in_tiles(
    product: Callable[[jax.Array, PyTree], jax.Array],
    shards: int,
    x: Float[Array, "N inputs"],
    weight: PyTree,
) -> Float[Array, "N outputs"]:
    """Computes product(x, weight) for ROW_TILE rows of each shard at a time.

    All products then have the same shape on every device. N is a multiple of shards * ROW_TILE, and
    the first N / shards rows are on the first shard. The backward pass differentiates the product
    of all rows at once: a weight gradient that is summed tile by tile would be rounded once per
    tile.
    """
    width = x.shape[1]

    def multiply_tile(
        rows: Float[Array, "shards rows inputs"],
    ) -> Float[Array, "shards rows outputs"]:
        return product(rows.reshape(-1, width), weight).reshape(shards, ROW_TILE, -1)

    # Each step of the loop takes one tile of every shard. A loop over the tiles in row order would
    # move the rows of one device after the other to all devices.
    tiles = jnp.swapaxes(x.reshape(shards, -1, ROW_TILE, width), 0, 1)
    # The barriers keep a loop over a single tile the same product as a loop over several. Without
    # them, XLA would not compute rows of padding that are cut off later.
    out = lax.optimization_barrier(lax.map(multiply_tile, lax.optimization_barrier(tiles)))
    return jnp.swapaxes(out, 0, 1).reshape(len(x), -1)


def in_tiles_forward(
    product: Callable[[jax.Array, PyTree], jax.Array], shards: int, x: jax.Array, weight: PyTree
) -> tuple[jax.Array, tuple[jax.Array, PyTree]]:
    return in_tiles(product, shards, x, weight), (x, weight)


def in_tiles_backward(
    product: Callable[[jax.Array, PyTree], jax.Array],
    shards: int,
    kept: tuple[jax.Array, PyTree],
    gradient: jax.Array,
) -> tuple[jax.Array, PyTree]:
    _, backward = jax.vjp(product, *kept)
    return backward(gradient)


in_tiles.defvjp(in_tiles_forward, in_tiles_backward)


def rounded(product: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns finite products unchanged, but keeps the compiler from fusing them into a sum.

    A CPU has a fused multiply-add, which rounds once. Whether the compiler uses it depends on the
    surrounding program; the maximum separates the product from the sum.
    """
    return jnp.maximum(product, jnp.finfo(product.dtype).min)


def exact_token_logps(
    logits: Float[Array, "*batch V"],
    tokens: Int[Array, "*batch"],
    temperature: Float[Array, "*batch"] | float,
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """Computes log p(token) and the entropy of p = softmax(logits / temperature), in fp32.

    The log-probability has the same bits in every program; the entropy may differ.
    """
    # XLA replaces a division by a constant with a product by its reciprocal, which has other bits.
    # The condition keeps the scale from being a constant: tokens are never negative, but XLA cannot
    # infer that.
    scale = jnp.where(tokens < 0, 1.0, jnp.broadcast_to(jnp.float32(temperature), tokens.shape))
    largest = lax.stop_gradient(logits.max(axis=-1))
    shifted = (logits - largest[..., None]) / scale[..., None]
    masses = jnp.exp(shifted)
    total = sum_by_halves(masses)
    at_token = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    logps = (at_token - largest) / scale - jnp.log(total)
    # H(p) = log Z - sum_v p_v logit_v
    entropy = jnp.log(total) - jnp.sum(masses / total[..., None] * shifted, axis=-1)
    return logps, entropy
