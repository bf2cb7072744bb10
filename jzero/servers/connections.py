"""Extends uvicorn with connection limits, so that idle and slow clients cannot exhaust the server.

uvicorn bounds neither the time to receive a request nor the time to read an answer, and its
`limit_concurrency` counts requests, not sockets. The protocol class here adds these bounds.

One deadline runs from the first moment of a connection, or of its next request, to the last byte
of the headers, and one to the last byte of the body; bytes in between do not extend them. If there
are too many connections, or too many of one client address, the one that has waited longest for a
complete request is closed. An application calls `admit` once it has checked the key of a request:
such a request is closed for others only if its client has stalled.
"""

import asyncio
import ipaddress
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import h11
import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from jzero.servers import sockets
from jzero.servers.limits import MAX_HEADER_BYTES, ConnectionLimits
from jzero.servers.rules import CheckedApp, Rules

RETRY_SECONDS = 5  # sent as Retry-After: about the duration of a few short answers
PROGRESS_BYTES = 1 << 16  # of a body; fewer bytes than these are no progress
STALL_SECONDS = 1.0  # without progress, after which a client makes room for others
# Chunks of a body that is sent in chunks. Smaller ones cost more time than their bytes.
FREE_CHUNKS = 1000
LEAST_CHUNK_BYTES = 64  # of each chunk, on average
LINGER_SECONDS = 2.0  # for the rest of a body that has been answered already, as with 401

TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\n"
    b"retry-after: %d\r\ncontent-length: 0\r\n\r\n" % RETRY_SECONDS
)


class BoundedConfig(uvicorn.Config):
    """uvicorn's configuration for an application with limits and rules."""

    def __init__(self, app: ASGIApp, limits: ConnectionLimits, rules: Rules) -> None:
        self.checked_app = CheckedApp(app, rules)
        super().__init__(
            self.checked_app,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            # The loggers of the process stay as they are. Only errors of the application are
            # reported: clients could fill a log with warnings.
            log_config=None,
            log_level="error",
            access_log=False,
            # uvicorn takes whole seconds.
            timeout_keep_alive=math.ceil(limits.idle_seconds),
            server_header=False,
            proxy_headers=False,
        )
        # Every connection takes a file descriptor, and the number of these is limited.
        allowed = sockets.allow_connections(limits.max_connections)
        self.limits = replace(limits, max_connections=allowed)
        self.open_connections = OpenConnections()


class OpenConnections:
    """Counts the connections of a server that have not been closed, also by client address."""

    def __init__(self) -> None:
        self.total = 0
        self.by_address: Counter[str] = Counter()

    def add(self, address: str) -> None:
        """Counts a connection."""
        self.total += 1
        self.by_address[address] += 1

    def remove(self, address: str) -> None:
        """Forgets a connection."""
        self.total -= 1
        self.by_address[address] -= 1
        if not self.by_address[address]:
            del self.by_address[address]


class ChunkBoundedConnection(h11.Connection):
    """The state of HTTP of a connection, without bodies of millions of tiny chunks."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)
        self.num_chunks = 0
        self.num_bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Returns what has been received. Raises RemoteProtocolError for what is not HTTP."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.num_chunks = 0
            self.num_bytes = 0
        elif isinstance(event, h11.Data):
            self.num_chunks += 1
            self.num_bytes += len(event.data)
            if self.num_chunks > FREE_CHUNKS + self.num_bytes // LEAST_CHUNK_BYTES:
                raise h11.RemoteProtocolError("the chunks of the body are too small")
        return event


class BoundedProtocol(H11Protocol):
    """One connection. It is closed if its client writes or reads too slowly."""

    def __init__(
        self,
        config: BoundedConfig,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        # The application finds its connection in the state of a request: see `admit`.
        super().__init__(config, server_state, app_state | {"connection": self}, _loop)
        self.conn = ChunkBoundedConnection()
        self.limits = config.limits
        self.open_connections = config.open_connections
        self.address = ""
        self.request_timer: asyncio.TimerHandle | None = None
        self.reading_timer: asyncio.TimerHandle | None = None
        self.linger_timer: asyncio.TimerHandle | None = None
        self.waits_since = 0.0  # start of the wait for a complete request, in loop time
        self.progress_at = 0.0  # last progress of the client, in loop time
        self.progress_bytes = 0  # received since then
        self.is_admitted = False
        self.is_closed = False  # by the server, or by the client

    @property
    def waits_for_request(self) -> bool:
        """Whether the connection has no complete request that is still being answered."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    @property
    def stalled_since(self) -> float:
        """The last progress of a client that has to send or to read; infinity for others."""
        if self.waits_for_request or self.reading_timer is not None:
            return self.progress_at
        return math.inf

    # -- callbacks of the event loop ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accepts a connection. Closes the longest-waiting idle one if there are too many."""
        super().connection_made(transport)
        self.address = client_address(self.client)
        self.open_connections.add(self.address)
        self.watch_request()
        if self.open_connections.by_address[self.address] > self.limits.max_address_connections:
            self.make_room(self.address)
        elif self.open_connections.total > self.limits.max_connections:
            self.make_room()

    def data_received(self, data: bytes) -> None:
        """Receives bytes of a request. Further bytes do not extend the request's deadline."""
        self.progress_bytes += len(data)
        if self.progress_bytes >= PROGRESS_BYTES:
            self.note_progress()
        super().data_received(data)
        self.watch_request()

    def on_response_complete(self) -> None:
        """Starts waiting for the next request."""
        self.is_admitted = False
        self.waits_since = self.loop.time()
        if self.conn.their_state is h11.SEND_BODY:
            self.linger_timer = cancel_timer(self.linger_timer)
            self.linger_timer = self.loop.call_later(LINGER_SECONDS, self.end_linger)
        super().on_response_complete()
        if not self.cycle.response_complete:
            # The headers of the next request had arrived already, and perhaps not its body.
            self.watch_request()

    def pause_writing(self) -> None:
        """Starts the timer for a client that does not read."""
        super().pause_writing()
        if self.reading_timer is None:
            self.note_progress()
            self.reading_timer = self.loop.call_later(self.limits.idle_seconds, self.abort)

    def resume_writing(self) -> None:
        """Stops the timer: the client has read."""
        super().resume_writing()
        self.reading_timer = cancel_timer(self.reading_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the timers of a closed connection."""
        self.request_timer = cancel_timer(self.request_timer)
        self.reading_timer = cancel_timer(self.reading_timer)
        self.linger_timer = cancel_timer(self.linger_timer)
        self.note_closed()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are not HTTP, and closes the connection."""
        if self.cycle is not None and not self.cycle.response_complete:
            # The application must not answer as well.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        # In the middle of an answer, or after it, h11 sends no further status line.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        self.close_at_once()

    # -- limits ------------------------------------------------------------------------------------

    def note_progress(self) -> None:
        """Records that the client has sent or read something that counts."""
        self.progress_at = self.loop.time()
        self.progress_bytes = 0

    def watch_request(self) -> None:
        """Starts the deadline of the next request, or cancels it once the request is complete."""
        if not self.waits_for_request:
            self.request_timer = cancel_timer(self.request_timer)
        elif self.request_timer is None and not self.transport.is_closing():
            self.waits_since = self.loop.time()
            self.note_progress()
            self.request_timer = self.loop.call_later(
                self.limits.header_seconds, self.give_up_request
            )

    def give_up_request(self) -> None:
        """Closes a connection if its request has not arrived in time."""
        self.request_timer = None
        if not self.waits_for_request:
            return
        cycle = self.cycle
        has_headers = cycle is not None and not cycle.response_complete
        seconds_left = self.waits_since + self.limits.request_seconds - self.loop.time()
        # The clock of the loop has a resolution of about a millisecond.
        if has_headers and seconds_left > 0.001:
            self.request_timer = self.loop.call_later(seconds_left, self.give_up_request)
            return
        # In the middle of an answer, a status line would corrupt the stream.
        if not (has_headers and cycle.response_started):
            self.transport.write(TOO_SLOW)
        self.close_at_once()

    def end_linger(self) -> None:
        """Closes a connection that still sends the body of a request that has been answered."""
        if self.cycle.response_complete and self.conn.their_state is h11.SEND_BODY:
            self.close_at_once()

    def timeout_keep_alive_handler(self) -> None:
        """Closes a connection if its client sends no further request."""
        # super() closes gracefully, which would wait for a client that does not read.
        super().timeout_keep_alive_handler()
        self.close_at_once()

    def make_room(self, address: str | None = None) -> None:
        """Closes another connection, of one client address if it is given.

        The first choice is the one that has waited longest for a complete request that has not
        been admitted, and the second one the client that has stalled longest. If there is neither,
        this connection is refused.
        """
        others: list[BoundedProtocol] = []
        for other in self.connections:
            # A closed connection stays in the set until `connection_lost` is called.
            if not isinstance(other, BoundedProtocol) or other is self or other.is_closed:
                continue
            if address is None or other.address == address:
                others.append(other)
        # Closing them loses no work.
        useless = [other for other in others if other.waits_for_request and not other.is_admitted]
        if useless:
            min(useless, key=lambda one: one.waits_since).abort()
            return
        stalled = stalled_longest(others, self.loop.time() - STALL_SECONDS)
        if stalled is not None:
            stalled.abort()
            return
        self.transport.write(TOO_MANY)
        self.close_at_once()

    def close_at_once(self) -> None:
        """Closes the connection without waiting for a client that does not read."""
        # transport.close() would first flush the buffer, which such a client never empties.
        if self.transport.get_write_buffer_size():
            self.abort()
        else:
            self.note_closed()
            self.transport.close()

    def abort(self) -> None:
        """Drops the connection and its unsent data."""
        self.note_closed()
        self.transport.abort()

    def note_closed(self) -> None:
        """Stops counting the connection, at once and once."""
        if not self.is_closed:
            self.is_closed = True
            self.open_connections.remove(self.address)


def admit(scope: Scope) -> None:
    """Marks a request whose key is right: connections of unknown clients make room before it."""
    connection = connection_of(scope)
    if connection is not None:
        connection.is_admitted = True


def connection_of(scope: Scope) -> BoundedProtocol | None:
    """Returns the connection of a request; None under another server, such as that of a test."""
    connection = scope.get("state", {}).get("connection")
    return connection if isinstance(connection, BoundedProtocol) else None


def stalled_longest(
    connections: Iterable[BoundedProtocol], before: float
) -> BoundedProtocol | None:
    """Returns the connection without progress for the longest time, if not since `before`."""
    candidates = [one for one in connections if one.stalled_since < before]
    return min(candidates, key=lambda one: one.stalled_since, default=None)


def client_address(client: tuple[str, int] | None) -> str:
    """Returns the address of a client that its connections are counted by.

    A client with IPv6 has a network of 64 bits, and so any number of addresses.
    """
    if client is None:
        return ""
    try:
        address = ipaddress.ip_address(client[0].partition("%")[0])
    except ValueError:
        return client[0]
    if isinstance(address, ipaddress.IPv6Address):
        return str(address.ipv4_mapped or address.exploded[:19])
    return str(address)


def cancel_timer(timer: asyncio.TimerHandle | None) -> None:
    """Cancels a timer, if there is one. Returns None, to store in its place."""
    if timer is not None:
        timer.cancel()
