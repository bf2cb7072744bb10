"""Estimators of the KL divergence KL(pi || ref) at one sampled token, for packed rows [B, T].

Source: Schulman, "Approximating KL divergence", 2020. The estimator k1 = log pi - log ref is only
used for `algorithm.kl_reward`, which is computed on the host (`training.step.assign_credit`).
"""

from collections.abc import Callable
from typing import TypeAlias

import jax.numpy as jnp

from jzero.algorithms.ratios import Tokens

MAX_LOG_RATIO = 40.0  # log ref - log pi is clamped to +-40, so that its exp stays finite in float32

KlEstimator: TypeAlias = Callable[[Tokens, Tokens], Tokens]


def k2(logps: Tokens, ref_logps: Tokens) -> Tokens:
    """k2 = (log pi - log ref)^2 / 2. Its expected gradient is the gradient of the KL."""
    return 0.5 * (logps - ref_logps) ** 2


def k3(logps: Tokens, ref_logps: Tokens) -> Tokens:
    """k3 = exp(d) - d - 1 with d = log ref - log pi (GRPO, arXiv:2402.03300 eq. 4).

    k3 is never negative, and its expectation is the KL.
    """
    d = jnp.clip(ref_logps - logps, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    # Near d = 0 the difference exp(d) - 1 would lose its digits.
    return jnp.expm1(d) - d


KL_ESTIMATORS: dict[str, KlEstimator] = {"k2": k2, "k3": k3}
