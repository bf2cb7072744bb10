"""Processes meet with a word and within a time, and each tells in one line of one that ended."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from jzero.errors import UserError
from jzero.hosts import relay, rendezvous
from jzero.hosts.rendezvous import Connection, meet

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def call(port: int) -> socket.socket:
    """Connects to a port as soon as somebody listens there."""
    for _ in range(200):
        with contextlib.suppress(OSError):
            return socket.create_connection(("localhost", port))
        time.sleep(0.02)
    raise TimeoutError(port)


MET: list[Connection] = []  # connections of a test, which it leaves open


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool
    while MET:
        MET.pop().socket.close()


def meet_in_thread(address: str, of: int, index: int, seconds: float) -> list[Connection]:
    connections = meet(address, of, index, seconds)
    MET.extend(connections)
    return connections


@pytest.fixture(autouse=True)
def early_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "FIRST_NOTICE", 0.3)
    monkeypatch.setattr(rendezvous, "HELLO_SECONDS", 0.5)


def meeting(
    threads: ThreadPoolExecutor, port: int, indices: list[int], of: int, seconds: float = 20.0
) -> list[Future[list[Connection]]]:
    """Lets processes meet, each in a thread of this one."""
    address = f"localhost:{port}"
    return [threads.submit(meet_in_thread, address, of, index, seconds) for index in indices]


# -- Meeting ---------------------------------------------------------------------------------------


def test_processes_meet_and_process_0_has_a_connection_to_each(
    threads: ThreadPoolExecutor,
) -> None:
    others = meeting(threads, port := free_port(), [2, 1], of=3)
    time.sleep(0.5)  # the first process comes last
    [first] = meeting(threads, port, [0], of=3)

    connections = first.result()
    assert [connection.index for connection in connections] == [1, 2]
    assert connections[1].name.startswith("host 2 of 3 (")
    for future, connection in zip(others, reversed(connections), strict=True):
        [other] = future.result()
        assert other.name.startswith("host 0 of 3 (")
        connection.send({"beat": connection.index})
        assert other.receive(5.0) == [{"beat": connection.index}]
    with socket.create_server(("localhost", port)):  # it is free for JAX's coordinator
        pass


@pytest.mark.parametrize(("index", "missing"), [(0, "process 1 of 2"), (1, "process 0 of 2")])
def test_who_waits_says_so_and_ends_with_what_is_missing(
    index: int, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"localhost:{free_port()}"
    start = time.monotonic()
    with pytest.raises(UserError, match=f"^{missing} did not join at {address} within 1 s.*same"):
        meet(address, 2, index, 1.0)
    assert time.monotonic() - start < 3.0
    [line] = capsys.readouterr().err.splitlines()
    assert line == f"waiting for {missing} at {address}, up to 1 s"


def test_a_process_that_left_before_the_start_is_waited_for_again(
    threads: ThreadPoolExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    [first] = meeting(threads, port := free_port(), [0], of=3)
    with call(port) as leaver:
        hello = rendezvous.hello_of(1, 3)
        Connection(leaver, 0, "").send(hello)
        time.sleep(0.5)
    time.sleep(0.5)
    rest = meeting(threads, port, [1, 2], of=3)

    assert [connection.index for connection in first.result()] == [1, 2]
    assert all(future.result() for future in rest)
    assert "host 1 of 3 (" in (err := capsys.readouterr().err)
    assert "has left before the start" in err


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"index": "1"}\n'])
def test_other_callers_at_the_port_are_no_processes(
    threads: ThreadPoolExecutor, said: bytes
) -> None:
    [first] = meeting(threads, port := free_port(), [0], of=2)
    with call(port) as stranger:
        stranger.sendall(said)
        [second] = meeting(threads, port, [1], of=2)
        assert [connection.index for connection in first.result()] == [1]
        assert second.result()


@pytest.mark.parametrize(
    ("starts", "mistake"),
    [
        ([(0, 3), (1, 2)], "process 0 has --num_processes=3 and process 1 has --num_processes=2"),
        ([(0, 3), (1, 3), (1, 3)], "two processes have --process_id=1"),
    ],
)
def test_processes_of_another_start_are_refused_on_all(
    threads: ThreadPoolExecutor, starts: list[tuple[int, int]], mistake: str
) -> None:
    address = f"localhost:{free_port()}"
    futures = [threads.submit(meet, address, of, index, 20.0) for index, of in starts]
    for future in futures:
        with pytest.raises(UserError, match=mistake):
            future.result()


@pytest.mark.parametrize("address", ["host", "host:", ":1", "host:70000", "host:x"])
def test_an_address_without_a_port_is_refused(address: str) -> None:
    with pytest.raises(UserError, match="--coordinator=.*give HOST:PORT"):
        meet(address, 2, 0, 1.0)


def test_a_port_that_is_taken_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "BIND_SECONDS", 0.2)
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--coordinator=localhost:{port}: Address already"):
            meet(f"localhost:{port}", 2, 0, 20.0)


# -- The relay -------------------------------------------------------------------------------------


def test_a_relay_keeps_the_near_end_open_when_the_far_end_closes() -> None:
    """JAX's client would abort its process otherwise."""

    async def talk(port: int, far: socket.socket) -> tuple[bytes, bool]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        accepted, _ = await asyncio.to_thread(far.accept)
        writer.write(b"ping")
        received = await asyncio.to_thread(accepted.recv, 4)
        accepted.sendall(received[::-1])
        answer = await reader.readexactly(4)
        accepted.close()
        try:
            await asyncio.wait_for(reader.read(1), 1.0)
        except TimeoutError:
            return answer, True
        finally:
            writer.close()
        return answer, False

    with socket.create_server(("127.0.0.1", 0)) as far:
        port = relay.start_relay("127.0.0.1", far.getsockname()[1])
        assert asyncio.run(talk(port, far)) == (b"gnip", True)
    with relay.RELAYS.pop() as process:
        assert process.stdin is not None
        process.stdin.close()  # as when this process ends
        assert process.wait(10) == 0


# -- The end ---------------------------------------------------------------------------------------

# A process that meets the others, and then does what its stdin says.
HOST = """
import sys
from jzero.hosts import peers, rendezvous

peers.NOTICE_SECONDS = 2.0
index = int(sys.argv[2])
connections = rendezvous.meet(sys.argv[1], 3, index, 60.0)
peers.start_watching(index, 3, connections, float(sys.argv[3]))
print("met", flush=True)
for line in sys.stdin:
    if line == "mistake\\n":
        peers.end_process("a mistake", 2, f"{peers.this_host()} ended: a mistake")
    if line == "raise\\n":
        raise RuntimeError("a fault")
"""


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts three processes that watch each other. The parameter is --silence_seconds."""
    address = f"localhost:{free_port()}"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", HOST, address, str(index), str(request.param)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(3)
    ]
    with contextlib.ExitStack() as cleanup:
        for process in started:
            cleanup.enter_context(process)
            cleanup.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "met\n"
        yield started


def outcomes(
    processes: list[subprocess.Popen[str]], seconds: float = 20.0
) -> list[tuple[int, list[str]]]:
    """Returns the status of each process, and the lines that it printed to stderr."""
    found = []
    for process in processes:
        process.wait(seconds)  # stdin stays open: a host does not end by itself
        assert process.stderr is not None
        found.append((process.returncode, process.stderr.read().splitlines()))
    return found


@pytest.mark.parametrize("hosts", [60], indirect=True)
@pytest.mark.parametrize("lost", [0, 2])
def test_a_host_that_is_killed_is_one_line_on_every_other(
    hosts: list[subprocess.Popen[str]], lost: int
) -> None:
    killed = hosts.pop(lost)
    killed.kill()
    start = time.monotonic()
    for status, lines in outcomes(hosts):
        assert status == 1
        [line] = lines
        assert line.startswith(f"error: host {lost} of 3 (")
        assert f"pid {killed.pid}) is gone" in line
        assert "Start the same command, with the same --workdir, on all hosts" in line
    assert time.monotonic() - start < 15.0


@pytest.mark.parametrize("hosts", [60], indirect=True)
def test_a_mistake_of_one_host_is_its_line_on_every_other(
    hosts: list[subprocess.Popen[str]],
) -> None:
    pipe = hosts[1].stdin
    assert pipe is not None
    pipe.write("mistake\n")
    pipe.flush()
    expected = ["error: host 1 of 3 ended: a mistake", "error: a mistake"]
    expected.append(expected[0])
    for host, (status, lines) in enumerate(outcomes(hosts)):
        # On a busy machine a host may also report that another one is late.
        errors = [line for line in lines if line.startswith("error:")]
        assert (status, errors) == (2 if host == 1 else 1, [expected[host]])


@pytest.mark.parametrize("hosts", [60], indirect=True)
def test_a_host_that_raises_is_gone_and_one_that_is_done_is_not(
    hosts: list[subprocess.Popen[str]],
) -> None:
    done = hosts[2].stdin
    assert done is not None
    done.close()
    assert hosts[2].wait(20) == 0
    time.sleep(2.0)
    assert hosts[0].poll() is None
    assert hosts[1].poll() is None

    pipe = hosts[1].stdin
    assert pipe is not None
    pipe.write("raise\n")
    pipe.flush()
    [(status, [line])] = outcomes(hosts[:1])
    assert status == 1
    assert "host 1 of 3" in line


@pytest.mark.parametrize("hosts", [5.0], indirect=True)
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_host_that_is_stopped_is_named_and_may_come_back(
    hosts: list[subprocess.Popen[str]], stopped: int
) -> None:
    victim = hosts[stopped]
    victim.send_signal(signal.SIGSTOP)
    time.sleep(3.5)
    victim.send_signal(signal.SIGCONT)
    time.sleep(2.0)
    assert all(process.poll() is None for process in hosts)

    victim.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    hosts.pop(stopped)
    found = outcomes(hosts)
    assert time.monotonic() - start < 15.0
    for status, lines in found:
        assert status == 1
        assert "answers again" in "\n".join(lines)
        errors = [line for line in lines if line.startswith("error: ")]
        assert len(errors) == 1
        assert f"host {stopped} of 3" in errors[0]
        assert "has not answered for 5 s" in errors[0]
    victim.send_signal(signal.SIGCONT)
    [(status, lines)] = outcomes([victim])
    assert status == 1
    assert len([line for line in lines if line.startswith("error: ")]) == 1


def test_a_line_of_another_process_is_one_printable_line() -> None:
    assert rendezvous.one_line("a\nb\x1b[31m" + "c" * 5000)[:8] == "a b[31mc"
    assert len(rendezvous.one_line("c" * 5000)) == rendezvous.LONGEST_TEXT


def test_lines_that_arrive_together_are_all_received() -> None:
    near, far = socket.socketpair()
    with near, far:
        sender = Connection(far, 1, "")
        threading.Thread(target=sender.send, args=({"a": "x" * 40_000},)).start()
        sender_seen: list[dict] = []
        receiver = Connection(near, 0, "")
        while len(sender_seen) < 1:
            sender_seen += receiver.receive(1.0) or []
        sender.send({"b": 1})
        sender.send({"c": 2})
        sender_seen += receiver.receive(1.0) or []
    assert [list(message) for message in sender_seen[:2]] == [["a"], ["b"]]
