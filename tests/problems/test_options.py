"""A task's own settings: `task.options=name=value` parsed by the types of the task's record."""

from dataclasses import dataclass
from typing import Literal

import pytest

from jzero import cli, config
from jzero.errors import UserError
from jzero.fields import Field, record
from jzero.problems.options import check_options, read_options


@record
class Options:
    largest: int = Field(default=7, le=99)
    bonus: float = 0.0
    spoken: bool = False
    name: str = ""
    unit: Literal["exact", "convert"] = "exact"


def test_options_have_the_types_of_their_fields() -> None:
    options = ("largest=9", "bonus=1e-2", "spoken=True", "name=a=b")

    assert read_options(Options, options) == Options(9, 0.01, True, "a=b")
    assert read_options(Options, list(options)) == Options(9, 0.01, True, "a=b")
    assert read_options(Options, ()) == Options()


def test_flags_give_options_one_by_one_and_replace_those_of_the_recipe() -> None:
    recipe = config.Config()
    recipe.task.options = ("largest=5", "name=x")

    flags = [f"--config.task.options={option}" for option in ("largest=9", "bonus=2")]
    task = cli.parse_settings(recipe, flags).task

    assert read_options(Options, task.options) == Options(largest=9, bonus=2.0)


@pytest.mark.parametrize(
    "option, message",
    [
        ("largst=8", "task.options=largst=8 is not an option of this task; did you mean largest"),
        ("x=1", "task.options=x=1 is not an option of this task; use largest=int, bonus=float"),
        ("largest=7.5", "task.options=largest=7.5 must be a whole number"),
        ("largest=100", "task.options=largest=100 must be at most 99"),
        ("largest=-1", "task.options=largest=-1 must be at least 0"),
        ("bonus=nan", "task.options=bonus=nan must be a finite number"),
        ("spoken=perhaps", "task.options=spoken=perhaps must be True or False"),
        ("unit=km", "task.options=unit=km is not one of exact, convert"),
    ],
)
def test_mistakes_name_the_option_and_its_type(option, message) -> None:
    with pytest.raises(UserError, match=message):
        check_options(Options, (option,))


@pytest.mark.parametrize("option", ["largest", "", "=9", " =9"])
def test_an_option_without_a_value_is_refused_when_it_is_assigned(option: str) -> None:
    task = config.TaskConfig()
    with pytest.raises(UserError, match=r"task\.options=.* has no value: write NAME=VALUE"):
        task.options = (option,)


def test_options_of_another_task_are_left_out_and_wrong_values_are_not() -> None:
    options = ("reward=all", "largest=9")
    assert read_options(Options, options) == Options(largest=9)
    with pytest.raises(UserError, match="task.options=largest=x must be a whole number"):
        read_options(Options, ("reward=all", "largest=x"))


def test_a_class_that_is_not_a_record_is_told_how_to_become_one() -> None:
    @dataclass(frozen=True)
    class Plain:
        largest: int = 7

    with pytest.raises(UserError, match="Plain has no settings: write it with @record"):
        read_options(Plain, ("largest=9",))
