"""No preset and no recipe has changed its loss since the algorithm was described by flat settings.

loss_descriptions.json was written by that version: for every preset of an algorithm, and for every
preset of a recipe, the values that were not the default of a setting.
"""

import json
from pathlib import Path

import pytest
from descriptions import Description, describe
from settings_by_name import load_recipe

from jzero import config
from jzero.algorithms import PRESETS
from jzero.fields import class_of_part, fields_of, part_name

WRITTEN = json.loads(Path(__file__).with_name("loss_descriptions.json").read_text())


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_loss_that_it_had(name: str) -> None:
    assert describe(PRESETS[name]()) == Description(**WRITTEN["presets"][name])


@pytest.mark.parametrize("name", WRITTEN["recipes"])
def test_a_recipe_has_the_loss_that_it_had(name: str) -> None:
    recipe, _, preset = name.partition(":")
    settings = load_recipe(recipe).get_config(preset)
    written: dict[str, dict[str, object]] = {"algorithm": {}, "optimizer": {}, "teacher": {}}
    for key, value in WRITTEN["recipes"][name].items():
        section, _, field = key.partition(".")
        written[section][field] = value

    assert describe(settings.algorithm) == Description(**written["algorithm"])
    assert flat_optimizer(settings.optimizer) == flat_optimizer() | written["optimizer"]
    assert flat_teacher(settings) == written["teacher"]


def flat_optimizer(optimizer: config.OptimizerConfig | None = None) -> dict[str, object]:
    """Returns the values of an optimizer with the numbers of its parts beside them."""
    optimizer = optimizer or config.OptimizerConfig()
    values = {**vars(optimizer)}
    schedule, warmup = values.pop("schedule"), values.pop("warmup")
    values |= {
        "warmup_steps": getattr(warmup, "number", 0),
        "warmup_ratio": getattr(warmup, "ratio", 0.0),
        "warmup_from_zero": getattr(warmup, "from_zero", False),
    }
    flat = {"min_lr_ratio": 0.1, "power": 2.0, "cycles": 1, "timescale": 0, "decay_ratio": 0.1}
    numbers = {name: getattr(schedule, name) for name in fields_of(type(schedule))}
    return {**values, **flat, "schedule": part_name(type(schedule)), **numbers}


def flat_teacher(settings: config.Config) -> dict[str, object]:
    """Returns the values of a teacher that are not the default."""
    teacher = settings.teacher
    if teacher is None:
        return {}
    changed = {
        name: getattr(teacher, name)
        for name, field in fields_of(type(teacher)).items()
        if getattr(teacher, name) != field.default
    }
    return {"kind": part_name(class_of_part(teacher)), **changed}
