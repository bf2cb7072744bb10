"""A config as the text of a run's config.json, and back."""

import dataclasses
import json
from collections.abc import Iterator, Mapping

from jzero.config.schema import Config, unknown_names
from jzero.errors import UserError
from jzero.setting import field_types, part_from_json, to_values


def to_json(config: Config) -> str:
    """Returns the text of a run's config.json."""
    return json.dumps(to_values(config), indent=1)


def from_json(text: str, source: str) -> Config:
    """Parses the text of a run's config.json. Settings that the text lacks have their defaults.

    Raises a UserError, with `source` as the name of the file, if a setting is unknown or has a
    value of the wrong type.
    """
    try:
        values = json.loads(text)
    except ValueError as error:
        raise UserError(f"{source} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{source} is no config: it holds no JSON object")
    # pydantic would ignore unknown settings.
    if mistakes := unknown_names(setting_names(Config, values)):
        raise UserError(
            f"{source} has settings that this version of jzero does not have: {mistakes}. "
            "Use the version that wrote the file, or remove them"
        )
    from pydantic import TypeAdapter  # not at the top: it takes a tenth of a second

    try:
        return TypeAdapter(Config).validate_python(with_parts(Config, values))
    except ValueError as error:
        raise UserError(f"{source} holds a wrong value: {error}") from None


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


def flatten(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Returns the leaves of nested dictionaries by dotted name: {"a": {"b": 1}} -> {"a.b": 1}."""
    leaves: dict[str, object] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= flatten(value, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = value
    return leaves
