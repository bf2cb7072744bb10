"""The loss of the policy and the loss of the critic for each token of packed rows [B, T].

Both are called inside the jitted update. They return weighted terms and metrics, and the update
reduces both over the tokens of the optimizer step. `metrics.py` defines the metrics by their names.
"""

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jzero.algorithms.algorithm import GAE, Algorithm
from jzero.algorithms.corrections import CORRECTIONS
from jzero.algorithms.kl import KL_ESTIMATORS
from jzero.algorithms.ratios import MAX_LOG_RATIO, RATIOS, SequenceSum, Tokens
from jzero.algorithms.surrogates import SURROGATES, TokenFlags
from jzero.types import Batch

TokenMetrics: TypeAlias = dict[str, Tokens]  # a value for each token, by the metric's name


def policy_loss(
    logps: Tokens,
    entropy: Tokens,
    batch: Batch[jax.Array],
    sequence_sum: SequenceSum,
    algorithm: Algorithm,
    full_logps: Tokens | None = None,
) -> tuple[Tokens, TokenMetrics]:
    """Returns the weighted loss and the metrics of every token.

        loss_t = w_t [ rl_coef c_t m_t surrogate(rho_t, A_t) - entropy_coef H_t
                       + ratio_penalty log^2 rho_t ]
                 + u_t cross_entropy.coef (-log pi_t) + v_t kl.coef KL_t

    `logps` and `entropy` are the policy's; gradients flow through both. `batch` has `old_logps`,
    and `ref_logps` if `kl.coef` is not 0. `sequence_sum` sums over the sequence of each token.
    If `logps` are normalized over the tokens that the sampler kept, `full_logps` are the log-probs
    over the full vocabulary, which the cross-entropy and the KL use (the reference's log-probs are
    over the full vocabulary too). None: both are the same. Terms with a factor of 0 are not
    computed.
    """
    weights = present(batch.weights)
    if full_logps is None:
        full_logps = logps
    terms: list[Tokens] = []  # the terms in the brackets, without w_t
    parts: list[Tokens] = []  # the weighted summands of the loss
    metrics: TokenMetrics = {}
    # The terms in the brackets have the weight w_t. Cross-entropy and KL can have other weights.
    if algorithm.rl_coef:
        term, metrics = surrogate_term(logps, batch, sequence_sum, algorithm)
        terms.append(term if algorithm.rl_coef == 1 else algorithm.rl_coef * term)
    if algorithm.entropy_coef:
        terms.append(-algorithm.entropy_coef * entropy)
    if algorithm.ratio_penalty:
        # Clamped as in the ratio.
        log_ratio = logps - present(batch.old_logps)
        log_ratio = jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        terms.append(algorithm.ratio_penalty * log_ratio**2)
    if terms:
        parts.append(weights * sum(terms[1:], terms[0]))
    if algorithm.cross_entropy.coef:
        ce_weights = weights if batch.ce_weights is None else batch.ce_weights
        parts.append(cross_entropy(full_logps, algorithm.cross_entropy.coef * ce_weights))
    if algorithm.kl.coef:
        kl = KL_ESTIMATORS[algorithm.kl.estimator](full_logps, present(batch.ref_logps))
        if algorithm.kl.bound:
            # k2 and k3 are never negative, so that a bound from above is enough.
            kl = jnp.minimum(kl, algorithm.kl.bound)
        kl_weights = weights if batch.kl_weights is None else batch.kl_weights
        parts.append(algorithm.kl.coef * kl_weights * kl)
        metrics["kl"] = kl
    assert parts, "the loss has no part"
    return sum(parts[1:], parts[0]), metrics


def surrogate_term(
    logps: Tokens,
    batch: Batch[jax.Array],
    sequence_sum: SequenceSum,
    algorithm: Algorithm,
) -> tuple[Tokens, TokenMetrics]:
    """Returns c_t m_t surrogate(rho_t, A_t) of every token, and metrics of the ratio."""
    old_logps = present(batch.old_logps)
    ratio = RATIOS[algorithm.ratio](logps - old_logps, sequence_sum)
    surrogate = SURROGATES[type(algorithm.surrogate)]
    advantages = present(batch.advantages)
    term, is_clipped = surrogate.compute(logps, ratio, advantages, algorithm.surrogate)
    metrics = {
        "clip_fraction": is_clipped.astype(jnp.float32),
        "clip_above": (is_clipped & (ratio > 1)).astype(jnp.float32),
        "clip_below": (is_clipped & (ratio < 1)).astype(jnp.float32),
        "ratio_shift": jnp.abs(ratio - 1),
    }
    if algorithm.off_policy_bound:
        is_kept = on_policy_mask(logps, batch, sequence_sum, algorithm)
        term = jnp.where(is_kept, term, 0.0)
        metrics["off_policy"] = 1 - is_kept.astype(jnp.float32)
    if algorithm.correction is not None:
        # The correction is a constant, but old_logps can be the policy's current log-probs, so the
        # gradient has to be stopped.
        gap = jax.lax.stop_gradient(old_logps - present(batch.sampler_logps))
        correction = CORRECTIONS[type(algorithm.correction)]
        correction_ratio = correction.ratio(gap, sequence_sum)
        # Truncation has no lower bound.
        low = getattr(algorithm.correction, "low", 0.0)
        high = algorithm.correction.high
        factor = correction.factor(correction_ratio, low, high)
        term = factor * term
        is_above = correction_ratio > high
        is_below = (correction_ratio < low) & (factor == 0)
        metrics |= {
            "correction": factor,
            "correction_above": is_above.astype(jnp.float32),
            "correction_below": is_below.astype(jnp.float32),
        }
    return term, metrics


def on_policy_mask(
    logps: Tokens,
    batch: Batch[jax.Array],
    sequence_sum: SequenceSum,
    algorithm: Algorithm,
) -> TokenFlags:
    """Returns m_t: False for tokens with A < 0 in off-policy sequences, True elsewhere.

    A sequence is off-policy if the mean of log pi_sampler - log pi over its trained tokens is above
    `off_policy_bound`. Source: the off-policy sequence mask of DeepSeek-V3.2, arXiv:2512.02556
    eq. 9.
    """
    gap = jax.lax.stop_gradient(present(batch.sampler_logps) - logps)
    # A sequence without trained tokens has length 0.
    length = jnp.maximum(sequence_sum(jnp.ones_like(gap)), 1.0)
    is_off_policy = sequence_sum(gap) / length > algorithm.off_policy_bound
    return (present(batch.advantages) >= 0) | ~is_off_policy


def mismatch_metrics(logps: Tokens, sampler_logps: Tokens) -> TokenMetrics:
    """Returns metrics of the difference between the policy's and the sampler's log-probs.

    With d = log pi - log pi_sampler, k1 = -d and k3 = exp(d) - d - 1 estimate the KL divergence
    KL(pi_sampler || pi) from the sampled tokens (Schulman, "Approximating KL divergence", 2020).
    exp(d) is the importance ratio.
    """
    # Clipped as the ratios are, so that exp(d) is finite.
    d = jnp.clip(logps - sampler_logps, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "mismatch": jnp.abs(sampler_logps - logps),
        "mismatch_max": jnp.abs(sampler_logps - logps),
        "mismatch_k1": sampler_logps - logps,
        "mismatch_k3": jnp.expm1(d) - d,
        "mismatch_tokens": (logps != sampler_logps).astype(jnp.float32),
        "importance": jnp.exp(d),
    }


def cross_entropy(
    logps: Float[Array, "rows tokens *targets"], weights: Float[Array, "rows tokens *targets"]
) -> Float[Array, "rows tokens *targets"]:
    """Returns the weighted cross-entropy of every target, w (-log pi)."""
    return weights * -logps


def environment_loss(logps: Tokens, weights: Tokens, algorithm: Algorithm) -> Tokens:
    """Returns the weighted cross-entropy of every token of the environment's replies.

        loss_e = - u_e environment_coef log pi(e)

    `weights` are the u_e. Source: ECHO, arXiv:2605.24517.
    """
    return cross_entropy(logps, algorithm.environment_coef * weights)


def value_loss(
    values: Tokens,
    batch: Batch[jax.Array],
    part: GAE,
) -> tuple[Tokens, TokenMetrics]:
    """Returns the weighted value loss and the metrics of every token.

        loss_t = w_t value_coef / 2 max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2)

    R is the target `batch.returns`, eps is `value_clip`. The clipped form comes from PPO's
    reference code (openai/baselines, ppo2) and is not in the paper.
    """
    old_values = present(batch.old_values)
    targets = present(batch.returns)
    clipped_values = values
    if part.value_clip:
        change = jnp.clip(values - old_values, -part.value_clip, part.value_clip)
        clipped_values = old_values + change
    error = (values - targets) ** 2
    clipped_error = (clipped_values - targets) ** 2
    # The larger error counts, so the clip never makes the loss smaller.
    worse_error = jnp.maximum(error, clipped_error)
    loss = 0.5 * part.value_coef * present(batch.weights) * worse_error
    metrics = {
        "value_loss": 0.5 * error,
        "value_clip_fraction": (clipped_error > error).astype(jnp.float32),
    }
    return loss, metrics


def present(array: jax.Array | None) -> jax.Array:
    """Returns a field of the batch, which must not be None."""
    assert array is not None, "the batch lacks a field that the algorithm needs"
    return array
