"""The environment `arithmetic` of the Tinker cookbook's recipe math_rl, as a task of jzero.

Its sums, prompt and grader are those of tinker_cookbook/recipes/math_rl/arithmetic_env.py with the
renderer qwen3_instruct. A step asks the same sums in every run, whatever the seed. The cookbook
subtracts 0.1 from the reward of a response without an end; here `algorithm.truncated_penalty` does.
Imports no jax: grader processes load this module.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from jzero.problems.prompts import PromptTemplate
from jzero.tasks.task import Task
from jzero.types import Grade, JsonValue, Problem

if TYPE_CHECKING:
    from jzero.config import TaskConfig

LARGEST = 100
DIGITS = 9  # of an answer; int() raises an exception for thousands of digits
CHAT = PromptTemplate(
    prompt="<|im_start|>user\nWhat is 4 + 5?<|im_end|>\n"
    "<|im_start|>assistant\n9<|im_end|>\n"
    "<|im_start|>user\n{question}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
INTEGER = re.compile(r"-?\d+")


def train_problems(task: TaskConfig, seed: int, step: int, count: int) -> list[Problem]:
    """Returns the sums of one step. `seed` is unused, as in the cookbook."""
    rng = np.random.RandomState(step)
    template = TASK.find_template(task.template)
    problems = []
    for index in range(count):
        first, second = (int(rng.randint(0, LARGEST + 1)) for _ in range(2))
        prompt = template.render({"question": f"What is {first} + {second}?"})
        problems.append(Problem(f"sums/{step}/{index}", task.name, prompt, first + second))
    return problems


def eval_problems(task: TaskConfig, count: int) -> list[Problem]:
    """Returns no problem: the environment has no held-out sums."""
    return []


def grade(response: str, gold: JsonValue, task: TaskConfig) -> Grade:
    """Returns a score of 1 if the last integer of the response is the sum, else 0."""
    integers = INTEGER.findall(response.replace(",", ""))
    if not integers or len(integers[-1]) > DIGITS:
        return Grade(0.0, False, "no answer")
    if int(integers[-1]) != gold:
        return Grade(0.0, False, "wrong value")
    return Grade(1.0, True, "correct")


TASK = Task(
    train_problems=train_problems,
    eval_problems=eval_problems,
    grade=grade,
    templates={"chat": CHAT},
    prompt_values=("question",),
)
