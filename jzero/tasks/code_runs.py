"""Runs the program of a response against the tests of its problem.

A grader process has one sandbox, which it starts with the first program. Programs run below that
sandbox's server and never in the grader process: whatever a program does, the process that holds
the expected outputs, and the pool above it, go on. Imports no jax: grader processes load this
module.
"""

from __future__ import annotations

import functools
import json
import re
import time
from typing import TYPE_CHECKING, NamedTuple

from jzero.errors import UserError
from jzero.grading.pool import WALL_SECONDS_PER_CPU_SECOND
from jzero.sandbox import client, comparison, levels, remote
from jzero.sandbox.client import Limits, Outcome, Program, shared_sandbox
from jzero.types import JsonValue

if TYPE_CHECKING:
    from jzero.config import SandboxConfig, TaskConfig

LANGUAGE = "python"
# The pool ends a grader process that takes longer than its wall limit. Programs stay below it.
_SHARE_OF_WALL_LIMIT = 0.8
_SHORTEST_RUN = 0.05  # seconds of wall time; a program that gets less is not run


class Verdict(NamedTuple):
    """What the tests of a problem say about a program."""

    passed: int
    run: int  # tests that were run, up to the first failure if that is enough
    all: int
    failure: str  # of the first test that failed; "" if none did

    @property
    def fraction(self) -> float:
        """The share of all tests that the program passed."""
        return self.passed / max(self.all, 1)

    @property
    def has_passed(self) -> bool:
        """Whether the program passed every test, and there was one."""
        return self.passed == self.all > 0


def extract_program(response: str, language: str = LANGUAGE) -> str:
    """Returns the last fenced block of a language in a response, "" if there is none.

    Source: open-r1, extract_code.
    """
    blocks = re.findall(rf"```{language}\n(.*?)```", response, re.DOTALL)
    return blocks[-1] if blocks else ""


def run_tests(source: str, gold: JsonValue, task: TaskConfig, *, run_all: bool) -> Verdict:
    """Runs a program against the tests of `gold`.

    Args:
        source: the program.
        gold: a problem's gold, with "tests" (`code_tests`) and "setup", which is run before it.
        run_all: whether tests are run after the first that fails.

    Raises:
        SandboxError: the sandbox failed, and nothing is known about the program.
    """
    # A response is graded, and then rewarded for the same tests.
    settings = json.dumps(vars(task.sandbox), default=vars)
    key = (source, json.dumps(gold), settings, task.grade_seconds, run_all)
    if key not in _LAST_VERDICT:
        verdict = _run_tests(source, gold, task, run_all)
        _LAST_VERDICT.clear()
        _LAST_VERDICT[key] = verdict
    return _LAST_VERDICT[key]


_LAST_VERDICT: dict[tuple[str, str, str, float, bool], Verdict] = {}


def _run_tests(source: str, gold: JsonValue, task: TaskConfig, run_all: bool) -> Verdict:
    sandbox = find_sandbox(task.sandbox)
    tests = gold["tests"]
    if gold.get("setup"):
        source = f"{gold['setup']}\n{source}"
    wall_limit = task.grade_seconds * WALL_SECONDS_PER_CPU_SECOND * _SHARE_OF_WALL_LIMIT
    deadline = time.monotonic() + wall_limit
    passed, run, failure = 0, 0, ""
    for number, test in enumerate(tests):
        left = deadline - time.monotonic()
        if left < _SHORTEST_RUN:
            failure = failure or f"test {number + 1} of {len(tests)}: no time left"
            break
        outcome = sandbox.run(_program(source, test), limits_of(task.sandbox, left))
        run += 1
        reason = _failure(outcome, test)
        if not reason:
            passed += 1
            continue
        failure = failure or f"test {number + 1} of {len(tests)}: {reason}"
        if not run_all:
            break
    return Verdict(passed, run, len(tests), failure)


def _program(source: str, test: dict[str, JsonValue]) -> Program:
    if "expression" in test:
        return Program(source, expression=test["expression"])
    if "function" in test:
        return Program(source, function=test["function"], arguments=tuple(test["arguments"]))
    return Program(source, stdin=test["stdin"])


def _failure(outcome: Outcome, test: dict[str, JsonValue]) -> str:
    """Returns why an outcome does not pass a test, "" if it does."""
    if outcome.end in ("time", "wall"):
        return "too slow"
    if outcome.end == "output":
        return "too much output"
    if not outcome.has_succeeded:
        last_line = outcome.stderr.strip().rpartition("\n")[2]
        return f"crashed with {outcome.status} {last_line}".strip()
    if "stdin" in test:
        is_right = comparison.same_output(outcome.stdout, test["expected"])
    else:
        choices = test["expected"]
        is_right = any(comparison.same_result(outcome.result, choice) for choice in choices)
    return "" if is_right else "wrong output"


def limits_of(settings: SandboxConfig, wall_seconds_left: float) -> Limits:
    """Returns the limits of one run, of which no more than the time that is left may be waited."""
    most = settings.seconds * client.WALL_SECONDS_PER_CPU_SECOND
    return Limits(
        seconds=settings.seconds,
        wall_seconds=min(most, wall_seconds_left),
        memory_gib=settings.memory_gib,
        output_mib=settings.output_mib,
    )


def find_sandbox(settings: SandboxConfig) -> levels.Executor:
    """Returns what runs this process's programs: its sandbox, or a server elsewhere.

    Raises:
        UserError: this machine does not have the level of protection.
        SandboxError: the sandbox does not start.
    """
    if settings.url:
        return _remote(settings.url, settings.protocol)
    level = levels.reached_level(settings.level)
    return shared_sandbox(level, tuple(settings.packages))


@functools.cache
def _remote(url: str, protocol: str) -> remote.RemoteSandbox:
    return remote.RemoteSandbox(url, protocol)


def check(task: TaskConfig) -> None:
    """Raises UserError if no program can be run with these settings."""
    settings = task.sandbox
    if settings.url:
        if not settings.url.startswith(("http://", "https://")):
            raise UserError(
                f"task.sandbox.url={settings.url}: give http://HOST:PORT or https://..."
            )
        return
    levels.reached_level(settings.level)


def describe(task: TaskConfig) -> str:
    """Returns a line that says where programs run, and at which level of protection."""
    settings = task.sandbox
    if settings.url:
        return f"sandbox: programs run at {settings.url} ({settings.protocol})"
    level = levels.reached_level(settings.level)
    line = f"sandbox: level {level}"
    return f"{line}: {levels.WARNINGS[level]}" if level in levels.WARNINGS else line


def level_number(task: TaskConfig) -> int:
    """Returns the level as the metric sandbox/level has it."""
    if task.sandbox.url:
        return levels.REMOTE
    return levels.LEVELS.index(levels.reached_level(task.sandbox.level))
