"""A config as the text of a run's config.json, and back."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from jzero import json_values
from jzero.config.old_settings import (
    SWITCHES,
    Merged,
    Moved,
    Removed,
    old_setting,
    rename_options,
    unknown_names,
)
from jzero.config.schema import (
    Config,
    known_names,
    names_part,
    parts_with_argument,
    put_value,
    set_part,
)
from jzero.errors import UserError, reason_of, shown
from jzero.setting import field_types, part_from_json, to_values
from jzero.types import JsonValue

if TYPE_CHECKING:
    from pydantic import TypeAdapter


def to_json(config: Config) -> str:
    """Returns the text of a run's config.json."""
    return json.dumps(to_values(config), indent=1)


def from_json(text: str, source: str) -> Config:
    """Parses the text of a run's config.json. Settings that the text lacks have their defaults.

    Settings of earlier versions have the meaning that they had (`old_settings`). Removed settings
    are left out.

    Raises a UserError, with `source` as the name of the file, if a setting is unknown or has a
    value of the wrong type.
    """
    try:
        values = json_values.parse(text, allows_nan=True)
    except ValueError as error:
        raise UserError(f"{source} is damaged: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{source} is not a config: it is not a JSON object")
    try:
        return _read_settings(values, source)
    except UserError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        # The values may be of any type, and the settings of earlier versions have many forms.
        raise UserError(f"{source} holds a wrong value: {_reason(error)}") from None


def _read_settings(values: Mapping[str, object], source: str) -> Config:
    today, old_values = split_old_values(Config, values)
    # pydantic would ignore unknown settings.
    unknown = [name for name in setting_names(Config, today)]
    if mistakes := unknown_names(map(shown, unknown)):
        raise UserError(
            f"{source} has settings that this version of jzero does not have: {mistakes}. "
            "Use the version that wrote the file, or remove them"
        )
    config = _adapter().validate_python(with_parts(Config, today))
    for name, value in old_values:
        put_recorded_value(config, name, value)
    rename_options(config.task)
    for name, value in flatten(json.loads(to_json(config))).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name}={value} must be finite")
    return config


def _reason(error: Exception) -> str:
    """Returns what is wrong in one line: of pydantic's errors, the first one with its setting."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        return f"{shown(name)}={shown(first['input'])}: {first['msg']}"
    return reason_of(error)


@functools.cache
def _adapter() -> TypeAdapter[Config]:
    # Not at the top: the import and the schema take a tenth of a second each.
    from pydantic import TypeAdapter

    return TypeAdapter(Config)


def split_old_values(
    section: type,
    values: Mapping[str, object],
    prefix: str = "",
) -> tuple[dict[str, object], list[tuple[str, object]]]:
    """Separates the settings of earlier versions from the JSON values of a section.

    Returns the values without them, and the old settings by dotted name. The arguments of a part
    that was a section are among the old ones.
    """
    fields = field_types(section)
    today: dict[str, object] = {}
    old: list[tuple[str, object]] = []
    for name, value in values.items():
        full_name = prefix + name
        if name in fields and isinstance(value, Mapping):
            inner = fields[name].kind
            if dataclasses.is_dataclass(inner):
                today[name], inner_old = split_old_values(inner, value, f"{full_name}.")
                old += inner_old
                continue
            if full_name in SWITCHES and not value.get(SWITCHES[full_name], True):
                continue
            if "name" not in value:
                old += flatten(value, f"{full_name}.").items()
                continue
        elif isinstance(value, Mapping) and old_setting(f"{full_name}."):
            old += [(f"{full_name}.{key}", item) for key, item in value.items()]
            continue
        has_parts = name in fields and bool(fields[name].parts)
        # Where a part is today, earlier versions had the name of a choice, or a number.
        is_name_of_part = has_parts and isinstance(value, str | int)
        if is_name_of_part or (name not in fields and old_setting(full_name)):
            old.append((full_name, value))
        else:
            today[name] = value
    # The parts first: the others are their arguments.
    old.sort(key=lambda item: item[0] not in known_names() or item[0].count("."))
    return today, old


def put_recorded_value(config: Config, name: str, value: object) -> None:
    """Changes a config as an earlier version with this setting in its config.json meant.

    A value that had no effect changes nothing: the default, or a number of a part that was not
    chosen.
    """
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    entry = old_setting(name)
    if isinstance(entry, Removed) or (isinstance(entry, Merged) and value == entry.default):
        return
    if isinstance(entry, Merged):
        if entry.needs and get_setting(config, entry.needs) is None:
            return
        if text:  # "" was no value for any of these settings
            entry.put(config, name, text)
        return
    name = entry.to if isinstance(entry, Moved) else name
    if not names_part(name):
        put_value(config, name, value)
        return
    parts = parts_with_argument(name)
    if not parts:  # the name of a part, "" for none
        if text:
            set_part(config, name, text)
        return
    owner, _, argument = name.rpartition(".")
    chosen = get_setting(config, owner)
    if field_types(parts[0])[argument].parts:
        text = text or "none"
    # In earlier versions these numbers were settings, and their defaults are in every config.json.
    # A default must not choose a part.
    is_default = [getattr(part(), argument) for part in parts] == [value]
    if type(chosen) in parts or (chosen is None and len(parts) == 1 and not is_default):
        set_part(config, name, text)


def get_setting(config: Config, name: str) -> object:
    """Returns the setting with a dotted name."""
    value: object = config
    for field in name.split("."):
        value = getattr(value, field)
    return value


def setting_names(section: type, values: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """Yields the dotted names of the settings in JSON values. A part is one name."""
    fields = field_types(section)
    for name, value in values.items():
        is_section = name in fields and dataclasses.is_dataclass(fields[name].kind)
        if is_section and isinstance(value, Mapping):
            yield from setting_names(fields[name].kind, value, f"{prefix}{name}.")
        else:
            yield prefix + name


def with_parts(section: type, values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Returns JSON values of a section with every part as a dataclass.

    Raises UserError for a part that does not exist, or has unknown arguments.
    """
    fields = field_types(section)
    read = dict(values)
    for name, value in values.items():
        if fields[name].parts:
            read[name] = part_from_json(prefix + name, fields[name].parts, value)
        elif dataclasses.is_dataclass(fields[name].kind) and isinstance(value, Mapping):
            read[name] = with_parts(fields[name].kind, value, f"{prefix}{name}.")
    return read


def flatten(tree: Mapping[str, JsonValue], prefix: str = "") -> dict[str, JsonValue]:
    """Returns the leaves of nested dictionaries by dotted name: {"a": {"b": 1}} -> {"a.b": 1}."""
    leaves: dict[str, JsonValue] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= flatten(value, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = value
    return leaves
