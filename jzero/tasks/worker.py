"""A grader process, which `pool` starts as the child of a `keeper`, sends items to, and kills.

Messages are JSON over one `pipe`. The process sends "ready" once it can grade. Each further message
from the pool is a list of requests: [number, kind, fields of a `TurnRequest` or a `CallRequest`].
The process answers each request with one message, in order:

    answer    ["answer", number, fields of the Grade]             to a turn
    returned  ["returned", number, value, why the call failed]    to a call; "" if it did not

Two more messages may precede an answer:

    stage   ["stage", is_user_code, function, seconds, score, correct]
    note    ["note", function, kind, text]

A stage announces which code runs next. The pool uses it for its time limit, and to find the code to
blame if the process ends. `is_user_code` is true for user-defined code, `function` is "" while the
grader runs, `seconds` is the wall-clock limit of a user-defined reward function or null, `score`
and `correct` are the grader's verdict so far. A note contains the text that a function printed, or
the traceback of its error; the pool shows it to the user once.

Responses are hostile. A request that takes too long, or too much memory, ends the process; the pool
notices the end of the pipe. User-defined reward functions are not hostile, and may take more: their
limits are `task.reward.seconds` and `task.reward.memory_gib`, and they may write files.
`problems.bounds` reads their return values.
"""

import contextlib
import ctypes
import io
import json
import os
import pkgutil
import resource
import signal
import socket
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jzero.errors import UserError
from jzero.types import Grade
from jzero.workers.keeper import OUT_OF_MEMORY
from jzero.workers.pipe import MAX_MESSAGE, CallRequest, Pipe, TurnRequest, read_request

if TYPE_CHECKING:
    from jzero.config import TaskConfig

MAX_MEMORY = 2 << 30  # bytes of address space that grading may take
MAX_NOTE = 4000  # characters
LOADING_SECONDS = 120.0  # to import the packages of a verifier on a busy machine
MAX_NOTES = 20  # per function, which may raise errors of any number of types

_LOADED = {"", "fast"}  # verifiers that have no packages, or that this process has imported
_NOTED: set[tuple[str, str]] = set()  # (function, kind) of the notes that this process has sent


class _Pipe:
    """This process's end of the pipe to the pool.

    If the other end is closed, the pool has ended and its grades are no longer needed. This process
    then exits at once, without running the exit handlers of user-defined code.
    """

    def __init__(self, descriptor: int) -> None:
        self._pipe = Pipe(socket.socket(fileno=descriptor))
        self.has_run_user_code = False

    def receive(self) -> list[Any]:
        try:
            return json.loads(self._pipe.receive())
        except (EOFError, OSError):
            os._exit(0)

    def send(self, *message: object) -> None:
        self.send_text(json.dumps(message))

    def send_text(self, message: str) -> None:
        try:
            self._pipe.send(message.encode())
        except OSError:
            os._exit(0)

    def send_stage(
        self,
        is_user_code: bool,
        function: str,
        seconds: float | None,
        grade: Grade | None,
    ) -> None:
        """Announces the code that runs next; `grade` is the grader's verdict, if it exists."""
        self.has_run_user_code |= is_user_code
        score, correct = (grade.score, grade.correct) if grade else (0.0, False)
        self.send("stage", is_user_code, function, seconds, score, correct)

    def send_note(self, function: str, kind: str, text: str) -> None:
        """Sends a text for the user, if it is the first of its kind in this process."""
        num_notes = sum(noted == function for noted, _ in _NOTED)
        if (function, kind) not in _NOTED and num_notes < MAX_NOTES:
            _NOTED.add((function, kind))
            self.send("note", function, kind, text[-MAX_NOTE:])


def work(descriptor: int, memory_limit: ctypes.c_uint64) -> None:
    """Answers the requests that come through a pipe, until the pipe or the process ends.

    This is the main function of a grader process; `descriptor` is the file descriptor of its end of
    the pipe, and the keeper reads `memory_limit`.
    """
    # Only the run handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Imported here, because the import may take a second. This process is the only place where
    # grading depends on tasks.
    from jzero.tasks import turn  # noqa: F401

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # crashes must not fill the disk with cores
    _limit_resources(MAX_MEMORY)
    pipe = _Pipe(descriptor)
    pipe.send("ready")
    try:
        while True:
            for number, kind, fields in pipe.receive():
                # User-defined code may change the settings that it gets.
                request = read_request(kind, fields, may_share_task=not pipe.has_run_user_code)
                # Lifts the limit that user-defined code of the previous request may have left.
                memory_limit.value = 0
                if isinstance(request, TurnRequest):
                    answer = _answer(number, request, _grade(pipe, request, memory_limit))
                else:
                    answer = _returned(number, *_call(pipe, request, memory_limit))
                pipe.send_text(answer)
    except BaseException as error:
        if not pipe.has_run_user_code:
            raise  # a bug in the grader: the traceback shows where
        # User-defined code has replaced something that every program needs, such as `len`. A
        # traceback of the grader would point at the wrong place.
        os.write(2, b"user-defined code has broken its grader process: %a\n" % type(error))
        os._exit(1)


def _answer(number: int, request: TurnRequest, grade: Grade) -> str:
    """Returns the message with a grade. A grade that is not JSON becomes a failed grade."""
    from jzero.tasks import turn

    try:
        return _to_message("answer", number, vars(grade))
    except (TypeError, ValueError, RecursionError) as error:
        failed = Grade(0.0, False, _reason_of(error), failed=turn.is_of_users(request.grader))
        return _to_message("answer", number, vars(failed))


def _returned(number: int, value: object, reason: str) -> str:
    """Returns the message with the result of a call. A result that is not JSON is a failure.

    Rewards of a function that is called for all responses of a step have no other bound.
    """
    try:
        return _to_message("returned", number, value, reason)
    except (TypeError, ValueError, RecursionError) as error:
        return _to_message("returned", number, None, _reason_of(error))


def _to_message(*message: object) -> str:
    """Returns a message as JSON.

    Raises:
        TypeError, ValueError, RecursionError: it is not JSON, or too long.
    """
    text = json.dumps(message, allow_nan=False)
    # The pool would treat a longer message as a broken worker.
    if len(text) > MAX_MESSAGE:
        raise ValueError(f"the grade takes {len(text):,} bytes")
    return text


def _reason_of(error: BaseException, function: str = "") -> str:
    """Returns the reason of a failure in one line. `function` names the user-defined code."""
    from jzero.problems import bounds

    where = f"{function}: " if function else ""
    return bounds.one_line(f"error: {where}{bounds.describe(error)}")


def _limit_resources(memory: int) -> None:
    """Limits a hostile response to `memory` bytes of address space, and to no files.

    These are soft limits, which `_user_code_limits` lifts temporarily.
    """
    _set_soft_limit(resource.RLIMIT_AS, memory)
    # Graders write no files, and pipes are not limited by file size. Set after the imports, which
    # may have written bytecode.
    _set_soft_limit(resource.RLIMIT_FSIZE, 0)


def _set_soft_limit(kind: int, limit: int) -> None:
    _, hard_limit = resource.getrlimit(kind)
    if hard_limit != resource.RLIM_INFINITY:
        limit = hard_limit if limit == resource.RLIM_INFINITY else min(limit, hard_limit)
    resource.setrlimit(kind, (limit, hard_limit))


def _address_space() -> int:
    """Returns the bytes of address space of this process; 0 if the system has no /proc."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[0])
    except OSError:
        return 0
    return pages * resource.getpagesize()


@contextlib.contextmanager
def _user_code_limits(memory_gib: float, memory_limit: ctypes.c_uint64) -> Iterator[None]:
    """Gives user-defined code its own limits, and restores the grader's limits afterwards.

    The address space bounds this process. The keeper also bounds the memory of all processes that
    the code has started.
    """
    # Stops the grader's CPU timer: the pool limits the wall time of user-defined code.
    remaining, _ = signal.setitimer(signal.ITIMER_PROF, 0)
    memory = int(memory_gib * 2**30)
    memory_limit.value = memory
    _set_soft_limit(resource.RLIMIT_AS, memory or resource.RLIM_INFINITY)
    _set_soft_limit(resource.RLIMIT_FSIZE, resource.RLIM_INFINITY)
    try:
        yield
    finally:
        # Memory that the function keeps, such as a loaded model, must not count against the next
        # response.
        _limit_resources(MAX_MEMORY + _address_space())
        signal.setitimer(signal.ITIMER_PROF, remaining)


def _grade(pipe: _Pipe, request: TurnRequest, memory_limit: ctypes.c_uint64) -> Grade:
    """Returns the grade of one response, with the seconds that grading took.

    If a grader of jzero raises, the response scores 0, because a hostile response may make it
    raise. If user-defined code raises, the grade is `failed`. A grader that takes more than
    `task.grade_seconds` of CPU time ends the process.
    """
    from jzero.problems import bounds
    from jzero.tasks import turn

    is_of_users = turn.is_of_users(request.grader)
    try:
        _load_verifier(pipe, request.task.verifier)
    except UserError as error:
        return Grade(0.0, False, bounds.one_line(f"error: {error}"), failed=True)
    if is_of_users:
        pipe.send_stage(True, "", None, None)
    start = time.perf_counter()

    def guard(function: str, grade: Grade) -> contextlib.AbstractContextManager[None]:
        return _user_code(pipe, function, request.task, grade, is_of_users, memory_limit)

    try:
        with _grader_limits(pipe, request.grader, request.task):
            grade = turn.take_turn(request, guard)
    except turn.FunctionFailedError as failure:
        cause = failure.__cause__
        assert cause is not None, f"{failure=}"
        _note_traceback(pipe, failure.function, cause)
        # A failed episode has no score, so it needs no reply.
        grade = replace(
            failure.grade,
            reason=_reason_of(cause, failure.function),
            failed=True,
            failed_function=failure.function,
            reply=None,
        )
    except BaseException as error:  # raised by a user-defined grader, or caused by a response
        _note_traceback(pipe, request.grader, error)
        grade = Grade(0.0, False, _reason_of(error), failed=is_of_users)
    # A turn without a reply ends the episode, which keeps its score even if its tools fail now.
    if request.has_tools and grade.reply is None:
        with contextlib.suppress(turn.FunctionFailedError):
            turn.end_tools(request, guard, grade)
    signal.setitimer(signal.ITIMER_PROF, 0)
    return replace(grade, seconds=time.perf_counter() - start)


def _call(pipe: _Pipe, request: CallRequest, memory_limit: ctypes.c_uint64) -> tuple[object, str]:
    """Returns the result of a call, and the reason why it failed, "" if it did not."""
    from jzero.tasks.turn import FunctionFailedError

    function = pkgutil.resolve_name(request.path)
    user_code = contextlib.nullcontext()
    if request.user_code:
        verdict = Grade(0.0, False, "")
        user_code = _user_code(pipe, request.user_code, request.task, verdict, False, memory_limit)
    try:
        with _grader_limits(pipe, request.path, request.task), user_code:
            return function(request.task, *request.arguments), ""
    except FunctionFailedError as failure:
        cause = failure.__cause__
        assert cause is not None, f"{failure=}"
        _note_traceback(pipe, failure.function, cause)
        return None, _reason_of(cause, failure.function)
    except BaseException as error:  # caused by a response
        _note_traceback(pipe, request.path, error)
        return None, _reason_of(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@contextlib.contextmanager
def _grader_limits(pipe: _Pipe, name: str, task: "TaskConfig") -> Iterator[None]:
    """Runs a grader within `task.grade_seconds` of CPU time. The caller stops the timer."""
    # The signal of the kernel's timer has no handler in Python, so it also ends a regular
    # expression or a power that does not return to the interpreter. The timer counts CPU time, so
    # that a busy machine does not change a grade; the pool limits the wall time of code that
    # sleeps.
    signal.setitimer(signal.ITIMER_PROF, task.grade_seconds)
    try:
        with _captured_output(pipe, name):
            yield
    except MemoryError:
        # Exits at once: a clean-up takes memory, and a new process has a clean heap.
        os._exit(OUT_OF_MEMORY)


def _load_verifier(pipe: _Pipe, verifier: str) -> None:
    """Imports the packages of a published verifier, once, outside of the time limit of an item.

    Raises:
        UserError: a package is missing or broken.
    """
    from jzero.answers import published

    if verifier in _LOADED:
        return
    pipe.send_stage(False, "", LOADING_SECONDS, None)
    published.load(verifier)
    _LOADED.add(verifier)
    pipe.send_stage(False, "", None, None)


def _note_traceback(pipe: _Pipe, function: str, error: BaseException) -> None:
    """Sends the traceback of the first error of each type that a function raises.

    A hostile response may cause any number of errors. The first one shows a mistake in a grader or
    in a reward function.
    """
    from jzero.problems import bounds

    text = ""
    with contextlib.suppress(BaseException):  # the printing of a hostile error may fail, too
        text = "".join(traceback.format_exception(error))
    pipe.send_note(function, f"raised {bounds.type_name(error)}", text)


class _FirstText(io.TextIOBase):
    """A text file that keeps the first MAX_NOTE characters that are written to it."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text[: MAX_NOTE - len(self.text)]
        return len(text)


@contextlib.contextmanager
def _captured_output(pipe: _Pipe, function: str) -> Iterator[None]:
    """Captures the output of a function, and sends the first part of it to be shown to the user."""
    printed = _FirstText()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            yield
    finally:
        if printed.text:
            pipe.send_note(function, "printed", printed.text)


@contextlib.contextmanager
def _user_code(
    pipe: _Pipe,
    function: str,
    task: "TaskConfig",
    grade: Grade,
    is_user_code: bool,
    memory_limit: ctypes.c_uint64,
) -> Iterator[None]:
    """Runs user-defined code within its own limits.

    `function` is the name of the code, and `grade` the grader's verdict so far. `is_user_code` is
    true if the grader, which continues afterwards, is also user-defined.

    Raises:
        FunctionFailedError: the code raised.
    """
    from jzero.tasks.turn import FunctionFailedError

    limits = task.reward
    pipe.send_stage(True, function, limits.seconds, grade)
    try:
        with _user_code_limits(limits.memory_gib, memory_limit), _captured_output(pipe, function):
            yield
    except BaseException as error:
        raise FunctionFailedError(function, grade) from error
    pipe.send_stage(is_user_code, "", None, grade)
