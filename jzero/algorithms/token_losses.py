"""Losses of packed rows [B, T] whose kind and numbers are data: no value compiles anything.

With p the model's probability of a target, q its `sampler_logps`, r = p / q, A the `advantages` and
w the `weights`, the terms of a position are

    cross_entropy        sum over K of w (-log p)   w may be fractional or negative
    importance_sampling  -r A
    ppo                  -min(r A, clip(r, low, high) A)        (Schulman et al. 2017, eq. 7)
    cispo                -stop_gradient(clip(r, low, high)) A log p    (CISPO, arXiv:2506.13585)
    dro                  -(A log p - beta / 2 (log p - log q)^2)       (arXiv:2405.19107)

A position may have K targets, of which all but the cross-entropy read the first. `low` and `high`
are the fields `ratio_low` and `ratio_high` of the batch. The penalty of dro does not vanish with
the advantage, so positions of weight 0 have none.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jzero.algorithms.losses import TokenMetrics, cross_entropy, present
from jzero.algorithms.ratios import SequenceSum, Tokens, bounded_exp
from jzero.algorithms.surrogates import clipped_gain, clipped_weight, importance_gain
from jzero.types import Batch

KINDS = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")


def token_loss(
    kind: Int[Array, ""],
    beta: Float[Array, ""],
    outputs: tuple[Float[Array, "B T K"], ...],
    batch: Batch[jax.Array],
    sequence_sum: SequenceSum,
    is_on_policy: jax.Array,
) -> tuple[Tokens, TokenMetrics]:
    """Returns the loss terms of every position. `kind` is an index of KINDS.

    The last four arguments are those of every loss (`training.heads.Loss`); with
    `jax.tree_util.Partial(token_loss, kind, beta)` the first two are data.
    """
    logps, weights = outputs[0], present(batch.weights)
    first, old = logps[..., 0], present(batch.sampler_logps)
    advantages = present(batch.advantages)
    low, high = present(batch.ratio_low), present(batch.ratio_high)

    def of_cross_entropy() -> Tokens:
        # `where`: a target of weight 0 may have log-probability -inf.
        return jnp.where(weights != 0, cross_entropy(logps, weights), 0).sum(axis=-1)

    def importance_sampling() -> Tokens:
        return -importance_gain(bounded_exp(first - old), advantages)

    def ppo() -> Tokens:
        gain, _ = clipped_gain(bounded_exp(first - old), advantages, low, high)
        return -gain

    def cispo() -> Tokens:
        weight = clipped_weight(bounded_exp(first - old), low, high)
        return -weight * advantages * first

    def dro() -> Tokens:
        penalty = 0.5 * beta * (first - old) ** 2
        return -(advantages * first - jnp.where(weights[..., 0] != 0, penalty, 0))

    # All five are cheap next to the model, and one program serves them all.
    terms = lax.switch(kind, (of_cross_entropy, importance_sampling, ppo, cispo, dro))
    return terms, {}
