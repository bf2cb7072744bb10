"""A config as the text of a run's config.json, and back."""

import dataclasses
import json
from collections.abc import Mapping

from jzero.config.schema import Config, unknown_names
from jzero.errors import UserError


def to_json(config: Config) -> str:
    """Returns the text of a run's config.json."""
    return json.dumps(dataclasses.asdict(config), indent=1)


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
    if mistakes := unknown_names(flatten(values)):
        raise UserError(
            f"{source} has settings that this version of jzero does not have: {mistakes}. "
            "Use the version that wrote the file, or remove them"
        )
    from pydantic import TypeAdapter  # not at the top: it takes a tenth of a second

    try:
        return TypeAdapter(Config).validate_json(text)
    except ValueError as error:
        raise UserError(f"{source} holds a wrong value: {error}") from None


def flatten(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Returns the leaves of nested dictionaries by dotted name: {"a": {"b": 1}} -> {"a.b": 1}."""
    leaves: dict[str, object] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= flatten(value, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = value
    return leaves
