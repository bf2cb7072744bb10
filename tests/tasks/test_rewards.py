"""Rewards: the published values, properties, and their sum through the pool."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jzero import config
from jzero.grading import verdict
from jzero.grading.pool import Pool
from jzero.tasks import rewards
from jzero.types import Grade

GOOD = "<think>\nSome reasoning\n</think>\n<answer>\nThe answer\n</answer>"


def graded(correct, lengths, functions, **settings):
    """Scores of a batch of responses with these lengths in characters (and half as many tokens)."""
    reward = config.RewardConfig(functions=functions, **settings)
    grades = [Grade(float(c), bool(c), "") for c in correct]
    return [
        grade.score
        for grade in rewards.add_batch_rewards(grades, lengths, [n // 2 for n in lengths], reward)
    ]


def value(case, row):
    """What our function gives for a row of the published cases."""
    name, args, texts = row["reward"], row["args"], row["completions"]
    if name == "soft_overlong_punishment":
        lengths = np.array([args["completion_len"]])
        settings = config.RewardConfig(
            overlong_length=args["max_completion_len"], overlong_cache=args["soft_punish_cache"]
        )
        return rewards.soft_overlong(np.array([True]), lengths, settings)
    if name in ("cosine_scaled", "len_reward"):
        right = [verdict.grade(text, row["solution"], template="boxed").correct for text in texts]
        settings = {"cosine_length": args["max_len"]} if args else {}
        function = "cosine" if args else "length"
        return graded(right, [len(text) for text in texts], (function,), **settings)
    settings = config.RewardConfig()
    if name == "repetition_penalty":
        settings = config.RewardConfig(
            repetition_ngram=args["ngram_size"], repetition_max=args["max_penalty"]
        )
    return [
        rewards.RESPONSE_REWARDS[name.removesuffix("_reward")](text, settings) for text in texts
    ]


def test_published_values(shared):
    rows = [
        json.loads(line)
        for line in (shared / "data/grader/reward_fn_cases.jsonl").read_text().splitlines()
    ]
    assert len(rows) >= 35
    for row in rows:
        places = 2 if "places=2" in row["source"] else 9
        np.testing.assert_allclose(
            value(row["id"], row), row["expected"], atol=0.6 * 10**-places, err_msg=row["id"]
        )


@pytest.mark.parametrize(
    "text, format, tags",
    [
        (GOOD, 1.0, 1.0),
        (GOOD + "\n", 1.0, 1.0),
        ("so: " + GOOD, 0.0, 1.0),
        (GOOD.replace("\n", ""), 0.0, 0.0),
        (GOOD + "\n" + GOOD, 0.0, 0.0),
        (GOOD.replace("Some", "<answer>"), 0.0, 1.0),
        ("", 0.0, 0.0),
    ],
)
def test_format_and_tags(text, format, tags):
    assert rewards.RESPONSE_REWARDS["format"](text, config.RewardConfig()) == format
    assert rewards.RESPONSE_REWARDS["tag_count"](text, config.RewardConfig()) == tags


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3000)), min_size=1, max_size=8))
def test_length_rewards_are_bounded_and_favour_short_right_answers(batch):
    correct, lengths = map(list, zip(*batch, strict=True))
    for name, low, high in (
        ("length", -0.5, 0.5),
        ("cosine", -1.0, 1.0),
        ("soft_overlong", -1.0, 0.0),
    ):
        scores = graded(correct, lengths, (name,))
        assert all(low - 1e-9 <= score <= high + 1e-9 for score in scores)
        right = sorted(
            (n, score) for c, n, score in zip(correct, lengths, scores, strict=True) if c
        )
        assert all(a[1] >= b[1] - 1e-9 for a, b in itertools.pairwise(right))
    assert all(
        score <= 1e-9
        for c, score in zip(correct, graded(correct, lengths, ("length",)), strict=True)
        if not c
    )


def test_the_unit_of_lengths():
    assert graded([True], [1000], ("cosine",)) == [0.5]
    assert graded([True], [1000], ("cosine",), unit="tokens") == [pytest.approx(0.75)]
    assert graded([True], [40], ("soft_overlong",), overlong_length=22, overlong_cache=4) == [-0.5]


def own(response, gold, task):
    """A user's function: None where there is no digit."""
    digits = sum(character.isdigit() for character in response)
    return task.format_score * digits if digits else None


def test_the_weighted_sum_of_what_applies_through_the_pool():
    functions = ("accuracy", "tag_count", "test_rewards:own", "length")
    task = config.TaskConfig(
        format_score=0.5, reward=config.RewardConfig(functions, weights=(2.0, 1.0, 10.0, 4.0))
    )
    rewards.check_rewards(task.reward)
    texts = ["<answer>1+2</answer>", "no", GOOD]
    with Pool(1) as pool:
        for i, text in enumerate(texts):
            pool.submit(i, "countdown", text, {"numbers": [1, 2], "target": 3}, task)
        grades = [grade for _, grade in sorted(pool.drain())]
    assert [set(grade.parts) for grade in grades] == [
        {"tag_count", "test_rewards:own"},
        {"tag_count"},
        {"tag_count"},
    ]
    done = rewards.add_batch_rewards(grades, [10, 20, 20], [0, 0, 0], task.reward)
    assert [grade.score for grade in done] == [2 + 10 * 0.5 * 2 + 4 * 0.5, 4 * -0.5, 1 + 4 * -0.5]
    assert [grade.correct for grade in done] == [True, False, False] and done[0].parts[
        "accuracy"
    ] == 1


def test_accuracy_alone_changes_nothing():
    grades = [Grade(0.1, False, "wrong")]
    assert rewards.add_batch_rewards(grades, [1], [1], config.RewardConfig()) == grades


@pytest.mark.parametrize(
    "functions, weights, message",
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
def test_mistakes(functions, weights, message):
    with pytest.raises(ValueError, match=message):
        rewards.check_rewards(config.RewardConfig(functions=functions, weights=weights))
