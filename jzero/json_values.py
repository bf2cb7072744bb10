"""Readers of JSON values: each checks the type of a value and returns it with that type.

    text = member(reply, ("choices", 0, "text"), str)  # of a reply that another program wrote
    numbers = as_list(gold["numbers"], "numbers")

A value of another type raises ValueError with one line that names the value. `jzero.http` and
`jzero.problems.bounds` limit the size and the depth of untrusted JSON before these readers see it.

Imports no jax: grader processes load this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from jzero.errors import shown
from jzero.types import JsonValue, Prompt

T = TypeVar("T")

_KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number"}


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
    """Converts a finite number, or the digits of an integer, to an int."""
    is_infinite = isinstance(value, float) and not math.isfinite(value)
    if is_infinite or not isinstance(value, int | float | str):
        raise ValueError(f"{name} is {shown(value)} and not a number")
    return int(value)


def finite_number(value: object, low: float, high: float) -> float:
    """Returns a number as a float. Raises ValueError unless low <= value <= high."""
    # A bool is an int in Python, but not in JSON.
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{shown(value)} is no number from {low:g} to {high:g}")
    # `float` is exact enough to compare: `http.MAX_DIGITS` keeps integers within its range.
    if not math.isfinite(value) or not low <= float(value) <= high:
        raise ValueError(f"{shown(value)} is no number from {low:g} to {high:g}")
    return float(value)


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
