"""Comparisons of trees of arrays, such as the parameters of a model."""

import jax
import numpy as np

from jzero.types import Params


def assert_equal(found: Params, expected: Params) -> None:
    """Asserts that two trees have the same structure and the same bits in every leaf."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
