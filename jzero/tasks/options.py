"""Settings that a task defines for itself: `task.options=name=value`.

`TaskConfig` holds the settings that several tasks share. A task with settings of its own declares
them as a frozen dataclass whose fields have defaults, passes that class to `Task(options=...)`, and
reads the values in its functions:

    @dataclass(frozen=True)
    class Options:
        largest: int = 7

    def grade(response: str, gold: JsonValue, task: TaskConfig) -> Grade:
        largest = read_options(Options, task.options).largest

On the command line every option is a flag of its own, `--config.task.options=largest=9`. The flags
replace the options of the recipe. Imports no jax: grader processes load this module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar, get_type_hints

from jzero.errors import UserError

Options = TypeVar("Options")


def _parse_bool(text: str) -> bool:
    """Reads true or false, in any case."""
    return {"true": True, "false": False}[text.lower()]


# How the text of an option becomes a value of its field's type.
PARSERS: dict[type, Callable[[str], object]] = {
    int: int,
    float: float,
    str: str,
    bool: _parse_bool,
}


def read_options(options_type: type[Options], options: Sequence[str]) -> Options:
    """Returns an `options_type` with the values that `options` names and defaults for the others.

    Args:
        options_type: a frozen dataclass whose fields are int, float, bool or str, with defaults.
        options: "name=value" texts, `task.options`. A later value of a name replaces an earlier.

    Raises:
        UserError: an option is not "name=value", has a name that is no field of `options_type`, or
            has a value that does not parse as the type of its field.
    """
    # A tuple can be a cache's key. Grader processes receive the options as a list, and their
    # functions call this one for every response.
    return _read_options(options_type, tuple(options))


@functools.cache
def _read_options(options_type: type[Options], options: tuple[str, ...]) -> Options:
    types = get_type_hints(options_type)
    for name, kind in types.items():
        assert kind in PARSERS, f"{options_type.__name__}.{name}: {kind} is not in {list(PARSERS)}"
    known = ", ".join(f"{name}={kind.__name__}" for name, kind in types.items())

    values = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not equals or name not in types:
            raise UserError(f"task.options={option!r} is not an option of this task: use {known}")
        try:
            values[name] = PARSERS[types[name]](text)
        except (ValueError, KeyError):
            raise UserError(
                f"task.options={option!r}: {text!r} is not of type {types[name].__name__}"
            ) from None
    return options_type(**values)
