"""What fails in a sandbox is noticed in time, and nothing of it stays behind.

Servers, watchers and programs that are killed or stopped, clients that go away, and messages
without end.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import started

from jzero.sandbox import client, levels, messages, session
from jzero.sandbox.client import Limits, Program, Sandbox, SandboxError
from jzero.sandbox.session import Session

LEVELS = ["namespaces", "landlock"]
GRACE_SECONDS = 1.0
ANSWER = Program("print(6 * 7)")
LIMITS = Limits(seconds=1.0, wall_seconds=1.0)


@pytest.fixture(params=LEVELS)
def sandbox(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    if reason := levels.failure(request.param):
        pytest.skip(f"this machine has no sandbox of level {request.param}: {reason}")
    monkeypatch.setattr(client, "_GRACE_SECONDS", GRACE_SECONDS)
    monkeypatch.setattr(session, "_GRACE_SECONDS", GRACE_SECONDS)
    with Sandbox(request.param) as made:
        yield made


def below(pid: int) -> list[int]:
    """Returns the processes below a process that have not ended."""
    found = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
            found += [int(child)] * (state != "Z") + below(int(child))
    return found


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def processes_of(sandbox: Sandbox) -> list[int]:
    return [sandbox.server_pid, *below(sandbox.server_pid)]


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_server_that_does_nothing_more_is_replaced_in_time(
    number: signal.Signals, sandbox: Sandbox
) -> None:
    processes = processes_of(sandbox)
    for pid in processes:
        os.kill(pid, number)
    start = time.monotonic()
    assert sandbox.run(ANSWER, LIMITS).stdout == "42\n"
    assert time.monotonic() - start < LIMITS.wall_seconds + 2 * GRACE_SECONDS + 10
    assert sandbox.num_starts == 2
    wait_until(lambda: not any(map(is_alive, processes)))


def test_a_stopped_server_begins_no_session_and_is_replaced(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_START_SECONDS", 5.0)
    for pid in processes_of(sandbox):
        os.kill(pid, signal.SIGSTOP)
    with Session(sandbox, LIMITS) as made:
        assert made.run("6 * 7").output == "42\n"
    assert sandbox.num_starts == 2


def test_a_program_ends_with_its_watcher(sandbox: Sandbox) -> None:
    """The watcher is what ends a program at its limits."""
    servers = processes_of(sandbox)
    sleeping = Program("import time\ntime.sleep(1000)")
    outcomes: list[object] = []

    def run() -> None:
        try:
            outcomes.append(sandbox._run(sleeping, Limits(seconds=5.0, wall_seconds=60.0)))
        except SandboxError as error:
            outcomes.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: len(processes_of(sandbox)) == len(servers) + 2)
    watcher, program = [pid for pid in processes_of(sandbox) if pid not in servers]
    time.sleep(0.3)  # until the program sleeps
    os.kill(watcher, signal.SIGKILL)
    wait_until(lambda: not is_alive(program))
    thread.join(20.0)
    assert isinstance(outcomes[0], SandboxError)
    assert sandbox.run(ANSWER, LIMITS).stdout == "42\n"


CLIENT = """
import sys, threading, time
from jzero.sandbox.client import Limits, Program, Sandbox
sandbox = Sandbox(sys.argv[1])
limits = Limits(seconds=1e6, wall_seconds=1e6)
sleeping = Program("import time\\ntime.sleep(1e6)")
threading.Thread(target=lambda: sandbox.run(sleeping, limits)).start()
time.sleep(0.5)
print(sandbox.server_pid, flush=True)
time.sleep(1e6)
"""


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_outlives_a_client_that_is_killed(level: str) -> None:
    if reason := levels.failure(level):
        pytest.skip(f"this machine has no sandbox of level {level}: {reason}")
    with started(
        [sys.executable, "-c", CLIENT, level], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        server = int(process.stdout.readline())
        wait_until(lambda: len(below(server)) >= 2)
        processes = [server, *below(server)]
        process.kill()
    wait_until(lambda: not any(map(is_alive, processes)))


def test_a_message_has_a_deadline_for_all_of_it_and_a_largest_size() -> None:
    ours, its = socket.socketpair()
    with ours, its:

        def drip() -> None:
            with contextlib.suppress(OSError):
                for byte in messages._LENGTH.pack(1000) + bytes(1000):
                    its.send(bytes([byte]))
                    time.sleep(0.05)

        thread = threading.Thread(target=drip)
        thread.start()
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            messages.receive_bytes(ours, seconds=0.3)
        assert time.monotonic() - start < 5.0
        ours.close()
        thread.join()
    ours, its = socket.socketpair()
    with ours, its:
        its.sendall(messages._LENGTH.pack(1 << 40))
        with pytest.raises(ValueError, match="1099511627776 bytes"):
            messages.receive_bytes(ours, seconds=5.0, max_bytes=1 << 20)


def test_output_and_value_are_bounded_together(sandbox: Sandbox) -> None:
    limits = Limits(seconds=5.0, output_mib=0.25)
    for source in (
        "def f(): return 'x' * 10**7",
        "def f(): return [0] * 10**6",
        "def f():\n    print('x' * 200_000)\n    return 'x' * 200_000",
        "def f():\n    import os\n    os.write(3, b'[' * 10**6)",
    ):
        outcome = sandbox.run(Program(source, function="f"), limits)
        assert outcome.end == "output"
        assert len(outcome.stdout) + len(outcome.result) <= 0.25 * 2**20
    # Every byte of the output may take six bytes of the reply, and still is no failure.
    outcome = sandbox.run(Program("import os\nos.write(1, bytes(200_000))"), limits)
    assert (outcome.end, outcome.stdout) == ("exit", "\0" * 200_000)


def test_large_sources_and_inputs_come_through(sandbox: Sandbox) -> None:
    source = f"x = {'a' * 3_000_000!r}\nprint(len(x), len(input()))"
    outcome = sandbox.run(Program(source, stdin="b" * 5_000_000), Limits(seconds=5.0))
    assert outcome.stdout == "3000000 5000000\n", outcome
    outcome = sandbox.run(Program("print(ascii(input()))", stdin="\ud800é"), Limits())
    assert outcome.stdout.strip().endswith("\\xe9'")
