"""Messages between the pool and a grader process: a length in 8 bytes, then that many bytes.

The pool sends lists of requests in JSON. A request is a turn of an episode (`TurnRequest`) or a
call of a function (`CallRequest`), with a number that its answer repeats. `tasks.worker` documents
the answers.

User-defined code runs in the process at the other end, so the pool reads with a deadline and a
bound. A length that is too large, an incomplete message and malformed bytes raise errors; the pool
never waits forever.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from jzero.config import TaskConfig, read_section
from jzero.fields import values_of
from jzero.json_values import as_list, as_object, as_text, from_fields
from jzero.types import Grade, JsonValue, Turns

# The largest message that the pool reads, in bytes. `task.max_reply_bytes` is at most 8 MiB; a
# reply of control characters takes six times as many bytes in JSON.
MAX_MESSAGE = 64 << 20
_LENGTH = struct.Struct("!Q")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class TurnRequest:
    """A response of the policy, and everything that its grade and the reply to it depend on.

    `environments.environment.make_request` makes the requests of rollouts.
    """

    grader: str  # a key of `tasks.TASKS`, the name of a module with a TASK, or "module:function"
    response: str
    gold: JsonValue  # the reference answer; for an environment its row, seed and first observation
    task: TaskConfig
    earlier: Turns = ()  # the earlier turns of the episode
    is_last: bool = True  # no reply is needed
    # The name of the episode, unique among the running episodes, if a process holds its state: an
    # environment, or tools. "" for a grader without state, which any process may call.
    episode: str = ""
    has_tools: bool = False  # whether calls of tools in the response are executed
    in_event_loop: bool = False  # whether the step is awaited in the event loop of the pool
    # `prompt`, `messages` and `row`, as far as reward functions or the judge read them.
    values: Mapping[str, JsonValue] = field(default_factory=dict)
    # The result of the event loop, for a request whose rewards remain to be added in a process.
    step: Grade | None = None
    called: tuple[str, ...] = ()  # reward functions that were called in the event loop


@dataclass(frozen=True)
class CallRequest:
    """A call of `function(task, *arguments)`, whose result is JSON."""

    path: str  # "module:function", a function of jzero
    arguments: list[JsonValue]
    task: TaskConfig
    # The name of the user-defined code that the function runs, which gets the limits of
    # `task.reward`. "" for a function that runs no such code, within the limits of a grader.
    user_code: str = ""


def write_request(number: int, request: TurnRequest | CallRequest) -> str:
    """Returns a request as JSON. Grades become dicts of their fields."""
    kind = "turn" if isinstance(request, TurnRequest) else "call"
    fields = vars(request) | {"task": _write_task(request.task)}
    return json.dumps([number, kind, fields], default=vars)


def read_request(
    kind: str, fields: dict[str, JsonValue], may_share_task: bool = False
) -> TurnRequest | CallRequest:
    """Returns the request of a message.

    Its settings are new objects. With `may_share_task`, requests with equal settings share them.
    """
    read = _read_shared_task if may_share_task else _read_task
    task = read(as_text(fields["task"], "task"))
    if kind == "call":
        return from_fields(CallRequest, fields | {"task": task})
    turns = [as_list(turn, "a turn") for turn in as_list(fields["earlier"], "earlier")]
    earlier = tuple((text, _read_grade(grade)) for text, grade in turns)
    step = _read_grade(fields["step"])
    called = tuple(as_list(fields["called"], "called"))
    values = {"task": task, "earlier": earlier, "step": step, "called": called}
    return from_fields(TurnRequest, fields | values)


# The settings that were written last, and their JSON text. They are the same in most requests of a
# run, and to write and read them would take three times as long as to grade.
_written: tuple[TaskConfig, str] | None = None


def _write_task(task: TaskConfig) -> str:
    global _written
    known = _written
    if known is None or known[0] != task:
        known = copy.deepcopy(task), json.dumps(values_of(task))
        _written = known
    return known[1]


def _read_task(text: str) -> TaskConfig:
    return read_section(TaskConfig, as_object(json.loads(text), "task"))


_read_shared_task = functools.lru_cache(maxsize=8)(_read_task)


def _read_grade(fields: JsonValue) -> Grade | None:
    return None if fields is None else from_fields(Grade, fields)


class BadMessageError(Exception):
    """A message does not have the form that a grader process sends."""


class Pipe:
    """One end of a pipe."""

    def __init__(self, end: socket.socket, max_bytes: int | None = None) -> None:
        """Messages longer than `max_bytes` raise BadMessageError in `receive`."""
        self._socket = end
        self._max_bytes = max_bytes

    def send(self, message: bytes, seconds: float | None = None) -> None:
        """Sends a message.

        Raises:
            TimeoutError: the other end has not read it within `seconds`.
            OSError: the other end is closed.
        """
        self._socket.settimeout(seconds)
        # In one call: the other end would wake up for the length alone.
        self._socket.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self, seconds: float | None = None) -> bytes:
        """Returns the next message.

        Raises:
            TimeoutError: the whole message has not arrived within `seconds`.
            EOFError, OSError: the other end is closed.
            BadMessageError: the message is longer than `max_bytes`.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        [length] = _LENGTH.unpack(self._receive(_LENGTH.size, deadline))
        if self._max_bytes is not None and length > self._max_bytes:
            raise BadMessageError(f"a message of {length:,} bytes")
        return self._receive(length, deadline)

    def close(self) -> None:
        """Closes this end."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def _receive(self, count: int, deadline: float | None) -> bytes:
        received = bytearray()
        while len(received) < count:
            if deadline is not None:
                # After the deadline, still takes data that has already arrived.
                self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            # In chunks, because recv reserves as many bytes as it is asked for, and the length is
            # not trusted.
            chunk = self._socket.recv(min(count - len(received), _CHUNK))
            if not chunk:
                raise EOFError
            received += chunk
            if deadline is not None and time.monotonic() > deadline and len(received) < count:
                raise TimeoutError
        return bytes(received)
