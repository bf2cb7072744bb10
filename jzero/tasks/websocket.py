"""A client of the WebSocket protocol (RFC 6455): text messages both ways, and no more.

    socket = await connect("ws://localhost:8000/ws")
    await socket.send("text")
    text = await socket.receive()
    await socket.close()

It belongs to an event loop and needs no package. Extensions and subprotocols are not asked for.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import os
import ssl
import struct
from typing import NamedTuple
from urllib.parse import urlsplit

MAX_MESSAGE = 100 * 2**20  # bytes
MAX_HEADERS = 100  # lines
CLOSE_SECONDS = 1.0  # for the server to say that it ends the connection, too
_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # of the protocol, section 1.3
_FINAL = 0x80  # the bit of a message's last frame
_MASKED = 0x80
_CONTINUATION, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
_NORMAL_CLOSURE = struct.pack(">H", 1000)


class WebSocketError(ConnectionError):
    """The server refused the connection, ended it, or broke the protocol."""


class _Frame(NamedTuple):
    kind: int
    is_final: bool
    payload: bytes


class WebSocket:
    """An open connection. One coroutine at a time may use it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, text: str) -> None:
        """Sends a message."""
        await self._send_frame(_TEXT, text.encode())

    async def receive(self) -> str:
        """Returns the next message.

        Raises:
            WebSocketError: the server has ended the connection.
        """
        parts: list[bytes] = []
        while True:
            frame = await self._receive_frame()
            if frame.kind == _CLOSE:
                reason = frame.payload[2:].decode(errors="replace")
                raise WebSocketError(f"the server ended the connection {reason}".rstrip())
            if frame.kind == _PING:
                await self._send_frame(_PONG, frame.payload)
            elif frame.kind in (_TEXT, _BINARY, _CONTINUATION):
                if (frame.kind == _CONTINUATION) != bool(parts):
                    raise WebSocketError("a message began in the middle of another")
                parts.append(frame.payload)
                if sum(map(len, parts)) > MAX_MESSAGE:
                    raise WebSocketError(f"a message is longer than {MAX_MESSAGE} bytes")
                if frame.is_final:
                    return b"".join(parts).decode()

    async def close(self) -> None:
        """Ends the connection, whatever state it is in."""
        with contextlib.suppress(OSError, TimeoutError):
            await self._send_frame(_CLOSE, _NORMAL_CLOSURE)
            await asyncio.wait_for(self._receive_close(), CLOSE_SECONDS)
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _receive_close(self) -> None:
        while (await self._receive_frame()).kind != _CLOSE:
            pass

    async def _send_frame(self, kind: int, payload: bytes) -> None:
        """Sends a message in one frame. A client masks what it sends (section 5.3)."""
        length = len(payload)
        if length < 126:
            head = struct.pack(">BB", _FINAL | kind, _MASKED | length)
        elif length < 1 << 16:
            head = struct.pack(">BBH", _FINAL | kind, _MASKED | 126, length)
        else:
            head = struct.pack(">BBQ", _FINAL | kind, _MASKED | 127, length)
        mask = os.urandom(4)
        self._writer.write(head + mask + _masked(payload, mask))
        await self._writer.drain()

    async def _receive_frame(self) -> _Frame:
        try:
            first, second = await self._reader.readexactly(2)
            length = second & 0x7F
            if length == 126:
                (length,) = struct.unpack(">H", await self._reader.readexactly(2))
            elif length == 127:
                (length,) = struct.unpack(">Q", await self._reader.readexactly(8))
            if second & _MASKED or length > MAX_MESSAGE:
                raise WebSocketError("the server sent a frame that is masked or too long")
            payload = await self._reader.readexactly(length)
        except asyncio.IncompleteReadError:
            raise WebSocketError("the server closed the connection") from None
        return _Frame(first & 0x0F, bool(first & _FINAL), payload)


def _masked(payload: bytes, mask: bytes) -> bytes:
    """Returns payload XOR mask, which is repeated; as one long number, because that is fast."""
    length = len(payload)
    repeated = (mask * (length // 4 + 1))[:length]
    number = int.from_bytes(payload, "big") ^ int.from_bytes(repeated, "big")
    return number.to_bytes(length, "big")


async def connect(url: str) -> WebSocket:
    """Opens a connection to "ws://HOST:PORT/PATH", or encrypted to "wss://...".

    Raises:
        WebSocketError: the server speaks no WebSocket, or refuses.
        OSError: there is no such server.
    """
    parts = urlsplit(url)
    is_encrypted = parts.scheme == "wss"
    host = parts.hostname or ""
    reader, writer = await asyncio.open_connection(
        host,
        parts.port or (443 if is_encrypted else 80),
        ssl=ssl.create_default_context() if is_encrypted else None,
    )
    try:
        await _shake_hands(reader, writer, parts.netloc, parts.path or "/", parts.query)
    except BaseException:  # a time limit cancels it
        writer.close()
        raise
    return WebSocket(reader, writer)


async def _shake_hands(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, path: str, query: str
) -> None:
    """Asks a server of HTTP to speak WebSocket (section 4.1)."""
    key = base64.b64encode(os.urandom(16)).decode()
    lines = [
        f"GET {path}?{query} HTTP/1.1" if query else f"GET {path} HTTP/1.1",
        f"Host: {host.rpartition('@')[2]}",
        "Upgrade: websocket",
        "Connection: Upgrade",
        f"Sec-WebSocket-Key: {key}",
        "Sec-WebSocket-Version: 13",
    ]
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
    await writer.drain()
    status = (await reader.readline()).decode(errors="replace").strip()
    headers: dict[str, str] = {}
    for _ in range(MAX_HEADERS):
        line = (await reader.readline()).decode(errors="replace").strip()
        if not line:
            break
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    if status.split(" ")[1:2] != ["101"]:
        raise WebSocketError(f"the server did not begin to speak WebSocket: {status or 'nothing'}")
    digest = hashlib.sha1((key + _GUID).encode(), usedforsecurity=False).digest()
    if headers.get("sec-websocket-accept") != base64.b64encode(digest).decode():
        raise WebSocketError("the server's Sec-WebSocket-Accept is wrong")
