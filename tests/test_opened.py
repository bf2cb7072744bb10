"""`jzero.open`: a model in one line, for sampling and for scores."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import pytest
import reference

import jzero
from jzero import config
from jzero.errors import UserError
from jzero.model.base_model import read_base_model
from jzero.opened import OpenModel
from jzero.run.export_model import export_model

PROMPTS = ["1+1=", "23-4="]


@pytest.fixture(scope="module")
def model(
    tmp_path_factory: pytest.TempPathFactory, quickly: Callable[[], AbstractContextManager[None]]
) -> Iterator[OpenModel]:
    """An opened model of random weights in fp32."""
    directory = tmp_path_factory.mktemp("opened") / "model"
    arch = config.tiny_arch(hidden_size=32, intermediate_size=64, num_hidden_layers=1, head_dim=16)
    base = read_base_model(config.ModelConfig(arch=arch))
    rollout = config.RolloutConfig(max_prompt_tokens=16, max_new_tokens=24)
    export_model(directory, base, rollout, reference.random_params(base.model), "float32")
    sizes = {"max_prompt_tokens": 16, "max_new_tokens": 24, "num_slots": 8}
    with quickly(), jzero.open(str(directory), dtype="float32", **sizes) as opened:
        yield opened


def test_answers_come_in_groups_and_repeat_with_the_seed(model: OpenModel) -> None:
    first = model.generate(PROMPTS, n=3, seed=1, max_new_tokens=8)
    again = model.generate(PROMPTS, n=3, seed=1, max_new_tokens=8)
    other = model.generate(PROMPTS, n=3, seed=2, max_new_tokens=8)
    assert [len(group) for group in first] == [3, 3]

    def texts(groups: list) -> list[list[str]]:
        return [[answer.text for answer in group] for group in groups]

    assert texts(first) == texts(again) != texts(other)
    assert all(1 <= len(answer.tokens) <= 8 for group in first for answer in group)


def test_calls_without_a_seed_differ(model: OpenModel) -> None:
    first, second = (model.generate(PROMPTS[0], n=2) for _ in range(2))
    assert [answer.text for answer in first[0]] != [answer.text for answer in second[0]]


def test_scores_equal_the_log_probs_of_sampling(model: OpenModel) -> None:
    [[answer]] = model.generate(PROMPTS[1], greedy=True, max_new_tokens=12)
    [logps] = model.score(PROMPTS[1], answer.text)
    np.testing.assert_allclose(logps, answer.logps[: len(logps)], atol=1e-4)


def test_stop_ends_an_answer(model: OpenModel) -> None:
    [[answer]] = model.generate(PROMPTS[0], greedy=True)
    stop = answer.text[2:4]
    [[shorter]] = model.generate(PROMPTS[0], greedy=True, stop=stop)
    assert shorter.text == answer.text[: answer.text.index(stop)]
    assert shorter.finish_reason == "stop"


@pytest.mark.parametrize("control_tokens", [False, True])
def test_control_tokens_of_messages_follow_the_settings(
    model: OpenModel, control_tokens: bool
) -> None:
    tok = copy.deepcopy(model.sampler.tokenizer)
    tok.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    task = replace(model.sampler.task, control_tokens=control_tokens)
    opened = OpenModel(replace(model.sampler, tokenizer=tok, task=task), {}, model.pool)
    assert tok.eos_token is not None
    prompt = [{"role": "user", "content": tok.eos_token}]
    [ids] = opened._encode(prompt)
    assert (tok.eos_token_id in ids) == control_tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "n=0"),
        ({"max_new_tokens": 25}, "max_new_tokens=25"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"prompts": "1" * 40}, "give max_prompt_tokens to jzero.open"),
    ],
)
def test_wrong_arguments_are_named(
    model: OpenModel, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        model.generate(**({"prompts": PROMPTS} | arguments))


def test_closed_model_is_not_used(model: OpenModel) -> None:
    closed = OpenModel(model.sampler, model._weights(), model.pool)
    closed.weights = None
    with pytest.raises(UserError, match="jzero.open again"):
        closed.score(PROMPTS[0], "2")
