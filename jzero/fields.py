"""Sections, parts and records of settings: pydantic dataclasses with jzero's rules and messages.

    @section
    class RolloutConfig:
        '''Sampling.'''

        num_prompts: int = Field(default=128, ge=1)
        '''Number of prompts in a step (P).'''

A *section* is mutable, so that recipes and flags can change it. A choice with numbers of its own is
a *part*: frozen, and a value of a setting whose type is the union of its parts, with None for "no
part". Its name (`kind`) is the name of its class in lowercase: clip, group_mean for GroupMean.

    @part
    class Clip:
        '''The clipped ratio of PPO.'''

        high: float = 0.2
        '''The ratio is clipped at 1 + high from above.'''

    surrogate: Clip | Reinforce | None = Clip()

Flags choose a part (surrogate=clip), choose it with numbers (surrogate="clip(high=0.28)"), or
change one number of the chosen part (surrogate.high=0.28). In JSON a part has the key "kind".

A *record* is frozen and not a part, such as the limits of a server. `frozen(config)` is a copy of
sections that cannot be changed, such as the resolved settings of a run.

A value of a class with `Written` has a text for flags, recipes and JSON, such as the data sets of
`task.data`. It is read from the text when it is assigned.

A value is checked when it is assigned, and a mistake is a `UserError`. Numbers are finite and, if
`Field` gives no other bounds, from 0 to LARGEST_INT or LARGEST_FLOAT. Texts are one line without
control characters, unless the type is `Text`. The docstring of a field is its help.
"""

import copy
import dataclasses
import difflib
import functools
import inspect
import re
import sys
import types
import typing
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Literal, NamedTuple, Self, TypeVar, dataclass_transform

import annotated_types as bounds
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo
from pydantic.types import AllowInfNan
from pydantic_core import ErrorDetails, core_schema

from jzero.errors import UserError, shown

__all__ = ["Field", "Text", "Written", "part", "record", "section", "written"]

Class = TypeVar("Class")

# Default bounds of all settings. Ids, positions and counts are int32 on the devices. Losses
# multiply several numbers of at most LARGEST_FLOAT, and stay finite in float32.
LARGEST_INT = 2**31 - 1
LARGEST_FLOAT = 1e9
SMALLEST_FLOAT = 1.18e-38  # the smallest normal float32
LONGEST_LINE = 4095  # characters; no path may be longer
LONGEST_TEXT = 100_000  # characters of a prompt
LONGEST_NAME = 255  # bytes of a file name

RULES = ConfigDict(
    extra="forbid", strict=True, validate_assignment=True, use_attribute_docstrings=True
)
KIND = "kind"  # the field with the name of a part


# -- Classes ---------------------------------------------------------------------------------------


def written(*, default: object, converter: Callable[[typing.Any], object]) -> typing.Any:
    """Returns the field of a `Written` value, whose text may be assigned in its place.

    converter: returns the value of a text. Only type checkers read it: the class converts texts.
    """
    return Field(default=default)


@dataclass_transform(field_specifiers=(dataclasses.field, Field, written))
def section(cls: type[Class]) -> type[Class]:
    """Makes a class of settings that can be changed."""
    return _make(cls, is_frozen=False)


@dataclass_transform(field_specifiers=(dataclasses.field, Field, written), frozen_default=True)
def part(cls: type[Class]) -> type[Class]:
    """Makes a class of parts: frozen, with its name in the field `kind`, which comes last."""
    cls.__annotations__ = inspect.get_annotations(cls) | {KIND: Literal[part_name(cls)]}
    setattr(cls, KIND, Field(part_name(cls), kw_only=True, repr=False))
    return _make(cls, is_frozen=True)


@dataclass_transform(field_specifiers=(dataclasses.field, Field), frozen_default=True)
def record(cls: type[Class]) -> type[Class]:
    """Makes a frozen class of settings that is not a part."""
    return _make(cls, is_frozen=True)


def _make(cls: type[Class], *, is_frozen: bool) -> type[Class]:
    # A module with `from __future__ import annotations` has them as texts.
    hints = inspect.get_annotations(cls, eval_str=True)
    cls.__annotations__ = {
        name: with_rules(hint, cls.__dict__.get(name)) for name, hint in hints.items()
    }
    made = dataclass(config=RULES, frozen=is_frozen)(cls)
    _inherit_help(made)
    _raise_user_errors(made)
    return typing.cast("type[Class]", made)


def _inherit_help(cls: type) -> None:
    """Gives fields of base classes their docstrings: pydantic reads them in their own class."""
    for base in cls.__mro__[1:]:
        for name, field in vars(base).get("__pydantic_fields__", {}).items():
            inherited = cls.__pydantic_fields__[name]  # pyright: ignore[reportAttributeAccessIssue]
            inherited.description = inherited.description or field.description


def _raise_user_errors(cls: type) -> None:
    """Lets the constructor and the assignments of a class raise `UserError` at a mistake."""
    construct, assign = cls.__init__, cls.__setattr__

    @functools.wraps(construct)
    def __init__(self: object, *values: object, **named: object) -> None:
        try:
            construct(self, *values, **named)
        except ValidationError as error:
            raise user_error(error, cls) from None

    @functools.wraps(assign)
    def __setattr__(self: object, name: str, value: object) -> None:
        if is_frozen(self):
            raise UserError(
                f"{setting_name(cls, name)}={shown(value)}: the settings of a run do not change "
                "after they are resolved: set it before, or make a copy with dataclasses.replace"
            )
        try:
            assign(self, name, value)  # pyright: ignore[reportCallIssue]
        except ValidationError as error:
            raise user_error(error, cls) from None
        except dataclasses.FrozenInstanceError:
            raise UserError(
                f"{setting_name(cls, name)}={shown(value)}: a {cls.__name__} is a value that "
                f"cannot be changed: assign another one, such as {cls.__name__}({name}=...)"
            ) from None

    cls.__init__ = __init__
    cls.__setattr__ = __setattr__  # pyright: ignore[reportAttributeAccessIssue]


# -- Rules of values -------------------------------------------------------------------------------


def with_rules(hint: object, default: object) -> object:
    """Returns the type of a field with the rules of its kind.

    default: the default of the field, or its `Field`, whose bounds replace those of the kind.
    """
    given = default.metadata if isinstance(default, FieldInfo) else []
    if hint in (int, float):
        largest = LARGEST_INT if hint is int else LARGEST_FLOAT
        rules: list[object] = []
        if not any(isinstance(rule, bounds.Ge | bounds.Gt) for rule in given):
            rules.append(bounds.Ge(0))
        if not any(isinstance(rule, bounds.Le | bounds.Lt) for rule in given):
            rules.append(bounds.Le(largest))
        if hint is float:
            rules += [AllowInfNan(False), AfterValidator(normal_number)]
        return Annotated[hint, *rules] if rules else hint
    if hint is str:
        return Line
    if typing.get_origin(hint) is tuple:
        item, *_ = typing.get_args(hint)
        item = {str: Line, float: Number, int: Integer}.get(item, item)
        return Annotated[tuple[item, ...], BeforeValidator(as_tuple)]
    classes = tuple(None if a is types.NoneType else a for a in typing.get_args(hint))
    if not isinstance(hint, types.UnionType):
        classes = (hint,)
    if all(one is None or is_part(one) for one in classes):
        return Annotated[hint, Parts(list(classes))]
    return hint


def normal_number(value: float) -> float:
    """Returns a number, or raises UserError if it is 0 in float32 without being 0."""
    # XLA flushes subnormal numbers to 0, and a setting of 0 often means "off".
    if 0 < abs(value) < SMALLEST_FLOAT:
        raise UserError(f"is 0 in float32: set it to 0, or to at least {SMALLEST_FLOAT:g}")
    return value


def one_line(value: str) -> str:
    """Returns a text, or raises UserError if it cannot be a line or a path."""
    unicode_text(value, LONGEST_LINE)
    if any(unicodedata.category(letter) == "Cc" for letter in value):
        raise UserError("has a line break or another control character: remove it")
    # Any line may become a path: the system's error on a long name comes late and without the
    # setting.
    if any(len(name.encode()) > LONGEST_NAME for name in value.split("/")):
        raise UserError(f"has a name of more than {LONGEST_NAME} bytes: give a shorter one")
    return value


def unicode_text(value: str, longest: int = LONGEST_TEXT) -> str:
    """Returns a text, or raises UserError if it is too long or cannot be encoded."""
    if len(value) > longest:
        raise UserError(f"has {len(value)} characters: give at most {longest}")
    # Python reads undecodable bytes of an argument as lone surrogates. They cannot be written to
    # config.json, and system calls refuse zero bytes.
    if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise UserError("is not Unicode text: give it in UTF-8, without zero bytes")
    return value


def name_and_value(value: str) -> str:
    """Returns a text such as value_max=9, or raises UserError if it has another form."""
    name, equals, _ = value.partition("=")
    if not equals or not name.strip():
        raise UserError("has no value: write NAME=VALUE")
    return unicode_text(value)


def non_empty(value: str) -> str:
    """Returns a text, or raises UserError if it is empty."""
    if not value:
        raise UserError("is an empty text: remove it")
    return value


def as_tuple(value: object) -> object:
    """Returns a list as a tuple, which Python code and JSON may write in its place."""
    return tuple(value) if isinstance(value, list) else value


class Written:
    """A value with a text, `str(value)`, that stands for it in flags, recipes, JSON and messages.

    `repr` has the text in quotes, as a recipe assigns it.
    """

    __slots__ = ()

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Returns the value of a text.

        Raises UserError with the rest of a message that begins with the setting.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Raises UserError if the value cannot work, with the rest of such a message."""

    def __repr__(self) -> str:
        return repr(str(self))

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: object, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._check, serialization=core_schema.to_string_ser_schema()
        )

    @classmethod
    def _check(cls, value: object) -> Self:
        if isinstance(value, str):
            value = cls.from_text(one_line(value))
        if not isinstance(value, cls):
            raise UserError("must be text")
        value.check()
        return value


Line = Annotated[str, AfterValidator(one_line)]
Text = Annotated[str, AfterValidator(unicode_text)]
NonEmptyText = Annotated[str, AfterValidator(unicode_text), AfterValidator(non_empty)]
NameAndValue = Annotated[str, AfterValidator(name_and_value)]
Integer = Annotated[int, Field(ge=-LARGEST_INT, le=LARGEST_INT)]
Number = Annotated[
    float,
    Field(ge=-LARGEST_FLOAT, le=LARGEST_FLOAT, allow_inf_nan=False),
    AfterValidator(normal_number),
]


# -- Parts -----------------------------------------------------------------------------------------


class Parts(NamedTuple):
    """The classes of the parts that a setting may have, None for no part."""

    classes: list[type | None]

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def check(self, value: object) -> object:
        """Returns a part, also from its JSON values. Raises UserError for any other value."""
        if class_of_part(value) in self.classes:
            return value
        if isinstance(value, Mapping):
            return part_from_json(value, self.classes)
        raise UserError(self.advice(value))

    def advice(self, value: object) -> str:
        """Returns what is wrong with a value that is not one of the parts, and what to write."""
        # A recipe may have written the part as a flag does, or forgotten the brackets.
        text = value if isinstance(value, str) else ""
        chosen, bracket, end = text.partition("(")
        named = [part for part in self.classes if part is value or part_name(part) == chosen]
        if named:
            arguments = f"({end}" if bracket else "()"
            kind = "text" if text else "a class"
            return (
                f"is {kind}, and a recipe needs the part: write {how_to_write(named[0], arguments)}"
            )
        choices = " or ".join(map(how_to_write, self.classes))
        return f"is not one of the parts of this setting: write {choices}"


def build(cls: type[Class], values: Mapping[str, object]) -> Class:
    """Returns a section, part or record with these values. Raises UserError for a wrong value."""
    return cls(**values)


def part_from_json(value: Mapping[str, object], classes: Iterable[type | None]) -> object:
    """Returns the part from its JSON values. Raises UserError with the rest of a message."""
    by_name = {part_name(part): part for part in classes}
    chosen = by_name.get(str(value.get(KIND)))
    if chosen is None:
        raise UserError(f'is not a part: write {{"kind": NAME}} with one of {", ".join(by_name)}')
    try:
        return build(chosen, value)
    except UserError as error:
        raise UserError(f": {error}") from None


def how_to_write(part: type | None, arguments: str = "()") -> str:
    """Returns how Python code writes a part, and where it imports the class from."""
    if part is None:
        return "None"
    package, _, module = part.__module__.rpartition(".")
    # A recipe imports a class from its package, if the package has it.
    if not package or getattr(sys.modules[package], part.__name__, None) is part:
        return f"{part.__name__}{arguments} (from {package or module} import {part.__name__})"
    return f"{module}.{part.__name__}{arguments} (from {package} import {module})"


_FROZEN = "_is_frozen"  # the attribute of a section that cannot be changed


def is_frozen(section: object) -> bool:
    """Returns whether a section is one of those that `frozen` returns."""
    return _FROZEN in vars(section)


def frozen(section: Class) -> Class:
    """Returns a copy of a section whose settings, and those of its sections, cannot be changed.

    An assignment raises UserError.
    """
    return _copy(section, is_frozen=True)


def editable(section: Class) -> Class:
    """Returns a copy of a section, frozen or not, whose settings can be changed."""
    return _copy(section, is_frozen=False)


def _copy(section: Class, *, is_frozen: bool) -> Class:
    copied = copy.deepcopy(section)
    for part in sections_in(copied):
        vars(part).pop(_FROZEN, None)
        if is_frozen:
            vars(part)[_FROZEN] = True
    return copied


def sections_in(section: object) -> Iterator[object]:
    """Yields a section and the sections in it, without their parts."""
    yield section
    for name, field in fields_of(type(section)).items():
        if section_of(field) is not None:
            yield from sections_in(getattr(section, name))


def values_of(section: object) -> dict[str, object]:
    """Returns the settings of a section or part by name, as JSON values."""
    return TypeAdapter(type(section)).dump_python(section, mode="json")


def add_part(section: type, field: str, part: type) -> None:
    """Adds a class to the parts that a field of a section may have, such as a user-defined one."""
    parts_of(fields_of(section)[field]).append(part)


def is_part(value: object) -> bool:
    """Returns whether a value is a part, or a class is a class of parts. None is not a part."""
    return KIND in getattr(value, "__pydantic_fields__", ())


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
    arguments = []
    for key, field in fields_of(type(value)).items():
        argument = getattr(value, key)
        # In quotes, because the part of an argument may have brackets.
        text = show_part(argument) if parts_of(field) else argument
        arguments.append(f"{key}={text!r}")
    return f"{name}({','.join(arguments)})" if arguments else name


# -- Fields ----------------------------------------------------------------------------------------


@functools.cache
def fields_of(cls: type) -> dict[str, FieldInfo]:
    """Returns the fields of a section, part or record by name, without the name of a part."""
    known = typing.cast("dict[str, FieldInfo] | None", getattr(cls, "__pydantic_fields__", None))
    if known is None:
        raise UserError(
            f"{cls.__name__} has no settings: write it with @record, @part or @section "
            "(from jzero.fields import record)"
        )
    return {name: field for name, field in known.items() if name != KIND}


def parts_of(field: FieldInfo) -> list[type | None]:
    """Returns the classes of the parts that a field may have; [] for any other field."""
    return next((rule.classes for rule in field.metadata if isinstance(rule, Parts)), [])


def section_of(field: FieldInfo) -> type | None:
    """Returns the class of the section that a field holds, None for any other field."""
    kind = field.annotation
    if not isinstance(kind, type) or parts_of(field):
        return None
    return kind if hasattr(kind, "__pydantic_fields__") else None


def kind_of(field: FieldInfo) -> type:
    """Returns bool, int, float, str or tuple; object for a part or a section.

    A `Written` value is a text.
    """
    kind = field.annotation
    if typing.get_origin(kind) is Literal or is_written(field):
        return str
    kind = typing.get_origin(kind) or kind
    return kind if isinstance(kind, type) and kind in (bool, int, float, str, tuple) else object


def is_written(field: FieldInfo) -> bool:
    """Returns whether the values of a field are `Written`."""
    return isinstance(field.annotation, type) and issubclass(field.annotation, Written)


def item_kind_of(field: FieldInfo) -> type | None:
    """Returns the type of a tuple's items: str, int or float; None for any other field."""
    if typing.get_origin(field.annotation) is not tuple:
        return None
    item, *_ = typing.get_args(field.annotation)
    return typing.get_args(item)[0] if typing.get_origin(item) is Annotated else item


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    """Returns the texts that a field may have; () for any other field."""
    is_literal = typing.get_origin(field.annotation) is Literal
    return typing.get_args(field.annotation) if is_literal else ()


def bounds_of(field: FieldInfo) -> list[str]:
    """Returns the bounds of a number as in "at least 1"; those of all settings are left out."""
    words = {
        bounds.Gt: ("above {:.10g}", "gt"),
        bounds.Ge: ("at least {:.10g}", "ge"),
        bounds.Lt: ("below {:.10g}", "lt"),
        bounds.Le: ("at most {:,.10g}", "le"),
    }
    texts = []
    for kind, (text, name) in words.items():
        values = [getattr(rule, name) for rule in field.metadata if isinstance(rule, kind)]
        texts += [
            text.format(value) for value in values if abs(value) not in (LARGEST_INT, LARGEST_FLOAT)
        ]
    return texts


def help_of(field: FieldInfo) -> str:
    """Returns the description of a field in one line."""
    return " ".join((field.description or "").split())


# -- Messages --------------------------------------------------------------------------------------

WRONG_TYPE = {
    "bool": "must be True or False",
    "int": "must be a whole number",
    "float": "must be a number",
    "string": "must be text",
    "tuple": "must be a list",
}
# By the type of pydantic's error. The braces are values of its context.
MISTAKES = {
    "finite_number": "must be a finite number",
    "greater_than_equal": "must be at least {ge:.10g}",
    "greater_than": "must be above {gt:.10g}",
    "less_than_equal": "must be at most {le:.10g}",
    "less_than": "must be below {lt:.10g}",
    "dataclass_type": "must be a {class_name}",
    "dataclass_exact_type": "must be a {class_name}",
    "missing": "is missing",
}
_LITERAL = re.compile(r"[-+.]?\d[-+.\deE_]*|True|False|[(\[].*[)\]]", re.DOTALL)
# The dotted names of sections. `jzero.config.schema` fills in those of `Config`.
SECTION_NAMES: dict[type, str] = {}


def setting_name(cls: type, name: str) -> str:
    """Returns the dotted name of a field, as far as the place of its class is known."""
    place = part_name(cls) if is_part(cls) else SECTION_NAMES.get(cls, "")
    return f"{place}.{name}" if place else name


def user_error(error: ValidationError, cls: type) -> UserError:
    """Returns pydantic's error on a value of a class as one line that names every mistake."""
    return UserError("; ".join(mistake(found, cls) for found in error.errors(include_url=False)))


def mistake(error: ErrorDetails, cls: type) -> str:
    """Returns the message on one mistake: the setting with its value, and what is wrong."""
    place = list(error["loc"])
    if place and isinstance(place[0], int):  # the argument of a constructor
        place[0] = [*fields_of(cls), str(place[0])][min(int(place[0]), len(fields_of(cls)))]
    owner, names = cls, list(fields_of(cls))
    for name in place[:-1]:
        inner = section_of(fields_of(owner)[str(name)]) if str(name) in fields_of(owner) else None
        owner, names = inner or owner, list(fields_of(inner)) if inner else names
    is_item = len(place) > 1 and isinstance(place[-1], int)
    name = ".".join(shown(str(item)) for item in (place[:-1] if is_item else place))
    name, value = setting_name(cls, name), error["input"]
    kind, context = error["type"], error.get("ctx", {})
    if kind in ("unexpected_keyword_argument", "no_such_attribute"):
        return f"{name}={shown(value)}: {unknown(str(place[-1]), names)}"
    if kind == "unexpected_positional_argument":
        return f"{name}={shown(value)}: {cls.__name__} has only {', '.join(names) or 'no fields'}"
    if kind == "value_error":
        text = str(context["error"])
        return f"{name}={quoted(value)}{'' if text.startswith(':') else ' '}{text}"
    if kind == "literal_error":
        text = f"is not one of {', '.join(choices(cls, place)) or context['expected']}"
    elif kind in MISTAKES:
        text = MISTAKES[kind].format(**context)
    else:
        text = WRONG_TYPE.get(kind.partition("_")[0], error["msg"])
        if isinstance(value, str) and _LITERAL.fullmatch(value):
            text += ", not text"
            value = _AsWritten(value)
    if is_item:
        return f"{name} has the item {quoted(value)}, which {text}"
    return f"{name}={quoted(value)} {text}"


class _AsWritten(str):
    """A text that a message shows in quotes, because it looks like a value of the right type."""


def choices(cls: type, place: list[int | str]) -> list[str]:
    """Returns the texts that the field at this place may have, '' for an empty text."""
    field: FieldInfo | None = None
    for name in place:
        field = fields_of(cls).get(str(name))
        cls = (section_of(field) if field else None) or cls
    return [choice or "''" for choice in choices_of(field)] if field else []


def quoted(value: object) -> str:
    """Returns a value for a message: a text as it is, anything else as its `repr`."""
    is_text = isinstance(value, str) and not isinstance(value, _AsWritten)
    return shown(value) if is_text else f"{value!r:.80}"


def unknown(name: str, names: Iterable[str]) -> str:
    """Returns the message on a name that does not exist, with those that are close to it."""
    names = list(names)
    close = difflib.get_close_matches(name, names, n=3)
    if close:
        return f"there is no {shown(name)}; did you mean {' or '.join(close)}?"
    return f"there is no {shown(name)}; there are {', '.join(names) or 'none'}"
