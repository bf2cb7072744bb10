"""Products of sorted rows with the weights of their groups, against a loop over groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jzero.model.grouped_products import PRODUCTS, GroupedProduct

pytestmark = pytest.mark.usefixtures("quick_compilation")

every_product = pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS.keys())
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
    rng = np.random.default_rng(0)
    rows, weights = rng.standard_normal((80, 5)), rng.standard_normal((4, 5, 3))
    cotangent = rng.standard_normal((80, 3))

    expected, of_rows, of_weights = np.zeros((80, 3)), np.zeros((80, 5)), np.zeros((4, 5, 3))
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
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
