"""Task-specific settings: `task.options=name=value`.

`TaskConfig` holds the settings that several tasks share. A task declares its additional settings
as a frozen dataclass with defaults, passes that class to `Task(options=...)`, and reads the values
in its functions:

    @dataclass(frozen=True)
    class Options:
        largest: int = 7

    def grade(response: str, gold: JsonValue, task: TaskConfig) -> Grade:
        largest = read_options(Options, task.options).largest

On the command line each option is a separate flag, `--config.task.options=largest=9`. The flags
replace the options of the recipe. Imports no jax: grader processes load this module.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TypeVar, get_type_hints

from jzero.errors import UserError
from jzero.setting import KEY, bounds_mistake, rules_of

Options = TypeVar("Options")


def _parse_bool(text: str) -> bool:
    # bool("false") is True. KeyError becomes a UserError in `_read_options`.
    return {"true": True, "false": False}[text.lower()]


# Parsers of an option's text, by the type of its field.
PARSERS: dict[type, Callable[[str], object]] = {
    int: int,
    float: float,
    str: str,
    bool: _parse_bool,
}


def read_options(options_type: type[Options], options: Sequence[str]) -> Options:
    """Returns an `options_type` with the values in `options`, and defaults for the other fields.

    Args:
        options_type: a frozen dataclass with fields of type int, float, bool or str, and defaults.
            Fields that are written with `jzero.setting.setting` have bounds.
        options: "name=value" texts, `task.options`. A later value of a name replaces an earlier.

    Raises:
        UserError: an option is not "name=value", has a name that is no field of `options_type`, or
            has a value that does not parse as the type of its field or is out of its bounds.
    """
    # Tasks call this function for every response, so the result is cached. Grader processes
    # receive the options as a list, which cannot be a cache's key.
    return _read_options(options_type, tuple(options))


def read_known_options(options_type: type[Options], options: Sequence[str]) -> Options:
    """Returns the same as `read_options`, without options that `options_type` does not have.

    For graders that also grade suites of runs of other tasks. `check_task_settings` has refused
    options that the run's own task does not have.
    """
    return _read_known_options(options_type, tuple(options))


@functools.cache
def _read_known_options(options_type: type[Options], options: tuple[str, ...]) -> Options:
    names = get_type_hints(options_type)
    known = tuple(option for option in options if option.partition("=")[0] in names)
    return _read_options(options_type, known)


@functools.cache
def _read_options(options_type: type[Options], options: tuple[str, ...]) -> Options:
    types = get_type_hints(options_type)
    for name, kind in types.items():
        assert kind in PARSERS, f"{options_type.__name__}.{name}: {kind} is not in {list(PARSERS)}"
    assert dataclasses.is_dataclass(options_type), f"{options_type=}"
    bounds = {
        field.name: rules_of(field)
        for field in dataclasses.fields(options_type)
        if KEY in field.metadata
    }
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
        value, rules = values[name], bounds.get(name)
        if rules is not None and rules.choices and value not in rules.choices:
            choices = ", ".join(choice or "''" for choice in rules.choices)
            raise UserError(f"task.options={option!r}: {text!r} is not one of {choices}")
        if rules is None or not isinstance(value, int | float):
            continue
        if mistake := bounds_mistake(value, rules):
            raise UserError(f"task.options={option!r} {mistake}")
    return options_type(**values)
