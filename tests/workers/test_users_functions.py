"""Where code of the user's fails the grade says so: it is no score of 0, and the cause has a name.

What a hostile response does to jzero's own graders still scores 0: see test_pool_attacks.py.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from jzero import config
from jzero.types import Grade
from jzero.workers.pipe import TurnRequest
from jzero.workers.pool import Pool

GOLD = {"numbers": [3, 7, 12], "target": 16}
RIGHT = "<answer>12+7-3</answer>"


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(1) as pool:
        yield pool


def settings(function: str, *, grade_seconds: float = 5.0, **limits: float) -> config.TaskConfig:
    reward = config.RewardConfig(functions=("accuracy", f"users_functions:{function}"), **limits)
    return config.TaskConfig(grade_seconds=grade_seconds, reward=reward)


def graded(pool: Pool, function: str, **limits: float) -> Grade:
    """Returns the grade of a right answer that `function` looks at, too."""
    pool.step("key", TurnRequest("countdown", RIGHT, GOLD, settings(function, **limits)))
    [(_, grade)] = pool.drain()
    return grade


def test_settings_that_a_function_changes_are_those_of_one_response(pool: Pool) -> None:
    for _ in range(3):
        grade = graded(pool, "count_in_settings")
        assert (
            grade.parts["users_functions:count_in_settings"]
            == config.TaskConfig().max_reply_bytes + 1
        )


@pytest.mark.parametrize(
    "function, reason",
    [
        ("misspelt", "error: users_functions:misspelt: NameError: name 'respons' is not defined"),
        ("text", "error: users_functions:text: TypeError: returned '1.0'"),
        ("table", "error: users_functions:table: TypeError: returned 'high'"),
        ("nan", "error: users_functions:nan: ValueError: returned nan"),
        ("refused", "error: users_functions:refused: ConnectionRefusedError"),
        ("leave", "error: users_functions:leave: SystemExit: 3"),
        ("die", "killed: users_functions:die"),
        ("absent", "error: users_functions:absent: UserError"),
    ],
)
def test_a_reward_that_fails_is_no_score_and_keeps_the_verdict(
    pool: Pool, function: str, reason: str
) -> None:
    grade = graded(pool, function)
    assert grade.failed
    assert grade.known_score is None
    assert grade.reason.startswith(reason)
    assert grade.correct  # the task's own grader had come to its verdict
    assert grade.score == 1.0


def test_a_reward_that_hangs_ends_at_its_own_limit(pool: Pool) -> None:
    grade = graded(pool, "hang", seconds=0.3)
    assert grade.failed and grade.correct
    assert grade.reason == ("timeout: users_functions:hang took more than task.reward.seconds=0.3")


def test_the_limits_of_a_reward_are_not_those_of_grading(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = graded(pool, "sleep_and_compute", grade_seconds=0.2)
    assert not slow.failed
    assert slow.parts == {"users_functions:sleep_and_compute": 0.5}

    large = graded(pool, "grow", memory_gib=2.0)
    assert large.failed and large.reason == "error: users_functions:grow: MemoryError"

    monkeypatch.setenv("USERS_FILE", str(tmp_path / "notes"))
    with Pool(1) as another:  # it starts with this environment
        assert not graded(another, "write").failed
        assert (tmp_path / "notes").read_text(encoding="utf-8") == RIGHT
        # The limits of grading hold again afterwards.
        another.step("fill", TurnRequest("hostile_graders:fill", "", None, config.TaskConfig()))
        [(_, grade)] = another.drain()
        assert grade.reason.startswith("error: OSError")


def test_what_functions_print_and_raise_is_shown_once(capfd: pytest.CaptureFixture[str]) -> None:
    with Pool(2) as pool:
        for key in range(20):
            for function in ("talk", "misspelt"):
                task = settings(function)
                pool.step((key, function), TurnRequest("countdown", RIGHT, GOLD, task))
        pool.drain()
    shown = capfd.readouterr()
    assert shown.err.count("users_functions:talk printed") == 1
    assert shown.err.count("a line for the user\na warning\n") == 1
    assert shown.err.count("users_functions:misspelt raised NameError") == 1
    assert shown.err.count("Traceback") == 1
    assert "return len(respons)" in shown.err


@pytest.mark.parametrize(
    "grader, reason",
    [
        ("users_functions:judge", "error: TypeError: the grader returned 1.0"),
        (
            "users_functions:nan_judge",
            "error: ValueError: returned nan: a reward is a finite number",
        ),
        ("users_functions:misspelt", "error: NameError: name 'respons' is not defined"),
    ],
)
def test_a_grader_of_the_users_that_fails_is_no_score(pool: Pool, grader: str, reason: str) -> None:
    pool.step("key", TurnRequest(grader, "1", None, config.TaskConfig()))
    [(_, grade)] = pool.drain()
    assert grade.failed and not grade.correct
    assert grade.reason.startswith(reason)


def test_a_grader_of_jzeros_that_fails_scores_zero(pool: Pool) -> None:
    without_target = {"numbers": [3, 7, 12]}
    pool.step("key", TurnRequest("countdown", RIGHT, without_target, config.TaskConfig()))
    [(_, grade)] = pool.drain()
    assert grade.reason.startswith("error: KeyError")
    assert not grade.failed
    assert grade.known_score == 0.0
