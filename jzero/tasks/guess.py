"""Guess a number from 1 to `value_max`, with a hint after each wrong guess.

The hint is "higher" or "lower". Binary search always finds one of 2^t - 1 numbers in t turns. A
policy that ignores the hints rarely does, so the task shows whether RL learns over several turns.
`configs/guess.py` has the recipes. Imports no jax: grader processes load this module.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING

from jzero.fields import (
    Field,
    record,
)
from jzero.json_values import to_integer
from jzero.problems import problem_sets
from jzero.problems.options import read_options
from jzero.problems.prompts import GUESS_TEMPLATES, PLAIN_REPLY, find_template
from jzero.types import Grade, JsonValue, Problem

if TYPE_CHECKING:
    from jzero.config import TaskConfig

# The share of warm-start examples with a right last guess. With a share of 1/4, as in countdown,
# the warm start did not learn to guess within the hints, and RL needed 50 steps to begin to
# (lab/log.md, guessing with hints).
HINDSIGHT = 0.5
# At most nine digits: int() raises an exception for thousands of digits.
_NUMBER = re.compile(r"\s*([0-9]{1,9})\s*")


@record
class Options:
    """Settings of this task, `task.options=name=value`."""

    value_max: int = Field(default=99, ge=1)
    """Largest number. The smallest is 1."""


def options_of(task: TaskConfig) -> Options:
    """Returns the options of guess; the defaults if the task of the run is another one."""
    return read_options(Options, task.options)


# Problems.


def _problems(task: TaskConfig, split: str, seed: int, indices: range) -> list[Problem]:
    """Returns the problems of a split with these indices."""
    template = find_template(task.template, GUESS_TEMPLATES)
    largest = options_of(task).value_max
    prompt = template.render({"largest": largest})
    return [
        Problem(f"guess/{split}/{i}", task.name, prompt, _number(largest, split, seed, i))
        for i in indices
    ]


def _number(largest: int, split: str, seed: int, index: int) -> int:
    # Every number occurs equally often: each round has all numbers in a random order. With
    # independently drawn numbers, the first guess would follow the numbers of the last step.
    round_of_all, position = divmod(index, largest)
    rng = random.Random(f"guess/{split}/{seed}/{round_of_all}")
    return rng.sample(range(1, largest + 1), largest)[position]


def train_problems(task: TaskConfig, seed: int, step: int, count: int) -> list[Problem]:
    """Returns the problems of one step."""
    return _problems(task, "train", seed, range(step * count, (step + 1) * count))


def eval_problems(task: TaskConfig, count: int) -> list[Problem]:
    """Returns `count` problems, the same in every run."""
    return _problems(task, "eval", problem_sets.EVAL_SEED, range(count))


# The environment.


def parse_guess(response: str) -> int | None:
    """Returns the number in a response, or None if the response is anything but a number."""
    found = _NUMBER.fullmatch(response)
    return int(found[1]) if found else None


def grade(response: str, gold: JsonValue, task: TaskConfig) -> Grade:
    """Returns a score of 1 for the right number and 0 for any other response."""
    guess = parse_guess(response)
    if guess is None:
        return Grade(0.0, False, "no answer")
    if guess != gold:
        return Grade(0.0, False, "wrong value")
    return Grade(1.0, True, "correct")


def hint(guess: int | None, gold: int) -> str:
    """Returns the environment's reply to a wrong guess, or to a response without a number."""
    if guess is None:
        return "no number"
    return "higher" if guess < gold else "lower"


def reply(gold: JsonValue, turns: list[tuple[str, Grade]], task: TaskConfig) -> str | None:
    """Returns the hint after the last response, or None if the response is right."""
    response, last_grade = turns[-1]
    return None if last_grade.correct else hint(parse_guess(response), to_integer(gold))


# The warm start.


def example(task: TaskConfig, seed: int, index: int, tries: float) -> tuple[str, str]:
    """Returns the index-th supervised example of template plain: (prompt, response).

    The prompt contains up to `tries` - 1 random wrong guesses with their true hints, and the
    response is one more guess. The guess is right in a share of HINDSIGHT of the examples and
    random in the others. The examples teach the meaning of hints, but not which number to guess.
    """
    rng = random.Random(f"guess/warm_start/{seed}/{index}")
    largest = options_of(task).value_max

    def draw() -> int:
        return 1 + int(rng.random() * largest)

    gold = draw()
    prompt = GUESS_TEMPLATES["plain"].prompt.format(largest=largest)
    for _ in range(int(rng.random() * tries)):
        guess = draw()
        if guess != gold:
            prompt += str(guess) + PLAIN_REPLY.replace("{}", hint(guess, gold))
    response = gold if rng.random() < HINDSIGHT else draw()
    return prompt, str(response)


def max_tokens(task: TaskConfig, tries: float) -> int:
    """Returns an upper bound on the tokens of a response: its digits and the end of sequence."""
    return len(str(options_of(task).value_max)) + 1
