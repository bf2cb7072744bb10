"""Messages from process 0 to all others of a run, in order, without the devices.

    stream = open_stream()             # on every process, after `processes.join_processes`
    stream.publish({"do": "add", "values": np.arange(3)})     # process 0: a `Sender`
    message = stream.receive()                                # the others: a `Receiver`

A message is JSON whose values may also be arrays. A process that waits for one waits at a socket
and in no collective, so a run may be idle for as long as it likes. `peers` ends a process that
waits for a host that has ended.
"""

import contextlib
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

import jax.numpy as jnp
import numpy as np

from jzero.errors import UserError
from jzero.hosts import peers
from jzero.types import JsonValue

Value: TypeAlias = "JsonValue | np.ndarray | Sequence[Value] | Mapping[str, Value]"
Message: TypeAlias = Mapping[str, Value]

KEY = "jzero/broadcast"  # in the coordinator's key-value store: the port of process 0
OPEN_SECONDS = 300  # limit for all processes to connect
HELLO_SECONDS = 5.0  # limit for a new connection to send its token
CLOSE_SECONDS = 10.0  # limit for the others to close after the last message
TOKEN_BYTES = 16
SIZES = struct.Struct(">QQ")  # bytes of the JSON text, and of all arrays
ARRAY = "array"  # marks the place of an array in the JSON text


class StreamEndedError(Exception):
    """The other end has closed the connection before the last message."""


# -- messages as bytes -----------------------------------------------------------------------------


def to_bytes(message: Message) -> bytes:
    """Returns a message as bytes: their sizes, the JSON text, and the values of the arrays."""
    arrays: list[np.ndarray] = []

    def without_arrays(value: Value) -> JsonValue:
        if isinstance(value, np.ndarray):
            arrays.append(np.ascontiguousarray(value))
            # `ascontiguousarray` gives an array without axes one axis.
            return {ARRAY: [value.dtype.name, [*value.shape]]}
        if isinstance(value, Mapping):
            assert ARRAY not in value, "the name marks arrays"
            return {name: without_arrays(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [without_arrays(item) for item in value]
        return cast(JsonValue, value)

    text = json.dumps(without_arrays(message)).encode()
    parts = [array.tobytes() for array in arrays]
    return b"".join([SIZES.pack(len(text), sum(map(len, parts))), text, *parts])


def from_bytes(text: bytes, values: bytes) -> dict:
    """Returns the message of a JSON text and the values of its arrays. A tuple is a list."""
    position = 0

    def with_arrays(value: object) -> object:
        nonlocal position
        if isinstance(value, list):
            return [with_arrays(item) for item in value]
        if not isinstance(value, dict):
            return value
        if ARRAY not in value:
            return {name: with_arrays(item) for name, item in value.items()}
        name, shape = value[ARRAY]
        dtype = np.dtype(jnp.dtype(name))
        count = int(np.prod(shape))
        array = np.frombuffer(values, dtype, count, position)
        position += array.nbytes
        return array.reshape(shape)

    return cast(dict, with_arrays(json.loads(text)))


# -- process 0 -------------------------------------------------------------------------------------


class Sender:
    """The end of process 0."""

    def __init__(self, connections: Sequence[socket.socket]) -> None:
        self.connections = connections

    def publish(self, message: Message) -> None:
        """Sends a message to all other processes. Returns once the system has taken it."""
        data = to_bytes(message)
        for connection in self.connections:
            try:
                connection.sendall(data)
            except OSError as error:
                raise StreamEndedError("another host has closed its connection") from error

    def close(self) -> None:
        """Closes the connections once the others have, at most CLOSE_SECONDS later."""
        deadline = time.monotonic() + CLOSE_SECONDS
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.settimeout(max(deadline - time.monotonic(), 1e-3))
                connection.recv(1)  # the others send nothing
            connection.close()


class Receiver:
    """The end of every other process."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def receive(self) -> dict:
        """Returns the next message. Waits for it without a limit: see `peers`."""
        text_size, values_size = SIZES.unpack(self._read(SIZES.size))
        text = self._read(text_size)
        return from_bytes(text, self._read(values_size))

    def _read(self, count: int) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            try:
                number = self.connection.recv_into(view)
            except OSError as error:
                raise StreamEndedError("process 0 has closed its connection") from error
            if not number:
                raise StreamEndedError("process 0 has closed its connection")
            view = view[number:]
        return bytes(data)

    def close(self) -> None:
        """Tells process 0 that the last message has arrived."""
        self.connection.close()


# -- the start -------------------------------------------------------------------------------------


def open_stream() -> Sender | Receiver:
    """Returns the stream of a run with several processes. Every process calls this once.

    Raises UserError if the processes have not connected within OPEN_SECONDS.
    """
    link = peers.LINK
    assert link is not None, "a run with one process has no stream"
    return _open_sender(link) if link.index == 0 else _open_receiver(link)


def _open_sender(link: peers.Link) -> Sender:
    token = secrets.token_hex(TOKEN_BYTES)
    connections: list[socket.socket] = []
    deadline = time.monotonic() + OPEN_SECONDS
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    dualstack = family == socket.AF_INET6
    with socket.create_server(("", 0), family=family, dualstack_ipv6=dualstack) as server:
        port = server.getsockname()[1]
        peers.PEERS.client.key_value_set(KEY, json.dumps({"port": port, "token": token}))
        while len(connections) < link.num_processes - 1:
            server.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                raise UserError(
                    f"{link.num_processes - 1 - len(connections)} of {link.num_processes - 1} "
                    f"other hosts have not connected to port {port} of host 0 within "
                    f"{OPEN_SECONDS} s: hosts must reach all ports of each other"
                ) from None
            if _has_token(connection, token):
                connection.settimeout(None)
                connections.append(connection)
            else:  # any program may connect to an open port
                connection.close()
    for connection in connections:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Sender(connections)


def _has_token(connection: socket.socket, token: str) -> bool:
    """Whether a new connection sends the token, which only processes of the run know."""
    connection.settimeout(HELLO_SECONDS)
    received = b""
    with contextlib.suppress(OSError):
        while len(received) < len(token):
            block = connection.recv(len(token) - len(received))
            if not block:
                break
            received += block
    return hmac.compare_digest(received, token.encode())


def _open_receiver(link: peers.Link) -> Receiver:
    try:
        text = peers.PEERS.client.blocking_key_value_get(KEY, OPEN_SECONDS * 1000)
    except Exception as error:
        raise UserError(f"host 0 has opened no port within {OPEN_SECONDS} s") from error
    opened = json.loads(text)
    # The address by which this host reaches process 0. IPv6 has two further numbers.
    known = link.connections[0].socket
    address, _, *rest = known.getpeername()
    connection = socket.socket(known.family)
    connection.settimeout(OPEN_SECONDS)
    try:
        connection.connect((address, opened["port"], *rest))
        connection.sendall(opened["token"].encode())
    except OSError as error:
        raise UserError(
            f"host 0 cannot be reached at {address}, port {opened['port']} ({error}): hosts must "
            "reach all ports of each other"
        ) from error
    connection.settimeout(None)
    return Receiver(connection)
