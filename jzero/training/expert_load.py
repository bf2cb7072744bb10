"""How evenly the tokens of an update are spread over the experts of a model."""

from collections.abc import Mapping, Sequence

import numpy as np


def expert_metrics(stats: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Returns the metrics of experts, from the stats of optimizer steps on the host.

    Empty for a dense model, and where no token went through the model. A layer's violation is the
    load of its busiest expert divided by the mean load, minus 1 (Wang et al. 2024,
    arXiv:2408.15664, their MaxVio).
    """
    loads = [sums["expert_load"] for sums in stats if "expert_load" in sums]
    load = np.sum(loads, axis=0, dtype=np.float64)  # [L, X]
    if not np.any(load):
        return {}
    largest = load.max(axis=1)
    violations = largest / load.mean(axis=1) - 1
    return {
        "experts/violation": float(violations.mean()),
        "experts/violation_max": float(violations.max()),
        "experts/largest_load": float((largest / load.sum(axis=1)).max()),
        "experts/unused": float(np.mean(load == 0)),
    }
