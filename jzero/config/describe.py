"""The text of `--help` for the settings, and the number of settings of each section.

`describe` returns the help on one setting, or on a section with one line for each setting:

    $ python -m jzero.main --help rollout

All information comes from the schema.
"""

import dataclasses
import difflib
import inspect
import textwrap
from collections.abc import Iterator

from jzero.config.schema import Config, Setting, list_settings
from jzero.errors import UserError
from jzero.setting import LARGEST_FLOAT, LARGEST_INT

WIDTH = 100  # columns
NAME_WIDTH = 36  # columns of `name=default`


def list_sections() -> dict[str, object]:
    """Returns every section with its defaults by dotted name; "" is the whole config."""
    return dict(walk_sections(Config(), ""))


def walk_sections(section: object, name: str) -> Iterator[tuple[str, object]]:
    """Yields a section and all of its subsections, with their dotted names."""
    assert dataclasses.is_dataclass(section), f"{section=}"
    yield name, section
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        if dataclasses.is_dataclass(value):
            yield from walk_sections(value, f"{name}.{item.name}".lstrip("."))


def count_settings(section: str = "") -> int:
    """Returns the number of settings in a section, subsections included."""
    return len(settings_of(section))


def settings_of(section: str) -> list[Setting]:
    """Returns the settings of a section, subsections included."""
    prefix = f"{section}." if section else ""
    return [item for item in list_settings(Config()) if item.name.startswith(prefix)]


def count_table() -> str:
    """Returns a table of the sections with the number of their settings."""
    lines = ["settings  section"]
    for name in list_sections():
        indent = "  " * name.count(".")
        lines.append(f"{count_settings(name):8}  {indent}{name or 'all'}")
    return "\n".join(lines)


def describe(name: str) -> str:
    """Returns the help on a setting or a section with this dotted name.

    Raises UserError for an unknown name.
    """
    name = name.removeprefix("--").removeprefix("config.")
    sections = list_sections()
    if name in sections:
        return describe_section(name, sections)
    settings = {setting.name: setting for setting in list_settings(Config())}
    if name in settings:
        return describe_setting(settings[name])
    # Without a similar name, list the top-level sections.
    names = [*sections, *settings]
    similar = difflib.get_close_matches(name, names) or list(dataclasses.asdict(Config()))
    raise UserError(f"--help {name}: no such section or setting; there are {', '.join(similar)}")


def describe_section(name: str, sections: dict[str, object]) -> str:
    """Returns a line for each setting of a section, and for each subsection."""
    prefix = f"{name}." if name else ""
    lines = [str(inspect.getdoc(type(sections[name]))).split("\n\n")[0], ""]
    for item in settings_of(name):
        short_name = item.name.removeprefix(prefix)
        if "." not in short_name:
            left = f"{short_name}={shown_default(item.value)}"
            lines.append(one_line(left, item.rules.description))
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


def shown_default(value: object) -> str:
    """Returns a default as it is written in a flag."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def describe_setting(item: Setting) -> str:
    """Returns the flag of a setting with its default, its description, choices and bounds."""
    lines = [f"--config.{item.name}={shown_default(item.value)}"]
    lines += textwrap.wrap(describe_value(item), WIDTH - 4)
    return "\n    ".join(lines)


def describe_value(item: Setting) -> str:
    """Returns the description of a setting with its choices or bounds, in one line."""
    rules = item.rules
    if rules.choices:
        names = ", ".join(choice or "''" for choice in rules.choices)
        return f"{rules.description} One of: {names}."
    # Texts and booleans have no bounds.
    if {item.kind, item.item_kind}.isdisjoint({int, float}):
        return rules.description
    # The default upper bounds of all settings are not shown.
    bounds = []
    if rules.above is not None:
        bounds.append(f"above {rules.above:g}")
    elif rules.at_least > -rules.at_most:
        bounds.append(f"at least {rules.at_least:g}")
    if rules.below is not None:
        bounds.append(f"below {rules.below:g}")
    elif rules.at_most not in (LARGEST_INT, LARGEST_FLOAT):
        bounds.append(f"at most {rules.at_most:g}")
    return f"{rules.description} ({', '.join(bounds)})" if bounds else rules.description
