"""Schemas of tools: those of `transformers`, from types and docstrings."""

import enum
from collections.abc import Callable
from typing import Any, Literal, Optional

import pytest

from jzero.environments.tools.calculator import calculator
from jzero.environments.tools.interpreter import Python
from jzero.environments.tools.schemas import function_schema, mismatch
from jzero.environments.tools.search import Search
from jzero.errors import UserError


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C") -> dict[str, float]:
    """Forecasts the weather
    of a city.

    Args:
        city: The name
            of the city.
        days: How many days: at most 7.
        unit: The unit.

    Returns:
        The temperature of each day.

    Raises:
        ValueError: there is no such city.
    """
    return {}


def many(
    a: list[int],
    b: dict[str, list[float]],
    c: tuple[int, str],
    d: int | str,
    e: Optional[bool],  # noqa: UP045
    f: list[str] | int,
    g: Color,
    h: Any,
    i: list,
    j: Literal[1, "a"] = 1,
    k: float | None = None,
) -> Color:
    """Takes all kinds.

    Args:
        a: a
        b: b
        c: c
        d: d
        e: e
        f: f
        g: g
        h: h
        i: i
        j: j
        k: k
    """
    return Color.RED


def drink(name: str) -> None:
    """Drinks.

    Args:
        name: What to drink (choices: ["tea", "coffee"])
    """


def nothing():
    """Does nothing."""


@pytest.mark.parametrize(
    "function", [weather, many, drink, nothing, calculator, Python.python, Search.search]
)
def test_a_schema_is_that_of_transformers(function: Callable[..., object]) -> None:
    from transformers.utils import get_json_schema

    assert function_schema(function) == get_json_schema(function)


def undocumented(x: int) -> int:
    return x


def untyped(x):
    """Does.

    Args:
        x: x
    """


def undescribed(x: int) -> None:
    """Does."""


def collecting(*args: int) -> None:
    """Does.

    Args:
        args: args
    """


def strange(x: set[int]) -> None:
    """Does.

    Args:
        x: x
    """


@pytest.mark.parametrize(
    "function, message",
    [
        (undocumented, "the tool undocumented has no docstring"),
        (untyped, "the parameter x has no type"),
        (undescribed, "the parameter x is not described"),
        (collecting, "the parameter args collects arguments"),
        (strange, "which JSON cannot hold"),
    ],
)
def test_what_makes_no_schema_is_named(function: Callable[..., object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        function_schema(function)


@pytest.mark.parametrize(
    "value, schema, fits",
    [
        (1, {"type": "integer"}, True),
        (True, {"type": "integer"}, False),
        (1.0, {"type": "integer"}, False),
        (1, {"type": "number"}, True),
        ("1", {"type": "number"}, False),
        (True, {"type": "boolean"}, True),
        (None, {"type": "string"}, False),
        (None, {"type": "string", "nullable": True}, True),
        (["a"], {"type": "array", "items": {"type": "integer"}}, False),
        ([1, "a"], {"type": "array", "prefixItems": [{"type": "integer"}, {}]}, True),
        ([1], {"type": "array", "prefixItems": [{"type": "integer"}, {}]}, False),
        ({"a": 1}, {"type": "object", "additionalProperties": {"type": "string"}}, False),
        ("x", {"type": "string", "enum": ["a"]}, False),
        ("x", {"type": ["integer", "string"]}, True),
        ([], {"anyOf": [{"type": "integer"}, {"type": "array"}]}, True),
        ({}, {"anyOf": [{"type": "integer"}, {"type": "array"}]}, False),
        ({"a": [1]}, {}, True),
    ],
)
def test_values_are_compared_with_their_schemas(value: Any, schema: Any, fits: bool) -> None:
    assert (mismatch(value, schema) == "") == fits
