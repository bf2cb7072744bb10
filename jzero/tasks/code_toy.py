"""Programming problems for a tiny model from nothing: write a formula of three numbers in Python.

The prompt is the formula in prefix notation, and the program reads the numbers:

    *+abc            a,b,c=map(int,input().split())
                     print((a+b)*c)

`example` makes the warm start's examples. The formula of an example's program is right in a share
of HINDSIGHT of them and a random one in the others: they teach what a program looks like, and RL
finds out that the formula matters. Imports no jax: grader processes load this module.
"""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, NamedTuple

from jzero.tasks import problem_sets
from jzero.tasks.code_tests import Test
from jzero.tasks.prompts import CODE_TEMPLATES, find_template
from jzero.types import Problem

if TYPE_CHECKING:
    from jzero.config import TaskConfig

HINDSIGHT = 0.5
HELD_OUT = 4  # every so many formulas one is never trained on
_NUM_TESTS = 3
_LARGEST = 99  # number in a test
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
        """The formula as the prompt writes it."""
        first, second, third = self.letters
        if self.nests_left:
            return f"{self.outer}{self.inner}{first}{second}{third}"
        return f"{self.outer}{first}{self.inner}{second}{third}"

    @property
    def python(self) -> str:
        """The formula as Python writes it."""
        first, second, third = self.letters
        if self.nests_left:
            return f"({first}{self.inner}{second}){self.outer}{third}"
        return f"{first}{self.outer}({second}{self.inner}{third})"

    def value(self, numbers: dict[str, int]) -> int:
        """Returns the value for numbers in place of the letters."""
        first, second, third = (numbers[letter] for letter in self.letters)
        if self.nests_left:
            return _apply(self.outer, _apply(self.inner, first, second), third)
        return _apply(self.outer, first, _apply(self.inner, second, third))


def _apply(operation: str, left: int, right: int) -> int:
    if operation == "+":
        return left + right
    return left - right if operation == "-" else left * right


# In a random order, so that those that are held out are of every kind.
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
    """Returns the program that prints the value of a formula."""
    return f"{','.join(_LETTERS)}=map(int,input().split())\nprint({formula.python})\n"


def response_of(formula: Formula) -> str:
    """Returns a response with the program of a formula."""
    return f"```python\n{program_of(formula)}```"


def tests_of(formula: Formula, rng: random.Random) -> list[Test]:
    """Returns tests whose numbers differ, so that formulas that differ give different values."""
    tests = []
    for _ in range(_NUM_TESTS):
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
    """Returns the problems of one step: formulas that are not held out."""
    problems = []
    for index in range(step * count, (step + 1) * count):
        rng = random.Random(f"code/train/{seed}/{index}")
        problems.append(_problem(task, f"code/train/{index}", rng.choice(TRAINED), rng))
    return problems


def eval_problems(task: TaskConfig, count: int) -> list[Problem]:
    """Returns a problem for each of at most `count` held-out formulas, the same in every run."""
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
    return len(response_of(FORMULAS[0])) + 1  # every character, and the end of the sequence
