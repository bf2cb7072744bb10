"""Makes the calls of a response, and says what came of each, within the limits of `task.tools`.

Nothing that a call does fails the episode: a call that cannot be made, a tool that raises and one
that takes too long are answered with what went wrong. A tool that keeps the interpreter for itself
beyond `task.reward.seconds` ends its process, and that fails the episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import signal
import threading
import time
from collections.abc import Awaitable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from jzero.sandbox.client import SandboxError
from jzero.tasks.tools.parsing import BadCall, Call
from jzero.tasks.tools.toolbox import Tool, Toolbox

if TYPE_CHECKING:
    from jzero.config import ToolsConfig

ERROR = "Error: "  # how the answer to a failed call begins
_LEAST_SECONDS = 0.01
_GRACE_SECONDS = 1.0

Message = dict[str, str]


class ToolUse(NamedTuple):
    """What the calls of an episode, or of a turn, came to."""

    calls: int
    failed: int  # of these
    seconds: float  # of wall time


class _TookTooLong(BaseException):
    """A tool is at its limit. No Exception, so that a tool does not catch it by chance."""


def answer_calls(
    calls: Sequence[Call | BadCall],
    toolbox: Toolbox,
    settings: ToolsConfig,
    num_earlier: int,
    seconds: float,
) -> tuple[list[Message], ToolUse]:
    """Makes calls one after the other.

    Args:
        calls: of one response, in order.
        num_earlier: calls of the turns before.
        seconds: that all calls of the response may take together.

    Returns:
        A message of the role tool for each call, and what the calls came to.

    Raises:
        SandboxError: nothing is known about a call, for no fault of the policy.
    """
    deadline = time.monotonic() + seconds
    messages = []
    failed = 0
    start = time.perf_counter()
    for number, call in enumerate(calls):
        left = settings.max_calls - num_earlier - number
        seconds_left = min(settings.seconds, deadline - time.monotonic())
        if left <= 0:
            text = f"{ERROR}all {settings.max_calls} calls of tools are used: answer without a tool"
        else:
            text = _answer(call, toolbox, seconds_left)
        failed += text.startswith(ERROR)
        messages.append({"role": "tool", "name": call.name, "content": _cut(text, settings)})
    spent = time.perf_counter() - start
    return messages, ToolUse(len(calls), failed, spent)


def _answer(call: Call | BadCall, toolbox: Toolbox, seconds: float) -> str:
    if isinstance(call, BadCall):
        return f"{ERROR}{call.reason}"
    tool = toolbox.tools[call.name]
    if seconds < _LEAST_SECONDS:
        return f"{ERROR}no time is left for this call"
    try:
        return _to_text(_run(tool, call, seconds))
    except _TookTooLong:
        return f"{ERROR}{call.name} took more than {seconds:.3g} seconds"
    except SandboxError:
        raise
    except (Exception, SystemExit) as error:  # a tool is foreign, and may raise anything
        return f"{ERROR}{_describe(error)}"


def _run(tool: Tool, call: Call, seconds: float) -> object:
    if tool.limits_itself:
        return tool.function(**call.arguments)
    with _limit(seconds):
        result = tool.function(**call.arguments)
    if not inspect.isawaitable(result):
        return result
    # The second limit is for a coroutine that keeps the interpreter for itself.
    with _limit(seconds + _GRACE_SECONDS):
        return _loop().run_until_complete(_wait_for(result, seconds))


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of async tools. An object may keep connections of this loop."""
    return asyncio.new_event_loop()


async def _wait_for(result: Awaitable[object], seconds: float) -> object:
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            return await result
    except TimeoutError:
        if scope.expired():
            raise _TookTooLong from None
        raise  # the tool's own


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raises _TookTooLong in the block after `seconds` of wall time.

    Signals reach the main thread alone. In another thread there is no limit but the process's.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TookTooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _to_text(result: object) -> str:
    """Returns what a tool returned as text: lists and dicts as JSON, where that is possible."""
    if isinstance(result, list | dict):
        with contextlib.suppress(TypeError, ValueError):
            return json.dumps(result, ensure_ascii=False)
    return str(result)


def _describe(error: BaseException) -> str:
    try:
        message = str(error)
    except Exception:  # the text of a foreign error may fail, too
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _cut(text: str, settings: ToolsConfig) -> str:
    """Returns a text without its middle, if it is longer than `task.tools.max_output`."""
    # Half of a pair of surrogates has no tokens.
    text = text.encode("utf-8", "replace").decode("utf-8")
    left_out = len(text) - settings.max_output
    if left_out <= 0:
        return text
    first = settings.max_output - settings.max_output // 2
    last = text[len(text) - settings.max_output // 2 :]
    return f"{text[:first]}\n[{left_out} characters left out]\n{last}"
