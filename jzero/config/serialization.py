"""A config as the text of a run's config.json, and back."""

import dataclasses
import json
from collections.abc import Mapping

from pydantic import TypeAdapter

from jzero.config.renamed import check_renamed
from jzero.config.schema import Config, list_settings
from jzero.errors import UserError


def to_json(config: Config) -> str:
    """Returns the text of a run's config.json."""
    return json.dumps(dataclasses.asdict(config), indent=1)


def from_json(text: str, source: str) -> Config:
    """Returns the config that `to_json` wrote; a setting that the text lacks has its default.

    Raises a UserError, with `source` as the name of the file, if a setting is unknown, has an old
    name, or has a value of the wrong type.
    """
    try:
        values = json.loads(text)
    except ValueError as error:
        raise UserError(f"{source} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{source} is no config: it holds no JSON object")
    settings = flatten(values)
    check_renamed(settings, source)
    known = {setting.name for setting in list_settings(Config())}
    if unknown := sorted(settings.keys() - known):
        raise UserError(
            f"{source} has settings that this version of jzero does not know: "
            f"{', '.join(unknown)}. Use the version that wrote the file, or remove them"
        )
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
