"""Products with sums in fp32, and their derivatives, against loops over rows in float64."""

import re
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jzero.numerics.products import (
    linear_product,
    product_in_fp32,
    product_over_rows,
    transposed_copy,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

HALF_UNIT = 2**-8  # the most that rounding to bf16 changes a number, relatively

# The letters of a product, and the shapes of its rows and its matrix.
PRODUCTS = {
    "inputs first": ("ni,io->no", (48, 40), (40, 24)),
    "outputs first": ("ne,ve->nv", (48, 40), (24, 40)),
    "rows of a batch": ("bte,ev->btv", (3, 16, 40), (40, 24)),
    "rows of a batch, outputs first": ("bte,ve->btv", (3, 16, 40), (24, 40)),
}
every_product = pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS.keys())
Product = tuple[str, tuple[int, ...], tuple[int, ...]]


def random_array(rng: np.random.Generator, *shape: int) -> jax.Array:
    """Returns random numbers in bf16."""
    return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)


def in_float64(x: jax.Array) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)


def gradients(
    product: Callable[[jax.Array, jax.Array], jax.Array],
    x: jax.Array,
    weight: jax.Array,
    of_out: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of both factors, for a gradient of the result."""
    _, backward = jax.vjp(product, x, weight)
    return backward(of_out)


def loops(letters: str, x: jax.Array, weight: jax.Array, of_out: jax.Array) -> list[np.ndarray]:
    """Returns the product and the gradients of both factors, one row after the other."""
    matrix = in_float64(weight)
    outputs_first = letters.split("->")[0].split(",")[1] == "ve"
    if outputs_first:
        matrix = matrix.T
    rows = in_float64(x).reshape(-1, matrix.shape[0])
    of_rows = in_float64(of_out).reshape(-1, matrix.shape[1])

    out, of_x, of_matrix = np.zeros_like(of_rows), np.zeros_like(rows), np.zeros_like(matrix)
    for number, (row, of_row) in enumerate(zip(rows, of_rows, strict=True)):
        out[number] = row @ matrix
        of_x[number] = matrix @ of_row
        of_matrix += np.outer(row, of_row)
    of_weight = of_matrix.T if outputs_first else of_matrix
    return [out.reshape(of_out.shape), of_x.reshape(x.shape), of_weight]


@every_product
def test_a_product_in_bf16_and_its_gradients_are_those_of_loops(product: Product) -> None:
    letters, shape, weight_shape = product
    rng = np.random.default_rng(0)
    x, weight = random_array(rng, *shape), random_array(rng, *weight_shape)
    of_out = random_array(rng, *shape[:-1], 24)

    @jax.jit
    def both(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, ...]:
        out, backward = jax.vjp(partial(linear_product, letters), x, weight)
        return out, *backward(of_out.astype(jnp.float32))

    out, of_x, of_weight = both(x, weight)

    expected, expected_of_x, expected_of_weight = loops(letters, x, weight, of_out)
    assert (out.dtype, of_x.dtype, of_weight.dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    # Sums in bf16 would be wrong by several units.
    np.testing.assert_allclose(in_float64(of_x), expected_of_x, rtol=HALF_UNIT, atol=1e-5)
    np.testing.assert_allclose(in_float64(of_weight), expected_of_weight, rtol=HALF_UNIT, atol=1e-5)


def test_the_gradient_of_a_product_in_bf16_is_rounded_before_it_is_multiplied() -> None:
    rng = np.random.default_rng(0)
    x, weight = random_array(rng, 8, 16), random_array(rng, 16, 4)
    of_out = jnp.asarray(rng.standard_normal((8, 4)), jnp.float32)
    rounded = of_out.astype(jnp.bfloat16).astype(jnp.float32)
    assert not jnp.array_equal(rounded, of_out)

    product = partial(linear_product, "ni,io->no")
    ours = gradients(product, x, weight, of_out)
    theirs = gradients(product, x, weight, rounded)

    for own, of_rounded in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(own, of_rounded)


def test_a_product_in_fp32_has_the_derivative_of_jax() -> None:
    rng = np.random.default_rng(0)
    x, weight, of_out = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in [(8, 16), (16, 4), (8, 4)]
    )

    ours = gradients(partial(linear_product, "ni,io->no"), x, weight, of_out)
    theirs = gradients(partial(jnp.einsum, "ni,io->no"), x, weight, of_out)

    for own, of_jax in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(own, of_jax)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_sum_over_the_rows_of_a_batch_is_that_of_a_loop(dtype: jnp.dtype) -> None:
    rng = np.random.default_rng(0)
    first, second = random_array(rng, 3, 16, 5).astype(dtype), random_array(rng, 3, 16, 7)
    second = second.astype(dtype)

    found = jax.jit(product_over_rows)(first, second)

    expected = np.zeros((5, 7))
    for row in range(3):
        for token in range(16):
            expected += np.outer(in_float64(first)[row, token], in_float64(second)[row, token])
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_transposed_copy_is_the_transposed_matrix() -> None:
    x = jnp.arange(24, dtype=jnp.bfloat16).reshape(4, 6)
    np.testing.assert_array_equal(jax.jit(transposed_copy)(x), x.T)


# -- what XLA:CPU makes of them --------------------------------------------------------------------


def types_of_factors(text: str) -> list[tuple[str, str]]:
    """Returns the types of both factors of every product in the text of a compiled program."""
    found = []
    types: dict[str, str] = {}
    for line in text.splitlines():
        if line.endswith("{"):  # names are those of one computation
            types = {}
        named = re.match(r"\s*(?:ROOT )?(%\S+) = (\w+)\[", line)
        if named:
            types[named[1]] = named[2]
        factors = re.search(r" dot\(.*?(%[\w.-]+), .*?(%[\w.-]+)\)", line)
        if factors:
            found.append((types[factors[1]], types[factors[2]]))
    return found


def test_a_cpu_multiplies_bf16_by_bf16_forward_and_backward() -> None:
    x, weight = jnp.ones((256, 128), jnp.bfloat16), jnp.ones((128, 256), jnp.bfloat16)
    head = jnp.ones((64, 256), jnp.bfloat16)
    alone = jax.jit(partial(product_in_fp32, "ni,io->no"))
    if types_of_factors(alone.lower(x, weight).compile().as_text()) != [("bf16", "bf16")]:
        pytest.skip("XLA has no product of bf16 for this CPU")

    def loss(x: jax.Array, weight: jax.Array, head: jax.Array) -> jax.Array:
        hidden = linear_product("ni,io->no", x, weight).astype(x.dtype)
        return jnp.sum(jnp.tanh(linear_product("ne,ve->nv", hidden, head)))

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    factors = types_of_factors(gradient.lower(x, weight, head).compile().as_text())

    # Two products forward, and for each of them two backward.
    assert factors == [("bf16", "bf16")] * 6
