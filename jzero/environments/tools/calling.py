"""Executes the tool calls of a response, within the limits of `task.tools`.

A failed call does not fail the episode. An invalid call, an exception in a tool and a timeout are
answered with an error message. Only a tool that never releases the interpreter fails the episode:
its process is killed after `task.reward.seconds`.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from jzero.environments.environment import RaisedExit, TookTooLong, limited, outside_of_loop
from jzero.environments.tools.parsing import BadCall, Call
from jzero.environments.tools.toolbox import Tool, Toolbox
from jzero.problems import bounds
from jzero.sandbox.client import SandboxError

if TYPE_CHECKING:
    from jzero.config import ToolsConfig

ERROR = "Error: "  # prefix of the answer to a failed call
_LEAST_SECONDS = 0.01
_GRACE_SECONDS = 1.0

Message = dict[str, str]


class ToolUse(NamedTuple):
    """Counts and duration of the tool calls of a turn."""

    calls: int
    failed: int  # of `calls`
    seconds: float  # wall time


class _Interrupted(BaseException):
    """A tool reached its time limit. No Exception, so that a tool does not catch it by accident."""


async def answer_calls(
    calls: Sequence[Call | BadCall],
    toolbox: Toolbox,
    settings: ToolsConfig,
    num_earlier: int,
    seconds: float,
) -> tuple[list[Message], ToolUse]:
    """Executes calls one after the other.

    Args:
        calls: the calls of one response, in order.
        toolbox: the tools of the episode.
        settings: the section `task.tools`.
        num_earlier: number of calls in earlier turns, which count toward `max_calls`.
        seconds: time limit for all calls of the response together.

    Returns:
        A message of the role tool for each call, and the counts and duration of the calls.

    Raises:
        SandboxError: the sandbox failed, which is not the policy's fault.
    """
    deadline = time.monotonic() + seconds
    messages = []
    failed = 0
    start = time.perf_counter()
    for number, call in enumerate(calls):
        # Every call is answered, so that the messages match the calls one to one.
        left = settings.max_calls - num_earlier - number
        seconds_left = min(settings.seconds, deadline - time.monotonic())
        if left <= 0:
            text = f"{ERROR}all {settings.max_calls} calls of tools are used: answer without a tool"
        else:
            text = await _answer(call, toolbox, seconds_left)
        failed += text.startswith(ERROR)
        messages.append({"role": "tool", "name": call.name, "content": _cut(text, settings)})
    spent = time.perf_counter() - start
    return messages, ToolUse(len(calls), failed, spent)


async def _answer(call: Call | BadCall, toolbox: Toolbox, seconds: float) -> str:
    if isinstance(call, BadCall):
        return f"{ERROR}{call.reason}"
    tool = toolbox.tools[call.name]
    # setitimer(0) would switch the timer off instead of firing at once.
    if seconds < _LEAST_SECONDS:
        return f"{ERROR}no time is left for this call"
    try:
        return _to_text(await _run(tool, call, seconds))
    except (TookTooLong, _Interrupted):
        return f"{ERROR}{call.name} took more than {seconds:.3g} seconds"
    except SandboxError:  # fails the episode, because the policy is not at fault
        raise
    except RaisedExit as error:
        cause = error.__cause__ or error
        if isinstance(cause, _Interrupted):
            return f"{ERROR}{call.name} took more than {seconds:.3g} seconds"
        return f"{ERROR}{_describe(cause)}"
    except BaseException as error:  # a tool is foreign, and may raise anything
        return f"{ERROR}{_describe(error)}"


async def _run(tool: Tool, call: Call, seconds: float) -> object:
    # The interpreter is another process, which is killed at its limit. A signal here would leave it
    # running.
    if tool.limits_itself:
        return tool.function(**call.arguments)
    with _limit(seconds), outside_of_loop():
        result = tool.function(**call.arguments)
    if not inspect.isawaitable(result):
        return result
    # The event loop cannot interrupt a coroutine that never awaits, but the signal can.
    with _limit(seconds + _GRACE_SECONDS):
        return await limited(seconds, lambda: result)


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raises _Interrupted in the block after `seconds` of wall time."""
    # Only the main thread receives signals. In another thread only the process's limit applies.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Interrupted

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _to_text(result: object) -> str:
    """Returns the result of a tool as text: lists and dicts as JSON if possible, else as `str`."""
    if isinstance(result, list | dict):
        with contextlib.suppress(TypeError, ValueError):
            return json.dumps(result, ensure_ascii=False)
    return str(result)


def _describe(error: BaseException) -> str:
    try:
        message = str(error)
    except BaseException:  # the text of a foreign error may fail, too
        message = ""
    return f"{bounds.type_name(error)}: {message}" if message else bounds.type_name(error)


def _cut(text: str, settings: ToolsConfig) -> str:
    """Removes the middle of a text that is longer than `task.tools.max_output` characters."""
    text = bounds.normalize(text)
    left_out = len(text) - settings.max_output
    if left_out <= 0:
        return text
    # The middle is cut out: a traceback ends with its error, and a table begins with its header.
    first = settings.max_output - settings.max_output // 2
    last = text[len(text) - settings.max_output // 2 :]
    return f"{text[:first]}\n[{left_out} characters left out]\n{last}"
