"""Flags of tuples: every one can be emptied, and text that is no Python literal is one item."""

import ast
from pathlib import Path

import pytest

from jzero import cli, config, main
from jzero.config.schema import Setting

TUPLES = [item for item in config.list_settings(config.Config()) if item.kind is tuple]
ITEMS = {str: ("one", "two"), int: (64, 32), float: (1.0, 0.5)}
ROOT = Path(__file__).resolve().parents[2]


def value_of(settings: config.Config, name: str) -> object:
    [found] = [item.value for item in config.list_settings(settings) if item.name == name]
    return found


def with_items(item: Setting) -> config.Config:
    """Returns settings in which a tuple has two items."""
    settings = config.Config()
    *sections, field = item.name.split(".")
    section: object = settings
    for name in sections:
        section = getattr(section, name)
    assert item.item_kind is not None
    if item.part:
        config.set_part(settings, item.name, ITEMS[item.item_kind])
    else:
        setattr(section, field, ITEMS[item.item_kind])
    return settings


@pytest.mark.parametrize("item", TUPLES, ids=lambda item: item.name)
def test_every_tuple_can_be_emptied_and_filled_by_flags(item: Setting) -> None:
    assert item.item_kind is not None
    items = ITEMS[item.item_kind]
    empty = [
        [f"--config.{item.name}="],
        [f"--config.{item.name}", ""],
        [f"--config.{item.name}=()"],
    ]
    for arguments in empty:
        assert value_of(cli.parse_settings(with_items(item), arguments), item.name) == ()
    once_for_each = [f"--config.{item.name}={value}" for value in items]
    found = value_of(cli.parse_settings(config.Config(), once_for_each), item.name)
    assert found == items
    # An empty flag takes back what earlier ones gave, as where a script adds one to a command.
    arguments = [*once_for_each, f"--config.{item.name}="]
    assert value_of(cli.parse_settings(with_items(item), arguments), item.name) == ()
    # A flag replaces the items of the recipe, and an empty one in front changes nothing.
    arguments = [f"--config.{item.name}=", f"--config.{item.name}={items[1]}"]
    assert value_of(cli.parse_settings(with_items(item), arguments), item.name) == items[1:]


TEXTS = [
    "tasks=math,code",
    "code.feedback.wrong=No, that is wrong.",
    "a b",
    "a, 'b",
    "</answer>",
    "\n\nQuestion",
    "1 +",
    "f(x)",
    "it's",
    "\\boxed{}",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_that_is_no_literal_is_one_item(text: str) -> None:
    for name in ("task.options", "rollout.stop"):
        flag = f"--config.{name}={text}"
        assert value_of(cli.parse_settings(config.Config(), [flag]), name) == (text,)
        assert value_of(cli.parse_settings(config.Config(), [flag, flag]), name) == (text, text)


@pytest.mark.parametrize("text", ["('a', 'b')", "'a','b'", '["a", "b"]', "'a b',", '"a, b"'])
def test_literals_are_read_as_before(text: str) -> None:
    value = ast.literal_eval(text)
    expected = (value,) if isinstance(value, str) else tuple(value)
    found = cli.parse_settings(config.Config(), [f"--config.rollout.stop={text}"])
    assert found.rollout.stop == expected


# ml_collections loads a recipe so.
@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
def test_a_recipe_s_weights_can_be_emptied() -> None:
    """configs/open_r1.py has three weights for three functions."""
    recipe = f"--config={ROOT}/configs/open_r1.py:qwen2.5-1.5b-instruct"
    command = main.parse(
        [recipe, "--config.task.reward.weights=", "--config.task.reward.functions=accuracy"]
    )
    assert command.settings.task.reward.weights == ()
    assert command.settings.task.reward.functions == ("accuracy",)
    config.validate(command.settings)


def test_nf4_is_refused_with_the_reason() -> None:
    settings = config.Config()
    settings.model.base = "nf4"
    settings.model.adapter.rank = 8
    with pytest.raises(
        config.checks.UserError, match="not one of native, int8: nf4 is a format of"
    ):
        config.validate(settings)
