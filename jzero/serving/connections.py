"""Connections that cannot be held open without use, and a server that ends in good order.

uvicorn bounds neither the time in which a request arrives nor the time in which an answer is read,
and its `limit_concurrency` counts requests, not sockets. Both are added to its protocol here.
"""

import asyncio
import math

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from jzero.serving.limits import Limits

RETRY_SECONDS = 5  # what Retry-After says: about as long as a few short answers take

TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\n"
    b"retry-after: %d\r\ncontent-length: 0\r\n\r\n" % RETRY_SECONDS
)


class BoundedConfig(uvicorn.Config):
    """uvicorn's configuration for an application whose connections have limits."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        super().__init__(
            app,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_level="warning",
            timeout_keep_alive=math.ceil(limits.idle_seconds),
        )
        self.limits = limits


class BoundedProtocol(H11Protocol):
    """One connection. It is closed if its client is too slow to write or to read."""

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
        self.waits_since = 0.0  # when the wait for a whole request began, in the loop's seconds
        self.is_aborted = False

    @property
    def waits_for_request(self) -> bool:
        """Whether no request that has arrived in full is being answered."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    # -- what the event loop calls -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accepts a connection, at the cost of the oldest useless one if there are too many."""
        super().connection_made(transport)
        self.watch_request()
        if len(self.connections) > self.limits.max_connections:
            self.make_room()

    def data_received(self, data: bytes) -> None:
        """Takes bytes of a request. Further bytes do not extend the time that the request has."""
        super().data_received(data)
        self.watch_request()

    def on_response_complete(self) -> None:
        """Begins to wait for a further request."""
        self.waits_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Begins to wait for a client that does not read."""
        super().pause_writing()
        if self.reading_timer is None:
            self.reading_timer = self.loop.call_later(self.limits.idle_seconds, self.abort)

    def resume_writing(self) -> None:
        """Goes on: the client has read."""
        super().resume_writing()
        self.reading_timer = cancel_timer(self.reading_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        self.request_timer = cancel_timer(self.request_timer)
        self.reading_timer = cancel_timer(self.reading_timer)
        super().connection_lost(exc)

    # -- limits ------------------------------------------------------------------------------------

    def watch_request(self) -> None:
        """Starts the timer of a request whose first bytes are awaited, or stops it at its end."""
        if not self.waits_for_request:
            self.request_timer = cancel_timer(self.request_timer)
        elif self.request_timer is None and not self.transport.is_closing():
            self.waits_since = self.loop.time()
            self.request_timer = self.loop.call_later(
                self.limits.request_seconds, self.give_up_request
            )

    def give_up_request(self) -> None:
        """Ends a connection whose request has not arrived in time."""
        self.request_timer = None
        if not self.waits_for_request:
            return
        cycle = self.cycle
        is_answering = cycle and cycle.response_started and not cycle.response_complete
        if not is_answering:
            self.transport.write(TOO_SLOW)
        self.close_at_once()

    def timeout_keep_alive_handler(self) -> None:
        """Ends a connection whose client sends no further request."""
        super().timeout_keep_alive_handler()
        self.close_at_once()

    def make_room(self) -> None:
        """Closes the connection that has waited the longest for a whole request.

        If every connection has a request that is being answered, this one is refused.
        """
        useless = [
            other
            for other in self.connections
            if isinstance(other, BoundedProtocol)
            and other is not self
            and other.waits_for_request
            and not other.is_aborted
        ]
        if useless:
            min(useless, key=BoundedProtocol.waiting_since).abort()
            return
        self.transport.write(TOO_MANY)
        self.close_at_once()

    def waiting_since(self) -> float:
        """Returns when this connection began to wait for a whole request."""
        return self.waits_since

    def close_at_once(self) -> None:
        """Closes the connection, and does not wait for a client that does not read."""
        if self.transport.get_write_buffer_size():
            self.abort()
        else:
            self.transport.close()

    def abort(self) -> None:
        """Drops the connection and what it still has to send."""
        self.is_aborted = True
        self.transport.abort()


def cancel_timer(timer: asyncio.TimerHandle | None) -> None:
    """Stops a timer, if there is one. Returns None, the value of a timer that does not run."""
    if timer is not None:
        timer.cancel()
