"""Products of sorted rows with the weights of their groups, against a loop over groups."""

import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike

from jzero.errors import UserError
from jzero.model.grouped_products import PRODUCTS, GroupedProduct, product_of_platform
from jzero.model.grouped_triton import triton_product
from jzero.planning.compiling import compile_only_devices

pytestmark = pytest.mark.usefixtures("quick_compilation")

HERE = PRODUCTS | {"triton": partial(triton_product, interpret=True)}  # as this CPU computes them
every_product = pytest.mark.parametrize("product", HERE.values(), ids=HERE.keys())
SIZES = {
    "even": [20, 20, 20, 20],
    "uneven": [0, 61, 1, 9],  # 9 rows have no group
    "one group": [0, 0, 80, 0],
    "none": [0, 0, 0, 0],
    "ends of blocks": [8, 16, 7, 17],
}


@every_product
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_products_and_gradients_are_those_of_a_loop(
    product: GroupedProduct, sizes: list[int]
) -> None:
    compare_with_loop(product, sizes, num_rows=80, inputs=5, outputs=3, atol=2e-5)


@every_product
def test_groups_and_weights_of_several_tiles(product: GroupedProduct) -> None:
    sizes = [0, 161, 5, 130]
    compare_with_loop(product, sizes, num_rows=300, inputs=150, outputs=140, atol=1e-4)


def compare_with_loop(
    product: GroupedProduct,
    sizes: list[int],
    num_rows: int,
    inputs: int,
    outputs: int,
    atol: float,
) -> None:
    """Compares a product and its gradients with those of a loop over groups."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((num_rows, inputs))
    weights = rng.standard_normal((len(sizes), inputs, outputs))
    cotangent = rng.standard_normal((num_rows, outputs))

    expected, of_rows, of_weights = map(np.zeros_like, (cotangent, rows, weights))
    first = 0
    for group, size in enumerate(sizes):
        part = slice(first, first + size)
        expected[part] = rows[part] @ weights[group]
        of_rows[part] = cotangent[part] @ weights[group].T
        of_weights[group] = rows[part].T @ cotangent[part]
        first += size

    @jax.jit
    def both(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> tuple:
        out, backward = jax.vjp(lambda r, w: product(r, w, sizes, jnp.float32), rows, weights)
        return out, *backward(jnp.asarray(cotangent, jnp.float32))

    found = both(jnp.float32(rows), jnp.float32(weights), jnp.int32(sizes))

    for ours, theirs in zip(found, (expected, of_rows, of_weights), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=atol)


@every_product
def test_integers_are_weights_without_a_gradient(product: GroupedProduct) -> None:
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.standard_normal((40, 20)), jnp.bfloat16)
    weights = jnp.asarray(rng.integers(-127, 128, (3, 20, 10)), jnp.int8)
    sizes = jnp.int32([7, 0, 30])

    @jax.jit
    def both(rows: jax.Array) -> tuple:
        out, backward = jax.vjp(lambda r: product(r, weights, sizes, jnp.float32), rows)
        return out, backward(jnp.ones_like(out))[0]

    out, of_rows = both(rows)

    group = np.repeat([0, 2], [7, 30])
    chosen = np.asarray(weights, np.float64)[group]
    exact = np.einsum("ni,nio->no", np.asarray(rows[:37], np.float64), chosen)
    np.testing.assert_allclose(out[:37], exact, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(np.float64(of_rows[:37]), chosen.sum(axis=2), rtol=1e-2, atol=1)
    assert not out[37:].any() and not of_rows[37:].any()


def abstract(
    rows: tuple[int, ...],
    weights: tuple[int, ...],
    dtype: DTypeLike,
    place: SingleDeviceSharding | None = None,
) -> list[jax.ShapeDtypeStruct]:
    """Returns arguments of a product with weights of a type. 8-bit ones have rows in bfloat16."""
    of_rows = jnp.bfloat16 if jnp.dtype(dtype).itemsize == 1 else dtype
    shapes = (rows, of_rows), (weights, dtype), (weights[:1], jnp.int32)
    return [jax.ShapeDtypeStruct(*shape, sharding=place) for shape in shapes]


def test_arrays_that_are_too_large_for_a_kernel_are_named() -> None:
    arguments = abstract((2**21, 2048), (8, 2048, 16), jnp.bfloat16)
    with pytest.raises(UserError, match="4.3 billion numbers.*lower train.microbatch_tokens"):
        jax.eval_shape(partial(triton_product, dtype=jnp.bfloat16), *arguments)


needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None, reason="jax-cuda12-plugin is not installed"
)


@needs_cuda
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn, jnp.float32])
def test_gpus_multiply_by_every_type_of_weights(dtype: DTypeLike) -> None:
    place = SingleDeviceSharding(compile_only_devices("h100:1")[0])
    arguments = abstract((64, 96), (8, 96, 40), dtype, place)
    product = jax.jit(partial(triton_product, dtype=jnp.float32), out_shardings=place)
    assert "triton" in product.lower(*arguments).compile().as_text()


@needs_cuda
def test_gpus_need_no_copy_of_the_rows_for_each_group() -> None:
    """XLA's `lax.ragged_dot` would take 2 GiB here for the product, and 6 for both gradients."""
    [device] = compile_only_devices("h100:1")
    place = SingleDeviceSharding(device)
    product = PRODUCTS[product_of_platform("gpu")]

    def total(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        return product(rows, weights, sizes, jnp.bfloat16).astype(jnp.float32).sum()

    arguments = abstract((4096, 2048), (128, 2048, 768), jnp.bfloat16, place)
    gradients = jax.jit(jax.grad(total, argnums=(0, 1)), out_shardings=place)
    compiled = gradients.lower(*arguments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 2**20
