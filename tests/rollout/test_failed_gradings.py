"""A broken reward function stops the run instead of turning every score into 0."""

import numpy as np
import pytest
from episodes import tiny_settings

from jzero import train
from jzero.errors import UserError
from jzero.rollout.collect import check_gradings
from jzero.types import Grade, Problem, Rollout, Turn

pytestmark = pytest.mark.usefixtures("quick_runs")


def graded(reason: str) -> Rollout:
    """Returns a rollout of one token whose grade has this reason."""
    grade = Grade(0.0, False, reason)
    empty = np.zeros(1, np.float32)
    return Rollout(
        problem=Problem("0", "guess", "", 1),
        sample_index=0,
        tokens=np.zeros(1, np.int32),
        sampled=np.ones(1, bool),
        logps=empty,
        versions=np.zeros(1, np.int32),
        turns=(Turn(0, 1, "", "stop", grade),),
        grade=grade,
    )


FAILED = graded("error: NameError: name 'x' is not defined")
RIGHT = graded("correct")


def test_a_few_failures_are_a_line_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    check_gradings(3, [FAILED] + [RIGHT] * 9, max_failed_share=0.5)
    assert capsys.readouterr().out == (
        "step 3: 1 of 10 gradings failed, 1 of them with: error: NameError: name 'x' is not "
        "defined. They score 0\n"
    )


def test_no_failure_is_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    check_gradings(3, [RIGHT] * 10, max_failed_share=0.5)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("reason", ["error: ValueError: a", "timeout", "killed"])
def test_too_many_failures_stop_the_run(reason: str) -> None:
    with pytest.raises(UserError, match=f"6 of 10 gradings failed, 6 of them with: {reason}. Mend"):
        check_gradings(1, [graded(reason)] * 6 + [RIGHT] * 4, max_failed_share=0.5)


def broken_reward(response: str, gold: object, task: object) -> float:
    """A user's reward function with a misspelt name."""
    return len(respons)  # noqa: F821


def test_a_run_with_a_broken_reward_ends_at_its_first_step(tmp_path) -> None:
    settings = tiny_settings(train={"steps": 2}, warm_start={"steps": 1}, eval={"problems": 0})
    settings.task.reward.functions = ("accuracy", "test_failed_gradings:broken_reward")

    with pytest.raises(UserError, match=r"step 1: .* NameError: name 'respons' is not defined"):
        train.train(settings, tmp_path / "run")
