"""Compares what a program printed or returned with what it should have.

This runs outside of the sandbox: a program never sees what is expected of it.
"""

import json
import math
import re

from jzero.types import JsonValue

TOLERANCE = 1e-6  # of numbers with a fraction, relative to numbers above 1

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_HAS_FRACTION = re.compile(r"[.eE]")
_LONGEST_NUMBER = 40  # characters


def same_output(printed: str, expected: str) -> bool:
    """Returns whether two texts have the same words, whatever white space is between them.

    Where the expected word is a number with a fraction, a number within TOLERANCE is the same.
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
    return _same_number(float(word), float(expected))


def _same_number(number: float, expected: float) -> bool:
    if not math.isfinite(expected):
        return number == expected
    return abs(number - expected) <= TOLERANCE * max(1.0, abs(expected))


def same_result(result: str, expected: JsonValue) -> bool:
    """Returns whether the value that a program returned, in `program.encode`'s JSON, is `expected`.

    `expected` has the same form; a tuple and a list with the same items are the same.
    """
    try:
        return _same_value(json.loads(result), expected)
    except (ValueError, RecursionError):  # the program wrote something else, or nothing
        return False


def _same_value(value: JsonValue, expected: JsonValue) -> bool:
    value, expected = _list_of_tuple(value), _list_of_tuple(expected)
    if isinstance(expected, list):
        if not isinstance(value, list) or len(value) != len(expected):
            return False
        return all(map(_same_value, value, expected))
    if isinstance(expected, dict):
        return isinstance(value, dict) and _same_marked(value, expected)
    if isinstance(expected, float) or isinstance(value, float):
        are_numbers = isinstance(value, int | float) and isinstance(expected, int | float)
        return are_numbers and _same_number(_as_float(value), _as_float(expected))
    if isinstance(value, list | dict):
        return False
    return value == expected


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # an integer of thousands of digits
        return math.nan


def _list_of_tuple(value: JsonValue) -> JsonValue:
    if isinstance(value, dict) and list(value) == ["tuple"]:
        return value["tuple"]
    return value


def _same_marked(value: dict[str, JsonValue], expected: dict[str, JsonValue]) -> bool:
    """Compares sets and dicts: the same items in any order."""
    if list(value) != list(expected) or len(value) != 1:
        return False
    [(kind, items)] = value.items()
    expected_items = expected[kind]
    if not isinstance(items, list) or len(items) != len(expected_items):
        return False
    left = list(expected_items)
    for item in items:
        for place, other in enumerate(left):
            if _same_value(item, other):
                del left[place]
                break
        else:
            return False
    return True
