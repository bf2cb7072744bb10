"""JSON schemas of Python functions, from their types and docstrings.

    def weather(city: str, days: int = 1) -> str:
        \"\"\"Forecasts the weather.

        Args:
            city: The name of the city.
            days: How many days.
        \"\"\"

The schema has the form that chat templates take as `tools=`. It equals the result of
`transformers.utils.get_json_schema`, which would take grader processes too long to import.
Parameters must have types that JSON can represent: numbers, text, booleans, lists, dicts, Literal,
Enum, and unions of them.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence

from jzero.errors import UserError
from jzero.json_values import as_list, as_object, as_text
from jzero.types import JsonValue

Schema = dict[str, JsonValue]

_TYPES: dict[object, Schema] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    typing.Any: {},
}
_SECTIONS = ("Args:", "Returns:", "Raises:")
_PARAMETER = re.compile(r"([ \t]*)(\w+):\s*(.*)")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def function_schema(function: Callable[..., object]) -> Schema:
    """Returns the schema of a function or method, as `{"type": "function", "function": {...}}`.

    Raises:
        UserError: the docstring or a type is missing, or JSON cannot represent a type.
    """
    name = getattr(function, "__name__", type(function).__name__)
    sections = _read_docstring(inspect.getdoc(function) or "")
    if not sections.description:
        raise UserError(f"the tool {name} has no docstring: say in it what the tool does")
    hints = typing.get_type_hints(function)
    properties: dict[str, Schema] = {}
    required = []
    # Every parameter needs a type and a description, which the prompt shows.
    for position, parameter in enumerate(inspect.signature(function).parameters.values()):
        if position == 0 and parameter.name == "self" and parameter.name not in hints:
            continue  # an unbound method, taken from a class instead of an instance
        where = f"the tool {name}: the parameter {parameter.name}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise UserError(f"{where} collects arguments: give each a name of its own")
        if parameter.name not in hints:
            raise UserError(f"{where} has no type: write one, such as {parameter.name}: str")
        if parameter.name not in sections.parameters:
            raise UserError(f"{where} is not described: add it below Args: in the docstring")
        schema = _schema_of_type(hints[parameter.name], where)
        properties[parameter.name] = schema | _describe(sections.parameters[parameter.name], where)
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    # Optional entries are left out if they are empty, as transformers does.
    parameters: Schema = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    content = {"name": name, "description": sections.description, "parameters": parameters}
    if "return" in hints and (returned := _schema_of_result(hints["return"])) is not None:
        content["return"] = returned
        if sections.returns:
            returned["description"] = sections.returns
    return {"type": "function", "function": content}


def _schema_of_result(hint: object) -> Schema | None:
    """Returns the schema of a return type, None if JSON cannot represent the type."""
    try:
        return _schema_of_type(hint, "the result")
    except UserError:
        return None


def _schema_of_type(hint: object, where: str) -> Schema:
    origin = typing.get_origin(hint)
    arguments: Sequence[object] = typing.get_args(hint)
    if origin is None and isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _one_of([member.value for member in hint], where)
    if origin is None and hint in _TYPES:
        return dict(_TYPES[hint])
    if origin is typing.Literal:
        return _one_of(list(arguments), where)
    if origin in (typing.Union, types.UnionType):
        return _union(arguments, where)
    if origin is list:
        return {"type": "array", "items": _schema_of_type(arguments[0], where)}
    if origin is tuple and len(arguments) > 1 and ... not in arguments:
        items = [_schema_of_type(argument, where) for argument in arguments]
        return {"type": "array", "prefixItems": items}
    if origin is dict:
        values = _schema_of_type(list(arguments)[1], where)
        return {"type": "object", "additionalProperties": values}
    raise UserError(
        f"{where} has the type {hint}, which JSON cannot hold: choose from int, float, str, bool, "
        "list, dict, Literal, Enum and unions of them"
    )


def _one_of(values: list[JsonValue], where: str) -> Schema:
    if not values or any(type(value) not in _TYPES for value in values):
        raise UserError(f"{where} has the values {values}: they have to be numbers, text or None")
    names = list(dict.fromkeys(_TYPES[type(value)]["type"] for value in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": values}


def _union(members: Sequence[object], where: str) -> Schema:
    # None becomes the entry "nullable", and simple types become one list of type names.
    choices = [_schema_of_type(hint, where) for hint in members if hint is not type(None)]
    schema: Schema
    are_plain = all(list(choice) == ["type"] for choice in choices)
    if len(choices) == 1:
        schema = choices[0]
    elif are_plain and all(isinstance(choice["type"], str) for choice in choices):
        # Sorted, as get_json_schema sorts them: the prompt must have the same tokens.
        names = sorted({as_text(choice["type"]) for choice in choices})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": choices}
    return schema | {"nullable": True} if type(None) in members else schema


# Docstrings in Google's format.


class _Docstring(typing.NamedTuple):
    description: str
    parameters: dict[str, str]
    returns: str


def _read_docstring(text: str) -> _Docstring:
    """Splits a docstring into its description, parameters and return value."""
    parts: dict[str, list[str]] = {"": []}
    section = ""
    for line in text.strip().splitlines():
        if line.strip() in _SECTIONS:
            section = line.strip()
            parts[section] = []
        else:
            parts[section].append(line)
    returns = "\n".join(parts.get("Returns:", [])).strip()
    return _Docstring(
        "\n".join(parts[""]).strip(), _read_parameters(parts.get("Args:", [])), returns
    )


def _read_parameters(lines: list[str]) -> dict[str, str]:
    """Returns the text of each parameter; a line with deeper indentation continues the last one."""
    described: dict[str, list[str]] = {}
    indent: str | None = None
    for line in lines:
        found = _PARAMETER.fullmatch(line)
        if found and (indent is None or len(found[1]) <= len(indent)):
            indent = found[1]
            described[found[2]] = [found[3]]
        elif line.strip() and described:
            described[list(described)[-1]].append(line.strip())
    return {name: " ".join(parts).strip() for name, parts in described.items()}


def _describe(text: str, where: str) -> Schema:
    """Returns a parameter's description, and its choices if the text ends with (choices: [...])."""
    found = _CHOICES.search(text)
    if found is None:
        return {"description": text}
    try:
        choices = json.loads(found[1])
    except ValueError as error:
        raise UserError(f"{where}: the choices {found[1]} is not a JSON list ({error})") from None
    return {"enum": choices, "description": text[: found.start()].strip()}


# Values and their schemas.


def mismatch(value: JsonValue, schema: Mapping[str, JsonValue]) -> str:
    """Returns the reason why a value does not fit a schema, "" if it fits."""
    if value is None and schema.get("nullable"):
        return ""
    if "anyOf" in schema:
        choices = [as_object(choice) for choice in as_list(schema["anyOf"])]
        reasons = [mismatch(value, choice) for choice in choices]
        return "" if "" in reasons else " and ".join(reasons)
    wanted = schema.get("type", [])
    names = [wanted] if isinstance(wanted, str) else [as_text(name) for name in as_list(wanted)]
    if names and not any(_has_type(value, name) for name in names):
        return f"{_shown(value)} is not of type {' or '.join(names)}"
    if "enum" in schema and value not in as_list(schema["enum"]):
        return f"{_shown(value)} is not one of {json.dumps(schema['enum'])}"
    if isinstance(value, list):
        return _mismatch_of_items(value, schema)
    if isinstance(value, dict):
        return _mismatch_of_members(value, schema)
    return ""


def _mismatch_of_members(value: dict[str, JsonValue], schema: Mapping[str, JsonValue]) -> str:
    properties = as_object(schema.get("properties", {}))
    for name in as_list(schema.get("required", [])):
        if name not in value:
            return f"{_shown(value)} lacks {name}"
    # The schema of all other members; a boolean says whether there may be any.
    other = schema.get("additionalProperties", True)
    for name, item in value.items():
        if name not in properties and other is False:
            return f"{_shown(value)} may not have {name}"
        own = properties.get(name, {} if isinstance(other, bool) else other)
        if reason := mismatch(item, as_object(own)):
            return reason
    return ""


def _mismatch_of_items(value: list[JsonValue], schema: Mapping[str, JsonValue]) -> str:
    if "prefixItems" in schema:
        schemas = as_list(schema["prefixItems"])
        if len(value) != len(schemas):
            return f"{_shown(value)} has {len(value)} items and needs {len(schemas)}"
    else:
        schemas = [schema.get("items", {})] * len(value)
    reasons = [mismatch(item, as_object(own)) for item, own in zip(value, schemas, strict=True)]
    return next(filter(None, reasons), "")


def _has_type(value: JsonValue, name: str) -> bool:
    if isinstance(value, bool):  # bool is a subclass of int
        return name == "boolean"
    kinds: dict[str, tuple[type, ...]] = {
        "integer": (int,),
        "number": (int, float),
        "string": (str,),
        "boolean": (),
        "null": (type(None),),
        "array": (list,),
        "object": (dict,),
    }
    return isinstance(value, kinds[name])


def _shown(value: JsonValue) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
