"""Moved from jzero.algorithms."""

from typing import Any

import jax
import jax.numpy as jnp

from jzero.algorithms.algorithm import Algorithm
from jzero.algorithms.corrections import CORRECTIONS
from jzero.algorithms.ratios import RATIOS, Total


def clip(
    logps: jax.Array, ratio: jax.Array, A: jax.Array, algorithm: Algorithm
) -> tuple[jax.Array, jax.Array]:
    """PPO's -min(rho A, clip(rho) A) (arXiv:1707.06347 eq. 7), with dual clip -max(., c A) where A < 0
    (arXiv:1912.09729 eq. 5); and where the gradient is cut."""
    clipped = jnp.clip(ratio, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
    gain, cut = jnp.minimum(ratio * A, clipped * A), clipped * A < ratio * A
    if algorithm.dual_clip:
        bound = jnp.where(A < 0, algorithm.dual_clip * A, -jnp.inf)
        gain, cut = jnp.maximum(gain, bound), cut | (gain < bound)
    return -gain, cut


def reinforce(
    logps: jax.Array, ratio: jax.Array, A: jax.Array, algorithm: Algorithm
) -> tuple[jax.Array, jax.Array]:
    """-A log pi, no ratio (Williams 1992)."""
    return -A * logps, jnp.zeros(ratio.shape, bool)


def cispo(
    logps: jax.Array, ratio: jax.Array, A: jax.Array, algorithm: Algorithm
) -> tuple[jax.Array, jax.Array]:
    """-stop_gradient(clip(rho)) A log pi (MiniMax-M1, arXiv:2506.13585 eq. 4): no token loses its gradient."""
    clipped = jnp.clip(ratio, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
    return -jax.lax.stop_gradient(clipped) * A * logps, clipped != ratio


SURROGATES = {"clip": clip, "reinforce": reinforce, "cispo": cispo}


def k3(logps: jax.Array, ref_logps: jax.Array) -> jax.Array:
    """exp(d) - d - 1 with d = log ref - log pi (Schulman 2020; GRPO eq. 4); d is clamped so that exp stays finite."""
    d = jnp.clip(ref_logps - logps, -40.0, 40.0)
    return jnp.expm1(d) - d


# The gradient of k2 is the KL's (Schulman 2020).
KLS = {"k2": lambda logps, ref_logps: 0.5 * (logps - ref_logps) ** 2, "k3": k3}


def policy_loss(
    logps, entropy, batch: Any, total: Total, algorithm: Algorithm
) -> tuple[jax.Array, dict[str, Any]]:
    """Every token's weighted term, and its diagnostics. batch: types.Batch [B, T], with ref_logps where a KL is on."""
    ratio = RATIOS[algorithm.ratio](logps - batch.old_logps, total)
    term, clipped = SURROGATES[algorithm.surrogate](logps, ratio, batch.advantages, algorithm)
    stats = {"clip_fraction": clipped.astype(jnp.float32), "ratio_shift": jnp.abs(ratio - 1)}
    if algorithm.correction:
        d = jax.lax.stop_gradient(batch.old_logps - batch.sampler_logps)
        stats["correction"] = CORRECTIONS[algorithm.correction](d, total, algorithm)
        term = stats["correction"] * term
    if algorithm.entropy_coef:
        term = term - algorithm.entropy_coef * entropy
    loss = batch.weights * term
    if algorithm.kl_coef:
        kl = KLS[algorithm.kl_estimator](logps, batch.ref_logps)
        kl = jnp.minimum(kl, algorithm.kl_max) if algorithm.kl_max else kl
        weights = batch.weights if batch.kl_weights is None else batch.kl_weights
        loss, stats["kl"] = loss + algorithm.kl_coef * weights * kl, kl
    return loss, stats


def value_loss(values, batch: Any, algorithm: Algorithm) -> tuple[jax.Array, dict[str, Any]]:
    """1/2 max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2) (PPO's reference code; R is the target)."""
    moved = jnp.clip(values - batch.old_values, -algorithm.value_clip, algorithm.value_clip)
    clipped = batch.old_values + moved if algorithm.value_clip else values
    free, bound = (values - batch.returns) ** 2, (clipped - batch.returns) ** 2
    loss = 0.5 * algorithm.value_coef * batch.weights * jnp.maximum(free, bound)
    return loss, {
        "value_loss": 0.5 * free,
        "value_clip_fraction": (bound > free).astype(jnp.float32),
    }
