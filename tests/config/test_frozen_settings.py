"""The settings of a run that is resolved cannot be changed, and copies of them can."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import reference

from jzero import cli, config, setup
from jzero.config import Config, list_sections
from jzero.config.flags import put_value
from jzero.errors import UserError
from jzero.fields import editable, fields_of, frozen, values_of
from jzero.tasks import mixed


def every_field(settings: Config) -> list[tuple[object, str, str]]:
    """Returns each section of a config with each of its fields, and the dotted name of it."""
    return [
        (section, field, f"{name}.{field}".removeprefix("."))
        for name, section in list_sections(settings).items()
        for field in fields_of(type(section))
    ]


def test_no_setting_of_a_frozen_config_can_be_assigned() -> None:
    settings = frozen(Config())
    fields = every_field(settings)
    assert len(fields) > 150
    for section, field, name in fields:
        with pytest.raises(UserError) as raised:
            setattr(section, field, getattr(section, field))
        assert str(raised.value).startswith(f"{name}=")
        assert "do not change after they are resolved" in str(raised.value)
    assert settings == Config()


@pytest.mark.parametrize("copied", [editable, lambda s: cli.parse_settings(s, [])])
def test_a_copy_of_a_frozen_config_can_be_changed(copied: Callable[[Config], Config]) -> None:
    original = frozen(Config())
    made = copied(original)
    for section, field, _ in every_field(made):
        setattr(section, field, getattr(section, field))
    made.rollout.group_size = 3
    assert original.rollout.group_size != 3


def test_a_frozen_config_is_written_and_compared_like_another() -> None:
    settings = Config()
    kept = frozen(settings)
    assert kept == settings
    assert config.to_json(kept) == config.to_json(settings)
    assert values_of(kept.task) == values_of(settings.task)
    assert replace(kept, name="x").name == "x"
    settings.rollout.group_size = 4  # the caller's settings are not frozen
    with pytest.raises(UserError, match=r"^rollout\.group_size=4: the settings of a run do not"):
        copy.deepcopy(kept).rollout.group_size = 4
    with pytest.raises(UserError, match=r"^rollout\.group_size=8: the settings of a run do not"):
        put_value(kept, "rollout.group_size", 8)


def test_settings_of_row_tasks_of_a_frozen_config_have_their_own_values() -> None:
    task = config.TaskConfig(name="mixed", options=("math.template=no", "code.sandbox.seconds=2"))
    settings = mixed.all_settings(frozen(task))
    assert settings["math"].template == "no"
    assert settings["code"].sandbox.seconds == 2.0


def test_resolve_returns_frozen_settings_and_leaves_those_of_the_caller() -> None:
    settings = reference.settings(train={"microbatch_tokens": 0})
    before = config.to_json(settings)
    resolved = setup.resolve(settings)
    assert config.to_json(settings) == before
    settings.train.steps = 7
    assert resolved.config.train.steps != 7
    with pytest.raises(UserError, match=r"^train\.steps=7: the settings of a run do not change"):
        resolved.config.train.steps = 7
    assert setup.build(resolved, None).config is resolved.config  # pyright: ignore
    assert resolved.config.train.microbatch_tokens  # computed
    assert resolved.config.rollout.num_slots
