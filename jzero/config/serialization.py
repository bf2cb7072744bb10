"""A config as the text of a run's config.json, and back."""

import json
from collections.abc import Mapping
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from jzero import json_values
from jzero.config.schema import Config
from jzero.errors import UserError
from jzero.fields import user_error, values_of
from jzero.json_types import JsonValue

Section = TypeVar("Section")


def to_json(config: Config) -> str:
    """Returns the text of a run's config.json."""
    return json.dumps(values_of(config), indent=1)


def from_json(text: str, source: str) -> Config:
    """Parses the text of a run's config.json. Settings that the text lacks have their defaults.

    source: the file, for error messages.

    Raises:
        UserError: the text is not JSON, or has a setting that does not exist or a wrong value.
    """
    advice = "Correct the file, or use the version of jzero that wrote it"
    try:
        # Bounds the text before pydantic reads it.
        json_values.as_object(json_values.parse(text, allows_nan=True), "a config")
        return TypeAdapter(Config).validate_json(text)
    except ValidationError as error:
        raise UserError(f"{source}: {user_error(error, Config)}. {advice}") from None
    except ValueError as error:
        raise UserError(f"{source}: {error}. {advice}") from None


def read_section(section: type[Section], values: Mapping[str, object]) -> Section:
    """Builds a section from its JSON values, which `fields.values_of` has returned."""
    return TypeAdapter(section).validate_json(json.dumps(values))


def flatten(tree: Mapping[str, JsonValue], prefix: str = "") -> dict[str, JsonValue]:
    """Returns the leaves of nested dictionaries by dotted name: {"a": {"b": 1}} -> {"a.b": 1}."""
    leaves: dict[str, JsonValue] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= flatten(value, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = value
    return leaves
