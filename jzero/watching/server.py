"""Serves the page of runs to a browser on this machine.

    GET /                                  the page
    GET /state?version=V                   curves, remarks, settings; only the version if it is V
    GET /index?run=R&generation=G&cursor=N blocks of the index of rollouts, from the N-th on
    GET /rows?run=R&lines=5,6              rollouts by their line
    GET /search?run=R&text=T               lines that contain a text

The server only reads. It is made for one user who may not trust the text in the runs: replies are
of bounded size, and a page of another origin can neither read them nor embed them. The Host header
is checked, because a hostile page may let its own name resolve to 127.0.0.1 (DNS rebinding).
"""

import contextlib
import gzip
import http.server
import json
import secrets
import urllib.parse
from collections.abc import Callable
from pathlib import Path

import jinja2

from jzero.errors import UserError
from jzero.files import JsonObject
from jzero.types import JsonValue
from jzero.watching.runs import Watcher

LOCAL_NAMES = ("127.0.0.1", "localhost", "::1")
MAX_BLOCKS = 40  # of one reply of /index
MAX_QUERY = 10_000  # characters of an address
REQUEST_SECONDS = 30.0  # in which a client has to send its request
MIN_GZIP_BYTES = 10_000


def render_page(data: JsonObject) -> str:
    """Returns the HTML of the page, as ASCII. Characters with a meaning in HTML are escaped.

    A script runs only with the nonce of the page, which nobody can know who wrote text in `data`.
    """
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    nonce = secrets.token_urlsafe(16)
    return jinja2.Template(template, autoescape=True).render(data=data, nonce=nonce)


class NotFound(Exception):
    """The request asks for something that does not exist."""


class PageServer(http.server.ThreadingHTTPServer):
    """A server of the runs of a Watcher. `host` is the address that it listens at."""

    daemon_threads = True

    def __init__(self, host: str, port: int, watcher: Watcher) -> None:
        """Starts to listen. Port 0 takes a free one. Raises UserError if the port is taken."""
        self.watcher = watcher
        self.allowed_names = {*LOCAL_NAMES, host}
        try:
            super().__init__((host, port), RequestHandler)
        except OSError as error:
            raise UserError(
                f"--port {port} of {host} cannot be used ({error.strerror}): give another"
            ) from None

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/"

    def reply(self, path: str, query: dict[str, str]) -> JsonValue:
        """Returns the JSON value for a path. Raises NotFound or ValueError for a wrong request."""
        answers: dict[str, Callable[[dict[str, str]], JsonValue]] = {
            "/state": lambda query: self.watcher.state(query.get("version", "")),
            "/index": self._index,
            "/rows": self._rows,
            "/search": self._search,
        }
        if path not in answers:
            raise NotFound(path)
        return answers[path](query)

    def _index(self, query: dict[str, str]) -> JsonValue:
        index = self.watcher.runs[int(query["run"])].rollouts
        # Read once: the worker may replace them while this reply is written.
        generation, blocks, texts = index.generation, index.blocks, index.texts.texts
        cursor, num_texts = int(query["cursor"]), int(query["texts"])
        # The page has blocks of a file that has been replaced: it gets all blocks again.
        if query["generation"] != generation or not 0 <= cursor <= len(blocks):
            cursor, num_texts = 0, 0
        chosen = blocks[cursor : cursor + MAX_BLOCKS]
        return {
            "generation": generation,
            "cursor": cursor + len(chosen),
            "from": cursor,
            "blocks": [block.to_json() for block in chosen],
            "texts": texts[max(0, num_texts) :],
            "total": len(index),
            "done": index.is_done and cursor + len(chosen) == len(blocks),
        }

    def _rows(self, query: dict[str, str]) -> JsonValue:
        lines = [int(line) for line in query["lines"].split(",") if line]
        return self.watcher.runs[int(query["run"])].rollouts.rows(lines)

    def _search(self, query: dict[str, str]) -> JsonValue:
        return self.watcher.runs[int(query["run"])].rollouts.search(query["text"][:1000])


class RequestHandler(http.server.BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"
    server_version = "jzero"
    sys_version = ""
    timeout = REQUEST_SECONDS
    server: PageServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def handle_one_request(self) -> None:
        # A browser that leaves the page closes the connections on which it waits for replies.
        with contextlib.suppress(ConnectionError):
            super().handle_one_request()
            return
        self.close_connection = True

    def do_GET(self) -> None:
        if not self._is_allowed():
            self._send(403, "text/plain; charset=utf-8", b"This page is for local users only.\n")
            return
        address = urllib.parse.urlsplit(self.path[:MAX_QUERY])
        if address.path == "/":
            page = render_page({"is_live": True})
            self._send(200, "text/html; charset=utf-8", page.encode("ascii"))
            return
        try:
            query = dict(urllib.parse.parse_qsl(address.query, keep_blank_values=True))
            value = self.server.reply(address.path, query)
        except (NotFound, KeyError, IndexError):
            self._send(404, "text/plain; charset=utf-8", b"There is no such page.\n")
        except ValueError:
            self._send(400, "text/plain; charset=utf-8", b"The address is wrong.\n")
        else:
            body = json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
            self._send(200, "application/json", body)

    def _is_allowed(self) -> bool:
        """Returns whether the request is from a page of this server, or from the address bar."""
        try:
            host = urllib.parse.urlsplit(f"//{self.headers.get('Host', '')}").hostname
        except ValueError:
            return False
        # A browser says where a request comes from; "none" is the address bar.
        site = self.headers.get("Sec-Fetch-Site", "none")
        is_page = urllib.parse.urlsplit(self.path).path == "/"
        # A link from another page may open this page, but no other page may read its data.
        is_same_site = site in ("none", "same-origin") or (is_page and site == "cross-site")
        return host in self.server.allowed_names and is_same_site

    def _send(self, status: int, kind: str, body: bytes) -> None:
        is_zipped = len(body) > MIN_GZIP_BYTES and "gzip" in self.headers.get("Accept-Encoding", "")
        if is_zipped:
            # The lowest level: the network is this machine, or a tunnel.
            body = gzip.compress(body, compresslevel=1)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if is_zipped:
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        # The terminal stays free for the address of the page.
        pass
