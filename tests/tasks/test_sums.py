"""Sums: problems, prompts, grading, and the examples of the warm start."""

import re

import pytest

from jzero.config import TaskConfig
from jzero.tasks import find_task, stop_strings, sums
from jzero.types import Problem

TASK = TaskConfig(name="sums", template="plain")
LINE = re.compile(r"([0-9]+) ([+-]) ([0-9]+) = ?(-?[0-9]+)?")


def value_of(first: str, sign: str, second: str) -> int:
    """Returns the value of a sum or a difference."""
    return int(first) + int(second) if sign == "+" else int(first) - int(second)


def read_line(line: str) -> tuple[int, str | None]:
    """Returns the value of the left side, and the right side of a line of a prompt."""
    found = LINE.fullmatch(line)
    assert found is not None, line
    first, sign, second, right = found.groups()
    return value_of(first, sign, second), right


@pytest.mark.parametrize("shots", [0, 1, 3])
@pytest.mark.parametrize("largest", [2, 20, 49, 1000])
@pytest.mark.parametrize("differences", ["true", "false"])
def test_the_solved_problems_are_right_and_the_answer_is_the_value(
    shots: int, largest: int, differences: str
) -> None:
    options = (f"shots={shots}", f"value_max={largest}", f"differences={differences}")
    task = TaskConfig(name="sums", template="plain", options=options)
    signs = set()
    for problem in sums.train_problems(task, seed=3, step=5, count=200):
        assert isinstance(problem.prompt, str)
        *solved, asked = problem.prompt.split("\n")
        assert len(solved) == shots
        for line in solved:
            value, right = read_line(line)
            assert right == str(value)
        assert read_line(asked) == (problem.gold, None)
        assert isinstance(problem.gold, int) and problem.gold >= 0
        assert max(map(int, re.findall("[0-9]+", asked))) <= largest
        signs |= {sign for sign in "+-" if sign in asked}
    assert signs == ({"+", "-"} if differences == "true" else {"+"})


def test_steps_seeds_and_splits_have_other_problems() -> None:
    def prompts(seed: int, step: int) -> list[object]:
        return [problem.prompt for problem in sums.train_problems(TASK, seed, step, 32)]

    assert prompts(0, 1) == prompts(0, 1)
    held_out = [problem.prompt for problem in sums.eval_problems(TASK, 32)]
    for other in (prompts(0, 2), prompts(1, 1), held_out):
        assert not set(map(str, other)) & set(map(str, prompts(0, 1)))


def test_no_question_of_an_evaluation_is_asked_in_training() -> None:
    def questions(problems: list[Problem]) -> set[str]:
        return {str(problem.prompt).split("\n")[-1] for problem in problems}

    asked = {f"{sums.example(TASK, 0, i, 1.0)[0]}".split("\n")[-1] for i in range(1000)}
    for step in range(60):
        asked |= questions(sums.train_problems(TASK, 0, step, 16))
    assert len(asked) > 700
    assert len(questions(sums.eval_problems(TASK, 128))) > 80
    assert not asked & questions(sums.eval_problems(TASK, 128))


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (" 80\n", "correct"),
        ("80", "correct"),
        ("080", "correct"),
        (" 81\n", "wrong value"),
        (" -80\n", "wrong value"),
        ("", "no answer"),
        (" 80 80\n", "no answer"),
        (" 8 0", "no answer"),
        (" 80.", "no answer"),
        (" 35 + 45 = 80\n", "no answer"),
        ("\u0668\u0660", "no answer"),  # 80 in other digits
        ("9" * 100_000, "no answer"),
    ],
)
def test_only_the_number_alone_is_right(response: str, reason: str) -> None:
    grade = sums.grade(response, 80, TASK)
    assert grade.reason == reason
    assert grade.score == float(grade.correct) == float(reason == "correct")


def test_a_warm_start_example_is_right_and_fits() -> None:
    for index in range(200):
        prompt, response = sums.example(TASK, 0, index, 1.0)
        value, _ = read_line(prompt.split("\n")[-1])
        assert sums.grade(response, value, TASK).correct
        assert response.endswith(stop_strings(TASK))
        assert len(response) < sums.max_tokens(TASK, 1.0)


def test_the_chat_template_shows_the_same_problem() -> None:
    [plain] = sums.train_problems(TASK, 0, 0, 1)
    [chat] = sums.train_problems(TaskConfig(name="sums", template="chat"), 0, 0, 1)
    assert isinstance(chat.prompt, list)
    assert str(chat.prompt[-1]["content"]).startswith(str(plain.prompt))
    assert find_task("sums").find_template("chat").chat
