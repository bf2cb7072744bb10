"""Interpreters in the sandbox that keep their variables from one cell to the next."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jzero.sandbox import levels
from jzero.sandbox.client import Limits, Sandbox, SandboxError
from jzero.sandbox.session import Session

LIMITS = Limits(seconds=1.0, wall_seconds=2.0, output_mib=0.1)


@pytest.fixture(scope="module", params=["namespaces", "landlock", "none"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    level = request.param
    if reason := levels.failure(level):
        pytest.skip(f"this machine has no sandbox of level {level}: {reason}")
    with Sandbox(level) as sandbox:
        yield sandbox


def test_cells_share_their_variables(sandbox: Sandbox) -> None:
    with Session(sandbox, LIMITS) as session:
        assert session.run("import math\ndef f(x):\n    return x * y").output == ""
        assert session.run("y = 7\nprint('set')").output == "set\n"
        assert session.run("print(1)\nf(6)").output == "1\n42\n"
        assert session.run("None").output == ""
        assert session.run("class A: pass\nimport pickle; len(pickle.dumps(A()))").end == ""


def test_what_a_cell_raises_is_its_output(sandbox: Sandbox) -> None:
    with Session(sandbox, LIMITS) as session:
        session.run("x = 1")
        outcome = session.run("print('before')\n1 / 0")
        assert outcome.failed and outcome.end == ""
        assert outcome.output.startswith("before\nTraceback")
        assert "1 / 0" in outcome.output and "program.py" not in outcome.output
        assert outcome.output.endswith("ZeroDivisionError: division by zero\n")
        assert "SyntaxError" in session.run("def").output
        assert "SystemExit" in session.run("import sys; sys.exit(3)").output
        assert session.run("x").output == "1\n"


@pytest.mark.parametrize(
    "source, end",
    [
        ("while True: pass", "time"),
        ("import time; time.sleep(100)", "wall"),
        ("while True: print('x' * 10000)", "output"),
        ("import os; os._exit(0)", "exit"),
        ("import os; os.close(4); os.close(3); 1", "exit"),
    ],
)
def test_a_cell_beyond_a_limit_ends_its_session_alone(
    sandbox: Sandbox, source: str, end: str
) -> None:
    limits = Limits(seconds=0.3, wall_seconds=0.6 if end == "wall" else 20.0, output_mib=0.1)
    with Session(sandbox, LIMITS) as other, Session(sandbox, limits) as session:
        other.run("kept = 5")
        assert session.run(source).end == end
        with pytest.raises(SandboxError, match="has ended"):
            session.run("1")
        assert other.run("kept").output == "5\n"


def test_many_sessions_live_beside_each_other_and_end_with_their_client(sandbox: Sandbox) -> None:
    sessions = [Session(sandbox, LIMITS) for _ in range(20)]
    for number, session in enumerate(sessions):
        session.run(f"number = {number}")
    assert [session.run("number").output for session in sessions] == [f"{i}\n" for i in range(20)]
    while_open = living_below(sandbox.server_pid)
    for session in sessions:
        session.close()
    # A watcher sees the end of its socket. Nothing announces when it has ended.
    while living_below(sandbox.server_pid) > while_open - 2 * len(sessions):
        time.sleep(0.01)


def living_below(pid: int) -> int:
    """Returns the number of processes below one that have not ended."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        states = [Path(f"/proc/{child}/stat").read_text().split()[2] for child in text.split()]
    except OSError:  # one has just been collected
        return 1 << 20
    below = sum(living_below(int(child)) for child in text.split())
    return below + sum(state != "Z" for state in states)


def test_sessions_have_no_more_rights_than_programs(sandbox: Sandbox) -> None:
    if sandbox.level == "none":
        return
    with Session(sandbox, LIMITS) as session:
        for source in (
            f"open({os.path.abspath(__file__)!r}).read()",
            "import socket; socket.create_connection(('127.0.0.1', 9))",
            "import os; os.fork()",
            "import subprocess; subprocess.run(['true'])",
        ):
            assert "Error" in session.run(source).output


def test_a_cell_that_forges_its_end_harms_itself_alone(sandbox: Sandbox) -> None:
    with Session(sandbox, LIMITS) as other, Session(sandbox, LIMITS) as session:
        session.run("import os; os.write(3, b'0' * 10)")
        session.run("print('x')")
        assert other.run("6 * 7").output == "42\n"


def test_an_interpreter_is_the_same_each_time(sandbox: Sandbox) -> None:
    source = "import random\n[random.random(), hash('a'), list({'a', 'b', 'c'})]"
    printed = set()
    for _ in range(2):
        with Session(sandbox, LIMITS) as session:
            printed.add(session.run(source).output)
    assert len(printed) == 1


def test_a_cell_has_a_largest_size(sandbox: Sandbox) -> None:
    with Session(sandbox, LIMITS) as session:
        with pytest.raises(ValueError, match="longer than"):
            session.run("#" * 100_000)
        assert session.run(f"len({'x' * 40_000!r})").output == "40000\n"


def test_a_server_that_ended_is_replaced(sandbox: Sandbox) -> None:
    with Sandbox(sandbox.level) as own:
        own._process.kill()
        own._process.wait()
        with Session(own, LIMITS) as session:
            assert session.run("1 + 1").output == "2\n"
