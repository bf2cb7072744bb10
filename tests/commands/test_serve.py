"""The server as a process, asked by OpenAI's own client, against the driver alone; and what malformed requests meet."""

import asyncio
import contextlib
import itertools
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AddedToken
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from jzero import cli, evaluate
from jzero.grading.pool import Pool
from jzero.model import huggingface, qwen, tokenizer
from jzero.rollout.sampler import make_seed
from jzero.rollout.scheduler import Scheduler
from jzero.rollout.sequence import Sequence

openai = pytest.importorskip("openai", reason="pip install openai")
httpx = pytest.importorskip("httpx", reason="pip install httpx")
serve = pytest.importorskip("jzero.serve", reason="pip install -e '.[serve]'")

ROOT = Path(__file__).resolve().parents[2]
ROOM = 96  # tokens of a prompt and its answer
SIZES = "max_prompt_tokens=32 max_new_tokens=64 num_slots=16 page_size=32 decode_steps=4 kv_dtype=float32"
SETTINGS = ["--config.model.dtype=float32", *(f"--config.rollout.{each}" for each in SIZES.split())]
TEMPLATE = """{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no') }}{% endif %}\
<{{ message.role }}>{{ message.content }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
GREETING = [{"role": "user", "content": "Grüße"}]

pytestmark = pytest.mark.usefixtures("quick_compilation")


@cache
def byte_tokenizer() -> Qwen2Tokenizer:
    """A token a byte, so that half characters are common."""
    pieces = [
        *bytes_to_unicode().values(),
        "<|endoftext|>",
        "<|pad|>",
        *(f"<|{i}|>" for i in range(14)),
    ]
    tok = Qwen2Tokenizer(
        {piece: i for i, piece in enumerate(pieces)}, [], eos_token="<|endoftext|>"
    )
    tok.add_special_tokens({"pad_token": AddedToken("<|pad|>")})
    tok.chat_template = TEMPLATE
    return tok


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path, tok = tmp_path_factory.mktemp("serve") / "model", byte_tokenizer()
    arch = qwen.QwenConfig("qwen2", len(tok), 32, 64, 2, 2, 1, 16, True, 10000.0, 1e-6)
    huggingface.save(path, arch, reference.random_params(arch), dtype="float32", hf_config_extra={})
    tok.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def alone(model):
    """What the driver makes of a prompt: greedy, nothing else on its way."""
    values = cli.parse_settings(evaluate.defaults(), SETTINGS)
    values.model.path = model
    sampler, params = evaluate.load(values, Pool(0))
    seed = make_seed(sampler.engine, (0, 0))

    def every(prompts: list[str | list[int]], limits: list[int]) -> list[Sequence]:
        ids = [tokenizer.encode(sampler.tokenizer, p) if isinstance(p, str) else p for p in prompts]
        rows = enumerate(zip(ids, limits, strict=True))
        made = [Sequence(i, 0, i, np.array(x, np.int32), len(x) + limit) for i, (x, limit) in rows]
        driver = Scheduler(
            sampler.engine, params, lambda ids: tokenizer.decode(sampler.tokenizer, ids)
        )
        list(driver.run([[sequence] for sequence in made], 1, 0.0, seed))
        return made

    one = lambda prompt, limit: every([prompt], [limit])[0]
    return SimpleNamespace(every=every, one=one, sampler=sampler, params=params, seed=seed)


def free_port() -> int:
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextlib.contextmanager
def process(model: str, environment, *arguments: str):
    command = [sys.executable, "-m", "jzero.serve", "--model", model, *SETTINGS, *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    ) as server:
        yield server
        server.kill()


@pytest.fixture(scope="module")
def url(model, environment):
    """Of a server, which Ctrl-C ends."""
    port = free_port()
    with process(model, environment, "--port", str(port)) as server:
        while server.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"http://127.0.0.1:{port}/health").raise_for_status()
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
        server.send_signal(signal.SIGINT)
        assert (server.wait(60), server.stderr.read()) == (0, "")


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def complete(client, model):
    return lambda prompt, **options: client.completions.create(
        model=model, prompt=prompt, **options
    )


@pytest.fixture(scope="module")
def chat(client, model):
    return lambda **options: client.chat.completions.create(
        model=model, messages=GREETING, **options
    )


def joined(stream, of) -> tuple[dict[int, str], dict[int, str], list]:
    """The text of every choice, why it ended, and the chunks."""
    chunks = list(stream)
    texts, ends = {}, {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        assert choice.index not in ends, "nothing follows the last chunk of a choice"
        texts[choice.index] = texts.get(choice.index, "") + of(choice)
        ends |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
    return texts, ends, chunks


def test_models(client, model):
    assert [each.id for each in client.models.list()] == [model]


@pytest.mark.parametrize("logprobs", [0, 1])
def test_a_completion_is_the_drivers(complete, alone, logprobs):
    answer, want = (
        complete("3 + 4 =", temperature=0, max_tokens=24, logprobs=logprobs),
        alone.one("3 + 4 =", 24),
    )
    choice, (usage, said) = answer.choices[0], (answer.usage, answer.choices[0].logprobs)
    assert (choice.text, choice.finish_reason) == (want.turn_text, want.finish_reason)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (
        7,
        len(want.tokens),
        31,
    )
    np.testing.assert_allclose(said.token_logprobs, want.logps, atol=1e-4)
    assert [list(best.items()) for best in said.top_logprobs] == [
        [pair] for pair in zip(said.tokens, said.token_logprobs, strict=True)
    ]
    assert said.text_offset == [len("".join(said.tokens[:i])) for i in range(len(said.tokens))]


def test_a_chat_is_a_completion_of_the_rendered_messages(chat, alone):
    answer = chat(temperature=0, max_completion_tokens=20, logprobs=True)
    want = alone.one("<user>Grüße\n<assistant>", 20)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        want.turn_text,
        want.finish_reason,
    )
    np.testing.assert_allclose(
        [token.logprob for token in choice.logprobs.content], want.logps, atol=1e-4
    )
    assert len("".join(token.token for token in choice.logprobs.content)) >= len(want.turn_text)
    prompt = len(want.context)
    assert chat(temperature=0).usage.total_tokens == ROOM, (
        "without a limit an answer takes what room there is"
    )
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        prompt,
        len(want.tokens),
    )


@pytest.mark.parametrize("stop", [None, "e", ["\x00\x01never", "\ufffd\ufffd"]], ids=str)
def test_streams_are_the_same_text(complete, chat, stop):
    same = {
        "n": 3,
        "seed": 5,
        "max_tokens": 40,
        "stop": stop,
        "stream_options": {"include_usage": True},
    }
    for ask, of, whole in (
        (
            lambda **more: complete("Once", **more),
            lambda choice: choice.text,
            lambda choice: choice.text,
        ),
        (chat, lambda choice: choice.delta.content, lambda choice: choice.message.content),
    ):
        want = ask(**same)
        texts, ends, chunks = joined(ask(**same, stream=True), of)
        assert texts == {choice.index: whole(choice) for choice in want.choices}
        assert ends == {choice.index: choice.finish_reason for choice in want.choices}
        assert chunks[-1].usage == want.usage and not chunks[-1].choices and len(chunks) > 4
        assert [choice.index for choice in want.choices] == [0, 1, 2] and len(
            set(texts.values())
        ) == 3


def test_streamed_logprobs_are_the_same(complete, chat):
    text, row = (
        lambda choice: choice.logprobs.token_logprobs,
        lambda choice: choice.logprobs.content,
    )
    for ask, of in (
        (lambda **more: complete("Once", logprobs=0, **more), text),
        (partial(chat, logprobs=True), row),
    ):
        want = ask(seed=3, max_tokens=30)
        chunks = ask(seed=3, max_tokens=30, stream=True)
        assert [each for chunk in chunks for each in of(chunk.choices[0])] == of(want.choices[0])


def test_the_first_chunk_alone_has_the_role(chat):
    roles = [
        chunk.choices[0].delta.role for chunk in chat(temperature=0, max_tokens=20, stream=True)
    ]
    assert roles[0] == "assistant" and not any(roles[1:]) and len(roles) > 2


def test_stop_strings_end_the_text_before_them(complete, alone):
    want = alone.one("3 + 4 =", 40)
    stops = [want.turn_text[at : at + 3] for at in (20, 12)]
    choice = complete("3 + 4 =", temperature=0, max_tokens=40, stop=stops).choices[0]
    first = min(want.turn_text.index(stop) for stop in stops)
    assert (choice.text, choice.finish_reason) == (want.turn_text[:first], "stop")


def test_seeds_repeat_and_requests_without_one_differ(complete):
    draw = lambda n=2, **more: [
        choice.text for choice in complete("Once", max_tokens=16, n=n, **more).choices
    ]
    assert draw(seed=1) == draw(seed=1) != draw(seed=2)
    assert len({*draw(), *draw(), *draw(seed=1)}) == 6
    assert draw(temperature=0) == [draw(temperature=0, n=1)[0]] * 2


def test_prompts_are_answered_in_their_order(complete, alone):
    texts = ["one", "two and more", "three"]
    ids = [tokenizer.encode(alone.sampler.tokenizer, text) for text in texts]
    want = [sequence.turn_text for sequence in alone.every(texts, [16] * 3) for _ in range(2)]
    for prompt in (texts, ids):
        answer = complete(prompt, n=2, temperature=0)
        assert [choice.text for choice in answer.choices] == want
        assert [choice.index for choice in answer.choices] == list(range(6))
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (20, 96)
    assert complete(ids[1], temperature=0).choices[0].text == want[2]


def test_what_changes_nothing_may_be_said(complete):
    more = {"repetition_penalty": None, "top_k": 0, "min_p": 0, "metadata": {"a": "b"}}
    same = {
        "top_p": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "user": "me",
        "echo": False,
        "logit_bias": {},
    }
    assert (
        complete("a", temperature=0, **same, extra_body=more).choices
        == complete("a", temperature=0).choices
    )


BAD = {
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
    "top_p": {"prompt": "a", "top_p": 0.5},
    "top_k": {"prompt": "a", "top_k": 4},
    "echo": {"prompt": "a", "echo": True},
    "best of": {"prompt": "a", "best_of": 4},
    "an unknown option": {"prompt": "a", "colour": "red"},
    "other tokens' logprobs": {"prompt": "a", "logprobs": 5},
    "the best token's, of samples": {"prompt": "a", "logprobs": 1},
    "stream options": {"prompt": "a", "stream_options": {"colour": True}},
    "a streamed mistake": {"prompt": "", "stream": True},
}
BAD_CHATS = {
    "no messages": {},
    "empty messages": {"messages": []},
    "text for messages": {"messages": "hello"},
    "no content": {"messages": [{"role": "user"}]},
    "a name": {"messages": [{"role": "user", "content": "hello", "name": "me"}]},
    "what the template refuses": {"messages": [{"role": "system", "content": "hello"}]},
    "top logprobs": {"messages": GREETING, "logprobs": True, "top_logprobs": 3},
    "tools": {"messages": GREETING, "tools": [{"type": "function", "function": {"name": "f"}}]},
}


@pytest.mark.parametrize(
    "path, body",
    [
        *(pytest.param("completions", body, id=name) for name, body in BAD.items()),
        *(pytest.param("chat/completions", body, id=name) for name, body in BAD_CHATS.items()),
    ],
)
def test_mistakes_are_answered(url, model, complete, path, body):
    body = body if isinstance(body, bytes) else json.dumps({"model": model, **body}).encode()
    answer = httpx.post(f"{url}/{path}", content=body.replace(b"MODEL", model.encode()))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (
        error["message"]
        and error["type"] == "invalid_request_error"
        and {"param", "code"} <= set(error)
    )
    assert len(complete("a", max_tokens=1).choices) == 1


def test_what_is_not_there(url, model, client):
    with pytest.raises(openai.NotFoundError, match=f"there is no model other, only {model}"):
        client.completions.create(model="other", prompt="a")
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("GET", "/completions", 405),
        ("PUT", "/models", 405),
    ):
        answer = httpx.request(method, url + path)
        assert answer.status_code == status and answer.json()["error"]["message"]


def test_500_requests_at_once_all_get_their_own_answer(url, model, alone):
    rng = random.Random(0)
    prompts = ["".join(rng.choices("abcdefgh ", k=rng.randint(1, 30))) for _ in range(500)]
    limits = [rng.randint(1, 30) for _ in prompts]

    async def ask(client, prompt: str, limit: int, streamed: bool) -> str:
        same = {"model": model, "prompt": prompt, "max_tokens": limit, "temperature": 0}
        if streamed:
            return "".join(
                [
                    c.choices[0].text
                    async for c in await client.completions.create(**same, stream=True)
                ]
            )
        return (await client.completions.create(**same)).choices[0].text

    async def soak() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=url, api_key="none", max_retries=0, timeout=120
        ) as client:
            asks = zip(prompts, limits, strict=True)
            return await asyncio.gather(
                *(ask(client, *each, i % 2 == 1) for i, each in enumerate(asks))
            )

    texts = asyncio.run(soak())
    assert texts == [sequence.turn_text for sequence in alone.every(prompts, limits)]


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_what_is_sent_is_whole_characters_before_any_stop_string(data):
    """However the tokens come: what was sent is never taken back, and in the end it is what the driver says."""
    text = data.draw(st.text(st.sampled_from("ab\u00e9\u4e2d\U0001f600\ufffd"), max_size=12))
    stop = data.draw(
        st.lists(st.text(st.sampled_from("ab\u00e9\u4e2d"), min_size=1, max_size=3), max_size=2)
    )
    tail = data.draw(st.sampled_from([b"", "\U0001f600".encode()[:3], "\u4e2d".encode()[:1]]))
    tok = byte_tokenizer()
    decode = lambda ids: tokenizer.decode(tok, ids)
    tokens = [tok.convert_tokens_to_ids(bytes_to_unicode()[byte]) for byte in text.encode() + tail]
    hit = [n for n in range(len(tokens) + 1) if any(each in decode(tokens[:n]) for each in stop)]
    tokens = tokens[: hit[0]] if hit else tokens
    sequence = Sequence(
        0, 0, 0, np.zeros(1, np.int32), 99, tokens=tokens, logps=[0.0] * len(tokens), stop=stop
    )
    whole = decode(tokens)
    sequence.turn_text = whole[
        : min((whole.index(each) for each in stop if each in whole), default=len(whole))
    ]
    server = serve.Server("m", SimpleNamespace(settings=SimpleNamespace(stop=())), tok)
    choice = server.choice(serve.Asked(model="m", prompt="a"), False, sequence)
    next(choice)
    counts = sorted(data.draw(st.sets(st.integers(0, max(0, len(tokens) - 1)))))
    said = [choice.send((count, "")) for count in counts]
    assert all(
        sequence.turn_text.startswith("".join(each["text"] for each in said[:n] if each))
        for n in range(len(said))
    )
    said.append(choice.send((len(tokens), "stop")))
    assert "".join(each["text"] for each in said if each) == sequence.turn_text


def test_sequences_may_each_have_a_temperature_and_stop_strings(alone):
    """Prefilled and inserted together, they are what runs of their own give."""
    context, heats = np.arange(65, 75, dtype=np.int32), (0.0, 1.0, 0.3, 1.0)
    make = lambda i, **own: Sequence(i, 0, i, context, 50, **own)
    driver = lambda: Scheduler(
        alone.sampler.engine, alone.params, lambda ids: tokenizer.decode(byte_tokenizer(), ids)
    )
    want = [make(i) for i in range(len(heats))]
    for sequence, heat in zip(want, heats, strict=True):
        list(driver().run([[sequence]], 1, heat, alone.seed))
    stop = byte_tokenizer().backend_tokenizer.decode(want[1].tokens[5:8])
    got = [
        make(i, temperature=heat, stop_strings=[stop] * (i == 1)) for i, heat in enumerate(heats)
    ]
    list(driver().run([[sequence] for sequence in got], 1, 0.7, alone.seed))
    assert [s.tokens for s in got if s is not got[1]] == [
        s.tokens for s in want if s is not want[1]
    ]
    assert got[1].tokens == want[1].tokens[: len(got[1].tokens)] and 0 < len(got[1].tokens) <= 8
    assert got[1].finish_reason == "stop" and len({tuple(s.tokens) for s in want}) == len(want)


def test_a_client_that_leaves_frees_its_slot(alone):
    server = serve.Server("m", alone.sampler.engine, alone.sampler.tokenizer)
    asked = serve.Asked(model="m", prompt="Once", max_tokens=90, temperature=0.0, n=2, stream=True)
    left, made = threading.Event(), server.sequences(asked, False)
    calls, done = itertools.count(), []

    def more():
        if next(calls) == 4:
            assert left.wait(60)
        return server.more() if server.live or not server.inbox.empty() else []

    async def leave():
        loop, heard = asyncio.get_running_loop(), asyncio.Queue()
        tell = lambda s: loop.call_soon_threadsafe(
            heard.put_nowait, (s.sample_index, len(s.tokens), s.finish_reason)
        )
        server.inbox.put((made, tell, True))
        decoding = loop.run_in_executor(
            None, lambda: done.extend(driver.run([], 1, 1.0, alone.seed, admit_more=more))
        )
        answer = server.reply(asked, False, made, heard)
        assert (await anext(answer)).startswith("data: {")
        await answer.aclose()
        left.set()
        await decoding

    driver = Scheduler(server.engine, alone.params, server.text)
    asyncio.run(leave())
    assert set(done) == set(made) and all(0 < len(sequence.tokens) < 40 for sequence in made)
    assert not server.engine.placements


def test_a_mistake_in_the_command_is_one_line(model, environment):
    with process(model, environment, "--config.rollout.num_slots=0") as server:
        assert server.wait(60) == 2
        error = server.stderr.read()
    assert error.startswith("error: rollout.num_slots=0") and error.count("\n") == 1


def test_jetstreams_client_gets_the_same_greedy_tokens(model, environment, alone):
    """More requests at once than there are slots, as text and as tokens; the last asks for more than there is room."""
    stubs = pytest.importorskip(
        "jetstream.core.proto.jetstream_pb2_grpc", reason="pip install -e '.[jetstream]'"
    )
    grpc, messages = (
        pytest.importorskip("grpc"),
        pytest.importorskip("jetstream.core.proto.jetstream_pb2"),
    )
    prompts = [*(f"{i} + {i} =" for i in range(24)), "a", "x" * 30]
    limits = [*(1 + i for i in range(24)), 64, 64]
    want = alone.every(prompts, limits)
    ids = [sequence.prompt_tokens.tolist() for sequence in want]
    limits[-1], port = 500, free_port()
    longer = alone.one(prompts[-1], ROOM - 30)

    def ask(i: int) -> list[int]:
        content = (
            {"text_content": {"text": prompts[i]}}
            if i % 2
            else {"token_content": {"token_ids": ids[i]}}
        )
        answer = stub.Decode(
            messages.DecodeRequest(**content, max_tokens=limits[i]),
            wait_for_ready=True,
            timeout=240,
        )
        return [
            token
            for part in answer
            for sample in part.stream_content.samples
            for token in sample.token_ids
        ]

    with process(model, environment, "--jetstream", str(port)) as server:
        with (
            grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
            ThreadPoolExecutor(len(prompts)) as threads,
        ):
            stub = stubs.OrchestratorStub(channel)
            got = list(threads.map(ask, range(len(prompts))))
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
    ends = alone.sampler.engine.stop_ids
    assert got == [[token for token in s.tokens if token not in ends] for s in [*want[:-1], longer]]
