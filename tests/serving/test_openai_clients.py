"""What OpenAI's client and clients of vLLM send: answered as they mean it, or refused by name."""

import re
from collections.abc import Iterator

import httpx
import openai
import pytest
import servers
import tiny
from servers import Alone

from jzero.errors import UserError
from jzero.model import tokenizer
from jzero.serving.limits import Limits
from jzero.serving.requests import CompletionRequest, RequestReader

HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def url(alone: Alone) -> Iterator[str]:
    with servers.decoding_server(alone, Limits()) as served:
        yield served.url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, messages: list = HELLO, **options: object):
    options = {"max_tokens": 2, "temperature": 0} | options
    return client.chat.completions.create(model="m", messages=messages, **options).choices[0]


NEUTRAL = {
    "add_generation_prompt": True,
    "continue_final_message": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "min_tokens": 0,
    "length_penalty": 1.0,
    "priority": 0,
    "chat_template_kwargs": {"enable_thinking": False},
    "service_tier": "auto",
    "reasoning_effort": "medium",
    "stop_token_ids": [],
    "logit_bias": {},
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_value_that_changes_nothing_is_accepted(client, name) -> None:
    assert ask(client, extra_body={name: NEUTRAL[name]}).message == ask(client).message


REFUSED = {
    "ignore_eos": True,
    "min_tokens": 2,
    "continue_final_message": True,
    "skip_special_tokens": False,
    "guided_json": {},
    "chat_template_kwargs": {"enable_thinking": True},
    "reasoning_effort": "high",
    "stop_token_ids": [10**6],
    "cache_salt": "1",
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_without_effect_is_refused_by_name_in_one_line(client, name) -> None:
    with pytest.raises(openai.BadRequestError, match=name) as refused:
        ask(client, extra_body={name: REFUSED[name]})
    assert "\n" not in str(refused.value)


FIELDS = (
    "max_tokens",
    "max_completion_tokens",
    "n",
    "best_of",
    "top_k",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "seed",
    "temperature",
    "top_p",
    "min_p",
)


@pytest.mark.parametrize("name", [*FIELDS, "prompt", "stop_token_ids", "chat_template_kwargs"])
@pytest.mark.parametrize("value", ["1" + "0" * 400, "-1" + "0" * 400, "1e999", "NaN", "Infinity"])
def test_numbers_are_bounded(url, name, value) -> None:
    sent = {"prompt": f"[{value}]", "stop_token_ids": f"[{value}]"}.get(name, value)
    if name == "chat_template_kwargs":
        sent = f'{{"x": {value}}}'
    body = f'{{"model": "m", "prompt": "x", "{name}": {sent}}}'
    headers = {"Content-Type": "application/json"}
    reply = httpx.post(f"{url}/v1/completions", content=body, headers=headers, timeout=60)
    assert reply.status_code == 400
    assert len(reply.text) < 2000


EARLIER = [
    {"role": "user", "name": "bob", "content": "x"},
    {"role": "assistant", "content": ""},
    {"role": "assistant", "content": "a", "refusal": None, "audio": None, "annotations": []},
    {"role": "assistant", "content": None, "refusal": "I must not."},
    {"role": "assistant", "content": "a", "reasoning_content": "b"},
    {"role": "assistant", "content": "a", "reasoning": "b", "function_call": None},
]


@pytest.mark.parametrize("message", EARLIER, ids=str)
def test_messages_of_other_servers_may_be_sent_back(client, message) -> None:
    assert ask(client, [*HELLO, message, *HELLO]).finish_reason == "length"


def test_an_answer_may_be_sent_back_as_it_came(client) -> None:
    answer = ask(client, max_tokens=5).message.model_dump()
    assert ask(client, [*HELLO, answer, *HELLO]).finish_reason == "length"


def test_stop_token_ids_end_the_text_before_them(client, alone) -> None:
    def complete(**extra: object):
        options = {"max_tokens": 20, "seed": 3, "extra_body": {"return_token_ids": True} | extra}
        return client.completions.create(model="m", prompt="3 + 4 =", **options).choices[0]

    ids = complete().token_ids
    place = next(i for i in range(3, len(ids)) if ids[i] not in ids[:i])
    cut = complete(stop_token_ids=[ids[place]])

    assert (cut.finish_reason, cut.token_ids) == ("stop", ids[: place + 1])
    assert cut.text == tokenizer.decode(alone.tokenizer, ids[:place])


def test_a_model_is_retrieved_by_its_name(client) -> None:
    assert client.models.retrieve("m").id == "m"
    with pytest.raises(openai.NotFoundError, match="there is no model a/b, only m"):
        client.models.retrieve("a/b")


def test_metrics_count_requests_and_tokens(client, url) -> None:
    def read() -> dict[str, float]:
        reply = httpx.get(f"{url}/metrics", timeout=60)
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        return {
            name: float(value)
            for name, value in re.findall(r"^(jzero_\S+) (\S+)$", reply.text, re.M)
        }

    before = read()
    ask(client, max_tokens=3)
    with pytest.raises(openai.BadRequestError):
        ask(client, temperature=9)
    after = read()
    grown = {name: after[name] - before.get(name, 0) for name in after if name.endswith("_total")}
    assert after['jzero_requests_total{endpoint="chat"}'] >= 2
    assert after["jzero_refused_requests_total"] - before["jzero_refused_requests_total"] == 1
    assert grown["jzero_generation_tokens_total"] >= 2
    assert after["jzero_sequences_running"] == after["jzero_sequences_waiting"] == 0
    assert after['jzero_kv_pages{state="free"}'] > 0


# -- Chat templates --------------------------------------------------------------------------------

SWITCHED = tiny.QWEN25 + (
    "{%- if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{%- endif %}"
)


@pytest.fixture
def reader(alone: Alone) -> RequestReader:
    """Reads requests for a model that thinks unless it is told not to."""
    reader = alone.new_reader(Limits())
    reader.tokenizer = servers.byte_level_tokenizer(["<|im_start|>", "<|im_end|>"])
    reader.tokenizer.chat_template = SWITCHED
    return reader


def request(**options: object) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "m", "messages": HELLO} | options)


def test_thinking_is_switched_off_by_either_option(reader) -> None:
    with_thoughts = reader.render(request()).text
    assert "<think>" not in with_thoughts
    for options in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
    ):
        text = reader.render(request(**options)).text
        assert text == with_thoughts + "<think>\n\n</think>"
    kept = {"chat_template_kwargs": {"enable_thinking": True}}
    assert reader.render(request(**kept)).text == with_thoughts


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "chat_template", "thinking_budget"]
)
def test_other_variables_of_the_template_are_refused(reader, name) -> None:
    with pytest.raises(UserError, match=f"chat_template_kwargs.{name}: "):
        reader.render(request(chat_template_kwargs={name: 1}))
