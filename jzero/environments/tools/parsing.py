"""Parses the tool calls in a response, strictly.

Qwen's models have two syntaxes. Qwen2.5 and Qwen3 write JSON:

    <tool_call>
    {"name": "calculator", "arguments": {"expression": "6*7"}}
    </tool_call>

Qwen3-Coder and Qwen3.5 write tags, with text parameters verbatim and all others as JSON:

    <tool_call>
    <function=calculator>
    <parameter=expression>
    6*7
    </parameter>
    </function>
    </tool_call>

A response may contain several calls, with any text around them. Calls in thoughts, the text before
</think>, are ignored. Malformed calls become a `BadCall` with an error message for the policy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import NamedTuple

from jzero.environments.tools.schemas import Schema, mismatch
from jzero.json_values import as_list, as_object
from jzero.types import JsonValue

JSON = "json"
XML = "xml"
SYNTAXES = (JSON, XML)

BEGIN = "<tool_call>"
END = "</tool_call>"
_BEGIN_FUNCTION = "<function="
_FUNCTION = re.compile(r"<function=([^<>\s]*)>(.*)</function>", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\s]*)>(.*?)</parameter>", re.DOTALL)
# Python literals: Qwen3-Coder's template writes these instead of JSON's true, false and null.
_PYTHON_WORDS = {"True": True, "False": False, "None": None}

_FORMS = {
    JSON: f'{BEGIN}\n{{"name": NAME, "arguments": {{...}}}}\n{END}',
    XML: (f"{BEGIN}\n<function=NAME>\n<parameter=NAME>\nVALUE\n</parameter>\n</function>\n{END}"),
}


class Call(NamedTuple):
    """A call of an existing tool, with valid arguments."""

    name: str
    arguments: dict[str, JsonValue]


class BadCall(NamedTuple):
    """A call that cannot be executed."""

    reason: str  # the error message for the policy
    name: str = ""  # the tool, if the call names an existing tool


class _CallError(Exception):
    """A call is malformed; carries the `BadCall`."""

    def __init__(self, reason: str, name: str = "") -> None:
        super().__init__(reason)
        self.bad_call = BadCall(reason, name)


def syntax_of(chat_template: object) -> str:
    """Returns the call syntax that a chat template describes to the model."""
    return XML if _BEGIN_FUNCTION in str(chat_template) else JSON


def parse_calls(
    response: str,
    syntax: str,
    parameters: Mapping[str, Schema],
) -> list[Call | BadCall]:
    """Returns the calls in a response, in order; an empty list if the response is an answer.

    Args:
        response: the text of a turn.
        syntax: JSON or XML.
        parameters: the schema of the parameters of each tool, by its name.
    """
    # From the last </think>: a response may think several times.
    _, _, text = response.rpartition("</think>")
    if "<think>" in text:  # the thoughts do not end
        return []
    calls: list[Call | BadCall] = []
    # Text between two calls may contain stray tags, which are reported in order.
    while BEGIN in text:
        before, _, rest = text.partition(BEGIN)
        calls += _stray_tags(before, syntax)
        body, end, text = rest.partition(END)
        calls.append(_parse_call(body, bool(end), syntax, parameters))
    return calls + _stray_tags(text, syntax)


def _stray_tags(text: str, syntax: str) -> list[Call | BadCall]:
    """Returns a bad call if a text outside of calls contains a call's tags."""
    if END in text:
        return [BadCall(f"{END} without {BEGIN}")]
    if syntax == XML and _BEGIN_FUNCTION in text:
        return [BadCall(f"{_BEGIN_FUNCTION}...> without {BEGIN}")]
    return []


def _parse_call(
    body: str,
    has_end: bool,
    syntax: str,
    parameters: Mapping[str, Schema],
) -> Call | BadCall:
    try:
        if not has_end:
            raise _CallError(f"{BEGIN} without {END}")
        if syntax == XML:
            return _parse_xml(body, parameters)
        return _parse_json(body, parameters)
    except _CallError as error:
        return error.bad_call


def _known_parameters(name: str, parameters: Mapping[str, Schema]) -> Schema:
    """Returns the schema of a tool's parameters; raises _CallError for an unknown tool."""
    if name not in parameters:
        known = ", ".join(parameters) or "none"
        raise _CallError(f"there is no tool {name[:60]!r}: the tools are {known}")
    return parameters[name]


def _check_arguments(name: str, arguments: dict[str, JsonValue], schema: Schema) -> Call:
    properties = as_object(schema["properties"])
    takes = f"{name} takes {', '.join(properties) or 'no arguments'}"
    for argument in as_list(schema.get("required", [])):
        if argument not in arguments:
            raise _CallError(f"the argument {argument} is missing: {takes}", name)
    for argument, value in arguments.items():
        if argument not in properties:
            raise _CallError(f"there is no argument {argument[:60]!r}: {takes}", name)
        if reason := mismatch(value, as_object(properties[argument])):
            raise _CallError(f"the argument {argument} is wrong: {reason}", name)
    return Call(name, arguments)


# JSON.


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _unique_keys(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    # Python's parser would silently keep the last of two equal keys.
    keys = [key for key, _ in pairs]
    twice = [key for key in keys if keys.count(key) > 1]
    if twice:
        raise ValueError(f"{twice[0][:60]!r} is there twice")
    return dict(pairs)


def _load_json(text: str) -> JsonValue:
    """Parses strict JSON: ValueError for NaN, infinities, duplicate keys and too deep nesting."""
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _parse_json(body: str, parameters: Mapping[str, Schema]) -> Call:
    form = f"write {_FORMS[JSON]}"
    try:
        call = _load_json(body)
    except ValueError as error:
        raise _CallError(f"the call is not JSON ({error}): {form}") from None
    if not isinstance(call, dict):
        raise _CallError(f"the call is not a JSON object: {form}")
    for key in ("name", "arguments"):
        if key not in call:
            raise _CallError(f'the call has no "{key}": {form}')
    for key in call:
        if key not in ("name", "arguments"):
            raise _CallError(f"the call has the key {json.dumps(key)[:60]}: {form}")
    name, arguments = call["name"], call["arguments"]
    if not isinstance(name, str):
        raise _CallError(f'"name" is {json.dumps(name)[:60]}: it has to be the name of a tool')
    schema = _known_parameters(name, parameters)
    if not isinstance(arguments, dict):
        raise _CallError(f'"arguments" is not a JSON object: {form}', name)
    return _check_arguments(name, arguments, schema)


# Tags.


def _parse_xml(body: str, parameters: Mapping[str, Schema]) -> Call:
    form = f"write {_FORMS[XML]}"
    found = _FUNCTION.fullmatch(body.strip())
    if found is None:
        raise _CallError(f"the call is not one <function=NAME>...</function>: {form}")
    name, content = found[1], found[2]
    schema = _known_parameters(name, parameters)
    properties = as_object(schema["properties"])
    arguments: dict[str, JsonValue] = {}
    # Parameters must follow each other with only white space between them.
    position = 0
    while parameter := _PARAMETER.match(content, position):
        key, text = parameter[1], parameter[2]
        if key in arguments:
            raise _CallError(f"the argument {key[:60]!r} is there twice", name)
        arguments[key] = _read_value(key, text, as_object(properties.get(key, {})), name)
        position = parameter.end()
    if content[position:].strip():
        raise _CallError(f"{content[position:].strip()[:60]!r} is not a parameter: {form}", name)
    return _check_arguments(name, arguments, schema)


def _read_value(key: str, text: str, schema: Schema, name: str) -> JsonValue:
    """Returns the value of a parameter: the text for strings, else the text parsed as JSON."""
    # One newline after the opening tag and one before the closing tag belong to the tags.
    text = text.removeprefix("\n").removesuffix("\n")
    if schema.get("type") == "string" and not schema.get("nullable"):
        return text
    try:
        return _PYTHON_WORDS[text] if text in _PYTHON_WORDS else _load_json(text)
    except ValueError as error:
        if not mismatch(text, schema):  # a union that includes strings
            return text
        raise _CallError(f"the argument {key} is not JSON ({error})", name) from None
