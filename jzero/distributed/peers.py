"""The other processes of a run: what they were started with, whether they live, and how they end.

All of it goes through the key-value store of JAX's coordinator, which is a part of process 0:

    jzero/start/<host>   the settings that a host was started with
    jzero/beat/<host>    a value that a host changes every second
    jzero/end/<host>     the line that a host prints when it ends before the run does

Without this module a host that ends would leave the others in a collective that never returns, and
that Python cannot interrupt. Alone, without other processes, nothing here has an effect.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any, NoReturn

from jax._src import distributed  # JAX does not publish the client of its key-value store

from jzero.errors import UserError

PATIENCE = 24  # seconds without a sign of life after which a host counts as lost
BEAT_SECONDS = 1.0  # between two signs of life
START_SECONDS = 300  # for which a host waits until the others have read their arguments
LEAVE_SECONDS = 10.0  # for which process 0 waits until the others have ended

START_FOLDER = "jzero/start"
BEAT_FOLDER = "jzero/beat"
END_FOLDER = "jzero/end"

PEERS: Any = distributed.global_state  # JAX's view of the other processes; untyped in JAX

GO_ON = "Start the same command on all hosts again: the run goes on from its last checkpoint"


def has_peers() -> bool:
    """Whether the run has other processes. Touches no device."""
    return (PEERS.num_processes or 1) > 1


def this_host() -> str:
    """Returns how messages name this process, for example "host 1 of 2"."""
    return f"host {PEERS.process_id} of {PEERS.num_processes}"


# -- The start -------------------------------------------------------------------------------------


def check_same_start(values: Mapping[str, object]) -> None:
    """Raises UserError on every host unless all hosts were started with the same values.

    `values` are the settings of this host by name, as JSON values. Hosts with other settings would
    dispatch other programs, and wait for each other forever. Touches no device.
    """
    if not has_peers():
        return
    client = PEERS.client
    client.key_value_set(f"{START_FOLDER}/{PEERS.process_id}", json.dumps(dict(values)))
    starts = []
    for index in range(PEERS.num_processes):
        try:
            text = client.blocking_key_value_get(f"{START_FOLDER}/{index}", START_SECONDS * 1000)
        except Exception as error:
            raise UserError(
                f"host {index} of {PEERS.num_processes} has not read its arguments within "
                f"{START_SECONDS} seconds: look at what it printed"
            ) from error
        starts.append(json.loads(text))

    differences = []
    for index, start in enumerate(starts):
        for name in sorted(start.keys() | starts[0].keys()):
            here, first = start.get(name, "(absent)"), starts[0].get(name, "(absent)")
            if here != first:
                differences.append(f"{name} is {first} on host 0 and {here} on host {index}")
    if differences:
        raise UserError(
            f"the hosts were started differently: {'; '.join(differences[:5])}. "
            "Start the same command on all hosts"
        )


# -- The end ---------------------------------------------------------------------------------------


def end_process(line: str, status: int, line_of_others: str | None = None) -> NoReturn:
    """Prints a line, tells the other hosts why this one ends, and ends this process at once.

    The other hosts print `line_of_others` (default: the same line) and end, too.

    The process ends with os._exit, because an orderly exit would never finish: the main thread may
    wait inside a collective, and JAX's shutdown waits for the other processes. The last checkpoint
    is whole, so nothing but the current step is lost.
    """
    print(f"error: {line}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    # Without the store nobody can be told: process 0 is gone, and JAX ends the others.
    with contextlib.suppress(Exception):
        _tell_end(line_of_others or line)
    os._exit(status)


def _tell_end(line: str) -> None:
    """Writes why this host ends. Process 0 then waits for the others, as the store ends with it."""
    client = PEERS.client
    client.key_value_set(f"{END_FOLDER}/{PEERS.process_id}", line, allow_overwrite=True)
    if PEERS.process_id == 0:
        deadline = time.monotonic() + LEAVE_SECONDS
        while time.monotonic() < deadline:
            if len(client.key_value_dir_get(END_FOLDER)) == PEERS.num_processes:
                break
            time.sleep(0.1)
        time.sleep(0.1)  # the last one ends just after it has written its key


def end_on_signals() -> None:
    """Makes Ctrl-C and SIGTERM end all hosts, for the time before a run can save its state.

    Inside `interrupt.StopSignal` they stop the run with a checkpoint instead.
    """

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        name = signal.Signals(number).name
        end_process(f"{name} on {this_host()} outside of the steps. {GO_ON}", 1)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def watch_peers() -> None:
    """Watches the other hosts from a thread, and ends this process once one of them has ended.

    A host that ended by itself has written why. A host whose sign of life has not changed for
    PATIENCE seconds is lost. Time in which this thread itself did not run does not count: on a
    machine that was suspended, or that starves all of its processes, nobody is lost.
    """
    last_beats: dict[str, str] = {}
    silence: dict[str, float] = {}  # seconds, by key
    last_look = time.monotonic()
    is_running = threading.main_thread().is_alive
    while is_running():  # at the end of a run the hosts leave one by one, and that is no loss
        now = time.monotonic()
        elapsed = min(now - last_look, 2 * BEAT_SECONDS)
        last_look = now
        try:
            PEERS.client.key_value_set(
                f"{BEAT_FOLDER}/{PEERS.process_id}", str(now), allow_overwrite=True
            )
            ends = PEERS.client.key_value_dir_get(END_FOLDER)
            beats = PEERS.client.key_value_dir_get(BEAT_FOLDER)
        except Exception:
            return  # the store is gone: the run is over, or process 0 is lost and JAX ends this one
        for key, line in ends:
            if key == f"{END_FOLDER}/{PEERS.process_id}":
                return  # this host ends, and waits for the others
            time.sleep(BEAT_SECONDS)  # this host may be about to print the same mistake itself
            if is_running():
                end_process(line, 1)
        for key, beat in beats:
            silence[key] = silence.get(key, 0.0) + elapsed
            if last_beats.get(key) != beat:
                last_beats[key] = beat
                silence[key] = 0.0
            elif silence[key] > PATIENCE and is_running():
                host = key.split("/")[-1]
                end_process(f"host {host} of {PEERS.num_processes} is gone. {GO_ON}", 1)
        time.sleep(BEAT_SECONDS)
