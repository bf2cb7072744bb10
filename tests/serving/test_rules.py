"""Which Host, Origin and type a request must have, and who makes room in a full server."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from jzero.servers import bodies as bodies_module
from jzero.servers import connections
from jzero.servers.bodies import Bodies, client_disconnected
from jzero.servers.connections import admit, client_address
from jzero.servers.limits import ConnectionLimits
from jzero.servers.rules import Rules, listens_at_loopback, make_hosts
from jzero.servers.running import HttpServer

LIMITS = ConnectionLimits(
    max_connections=8, max_address_connections=4, request_seconds=20, grace_seconds=0
)
MOST_BYTES, BUDGET = 100_000, 250_000
HEAD = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"


# -- hosts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "host", "expected"),
    [
        ("127.0.0.1", "localhost", True),
        ("127.0.0.1", "127.0.0.1:8000", True),
        ("127.0.0.1", "[::1]:8000", True),
        ("127.0.0.1", "10.0.0.1", False),
        ("127.0.0.1", "evil.example", False),
        ("127.0.0.1", "proxy.example", True),
        ("0.0.0.0", "10.0.0.1:8000", True),
        ("0.0.0.0", "[fe80::1]:8000", True),
        ("0.0.0.0", f"{socket.gethostname()}:8000", True),
        ("0.0.0.0", "evil.example", False),
        ("0.0.0.0", "10.0.0.1.evil.example", False),
        ("::", "[::1]", True),
        ("", "evil.example", False),
        ("", "", False),
        ("10.0.0.1", "10.0.0.1", True),
        ("trainer.internal", "trainer.internal:8400", True),
    ],
)
def test_a_server_answers_to_its_own_names(address: str, host: str, expected: bool) -> None:
    hosts = make_hosts(address, ["Proxy.example"])
    assert hosts.includes(host) == expected


def test_the_origin_is_the_host_or_an_allowed_name() -> None:
    hosts = make_hosts("127.0.0.1", ["proxy.example"])
    assert hosts.includes_origin("http://localhost:8000", "localhost:8000")
    assert hosts.includes_origin("https://proxy.example", "127.0.0.1:8000"), "behind a proxy"
    assert not hosts.includes_origin("http://localhost:3000", "localhost:8000")
    assert not hosts.includes_origin("null", "localhost:8000")


def test_loopback_addresses_are_known() -> None:
    assert all(map(listens_at_loopback, ("127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost")))
    assert not any(map(listens_at_loopback, ("", "0.0.0.0", "::", "10.0.0.1", "host")))


def test_a_network_of_ipv6_is_one_client() -> None:
    assert client_address(("2001:db8:1:2::5", 1)) == client_address(("2001:db8:1:2:9::", 2))
    assert client_address(("2001:db8:1:2::5", 1)) != client_address(("2001:db8:1:3::5", 1))
    assert client_address(("::ffff:10.0.0.1", 1)) == "10.0.0.1"


# -- room ------------------------------------------------------------------------------------------


@dataclass
class Running:
    """A server of one path, /echo, whose requests with a key are admitted."""

    server: HttpServer
    bodies: Bodies

    def connect(self, sent: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
        address = self.server.server_address
        opened = socket.create_connection(address, 30, source_address=(source, 0))
        opened.sendall(sent)
        return opened


@pytest.fixture
def running() -> Iterator[Running]:
    bodies = Bodies(BUDGET)

    async def echo(request: Request) -> Response:
        if "authorization" in request.headers:
            admit(request.scope)
        async with bodies.spool(request, MOST_BYTES, "") as file:
            return PlainTextResponse(file.read())

    app = Starlette(
        routes=[Route("/echo", echo, methods=["POST"])],
        exception_handlers={ClientDisconnect: client_disconnected},
    )
    rules = Rules(make_hosts("127.0.0.1"))
    with HttpServer(app, "127.0.0.1", 0, LIMITS, rules) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Running(server, bodies)


def head(num_bytes: int, has_key: bool = True) -> bytes:
    key = b"Authorization: Bearer key\r\n" if has_key else b""
    return HEAD + key + b"Content-Length: %d\r\n\r\n" % num_bytes


def is_open(opened: socket.socket) -> bool:
    """Returns whether the server has left a connection open, which gets no answer."""
    opened.settimeout(0.2)
    with contextlib.suppress(TimeoutError, OSError):
        opened.recv(1)
        return False
    return True


def read_all(opened: socket.socket) -> bytes:
    received = b""
    while part := opened.recv(1000):
        received += part
    return received


def wait_for_bodies(running: Running, num_bytes: int) -> None:
    deadline = time.monotonic() + 30
    while running.bodies.num_bytes < num_bytes:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_client_address_closes_its_own_connections(running: Running) -> None:
    other = running.connect()
    many = [running.connect(source="127.0.0.2") for _ in range(30)]
    with running.connect(head(0), "127.0.0.3") as last:
        assert last.recv(1)  # so that all are accepted
    assert is_open(other)
    assert sum(map(is_open, many)) == LIMITS.max_address_connections
    for opened in (other, *many):
        opened.close()


def test_unknown_clients_do_not_close_the_upload_of_a_known_one(running: Running) -> None:
    with running.connect(head(6) + b"abc") as upload:
        wait_for_bodies(running, 3)
        many = [running.connect(head(6, has_key=False) + b"a") for _ in range(30)]
        upload.sendall(b"def")
        assert read_all(upload).endswith(b"abcdef")
    for opened in many:
        opened.close()


def test_a_stalled_upload_makes_room(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALL_SECONDS", 0.1)
    stalled = [running.connect(head(6) + b"abc") for _ in range(LIMITS.max_address_connections)]
    wait_for_bodies(running, 3 * len(stalled))
    time.sleep(0.2)
    with running.connect(head(3) + b"xyz") as honest:
        assert read_all(honest).endswith(b"xyz")
    for opened in stalled:
        opened.close()


@pytest.mark.parametrize("has_stalled", [False, True])
def test_bodies_have_one_budget(
    running: Running, monkeypatch: pytest.MonkeyPatch, has_stalled: bool
) -> None:
    """A client beyond it gets the room of the one that has stalled longest, or is refused."""
    monkeypatch.setattr(bodies_module, "STALL_SECONDS", 0.0 if has_stalled else 1000.0)
    others = [running.connect(head(MOST_BYTES) + bytes(MOST_BYTES - 1)) for _ in range(2)]
    wait_for_bodies(running, 2 * (MOST_BYTES - 1))
    time.sleep(0.01)
    with running.connect(head(MOST_BYTES) + bytes(MOST_BYTES)) as opened:
        status = opened.recv(1000)[9:12]
    assert status == (b"200" if has_stalled else b"503")
    for other in others:
        other.close()


def test_a_body_beyond_its_bound_is_refused_before_it_is_read(running: Running) -> None:
    for announced in (MOST_BYTES + 1, 10**19):
        with running.connect(head(announced)) as opened:
            assert opened.recv(1000).startswith(b"HTTP/1.1 413 ")
    assert running.bodies.num_bytes == 0
