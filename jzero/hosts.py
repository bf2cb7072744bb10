"""Several hosts, one program: joining, what hosts tell each other, and how all of them stop at the same place.

Global programs are dispatched by every host in the same order; rollouts are local, and hosts meet in `gather`. Process
0 writes and speaks. Alone everything here is immediate."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from jax._src import distributed  # the client: JAX publishes no key-value store
from jax.experimental import multihost_utils
from jax.sharding import Sharding
from tqdm import tqdm

from jzero import metrics

PATIENCE = 24  # seconds without a sign of life after which a host is lost
POLL = 1.0  # seconds between looks at whether another host was told to stop
PEERS: Any = distributed.global_state  # its client is the coordinator's store of keys and values
STOP, BEAT = "jzero/stop", "jzero/beat"  # folders of keys in that store


def join(coordinator: str | None, count: int | None, index: int | None) -> None:
    """Before any device is touched; without arguments as a Cloud TPU, SLURM or Open MPI say, or alone."""
    given = [x is not None for x in (coordinator, count, index)]
    if any(given) and not all(given):
        raise ValueError("give --coordinator HOST:PORT, --num_processes and --process_id together, or none of them")
    try:
        jax.distributed.initialize(coordinator, count, index, heartbeat_timeout_seconds=3 * PATIENCE)
    except ValueError as error:
        if any(given) or "coordinator_address should be defined" not in str(error):
            raise ValueError(f"this process cannot join the others: {error}") from error
        return  # alone
    if joined():
        threading.Thread(target=watch, daemon=True).start()


def joined() -> bool:
    """Whether there are other processes. Touches no device."""
    return (PEERS.num_processes or 1) > 1


def first() -> bool:
    """Alone it touches no device, which graders' processes start before."""
    return not joined() or jax.process_index() == 0


def say(text: str) -> None:
    """A line on the terminal, above progress bars, once."""
    if first():
        tqdm.write(text)


def write(path: Path, text: str) -> None:
    """The whole file or nothing of it, by the first host."""
    if first():
        path.parent.mkdir(parents=True, exist_ok=True)
        metrics.write_atomic(path, text)


def share(count: int) -> slice:
    """Which of `count` problems this host decodes: neighbours, as even as can be."""
    index, processes = jax.process_index(), jax.process_count()
    return slice(count * index // processes, count * (index + 1) // processes)


def gather(data: bytes) -> list[bytes]:
    """What every host gave, in their order."""
    if not joined():
        return [data]
    sizes = multihost_utils.process_allgather(np.array([len(data)], np.int32)).ravel()
    padded = np.zeros(1 << int(sizes.max()).bit_length(), np.uint8)  # few shapes, few programs
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    return [row[:size].tobytes() for row, size in zip(multihost_utils.process_allgather(padded), sizes, strict=True)]


def agree(value: Any) -> list[Any]:
    """JSON values of all hosts."""
    return [json.loads(each) for each in gather(json.dumps(value).encode())]


def check_shared(path: Path) -> None:
    """Raises ValueError unless every host sees a file that the first one wrote."""
    agree("written")
    if not all(agree(path.exists())):
        raise ValueError(f"{path.parent} is not the same directory on every host: give --workdir on shared storage")


def total(counts: Mapping[str, float]) -> dict[str, float]:
    """The sum over hosts of each."""
    every = agree(counts)
    return {name: sum(each[name] for each in every) for name in counts}


def put(x: np.ndarray | np.generic, sharding: Sharding) -> jax.Array:
    """An array that every host has, on the devices of all of them; each puts the shards it holds."""
    return jax.make_array_from_callback(x.shape, sharding, lambda index: np.asarray(x)[index])


def fetch(x: jax.Array) -> np.ndarray:
    """The other way: all of an array whose shards are spread over hosts. Every host gets it."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(jax.device_get(x))
    return multihost_utils.process_allgather(x, tiled=True)


class Interrupted(Exception):
    """Ctrl-C or SIGTERM on any host, raised on all of them where the state is whole."""


def meet(reason: str = "") -> None:
    """Raises Interrupted on every host if any gave a reason."""
    for each in agree(reason):
        if each:
            raise Interrupted(each)


class Stop:
    """`with Stop() as stop:` Ctrl-C and SIGTERM are remembered; a second one stops at once."""

    def __init__(self):
        self.reason, self.looked = "", 0.0

    def __enter__(self) -> "Stop":
        here = threading.current_thread() is threading.main_thread()  # Python takes no handlers elsewhere
        self.before = {n: signal.signal(n, self._handle) for n in (signal.SIGINT, signal.SIGTERM) if here}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame) -> None:
        self.reason = signal.Signals(number).name
        if joined():
            self.reason += f" on host {jax.process_index()}"
            PEERS.client.key_value_set(f"{STOP}/{jax.process_index()}", self.reason, allow_overwrite=True)
        for each in self.before:
            signal.signal(each, signal.default_int_handler)
        print(f"{self.reason}: saving a checkpoint; again to stop at once", file=sys.stderr, flush=True)

    def soon(self) -> None:
        """Raises Interrupted here once any host was told: the others wait in `meet`."""
        if self.reason:
            raise Interrupted(self.reason)
        if joined() and time.monotonic() - self.looked > POLL:
            self.looked = time.monotonic()
            for _, reason in PEERS.client.key_value_dir_get(STOP):
                raise Interrupted(reason)

    def together(self) -> None:
        """Every host calls it at the same place: raises on all once any was told."""
        meet(self.reason)


def watch() -> None:
    """Ends this process, with a line that says why, once another shows no sign of life for PATIENCE."""
    me, count, seen = PEERS.process_id, PEERS.num_processes, {}
    running = threading.main_thread().is_alive  # at the end of a run hosts leave one by one
    while running():
        now = time.monotonic()
        try:
            PEERS.client.key_value_set(f"{BEAT}/{me}", str(now), allow_overwrite=True)
            beats = PEERS.client.key_value_dir_get(BEAT)
        except Exception:
            return  # no store: this run is over, or JAX is about to end it
        for key, beat in beats:
            if key not in seen or seen[key][0] != beat:
                seen[key] = beat, now
            elif now - seen[key][1] > PATIENCE and running():
                lost(f"host {key.split('/')[-1]} of {count} is gone")
        time.sleep(PATIENCE / 8)


def lost(why: str) -> NoReturn:
    """At once: an orderly exit would wait for the others."""
    again = "Start the same command on all hosts again: the run goes on from its last checkpoint"
    print(f"error: {why}. {again}", file=sys.stderr, flush=True)
    os._exit(1)
