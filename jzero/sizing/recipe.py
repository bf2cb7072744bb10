"""Writes chosen settings as a recipe, and prints them as a table with reasons."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from jzero import terminal
from jzero.config import Config, list_settings
from jzero.fields import show_part
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
BY_HAND = "given by you"  # as a flag, or in Python
TABLE_ROWS = 12
VALUE_WIDTH = 12  # columns of a value; a longer one has a line of its own
# The choices that decide what a run learns and how long it takes. The table has the first of them.
IMPORTANT = (
    "task.data",
    "task.reward.functions",
    "task.system_prompt",
    "task.options",
    "rollout.max_new_tokens",
    "rollout.max_prompt_tokens",
    "rollout.num_prompts",
    "rollout.group_size",
    "train.steps",
    "optimizer.lr",
    "model.adapter.rank",
    "model.base",
    "task.template",
    "task.environment",
    "rollout.max_turns",
    "task.name",
    "train.minutes",
    "rollout.num_slots",
    "train.microbatch_tokens",
)


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
        if setting.parts:  # as a flag chooses it: a recipe needs no import of its class
            has_parts = True
            lines.append(f"    put_value(config, {setting.name!r}, {show_part(setting.value)!r})")
        else:
            lines.append(f"    config.{setting.name} = {setting.value!r}")
    names = "Config, put_value" if has_parts else "Config"
    head = HEAD.format(title=title.replace("\\", "/"), path=path, names=names)
    return head + "\n".join([*lines, "    return config"]) + "\n"


def reasons_of(choices: Sequence[Choice]) -> Mapping[str, str]:
    """Returns the reasons of choices by the names of the settings."""
    return {choice.name: choice.reason for choice in choices}


def table(settings: Config, choices: Sequence[Choice], given: Sequence[str]) -> str:
    """Returns the choices that matter most: the setting, its value, and the reason.

    They have at most TABLE_ROWS rows, within the width of the terminal. A last line tells how many
    choices are only in the recipe.
    """
    reasons = reasons_of(choices)
    values = {setting.name: setting.value for setting in list_settings(settings)}
    chosen = [name for name in values if name in reasons or name in given]
    by_importance = sorted(chosen, key=_importance)
    listed = set(by_importance[:TABLE_ROWS])
    rows = []
    for name in chosen:
        if name in listed:
            value = " ".join(shown(values[name]).split())
            rows.append((name, value, reasons.get(name, BY_HAND)))
    width = terminal.width()
    name_width = max(len(name) for name, _, _ in rows)
    value_width = min(VALUE_WIDTH, max(len(value) for _, value, _ in rows))
    lines = []
    for name, value, reason in rows:
        head = f"{name:<{name_width}}  {value:<{value_width}}  "
        if len(value) <= value_width:
            indent = " " * len(head)
            lines += terminal.wrap(head + reason, width, indent)
            continue
        # A long value, such as a path or a prompt, and its reason have lines of their own.
        indent = " " * (name_width + 2)
        lines += terminal.wrap(f"{name:<{name_width}}  {value}", width, indent)
        lines += terminal.wrap(indent + reason, width, indent)
    hidden = len(chosen) - len(rows)
    if hidden:
        lines.append(f"{hidden} more choices with their reasons are in {FILE}")
    return "\n".join(line.rstrip() for line in lines)


def _importance(name: str) -> int:
    """Returns the place of a setting in IMPORTANT; all others come after these."""
    return IMPORTANT.index(name) if name in IMPORTANT else len(IMPORTANT)


def shown(value: object) -> str:
    """Returns a value as the command line takes it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
