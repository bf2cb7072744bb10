"""Matrix products with fp32 accumulation and fp32 results, and their derivatives.

    out = product_in_fp32("ni,io->no", x, weight)
    out = linear_product("ni,io->no", x, weight)  # the same, with a custom derivative

The factors may be in bf16, which accelerators and some CPUs multiply at least twice as fast as
fp32. XLA uses these fast products only under conditions, which the functions here meet:

- Both factors are in bf16. An fp32 gradient times a weight in bf16 is computed in fp32.
- On a CPU the result is in fp32. For a result in bf16 XLA:CPU converts both factors to fp32 first.
- On a CPU the sum is over the last axis of the first factor, and that axis is contiguous in memory.
  `product_over_rows` copies the first factor to achieve this.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def product_in_fp32(letters: str, first: jax.Array, second: jax.Array) -> jax.Array:
    """Multiplies two arrays of one type as `jnp.einsum`; the sum and the result are in fp32."""
    return jnp.einsum(letters, first, second, preferred_element_type=jnp.float32)


def rounded_product(letters: str, first: jax.Array, second: jax.Array) -> jax.Array:
    """Multiplies two narrow arrays of one type; the sum is in fp32, and rounded once to the type.

    The derivative is JAX's: `rounded_linear_product` has a better one.
    """

    def in_fp32(first: jax.Array, second: jax.Array) -> jax.Array:
        return product_in_fp32(letters, first, second).astype(first.dtype)

    def at_once(first: jax.Array, second: jax.Array) -> jax.Array:
        return jnp.einsum(letters, first, second, preferred_element_type=first.dtype)

    # cuBLAS sums in fp32 and rounds as it writes. From a result in fp32 XLA would round in a second
    # pass over memory.
    return lax.platform_dependent(first, second, cuda=at_once, default=in_fp32)


def linear_product(
    letters: str,
    x: Float[Array, "*rows inputs"],
    weight: Float[Array, "..."],
) -> Float[Array, "*rows outputs"]:
    """Multiplies rows by a matrix as `jnp.einsum`; the sum and the result are in fp32.

    letters: the axes of the rows and of the matrix, such as "bte,ve->btv". If the factors are
    narrower than fp32, the gradient of the result is rounded to their type before the gradients of
    both factors are computed.
    """
    if is_narrow(x) and x.dtype == weight.dtype:
        return narrow_product(letters, x, weight)
    return product_in_fp32(letters, x, weight)


def is_narrow(x: jax.Array) -> bool:
    """Returns whether the values of an array are narrower than fp32: bf16 or fp16."""
    return jnp.finfo(x.dtype).bits < 32


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def narrow_product(letters: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Computes `linear_product` of factors that are narrower than fp32.

    JAX's derivative would multiply the fp32 gradient of the result by narrow factors.
    """
    return product_in_fp32(letters, x, weight)


def narrow_forward(
    letters: str,
    x: jax.Array,
    weight: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return product_in_fp32(letters, x, weight), (x, weight)


def narrow_backward(
    letters: str,
    kept: tuple[jax.Array, jax.Array],
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of x and of the matrix; that of the product may be in any type."""
    x, weight = kept
    factors, out_letters = letters.split("->")
    x_letters, weight_letters = factors.split(",")
    # Both factors have to be narrow, or the products would be computed in fp32.
    gradient = gradient.astype(x.dtype)
    x_gradient = rounded_product(f"{out_letters},{weight_letters}->{x_letters}", gradient, weight)
    if weight_letters[0] in x_letters:  # the matrix is [inputs, outputs]
        weight_gradient = product_over_rows(x, gradient, weight.dtype)
    else:
        weight_gradient = product_over_rows(gradient, x, weight.dtype)
    return x_gradient, weight_gradient


narrow_product.defvjp(narrow_forward, narrow_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def rounded_linear_product(
    letters: str, x: Float[Array, "*rows inputs"], weight: Float[Array, "..."]
) -> Float[Array, "*rows outputs"]:
    """Computes `linear_product` of narrow factors, with the result rounded to their type."""
    return rounded_product(letters, x, weight)


def rounded_forward(
    letters: str, x: jax.Array, weight: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return rounded_product(letters, x, weight), (x, weight)


rounded_linear_product.defvjp(rounded_forward, narrow_backward)


def product_over_rows(
    first: Float[Array, "*rows I"],
    second: Float[Array, "*rows O"],
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "I O"]:
    """Sums first[row, i] * second[row, o] over all rows: the gradient of a matrix.

    The sum is in fp32, and rounded once to `dtype`.
    """
    rows = "abcdefgh"[: first.ndim - 1]

    def at_once(first: jax.Array, second: jax.Array) -> jax.Array:
        return product_in_fp32(f"{rows}i,{rows}o->io", first, second).astype(dtype)

    def rounded(first: jax.Array, second: jax.Array) -> jax.Array:
        # See `rounded_product`.
        return jnp.einsum(f"{rows}i,{rows}o->io", first, second, preferred_element_type=dtype)

    def from_a_copy(first: jax.Array, second: jax.Array) -> jax.Array:
        columns = transposed_copy(first.reshape(-1, first.shape[-1]))
        product = product_in_fp32("in,no->io", columns, second.reshape(-1, second.shape[-1]))
        return product.astype(dtype)

    # Only XLA:CPU needs the copy, and only for narrow types.
    if not is_narrow(first):
        return at_once(first, second)
    return lax.platform_dependent(first, second, cpu=from_a_copy, cuda=rounded, default=at_once)


def transposed_copy(x: Float[Array, "N I"]) -> Float[Array, "I N"]:
    """Returns the transposed matrix with contiguous rows."""
    # Without the barrier XLA would merge the transposition into the following product. The leading
    # axis of 1 forces a copy: a merely transposed array keeps the memory order and encodes the
    # transposition in its layout, for which XLA:CPU has no bf16 product.
    N, inputs = x.shape
    return lax.optimization_barrier(x.T.reshape(1, inputs, N)).reshape(inputs, N)
