"""Moved from jzero.algorithms."""

from collections.abc import Callable
from typing import Any

import numpy as np

# (n: tokens of each rollout of this optimizer step, f64[n]; N: of all rollouts, f64[N]; L_max) -> of each of its
# tokens, f64[n] or one number. A rollout that is not trained has 0 tokens and still counts among the n.

WEIGHTS: dict[str, Callable[[np.ndarray, np.ndarray, int], Any]] = {
    # 1 / (n |o|): the mean over rollouts of their token means (GRPO eq. 3)
    "sequence_mean": lambda n, N, longest: 1.0 / (len(n) * np.maximum(n, 1.0)),
    # 1 / n: the mean over rollouts of their token sums (REINFORCE; oat in March 2025)
    "sequence_sum": lambda n, N, longest: 1.0 / len(n),
    # 1 / sum |o|: the mean over all tokens of the optimizer step (DAPO, arXiv:2503.14476 eq. 8)
    "token_mean": lambda n, N, longest: 1.0 / max(n.sum(), 1.0),
    # 1 / sum |o| over the rollouts of all optimizer steps of the RL step (dapo in TRL 1.10)
    "batch_token_mean": lambda n, N, longest: 1.0 / max(N.sum(), 1.0),
    # 1 / (n L_max), L_max the configured response length (Dr. GRPO, appendix A)
    "constant": lambda n, N, longest: 1.0 / (len(n) * longest),
}
