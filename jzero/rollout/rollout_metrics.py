"""Metrics of a step's rollouts: rewards, lengths and turns. `run.metrics` documents them."""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from jzero.types import Grade, Rollout, grade_of

# Maximum number of reward names in the metrics: user-defined code may return other names each time.
MAX_REWARD_NAMES = 256
_FOLDER = re.compile(r"^[^:(]*/(?=[^:/(]+\.py:)")  # of a user-defined function in a file


def rollout_metrics(rollouts: Sequence[Rollout], group_size: int) -> dict[str, float]:
    """Returns metrics of graded rollouts, which are complete groups of `group_size` in order."""
    metrics = reward_metrics(rollouts, group_size) | length_metrics(rollouts)
    # A run without turns has no columns that are always 1.
    if any(len(rollout.turns) > 1 for rollout in rollouts):
        metrics |= turn_metrics(rollouts)
    if any(grade_of(rollout).tool_calls for rollout in rollouts):
        metrics |= tool_metrics(rollouts)
    for name, task_rollouts in by_row_task(rollouts).items():
        metrics |= {f"{metric}/{name}": v for metric, v in row_task_metrics(task_rollouts).items()}
    return metrics


def by_row_task(rollouts: Sequence[Rollout]) -> dict[str, list[Rollout]]:
    """Returns the rollouts of each task that rows name; empty unless `task.name=mixed`."""
    names = sorted({rollout.problem.row_task for rollout in rollouts} - {""})
    return {name: [one for one in rollouts if one.problem.row_task == name] for name in names}


def row_task_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Returns the metrics that `task.name=mixed` reports for each task."""
    grades = [grade_of(rollout) for rollout in rollouts]
    scores = [grade.score for grade in grades if not grade.failed]
    first_grades = [grade_of(rollout.turns[0]) for rollout in rollouts]
    return {
        "reward/mean": float(np.mean(scores)) if scores else 0.0,
        "reward/accuracy": float(np.mean([grade.correct for grade in grades])),
        "rollout/count": float(len(rollouts)),
        "rollout/length": float(np.mean([rollout.response_length for rollout in rollouts])),
        "turns/mean": float(np.mean([len(rollout.turns) for rollout in rollouts])),
        "turns/first_try": float(np.mean([grade.correct for grade in first_grades])),
    }


def reward_metrics(rollouts: Sequence[Rollout], group_size: int) -> dict[str, float]:
    """Returns the means of the scores and of their named parts."""
    grades = [grade_of(rollout) for rollout in rollouts]
    metrics = named_rewards(grades)

    # If a user-defined function failed there is no score; means cover the other responses.
    # Rollouts lie group by group: [N] -> [P, G].
    scores_PG = np.array([grade.score for grade in grades]).reshape(-1, group_size)
    has_score_PG = np.array([not grade.failed for grade in grades]).reshape(-1, group_size)
    highest_P = np.where(has_score_PG, scores_PG, -np.inf).max(axis=1)
    lowest_P = np.where(has_score_PG, scores_PG, np.inf).min(axis=1)
    # In a group without any score the highest is -inf and the lowest inf, so it counts as uniform.
    is_uniform = highest_P <= lowest_P
    metrics["reward/mean"] = float(scores_PG[has_score_PG].mean()) if has_score_PG.any() else 0.0
    metrics["reward/accuracy"] = float(np.mean([grade.correct for grade in grades]))
    metrics["reward/zero_variance_groups"] = float(is_uniform.mean())
    metrics["reward/failed"] = float(1 - has_score_PG.mean())
    return metrics


def named_rewards(grades: Sequence[Grade]) -> dict[str, float]:
    """Returns the mean of each named reward, over the grades that have it."""
    metrics: dict[str, float] = {}
    names = list(dict.fromkeys(name for grade in grades for name in grade.parts))
    if len(names) > MAX_REWARD_NAMES:
        metrics["reward/parts_left_out"] = float(len(names) - MAX_REWARD_NAMES)
    shown = short_names(names[:MAX_REWARD_NAMES])
    for name in names[:MAX_REWARD_NAMES]:
        # Skip the reward function `accuracy`: reward/accuracy is the share of correct answers
        # instead.
        if name != "accuracy":
            parts = [grade.parts[name] for grade in grades if name in grade.parts]
            metrics[f"reward/{shown[name]}"] = float(np.mean(parts))
    return metrics


def short_names(rewards: Sequence[str]) -> dict[str, str]:
    """Returns the names of rewards in metrics: "my.py.f" for "/home/me/my.py:f".

    A name keeps its folder if two rewards would have the same name without it.
    """
    without_folder = {name: _FOLDER.sub("", name) for name in rewards}
    counts = Counter(without_folder.values())
    return {
        name: (short if counts[short] == 1 else name).replace(":", ".")
        for name, short in without_folder.items()
    }


def length_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Returns metrics of the tokens after the prompts, including replies of an environment."""
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
    # Next to the final accuracy: how much the further turns have added.
    first_grades = [grade_of(rollout.turns[0]) for rollout in rollouts]
    return {
        "turns/sampled_tokens": float(sum(rollout.tokens.sampled.sum() for rollout in rollouts)),
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
