"""No program holds anything of another request, and no process that programs are forked from does.

Earlier and concurrent requests carry markers in their sources, inputs, arguments, expressions and
cells. The programs look for them in all of their memory, and so does this process from outside
where it may.
"""

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/attacks"))

import escapes  # noqa: E402
from escape_tries import PRELUDE, REQUESTS, SCAN  # noqa: E402

from jzero.config import Local, TaskConfig  # noqa: E402
from jzero.sandbox import levels  # noqa: E402
from jzero.sandbox.client import Limits, Program, Sandbox  # noqa: E402
from jzero.sandbox.session import Session  # noqa: E402
from jzero.tasks import code  # noqa: E402

LIMITS = Limits(seconds=3.0, wall_seconds=20.0)
LOOK = Program(PRELUDE + SCAN)
PLANTED = Program(PRELUDE + "planted = ('MARK' + 'ER-' + 'f' * 8).encode()" + SCAN)


@pytest.fixture(
    scope="module",
    params=[
        "namespaces",
        "landlock",
        "seccomp",
        "none",
    ],
)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    if reason := levels.failure(request.param):
        pytest.skip(f"this machine has no sandbox of level {request.param}: {reason}")
    with Sandbox(request.param) as made:
        yield made


def markers_seen(sandbox: Sandbox) -> list[str]:
    outcome = sandbox.run(LOOK, LIMITS)
    assert outcome.has_succeeded, outcome
    return outcome.stdout.splitlines()


def test_the_look_finds_a_marker_that_is_there(sandbox: Sandbox) -> None:
    assert sandbox.run(PLANTED, LIMITS).stdout == "DID b'MARKER-ffffffff'\n"


def test_programs_hold_nothing_of_earlier_requests(sandbox: Sandbox) -> None:
    kept: list[Session] = []
    for name in REQUESTS:
        if name != "everything again":
            escapes._leave(name, sandbox, kept)
    assert kept, "one session lives on"
    assert markers_seen(sandbox) == []
    for session in kept:
        session.close()


def test_cells_hold_nothing_of_other_requests(sandbox: Sandbox) -> None:
    escapes._leave("a large source", sandbox, [])
    with Session(sandbox, LIMITS) as other, Session(sandbox, LIMITS) as session:
        other.run(f"x = {escapes._marker()!r}")
        outcome = session.run(LOOK.source)
        assert (outcome.output, outcome.failed) == ("", False)


def test_programs_hold_nothing_of_a_concurrent_program(sandbox: Sandbox) -> None:
    """Two requests of one server at once; a grader process has one, this shows that it may not."""
    mark = escapes._marker()
    slow = Program(f"import time\nx = {mark!r}\ntime.sleep(1.0)\nprint(input())", stdin=mark)
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(sandbox.run(slow, LIMITS)))
    thread.start()
    time.sleep(0.3)
    seen = markers_seen(sandbox)
    thread.join()
    assert seen == []
    assert outcomes[0].stdout == f"{mark}\n"


def test_processes_that_fork_programs_hold_no_source(sandbox: Sandbox) -> None:
    """The server, seen from outside after requests, and the watcher, while its program runs."""
    kept: list[Session] = []
    escapes._leave("everything again", sandbox, kept)
    for session in kept:
        session.close()
    servers = escapes.server_processes(sandbox)
    try:
        counts = [escapes.markers_in_memory(pid) for pid in servers]
    except PermissionError:
        pytest.skip("needs the right to read the memory of a process that forbids it")
    assert counts == [0] * len(servers)

    mark = escapes._marker()
    sleeping = Program(f"import time\nx = {mark!r}\ntime.sleep(1.5)", stdin=mark)
    before = descendants(servers[-1])
    thread = threading.Thread(target=lambda: sandbox.run(sleeping, LIMITS))
    thread.start()
    deadline = time.monotonic() + 10.0
    counts = []
    while time.monotonic() < deadline and not any(counts):
        time.sleep(0.05)
        new = [pid for pid in descendants(servers[-1]) if pid not in before]
        counts = [escapes.markers_in_memory(pid) for pid in new]
    thread.join()
    assert len(counts) == 2, "the watcher, and the program below it"
    assert counts[0] == 0
    assert counts[1] > 0, "the program holds its own source"


def descendants(pid: int) -> list[int]:
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *descendants(int(child))]
    return found


# A response without a solution: it looks for another's in its memory, and runs what it finds.
THIEF = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.sbrk.restype = libc.write.restype = ctypes.c_ssize_t
read_end, write_end = os.pipe()
top = libc.sbrk(0) & ~4095
pages = []
for address in range(top - (24 << 20), top, 4096):
    count = libc.write(write_end, ctypes.c_void_p(address), ctypes.c_size_t(4096))
    pages.append(os.read(read_end, count) if count > 0 else bytes(4096))
memory = b"".join(pages)
word = b"def NAME" + b"("
place = memory.find(word)
while place >= 0 and "NAME" not in globals():
    text = memory[place : memory.find(bytes(1), place)]
    place = memory.find(word, place + 1)
    for source in (text, text.replace(b"\\\\n", b"\\n")):
        lines = source.decode("latin1").splitlines()
        while lines and "NAME" not in globals():
            try:
                exec("\\n".join(lines))
            except Exception:
                pass
            lines.pop()
"""
HONEST = {
    "digit_sum": "return sum(int(c) for c in str(n))",
    "reverse": "return int(str(n)[::-1])",
    "ones": "return bin(n).count('1')",
    "triangle": "return n * (n + 1) // 2",
    "square": "return int(n**0.5 + 0.5)**2 == n",
    "halves": "return [n // 2, n - n // 2]",
}


@pytest.mark.parametrize("size", [0, 400, 1500, 6000])
def test_a_plagiarist_gets_no_credit(size: int) -> None:
    """24 problems, over all sizes, of which an earlier response of the same group is right."""
    task = TaskConfig(name="code", sandbox=Local(seconds=3.0))
    credited = []
    for name, body in HONEST.items():
        source = f"def {name}(n):\n    # {'an honest comment ' * (size // 18)}\n    {body}\n"
        values: dict = {}
        exec(source, values)
        tests = [
            {"function": name, "arguments": [n], "expected": [values[name](n)]} for n in (12, 305)
        ]
        gold = {"tests": tests, "setup": ""}
        assert code.grade(f"```python\n{source}```", gold, task).correct
        thief = code.grade(f"```python\n{THIEF.replace('NAME', name)}```", gold, task)
        credited += [thief] if thief.score > 0 else []
    assert credited == []
