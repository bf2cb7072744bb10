"""Messages between the client and the server of a sandbox: JSON with its length in front.

Runs inside of the sandbox, and imports the standard library alone.
"""

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!Q")
_CHUNK = 1 << 20

Message = dict[str, Any]  # a JSON object


def encode(message: Message) -> bytes:
    """Returns the content of a message."""
    return json.dumps(message).encode()


def send(connection: socket.socket, message: Message) -> None:
    """Sends a message. Raises OSError if the other side is gone."""
    content = encode(message)
    connection.sendall(_LENGTH.pack(len(content)) + content)


def receive(connection: socket.socket) -> Message:
    """Returns the next message.

    Raises:
        EOFError: the other side is gone.
        TimeoutError: the connection has a time limit, and nothing came.
    """
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    return json.loads(_read(connection, length))


def _read(connection: socket.socket, length: int) -> bytes:
    parts = []
    while length:
        part = connection.recv(min(length, _CHUNK))
        if not part:
            raise EOFError("the other side closed the connection")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
