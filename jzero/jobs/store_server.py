"""Serves the trainer's store over HTTP to samplers that see no directory and no bucket of it.

    GET    /files/NAME       the file; 404 if there is none
    PUT    /files/NAME       writes it
    POST   /files/NAME       creates it; 412 if it exists
    DELETE /files/NAME       removes it, if it exists
    GET    /names/FOLDER     a JSON list of the names of its files
    GET    /modified/NAME    the seconds of the last change
    GET    /now/WHO          the clock of the store

`rollout.placement.serve=HOST:PORT` starts the server with the trainer. Every request needs the key
as `Authorization: Bearer KEY`. With the key a client may read all files, and change those that
samplers write; it cannot leave the directory. Requests are bounded in bytes, time and number
(`jzero.servers`), and files are streamed from and to the disk.
`http_store.HttpStore` is the client. The key is as secret as the network: without TLS, use a
private network or a tunnel.
"""

import asyncio
import contextlib
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from jzero import terminal
from jzero.errors import UserError
from jzero.files import write_atomic
from jzero.http import bears_key
from jzero.jobs.store import BadFileError, FolderStore, open_store, sync
from jzero.servers.bodies import Bodies, client_disconnected
from jzero.servers.connections import admit
from jzero.servers.limits import ConnectionLimits
from jzero.servers.rules import Rules, make_hosts
from jzero.servers.running import HttpServer

T = TypeVar("T")

KEY_VARIABLE = "JZERO_STORE_KEY"
KEY_FILE = "store.key"  # in the workdir
FAREWELL_SECONDS = 2.0  # in which samplers see that the run has ended
# A file may take minutes over a slow network.
LIMITS = ConnectionLimits(
    max_connections=1024, max_address_connections=512, request_seconds=600.0, idle_seconds=60.0
)
MOST_BYTES = 1 << 30  # of a file that a client writes
MOST_SMALL_BYTES = 1 << 16
MOST_RECEIVED_BYTES = 4 << 30  # of all files that clients are writing
READING_THREADS = 8
READ_BYTES = 1 << 19  # of a file, at once
WRITING_THREADS = 4  # which wait until files are on the disk
SETTING = "rollout.placement.serve"
PART = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}"
FILE = re.compile(PART, re.ASCII)
NAME = re.compile(f"{PART}(/{PART})?", re.ASCII)
# Folders of the files that samplers write, and the bytes of a file. The trainer writes into its
# directory itself.
WRITTEN = {
    "results": MOST_BYTES,
    "partials": MOST_BYTES,
    "leases": MOST_SMALL_BYTES,
    "broken": MOST_SMALL_BYTES,
}
# Files that the first sampler creates, and that no sampler replaces.
CREATED = {"decoder.json": MOST_SMALL_BYTES}
REMOVED = ("leases", "requests")


class StoreServer(HttpServer):
    """A server of one directory."""

    def __init__(
        self,
        host: str,
        port: int,
        store: FolderStore,
        key: str,
        allowed_hosts: Sequence[str] = (),
        limits: ConnectionLimits = LIMITS,
    ) -> None:
        """Starts to listen. Port 0 takes a free one.

        allowed_hosts: names of the server besides `host`, as samplers join it.

        Raises UserError if the address cannot be used.
        """
        self.store = store
        self.key = key.encode()
        self.bodies = Bodies(MOST_RECEIVED_BYTES)
        # Not the default threads of the event loop, whose end waits for them. Those that write are
        # separate, so that uploads keep no reader waiting.
        self.reading_threads = ThreadPoolExecutor(READING_THREADS, "store-read")
        self.writing_threads = ThreadPoolExecutor(WRITING_THREADS, "store-write")
        rules = Rules(
            make_hosts(host, allowed_hosts),
            advice="add it to rollout.placement.allowed_hosts of the trainer",
        )
        app = Starlette(
            routes=[
                Route("/{path:path}", self.answer, methods=["GET", "PUT", "POST", "DELETE"]),
            ],
            exception_handlers={
                HTTPException: refuse,
                ClientDisconnect: client_disconnected,
                OSError: refuse,
                BadFileError: refuse,
            },
        )
        super().__init__(app, host, port, limits, rules, setting=f"{SETTING}={host}:{port}")

    async def answer(self, request: Request) -> Response:
        """Answers a request. The key is checked before anything else is read."""
        if not bears_key(request.headers.get("authorization", ""), self.key):
            raise HTTPException(401, f"the key is wrong: set {KEY_VARIABLE} to the trainer's")
        admit(request.scope)
        # Not the parameter of the route, which loses a line break at the end.
        kind, _, name = request.scope["path"].removeprefix("/").partition("/")
        if not NAME.fullmatch(name):
            raise HTTPException(400, "a name is FILE or FOLDER/FILE")
        if request.method == "GET":
            return await self.read(kind, name)
        if kind != "files":
            raise HTTPException(405, "samplers change only files", {"Allow": "GET"})
        if request.method == "DELETE":
            if name.partition("/")[0] not in REMOVED or not name.partition("/")[2]:
                raise HTTPException(403, "samplers do not remove this file")
            await self.write_in_thread(lambda: self.store.delete(name))
            return Response()
        return await self.write(request, name, is_new=request.method == "POST")

    async def read(self, kind: str, name: str) -> Response:
        """Answers GET."""
        store = self.store
        is_file = FILE.fullmatch(name) is not None
        if kind == "files":
            file = await self.read_in_thread(lambda: store.open(name))
            return self.stream(file, name)
        if kind == "names" and is_file:
            return in_json(await self.read_in_thread(lambda: store.names(name)))
        if kind == "modified":
            return in_json(await self.read_in_thread(lambda: store.modified(name)))
        if kind == "now" and is_file:
            return in_json(await self.write_in_thread(lambda: store.now(name)))
        raise HTTPException(404, "unknown address")

    def stream(self, file: BinaryIO, name: str) -> Response:
        """Returns the content of an open file, which is closed after it."""
        # A writer replaces a file, so that an open one does not change.
        num_bytes = os.fstat(file.fileno()).st_size

        async def parts() -> AsyncIterator[bytes]:
            with file:
                remaining = num_bytes
                while remaining:
                    part = await self.read_in_thread(partial(file.read, min(READ_BYTES, remaining)))
                    if not part:
                        raise OSError(f"{name} has become shorter while it was read")
                    remaining -= len(part)
                    yield part

        headers = {"Content-Length": str(num_bytes)}
        return StreamingResponse(parts(), 200, headers, "application/octet-stream")

    async def write(self, request: Request, name: str, is_new: bool) -> Response:
        """Writes a file, or creates it."""
        most = most_bytes(name, is_new)
        if most is None:
            raise HTTPException(403, "samplers do not change this file")
        with self.store.temporary(name) as temporary:
            file = await self.write_in_thread(lambda: temporary.open("xb+"))
            with file:
                async with self.bodies.receive(request, file, most, ""):
                    await self.write_in_thread(lambda: sync(file))
            if not is_new:
                await self.write_in_thread(lambda: self.store.put(temporary, name))
            elif not await self.write_in_thread(lambda: self.store.link(temporary, name)):
                raise HTTPException(412, "the file exists")
        return Response()

    async def read_in_thread(self, work: Callable[[], T]) -> T:
        """Returns the result of `work`, which reads files."""
        return await asyncio.get_running_loop().run_in_executor(self.reading_threads, work)

    async def write_in_thread(self, work: Callable[[], T]) -> T:
        """Returns the result of `work`, which changes files."""
        return await asyncio.get_running_loop().run_in_executor(self.writing_threads, work)


def most_bytes(name: str, is_new: bool) -> int | None:
    """Returns the bytes that a sampler may write to a file; None for a file of the trainer.

    is_new: the file is created, and not replaced.
    """
    folder, _, file = name.partition("/")
    if not file:
        return CREATED.get(name) if is_new else None
    return WRITTEN.get(folder)


def in_json(value: float | list[str]) -> Response:
    """Returns a reply in JSON."""
    return Response(json.dumps(value), media_type="application/octet-stream")


async def refuse(_: Request, error: Exception) -> Response:
    """Answers a request that is wrong, or that the disk refuses."""
    if isinstance(error, HTTPException):
        return Response(error.detail, error.status_code, error.headers, "text/plain")
    is_missing = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
    if is_missing or isinstance(error, BadFileError):
        return Response("the file does not exist", 404, media_type="text/plain")
    # A full disk, for example: clients try again.
    reason = (error.strerror if isinstance(error, OSError) else "") or "the store failed"
    return Response(reason, 503, media_type="text/plain")


def read_key(workdir: Path) -> str:
    """Returns the key of the environment, or that of the workdir, which is made if it is new."""
    key = os.environ.get(KEY_VARIABLE, "")
    path = workdir / KEY_FILE
    if key:
        return key
    if not path.exists():
        write_atomic(path, secrets.token_urlsafe(32) + "\n", mode=0o600)
    return path.read_text(encoding="ascii").strip()


@contextlib.contextmanager
def serve(
    address: str, directory: str, workdir: Path, allowed_hosts: Sequence[str] = ()
) -> Iterator[StoreServer]:
    """Serves the store in a directory at HOST:PORT until the block ends.

    allowed_hosts: further names of this machine, as samplers join it.

    Raises UserError if the store is not a directory, or if the address cannot be used.
    """
    host, _, port = address.rpartition(":")
    store = open_store(directory)
    if not isinstance(store, FolderStore):
        raise UserError(
            f"{SETTING}={address}: {directory} is not a directory, and samplers can "
            "join it directly: remove rollout.placement.serve"
        )
    workdir.mkdir(parents=True, exist_ok=True)
    key = read_key(workdir)
    server = StoreServer(host.strip("[]"), int(port), store, key, allowed_hosts)
    with server:
        thread = threading.Thread(target=server.serve_forever, name="jzero-store", daemon=True)
        thread.start()
        url = server.url.replace("0.0.0.0", socket.gethostname())
        terminal.say(f"samplers join with: python -m jzero.sample --join {url}", "bold")
        source = "of this process" if os.environ.get(KEY_VARIABLE) else f"of {workdir / KEY_FILE}"
        terminal.say(f"they need the key {source} in {KEY_VARIABLE}")
        try:
            yield server
            time.sleep(FAREWELL_SECONDS)
        finally:
            server.shutdown()
