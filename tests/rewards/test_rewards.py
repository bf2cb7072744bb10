"""Rewards: the published values, properties of single rewards, and their weighted sum."""

import itertools
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jzero.answers import verdict
from jzero.config import RewardConfig, TaskConfig
from jzero.errors import UserError
from jzero.rewards import rewards
from jzero.types import Grade
from jzero.workers.pipe import TurnRequest
from jzero.workers.pool import Pool

GOOD = "<think>\nSome reasoning\n</think>\n<answer>\nThe answer\n</answer>"
ROUNDING = 1e-9


def batch_scores(
    correct: list[bool], lengths: list[int], function: str, **settings: Any
) -> list[float]:
    """Returns the scores by one reward of a batch of responses.

    The lengths are in characters. There are half as many tokens.
    """
    reward = RewardConfig(functions=(function,), **settings)
    grades = [Grade(float(is_correct), is_correct, "") for is_correct in correct]
    token_lengths = [length // 2 for length in lengths]
    graded = rewards.add_batch_rewards(grades, lengths, token_lengths, reward)
    return [grade.score for grade in graded]


# The published values


def overlong_reward(row: dict[str, Any]) -> Any:
    arguments = row["args"]
    return rewards.soft_overlong(
        np.array([True]),
        np.array([arguments["completion_len"]]),
        length=arguments["max_completion_len"],
        cache=arguments["soft_punish_cache"],
    )


def length_reward(row: dict[str, Any]) -> list[float]:
    """Returns the rewards of a case that compares the lengths of right and wrong responses."""
    correct = []
    for text in row["completions"]:
        correct.append(verdict.grade(text, row["solution"], template="boxed").correct)
    lengths = [len(text) for text in row["completions"]]
    if row["reward"] == "len_reward":
        return batch_scores(correct, lengths, "length")
    return batch_scores(correct, lengths, f"cosine(length={row['args']['max_len']})")


def response_reward(row: dict[str, Any]) -> list[float]:
    """Returns the rewards of a case whose function looks at single responses."""
    arguments = {}
    if row["reward"] == "repetition_penalty":
        arguments = {"ngram": row["args"]["ngram_size"], "most": row["args"]["max_penalty"]}
    function = rewards.RESPONSE_REWARDS[row["reward"].removesuffix("_reward")]
    return [function(text, **arguments) for text in row["completions"]]


def our_rewards(row: dict[str, Any]) -> Any:
    """Returns what jzero gives the responses of a published case."""
    if row["reward"] == "soft_overlong_punishment":
        return overlong_reward(row)
    if row["reward"] in ("cosine_scaled", "len_reward"):
        return length_reward(row)
    return response_reward(row)


def test_rewards_have_the_published_values(shared: Path) -> None:
    lines = (shared / "data/grader/reward_fn_cases.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]

    assert len(rows) >= 35
    for row in rows:
        decimals = 2 if "places=2" in row["source"] else 9
        np.testing.assert_allclose(
            our_rewards(row), row["expected"], atol=0.6 * 10**-decimals, err_msg=row["id"]
        )


# Rewards of one response


@pytest.mark.parametrize(
    ("text", "format_reward", "tag_count"),
    [
        pytest.param(GOOD, 1.0, 1.0, id="as it should be"),
        pytest.param(GOOD + "\n", 1.0, 1.0, id="newline at the end"),
        pytest.param("so: " + GOOD, 0.0, 1.0, id="text before"),
        pytest.param(GOOD.replace("\n", ""), 0.0, 0.0, id="no lines"),
        pytest.param(GOOD + "\n" + GOOD, 0.0, 0.0, id="twice"),
        pytest.param(GOOD.replace("Some", "<answer>"), 0.0, 1.0, id="tag in the thoughts"),
        pytest.param("", 0.0, 0.0, id="empty"),
    ],
)
def test_format_and_tags_are_rewarded(text: str, format_reward: float, tag_count: float) -> None:
    assert rewards.RESPONSE_REWARDS["format"](text) == format_reward
    assert rewards.RESPONSE_REWARDS["tag_count"](text) == tag_count


# The patterns of open-r1's format_reward: at its head, and at e4ac3ae.
OPEN_R1_FORMATS = {
    "open_r1_format": r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$",
    "open_r1_format_inline": r"^<think>.*?</think>\s*<answer>.*?</answer>$",
}
PIECES = ("<think>", "</think>", "<answer>", "</answer>", "\n", "\n", " ", "x", "\r", "\x0b")


@pytest.mark.parametrize("name", OPEN_R1_FORMATS)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=14), in_form=st.booleans())
def test_the_formats_of_open_r1_are_its_patterns(name, pieces, in_form) -> None:
    text = "".join(pieces)
    if in_form:  # random text alone rarely has the form
        text = f"<think>\n{text}\n</think>\n<answer>\n{text}\n</answer>{text}"
    pattern = re.compile(OPEN_R1_FORMATS[name], re.DOTALL | re.MULTILINE)
    expected = float(pattern.match(text) is not None)
    assert rewards.RESPONSE_REWARDS[name](text) == expected


@pytest.mark.parametrize("name", OPEN_R1_FORMATS)
def test_the_formats_of_open_r1_take_linear_time(name) -> None:
    text = "<think>\n" + 100_000 * "\n</think>\n<answer>\n"
    start = time.process_time()
    assert rewards.RESPONSE_REWARDS[name](text) == 0
    assert time.process_time() - start < 1


@pytest.mark.parametrize("correct", [True, False])
def test_open_r1_cosine_rises_again_beyond_its_length(correct) -> None:
    lengths = [0, 500, 1000, 1500, 2000]
    scores = batch_scores([correct] * 5, lengths, "open_r1_cosine(length=1000)")
    low, high = (0.5, 1.0) if correct else (-0.5, -1.0)
    expected = [low + 0.5 * (high - low) * (1 + math.cos(math.pi * n / 1000)) for n in lengths]
    np.testing.assert_allclose(scores, expected, atol=ROUNDING)
    constant = batch_scores([correct] * 5, lengths, "cosine")
    np.testing.assert_allclose(constant[:3], expected[:3], atol=ROUNDING)
    assert constant[3] == constant[4] == constant[2]


ONE_LINE = "<think>Two and two is 4.</think> <answer>4</answer>"


@pytest.mark.parametrize(
    ("text", "format_inline", "tag_count_inline"),
    [
        pytest.param(ONE_LINE, 1.0, 1.0, id="one line"),
        pytest.param(ONE_LINE.replace(" <a", "<a") + "\n", 1.0, 1.0, id="no space"),
        pytest.param(GOOD, 1.0, 1.0, id="several lines"),
        pytest.param("so: " + ONE_LINE, 0.0, 1.0, id="text before"),
        pytest.param(ONE_LINE + " done", 0.0, 1.0, id="text after"),
        pytest.param(ONE_LINE.replace(" <a", " so <a"), 0.0, 1.0, id="text between"),
        pytest.param(ONE_LINE + ONE_LINE, 0.0, 0.0, id="twice"),
        pytest.param("<answer>4</answer><think>x</think>", 0.0, 1.0, id="wrong order"),
        pytest.param("<think>x</think> 4", 0.0, 0.5, id="no answer"),
        pytest.param("", 0.0, 0.0, id="empty"),
    ],
)
def test_the_form_of_one_line_is_rewarded(
    text: str, format_inline: float, tag_count_inline: float
) -> None:
    assert rewards.RESPONSE_REWARDS["format_inline"](text) == format_inline
    assert rewards.RESPONSE_REWARDS["tag_count_inline"](text) == tag_count_inline


# Rewards of lengths

BATCHES = st.lists(st.tuples(st.booleans(), st.integers(0, 3000)), min_size=1, max_size=8)
Batch = list[tuple[bool, int]]  # (is correct, length) of every response


def scores_of(batch: Batch, function: str) -> list[float]:
    correct = [is_correct for is_correct, _ in batch]
    lengths = [length for _, length in batch]
    return batch_scores(correct, lengths, function)


@pytest.mark.parametrize(
    ("function", "low", "high"),
    [("length", -0.5, 0.5), ("cosine", -1.0, 1.0), ("soft_overlong", -1.0, 0.0)],
)
@given(batch=BATCHES)
def test_length_rewards_are_bounded(function: str, low: float, high: float, batch: Batch) -> None:
    for score in scores_of(batch, function):
        assert low - ROUNDING <= score <= high + ROUNDING


@pytest.mark.parametrize("function", ["length", "cosine", "soft_overlong"])
@given(batch=BATCHES)
def test_length_rewards_favour_short_right_answers(function: str, batch: Batch) -> None:
    scores = scores_of(batch, function)

    lengths_and_scores = []
    for (is_correct, length), score in zip(batch, scores, strict=True):
        if is_correct:
            lengths_and_scores.append((length, score))
    for (_, score), (_, score_of_longer) in itertools.pairwise(sorted(lengths_and_scores)):
        assert score >= score_of_longer - ROUNDING


@given(batch=BATCHES)
def test_the_length_reward_of_a_wrong_answer_is_not_positive(batch: Batch) -> None:
    scores = scores_of(batch, "length")

    for (is_correct, _), score in zip(batch, scores, strict=True):
        assert is_correct or score <= ROUNDING


def test_lengths_are_characters_or_tokens() -> None:
    assert batch_scores([True], [1000], "cosine") == [0.5]
    assert batch_scores([True], [1000], "cosine", unit="tokens") == [pytest.approx(0.75)]


def test_the_overlong_reward_counts_tokens() -> None:
    scores = batch_scores([True], [40], "soft_overlong(length=22, cache=4)")

    assert scores == [-0.5]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("cosine(len=3)", "the arguments of cosine are length, right_short, right_long, wrong_"),
        ("cosine(3)", "the arguments of cosine are length, "),
        ("accuracy(x=1)", "the arguments of accuracy are none"),
        ("cosine(length=0)", "length must be a whole number between 1 and 1e"),
        ("cosine(length=1.5)", "length must be a whole number"),
        ("cosine(length=True)", "length must be a whole number"),
        ("cosine(right_long=1e999)", "right_long must be a number between -1e"),
        ("repetition_penalty(most=1.0)", "most must be a number between -1e+09 and 0"),
        ("repetition_penalty(ngram='x')", "ngram must be a whole number"),
        ("cosine(length=2000", "close the bracket"),
        ("cosine(length=print())", "the arguments of a factory are numbers"),
    ],
)
def test_arguments_that_a_function_does_not_have_are_refused(function: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        rewards.check_rewards(RewardConfig(functions=(function,)))
    assert str(caught.value).startswith(f"task.reward.functions={function}: {message}")


def test_functions_with_arguments_are_parts_by_their_whole_name() -> None:
    functions = ("cosine", "cosine(length=10)", "repetition_penalty(ngram=1, most=-2)")
    settings = TaskConfig(reward=RewardConfig(functions=functions))
    rewards.check_rewards(settings.reward)

    grade = rewards.add_response_rewards(Grade(1.0, True, ""), "a a", None, settings)
    [graded] = rewards.add_batch_rewards([grade], [10], [10], settings.reward)

    assert rewards.need_worker(settings.reward, ())
    assert graded.parts["cosine(length=10)"] == pytest.approx(0.5)
    assert graded.parts["cosine"] > 0.99
    assert graded.parts["repetition_penalty(ngram=1, most=-2)"] == -1.0
    assert graded.score == pytest.approx(sum(graded.parts.values()))


# Sums of rewards


def reward_of_digits(response: str, gold: object, task: TaskConfig) -> float | None:
    """A user's function, which does not apply to a response without a digit."""
    num_digits = sum(character.isdigit() for character in response)
    return task.grade_seconds * num_digits if num_digits else None


def test_the_score_is_the_weighted_sum_of_what_applies() -> None:
    of_user = "test_rewards:reward_of_digits"
    functions = ("accuracy", "tag_count", of_user, "length")
    reward = RewardConfig(functions, weights=(2.0, 1.0, 10.0, 4.0))
    task = TaskConfig(grade_seconds=0.5, reward=reward)
    rewards.check_rewards(reward)
    gold = {"numbers": [1, 2], "target": 3}
    texts = ["<answer>1+2</answer>", "no", GOOD]

    # The grader process computes the rewards of single responses, the caller the others.
    with Pool(1) as pool:
        for i, text in enumerate(texts):
            pool.step(i, TurnRequest("countdown", text, gold, task))
        grades = [grade for _, grade in sorted(pool.drain())]
    first, second, third = rewards.add_batch_rewards(grades, [10, 20, 20], [0, 0, 0], reward)

    names = [set(grade.parts) for grade in grades]
    assert names == [{"tag_count", of_user}, {"tag_count"}, {"tag_count"}]
    digits, tags = 2, 1
    assert first.score == 2 * 1 + 10 * 0.5 * digits + 4 * 0.5
    assert second.score == 4 * -0.5
    assert third.score == 1 * tags + 4 * -0.5
    assert [first.correct, second.correct, third.correct] == [True, False, False]
    assert first.parts["accuracy"] == 1


def test_accuracy_alone_changes_nothing() -> None:
    grades = [Grade(0.1, False, "wrong")]

    assert rewards.add_batch_rewards(grades, [1], [1], RewardConfig()) == grades


@pytest.mark.parametrize(
    ("functions", "weights", "message"),
    [
        (("acuracy",), (), "'acuracy' is not one of accuracy, open_r1_format"),
        (
            ("accuracy,format",),
            (),
            "'accuracy,format' is not one of .*; give the flag once for each",
        ),
        (
            ("accuracy", "format"),
            (1.0,),
            r"weights=\(1.0,\) must be a number for each of 2 functions",
        ),
        (("accuracy",), ("a",), "weights has the item a, which must be a number"),
        (("math",), (), "'math' is not one of .*no function"),
        (
            ("no.such:function",),
            (),
            "=no.such:function: no such module:function .*No module named 'no'",
        ),
        (("math:no_such",), (), "=math:no_such: no such module:function .*no attribute 'no_such'"),
    ],
)
def test_settings_that_cannot_work_are_errors(
    functions: tuple[str, ...], weights: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rewards.check_rewards(RewardConfig(functions=functions, weights=weights))


@pytest.mark.parametrize("name", ["accuracy", "tag_count", "test_rewards:reward_of_digits"])
def test_the_same_reward_named_twice_is_refused(name: str) -> None:
    settings = RewardConfig(functions=("format", name, name))
    with pytest.raises(UserError, match=f"names {name} 2 times"):
        rewards.check_rewards(settings)
