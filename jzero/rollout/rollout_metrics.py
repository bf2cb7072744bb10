"""Metrics of a step's rollouts: rewards, lengths and turns. `run.metrics` defines them."""

from collections.abc import Sequence

import numpy as np

from jzero.types import Rollout, grade_of


def rollout_metrics(rollouts: Sequence[Rollout], group_size: int) -> dict[str, float]:
    """Returns metrics of graded rollouts: whole groups in order, `group_size` for each problem."""
    metrics = reward_metrics(rollouts, group_size) | length_metrics(rollouts)
    if any(len(rollout.turns) > 1 for rollout in rollouts):
        metrics |= turn_metrics(rollouts)
    if any(grade_of(rollout).tool_calls for rollout in rollouts):
        metrics |= tool_metrics(rollouts)
    return metrics


def reward_metrics(rollouts: Sequence[Rollout], group_size: int) -> dict[str, float]:
    """Returns the means of the scores and of the named rewards that they are made of."""
    grades = [grade_of(rollout) for rollout in rollouts]
    metrics: dict[str, float] = {}

    names = dict.fromkeys(name for grade in grades for name in grade.parts)
    for name in names:
        # The reward function `accuracy` is left out: reward/accuracy counts right answers instead.
        if name != "accuracy":
            parts = [grade.parts[name] for grade in grades if name in grade.parts]
            metrics[f"reward/{name.replace(':', '.')}"] = float(np.mean(parts))

    # Where a function of the user's failed there is no score, and means are over the others.
    scores_PG = np.array([grade.score for grade in grades]).reshape(-1, group_size)
    has_score_PG = np.array([not grade.failed for grade in grades]).reshape(-1, group_size)
    highest_P = np.where(has_score_PG, scores_PG, -np.inf).max(axis=1)
    lowest_P = np.where(has_score_PG, scores_PG, np.inf).min(axis=1)
    # A group without any score has its highest below its lowest.
    is_uniform = highest_P <= lowest_P
    metrics["reward/mean"] = float(scores_PG[has_score_PG].mean()) if has_score_PG.any() else 0.0
    metrics["reward/accuracy"] = float(np.mean([grade.correct for grade in grades]))
    metrics["reward/zero_variance_groups"] = float(is_uniform.mean())
    metrics["reward/failed"] = float(1 - has_score_PG.mean())
    return metrics


def length_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Returns metrics of the tokens after the prompts, replies of an environment included."""
    lengths = np.array([rollout.response_length for rollout in rollouts])
    is_truncated = [rollout.finish_reason == "length" for rollout in rollouts]
    return {
        "rollout/length": float(lengths.mean()),
        "rollout/length_max": float(lengths.max()),
        "rollout/truncated": float(np.mean(is_truncated)),
        "rollout/tokens": float(lengths.sum()),
    }


def turn_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Returns metrics of episodes of several turns."""
    first_grades = [grade_of(rollout.turns[0]) for rollout in rollouts]
    return {
        "turns/sampled_tokens": float(sum(rollout.sampled.sum() for rollout in rollouts)),
        "turns/mean": float(np.mean([len(rollout.turns) for rollout in rollouts])),
        "turns/first_try": float(np.mean([grade.correct for grade in first_grades])),
    }


def tool_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Returns metrics of the tools that the policy called."""
    grades = [grade_of(rollout) for rollout in rollouts]
    return {
        "tools/calls": float(np.mean([grade.tool_calls for grade in grades])),
        "tools/failed": float(np.mean([grade.failed_tool_calls for grade in grades])),
        "tools/seconds": float(np.mean([grade.tool_seconds for grade in grades])),
    }
