"""Checks before a run that its first step has problems, and that every reward applies to them.

    check_problems(task, seed, count)

A reward that applies to no problem adds nothing to any score, so the run would train on nothing.
Imports no jax.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jzero.environments import agents, environment
from jzero.errors import UserError
from jzero.programming.code_rewards import has_tests
from jzero.rewards import rewards, user_functions
from jzero.tasks import mixed
from jzero.tasks.task import find_task
from jzero.types import Problem

if TYPE_CHECKING:
    from jzero.config import TaskConfig


def check_problems(task: TaskConfig, seed: int, count: int) -> None:
    """Draws the problems of the first step, and checks the rewards on them.

    Args:
        task: the section `task` of the config, which `check_task_settings` accepts.
        seed: `train.seed`.
        count: the problems of a step, `rollout.num_prompts`.

    Raises:
        UserError: the data cannot be read, no row is left to train on, or a reward cannot be called
            on the problems or applies to none of them.
    """
    # The prompts of an environment are resets, which the first step makes. Agents reward
    # themselves.
    if task.name in (environment.NAME, agents.NAME):
        return
    problems = find_task(task.name).train_problems(task, seed, 1, count)
    for name, row_settings in mixed.all_settings(task).items():
        # The first step may have no row of a task of a mixed set.
        if own := [problem for problem in problems if problem.row_task == name]:
            _check_rewards(row_settings, own)


def _check_rewards(task: TaskConfig, problems: Sequence[Problem]) -> None:
    """Raises UserError if a reward function does not apply to any of the problems."""
    columns: set[str] = set()
    for problem in problems:
        columns |= (problem.row or {}).keys()
    for function in task.reward.functions:
        where = f"task.reward.functions={function}"
        if rewards.find_built_in(function) is not None:
            is_of_tests = function in rewards.REWARDS_OF_TESTS
            if is_of_tests and not any(has_tests(problem.gold) for problem in problems):
                raise UserError(
                    f"{where} runs programs, and the problems of task.name={task.name} have no "
                    "tests: set task.name=code and data with a column of tests, or choose another "
                    "reward"
                )
            continue
        missing = user_functions.missing_from(function, columns, has_environment=False)
        if missing in user_functions.INSTANCES:
            raise UserError(
                f"{where} requires the parameter {missing}, and task.name={task.name} has no "
                "environment: set task.name=environment, or remove the parameter"
            )
        if missing:
            raise UserError(
                f"{where} requires the parameter {missing}, and the rows have the columns "
                f"{', '.join(sorted(columns)) or '(none)'}: add the column to the data, or give "
                "the parameter a default"
            )
