"""Messages between the client, the watchers and the programs of a sandbox.

A message is its length and then its bytes, usually JSON. Runs inside of the sandbox, and imports
only the standard library.
"""

import json
import socket
import struct
import time
from typing import Any

# The kinds of request. The server receives only one of these bytes with a socket. Everything else
# is sent through that socket to the processes that the server forks.
PROGRAM, SESSION = b"p", b"s"

MAX_BYTES = 1 << 32  # of a message, if the receiver has no smaller bound

_LENGTH = struct.Struct("!Q")
# `recv` allocates all the bytes that it is asked for, before any have arrived.
_CHUNK = 1 << 20

Message = dict[str, Any]  # a JSON object


def encode(message: Message) -> bytes:
    """Returns the content of a message."""
    return json.dumps(message).encode()


def send(connection: socket.socket, *messages: Message | bytes) -> None:
    """Sends messages, JSON or bytes, all at once. Raises OSError if the other side is gone."""
    parts = []
    for message in messages:
        content = message if isinstance(message, bytes) else encode(message)
        parts += [_LENGTH.pack(len(content)), content]
    connection.sendall(b"".join(parts))


def receive(
    connection: socket.socket,
    seconds: float | None = None,
    max_bytes: int = MAX_BYTES,
) -> Message:
    """Returns the next message.

    Args:
        seconds: the time limit for the whole message; None: no limit.
        max_bytes: the largest message that is read.

    Raises:
        EOFError: the other side is gone.
        TimeoutError: the message has not arrived within `seconds`.
        ValueError: the message is larger than `max_bytes`, or not JSON.
    """
    return json.loads(receive_bytes(connection, seconds, max_bytes))


def receive_bytes(
    connection: socket.socket,
    seconds: float | None = None,
    max_bytes: int = MAX_BYTES,
) -> bytes:
    """Returns the bytes of the next message, which need not be JSON; see `receive`."""
    deadline = None if seconds is None else time.monotonic() + seconds
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size, deadline))
    if length > max_bytes:
        raise ValueError(f"a message of {length} bytes exceeds the limit of {max_bytes}")
    return _read(connection, length, deadline)


def _read(connection: socket.socket, length: int, deadline: float | None) -> bytes:
    parts = []
    while length:
        if deadline is not None:
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0:
                raise TimeoutError
            connection.settimeout(seconds_left)
        part = connection.recv(min(length, _CHUNK))
        if not part:
            raise EOFError("the other side closed the connection")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
