"""WebSocket client: sends and receives JSON messages, and treats the server as hostile.

    session = await Session.open("ws://localhost:8000/ws")
    reply = await session.ask({"type": "reset"})
    await session.close()

The package websockets implements the protocol. This module adds limits: deadlines for the handshake
and `close`, maximum bytes and frames of a message, and maximum bytes that the server has not read
yet. As in `jzero.http`, nothing is decompressed, redirects are refused, TLS certificates are
verified, and the environment's proxies apply.

`ask` has no time limit: the caller has to bound it, as `environments.asyncio_environments` does
with task.reward.seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json

import websockets
from websockets.asyncio.client import ClientConnection, connect
from websockets.protocol import Event

from jzero.errors import reason_of
from jzero.http import parse_json
from jzero.types import JsonValue

MAX_MESSAGE_BYTES = 4 << 20
MAX_FRAMES = 4096  # of a reply, including all pings and pongs before it
MAX_UNREAD_BYTES = 1 << 20  # of pongs and messages that the server has not read yet
SLICE_BYTES = 4096  # parsed at once; up to 2048 frames
OPEN_SECONDS = 30.0  # for connecting and the handshake
CLOSE_SECONDS = 1.0  # for the whole closing handshake


class WebSocketError(ConnectionError):
    """The server refused the connection, ended it, or broke the protocol."""


class _Connect(connect):
    """Opens a connection; a redirect is an error."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


class _Connection(ClientConnection):
    """A connection that is aborted at a flood of frames, before all of them are parsed."""

    num_frames = 0  # received since the last message was sent

    def process_event(self, event: Event) -> None:
        super().process_event(event)
        self.num_frames += 1

    def data_received(self, data: bytes) -> None:
        # The library parses all received bytes, and answers all pings, before anything else runs in
        # the event loop.
        for begin in range(0, len(data), SLICE_BYTES):
            super().data_received(data[begin : begin + SLICE_BYTES])
            unread = self.transport.get_write_buffer_size()
            if self.num_frames > MAX_FRAMES or unread > MAX_UNREAD_BYTES:
                self.transport.abort()
                return
        # After a close frame or a protocol error the library waits for the server to hang up.
        if self.protocol.close_expected():
            self.loop.call_later(CLOSE_SECONDS, self.transport.abort)


class Session:
    """A connection in the event loop that opened it. Only one coroutine may use it at a time."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection

    @classmethod
    async def open(cls, url: str, max_bytes: int = MAX_MESSAGE_BYTES) -> Session:
        """Opens a connection to "ws://HOST:PORT/PATH", or encrypted to "wss://...".

        Args:
            url: Address of the server.
            max_bytes: Limit of a message from the server.

        Raises:
            WebSocketError: the server does not support WebSocket, refuses, or redirects.
            OSError: there is no such server, or connecting takes more than OPEN_SECONDS.
        """
        try:
            connection = await _Connect(
                url,
                compression=None,  # nothing is decompressed
                open_timeout=OPEN_SECONDS,
                close_timeout=CLOSE_SECONDS,
                ping_interval=None,  # an environment may block the server's event loop for long
                max_size=max_bytes,
                create_connection=_Connection,
            )
        # UnicodeError: a host name that no resolver accepts. ImportError: a SOCKS proxy needs a
        # package.
        except (websockets.WebSocketException, EOFError, UnicodeError, ImportError) as error:
            raise WebSocketError(f"no WebSocket at {url}: {reason_of(error)}") from None
        assert isinstance(connection, _Connection), f"{connection=}"
        return cls(connection)

    async def ask(self, message: JsonValue) -> JsonValue:
        """Sends a message, and returns the next message from the server.

        Raises:
            WebSocketError: the server or the network ended the connection.
            ValueError: the reply is not JSON within the bounds of `http.parse_json`.
        """
        self._connection.num_frames = 0
        try:
            await self._connection.send(json.dumps(message))
            reply = await self._connection.recv()
        except websockets.ConnectionClosed as error:
            reason = reason_of(error)
            if self._connection.num_frames > MAX_FRAMES:
                reason = f"the server sent more than {MAX_FRAMES} frames in reply to a message"
            raise WebSocketError(f"the connection has ended: {reason}") from None
        if not isinstance(reply, str):
            raise ValueError("a binary message")
        return parse_json(reply.encode())

    async def close(self, farewell: JsonValue | None = None) -> None:
        """Ends the connection within CLOSE_SECONDS in every state. `farewell` is sent first."""
        try:
            with contextlib.suppress(OSError, TimeoutError, websockets.WebSocketException):
                async with asyncio.timeout(CLOSE_SECONDS):
                    if farewell is not None:
                        await self._connection.send(json.dumps(farewell))
                    await self._connection.close()
        finally:
            self._connection.transport.abort()  # has no effect on a closed connection
