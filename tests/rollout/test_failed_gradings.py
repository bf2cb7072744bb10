"""Where a function of the user's fails there is no score, and a broken one stops the run."""

import json
from dataclasses import replace

import numpy as np
import pytest
from tiny import tiny_settings

from jzero.errors import UserError
from jzero.loops import rl
from jzero.rollout.collect import is_uniform
from jzero.rollout.failed_gradings import check_gradings
from jzero.rollout.rollout_metrics import reward_metrics
from jzero.rollout.sampler import with_turn_grades
from jzero.run.samples import sample_row
from jzero.tokens import Tokens
from jzero.types import Grade, Problem, Rollout, Turn, grade_of

pytestmark = pytest.mark.usefixtures("quick_runs")


def graded(reason: str, score: float = 0.0, failed: bool = False) -> Rollout:
    """Returns a rollout of one token whose grade has this reason."""
    grade = Grade(score, False, reason, failed=failed)
    return Rollout(
        problem=Problem("0", "guess", "", 1),
        sample_index=0,
        tokens=Tokens([0], sampled=[True], versions=[0]),
        turns=(Turn(0, 1, "", "stop", grade),),
        grade=grade,
    )


FAILED = graded("error: NameError: name 'x' is not defined", failed=True)
RIGHT = graded("correct")


def test_a_few_failures_are_a_line_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    check_gradings("step 3", [FAILED] + [RIGHT] * 9, max_failed_share=0.5)
    assert capsys.readouterr().out == (
        "step 3: 1 of 10 gradings failed, 1 of them with: error: NameError: name 'x' is not "
        "defined. Of these 1 have no score and are not trained on\n"
    )


def test_no_failure_is_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    check_gradings("step 3", [RIGHT] * 10, max_failed_share=0.5)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("reason", ["error: ValueError: a", "timeout", "killed"])
def test_too_many_failures_stop_the_run(reason: str) -> None:
    with pytest.raises(UserError, match=f"6 of 10 gradings failed, 6 of them with: {reason}. Mend"):
        check_gradings("step 1", [graded(reason)] * 6 + [RIGHT] * 4, max_failed_share=0.5)


def broken_reward(response: str, gold: object, task: object) -> float:
    """A user's reward function with a misspelt name."""
    return len(respons)  # noqa: F821


def test_a_run_with_a_broken_reward_ends_at_its_first_step(tmp_path) -> None:
    settings = tiny_settings(train={"steps": 2}, warm_start={"steps": 1}, eval={"problems": 0})
    settings.task.reward.functions = ("accuracy", "test_failed_gradings:broken_reward")

    with pytest.raises(UserError, match=r"step 1: .* NameError: name 'respons' is not defined"):
        rl.train(settings, tmp_path / "run")


def test_a_failed_rollout_counts_in_no_mean_of_scores() -> None:
    right, wrong = graded("correct", score=1.0), graded("wrong")
    failed = graded("error: X", score=7.0, failed=True)

    metrics = reward_metrics([right, wrong, failed, right, failed, failed, right, right], 2)

    assert metrics["reward/mean"] == 4 / 5
    assert metrics["reward/failed"] == 3 / 8
    assert metrics["reward/zero_variance_groups"] == 3 / 4
    assert is_uniform([right, failed]) and is_uniform([failed, failed])
    assert not is_uniform([right, wrong, failed])


def test_metrics_without_any_score_are_finite() -> None:
    metrics = reward_metrics([FAILED, FAILED], 2)
    assert all(np.isfinite(value) for value in metrics.values())


def test_an_episode_has_failed_if_one_of_its_turns_has(capsys: pytest.CaptureFixture[str]) -> None:
    turns = (RIGHT.turns[0], RIGHT.turns[0])
    grades = [Grade(0.0, False, "killed: f", failed=True), Grade(1.0, True, "correct")]

    episode = with_turn_grades(replace(RIGHT, turns=turns), grades)

    assert grade_of(episode).failed
    row = sample_row(episode)
    assert row["score"] is None and row["failed"] is True
    assert [turn["score"] for turn in row["turns"]] == [None, 1.0]
    check_gradings("step 2", [episode], max_failed_share=1.0)
    assert "1 of 1 gradings failed, 1 of them with: killed: f" in capsys.readouterr().out


def moody_reward(response: str, gold: object, task: object) -> float:
    """A user's reward function that cannot read an odd number of characters."""
    if len(response) % 2:
        raise OSError("no answer from the judge")
    return 1.0


def test_a_run_keeps_failed_rows_and_does_not_train_on_them(tmp_path) -> None:
    settings = tiny_settings(
        train={"steps": 1, "logged_rollouts": 100}, warm_start={"steps": 1}, eval={"problems": 0}
    )
    settings.task.reward.functions = ("accuracy", "test_failed_gradings:moody_reward")
    settings.task.max_failed_share = 1.0

    rl.train(settings, tmp_path / "run")

    lines = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    failed = [row for row in rows if row.get("failed")]
    reason = "error: test_failed_gradings:moody_reward: OSError: no answer from the judge"
    assert 0 < len(failed) < len(rows)
    for row in failed:
        assert row["score"] is None
        assert row["advantage"] == 0.0
        assert any(turn["reason"] == reason for turn in row.get("turns", [row]))
    [metrics] = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert metrics["reward/failed"] == pytest.approx(len(failed) / len(rows))
