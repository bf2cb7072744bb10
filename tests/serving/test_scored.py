"""Log-probabilities of prompts and of alternatives over HTTP, and choices that share a prefill."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import jax.numpy as jnp
import numpy as np
import openai
import pytest
from servers import NUM_SLOTS, Alone, load_alone, save_model, threaded_server, wait_for

from jzero.attention import xla
from jzero.model import qwen, tokenizer
from jzero.serving.limits import Limits
from jzero.serving.worker import DecodingWorker
from jzero.types import RowLayout

LIMITS = Limits(max_request_sequences=2 * NUM_SLOTS, max_request_logprobs=1000)
TEXT = "3 + 4 = 7, Grüße"
GREETING = [{"role": "user", "content": "Grüße"}]

pytestmark = pytest.mark.usefixtures("quick_compilation")


@dataclass
class Served:
    """A server of this process that decodes."""

    alone: Alone
    worker: DecodingWorker
    url: str

    def post(self, path: str = "completions", **body: object) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/{path}", json={"model": "m", **body}, timeout=120)

    def complete(self, **body: object) -> dict:
        answer = self.post(**body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chat(self, **body: object) -> dict:
        answer = self.post("chat/completions", messages=GREETING, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def encode(self, text: str) -> list[int]:
        return tokenizer.encode(self.alone.tokenizer, text)

    def piece(self, token: int) -> str:
        return self.alone.tokenizer.backend_tokenizer.decode([token], skip_special_tokens=False)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    # Its engine is its own, because its thread never ends.
    alone = load_alone(save_model(tmp_path_factory.mktemp("scored") / "model"))
    server = alone.new_server(LIMITS)
    arguments = alone.params, alone.key
    threading.Thread(target=server.worker.serve, args=arguments, daemon=True).start()
    with threaded_server(server, LIMITS) as running:
        yield Served(alone, server.worker, running.url)


@pytest.fixture(scope="module")
def logps_of(served) -> Callable[[list[int]], np.ndarray]:
    """tokens -> the log-probabilities [tokens - 1, vocabulary] of what follows each of them."""

    def whole_forward(ids: list[int]) -> np.ndarray:
        model = served.alone.engine.model
        tokens = jnp.array([ids[:-1]], jnp.int32)
        segments = jnp.ones_like(tokens)

        def attend(q, k, v, layer, carry):
            return xla.packed(q, k, v, segments, RowLayout(0, 1, tokens.shape[1])), carry

        positions = jnp.arange(tokens.shape[1])[None]
        params = served.alone.params
        hidden, _ = qwen.forward(model, params, tokens, positions, attend, dtype=jnp.float32)
        logits = np.asarray(qwen.head(model, params, hidden, jnp.float32), np.float64)[0]
        return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)

    return whole_forward


def of_tokens(logps: np.ndarray, ids: list[int]) -> np.ndarray:
    return logps[np.arange(len(ids) - 1), ids[1:]]


# -- the prompt -----------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("logprobs", [0, 1, 4])
def test_echo_has_the_prompts_log_probs_and_alternatives(
    served, logps_of, logprobs, max_tokens
) -> None:
    ids = served.encode(TEXT)
    options = {"logprobs": logprobs, "max_tokens": max_tokens, "temperature": 0}
    answer = served.complete(prompt=ids, echo=True, return_token_ids=True, **options)
    [choice] = answer["choices"]
    all_ids = ids + choice["token_ids"]
    assert choice["prompt_token_ids"] == ids and len(all_ids) == len(ids) + max_tokens
    assert choice["text"].startswith(TEXT) and choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == max_tokens

    got, want = choice["logprobs"], logps_of(all_ids)
    assert got["tokens"] == [served.piece(token) for token in all_ids]
    assert got["text_offset"] == [len("".join(got["tokens"][:i])) for i in range(len(all_ids))]
    assert got["token_logprobs"][0] is None and got["top_logprobs"][0] is None
    np.testing.assert_allclose(got["token_logprobs"][1:], of_tokens(want, all_ids), atol=1e-4)
    for i, best in enumerate(got["top_logprobs"][1:]):
        tokens = [*np.argsort(-want[i])[:logprobs], all_ids[i + 1]]
        expected: dict[str, float] = {}
        for token in tokens:
            piece = served.piece(int(token))
            expected[piece] = max(want[i, token], expected.get(piece, -np.inf))
        assert best == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("echo", [False, True])
def test_prompt_logprobs_are_those_of_vllm(served, logps_of, echo) -> None:
    ids = served.encode(TEXT)
    answer = served.complete(prompt=ids, max_tokens=1, echo=echo, prompt_logprobs=2)
    [choice] = answer["choices"]
    first, *rest = choice["prompt_logprobs"]
    want = logps_of(ids)
    assert first is None and len(rest) == len(ids) - 1 and choice["logprobs"] is None
    for i, by_token in enumerate(rest):
        best = np.argsort(-want[i])
        assert set(by_token) == {str(token) for token in (ids[i + 1], *best[:2])}
        for token, item in by_token.items():
            assert item["logprob"] == pytest.approx(want[i, int(token)], abs=1e-4)
            assert item["rank"] == 1 + best.tolist().index(int(token))
            assert item["decoded_token"] == served.piece(int(token))


def test_prompt_logprobs_of_0_have_the_prompts_tokens_alone(served, logps_of) -> None:
    ids = served.encode(TEXT)
    [choice] = served.complete(prompt=ids, max_tokens=0, prompt_logprobs=0)["choices"]
    got = [
        item[str(token)] for token, item in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True)
    ]
    assert all(len(item) == 1 for item in choice["prompt_logprobs"][1:])
    np.testing.assert_allclose(
        [item["logprob"] for item in got], of_tokens(logps_of(ids), ids), atol=1e-4
    )


def test_a_prompt_of_one_token_has_no_log_prob(served) -> None:
    options = {"echo": True, "logprobs": 1, "prompt_logprobs": 1}
    [choice] = served.complete(prompt=[5], max_tokens=0, **options)["choices"]
    assert choice["logprobs"]["token_logprobs"] == choice["prompt_logprobs"] == [None]


def test_prompts_of_a_list_are_scored_as_each_alone(served) -> None:
    texts = ["one", "two and more", TEXT * 4]
    options = {"echo": True, "logprobs": 2, "max_tokens": 0}
    together = served.complete(prompt=texts, **options)["choices"]
    for text, choice in zip(texts, together, strict=True):
        [alone] = served.complete(prompt=text, **options)["choices"]
        assert alone["text"] == choice["text"] == text
        got, want = choice["logprobs"], alone["logprobs"]
        np.testing.assert_allclose(got["token_logprobs"][1:], want["token_logprobs"][1:], atol=1e-5)


def test_a_chats_prompt_is_scored_and_told(served, logps_of) -> None:
    answer = served.chat(max_tokens=2, prompt_logprobs=0, return_token_ids=True)
    ids = answer["prompt_token_ids"]
    assert ids == served.encode("<user>Grüße\n<assistant>")
    got = [
        item[str(token)] for token, item in zip(ids[1:], answer["prompt_logprobs"][1:], strict=True)
    ]
    np.testing.assert_allclose(
        [item["logprob"] for item in got], of_tokens(logps_of(ids), ids), atol=1e-4
    )
    assert len(answer["choices"][0]["token_ids"]) == 2


# -- what is sampled ------------------------------------------------------------------------------


def test_alternatives_of_samples_are_at_the_sampling_temperature(served, logps_of) -> None:
    options = {"prompt": TEXT, "max_tokens": 8, "temperature": 0.5, "seed": 3}
    options["return_token_ids"] = True
    answer = served.complete(**options, logprobs=3, n=2)
    plain = served.complete(**options, n=2)
    prompt = served.encode(TEXT)
    for choice, unscored in zip(answer["choices"], plain["choices"], strict=True):
        assert choice["token_ids"] == unscored["token_ids"], "scoring changes no token"
        ids = prompt + choice["token_ids"]
        logits = logps_of(ids)[len(prompt) - 1 :] / 0.5
        want = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        got = choice["logprobs"]
        for i, best in enumerate(got["top_logprobs"]):
            token = choice["token_ids"][i]
            assert got["token_logprobs"][i] == pytest.approx(want[i, token], abs=1e-4)
            assert max(best.values()) == pytest.approx(want[i].max(), abs=1e-4)
            assert 1 <= len(best) <= 4


def test_a_chat_has_top_logprobs(served, logps_of) -> None:
    """As OpenAI's own client reads them."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="m",
            messages=GREETING,
            max_tokens=4,
            seed=1,
            logprobs=True,
            top_logprobs=3,
            extra_body={"return_token_ids": True},
        )
    rows = answer.choices[0].logprobs.content
    want = logps_of(answer.prompt_token_ids + answer.choices[0].token_ids)[-4:]
    for row, logps in zip(rows, want, strict=True):
        best = np.argsort(-logps)[:3]
        assert [item.token for item in row.top_logprobs] == [served.piece(i) for i in best]
        np.testing.assert_allclose(
            [item.logprob for item in row.top_logprobs], logps[best], atol=1e-4
        )


def test_the_choices_of_a_prompt_share_one_prefill_and_are_those_of_their_seeds(served) -> None:
    options = {"prompt": TEXT, "max_tokens": 12, "logprobs": 0, "return_token_ids": True}
    before = served.worker.counters.prefills
    together = served.complete(n=8, seed=11, **options)["choices"]
    assert served.worker.counters.prefills == before + 1
    alone = [served.complete(seed=11 + i, **options)["choices"][0] for i in range(8)]
    assert served.worker.counters.prefills == before + 9
    assert [choice["index"] for choice in together] == list(range(8))
    for got, want in zip(together, alone, strict=True):
        assert got["token_ids"] == want["token_ids"]
        np.testing.assert_allclose(
            got["logprobs"]["token_logprobs"], want["logprobs"]["token_logprobs"], atol=1e-5
        )
    assert len({tuple(choice["token_ids"]) for choice in together}) == 8


def test_more_choices_than_slots_share_a_prefill_and_one_scoring(served) -> None:
    before = served.worker.counters
    prefills, scored = before.prefills, before.scored_tokens
    num_prompt = len(served.encode(TEXT))
    answer = served.complete(prompt=TEXT, n=NUM_SLOTS + 4, max_tokens=3, echo=True, logprobs=0)
    assert served.worker.counters.prefills == prefills + 1
    assert served.worker.counters.scored_tokens == scored + num_prompt - 1
    logprobs = [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]]
    assert len(logprobs) == NUM_SLOTS + 4
    assert len({tuple(values[:num_prompt]) for values in logprobs}) == 1


def test_a_streams_pieces_have_the_token_ids_and_the_prompt_once(served) -> None:
    options = {"prompt": "Once", "max_tokens": 12, "seed": 2, "return_token_ids": True}
    want = served.complete(**options)["choices"][0]
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        extra = {"return_token_ids": True}
        stream = client.completions.create(
            model="m",
            prompt="Once",
            max_tokens=12,
            seed=2,
            echo=True,
            extra_body=extra,
            stream=True,
        )
        chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.text for chunk in chunks) == "Once" + want["text"]
    assert [token for chunk in chunks for token in chunk.token_ids] == want["token_ids"]
    assert chunks[0].prompt_token_ids == want["prompt_token_ids"] == served.encode("Once")
    assert len(chunks) > 1 and not hasattr(chunks[1], "prompt_token_ids")


# -- streams --------------------------------------------------------------------------------------

STREAMED = {
    "sampled": {"temperature": 0.7, "seed": 3},
    "greedy": {"temperature": 0},
    "choices": {"n": 3, "seed": 4},
    "stop string": {"temperature": 0, "stop": ["\ufffd"]},
    "one token": {"max_tokens": 1, "seed": 5},
}


def read_streams(served: Served, path: str, body: dict) -> dict[int, list[dict]]:
    """Returns the chunks of a streamed reply, by choice."""
    chunks: dict[int, list[dict]] = {}
    request = {"model": "m", "stream": True, **body}
    with httpx.stream("POST", f"{served.url}/v1/{path}", json=request, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    chunks.setdefault(choice["index"], []).append(choice)
    return chunks


def assert_same_tokens(got: list[dict], want: list[dict]) -> None:
    """Compares tokens of chats with their alternatives, whose numbers are rounded differently."""
    assert [row["token"] for row in got] == [row["token"] for row in want]
    for row, other in zip(got, want, strict=True):
        assert row["logprob"] == pytest.approx(other["logprob"], abs=1e-5)
        if "top_logprobs" in row:
            assert_same_tokens(row["top_logprobs"], other["top_logprobs"])


@pytest.mark.parametrize("case", STREAMED)
def test_a_streamed_chat_has_the_alternatives_of_the_whole_reply(served, case) -> None:
    body = {"messages": GREETING, "max_tokens": 40, "logprobs": True, "top_logprobs": 3}
    body |= STREAMED[case]
    want = served.post("chat/completions", **body).json()["choices"]
    streams = read_streams(served, "chat/completions", body)
    for choice in want:
        chunks = streams[choice["index"]]
        content = "".join(chunk["delta"]["content"] for chunk in chunks)
        assert content == choice["message"]["content"]
        assert chunks[-1]["finish_reason"] == choice["finish_reason"]
        tokens = [row for chunk in chunks for row in chunk["logprobs"]["content"]]
        assert_same_tokens(tokens, choice["logprobs"]["content"])


@pytest.mark.parametrize("case", STREAMED)
def test_a_streamed_completion_has_the_alternatives_of_the_whole_reply(served, case) -> None:
    body = {"prompt": TEXT, "max_tokens": 40, "logprobs": 2} | STREAMED[case]
    want = served.complete(**body)["choices"]
    streams = read_streams(served, "completions", body)
    for choice in want:
        chunks = streams[choice["index"]]
        assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
        got = [chunk["logprobs"] for chunk in chunks]
        expected = choice["logprobs"]
        assert [piece for part in got for piece in part["tokens"]] == expected["tokens"]
        logps = [logp for part in got for logp in part["token_logprobs"]]
        assert logps == pytest.approx(expected["token_logprobs"], abs=1e-5)
        best = [row for part in got for row in part["top_logprobs"]]
        for row, other in zip(best, expected["top_logprobs"], strict=True):
            assert row == pytest.approx(other, abs=1e-5)


def test_openais_client_reads_a_stream_with_top_logprobs_while_it_is_decoded(served) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="m",
            messages=GREETING,
            max_tokens=60,
            seed=1,
            logprobs=True,
            top_logprobs=5,
            stream=True,
        )
        chunks = [chunk.choices[0] for chunk in stream]
    # Not everything at the end: a later part begins where the scores before it end.
    assert len(chunks) > 2
    rows = [row for chunk in chunks for row in chunk.logprobs.content]
    assert len(rows) == 60 and all(len(row.top_logprobs) == 5 for row in rows)


def test_clients_that_leave_streams_with_alternatives_give_their_room_back(served) -> None:
    body = {"model": "m", "prompt": ["a" * 30] * 4, "max_tokens": 60, "logprobs": 2}
    url = f"{served.url}/v1/completions"
    for num_lines in (0, 1, 3):
        with httpx.stream("POST", url, json={**body, "stream": True}, timeout=120) as answer:
            for _ in zip(range(num_lines), answer.iter_lines(), strict=False):
                pass
    wait_for(lambda: served.worker.num_reserved == 0)
    wait_for(lambda: not served.worker.scoring)
    assert served.complete(prompt="a", max_tokens=2, logprobs=2)["choices"][0]["logprobs"]


# -- refusals and limits --------------------------------------------------------------------------

REFUSED = {
    "best_of": ({"best_of": 4}, "best_of=4: .* n=4"),
    "nothing": ({"max_tokens": 0}, "max_tokens=0: .* echo or prompt_logprobs"),
    "copies of nothing": ({"max_tokens": 0, "echo": True, "n": 2}, "omit n"),
    "a streamed prompt": ({"stream": True, "logprobs": 0, "echo": True}, "stream: .* echo"),
    "a stream's prompt": ({"stream": True, "prompt_logprobs": 0}, "stream: .* prompt_logprobs"),
    "too many": ({"logprobs": 21}, "20"),
    "chat's name": ({"top_logprobs": 2}, "give the number as logprobs"),
    "too many in all": (
        {"prompt": ["a" * 30] * 8, "max_tokens": 0, "echo": True, "logprobs": 4},
        "more than 1000 log-probabilities .* --max-request-logprobs",
    ),
    "too many of a sample": (
        {"prompt": "a", "n": 6, "max_tokens": 9, "logprobs": 20},
        "--max-request-logprobs",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_done_is_refused_with_what_to_do(served, case) -> None:
    body, message = REFUSED[case]
    answer = served.post(**{"prompt": "a", **body})
    assert answer.status_code == 400
    assert re.search(message, answer.json()["error"]["message"])


def test_best_of_n_is_n(served) -> None:
    assert len(served.complete(prompt="a", n=2, best_of=2, max_tokens=1)["choices"]) == 2


@pytest.mark.parametrize(
    "body, message", [({"echo": True}, "echo"), ({"top_logprobs": 2}, "set logprobs=true")]
)
def test_a_chat_refuses_what_is_not_its(served, body, message) -> None:
    answer = served.post("chat/completions", messages=GREETING, **body)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_a_client_that_leaves_gives_the_room_of_its_scorings_back(served) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{served.url}/v1/completions",
            json={"model": "m", "prompt": ["a" * 60] * 16, "max_tokens": 30, "prompt_logprobs": 0},
            timeout=0.05,
        )
    wait_for(lambda: served.worker.num_reserved == 0)
    wait_for(lambda: not served.worker.scoring)
    served.complete(prompt="a", max_tokens=0, prompt_logprobs=0)
