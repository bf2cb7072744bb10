"""Reads untrusted JSON: `parse` bounds a text before it is parsed, the readers check each value.

    value = parse(text)                                # depth, containers, digits, no NaN
    text = member(reply, ("choices", 0, "text"), str)  # of a reply that another program wrote
    step = bounded_int(row["step"], 0, MAX_STEP, "step")
    lr = bounded_number(fields["lr"], 0.0, 1.0, "lr")

A reader returns the value with its type. A value of another type or out of its bounds raises
ValueError with one line that names the value. `jzero.files` opens and reads untrusted files.

Imports no jax: grader processes load this module.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn, TypeGuard, TypeVar

from jzero.errors import shown
from jzero.json_types import JsonValue, Prompt

T = TypeVar("T")

MAX_DEPTH = 64  # of nested JSON arrays and objects
MAX_CONTAINERS = 1 << 20  # arrays and objects of one text; each takes up to 230 bytes of memory
MAX_DIGITS = 300  # of an integer; longer ones do not fit a float64

# Possessive repetitions: a string without its end fails at once instead of backtracking.
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_NOT_A_BRACKET = bytes(set(range(256)) - set(b"[]{}"))
# Numbers that may not fit a float64: all others have fewer digits, and exponents of two digits.
# The look-behind keeps the search linear: without it every digit of a long number starts a search.
_LARGE_NUMBER = re.compile(rf"(?<![0-9])[0-9]{{{MAX_DIGITS + 1}}}|[0-9.][eE]\+?[0-9]{{3}}")

_KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number"}


def parse(text: str, *, allows_nan: bool = False) -> JsonValue:
    """Parses JSON of unknown origin. The cost of a hostile text is bounded by its length.

    Args:
        text: the JSON text.
        allows_nan: whether NaN and infinities are returned as floats, as `json.dumps` writes them.

    Raises:
        ValueError: the text is not JSON, has an object with duplicate keys or a number that does
            not fit a float64, or exceeds MAX_DEPTH, MAX_CONTAINERS or MAX_DIGITS.
    """
    # Count containers and nesting before parsing, because the parser would build all of them. Most
    # texts have few brackets, and the first count spares them the second.
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_brackets(text)
    # Python code for each number would be slow for a long list of tokens.
    has_large = _LARGE_NUMBER.search(text) is not None
    try:
        return json.loads(
            text,
            parse_int=_parse_int if has_large else None,
            parse_float=_parse_float if has_large else None,
            parse_constant=float if allows_nan else _refuse_constant,
            object_pairs_hook=_to_object,
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at character {error.pos}") from None


def _check_brackets(text: str) -> None:
    brackets = _STRING.sub("", text).encode("ascii", "replace").translate(None, _NOT_A_BRACKET)
    # A container has two brackets.
    if len(brackets) > 2 * MAX_CONTAINERS:
        raise ValueError(f"more than {MAX_CONTAINERS} lists and objects")
    depth = 0
    # Strings are removed, so every bracket opens or closes a container.
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _parse_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{shown(digits)} does not fit a float64")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _to_object(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    # json.loads would silently keep the last of two equal keys.
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("an object has the same key twice")
    return value


def as_object(value: object, name: str = "the value") -> dict[str, JsonValue]:
    """Returns a value that has to be an object."""
    return _checked(value, dict, name)


def as_list(value: object, name: str = "the value") -> list[JsonValue]:
    """Returns a value that has to be a list. A tuple, which JSON writes as a list, is copied."""
    return _checked(list(value) if isinstance(value, tuple) else value, list, name)


def as_text(value: object, name: str = "the value") -> str:
    """Returns a value that has to be text."""
    return _checked(value, str, name)


def as_messages(value: object, name: str = "the messages") -> list[dict[str, str]]:
    """Returns a value that has to be a list, of chat messages. The messages are not checked."""
    return _checked(value, list, name)


def as_prompt(value: object, name: str = "the prompt") -> Prompt:
    """Returns a value that has to be text or a list of chat messages."""
    return value if isinstance(value, str) else as_messages(value, name)


def as_number(value: object, name: str = "the value") -> int | float:
    """Returns a value that has to be a number, which may be infinite or NaN."""
    # A bool is an int in Python, but not in JSON.
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{name} is {shown(value)} and not a number")
    return value


def to_integer(value: object, name: str = "the value") -> int:
    """Converts a finite number, or the digits of an integer, to an int.

    Raises:
        ValueError: the value is neither.
    """
    is_infinite = isinstance(value, float) and not math.isfinite(value)
    if is_infinite or not isinstance(value, int | float | str):
        raise ValueError(f"{name} is {shown(value)} and not a number")
    return int(value)


def is_finite_number(value: object) -> TypeGuard[int | float]:
    """Returns whether a value is a number that a float64 holds: not NaN, not infinite, no bool."""
    # A bool is an int in Python, but not in JSON.
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond all floats
        return False


def bounded_number(value: object, low: float, high: float, name: str = "the value") -> float:
    """Returns a number as a float. Raises ValueError unless low <= value <= high."""
    if not is_finite_number(value) or not low <= float(value) <= high:
        raise ValueError(f"{name} is {shown(value)} and not a number from {low:g} to {high:g}")
    return float(value)


def bounded_int(value: object, low: int, high: int, name: str = "the value") -> int:
    """Returns an integer. Raises ValueError for other values, and unless low <= value <= high."""
    # A bool is an int in Python, but not in JSON.
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} is {shown(value)} and not an integer from {low} to {high}")
    return value


def bounded_text(value: object, most: int, name: str = "the value") -> str:
    """Returns text of at most `most` characters that UTF-8 can encode.

    Raises:
        ValueError: the value is not text, is too long, or has half of a pair of surrogates.
    """
    text = as_text(value, name)
    if len(text) > most:
        raise ValueError(f"{name} has {len(text):,} characters and not at most {most:,}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} has half of a pair of surrogates") from None
    return text


def bounded_list(value: object, most: int, name: str = "the value") -> list[JsonValue]:
    """Returns a list of at most `most` values. Raises ValueError for other values."""
    items = as_list(value, name)
    if len(items) > most:
        raise ValueError(f"{name} has {len(items):,} values and not at most {most:,}")
    return items


def member(value: object, path: Iterable[str | int], kind: type[T]) -> T:
    """Returns the value at a path of keys and indices in a reply, such as ("choices", 0, "text").

    Raises:
        ValueError: the value is missing, or is not of type `kind`.
    """
    path = tuple(path)
    name = ".".join(map(str, path)) or "the reply"
    for step in path:
        if isinstance(step, int):
            is_there = isinstance(value, list) and step < len(value)
        else:
            is_there = isinstance(value, dict) and step in value
        if not is_there:
            raise ValueError(f"{name} is missing")
        # The readers only tell the type checker what `is_there` has found.
        value = as_list(value)[step] if isinstance(step, int) else as_object(value)[step]
    return _checked(value, kind, name)


def optional_member(value: object, path: Iterable[str | int], kind: type[T], default: T) -> T:
    """Like `member`, but returns `default` if the value is missing or null."""
    *parents, last = path
    parent = member(value, parents, dict)
    return default if parent.get(str(last)) is None else member(parent, (last,), kind)


def from_fields(kind: Callable[..., T], fields: object) -> T:
    """Builds a dataclass from a dict of its fields. The types of the fields are not checked.

    Raises:
        ValueError: `fields` is no dict.
        TypeError: a field is missing or unknown.
    """
    if not isinstance(fields, Mapping):
        raise ValueError(f"the fields are {shown(fields)} and not an object")
    return kind(**fields)


def _checked(value: object, kind: type[T], name: str) -> T:
    # A bool is an int in Python, but not in JSON.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{name} is {shown(value)} and not {_KINDS[kind]}")
    return value
