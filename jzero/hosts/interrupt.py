"""Handles Ctrl-C, SIGTERM and preemption: all hosts stop at the same place, with a complete state.

The preemption notice of a spot machine (`preemption.py`) is handled like a signal.

A signal reaches one process, but all hosts must dispatch the same global programs in the same
order: a host that left by itself would leave the others waiting in their next collective. So the
signal handler only remembers the signal and publishes it to the other hosts. `Interrupted` is
raised at places that the run chooses:

- between two steps, where every host calls `StopSignal.raise_if_stopped_anywhere`;
- while a host decodes its share of the rollouts, where only that host calls
  `StopSignal.raise_if_stopped_here`. A host that stops there proceeds directly to
  `raise_if_any_host_stopped`, which the other hosts call once their share is decoded.

    with StopSignal() as stop:
        for step in range(steps):
            ...
            stop.raise_if_stopped_anywhere()
"""

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

import jax

from jzero import terminal
from jzero.hosts import preemption
from jzero.hosts.collectives import gather_json
from jzero.hosts.peers import PEERS, has_peers

# A folder in the coordinator's key-value store, with one key for each host that got a signal.
STOP_FOLDER = "jzero/stop"
POLL_SECONDS = 1.0  # between reads of that folder, which are requests to the coordinator

StopCheck = Callable[[], None]  # raises Interrupted if the run should stop


class Interrupted(Exception):
    """The run should stop, because a host got the signal or notice in the message."""


def is_main_thread() -> bool:
    """Whether this is the main thread, the only one that Python lets handle signals."""
    return threading.current_thread() is threading.main_thread()


def never_stop() -> None:
    """The `StopCheck` of work that must not be interrupted."""


def raise_if_any_host_stopped(reason_here: str = "") -> None:
    """Raises Interrupted on all hosts if any gives a reason. All hosts must call it together."""
    for reason in gather_json(reason_here):
        if reason:
            raise Interrupted(reason)


class StopSignal:
    """Remembers Ctrl-C and SIGTERM inside a `with` block. A second signal stops the process.

    `preemption_notice` is the setting `train.preemption_notice`: the source of preemption notices,
    which are remembered like a signal. A notice does not count as the first of two signals, because
    the machine's shutdown sends SIGTERM a moment later. `reaction` is what the user is told that
    the process does then.
    """

    def __init__(
        self,
        preemption_notice: str = "none",
        reaction: str = "saving a checkpoint",
    ) -> None:
        self.reason = ""  # the signal or notice of this host; "" for none
        self.reaction = reaction
        self._preemption_notice = preemption_notice
        self._is_over = threading.Event()
        self._last_poll = 0.0  # time.monotonic() of the last read of the other hosts' reasons
        self._handlers_before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> "StopSignal":
        self.watch_notices(self._preemption_notice)
        # Python accepts signal handlers in the main thread only.
        if is_main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers_before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Ends the thread that polls for preemption notices.
        self._is_over.set()
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)

    def watch_notices(self, preemption_notice: str) -> None:
        """Begins to poll a source of preemption notices, until the end of the block."""
        preemption.watch(preemption_notice, self._stop_at_notice, self._is_over)

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        """Handles a signal: reports it to the other hosts and the user."""
        self._remember_reason(signal.Signals(number).name)
        # Python's default handler takes a second signal.
        for handled in self._handlers_before:
            signal.signal(handled, signal.default_int_handler)
        message = f"{self.reason}: {self.reaction}; again to stop at once"
        terminal.write(message, sys.stderr)

    def _stop_at_notice(self, notice: str) -> None:
        """Handles a preemption notice, in the thread that polls for notices."""
        self._remember_reason(notice)
        terminal.write(f"{self.reason}: {self.reaction}", sys.stderr)

    def _remember_reason(self, reason: str) -> None:
        """Stores the reason why this host stops, and publishes it to the other hosts."""
        if not has_peers():
            self.reason = reason
            return
        index = jax.process_index()
        self.reason = f"{reason} on host {index}"
        PEERS.client.key_value_set(f"{STOP_FOLDER}/{index}", self.reason, allow_overwrite=True)

    def raise_if_stopped_here(self) -> None:
        """Raises Interrupted on this host only, once any host got a signal.

        For work that hosts do at their own pace. The code that catches the exception must call
        `raise_if_any_host_stopped` with its message, because the other hosts wait there.
        """
        if self.reason:
            raise Interrupted(self.reason)
        # Decoding calls this function often, but each read is a request to the coordinator.
        if has_peers() and time.monotonic() - self._last_poll > POLL_SECONDS:
            self._last_poll = time.monotonic()
            for _, reason in PEERS.client.key_value_dir_get(STOP_FOLDER):
                raise Interrupted(reason)

    def raise_if_stopped_anywhere(self) -> None:
        """Raises Interrupted on all hosts once any got a signal. All must call it together."""
        raise_if_any_host_stopped(self.reason)
