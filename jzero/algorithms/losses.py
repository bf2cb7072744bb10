"""The loss of the policy and the loss of the critic, term by term, for packed rows [B, T].

Both are called inside the jitted update. They return weighted terms, which the update sums over the
trained tokens of the whole optimizer step, and diagnostics, which it sums in the same way.
"""

from typing import TypeAlias

import jax
import jax.numpy as jnp

from jzero.algorithms.algorithm import Algorithm
from jzero.algorithms.corrections import CORRECTIONS
from jzero.algorithms.kl import KL_ESTIMATORS
from jzero.algorithms.ratios import MAX_LOG_RATIO, RATIOS, SequenceSum, Tokens
from jzero.algorithms.surrogates import SURROGATES
from jzero.types import Batch

Stats: TypeAlias = dict[str, Tokens]


def policy_loss(
    logps: Tokens,
    entropy: Tokens,
    batch: Batch[jax.Array],
    sequence_sum: SequenceSum,
    algorithm: Algorithm,
    full_logps: Tokens | None = None,
) -> tuple[Tokens, Stats]:
    """Returns the weighted loss of every token, and diagnostics of every token.

        loss_t = w_t [ c_t surrogate(rho_t, A_t) - entropy_coef H_t + ratio_penalty log^2 rho_t ]
                 + v_t kl_coef KL_t

    `logps` and `entropy` are the policy's; gradients go through both. `batch` has `old_logps`, and
    `ref_logps` if `kl_coef` is not 0. `sequence_sum` gives every token the sum over its sequence.
    `full_logps` are those of the KL, over the full vocabulary as the reference's are, where
    `logps` are over the tokens that the sampler kept. None: they are the same.
    """
    old_logps = present(batch.old_logps)
    weights = present(batch.weights)
    ratio = RATIOS[algorithm.ratio](logps - old_logps, sequence_sum)
    surrogate = SURROGATES[algorithm.surrogate]
    term, is_clipped = surrogate.compute(logps, ratio, present(batch.advantages), algorithm)
    stats = {
        "clip_fraction": is_clipped.astype(jnp.float32),
        "clip_above": (is_clipped & (ratio > 1)).astype(jnp.float32),
        "clip_below": (is_clipped & (ratio < 1)).astype(jnp.float32),
        "ratio_shift": jnp.abs(ratio - 1),
    }
    if algorithm.correction:
        # The correction is a constant: old_logps may be the policy's own log-probs.
        gap = jax.lax.stop_gradient(old_logps - present(batch.sampler_logps))
        correction = CORRECTIONS[algorithm.correction]
        correction_ratio = correction.ratio(gap, sequence_sum)
        factor = correction.factor(correction_ratio, algorithm)
        term = factor * term
        is_above = correction_ratio > algorithm.correction_high
        is_below = (correction_ratio < algorithm.correction_low) & (factor == 0)
        stats |= {
            "correction": factor,
            "correction_above": is_above.astype(jnp.float32),
            "correction_below": is_below.astype(jnp.float32),
        }
    if algorithm.entropy_coef:
        term = term - algorithm.entropy_coef * entropy
    if algorithm.ratio_penalty:
        log_ratio = jnp.clip(logps - old_logps, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        term = term + algorithm.ratio_penalty * log_ratio**2
    loss = weights * term
    if algorithm.kl_coef:
        kl_logps = logps if full_logps is None else full_logps
        kl = KL_ESTIMATORS[algorithm.kl_estimator](kl_logps, present(batch.ref_logps))
        if algorithm.kl_max:
            kl = jnp.minimum(kl, algorithm.kl_max)
        kl_weights = weights if batch.kl_weights is None else batch.kl_weights
        loss = loss + algorithm.kl_coef * kl_weights * kl
        stats["kl"] = kl
    return loss, stats


def environment_loss(logps: Tokens, weights: Tokens, algorithm: Algorithm) -> Tokens:
    """Returns the weighted cross-entropy of every token that the environment replied.

        loss_e = - u_e environment_coef log pi(e)

    `weights` are u. Source: ECHO, arXiv:2605.24517.
    """
    return -algorithm.environment_coef * weights * logps


def value_loss(
    values: Tokens,
    batch: Batch[jax.Array],
    algorithm: Algorithm,
) -> tuple[Tokens, Stats]:
    """Returns the weighted loss of the critic's value of every token, and diagnostics.

        loss_t = w_t value_coef / 2 max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2)

    R is the target `batch.returns`, eps is `value_clip`. The clipped form is not in PPO's paper but
    in its reference code (openai/baselines, ppo2).
    """
    old_values = present(batch.old_values)
    targets = present(batch.returns)
    clipped_values = values
    if algorithm.value_clip:
        change = jnp.clip(values - old_values, -algorithm.value_clip, algorithm.value_clip)
        clipped_values = old_values + change
    error = (values - targets) ** 2
    clipped_error = (clipped_values - targets) ** 2
    worse_error = jnp.maximum(error, clipped_error)
    loss = 0.5 * algorithm.value_coef * present(batch.weights) * worse_error
    stats = {
        "value_loss": 0.5 * error,
        "value_clip_fraction": (clipped_error > error).astype(jnp.float32),
    }
    return loss, stats


def present(array: jax.Array | None) -> jax.Array:
    """Returns a field of the batch that this algorithm needs."""
    assert array is not None, "the batch lacks a field that the algorithm needs"
    return array
