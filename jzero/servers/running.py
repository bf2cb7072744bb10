"""Runs a server, and ends it in a bounded time whatever its clients do."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import uvicorn
from starlette.types import ASGIApp

from jzero.servers import sockets
from jzero.servers.connections import BoundedConfig, BoundedProtocol
from jzero.servers.limits import ConnectionLimits
from jzero.servers.rules import Rules

POLL_SECONDS = 0.05
# For clients that send or read slowly when the server ends. Others have `grace_seconds`.
LAST_SECONDS = 1.0
ABORT_SECONDS = 0.5  # for aborted requests to notice
END_SECONDS = 5.0  # for all of the end, of a server in another thread


class BoundedServer(uvicorn.Server):
    """A uvicorn server that drains requests for up to `grace_seconds` after Ctrl-C or TERM.

    New connections and requests are rejected meanwhile, and slow clients are disconnected.
    """

    def __init__(
        self, configuration: BoundedConfig, announce: Callable[[], None] = lambda: None
    ) -> None:
        """`announce` is called once connections are accepted."""
        # uvicorn's own timeout would cut streams in the middle and print a traceback for each of
        # them.
        super().__init__(configuration)
        self.checked_app = configuration.checked_app
        self.grace_seconds = configuration.limits.grace_seconds
        self.announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts accepting connections."""
        await super().startup(sockets)
        self.announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Rejects new requests and drains running ones."""
        self.checked_app.is_ending = True
        ending = asyncio.create_task(self.end_requests())
        dropping = asyncio.create_task(self.drop_slow_clients())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            dropping.cancel()

    async def drop_slow_clients(self) -> None:
        """Closes connections whose clients send or read slowly, until it is cancelled."""
        await asyncio.sleep(LAST_SECONDS)
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time() - LAST_SECONDS
            for connection in list(self.server_state.connections):
                if isinstance(connection, BoundedProtocol) and connection.stalled_since < before:
                    connection.abort()
            await asyncio.sleep(POLL_SECONDS)

    async def end_requests(self) -> None:
        """Ends requests that run past the grace period."""
        deadline = time.monotonic() + self.grace_seconds
        while time.monotonic() < deadline and not self.force_exit and not self.has_failed():
            await asyncio.sleep(POLL_SECONDS)
        await self.send_errors()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(ABORT_SECONDS)
        # uvicorn would wait for requests that wait for something else than their client.
        self.force_exit = True

    def has_failed(self) -> bool:
        """Returns whether no running request can be answered any more."""
        return False

    async def send_errors(self) -> None:
        """Sends errors to clients that have no complete answer at the end."""


class HttpServer:
    """An application at one address. It listens at once, and answers in `serve_forever`.

    with HttpServer(app, "127.0.0.1", 0, limits, rules) as server:
        threading.Thread(target=server.serve_forever).start()
        ...
        server.shutdown()
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        limits: ConnectionLimits,
        rules: Rules,
        setting: str = "",
    ) -> None:
        """Starts to listen. Port 0 takes a free one.

        setting: names the address in the UserError that is raised if it cannot be used.
        """
        self.bound = sockets.bind(host, port, setting=setting)
        sockets.listen(host, port, self.bound, setting)
        self.server_address: tuple[str, int] = self.bound[0].getsockname()[:2]
        self.url = sockets.url(self.bound[0])  # such as http://127.0.0.1:8000
        self.server = BoundedServer(BoundedConfig(app, limits, rules))
        self.is_started = False
        self.has_ended = threading.Event()

    def serve_forever(self) -> None:
        """Answers requests until `shutdown`. In the main thread Ctrl-C and TERM end it as well."""
        self.is_started = True
        try:
            self.server.run(self.bound)
        finally:
            self.has_ended.set()

    def shutdown(self) -> None:
        """Ends `serve_forever` in another thread, and waits for its end."""
        self.server.should_exit = True
        if self.is_started:
            self.has_ended.wait(END_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()
        close_all(self.bound)


def close_all(bound: Sequence[socket.socket]) -> None:
    """Closes sockets that may be closed already."""
    for opened in bound:
        with contextlib.suppress(OSError):
            opened.close()
