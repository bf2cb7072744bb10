"""Programming problems: a response holds a program, which is run against the problem's tests.

`task.data` names a set in one of the layouts of `code_tests`. Without data the task makes toy
problems for a tiny model (`code_toy`). `code_runs` runs the programs in a sandbox. The score is the
share of tests that pass, or 1 for all of them: `task.options=reward=all`.

The rewards `code`, `binary_code` and `code_format` are open-r1's (github.com/huggingface/open-r1,
rewards.py). Imports no jax: grader processes load this module.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

from jzero.errors import UserError
from jzero.sandbox.client import SandboxError
from jzero.tasks import code_runs, code_tests, code_toy, overlap, problem_sets
from jzero.tasks.options import read_options
from jzero.tasks.prompts import CODE_TEMPLATES, find_template
from jzero.types import Grade, JsonValue, Problem

if TYPE_CHECKING:
    import datasets

    from jzero.config import TaskConfig

REWARDS_OF_ALL = "all"
REWARDS = ("fraction", REWARDS_OF_ALL)

# The names that the column of problems has in public sets.
_PROBLEM_COLUMNS = (
    "problem",
    "question",
    "question_content",
    "problem_statement",
    "prompt",
    "text",
)
_PASSED = 0.99  # open-r1, binary_code_reward

INSTRUCTION = (
    "Write a complete Python 3 program that reads from standard input and writes to standard "
    "output. End your answer with the program in one block that begins with ```python and ends "
    "with ```."
)
INSTRUCTION_FOR_FUNCTION = (
    "Write the function {function} in Python 3. End your answer with the code in one block that "
    "begins with ```python and ends with ```."
)


@dataclass(frozen=True)
class Options:
    """The task's own settings, `task.options=name=value`."""

    reward: str = "fraction"  # of the tests, or "all": 1 where every test passes, 0 otherwise
    max_tests: int = 15  # of a problem, those with the longest inputs; 0: all


def options_of(task: TaskConfig) -> Options:
    """Returns the task's own settings; raises UserError if one is wrong."""
    options = read_options(Options, task.options)
    if options.reward not in REWARDS:
        raise UserError(f"task.options=reward={options.reward}: use one of {', '.join(REWARDS)}")
    if options.max_tests < 0:
        raise UserError(f"task.options=max_tests={options.max_tests}: use 0 for all, or more")
    return options


# Data.


class Exercise(NamedTuple):
    """A programming problem of a set."""

    question: str
    tests: list[code_tests.Test]
    setup: str  # code that is run before the program


class ExerciseSets(NamedTuple):
    """The data of the task."""

    train: list[list[Exercise]]  # one list for every set of `task.data`
    held_out: list[Exercise]
    notes: list[str]


def load_sets(task: TaskConfig) -> ExerciseSets:
    """Loads the sets of `task.data`.

    Raises:
        UserError: a set cannot be loaded, or has no problem with tests that can be run.
    """
    return _load_sets(
        data=task.data,
        eval_data=task.eval_data,
        train_split=task.train_split,
        eval_split=task.eval_split,
        problem_column=task.problem_column,
        max_train=task.max_train,
        max_tests=options_of(task).max_tests,
    )


@functools.cache
def _load_sets(
    *,
    data: str,
    eval_data: str,
    train_split: str,
    eval_split: str,
    problem_column: str,
    max_train: int,
    max_tests: int,
) -> ExerciseSets:
    sources = [source.strip() for source in data.split(",") if source.strip()]
    if eval_data:
        held_out_sources = [eval_data]
    else:
        held_out_sources = problem_sets.held_out_sources(
            sources, eval_split, train_split, "task.eval_split"
        )
    held_out: list[Exercise] = []
    notes: list[str] = []
    for source in held_out_sources:
        dataset = problem_sets.choose_split(source, eval_split, "test", "task.eval_split")
        exercises, _ = _read(dataset, source, problem_column, max_tests)
        held_out += exercises
    digests = {overlap.digest(exercise.question) for exercise in held_out}

    train: list[list[Exercise]] = []
    for source in sources:
        dataset = problem_sets.choose_split(source, train_split, "train", "task.train_split")
        if 0 < max_train < len(dataset):
            dataset = dataset.select(range(max_train))
        exercises, dropped = _read(dataset, source, problem_column, max_tests)
        trainable = [item for item in exercises if overlap.digest(item.question) not in digests]
        if dropped:
            notes.append(f"{source}: {dropped} problems dropped, they have no test that can be run")
        if len(trainable) < len(exercises):
            count = len(exercises) - len(trainable)
            notes.append(f"{source}: {count} problems dropped, they are held out")
        if not trainable:
            raise UserError(
                f"task.data={source}: none of {len(dataset)} problems is left to train on"
            )
        notes.append(f"{source}: {len(trainable)} problems")
        train.append(trainable)
    return ExerciseSets(train, held_out, notes)


def _read(
    dataset: datasets.Dataset, source: str, problem_column: str, max_tests: int
) -> tuple[list[Exercise], int]:
    """Returns the problems of a split that have tests, and how many have none."""
    columns = list(dataset.column_names)
    names = [problem_column] if problem_column else _PROBLEM_COLUMNS
    column = next((name for name in names if name in columns), None)
    if column is None or not code_tests.has_layout(columns):
        raise UserError(
            f"task.data={source} has columns {', '.join(sorted(columns))}: the task code needs a "
            f"column of problems (task.problem_column, or {', '.join(_PROBLEM_COLUMNS)}) and one "
            f"of tests ({', '.join(code_tests.LAYOUTS)})"
        )
    exercises = []
    for row in cast(Iterable[code_tests.Row], dataset):
        tests = code_tests.read_tests(row)
        if max_tests:
            tests = code_tests.longest(tests, max_tests)
        question = row[column]
        if tests and isinstance(question, str):
            starter = row.get("starter_code") or ""
            if starter.strip():
                question += f"\n\nBegin with this code:\n```python\n{starter.rstrip()}\n```"
            exercises.append(Exercise(question, tests, code_tests.setup_code(row)))
    return exercises, len(dataset) - len(exercises)


# The functions of the task.


def _problem(task: TaskConfig, id: str, exercise: Exercise) -> Problem:
    function = exercise.tests[0].get("function", "").rpartition(".")[2]
    instruction = INSTRUCTION
    if function:
        instruction = INSTRUCTION_FOR_FUNCTION.format(function=function)
    elif "expression" in exercise.tests[0]:
        # The name of the function is in the test's own call.
        call = exercise.tests[0]["expression"]
        instruction = INSTRUCTION_FOR_FUNCTION.format(function=f"that {call} calls")
    template = find_template(task.template, CODE_TEMPLATES)
    values = {"question": exercise.question, "instruction": instruction}
    prompt = template.render(values, task.system_prompt)
    gold = {"tests": exercise.tests, "setup": exercise.setup}
    return Problem(id, task.name, prompt, gold)


def train_problems(task: TaskConfig, seed: int, step: int, count: int) -> list[Problem]:
    """Returns the problems of one step; without `task.data` these are toy problems."""
    if not task.data:
        return code_toy.train_problems(task, seed, step, count)
    exercises = problem_sets.stream(load_sets(task).train, task.weights, seed)
    indices = range(step * count, (step + 1) * count)
    return [_problem(task, f"{task.name}/train/{index}", exercises[index]) for index in indices]


def eval_problems(task: TaskConfig, count: int) -> list[Problem]:
    """Returns at most `count` held-out problems, the same in every run."""
    if not task.data:
        return code_toy.eval_problems(task, count)
    held_out = load_sets(task).held_out
    rng = random.Random(problem_sets.EVAL_SEED)
    places = sorted(rng.sample(range(len(held_out)), min(count, len(held_out))))
    return [_problem(task, f"{task.name}/eval/{place}", held_out[place]) for place in places]


def num_train_problems(task: TaskConfig) -> int | None:
    """Returns the number of problems to train on, None for toy problems without end."""
    return sum(map(len, load_sets(task).train)) if task.data else None


def notes(task: TaskConfig) -> list[str]:
    """Returns lines on the data, and on where programs run."""
    of_data = load_sets(task).notes if task.data else []
    return [*of_data, code_runs.describe(task)]


def check(task: TaskConfig) -> None:
    """Raises UserError if the settings of the task, or of the sandbox, cannot work."""
    options_of(task)
    code_runs.check(task)


def metrics(task: TaskConfig, grades: Sequence[Grade]) -> dict[str, float]:
    """Returns the level of protection, and the seconds that the tests of a step took in all."""
    return {
        "sandbox/level": code_runs.level_number(task),
        "sandbox/seconds": sum(grade.seconds for grade in grades),
    }


def grade(response: str, gold: JsonValue, task: TaskConfig) -> Grade:
    """Runs the program of a response. The score is the share of tests that pass, or all or none."""
    options = options_of(task)
    source = code_runs.extract_program(response)
    if not source:
        return Grade(0.0, False, "no answer")
    try:
        verdict = _verdict(source, gold, task)
    except SandboxError as error:
        return Grade(0.0, False, f"error: {error}", failed=True)
    is_correct = verdict.has_passed
    fraction = 0.0 if options.reward == REWARDS_OF_ALL else verdict.fraction
    score = 1.0 if is_correct else fraction
    return Grade(score, is_correct, verdict.failure or "correct")


def _verdict(source: str, gold: JsonValue, task: TaskConfig) -> code_runs.Verdict:
    """Runs as many tests as the settings need: up to the first failure where only all count."""
    functions = getattr(getattr(task, "reward", None), "functions", ())
    run_all = options_of(task).reward != REWARDS_OF_ALL or "code" in functions
    return code_runs.run_tests(source, gold, task, run_all=run_all)


# Rewards: (response, gold, settings) -> reward, or None where the problem has no tests.


def code_reward(response: str, gold: JsonValue, task: TaskConfig) -> float | None:
    """Returns the share of the tests that the last block of Python in the response passes.

    Source: open-r1, code_reward, which compares line by line and up to the shorter output, so that
    a program that prints nothing may pass. Here the outputs have the same words.
    """
    if not _has_tests(gold):
        return None
    source = code_runs.extract_program(response)
    return _verdict(source, gold, task).fraction if source else 0.0


def binary_code_reward(response: str, gold: JsonValue, task: TaskConfig) -> float | None:
    """Returns 1 where `code_reward` is above 0.99, else 0. Source: open-r1, binary_code_reward."""
    reward = code_reward(response, gold, task)
    return None if reward is None else float(reward > _PASSED)


def code_format_reward(response: str, gold: JsonValue, task: TaskConfig) -> float:
    """Returns 1 for thoughts in their tags, and an answer in its tags that has a block of code.

    The language is Python, or `gold["language"]`. Source: open-r1, get_code_format_reward.
    """
    language = code_runs.LANGUAGE
    if isinstance(gold, dict):
        language = gold.get("language") or language
    form = rf"^<think>\n.*?\n</think>\n<answer>\n.*?```{re.escape(language)}.*?```.*?\n</answer>$"
    return float(re.match(form, response, re.DOTALL | re.MULTILINE) is not None)


def _has_tests(gold: JsonValue) -> bool:
    return isinstance(gold, dict) and bool(gold.get("tests"))
