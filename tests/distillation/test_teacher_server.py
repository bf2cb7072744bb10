"""The client of a server that scores: what it sends and reads, and what it does at a failure."""

import socket
import threading
import time

import numpy as np
import pytest
from scoring_server import MODEL_NAME, ScoringServer, served
from test_teachers import MODEL, PARAMS, TOKENIZER

from jzero import http
from jzero.config import teachers
from jzero.distillation.server import ScoringClient, check_tokens
from jzero.errors import UserError

IDS = [3, 1, 4, 1, 5]


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Returns the longest pauses between tries, which are not waited for."""
    planned: list[float] = []

    def pause_after(number: int, first_pause: float) -> float:
        planned.append(first_pause * 2**number)
        return 0.0

    monkeypatch.setattr(http, "pause_after", pause_after)
    return planned


def client_of(url: str, **changes: object) -> ScoringClient:
    return ScoringClient(teachers.Server(url=url, **changes))


def reply_with(choice: object):
    def answer(path: str, body: dict) -> tuple[int, object]:
        return 200, {"data": [{"id": "m"}], "choices": [choice]}

    return answer


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("request_form", ["echo", "prompt_logprobs"])
def test_log_probs_are_the_models_in_the_order_of_the_prompts(request_form: str) -> None:
    model = ScoringServer(PARAMS, MODEL, TOKENIZER)
    prompts = [[2, 7, *range(length)] for length in (9, 1, 17, 3, 30, 5)]

    with served(model.answer) as url:
        scored = client_of(url, request=request_form, concurrency=3).score_all(prompts)

    for prompt, logps in zip(prompts, scored, strict=True):
        np.testing.assert_allclose(logps[1:], model.logps(prompt)[1:], atol=1e-6)
        assert logps[0] == 0
    for body in model.bodies:
        assert body["model"] == MODEL_NAME
        assert body["prompt"] in prompts
    common = {"model", "prompt", "max_tokens", "temperature"}
    [fields] = {frozenset(body) - common for body in model.bodies}
    assert fields == ({"echo", "logprobs"} if request_form == "echo" else {"prompt_logprobs"})


def test_tokens_that_a_server_makes_behind_the_prompt_are_left_out() -> None:
    values = [None, -1.0, -2.0, -3.0, -4.0, -9.0]
    with served(reply_with({"logprobs": {"token_logprobs": values}})) as url:
        [logps] = client_of(url).score_all([IDS])

    assert logps.tolist() == [0, -1, -2, -3, -4]


def test_a_server_that_is_busy_is_asked_again(pauses: list[float]) -> None:
    statuses = [503, 429, 200]

    def answer(path: str, body: dict) -> tuple[int, object]:
        choice = {"logprobs": {"token_logprobs": [None, -1, -1, -1, -1]}}
        return statuses.pop(0), {"choices": [choice]}

    with served(answer) as url:
        [logps] = client_of(url, model="m").score_all([IDS])

    assert logps[1:].tolist() == [-1] * 4
    assert pauses[:2] == [1.0, 2.0]


def test_a_server_that_stays_down_is_one_line(pauses: list[float]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(UserError, match=r"not answered in 3 tries \(.*[Rr]efused.*the same com"):
        client_of(url, model="m", retries=2).score_all([IDS])
    assert pauses[:2] == [1.0, 2.0]


def test_a_server_that_is_too_slow_is_a_failure() -> None:
    answered = threading.Event()

    def answer(path: str, body: dict) -> tuple[int, object]:
        answered.wait(30)
        return 200, {}

    with served(answer) as url:
        start = time.monotonic()
        with pytest.raises(UserError, match=r"in 1 try \(.*timed out"):
            client_of(url, model="m", retries=0, seconds=0.2).score_all([IDS])
        answered.set()
    assert time.monotonic() - start < 20


def test_a_refusal_is_not_tried_again(pauses: list[float]) -> None:
    def answer(path: str, body: dict) -> tuple[int, object]:
        return 400, {"error": {"message": "this model takes 4 tokens"}}

    with (
        served(answer) as url,
        pytest.raises(UserError, match=r"refuses a request \(status 400: .*takes 4 tokens"),
    ):
        client_of(url, model="m").score_all([IDS])
    assert pauses == []


@pytest.mark.parametrize(
    ("choice", "request_form", "message"),
    [
        ({"text": "x"}, "echo", "0 log-probs of 5 tokens"),
        ({"logprobs": {"token_logprobs": [-1.0]}}, "echo", "1 log-probs of 5 tokens"),
        ({"logprobs": {"token_logprobs": [None, -1, None, -1, -1]}}, "echo", "token 2 is None"),
        (
            {"logprobs": {"token_logprobs": [None, -1, "-1", -1, -1]}},
            "echo",
            "token 2 is -1 and not a number",
        ),
        (
            {"logprobs": {"token_logprobs": [None, 7.0, -1, -1, -1]}},
            "echo",
            "token 1 is 7.0 and not a number",
        ),
        ({"prompt_logprobs": [None, {"9": {"logprob": -1}}]}, "prompt_logprobs", "2 log-probs"),
        ({"prompt_logprobs": [None, *[{"9": {}}] * 4]}, "prompt_logprobs", "none of token 1"),
        ("no choice", "echo", "choices.0 is no choice and not an object"),
    ],
)
def test_a_reply_without_the_log_probs_is_one_line(
    choice: object, request_form: str, message: str
) -> None:
    with served(reply_with(choice)) as url, pytest.raises(UserError, match=message) as raised:
        client_of(url, request=request_form).score_all([IDS])
    assert f"teacher.request={request_form}" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_is_no_api_is_one_line() -> None:
    with (
        served(lambda path, body: (200, b"<html>")) as url,
        pytest.raises(
            UserError, match="not valid JSON: .*give the address of an OpenAI-compatible API"
        ),
    ):
        client_of(url, model="m").score_all([IDS])


def test_of_several_models_one_has_to_be_named() -> None:
    def answer(path: str, body: dict) -> tuple[int, object]:
        return 200, {"data": [{"id": "a"}, {"id": "b"}]}

    with served(answer) as url, pytest.raises(UserError, match=r"models a, b: set teacher\.model"):
        client_of(url).score_all([IDS])


def test_a_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, str]] = []
    choice = {"logprobs": {"token_logprobs": [None, -1, -1, -1, -1]}}
    with served(reply_with(choice), sent) as url:
        client_of(url).score_all([IDS])
        assert "Authorization" not in sent[-1]

        named = client_of(url, key_variable="KEY_OF_THE_TEACHER")
        with pytest.raises(UserError, match="KEY_OF_THE_TEACHER is not set"):
            named.score_all([IDS])
        monkeypatch.setenv("KEY_OF_THE_TEACHER", "abc")
        client_of(url, key_variable="KEY_OF_THE_TEACHER").score_all([IDS])
    assert sent[-1]["Authorization"] == "Bearer abc"


@pytest.mark.usefixtures("quick_compilation")
def test_a_server_with_another_vocabulary_is_refused() -> None:
    model = ScoringServer(PARAMS, MODEL, TOKENIZER)

    def shifted(path: str, body: dict) -> tuple[int, object]:
        """Answers as a server whose tokens have other numbers."""
        status, reply = model.answer(path, body)
        if path.endswith("/completions"):
            logprobs = reply["choices"][0]["logprobs"]
            logprobs["tokens"] = logprobs["tokens"][5:] + logprobs["tokens"][:5]
        return status, reply

    with served(model.answer) as url:
        check_tokens(client_of(url), TOKENIZER)
    with served(shifted) as url, pytest.raises(UserError, match="another vocabulary than the poli"):
        check_tokens(client_of(url), TOKENIZER)
