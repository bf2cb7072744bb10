"""Toy programming problems for a tiny, randomly initialized model: formulas of three numbers.

The prompt is a formula in prefix notation, and the program reads the numbers:

    *+abc            a,b,c=map(int,input().split())
                     print((a+b)*c)

`example` generates the warm-start examples. A share HINDSIGHT of them has a program with the
correct formula, the others have a random formula. The examples teach the form of a program, and RL
learns that the formula matters. Imports no jax: grader processes load this module.
"""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, NamedTuple

from jzero.problems import problem_sets
from jzero.problems.prompts import CODE_TEMPLATES, find_template
from jzero.programming.code_tests import Test
from jzero.types import Problem

if TYPE_CHECKING:
    from jzero.config import TaskConfig

HINDSIGHT = 0.5
HELD_OUT = 4  # one in HELD_OUT formulas is held out from training
_NUM_TESTS = 3
_LARGEST = 99  # the largest number in a test
_OPERATIONS = "+-*"
_LETTERS = "abc"


class Formula(NamedTuple):
    """Two operations on three letters."""

    outer: str
    inner: str
    letters: tuple[str, ...]
    nests_left: bool  # (x inner y) outer z, or else x outer (y inner z)

    @property
    def prefix(self) -> str:
        """The formula in prefix notation, for the prompt."""
        first, second, third = self.letters
        if self.nests_left:
            return f"{self.outer}{self.inner}{first}{second}{third}"
        return f"{self.outer}{first}{self.inner}{second}{third}"

    @property
    def python(self) -> str:
        """The formula in Python syntax."""
        first, second, third = self.letters
        if self.nests_left:
            return f"({first}{self.inner}{second}){self.outer}{third}"
        return f"{first}{self.outer}({second}{self.inner}{third})"

    def value(self, numbers: dict[str, int]) -> int:
        """Evaluates the formula with a number for each letter."""
        first, second, third = (numbers[letter] for letter in self.letters)
        if self.nests_left:
            return _apply(self.outer, _apply(self.inner, first, second), third)
        return _apply(self.outer, first, _apply(self.inner, second, third))


def _apply(operation: str, left: int, right: int) -> int:
    if operation == "+":
        return left + right
    return left - right if operation == "-" else left * right


# Shuffled, so that the held-out formulas cover all operations and both kinds of nesting.
FORMULAS = [
    Formula(outer, inner, letters, nests_left)
    for outer, inner, letters, nests_left in itertools.product(
        _OPERATIONS, _OPERATIONS, itertools.permutations(_LETTERS), (True, False)
    )
]
random.Random("code/formulas").shuffle(FORMULAS)
TRAINED = [formula for place, formula in enumerate(FORMULAS) if place % HELD_OUT]
NOT_TRAINED = FORMULAS[::HELD_OUT]


def program_of(formula: Formula) -> str:
    """Returns a program that reads the numbers and prints the value of a formula."""
    return f"{','.join(_LETTERS)}=map(int,input().split())\nprint({formula.python})\n"


def response_of(formula: Formula) -> str:
    """Returns a response with the program of a formula in a Python block."""
    return f"```python\n{program_of(formula)}```"


def tests_of(formula: Formula, rng: random.Random) -> list[Test]:
    """Returns random tests for the program of a formula."""
    tests = []
    # The numbers of a test are distinct, which tells different formulas apart.
    for _ in range(_NUM_TESTS):
        # From 2, because factors of 0 and 1 would let wrong formulas pass.
        numbers = rng.sample(range(2, _LARGEST + 1), len(_LETTERS))
        value = formula.value(dict(zip(_LETTERS, numbers, strict=True)))
        tests.append({"stdin": " ".join(map(str, numbers)), "expected": str(value)})
    return tests


def _problem(task: TaskConfig, id: str, formula: Formula, rng: random.Random) -> Problem:
    template = find_template(task.template, CODE_TEMPLATES)
    question = (
        f"Write a program that reads the integers a, b and c from one line and prints the value of "
        f"{formula.python}."
    )
    if task.template == "plain":
        question = formula.prefix
    prompt = template.render({"question": question, "instruction": ""}, task.system_prompt)
    return Problem(id, task.name, prompt, {"tests": tests_of(formula, rng), "setup": ""})


def train_problems(task: TaskConfig, seed: int, step: int, count: int) -> list[Problem]:
    """Returns the problems of one step, drawn from the training formulas."""
    problems = []
    for index in range(step * count, (step + 1) * count):
        rng = random.Random(f"code/train/{seed}/{index}")
        problems.append(_problem(task, f"code/train/{index}", rng.choice(TRAINED), rng))
    return problems


def eval_problems(task: TaskConfig, count: int) -> list[Problem]:
    """Returns problems for at most `count` held-out formulas, the same in every run."""
    problems = []
    for index, formula in enumerate(NOT_TRAINED[:count]):
        rng = random.Random(f"code/eval/{problem_sets.EVAL_SEED}/{index}")
        problems.append(_problem(task, f"code/eval/{index}", formula, rng))
    return problems


def example(task: TaskConfig, seed: int, index: int, tries: float) -> tuple[str, str]:
    """Returns the prompt and the response of the index-th supervised example of template plain."""
    rng = random.Random(f"code/warm_start/{seed}/{index}")
    asked = rng.choice(TRAINED)
    written = asked if rng.random() < HINDSIGHT else rng.choice(TRAINED)
    prompt = CODE_TEMPLATES["plain"].prompt.format(question=asked.prefix)
    return prompt, response_of(written)


def max_tokens(task: TaskConfig, tries: float) -> int:
    """Returns an upper bound on the tokens of a response in jzero's own tokenizer."""
    # One token for every character, and one for the end of the sequence. All formulas have the same
    # length.
    return len(response_of(FORMULAS[0])) + 1
