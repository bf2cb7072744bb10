"""Readers of JSON values: the type that was asked for, or one line that says what is wrong."""

import math
import typing
from collections.abc import Callable
from dataclasses import asdict

import pytest

from jzero import json_values
from jzero.types import Grade, JsonValue
from tests.hostile_values import VALUES as VALUES_BY_NAME
from tests.hostile_values import Raw, to_json

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
    with pytest.raises(ValueError, match="x is .* and not a number from 0 to 10"):
        json_values.bounded_number(value, 0, 10, "x")


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


DOORS: list[tuple[Callable[[object], object], type]] = [
    (lambda value: json_values.bounded_int(value, -5, 2**31 - 1, "x"), int),
    (lambda value: json_values.bounded_number(value, -1e9, 1e9, "x"), float),
    (lambda value: json_values.bounded_text(value, 100, "x"), str),
    (lambda value: json_values.bounded_list(value, 3, "x"), list),
]


@pytest.mark.parametrize("name", VALUES_BY_NAME)
def test_a_bounded_reader_returns_its_type_or_gives_one_line(name: str) -> None:
    value = VALUES_BY_NAME[name]
    for read, kind in DOORS:
        try:
            result = read(value)
        except ValueError as error:
            assert str(error).isprintable()
            assert len(str(error)) < 300
            continue
        assert type(result) is kind or isinstance(result, Raw)
        if isinstance(result, int | float):
            assert math.isfinite(result)
            assert abs(result) <= 2**31
        if isinstance(result, str):
            assert len(result.encode()) <= 400


@pytest.mark.parametrize("name", VALUES_BY_NAME)
def test_parsing_gives_a_finite_bounded_value_or_one_line(name: str) -> None:
    text = to_json({"a": [VALUES_BY_NAME[name]]})
    for allows_nan in (False, True):
        try:
            value = json_values.parse(text, allows_nan=allows_nan)
        except ValueError as error:
            assert str(error).isprintable()
            continue
        item = json_values.as_list(json_values.as_object(value)["a"])[0]
        if isinstance(item, int | float):
            assert allows_nan or math.isfinite(item)
            float(item)  # no integer is beyond all floats


def test_a_long_integer_among_short_ones_is_found() -> None:
    for text in ("[1, 2e3, 3.5E-400]", "[" + "1" * 300 + "]"):
        assert len(json_values.as_list(json_values.parse(text))) >= 1
    for text in ("[" + "1" * 400 + ".0]", "[1E400]", "[1.1e+309]"):
        with pytest.raises(ValueError):
            json_values.parse(text)
