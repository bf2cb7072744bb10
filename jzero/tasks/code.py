"""Programming problems: a response contains a program, which runs against the problem's tests.

`task.data` names a data set in one of the layouts of `code_tests`. Without data the task generates
toy problems for a tiny model (`code_toy`). `code_runs` runs the programs in a sandbox. The score is
the fraction of tests that pass; with `task.options=reward=all` it is 1 if all tests pass and 0
otherwise. Imports no jax: grader processes load this module.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from jzero.config.data_sources import Rows
from jzero.errors import UserError
from jzero.json_values import as_text
from jzero.problems import problem_sets, row_loader
from jzero.problems.problem_sets import AskedRow
from jzero.problems.prompts import CODE_TEMPLATES, find_template
from jzero.problems.row_loader import Loaded, Selection, Sets
from jzero.programming import code_feedback, code_runs, code_tests
from jzero.programming.code_rewards import options_of, verdict_of
from jzero.rewards import rewards
from jzero.sandbox.client import SandboxError
from jzero.tasks import code_toy
from jzero.types import Grade, JsonValue, Problem, Prompt

if TYPE_CHECKING:
    import datasets

    from jzero.config import TaskConfig

NAME = "code"  # of the task
# The names of the problem column in public data sets.
PROBLEM_COLUMNS = (
    "problem",
    "question",
    "question_content",
    "problem_statement",
    "prompt",
    "text",
    "messages",
)

INSTRUCTION = (
    "Write a complete Python 3 program that reads from standard input and writes to standard "
    "output. End your answer with the program in one block that begins with ```python and ends "
    "with ```."
)
INSTRUCTION_FOR_FUNCTION = (
    "Write the function {function} in Python 3. End your answer with the code in one block that "
    "begins with ```python and ends with ```."
)


# Data.


class Exercise(NamedTuple):
    """A programming problem of a data set."""

    question: str
    tests: list[code_tests.Test]
    setup: str  # code that runs before the program
    prompt: Prompt | None = None  # the prompt of the data set, with task.template=column:NAME
    columns: dict[str, JsonValue] | None = None  # all columns, if a reward reads them
    place: problem_sets.Place | None = None


class Reading(NamedTuple):
    """Settings for reading the rows of a data set."""

    prompt_column: str
    max_tests: int
    with_columns: bool = False


def reading_of(task: TaskConfig) -> Reading:
    """Returns the settings with which a task reads rows."""
    return Reading(
        prompt_column=find_template(task.template, CODE_TEMPLATES).column,
        max_tests=options_of(task).max_tests,
        with_columns=rewards.need_columns(task.reward),
    )


def load_sets(task: TaskConfig) -> Sets[Exercise]:
    """Loads the data sets of `task.data`.

    Raises:
        UserError: a data set cannot be loaded, or has no problem with runnable tests.
    """
    return _load_sets(row_loader.selection_of(task), reading_of(task))


# Cached, because every step and every evaluation asks for the sets.
@functools.cache
def _load_sets(selection: Selection, reading: Reading) -> Sets[Exercise]:
    def notes_on(loaded: Loaded[Exercise]) -> list[str]:
        return row_loader.notes_on_dropped(loaded, "no test that can be run")

    return row_loader.load_sets(selection, functools.partial(_read, reading), notes_on)


def read_set(
    task: TaskConfig,
    dataset: datasets.Dataset,
    source: Rows,
    is_held_out: bool,
) -> list[AskedRow | None]:
    """Returns rows in the form that `task.name=mixed` takes, None for each row without tests."""
    exercises = _read(reading_of(task), dataset, source, is_held_out)
    return [
        None if item is None else AskedRow(item.question, _problem(task, "", item))
        for item in exercises
    ]


def _read(
    reading: Reading,
    dataset: datasets.Dataset,
    source: Rows,
    is_held_out: bool,
) -> list[Exercise | None]:
    """Returns the problem of each row of a split, None for each row without tests."""
    # The problem column is optional if the template reads prompts from a column.
    columns = list(dataset.column_names)
    names = [source.problem] if source.problem else PROBLEM_COLUMNS
    column = next((name for name in names if name in columns), None)
    if (column is None and not reading.prompt_column) or not code_tests.column_of_tests(columns):
        raise UserError(
            f"task.data={source.path} has columns {', '.join(sorted(columns))}: the task code "
            f"needs a column of problems (rows('{source.path}',problem='COLUMN'), or "
            f"{', '.join(PROBLEM_COLUMNS)}) and one of tests ({', '.join(code_tests.LAYOUTS)})"
        )
    prompts: list[Prompt | None] = [None] * len(dataset)
    questions = dataset[column][:] if column else []
    if reading.prompt_column:
        asked = problem_sets.read_rows_without_answers(
            dataset, source.problem, source.path, reading.prompt_column
        )
        prompts = [row.prompt for row in asked]
        questions = [row.question for row in asked]
    columns_of_rows: list[dict[str, JsonValue] | None] = [None] * len(dataset)
    if reading.with_columns:
        columns_of_rows = [*problem_sets.read_readable_columns(dataset)]
    exercises: list[Exercise | None] = []
    rows = cast(Iterable[code_tests.Row], dataset)
    for row, question, prompt, values in zip(
        rows, questions, prompts, columns_of_rows, strict=True
    ):
        tests = code_tests.read_tests(row)
        if reading.max_tests:
            tests = code_tests.longest(tests, reading.max_tests)
        # Without a test there is nothing to grade by.
        if not tests or not isinstance(question, str):
            exercises.append(None)
            continue
        starter = row.get("starter_code") or ""
        if starter.strip():
            question += f"\n\nBegin with this code:\n```python\n{starter.rstrip()}\n```"
        setup = code_tests.setup_code(row)
        exercises.append(Exercise(question, tests, setup, prompt, values))
    return exercises


# The functions of the task.


def _problem(task: TaskConfig, id: str, exercise: Exercise) -> Problem:
    return problem_sets.placed(_unplaced_problem(task, id, exercise), exercise.place)


def _unplaced_problem(task: TaskConfig, id: str, exercise: Exercise) -> Problem:
    gold = {"tests": exercise.tests, "setup": exercise.setup}
    if exercise.prompt is not None:
        return Problem(id, task.name, exercise.prompt, gold, exercise.columns)
    # The policy writes the function, also where a test calls it as a method of a class.
    function = as_text(exercise.tests[0].get("function", "")).rpartition(".")[2]
    instruction = INSTRUCTION
    if function:
        instruction = INSTRUCTION_FOR_FUNCTION.format(function=function)
    elif "expression" in exercise.tests[0]:
        # The expression of the test shows the name of the function.
        call = exercise.tests[0]["expression"]
        instruction = INSTRUCTION_FOR_FUNCTION.format(function=f"that {call} calls")
    template = find_template(task.template, CODE_TEMPLATES)
    values = {"question": exercise.question, "instruction": instruction}
    prompt = template.render(values, task.system_prompt)
    inserted = "" if template.chat else exercise.question
    return Problem(id, task.name, prompt, gold, exercise.columns, inserted=inserted)


def train_problems(task: TaskConfig, seed: int, step: int, count: int) -> list[Problem]:
    """Returns the problems of one step: toy problems without `task.data`."""
    if not task.data:
        return code_toy.train_problems(task, seed, step, count)
    sets = load_sets(task).train
    weights = row_loader.selection_of(task).weights
    exercises = problem_sets.stream(sets, weights, seed)
    indices = problem_sets.step_indices(step, count, sum(map(len, sets)), task, weights)
    return [_problem(task, f"{task.name}/train/{index}", exercises[index]) for index in indices]


def eval_problems(task: TaskConfig, count: int) -> list[Problem]:
    """Returns at most `count` held-out problems, the same in every run."""
    if not task.data:
        return code_toy.eval_problems(task, count)
    held_out = load_sets(task).held_out
    places = row_loader.draw_held_out(count, len(held_out))
    return [_problem(task, f"{task.name}/eval/{place}", held_out[place]) for place in places]


def num_train_problems(task: TaskConfig) -> int | None:
    """Returns the number of training problems, None for the endless toy problems."""
    return sum(map(len, load_sets(task).train)) if task.data else None


def notes(task: TaskConfig) -> list[str]:
    """Returns lines about the data and about where programs run."""
    data_notes = load_sets(task).notes if task.data else []
    return [*data_notes, code_runs.describe(task)]


def check(task: TaskConfig) -> None:
    """Raises UserError if the settings of the task or of the sandbox are wrong."""
    code_runs.check(task)


def metrics(task: TaskConfig, grades: Sequence[Grade]) -> dict[str, float]:
    """Returns the sandbox's protection level and the total seconds of a step's tests."""
    return {
        "sandbox/level": code_runs.level_number(task),
        "sandbox/seconds": sum(grade.seconds for grade in grades),
    }


def grade(response: str, gold: JsonValue, task: TaskConfig) -> Grade:
    """Runs the program of a response and scores it by its tests (see the module's docstring).

    A sandbox that fails gives a failed grade, because the program could not be judged.
    """
    options = options_of(task)
    source = code_runs.extract_program(response)
    if not source:
        return Grade(0.0, False, "no answer")
    try:
        verdict = verdict_of(source, gold, task)
    except SandboxError as error:
        return Grade(0.0, False, f"error: {error}", failed=True)
    is_correct = verdict.has_passed
    fraction = 0.0 if options.reward == "all" else verdict.fraction
    score = 1.0 if is_correct else fraction
    return Grade(score, is_correct, verdict.failure or "correct")


def reply(gold: JsonValue, turns: list[tuple[str, Grade]], task: TaskConfig) -> str | None:
    """Returns the feedback for the policy: the program is correct, or why it is wrong.

    The reply is `task.feedback.right`, or `task.feedback.wrong` and a message from `code_feedback`
    on the first failed test. None ends an episode with a program that could not be run.
    """
    response, last_grade = turns[-1]
    if last_grade.failed:
        return None
    if last_grade.correct:
        return task.feedback.right
    feedback = options_of(task).feedback
    if feedback == code_feedback.WORDS:
        return task.feedback.wrong
    source = code_runs.extract_program(response)
    message = code_feedback.NO_PROGRAM
    if source:
        try:
            verdict = verdict_of(source, gold, task)
        except SandboxError:
            return None
        if verdict.first_failed is None:
            return task.feedback.wrong
        message = code_feedback.describe(verdict.first_failed, verdict.all, feedback)
    return f"{task.feedback.wrong}\n\n{message}"
