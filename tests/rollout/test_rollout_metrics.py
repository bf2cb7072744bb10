"""Metrics of the rollouts of one step."""

from dataclasses import replace

import pytest
import reference

from jzero.algorithms import PRESETS, Fixed, Grade, Ignore, shape_score
from jzero.rollout.collect import with_truncation_rule
from jzero.rollout.rollout_metrics import rollout_metrics, short_names

ROLLOUTS = reference.random_rollouts(1, 4, 4)


def test_rewards_are_means_over_rollouts() -> None:
    metrics = rollout_metrics(ROLLOUTS, 4)

    scores = [rollout.grade.score for rollout in ROLLOUTS]
    assert metrics["reward/mean"] == pytest.approx(sum(scores) / 16)
    num_correct = sum(rollout.grade.correct for rollout in ROLLOUTS)
    assert metrics["reward/accuracy"] == num_correct / 16


def test_groups_in_which_all_scores_are_equal_are_counted() -> None:
    metrics = rollout_metrics(ROLLOUTS, 4)

    num_uniform = 0
    for start in range(0, 16, 4):
        scores = {rollout.grade.score for rollout in ROLLOUTS[start : start + 4]}
        num_uniform += len(scores) == 1
    assert num_uniform >= 1  # the scores of the first group are all 0.1
    assert metrics["reward/zero_variance_groups"] == num_uniform / 4


@pytest.mark.parametrize("rule", [Fixed(), Fixed(-0.5), Ignore(), Grade()])
def test_metrics_show_the_scores_that_are_trained_on(rule: Fixed | Ignore | Grade) -> None:
    algorithm = PRESETS["grpo"](truncated=rule)
    assert any(rollout.finish_reason == "length" for rollout in ROLLOUTS)

    rollouts = with_truncation_rule(ROLLOUTS, algorithm)

    trained = []
    for before, after in zip(ROLLOUTS, rollouts, strict=True):
        score = 0.0
        for turn in before.turns:
            is_cut = turn.finish_reason == "length"
            score += shape_score(turn.grade.score, 5, is_cut, algorithm, 100)
        trained.append(score)
        assert after.grade == replace(before.grade, score=after.grade.score)
    assert [rollout.grade.score for rollout in rollouts] == pytest.approx(trained)
    metrics = rollout_metrics(rollouts, 4)
    assert metrics["reward/mean"] == pytest.approx(sum(trained) / len(trained))
    # The rule does nothing to scores that it has set.
    assert with_truncation_rule(rollouts, algorithm) == rollouts


def test_lengths_are_those_of_responses() -> None:
    metrics = rollout_metrics(ROLLOUTS, 4)

    lengths = [len(rollout.tokens) - rollout.prompt_length for rollout in ROLLOUTS]
    num_truncated = sum(rollout.finish_reason == "length" for rollout in ROLLOUTS)
    assert metrics["rollout/length"] == sum(lengths) / 16
    assert metrics["rollout/length_max"] == max(lengths)
    assert metrics["rollout/tokens"] == sum(lengths)
    assert metrics["rollout/truncated"] == num_truncated / 16


def test_rewards_of_files_have_no_folder_in_their_names() -> None:
    names = short_names(
        ["length", "my.module:f", "/home/me/my.py:f", "b/r.py:make(path='/a/c.py')"]
    )

    assert list(names.values()) == ["length", "my.module.f", "my.py.f", "r.py.make(path='/a/c.py')"]


def test_rewards_of_two_files_of_one_name_keep_their_folders() -> None:
    names = short_names(["a/my.py:f", "b/my.py:f", "b/my.py:g"])
    assert list(names.values()) == ["a/my.py.f", "b/my.py.f", "my.py.g"]
