"""Ends all processes that user-defined code has started, at the latest with the run.

    keep     is the parent of one grader process. It adopts the processes whose parents have ended,
             and ends all of them with the grader process, and with the run. It also ends a grader
             process that takes too much memory, or starts too many processes, in total.
    guard    watches the run's own process, in which `asyncio` environments live. Once that process
             has ended for any reason, it ends the processes that were started there.

Both are separate processes, so that they also work if SIGKILL ends the run. The Linux kernel lets a
process adopt orphans (PR_SET_CHILD_SUBREAPER) and signals the end of its parent (PR_SET_PDEATHSIG),
so processes that have left their session are found as well. On other systems a grader process takes
only the processes of its own session with it, their total memory is not bounded, and `guard` is not
started. Imports the standard library only, because each grader process starts with this module.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import mmap
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from jzero import terminal

WORKER = "jzero.tasks.worker"  # its function `work` grades what comes through a pipe
IS_LINUX = sys.platform == "linux"
MAX_PROCESSES = 4096  # of one grader process, in total
MARK = "JZERO_GRADER"  # environment variable that marks the processes started by a grader process
# Exit statuses of a grader process.
OUT_OF_MEMORY = 90
TOO_MANY_PROCESSES = 91

_PERIOD_SECONDS = 0.2  # between two checks of the processes
_END_SECONDS = 10.0  # for killed processes to end
_POLITE_SECONDS = 2.0  # between SIGTERM and SIGKILL for the processes of a run that has ended
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_PR_SET_CHILD_SUBREAPER = 36
_WAKE_SIGNALS = (signal.SIGCHLD, signal.SIGTERM)


# The parent of a grader process.


def shared_limit() -> ctypes.c_uint64:
    """Returns an integer in shared memory: a limit in bytes, 0 for none.

    It is the memory limit of a grader process with all processes that it started. The grader
    process writes the `value`, and its keeper reads it.
    """
    return ctypes.c_uint64.from_buffer(mmap.mmap(-1, ctypes.sizeof(ctypes.c_uint64)))


def keep(descriptor: int, parent: int, max_processes: int = MAX_PROCESSES) -> NoReturn:
    """Starts a grader process as a child of this one, and exits with its status.

    `descriptor` is the file descriptor of the pipe to the pool, and `parent` the process of the
    pool.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the run handles Ctrl-C
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAKE_SIGNALS)
    if IS_LINUX:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the pool ended before the lines above
        os._exit(0)
    # Shared memory, made before the fork.
    limit = shared_limit()
    keeper = os.getpid()
    grader = os.fork()
    if grader == 0:
        _grade(descriptor, keeper, limit)
    # Otherwise the keeper would hold the pipe open after its grader process has ended.
    os.close(descriptor)
    status = _watch(grader, parent, limit, max_processes)
    end_descendants(grader)
    _exit_with(status)


def _grade(descriptor: int, keeper: int, limit: ctypes.c_uint64) -> NoReturn:
    """Runs the grader, in the child process."""
    try:
        os.setsid()  # a process group that can be killed even without /proc
        if IS_LINUX:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            # If the machine runs out of memory, the kernel ends this process and not the run.
            with contextlib.suppress(OSError):
                Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAKE_SIGNALS)
        os.set_inheritable(descriptor, False)
        if os.getppid() != keeper:
            os._exit(0)
        # Imported here and by name: the keeper itself needs neither the worker nor its tasks.
        importlib.import_module(WORKER).work(descriptor, limit)
    except BaseException:
        terminal.write(traceback.format_exc(), sys.stderr)
    os._exit(1)


def _watch(grader: int, parent: int, limit: ctypes.c_uint64, max_processes: int) -> int:
    """Waits until the grader process has ended, or has to end, and returns its status."""
    next_look = time.monotonic() + _PERIOD_SECONDS
    while True:
        number = _wait_for_signal()
        status = _collect(grader)
        if status is not None:
            return status
        # The pool asks for the end, or has ended itself.
        if number == signal.SIGTERM or os.getppid() != parent:
            return 0
        if time.monotonic() >= next_look:
            status = _exceeded_limit(limit.value, max_processes)
            if status is not None:
                return status
            next_look = time.monotonic() + _PERIOD_SECONDS


def _wait_for_signal() -> int | None:
    """Waits for a signal, or for a period. Returns SIGTERM if it has arrived."""
    if IS_LINUX:
        # The signals are blocked (`keep`), so that none is lost between two waits.
        info = signal.sigtimedwait(_WAKE_SIGNALS, _PERIOD_SECONDS)
        return None if info is None else info.si_signo
    time.sleep(_PERIOD_SECONDS / 4)
    return signal.SIGTERM if signal.SIGTERM in signal.sigpending() else None


def _collect(grader: int) -> int | None:
    """Collects ended children. Returns the grader's exit status, negative for a signal."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == grader:
                status = os.waitstatus_to_exitcode(ended[1])
    return status


def _exceeded_limit(max_bytes: int, max_processes: int) -> int | None:
    """Returns an exit status if the grader process and its children exceed a limit."""
    if not IS_LINUX:
        return None
    pids = descendants(os.getpid())
    if len(pids) > max_processes:
        return TOO_MANY_PROCESSES
    if not max_bytes or sum(map(_resident_bytes, pids)) <= max_bytes:
        return None
    # Processes share pages after a fork. The exact sum takes longer to read, so it is read only if
    # the upper bound exceeds the limit.
    return OUT_OF_MEMORY if sum(map(_proportional_bytes, pids)) > max_bytes else None


def _resident_bytes(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    except OSError:
        return 0
    return int(fields[1]) * mmap.PAGESIZE


def _proportional_bytes(pid: int) -> int:
    """Returns the resident bytes, in which a page shared by several processes counts in shares."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0


def end_descendants(grader: int) -> None:
    """Kills all processes below this one, and waits for their end."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        # Also works on systems without /proc.
        os.killpg(grader, signal.SIGKILL)
    deadline = time.monotonic() + _END_SECONDS
    while time.monotonic() < deadline:
        # A stopped process cannot start others while the remaining ones are killed.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in descendants(os.getpid()):
                _kill(pid, number)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # no children are left
            return
        time.sleep(0.002)


def end_marked(mark: str) -> None:
    """Kills the processes that have inherited the environment variable MARK=`mark`.

    Used if user-defined code has killed the keeper, because its orphans cannot be found otherwise.
    """
    text = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text in (folder / "environ").read_bytes().split(b"\0"):
                _kill(int(folder.name), signal.SIGKILL)


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _exit_with(status: int) -> NoReturn:
    """Ends this process with a status of `os.waitstatus_to_exitcode`."""
    if status < 0:
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        # The pool learns the signal from the exit status of this process.
        os.kill(os.getpid(), -status)
        time.sleep(_END_SECONDS)
    os._exit(max(status, 0))


def descendants(pid: int) -> list[int]:
    """Returns the processes below a process, parents first."""
    pids = []
    waiting = [pid]
    while waiting:
        children = _children(waiting.pop())
        pids += children
        waiting += children
    return pids


def _children(pid: int) -> list[int]:
    """Returns the children of all threads of a process; empty if the system has no /proc."""
    children = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            children += children_of_thread(pid, int(thread))
    return children


def children_of_thread(pid: int, thread: int) -> list[int]:
    """Returns the children of one thread of a process."""
    try:
        text = Path(f"/proc/{pid}/task/{thread}/children").read_text(encoding="ascii")
    except OSError:  # the thread has ended
        return []
    return [int(child) for child in text.split()]


@functools.cache
def _libc_prctl() -> Callable[[int, int], int]:
    return ctypes.CDLL(None).prctl


def _prctl(option: int, value: int) -> None:
    _libc_prctl()(option, value)


# The watch over the run's own process.


class Guard:
    """A process that outlives this one, and then ends the processes that this one has started.

    It ends only processes that were started after the guard, including any that left their session.
    """

    def __init__(self) -> None:
        if not IS_LINUX:
            return
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # so that orphans stay below this process
        # Listed before the guard starts, because its start takes a while.
        earlier = descendants(os.getpid())
        start = f"from jzero.workers import keeper; keeper.guard({os.getpid()}, {earlier})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", start],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,  # Ctrl-C must not reach the guard
        )
        atexit.register(self._announce_end)

    def _announce_end(self) -> None:
        """Tells the guard that this process ends normally."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(b".")
            self._process.stdin.close()
        self._process.returncode = 0  # Popen must not wait for the guard


@functools.cache
def guard_this_process() -> Guard:
    """Starts the guard of this process, once."""
    return Guard()


def end_children_of_threads(threads: list[int]) -> None:
    """Kills the processes that some threads of this process have started, and their descendants."""
    pids = []
    for thread in threads:
        for child in children_of_thread(os.getpid(), thread):
            pids += [child, *descendants(child)]
    for pid in pids:
        _kill(pid, signal.SIGKILL)


Process = tuple[int, str]  # process ID and start time, because the kernel reuses IDs


def guard(parent: int, earlier: Sequence[int]) -> None:
    """Waits for the end of process `parent`, and ends the processes that it started in the
    meantime.

    `earlier` are processes below `parent` that were already running; the guard does not end them.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The guard is a child of `parent`, and must not end itself.
    ignored = {*earlier, os.getpid()}
    started: set[Process] = set()
    is_announced = False
    is_open = True
    while os.getppid() == parent:
        ready, _, _ = select.select([0] if is_open else [], [], [], _PERIOD_SECONDS)
        if ready:
            text = os.read(0, 16)
            # An empty read is the end of the pipe: the run has ended, perhaps without a word.
            is_announced |= bool(text)
            is_open = bool(text)
        pids = [pid for pid in descendants(parent) if pid not in ignored]
        running = {process for pid in pids if (process := _process(pid)) is not None}
        # A process that was adopted by another parent in the meantime still belongs to this set.
        started = running | {process for process in started if _is_alive(process)}

    left = {process for process in started if _is_alive(process)}
    if not is_announced:
        terminal.write(
            f"process {parent} of the run ended without closing its environments: a signal ended "
            f"it, or os._exit in an environment; {len(left)} processes that it started end now",
            sys.stderr,
        )
    _end_all(left)


def _end_all(processes: set[Process]) -> None:
    """Ends processes and their descendants: SIGTERM first, which servers of environments expect."""
    pids = []
    for pid, _ in processes:
        pids += [pid, *descendants(pid)]
    targets = {process for pid in pids if (process := _process(pid)) is not None}
    for pid, _ in targets:
        _kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _POLITE_SECONDS
    while any(map(_is_alive, targets)) and time.monotonic() < deadline:
        time.sleep(_PERIOD_SECONDS / 4)
    for process in targets:
        if _is_alive(process):
            for pid in [process[0], *descendants(process[0])]:
                _kill(pid, signal.SIGKILL)


def _process(pid: int) -> Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field, the program's name in brackets, may contain spaces and brackets.
    fields = text.rpartition(")")[2].split()
    # A zombie counts as ended.
    return None if fields[0] == "Z" else (pid, fields[19])


def _is_alive(process: Process) -> bool:
    return _process(process[0]) == process
