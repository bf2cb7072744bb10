"""The port is taken before a model is loaded, and what prevents that is one line."""

import contextlib
import socket
import sys
from collections.abc import Iterator

import pytest
from servers import server_process

from jzero import cli, serve
from jzero.commands import evaluate
from jzero.errors import UserError
from jzero.servers import sockets


@pytest.fixture
def taken_port() -> Iterator[int]:
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_a_free_port_is_bound_and_listens_only_when_told() -> None:
    bound = sockets.bind("127.0.0.1", 0)
    [opened] = bound
    address = opened.getsockname()
    assert sockets.url(opened) == f"http://127.0.0.1:{address[1]}"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=10)
    sockets.listen("127.0.0.1", 0, bound)
    socket.create_connection(address, timeout=10).close()
    opened.close()


def test_a_port_that_was_taken_meanwhile_is_refused_too() -> None:
    """Two servers may bind a port, but one listens."""
    first = sockets.bind("127.0.0.1", 0)
    port = first[0].getsockname()[1]
    second = sockets.bind("127.0.0.1", port)
    sockets.listen("127.0.0.1", port, first)
    with pytest.raises(UserError, match=f"--port={port}: cannot listen .another process"):
        sockets.listen("127.0.0.1", port, second)
    for opened in (*first, *second):
        opened.close()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--port", "99999"], "--port=99999: ports are from 0 to 65535"),
        (["--port", "-1"], "--port=-1: ports are from 0 to 65535"),
        (["--port", "many"], "argument --port: invalid int value: 'many'"),
        (["--jetstream", "99999"], "--jetstream=99999: ports are from 0 to 65535"),
        (["--host", "no-such-host.invalid"], "--host=no-such-host.invalid: the name has no addr"),
        (["--host", "a" * 300], ": the name has no address"),
        (["--host", "192.0.2.1"], "--host=192.0.2.1 --port=8000: cannot listen"),
        (["--port", "TAKEN"], "cannot listen (another process listens there): choose another"),
        (["--jetstream", "TAKEN"], "cannot listen (another process listens there)"),
        (["--max-body-bytes", "0"], "--max-body-bytes=0 must be at least 1"),
        (["--api-key", ""], "--api-key: the key has to be"),
        (
            ["--jetstream", "0", "--api-key", "k"],
            "--jetstream=0: JetStream's server has no API keys",
        ),
        (
            ["--jetstream", "0", "--config.rollout.draft=ngram"],
            "--jetstream=0: JetStream takes one token of a slot at a time: set rollout.draft=none",
        ),
    ],
)
def test_a_mistake_is_one_line_before_the_model_is_loaded(
    monkeypatch, capsys, taken_port, arguments, message
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(evaluate, "load", load)
    monkeypatch.setattr(cli, "start_jax", list)  # this process has its devices already
    arguments = [argument.replace("TAKEN", str(taken_port)) for argument in arguments]
    monkeypatch.setattr(sys, "argv", ["serve", "--model", "DIR", *arguments])
    with pytest.raises(SystemExit) as ended:
        serve.main()
    assert ended.value.code == 2
    out, error = capsys.readouterr()
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert "until Ctrl-C" not in out


def test_a_taken_port_ends_the_command(taken_port, environment: dict[str, str]) -> None:
    """As a process, whose threads once made its end an abort."""
    with server_process("no-such-model", environment, "--port", str(taken_port)) as server:
        assert server.wait(120) == 2
        error = server.stderr.read()
    assert error.startswith(f"error: --host=127.0.0.1 --port={taken_port}: cannot listen")
    assert error.count("\n") == 1
