"""A thread with an event loop for code that waits: thousands of coroutines in one process.

The pool awaits the steps of environments here (`environments.asyncio_environments`). Code in an
event loop must await everything that takes long. Code that computes or blocks instead holds up all
other coroutines and cannot be interrupted; then `on_blocked` is called with the place where the
code is.

User-defined code may also stop the loop, or raise SystemExit in one of its tasks. The loop then
restarts. Processes that the code has started end with the loop or, at the latest, with the process
(`keeper.guard`).
"""

import asyncio
import contextlib
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine

from jzero.workers import keeper

PERIOD_SECONDS = 1.0  # between two checks that the event loop still runs
END_SECONDS = 5.0  # for cancelled tasks to end, and for each function of `at_end`

MAX_RESTARTS = 100  # of the loop, after user-defined code has ended it

OnBlocked = Callable[[float, str], None]  # the seconds, and where the code is
OnEnded = Callable[[BaseException | None], None]  # the error that ended the loop
OnError = Callable[[str, BaseException | None], None]  # in a task that user-defined code started


def _ignore(*_: object) -> None:
    pass


class EventLoop:
    """An event loop in a daemon thread. Any thread may start coroutines; one thread closes it."""

    def __init__(
        self,
        blocked_seconds: float,
        on_blocked: OnBlocked,
        on_ended: OnEnded = _ignore,
        on_error: OnError = _ignore,
    ) -> None:
        """Starts the loop. Calls `on_blocked` once if the loop is blocked for `blocked_seconds`."""
        keeper.guard_this_process()
        self._blocked_seconds = blocked_seconds
        self._on_blocked = on_blocked
        self._on_ended = on_ended
        self._on_error = on_error
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._at_end: list[Callable[[], Awaitable[None]]] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="event loop")
        self._thread.start()
        threading.Thread(target=self._watch, daemon=True, name="event loop's watch").start()

    def start(self, coroutine: Coroutine[None, None, None]) -> None:
        """Runs a coroutine, which must handle its own errors, concurrently with all others."""
        self._loop.call_soon_threadsafe(self._start, coroutine)

    def at_end(self, function: Callable[[], Awaitable[None]]) -> None:
        """Registers a function to await when the loop closes, after coroutines are cancelled."""
        self._at_end.append(function)

    def close(self) -> None:
        """Cancels all coroutines, and returns once they have ended or after END_SECONDS."""
        self._closed.set()
        with contextlib.suppress(RuntimeError):  # the loop has already ended
            # The loop belongs to its thread: only this call of it is safe from another one.
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(2 * END_SECONDS)

    def _start(self, coroutine: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._tasks.discard)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(self._handle_error)
        self._run_until_closed()
        threads = [threading.get_native_id(), *_executor_threads()]
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            with contextlib.suppress(Exception):  # user-defined code may have stopped the loop
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=END_SECONDS))
        for function in self._at_end:
            with contextlib.suppress(Exception):  # the run is over: errors have no reader
                self._loop.run_until_complete(asyncio.wait_for(function(), END_SECONDS))
        keeper.end_children_of_threads(threads)
        try:
            self._loop.close()
        except Exception:  # user-defined code has closed its files
            # Without its files the loop stays open, and its destructor would print a traceback.
            asyncio.BaseEventLoop.close(self._loop)  # pyright: ignore[reportArgumentType]

    def _run_until_closed(self) -> None:
        error: BaseException | None = None
        # User-defined code may stop the loop at any time: runs it again until it is closed.
        for _ in range(MAX_RESTARTS):
            try:
                self._loop.run_forever()
            except BaseException as raised:  # SystemExit in a task, or a closed file of the loop
                error = raised
            if self._closed.is_set():
                return
        self._on_ended(error)

    def _handle_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """Reports the error of a task that is not awaited."""
        error = context.get("exception")
        is_error = isinstance(error, BaseException)
        self._on_error(str(context.get("message", "")), error if is_error else None)

    def _watch(self) -> None:
        """Reports once if the loop is blocked."""
        while not self._closed.wait(PERIOD_SECONDS):
            # A callback that does not run in time means that the loop is blocked.
            has_turned = threading.Event()
            try:
                self._loop.call_soon_threadsafe(has_turned.set)
            except RuntimeError:  # the loop was closed
                return
            if not has_turned.wait(self._blocked_seconds) and not self._closed.is_set():
                frame = sys._current_frames().get(self._thread.ident or 0)
                where = traceback.format_stack(frame)[-1] if frame else ""
                self._on_blocked(self._blocked_seconds, " ".join(where.split()))
                return


def _executor_threads() -> list[int]:
    """Returns the IDs of the threads in which `asyncio.to_thread` runs functions."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("asyncio_")]
    return [thread.native_id for thread in threads if thread.native_id is not None]
