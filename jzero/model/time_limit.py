"""Ends Python code of unknown origin that runs too long, such as the loops of a chat template.

    text = within_seconds(10.0, lambda: template.render(messages))     # TimeoutError after 10 s

A thread cannot be killed, and a process for each prompt would be slow. Instead, a watching thread
raises an exception in the thread that runs the code. The exception arrives between two bytecodes: a
loop ends at once, and one long call of a C function ends first.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

TICK_SECONDS = 0.2  # between two looks of the watching thread


class _TimeIsUp(BaseException):
    """Is raised in the code. Not an Exception: the code must not handle it."""


@dataclass(eq=False)
class _Call:
    thread: int
    deadline: float
    is_interrupted: bool = False


class _Watch:
    """The running calls, and the thread that interrupts them. It runs only while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[_Call] = []
        self._is_running = False

    def add(self, call: _Call) -> None:
        with self._lock:
            self._calls.append(call)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, daemon=True).start()

    def remove(self, call: _Call) -> None:
        with self._lock:
            if call in self._calls:
                self._calls.remove(call)
            if call.is_interrupted:
                # The call may have ended before the exception arrived.
                _raise_in(call.thread, None)

    def _run(self) -> None:
        idle_since = time.monotonic()
        while True:
            time.sleep(TICK_SECONDS)
            with self._lock:
                now = time.monotonic()
                for call in self._calls:
                    if now > call.deadline and not call.is_interrupted:
                        call.is_interrupted = True
                        _raise_in(call.thread, _TimeIsUp)
                idle_since = now if self._calls else idle_since
                if now - idle_since > 10:
                    self._is_running = False
                    return


_WATCH = _Watch()
os.register_at_fork(after_in_child=_WATCH.__init__)  # a fork does not copy the thread


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    argument = ctypes.py_object() if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), argument)


def within_seconds(seconds: float, function: Callable[[], T]) -> T:
    """Returns the result of a function. Raises TimeoutError if it takes longer than `seconds`."""
    call = _Call(threading.get_ident(), time.monotonic() + seconds)
    try:
        try:
            _WATCH.add(call)
            return function()
        finally:
            _WATCH.remove(call)
    except _TimeIsUp:
        # The exception may have arrived before the call was removed.
        _WATCH.remove(call)
        raise TimeoutError(f"it takes more than {seconds:g} s") from None
