"""A grader process, which `pool` starts as the child of a `keeper`, sends items to, and kills.

Messages are JSON over one `pipe`. The process sends "ready" once it can grade. Each further message
from the pool is a list of items. The process answers each item with one message, in order:

    item    [number, grader, response, gold, settings, earlier turns or null, episode]
    answer  ["answer", number, fields of the Grade]

- `grader` is the name of a task or "module:function".
- `settings` are the fields of a `config.TaskConfig`, as JSON in a string.
- `earlier` are pairs of a turn's text and the fields of its grade. With them, the task is also
  asked for a reply to the response.
- `episode` holds the values of `rewards.user_functions.FROM_EPISODE` that reward functions ask for,
  for an environment `environments.environment.episode_values`, and for an episode with tools
  `environments.tools.episodes.episode_values`. A step that was awaited in the event loop comes
  with its grade, as `graded`, and with the names of the reward functions that have been `called`.

Two more messages may precede an answer:

    stage   ["stage", is_user_code, function, seconds, score, correct]
    note    ["note", function, kind, text]

A stage announces which code runs next. The pool uses it for its time limit, and to find the code to
blame if the process ends. `is_user_code` is true for user-defined code, `function` is "" while the
grader runs, `seconds` is the wall-clock limit of a user-defined reward function or null, `score`
and `correct` are the grader's verdict so far. A note contains the text that a function printed, or
the traceback of its error; the pool shows it to the user once.

Responses are hostile. An item that takes too long, or too much memory, ends the process; the pool
notices the end of the pipe. User-defined reward functions are not hostile, and may take more: their
limits are `task.reward.seconds` and `task.reward.memory_gib`, and they may write files.
`problems.bounds` reads their return values.
"""

import contextlib
import io
import json
import os
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
from jzero.workers.keeper import OUT_OF_MEMORY, MemoryLimit
from jzero.workers.pipe import MAX_MESSAGE, Pipe

if TYPE_CHECKING:
    from jzero.tasks.turn import Item

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
        self, is_user_code: bool, function: str, seconds: float | None, grade: Grade | None
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


def work(descriptor: int, memory_limit: MemoryLimit) -> None:
    """Grades the items that come through a pipe, until the pipe or the process ends.

    This is the main function of a grader process; `descriptor` is the file descriptor of its end of
    the pipe, and the keeper reads `memory_limit`.
    """
    # Only the run handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Imported here, because the import may take a second. This process is the only place where
    # grading depends on tasks.
    from jzero import config
    from jzero.tasks import turn

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # crashes must not fill the disk with cores
    _limit_resources(MAX_MEMORY)
    pipe = _Pipe(descriptor)
    pipe.send("ready")
    try:
        while True:
            for number, name, response, gold, settings, earlier, episode in pipe.receive():
                task = config.read_section(config.TaskConfig, json.loads(settings))
                turns = None if earlier is None else turn.read_turns(earlier)
                item = turn.Item(name, response, gold, task, turns, episode)
                pipe.send_text(_to_answer(number, _grade(pipe, item, memory_limit), item))
    except BaseException as error:
        if not pipe.has_run_user_code:
            raise  # a bug in the grader: the traceback shows where
        # User-defined code has replaced something that every program needs, such as `len`. A
        # traceback of the grader would point at the wrong place.
        os.write(2, b"user-defined code has broken its grader process: %a\n" % type(error))
        os._exit(1)


def _to_answer(number: int, grade: Grade, item: "Item") -> str:
    """Returns the message with a grade. A grade that is not JSON, or too long, becomes a failed
    grade.

    Grades from a reward function that is called for all responses of a step have no other bound.
    """
    try:
        message = json.dumps(["answer", number, vars(grade)], allow_nan=False)
        # The pool would treat a longer message as a broken worker.
        if len(message) > MAX_MESSAGE:
            raise ValueError(f"the grade takes {len(message):,} bytes")
    except (TypeError, ValueError, RecursionError) as error:
        from jzero.problems import bounds

        reason = bounds.one_line(f"error: {bounds.describe(error)}")
        failed = Grade(0.0, False, reason, failed=item.is_of_users)
        return json.dumps(["answer", number, vars(failed)])
    return message


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
def _user_code_limits(memory_gib: float, memory_limit: MemoryLimit) -> Iterator[None]:
    """Gives user-defined code its own limits, and restores the grader's limits afterwards.

    The address space bounds this process. The keeper also bounds the memory of all processes that
    the code has started.
    """
    # Stops the grader's CPU timer: the pool limits the wall time of user-defined code.
    remaining, _ = signal.setitimer(signal.ITIMER_PROF, 0)
    memory = int(memory_gib * 2**30)
    memory_limit.set(memory)
    _set_soft_limit(resource.RLIMIT_AS, memory or resource.RLIM_INFINITY)
    _set_soft_limit(resource.RLIMIT_FSIZE, resource.RLIM_INFINITY)
    try:
        yield
    finally:
        # Memory that the function keeps, such as a loaded model, must not count against the next
        # response.
        _limit_resources(MAX_MEMORY + _address_space())
        signal.setitimer(signal.ITIMER_PROF, remaining)


def _grade(pipe: _Pipe, item: "Item", memory_limit: MemoryLimit) -> Grade:
    """Returns the grade of one response, with the seconds that grading took.

    If a grader of jzero raises, the response scores 0, because a hostile response may make it
    raise. If user-defined code raises, the grade is `failed`. A grader that takes more than
    `task.grade_seconds` of CPU time ends the process.
    """
    from jzero.problems import bounds
    from jzero.tasks import turn

    # Lifts the keeper's limit, which user-defined code of the previous item may have left.
    memory_limit.set(0)
    try:
        _load_verifier(pipe, item.task.verifier)
    except UserError as error:
        return Grade(0.0, False, bounds.one_line(f"error: {error}"), failed=True)
    if item.is_of_users:
        pipe.send_stage(True, "", None, None)
    # The signal of the kernel's timer has no handler in Python, so it also ends a regular
    # expression or a power that does not return to the interpreter. The timer counts CPU time, so
    # that a busy machine does not change a grade; the pool limits the wall time of code that
    # sleeps.
    signal.setitimer(signal.ITIMER_PROF, item.task.grade_seconds)
    start = time.perf_counter()

    def guard(function: str, grade: Grade) -> contextlib.AbstractContextManager[None]:
        return _user_code(pipe, function, item, grade, item.is_of_users, memory_limit)

    try:
        with _captured_output(pipe, item.name):
            grade = turn.answer(item, guard)
    except MemoryError:
        # Exits at once: a clean-up takes memory, and a new process has a clean heap.
        os._exit(OUT_OF_MEMORY)
    except turn.FunctionFailedError as failure:
        cause = failure.__cause__
        assert cause is not None, f"{failure=}"
        _note_traceback(pipe, failure.function, cause)
        reason = bounds.one_line(f"error: {failure.function}: {bounds.describe(cause)}")
        # A failed episode has no score, so it needs no reply.
        grade = replace(
            failure.grade,
            reason=reason,
            failed=True,
            failed_function=failure.function,
            reply=None,
        )
    except BaseException as error:  # raised by a user-defined grader, or caused by a response
        _note_traceback(pipe, item.name, error)
        reason = bounds.one_line(f"error: {bounds.describe(error)}")
        grade = Grade(0.0, False, reason, failed=item.is_of_users)
    # A turn without a reply ends the episode.
    if "has_tools" in item.episode and grade.reply is None:
        _end_tools(pipe, item, grade, memory_limit)
    signal.setitimer(signal.ITIMER_PROF, 0)
    return replace(grade, seconds=time.perf_counter() - start)


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


def _end_tools(pipe: _Pipe, item: "Item", grade: Grade, memory_limit: MemoryLimit) -> None:
    """Ends the tools of an episode that is over."""
    from jzero.environments.tools import episodes as tool_episodes
    from jzero.tasks.turn import FunctionFailedError

    # The episode keeps its score even if its tools fail while they end.
    with (
        contextlib.suppress(FunctionFailedError),
        _user_code(pipe, "the tools", item, grade, False, memory_limit),
    ):
        tool_episodes.end(item.episode["episode"])


@contextlib.contextmanager
def _user_code(
    pipe: _Pipe,
    function: str,
    item: "Item",
    grade: Grade,
    is_user_code: bool,
    memory_limit: MemoryLimit,
) -> Iterator[None]:
    """Runs user-defined code within its own limits.

    `function` is the name of the code, and `grade` the grader's verdict so far. `is_user_code` is
    true if the grader, which continues afterwards, is also user-defined.

    Raises:
        FunctionFailedError: the code raised.
    """
    from jzero.tasks.turn import FunctionFailedError

    limits = item.task.reward
    pipe.send_stage(True, function, limits.seconds, grade)
    try:
        with _user_code_limits(limits.memory_gib, memory_limit), _captured_output(pipe, function):
            yield
    except BaseException as error:
        raise FunctionFailedError(function, grade) from error
    pipe.send_stage(is_user_code, "", None, grade)
