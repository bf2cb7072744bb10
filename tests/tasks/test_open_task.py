"""task.name=open: questions without answers."""

import json
from pathlib import Path

import pytest

from jzero.config import RewardConfig, TaskConfig
from jzero.errors import UserError
from jzero.tasks import check_task_settings, find_task


@pytest.fixture
def task(tmp_path: Path) -> TaskConfig:
    for name, count in (("train", 6), ("held", 2)):
        rows = [{"question": f"Describe {i}.", "style": i} for i in range(count)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "my.py").write_text("def f(response, gold, task): return 1.0")
    return TaskConfig(
        name="open",
        data=str(tmp_path / "train.jsonl"),
        eval_data=str(tmp_path / "held.jsonl"),
        template="chat",
        system_prompt="none",
        reward=RewardConfig(functions=(f"{tmp_path}/my.py:f",)),
    )


def test_problems_have_columns_and_no_answer(task: TaskConfig) -> None:
    problems = find_task("open").train_problems(task, 0, 0, 4)

    rows = [problem.row for problem in problems]
    assert sorted(row["style"] for row in rows if row) == [2, 3, 4, 5]  # 0 and 1 are held out
    for problem in problems:
        assert problem.row is not None
        assert problem.prompt == [{"role": "user", "content": problem.row["question"]}]
        assert problem.gold["answer"] is None


def test_held_out_questions_are_evaluated(task: TaskConfig) -> None:
    problems = find_task("open").eval_problems(task, 5)
    assert [problem.gold["question"] for problem in problems] == ["Describe 0.", "Describe 1."]


def test_the_grader_never_gives_a_verdict(task: TaskConfig) -> None:
    grade = find_task("open").grade("yes", {"answer": None, "question": "?"}, task)
    assert (grade.score, grade.correct, grade.reason) == (0.0, False, "not graded")


def test_without_a_reward_nothing_would_score(task: TaskConfig) -> None:
    check_task_settings(task, 1)
    task.reward.functions = ("accuracy",)
    with pytest.raises(UserError, match="task.name=open has questions without answers"):
        check_task_settings(task, 1)
