"""Feedback for the policy on a failed program: the reply of `task.name=code`.

The expected values of a test never reach the process that runs a program. The test's input does,
and a program can print it. The reply to a program that fails a hidden test therefore contains only
fixed words: the number of the test, how it failed, and the name of a built-in exception. For a test
that its data set publishes (`code_tests.PUBLIC`), the reply shows the input, the expected output,
and the program's output. `task.options=feedback=error` also shows the last line of the error of a
hidden test, through which a program may reveal the input to the policy.

All quoted text is cut to MAX_SHOWN characters, has no control characters, and cannot spell the
special tokens that end a turn. Imports no jax: grader processes load this module.
"""

from __future__ import annotations

import builtins
import json
import re
from typing import Literal, NamedTuple

from jzero.json_values import as_list, as_text
from jzero.programming import code_tests
from jzero.sandbox import program as inside
from jzero.sandbox.client import Outcome
from jzero.types import JsonValue

WORDS = "words"  # task.feedback.right and task.feedback.wrong only
TEST = "test"
ERROR = "error"
Feedback = Literal["test", "error", "words"]

MAX_SHOWN = 300  # characters per input, output or error

NO_PROGRAM = "Your answer has no block that begins with ```python and ends with ```."

# The allowed words from the error message of a crash. A program can choose any other text.
_EXCEPTIONS = frozenset(
    name
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException)
)
_ERROR_NAME = re.compile(r"([A-Za-z]+)(?:$|:)")
# Chat templates write their special tokens in these brackets, or as </s>.
_SPECIAL = re.compile(r"<(?=[|｜]|/?s>)")


class FailedTest(NamedTuple):
    """The first test that a program failed."""

    number: int  # starts at 1
    test: code_tests.Test
    outcome: Outcome | None  # None: no time was left to run the test


def describe(failed: FailedTest, num_tests: int, feedback: str) -> str:
    """Describes a failed test to the policy. `feedback` is TEST or ERROR."""
    outcome = failed.outcome
    lines = [f"Test {failed.number} of {num_tests} failed: {_failure(outcome)}."]
    is_public = bool(failed.test.get(code_tests.PUBLIC))
    if is_public:
        lines += [
            f"Input: {shown(_input_of(failed.test))}",
            f"Expected: {shown(_expected_by(failed.test))}",
        ]
    # Outputs and errors are shown only if the program ended by itself.
    if outcome is None or outcome.end != "exit":
        return "\n".join(lines)
    if outcome.has_succeeded and is_public:
        lines.append(f"Your output: {shown(_output_of(outcome, failed.test))}")
    # The error message of a hidden test may contain the input.
    elif not outcome.has_succeeded and (is_public or feedback == ERROR):
        last_line = outcome.stderr.strip().rpartition("\n")[2]
        lines.append(f"Error: {shown(last_line)}")
    return "\n".join(lines)


def shown(text: str) -> str:
    """Returns text from a test or a program in a safe form: see the module's docstring."""
    # The first cut bounds the work on outputs of megabytes.
    cut = text[: MAX_SHOWN + 1]
    safe = "".join(_safe(character) for character in cut).strip()
    safe = _SPECIAL.sub("< ", safe)
    if len(text) > MAX_SHOWN:
        return safe[:MAX_SHOWN] + "..."
    return safe or "nothing"


def _safe(character: str) -> str:
    if character == "\n" or character.isprintable():
        return character
    return " " if character.isspace() else "?"


def _failure(outcome: Outcome | None) -> str:
    """Returns how a test failed, in fixed words: the program can only choose among them."""
    if outcome is None or outcome.end in ("time", "wall"):
        return "the program is too slow"
    if outcome.end == "output":
        return "the program writes too much"
    if outcome.has_succeeded:
        return "the output is wrong"
    if outcome.end == "signal":
        return "the program was ended by a signal"
    last_line = outcome.stderr.strip().rpartition("\n")[2]
    name = _ERROR_NAME.match(last_line)
    if name and name.group(1) in _EXCEPTIONS:
        return f"the program ended with {name.group(1)}"
    return "the program ended with an error"


def _input_of(test: code_tests.Test) -> str:
    if "stdin" in test:
        return as_text(test["stdin"])
    if "expression" in test:
        return as_text(test["expression"])
    arguments = ", ".join(json.dumps(argument) for argument in as_list(test["arguments"]))
    return f"{test['function']}({arguments})"


def _expected_by(test: code_tests.Test) -> str:
    if "stdin" in test:
        return as_text(test["expected"])
    return " or ".join(_literal(choice) for choice in as_list(test["expected"]))


def _output_of(outcome: Outcome, test: code_tests.Test) -> str:
    if "stdin" in test:
        return outcome.stdout
    try:
        return _literal(json.loads(outcome.result))
    except (ValueError, RecursionError):  # no value was returned
        return outcome.result


def _literal(value: JsonValue) -> str:
    """Returns a value in the form of `program.encode` as a Python literal."""
    try:
        return repr(inside.decode(value))
    except (TypeError, ValueError, KeyError, RecursionError):  # a program may write any JSON
        return json.dumps(value)
