"""Messages between the pool and a grader process: a length in 8 bytes, then that many bytes.

User-defined code runs in the process at the other end, so the pool reads with a deadline and a
bound. A length that is too large, an incomplete message and malformed bytes raise errors; the pool
never waits forever.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time

# The largest message that the pool reads, in bytes. `task.max_reply_bytes` is at most 8 MiB; a
# reply of control characters takes six times as many bytes in JSON.
MAX_MESSAGE = 64 << 20
_LENGTH = struct.Struct("!Q")
_CHUNK = 1 << 20


class BadMessageError(Exception):
    """A message does not have the form that a grader process sends."""


class Pipe:
    """One end of a pipe."""

    def __init__(self, end: socket.socket, max_bytes: int | None = None) -> None:
        """Messages longer than `max_bytes` raise BadMessageError in `receive`."""
        self._socket = end
        self._max_bytes = max_bytes

    def send(self, message: bytes, seconds: float | None = None) -> None:
        """Sends a message.

        Raises:
            TimeoutError: the other end has not read it within `seconds`.
            OSError: the other end is closed.
        """
        self._socket.settimeout(seconds)
        self._socket.sendall(_LENGTH.pack(len(message)))
        self._socket.sendall(message)

    def receive(self, seconds: float | None = None) -> bytes:
        """Returns the next message.

        Raises:
            TimeoutError: the whole message has not arrived within `seconds`.
            EOFError, OSError: the other end is closed.
            BadMessageError: the message is longer than `max_bytes`.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        [length] = _LENGTH.unpack(self._receive(_LENGTH.size, deadline))
        if self._max_bytes is not None and length > self._max_bytes:
            raise BadMessageError(f"a message of {length:,} bytes")
        return self._receive(length, deadline)

    def close(self) -> None:
        """Closes this end."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def _receive(self, count: int, deadline: float | None) -> bytes:
        received = bytearray()
        while len(received) < count:
            if deadline is not None:
                # After the deadline, still takes data that has already arrived.
                self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            chunk = self._socket.recv(min(count - len(received), _CHUNK))
            if not chunk:
                raise EOFError
            received += chunk
            if deadline is not None and time.monotonic() > deadline and len(received) < count:
                raise TimeoutError
        return bytes(received)
