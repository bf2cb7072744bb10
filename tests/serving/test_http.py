"""What is admitted when much is asked for at once, and what becomes of clients that leave."""

import gc
import json
import re
import threading
from collections.abc import Iterator

import httpx
import pytest
from servers import NUM_SLOTS, Threaded, threaded_server, wait_for

from jzero.model import tokenizer
from jzero.serving.http import BODIES_HELD, Server
from jzero.serving.limits import Limits

LIMITS = Limits(max_body_bytes=4000, max_request_sequences=8, max_waiting_sequences=8)


@pytest.fixture
def server(alone) -> Server:
    """A server whose worker decodes nothing: what it admits stays in the queue."""
    return alone.new_server(LIMITS)


@pytest.fixture
def threaded(server) -> Iterator[Threaded]:
    with threaded_server(server, LIMITS) as running:
        yield running


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def body_of(**fields: object) -> bytes:
    return json.dumps({"model": "m", "max_tokens": 2, **fields}).encode()


def request_bytes(body: bytes) -> bytes:
    """Returns a request for a completion as it is sent."""
    return HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


def ask(threaded: Threaded, body: bytes | Iterator[bytes]) -> httpx.Response:
    headers = {"Content-Type": "application/json"}
    url = f"{threaded.url}/v1/completions"
    return httpx.post(url, content=body, headers=headers, timeout=60)


def test_a_body_that_is_too_large_is_refused_before_it_is_read(server, threaded) -> None:
    answer = ask(threaded, body_of(prompt="x" * 5000))
    assert answer.status_code == 413
    message = "the body has more than 4000 bytes: .* --max-body-bytes"
    assert re.search(message, answer.json()["error"]["message"])

    def pieces() -> Iterator[bytes]:
        for _ in range(50):
            yield b"x" * 100

    assert ask(threaded, pieces()).status_code == 413, "no header announced the size"
    with threaded.connect(request_bytes(b"")) as connection:
        connection.recv(1 << 16)
        connection.sendall(HEAD + b"Content-Length: 60000000\r\n\r\nx")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413 ")
    assert server.bodies.num_bytes == 0


def test_bodies_that_are_held_at_once_are_bounded(server, threaded) -> None:
    server.bodies.num_bytes = BODIES_HELD * LIMITS.max_body_bytes
    answer = ask(threaded, body_of(prompt="a"))
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
    assert threaded.is_healthy()
    assert server.bodies.num_bytes == BODIES_HELD * LIMITS.max_body_bytes


def test_a_full_queue_asks_clients_to_come_back(server, threaded) -> None:
    body = request_bytes(body_of(prompt=["a"] * 8))
    waiting = [threaded.connect(body) for _ in range((NUM_SLOTS + 8) // 8)]
    wait_for(lambda: server.worker.posted.qsize() == len(waiting))

    answer = ask(threaded, body_of(prompt="a"))
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) > 0
    error = answer.json()["error"]
    assert "--max-waiting-sequences" in error["message"] and error["type"] == "rate_limit_error"
    assert threaded.is_healthy()
    for connection in waiting:
        connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_it_waits_is_forgotten(alone, server, threaded, stream) -> None:
    body = request_bytes(body_of(prompt=["a"] * 8, stream=stream))
    with threaded.connect(body):
        wait_for(lambda: server.worker.posted.qsize() == 1)
        [reply] = server.replies
        submission = reply.submission
        assert not submission.is_cancelled
    wait_for(lambda: submission.is_cancelled)
    wait_for(lambda: not server.replies)

    # The worker then drops it, and the room is free for a request of 8 beside the slots.
    server.worker.begin(alone.new_scheduler())
    # It does not block while something is live.
    server.worker.live = {submission.sequences[0]: submission.choices[0]}
    assert server.worker.admit(server.worker.run) == []
    assert server.worker.num_reserved == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_its_prompts_are_tokenized_is_forgotten(
    server, threaded, monkeypatch, stream
) -> None:
    """The prompts after the one that is being tokenized are not, and /health is answered."""
    may_go_on, tokenized = threading.Event(), []

    def encode(*_: object) -> list[int]:
        tokenized.append(0)
        assert may_go_on.wait(60)
        return [1]

    monkeypatch.setattr(tokenizer, "encode_releasing_gil", encode)
    with threaded.connect(request_bytes(body_of(prompt=["a"] * 8, stream=stream))):
        wait_for(lambda: tokenized)
        assert server.worker.num_reserved == 8
        assert threaded.is_healthy()
    wait_for(lambda: server.worker.num_reserved == 0)
    may_go_on.set()
    server.reading_threads.shutdown()
    assert len(tokenized) == 1
    assert server.worker.posted.empty() and not server.replies


def test_a_request_that_is_refused_gives_its_room_back(server, threaded) -> None:
    assert ask(threaded, body_of(prompt=["a", "x" * 96])).status_code == 400
    assert server.worker.num_reserved == 0 and server.bodies.num_bytes == 0


def test_what_a_request_says_is_forgotten_once_it_is_admitted(server, threaded) -> None:
    """A request that waits may have brought a megabyte of labels."""
    label = "unlikely-" * 300
    with threaded.connect(request_bytes(body_of(prompt="a", user=label))):
        wait_for(lambda: server.worker.posted.qsize() == 1)
        wait_for(lambda: server.bodies.num_bytes == 0)
        gc.collect()
        holders = [
            value
            for value in gc.get_objects()
            if type(value) is dict and value.get("user") == label
        ]
        assert holders == []


def test_a_client_that_sends_on_gets_to_read_why_its_body_is_refused(threaded) -> None:
    """The connection is not reset under a client that is still sending."""
    answer = ask(threaded, b"x" * 20_000_000)
    assert answer.status_code == 413
