"""What makes a token's log-probability the same, to the last bit, in every program of a run.

With `model.exact` the sampler's programs and the trainer's share one forward pass whose bits do not
depend on how many tokens are computed beside a token. `attention/exact.py` is its attention. Here
are the other rules: how many rows a product has, how it is computed on a TPU, and the softmax over
the vocabulary. docs/exact.md explains them.
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

# Rows of a product. Products of other numbers of rows take other paths through the libraries that
# XLA:CPU calls, with other bits, so that every product has this number (`in_tiles`).
ROW_TILE = 64

# On a TPU the default product of a row depends on the number of rows; this one does not.
TPU_PRODUCTS = "BF16_BF16_F32"


@dataclass(frozen=True)
class ExactRows:
    """How the products of an exact forward pass are computed."""

    shards: int = 1  # devices that XLA splits the rows over; each has ROW_TILE of every product
    precision: str = ""  # as jax.default_matmul_precision; "": the platform's default

    def pad(self, x: Shaped[Array, "rows ..."]) -> Shaped[Array, "padded ..."]:
        """Appends rows of zeros until every shard has whole tiles."""
        return jnp.pad(x, [(0, -len(x) % (self.shards * ROW_TILE))] + [(0, 0)] * (x.ndim - 1))

    def products(self) -> AbstractContextManager[object]:
        """Returns the context in which products are traced."""
        if not self.precision:
            return contextlib.nullcontext()
        return jax.default_matmul_precision(self.precision)


def compiler_options(exact: ExactRows | None) -> dict[str, bool | str] | None:
    """Returns the options of XLA that a program of a run is compiled with, None for its own.

    By default XLA may leave out a rounding to bf16 and back, where it finds one. What it finds
    depends on the program: a number that goes to another device goes as fp32 on a CPU.
    """
    return None if exact is None else {"xla_allow_excess_precision": False}


def exact_rows(mesh: Mesh, shards: int = 1) -> ExactRows:
    """Returns how a program on the devices of `mesh` computes products.

    shards: devices that rows are split over by XLA. Inside a shard_map over rows it is 1.
    """
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

    So every product has one shape, on every device. N is a multiple of shards * ROW_TILE, and the
    first N / shards rows are on the first shard. The backward pass is that of the product of all
    rows: a gradient of the weight that was summed tile by tile would be rounded as often.
    """
    width = x.shape[1]

    def of_tile(rows: Float[Array, "shards rows inputs"]) -> Float[Array, "shards rows outputs"]:
        return product(rows.reshape(-1, width), weight).reshape(shards, ROW_TILE, -1)

    # A loop over the tiles of every shard. Over the tiles in their order, it would need the rows of
    # one device after the other on all devices.
    tiles = jnp.swapaxes(x.reshape(shards, -1, ROW_TILE, width), 0, 1)
    # Between the barriers a loop over one tile is no other product than a loop over several: XLA
    # leaves out rows of padding that are cut off again.
    out = lax.optimization_barrier(lax.map(of_tile, lax.optimization_barrier(tiles)))
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
    """Returns the gradients of x and the weight."""
    _, backward = jax.vjp(product, *kept)
    return backward(gradient)


in_tiles.defvjp(in_tiles_forward, in_tiles_backward)


def rounded(product: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns finite products as they are, and keeps the compiler from adding them unrounded.

    A CPU has one operation that multiplies and adds, and rounds once. Whether the compiler takes it
    depends on the program around; here it finds a maximum between product and sum.
    """
    return jnp.maximum(product, jnp.finfo(product.dtype).min)


def exact_token_logps(
    logits: Float[Array, "*batch V"],
    tokens: Int[Array, "*batch"],
    temperature: Float[Array, "*batch"] | float,
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """Computes log p(token) and the entropy of p = softmax(logits / temperature), in fp32.

    The log-probability has the same bits in every program; the entropy need not have.
    """
    # No token is negative, but XLA does not know that, so the scale is no constant: XLA would
    # multiply by the reciprocal of a constant, and divide by what it does not know.
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
