"""A config survives config.json, and a file with unknown settings is refused."""

import json

import pytest
from settings_by_name import changed_config

from jzero import config
from jzero.errors import UserError
from jzero.setting import is_part


def test_a_config_is_read_as_it_was_written() -> None:
    settings = changed_config(
        {
            "rollout.stop": ("</answer>",),
            "eval.suites": ("aime24", "math500"),
            "optimizer.lr": 1.0,
            "critic.lr": 1e-4,
        }
    )
    assert config.from_json(config.to_json(settings), "config.json") == settings


def test_a_setting_that_is_not_in_the_file_has_its_default() -> None:
    settings = config.from_json('{"train": {"steps": 3}}', "config.json")
    assert settings == changed_config({"train.steps": 3})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "runs/a/config.json is damaged: not valid JSON: "),
        ("[]", "runs/a/config.json is not a config"),
        ('{"train": {"steps": "x"}}', "runs/a/config.json holds a wrong value: .*train.steps"),
        (
            '{"train": {"stepz": 3}}',
            r"does not have: no field train.stepz; did you mean train.steps",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_named(text, message) -> None:
    with pytest.raises(UserError, match=f"(?s){message}"):
        config.from_json(text, "runs/a/config.json")


def test_flatten_keeps_values_and_order() -> None:
    tree = {"b": {"y": (1, 2), "x": None}, "a": 3}
    assert list(config.flatten(tree).items()) == [("b.y", (1, 2)), ("b.x", None), ("a", 3)]


def test_to_json_holds_every_setting() -> None:
    settings = config.Config()
    names = []
    for setting in config.list_settings(settings):
        is_named = is_part(setting.value)
        names.append(f"{setting.name}.name" if is_named else setting.name)
    assert list(config.flatten(json.loads(config.to_json(settings)))) == names
