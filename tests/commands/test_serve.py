"""The server as a process, asked by OpenAI's own client, against the scheduler alone.

The second half says what malformed requests meet, and tests parts of the server in this process.
"""

import asyncio
import itertools
import json
import random
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import (
    ROOM,
    Alone,
    byte_tokenizer,
    free_port,
    load_alone,
    save_model,
    server_process,
    wait_until_healthy,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from jzero.decoder.sequence import Groups, Sequence
from jzero.model import tokenizer
from jzero.serving import choices, requests
from jzero.serving import worker as worker_module
from jzero.serving.limits import Limits
from jzero.serving.replies import Reply

GREETING = [{"role": "user", "content": "Grüße"}]

Ask = Callable[..., object]  # options -> the client's answer

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a tiny model with random weights."""
    return save_model(tmp_path_factory.mktemp("serve") / "model")


@pytest.fixture(scope="module")
def alone(model) -> Alone:
    """The same model in this process."""
    return load_alone(model)


@pytest.fixture(scope="module")
def url(model, environment: dict[str, str]) -> Iterator[str]:
    """The address of a server, which Ctrl-C ends without a further word."""
    port = free_port()
    with server_process(model, environment, "--port", str(port)) as server:
        wait_until_healthy(server, f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}/v1"
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
        words = server.stderr.read()
        assert words.startswith("KV cache: ") and words.count("\n") == 1


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as openai_client:
        yield openai_client


@pytest.fixture(scope="module")
def complete(client, model) -> Ask:
    def ask(prompt, **options):
        return client.completions.create(model=model, prompt=prompt, **options)

    return ask


@pytest.fixture(scope="module")
def chat(client, model) -> Ask:
    def ask(**options):
        return client.chat.completions.create(**{"model": model, "messages": GREETING} | options)

    return ask


def join_stream(stream: Iterable, text_of: Callable) -> tuple[dict[int, str], dict[int, str], list]:
    """Returns the text of every choice, why it ended, and all chunks."""
    chunks = list(stream)
    texts: dict[int, str] = {}
    finish_reasons: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            assert choice.index not in finish_reasons, "nothing follows a choice's last chunk"
            texts[choice.index] = texts.get(choice.index, "") + text_of(choice)
            if choice.finish_reason:
                finish_reasons[choice.index] = choice.finish_reason
    return texts, finish_reasons, chunks


# -- answers --------------------------------------------------------------------------------------


def test_models(client, model) -> None:
    assert [item.id for item in client.models.list()] == [model]


@pytest.mark.parametrize("logprobs", [0, 1])
def test_a_completion_is_the_schedulers(complete, alone, logprobs) -> None:
    want = alone.complete("3 + 4 =", 24)
    answer = complete("3 + 4 =", temperature=0, max_tokens=24, logprobs=logprobs)
    choice, usage = answer.choices[0], answer.usage
    assert (choice.text, choice.finish_reason) == (want.turn_text, want.finish_reason)
    assert usage.prompt_tokens == 7
    assert usage.completion_tokens == want.num_new
    assert usage.total_tokens == 31

    got = choice.logprobs
    np.testing.assert_allclose(got.token_logprobs, want.new_logps, atol=1e-4)
    pairs = zip(got.tokens, got.token_logprobs, strict=True)
    assert [list(best.items()) for best in got.top_logprobs] == [[pair] for pair in pairs]
    assert got.text_offset == [len("".join(got.tokens[:i])) for i in range(len(got.tokens))]


def test_a_chat_is_a_completion_of_the_rendered_messages(chat, alone) -> None:
    want = alone.complete("<user>Grüße\n<assistant>", 20)
    answer = chat(temperature=0, max_completion_tokens=20, logprobs=True)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == want.turn_text
    assert choice.finish_reason == want.finish_reason
    rows = choice.logprobs.content
    np.testing.assert_allclose([row.logprob for row in rows], want.new_logps, atol=1e-4)
    assert len("".join(row.token for row in rows)) >= len(want.turn_text)
    assert answer.usage.prompt_tokens == len(want.prompt_tokens)
    assert answer.usage.completion_tokens == want.num_new


def test_a_chat_without_a_limit_takes_what_room_there_is(chat) -> None:
    assert chat(temperature=0).usage.total_tokens == ROOM


@pytest.mark.parametrize("stop", [None, "e", ["\x00\x01never", "\ufffd\ufffd"]], ids=str)
@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_streams_are_the_same_text(complete, chat, kind, stop) -> None:
    options = {
        "n": 3,
        "seed": 5,
        "max_tokens": 40,
        "stop": stop,
        "stream_options": {"include_usage": True},
    }
    if kind == "chat":
        want = chat(**options)
        want_texts = {choice.index: choice.message.content for choice in want.choices}
        stream = chat(**options, stream=True)
        texts, ends, chunks = join_stream(stream, lambda choice: choice.delta.content)
    else:
        want = complete("Once", **options)
        want_texts = {choice.index: choice.text for choice in want.choices}
        stream = complete("Once", **options, stream=True)
        texts, ends, chunks = join_stream(stream, lambda choice: choice.text)
    assert texts == want_texts
    assert ends == {choice.index: choice.finish_reason for choice in want.choices}
    assert chunks[-1].usage == want.usage and not chunks[-1].choices and len(chunks) > 4
    assert [choice.index for choice in want.choices] == [0, 1, 2]
    assert len(set(texts.values())) == 3


def test_streamed_logprobs_of_a_completion_are_the_same(complete) -> None:
    options = {"seed": 3, "max_tokens": 30, "logprobs": 0}
    want = complete("Once", **options).choices[0].logprobs.token_logprobs
    chunks = complete("Once", **options, stream=True)
    pieces = [chunk.choices[0].logprobs.token_logprobs for chunk in chunks]
    assert list(itertools.chain(*pieces)) == want


def test_streamed_logprobs_of_a_chat_are_the_same(chat) -> None:
    options = {"seed": 3, "max_tokens": 30, "logprobs": True}
    want = chat(**options).choices[0].logprobs.content
    chunks = chat(**options, stream=True)
    pieces = [chunk.choices[0].logprobs.content for chunk in chunks]
    assert list(itertools.chain(*pieces)) == want


def test_the_first_chunk_alone_has_the_role(chat) -> None:
    chunks = chat(temperature=0, max_tokens=20, stream=True)
    roles = [chunk.choices[0].delta.role for chunk in chunks]
    assert roles[0] == "assistant" and not any(roles[1:]) and len(roles) > 2


def test_stop_strings_end_the_text_before_them(complete, alone) -> None:
    text = alone.complete("3 + 4 =", 40).turn_text
    stop = [text[start : start + 3] for start in (20, 12)]
    choice = complete("3 + 4 =", temperature=0, max_tokens=40, stop=stop).choices[0]
    first = min(text.index(string) for string in stop)
    assert (choice.text, choice.finish_reason) == (text[:first], "stop")


def test_seeds_repeat_and_requests_without_one_differ(complete) -> None:
    def draw(n: int = 2, **options: object) -> list[str]:
        answer = complete("Once", max_tokens=16, n=n, **options)
        return [choice.text for choice in answer.choices]

    assert draw(seed=1) == draw(seed=1) != draw(seed=2)
    assert len({*draw(), *draw(), *draw(seed=1)}) == 6
    assert draw(temperature=0) == [draw(temperature=0, n=1)[0]] * 2


def test_prompts_are_answered_in_their_order(complete, alone) -> None:
    texts = ["one", "two and more", "three"]
    ids = [tokenizer.encode(alone.tokenizer, text) for text in texts]
    want = [sequence.turn_text for sequence in alone.complete_all(texts, [16] * 3)]
    for prompt in (texts, ids):
        answer = complete(prompt, n=2, temperature=0)
        twice_each = [text for text in want for _ in range(2)]
        assert [choice.text for choice in answer.choices] == twice_each
        assert [choice.index for choice in answer.choices] == list(range(6))
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (20, 96)
    assert complete(ids[1], temperature=0).choices[0].text == want[1]


def test_options_that_change_nothing_are_accepted(complete) -> None:
    options = {
        "top_p": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "user": "me",
        "echo": False,
        "logit_bias": {},
        "extra_body": {
            "repetition_penalty": 1.0,
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "top_k": 0,
            "min_p": 0,
            "metadata": {"a": "b"},
        },
    }
    with_options = complete("a", temperature=0, **options)
    assert with_options.choices == complete("a", temperature=0).choices


def test_filters_of_a_request(complete) -> None:
    greedy = complete("a", temperature=0).choices[0].text
    for filters in ({"top_p": 0}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1}}):
        assert complete("a", temperature=2, **filters).choices[0].text == greedy
    unfiltered = complete("a", temperature=2, seed=3).choices[0].text
    assert unfiltered != greedy
    all_tokens = {"top_p": 1, "extra_body": {"top_k": -1, "min_p": 0}}
    assert complete("a", temperature=2, seed=3, **all_tokens).choices[0].text == unfiltered


def test_a_message_in_parts(chat) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    answers = [
        chat(messages=[{"role": "user", "content": content}], temperature=0)
        for content in (parts, "hel\nlo")
    ]
    assert answers[0].choices == answers[1].choices


@pytest.mark.parametrize("count", [100, 500])
def test_requests_at_once_all_get_their_own_answer(url, model, alone, count) -> None:
    rng = random.Random(0)
    prompts = ["".join(rng.choices("abcdefgh ", k=rng.randint(1, 30))) for _ in range(count)]
    limits = [rng.randint(1, 30) for _ in prompts]

    async def ask(client, i: int) -> str:
        options = {"prompt": prompts[i], "max_tokens": limits[i], "temperature": 0}
        if i % 2 == 0:
            answer = await client.completions.create(model=model, **options)
            return answer.choices[0].text
        stream = await client.completions.create(model=model, **options, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=url, api_key="none", max_retries=0, timeout=120
        ) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(count)))

    texts = asyncio.run(ask_all())
    assert texts == [sequence.turn_text for sequence in alone.complete_all(prompts, limits)]


# -- mistakes -------------------------------------------------------------------------------------

BAD_COMPLETIONS = {
    "not JSON": b"{",
    "not UTF-8": b'{"model": "\xff"}',
    "nothing": b"",
    "a list": b"[]",
    "deep": b"[" * 100_000,
    "no prompt": {},
    "an empty prompt": {"prompt": ""},
    "no prompts": {"prompt": []},
    "an empty one of them": {"prompt": ["a", ""]},
    "no tokens": {"prompt": [[1], []]},
    "a number": {"prompt": 5},
    "mixed": {"prompt": ["a", 5]},
    "a half surrogate": b'{"model": "MODEL", "prompt": "\\ud800"}',
    "no such token": {"prompt": [5, 272]},
    "a negative token": {"prompt": [-1]},
    "a huge token": {"prompt": [10**30]},
    "too long": {"prompt": "x" * ROOM},
    "too many tokens": {"prompt": "a", "max_tokens": ROOM},
    "negative tokens": {"prompt": "a", "max_tokens": -1},
    "no new tokens": {"prompt": "a", "max_tokens": 0},
    "half a token": {"prompt": "a", "max_tokens": 1.5},
    "a word for a number": {"prompt": "a", "max_tokens": "many"},
    "a huge n": {"prompt": "a", "n": 10**9},
    "n of 0": {"prompt": "a", "n": 0},
    "cold": {"prompt": "a", "temperature": -1},
    "not a number": b'{"model": "MODEL", "prompt": "a", "temperature": NaN}',
    "an empty stop string": {"prompt": "a", "stop": ["b", ""]},
    "top_p": {"prompt": "a", "top_p": 1.5},
    "top_k": {"prompt": "a", "top_k": -2},
    "half a top_k": {"prompt": "a", "top_k": 1.5},
    "min_p": {"prompt": "a", "min_p": -0.1},
    "a top_p that is not a number": b'{"model": "MODEL", "prompt": "a", "top_p": NaN}',
    "a streamed echo with logprobs": {"prompt": "a", "echo": True, "logprobs": 0, "stream": True},
    "best of": {"prompt": "a", "best_of": 4},
    "an unknown option": {"prompt": "a", "colour": "red"},
    "too many tokens' logprobs": {"prompt": "a", "logprobs": 21},
    "stream options": {"prompt": "a", "stream_options": {"colour": True}},
    "a streamed mistake": {"prompt": "", "stream": True},
}
BAD_CHATS = {
    "no messages": {},
    "empty messages": {"messages": []},
    "text for messages": {"messages": "hello"},
    "no content": {"messages": [{"role": "user"}]},
    "a call's id": {"messages": [{"role": "user", "content": "hello", "tool_call_id": "x"}]},
    "an image": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    "no part": {"messages": [{"role": "user", "content": []}]},
    "many parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 300}]
    },
    "what the template refuses": {"messages": [{"role": "system", "content": "hello"}]},
    "top logprobs alone": {"messages": GREETING, "top_logprobs": 3},
    "tools that the template does not show": {
        "messages": GREETING,
        "tools": [{"type": "function", "function": {"name": "f"}}],
    },
}


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"extra_body": {"tool_choice": "required"}}, "tool_choice=.*: the request has no tools"),
        ({"response_format": {"type": "json_object"}}, "cannot force a format: ask for JSON"),
        ({"presence_penalty": 0.5}, "samples without penalties, as training does"),
        ({"extra_body": {"repetition_penalty": 1.1}}, "repetition_penalty=1.1: this server sampl"),
    ],
)
def test_an_option_is_refused_by_name_with_the_reason(chat, option, reason) -> None:
    with pytest.raises(openai.BadRequestError, match=reason) as refused:
        chat(**option)
    [name] = option.get("extra_body", option)
    assert f"{name}=" in str(refused.value)


def test_a_served_name_replaces_the_directory(model, environment: dict[str, str]) -> None:
    port = free_port()
    flags = ("--port", str(port), "--served-model-name", "smol")
    with server_process(model, environment, *flags) as server:
        address = f"http://127.0.0.1:{port}"
        wait_until_healthy(server, address)
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            assert [found.id for found in client.models.list()] == ["smol"]
            answer = client.completions.create(model="smol", prompt="a", max_tokens=2)
            assert answer.model == "smol"
            with pytest.raises(openai.NotFoundError, match="there is no model"):
                client.completions.create(model=model, prompt="a", max_tokens=2)
        server.send_signal(signal.SIGINT)
        server.wait(60)


@pytest.mark.parametrize(
    "path, body",
    [
        *(pytest.param("completions", body, id=name) for name, body in BAD_COMPLETIONS.items()),
        *(pytest.param("chat/completions", body, id=name) for name, body in BAD_CHATS.items()),
    ],
)
def test_mistakes_are_answered_and_the_server_goes_on(url, model, complete, path, body) -> None:
    if not isinstance(body, bytes):
        body = json.dumps({"model": model, **body}).encode()
    answer = httpx.post(
        f"{url}/{path}",
        content=body.replace(b"MODEL", model.encode()),
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"] and error["type"] == "invalid_request_error"
    assert {"param", "code"} <= set(error)
    assert len(complete("a", max_tokens=1).choices) == 1


def test_another_model_is_not_found(model, client) -> None:
    with pytest.raises(openai.NotFoundError, match=f"there is no model other, only {model}"):
        client.completions.create(model="other", prompt="a")


@pytest.mark.parametrize(
    "method, path, status",
    [("GET", "/nothing", 404), ("GET", "/completions", 405), ("PUT", "/models", 405)],
)
def test_other_paths_and_methods_are_refused(url, method, path, status) -> None:
    answer = httpx.request(method, url + path)
    assert answer.status_code == status and answer.json()["error"]["message"]


def test_a_mistake_in_the_command_is_one_line(model, environment: dict[str, str]) -> None:
    with server_process(model, environment, "--config.rollout.num_slots=-1") as server:
        assert server.wait(60) == 2
        error = server.stderr.read()
    assert error.startswith("error: rollout.num_slots=-1") and error.count("\n") == 1


# -- parts of the server --------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_sent_text_has_whole_characters_and_no_stop_string(data) -> None:
    """However the tokens come: sent text is never taken back, and ends as the scheduler's text."""
    alphabet = "ab\u00e9\u4e2d"
    text = data.draw(st.text(st.sampled_from(alphabet + "\U0001f600\ufffd"), max_size=12))
    stop_string = st.text(st.sampled_from(alphabet), min_size=1, max_size=3)
    stop_strings = data.draw(st.lists(stop_string, max_size=2))
    tail = data.draw(st.sampled_from([b"", "\U0001f600".encode()[:3], "\u4e2d".encode()[:1]]))
    tok = byte_tokenizer()
    piece_of_byte = bytes_to_unicode()
    tokens = [tok.convert_tokens_to_ids(piece_of_byte[byte]) for byte in text.encode() + tail]

    # The scheduler ends a sequence at the token that completes a stop string.
    for end in range(len(tokens) + 1):
        if any(stop in tokenizer.decode(tok, tokens[:end]) for stop in stop_strings):
            tokens = tokens[:end]
            break
    whole_text = tokenizer.decode(tok, tokens)
    found_at = [whole_text.index(stop) for stop in stop_strings if stop in whole_text]
    want = whole_text[: min(found_at, default=len(whole_text))]
    sequence = Sequence(0, 0, 0, np.zeros(1, np.int32), 99)
    sequence.tokens.append(tokens)
    sequence.stop_strings = stop_strings
    sequence.turn_text = want

    options = requests.CompletionRequest(model="m", prompt="a").reply_options(is_chat=False)
    writer = choices.ChoiceWriter(options, sequence, tok, ())
    sent = ""
    for num_tokens in sorted(data.draw(st.sets(st.integers(0, max(0, len(tokens) - 1))))):
        choice = writer.write(worker_module.Progress(0, num_tokens, ""))
        sent += choice["text"] if choice else ""
        assert want.startswith(sent)
    sent += writer.write(worker_module.Progress(0, len(tokens), "stop"))["text"]
    assert sent == want


def test_sequences_may_each_have_a_temperature_and_stop_strings(alone) -> None:
    """Prefilled and inserted together, they are what runs of their own give."""
    prompt = np.arange(65, 75, dtype=np.int32)
    temperatures = (0.0, 1.0, 0.3, 1.0)

    def new_sequence(i: int, **fields: object) -> Sequence:
        return Sequence(i, 0, i, prompt, 50, **fields)

    want = [new_sequence(i) for i in range(len(temperatures))]
    for sequence, temperature in zip(want, temperatures, strict=True):
        list(alone.new_scheduler().run([[sequence]], 1, temperature, alone.seed))

    got = [new_sequence(i, temperature=value) for i, value in enumerate(temperatures)]
    stop = byte_tokenizer().backend_tokenizer.decode(want[1].new_tokens[5:8])
    got[1].stop_strings = [stop]
    list(alone.new_scheduler().run([[sequence] for sequence in got], 1, 0.7, alone.seed))

    for i in (0, 2, 3):
        assert got[i].new_tokens == want[i].new_tokens
    num_tokens = got[1].num_new
    assert got[1].new_tokens == want[1].new_tokens[:num_tokens] and 0 < num_tokens <= 8
    assert got[1].finish_reason == "stop"
    assert len({tuple(sequence.new_tokens) for sequence in want}) == len(want)


def test_a_client_that_leaves_frees_its_slot(alone) -> None:
    reader = alone.new_reader(Limits())
    worker = alone.new_worker(Limits())
    request = requests.CompletionRequest(
        model="m", prompt="Once", max_tokens=90, temperature=0.0, n=2, stream=True
    )
    sequences = reader.make_sequences(request, is_chat=False)
    has_left = threading.Event()
    finished: list[Sequence] = []

    def admit_more() -> Groups:
        """Decodes few tokens before the client has left, and ends when all is done."""
        if any(sequence.num_new >= 16 for sequence in sequences):
            assert has_left.wait(60)
        return worker.admit(scheduler) if worker.live or not worker.inbox.empty() else []

    scheduler = alone.new_scheduler()

    def decode() -> None:
        worker.begin(scheduler)
        for sequence in scheduler.run([], 0, 1.0, alone.seed, admit_more=admit_more):
            worker.turn_ended(scheduler, sequence)
            finished.append(sequence)

    async def leave() -> None:
        reply = Reply(reader, request.reply_options(is_chat=False), sequences)
        assert worker.reserve(len(sequences))
        worker.submit(reply.submission)
        decoding = asyncio.get_running_loop().run_in_executor(None, decode)
        first = await asyncio.wait_for(anext(reply.events()), 60)
        assert first.startswith("data: {")
        reply.submission.cancel()
        has_left.set()
        await decoding

    asyncio.run(leave())
    assert set(finished) == set(sequences)
    assert all(0 < sequence.num_new < 40 for sequence in sequences)
    assert not alone.engine.placements
    assert worker.num_reserved == 0


def test_jetstreams_client_gets_the_same_greedy_tokens(
    model, environment: dict[str, str], alone
) -> None:
    """More requests at once than slots, as text and as tokens; the last asks for too many."""
    stubs = pytest.importorskip(
        "jetstream.core.proto.jetstream_pb2_grpc", reason="pip install -e '.[jetstream]'"
    )
    messages = pytest.importorskip("jetstream.core.proto.jetstream_pb2")
    grpc = pytest.importorskip("grpc")
    prompts = [*(f"{i} + {i} =" for i in range(24)), "a", "x" * 30]
    limits = [*(1 + i for i in range(24)), 64, 64]
    want = alone.complete_all(prompts, limits)
    ids = [sequence.prompt_tokens.tolist() for sequence in want]
    limits[-1] = 500
    want[-1] = alone.complete(prompts[-1], ROOM - 30)

    def ask(stub: object, i: int) -> list[int]:
        if i % 2:
            content = {"text_content": {"text": prompts[i]}}
        else:
            content = {"token_content": {"token_ids": ids[i]}}
        request = messages.DecodeRequest(**content, max_tokens=limits[i])
        tokens: list[int] = []
        for part in stub.Decode(request, wait_for_ready=True, timeout=240):
            for sample in part.stream_content.samples:
                tokens += sample.token_ids
        return tokens

    port = free_port()
    with server_process(model, environment, "--jetstream", str(port)) as server:
        with (
            grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
            ThreadPoolExecutor(len(prompts)) as threads,
        ):
            stub = stubs.OrchestratorStub(channel)
            got = list(threads.map(lambda i: ask(stub, i), range(len(prompts))))
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
    stop_ids = alone.engine.stop_ids
    assert got == [[t for t in sequence.new_tokens if t not in stop_ids] for sequence in want]
