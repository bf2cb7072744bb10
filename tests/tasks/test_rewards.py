"""Rewards: the published values, properties of single rewards, and their weighted sum."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jzero.config import RewardConfig, TaskConfig
from jzero.errors import UserError
from jzero.grading import verdict
from jzero.grading.pool import Pool
from jzero.tasks import rewards
from jzero.types import Grade

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
    settings = RewardConfig(
        overlong_length=arguments["max_completion_len"],
        overlong_cache=arguments["soft_punish_cache"],
    )
    lengths = np.array([arguments["completion_len"]])
    return rewards.soft_overlong(np.array([True]), lengths, settings)


def length_reward(row: dict[str, Any]) -> list[float]:
    """Returns the rewards of a case that compares the lengths of right and wrong responses."""
    correct = []
    for text in row["completions"]:
        correct.append(verdict.grade(text, row["solution"], template="boxed").correct)
    lengths = [len(text) for text in row["completions"]]
    if row["reward"] == "len_reward":
        return batch_scores(correct, lengths, "length")
    return batch_scores(correct, lengths, "cosine", cosine_length=row["args"]["max_len"])


def response_reward(row: dict[str, Any]) -> list[float]:
    """Returns the rewards of a case whose function looks at single responses."""
    settings = RewardConfig()
    if row["reward"] == "repetition_penalty":
        settings = RewardConfig(
            repetition_ngram=row["args"]["ngram_size"],
            repetition_max=row["args"]["max_penalty"],
        )
    function = rewards.RESPONSE_REWARDS[row["reward"].removesuffix("_reward")]
    return [function(text, settings) for text in row["completions"]]


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
    assert rewards.RESPONSE_REWARDS["format"](text, RewardConfig()) == format_reward
    assert rewards.RESPONSE_REWARDS["tag_count"](text, RewardConfig()) == tag_count


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
    assert rewards.RESPONSE_REWARDS["format_inline"](text, RewardConfig()) == format_inline
    assert rewards.RESPONSE_REWARDS["tag_count_inline"](text, RewardConfig()) == tag_count_inline


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
    scores = batch_scores([True], [40], "soft_overlong", overlong_length=22, overlong_cache=4)

    assert scores == [-0.5]


# Sums of rewards


def reward_of_digits(response: str, gold: object, task: TaskConfig) -> float | None:
    """A user's function, which does not apply to a response without a digit."""
    num_digits = sum(character.isdigit() for character in response)
    return task.format_score * num_digits if num_digits else None


def test_the_score_is_the_weighted_sum_of_what_applies() -> None:
    of_user = "test_rewards:reward_of_digits"
    functions = ("accuracy", "tag_count", of_user, "length")
    reward = RewardConfig(functions, weights=(2.0, 1.0, 10.0, 4.0))
    task = TaskConfig(format_score=0.5, reward=reward)
    rewards.check_rewards(reward)
    gold = {"numbers": [1, 2], "target": 3}
    texts = ["<answer>1+2</answer>", "no", GOOD]

    # The grader process computes the rewards of single responses, the caller the others.
    with Pool(1) as pool:
        for i, text in enumerate(texts):
            pool.submit(i, "countdown", text, gold, task)
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
        (("acuracy",), (), "'acuracy' is not one of accuracy, format"),
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
        (("accuracy",), ("a",), "weights=.* must be a number"),
        (("math",), (), "'math' is not one of .*no function"),
        (("no.such:function",), (), "'no.such:function' is not one of .*No module named 'no'"),
        (("math:no_such",), (), "'math:no_such' is not one of .*no attribute 'no_such'"),
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
