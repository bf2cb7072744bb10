# ruff: noqa: E501 - the sources of short programs are not broken into lines
"""Asserts as tests: what the program is asked for, and what is computed outside of it."""

import pytest

from jzero.config import Local, TaskConfig
from jzero.programming import code_asserts, code_tests
from jzero.sandbox import levels
from jzero.tasks import code

BEST = next(level for level in reversed(levels.LEVELS) if not levels.failure(level))
TASK = TaskConfig(name="code", sandbox=Local(level=BEST, seconds=1.0))


def fraction(source: str, *asserts: str, **columns: object) -> float:
    """Returns the share of the asserts that a program passes."""
    row = {"test_list": list(asserts), **columns}
    gold = {"tests": code_tests.read_tests(row), "setup": code_tests.setup_code(row)}
    assert len(gold["tests"]) == len(asserts)
    return code.grade(f"```python\n{source}\n```", gold, TASK).score


@pytest.mark.parametrize(
    ("left", "expression", "check"),
    [
        ("f(2)", "f(2)", None),
        ("len(f([1, 2]))", "f([1, 2])", "len(_answer)"),
        ("f(len([1]))", "f(len([1]))", None),  # the arguments are the program's to see
        ("round(f(2), 2)", "f(2)", "round(_answer, 2)"),
        ("math.isclose(f(2), 3)", "f(2)", "math.isclose(_answer, 3)"),
        ("f(1) + g(2)", "(f(1), g(2))", "_answer[0] + _answer[1]"),
        ("f(1)[0]", "f(1)", "_answer[0]"),
        ("f('x').strip()", "f('x')", "_answer.strip()"),
        ("Solution().f(2)", "Solution().f(2)", None),
        ("Stack().count(2)", "Stack().count(2)", None),  # not the method of a list
        ("f(1).size", "f(1).size", None),
        ("[f(x) for x in (1, 2)]", "[f(x) for x in (1, 2)]", None),
        ("[round(x) for x in f(3)]", "f(3)", "[round(x) for x in _answer]"),
        ("all(x in f(3) for x in (1, 2))", "f(3)", "all((x in _answer for x in (1, 2)))"),
        ("sorted(f(1), key=lambda x: x[0])", "f(1)", "sorted(_answer, key=lambda x: x[0])"),
        ("sum(10, 15)", "sum(10, 15)", None),  # a function under test with a built-in's name
        ("f(Pair(1, 2))", "f(Pair(1, 2))", None),
        ("same(f(1), 2)", "f(1)", "same(_answer, 2)"),  # the setup defines it
    ],
)
def test_the_program_is_asked_for_its_calls_alone(
    left: str, expression: str, check: str | None
) -> None:
    setup = "import math\nclass Pair: pass\ndef same(a, b): return a == b"
    [test] = code_asserts.read_asserts([f"assert {left} == 5"], setup)
    assert test["expression"] == expression
    assert test.get("check") == check
    assert test["expected"] == [5]


@pytest.mark.parametrize(
    "text",
    [
        "assert f(1)",
        "assert f(1) != 2",
        "assert f(1) == g(2)",
        "assert 1 == 1",
        "assert all(f(x) for x in (1, 2)) == True",  # the call depends on x
        "f(1)",
    ],
)
def test_asserts_that_compare_nothing_with_a_value_are_left_out(text: str) -> None:
    assert code_asserts.read_asserts([text], "") == []


LYING = """
class Lie(list):
    def __len__(self): return 3
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __contains__(self, item): return True
    def __getitem__(self, place): return 7
    __hash__ = None
def f(x): return Lie()
"""


@pytest.mark.parametrize(
    ("source", "asserts"),
    [
        # Names of the assert itself, bound again.
        ("def len(x): return 3\ndef f(x): return []", ["assert len(f(1)) == 3"]),
        ("def f(x): return 0\nround = lambda *_: 3.14", ["assert round(f(2), 2) == 3.14"]),
        ("def f(x): return 0\nisinstance = lambda *_: True", ["assert isinstance(f(1), str)==True"]),
        ("def f(x): return 5\nsorted = lambda *_: [1, 2]", ["assert sorted(f(1)) == [1, 2]"]),
        ("import builtins\nbuiltins.len = lambda x: 3\ndef f(x): return []",
         ["assert len(f(1)) == 3"]),
        ("import sys\nsys.modules['builtins'].max = lambda *_: 9\ndef f(x): return [1]",
         ["assert max(f(1)) == 9"]),
        ("import math\nmath.isclose = lambda *_, **__: True\ndef f(x): return 0",
         ["assert math.isclose(f(1), 2.5) == True"]),
        ("def f(x):\n    import gc\n    for d in gc.get_objects():\n        if isinstance(d, dict) and"
         " 'len' in d: d['len'] = lambda x: 3\n    return []", ["assert len(f(1)) == 3"]),
        # Objects that lie.
        (LYING, ["assert len(f(1)) == 3"]),
        (LYING, ["assert f(1) == [1, 2]"]),
        (LYING, ["assert f(1)[0] == 7"]),
        (LYING, ["assert (4 in f(1)) == True"]),
        ("class Int(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
         "def f(x): return Int(1)", ["assert f(1) == 5"]),
        ("class Text(str):\n    def strip(self): return 'x'\ndef f(x): return Text('y')",
         ["assert f(1).strip() == 'x'"]),
        ("class Any:\n    def __eq__(self, other): return True\n    def __repr__(self): return '5'\n"
         "def f(x): return Any()", ["assert f(1) == 5", "assert str(f(1)) == 'True'"]),
        ("class Bool:\n    def __bool__(self): return True\ndef f(x): return Bool()",
         ["assert f(1) == True"]),
        # Verdicts and ends of its own.
        ("import os\nos.write(3, b'true')\nos._exit(0)", ["assert f(1) == 5"]),
        ("import json\njson.dumps = lambda _: '5x'\ndef f(x): return 4", ["assert f(1) == 5"]),
        ("print('passed')\nraise SystemExit(0)", ["assert f(1) == 5"]),
        ("import atexit, os\natexit.register(lambda: os.write(3, b'5'))\ndef f(x): return 4",
         ["assert f(1) == 5"]),
        ("import threading, os, time\ndef f(x):\n    threading.Thread(target=lambda:"
         " (time.sleep(0.01), os.write(3, b'5'))).start()\n    return 4", ["assert f(1) == 5"]),
        ("from jzero.sandbox import program\nprogram.encode = lambda value: [value, value]\n"
         "def f(x): return 4", ["assert f(1) == 5"]),
    ],
)  # fmt: skip
def test_programs_that_cheat_pass_no_assert(source: str, asserts: list[str]) -> None:
    assert fraction(source, *asserts, test_imports=["import math"]) == 0.0


def test_right_programs_pass_asserts_that_compute() -> None:
    source = "def f(x): return [3, 1, 2][:x]\ndef g(x): return (i for i in (2, 1))"
    asserts = [
        "assert len(f(2)) == 2",
        "assert sorted(f(3)) == [1, 2, 3]",
        "assert set(g(0)) == {1, 2}",
        "assert f(3)[-1] == 2",
        "assert math.isclose(f(1)[0], 3.0) == True",
        "assert f(1) + f(1) == [3, 3]",
        "assert isinstance(f(1), list) == True",
    ]
    assert fraction(source, *asserts, test_imports=["import math"]) == 1.0


@pytest.mark.parametrize(
    "source",
    [
        "from __future__ import annotations\ndef f(a: Missing): return math.sqrt(4)",
        '"""A text."""\nfrom __future__ import annotations\ndef f(a: Missing): return math.sqrt(4)',
        "# first\nfrom __future__ import (\n    annotations,\n    division,\n)\n"
        "def f(a: Missing): return math.sqrt(4)",
        "from __future__ import annotations; x = 1\r\ndef f(a: Missing): return math.sqrt(4)",
    ],
)
def test_imports_from_the_future_work_behind_a_setup(source: str) -> None:
    for setup in ("import math", "import math\ndef helper(x):\n    return x"):
        assert fraction(source, "assert f(1) == 2", test_setup_code=setup) == 1.0
