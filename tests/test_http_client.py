"""The one client of remote servers: its deadline, its bounds, its retries and its keys."""

import ast
import asyncio
import json
import random
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from runs import Stand

from jzero import http, json_values
from jzero.errors import UserError
from jzero.types import JsonValue

pytestmark = pytest.mark.usefixtures("quick_retries")

ROOT = Path(__file__).resolve().parents[1]
Reply = Callable[[BaseHTTPRequestHandler], None]


class Served(Stand):
    """A server whose replies a test writes: the first of `replies` first, the last for ever."""

    def __init__(self, *replies: Reply) -> None:
        served = self
        self.replies = list(replies)
        self.requests: list[BaseHTTPRequestHandler] = []

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments: object) -> None:
                """Prints nothing."""

            def do_GET(self) -> None:
                served.requests.append(self)
                reply = served.replies.pop(0) if len(served.replies) > 1 else served.replies[0]
                reply(self)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.do_GET()

        super().__init__(Handler)

    def handle_error(self, request, client_address) -> None:
        """Prints nothing: clients give up on these servers."""

    def client(self, **settings) -> http.Client:
        url = f"http://127.0.0.1:{self.server_port}/v1"
        return http.Client("a.url", url, **{"seconds": 30.0} | settings)


def send(status: int, value: JsonValue, **headers: str) -> Reply:
    def reply(handler: BaseHTTPRequestHandler) -> None:
        content = json.dumps(value).encode()
        handler.send_response(status)
        for name, text in headers.items():
            handler.send_header(name.replace("_", "-"), text)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    return reply


def cut(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{"x"')


def drip(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n")
    for _ in range(50):
        handler.wfile.write(b" ")
        time.sleep(0.2)


def value_of(reply: JsonValue) -> int:
    return json_values.member(reply, ("x",), int)


RIGHT = send(200, {"x": 7})

# -- The exchange ----------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [cut, send(503, {}), send(429, {}), send(500, {})])
def test_a_failure_that_may_pass_is_tried_again(first: Reply) -> None:
    with Served(first, first, RIGHT) as server:
        assert server.client(retries=2).ask("x", {}, value_of) == 7
        assert len(server.requests) == 3


def test_tries_end_and_their_number_is_named() -> None:
    with Served(cut) as server, pytest.raises(http.NoAnswer, match="in 3 tries .*peer closed"):
        server.client(retries=2).ask("x", {}, value_of)
    assert len(server.requests) == 3


@pytest.mark.parametrize("status", [201, 204, 301, 308, 400, 401, 404, 418])
def test_a_refusal_is_not_tried_again(status: int) -> None:
    refusal = send(status, {"error": "no"}, Location="http://127.0.0.1:1/")
    with Served(refusal) as server, pytest.raises(http.Refused, match=f"status {status}"):
        server.client(retries=5).ask("x", {}, value_of)
    assert len(server.requests) == 1


def test_one_deadline_covers_the_whole_exchange() -> None:
    with Served(drip) as server:
        start = time.monotonic()
        with pytest.raises(http.NoAnswer, match=r"timed out after 0\.6 s"):
            server.client(seconds=0.6).ask("x", {}, value_of)
        assert time.monotonic() - start < 5  # the server drips for 10 s


def test_a_server_that_does_not_read_is_given_up() -> None:
    """The request is longer than what the two systems buffer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(http.NoAnswer, match="timed out"):
            http.Client("a.url", url, seconds=0.5).ask("x", ["x" * 1000] * 30_000, value_of)


def test_close_ends_a_wait_and_a_pause_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_PAUSE", 60.0)
    with Served(drip) as server:
        for client in (server.client(), server.client(seconds=0.1, retries=9)):
            threading.Timer(0.5, client.close).start()
            start = time.monotonic()
            with pytest.raises(http.Closed, match="the run has ended"):
                client.ask("x", {}, value_of)
            assert time.monotonic() - start < 8
            with pytest.raises(http.Closed):
                client.ask("x", {}, value_of)


def test_a_client_works_in_an_event_loop() -> None:
    with Served(RIGHT) as server:
        client = server.client()

        async def ask_twice() -> list[int]:
            asked = [asyncio.to_thread(client.ask, "x", {}, value_of) for _ in range(2)]
            return await asyncio.gather(*asked)

        assert asyncio.run(ask_twice()) == [7, 7]


FORKS = """
import os, sys
from jzero import http
client = http.Client("a.url", sys.argv[1], seconds=30.0)
assert client.ask("x", {}, dict) == {"x": 7}
process = os.fork()  # the thread of the parent's network I/O is not in the child
if process == 0:
    os._exit(client.ask("x", {}, dict)["x"])
print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
"""


def test_a_client_works_after_a_fork() -> None:
    with Served(RIGHT) as server:
        command = [sys.executable, "-W", "ignore", "-c", FORKS]
        url = f"http://127.0.0.1:{server.server_port}"
        done = subprocess.run([*command, url], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "7\n", done.stderr


def test_a_certificate_that_nobody_signed_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """self_signed.pem is of 127.0.0.1, with its key, and is valid for a hundred years."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(ROOT / "tests" / "self_signed.pem")
    with Served(RIGHT) as server:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        url = f"https://127.0.0.1:{server.server_port}"
        client = http.Client("a.url", url, seconds=30, retries=5)
        with pytest.raises(http.Refused, match="certificate verify failed"):
            client.ask("x", {}, value_of)
        assert not server.requests

        monkeypatch.setenv("SSL_CERT_FILE", str(ROOT / "tests" / "self_signed.pem"))
        http._tls.cache_clear()
        assert client.ask("x", {}, value_of) == 7
    http._tls.cache_clear()


def test_proxies_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with Served(RIGHT) as proxy:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.server_port}")
        monkeypatch.setenv("NO_PROXY", "")
        client = http.Client("a.url", "http://jzero.invalid/v1", seconds=20)
        assert client.ask("x", {}, value_of) == 7
        assert proxy.requests[0].path == "http://jzero.invalid/v1/x"
        direct = http.Client("a.url", "http://jzero.invalid/v1", seconds=20, use_proxies=False)
        with pytest.raises(http.NoAnswer):
            direct.ask("x", {}, value_of)
        assert len(proxy.requests) == 1


def test_cookies_are_not_kept() -> None:
    with Served(send(200, {"x": 7}, Set_Cookie="a=b; Path=/")) as server:
        client = server.client()
        for _ in range(2):
            client.ask("x", {}, value_of)
        assert [request.headers["Cookie"] for request in server.requests] == [None, None]


# -- Pauses ----------------------------------------------------------------------------------------


def test_pauses_grow_have_jitter_and_an_end() -> None:
    state = random.getstate()
    for number in (*range(12), 10**6):
        longest = min(0.5 * 2.0 ** min(number, 30), http.LONGEST_PAUSE)
        pauses = {http.pause_after(number, 0.5) for _ in range(50)}
        assert all(0.5 * longest <= pause <= longest for pause in pauses)
        assert len(pauses) > 25
    assert random.getstate() == state  # no seeded generator moves


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("", 0), ("7", 7), ("60", 60), ("61", 60), ("1000000000", 0), ("999999999", 60)]
    + [(text, 0) for text in ("1e9", "-5", "inf", "nan", "٧", "9" * 5000, "Wed, 21 Oct 2099")],
)
def test_retry_after_is_bounded(header: str, seconds: float) -> None:
    assert http.seconds_to_wait(header) == seconds


def test_retry_after_is_obeyed() -> None:
    with Served(send(503, {}, Retry_After="1"), RIGHT) as server:
        start = time.monotonic()
        assert server.client(retries=1).ask("x", {}, value_of) == 7
        assert time.monotonic() - start >= 1


# -- Keys and addresses ----------------------------------------------------------------------------

KEY = "sk-0123456789/abcdef"


def test_a_key_goes_to_its_server_and_into_no_message() -> None:
    echoes = [
        send(401, {"error": f"wrong key {KEY}"}),
        send(302, {}, Location=f"http://x/{KEY}"),
        send(200, {"y": KEY}),
        send(200, {"x": KEY}),
        send(200, {}, Content_Type=KEY),
        send(200, {}, Content_Encoding=KEY),
        send(503, {"error": "x" * (http.SHOWN_BYTES - 25) + KEY}),
    ]
    for echo in echoes:
        with Served(echo) as server, pytest.raises(http.RemoteError) as raised:
            server.client(key=KEY).ask("x", {}, value_of)
        assert server.requests[0].headers["Authorization"] == f"Bearer {KEY}"
        assert KEY[:8] not in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("escaped", [KEY, KEY.replace("/", "\\/"), "\\u0073" + KEY[1:]])
def test_a_key_that_a_server_sends_back_is_cut_out_of_the_reply(escaped: str) -> None:
    content = f'{{"x": ["so {escaped}"], "{escaped}": 1}}'.encode()
    assert http.parse_json(content, KEY) == {"x": ["so [API key]"], "[API key]": 1}


@pytest.mark.parametrize("key", ["a b", "a\n", "a\r\nX: y", "ключ", "a\0", "\t"])
def test_a_key_that_is_no_header_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(UserError, match="the API key in MY_KEY has a space") as raised:
        http.Client("a.url", "http://x", seconds=1, key=key, key_variable="MY_KEY")
    assert key not in str(raised.value).replace(" a ", "")


NO_ADDRESSES = """
x
localhost:8000
http://
ftp://x
http://x:port
http://x:0
http://x:99999
http://x y
http://x\ty
http://[::1
http://x?a=b
http://x#a
http://ü
//x
"""


@pytest.mark.parametrize("url", [*NO_ADDRESSES.split("\n")[:-1], "http://x\r\nX: y", "x" * 999])
def test_what_is_no_address_is_one_line(url: str) -> None:
    with pytest.raises(UserError, match=r"^a\.url=.*is not a server address: use http://") as e:
        http.check_url("a.url", url)
    assert "\n" not in str(e.value) and len(str(e.value)) < 200


@pytest.mark.parametrize("url", ["http://me:secret@x", "http://secret@x/v1", "http://:secret@x"])
def test_credentials_in_an_address_are_refused_and_not_shown(url: str) -> None:
    with pytest.raises(UserError, match="holds a user name or a password") as raised:
        http.check_url("a.url", url)
    assert "secret" not in str(raised.value)


# -- JSON ------------------------------------------------------------------------------------------


def random_json(rng: random.Random, depth: int = 0) -> JsonValue:
    kind = rng.randrange(7 if depth < 5 else 5)
    if kind == 5:
        return [random_json(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 6:
        names = [
            rng.choice(['"', "\\", "[{", "}]", "é", "\U0001f600", "\\u"]) + str(i) for i in "ab"
        ]
        return {name: random_json(rng, depth + 1) for name in names}
    return [None, True, rng.gauss(0, 1e9), rng.getrandbits(99), '"[{\\"' + chr(rng.randrange(999))][
        kind
    ]


@pytest.mark.parametrize("ensure_ascii", [True, False])
def test_json_is_read_as_the_standard_library_reads_it(ensure_ascii: bool) -> None:
    rng = random.Random(0)
    for _ in range(300):
        value = random_json(rng)
        content = json.dumps(value, ensure_ascii=ensure_ascii).encode()
        assert http.parse_json(content) == value
        assert http.parse_json(content, key="no such key") == value


def test_json_that_is_cut_anywhere_is_refused() -> None:
    content = json.dumps({"a": [1.5, {"b": 'c\\"d\u00e9'}], "e": [None, True]}).encode()
    for end in range(len(content)):
        with pytest.raises(ValueError):
            http.parse_json(content[:end])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not valid JSON: Expecting value"),
        (b"\xef\xbb\xbf{}", "not valid JSON: "),
        ("{}".encode("utf-16"), "utf-8"),
        (b'"\xff"', "utf-8"),
        (b'"\xed\xa0\x80"', "utf-8"),
        (b"NaN", "NaN is not a JSON number"),
        (b"-Infinity", "-Infinity is not a JSON number"),
        (b"1e400", "does not fit"),
        (b"1" * 301, "301 digits"),
        (b"9" * 10**6, "digits"),
        (b'{"a": 1, "a": 1}', "the same key twice"),
        (b'{"a": 1, "\\u0061": 1}', "the same key twice"),
        (b"[" * 65 + b"]" * 65, "nested more than 64"),
        (b'[{"a":' * 40, "nested more than 64"),
        (b"[" * 10**6, "nested more than 64"),
        (b"[" + b"[]," * (1 << 20) + b"1]", "more than 1048576 lists"),
    ],
)
def test_json_beyond_its_bounds_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        http.parse_json(content)


def test_json_within_its_bounds_is_read() -> None:
    assert http.parse_json(b"[" * 64 + b"]" * 64) is not None
    assert http.parse_json(b"9" * 300) == 10**300 - 1
    assert http.parse_json(json.dumps("[" * 1000).encode()) == "[" * 1000
    assert http.parse_json(b'"\\ud800 \\ud83d\\ude00 \\udc00"') == "\ufffd \U0001f600 \ufffd"


# -- One client ------------------------------------------------------------------------------------

LIBRARIES = (
    "httpx",
    "websockets",
    "urllib.request",
    "urllib3",
    "http.client",
    "xmlrpc",
    "ftplib",
    "smtplib",
    "telnetlib",
    "aiohttp",
    "requests",
    "openai",
)
# Functions that connect to an address.
CONNECTS = ("create_connection", "open_connection", "connect", "connect_ex")


def imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_client(source: str) -> bool:
    """Returns whether a module imports a library of clients, or connects to an address itself."""
    words = (*CONNECTS, *(library.rpartition(".")[2] for library in LIBRARIES))
    if not any(word in source for word in words):
        return False
    tree = ast.parse(source)
    for name in imports(tree):
        if any(name == library or name.startswith(f"{library}.") for library in LIBRARIES):
            return True
    return any(connects(node) for node in ast.walk(tree))


def connects(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name) | ast.alias(name=name):
            return name in CONNECTS
    return False


def test_one_module_is_a_client_of_http_and_one_of_websockets() -> None:
    clients = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "jzero").rglob("*.py")
        if is_client(path.read_text(encoding="utf-8"))
    }
    # The processes of one run meet, and reach their coordinator, over connections of their own.
    within_one_run = {f"jzero/hosts/{name}.py" for name in ("broadcast", "relay", "rendezvous")}
    assert clients - within_one_run == {"jzero/http.py", "jzero/websocket.py"}


@pytest.mark.parametrize(
    "source",
    [
        "import httpx",
        "from urllib import request",
        "import http.client as h",
        "from websockets.sync.client import connect",
        "from socket import create_connection as c",
        "socket.create_connection(('host', 80))",
        "asyncio.open_connection('host', 80)",
        "socket.socket().connect(('host', 80))",
    ],
)
def test_a_client_is_found(source: str) -> None:
    assert is_client(source)


@pytest.mark.parametrize(
    "source", ["from jzero import http", "import http.server", "from urllib.parse import urlsplit"]
)
def test_a_server_and_a_parser_are_no_clients(source: str) -> None:
    assert not is_client(source)
