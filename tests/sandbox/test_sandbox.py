"""The sandbox as its users see it: what programs print, their limits, levels, and replacements."""

import os
import signal

import pytest

from jzero.errors import UserError
from jzero.sandbox import comparison, levels
from jzero.sandbox.client import Limits, Program, Sandbox, SandboxError

BEST = next(level for level in reversed(levels.LEVELS) if not levels.failure(level))


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(BEST) as made:
        yield made


def printed(sandbox: Sandbox, source: str, stdin: str = "") -> str:
    return sandbox.run(Program(source, stdin), Limits()).stdout


def returned(sandbox: Sandbox, source: str, *arguments: object) -> str:
    return sandbox.run(Program(source, function="f", arguments=arguments), Limits()).result


@pytest.mark.parametrize(
    ("source", "stdin", "stdout"),
    [
        ("print(sum(map(int, input().split())))", "1 2 3", "6\n"),
        ("import sys\nprint(len(sys.stdin.read()))", "x" * 300_000, "300000\n"),
        ("import sys\nfor line in sys.stdin: print(line.strip()[::-1])", "ab\ncd", "ba\ndc\n"),
        ("if __name__ == '__main__': print('main')", "", "main\n"),
        ("import heapq, bisect, collections, itertools, math, re, json\nprint('ok')", "", "ok\n"),
        ("import sys\nprint('before')\nsys.exit(0)", "", "before\n"),
        ("print('é', input())", "ß", "é ß\n"),
        (
            "import threading, sys\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 26)\n"
            "def deep(n): return n and 1 + deep(n - 1)\n"
            "threading.Thread(target=lambda: print(deep(20000))).start()",
            "",
            "20000\n",
        ),
        ("import asyncio\nasync def f(): return 3\nprint(asyncio.run(f()))", "", "3\n"),
    ],
)
def test_honest_programs_print_what_they_would_print_elsewhere(
    source: str, stdin: str, stdout: str, sandbox: Sandbox
) -> None:
    outcome = sandbox.run(Program(source, stdin), Limits())
    assert (outcome.stdout, outcome.end, outcome.status) == (stdout, "exit", 0), outcome


@pytest.mark.parametrize(
    ("source", "end", "status"),
    [
        ("1 / 0", "exit", 1),
        ("import sys\nsys.exit(3)", "exit", 3),
        ("import ctypes\nctypes.string_at(0)", "signal", -signal.SIGSEGV),
        ("while True: pass", "time", -signal.SIGKILL),
        ("import time\ntime.sleep(99)", "wall", -signal.SIGKILL),
        ("while True: print('x' * 1000)", "output", -signal.SIGKILL),
        ("x = bytearray(1 << 30)", "exit", 1),
    ],
)
def test_every_end_has_its_name(source: str, end: str, status: int, sandbox: Sandbox) -> None:
    limits = Limits(seconds=0.2, wall_seconds=30.0 if end == "time" else 2.0, memory_gib=0.5)
    outcome = sandbox.run(Program(source), limits)
    assert (outcome.end, outcome.status) == (end, status), outcome


def test_programs_do_not_meet_each_other(sandbox: Sandbox) -> None:
    leaves = "import builtins, os, sys\nbuiltins.left = 1\nsys.modules['math'].left = 1\n"
    finds = "import builtins, math, os\nprint(hasattr(builtins, 'left'), hasattr(math, 'left'))\n"
    if BEST == "namespaces":
        leaves += "open('left', 'w').write('x')\n"
        finds += "print(os.listdir('.'))"
    printed(sandbox, "import math\n" + leaves)
    assert printed(sandbox, finds).split("\n")[:2] in (
        ["False False", "[]"],
        ["False False", ""],
    )


def test_the_order_of_a_set_is_the_same_in_every_run() -> None:
    source = "print(sorted(map(str, 'abcdef'), key=hash))"
    texts = set()
    for _ in range(2):
        with Sandbox("none") as made:
            texts.add(printed(made, source))
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("source", "arguments", "expected", "is_same"),
    [
        ("def f(a, b): return a + b", (1, 2), 3, True),
        ("def f(a): return (a, [a])", (1,), [1, [1]], True),
        ("class Solution:\n    def f(self, a): return a * 2", ("x",), "xx", True),
        ("def f(): return {1: {2, 3}}", (), {"dict": [[1, {"set": [3, 2]}]]}, True),
        ("def f(): return 0.1 + 0.2", (), 0.3, True),
        ("def f(): return 3", (), 3.0, True),
        ("def f(): return '3'", (), 3, False),
        ("def f(): return [1]", (), [1, 2], False),
        ("def f(): return {1}", (), [1], False),
        ("def f(): return None", (), 0, False),
        ("f = 1", (), 1, False),
        ("def f(): return float('nan')", (), 1.0, False),
    ],
)
def test_values_of_calls_are_compared_outside(
    source: str, arguments: tuple[object, ...], expected: object, is_same: bool, sandbox: Sandbox
) -> None:
    result = returned(sandbox, source, *arguments)
    assert comparison.same_result(result, expected) == is_same, result


def test_a_server_that_was_killed_is_replaced() -> None:
    with Sandbox(BEST) as made:
        path = f"/proc/{made.server_pid}/task/{made.server_pid}/children"
        with open(path, encoding="ascii") as file:
            processes = [made.server_pid, *map(int, file.read().split())]
        for pid in processes:
            os.kill(pid, signal.SIGKILL)
        assert printed(made, "print(1)") == "1\n"
        assert made.num_starts == 2


def test_a_level_that_the_machine_lacks_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failure(level: str) -> str:
        return "" if level == "seccomp" else "not here"

    monkeypatch.setattr(levels, "failure", failure)
    with pytest.raises(
        UserError, match=r"task\.sandbox\.level=auto.*task\.sandbox=remote"
    ) as error:
        levels.reached_level("auto")
    assert "task.sandbox.level=seccomp or task.sandbox.level=none" in str(error.value)
    with pytest.raises(UserError, match="namespaces: not here"):
        levels.reached_level("namespaces")
    assert levels.reached_level("seccomp") == "seccomp"


def test_no_isolation_is_never_chosen_by_itself() -> None:
    assert "none" not in levels.AUTO_LEVELS
    assert levels.reached_level("none") == "none"


def test_a_level_without_a_name_does_not_start() -> None:
    with pytest.raises(SandboxError):
        Sandbox("nothing like it").run(Program("print(1)"), Limits())
