"""Mixed tasks: with `task.name=mixed` each row of a data set names its task.

    task.name=mixed task.data=math_and_code.jsonl

The column `task` of a row (or the column NAME with `task.options=column=NAME`) is a key of
ROW_TASKS, such as "math" or "code". That task determines the prompt, template, grader, rewards and
replies of the row, as in AReaL's environment for mathematics and code
(realhf/impl/environment/math_code_single_step_env.py).

The settings of the section `task` apply to all rows. An option `task.options=TASK.SETTING=VALUE`
overrides a setting for the rows of one task:

    task.options=code.template=chat task.options=code.reward.functions=binary_code

The option `math.data=rows(answer='solutions',level_min=3)` names columns and levels for the rows of
one task. It has no path: the rows of all tasks are in `task.data`.

`problem.task` is the grader of a row, and `problem.row_task` is the task name in the row. The names
of metrics per task end with `row_task`, as in `reward/mean/code`. Imports no jax: grader processes
load this module.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from jzero.config.data_sources import Rows, Sources
from jzero.config.flags import put_texts
from jzero.errors import UserError, counted, quoted
from jzero.fields import editable, record, values_of
from jzero.files import split_commas
from jzero.problems import problem_sets, row_loader
from jzero.problems.options import check_options, read_options
from jzero.problems.problem_sets import AskedRow
from jzero.problems.row_loader import Loaded, Sets
from jzero.tasks import code, math_problems
from jzero.types import Grade, JsonValue, Problem

if TYPE_CHECKING:
    import datasets

    from jzero.config import TaskConfig

NAME = "mixed"
QUESTIONS = "math"  # the key of ROW_TASKS that provides the settings for suites of questions

# Settings of the section `task` that apply to the whole run. Row tasks cannot override them.
RUN_SETTINGS = (
    "name",
    "environment",
    "environment_mode",
    "eval_data",
    "turn_discount",
    "grade_workers",
    "max_failed_share",
    "tools",
)


@record
class Options:
    """The task's own settings, `task.options=name=value`."""

    column: str = "task"  # the column with the task name of each row
    tasks: str = "math,code"  # the task names that rows may have, keys of ROW_TASKS


class RowTask(NamedTuple):
    """A task that rows of a mixed data set may name."""

    task: str  # the key of TASKS that grades and replies
    # read(settings, rows, source, is_held_out) returns a problem for each row, or None for a row
    # that the task cannot use.
    read: Callable[[TaskConfig, datasets.Dataset, Rows, bool], Sequence[AskedRow | None]]


_MATHEMATICS = RowTask("math_multiturn", math_problems.read_set)

# To let rows name another task, add a line.
ROW_TASKS: dict[str, RowTask] = {
    QUESTIONS: _MATHEMATICS,
    "stem": _MATHEMATICS,  # AReaL's name for science questions, which it grades as mathematics
    "gsm8k": _MATHEMATICS._replace(task="gsm8k"),
    "code": RowTask("code", code.read_set),
}


# Settings of a row's task.


def row_tasks(task: TaskConfig) -> list[str]:
    """Returns the task names that rows may have; empty unless `task.name=mixed`.

    Raises:
        UserError: `task.options` names a task that does not exist.
    """
    if task.name != NAME:
        return []
    names = split_commas(_options(task).tasks)
    for name, count in Counter(names).items():
        if name not in ROW_TASKS:
            raise UserError(
                f"task.options=tasks={','.join(names)}: {name!r} is not one of "
                f"{', '.join(ROW_TASKS)}"
            )
        if count > 1:
            raise UserError(f"task.options=tasks={','.join(names)} names {name} {count} times")
    if not names:
        raise UserError("task.options=tasks= names no task: remove it for math,code")
    return names


def settings_of(task: TaskConfig, problem: Problem) -> TaskConfig:
    """Returns the settings for the prompt, the grade and the replies of a problem.

    Returns `task` itself unless `task.name=mixed`. With mixed tasks, questions of a suite have the
    settings of the row task QUESTIONS.
    """
    # In a run of mixed tasks, a problem without a row task comes from a suite.
    if not problem.row_task:
        return settings_of_questions(task)
    return settings_of_row_task(task, problem.row_task)


def settings_of_questions(task: TaskConfig) -> TaskConfig:
    """Returns the settings for the prompts and grades of a suite of questions."""
    return settings_of_row_task(task, QUESTIONS) if QUESTIONS in row_tasks(task) else task


def settings_of_row_task(task: TaskConfig, name: str) -> TaskConfig:
    """Returns the settings for rows with the task name `name`.

    Raises:
        UserError: an option names an unknown setting, or a value has the wrong type.
    """
    # `data` of a row task names columns and levels (`own_rows`).
    own = editable(task)
    own.name, own.data, own.options = ROW_TASKS[name].task, Sources(), ()
    values: dict[str, list[str]] = {}
    # A repeated option adds items to a tuple, so all values of a setting are collected first.
    for option in task.options:
        place, _, text = option.partition("=")
        head, dot, setting = place.partition(".")
        if dot and head == name:
            values.setdefault(setting, []).append(text)
    for setting, texts in values.items():
        try:
            put_texts(own, setting, texts)
        except UserError as error:
            raise UserError(f"task.options={name}.{setting}={texts[-1]}: {error}") from None
    return own


def all_settings(task: TaskConfig) -> dict[str, TaskConfig]:
    """Returns the settings by the task name of rows, or {"": task} unless `task.name=mixed`."""
    names = row_tasks(task)
    return {name: settings_of_row_task(task, name) for name in names} or {"": task}


def _options(task: TaskConfig) -> Options:
    """Returns the options of the task `mixed` itself."""
    return read_options(Options, task.options)


def check(task: TaskConfig) -> None:
    """Raises UserError if an option is invalid, or overrides a setting with an invalid value.

    `task.check_task_settings` runs the checks of the row tasks.
    """
    # Options with a dot override the settings of one row task.
    own_options = [option for option in task.options if "." not in option.partition("=")[0]]
    check_options(Options, own_options)
    names = row_tasks(task)
    for option in task.options:
        head, dot, setting = option.partition("=")[0].partition(".")
        if dot and head not in names:
            raise UserError(
                f"task.options={option}: {head} is not one of the tasks that rows may name, "
                f"{', '.join(names)}"
            )
        if dot and setting.partition(".")[0] in RUN_SETTINGS:
            raise UserError(
                f"task.options={option}: task.{setting} holds for all rows, set it there"
            )
    if task.tools.names:
        raise UserError(
            f"task.tools.names={','.join(task.tools.names)}: task.name={NAME} has no tools: "
            "remove them"
        )
    for name, own in all_settings(task).items():
        own_rows(name, own, Rows())


# Data.


_LOADED: dict[str, Sets[AskedRow]] = {}  # by the settings, as JSON


def load_sets(task: TaskConfig) -> Sets[AskedRow]:
    """Loads the data sets of `task.data`.

    Raises:
        UserError: a data set cannot be loaded, a row names no task, or no rows to train on remain.
    """
    # TaskConfig is mutable and without a hash, so its JSON is the key.
    key = json.dumps(values_of(task))
    if key not in _LOADED:
        selection = row_loader.selection_of(task)
        notes_on = functools.partial(_notes_on, task)
        _LOADED[key] = row_loader.load_sets(selection, functools.partial(_read, task), notes_on)
    return _LOADED[key]


def _read(
    task: TaskConfig,
    dataset: datasets.Dataset,
    source: Rows,
    is_held_out: bool,
) -> list[AskedRow | None]:
    return read_rows(task, dataset, source, is_held_out=is_held_out)


def _notes_on(task: TaskConfig, loaded: Loaded[AskedRow]) -> list[str]:
    """Returns lines with the number of rows of each task in a data set, and of dropped rows."""
    source = loaded.source
    num_rows = Counter(loaded.dataset[_options(task).column][:])
    num_usable = Counter(row.problem.row_task for row in loaded.usable)
    num_trained = Counter(row.problem.row_task for row in loaded.train)
    notes = []
    for name, count in num_rows.items():
        if dropped := count - num_usable[name]:
            notes.append(
                f"{source}: {counted(dropped, 'problem')} of {name} dropped: no answer that grades "
                "1 against itself, no test that can be run, or another level"
            )
        if dropped := num_usable[name] - num_trained[name]:
            notes.append(f"{source}: {counted(dropped, 'problem')} of {name} dropped: held out")
        notes.append(f"{source}: {counted(num_trained[name], 'problem')} of {name}")
        golds = [
            row.problem.gold["answer"]
            for row in loaded.train
            if row.problem.row_task == name
            and isinstance(row.problem.gold, dict)
            and "answer" in row.problem.gold
        ]
        own = settings_of_row_task(task, name)
        notes += math_problems.notes_on_unread_golds(source, golds, own.verifier)
    return notes


def has_row_tasks(task: TaskConfig, dataset: datasets.Dataset) -> bool:
    """Returns whether the run has mixed tasks and the data set has the column of task names."""
    return task.name == NAME and _options(task).column in dataset.column_names


def read_rows(
    task: TaskConfig,
    dataset: datasets.Dataset,
    source: Rows,
    *,
    is_held_out: bool,
) -> list[AskedRow | None]:
    """Returns the rows of a data set, None for unusable ones. `source` names its path and columns.

    Raises:
        UserError: a row does not name one of the tasks, or is invalid for its task.
    """
    column = _options(task).column
    names = row_tasks(task)
    if column not in dataset.column_names:
        raise UserError(
            f"task.data={source.path} has columns {', '.join(sorted(dataset.column_names))}: "
            f"task.name={NAME} needs one that names the task of each row, "
            "task.options=column=NAME"
        )
    places: dict[str, list[int]] = {name: [] for name in names}
    for number, name in enumerate(dataset[column][:]):
        if not isinstance(name, str) or name not in places:
            raise UserError(
                f"task.data={source.path} row {number}: the column {column} holds {quoted(name)}, "
                f"which is not one of {', '.join(names)}; task.options=tasks=... says which tasks "
                f"of {', '.join(ROW_TASKS)} rows may name"
            )
        places[name].append(number)

    # Each task reads all of its rows in one call. Then the rows return to the data set's order.
    rows: list[AskedRow | None] = [None] * len(dataset)
    for name, numbers in places.items():
        if not numbers:
            continue
        own = settings_of_row_task(task, name)
        task_rows = dataset.select(numbers)
        # Row numbers in messages count only the rows of this task.
        rows_of_task = replace(own_rows(name, own, source), path=f"{source.path} (rows of {name})")
        asked = ROW_TASKS[name].read(own, task_rows, rows_of_task, is_held_out)
        for number, row in zip(numbers, asked, strict=True):
            if row is not None:
                rows[number] = row._replace(problem=replace(row.problem, row_task=name))
    return rows


def own_rows(name: str, own: TaskConfig, source: Rows) -> Rows:
    """Returns the columns and levels of the rows of one task in a source.

    Args:
        name: the task name of the rows.
        own: the settings of the row task. Its `data` names columns and levels, or is () for the
            columns of the source.
        source: the data set with the rows of all tasks.

    Raises:
        UserError: `data` has a path, or selects rows by more than their level.
    """
    if not own.data:
        return replace(source, level_min=0, level_max=0)  # the whole set has these levels
    rows = own.data[0]
    has_columns_and_levels_only = rows == Rows(
        problem=rows.problem,
        answer=rows.answer,
        level_min=rows.level_min,
        level_max=rows.level_max,
    )
    if not has_columns_and_levels_only or len(own.data) > 1:
        raise UserError(
            f"task.options={name}.data={own.data}: the rows of all tasks are in task.data; give "
            "only problem, answer, level_min and level_max here"
        )
    return replace(
        rows, problem=rows.problem or source.problem, answer=rows.answer or source.answer
    )


# The functions of the task.


def train_problems(task: TaskConfig, seed: int, step: int, count: int) -> list[Problem]:
    """Returns the problems of one step. Each data set is reshuffled in each of its epochs."""
    weights = row_loader.selection_of(task).weights
    rows = problem_sets.stream(load_sets(task).train, weights, seed)
    indices = problem_sets.step_indices(step, count, num_train_problems(task), task, weights)
    return [_problem(rows[index], f"{NAME}/train/{index}") for index in indices]


def eval_problems(task: TaskConfig, count: int) -> list[Problem]:
    """Returns at most `count` held-out problems, the same in every run."""
    held_out = load_sets(task).held_out
    places = row_loader.draw_held_out(count, len(held_out))
    return [_problem(held_out[place], f"{NAME}/eval/{place}") for place in places]


def _problem(row: AskedRow, id: str) -> Problem:
    return problem_sets.placed(replace(row.problem, id=id), row.place)


def num_train_problems(task: TaskConfig) -> int:
    """Returns the number of training problems in all data sets and tasks."""
    return sum(map(len, load_sets(task).train))


def notes(task: TaskConfig) -> list[str]:
    """Returns lines with the number of rows of each data set and task."""
    return load_sets(task).notes


def grade(response: str, gold: JsonValue, task: TaskConfig) -> Grade:
    """Raises AssertionError: the task `problem.task` of a row grades its responses."""
    raise AssertionError(f"no problem is graded by task.name={NAME}")
