"""How the server begins and ends: it says when it listens, and lets requests finish at the end."""

import asyncio
import socket
import time
from collections.abc import Callable

import uvicorn
from starlette.exceptions import HTTPException

from jzero.serving.connections import BoundedConfig
from jzero.serving.http import Server, overloaded

SECONDS_BETWEEN_LOOKS = 0.05  # whether there is a reason to end requests before the grace is over
SECONDS_TO_SAY_SO = 1.0  # for sending the reason to the clients whose requests are ended


class GracefulServer(uvicorn.Server):
    """uvicorn's server, whose requests may run on for `grace_seconds` after Ctrl-C or TERM.

    New connections and requests are refused meanwhile. uvicorn's own timeout would cut streams in
    the middle and print a traceback for each of them.
    """

    def __init__(
        self, configuration: BoundedConfig, server: Server, announce: Callable[[], None]
    ) -> None:
        """`announce` is called once connections are accepted."""
        super().__init__(configuration)
        self.grace_seconds = configuration.limits.grace_seconds
        self.server = server
        self.announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to accept connections."""
        await super().startup(sockets)
        self.announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuses what is new, and waits for what runs."""
        self.server.stop()
        ending = asyncio.create_task(self.end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def end_requests(self) -> None:
        """Ends the requests that still run after the grace, or that can never finish."""
        deadline = time.monotonic() + self.grace_seconds
        worker = self.server.worker
        while time.monotonic() < deadline and not worker.has_ended and not self.force_exit:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)

        if worker.has_ended:
            reason = HTTPException(500, "the server has failed: its log says why")
        else:
            reason = overloaded(503, "the server has ended before the answer was complete")
        self.server.end_replies(reason)
        await asyncio.sleep(SECONDS_TO_SAY_SO)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
