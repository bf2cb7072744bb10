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
samplers write; it cannot leave the directory. Requests are bounded in bytes, time and number.
`http_store.HttpStore` is the client. The key is as secret as the network: without TLS, use a
private network or a tunnel.
"""

import contextlib
import http.server
import json
import os
import re
import secrets
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

from jzero import terminal
from jzero.errors import UserError
from jzero.files import write_atomic
from jzero.http import bears_key
from jzero.jobs.store import FolderStore, open_store

KEY_VARIABLE = "JZERO_STORE_KEY"
KEY_FILE = "store.key"  # in the workdir
REQUEST_SECONDS = 600.0  # in which a client has to send its request and to read the reply
SILENT_SECONDS = 60.0  # of a client, after which its connection ends
FAREWELL_SECONDS = 2.0  # in which samplers see that the run has ended
MOST_CONNECTIONS = 64  # at once; others wait
MOST_BYTES = 1 << 30  # of a file that a client writes
PART_BYTES = 1 << 20
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}(/[A-Za-z0-9_-][A-Za-z0-9._-]{0,199})?")
# What samplers write. The trainer writes into its directory itself.
WRITTEN = ("results/", "partials/", "leases/", "broken/", "decoder.json")
REMOVED = ("leases/", "requests/")


class BadRequest(Exception):
    """A request that gets an error status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class StoreServer(http.server.ThreadingHTTPServer):
    """A server of one directory."""

    daemon_threads = True

    def __init__(self, host: str, port: int, store: FolderStore, key: str) -> None:
        """Starts to listen. Port 0 takes a free one. Raises OSError if the port is taken."""
        self.store = store
        self.key = key.encode()
        self.free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__((host, port), RequestHandler)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}"

    def process_request(self, request: object, client_address: object) -> None:
        self.free.acquire()
        try:
            super().process_request(request, client_address)  # pyright: ignore[reportArgumentType]
        except BaseException:
            self.free.release()
            raise

    def process_request_thread(self, request: object, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)  # pyright: ignore[reportArgumentType]
        finally:
            self.free.release()


class RequestHandler(http.server.BaseHTTPRequestHandler):
    """Answers one request of a connection."""

    server_version = "jzero"
    sys_version = ""
    timeout = SILENT_SECONDS
    server: StoreServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def handle_one_request(self) -> None:
        """Answers one request. A client that goes away is no event: it sends its request again."""
        with contextlib.suppress(OSError):
            super().handle_one_request()
            return
        self.close_connection = True

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_PUT(self) -> None:
        self._answer(self._put)

    def do_POST(self) -> None:
        self._answer(self._post)

    def do_DELETE(self) -> None:
        self._answer(self._delete)

    def _answer(self, method: Callable[[str, str], bytes]) -> None:
        try:
            self._check_key()
            kind, _, name = urllib.parse.urlsplit(self.path).path.lstrip("/").partition("/")
            name = urllib.parse.unquote(name)
            if not NAME.fullmatch(name):
                raise BadRequest(400, "a name is FILE or FOLDER/FILE")
            status, body = 200, method(kind, name)
        except BadRequest as error:
            status, body = error.status, str(error).encode()
        except FileNotFoundError:
            status, body = 404, b"there is no such file"
        except OSError as error:  # such as a full disk: clients try again
            status, body = 503, (error.strerror or "the store failed").encode()
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _check_key(self) -> None:
        if not bears_key(self.headers.get("Authorization", ""), self.server.key):
            raise BadRequest(401, f"the key is wrong: set {KEY_VARIABLE} to the trainer's")

    def _get(self, kind: str, name: str) -> bytes:
        store = self.server.store
        if kind == "files":
            return store.read(name)
        if kind == "names":
            return json.dumps(store.names(name)).encode()
        if kind == "modified":
            return repr(store.modified(name)).encode()
        if kind == "now":
            return repr(store.now(name)).encode()
        raise BadRequest(404, "there is no such address")

    def _put(self, kind: str, name: str) -> bytes:
        self._check_change(kind, name, WRITTEN)
        self.server.store.write(name, self._body())
        return b""

    def _post(self, kind: str, name: str) -> bytes:
        self._check_change(kind, name, WRITTEN)
        if not self.server.store.create(name, self._body()):
            raise BadRequest(412, "the file exists")
        return b""

    def _delete(self, kind: str, name: str) -> bytes:
        self._check_change(kind, name, REMOVED)
        self.server.store.delete(name)
        return b""

    def _check_change(self, kind: str, name: str, allowed: tuple[str, ...]) -> None:
        if kind != "files" or not name.startswith(allowed):
            raise BadRequest(403, "samplers do not change this file")

    def _body(self) -> bytes:
        """Returns the content that the client sends, within the bounds."""
        given = self.headers.get("Content-Length", "")
        if not given.isdecimal() or len(given) > 12:
            raise BadRequest(411, "the length of the content is missing")
        length = int(given)
        if length > MOST_BYTES:
            raise BadRequest(413, f"a file has at most {MOST_BYTES} bytes")
        deadline = time.monotonic() + REQUEST_SECONDS
        body = bytearray()
        while len(body) < length:
            part = self.rfile.read1(min(PART_BYTES, length - len(body)))
            if not part or time.monotonic() > deadline:
                raise BadRequest(408, "the content is incomplete")
            body += part
        return bytes(body)

    def log_message(self, format: str, *args: object) -> None:
        # The terminal stays free for the run.
        pass


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
def serve(address: str, directory: str, workdir: Path) -> Iterator[StoreServer]:
    """Serves the store in a directory at HOST:PORT until the block ends.

    Raises UserError if the store is no directory, or if the address cannot be used.
    """
    host, _, port = address.rpartition(":")
    store = open_store(directory)
    if not isinstance(store, FolderStore):
        raise UserError(
            f"rollout.placement.serve={address}: {directory} is no directory, and samplers can "
            "join it themselves: leave out rollout.placement.serve"
        )
    workdir.mkdir(parents=True, exist_ok=True)
    key = read_key(workdir)
    try:
        server = StoreServer(host.strip("[]"), int(port), store, key)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"rollout.placement.serve={address} cannot be used ({error}): give another address"
        ) from None
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
            thread.join()
