"""Receives the bodies of requests on disk, within one budget of bytes for all of them.

A client that sends a large body slowly holds room on the disk instead of memory. If the budget is
spent, the client that has stalled longest makes room.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, cast

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jzero.servers.connections import (
    RETRY_SECONDS,
    STALL_SECONDS,
    BoundedProtocol,
    connection_of,
    stalled_longest,
)

PART_BYTES = 1 << 16  # written to the disk at once; smaller bodies stay in memory
THREADS = 4  # that write to the disk


class Bodies:
    """The bodies that a server is receiving, or holds."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: of all bodies."""
        self.max_bytes = max_bytes
        # Not the default threads of the event loop, whose end waits for them.
        self.threads = ThreadPoolExecutor(THREADS, "bodies")
        self.num_bytes = 0
        self.receiving: set[BoundedProtocol] = set()

    @contextlib.asynccontextmanager
    async def spool(self, request: Request, most: int, advice: str) -> AsyncIterator[BinaryIO]:
        """Yields the body of a request as a file, which is gone after the block.

        Raises as `receive` does.
        """
        with tempfile.SpooledTemporaryFile(PART_BYTES) as spooled:
            file = cast(BinaryIO, spooled)
            async with self.receive(request, file, most, advice):
                yield file

    @contextlib.asynccontextmanager
    async def receive(
        self, request: Request, file: BinaryIO, most: int, advice: str
    ) -> AsyncIterator[None]:
        """Writes the body of a request to `file`, and counts its bytes until the block ends.

        most: bytes of this body.
        advice: follows the message that a body has more.

        Raises HTTPException with 413 for a larger body and with 503 if the budget is spent,
        ClientDisconnect if the client ends before, and OSError if the disk is full.
        """
        loop = asyncio.get_running_loop()
        connection = connection_of(request.scope)
        too_large = HTTPException(413, f"the body has more than {most} bytes{advice}")
        # h11 has checked that it is a number, which may have many digits.
        announced = request.headers.get("content-length", "0").lstrip("0")
        if len(announced) > 18 or int(announced or 0) > most:
            raise too_large
        num_bytes = 0
        part = bytearray()
        try:
            if connection is not None:
                self.receiving.add(connection)
            async for chunk in request.stream():
                num_bytes += len(chunk)
                self.num_bytes += len(chunk)
                if num_bytes > most:
                    raise too_large
                if self.num_bytes > self.max_bytes:
                    self.make_room(connection)
                part += chunk
                if len(part) >= PART_BYTES:
                    await loop.run_in_executor(self.threads, file.write, bytes(part))
                    part.clear()
            self.receiving.discard(connection)  # pyright: ignore[reportArgumentType]
            await loop.run_in_executor(self.threads, finish, file, bytes(part))
            part.clear()
            yield
        finally:
            self.num_bytes -= num_bytes
            self.receiving.discard(connection)  # pyright: ignore[reportArgumentType]

    def make_room(self, connection: BoundedProtocol | None) -> None:
        """Closes the connection whose body has stalled longest, or raises HTTPException."""
        others = [one for one in self.receiving if one is not connection and not one.is_closed]
        before = asyncio.get_running_loop().time() - STALL_SECONDS
        stalled = stalled_longest(others, before)
        if stalled is None:
            raise HTTPException(
                503,
                "the server is receiving too many long requests: ask again later",
                {"Retry-After": str(RETRY_SECONDS)},
            )
        stalled.abort()


async def client_disconnected(_: Request, error: Exception) -> Response:
    """Handles ClientDisconnect: ends the answer, which the client does not receive any more."""
    return Response(status_code=400)


def finish(file: BinaryIO, part: bytes) -> None:
    """Writes the last part of a body, and goes back to its beginning."""
    file.write(part)
    file.seek(0)
