"""The tokens of episodes with tools: what the chat template writes, and none of it twice."""

import json
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from tiny import QWEN3_CODER, QWEN25, QWEN25_TOOLS, make_untrained_sampler, tiny_settings

from jzero import config
from jzero.decoder.sequence import Sequence
from jzero.decoder.serialization import rollouts_from_bytes, rollouts_to_bytes
from jzero.environments.tools import episodes as tool_episodes
from jzero.errors import UserError
from jzero.model import tokenizer
from jzero.rollout.rollout_metrics import rollout_metrics
from jzero.rollout.sampler import Sampler, to_rollout, with_turn_grades
from jzero.rollout.turns import TurnGrader
from jzero.run import trajectories
from jzero.tasks import arithmetic
from jzero.types import Problem, Rollout, Turn, grade_of
from jzero.workers.pool import Pool


def in_json(expression: str, name: str = "calculator") -> str:
    call = {"name": name, "arguments": {"expression": expression}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def in_tags(expression: str, name: str = "calculator") -> str:
    return (
        f"<tool_call>\n<function={name}>\n<parameter=expression>\n{expression}\n</parameter>\n"
        "</function>\n</tool_call>"
    )


class Spoken(NamedTuple):
    """A response, and whether the policy wrote the end of its turn."""

    text: str
    has_end: bool = True


class Episode(NamedTuple):
    sequence: Sequence
    problem: Problem
    is_over: bool


def make_sampler(pool: Pool, task: dict[str, object], **model: str) -> Sampler:
    settings = tiny_settings(
        model={"arch": config.tiny_arch(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=8), **model},
        task=task,
        rollout={
            "max_prompt_tokens": 400,
            "max_new_tokens": 400,
            "max_turns": 4,
            "max_reply_tokens": 200,
            "num_slots": 2,
        },
        train={"microbatch_tokens": 4096, "packs_per_row": 1},
    )  # fmt: skip
    return make_untrained_sampler(settings, pool)


def speak(sampler: Sampler, problem: Problem, responses: SequenceOf[Spoken]) -> Episode:
    """Plays an episode in which the policy samples the tokens of `responses`."""
    tok = sampler.tokenizer
    engine = sampler.engine
    grader = TurnGrader(
        sampler.pool, sampler.task, engine.settings, engine.stop_ids, tok, [problem].__getitem__
    )
    sequence = Sequence(0, 0, 0, sampler.encode_prompt(problem), 10_000)
    is_over = False
    for response in responses:
        assert not is_over
        start = len(sequence)
        sampled = tokenizer.encode(tok, response.text)
        if response.has_end:
            sampled.append(sampler.engine.stop_ids[0])
        sequence.tokens.append(sampled, sampled=True, versions=3, logps=-1.0)
        sequence.turn_text = tokenizer.decode(tok, sampled)
        reason = "stop" if response.has_end else "length"
        sequence.turns.append(Turn(start, len(sequence), sequence.turn_text, reason))
        grader.submit(sequence)
        [(_, between)] = grader.poll_replies(wait=True)
        if between is None:
            is_over = True
        else:
            sequence.tokens.append(between)
    return Episode(sequence, problem, is_over)


@pytest.mark.parametrize("has_end", [True, False])
@pytest.mark.parametrize(
    "template, write", [(QWEN25_TOOLS, in_json), (QWEN3_CODER, in_tags)], ids=["json", "xml"]
)
def test_the_policy_sees_what_the_template_writes(
    shared: Path, template: str, write: object, has_end: bool
) -> None:
    """Several calls in a turn, errors, and text around them: all tokens are the template's."""
    assert callable(write)
    syntax = "json" if write is in_json else "xml"
    task = {
        "name": "gsm8k",
        "template": "chat",
        "turn_reward": "score",
        "tools": config.ToolsConfig(names=("calculator",), syntax=syntax),
    }
    responses = [
        Spoken(f"I multiply.\n{write('6*7')}\n{write('1/0')}", has_end),
        Spoken(f"{write('2+2', 'abacus')}\n<tool_call>\nnonsense\n</tool_call>", has_end),
        Spoken("The answer is \\boxed{42}."),
    ]
    prompt = [{"role": "user", "content": "What is 6*7?"}]
    problem = Problem("1", "gsm8k", prompt, {"answer": "42", "question": ""})
    with Pool(1) as pool:
        sampler = make_sampler(pool, task, tokenizer=str(shared / "data/qwen2_tokenizer"))
        sampler.tokenizer.chat_template = template
        sequence, _, is_over = speak(sampler, problem, responses)

    conversation: list[dict[str, str]] = list(prompt)
    for turn in sequence.turns:
        conversation.append({"role": "assistant", "content": turn.text})
        reply = grade_of(turn).reply
        if reply is not None:
            assert isinstance(reply, list)
            conversation += reply
    written = sampler.tokenizer.apply_chat_template(
        conversation, tools=tool_episodes.schemas(sampler.task), tokenize=True, return_dict=False
    )
    tokens = sequence.tokens.ids.tolist()
    assert written[: len(tokens)] == tokens
    assert len(written) - len(tokens) <= 1  # the newline after the last message
    assert is_over and [message["role"] for message in conversation] == [
        *["user", "assistant", "tool", "tool", "assistant", "tool", "tool", "assistant"]
    ]
    said = [message["content"] for message in conversation if message["role"] == "tool"]
    assert said[0] == "42" and "ZeroDivisionError" in said[1]
    assert "no tool 'abacus'" in said[2] and said[3].startswith("Error: ")
    # What the tools said is not sampled, and so is not trained on.
    sampled = to_rollout(problem, sequence).tokens.sampled
    expected = np.zeros(len(tokens), bool)
    for turn in sequence.turns:
        expected[turn.start : turn.end] = True
    np.testing.assert_array_equal(sampled, expected)


def test_a_template_that_shows_no_tools_is_refused(shared: Path) -> None:
    tok = tokenizer.load(str(shared / "data/qwen2_tokenizer"))
    tok.chat_template = QWEN25
    prompt = [{"role": "user", "content": "6*7?"}]
    schema = {"type": "function", "function": {"name": "calculator"}}
    with pytest.raises(UserError, match="does not show tools"):
        tokenizer.prompt_ids(tok, prompt, [schema])


def multiply(pool: Pool) -> Episode:
    """Plays an episode of the recipe configs/calculator.py."""
    task = {
        "name": "arithmetic",
        "template": "plain",
        "turn_reward": "score",
        "tools": config.ToolsConfig(names=("calculator",)),
    }
    sampler = make_sampler(pool, task)
    [problem] = arithmetic.train_problems(sampler.task, 0, 0, 1)
    assert isinstance(problem.prompt, str)
    expression = problem.prompt.removesuffix("=\n")
    responses = [Spoken(arithmetic.call_of(expression)), Spoken(str(problem.gold))]
    return speak(sampler, problem, responses)


def graded(episode: Episode) -> Rollout:
    rollout = to_rollout(episode.problem, episode.sequence)
    return with_turn_grades(rollout, [grade_of(turn) for turn in rollout.turns])


def test_warm_start_examples_are_the_turns_of_an_episode() -> None:
    """To the token: the examples of the recipe are what the policy sees in its episodes."""
    with Pool(1) as pool:
        episode = multiply(pool)
    tok = tokenizer.countdown()
    with_tool = config.TaskConfig(tools=config.ToolsConfig(names=("calculator",)))
    texts = [arithmetic.example(with_tool, 0, index, 1.0) for index in range(40)]
    has_call = ["<tool_call>" in text for text, _ in texts]
    calls = ["<tool_call>" in response for _, response in texts]
    assert any(has_call) and any(calls) and not all(map(max, zip(has_call, calls, strict=True)))
    without = [arithmetic.example(config.TaskConfig(), 0, index, 1.0) for index in range(40)]
    assert not any("<tool_call>" in text + response for text, response in without)

    index = has_call.index(True)
    prompt, response = texts[index]
    assert eval_product(prompt) == response
    question, call = prompt.split("<|endoftext|>")[0].split("\n")
    result = prompt.split("<|endoftext|>")[1].strip()
    expression = question.removesuffix("=")
    assert call == arithmetic.call_of(expression)
    # The same question in an episode gives the same tokens.
    text = tok.backend_tokenizer.decode(
        episode.sequence.tokens.ids.tolist(), skip_special_tokens=False
    )
    played = str(episode.problem.prompt).removesuffix("=\n")
    as_played = prompt.replace(expression, played).replace(result, str(episode.problem.gold))
    assert text == f"{as_played}{episode.problem.gold}<|endoftext|>"
    assert max(len(tokenizer.encode(tok, response)) for _, response in texts) < (
        arithmetic.max_tokens(with_tool, 1.0)
    )


def eval_product(prompt: str) -> str:
    first, second = prompt.split("=")[0].split("*")
    return str(int(first) * int(second))


def test_calls_are_counted_and_written_down(tmp_path: Path) -> None:
    with Pool(1) as pool:
        rollout = graded(multiply(pool))

    metrics = rollout_metrics([rollout], 1)

    assert grade_of(rollout).correct and grade_of(rollout).score == 1.0
    assert metrics["tools/calls"] == 1 and metrics["tools/failed"] == 0
    assert metrics["tools/seconds"] > 0 and metrics["turns/mean"] == 2
    no_calls = replace(rollout, grade=replace(grade_of(rollout), tool_calls=0))
    assert "tools/calls" not in rollout_metrics([no_calls], 1)
    [restored] = rollouts_from_bytes([rollouts_to_bytes([rollout])])
    assert restored.turns == rollout.turns
    trajectories.write_trajectories(tmp_path / "trajectories", [rollout])
    [path] = tmp_path.glob("trajectories/*/*.txt")
    assert f"--- reply\n[calculator] {rollout.problem.gold}\n" in path.read_text()
