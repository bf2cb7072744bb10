"""Extends uvicorn with connection limits, so that idle and slow clients cannot exhaust the server.

uvicorn bounds neither the time to receive a request nor the time to read an answer, and its
`limit_concurrency` counts requests, not sockets. The protocol class here adds both bounds.
"""

import asyncio
import math

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from jzero.serving.limits import Limits

RETRY_SECONDS = 5  # sent as Retry-After: about the duration of a few short answers

TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\n"
    b"retry-after: %d\r\ncontent-length: 0\r\n\r\n" % RETRY_SECONDS
)


class BoundedConfig(uvicorn.Config):
    """uvicorn's configuration for an application with limits on its connections."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        super().__init__(
            app,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_level="warning",
            # uvicorn takes whole seconds.
            timeout_keep_alive=math.ceil(limits.idle_seconds),
        )
        self.limits = limits


class BoundedProtocol(H11Protocol):
    """One connection. It is closed if its client writes or reads too slowly."""

    def __init__(
        self,
        config: BoundedConfig,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.limits = config.limits
        self.request_timer: asyncio.TimerHandle | None = None
        self.reading_timer: asyncio.TimerHandle | None = None
        self.waits_since = 0.0  # start of the wait for a complete request, in loop time
        self.is_aborted = False

    @property
    def waits_for_request(self) -> bool:
        """Whether the connection has no complete request that is still being answered."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    # -- callbacks of the event loop ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accepts a connection. Closes the longest-waiting idle one if there are too many."""
        super().connection_made(transport)
        self.watch_request()
        if len(self.connections) > self.limits.max_connections:
            self.make_room()

    def data_received(self, data: bytes) -> None:
        """Receives bytes of a request. Further bytes do not extend the request's deadline."""
        super().data_received(data)
        self.watch_request()

    def on_response_complete(self) -> None:
        """Starts waiting for the next request."""
        self.waits_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Starts the timer for a client that does not read."""
        super().pause_writing()
        if self.reading_timer is None:
            self.reading_timer = self.loop.call_later(self.limits.idle_seconds, self.abort)

    def resume_writing(self) -> None:
        """Stops the timer: the client has read."""
        super().resume_writing()
        self.reading_timer = cancel_timer(self.reading_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the timers of a closed connection."""
        self.request_timer = cancel_timer(self.request_timer)
        self.reading_timer = cancel_timer(self.reading_timer)
        super().connection_lost(exc)

    # -- limits ------------------------------------------------------------------------------------

    def watch_request(self) -> None:
        """Starts the deadline of the next request, or cancels it once the request is complete."""
        if not self.waits_for_request:
            self.request_timer = cancel_timer(self.request_timer)
        elif self.request_timer is None and not self.transport.is_closing():
            self.waits_since = self.loop.time()
            self.request_timer = self.loop.call_later(
                self.limits.request_seconds, self.give_up_request
            )

    def give_up_request(self) -> None:
        """Closes a connection if its request has not arrived in time."""
        self.request_timer = None
        if not self.waits_for_request:
            return
        cycle = self.cycle
        is_answering = cycle and cycle.response_started and not cycle.response_complete
        # In the middle of an answer, a status line would corrupt the stream.
        if not is_answering:
            self.transport.write(TOO_SLOW)
        self.close_at_once()

    def timeout_keep_alive_handler(self) -> None:
        """Closes a connection if its client sends no further request."""
        # super() closes gracefully, which would wait for a client that does not read.
        super().timeout_keep_alive_handler()
        self.close_at_once()

    def make_room(self) -> None:
        """Closes the connection that has waited longest for a complete request.

        If every connection has a request that is being answered, this connection is refused.
        """
        # Candidates have no complete request, so closing them loses no work.
        useless = [
            other
            for other in self.connections
            if isinstance(other, BoundedProtocol)
            and other is not self
            and other.waits_for_request
            # An aborted connection stays in the set until `connection_lost` is called.
            and not other.is_aborted
        ]
        if useless:
            min(useless, key=BoundedProtocol.waiting_since).abort()
            return
        self.transport.write(TOO_MANY)
        self.close_at_once()

    def waiting_since(self) -> float:
        """Returns when this connection started to wait for a complete request, in loop time."""
        return self.waits_since

    def close_at_once(self) -> None:
        """Closes the connection without waiting for a client that does not read."""
        # transport.close() would first flush the buffer, which such a client never empties.
        if self.transport.get_write_buffer_size():
            self.abort()
        else:
            self.transport.close()

    def abort(self) -> None:
        """Drops the connection and its unsent data."""
        self.is_aborted = True
        self.transport.abort()


def cancel_timer(timer: asyncio.TimerHandle | None) -> None:
    """Cancels a timer, if there is one. Returns None, to store in its place."""
    if timer is not None:
        timer.cancel()
