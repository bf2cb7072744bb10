"""The tests of programming problems, as public data sets write them.

A test is a dict of JSON: {"stdin", "expected"} for a whole program, {"function", "arguments",
"expected"} for a call, {"expression", "expected"} for an expression such as "f(2) + 1". `expected`
of the last two is a list of values in the form of `sandbox.program.encode`, any of which is right.
`read_tests` knows these layouts:

| columns | sets |
|---|---|
| `verification_info` | open-r1's verifiable coding problems |
| `tests` | DeepCoder (agentica-org/DeepCoder-Preview-Dataset) |
| `input_output` | TACO, APPS |
| `public_test_cases`, `private_test_cases` | LiveCodeBench |
| `test_list` | MBPP |

Imports no jax: grader processes load this module.
"""

import ast
import json
from collections.abc import Callable, Mapping
from typing import Any

from jzero.types import JsonValue

Test = dict[str, JsonValue]
Row = Mapping[str, Any]  # of a data set


def read_tests(row: Row) -> list[Test]:
    """Returns the tests of a row that can be run here; none if there are none.

    Left out are tests in pickled data, asserts that compare nothing with a value, and outputs
    without a word, which the empty program would print.
    """
    tests: list[Test] = []
    for column, read in LAYOUTS.items():
        if row.get(column):
            try:
                tests += read(row)
            except (KeyError, TypeError, ValueError, AttributeError, SyntaxError, RecursionError):
                continue  # a row that is not in the layout of its set
    return [test for test in tests if _says_something(test)]


def has_layout(columns: list[str]) -> bool:
    """Returns whether a set has a column that `read_tests` knows."""
    return any(column in columns for column in LAYOUTS)


def _says_something(test: Test) -> bool:
    return "stdin" not in test or bool(test["expected"].split())


def longest(tests: list[Test], most: int) -> list[Test]:
    """Returns at most `most` tests, those with the longest inputs, in their order."""
    if len(tests) <= most:
        return tests
    sizes = [len(json.dumps(test)) for test in tests]
    places = sorted(range(len(tests)), key=sizes.__getitem__, reverse=True)[:most]
    return [tests[place] for place in sorted(places)]


def _loaded(value: JsonValue) -> JsonValue:
    """Returns a value that some sets have as text of JSON."""
    return json.loads(value) if isinstance(value, str) else value


def _stdin_test(stdin: JsonValue, expected: JsonValue) -> Test:
    return {"stdin": _as_text(stdin), "expected": _as_text(expected)}


def _as_text(value: JsonValue) -> str:
    """Returns an input or output as text; some sets have a list of lines."""
    if isinstance(value, list):
        return "\n".join(map(str, value))
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} is no text")
    return value


def _call_test(function: str, arguments: list[JsonValue], *expected: JsonValue) -> Test:
    return {
        "function": function,
        "arguments": arguments,
        "expected": [_marked(value) for value in expected],
    }


def _marked(value: JsonValue) -> JsonValue:
    """Returns a value of JSON in the form of `program.encode`, which marks dicts."""
    if isinstance(value, list):
        return [_marked(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[key, _marked(item)] for key, item in value.items()]}
    return value


def _inputs_and_outputs(found: JsonValue) -> list[Test]:
    """Reads {"inputs": [...], "outputs": [...], "fn_name": ...}, the form of TACO and APPS."""
    function = found.get("fn_name")
    tests = []
    for given, expected in zip(found["inputs"], found["outputs"], strict=False):
        if function:
            expected = _loaded_if_json(expected)
            # Some rows have the value, and some a list that holds it.
            choices = [expected, *expected[:1]] if isinstance(expected, list) else [expected]
            tests.append(_call_test(function, _loaded_if_json(given), *choices))
        else:
            tests.append(_stdin_test(given, expected))
    return tests


def _loaded_if_json(value: JsonValue) -> JsonValue:
    try:
        return _loaded(value)
    except ValueError:
        return value


def _cases(found: list[JsonValue], function: str = "") -> list[Test]:
    """Reads [{"input", "output", "type" or "testtype"}, ...]."""
    tests = []
    for case in found:
        kind = case.get("type") or case.get("testtype") or "stdin"
        metadata = case.get("metadata") or {}
        name = case.get("fn_name") or metadata.get("func_name") or function
        if kind in ("stdin", "stdin_stdout") or not name:
            tests.append(_stdin_test(case["input"], case["output"]))
            continue
        given, expected = case["input"], _loaded_if_json(case["output"])
        if isinstance(given, str):  # an argument on each line
            given = [json.loads(line) for line in given.split("\n") if line.strip()]
        # Where the set says function_call the value is in a list, and elsewhere it is not.
        is_in_list = kind == "function_call" and isinstance(expected, list)
        choices = [expected, *expected[:1]] if is_in_list else [expected]
        tests.append(_call_test(name, given, *choices))
    return tests


def _read_verification_info(row: Row) -> list[Test]:
    found = _loaded(row["verification_info"])
    if (found.get("language") or "python") != "python":
        return []
    return _cases(_loaded(found["test_cases"]))


def _read_tests_column(row: Row) -> list[Test]:
    found = _loaded(row["tests"])
    return _inputs_and_outputs(found) if isinstance(found, dict) else _cases(found)


def _read_input_output(row: Row) -> list[Test]:
    return _inputs_and_outputs(_loaded(row["input_output"]))


def _read_live_code_bench(row: Row) -> list[Test]:
    metadata = _loaded(row.get("metadata") or "{}")
    function = metadata.get("func_name") or ""
    tests = _cases(_loaded(row["public_test_cases"]), function)
    # The private cases of the newer releases are pickled, and nothing here unpickles.
    private = _loaded_if_json(row.get("private_test_cases") or [])
    return tests + (_cases(private, function) if isinstance(private, list) else [])


def _read_asserts(row: Row) -> list[Test]:
    """Reads asserts such as `assert f(2) == 3`, the form of MBPP.

    The program never sees the right side: only the left side is evaluated in the sandbox.
    """
    tests = []
    for text in _loaded(row["test_list"]):
        test = _read_assert(text)
        if test is not None:
            tests.append(test)
    return tests


def _read_assert(text: str) -> Test | None:
    [statement] = ast.parse(text.strip()).body
    if not isinstance(statement, ast.Assert):
        return None
    comparison = statement.test
    if not isinstance(comparison, ast.Compare) or len(comparison.ops) != 1:
        return None
    if not isinstance(comparison.ops[0], ast.Eq | ast.Is):
        return None
    try:
        expected = _value_of(comparison.comparators[0])
    except (ValueError, TypeError):  # the right side is no value
        return None
    return {"expression": ast.unparse(comparison.left), "expected": [expected]}


def _value_of(node: ast.expr) -> JsonValue:
    """Returns a literal, or a set of one, in the form of `program.encode`."""
    match node:
        case ast.Call(func=ast.Name(id="set" | "frozenset"), args=[items]):
            return _marked_literal(set(ast.literal_eval(items)))
    return _marked_literal(ast.literal_eval(node))


def _marked_literal(value: object) -> JsonValue:
    if isinstance(value, list):
        return [_marked_literal(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_marked_literal(item) for item in value]}
    if isinstance(value, set | frozenset):
        return {"set": [_marked_literal(item) for item in value]}
    if isinstance(value, dict):
        pairs = [[_marked_literal(key), _marked_literal(item)] for key, item in value.items()]
        return {"dict": pairs}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{value!r:.80} has no form in JSON")


def setup_code(row: Row) -> str:
    """Returns what a row has to run before the program: MBPP's imports."""
    lines = row.get("test_imports") or []
    setup = row.get("test_setup_code") or ""
    return "\n".join([*lines, setup]).strip()


LAYOUTS: dict[str, Callable[[Row], list[Test]]] = {
    "verification_info": _read_verification_info,
    "tests": _read_tests_column,
    "input_output": _read_input_output,
    "public_test_cases": _read_live_code_bench,
    "test_list": _read_asserts,
}
