"""A grader process: what `pool` starts, sends items to, and kills.

Messages are JSON over one pipe. The process says "ready" once it can grade. Then it takes a list of
items a message and answers with one message for every item, in their order:

    item    [number, grader, response, gold, settings, earlier turns or null]
    answer  [number, score, correct, reason, seconds, parts, reply]

`grader` is the name of a task or "module:function". `settings` are JSON in a string, because only
they become a namespace: golds stay as they are. `earlier` are pairs of a turn's text and the fields
of its grade; with them, the task is asked for a reply to the response, too.

Responses are hostile. An item that takes too long, or too much memory, ends the process; the pool
finds out from the end of the pipe.
"""

import contextlib
import ctypes
import functools
import json
import os
import pkgutil
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import connection
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from jzero.types import Grade

if TYPE_CHECKING:
    from jzero.config import TaskConfig

MAX_MEMORY = 2 << 30  # bytes of address space
MAX_REASON = 200  # characters: a reason may quote the response
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

_SHOWN: set[type[Exception]] = set()  # the types of errors whose traceback was printed

EarlierTurns = list[tuple[str, dict[str, Any]]]  # text, fields of its Grade


class _Grader(NamedTuple):
    """The functions that grade a response and reply to it."""

    grade: Callable[[str, object, "TaskConfig"], Grade]
    reply: Callable[[object, list[tuple[str, Grade]], "TaskConfig"], str | None] | None


def work(descriptor: int) -> None:
    """Grades what comes through a pipe, until the pipe or the process ends.

    This is the main function of a grader process; `descriptor` is the file descriptor of its end of
    the pipe. The settings are a namespace, because `jzero.config` would import jax.
    """
    _end_with_parent()
    # After the guard above, since it may take a second. This process is the one place where grading
    # knows of tasks.
    import jzero.tasks  # noqa: F401

    _limit_resources()
    pipe = connection.Connection(descriptor)
    pipe.send_bytes(b'"ready"')
    while True:
        for number, name, response, gold, settings, earlier in json.loads(pipe.recv_bytes()):
            task = json.loads(settings, object_hook=_namespace)
            grade = _grade(name, response, gold, task, earlier)
            answer = (
                number,
                float(grade.score),
                bool(grade.correct),
                grade.reason[:MAX_REASON],
                grade.seconds,
                grade.parts,
                grade.reply,
            )
            pipe.send_bytes(json.dumps(answer).encode())


def _end_with_parent() -> None:
    """Leaves no orphan behind, and leaves Ctrl-C to the parent."""
    if sys.platform == "linux":
        # A parent that is killed can kill nobody: the kernel does. Elsewhere the process ends when
        # it next reads from the pipe.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _limit_resources() -> None:
    """Limits what a hostile response can take. The imports before may write bytecode."""
    limits = {
        resource.RLIMIT_CORE: 0,  # a crash at every other item must not fill the disk with cores
        resource.RLIMIT_FSIZE: 0,  # graders write no files; pipes have no size
        resource.RLIMIT_AS: MAX_MEMORY,
    }
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))


def _namespace(values: dict[str, object]) -> SimpleNamespace:
    return SimpleNamespace(**values)


@functools.cache
def _grader(name: str) -> _Grader:
    from jzero.tasks import find_task

    if ":" in name:
        return _Grader(pkgutil.resolve_name(name), None)
    task = find_task(name)
    return _Grader(task.grade, task.reply)


def _grade(
    name: str,
    response: str,
    gold: object,
    task: "TaskConfig",
    earlier: EarlierTurns | None,
) -> Grade:
    """Returns the grade of one response, with the seconds that grading took.

    A grader that raises scores 0. One that takes more than `task.grade_seconds` of CPU time ends
    the process.
    """
    # The kernel's timer, whose signal has no handler in Python: it also ends a regular expression
    # or a power that does not return to the interpreter. It counts CPU time, so that a busy machine
    # does not change a grade; the pool limits the wall time of what sleeps.
    signal.setitimer(signal.ITIMER_PROF, task.grade_seconds)
    start = time.perf_counter()
    try:
        grade = _grade_and_reply(name, response, gold, task, earlier)
    except MemoryError:
        os._exit(1)  # at once: a clean-up takes memory, and a new process has a clean heap
    except Exception as error:  # graders of users, and whatever a response makes them do
        _print_first_traceback(error)
        grade = Grade(0.0, False, f"error: {type(error).__name__}: {error}")
    signal.setitimer(signal.ITIMER_PROF, 0)
    return replace(grade, seconds=time.perf_counter() - start)


def _print_first_traceback(error: Exception) -> None:
    """Prints the traceback of the first error of each type in this process, to stderr.

    A hostile response may cause as many errors as it likes. The first one shows a mistake in a
    grader or in a reward function.
    """
    if type(error) in _SHOWN:
        return
    _SHOWN.add(type(error))
    with contextlib.suppress(Exception):  # the printing of a hostile error may fail, too
        traceback.print_exception(error)


def _grade_and_reply(
    name: str,
    response: str,
    gold: object,
    task: "TaskConfig",
    earlier: EarlierTurns | None,
) -> Grade:
    from jzero.tasks import rewards

    grader = _grader(name)
    grade = grader.grade(response, gold, task)
    grade = rewards.add_response_rewards(grade, response, gold, task)
    if earlier is None or grader.reply is None:
        return grade
    turns = [(text, Grade(**fields)) for text, fields in earlier]
    return replace(grade, reply=grader.reply(gold, [*turns, (response, grade)], task))
