"""Runs the program of a response against the tests of its problem.

A grader process has one sandbox, which starts with the first program. Programs run in processes
below the sandbox's server and never in the grader process. No program can therefore stop the grader
process, which holds the expected outputs, or the pool. Imports no jax: grader processes load this
module.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import time
from typing import TYPE_CHECKING, NamedTuple

from jzero import http
from jzero.config import Local, Remote, SandboxLimits
from jzero.json_values import as_list, as_object, as_text, member, optional_member
from jzero.programming import code_asserts
from jzero.programming.code_feedback import FailedTest
from jzero.sandbox import client, comparison, levels, remote
from jzero.sandbox import program as inside
from jzero.sandbox.client import Limits, Outcome, Program, shared_sandbox
from jzero.types import JsonValue
from jzero.workers.pool import WALL_SECONDS_PER_CPU_SECOND

if TYPE_CHECKING:
    from jzero.config import TaskConfig

LANGUAGE = "python"
# The pool kills a grader process that exceeds its wall limit. Programs may use this share of it.
_SHARE_OF_WALL_LIMIT = 0.8
_SHORTEST_RUN = 0.05  # seconds of wall time; with less time left no program starts


class Verdict(NamedTuple):
    """The results of a problem's tests for a program."""

    passed: int
    run: int  # tests that were run; may stop at the first failure
    all: int
    failure: str  # reason of the first failed test, "" if no test failed
    first_failed: FailedTest | None = None

    @property
    def fraction(self) -> float:
        """The fraction of all tests that the program passed."""
        return self.passed / max(self.all, 1)

    @property
    def has_passed(self) -> bool:
        """Whether the program passed all tests, of which there is at least one."""
        return self.passed == self.all > 0


def extract_program(response: str, language: str = LANGUAGE) -> str:
    """Returns the last fenced block of a language in a response, "" without such a block.

    Source: open-r1, extract_code. Here the fence may also be ```py, ```python3 or ```Python, spaces
    may follow the fence, and lines may have Windows line endings.
    """
    names = _NAMES_OF_PYTHON if language == LANGUAGE else re.escape(language)
    # The bounded number of blanks also bounds the regex search.
    fence = rf"```(?i:{names})[ \t]{{0,80}}\r?\n(.*?)```"
    blocks = re.findall(fence, response, re.DOTALL)
    return blocks[-1] if blocks else ""


_NAMES_OF_PYTHON = "python3?|py"
# Python accepts this form only at the beginning of a program.
_FUTURE_IMPORT = re.compile(
    r"^from[ \t]+__future__[ \t]+import[ \t]+(?:\([\w\s,]*\)|[\w \t,]+)", re.MULTILINE
)


def with_setup(setup: str, source: str) -> str:
    """Returns the source of a program with setup code in front of it."""
    if not setup:
        return source
    # Imports from __future__ have to be the first statements, so they move in front of the setup.
    imports = _FUTURE_IMPORT.findall(source)
    # A statement stays in its place, because another one may follow after a semicolon.
    rest = _FUTURE_IMPORT.sub("pass", source)
    return "\n".join([*imports, setup, rest])


def run_tests(source: str, gold: JsonValue, task: TaskConfig, *, run_all: bool) -> Verdict:
    """Runs a program against the tests of `gold`.

    Args:
        source: the program.
        gold: a problem's gold, with "tests" (`code_tests`) and "setup", code that runs before the
            program.
        run_all: whether to run tests after the first failure.

    Raises:
        SandboxError: the sandbox failed, so the result of the program is unknown.
    """
    # Cache the last verdict: the grade, the rewards and the reply use the same tests.
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
    tests = [as_object(test, "a test") for test in member(gold, ("tests",), list)]
    setup = optional_member(gold, ("setup",), str, "")
    source = with_setup(setup, source)
    wall_limit = task.grade_seconds * WALL_SECONDS_PER_CPU_SECOND * _SHARE_OF_WALL_LIMIT
    # All tests of a response share one deadline, below the wall limit of the grader process.
    deadline = time.monotonic() + wall_limit
    passed, run, failure = 0, 0, ""
    first_failed: FailedTest | None = None
    for number, test in enumerate(tests):
        left = deadline - time.monotonic()
        if left < _SHORTEST_RUN:
            # The remaining tests count as failed: the fraction is over all tests.
            failure = failure or f"test {number + 1} of {len(tests)}: no time left"
            first_failed = first_failed or FailedTest(number + 1, test, None)
            break
        outcome = sandbox.run(_program(source, test), limits_of(task.sandbox, left))
        run += 1
        reason = _failure(outcome)
        # Compute the assert's check in a second process, which never sees the program's code.
        if not reason and "check" in test:
            left = max(deadline - time.monotonic(), _SHORTEST_RUN)
            check = _check_program(setup, as_text(test["check"]), outcome.result)
            checked = sandbox.run(check, limits_of(task.sandbox, left))
            reason = "wrong output" if _failure(checked) else ""
        else:
            checked = outcome
        if not reason and not _is_right(checked, test):
            reason = "wrong output"
        if not reason:
            passed += 1
            continue
        # Report the first failure, even if later tests run too.
        failure = failure or f"test {number + 1} of {len(tests)}: {reason}"
        first_failed = first_failed or FailedTest(number + 1, test, outcome)
        if not run_all:
            break
    return Verdict(passed, run, len(tests), failure, first_failed)


def _program(source: str, test: dict[str, JsonValue]) -> Program:
    if "expression" in test:
        return Program(source, expression=as_text(test["expression"]))
    if "function" in test:
        function, arguments = as_text(test["function"]), as_list(test["arguments"])
        return Program(source, function=function, arguments=tuple(arguments))
    return Program(source, stdin=as_text(test["stdin"]))


# Computes an assert's check from the program's answer, which arrives on stdin. The script contains
# no code of the program.
_CHECK_SCRIPT = """
{setup}
from typing import Any
{decode}
import json as _json, sys as _sys
{answer} = decode(_json.loads(_sys.stdin.read()))
"""


def _check_program(setup: str, check: str, result: str) -> Program:
    source = _CHECK_SCRIPT.format(
        setup=setup, decode=inspect.getsource(inside.decode), answer=code_asserts.ANSWER
    )
    return Program(source, stdin=result, expression=check)


def _failure(outcome: Outcome) -> str:
    """Returns why a program did not finish, "" if it did."""
    if outcome.end in ("time", "wall"):
        return "too slow"
    if outcome.end == "output":
        return "too much output"
    if not outcome.has_succeeded:
        last_line = outcome.stderr.strip().rpartition("\n")[2]
        return f"crashed with {outcome.status} {last_line}".strip()
    return ""


def _is_right(outcome: Outcome, test: dict[str, JsonValue]) -> bool:
    """Returns whether a program printed or returned the expected value of the test."""
    if "stdin" in test:
        return comparison.same_output(outcome.stdout, as_text(test["expected"]))
    is_python = "expression" in test  # other tests come from JSON, which has no tuples
    return any(
        comparison.same_result(outcome.result, choice, is_python=is_python)
        for choice in as_list(test["expected"])
    )


def limits_of(settings: SandboxLimits, wall_seconds_left: float) -> Limits:
    """Returns the limits of one run, which may take at most `wall_seconds_left` of wall time."""
    most = settings.seconds * client.WALL_SECONDS_PER_CPU_SECOND
    return Limits(
        seconds=settings.seconds,
        wall_seconds=min(most, wall_seconds_left),
        memory_gib=settings.memory_gib,
        output_mib=settings.output_mib,
    )


def find_sandbox(settings: Local | Remote) -> levels.Executor:
    """Returns the executor of this process's programs: a local sandbox or a remote server.

    Raises:
        UserError: this machine does not support the required protection level.
        SandboxError: the sandbox does not start.
    """
    if isinstance(settings, Remote):
        return _remote(settings.url, settings.protocol)
    level = levels.reached_level(settings.level)
    return shared_sandbox(level, tuple(settings.packages))


@functools.cache
def _remote(url: str, protocol: str) -> remote.RemoteSandbox:
    return remote.RemoteSandbox(url, protocol)


def check(task: TaskConfig) -> None:
    """Raises UserError if programs cannot run with these settings."""
    settings = task.sandbox
    if isinstance(settings, Remote):
        http.check_url("task.sandbox.url", settings.url)
        return
    levels.reached_level(settings.level)


def describe(task: TaskConfig) -> str:
    """Returns a line with the place where programs run and its protection level."""
    settings = task.sandbox
    if isinstance(settings, Remote):
        return f"sandbox: programs run at {settings.url} ({settings.protocol})"
    level = levels.reached_level(settings.level)
    line = f"sandbox: level {level}"
    return f"{line}: {levels.WARNINGS[level]}" if level in levels.WARNINGS else line


def level_number(task: TaskConfig) -> int:
    """Returns the value of the metric sandbox/level."""
    if isinstance(task.sandbox, Remote):
        return levels.REMOTE
    return levels.LEVELS.index(levels.reached_level(task.sandbox.level))
