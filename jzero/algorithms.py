"""Algorithms are values: one loss, and named presets that pick an advantage, a weight, a surrogate and a ratio.

    loss = sum_t w_t * [ surrogate(rho_t, A_t) + kl_coef * k3_t ],   rho_t = exp(logp_t - old_logp_t)

Advantages and weights are made on the host (NumPy) over the whole optimizer step, so that packing, microbatches and
sharding cannot change them. Dimensions: P prompts, G group, N = P*G rollouts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@dataclass
class Algorithm:
    name: str = "grpo"
    advantage: str = "group_mean_std"  # key of ADVANTAGES
    weight: str = "sequence_mean"  # key of WEIGHTS
    surrogate: str = "clip"  # key of SURROGATES
    ratio: str = "token"  # key of RATIOS
    clip_low: float = 0.2  # ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    std_eps: float = 1e-6  # added to the group's standard deviation
    kl_coef: float = 0.0  # k3 to the reference policy, in the loss; 0 = no reference policy is kept
    truncated: str = "grade"  # rollouts cut at max_new: grade (as they are) | zero (score 0) | mask (count, not train)


# -- advantages: scores f32[P, G] -> f32[P, G] ------------------------------------------------------------------


def group_mean(scores: np.ndarray, algorithm: Algorithm) -> np.ndarray:
    """A = r - mean(r) (Dr. GRPO, arXiv:2503.20783 eq. 3). A group of equal scores gives exactly 0."""
    centred = scores - scores.mean(axis=1, keepdims=True, dtype=np.float64)
    return np.where(uniform(scores), 0.0, centred).astype(np.float32)


def group_mean_std(scores: np.ndarray, algorithm: Algorithm) -> np.ndarray:
    """A = (r - mean(r)) / (std(r) + eps), std with G - 1 (GRPO, arXiv:2402.03300 §4.1.2)."""
    deviation = scores.std(axis=1, keepdims=True, ddof=1, dtype=np.float64)
    return (group_mean(scores, algorithm) / (deviation + algorithm.std_eps)).astype(np.float32)


def uniform(scores: np.ndarray) -> np.ndarray:
    """bool[P, 1]: groups without any difference in score; by max == min, not by an epsilon."""
    return scores.max(axis=1, keepdims=True) == scores.min(axis=1, keepdims=True)


class Advantage(NamedTuple):
    compute: Callable[[np.ndarray, Algorithm], np.ndarray]
    group_min: int  # smallest group it is defined for


ADVANTAGES = {"group_mean": Advantage(group_mean, 2), "group_mean_std": Advantage(group_mean_std, 2)}


# -- weights: trained tokens of each rollout f64[N], max_new -> weight of each of its tokens f64[N] ----------------
# A masked rollout has 0 trained tokens and still counts among the N.


def sequence_mean(counts: np.ndarray, max_new: int) -> np.ndarray:
    """1 / (N |o_i|): the mean over rollouts of their token means (GRPO eq. 3)."""
    return 1.0 / (len(counts) * np.maximum(counts, 1.0))


def token_mean(counts: np.ndarray, max_new: int) -> np.ndarray:
    """1 / sum_i |o_i|: the mean over all tokens of the optimizer step (DAPO, arXiv:2503.14476 eq. 8)."""
    return np.full(len(counts), 1.0 / max(counts.sum(), 1.0))


def constant(counts: np.ndarray, max_new: int) -> np.ndarray:
    """1 / (N L_max), L_max the configured response length (Dr. GRPO, appendix A)."""
    return np.full(len(counts), 1.0 / (len(counts) * max_new))


WEIGHTS = {"sequence_mean": sequence_mean, "token_mean": token_mean, "constant": constant}


# -- inside jit: every argument [B, T] ---------------------------------------------------------------------------


def token_ratio(logps: jax.Array, old_logps: jax.Array) -> jax.Array:
    return jnp.exp(logps - old_logps)


RATIOS = {"token": token_ratio}


def clip(ratio: jax.Array, advantages: jax.Array, algorithm: Algorithm) -> tuple[jax.Array, jax.Array]:
    """PPO's -min(rho A, clip(rho) A) (arXiv:1707.06347 eq. 7) and where the clip cuts the gradient."""
    clipped = jnp.clip(ratio, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
    return -jnp.minimum(ratio * advantages, clipped * advantages), clipped * advantages < ratio * advantages


SURROGATES = {"clip": clip}


def k3(logps: jax.Array, ref_logps: jax.Array) -> jax.Array:
    """exp(d) - d - 1 with d = ref - logp (Schulman 2020, used by GRPO eq. 4); d is clamped so that exp stays finite."""
    d = jnp.clip(ref_logps - logps, -40.0, 40.0)
    return jnp.expm1(d) - d


def loss_terms(logps, old_logps, ref_logps, advantages, algorithm: Algorithm):
    """Per-token loss (to be multiplied by its weight and summed) and diagnostics, each [B, T]."""
    ratio = RATIOS[algorithm.ratio](logps, old_logps)
    loss, clipped = SURROGATES[algorithm.surrogate](ratio, advantages, algorithm)
    stats = {"clip_fraction": clipped.astype(jnp.float32)}
    if algorithm.kl_coef:
        stats["kl"] = k3(logps, ref_logps)
        loss = loss + algorithm.kl_coef * stats["kl"]
    return loss, stats


# -- presets -------------------------------------------------------------------------------------------------------


def grpo(**changes) -> Algorithm:
    """DeepSeekMath's GRPO (arXiv:2402.03300), without its KL term, which reasoning runs leave off."""
    return replace(Algorithm(), **changes)


def dr_grpo(**changes) -> Algorithm:
    """Dr. GRPO (arXiv:2503.20783): no division by the standard deviation nor by the response's length."""
    return replace(Algorithm(name="dr_grpo", advantage="group_mean", weight="constant"), **changes)


PRESETS = {"grpo": grpo, "dr_grpo": dr_grpo}
