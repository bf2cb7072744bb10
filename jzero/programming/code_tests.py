"""Reads the tests of programming problems from public data sets.

A test is a JSON dict: {"stdin", "expected"} for a complete program, {"function", "arguments",
"expected"} for a call, {"expression", "check", "expected"} for an assert (`code_asserts`). In the
last two `expected` is a list of accepted values in the form of `sandbox.program.encode`. A test
that its data set publishes also has the key PUBLIC, and the policy may see it. `read_tests`
supports these layouts:

| columns | sets |
|---|---|
| `verification_info` | open-r1's verifiable coding problems |
| `tests` | DeepCoder (agentica-org/DeepCoder-Preview-Dataset) |
| `input_output` | TACO, APPS |
| `public_test_cases`, `private_test_cases` | LiveCodeBench |
| `test_list` | MBPP |

Imports no jax: grader processes load this module.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jzero.json_values import as_list, as_object, as_text
from jzero.programming import code_asserts
from jzero.types import JsonValue

PUBLIC = "public"  # the key of a test that the policy may see; its value is True

Test = dict[str, JsonValue]
Row = Mapping[str, Any]  # a row of a data set, by column


def read_tests(row: Row) -> list[Test]:
    """Returns the runnable tests of a row; the list may be empty.

    Skips tests in pickled data, asserts that do not compare with a value, and tests that expect
    output without any word, which an empty program would pass.
    """
    tests: list[Test] = []
    for column, read in LAYOUTS.items():
        if row.get(column):
            try:
                tests += read(row)
            except (KeyError, TypeError, ValueError, AttributeError, SyntaxError, RecursionError):
                continue  # the row does not follow the layout of its data set
    return [test for test in tests if _says_something(test)]


def column_of_tests(columns: Sequence[str]) -> str:
    """Returns the first column that `read_tests` supports, "" if a data set has none."""
    return next((column for column in LAYOUTS if column in columns), "")


def _says_something(test: Test) -> bool:
    return "stdin" not in test or bool(as_text(test["expected"]).split())


def longest(tests: list[Test], most: int) -> list[Test]:
    """Returns the at most `most` tests with the longest inputs, in their original order."""
    if len(tests) <= most:
        return tests
    # Whether a test is public must not influence the choice.
    sizes = [len(json.dumps(_without_mark(test))) for test in tests]
    places = sorted(range(len(tests)), key=sizes.__getitem__, reverse=True)[:most]
    return [tests[place] for place in sorted(places)]


def _without_mark(test: Test) -> Test:
    return {name: value for name, value in test.items() if name != PUBLIC}


def _loaded(value: JsonValue) -> JsonValue:
    """Parses a value that some data sets store as JSON text."""
    return json.loads(value) if isinstance(value, str) else value


def _stdin_test(stdin: JsonValue, expected: JsonValue) -> Test:
    return {"stdin": _as_text(stdin), "expected": _as_text(expected)}


def _as_text(value: JsonValue) -> str:
    """Returns an input or output as text; some data sets store a list of lines."""
    if isinstance(value, list):
        return "\n".join(map(str, value))
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} is not text")
    return value


def _call_test(function: str, arguments: list[JsonValue], expected: JsonValue) -> Test:
    return {"function": function, "arguments": arguments, "expected": [_marked(expected)]}


def _marked(value: JsonValue) -> JsonValue:
    """Returns a JSON value in the form of `program.encode`, which marks dicts."""
    if isinstance(value, list):
        return [_marked(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[key, _marked(item)] for key, item in value.items()]}
    return value


def _inputs_and_outputs(found: dict[str, JsonValue], row: Row) -> list[Test]:
    """Reads {"inputs": [...], "outputs": [...], "fn_name": ...}, the form of TACO and APPS."""
    function = as_text(found.get("fn_name") or "", "fn_name")
    # An input without an output is no test.
    inputs, expected_outputs = as_list(found["inputs"]), as_list(found["outputs"])
    pairs = list(zip(inputs, expected_outputs, strict=False))
    if not function:
        return [_stdin_test(given, expected) for given, expected in pairs]
    outputs = _unwrapped(_all_loaded([expected for _, expected in pairs]), row)
    return [
        _call_test(function, as_list(_loaded_if_json(given)), expected)
        for (given, _), expected in zip(pairs, outputs, strict=True)
    ]


def _all_loaded(values: list[JsonValue]) -> list[JsonValue]:
    """Returns the outputs of a row, parsed if all of them are JSON text."""
    texts = [value for value in values if isinstance(value, str)]
    if len(texts) < len(values):
        return values
    try:
        return [json.loads(text) for text in texts]
    except ValueError:  # one output is plain text, so all of them are
        return values


def _unwrapped(outputs: list[JsonValue], row: Row) -> list[JsonValue]:
    """Returns the outputs of a row without the extra list around each value.

    Some rows wrap every value in a list, `[[9], [16]]` for 9 and 16. The outputs of a row count as
    wrapped if every output is a list of one item, unless the starter code annotates a return type
    with lists nested as deep as the outputs. A single test never decides: in a row with the outputs
    `[1]` and `[1, 2]` both values are lists.
    """
    wrapped = [output for output in outputs if isinstance(output, list) and len(output) == 1]
    if len(wrapped) < len(outputs):
        return outputs
    # The annotated return type settles the ambiguity between a list of one item and a wrapped item.
    annotation = _RETURNS.search(row.get("starter_code") or "")
    if annotation:
        depth = len(_LIST.findall(annotation.group(1)))
        if depth and all(_depth(output) <= depth for output in outputs):
            return outputs
    return [output[0] for output in wrapped]


_RETURNS = re.compile(r"->([^:\n]*)")  # a function's return annotation
_LIST = re.compile(r"\b[Ll]ist\b")


def _depth(value: JsonValue) -> int:
    """Returns the nesting depth of lists in a value: 2 for [[1], [2]]."""
    if not isinstance(value, list):
        return 0
    return 1 + max((_depth(item) for item in value), default=0)


def _loaded_if_json(value: JsonValue) -> JsonValue:
    try:
        return _loaded(value)
    except ValueError:
        return value


def _cases(found: JsonValue, row: Row, function: str = "") -> list[Test]:
    """Reads [{"input", "output", "type" or "testtype"}, ...]."""
    cases = [as_object(case, "a test case") for case in as_list(found, "the test cases")]
    # Only rows with type=function_call may wrap values in an extra list.
    outputs = _all_loaded([case["output"] for case in cases])
    if all(case.get("type") == "function_call" for case in cases):
        outputs = _unwrapped(outputs, row)
    tests = []
    for case, expected in zip(cases, outputs, strict=True):
        kind = case.get("type") or case.get("testtype") or "stdin"
        metadata = as_object(case.get("metadata") or {}, "metadata")
        name = as_text(case.get("fn_name") or metadata.get("func_name") or function)
        if kind in ("stdin", "stdin_stdout") or not name:
            tests.append(_stdin_test(case["input"], case["output"]))
            continue
        given = case["input"]
        if isinstance(given, str):  # one argument per line
            given = [json.loads(line) for line in given.split("\n") if line.strip()]
        tests.append(_call_test(name, as_list(given, "input"), expected))
    return tests


def _read_verification_info(row: Row) -> list[Test]:
    found = as_object(_loaded(row["verification_info"]))
    # The sandbox runs only Python.
    if (found.get("language") or "python") != "python":
        return []
    return _cases(_loaded(found["test_cases"]), row)


def _read_tests_column(row: Row) -> list[Test]:
    found = _loaded(row["tests"])
    return _inputs_and_outputs(found, row) if isinstance(found, dict) else _cases(found, row)


def _read_input_output(row: Row) -> list[Test]:
    return _inputs_and_outputs(as_object(_loaded(row["input_output"])), row)


def _read_live_code_bench(row: Row) -> list[Test]:
    metadata = as_object(_loaded(row.get("metadata") or "{}"))
    function = as_text(metadata.get("func_name") or "", "func_name")
    public = _cases(_loaded(row["public_test_cases"]), row, function)
    tests = [test | {PUBLIC: True} for test in public]
    # Newer releases pickle the private cases. They are skipped: jzero does not unpickle data.
    private = _loaded_if_json(row.get("private_test_cases") or [])
    return tests + (_cases(private, row, function) if isinstance(private, list) else [])


def _read_asserts(row: Row) -> list[Test]:
    texts = [as_text(text) for text in as_list(_loaded(row["test_list"]))]
    return code_asserts.read_asserts(texts, setup_code(row))


def setup_code(row: Row) -> str:
    """Returns the code of a row that runs before the program, such as MBPP's imports."""
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
