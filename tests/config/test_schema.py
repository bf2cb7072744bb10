"""Every setting can be set by a flag, has a description, and belongs to one config only."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from absl import flags
from ml_collections import config_flags
from settings_by_name import ROOT, get, put

from jzero import config
from jzero.algorithms import ADVANTAGES, KL, WEIGHTS, Algorithm, Auto
from jzero.algorithms.corrections import CORRECTIONS
from jzero.algorithms.kl import KL_ESTIMATORS
from jzero.algorithms.ratios import RATIOS
from jzero.algorithms.surrogates import SURROGATES
from jzero.setting import field_types, is_part, rules_of, to_values

# ml_collections loads a recipe that way.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")

SETTINGS = config.list_settings(config.Config())
# tests/config/test_part_settings.py has the flags of parts.
DEFAULTS = {setting.name: setting.value for setting in SETTINGS if setting.kind is not object}
DEFAULTS = {name: value for name, value in DEFAULTS.items() if not config.names_part(name)}
TEXTS_OF_A_TUPLE = {
    "</answer>": ("</answer>",),
    "('a', 'b c')": ("a", "b c"),
    "()": (),
}


def parse(*arguments: str) -> config.Config:
    """Returns what the command line makes of a recipe."""
    argv = ["main", f"--config={ROOT / 'configs/countdown.py'}:tiny", *arguments]
    values = flags.FlagValues()
    holder = config_flags.DEFINE_config_file("config", None, "", values, sys_argv=argv)
    values(argv)
    return holder.value


@pytest.fixture(scope="module")
def recipe() -> config.Config:
    """The recipe without a change."""
    return parse()


def other_value(value: bool | int | float | str) -> bool | int | float | str:
    """Returns another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 3
    if isinstance(value, float):
        return value / 2 + 0.125
    return value + "other/one 2"


@pytest.mark.parametrize("name", [name for name in DEFAULTS if not config.schema.names_part(name)])
def test_every_setting_is_set_by_its_flag(name, recipe) -> None:
    value = get(recipe, name)
    if isinstance(value, tuple):
        for text, parsed in TEXTS_OF_A_TUPLE.items():
            assert get(parse(f"--config.{name}={text}"), name) == parsed
        twice = parse(f"--config.{name}=a", f"--config.{name}=<b>")
        assert get(twice, name) == ("a", "<b>")
        return

    new_value = other_value(value)
    changed = parse(f"--config.{name}={new_value}")

    assert get(changed, name) == new_value
    assert type(get(changed, name)) is type(value)
    put(changed, name, value)
    assert changed == recipe  # nothing else has changed
    if isinstance(value, bool):
        assert get(parse(f"--config.{name}"), name) is True
        assert get(parse(f"--noconfig.{name}"), name) is False


def fields_of(section: object, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field, object]]:
    """Yields the dotted name, the field and the value of every setting, by its own walk."""
    assert dataclasses.is_dataclass(section)
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if is_part(value) or is_part(section) or prefix + field.name == "teacher":
            yield prefix + field.name, field, value
            if is_part(value):
                yield from fields_of(value, f"{prefix}{field.name}.")
        elif dataclasses.is_dataclass(value):
            yield from fields_of(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field, value


def test_settings_are_listed_in_the_order_of_the_schema() -> None:
    listed = [(setting.name, setting.value) for setting in config.list_settings(config.Config())]
    assert listed == [(name, value) for name, _, value in fields_of(config.Config())]


def test_settings_have_types_that_a_flag_can_parse() -> None:
    for name, field, value in fields_of(config.Config()):
        if config.schema.names_part(name) or value is None or is_part(value):
            continue
        assert type(value) in (bool, int, float, str, tuple), name
        # An int as default of a float could not be changed to 0.5.
        assert field.type not in (float, "float") or isinstance(value, float), name


def test_every_setting_has_a_description_in_sentences() -> None:
    for setting in config.list_settings(config.Config()):
        description = setting.rules.description
        assert description[0].isupper()
        assert description.endswith((".", "...")), setting.name


def test_every_default_is_allowed() -> None:
    config.validate(config.Config())


def test_every_part_has_a_function_and_every_function_a_part() -> None:
    parts = {name: set(field.parts) for name, field in field_types(Algorithm).items()}
    assert parts["advantage"] == set(ADVANTAGES)
    assert parts["weight"] == set(WEIGHTS)
    assert parts["surrogate"] == set(SURROGATES)
    assert parts["correction"] == {*CORRECTIONS, Auto, None}
    [ratio] = [field for field in dataclasses.fields(Algorithm) if field.name == "ratio"]
    assert rules_of(ratio).choices == tuple(RATIOS)
    [estimator] = [field for field in dataclasses.fields(KL) if field.name == "estimator"]
    assert rules_of(estimator).choices == tuple(KL_ESTIMATORS)


def test_sections_are_not_shared_between_configs() -> None:
    config.Config().rollout.group_size = 99
    assert config.Config().rollout.group_size != 99


def test_importing_the_settings_loads_no_jax() -> None:
    """Grader processes import them, of which there are many."""
    heavy = "{'jax', 'pydantic', 'huggingface_hub', 'httpx'}"
    script = f"import sys, jzero.config; print({heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_a_section_is_read_from_its_fields_in_json() -> None:
    task = config.TaskConfig(options=("a=1", "b=2"))
    task.reward.functions = ("accuracy", "format")
    task.reward.judge = config.JudgeServer(url="http://localhost:1/v1")
    fields = json.loads(json.dumps(to_values(task)))
    assert config.read_section(config.TaskConfig, fields) == task
