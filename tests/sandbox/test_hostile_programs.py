"""No hostile program escapes, none gets credit, and honest ones go on being run."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hostile_programs import CASES, ESCAPED, LIMITS, Case, fill_in

from jzero.sandbox import comparison, levels
from jzero.sandbox.client import Limits, Program, Sandbox

# Words that no program can know.
EXPECTED = f"{os.urandom(8).hex()} {os.urandom(8).hex()}"
HONEST = Program("print(sum(map(int, input().split())))", stdin="20 22")
SECONDS_TO_END = 5.0  # of a watcher, on a busy machine
MOST_MEMORY = 400 << 20  # bytes of one process: 256 MiB of a program, and Python


def need(level: str) -> None:
    """Skips a test that needs a level of protection that this machine does not have."""
    if reason := levels.failure(level):
        pytest.skip(f"this machine has no sandbox of level {level}: {reason}")


@pytest.fixture(scope="module")
def canary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of the user's with the expected output."""
    path = tmp_path_factory.mktemp("canary") / "expected.txt"
    path.write_text(EXPECTED)
    return path


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A port of this machine that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(
    scope="module",
    params=[
        "namespaces",
        "landlock",
        "seccomp",
    ],
)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    need(request.param)
    with pytest.MonkeyPatch.context() as patch, Sandbox(request.param) as made:
        patch.setenv("JZERO_SECRET", "key")
        yield made


@pytest.fixture(scope="module")
def server_processes(sandbox: Sandbox) -> list[int]:
    """The processes of the server itself, before it has run a program."""
    return descendants(sandbox.server_pid)


def descendants(pid: int) -> list[int]:
    """Returns the processes below a process.

    A process may end between its listing and the look at it. Then opening the file fails, or
    reading it does.
    """
    found = []
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    for child in map(int, text.split()):
        found += [child, *descendants(child)]
    return found


def has_only(pid: int, processes: list[int]) -> bool:
    """Returns whether nothing but `processes` is left below a process, within a few seconds.

    A watcher sends its reply before it ends.
    """
    deadline = time.monotonic() + SECONDS_TO_END
    while descendants(pid) != processes:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def parameters() -> list[object]:
    """Returns all cases as parameters of a test."""
    return [pytest.param(case, id=case.name.replace(" ", "_")) for case in CASES]


@pytest.mark.parametrize("case", parameters())
def test_a_hostile_program_gets_nothing(
    case: Case, sandbox: Sandbox, server_processes: list[int], canary: Path, port: int
) -> None:
    if sandbox.level == "seccomp" and case.reads:
        pytest.skip("the level seccomp does not keep programs from reading")

    outcome = sandbox.run(fill_in(case, canary, port), LIMITS)

    assert ESCAPED not in outcome.stdout + outcome.result
    assert not comparison.same_output(outcome.stdout, EXPECTED)
    assert not comparison.same_result(outcome.result, EXPECTED)
    assert canary.read_text() == EXPECTED
    assert not (canary.parent / "jzero-was-here").exists()
    assert len(outcome.stdout) + len(outcome.result) <= 2 * LIMITS.output_mib * 2**20
    assert has_only(sandbox.server_pid, server_processes)
    # The same server goes on: it was neither killed nor replaced.
    assert sandbox.num_starts == 1


@pytest.mark.parametrize("level", ["namespaces", "landlock"])
def test_honest_programs_pass_between_hostile_ones(level: str, canary: Path, port: int) -> None:
    need(level)
    with Sandbox(level) as sandbox:
        for case in CASES[:: len(CASES) // 8]:
            sandbox.run(fill_in(case, canary, port), LIMITS)
            assert sandbox.run(HONEST, Limits()).stdout == "42\n"
        assert sandbox.num_starts == 1


# Runs programs in a process that has no other children, and prints how they ended and the most
# memory that one of its descendants took.
MEASURE = """
import json, resource, sys
from jzero.sandbox.client import Limits, Program, Sandbox

programs, limits = json.load(sys.stdin)
with Sandbox("namespaces") as sandbox:
    statuses = [sandbox.run(Program(**each), Limits(**limits)).status for each in programs]
print(json.dumps([statuses, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024]))
"""


def test_there_are_sixty_cases_and_the_memory_of_the_machine_is_bounded(
    canary: Path, port: int
) -> None:
    need("namespaces")
    assert len({case.name for case in CASES}) == len(CASES) >= 60
    bombs = [case for case in CASES if case.name in ("list without end", "shared memory")]
    programs = [asdict(fill_in(case, canary, port)) for case in bombs]
    # Time enough for all of the memory: it is the memory that has to end them.
    limits = replace(LIMITS, seconds=10.0, wall_seconds=60.0)

    measured = subprocess.run(
        [sys.executable, "-c", MEASURE],
        input=json.dumps([programs, asdict(limits)]),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )

    statuses, peak = json.loads(measured.stdout)
    assert statuses == [1, 1]
    assert peak < MOST_MEMORY
