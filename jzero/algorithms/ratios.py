"""Moved from jzero.algorithms."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

LOG_RATIO = 20.0  # log-ratios are clamped to this, so that exp stays finite


Total = Callable[
    [jax.Array], jax.Array
]  # the sum over the trained tokens of each token's own sequence


def bounded_exp(log_ratio: jax.Array) -> jax.Array:
    return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO, LOG_RATIO))


def sequence_ratio(log_ratio: jax.Array, total: Total) -> jax.Array:
    """The geometric mean of a sequence's token ratios, for each of its tokens (GSPO, arXiv:2507.18071 eq. 7)."""
    return bounded_exp(total(log_ratio) / jnp.maximum(total(jnp.ones_like(log_ratio)), 1.0))


RATIOS = {"token": lambda log_ratio, total: bounded_exp(log_ratio), "sequence": sequence_ratio}
