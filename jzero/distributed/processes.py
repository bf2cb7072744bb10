"""The processes of a run, one for each host: how they join, who writes, and how a loss ends them.

JAX connects the processes through a coordinator, which also keeps a store of keys and values (used
here for signs of life, and by `interrupt.py`). Alone, without a coordinator, every function here
returns at once.
"""

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import jax
from jax._src import distributed  # JAX does not publish the client of its key-value store
from tqdm import tqdm

from jzero.errors import UserError
from jzero.files import write_atomic

PATIENCE = 24  # seconds without a sign of life after which a host counts as lost
BEAT_FOLDER = "jzero/beat"  # folder of keys in the coordinator's store: one key for each host
PEERS: Any = distributed.global_state  # JAX's view of the other processes; untyped in JAX


def join_processes(coordinator: str | None, num_processes: int | None, index: int | None) -> None:
    """Connects this process to the others of the run. Must be called before any device is used.

    `coordinator` is "HOST:PORT" of process 0. Without arguments JAX takes all three from the
    environment of a Cloud TPU, SLURM or Open MPI, and a process that finds none of these runs
    alone. Raises UserError if only some arguments are given, or if the other processes cannot be
    reached.
    """
    arguments = (coordinator, num_processes, index)
    is_given = [argument is not None for argument in arguments]
    if any(is_given) and not all(is_given):
        raise UserError(
            "give --coordinator HOST:PORT, --num_processes and --process_id together, "
            "or none of them"
        )
    try:
        # JAX's own heartbeat is the last resort: `watch_peers` is faster and names the lost host.
        jax.distributed.initialize(*arguments, heartbeat_timeout_seconds=3 * PATIENCE)
    except ValueError as error:
        is_alone = "coordinator_address should be defined" in str(error)
        if any(is_given) or not is_alone:
            raise UserError(f"this process cannot join the others: {error}") from error
        return
    if has_peers():
        threading.Thread(target=watch_peers, daemon=True).start()


def has_peers() -> bool:
    """Whether the run has other processes. Touches no device."""
    return (PEERS.num_processes or 1) > 1


def is_first_process() -> bool:
    """Whether this is process 0, which writes all files and prints.

    Touches no device if the process is alone. Commands ask before they use devices, because the
    processes of the graders start first.
    """
    return not has_peers() or jax.process_index() == 0


def print_once(text: str) -> None:
    """Prints a line on the first host's terminal, above progress bars."""
    if is_first_process():
        tqdm.write(text)


def write_once(path: Path, text: str) -> None:
    """Writes a file from the first host, atomically: it has all of `text` or does not exist."""
    if is_first_process():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)


def watch_peers() -> None:
    """Watches the other hosts from a thread, and ends this process once one of them is lost.

    Every host writes the time under a key of its own and reads everybody's keys. A host whose key
    has not changed for PATIENCE seconds is lost. Without this thread the run would hang: a
    collective that waits for a lost host's devices never returns, and Python cannot interrupt it.
    """
    this_host = PEERS.process_id
    last_seen: dict[str, tuple[str, float]] = {}  # key -> its value, and when that value was new
    is_running = threading.main_thread().is_alive
    while is_running():  # at the end of a run the hosts leave one by one, and that is no loss
        now = time.monotonic()
        try:
            PEERS.client.key_value_set(f"{BEAT_FOLDER}/{this_host}", str(now), allow_overwrite=True)
            beats = PEERS.client.key_value_dir_get(BEAT_FOLDER)
        except Exception:
            return  # the store is gone: the run is over, or process 0 is lost and JAX ends this one
        for key, beat in beats:
            if key not in last_seen or last_seen[key][0] != beat:
                last_seen[key] = beat, now
            elif now - last_seen[key][1] > PATIENCE and is_running():
                lost_host = key.split("/")[-1]
                exit_without_peers(f"host {lost_host} of {PEERS.num_processes} is gone")
        time.sleep(PATIENCE / 8)


def exit_without_peers(reason: str) -> NoReturn:
    """Prints why and ends this process at once.

    With os._exit, because an orderly exit would never finish: the main thread waits inside a
    collective, and JAX's shutdown waits for the other processes. The last checkpoint is whole, so
    nothing but the current step is lost.
    """
    advice = "Start the same command on all hosts again: the run goes on from its last checkpoint"
    print(f"error: {reason}. {advice}", file=sys.stderr, flush=True)
    os._exit(1)
