"""Watches the other processes of a run: equal settings at the start, signs of life, and their end.

Process 0 has a connection to each of the others (`rendezvous.py`), over which both ends send

    {"beat": 1}      every second
    {"say": line}    a line that all hosts print, such as that one of them does not answer
    {"end": line}    the last line of a host that ends before the run does
    {"bye": 1}       a host has finished its work, and leaves

Process 0 forwards lines, because the others have no connections to each other. A connection that
closes without a message belongs to a process that was killed. Without this module, a host that ends
would leave the others in a collective that never returns, and that Python cannot interrupt. In a
run with one process, nothing here has an effect.
"""

import atexit
import json
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

from jax._src import distributed  # JAX does not publish the client of its key-value store

from jzero import terminal
from jzero.errors import UserError
from jzero.files import JsonObject
from jzero.hosts.rendezvous import Connection, one_line
from jzero.hosts.waits import NOTICE_SECONDS

BEAT_SECONDS = 1.0  # between two signs of life
START_SECONDS = 300  # limit for the other hosts to read their arguments
LEAVE_SECONDS = 2.0  # limit for the other hosts to read why this one ends
VERDICT_SECONDS = 5.0  # after a failed collective, to detect a host that has ended

START_FOLDER = "jzero/start"  # in JAX's key-value store: the settings of each host

PEERS: Any = distributed.global_state  # JAX's view of the other processes; untyped in JAX

RESUME_ADVICE = (
    "Start the same command, with the same --workdir, on all hosts: "
    "the run continues from its last checkpoint"
)
_ADVICE = [RESUME_ADVICE]  # of this process: what to do after a host has ended


def set_advice(advice: str) -> None:
    """Sets what the last line of this process tells the user to do. Called before the start."""
    _ADVICE[0] = advice


def advice() -> str:
    """Returns what to do after a host has ended: by default, to resume a run."""
    return _ADVICE[0]


class Link:
    """The connections of this process to the others of its run."""

    def __init__(
        self,
        index: int,
        num_processes: int,
        connections: Sequence[Connection],
        silence: float,
    ) -> None:
        self.index = index
        self.num_processes = num_processes
        self.connections = list(connections)
        self.silence_limit = silence
        self._lock = threading.Lock()  # two threads must not mix their lines

    def send(self, message: JsonObject, but: Connection | None = None) -> None:
        """Sends a message to all open connections except `but`."""
        with self._lock:
            for connection in self.connections:
                if connection is not but:
                    try:
                        connection.send(message)
                    except OSError:  # closed: `watch_peers` handles it
                        continue


LINK: Link | None = None  # None: a run with one process
_ENDING: list[int] = []  # the thread that ends this process: only that thread prints a line
_ENDING_LOCK = threading.Lock()


def has_peers() -> bool:
    """Returns whether the run has other processes. Touches no device."""
    return LINK is not None


def this_host() -> str:
    """Returns the name of this process in messages, for example "host 1 of 2"."""
    assert LINK is not None, "the run has one process"
    return f"host {LINK.index} of {LINK.num_processes}"


def start_watching(
    index: int,
    num_processes: int,
    connections: Sequence[Connection],
    silence: float,
) -> None:
    """Starts to watch the other processes, until this process ends."""
    global LINK
    LINK = Link(index, num_processes, connections, silence)
    atexit.register(_leave, LINK)
    # JAX's own list of live processes is of no use: it comes from the same heartbeats, and JAX
    # aborts the process when they stop (lab/log.md, 2026-11-20).
    threading.Thread(target=watch_peers, args=(LINK,), daemon=True).start()


# -- The start -------------------------------------------------------------------------------------


def check_same_start(values: Mapping[str, object]) -> None:
    """Raises UserError on every host unless all hosts were started with the same values.

    `values` are the settings of this host by name, as JSON values. Hosts with different settings
    would dispatch different programs, and wait for each other forever. Touches no device.
    """
    if not has_peers():
        return
    client = PEERS.client
    # Every host publishes its values and reads all others, so that all hosts raise the same error.
    client.key_value_set(f"{START_FOLDER}/{PEERS.process_id}", json.dumps(dict(values)))
    starts = []
    for index in range(PEERS.num_processes):
        try:
            text = client.blocking_key_value_get(f"{START_FOLDER}/{index}", START_SECONDS * 1000)
        except Exception as error:
            raise UserError(
                f"host {index} of {PEERS.num_processes} has not read its arguments within "
                f"{START_SECONDS} seconds: check its output"
            ) from error
        starts.append(json.loads(text))

    differences = []
    for index, start in enumerate(starts):
        for name in sorted(start.keys() | starts[0].keys()):
            value, first_value = start.get(name, "(absent)"), starts[0].get(name, "(absent)")
            if value != first_value:
                differences.append(f"{name} is {first_value} on host 0 and {value} on host {index}")
    if differences:
        raise UserError(
            f"the hosts were started differently: {'; '.join(differences[:5])}. "
            "Start the same command on all hosts"
        )


# -- The end ---------------------------------------------------------------------------------------


def end_process(line: str, status: int, line_of_others: str | None = None) -> NoReturn:
    """Prints a line, sends it to the other hosts, and ends this process at once.

    The other hosts print `line_of_others` (default: the same line) and end, too.

    The process ends with os._exit, because an orderly exit would never finish: the main thread may
    wait inside a collective, and JAX's shutdown waits for the other processes. The last checkpoint
    is complete, so only the current step is lost.
    """
    with _ENDING_LOCK:
        # Several threads may end the process at the same time: only the first one prints its line.
        _ENDING.append(threading.get_ident())
    if _ENDING[0] != _ENDING[-1]:
        _wait_for_end()
    if len(_ENDING) > 1:  # a signal arrived while this thread was already ending the process
        os._exit(status)
    terminal.close()  # the process cannot remove its progress bars later
    terminal.say(f"error: {line}", is_error=True)
    sys.stdout.flush()
    if LINK is not None:
        LINK.send({"end": line_of_others or line})
        _wait_until_read(LINK)
    os._exit(status)


def _wait_for_end() -> NoReturn:
    """Waits until the thread that ends this process has ended it."""
    while True:
        time.sleep(LEAVE_SECONDS)


def _wait_until_read(link: Link) -> None:
    """Waits until the other ends have closed, up to LEAVE_SECONDS."""
    # A TCP reset at exit may overtake the last line.
    deadline = time.monotonic() + LEAVE_SECONDS
    for connection in link.connections:
        try:
            while time.monotonic() < deadline:
                if connection.receive(deadline - time.monotonic()) is None:
                    break
        except ValueError:
            continue


def wait_for_verdict() -> None:
    """Gives `watch_peers` time to end this process after a failed collective.

    A collective fails when another host has ended, and often before its connection has closed.
    Returns if no host has ended: then the failure belongs to this host.
    """
    if has_peers():
        time.sleep(VERDICT_SECONDS)


def end_on_signals(when: str = " outside of the steps") -> None:
    """Makes Ctrl-C and SIGTERM end all hosts, while the run cannot save its state yet.

    Inside `interrupt.StopSignal` they stop the run with a checkpoint instead.

    when: what the last line says of the moment.
    """

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        name = signal.Signals(number).name
        host = this_host() if has_peers() else "this host"
        end_process(f"{name} on {host}{when}. {advice()}", 1)

    # Python accepts signal handlers in the main thread only.
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, end)


def leave() -> None:
    """Tells the other hosts that this process has finished. For processes that use os._exit."""
    if LINK is not None:
        LINK.send({"bye": 1})


def _leave(link: Link) -> None:
    """Tells the other hosts that this process has finished, except after an uncaught exception."""
    # Python sets `last_value` after an uncaught exception.
    if not hasattr(sys, "last_value"):
        link.send({"bye": 1})


# -- Life ------------------------------------------------------------------------------------------


def watch_peers(link: Link) -> None:
    """Watches the other hosts from a thread, and ends this process once one of them has ended.

    A host that ended by itself has sent the reason. The connection to a killed host closes, even
    while that host compiles, loads, or waits. A silent host is named after NOTICE_SECONDS, and is
    lost after `--silence_seconds`.
    """
    selector = selectors.DefaultSelector()
    for connection in link.connections:
        selector.register(connection.socket, selectors.EVENT_READ, connection)
    silence = {connection.index: 0.0 for connection in link.connections}
    named: set[int] = set()  # hosts that do not answer, as reported on all hosts
    last_look = time.monotonic()
    last_beat = 0.0
    while selector.get_map():
        # Messages that arrived together with an earlier one are buffered, where `select` does not
        # see them.
        is_pending = any(connection.pending for connection in link.connections)
        events = selector.select(0.0 if is_pending else BEAT_SECONDS / 2)
        current_time = time.monotonic()
        # Time in which this thread did not run does not count: on a machine that was suspended, or
        # that starves all of its processes, no host is lost.
        elapsed = min(current_time - last_look, 2 * BEAT_SECONDS)
        last_look = current_time

        # Send a sign of life.
        if current_time - last_beat >= BEAT_SECONDS:
            last_beat = current_time
            link.send({"beat": 1})

        # Read messages. Any message is a sign of life.
        for index in silence:
            silence[index] += elapsed
        readable = [key.data for key, _ in events]
        readable += [x for x in link.connections if x.pending and x not in readable]
        for connection in readable:
            silence[connection.index] = 0.0
            if not _read(link, connection):  # this host has left
                selector.unregister(connection.socket)
                silence.pop(connection.index)

        # Report silent hosts, and end the run if a host is lost.
        for connection in link.connections:
            seconds = silence.get(connection.index, 0.0)
            if seconds > link.silence_limit:
                end_process(
                    f"{connection.name} has not answered for {link.silence_limit:g} s: its process "
                    f"hangs, or its machine or network failed. {advice()}",
                    1,
                )
            if seconds > NOTICE_SECONDS and connection.index not in named:
                named.add(connection.index)
                _announce(
                    link,
                    f"{connection.name} has not answered for {NOTICE_SECONDS:g} s: the run waits "
                    f"for it, up to {link.silence_limit:g} s",
                    connection,
                )
            if seconds == 0.0 and connection.index in named:
                named.remove(connection.index)
                _announce(link, f"{connection.name} answers again", connection)


def _announce(link: Link, line: str, about: Connection) -> None:
    """Prints a line on all hosts except the one that it is about."""
    terminal.say(line, is_error=True)
    if link.index == 0:
        link.send({"say": line}, but=about)


def _read(link: Link, connection: Connection) -> bool:
    """Reads the messages of a host that has sent some. Returns False once the host has left.

    Ends this process if the other host has ended before it finished its work.
    """
    try:
        messages = connection.receive(0)
    except ValueError as error:
        end_process(f"{connection.name} sent {error}. {advice()}", 1)
    if messages is None:
        end_process(
            f"{connection.name} is gone: its process was killed, or its machine failed. {advice()}",
            1,
        )
    for message in messages:
        if "end" in message:
            line = one_line(message["end"])
            if link.index == 0:
                link.send(message, but=connection)
            time.sleep(BEAT_SECONDS)  # this host may be about to report the same mistake itself
            end_process(line, 1)
        if "say" in message:
            terminal.say(one_line(message["say"]), is_error=True)
        if "bye" in message:
            return False
    return True
