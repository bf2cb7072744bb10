"""The end of `jzero serve`: requests that run may finish, and the others get an error."""

import asyncio
from collections.abc import Callable

from starlette.exceptions import HTTPException

from jzero.servers.connections import BoundedConfig
from jzero.servers.running import BoundedServer
from jzero.serving.http import Server, overloaded

ERROR_FLUSH_SECONDS = 1.0  # for sending the error to the clients of aborted requests


class GracefulServer(BoundedServer):
    """A bounded server whose decoding thread may fail, and whose streams end with an error."""

    def __init__(
        self, configuration: BoundedConfig, server: Server, announce: Callable[[], None]
    ) -> None:
        """`announce` is called once connections are accepted."""
        super().__init__(configuration, announce)
        self.server = server

    async def end_requests(self) -> None:
        """Rejects requests that arrive, and ends those that run past the grace period."""
        self.server.stop()
        await super().end_requests()

    def has_failed(self) -> bool:
        """Returns whether the decoding thread has ended, so that no request can finish."""
        return self.server.worker.has_ended

    async def send_errors(self) -> None:
        """Sends an error to the clients of running requests."""
        if self.server.worker.has_ended:
            reason = HTTPException(500, "the server has failed: see its log")
        else:
            reason = overloaded(503, "the server has ended before the answer was complete")
        self.server.end_replies(reason)
        # The errors are written by the tasks of the replies, which need the event loop for that.
        await asyncio.sleep(ERROR_FLUSH_SECONDS)
