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
    batch: Batch[jax.Array],
    sequence_sum: SequenceSum,
    algorithm: Algorithm,
) -> tuple[Tokens, Stats]:
    """Returns the weighted loss of every token, and diagnostics of every token.

        loss_t = w_t [ rl_coef c_t surrogate(rho_t, A_t) - entropy_coef H_t ]
                 + u_t ce_coef (-log pi_t) + v_t kl_coef KL_t

    `logps` and `entropy` are the policy's; gradients go through both. `batch` has `old_logps`, and
    `ref_logps` if `kl_coef` is not 0. `sequence_sum` gives every token the sum over its sequence. A
    part whose factor is 0 is not computed.
    """
    weights = present(batch.weights)
    parts: list[Tokens] = []
    stats: Stats = {}
    if algorithm.rl_coef:
        term, stats = surrogate_term(logps, batch, sequence_sum, algorithm)
        if algorithm.rl_coef != 1:
            term = algorithm.rl_coef * term
        if algorithm.entropy_coef:
            term = term - algorithm.entropy_coef * entropy
        parts.append(weights * term)
    elif algorithm.entropy_coef:
        parts.append(weights * (-algorithm.entropy_coef * entropy))
    if algorithm.ce_coef:
        ce_weights = weights if batch.ce_weights is None else batch.ce_weights
        parts.append(algorithm.ce_coef * ce_weights * -logps)
    if algorithm.kl_coef:
        kl = KL_ESTIMATORS[algorithm.kl_estimator](logps, present(batch.ref_logps))
        if algorithm.kl_max:
            kl = jnp.minimum(kl, algorithm.kl_max)
        kl_weights = weights if batch.kl_weights is None else batch.kl_weights
        parts.append(algorithm.kl_coef * kl_weights * kl)
        stats["kl"] = kl
    assert parts, "the loss has no part"
    return sum(parts[1:], parts[0]), stats


def surrogate_term(
    logps: Tokens,
    batch: Batch[jax.Array],
    sequence_sum: SequenceSum,
    algorithm: Algorithm,
) -> tuple[Tokens, Stats]:
    """Returns c_t surrogate(rho_t, A_t) of every token, and diagnostics of the ratio."""
    old_logps = present(batch.old_logps)
    ratio = RATIOS[algorithm.ratio](logps - old_logps, sequence_sum)
    surrogate = SURROGATES[algorithm.surrogate]
    term, is_clipped = surrogate.compute(logps, ratio, present(batch.advantages), algorithm)
    stats = {
        "clip_fraction": is_clipped.astype(jnp.float32),
        "ratio_shift": jnp.abs(ratio - 1),
    }
    if algorithm.correction:
        # The correction is a constant: old_logps may be the policy's own log-probs.
        gap = jax.lax.stop_gradient(old_logps - present(batch.sampler_logps))
        stats["correction"] = CORRECTIONS[algorithm.correction](gap, sequence_sum, algorithm)
        term = stats["correction"] * term
    return term, stats


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
