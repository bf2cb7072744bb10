"""Serves the page of runs to a browser on this machine.

    GET /                                  the page
    GET /state?version=V                   curves, remarks, settings; only the version if it is V
    GET /index?run=R&generation=G&cursor=N blocks of the index of rollouts, from the N-th on
    GET /rows?run=R&lines=5,6              rollouts by their line
    GET /search?run=R&text=T               lines that contain a text

The server only reads. It is made for one user who may not trust the text in the runs: replies are
of bounded size, and a page of another origin can neither read them nor embed them (see
`servers.rules`).
"""

import asyncio
import gzip
import json
import re
import secrets
import urllib.parse
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jinja2
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from jzero.files import JsonObject
from jzero.servers.limits import ConnectionLimits
from jzero.servers.rules import Rules, make_hosts
from jzero.servers.running import HttpServer
from jzero.types import JsonValue
from jzero.watching.runs import Watcher

MAX_BLOCKS = 40  # of one reply of /index
MAX_QUERY = 10_000  # characters of a query
MAX_SEARCH = 1000  # characters
MAX_WAITING = 64  # requests of one kind that wait for a thread
LIMITS = ConnectionLimits(max_connections=512, max_address_connections=512, request_seconds=30.0)
MIN_GZIP_BYTES = 10_000
INTEGER = re.compile(r"-?[0-9]{1,12}", re.ASCII)
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}

Query = dict[str, str]
Handler = Callable[[Request], Awaitable[Response]]


def render_page(data: JsonObject) -> str:
    """Returns the HTML of the page, as ASCII. Characters with a meaning in HTML are escaped.

    A script runs only with the nonce of the page, which nobody can know who wrote text in `data`.
    """
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    nonce = secrets.token_urlsafe(16)
    return jinja2.Template(template, autoescape=True).render(data=data, nonce=nonce)


def page_server(
    host: str,
    port: int,
    watcher: Watcher,
    allowed_hosts: Sequence[str] = (),
    limits: ConnectionLimits = LIMITS,
) -> HttpServer:
    """Returns a server of the runs of a watcher, which listens already. Port 0 takes a free one.

    allowed_hosts: further names of the server, for the Host header.

    Raises UserError if the address cannot be used.
    """
    rules = Rules(make_hosts(host, allowed_hosts), linked_pages=frozenset("/"))
    return HttpServer(Pages(watcher).app(), host, port, limits, rules)


class Pages:
    """Answers requests. Each kind has a thread, so that no kind keeps the others waiting."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher

    def app(self) -> Starlette:
        """Returns the application."""
        return Starlette(
            routes=[
                Route("/", self.page),
                Route("/state", self.endpoint(self.state)),
                Route("/index", self.endpoint(self.index)),
                Route("/rows", self.endpoint(self.rows)),
                Route("/search", self.endpoint(self.search)),
            ],
            exception_handlers={HTTPException: refuse},
        )

    async def page(self, _: Request) -> Response:
        """Answers GET /."""
        page = render_page({"is_live": True})
        return Response(page, 200, HEADERS, "text/html; charset=utf-8")

    def endpoint(self, answer: Callable[[Query], JsonValue]) -> Handler:
        """Returns the handler of a path whose reply is JSON."""
        worker = Worker()

        async def handle(request: Request) -> Response:
            encoded = request.scope["query_string"][:MAX_QUERY].decode("ascii", "replace")
            query = dict(urllib.parse.parse_qsl(encoded, keep_blank_values=True))
            is_zipped = "gzip" in request.headers.get("accept-encoding", "")
            return await worker.run(lambda: json_response(answer(query), is_zipped))

        return handle

    def state(self, query: Query) -> JsonValue:
        return self.watcher.state(query.get("version", ""))

    def index(self, query: Query) -> JsonValue:
        index = self.watcher.runs[self.run_number(query)].rollouts
        # Read once: the worker may replace them while this reply is written.
        generation, blocks, texts = index.generation, index.blocks, index.texts.texts
        cursor, num_texts = integer(query, "cursor"), integer(query, "texts")
        # The page has blocks of a file that has been replaced: it gets all blocks again.
        if text_of(query, "generation") != generation or not 0 <= cursor <= len(blocks):
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

    def rows(self, query: Query) -> JsonValue:
        numbers = [read_integer(line) for line in text_of(query, "lines").split(",") if line]
        return self.watcher.runs[self.run_number(query)].rollouts.rows(numbers)

    def search(self, query: Query) -> JsonValue:
        text = text_of(query, "text")[:MAX_SEARCH]
        return self.watcher.runs[self.run_number(query)].rollouts.search(text)

    def run_number(self, query: Query) -> int:
        """Returns the place of the run that a query asks for. Raises HTTPException."""
        number = integer(query, "run")
        if not 0 <= number < len(self.watcher.runs):
            raise HTTPException(404, f"run={number} does not exist")
        return number


class Worker:
    """A thread for one kind of request, and a bounded number of requests that wait for it."""

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1, "watch")
        self.num_waiting = 0

    async def run(self, work: Callable[[], Response]) -> Response:
        """Returns the result of `work`. Raises HTTPException if too many requests wait."""
        if self.num_waiting >= MAX_WAITING:
            raise HTTPException(503, "too many requests wait: ask again", {"Retry-After": "1"})
        self.num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.executor, work)
        finally:
            self.num_waiting -= 1


def text_of(query: Query, name: str) -> str:
    """Returns a value of a query. Raises HTTPException if it is missing."""
    if name not in query:
        raise HTTPException(404, f"the address has no {name}=")
    return query[name]


def integer(query: Query, name: str) -> int:
    """Returns a number of a query. Raises HTTPException."""
    return read_integer(text_of(query, name))


def read_integer(text: str) -> int:
    """Returns an integer of at most 12 digits. Raises HTTPException."""
    if not INTEGER.fullmatch(text):
        raise HTTPException(400, "a number of the address is not an integer of 1 to 12 digits")
    return int(text)


def json_response(value: JsonValue, is_zipped: bool) -> Response:
    """Returns a reply in JSON, compressed if it is long and the client reads gzip."""
    body = json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
    headers = HEADERS
    if is_zipped and len(body) > MIN_GZIP_BYTES:
        # The lowest level: the network is this machine, or a tunnel.
        body = gzip.compress(body, compresslevel=1)
        headers = HEADERS | {"Content-Encoding": "gzip"}
    return Response(body, 200, headers, "application/json")


async def refuse(_: Request, error: Exception) -> Response:
    """Answers a wrong request."""
    assert isinstance(error, HTTPException), f"{error=}"
    headers = HEADERS | dict(error.headers or {})
    return PlainTextResponse(f"{error.detail}\n", error.status_code, headers)
