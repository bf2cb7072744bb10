"""The types of JSON values and of prompts."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

# A prompt is text that the policy continues, or chat messages: dicts with "role" and "content".
Prompt: TypeAlias = str | list[dict[str, str]]

# A value that JSON can hold: null, a boolean, a number, text, or a list or dict of such values.
# Sequence and Mapping instead of list and dict, which are invariant: a list[str] or a
# dict[str, float] is such a value, too. `jzero.json_values` reads values of unknown structure.
JsonValue: TypeAlias = (
    bool | int | float | str | Sequence["JsonValue"] | Mapping[str, "JsonValue"] | None
)
