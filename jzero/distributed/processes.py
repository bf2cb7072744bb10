"""Moved from jzero.hosts."""

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import jax
from jax._src import distributed  # the client: JAX publishes no key-value store
from tqdm import tqdm

from jzero.errors import UserError
from jzero.files import write_atomic

PATIENCE = 24  # seconds without a sign of life after which a host is lost
PEERS: Any = distributed.global_state  # its client is the coordinator's store of keys and values
BEAT = "jzero/beat"  # folder of keys in that store


def join_processes(coordinator: str | None, count: int | None, index: int | None) -> None:
    """Before any device is touched; without arguments as a Cloud TPU, SLURM or Open MPI say, or alone."""
    given = [x is not None for x in (coordinator, count, index)]
    if any(given) and not all(given):
        raise UserError(
            "give --coordinator HOST:PORT, --num_processes and --process_id together, or none of them"
        )
    try:
        jax.distributed.initialize(
            coordinator, count, index, heartbeat_timeout_seconds=3 * PATIENCE
        )
    except ValueError as error:
        if any(given) or "coordinator_address should be defined" not in str(error):
            raise UserError(f"this process cannot join the others: {error}") from error
        return  # alone
    if has_peers():
        threading.Thread(target=watch_peers, daemon=True).start()


def has_peers() -> bool:
    """Whether there are other processes. Touches no device."""
    return (PEERS.num_processes or 1) > 1


def is_first_process() -> bool:
    """Alone it touches no device, which graders' processes start before."""
    return not has_peers() or jax.process_index() == 0


def print_once(text: str) -> None:
    """A line on the terminal, above progress bars, once."""
    if is_first_process():
        tqdm.write(text)


def write_once(path: Path, text: str) -> None:
    """The whole file or nothing of it, by the first host."""
    if is_first_process():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)


def watch_peers() -> None:
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
                exit_without_peers(f"host {key.split('/')[-1]} of {count} is gone")
        time.sleep(PATIENCE / 8)


def exit_without_peers(why: str) -> NoReturn:
    """At once: an orderly exit would wait for the others."""
    again = "Start the same command on all hosts again: the run goes on from its last checkpoint"
    print(f"error: {why}. {again}", file=sys.stderr, flush=True)
    os._exit(1)
