"""Rollouts as rows of JSON: those of samples.jsonl, and those of evaluations."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jzero.distributed import processes
from jzero.files import JsonObject
from jzero.rollout.evaluation import Evaluated
from jzero.types import Rollout, Turn, grade_of


def sample_row(rollout: Rollout) -> JsonObject:
    """Returns a graded rollout as a row of plain JSON values.

    `response` is the last response. A rollout of several turns has all of them in `turns`. A
    rollout on which a function of the user's failed has the score null, and says `failed`.
    """
    problem, grade = rollout.problem, grade_of(rollout)
    row: JsonObject = {
        "id": problem.id,
        "sample": rollout.sample_index,
        "prompt": problem.prompt,
        "response": rollout.text,
        "gold": problem.gold,
        "score": grade.known_score,
        "advantage": rollout.advantage,
        "reason": grade.reason,
        "tokens": rollout.response_length,
        "finish": rollout.finish_reason,
    }
    if grade.failed:
        row["failed"] = True
    if len(rollout.turns) > 1:
        row["turns"] = [turn_row(turn) for turn in rollout.turns]
    return row


def turn_row(turn: Turn) -> JsonObject:
    """Returns a graded turn: its response, and what the environment replied to it."""
    grade = grade_of(turn)
    return {
        "response": turn.text,
        "score": grade.known_score,
        "reason": grade.reason,
        "tokens": turn.end - turn.start,
        "reply": grade.reply,
    }


def write_responses(directory: Path, evaluated: Sequence[Evaluated]) -> None:
    """Writes all responses of evaluations: a file for each problem set and kind.

    A file has a line for each problem, and is called <problem set>-<kind>.jsonl. That of the task's
    own problems is problems-<kind>.jsonl.
    """
    for evaluation in evaluated:
        rows = problem_rows(evaluation.rollouts, evaluation.num_samples)
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        name = f"{evaluation.name or 'problems'}-{evaluation.label}.jsonl"
        processes.write_once(directory / name, "".join(lines))


def problem_rows(rollouts: list[Rollout], num_samples: int) -> list[JsonObject]:
    """Returns a row for each problem of an evaluation, with all of its `num_samples` responses."""
    rows: list[JsonObject] = []
    for start in range(0, len(rollouts), num_samples):
        of_problem = rollouts[start : start + num_samples]
        problem = of_problem[0].problem
        rows.append(
            {
                "id": problem.id,
                "prompt": problem.prompt,
                "gold": problem.gold,
                "accuracy": float(np.mean([grade_of(rollout).correct for rollout in of_problem])),
                "samples": [response_row(rollout) for rollout in of_problem],
            }
        )
    return rows


def response_row(rollout: Rollout) -> JsonObject:
    """Returns one graded response of an evaluation."""
    grade = grade_of(rollout)
    return {
        "response": rollout.text,
        "correct": grade.correct,
        "reason": grade.reason,
        "tokens": rollout.response_length,
        "finish": rollout.finish_reason,
    }
