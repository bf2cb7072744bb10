"""A task's own settings: `task.options=name=value` parsed by the types of the task's dataclass."""

from dataclasses import dataclass

import pytest

from jzero import cli, config
from jzero.problems.options import read_known_options, read_options


@dataclass(frozen=True)
class Options:
    largest: int = 7
    bonus: float = 0.0
    spoken: bool = False
    name: str = ""


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
        ("largest", "'largest' is not an option of this task: use largest=int, bonus=float"),
        ("smallest=1", "'smallest=1' is not an option of this task"),
        ("largest=7.5", "'largest=7.5': '7.5' is not of type int"),
        ("spoken=1", "'spoken=1': '1' is not of type bool"),
    ],
)
def test_mistakes_name_the_option_and_its_type(option, message) -> None:
    with pytest.raises(ValueError, match=message):
        read_options(Options, (option,))


def test_options_of_another_task_are_left_out_and_wrong_values_are_not() -> None:
    options = ("reward=all", "largest=9")
    assert read_known_options(Options, options) == Options(largest=9)
    with pytest.raises(ValueError, match="'x' is not of type int"):
        read_known_options(Options, ("reward=all", "largest=x"))
