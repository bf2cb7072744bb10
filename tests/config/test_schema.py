"""Every setting can be set by a flag, has a description, and belongs to one config only."""

import dataclasses
import subprocess
import sys
import typing
from collections.abc import Iterator

import pytest
from settings_by_name import ROOT, get

from jzero import cli, config, main
from jzero.algorithms import ADVANTAGES, KL, WEIGHTS, Algorithm, Auto
from jzero.algorithms.corrections import CORRECTIONS
from jzero.algorithms.kl import KL_ESTIMATORS
from jzero.algorithms.ratios import RATIOS
from jzero.algorithms.surrogates import SURROGATES
from jzero.config.architecture import Architecture, read_architecture, tiny_arch
from jzero.config.data_sources import Sources, as_sources
from jzero.errors import UserError
from jzero.fields import (
    KIND,
    choices_of,
    fields_of,
    help_of,
    is_part,
    is_written,
    kind_of,
    parts_of,
    section_of,
)

# tests/config/test_part_settings.py has the flags of parts, tests/commands/test_flags.py of lists.
VALUES = [
    setting
    for setting in config.list_settings(config.Config())
    if not setting.part and kind_of(setting.field) not in (object, tuple)
]
# Texts that are not one name.
OTHER_TEXTS = ("other/one 2", "a,b", "f(x)", "'quoted'", "none", "3")


def parse(*arguments: str) -> config.Config:
    """Returns the settings of a command with a recipe."""
    return main.parse([f"--config={ROOT / 'configs/countdown.py'}:tiny", *arguments]).settings


@pytest.fixture(scope="module")
def recipe() -> config.Config:
    """The recipe without a change."""
    return parse()


def other_values(setting: config.Setting, value: object) -> list[object]:
    """Returns other values of the same type, which the setting may have."""
    if choices := choices_of(setting.field):
        return [choice for choice in choices if choice != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 3]
    if isinstance(value, float):
        return [value / 2 + 0.125]
    return list(OTHER_TEXTS)


@pytest.mark.parametrize("setting", VALUES, ids=lambda setting: setting.name)
def test_every_setting_is_set_by_its_flag(setting: config.Setting, recipe: config.Config) -> None:
    value = get(recipe, setting.name)
    for new_value in other_values(setting, value):
        for flag in ([f"--config.{setting.name}={new_value}"], [f"--config.{setting.name}"]):
            flag = flag if "=" in flag[0] else [*flag, str(new_value)]
            if isinstance(value, bool) and len(flag) > 1:  # a flag that takes no second argument
                continue
            changed = cli.parse_settings(recipe, flag)
            expected = as_sources(new_value) if isinstance(value, Sources) else new_value
            assert get(changed, setting.name) == expected
            assert type(get(changed, setting.name)) is type(value)
            config.put_value(changed, setting.name, value)
            if setting.name != "task.name":  # another task has other options than the recipe's
                assert changed == recipe  # nothing else has changed
    if isinstance(value, bool):
        for flag, switched in (("--config", True), ("--noconfig", False)):
            changed = cli.parse_settings(recipe, [f"{flag}.{setting.name}"])
            assert get(changed, setting.name) is switched


@pytest.mark.parametrize("entry", fields_of(Architecture))
def test_every_entry_of_a_tiny_model_is_set_by_its_flag(entry: str) -> None:
    settings = config.Config()
    settings.model.arch = tiny_arch("tiny-qwen3-moe", num_hidden_layers=2)
    before = read_architecture(settings.model.arch)
    for value in other_values_of(getattr(before, entry)):
        changed = cli.parse_settings(settings, [f"--config.model.arch.{entry}={value}"])
        after = read_architecture(changed.model.arch)
        assert after == dataclasses.replace(before, **{entry: value})


def other_values_of(value: object) -> list[object]:
    """Returns other values of the type of an entry, within all bounds."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, str):
        return ["llama", "qwen3"]
    assert isinstance(value, int | float), f"{value=}"
    return [value + 2 if isinstance(value, int) else value / 2 + 0.125]


def test_an_entry_of_a_file_is_not_set_by_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        flags = ["--config.model.arch=a/config.json", "--config.model.arch.head_dim=8"]
        cli.parse_settings(config.Config(), flags)
    assert "change the entry there" in capsys.readouterr().err


@pytest.mark.parametrize(
    "kind", [bool, int, float], ids=["True or False", "a whole number", "a number"]
)
def test_a_value_of_another_type_is_refused_where_it_is_assigned(
    kind: type, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a flag, by an assignment, and by the constructor, with the name of the setting."""
    words = {bool: "True or False", int: "a whole number", float: "a number"}[kind]
    settings = config.Config()
    for setting in VALUES:
        if kind_of(setting.field) is not kind:
            continue
        section, _, field = setting.name.rpartition(".")
        owner = get(settings, section)
        message = f"{setting.name}=x1 must be {words}"
        with pytest.raises(UserError, match=message):
            setattr(owner, field, "x1")
        with pytest.raises(UserError, match=message):
            type(owner)(**{field: "x1"})
        with pytest.raises(SystemExit):
            cli.parse_settings(settings, [f"--config.{setting.name}=x1"])
        assert capsys.readouterr().err.startswith(f"error: {message}")
    assert settings == config.Config()


def test_every_bound_and_choice_is_checked_where_a_value_is_assigned() -> None:
    settings = config.Config()
    for setting in VALUES:
        wrong = {
            int: [-(2**31), 2**40],
            float: [-1e10, 1e39, float("nan"), float("inf"), 1e-320],
            str: ["\n", "a" * 100_001, "\udcff"],
        }
        wrong_values: list[object] = list(wrong.get(kind_of(setting.field), ()))
        if setting.name == "task.system_prompt":  # a text of several lines
            wrong_values.remove("\n")
        for value in wrong_values:
            section, _, field = setting.name.rpartition(".")
            with pytest.raises(UserError, match=f"^{setting.name}=") as raised:
                setattr(get(settings, section), field, value)
            assert "\n" not in str(raised.value)
            assert len(str(raised.value)) < 400, setting.name


def walk(section: object, prefix: str = "") -> Iterator[tuple[str, object, object]]:
    """Yields the dotted name, the type and the value of every setting, by a walk of its own."""
    hints = typing.get_type_hints(type(section))
    assert dataclasses.is_dataclass(section)
    for field in dataclasses.fields(section):
        if field.name == KIND:
            continue
        name, value = prefix + field.name, getattr(section, field.name)
        is_section = dataclasses.is_dataclass(value) and not is_part(value)
        if not is_section:
            yield name, hints[field.name], value
        if dataclasses.is_dataclass(value):
            yield from walk(value, f"{name}.")


def test_settings_are_listed_in_the_order_of_the_schema() -> None:
    listed = [(setting.name, setting.value) for setting in config.list_settings(config.Config())]
    assert listed == [(name, value) for name, _, value in walk(config.Config())]


def test_settings_have_types_that_a_flag_can_parse() -> None:
    for setting in config.list_settings(config.Config()):
        if setting.parts or is_written(setting.field):
            continue
        # An int as default of a float could not be changed to 0.5.
        assert kind_of(setting.field) is type(setting.value), setting.name
        assert section_of(setting.field) is None


def test_every_setting_has_a_description_in_sentences() -> None:
    for name, fields in config.known_names().items():
        for field in fields:
            description = help_of(field)
            assert description[0].isupper(), name
            assert description.endswith((".", "...")), name


def test_every_default_is_allowed() -> None:
    config.validate(config.Config())


def test_every_part_has_a_function_and_every_function_a_part() -> None:
    parts = {name: set(parts_of(field)) for name, field in fields_of(Algorithm).items()}
    assert parts["advantage"] == set(ADVANTAGES)
    assert parts["weight"] == set(WEIGHTS)
    assert parts["surrogate"] == set(SURROGATES)
    assert parts["correction"] == {*CORRECTIONS, Auto, None}
    assert choices_of(fields_of(Algorithm)["ratio"]) == tuple(RATIOS)
    assert choices_of(fields_of(KL)["estimator"]) == tuple(KL_ESTIMATORS)


def test_sections_are_not_shared_between_configs() -> None:
    config.Config().rollout.group_size = 99
    assert config.Config().rollout.group_size != 99


def test_importing_the_settings_loads_no_jax_and_no_numpy() -> None:
    """Grader processes import them, of which there are many; and every mistyped flag does."""
    heavy = "{'jax', 'numpy', 'huggingface_hub', 'httpx', 'transformers'}"
    script = f"import sys, jzero.config; print({heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
