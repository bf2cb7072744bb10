"""Rows of samples.jsonl: a few rollouts of every step, to read."""

from jzero.files import JsonObject
from jzero.types import Rollout, grade_of


def sample_row(rollout: Rollout) -> JsonObject:
    """Returns a graded rollout as a row of plain JSON values."""
    problem, grade = rollout.problem, grade_of(rollout)
    return {
        "id": problem.id,
        "sample": rollout.sample_index,
        "prompt": problem.prompt,
        "response": rollout.text,
        "gold": problem.gold,
        "score": grade.score,
        "advantage": rollout.advantage,
        "reason": grade.reason,
        "tokens": rollout.response_length,
        "finish": rollout.finish_reason,
    }
