"""Startup and shutdown of the server: announces its address, and drains requests at the end."""

import asyncio
import socket
import time
from collections.abc import Callable

import uvicorn
from starlette.exceptions import HTTPException

from jzero.serving.connections import BoundedConfig
from jzero.serving.http import Server, overloaded

# Polling interval for reasons to end requests before the grace period is over
POLL_SECONDS = 0.05
ERROR_FLUSH_SECONDS = 1.0  # for sending the error to the clients of aborted requests


class GracefulServer(uvicorn.Server):
    """A uvicorn server that drains requests for up to `grace_seconds` after Ctrl-C or TERM.

    New connections and requests are rejected meanwhile.
    """

    def __init__(
        self, configuration: BoundedConfig, server: Server, announce: Callable[[], None]
    ) -> None:
        """`announce` is called once connections are accepted."""
        # uvicorn's own timeout would cut streams in the middle and print a traceback for each of
        # them.
        super().__init__(configuration)
        self.grace_seconds = configuration.limits.grace_seconds
        self.server = server
        self.announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts accepting connections."""
        await super().startup(sockets)
        self.announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Rejects new requests and drains running ones."""
        self.server.stop()
        ending = asyncio.create_task(self.end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def end_requests(self) -> None:
        """Ends requests that run past the grace period, or that can never finish."""
        deadline = time.monotonic() + self.grace_seconds
        worker = self.server.worker
        while time.monotonic() < deadline and not worker.has_ended and not self.force_exit:
            await asyncio.sleep(POLL_SECONDS)

        if worker.has_ended:
            reason = HTTPException(500, "the server has failed: see its log")
        else:
            reason = overloaded(503, "the server has ended before the answer was complete")
        self.server.end_replies(reason)
        # The errors are written by the tasks of the replies, which need the event loop for that.
        await asyncio.sleep(ERROR_FLUSH_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
