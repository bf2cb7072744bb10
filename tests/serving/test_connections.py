"""Connections that send or read too slowly: they are closed, and lock nobody out."""

import asyncio
import socket
import time
from collections.abc import Iterator

import httpx
import pytest
from servers import Threaded, read_all, read_until, threaded_server, wait_for
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from jzero.servers.bodies import client_disconnected
from jzero.servers.sockets import allow_connections
from jzero.serving.http import Server
from jzero.serving.limits import Limits

LIMITS = Limits(max_connections=4, request_seconds=1.0, idle_seconds=1.0)
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
BEGUN_HEAD = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Le"
BEGUN_BODY = (
    b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 100\r\n\r\nabc"
)


class NoWorker:
    """Stands where the decoding thread would be: these tests decode nothing."""

    has_ended = False


def make_test_app(sent: list[int]) -> Starlette:
    """Returns an application with a body to read, an endless stream, and an answer that waits.

    `sent` gets the bytes of every piece of the stream that the server took.
    """

    async def health(_: Request) -> Response:
        return PlainTextResponse("well")

    async def echo(request: Request) -> Response:
        return PlainTextResponse(await request.body())

    async def slow(_: Request) -> Response:
        await asyncio.sleep(2.5)
        return PlainTextResponse("at last")

    async def stream(_: Request) -> Response:
        async def pieces():
            while True:
                yield b"x" * 100_000
                sent.append(100_000)
                await asyncio.sleep(0)

        return StreamingResponse(pieces())

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/echo", echo, methods=["POST"]),
            Route("/slow", slow),
            Route("/stream", stream),
        ],
        exception_handlers={ClientDisconnect: client_disconnected},
    )


@pytest.fixture
def sent() -> list[int]:
    return []


@pytest.fixture
def threaded(sent: list[int]) -> Iterator[Threaded]:
    server = Server.__new__(Server)
    server.worker = NoWorker()
    server.replies = set()
    with threaded_server(server, LIMITS, app=make_test_app(sent)) as running:
        yield running


@pytest.mark.parametrize("begun", [b"", BEGUN_HEAD, BEGUN_BODY], ids=["nothing", "head", "body"])
def test_a_request_that_does_not_arrive_in_time_is_given_up(threaded, begun) -> None:
    start = time.monotonic()
    with threaded.connect(begun) as connection:
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    # The event loop may be early by the resolution of its clock.
    assert time.monotonic() - start >= LIMITS.request_seconds - 0.01


def test_a_byte_now_and_then_does_not_keep_a_connection_open(threaded) -> None:
    with threaded.connect(BEGUN_BODY) as connection:
        deadline = time.monotonic() + 60
        with pytest.raises(OSError):
            while time.monotonic() < deadline:
                connection.sendall(b"x")
                time.sleep(0.1)
    wait_for(lambda: not threaded.uvicorn.server_state.connections)


def test_a_second_request_has_the_same_time(threaded) -> None:
    with threaded.connect(GET) as connection:
        read_until(connection, b"well")
        connection.sendall(BEGUN_HEAD)
        assert read_all(connection).startswith(b"HTTP/1.1 408 ")


def test_an_answer_may_take_longer_than_a_request(threaded) -> None:
    """The limits are on what the client does: a long answer, and one after it, are not cut."""
    with httpx.Client(base_url=threaded.url, timeout=60) as client:
        assert [client.get("/slow").text for _ in range(2)] == ["at last"] * 2
        assert client.post("/echo", json=7).text == "7"


def test_slow_sockets_lock_nobody_out(threaded) -> None:
    """Each new connection takes the place of the one that has waited the longest."""
    slow = [threaded.connect(begun) for begun in [b"", BEGUN_HEAD, BEGUN_BODY] * 10]
    assert threaded.is_healthy()
    assert len(threaded.uvicorn.server_state.connections) <= LIMITS.max_connections + 1
    for connection in slow:
        connection.close()


def test_connections_whose_requests_run_are_not_closed_for_others(threaded) -> None:
    """The connection beyond the limit is refused, and told when to come back."""
    get_slow = GET.replace(b"health", b"slow")
    running = [threaded.connect(get_slow) for _ in range(LIMITS.max_connections)]
    wait_for(lambda: len(threaded.uvicorn.server_state.tasks) == len(running))
    with threaded.connect() as refused:
        answer = read_all(refused)
    assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: " in answer
    for connection in running:
        read_until(connection, b"at last")
        connection.close()


def test_a_client_that_does_not_read_is_disconnected(threaded, sent) -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(threaded.address)
        connection.sendall(GET.replace(b"health", b"stream"))
        wait_for(lambda: sent)
        wait_for(lambda: not threaded.uvicorn.server_state.connections)
        wait_for(lambda: not threaded.uvicorn.server_state.tasks)


def test_connections_are_no_more_than_the_files_that_may_be_open(monkeypatch) -> None:
    import resource

    limits = [1024, 1024]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.__setitem__(0, pair[0]))
    assert allow_connections(500) == 500
    assert allow_connections(2048) == 1024 - 256
    limits[:] = [1024, 4096]
    assert allow_connections(2048) == 2048
    assert limits == [2048 + 256, 4096]
