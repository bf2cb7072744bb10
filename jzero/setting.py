"""A setting: a typed dataclass field with a description and the values that it may have.

The sections of `config.Config` and `algorithms.Algorithm` are plain dataclasses, and their fields
are written with `setting`:

    num_prompts: int = setting(128, "Number of prompts in a step (P).", at_least=1)

`--help` prints the description. `config.validate` checks the bounds and the choices. Both read the
field's metadata, so a setting is fully defined on one line.

A choice with numbers of its own is a *part*: a frozen dataclass, whose fields are settings too. The
type of the setting is the union of its parts, and None stands for "no part":

    @dataclass(frozen=True)
    class Clip:
        '''The clipped ratio of PPO.'''

        high: float = setting(0.2, "The ratio is clipped at 1 + high from above.")

    surrogate: Clip | Reinforce | None = setting(Clip(), "Surrogate objective.")

The name of a part is the name of its class in lowercase: clip, group_mean for GroupMean. Flags
choose a part (surrogate=clip), choose it with numbers (surrogate="clip(high=0.28)"), or change one
number of the chosen part (surrogate.high=0.28). In JSON a part is {"name": "clip", "high": 0.28}.
"""

import ast
import dataclasses
import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from jzero.errors import UserError, shown

Value = TypeVar("Value")  # bool, int, float, str, or a tuple of str, int or float

KEY = "setting"  # in the field's metadata

# Default bounds of all settings. Ids, positions and counts are int32 on the devices. Losses
# multiply several numbers of at most LARGEST_FLOAT, and stay finite in float32.
LARGEST_INT = 2**31 - 1
LARGEST_FLOAT = 1e9
SMALLEST_FLOAT = 1.18e-38  # the smallest normal float32
LONGEST_LINE = 4095  # characters; no path may be longer
LONGEST_TEXT = 100_000  # characters of a prompt


@dataclasses.dataclass(frozen=True)
class Rules:
    """The rules for a setting, stored in the metadata of its field.

    `at_least` is the smallest number allowed and `at_most` the largest. `above` and `below` are
    exclusive bounds. No setting may be infinite. For a tuple, the bounds apply to its items.
    `choices` are the strings allowed; an empty tuple allows every string. A string is one line
    without control characters, unless `is_text` allows any text.
    """

    description: str
    at_least: float
    choices: tuple[str, ...]
    above: float | None = None
    at_most: float = LARGEST_FLOAT
    below: float | None = None
    is_text: bool = False


def setting(
    default: Value,
    description: str,
    *,
    at_least: float | None = 0,
    choices: tuple[str, ...] = (),
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    is_text: bool = False,
) -> Value:
    """Returns a dataclass field with a default and its `Rules`.

    `at_least=None` allows negative numbers down to -at_most.

    As for `dataclasses.field`, the return type is the type of the default, so that `steps: int =
    setting(200, ...)` type-checks.
    """
    largest = LARGEST_INT if isinstance(default, int) else LARGEST_FLOAT
    at_most = largest if at_most is None else at_most
    at_least = -at_most if at_least is None else at_least
    rules = Rules(description, at_least, choices, above, at_most, below, is_text)
    return dataclasses.field(default=default, metadata={KEY: rules})


def rules_of(field: dataclasses.Field[object]) -> Rules:
    """Returns the rules of a field that was written with `setting`."""
    assert KEY in field.metadata, f"{field.name}: write the field with jzero.setting.setting"
    return field.metadata[KEY]


def bounds_mistake(value: float, rules: Rules) -> str:
    """Returns the rest of a message such as "must be at least 1", "" if a number is allowed."""
    if math.isnan(value):
        return "is not a number"
    if math.isinf(value):
        return "must be finite"
    if value < rules.at_least:
        return f"must be at least {rules.at_least:.10g}"
    if rules.above is not None and value <= rules.above:
        return f"must be above {rules.above:g}"
    if rules.below is not None and value >= rules.below:
        return f"must be below {rules.below:g}"
    if value > rules.at_most:
        return f"must be at most {rules.at_most:.10g}"
    # XLA flushes subnormal numbers to 0, and a setting of 0 often means "off".
    if 0 < abs(value) < SMALLEST_FLOAT:
        return f"is 0 in float32: set it to 0, or to at least {SMALLEST_FLOAT:g}"
    return ""


# -- The types of fields ---------------------------------------------------------------------------


class FieldType(NamedTuple):
    """The declared type of a field.

    A field is a single value, a tuple of values, a section of settings (a mutable dataclass), or a
    part (a frozen dataclass, or None).
    """

    kind: type  # bool, int, float, str, tuple, the class of a section, or object for a part
    item_kind: type | None = None  # type of a tuple's items: str, int or float
    parts: tuple[type | None, ...] = ()  # the classes that a part may have, None for no part


@functools.cache
def field_types(section: type) -> dict[str, FieldType]:
    """Returns the type of every field of a section or a part."""
    hints = typing.get_type_hints(section)
    fields = {field.name: field_type(hints[field.name]) for field in dataclasses.fields(section)}
    # In JSON, "name" is the name of the part.
    assert not (is_part(section) and "name" in fields), f"{section=}"
    return fields


def field_type(hint: object) -> FieldType:
    """Returns the type of a field with this type hint."""
    arguments = typing.get_args(hint)
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return FieldType(object, parts=tuple(None if a is types.NoneType else a for a in arguments))
    if arguments:
        return FieldType(tuple, arguments[0])
    assert isinstance(hint, type), f"{hint=}"
    return FieldType(object, parts=(hint,)) if is_part(hint) else FieldType(hint)


def add_part(section: type, field: str, part: type) -> None:
    """Adds a class to the parts that a field of a section may have, such as a user-defined one."""
    types_of_section = field_types(section)
    kind = types_of_section[field]
    # `field_types` is cached: the dictionary is the one home of the types of a section.
    types_of_section[field] = kind._replace(parts=(*kind.parts, part))


def is_part(value: object) -> bool:
    """Returns whether a value is a part, or a class is a class of parts. None is not a part."""
    parameters = getattr(value, "__dataclass_params__", None)
    # Sections are mutable dataclasses, so that flags can change them; parts are values.
    return parameters is not None and parameters.frozen


NAMES_OF_KINDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    tuple: "a list",
}


def has_kind(value: object, kind: type) -> bool:
    """Returns whether a value is allowed for a setting of this type."""
    # In Python True is an int, and would pass as the number 1.
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int | float)
    return isinstance(value, list | tuple) if kind is tuple else isinstance(value, kind)


# -- Parts -----------------------------------------------------------------------------------------


def part_name(part: type | None) -> str:
    """Returns the name of a class of parts: group_mean for GroupMean, "none" for None."""
    if part is None:
        return "none"
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", part.__name__).lower()


def class_of_part(value: object) -> type | None:
    """Returns the class of a part, None for None."""
    return None if value is None else type(value)


def show_part(value: object) -> str:
    """Returns a part as a flag chooses it: clip(low=0.2,high=0.28)."""
    name = part_name(class_of_part(value))
    if value is None:
        return name
    assert dataclasses.is_dataclass(value), f"{value=}"
    arguments = []
    for field in dataclasses.fields(value):
        argument = getattr(value, field.name)
        if field_types(type(value))[field.name].parts:
            argument = show_part(argument)
        arguments.append(f"{field.name}={argument!r}")
    return f"{name}({','.join(arguments)})" if arguments else name


# In the arguments of a call: text in quotes, or the rest of an argument after its name.
_QUOTED_OR_VALUE = re.compile(r"""("[^"]*"|'[^']*')|(?<==)([^,()'"]+)""")


def read_arguments(text: str, *, bare_text: bool = False) -> tuple[list[object], dict[str, object]]:
    """Returns the positional and the keyword arguments of a call.

    `text` is the text between the brackets, such as "1, length=2000". Nothing is evaluated. With
    `bare_text` a keyword argument that is no literal is a text without quotes: project=my-run.

    Raises:
        ValueError: an argument is not a literal.
    """
    if bare_text:
        text = _QUOTED_OR_VALUE.sub(lambda found: found[1] or _quote(found[2]), text)
    try:
        # Python's own parser handles quotes, brackets and escapes. Only literals are read from the
        # tree.
        call = ast.parse(f"_({text})", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError("more than one call")
        positional = [ast.literal_eval(argument) for argument in call.args]
        named: dict[str, object] = {}
        for keyword in call.keywords:
            if keyword.arg is None:  # **dict
                raise ValueError("two asterisks")
            named[keyword.arg] = ast.literal_eval(keyword.value)
    except (MemoryError, RecursionError, SyntaxError, TypeError) as error:
        raise ValueError(str(error)) from None
    return positional, named


def _quote(value: str) -> str:
    """Returns an argument that is a literal as it is, and any other text in quotes."""
    try:
        ast.literal_eval(value.strip())
    except (MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        return repr(value.strip())
    return value


def parse_part(
    name: str,
    parts: tuple[type | None, ...],
    text: str,
    current: object = None,
) -> object:
    """Returns the part that a text chooses: "clip", or "clip(low=0.2,high=0.28)".

    Without brackets, a part of the same class as `current` is `current`, with its numbers.

    Args:
        name: dotted name of the setting, for error messages.
        parts: the classes to choose from.
        text: name of a part, and arguments in brackets.
        current: the part that the text replaces.

    Raises:
        UserError: there is no such part or argument, or an argument has the wrong type.
    """
    chosen, bracket, rest = text.strip().partition("(")
    classes = {part_name(part): part for part in parts}
    if chosen not in classes:
        raise UserError(no_such_part(name, chosen, list(classes)))
    part = classes[chosen]
    if not bracket:
        # A flag that names the recipe's part again must not reset the recipe's numbers.
        return current if part is class_of_part(current) else make_part(name, part, {})
    if not rest.endswith(")"):
        raise UserError(f"{name}={shown(text)}: close the bracket")
    try:
        positional, named = read_arguments(rest[:-1])
    except ValueError:
        raise UserError(
            f"{name}={shown(text)}: the arguments are numbers, texts in quotes, True and False, as "
            "in NAME(low=0.2)"
        ) from None
    if positional:
        raise UserError(f"{name}={shown(text)}: write each argument as NAME=VALUE")
    return make_part(name, part, named)


def no_such_part(name: str, chosen: str, names: list[str]) -> str:
    """Returns the message on a part that a setting does not have."""
    close = difflib.get_close_matches(chosen, names, n=1)
    advice = f"; did you mean {close[0]}?" if close else ""
    return f"{name}={shown(chosen)} is not one of {', '.join(names)}{advice}"


def make_part(name: str, part: type | None, arguments: Mapping[str, object]) -> object:
    """Returns a part with these arguments, and with its defaults for the others.

    An argument that is a part itself may be written as a text, such as "constant(length=300)".

    Raises:
        UserError: the part has no such argument, or an argument has the wrong type.
    """
    if part is None:
        if arguments:
            raise UserError(f"{name}=none has no {', '.join(map(shown, arguments))}: leave it out")
        return None
    fields = field_types(part)
    values = {}
    for argument, value in arguments.items():
        if argument not in fields:
            known = ", ".join(fields) or "none"
            raise UserError(
                f"{name}={part_name(part)} has no {shown(argument)}: its arguments are {known}"
            )
        values[argument] = checked_argument(f"{name}.{argument}", fields[argument], value)
    return part(**values)


def checked_argument(name: str, field: FieldType, value: object) -> object:
    """Returns the value of an argument with the type of its field, or raises UserError."""
    if field.parts:
        if class_of_part(value) in field.parts:
            return value
        if isinstance(value, Mapping):
            return part_from_json(name, field.parts, value)
        if isinstance(value, str):
            return parse_part(name, field.parts, value)
        raise UserError(f"{name}={shown(value)} is no part: write its name")
    if not has_kind(value, field.kind):
        raise UserError(f"{name}={shown(value)} must be {NAMES_OF_KINDS[field.kind]}")
    # A part is hashable, and JSON has lists only.
    if isinstance(value, list | tuple):
        return tuple(value)
    # JSON and Python code may write 1 for 1.0.
    return float(value) if field.kind is float and isinstance(value, int) else value


def only_part_with(parts: tuple[type | None, ...], argument: str) -> object:
    """Returns the part with an argument if it is the only one, with its defaults; otherwise None.

    An argument of a setting that is "none" so chooses the part: hub.repo=USER/NAME.
    """
    owners = [part for part in parts if part is not None and argument in field_types(part)]
    return owners[0]() if len(owners) == 1 else None


def replace_argument(
    name: str,
    parts: tuple[type | None, ...],
    part: object,
    path: str,
    value: object,
) -> object:
    """Returns a copy of a part with one argument changed.

    Args:
        name: dotted name of the setting.
        parts: the classes that the setting may have.
        part: the current part. None becomes the only part that has the argument.
        path: name of the argument; dotted for an argument of a part inside the part.
        value: the value, or its text from a flag.

    Raises:
        UserError: the part does not have the argument, or the value has the wrong type.
    """
    argument, _, inner_path = path.partition(".")
    if part is None:
        part = only_part_with(parts, argument)
    fields = {} if part is None else field_types(type(part))
    if argument not in fields:
        owners = [
            part_name(other)
            for other in parts
            if other is not None and argument in field_types(other)
        ]
        advice = f"{', '.join(owners)} have it" if owners else "no part has it"
        advice = f"{owners[0]} has it" if len(owners) == 1 else advice
        raise UserError(f"{name}={part_name(class_of_part(part))} has no {argument}: {advice}")
    assert dataclasses.is_dataclass(part) and not isinstance(part, type), f"{part=}"
    field, inner_name = fields[argument], f"{name}.{argument}"
    if field.parts:
        current = getattr(part, argument)
        if inner_path:
            value = replace_argument(inner_name, field.parts, current, inner_path, value)
        elif isinstance(value, str):
            value = parse_part(inner_name, field.parts, value, current)
    elif isinstance(value, str):
        value = parse_value(inner_name, field, value)
    value = checked_argument(inner_name, field, value)
    return dataclasses.replace(part, **{argument: value})


def parse_value(name: str, field: FieldType, text: str) -> object:
    """Returns the value of an argument from its text in a flag.

    Raises UserError for a text that is not of the field's type.
    """
    if field.kind is str:
        return text
    if field.kind is bool and text.lower() in ("true", "1", "false", "0"):
        return text.lower() in ("true", "1")
    try:
        if field.kind in (int, float):
            return field.kind(text)
        if field.kind is tuple:
            return read_tuple(text, field.item_kind)
    except ValueError:
        pass
    raise UserError(f"{name}={shown(text)} must be {NAMES_OF_KINDS[field.kind]}")


def read_tuple(text: str, item_kind: type | None) -> tuple[object, ...]:
    """Returns the items of a tuple from its text: a literal, or items separated by commas.

    Raises ValueError for an item of another type.
    """
    if not text.strip("() "):
        return ()
    try:
        value = ast.literal_eval(text)
        items = tuple(value) if isinstance(value, list | tuple) else (value,)
    except (MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        # Names need no quotes in a flag: q,k,v is no Python literal.
        items = tuple(item.strip() for item in text.split(","))
    if item_kind is not None and not all(has_kind(item, item_kind) for item in items):
        raise ValueError("an item has another type")
    return items


# -- JSON ------------------------------------------------------------------------------------------


def to_values(value: object) -> object:
    """Returns a section or a part as JSON values. A part has the key "name"."""
    if isinstance(value, tuple):
        return [to_values(item) for item in value]
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields: dict[str, object] = {"name": part_name(type(value))} if is_part(value) else {}
    for field in dataclasses.fields(value):
        fields[field.name] = to_values(getattr(value, field.name))
    return fields


def part_from_json(name: str, parts: tuple[type | None, ...], value: object) -> object:
    """Returns the part that `to_values` wrote. Missing arguments have their defaults.

    Raises:
        UserError: it is no part, or has an unknown name, an unknown argument or a wrong type.
    """
    classes = {part_name(part): part for part in parts}
    if value is None and None in parts:
        return None
    if not isinstance(value, Mapping) or "name" not in value:
        example = next(iter(classes))
        raise UserError(f'{name}={shown(value)} is no part: write {{"name": "{example}"}}')
    chosen = str(value["name"])
    if chosen not in classes:
        raise UserError(no_such_part(name, chosen, list(classes)))
    arguments = {argument: item for argument, item in value.items() if argument != "name"}
    return make_part(name, classes[chosen], arguments)
