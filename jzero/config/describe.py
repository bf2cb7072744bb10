"""The text of `--help` for the settings, and the number of settings of each section.

`describe` returns the help on one setting, or on a section with one line for each setting:

    $ python -m jzero.main --help rollout

The help on a setting with parts lists every part with its arguments.

All information comes from the schema.
"""

import difflib
import inspect
import textwrap
from collections.abc import Iterator

from jzero.config.data_sources import Rows
from jzero.config.flags import names_sources
from jzero.config.schema import Config, Setting, known_names, list_sections, list_settings
from jzero.errors import UserError
from jzero.fields import (
    bounds_of,
    choices_of,
    fields_of,
    help_of,
    part_name,
    parts_of,
    show_part,
)
from jzero.notation import parts_with

WIDTH = 100  # columns
NAME_WIDTH = 36  # columns of `name=default`


def count_settings(section: str = "") -> int:
    """Returns the number of settings in a section, subsections included. A part is one setting."""
    return len(settings_of(section))


def settings_of(section: str) -> list[Setting]:
    """Returns the settings of a section, subsections included, without arguments of parts."""
    prefix = f"{section}." if section else ""
    return [
        item for item in list_settings(Config()) if item.name.startswith(prefix) and not item.part
    ]


def count_arguments(section: str = "") -> int:
    """Returns the number of arguments of all parts that the settings of a section may have."""
    return sum(len(list(arguments_of(item.parts))) for item in settings_of(section))


def arguments_of(parts: list[type | None]) -> Iterator[object]:
    """Yields the fields of some parts, and of the parts inside of them."""
    for part in parts:
        for argument in fields_of(part).values() if part else ():
            yield argument
            yield from arguments_of(parts_of(argument))


def count_table() -> str:
    """Returns a table of the sections with the number of their settings, and of parts' arguments.

    A part counts as one setting.
    """
    lines = ["settings  arguments of parts  section"]
    for name in list_sections(Config()):
        indent = "  " * name.count(".")
        arguments = count_arguments(name)
        lines.append(f"{count_settings(name):8}  {arguments:18}  {indent}{name or 'all'}")
    return "\n".join(lines)


def describe(name: str) -> str:
    """Returns the help on a setting, a section or an argument of a part with this dotted name.

    Raises UserError for an unknown name.
    """
    name = name.removeprefix("--").removeprefix("config.")
    sections = list_sections(Config())
    if name in sections:
        return describe_section(name, sections)
    settings = {item.name: item for item in list_settings(Config()) if not item.part}
    if name in settings:
        return describe_setting(settings[name])
    names = [*sections, *known_names()]
    if name in names:
        return describe_argument(name)
    # Without a similar name, list the top-level sections.
    similar = difflib.get_close_matches(name, names) or list(fields_of(Config))
    raise UserError(f"--help {name}: no such section or setting; there are {', '.join(similar)}")


def describe_section(name: str, sections: dict[str, object]) -> str:
    """Returns a line for each setting of a section, and for each subsection."""
    prefix = f"{name}." if name else ""
    lines = [str(inspect.getdoc(type(sections[name]))).split("\n\n")[0], ""]
    for item in settings_of(name):
        short_name = item.name.removeprefix(prefix)
        # Settings of subsections are counted in a line of their subsection.
        if "." not in short_name:
            left = f"{short_name}={shown_default(item)}"
            lines.append(one_line(left, help_of(item.field)))
    inner = [other for other in sections if other.startswith(prefix) and other != name]
    for other in inner:
        if "." not in other.removeprefix(prefix):
            left = f"{other.removeprefix(prefix)}."
            lines.append(one_line(left, f"{count_settings(other)} settings: --help {other}"))
    flag, setting = f"--config.{prefix}NAME=VALUE", f"--help {prefix}NAME"
    return "\n".join([*lines, "", f"{flag} sets one; {setting} says all about it."])


def one_line(left: str, text: str) -> str:
    """Returns two columns in one line of at most WIDTH characters; cuts a longer text at a word."""
    if len(left) > NAME_WIDTH:
        left = f"{left[: NAME_WIDTH - 1]}…"
    left = f"  {left:<{NAME_WIDTH}}  "
    width = WIDTH - len(left)
    return left + textwrap.shorten(text, width, placeholder=" …", break_on_hyphens=False)


def shown_default(item: Setting) -> str:
    """Returns the default of a setting as it is written in a flag."""
    if item.parts:
        return show_part(item.value)
    return ",".join(map(str, item.value)) if isinstance(item.value, tuple) else str(item.value)


def describe_setting(item: Setting) -> str:
    """Returns the flag of a setting with its default, its description, choices and bounds."""
    lines = [f"--config.{item.name}={shown_default(item)}"]
    lines += textwrap.wrap(describe_value(item), WIDTH - 4)
    lines = ["\n    ".join(lines)]
    for part in item.parts:
        lines += describe_part(item, part)
    if names_sources(item.name):
        lines += describe_rows(item)
    if item.parts:
        lines.append(f"\n--config.{item.name}.NAME=VALUE changes an argument of the chosen part.")
    return "\n".join(lines)


def describe_rows(item: Setting) -> list[str]:
    """Returns the arguments of rows(...), for a setting that names data sets."""
    advice = f"\n--config.{item.name}.NAME=VALUE changes an argument of every set."
    return [*describe_part(item, Rows), advice]


def describe_part(item: Setting, part: type | None) -> list[str]:
    """Returns a line for a part that a setting may have, and for each of its arguments."""
    if part is None:
        return [one_line(part_name(part), "No part.")]
    lines = [one_line(part_name(part), str(inspect.getdoc(part)).split("\n\n")[0])]
    for argument in arguments_of_part(item.name, part):
        left = f"  {argument.name.rpartition('.')[2]}={shown_default(argument)}"
        lines.append(one_line(left, describe_value(argument)))
    return lines


def arguments_of_part(name: str, part: type) -> list[Setting]:
    """Returns the arguments of a part with their defaults, as settings below a dotted name."""
    fields = fields_of(part).items()
    return [Setting(f"{name}.{key}", field.default, field, name) for key, field in fields]


def describe_argument(name: str) -> str:
    """Returns the help on an argument, for each part that has it."""
    owner, _, argument = name.rpartition(".")
    texts = []
    parts = [part for field in known_names()[owner] for part in parts_of(field)]
    for part in parts_with(parts, argument):
        [item] = [item for item in arguments_of_part(owner, part) if item.name == name]
        lines = [f"--config.{name}={shown_default(item)}, with {owner}={part_name(part)}"]
        lines += textwrap.wrap(describe_value(item), WIDTH - 4)
        lines = ["\n    ".join(lines)]
        if names_sources(name):
            lines += describe_rows(item)
        texts += lines
    return "\n".join(texts)


def describe_value(item: Setting) -> str:
    """Returns the description of a setting with its choices or bounds, in one line."""
    text = help_of(item.field)
    if item.parts:
        return f"{text} One of: {', '.join(map(part_name, item.parts))}."
    if choices := choices_of(item.field):
        return f"{text} One of: {', '.join(choice or repr('') for choice in choices)}."
    bounds = bounds_of(item.field)
    return f"{text} ({', '.join(bounds)})" if bounds else text
