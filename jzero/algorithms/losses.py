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
from jzero.algorithms.ratios import RATIOS, SequenceSum, Tokens
from jzero.algorithms.surrogates import SURROGATES
from jzero.types import Batch

Stats: TypeAlias = dict[str, Tokens]


def policy_loss(
    logps: Tokens,
    entropy: Tokens,
    batch: Batch,
    sequence_sum: SequenceSum,
    algorithm: Algorithm,
) -> tuple[Tokens, Stats]:
    """Returns the weighted loss of every token, and diagnostics of every token.

        loss_t = w_t [ c_t surrogate(rho_t, A_t) - entropy_coef H_t ] + v_t kl_coef KL_t

    `logps` and `entropy` are the policy's; gradients go through both. `batch` has `old_logps`, and
    `ref_logps` if `kl_coef` is not 0. `sequence_sum` gives every token the sum over its sequence.
    """
    ratio = RATIOS[algorithm.ratio](logps - batch.old_logps, sequence_sum)
    surrogate = SURROGATES[algorithm.surrogate]
    term, is_clipped = surrogate(logps, ratio, batch.advantages, algorithm)
    stats = {
        "clip_fraction": is_clipped.astype(jnp.float32),
        "ratio_shift": jnp.abs(ratio - 1),
    }
    if algorithm.correction:
        gap = jax.lax.stop_gradient(batch.old_logps - batch.sampler_logps)
        stats["correction"] = CORRECTIONS[algorithm.correction](gap, sequence_sum, algorithm)
        term = stats["correction"] * term
    if algorithm.entropy_coef:
        term = term - algorithm.entropy_coef * entropy
    loss = batch.weights * term
    if algorithm.kl_coef:
        kl = KL_ESTIMATORS[algorithm.kl_estimator](logps, batch.ref_logps)
        if algorithm.kl_max:
            kl = jnp.minimum(kl, algorithm.kl_max)
        kl_weights = batch.weights if batch.kl_weights is None else batch.kl_weights
        loss = loss + algorithm.kl_coef * kl_weights * kl
        stats["kl"] = kl
    return loss, stats


def value_loss(values: Tokens, batch: Batch, algorithm: Algorithm) -> tuple[Tokens, Stats]:
    """Returns the weighted loss of the critic's value of every token, and diagnostics.

        loss_t = w_t value_coef / 2 max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2)

    R is the target `batch.returns`, eps is `value_clip`. The clipped form is not in PPO's paper but
    in its reference code (openai/baselines, ppo2).
    """
    clipped_values = values
    if algorithm.value_clip:
        change = values - batch.old_values
        change = jnp.clip(change, -algorithm.value_clip, algorithm.value_clip)
        clipped_values = batch.old_values + change
    error = (values - batch.returns) ** 2
    clipped_error = (clipped_values - batch.returns) ** 2
    loss = 0.5 * algorithm.value_coef * batch.weights * jnp.maximum(error, clipped_error)
    stats = {
        "value_loss": 0.5 * error,
        "value_clip_fraction": (clipped_error > error).astype(jnp.float32),
    }
    return loss, stats
