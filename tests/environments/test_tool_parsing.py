"""Calls in both syntaxes of Qwen's models: what is one, and what is wrong with what is none."""

import json

import pytest

from jzero.environments.tools.parsing import JSON, XML, BadCall, Call, parse_calls, syntax_of

PARAMETERS = {
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
    "write": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "options": {"type": "object"},
            "loud": {"type": "boolean"},
            "either": {"type": ["integer", "string"]},
        },
        "required": ["text"],
    },
    "stop": {"type": "object", "properties": {}},
}


def in_json(name: object, arguments: object) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def in_xml(name: str, arguments: dict[str, str]) -> str:
    parts = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(parts)}</function>\n</tool_call>"


def one(response: str, syntax: str = JSON) -> Call | BadCall:
    [call] = parse_calls(response, syntax, PARAMETERS)
    return call


def test_both_syntaxes_say_the_same() -> None:
    arguments = {"text": 'a "b"\n<c> </c>\n', "options": {"x": [1, None]}, "loud": True}
    written = {key: v if isinstance(v, str) else json.dumps(v) for key, v in arguments.items()}
    call = Call("write", arguments)
    assert one(in_json("write", arguments)) == call
    assert one(in_xml("write", written), XML) == call
    assert one(in_xml("stop", {}), XML) == one(in_json("stop", {})) == Call("stop", {})


def test_values_in_tags_have_the_types_of_the_schema() -> None:
    def value_of(key: str, text: str) -> object:
        call = one(in_xml("write", {"text": "", key: text}), XML)
        assert isinstance(call, Call), call
        return call.arguments[key]

    assert value_of("loud", "True") is True and value_of("loud", "false") is False
    assert value_of("text", "12") == "12" and value_of("text", "\n x\n") == "\n x\n"
    assert value_of("either", "12") == 12 and value_of("either", "twelve") == "twelve"
    assert one("<tool_call><function=add><parameter=a>1</parameter><parameter=b>2</parameter>"
               "</function></tool_call>", XML) == Call("add", {"a": 1, "b": 2})  # fmt: skip


@pytest.mark.parametrize("syntax", [JSON, XML])
def test_several_calls_come_in_their_order_between_text(syntax: str) -> None:
    write = in_json if syntax == JSON else in_xml
    calls = [write("add", {"a": i, "b": 2}) for i in range(3)]
    response = f"First.\n{calls[0]}\n{calls[1]} and {calls[2]}\nDone."
    assert parse_calls(response, syntax, PARAMETERS) == [
        Call("add", {"a": i, "b": 2}) for i in range(3)
    ]
    mixed = f"{calls[0]}\n<tool_call>\noops\n</tool_call>\n{calls[2]}"
    kinds = [type(call) for call in parse_calls(mixed, syntax, PARAMETERS)]
    assert kinds == [Call, BadCall, Call]


@pytest.mark.parametrize(
    "response",
    [
        "",
        "42",
        'I could write {"name": "add"}.',
        f"<think>\n{in_json('add', {'a': 1, 'b': 2})}\n</think>\n\n3",
        f"<think>\nmaybe {in_json('add', {'a': 1, 'b': 2})}",
        f"thoughts that the prompt began {in_json('add', {'a': 1, 'b': 2})}</think>3",
    ],
)
def test_answers_and_thoughts_hold_no_calls(response: str) -> None:
    assert parse_calls(response, JSON, PARAMETERS) == []
    assert parse_calls(response, XML, PARAMETERS) == []


def test_a_call_after_thoughts_is_one() -> None:
    response = f"<think>\nadd\n</think>\n\n{in_json('add', {'a': 1, 'b': 2})}"
    assert one(response) == Call("add", {"a": 1, "b": 2})


BAD_JSON = {
    '{"name": "add", "arguments": {"a": 1, "b": 2}': "not JSON (Expecting",
    "add(1, 2)": "not JSON",
    "[1]": "not a JSON object",
    '{"arguments": {}}': 'no "name"',
    '{"name": "add"}': 'no "arguments"',
    '{"name": "add", "arguments": {}, "id": 1}': 'the key "id"',
    '{"name": 3, "arguments": {}}': "has to be the name of a tool",
    '{"name": "sub", "arguments": {}}': "no tool 'sub': the tools are add, write, stop",
    '{"name": "add", "arguments": "{}"}': '"arguments" is not a JSON object',
    '{"name": "add", "arguments": {"a": 1}}': "argument b is missing: add takes a, b",
    '{"name": "add", "arguments": {"a": 1, "b": 2, "c": 3}}': "no argument 'c'",
    '{"name": "add", "arguments": {"a": 1, "b": "2"}}': 'b is wrong: "2" is not of type integer',
    '{"name": "add", "arguments": {"a": 1, "a": 2, "b": 2}}': "'a' is there twice",
    '{"name": "add", "arguments": {"a": NaN, "b": 2}}': "NaN is not JSON",
    '{"name": "stop", "arguments": {"a": 1}}': "stop takes no arguments",
    "[" * 100_000: "not JSON",
    "{'name': 'add', 'arguments': {}}": "not JSON",
    "<function=add></function>": "not JSON",
    '{"name": "add", "arguments": {"a": ' + "9" * 5000 + ', "b": 1}}': "not JSON",
}


@pytest.mark.parametrize("body, reason", BAD_JSON.items(), ids=range(len(BAD_JSON)))
def test_a_bad_call_in_json_says_why(body: str, reason: str) -> None:
    call = one(f"<tool_call>\n{body}\n</tool_call>")
    assert isinstance(call, BadCall) and reason in call.reason
    assert len(call.reason) < 400


BAD_XML = {
    '{"name": "add", "arguments": {"a": 1, "b": 2}}': "is not one <function=NAME>",
    "<function=add>\n<parameter=a>\n1\n</parameter>\n": "is not one <function=NAME>",
    "<function=sub>\n</function>": "no tool 'sub'",
    "<function=add>\n<parameter=a>\n1\n</function>": "is not a parameter",
    "<function=add>\n1, 2\n</function>": "'1, 2' is not a parameter",
    "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>": "b is missing",
    "<function=add><parameter=a>x</parameter></function>": "a is not JSON",
    "<function=add><parameter=a>1.5</parameter><parameter=b>2</parameter></function>": "a is wrong",
    "<function=stop><parameter=a>1</parameter></function>": "stop takes no arguments",
    "<function=add><parameter=a>1</parameter><parameter=a>1</parameter></function>": "twice",
}


@pytest.mark.parametrize("body, reason", BAD_XML.items(), ids=range(len(BAD_XML)))
def test_a_bad_call_in_tags_says_why(body: str, reason: str) -> None:
    call = one(f"<tool_call>\n{body}\n</tool_call>", XML)
    assert isinstance(call, BadCall) and reason in call.reason
    assert len(call.reason) < 400


@pytest.mark.parametrize(
    "response, syntax",
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}', JSON),
        ('{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', JSON),
        ("<tool_call>", XML),
        ("<function=add>\n</function>\n</tool_call>", XML),
        ("<function=add>\n</function>", XML),
    ],
)
def test_a_call_without_its_tags_is_bad(response: str, syntax: str) -> None:
    call = one(response, syntax)
    assert isinstance(call, BadCall) and "without" in call.reason


def test_the_chat_template_says_which_syntax() -> None:
    assert syntax_of("... <function=example_function_name> ...") == XML
    assert syntax_of('{"name": <function-name>, "arguments": <args-json-object>}') == JSON
    assert syntax_of(None) == JSON
