"""Tools of a chat: what the template shows, and the calls that are read in the answers."""

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import openai
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from servers import byte_tokenizer, free_port, server_process, wait_until_healthy
from transformers import AddedToken

from jzero.decoder.sequence import Sequence
from jzero.errors import UserError
from jzero.model import huggingface, qwen, tokenizer
from jzero.serving import choices
from jzero.serving.limits import Limits
from jzero.serving.requests import CompletionRequest, RequestReader
from jzero.serving.tools import CallReader
from jzero.serving.worker import Progress

TEMPLATE = """{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% if tools %}Write <tool_call>{"name": NAME, "arguments": {...}}</tool_call>
{% endif %}{% for message in messages %}<{{ message.role }}>{{ message.content }}\
{% for call in message.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments | \
tojson }}){% endfor %}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
ASKED = [{"role": "user", "content": "2 + 3?"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


@pytest.fixture
def reader(alone) -> Iterator[RequestReader]:
    """Returns the reader of requests, for a model with a template that shows tools."""
    found = alone.new_reader(Limits())
    template = found.tokenizer.chat_template
    found.tokenizer.chat_template = TEMPLATE
    yield found
    found.tokenizer.chat_template = template


def read(reader: RequestReader, is_chat: bool = True, **fields: object) -> CompletionRequest:
    return reader.read(json.dumps({"model": "m", **fields}).encode(), is_chat)


def test_the_template_shows_tools_earlier_calls_and_their_answers(reader: RequestReader) -> None:
    said = {"role": "assistant", "content": None, "refusal": None, "tool_calls": []}
    said["tool_calls"] = [
        {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    ]
    answered = {"role": "tool", "tool_call_id": "x", "content": "5"}
    reader.longest_token = 1000  # the limit of characters is not tested here

    text = reader.render(read(reader, messages=[*ASKED, said, answered], tools=[ADD])).text

    assert '"name": "add"' in text
    assert "Adds two numbers." in text
    assert '<assistant>add({"a": 2})' in text  # an object, and not a string with an object
    assert text.endswith("<tool>5<assistant>")
    hidden = read(reader, messages=ASKED, tools=[ADD], tool_choice="none")
    assert "Adds" not in reader.render(hidden).text
    assert reader.reply_options(hidden, is_chat=True).calls is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tool_choice": "required"}, "tool_choice='?required'?: this server cannot force a call"),
        ({"tool_choice": {"type": "function"}}, "this server cannot force a call"),
        ({"parallel_tool_calls": False}, "the model decides how many calls an answer has"),
        ({"tools": [{"type": "web_search"}]}, "Input should be 'function'"),
        ({"tools": [ADD] * 129}, "at most 128 items"),
        ({"tools": [], "tool_choice": "required"}, "the request has no tools"),
    ],
)
def test_what_cannot_be_had_is_refused(reader: RequestReader, fields: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read(reader, **{"messages": ASKED, "tools": [ADD], **fields})


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user", "content": ""}, "the content is missing or empty"),
        ({"role": "user", "content": "a", "tool_call_id": "x"}, "of messages with the role tool"),
        ({"role": "user", "content": "a", "refusal": "b"}, "only the assistant has refusal"),
        (
            {"role": "user", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            "only the assistant has tool_calls",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]},
            "the arguments of f are not a JSON object",
        ),
    ],
)
def test_messages_that_are_none_are_refused(
    reader: RequestReader, message: dict, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        reader.render(read(reader, messages=[message]))


def test_tools_need_a_chat_and_a_template_that_shows_them(reader: RequestReader) -> None:
    with pytest.raises(UserError, match="tools: they are an option of chats"):
        read(reader, is_chat=False, prompt="a", tools=[ADD])
    request = read(reader, messages=ASKED, tools=[ADD])
    reader.longest_token = 1000
    reader.tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(UserError, match="the chat template of this model shows no tools"):
        reader.render(request)
    reader.tokenizer.chat_template = "{{ tools | tojson }}[TOOL_CALLS]{{ messages[0].content }}"
    with pytest.raises(UserError, match="asks for calls without <tool_call>"):
        reader.render(request)


# Text of an answer -> its content, and the arguments of its calls.
ANSWERS = {
    "no call": ("2 + 3 = 5", "2 + 3 = 5", []),
    "a call": (CALL, None, [{"a": 2, "b": 3}]),
    "words and two calls": (f"I add.\n\n{CALL}\n{CALL}", "I add.", [{"a": 2, "b": 3}] * 2),
    "after thoughts": (f"a <tool_call> b</think>So: {CALL}", None, [{"a": 2, "b": 3}]),
    "arguments that do not match": (CALL.replace("2", '"two"'), ..., []),
    "an unknown tool": (CALL.replace("add", "sub"), ..., []),
    "a call without an end": (CALL[:-4], ..., []),
    "a tag at the end": ("less <tool_", "less <tool_", []),
}


def written(text: str, cuts: list[int], finish_reason: str, is_streamed: bool) -> list[dict]:
    """Returns the chunks of an answer that is reported after `cuts` of its bytes."""
    options = CompletionRequest(model="m", messages=[], stream=is_streamed).reply_options(True)
    calls = CallReader("json", {"add": ADD["function"]["parameters"]})
    sequence = Sequence(0, 0, 0, np.zeros(1, np.int32), 999)
    ids = tokenizer.encode(byte_tokenizer(), text)
    sequence.tokens.append(ids)
    sequence.turn_text = text
    writer = choices.ChoiceWriter(replace(options, calls=calls), sequence, byte_tokenizer(), ())
    reports = [Progress(0, cut, "") for cut in cuts if cut < len(ids)]
    chunks = [writer.write(report) for report in reports]
    chunks.append(writer.write(Progress(0, len(ids), finish_reason)))
    return [chunk for chunk in chunks if chunk]


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_has_the_calls_that_are_valid(name: str) -> None:
    text, content, arguments = ANSWERS[name]
    [choice] = written(text, [], "stop", is_streamed=False)
    message = choice["message"]
    if name != "after thoughts":
        assert message["content"] == (text if content is ... else content)
    calls = message.get("tool_calls", [])
    assert [json.loads(call["function"]["arguments"]) for call in calls] == arguments
    assert choice["finish_reason"] == ("tool_calls" if arguments else "stop")
    assert len({call["id"] for call in calls}) == len(calls)


@given(st.sampled_from(sorted(ANSWERS)), st.sets(st.integers(0, 150)))
def test_a_stream_never_sends_a_part_of_a_call_as_text(name: str, cuts: set[int]) -> None:
    text, _, arguments = ANSWERS[name]
    [whole] = written(text, [], "stop", is_streamed=False)
    chunks = written(text, sorted(cuts), "stop", is_streamed=True)
    sent = "".join(chunk["delta"]["content"] or "" for chunk in chunks)
    assert sent == (whole["message"]["content"] or "")
    assert not any("tool_calls" in chunk["delta"] for chunk in chunks[:-1])
    calls = chunks[-1]["delta"].get("tool_calls", [])
    assert [call["index"] for call in calls] == list(range(len(arguments)))
    assert chunks[-1]["finish_reason"] == whole["finish_reason"]


def test_an_answer_that_is_cut_off_keeps_its_reason() -> None:
    [choice] = written(CALL, [], "length", is_streamed=False)
    assert choice["finish_reason"] == "length"


# -- a model that calls a tool ---------------------------------------------------------------------


def save_calling_model(path: Path) -> str:
    """Writes a model whose greedy answer is CALL. Returns its directory.

    Its layers add nothing, and its head chooses the token that follows the last one.
    """
    tok = copy.deepcopy(byte_tokenizer())
    half = len(CALL) // 2
    parts = [CALL[:half], CALL[half:]]
    tok.add_tokens([AddedToken(part, special=False, normalized=False) for part in parts])
    tok.chat_template = TEMPLATE
    arch = qwen.QwenConfig("qwen2", len(tok), 32, 64, 2, 2, 1, 16, False, 10000.0, 1e-6)
    params = dict(reference.random_params(arch))
    layers = dict(params["layers"])
    for name in ("o", "down"):
        layers[name] = jnp.zeros_like(layers[name])
    rows = np.zeros(np.shape(params["lm_head"]), np.float32)
    embed = np.asarray(params["embed"])
    chain = [tok.encode(">")[-1], *tok.convert_tokens_to_ids(parts), tok.eos_token_id]
    for token, following in itertools.pairwise(chain):
        rows[:, following] = 50 * embed[token] / np.linalg.norm(embed[token])
    changed = {
        "layers": layers,
        "lm_head": jnp.asarray(rows),
        "norm": jnp.ones_like(params["norm"]),
    }
    huggingface.save(path, arch, params | changed, dtype="float32", hf_config_extra={})
    tok.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def ask(tmp_path_factory, environment: dict[str, str]) -> Iterator[Callable]:
    """Returns a function that asks a server of the model with OpenAI's client."""
    model, port = save_calling_model(tmp_path_factory.mktemp("calling")), free_port()
    flags = ("--port", str(port), "--config.rollout.max_prompt_tokens=1024")
    with server_process(model, environment, *flags) as server:
        wait_until_healthy(server, f"http://127.0.0.1:{port}")
        url = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:

            def chat(**options: object) -> object:
                fields = {"model": model, "messages": ASKED, "temperature": 0} | options
                return client.chat.completions.create(**fields)

            yield chat


def test_openai_s_client_gets_the_calls_and_sends_their_answers(ask: Callable) -> None:
    answer = ask(tools=[ADD]).choices[0]

    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    [call] = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 2, "b": 3}')
    # The client sends the message as it came, with the answer of the tool.
    answered = {"role": "tool", "tool_call_id": call.id, "content": "5"}
    again = ask(messages=[*ASKED, answer.message, answered], tools=[ADD])
    assert again.choices[0].finish_reason == "tool_calls"
    # Without tools, the same answer is text.
    assert ask().choices[0].message.content == CALL


def test_openai_s_client_streams_the_calls(ask: Callable) -> None:
    deltas = [chunk.choices[0] for chunk in ask(tools=[ADD], stream=True)]

    assert not any(choice.delta.content for choice in deltas)
    [call] = deltas[-1].delta.tool_calls
    assert (call.index, call.function.name) == (0, "add")
    assert deltas[-1].finish_reason == "tool_calls"
