"""The task `agent`: its settings and its rows. `environments.agents` runs the agents.

A problem is a row of `task.data` and a seed, which the agent gets. It has no prompt, because an
agent writes its own. Imports no jax.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jzero.environments import agents
from jzero.environments.environment_task import DataRow, eval_rows, problem_seed, train_rows
from jzero.errors import UserError
from jzero.problems import problem_sets
from jzero.rewards import rewards
from jzero.types import Grade, JsonValue, Problem, Prompt

if TYPE_CHECKING:
    from jzero.config import TaskConfig

MAX_SHOWN = 2000  # characters of a problem in samples.jsonl


def check(task: TaskConfig) -> None:
    """Raises UserError if the agent does not exist, or if a setting does not fit it."""
    if not task.agent:
        raise UserError(
            "task.name=agent needs task.agent=module:function, FILE.py:function or command:PROGRAM"
        )
    agents.find_agent(task.agent)
    if tuple(task.reward.functions) != rewards.DEFAULT:
        raise UserError(
            f"task.reward.functions={','.join(task.reward.functions)}: the reward is what "
            f"task.agent={task.agent} returns; return the parts of the reward as a dict"
        )


def _problems(split: str, seed: int, rows: Sequence[tuple[int, DataRow]]) -> list[Problem]:
    """Returns a problem for each pair of an index and a row."""
    problems = []
    for index, row in rows:
        columns: dict[str, JsonValue] = {"seed": problem_seed(split, seed, index)} | row.columns
        shown = json.dumps(columns, ensure_ascii=False)[:MAX_SHOWN]
        problem = Problem(f"{agents.NAME}/{split}/{index}", agents.NAME, shown, columns, columns)
        problems.append(problem_sets.placed(problem, row.place))
    return problems


def train_problems(task: TaskConfig, seed: int, step: int, count: int) -> list[Problem]:
    """Returns the problems of one step. Without `task.data` a problem is only a seed."""
    return _problems("train", seed, train_rows(task, seed, step, count))


def eval_problems(task: TaskConfig, count: int) -> list[Problem]:
    """Returns at most `count` held-out problems, chosen as those of environments."""
    return _problems("eval", problem_sets.EVAL_SEED, eval_rows(task, count))


def grade(response: str, gold: JsonValue, task: TaskConfig) -> Grade:
    """Raises UserError: the agent decides what a response is worth."""
    raise UserError(
        f"task.agent={task.agent} rewards its own episodes: a response without its agent has no "
        "grade"
    )


def reply(gold: JsonValue, turns: list[tuple[str, Grade]], task: TaskConfig) -> Prompt | None:
    """Returns None: the requests of the agent are the replies."""
    return None
