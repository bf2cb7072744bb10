"""Adapts the settings of the section `task` to an evaluation of one problem set.

An evaluation may use another verifier than training (`eval.verifier`). It calls only the reward
functions that its problems have values for. Imports no jax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from jzero.answers import published
from jzero.environments import environment
from jzero.errors import UserError
from jzero.rewards import rewards, user_functions
from jzero.tasks.votes import MATHEMATICS
from jzero.types import Problem

if TYPE_CHECKING:
    from jzero.config import EvalConfig, TaskConfig

HAVE_VERIFIERS = (*MATHEMATICS, "countdown")  # values of `problem.task`


def settings_for(task: TaskConfig, settings: EvalConfig, problems: Sequence[Problem]) -> TaskConfig:
    """Returns the settings for grading the responses to a problem set."""
    verifier = settings.verifier or task.verifier
    kinds = {problem.task for problem in problems}
    # A published verifier grades either countdown or mathematics. jzero's own verifier grades the
    # problem sets that the published one cannot.
    if not all(published.grades(verifier, kind) for kind in kinds):
        verifier = published.OWN_VERIFIER
    # Without `eval.rewards` an evaluation calls no reward function, only the grader.
    if settings.rewards:
        omitted = set(left_out(task, problems))
    else:
        omitted = set(task.reward.functions) - {"accuracy"}
    if not omitted:
        return replace(task, verifier=verifier)
    kept = [i for i, name in enumerate(task.reward.functions) if name not in omitted]
    functions = tuple(task.reward.functions[i] for i in kept)
    weights = tuple(task.reward.weights[i] for i in kept) if task.reward.weights else ()
    # Without any function, the score is the grader's score, which is not reported.
    if not functions:
        functions, weights = ("accuracy",), ()
    return replace(
        task,
        verifier=verifier,
        reward=replace(task.reward, functions=functions, weights=weights),
    )


def left_out(task: TaskConfig, problems: Sequence[Problem]) -> dict[str, str]:
    """Returns the reward functions that cannot be called on a problem set, with the reasons.

    A function cannot be called if a parameter without a default has no value: a column that is
    missing in a row, or the instance of an environment.
    """
    if not problems:
        return {}
    # A function is called on all problems or on none, so only the columns of all rows count.
    rows = [problem.row or {} for problem in problems]
    columns = set(rows[0]).intersection(*rows)
    has_environment = all(problem.task == environment.NAME for problem in problems)
    reasons: dict[str, str] = {}
    for name in rewards.users_functions(task.reward):
        missing = user_functions.missing_from(name, columns, has_environment=has_environment)
        if missing in user_functions.INSTANCES:
            reasons[name] = f"which have no {missing}"
        elif missing:
            reasons[name] = f"whose rows have no column {missing}"
    return reasons


def graded_by(task: TaskConfig, verifier: str) -> TaskConfig:
    """Returns the settings for grading with `verifier`, without any other reward."""
    reward = replace(task.reward, functions=("accuracy",), weights=())
    return replace(task, verifier=verifier, reward=reward)


def further_verifiers(settings: EvalConfig, problems: Sequence[Problem]) -> list[str]:
    """Returns the verifiers in `eval.verifiers` that grade all problems of a set."""
    kinds = {problem.task for problem in problems}
    return [
        name
        for name in settings.verifiers
        if all(kind in HAVE_VERIFIERS and published.grades(name, kind) for kind in kinds)
    ]


def check_verifiers(settings: EvalConfig) -> None:
    """Raises UserError if a verifier is unknown or named twice, or its packages do not work."""
    known = (published.OWN_VERIFIER, *published.VERIFIERS)
    for name in settings.verifiers:
        if name not in known:
            raise UserError(f"eval.verifiers={name} is not one of {', '.join(known)}")
        if settings.verifiers.count(name) > 1:
            raise UserError(f"eval.verifiers names {name} twice: name it once")
    for name in (settings.verifier, *settings.verifiers):
        published.load(name)
