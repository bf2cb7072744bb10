"""Settings from flags: --config.section.field=value.

A flag is read by the type of its setting. A repeated flag of a list adds an item, and a flag
without a value empties the list: --config.task.trackers= . --noconfig.section.field is False.
"""

import difflib
import re
from collections.abc import Sequence
from typing import NamedTuple

from pydantic.fields import FieldInfo

from jzero.config.architecture import ARCH, Architecture, change_entry
from jzero.config.data_sources import Rows, Sources
from jzero.config.schema import Config, known_names, list_sections
from jzero.errors import UserError, shown, slips
from jzero.fields import (
    build,
    fields_of,
    item_kind_of,
    kind_of,
    part_name,
    parts_of,
    section_of,
    unknown,
)
from jzero.notation import change_argument, parts_with, read_value

# Proposals for a name that does not exist.
MOST_MEANT = 3
LEAST_SIMILAR = 0.85  # of dotted names, which have their section in common (difflib)
FOREIGN_NAMES = "docs/start.md lists the settings by their names in TRL, oat, verl and others"

TASK_NAME, TASK_OPTIONS = "task.name", "task.options"
_FLAG = re.compile(r"--?(no)?config\.([^=]*)(?:(=)(.*))?", re.DOTALL)


class Flag(NamedTuple):
    """A flag of a setting: its dotted name, and its text."""

    name: str
    text: str

    def __str__(self) -> str:
        return f"--config.{self.name}={shown(self.text)}"


def split_flags(arguments: Sequence[str]) -> tuple[list[Flag], list[str]]:
    """Separates the flags of settings from the other arguments.

    Raises UserError at the first flag that names no setting.
    """
    flags: list[Flag] = []
    others: list[str] = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        found = _FLAG.fullmatch(argument)
        if found is None:
            others.append(argument)
            continue
        negation, name, equals, text = found.groups()
        check_name(name, argument)
        if negation:
            text = "False"
        elif not equals and is_boolean(name):
            text = "True"
        elif not equals and not remaining:
            raise UserError(f"{argument}: give a value, as in --config.{name}=VALUE")
        elif not equals:
            text = remaining.pop(0)
        flags.append(Flag(name, text))
    return flags, others


def check_name(name: str, argument: str) -> None:
    """Raises UserError if a dotted name is not a setting, with the names that are close to it."""
    if name not in known_names() and not (rows_argument(name) or arch_entry(name)):
        raise UserError(f"{argument}: {no_such_setting(name)}")


def no_such_setting(name: str) -> str:
    """Returns the message on a dotted name that is not a setting, with the names close to it."""
    names = [*known_names(), *(f"{ARCH}.{entry}" for entry in fields_of(Architecture))]
    sections = list_sections(Config())
    if name and name in sections:
        return f"{name} is a section: write --config.{name}.NAME=VALUE, or see --help {name}"
    # The section may be wrong.
    meant = [other for other in names if other.rpartition(".")[2] == name.rpartition(".")[2]]
    meant = slips(name, names) or meant
    if not 0 < len(meant) <= MOST_MEANT:
        # Names of one section are similar by its name: the last part has to be similar, too.
        last = name.rpartition(".")[2]
        close = difflib.get_close_matches(name, names, MOST_MEANT, LEAST_SIMILAR)
        meant = [n for n in close if difflib.get_close_matches(last, [n.rpartition(".")[2]])]
    if meant:
        return f"there is no setting {shown(name)}; did you mean {' or '.join(meant)}?"
    places = {*names, *sections}
    owner = name
    while owner not in places:
        owner = owner.rpartition(".")[0]
    return (
        f"there is no setting {shown(name)}; {f'--help {owner}'.strip()} lists all, and "
        f"{FOREIGN_NAMES}"
    )


def check_texts(flags: Sequence[Flag]) -> None:
    """Raises UserError if the text of a flag cannot be a value of its setting in any recipe."""
    for name, text in flags:
        owner, _, argument = name.rpartition(".")
        parts = [part for field in known_names().get(owner, ()) for part in parts_of(field)]
        mistakes = []
        for part in parts_with(parts, argument):
            try:
                change_argument(owner, parts, part(), argument, text, is_text=True)
                break
            except UserError as error:
                mistakes.append(error)
        else:
            if mistakes:
                raise mistakes[0]
            put_texts(Config(), name, [text])


def rows_argument(name: str) -> bool:
    """Returns whether a name is an argument of the sets of a setting, such as task.data.problem."""
    setting, _, argument = name.rpartition(".")
    return names_sources(setting) and argument in fields_of(Rows)


def names_sources(name: str) -> bool:
    """Returns whether the value of a setting is data sets, such as task.data."""
    return any(field.annotation is Sources for field in known_names().get(name, ()))


def arch_entry(name: str) -> bool:
    """Returns whether a name is an entry of a tiny model, such as model.arch.hidden_size."""
    setting, _, entry = name.rpartition(".")
    return setting == ARCH and entry in fields_of(Architecture)


def is_boolean(name: str) -> bool:
    """Returns whether a setting is True or False."""
    fields = known_names().get(name, ())
    return bool(fields) and all(kind_of(field) is bool for field in fields)


def apply_flags(config: object, flags: Sequence[Flag]) -> None:
    """Changes a config as flags say, in place.

    Raises:
        UserError: a text is not a value of its setting, or two flags contradict each other.
    """
    check_chosen_parts(flags)
    texts: dict[str, list[str]] = {}
    for name, text in flags:
        texts.setdefault(name, []).append(text)
    # Another task has other options than the recipe's.
    changes_task = TASK_NAME in texts and texts[TASK_NAME][-1] != value_of(config, TASK_NAME)
    if changes_task and TASK_OPTIONS not in texts:
        put_value(config, TASK_OPTIONS, ())
    # Parts are chosen before their arguments change: their names have fewer dots.
    for name in sorted(texts, key=lambda name: name.count(".")):
        put_texts(config, name, texts[name])


def put_texts(root: object, name: str, texts: Sequence[str]) -> None:
    """Changes a setting below a section as its flags say: the last counts, a list has all items."""
    if rows_argument(name):
        _change_rows(root, name, texts[-1])
        return
    if arch_entry(name):
        entry = name.removeprefix(f"{ARCH}.")
        put_value(root, ARCH, change_entry(str(value_of(root, ARCH)), entry, texts[-1]))
        return
    field = field_of(root, name)
    if field is None or item_kind_of(field) is None:
        put_value(root, name, texts[-1], is_text=True)
        return
    items: tuple[object, ...] = ()
    for text in texts:
        added = read_value(name, field, text)
        assert isinstance(added, tuple), f"{added=}"
        items = (*items, *added) if added else ()
    put_value(root, name, items)


def _change_rows(root: object, name: str, text: str) -> None:
    """Changes an argument of every set of a setting with data sets."""
    setting, _, argument = name.rpartition(".")
    value = read_value(name, fields_of(Rows)[argument], text)
    sources = value_of(root, setting)
    # Without a set, the argument belongs to the default set of the task: an empty path.
    rows = sources if isinstance(sources, Sources) and sources else (Rows(),)
    changed = [build(Rows, vars(source) | {argument: value}) for source in rows]
    put_value(root, setting, Sources(changed))


def put_value(root: object, name: str, value: object, *, is_text: bool = False) -> None:
    """Changes a setting, or an argument of a part, below a section.

    Args:
        value: the value; a part may be given by its text, too: "clip(high=0.28)".
        is_text: the value is the text of a flag, to be read by the type of the setting: "8".

    Raises UserError if there is no such part or argument, or the value is wrong.
    """
    section, field_name, path = find_place(root, name)
    field = fields_of(type(section))[field_name]
    current = getattr(section, field_name)
    setting = name.removesuffix(f".{path}") if path else name
    if path:
        value = change_argument(setting, parts_of(field), current, path, value, is_text=is_text)
    elif isinstance(value, str) and section_of(field) is not None:
        raise UserError(f"{name} is a section: set one of its settings, as in {name}.NAME")
    elif isinstance(value, str) and (is_text or parts_of(field)):
        value = read_value(name, field, value, current)
    setattr(section, field_name, value)


class Place(NamedTuple):
    """Where a setting is: the section and its field, and the path of an argument in a part."""

    section: object
    field: str
    path: str  # "" for the setting itself, "low" for an argument of its part


def find_place(root: object, name: str) -> Place:
    """Returns the place of a setting, of an argument of a part, or of a section, below a section.

    Raises UserError if there is no such setting.
    """
    section = root
    first, _, path = name.partition(".")
    while True:
        fields = fields_of(type(section))
        if first not in fields:
            raise UserError(f"{f'{name}: ' if path else ''}{unknown(first, fields)}")
        if section_of(fields[first]) is None or not path:
            return Place(section, first, path)
        section = getattr(section, first)
        first, _, path = path.partition(".")


def field_of(root: object, name: str) -> FieldInfo | None:
    """Returns the field of a setting, or of an argument of the first part that has it."""
    section, field_name, path = find_place(root, name)
    field: FieldInfo | None = fields_of(type(section))[field_name]
    for argument in path.split(".") if path else []:
        owners = parts_with(parts_of(field), argument) if field else []
        field = fields_of(owners[0])[argument] if owners else None
    return field


def value_of(root: object, name: str) -> object:
    """Returns a setting, or an argument of a part; None without a part that has the argument."""
    section, field, path = find_place(root, name)
    value = getattr(section, field)
    for argument in path.split(".") if path else []:
        value = getattr(value, argument, None)
    return value


def check_chosen_parts(flags: Sequence[Flag]) -> None:
    """Raises UserError if a flag changes an argument that the part of another flag does not have.

    Without the check, --config.warm_start=none would do nothing next to --config.warm_start.lr=0.1,
    because an argument of a setting that is none chooses its part.
    """
    last = {flag.name: flag for flag in flags}
    for choice in last.values():
        parts = {
            part_name(p): p for field in known_names().get(choice.name, ()) for p in parts_of(field)
        }
        chosen = choice.text.partition("(")[0].strip()
        if chosen not in parts:  # `read_value` reports a part that does not exist
            continue
        part = parts[chosen]
        arguments = fields_of(part) if part else {}
        for other in flags:
            argument, _, _ = other.name.removeprefix(f"{choice.name}.").partition(".")
            if not other.name.startswith(f"{choice.name}.") or argument in arguments:
                continue
            owners = [part_name(p) for p in parts.values() if p and argument in fields_of(p)]
            raise UserError(
                f"{choice} and {other} contradict each other, because {choice.name}="
                f"{shown(chosen)} has no {argument}: remove one of them, or choose "
                f"{' or '.join(owners)}"
            )
