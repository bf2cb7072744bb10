"""Attention of `model.exact`: the definition's values, and one set of bits packed and paged."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jzero.attention import exact, xla
from jzero.attention.pools import to_rows
from jzero.types import RowLayout

H, K, D = 4, 2, 16
PAGE = 8


def random_heads(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.usefixtures("quick_compilation")  # the values have a tolerance
def test_packed_sequences_get_the_values_of_the_definition() -> None:
    """A row has a shared prefix, two sequences behind it, one longer than a block, and padding."""
    prefix, own = 8, 88
    T = prefix + own
    q, k, v = random_heads(0, 1, T, H, D), random_heads(1, 1, T, K, D), random_heads(2, 1, T, K, D)
    segments = np.zeros((1, T), np.int32)
    segments[0, :5] = 1
    segments[0, prefix : prefix + 70] = 1
    segments[0, prefix + 70 : prefix + 80] = 2
    layout = RowLayout(prefix, 1, own)

    ours = jax.jit(exact.packed, static_argnums=4)(q, k, v, segments, layout)
    defined = jax.jit(xla.packed, static_argnums=4)(q, k, v, segments, layout)

    is_token = segments[0] > 0
    np.testing.assert_allclose(ours[0, is_token], defined[0, is_token], atol=2e-6)


@pytest.mark.parametrize(
    ("pool_rows", "soft_cap"),
    [((K, D), 0.0), ((K // 2, 2 * D), 0.0), ((K, D), 1.5)],
    ids=["a head", "two heads", "bounded scores"],
)
def test_a_slot_has_the_bits_of_a_packed_row(pool_rows: tuple[int, int], soft_cap: float) -> None:
    T = 96
    q, k, v = random_heads(0, 1, T, H, D), random_heads(1, 1, T, K, D), random_heads(2, 1, T, K, D)
    positions = jnp.array([0, 3, 40, 63, 64, 95])
    slots = len(positions)

    def pool(x: jax.Array) -> jax.Array:
        rows, width = pool_rows
        return jnp.moveaxis(to_rows(x[0], rows, width), 1, 0).reshape(rows, -1, PAGE, width)

    table = jnp.tile(jnp.arange(T // PAGE), (slots, 1))
    shared = jnp.zeros(slots, jnp.int32)
    segments = jnp.ones((1, T), jnp.int32)

    packed = jax.jit(partial(exact.packed, soft_cap=soft_cap), static_argnums=4)
    paged = jax.jit(partial(exact.paged, soft_cap=soft_cap), static_argnums=6)
    in_row = packed(q, k, v, segments, RowLayout(0, 1, T))
    in_slots = paged(q[0, positions], pool(k), pool(v), table, positions + 1, shared, K)

    np.testing.assert_array_equal(in_row[0, positions], in_slots)


@pytest.mark.parametrize(
    ("heads", "head_dim", "expected"), [(2, 64, (1, 128)), (3, 64, (3, 64)), (8, 128, (8, 128))]
)
def test_small_heads_share_a_row_of_the_pool(
    heads: int, head_dim: int, expected: tuple[int, int]
) -> None:
    assert exact.pool_rows(heads, head_dim) == expected
