"""Ctrl-C, SIGTERM and preemption: all hosts stop at the same place, where the run's state is whole.

The notice before a spot machine is taken away (`preemption.py`) is handled as a signal is.

A signal reaches one process, but all hosts must dispatch the same global programs in the same
order: a host that left by itself would leave the others waiting in their next collective. So the
signal handler only remembers the signal and publishes it to the other hosts. `Interrupted` is
raised at places that the run chooses:

- between two steps, where every host calls `StopSignal.raise_if_stopped_anywhere`;
- while a host decodes its own share of rollouts, where it alone calls
  `StopSignal.raise_if_stopped_here`. A host that stops there goes straight to
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

from jzero.distributed import preemption
from jzero.distributed.collectives import gather_json
from jzero.distributed.peers import PEERS, has_peers

# A folder of the coordinator's key-value store, with one key for each host that got a signal.
STOP_FOLDER = "jzero/stop"
SECONDS_BETWEEN_LOOKS = 1.0  # into that folder: every look is a request to the coordinator

StopCheck = Callable[
    [], None
]  # raises Interrupted if the run is to stop, and otherwise does nothing


class Interrupted(Exception):
    """The run is to stop, because a host got the signal or notice that the message names."""


def never_stop() -> None:
    """The `StopCheck` of work that must not be interrupted."""


def raise_if_any_host_stopped(reason_here: str = "") -> None:
    """Raises Interrupted on all hosts if any gives a reason. All hosts must call it together."""
    for reason in gather_json(reason_here):
        if reason:
            raise Interrupted(reason)


class StopSignal:
    """Remembers Ctrl-C and SIGTERM inside a `with` block. A second signal stops the process.

    `preemption_notice` is `train.preemption_notice`: whose notice is remembered like a signal. It
    is not the first of two signals, because the machine's shutdown sends SIGTERM a moment later.
    """

    def __init__(self, preemption_notice: str = "none") -> None:
        self.reason = ""  # the signal or notice that this host got; empty: none
        self._preemption_notice = preemption_notice
        self._is_over = threading.Event()
        self._last_look = 0.0  # time.monotonic() of the last look at the other hosts' reasons
        self._handlers_before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> "StopSignal":
        preemption.watch(self._preemption_notice, self._stop_at_notice, self._is_over)
        # Python accepts signal handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers_before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over.set()
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        """Handles a signal: tells the other hosts and the user. Python handles a second signal."""
        self._remember_reason(signal.Signals(number).name)
        for handled in self._handlers_before:
            signal.signal(handled, signal.default_int_handler)
        message = f"{self.reason}: saving a checkpoint; again to stop at once"
        print(message, file=sys.stderr, flush=True)

    def _stop_at_notice(self, notice: str) -> None:
        """Handles a preemption notice, in the thread that asks for them."""
        self._remember_reason(notice)
        print(f"{self.reason}: saving a checkpoint", file=sys.stderr, flush=True)

    def _remember_reason(self, reason: str) -> None:
        """Keeps why this host stops, and tells the other hosts."""
        if not has_peers():
            self.reason = reason
            return
        index = jax.process_index()
        self.reason = f"{reason} on host {index}"
        PEERS.client.key_value_set(f"{STOP_FOLDER}/{index}", self.reason, allow_overwrite=True)

    def raise_if_stopped_here(self) -> None:
        """Raises Interrupted on this host alone, once any host got a signal.

        For work that hosts do at their own pace. Whoever catches the exception must call
        `raise_if_any_host_stopped` with its message, because the other hosts wait there.
        """
        if self.reason:
            raise Interrupted(self.reason)
        if has_peers() and time.monotonic() - self._last_look > SECONDS_BETWEEN_LOOKS:
            self._last_look = time.monotonic()
            for _, reason in PEERS.client.key_value_dir_get(STOP_FOLDER):
                raise Interrupted(reason)

    def raise_if_stopped_anywhere(self) -> None:
        """Raises Interrupted on all hosts once any got a signal. All must call it together."""
        raise_if_any_host_stopped(self.reason)
