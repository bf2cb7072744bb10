"""A setting: a typed dataclass field with a description and the values that it may have.

The sections of `config.Config` and `algorithms.Algorithm` are plain dataclasses, and their fields
are written with `setting`:

    num_prompts: int = setting(128, "Number of prompts in a step (P).", at_least=1)

`--help` prints the description. `config.validate` checks the bounds and the choices. Both read the
field's metadata, so a setting is fully defined on one line.
"""

import dataclasses
import math
from typing import TypeVar

Value = TypeVar("Value")  # bool, int, float, str, or a tuple of str, int or float

KEY = "setting"  # in the field's metadata

# Default bounds of all settings. Ids, positions and counts are int32 on the devices. Losses
# multiply several numbers of at most LARGEST_FLOAT, and stay finite in float32.
LARGEST_INT = 2**31 - 1
LARGEST_FLOAT = 1e9
SMALLEST_FLOAT = 1.18e-38  # the smallest normal float32
LONGEST_LINE = 4095  # characters; no path may be longer
LONGEST_TEXT = 100_000  # characters of a prompt


@dataclasses.dataclass(frozen=True)
class Rules:
    """The rules for a setting, stored in the metadata of its field.

    `at_least` is the smallest number allowed and `at_most` the largest. `above` and `below` are
    exclusive bounds. No setting may be infinite. For a tuple, the bounds apply to its items.
    `choices` are the strings allowed; an empty tuple allows every string. A string is one line
    without control characters, unless `is_text` allows any text.
    """

    description: str
    at_least: float
    choices: tuple[str, ...]
    above: float | None = None
    at_most: float = LARGEST_FLOAT
    below: float | None = None
    is_text: bool = False


def setting(
    default: Value,
    description: str,
    *,
    at_least: float | None = 0,
    choices: tuple[str, ...] = (),
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    is_text: bool = False,
) -> Value:
    """Returns a dataclass field with a default and its `Rules`.

    `at_least=None` allows negative numbers down to -at_most.

    As for `dataclasses.field`, the return type is the type of the default, so that `steps: int =
    setting(200, ...)` type-checks.
    """
    largest = LARGEST_INT if isinstance(default, int) else LARGEST_FLOAT
    at_most = largest if at_most is None else at_most
    at_least = -at_most if at_least is None else at_least
    rules = Rules(description, at_least, choices, above, at_most, below, is_text)
    return dataclasses.field(default=default, metadata={KEY: rules})


def rules_of(field: dataclasses.Field[object]) -> Rules:
    """Returns the rules of a field that was written with `setting`."""
    assert KEY in field.metadata, f"{field.name}: write the field with jzero.setting.setting"
    return field.metadata[KEY]


def bounds_mistake(value: float, rules: Rules) -> str:
    """Returns the rest of a message such as "must be at least 1", "" if a number is allowed."""
    if math.isnan(value):
        return "is not a number"
    if math.isinf(value):
        return "must be finite"
    if value < rules.at_least:
        return f"must be at least {rules.at_least:.10g}"
    if rules.above is not None and value <= rules.above:
        return f"must be above {rules.above:g}"
    if rules.below is not None and value >= rules.below:
        return f"must be below {rules.below:g}"
    if value > rules.at_most:
        return f"must be at most {rules.at_most:.10g}"
    if 0 < abs(value) < SMALLEST_FLOAT:
        return f"is 0 in float32: set it to 0, or to at least {SMALLEST_FLOAT:g}"
    return ""
