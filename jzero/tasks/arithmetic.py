"""Products of two two-digit numbers: too hard for a tiny model, easy with a calculator.

The task shows whether RL learns to call a tool. `configs/calculator.py` has the recipe. Its model
starts from random weights, and the warm start shows the model direct answers, calls of the tool
`calculator`, and answers after a call. Only the rewards teach which of the two ways is better.
Imports no jax: grader processes load this module.
"""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING

from jzero.environments.tools.parsing import BEGIN, END
from jzero.problems import problem_sets
from jzero.problems.prompts import ARITHMETIC_TEMPLATES, PLAIN_REPLY, find_template
from jzero.types import Grade, JsonValue, Problem

if TYPE_CHECKING:
    from jzero.config import TaskConfig

NAME = "arithmetic"
TOOL = "calculator"
# The shares of warm-start examples with the tool that are direct answers and calls. The other
# examples are answers after a call.
SHARE_OF_ANSWERS = 0.4
SHARE_OF_CALLS = 0.2
_NUMBER = re.compile(r"\s*([0-9]{1,9})\s*")


# Problems.


def _factors(kind: str, seed: int, index: int) -> tuple[int, int]:
    rng = random.Random(f"{NAME}/{kind}/{seed}/{index}")
    return rng.randint(10, 99), rng.randint(10, 99)


def _problems(task: TaskConfig, split: str, seed: int, indices: range) -> list[Problem]:
    template = find_template(task.template, ARITHMETIC_TEMPLATES)
    problems = []
    for index in indices:
        first, second = _factors(split, seed, index)
        prompt = template.render({"question": f"{first}*{second}"}, task.system_prompt)
        problems.append(Problem(f"{NAME}/{split}/{index}", NAME, prompt, first * second))
    return problems


def train_problems(task: TaskConfig, seed: int, step: int, count: int) -> list[Problem]:
    """Returns the problems of one step."""
    return _problems(task, "train", seed, range(step * count, (step + 1) * count))


def eval_problems(task: TaskConfig, count: int) -> list[Problem]:
    """Returns `count` problems, the same in every run."""
    return _problems(task, "eval", problem_sets.EVAL_SEED, range(count))


def grade(response: str, gold: JsonValue, task: TaskConfig) -> Grade:
    """Returns a score of 1 if the response is exactly the product, else 0."""
    return grade_number(_NUMBER.fullmatch(response), gold)


def grade_number(found: re.Match[str] | None, gold: JsonValue) -> Grade:
    """Returns a score of 1 if the number of a response is right, else 0.

    found: the match of the whole response, whose first group is the number; None without a number.
    """
    if found is None:
        return Grade(0.0, False, "no answer")
    if int(found[1]) != gold:
        return Grade(0.0, False, "wrong value")
    return Grade(1.0, True, "correct")


# The warm start.


def call_of(expression: str) -> str:
    """Returns a one-line call of the calculator."""
    call = {"name": TOOL, "arguments": {"expression": expression}}
    return f"{BEGIN}{json.dumps(call, separators=(',', ':'))}{END}"


def example(task: TaskConfig, seed: int, index: int, tries: float) -> tuple[str, str]:
    """Returns the index-th supervised example of template plain: (prompt, response).

    Without the tool every example is a direct answer. `tries` is unused.
    """
    first, second = _factors("warm_start", seed, index)
    expression, product = f"{first}*{second}", str(first * second)
    prompt = ARITHMETIC_TEMPLATES["plain"].prompt.format(question=expression)
    choice = random.Random(f"{NAME}/choice/{seed}/{index}").random()
    if TOOL not in task.tools.names or choice < SHARE_OF_ANSWERS:
        return prompt, product
    if choice < SHARE_OF_ANSWERS + SHARE_OF_CALLS:
        return prompt, call_of(expression)
    # The call and the tool's reply are part of the prompt, so only the answer is trained on.
    return prompt + call_of(expression) + PLAIN_REPLY.replace("{}", product), product


def max_tokens(task: TaskConfig, tries: float) -> int:
    """Returns an upper bound on the tokens of a response: a call and the end of sequence."""
    return len(call_of("99*99")) + 1
