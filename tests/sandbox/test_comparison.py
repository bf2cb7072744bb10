"""The rules by which printed texts and returned values are compared (docs/environments.md)."""

import json

import pytest

from jzero.sandbox import comparison, program


@pytest.mark.parametrize(
    ("text", "expected", "is_same"),
    [
        ("1 2\n3", "1\n2 3\n", True),
        ("  *\n ***", "* ***", True),  # white space never counts
        ("1", "1 2", False),  # what a comparison up to the shorter output would accept
        ("", "1", False),
        ("YES", "Yes", False),
        ("2.0", "2", False),  # a whole number is expected
        ("1000001", "1000000", False),
        ("2", "2.0", True),
        ("1.1", "1.10", True),
        ("0.33333333333", "0.333333", True),  # the expected one is rounded to six decimals
        ("0.3333333", "0.33333333", True),
        ("0.3334", "0.3333", False),
        ("0.12", "0.1", False),
        ("0", "0.0000001", False),
        ("0", "0.000001", False),
        ("0.0000002", "0.0000001", False),
        ("0", "0.000000", True),
        ("1e-9", "0.0", True),
        ("1e-7", "0.0", False),
        ("1234567.4", "1234567.5", True),  # a millionth
        ("1234569.5", "1234567.5", False),
        ("1.23457e+06", "1234567.5", False),
        ("nan", "1.0", False),
        ("inf", "1e999", False),
        ("1_0.0", "10.0", False),
        ("9" * 50 + ".5", "9" * 50 + ".50", False),  # no number of that length is read
    ],
)
def test_printed_words_are_compared(text: str, expected: str, is_same: bool) -> None:
    assert comparison.same_output(text, expected) == is_same


# value, expected, the same in JSON, the same in Python
VALUES = [
    (3, 3, True, True),
    (3.0, 3, True, True),  # half of 6
    (True, 1, False, False),
    (1, True, True, True),  # C's truth values
    (2, True, False, False),
    (0, False, True, True),
    (1.0, True, False, False),
    (1000000507.0, 1000000007, False, False),
    (10**16 + 1, 10**16, False, False),
    (float(2**53), 2**53 + 1, False, False),
    (3, 3.0, True, True),
    (0.1 + 0.2, 0.3, True, True),
    (0.3000001, 0.3, False, False),
    (0, 1e-10, False, False),
    (True, 1.0, False, False),
    (10**4000, 1.0, False, False),
    (float("nan"), 1.0, False, False),
    (float("inf"), float("inf"), True, True),
    ("3", 3, False, False),
    (3, "3", False, False),
    (None, 0, False, False),
    (None, None, True, True),
    ([1, 2], [1, 2], True, True),
    ((1, 2), [1, 2], True, False),  # JSON has no tuples
    ([1, 2], (1, 2), True, False),
    ([(1, 2), [3]], [[1, 2], [3]], True, False),
    ([1], 1, False, False),
    (1, [1], False, False),
    ([1], [1, 2], False, False),
    ({1, 2}, [1, 2], False, False),
    ({1, 2}, {2, 1}, True, True),
    ({1}, set(), False, False),
    ({}, set(), False, False),
    ({"a": [1]}, {"a": [1]}, True, True),
    ({"a": 1}, {"a": 2}, False, False),
    (iter([1, 2]), [1, 2], False, False),
    (range(2), [0, 1], False, False),
]


@pytest.mark.parametrize(("value", "expected", "in_json", "in_python"), VALUES)
def test_returned_values_are_compared(
    value: object, expected: object, in_json: bool, in_python: bool
) -> None:
    result = json.dumps(program.encode(value))
    expected_value = json.loads(json.dumps(program.encode(expected)))
    assert comparison.same_result(result, expected_value) == in_json
    assert comparison.same_result(result, expected_value, is_python=True) == in_python


@pytest.mark.parametrize(
    "result",
    [
        "",
        "{",
        "[" * 60_000,
        "[" * 60_000 + "]" * 60_000,
        "1" * 50_000,
        '{"tuple": 1}',
        '{"set": {"set": []}}',
        '{"dict": [[1]]}',
        '{"tuple": [1], "set": [1]}',
        "1 1",
    ],
)
def test_forged_results_are_no_values_and_end_nothing(result: str) -> None:
    for expected in (1, [1], {"set": [1]}, {"tuple": [1]}, {"dict": [[1, 2]]}):
        assert not comparison.same_result(result, expected)
        assert not comparison.same_result(result, expected, is_python=True)


@pytest.mark.parametrize(
    "value", [None, 3, "x", [1, (2, [3])], {1, 2}, {"a": (1,), 2: [{}]}, {(1, 2): 3}]
)
def test_values_are_decoded_as_they_were(value: object) -> None:
    assert program.decode(json.loads(json.dumps(program.encode(value)))) == value
