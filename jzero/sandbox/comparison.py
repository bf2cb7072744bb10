"""Compares the printed output or the return value of a program with the expected one.

This runs outside of the sandbox: a program never sees the expected output. docs/environments.md
explains which differences count, and tests/sandbox/test_comparison.py has a case of each rule.
"""

import json
import math
import re

from jzero.json_values import as_list
from jzero.types import JsonValue

PRINTED_TOLERANCE = 1e-6  # relative tolerance of a printed number with a fraction
RETURNED_TOLERANCE = 1e-9  # relative tolerance of a returned float, which has all its digits
_NEAR_ZERO = 1e-9  # absolute tolerance of a printed number: rounding errors around 0
_RETURNED_NEAR_ZERO = 1e-12  # absolute tolerance of a returned float
# An expected number with at least this many decimals may have been rounded to them.
_DECIMALS_OF_ROUNDED = 6

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_HAS_FRACTION = re.compile(r"[.eE]")
_LONGEST_NUMBER = 40  # characters


def same_output(printed: str, expected: str) -> bool:
    """Returns whether two texts have the same words, regardless of the white space between them.

    If the expected word is a number with a fraction, a number close to it is the same.
    """
    words, expected_words = printed.split(), expected.split()
    if len(words) != len(expected_words):
        return False
    return all(map(_same_word, words, expected_words))


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    are_short = max(len(word), len(expected)) <= _LONGEST_NUMBER
    if not are_short or not _HAS_FRACTION.search(expected):
        return False
    if not _NUMBER.fullmatch(word) or not _NUMBER.fullmatch(expected):
        return False
    number, expected_number = float(word), float(expected)
    if not math.isfinite(expected_number):
        return number == expected_number
    allowed = max(PRINTED_TOLERANCE * abs(expected_number), _NEAR_ZERO)
    return abs(number - expected_number) <= max(allowed, _half_of_last_decimal(expected))


def _half_of_last_decimal(expected: str) -> float:
    """Returns the largest rounding error of an expected number, 0 if it has few decimals."""
    _, _, decimals = expected.partition(".")
    if not decimals.isdigit() or len(decimals) < _DECIMALS_OF_ROUNDED:
        return 0.0
    return 0.5 * 10.0 ** -len(decimals)


def same_result(result: str, expected: JsonValue, *, is_python: bool = False) -> bool:
    """Returns whether a program's return value, as JSON of `program.encode`, equals `expected`.

    Args:
        result: the JSON, which the program may have forged.
        expected: the value, in the same form.
        is_python: whether `expected` is a value of Python, which distinguishes lists from tuples.
            In JSON a tuple is a list.
    """
    try:
        return _same_value(json.loads(result), expected, is_python)
    except (ValueError, RecursionError):  # the program wrote malformed JSON, or nothing
        return False


def _same_value(value: JsonValue, expected: JsonValue, is_python: bool) -> bool:
    if not is_python:
        # JSON has no tuples, so a returned tuple equals the expected list.
        value, expected = _list_of_tuple(value), _list_of_tuple(expected)
    if isinstance(expected, list):
        if not isinstance(value, list) or len(value) != len(expected):
            return False
        return all(
            _same_value(item, other, is_python) for item, other in zip(value, expected, strict=True)
        )
    if isinstance(expected, dict):
        return isinstance(value, dict) and _same_marked(value, expected, is_python)
    if isinstance(expected, int | float):
        return isinstance(value, int | float) and _same_number(value, expected)
    if isinstance(value, int | float | list | dict):
        return False
    return value == expected


def _same_number(value: float, expected: float) -> bool:
    """Compares numbers. Only an expected float allows a small difference.

    A returned False or True never equals an expected number. An expected False or True accepts the
    integers 0 and 1, which programs return as truth values.
    """
    if isinstance(expected, bool):
        return isinstance(value, int) and value == expected
    if isinstance(value, bool):
        return False
    if isinstance(expected, int):
        return value == expected  # Python compares integers with floats exactly
    if not math.isfinite(expected):
        return value == expected
    number = _as_float(value)
    return abs(number - expected) <= max(RETURNED_TOLERANCE * abs(expected), _RETURNED_NEAR_ZERO)


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # an integer of thousands of digits
        return math.nan


def _list_of_tuple(value: JsonValue) -> JsonValue:
    if isinstance(value, dict) and list(value) == ["tuple"] and isinstance(value["tuple"], list):
        return value["tuple"]
    return value


def _same_marked(
    value: dict[str, JsonValue],
    expected: dict[str, JsonValue],
    is_python: bool,
) -> bool:
    """Compares tuples in order, and the items of sets and dicts in any order."""
    if list(value) != list(expected) or len(value) != 1:
        return False
    [(kind, items)] = value.items()
    if kind == "tuple":
        return _same_value(items, expected[kind], is_python)
    expected_items = as_list(expected[kind], kind)
    if not isinstance(items, list) or len(items) != len(expected_items):
        return False
    left = expected_items.copy()
    for item in items:
        for place, other in enumerate(left):
            if _same_value(item, other, is_python):
                # An expected item matches only one item.
                del left[place]
                break
        else:
            return False
    return True
