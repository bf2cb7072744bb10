"""Writes chosen settings as a recipe, and prints them as a table with reasons."""

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from jzero.config import Config, list_settings
from jzero.setting import show_part
from jzero.sizing.choices import Choice

FILE = "recipe.py"  # in the workdir
HEAD = '''"""{title}

`jzero train` wrote this recipe. Edit it, and start it with

    python -m jzero.main --config {path}
"""

from jzero.config import {names}


def get_config() -> Config:
    """Returns the settings of the run, each with the reason."""
    config = Config()
'''
COMMENT_COLUMNS = 100
BY_HAND = "from the command line"


def recipe_source(settings: Config, choices: Sequence[Choice], title: str, path: Path) -> str:
    """Returns the text of a recipe with all choices, and whatever else differs from the defaults.

    title: the first line of its docstring.
    path: where the recipe will be.
    """
    reasons = reasons_of(choices)
    lines = []
    section = ""
    has_parts = False
    for setting in list_settings(settings):
        if setting.part:  # the line of its part has all arguments
            continue
        # Choices that equal a default are written, too: a later version may have another default.
        if setting.value == setting.default and setting.name not in reasons:
            continue
        if lines and setting.name.partition(".")[0] != section:
            lines.append("")
        section = setting.name.partition(".")[0]
        reason = reasons.get(setting.name, BY_HAND if setting.name != "name" else "")
        if reason:
            lines += textwrap.wrap(
                reason,
                COMMENT_COLUMNS,
                initial_indent="    # ",
                subsequent_indent="    # ",
            )
        if setting.type.parts:  # as a flag chooses it: a recipe needs no import of its class
            has_parts = True
            lines.append(f"    set_part(config, {setting.name!r}, {show_part(setting.value)!r})")
        else:
            lines.append(f"    config.{setting.name} = {setting.value!r}")
    names = "Config, set_part" if has_parts else "Config"
    head = HEAD.format(title=title.replace("\\", "/"), path=path, names=names)
    return head + "\n".join([*lines, "    return config"]) + "\n"


def reasons_of(choices: Sequence[Choice]) -> Mapping[str, str]:
    """Returns the reasons of choices by the names of the settings."""
    return {choice.name: choice.reason for choice in choices}


def table(settings: Config, choices: Sequence[Choice], given: Sequence[str]) -> str:
    """Returns a line for each choice: the setting, its value, and the reason."""
    reasons = reasons_of(choices)
    rows = [
        (setting.name, shown(setting.value), reasons.get(setting.name, BY_HAND))
        for setting in list_settings(settings)
        if setting.name in reasons or setting.name in given
    ]
    columns = min(120, shutil.get_terminal_size((100, 24)).columns)
    names = max(len(name) for name, _, _ in rows)
    values = min(24, max(len(value) for _, value, _ in rows))
    lines = []
    for name, value, reason in rows:
        indent = " " * (names + values + 4)
        head = f"{name:<{names}}  {value:<{values}}  "
        # A long value, such as a path, has a line of its own.
        if len(value) > values:
            lines.append(head.rstrip())
            head = indent
        lines += textwrap.wrap(
            head + reason,
            max(columns, len(indent) + 20),
            subsequent_indent=indent,
            drop_whitespace=True,
            replace_whitespace=False,
        )
    return "\n".join(line.rstrip() for line in lines)


def shown(value: object) -> str:
    """Returns a value as the command line takes it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
