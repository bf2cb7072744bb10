"""Ctrl-C and TERM: requests that run may finish for a while, and new ones are refused."""

import contextlib
import json
import re
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest
from servers import Threaded, read_all, save_model, server_process, threaded_server, wait_for

from jzero.serving.http import Server
from jzero.serving.limits import Limits
from jzero.serving.worker import Submission

LIMITS = Limits(grace_seconds=1000)


@pytest.fixture
def server(alone) -> Server:
    """A server whose worker decodes nothing: the tests report what they like."""
    return alone.new_server(LIMITS)


@pytest.fixture
def threaded(server, request: pytest.FixtureRequest) -> Iterator[Threaded]:
    """The server with the grace of the test's parameter, in seconds, or a very long one."""
    grace_seconds = getattr(request, "param", LIMITS.grace_seconds)
    with threaded_server(server, replace(LIMITS, grace_seconds=grace_seconds)) as running:
        yield running


def request_bytes(stream: bool) -> bytes:
    body = json.dumps({"model": "m", "prompt": "a", "stream": stream}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def take_submission(server: Server) -> Submission:
    """Returns what the server has submitted, in the place of its worker."""
    wait_for(lambda: server.worker.posted.qsize() == 1)
    [reply] = server.replies
    return reply.submission


def report(submission: Submission, tokens: list[int], finish_reason: str = "") -> None:
    """Decodes tokens of the only sequence, and reports them."""
    [sequence] = submission.sequences
    sequence.tokens.append(tokens)
    sequence.turn_text = "".join(chr(33 + token) for token in sequence.new_tokens)
    sequence.finish_reason = finish_reason
    submission.report(sequence)


def stop(threaded: Threaded, server: Server) -> None:
    """Does what the first Ctrl-C does."""
    threaded.uvicorn.should_exit = True
    wait_for(lambda: server.is_stopping)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_runs_finishes_and_new_connections_are_refused(
    server, threaded, stream
) -> None:
    with threaded.connect(request_bytes(stream)) as connection:
        submission = take_submission(server)
        report(submission, [1, 2])
        stop(threaded, server)

        def is_refused() -> bool:
            with contextlib.suppress(ConnectionRefusedError), threaded.connect():
                return False
            return True

        wait_for(is_refused)
        report(submission, [3], "length")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b'"finish_reason": "length"' in answer
    assert (b"data: [DONE]" in answer) == stream
    threaded.thread.join(60)
    assert not threaded.thread.is_alive()


def test_a_request_that_arrives_after_the_stop_is_refused(server, threaded) -> None:
    sent = request_bytes(stream=False)
    with threaded.connect(sent[:-5]) as connection:
        wait_for(lambda: server.bodies.num_bytes)
        stop(threaded, server)
        connection.sendall(sent[-5:])
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: " in answer
    assert server.worker.num_reserved == 0


def test_idle_connections_do_not_delay_the_end(server, threaded) -> None:
    with threaded.connect(), threaded.connect(b"GET /hea"), httpx.Client() as client:
        assert client.get(f"{threaded.url}/health").status_code == 200
        stop(threaded, server)
        threaded.thread.join(60)
        assert not threaded.thread.is_alive()


@pytest.mark.parametrize("threaded", [0.3], indirect=True)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_outlasts_the_grace_ends_with_an_error(server, threaded, stream) -> None:
    """And without a traceback for each of them in the log."""
    with threaded.connect(request_bytes(stream)) as connection:
        submission = take_submission(server)
        report(submission, [1, 2])
        stop(threaded, server)
        answer = read_all(connection)
    assert b"the server has ended before the answer was complete" in answer
    assert b'"server_error"' in answer and b"[DONE]" not in answer
    assert answer.startswith(b"HTTP/1.1 200 " if stream else b"HTTP/1.1 503 ")
    wait_for(lambda: submission.is_cancelled)  # it may be cancelled after the answer is there
    threaded.thread.join(60)
    assert not threaded.thread.is_alive()


@pytest.mark.parametrize("threaded", [0.3], indirect=True)
def test_a_client_that_does_not_read_does_not_delay_the_end(server, threaded) -> None:
    """Its stream is full, so that the error cannot be sent either."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(threaded.address)
        connection.sendall(request_bytes(stream=True))
        submission = take_submission(server)
        [held] = threaded.uvicorn.server_state.connections
        send_buffer = held.transport.get_extra_info("socket")
        send_buffer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        report(submission, [1] * 400_000)
        wait_for(lambda: held.flow.write_paused)
        stop(threaded, server)
        threaded.thread.join(60)
        assert not threaded.thread.is_alive()


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_of_the_decoding_thread_ends_its_requests_at_once(server, threaded, stream) -> None:
    with threaded.connect(request_bytes(stream)) as connection:
        take_submission(server)
        server.worker.has_ended = True
        stop(threaded, server)
        answer = read_all(connection)
    assert b"the server has failed" in answer
    assert answer.startswith(b"HTTP/1.1 200 " if stream else b"HTTP/1.1 500 ")


def test_a_second_interrupt_does_not_wait(server, threaded) -> None:
    with threaded.connect(request_bytes(stream=True)):
        take_submission(server)
        stop(threaded, server)
        threaded.uvicorn.force_exit = True
        threaded.thread.join(60)
        assert not threaded.thread.is_alive()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_process_says_when_it_listens_and_finishes_its_streams(
    tmp_path, environment: dict[str, str], sent
) -> None:
    model = save_model(tmp_path / "model")
    with server_process(model, environment, "--port", "0") as process:
        line = process.stdout.readline()
        url = re.fullmatch(rf"{model}: listening on (http://\S+)/v1 until Ctrl-C\n", line)[1]
        assert httpx.get(f"{url}/health").status_code == 200, "what it says is true at once"
        options = {"model": model, "prompt": "a", "n": 16, "max_tokens": 90, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=options, timeout=300) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(sent)
            time.sleep(0.5)
            assert list(lines)[-2] == "data: [DONE]"
        expected = 0 if sent == signal.SIGINT else -signal.SIGTERM
        assert (process.wait(60), process.stderr.read()) == (expected, "")
