"""Readers of JSON values: the type that was asked for, or one line that says what is wrong."""

import math
import typing
from collections.abc import Callable
from dataclasses import asdict

import pytest

from jzero import json_values
from jzero.types import Grade, JsonValue

VALUES: list[JsonValue] = [
    None, True, False, 0, 7, 2.5, "", "7", "text", [], [1, "a"], {}, {"a": [None]}
]  # fmt: skip
READERS: list[tuple[Callable[..., object], Callable[[object], bool]]] = [
    (json_values.as_object, lambda value: type(value) is dict),
    (json_values.as_list, lambda value: type(value) is list),
    (json_values.as_text, lambda value: type(value) is str),
    (json_values.as_number, lambda value: type(value) in (int, float)),
    (json_values.as_messages, lambda value: type(value) is list),
    (json_values.as_prompt, lambda value: type(value) in (str, list)),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_reader_returns_its_type_and_refuses_all_others(value: JsonValue) -> None:
    for read, has_type in READERS:
        if has_type(value):
            assert read(value, "gold.x") is value
        else:
            with pytest.raises(ValueError, match=r"^gold\.x is .* and not [a-z ]+$"):
                read(value, "gold.x")


def test_a_tuple_is_a_list() -> None:
    assert json_values.as_list((1, "a")) == [1, "a"]


@pytest.mark.parametrize(("value", "number"), [(7, 7), (7.0, 7), ("-7", -7), (True, 1)])
def test_a_number_or_its_digits_are_an_integer(value: JsonValue, number: int) -> None:
    assert json_values.to_integer(value) == number


@pytest.mark.parametrize("value", ["seven", None, [7], {"a": 7}, math.nan, math.inf])
def test_other_values_are_no_integer(value: JsonValue) -> None:
    with pytest.raises(ValueError, match="seven|is .* and not a number"):
        json_values.to_integer(value)


def test_a_dataclass_is_built_from_its_fields() -> None:
    grade = Grade(0.5, True, "correct", parts={"length": 1.0})
    assert json_values.from_fields(Grade, asdict(grade)) == grade
    with pytest.raises(ValueError, match="the fields are None and not an object"):
        json_values.from_fields(Grade, None)
    with pytest.raises(TypeError, match="missing"):
        json_values.from_fields(Grade, {"score": 0.5})


def test_the_type_of_json_values_is_precise() -> None:
    """A type checker has to refuse reading a member of a value whose type was not checked."""
    kinds = set(typing.get_args(JsonValue))
    assert {bool, int, float, str, type(None)} < kinds
    assert not {typing.Any, object, dict, list} & kinds


@pytest.mark.parametrize("value", [True, "1", None, [1], {}, math.nan, math.inf, 11, -0.1, 10**299])
def test_a_number_outside_of_its_range_is_refused(value: JsonValue) -> None:
    with pytest.raises(ValueError, match="is no number from 0 to 10"):
        json_values.finite_number(value, 0, 10)


def test_members_are_found_by_path_and_kind() -> None:
    reply = {"a": [{"b": True, "c": None, "d": "x"}]}
    assert json_values.member(reply, ("a", 0, "d"), str) == "x"
    assert json_values.optional_member(reply, ("a", 0, "c"), int, 5) == 5
    for path, kind in (
        (("a", 1), dict),
        (("a", "0"), dict),
        (("x",), int),
        (("a", 0, "b", 0), int),
    ):
        with pytest.raises(ValueError, match="is missing"):
            json_values.member(reply, path, kind)
    for path, kind in ((("a", 0, "b"), int), (("a", 0, "c"), str), (("a",), dict)):
        with pytest.raises(ValueError, match=r"is .* and not "):
            json_values.member(reply, path, kind)
