"""A grader process: what `pool` starts, sends items to, and kills.

Messages are JSON over one pipe. The process says "ready" once it can grade. Then it takes a list of
items a message and answers with one message for every item, in their order:

    item    [number, grader, response, gold, settings, earlier turns or null, episode]
    answer  ["answer", number, fields of the Grade]

`grader` is the name of a task or "module:function". `settings` are JSON in a string, because only
they become a namespace: golds stay as they are. `earlier` are pairs of a turn's text and the fields
of its grade; with them, the task is asked for a reply to the response, too. `episode` are the
values of `tasks.user_functions.FROM_EPISODE` that reward functions ask for, for an environment
`tasks.environment.episode_values`, and for an episode with tools
`tasks.tools.episodes.episode_values`. A step that was awaited in the event loop comes with its
grade, as `graded`, and with the names of the reward functions that have been `called`.

Two more messages may come before an answer:

    stage   ["stage", is the user's, function, seconds, score, correct]
    note    ["note", function, kind, text]

A stage says whose code runs from now on, so that the pool knows how long to wait and whom to blame
if the process ends. `function` is "" while the grader runs, `seconds` are the wall-clock limit of a
reward function of the user's or null, `score` and `correct` are the grader's verdict so far. A note
is what a function printed, or the traceback of what it raised: for people, once.

Responses are hostile. An item that takes too long, or too much memory, ends the process; the pool
finds out from the end of the pipe. Reward functions of the user's are not hostile, and may take
more: their limits are `task.reward.seconds` and `task.reward.memory_gib`, and they may write files.
"""

import contextlib
import ctypes
import io
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import connection
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from jzero.types import Grade

if TYPE_CHECKING:
    from jzero.config import TaskConfig
    from jzero.tasks.turn import Item

MAX_MEMORY = 2 << 30  # bytes of address space that grading may take
MAX_NOTE = 4000  # characters
MAX_MESSAGE = 200  # characters of what a function raised
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

_NOTED: set[tuple[str, str]] = set()  # function and kind of the notes that this process has sent


class _Pipe:
    """Our end of the pipe to the pool.

    Where the other end is closed the pool has ended, and this process ends, too: nobody waits for
    what it would say.
    """

    def __init__(self, descriptor: int) -> None:
        self._connection = connection.Connection(descriptor)

    def receive(self) -> list[Any]:
        try:
            return json.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            sys.exit()

    def send(self, *message: object) -> None:
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionResetError):
            sys.exit()

    def send_stage(
        self, is_users: bool, function: str, seconds: float | None, grade: Grade | None
    ) -> None:
        """Says whose code runs from now on; `grade` is the grader's verdict, if there is one."""
        score, correct = (grade.score, grade.correct) if grade else (0.0, False)
        self.send("stage", is_users, function, seconds, score, correct)

    def send_note(self, function: str, kind: str, text: str) -> None:
        """Sends a text for people, the first of its kind in this process."""
        if (function, kind) not in _NOTED:
            _NOTED.add((function, kind))
            self.send("note", function, kind, text[-MAX_NOTE:])


def work(descriptor: int) -> None:
    """Grades what comes through a pipe, until the pipe or the process ends.

    This is the main function of a grader process; `descriptor` is the file descriptor of its end of
    the pipe. The settings are a namespace, because `jzero.config` would import jax.
    """
    _end_with_parent()
    # After the guard above, since it may take a second. This process is the one place where grading
    # knows of tasks.
    from jzero.tasks import turn

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # crashes must not fill the disk with cores
    _limit_resources(MAX_MEMORY)
    pipe = _Pipe(descriptor)
    pipe.send("ready")
    while True:
        for number, name, response, gold, settings, earlier, episode in pipe.receive():
            task = json.loads(settings, object_hook=_namespace)
            turns = None if earlier is None else turn.read_turns(earlier)
            item = turn.Item(name, response, gold, task, turns, episode)
            pipe.send("answer", number, vars(_grade(pipe, item)))


def _end_with_parent() -> None:
    """Leaves no orphan behind, and leaves Ctrl-C to the parent."""
    if sys.platform == "linux":
        # A parent that is killed can kill nobody: the kernel does. Elsewhere the process ends when
        # it next reads from the pipe.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _limit_resources(memory: int) -> None:
    """Limits what a hostile response can take: `memory` bytes of address space, and no files.

    These are soft limits, which `_users_limits` lifts for a while.
    """
    _set_soft_limit(resource.RLIMIT_AS, memory)
    # Graders write no files; pipes have no size. The imports before may have written bytecode.
    _set_soft_limit(resource.RLIMIT_FSIZE, 0)


def _set_soft_limit(kind: int, limit: int) -> None:
    _, most = resource.getrlimit(kind)
    if most != resource.RLIM_INFINITY:
        limit = most if limit == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(kind, (limit, most))


def _address_space() -> int:
    """Returns the bytes of address space that this process has; 0 where the system has no /proc."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[0])
    except OSError:
        return 0
    return pages * resource.getpagesize()


@contextlib.contextmanager
def _users_limits(memory_gib: float) -> Iterator[None]:
    """Gives a reward function of the user's its own limits, and takes grading's back afterwards."""
    remaining, _ = signal.setitimer(signal.ITIMER_PROF, 0)
    memory = int(memory_gib * 2**30) if memory_gib else resource.RLIM_INFINITY
    _set_soft_limit(resource.RLIMIT_AS, memory)
    _set_soft_limit(resource.RLIMIT_FSIZE, resource.RLIM_INFINITY)
    try:
        yield
    finally:
        # What the function keeps, such as a model of its own, is not the next response's to pay.
        _limit_resources(MAX_MEMORY + _address_space())
        signal.setitimer(signal.ITIMER_PROF, remaining)


def _namespace(values: dict[str, object]) -> SimpleNamespace:
    return SimpleNamespace(**values)


def _grade(pipe: _Pipe, item: "Item") -> Grade:
    """Returns the grade of one response, with the seconds that grading took.

    A grader of jzero's that raises scores 0, because a hostile response may make it raise. Where
    code of the user's raises, the grade is `failed`. A grader that takes more than
    `task.grade_seconds` of CPU time ends the process.
    """
    from jzero.tasks import turn

    if item.is_of_users:
        pipe.send_stage(True, "", None, None)
    # The kernel's timer, whose signal has no handler in Python: it also ends a regular expression
    # or a power that does not return to the interpreter. It counts CPU time, so that a busy machine
    # does not change a grade; the pool limits the wall time of what sleeps.
    signal.setitimer(signal.ITIMER_PROF, item.task.grade_seconds)
    start = time.perf_counter()

    def guard(function: str, grade: Grade) -> contextlib.AbstractContextManager[None]:
        return _running_users(pipe, function, item.task, grade, item.is_of_users)

    try:
        with _shown_once(pipe, item.name):
            grade = turn.answer(item, guard)
    except MemoryError:
        os._exit(1)  # at once: a clean-up takes memory, and a new process has a clean heap
    except turn.FunctionFailedError as failure:
        cause = failure.__cause__
        assert cause is not None, f"{failure=}"
        reason = f"error: {failure.function}: {_describe(cause)}"
        _note_traceback(pipe, failure.function, cause)
        # The episode has no score any more, so that nobody needs a reply.
        reason = reason[: turn.MAX_REASON]
        grade = replace(failure.grade, reason=reason, failed=True, reply=None)
    except (Exception, SystemExit) as error:  # graders of users, and what a response makes them do
        _note_traceback(pipe, item.name, error)
        reason = f"error: {_describe(error)}"
        grade = Grade(0.0, False, reason[: turn.MAX_REASON], failed=item.is_of_users)
    if "has_tools" in item.episode and grade.reply is None:
        _end_tools(pipe, item.episode["episode"], item.task, grade)
    signal.setitimer(signal.ITIMER_PROF, 0)
    return replace(grade, seconds=time.perf_counter() - start)


def _describe(error: BaseException) -> str:
    """Returns the type and the message of an error; making its message may fail, too."""
    try:
        message = str(error)
    except Exception:
        message = ""
    return f"{type(error).__name__}: {message[:MAX_MESSAGE]}"


def _note_traceback(pipe: _Pipe, function: str, error: BaseException) -> None:
    """Sends the traceback of the first error of each type that a function raises.

    A hostile response may cause as many errors as it likes. The first one shows a mistake in a
    grader or in a reward function.
    """
    with contextlib.suppress(Exception):  # the printing of a hostile error may fail, too
        text = "".join(traceback.format_exception(error))
        pipe.send_note(function, f"raised {type(error).__name__}", text)


class _FirstText(io.TextIOBase):
    """A text file that keeps the first MAX_NOTE characters that are written to it."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text[: MAX_NOTE - len(self.text)]
        return len(text)


@contextlib.contextmanager
def _shown_once(pipe: _Pipe, function: str) -> Iterator[None]:
    """Catches what a function prints, and sends the first of it for people to see."""
    printed = _FirstText()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            yield
    finally:
        if printed.text:
            pipe.send_note(function, "printed", printed.text)


def _end_tools(pipe: _Pipe, name: str, task: "TaskConfig", grade: Grade) -> None:
    """Ends the tools of an episode that is over."""
    from jzero.tasks.tools import episodes as tool_episodes
    from jzero.tasks.turn import FunctionFailedError

    # The episode has its score, whatever its tools do at their end.
    with (
        contextlib.suppress(FunctionFailedError),
        _running_users(pipe, "the tools", task, grade, is_users=False),
    ):
        tool_episodes.end(name)


@contextlib.contextmanager
def _running_users(
    pipe: _Pipe, function: str, task: "TaskConfig", grade: Grade, is_users: bool
) -> Iterator[None]:
    """Runs code of the user's within limits of its own.

    `function` is its name, `grade` the grader's verdict so far, and `is_users` says whether the
    grader, which goes on afterwards, is the user's, too.

    Raises:
        FunctionFailedError: the code raised.
    """
    from jzero.tasks.turn import FunctionFailedError

    limits = task.reward
    pipe.send_stage(True, function, limits.seconds, grade)
    try:
        with _users_limits(limits.memory_gib), _shown_once(pipe, function):
            yield
    except (Exception, SystemExit) as error:
        raise FunctionFailedError(function, grade) from error
    pipe.send_stage(is_users, "", None, grade)
