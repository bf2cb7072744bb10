"""A thread with an event loop, for what waits: thousands of coroutines at once in one process.

The pool awaits the steps of environments here (`tasks.asyncio_environments`). Code in an event loop
has to await whatever takes long. Code that does not, and computes or blocks, holds up all others,
and nothing can end it: then `on_blocked` is called, with the place where the code is.
"""

import asyncio
import contextlib
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine

PERIOD_SECONDS = 1.0  # between two looks at whether the event loop still runs
END_SECONDS = 5.0  # for what was cancelled, and for what runs at the end

OnBlocked = Callable[[float, str], None]  # the seconds, and where the code is


class EventLoop:
    """An event loop in a daemon thread. Any thread may start coroutines; one thread closes it."""

    def __init__(self, blocked_seconds: float, on_blocked: OnBlocked) -> None:
        """After `blocked_seconds` without a turn of the loop `on_blocked` is called, once."""
        self._blocked_seconds = blocked_seconds
        self._on_blocked = on_blocked
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._at_end: list[Callable[[], Awaitable[None]]] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="event loop")
        self._thread.start()
        threading.Thread(target=self._watch, daemon=True, name="event loop's watch").start()

    def start(self, coroutine: Coroutine[None, None, None]) -> None:
        """Runs a coroutine, which has to handle its own errors, beside all others."""
        self._loop.call_soon_threadsafe(self._start, coroutine)

    def at_end(self, function: Callable[[], Awaitable[None]]) -> None:
        """Has a function awaited when the loop is closed, after all coroutines were cancelled."""
        self._at_end.append(function)

    def close(self) -> None:
        """Cancels what runs, and returns once that has ended or after END_SECONDS."""
        self._closed.set()
        with contextlib.suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(2 * END_SECONDS)

    def _start(self, coroutine: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)  # the loop itself keeps weak references alone
        task.add_done_callback(self._tasks.discard)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=END_SECONDS))
        for function in self._at_end:
            with contextlib.suppress(Exception):  # nobody is there any more who could be told
                self._loop.run_until_complete(asyncio.wait_for(function(), END_SECONDS))
        self._loop.close()

    def _watch(self) -> None:
        """Says once that the loop is blocked, if it is."""
        while not self._closed.wait(PERIOD_SECONDS):
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
