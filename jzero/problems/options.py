"""Task-specific settings: `task.options=name=value`.

`TaskConfig` holds the settings that several tasks share. A task declares its additional settings
as a record with defaults, passes that class to `Task(options=...)`, and reads the values in its
functions:

    @record
    class Options:
        largest: int = 7

    def grade(response: str, gold: JsonValue, task: TaskConfig) -> Grade:
        largest = read_options(Options, task.options).largest

On the command line each option is a separate flag, `--config.task.options=largest=9`. The flags
replace the options of the recipe. Imports no jax: grader processes load this module.
"""

import functools
from collections.abc import Sequence
from typing import TypeVar

from jzero.errors import UserError
from jzero.fields import fields_of, kind_of
from jzero.notation import read_value

Options = TypeVar("Options")


def read_options(options_type: type[Options], options: Sequence[str]) -> Options:
    """Returns an `options_type` with the values in `options`, and defaults for the other fields.

    Args:
        options_type: a record (`jzero.fields.record`) with defaults.
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
    names = fields_of(options_type)
    known = tuple(option for option in options if option.partition("=")[0] in names)
    return _read_options(options_type, known)


@functools.cache
def _read_options(options_type: type[Options], options: tuple[str, ...]) -> Options:
    fields = fields_of(options_type)
    values = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not equals or name not in fields:
            known = ", ".join(f"{key}={kind_of(field).__name__}" for key, field in fields.items())
            raise UserError(f"task.options={option!r} is not an option of this task: use {known}")
        values[name] = read_value(f"task.options={name}", fields[name], text)
    try:
        return options_type(**values)
    except UserError as error:
        raise UserError(f"task.options={error}") from None
