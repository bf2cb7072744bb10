"""The options of the task `code`, the verdict on a program, and the rewards for programs.

The rewards `code`, `binary_code` and `code_format` are open-r1's (github.com/huggingface/open-r1,
rewards.py). Imports no jax: grader processes load this module.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from jzero.fields import record
from jzero.json_values import as_text
from jzero.problems.options import read_options
from jzero.programming import code_feedback, code_runs
from jzero.types import JsonValue

if TYPE_CHECKING:
    from jzero.config import TaskConfig

_PASSED = 0.99  # source: open-r1, binary_code_reward


@record
class Options:
    """Settings of this task, `task.options=name=value`."""

    reward: Literal["fraction", "all"] = "fraction"
    """Score of a program. fraction: the fraction of the tests that it passes. all: 1 if it passes
    every test, 0 otherwise."""
    max_tests: int = 15
    """Maximum tests of a problem: the tests with the longest inputs are kept. 0: all."""
    feedback: code_feedback.Feedback = "test"
    """Content of the reply to a failed test. test: its input and output. error: the message of a
    crash. words: only task.feedback.right and task.feedback.wrong."""


def options_of(task: TaskConfig) -> Options:
    """Returns the settings of this task."""
    return read_options(Options, task.options)


def verdict_of(source: str, gold: JsonValue, task: TaskConfig) -> code_runs.Verdict:
    """Runs a program against the tests of its problem; raises SandboxError if it cannot be run."""
    # If only passing all tests counts, stop at the first failure. The reward `code` needs the
    # fraction.
    run_all = options_of(task).reward != "all" or "code" in task.reward.functions
    return code_runs.run_tests(source, gold, task, run_all=run_all)


# Rewards: (response, gold, settings) -> reward, or None if the problem has no tests.


def code_reward(response: str, gold: JsonValue, task: TaskConfig) -> float | None:
    """Returns the fraction of tests that the last Python block of the response passes.

    Source: open-r1, code_reward. open-r1 compares line by line, up to the end of the shorter
    output, so a program that prints nothing may pass. Here the outputs must have the same words.
    """
    if not has_tests(gold):
        return None
    source = code_runs.extract_program(response)
    return verdict_of(source, gold, task).fraction if source else 0.0


def binary_code_reward(response: str, gold: JsonValue, task: TaskConfig) -> float | None:
    """Returns 1 if `code_reward` is above 0.99, else 0. Source: open-r1, binary_code_reward."""
    reward = code_reward(response, gold, task)
    return None if reward is None else float(reward > _PASSED)


def code_format_reward(response: str, gold: JsonValue, task: TaskConfig) -> float:
    """Returns 1 for a <think> block followed by an <answer> block that contains a code block.

    The code block's language is `gold["language"]`, by default Python. Source: open-r1,
    get_code_format_reward.
    """
    language = code_runs.LANGUAGE
    if isinstance(gold, dict):
        language = as_text(gold.get("language") or language, "language")
    form = rf"^<think>\n.*?\n</think>\n<answer>\n.*?```{re.escape(language)}.*?```.*?\n</answer>$"
    return float(re.match(form, response, re.DOTALL | re.MULTILINE) is not None)


def has_tests(gold: JsonValue) -> bool:
    """Returns whether a problem is a programming problem with tests."""
    return isinstance(gold, dict) and bool(gold.get("tests"))
