"""Reading and changing settings by their dotted name, and loading recipes."""

import importlib.util
from pathlib import Path
from types import ModuleType

from jzero import config
from jzero.fields import class_of_part, is_part, part_name

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))


def get(settings: object, name: str) -> object:
    """Returns the setting or section with this dotted name; "" is the whole."""
    for part in name.split(".") if name else []:
        settings = getattr(settings, part)
    return settings


def shown_value(settings: object, name: str) -> object:
    """Returns the setting with this dotted name; of a part its name.

    task.data is shown as its paths; task.data.problem is an argument of the first data source.
    """
    setting, _, argument = name.rpartition(".")
    if setting.endswith("data"):
        sources = get(settings, setting)
        assert isinstance(sources, config.Sources)
        [first, *_] = sources
        return getattr(first, argument)
    if name.endswith(".data"):
        sources = get(settings, name)
        assert isinstance(sources, config.Sources)
        return ",".join(rows.path for rows in sources)
    value = get(settings, name)
    is_name_of_part = value is None or is_part(value)
    return part_name(class_of_part(value)) if is_name_of_part else value


def changed_config(changes: dict[str, object]) -> config.Config:
    """Returns the default config with some settings, or arguments of parts, changed."""
    settings = config.Config()
    for name, value in changes.items():
        config.put_value(settings, name, value)
    return settings


def load_recipe(name: str) -> ModuleType:
    """Returns the module of configs/NAME.py."""
    spec = importlib.util.spec_from_file_location(f"{name}_recipe", ROOT / f"configs/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
