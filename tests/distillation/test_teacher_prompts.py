"""The prompt that a teacher reads in place of the policy's."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import reference

from jzero.distillation.prompts import TeacherPrompts, fill_prompt, read_template
from jzero.errors import UserError
from jzero.model import tokenizer
from jzero.types import Problem

PROBLEM = Problem("p/1", "math", "What is 2 + 3?", "5")


def test_question_and_answer_go_where_their_names_are() -> None:
    assert fill_prompt("{prompt} ({gold}) \\boxed{}", PROBLEM) == "What is 2 + 3? (5) \\boxed{}"


def test_fields_of_a_gold_answer_have_their_names() -> None:
    problem = replace(PROBLEM, gold={"numbers": [1, 2], "target": 3})

    assert fill_prompt("{prompt} {numbers} {target}", problem) == "What is 2 + 3? [1, 2] 3"
    assert fill_prompt("{gold}", problem) == '{"numbers": [1, 2], "target": 3}'


def test_what_stands_in_a_problem_is_no_template() -> None:
    problem = replace(PROBLEM, prompt="Is {gold} a name?")

    assert fill_prompt("{prompt}", problem) == "Is {gold} a name?"


def test_of_a_chat_the_last_message_is_replaced() -> None:
    messages = [{"role": "system", "content": "Think."}, {"role": "user", "content": "2 + 3?"}]

    filled = fill_prompt("{prompt} It is {gold}.", replace(PROBLEM, prompt=messages))

    assert filled == [messages[0], {"role": "user", "content": "2 + 3? It is 5."}]
    assert messages[1]["content"] == "2 + 3?"


def test_a_name_without_a_value_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(UserError, match=r"{hint}, and .* have {prompt}, {gold}"):
        fill_prompt("{prompt} {hint}", PROBLEM)


def test_a_template_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "hint"
    path.write_text("{prompt}\n\nHint: {gold}\n")
    assert read_template(str(path)) == "{prompt}\n\nHint: {gold}"

    path.write_text("no question\n")
    with pytest.raises(UserError, match="does not hold the question"):
        read_template(str(path))


def test_what_follows_the_prompt_is_what_the_policy_has_read_and_sampled() -> None:
    [rollout] = reference.random_rollouts(0, 1, 1)
    tok = tokenizer.countdown()
    rollout = replace(rollout, problem=replace(PROBLEM, prompt="1 2=3\n", gold="1+2"))

    found = TeacherPrompts("{gold} {prompt}", 12, tok).sequence_of(rollout)

    assert found is not None
    tokens, prompt_length = found
    assert tokens[:prompt_length].tolist() == tokenizer.encode(tok, "1+2 1 2=3\n")
    np.testing.assert_array_equal(
        tokens[prompt_length:], rollout.tokens.ids[rollout.prompt_length :]
    )
    assert TeacherPrompts("{gold} {prompt}", prompt_length - 1, tok).sequence_of(rollout) is None
