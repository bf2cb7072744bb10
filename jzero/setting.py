"""A setting: a typed dataclass field that knows what it means and which values it may have.

The sections of `config.Config` and `algorithms.Algorithm` are plain dataclasses, and their fields
are written with `setting`:

    num_prompts: int = setting(128, "Number of prompts in a step (P).", at_least=1)

The description is what `--help` prints. `config.validate` checks the bounds and the choices. Both
read them from the field's metadata, so that everything known about a setting stands on its line.
"""

import dataclasses
from typing import TypeVar

Value = TypeVar("Value")  # bool, int, float, str, or a tuple of str or float

KEY = "setting"  # of the field's metadata


@dataclasses.dataclass(frozen=True)
class Rules:
    """What a field's metadata says about its setting.

    `at_least` is the smallest number allowed, or None for a setting that may have any number.
    `above` and `below` are bounds that the number itself may not have; `at_most` is the largest
    number allowed. No setting may be infinite. `choices` are the strings allowed; an empty tuple
    allows every string.
    """

    description: str
    at_least: float | None
    choices: tuple[str, ...]
    above: float | None = None
    at_most: float | None = None
    below: float | None = None


def setting(
    default: Value,
    description: str,
    *,
    at_least: float | None = 0,
    choices: tuple[str, ...] = (),
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Value:
    """Returns a dataclass field with a default and its `Rules`.

    The return type is that of the default, as for `dataclasses.field`, so that
    `steps: int = setting(200, ...)` type-checks.
    """
    rules = Rules(description, at_least, choices, above, at_most, below)
    return dataclasses.field(default=default, metadata={KEY: rules})


def rules_of(field: dataclasses.Field[object]) -> Rules:
    """Returns the rules of a field that was written with `setting`."""
    assert KEY in field.metadata, f"{field.name}: write the field with jzero.setting.setting"
    return field.metadata[KEY]
