"""Connects the processes of a run before JAX does, with clear messages and a time limit.

Process 0 listens at the coordinator's port until every other process has sent its hello. Then it
leaves the port to JAX's coordinator, and the connections stay open: `peers.py` watches them until
the run ends. A waiting process prints the processes that it waits for, and the time limit.

Each line on a connection is a JSON object (`Connection`).
"""

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from jzero import terminal
from jzero.errors import UserError, shown
from jzero.files import JsonObject

FIRST_NOTICE = 2.0  # seconds until a waiting process prints which processes are missing
RETRY_SECONDS = 0.2  # between two attempts to connect
HELLO_SECONDS = 5.0  # limit for a new connection to send its hello
BIND_SECONDS = 10.0  # a previous process may hold the port for this long
SEND_SECONDS = 5.0  # limit for a line to fit into the connection's buffer
LONGEST_TEXT = 2000  # characters of a line from another process that are printed
LONGEST_LINE = 1 << 16  # maximum bytes of an unfinished line


@dataclass
class Connection:
    """A connection to another process of the run."""

    socket: socket.socket
    index: int  # the other process's index
    name: str  # the other process's name in messages: "host 1 of 2 (node7, pid 4711)"
    received: bytes = field(default=b"", repr=False)  # an unfinished line
    pending: list[JsonObject] = field(default_factory=list)  # messages that arrived together

    def send(self, message: JsonObject) -> None:
        """Sends a message. Raises OSError if the other end has closed, or does not read."""
        self.socket.settimeout(SEND_SECONDS)
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float) -> list[JsonObject] | None:
        """Returns the messages that arrive within `seconds`, or None if the other end has closed.

        Raises ValueError for bytes that are not valid messages.
        """
        # Messages that arrived together with an earlier one come first.
        if self.pending:
            messages, self.pending = self.pending, []
            return messages
        # A timeout of 0 would make the socket non-blocking.
        self.socket.settimeout(max(seconds, 1e-3))
        try:
            block = self.socket.recv(LONGEST_LINE)
        except TimeoutError:
            return []
        except OSError:
            return None
        if not block:
            return None
        # The last element is the unfinished line, or empty.
        *lines, self.received = (self.received + block).split(b"\n")
        if len(self.received) > LONGEST_LINE:
            raise ValueError("a line without an end")
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("no message")
        return messages


class Waiting:
    """Prints the missing processes: first after two seconds, then at growing intervals."""

    def __init__(self, address: str, seconds: float) -> None:
        self.address = address
        self.seconds = seconds
        self.started = time.monotonic()
        self._next_notice = FIRST_NOTICE

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    @property
    def is_over(self) -> bool:
        return self.elapsed > self.seconds

    def notice(self, missing: str) -> None:
        """Prints a line if one is due."""
        if self.elapsed < self._next_notice:
            return
        so_far = f", {self.elapsed:.0f} s so far" if self._next_notice > FIRST_NOTICE else ""
        terminal.write(
            f"waiting for {missing} at {self.address}, up to {self.seconds:g} s{so_far}", sys.stderr
        )
        # Notices come after 2, 10, 20, 40 and 80 s, and then once a minute.
        self._next_notice = max(10.0, 2 * self._next_notice)
        if self._next_notice > 80:
            self._next_notice = self.elapsed + 60


def meet(address: str, num_processes: int, index: int, seconds: float) -> list[Connection]:
    """Returns connections to the other processes: process 0 has one to each, the others to it.

    `address` is "HOST:PORT" of process 0. Raises UserError if the processes have not met within
    `seconds`, or were started with different numbers.
    """
    host, port = split_address(address)
    if not 0 <= index < num_processes:
        raise UserError(
            f"--process_id={index} must be from 0 to {num_processes - 1}: --num_processes is "
            f"{num_processes}"
        )
    waiting = Waiting(address, seconds)
    if index == 0:
        return _meet_as_first(port, num_processes, waiting)
    return [_meet_first(host, port, num_processes, index, waiting)]


def split_address(address: str) -> tuple[str, int]:
    """Returns the host and the port of "HOST:PORT", where HOST may be "[IPv6]"."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UserError(f"--coordinator={shown(address)}: give HOST:PORT of process 0")
    return host.strip("[]"), int(port)


def process_name(index: int, num_processes: int, hello: JsonObject) -> str:
    """Returns the name in messages of a process that has sent its hello."""
    where = f"{shown(hello.get('host'))}, pid {shown(hello.get('pid'))}"
    return f"host {index} of {num_processes} ({where})"


def hello_of(index: int, num_processes: int) -> JsonObject:
    """Returns the first message of a process."""
    return {
        "index": index,
        "num_processes": num_processes,
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }


# -- Process 0 -------------------------------------------------------------------------------------


def _meet_as_first(port: int, num_processes: int, waiting: Waiting) -> list[Connection]:
    """Waits for all other processes, then sends them "go"."""
    met: dict[int, Connection] = {}
    try:
        with _listen(port, waiting) as server:
            server.settimeout(RETRY_SECONDS)
            while len(met) < num_processes - 1:
                _accept_process(server, num_processes, met, waiting)
        for connection in met.values():
            _send_if_open(connection, {"go": hello_of(0, num_processes)})
    except BaseException:
        # A closed connection makes the other processes ask again instead of waiting for "go".
        for connection in met.values():
            connection.socket.close()
        raise
    return [met[index] for index in sorted(met)]


def _accept_process(
    server: socket.socket,
    num_processes: int,
    met: dict[int, Connection],
    waiting: Waiting,
) -> None:
    """Waits briefly for one more process, and adds it to `met`."""
    missing = [index for index in range(1, num_processes) if index not in met]
    if waiting.is_over:
        raise UserError(_timeout_message(missing, num_processes, waiting))
    waiting.notice(_name_processes(missing, num_processes))
    _remove_departed(met)
    try:
        accepted, _ = server.accept()
    except OSError:  # no connection within the time limit
        return
    if connection := _receive_hello(accepted, num_processes, met):
        met[connection.index] = connection


def _listen(port: int, waiting: Waiting) -> socket.socket:
    """Returns a socket that listens at `port` on all addresses of this machine."""
    while True:
        try:
            # One socket serves IPv4 and IPv6, if the system supports that.
            if socket.has_dualstack_ipv6():
                return socket.create_server(
                    ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
                )
            return socket.create_server(("", port), backlog=1024)
        except OSError as error:
            # The previous process of this run may not have released the port yet.
            if waiting.elapsed > min(BIND_SECONDS, waiting.seconds):
                raise UserError(
                    f"--coordinator={waiting.address}: {error.strerror or error}: end the process "
                    "that has the port, or give another port on all hosts"
                ) from error
            time.sleep(RETRY_SECONDS)


def _receive_hello(
    accepted: socket.socket,
    num_processes: int,
    met: dict[int, Connection],
) -> Connection | None:
    """Returns the connection of a process that sends a valid hello; None for any other client.

    Any program may connect to an open port. Raises UserError for a process of another run.
    """
    connection = Connection(accepted, -1, "")
    deadline = time.monotonic() + HELLO_SECONDS
    messages: list[JsonObject] | None = []
    try:
        while not messages and messages is not None and time.monotonic() < deadline:
            messages = connection.receive(RETRY_SECONDS)
    except ValueError:
        messages = None
    # A port scanner or a health check sends no hello, and is ignored.
    hello = messages[0] if messages else {}
    index = hello.get("index")
    if not isinstance(index, int):
        accepted.close()
        return None
    mistake = ""
    if hello.get("num_processes") != num_processes:
        mistake = (
            f"process 0 has --num_processes={num_processes} and process {index} has "
            f"--num_processes={shown(hello.get('num_processes'))}: start the same command on all "
            "hosts"
        )
    elif index in met or not 0 < index < num_processes:
        mistake = f"two processes have --process_id={index}: give each host another"
    if mistake:
        # All processes end with the same message.
        for other in (connection, *met.values()):
            _send_if_open(other, {"end": mistake})
        accepted.close()
        raise UserError(mistake)
    connection.index = index
    connection.name = process_name(index, num_processes, hello)
    return connection


def _remove_departed(met: dict[int, Connection]) -> None:
    """Removes processes that ended while they waited. They may be started again."""
    for index, connection in list(met.items()):
        try:
            # `receive` returns None once the other end has closed.
            has_left = connection.receive(0) is None
        except ValueError:
            has_left = True
        if has_left:
            terminal.write(f"{connection.name} has left before the start", sys.stderr)
            connection.socket.close()
            del met[index]


def _send_if_open(connection: Connection, message: JsonObject) -> None:
    with contextlib.suppress(OSError):
        connection.send(message)


# -- The other processes ---------------------------------------------------------------------------


def _meet_first(
    host: str,
    port: int,
    num_processes: int,
    index: int,
    waiting: Waiting,
) -> Connection:
    """Connects to process 0, and waits until all processes have joined."""
    reason = ""
    while not waiting.is_over:
        try:
            opened = socket.create_connection((host, port), HELLO_SECONDS)
        except OSError as error:
            reason = error.strerror or str(error)
            waiting.notice(f"process 0 of {num_processes}")
            time.sleep(RETRY_SECONDS)
            continue
        connection = Connection(opened, 0, "")
        _send_if_open(connection, hello_of(index, num_processes))
        answer = _wait_for_go(connection, num_processes, waiting)
        if "go" in answer:
            connection.name = process_name(0, num_processes, answer["go"])
            return connection
        connection.socket.close()
        if "end" in answer:
            raise UserError(one_line(answer["end"]))
        # The port may still belong to the previous run or to another program, and process 0 may
        # have ended while it waited: retry.
        reason = "what answers there is not process 0 of this run"
        time.sleep(RETRY_SECONDS)
    raise UserError(_timeout_message([0], num_processes, waiting, reason))


def _wait_for_go(connection: Connection, num_processes: int, waiting: Waiting) -> JsonObject:
    """Returns the answer of process 0; {} if it does not answer in time, or ends."""
    while not waiting.is_over:
        waiting.notice(f"the other processes of {num_processes}, together with process 0")
        try:
            messages = connection.receive(RETRY_SECONDS)
        except ValueError:
            return {}
        if messages is None:
            return {}
        if messages:
            # `watch_peers` reads messages that arrived together with the answer.
            connection.pending = messages[1:]
            return messages[0]
    return {}


# -- Messages --------------------------------------------------------------------------------------


def one_line(text: object) -> str:
    """Returns a text from another process as one printable line of bounded length."""
    line = " ".join(str(text).split())
    return "".join(filter(str.isprintable, line))[:LONGEST_TEXT]


def _name_processes(missing: Sequence[int], num_processes: int) -> str:
    """Returns "process 1 of 2", or "processes 1, 3 of 4"."""
    numbers = ", ".join(str(index) for index in missing[:8])
    ellipsis = ", ..." if len(missing) > 8 else ""
    return f"process{'es' if len(missing) > 1 else ''} {numbers}{ellipsis} of {num_processes}"


def _timeout_message(
    missing: Sequence[int],
    num_processes: int,
    waiting: Waiting,
    reason: str = "",
) -> str:
    """Returns the error message of a process that has waited for the time limit."""
    cause = f" ({reason})" if reason else ""
    return (
        f"{_name_processes(missing, num_processes)} did not join at {waiting.address} within "
        f"{waiting.seconds:g} s{cause}: check its output and that every host reaches "
        "this address, and start the same command on all hosts; --join_seconds waits longer"
    )
