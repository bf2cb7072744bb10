"""The notation of flags: values, lists, and parts with arguments, as in clip(low=0.2,high=0.28).

A text is read by the type of its field. Nothing is evaluated.
"""

import ast
import dataclasses
import difflib
import re
import typing
from collections.abc import Sequence

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from jzero.errors import UserError, shown
from jzero.fields import (
    WRONG_TYPE,
    build,
    class_of_part,
    fields_of,
    is_part,
    item_kind_of,
    kind_of,
    part_name,
    parts_of,
    unknown,
)

# In the arguments of a call: text in quotes or a list, or the rest of an argument after its name.
_QUOTED_OR_VALUE = re.compile(r"""("[^"]*"|'[^']*'|(?<==)\[[^]]*\])|(?<==)([^,()'"]+)""")
_ERRORS = (MemoryError, RecursionError, SyntaxError, TypeError, ValueError)


def read_arguments(text: str, *, bare_text: bool = False) -> tuple[list[object], dict[str, object]]:
    """Returns the positional and the keyword arguments of a call.

    `text` is the text between the brackets, such as "1, length=2000". With `bare_text`, a keyword
    argument that is not a literal is a text without quotes: project=my-run.

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
    except _ERRORS as error:
        raise ValueError(str(error)) from None
    return positional, named


def read_literal(text: str) -> object:
    """Returns the value of a Python literal. Raises ValueError for any other text."""
    try:
        return ast.literal_eval(text)
    except _ERRORS as error:
        raise ValueError(str(error)) from None


def _quote(value: str) -> str:
    """Returns an argument that is a literal as it is, and any other text in quotes."""
    try:
        read_literal(value.strip())
    except ValueError:
        return repr(value.strip())
    return value


# -- Values ----------------------------------------------------------------------------------------

# Names separated by commas, such as accuracy,my_rewards:short or FILE.py:f,length.
NAMES = re.compile(r"[\w./-]+(:[A-Za-z_]\w*)?(,[\w./-]+(:[A-Za-z_]\w*)?)+")


def read_value(name: str, field: FieldInfo, text: str, current: object = None) -> object:
    """Returns the value of a field from its text.

    Args:
        name: dotted name of the setting, for error messages.
        field: the field, whose type the text has.
        text: the text of a flag, or of an argument of a part.
        current: the present value: a part whose name is given again keeps its numbers.

    Raises:
        UserError: the text is not a value of the field's type.
    """
    if parts_of(field):
        return read_part(name, parts_of(field), text, current)
    item_kind = item_kind_of(field)
    if item_kind is not None:
        return tuple(read_scalar(name, item_kind, item) for item in read_items(item_kind, text))
    return read_scalar(name, kind_of(field), text)


def read_scalar(name: str, kind: type, text: str) -> object:
    """Returns a bool, int, float or str from its text. Raises UserError for any other text."""
    if kind is str:
        return text
    try:
        return TypeAdapter(kind).validate_strings(text.strip(), strict=True)
    except ValidationError:
        raise UserError(f"{name}={shown(text)} {WRONG_TYPE[kind.__name__]}") from None


def read_items(kind: type, text: str) -> list[str]:
    """Returns the texts of a list's items: a Python list, or items separated by commas.

    A text with commas is one item unless it is a list of names, such as q,k,v.
    """
    if not text.strip():
        return []
    if kind is not str:
        return [item for item in text.strip("()[] ").split(",") if item.strip()]
    if NAMES.fullmatch(text):
        return text.split(",")
    try:
        items = read_literal(text)
    except ValueError:
        return [text]
    return [str(item) for item in items] if isinstance(items, list | tuple) else [str(items)]


def read_values(cls: type, text: str) -> dict[str, object]:
    """Returns the values of fields from a text such as "low=0.2,high=0.28".

    Texts need no quotes unless they have commas or brackets.

    Raises:
        UserError: the class has no such field, or a value is not of the field's type.
    """
    try:
        positional, named = read_arguments(text, bare_text=True)
    except ValueError:
        positional, named = [text], {}
    if positional:
        raise UserError(
            f"{shown(text)}: write each argument as NAME=VALUE, with commas in between, and texts "
            "with commas or brackets in quotes"
        )
    fields = fields_of(cls)
    values: dict[str, object] = {}
    for name, value in named.items():
        if name not in fields:
            raise UserError(unknown(name, fields))
        # The parts inside of a part are written as texts, and booleans as in a flag: true.
        is_text = isinstance(value, str) and kind_of(fields[name]) is not str
        values[name] = read_value(name, fields[name], str(value)) if is_text else value
    return values


# -- Parts -----------------------------------------------------------------------------------------


def read_part(name: str, parts: Sequence[type | None], text: str, current: object = None) -> object:
    """Returns the part that a text chooses: "clip", or "clip(low=0.2,high=0.28)".

    Without brackets, a part of the same class as `current` is `current`, with its numbers.

    Args:
        name: dotted name of the setting, for error messages.
        parts: the classes to choose from.
        text: name of a part, and arguments in brackets.
        current: the part that the text replaces.

    Raises:
        UserError: there is no such part or argument, or an argument has a wrong value.
    """
    chosen, bracket, rest = text.strip().partition("(")
    classes = {part_name(part): part for part in parts}
    if chosen not in classes:
        raise UserError(no_such_part(name, chosen, list(classes)))
    part = classes[chosen]
    if not bracket:
        # A flag that names the recipe's part again must not reset the recipe's numbers.
        return current if part is class_of_part(current) else part and part()
    if not rest.endswith(")"):
        raise UserError(f"{name}={shown(text)}: close the bracket")
    if part is None:
        raise UserError(f"{name}={shown(text)}: write {name}=none without brackets")
    try:
        return build(part, read_values(part, rest[:-1]))
    except UserError as error:
        raise UserError(f"{name}={shown(text)}: {error}") from None


def no_such_part(name: str, chosen: str, names: list[str]) -> str:
    """Returns the message on a part that a setting does not have."""
    close = difflib.get_close_matches(chosen, names, n=1)
    advice = f"; did you mean {close[0]}?" if close else ""
    return f"{name}={shown(chosen)} is not one of {', '.join(names)}{advice}"


def parts_with(parts: Sequence[type | None], argument: str) -> list[type]:
    """Returns the parts that have an argument."""
    return [part for part in parts if part is not None and argument in fields_of(part)]


def change_argument(
    name: str,
    parts: Sequence[type | None],
    part: object,
    path: str,
    value: object,
    *,
    is_text: bool = False,
) -> object:
    """Returns a copy of a part with one argument changed.

    Args:
        name: dotted name of the setting.
        parts: the classes that the setting may have.
        part: the current part. None becomes the only part that has the argument.
        path: name of the argument; dotted for an argument of a part inside the part.
        value: the value; of an argument that is a part, also its text.
        is_text: the value is the text of a flag, to be read by the type of the argument.

    Raises:
        UserError: the part does not have the argument, or the value is wrong.
    """
    argument, _, inner_path = path.partition(".")
    if not parts:
        raise UserError(f"{name}.{path}: {name} has no settings of its own: set {name}")
    owners = parts_with(parts, argument)
    if part is None and len(owners) == 1:
        part = owners[0]()
    if part is None or argument not in fields_of(type(part)):
        names = ", ".join(map(part_name, owners))
        advice = (
            f"{names} {'has' if len(owners) == 1 else 'have'} it" if owners else "no part has it"
        )
        raise UserError(f"{name}={part_name(class_of_part(part))} has no {argument}: {advice}")
    assert is_part(part), f"{part=}"
    field, inner_name = fields_of(type(part))[argument], f"{name}.{argument}"
    current = getattr(part, argument)
    if inner_path:
        value = change_argument(
            inner_name, parts_of(field), current, inner_path, value, is_text=is_text
        )
    elif isinstance(value, str) and (is_text or parts_of(field)):
        value = read_value(inner_name, field, value, current)
    try:
        return dataclasses.replace(typing.cast("typing.Any", part), **{argument: value})
    except UserError as error:
        # The message of a part begins with its own name.
        raise UserError(str(error).replace(f"{part_name(type(part))}.", f"{name}.", 1)) from None
