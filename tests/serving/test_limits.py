"""What is refused for its size, and that the refusal costs little."""

import json
import re
import threading
import time
from pathlib import Path

import pytest
from servers import ROOM
from tokenizers.processors import TemplateProcessing

from jzero import serve
from jzero.errors import UserError
from jzero.fields import fields_of
from jzero.model import tokenizer
from jzero.servers.limits import flag_name
from jzero.serving.http import refuse
from jzero.serving.limits import Limits
from jzero.serving.requests import RequestReader

LIMITS = Limits(max_request_sequences=8)
DOCS = Path(__file__).resolve().parents[2] / "docs" / "serve-and-export.md"


@pytest.fixture
def reader(alone):
    return alone.new_reader(LIMITS)


def body_of(**fields: object) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


# -- the flags ------------------------------------------------------------------------------------


def test_help_and_the_page_say_every_limit_and_its_default(capsys) -> None:
    with pytest.raises(SystemExit):
        serve.parse(["--help"])
    help_text = " ".join(capsys.readouterr().out.split())
    rows = re.findall(r"^\| `(--[a-z-]+)` \| ([^|]+) \|", DOCS.read_text(), re.MULTILINE)
    defaults = {flag: default.strip() for flag, default in rows}
    for name, item in fields_of(Limits).items():
        flag = flag_name(name)
        assert float(defaults[flag]) == item.default
        assert re.search(rf"{flag} N [^()]*\(default {item.default}\)", help_text)


@pytest.mark.parametrize(
    "limits, message",
    [
        ({"max_body_bytes": 0}, "max_body_bytes=0 must be at least 1"),
        ({"request_seconds": float("nan")}, "request_seconds=nan must be "),
        ({"grace_seconds": float("inf")}, "grace_seconds=inf must be a finite number"),
        ({"grace_seconds": -1}, "grace_seconds=-1 must be at least 0"),
        ({"max_waiting_sequences": 100}, "--max-waiting-sequences=100: a request may have 256"),
    ],
)
def test_limits_that_make_no_sense_are_refused(limits, message) -> None:
    Limits().check()
    with pytest.raises(UserError, match=re.escape(message)):
        Limits(**limits).check()


# -- requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_times_n_are_bounded(reader, stream) -> None:
    body = body_of(prompt=["a"] * 4, n=2, stream=stream)
    assert reader.read(body, is_chat=False).count_sequences(is_chat=False) == 8
    message = "5 prompts and n=2: 10 sequences, and a request may have 8.*--max-request-sequences"
    with pytest.raises(UserError, match=message):
        reader.read(body_of(prompt=["a"] * 5, n=2, stream=stream), is_chat=False)
    with pytest.raises(UserError, match="1 prompts and n=9: 9 sequences"):
        reader.read(body_of(messages=[{"role": "user", "content": "a"}], n=9), is_chat=True)


def test_a_text_that_cannot_fit_is_not_tokenized(reader, monkeypatch) -> None:
    def refuse_to_encode(*_: object) -> list[int]:
        raise AssertionError("a text that cannot fit was tokenized")

    monkeypatch.setattr(tokenizer, "encode_releasing_gil", refuse_to_encode)
    longest = ROOM * reader.longest_token
    text = "x" * (longest + 1)
    message = f"has {longest + 1} characters: there is room for {ROOM} tokens"
    with pytest.raises(UserError, match=f"prompt 1 {message}"):
        reader.read(body_of(prompt=["a", text]), is_chat=False)
    with pytest.raises(UserError, match=f"prompt 0 {message}"):
        reader.read(body_of(messages=[{"role": "user", "content": text}]), is_chat=True)
    reader.read(body_of(prompt=text[1:]), is_chat=False)

    # What the template adds counts, too.
    request = reader.read(body_of(messages=[{"role": "user", "content": text[1:]}]), is_chat=True)
    with pytest.raises(UserError, match="prompt 0 has .* characters"):
        reader.make_sequences(request, is_chat=True)


def test_a_text_that_fits_is_never_refused_for_its_characters(alone) -> None:
    """The longest text of as many tokens as there is room for passes."""
    tok = tokenizer.countdown()
    reader = RequestReader("m", alone.engine, tok, LIMITS.max_request_sequences)
    pieces = {tokenizer.decode(tok, [i]): i for i in tok.get_vocab().values()}
    piece = max((piece for piece in pieces if len(tokenizer.encode(tok, piece * 2)) == 2), key=len)
    num_tokens = ROOM - 1
    text = piece * num_tokens
    assert len(piece) > 1 and len(tokenizer.encode(tok, text)) == num_tokens
    request = reader.read(body_of(prompt=text, max_tokens=1), is_chat=False)
    [sequence] = reader.make_sequences(request, is_chat=False)
    assert len(sequence.prompt_tokens) == num_tokens


def test_a_completion_and_a_chat_begin_with_the_first_token_once(alone) -> None:
    """The tokenizer gives it to a text, the chat template writes it itself: as with Llama's."""
    tok = tokenizer.countdown()
    tok.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", tok.pad_token_id)]
    )
    tok.chat_template = "{{ '<|pad|>' }}{{ messages[0]['content'] }}"
    reader = RequestReader("m", alone.engine, tok, LIMITS.max_request_sequences)
    expected = [tok.pad_token_id, *tokenizer.encode(tok, "1+2")]

    text = reader.read(body_of(prompt="1+2", max_tokens=1), is_chat=False)
    ids = reader.read(body_of(prompt=expected[1:], max_tokens=1), is_chat=False)
    chat = reader.read(
        body_of(messages=[{"role": "user", "content": "1+2"}], max_tokens=1), is_chat=True
    )

    [of_text] = reader.make_sequences(text, is_chat=False)
    [of_ids] = reader.make_sequences(ids, is_chat=False)
    [of_chat] = reader.make_sequences(chat, is_chat=True)
    assert of_text.prompt_tokens.tolist() == of_chat.prompt_tokens.tolist() == expected
    assert of_ids.prompt_tokens.tolist() == expected[1:]  # ids are taken as they are


# A megabyte each. Every wrong element of a list used to be an error of its own: most of a minute.
LONG_BODIES = {
    "numbers that are not tokens": {"prompt": [1.5] * 200_000},
    "numbers among texts": {"prompt": ["a", *[5] * 300_000]},
    "many tokens": {"prompt": [5] * 300_000},
    "long lists of what is not a token": {"prompt": [[1.5] * 90] * 2000},
    "one list of many tokens": {"prompt": [[5] * 300_000]},
    "prompts": {"prompt": [[5]] * 200_000},
    "messages": {"messages": [{"role": "user", "content": "a"}] * 20_000},
    "a message of many fields": {"messages": [{f"{i}": "a" for i in range(60_000)}]},
    "messages that are none": {"messages": [{"role": 5, "content": 5}] * 90},
    "stop strings": {"prompt": "a", "stop": [""] * 200_000},
    "a long stop string": {"prompt": "a", "stop": "x" * 900_000},
    "stream options": {"prompt": "a", "stream_options": {f"{i}": 5 for i in range(60_000)}},
    "options": {"prompt": "a", **{f"{i}": 5 for i in range(60_000)}},
    "a long option": {"prompt": "a", "colour": "x" * 900_000},
}


@pytest.mark.parametrize("name", LONG_BODIES)
def test_a_long_body_is_refused_quickly_and_briefly(reader, name) -> None:
    body = body_of(**LONG_BODIES[name])
    start = time.thread_time()
    with pytest.raises(ValueError) as refused:
        reader.read(body, is_chat=name.endswith("messages") or "message" in name)
    assert time.thread_time() - start < 2
    answer = next_value(refuse(None, refused.value))
    assert answer.status_code == 400 and len(answer.body) < 2000


def next_value(coroutine):
    """Returns the result of a coroutine that does not wait for anything."""
    with pytest.raises(StopIteration) as ended:
        coroutine.send(None)
    return ended.value.value


def test_other_threads_run_while_a_text_is_tokenized() -> None:
    """The event loop is one of them: it did not run while 20 MB were tokenized."""
    tok = tokenizer.countdown()
    text = "3 + 4 = 7 and so on " * 5000
    started, ended = threading.Event(), threading.Event()
    got: list[list[int]] = []

    def encode() -> None:
        started.set()
        got.append(tokenizer.encode_releasing_gil(tok, text))
        ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    started.wait()
    num_turns = 0
    while not ended.is_set():
        num_turns += 1
        time.sleep(0.001)
    thread.join()
    assert num_turns > 5
    assert got[0] == tokenizer.encode(tok, text)
