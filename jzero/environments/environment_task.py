"""The task `environment`: its settings, its rows, and the prompts that resets return.

A problem is a row of `task.data` and a seed. Its prompt is the first observation of a reset, which
runs in a grader process or, with `task.environment_mode=asyncio`, in an event loop. Imports no jax.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from jzero.config.data_sources import Rows
from jzero.environments import asyncio_environments, environment, openenv, verifiers
from jzero.environments.environment import NAME, Observation, mode
from jzero.environments.tools import classes
from jzero.errors import UserError
from jzero.json_values import as_list, as_prompt
from jzero.problems import bounds, problem_sets, row_loader
from jzero.problems.prompts import ENVIRONMENT_TEMPLATES, find_template
from jzero.problems.row_loader import Selection
from jzero.rewards.user_functions import find_function, reason_of_import
from jzero.types import Grade, JsonValue, Problem, Prompt
from jzero.workers.pool import CallError, Pool

if TYPE_CHECKING:
    from jzero.config import TaskConfig

RESETTER = "jzero.environments.environment_task:reset_in_worker"
MOST_RESETS = 64  # that wait for a grader process at the same time


# The settings.


def check(task: TaskConfig) -> None:
    """Raises UserError if the class does not exist or lacks a method."""
    if not task.environment:
        raise UserError(
            "task.name=environment needs task.environment=module:Class or FILE.py:Class"
        )
    if task.environment.startswith((openenv.PREFIX, verifiers.PREFIX)):
        _check_foreign(task)
        return
    try:
        environment_class = find_function(task.environment)
    except Exception as error:  # the module is the user's: its import may raise anything
        raise UserError(
            f"task.environment={task.environment} is not a module:Class or FILE.py:Class "
            f"({reason_of_import(task.environment, error)})"
        ) from None
    if mode(task) == "asyncio" and task.tools.names:
        raise UserError(
            f"task.environment_mode=asyncio: {task.environment} is awaited in the run's own "
            "process, and task.tools.names run in grader processes. Remove one of them"
        )
    if classes.is_tool_class(task.environment):
        if mode(task) == "asyncio":
            raise UserError(
                f"task.environment_mode=asyncio: the methods of {task.environment} are tools, "
                "which run in grader processes. Leave the mode out"
            )
        return
    for method in ("reset", "step"):
        function = getattr(environment_class, method, None)
        if not callable(function):
            raise UserError(
                f"task.environment={task.environment} has no method {method}: an environment has "
                "reset(row, seed) and step(response)"
            )
        if mode(task) == "asyncio" and not inspect.iscoroutinefunction(function):
            raise UserError(
                f"task.environment_mode=asyncio: {task.environment} has a method {method} that "
                "would hold up all other episodes: write `async def`, or set "
                "task.environment_mode=processes"
            )


def _foreign_name(task: TaskConfig) -> str:
    """Returns the name after the prefix "openenv:" or "verifiers:"."""
    _, _, name = task.environment.partition(":")
    return name


def _check_foreign(task: TaskConfig) -> None:
    """Raises UserError if the settings of an OpenEnv or verifiers environment are wrong."""
    if mode(task) != "asyncio":
        raise UserError(
            f"task.environment={task.environment} waits for others: set task.environment_mode=auto"
        )
    if task.environment.startswith(openenv.PREFIX):
        openenv.check_url(_foreign_name(task))
        return
    if task.data:
        raise UserError(
            f"task.data={task.data}: {task.environment} has tasks of its own, set task.data="
        )
    verifiers.check(_foreign_name(task))


# The prompts.


def reset_in_worker(task: TaskConfig, row: dict[str, JsonValue], seed: int) -> Observation:
    """Resets an environment in a grader process to obtain a prompt, and closes it."""
    return environment.run(environment.reset_once(task, row, seed))


@functools.cache
def _resetters(workers: int) -> Pool:
    """Returns the pool that resets environments for prompts. It lives until this process ends."""
    pool = Pool(workers)
    atexit.register(pool.close)
    return pool


def _reset_all(
    task: TaskConfig, rows: Sequence[dict[str, JsonValue]], seeds: Sequence[int]
) -> list[Observation]:
    """Resets an environment for each row, in parallel.

    Raises:
        UserError: a reset failed.
    """
    if mode(task) == "asyncio":
        # No grader processes: asyncio environments live in the pool's event loop.
        pool = _resetters(0)
        resets = [
            functools.partial(asyncio_environments.reset, pool, task, row, seed)
            for row, seed in zip(rows, seeds, strict=True)
        ]
        results = pool.gather(resets, task.reward.seconds)
    else:
        pool = _resetters(task.grade_workers)

        def reset(row: dict[str, JsonValue], seed: int) -> Observation | str:
            try:
                returned = pool.call(RESETTER, row, seed, task=task, user_code=task.environment)
            except CallError as error:
                return str(error)
            # The pipe to a grader process carries JSON, in which a tuple is a list.
            prompt, tools = as_list(returned)
            return Observation(as_prompt(prompt), as_list(tools))

        # The threads only wait for grader processes.
        with ThreadPoolExecutor(max(MOST_RESETS, 2 * task.grade_workers)) as threads:
            results = list(threads.map(reset, rows, seeds))
    observations = []
    for seed, result in zip(seeds, results, strict=True):
        if isinstance(result, str):
            raise UserError(
                f"task.environment={task.environment}: reset(row, seed={seed}) failed "
                f"({result}): mend it"
            )
        observations.append(result)
    return observations


class DataRow(NamedTuple):
    """The row of an episode, with its place in a data set if it is from one."""

    columns: dict[str, JsonValue]
    place: problem_sets.Place | None = None


def problem_seed(split: str, seed: int, index: int) -> int:
    """Returns the seed of a problem."""
    # Seeded by text, so that a problem does not depend on the size of a step or on the number of
    # hosts.
    return random.Random(f"environment/{split}/{seed}/{index}").getrandbits(31)


def _problems(
    task: TaskConfig, split: str, seed: int, rows: Sequence[tuple[int, DataRow]]
) -> list[Problem]:
    """Returns a problem for each pair of an index and a row."""
    template = find_template(task.template, ENVIRONMENT_TEMPLATES)
    seeds = [problem_seed(split, seed, index) for index, _ in rows]
    observations = _reset_all(task, [row.columns for _, row in rows], seeds)
    problems = []
    for (index, row), row_seed, observation in zip(rows, seeds, observations, strict=True):
        prompt, inserted = observation.prompt, ""
        if isinstance(prompt, str):
            inserted = "" if template.chat else prompt
            prompt = template.render({"observation": prompt}, task.system_prompt)
        elif not template.chat:
            raise UserError(
                f"task.environment={task.environment}: reset returned messages, and task.template="
                f"{task.template} is plain text: set task.template=chat, or return text"
            )
        # The observation is part of the gold: every episode's reset is compared with it.
        gold = {"row": row.columns, "seed": row_seed, "observation": observation.prompt}
        name = f"{NAME}/{split}/{index}"
        tools = observation.tools or None
        problem = Problem(name, NAME, prompt, gold, row.columns, tools, inserted=inserted)
        problems.append(problem_sets.placed(problem, row.place))
    return problems


# The rows.


@functools.cache
def _read_sets(selection: Selection, *, is_held_out: bool) -> list[list[DataRow]]:
    """Returns the selected rows of each data set, with all columns."""
    usual, setting = ("test", "task.eval_data") if is_held_out else ("train", "task.data")
    sources = row_loader.held_out_sources(selection) if is_held_out else selection.train
    return [_read_set(rows, usual, setting) for rows in sources]


def _read_set(rows: Rows, usual: str, setting: str) -> list[DataRow]:
    columns = problem_sets.read_columns(row_loader.open_rows(rows, usual, setting), rows.path)
    numbers = row_loader.row_numbers(rows, usual, setting)
    return [
        DataRow(row, problem_sets.Place(rows.path, number))
        for row, number in zip(columns, numbers, strict=True)
    ]


def _train_sets(task: TaskConfig) -> list[list[DataRow]] | None:
    """Returns the training rows of each data set, None without a finite data set."""
    if task.environment.startswith(verifiers.PREFIX):
        rows = verifiers.train_rows(_foreign_name(task))
        return None if rows is None else [[DataRow(row) for row in rows]]
    if not task.data:
        return None
    return _read_sets(row_loader.selection_of(task), is_held_out=False)


def train_problems(task: TaskConfig, seed: int, step: int, count: int) -> list[Problem]:
    """Returns the problems of one step. Without `task.data` every row is empty."""
    return _problems(task, "train", seed, train_rows(task, seed, step, count))


def train_rows(task: TaskConfig, seed: int, step: int, count: int) -> list[tuple[int, DataRow]]:
    """Returns the rows of one step with their indices. Without `task.data` every row is empty."""
    indices = range(step * count, (step + 1) * count)
    sets = _train_sets(task)
    if sets is not None:
        weights = row_loader.selection_of(task).weights
        rows = problem_sets.stream(sets, weights, seed)
        indices = problem_sets.step_indices(step, count, sum(map(len, sets)), task, weights)
        chosen = [rows[index] for index in indices]
    elif task.environment.startswith(verifiers.PREFIX):
        endless = verifiers.endless_train_rows(_foreign_name(task), indices)
        chosen = [DataRow(row) for row in endless]
    else:
        chosen = [DataRow({}) for _ in indices]
    return list(zip(indices, chosen, strict=True))


def eval_problems(task: TaskConfig, count: int) -> list[Problem]:
    """Returns at most `count` held-out problems, the same in every run.

    The problems are the first rows of `task.eval_data`. Without `task.data` they differ from the
    training problems in their seeds. With `task.data`, but without `task.eval_data`, there are no
    held-out problems. For verifiers every tenth task is held out.
    """
    return _problems(task, "eval", problem_sets.EVAL_SEED, eval_rows(task, count))


def eval_rows(task: TaskConfig, count: int) -> list[tuple[int, DataRow]]:
    """Returns at most `count` held-out rows with their indices: see `eval_problems`."""
    if task.environment.startswith(verifiers.PREFIX):
        held_out = verifiers.eval_rows(_foreign_name(task), count)
        return list(enumerate(map(DataRow, held_out)))
    if not task.data:
        return [(index, DataRow({})) for index in range(count)]
    if not task.eval_data:
        return []
    sets = _read_sets(row_loader.selection_of(task), is_held_out=True)
    rows = [row for rows_of_set in sets for row in rows_of_set]
    return list(enumerate(rows))[:count]


def num_train_problems(task: TaskConfig) -> int | None:
    """Returns the number of training rows, None for an endless stream of problems."""
    sets = _train_sets(task)
    return None if sets is None else sum(map(len, sets))


# The functions of the task that a grader process calls.


def grade(response: str, gold: JsonValue, task: TaskConfig) -> Grade:
    """Grades a response as the only turn of an episode.

    For episodes with several turns the worker takes a step after the earlier turns instead.
    """

    async def play() -> Grade:
        made = environment.make_environment(task.environment, bounds.reply_bytes(task))
        async with environment.closed_on_error(made):
            await made.replay(gold, ())
            step = await made.step(response)
        await made.close()
        return environment.to_grade(step._replace(reply=None))

    return environment.run(play())


def reply(gold: JsonValue, turns: list[tuple[str, Grade]], task: TaskConfig) -> Prompt | None:
    """Returns the reply that `step` returned with its reward."""
    _, last_grade = turns[-1]
    return last_grade.reply
