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
replace the options of the recipe. An option without a value is refused when it is assigned, and
`check_options` refuses options that the task does not have. Imports no jax: grader processes load
this module.
"""

import functools
from collections.abc import Sequence
from typing import TypeVar

from jzero.errors import UserError, shown
from jzero.fields import fields_of, kind_of, unknown
from jzero.notation import read_value

Options = TypeVar("Options")


def read_options(options_type: type[Options], options: Sequence[str]) -> Options:
    """Returns an `options_type` with the values in `options`, and defaults for the other fields.

    Options that `options_type` does not have are left out: graders also grade suites of runs of
    other tasks, and `check_options` has refused them for the task of the run.

    Args:
        options_type: a record (`jzero.fields.record`) with defaults.
        options: "name=value" texts, `task.options`. A later value of a name replaces an earlier.

    Raises:
        UserError: a value does not parse as the type of its field, or is out of its bounds.
    """
    # Tasks call this function for every response, so the result is cached. Grader processes
    # receive the options as a list, which cannot be a cache's key.
    return _read_options(options_type, tuple(options))


@functools.cache
def _read_options(options_type: type[Options], options: tuple[str, ...]) -> Options:
    fields = fields_of(options_type)
    values = {}
    for option in options:
        name, _, text = option.partition("=")
        if name in fields:
            values[name] = read_value(f"task.options={name}", fields[name], text)
    try:
        return options_type(**values)
    except UserError as error:
        raise UserError(f"task.options={error}") from None


def check_options(options_type: type, options: Sequence[str]) -> None:
    """Raises UserError for an option that a task does not have, or for a wrong value.

    options_type: the record of the task, `Task.options`.
    """
    fields = fields_of(options_type)
    for option in options:
        name, equals, _ = option.partition("=")
        if equals and name in fields:
            continue
        known = ", ".join(f"{key}={kind_of(field).__name__}" for key, field in fields.items())
        close = unknown(name, fields)
        advice = close.partition("; ")[2] if "did you mean" in close else f"use {known}"
        raise UserError(f"task.options={shown(option)} is not an option of this task; {advice}")
    read_options(options_type, options)
