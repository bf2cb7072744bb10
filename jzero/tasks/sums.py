"""Sums of two numbers after a few solved ones, for pretrained models.

    12 + 7 = 19
    25 + 9 = 34
    31 + 14 = 45
    35 + 45 =

A pretrained model of 135M parameters understands the pattern and solves a fifth of the problems, so
there is something to learn in the first step, and a response has only four tokens: a real model
learns on a CPU in minutes. `configs/sums.py` has the recipes. Imports no jax: grader processes load
this module.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING

from jzero.fields import (
    Field,
    record,
)
from jzero.problems import problem_sets
from jzero.problems.options import read_options
from jzero.problems.prompts import SUMS_TEMPLATES, find_template
from jzero.tasks import arithmetic
from jzero.types import Grade, JsonValue, Problem

if TYPE_CHECKING:
    from jzero.config import TaskConfig

NAME = "sums"
# At most nine digits: int() raises an exception for thousands of digits.
MOST_DRAWS = 200
_NUMBER = re.compile(r"\s*(-?[0-9]{1,9})\s*")


@record
class Options:
    """Settings of this task, `task.options=name=value`."""

    value_max: int = Field(default=49, ge=2, le=10**6)
    """Largest number. The smallest is 2."""
    shots: int = Field(default=3, le=100)
    """Solved problems before the question."""
    differences: bool = False
    """Half of the problems are differences, such as 25 - 9 = 16."""


def options_of(task: TaskConfig) -> Options:
    """Returns the options of sums; the defaults if the task of the run is another one."""
    return read_options(Options, task.options)


# Problems.


def _equation(rng: random.Random, options: Options) -> tuple[str, int]:
    """Returns a sum or a difference such as "35 + 45", and its value, which is not negative."""
    first, second = (rng.randint(2, options.value_max) for _ in range(2))
    if not options.differences or rng.random() < 0.5:
        return f"{first} + {second}", first + second
    first, second = max(first, second), min(first, second)
    return f"{first} - {second}", first - second


def question(options: Options, split: str, seed: int, index: int) -> tuple[str, str, int]:
    """Returns the lines of solved problems, the question, and its answer.

    A question of an evaluation is never asked in training, unless value_max is so small that there
    are hardly any.
    """
    rng = random.Random(f"{NAME}/{split}/{seed}/{index}")
    solved = [_equation(rng, options) for _ in range(options.shots)]
    asked, answer = _equation(rng, options)
    for _ in range(MOST_DRAWS):
        if problem_sets.is_held_out(asked) == (split == "eval"):
            break
        asked, answer = _equation(rng, options)
    return "".join(f"{equation} = {value}\n" for equation, value in solved), asked, answer


def _problems(task: TaskConfig, split: str, seed: int, indices: range) -> list[Problem]:
    template = find_template(task.template, SUMS_TEMPLATES)
    options = options_of(task)
    problems = []
    for index in indices:
        examples, asked, answer = question(options, split, seed, index)
        values = {"examples": examples, "question": asked}
        prompt = template.render(values, task.system_prompt)
        problems.append(Problem(f"{NAME}/{split}/{index}", NAME, prompt, answer))
    return problems


def train_problems(task: TaskConfig, seed: int, step: int, count: int) -> list[Problem]:
    """Returns the problems of one step."""
    return _problems(task, "train", seed, range(step * count, (step + 1) * count))


def eval_problems(task: TaskConfig, count: int) -> list[Problem]:
    """Returns `count` problems, the same in every run."""
    return _problems(task, "eval", problem_sets.EVAL_SEED, range(count))


def grade(response: str, gold: JsonValue, task: TaskConfig) -> Grade:
    """Returns a score of 1 if the response is the value and nothing else, else 0."""
    return arithmetic.grade_number(_NUMBER.fullmatch(response), gold)


# The warm start.


def example(task: TaskConfig, seed: int, index: int, tries: float) -> tuple[str, str]:
    """Returns the index-th supervised example of template plain: (prompt, response).

    `tries` is unused.
    """
    examples, asked, answer = question(options_of(task), "warm_start", seed, index)
    values = {"examples": examples, "question": asked}
    return SUMS_TEMPLATES["plain"].prompt.format(**values), f" {answer}\n"


def max_tokens(task: TaskConfig, tries: float) -> int:
    """Returns an upper bound on the tokens of a response: its characters, and the end."""
    return len(f" {2 * options_of(task).value_max}\n") + 1
