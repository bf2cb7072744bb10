"""Moved from jzero.hosts."""

import signal
import sys
import threading
import time

import jax

from jzero.distributed.collectives import gather_json
from jzero.distributed.processes import PEERS, has_peers

POLL = 1.0  # seconds between looks at whether another host was told to stop
STOP = "jzero/stop"  # folder of keys in the coordinator's store


class Interrupted(Exception):
    """Ctrl-C or SIGTERM on any host, raised on all of them where the state is whole."""


def raise_if_interrupted(reason: str = "") -> None:
    """Raises Interrupted on every host if any gave a reason."""
    for each in gather_json(reason):
        if each:
            raise Interrupted(each)


class StopSignal:
    """`with Stop() as stop:` Ctrl-C and SIGTERM are remembered; a second one stops at once."""

    def __init__(self):
        self.reason, self.looked = "", 0.0

    def __enter__(self) -> "StopSignal":
        here = (
            threading.current_thread() is threading.main_thread()
        )  # Python takes no handlers elsewhere
        self.before = {
            n: signal.signal(n, self._handle) for n in (signal.SIGINT, signal.SIGTERM) if here
        }
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame) -> None:
        self.reason = signal.Signals(number).name
        if has_peers():
            self.reason += f" on host {jax.process_index()}"
            PEERS.client.key_value_set(
                f"{STOP}/{jax.process_index()}", self.reason, allow_overwrite=True
            )
        for each in self.before:
            signal.signal(each, signal.default_int_handler)
        print(
            f"{self.reason}: saving a checkpoint; again to stop at once",
            file=sys.stderr,
            flush=True,
        )

    def soon(self) -> None:
        """Raises Interrupted here once any host was told: the others wait in `meet`."""
        if self.reason:
            raise Interrupted(self.reason)
        if has_peers() and time.monotonic() - self.looked > POLL:
            self.looked = time.monotonic()
            for _, reason in PEERS.client.key_value_dir_get(STOP):
                raise Interrupted(reason)

    def together(self) -> None:
        """Every host calls it at the same place: raises on all once any was told."""
        raise_if_interrupted(self.reason)
