"""Reward functions of the user's get what their parameters name, and their results count."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from jzero.config import RewardConfig, TaskConfig
from jzero.errors import UserError
from jzero.problems import bounds, problem_sets
from jzero.rewards import rewards
from jzero.rollout.rollout_metrics import reward_metrics
from jzero.rollout.turns import make_request
from jzero.tasks import math_problems
from jzero.tokens import Tokens
from jzero.types import Grade, Problem, Rollout
from jzero.workers.pool import Pool

SOURCE = """
import asyncio
from dataclasses import dataclass

calls = []


@dataclass
class Part:
    value: float


def by_other_names(text, answer, settings):
    return float(text == "7" and answer["answer"] == "7" and settings.grade_seconds > 0)


def in_another_order(gold, response):
    return float(response == "7" and gold["answer"] == "7")


def with_default(response, factor=3.0):
    return factor * len(response)


async def asynchronous(response):
    await asyncio.sleep(0)
    return Part(2.0).value


def parts(response):
    return {"style": 0.5, "facts": 0.25}


def scored(response):
    return {"score": 0.5, "length": 40}


def column(row):
    return float(row["difficulty"])


def prompted(prompt, response):
    return float(prompt.endswith("4 + 3?") and response == "7")


def talk(messages):
    roles = [message["role"] for message in messages]
    return float(roles == ["user", "assistant", "user", "assistant"]) + len(messages[2]["content"])


def tries(turns):
    (first, first_grade), (last, last_grade) = turns
    assert (first, last) == ("5", "7") and first_grade.reply == "no"
    return float(last_grade.correct) - float(first_grade.correct)


def strange(response, mood):
    return 1.0


def mixed(answer, prompt, task):
    return 1.0


def nothing():
    return 1.0
"""

PROBLEM = Problem(
    "1", "math", "What is 4 + 3?", {"answer": "7", "question": ""}, {"difficulty": 4, "answer": "7"}
)
EARLIER = [("5", Grade(0.0, False, "wrong value", reply="no"))]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("mine") / "rewards.of-mine.py"
    path.write_text(SOURCE, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(1) as pool:
        yield pool


def graded(pool: Pool, function: str, earlier: Any = ()) -> Grade:
    """Returns the grade of the response 7 with the parts of one function of the user's."""
    settings = TaskConfig(
        name="math", options=("answer_mark=answer",), reward=RewardConfig((function,))
    )
    pool.step("key", make_request(PROBLEM, 0, "7", earlier, settings, is_last=True))
    [(_, grade)] = pool.drain()
    assert not grade.failed, grade.reason
    return grade


@pytest.mark.parametrize(
    "function, reward",
    [
        ("by_other_names", 1.0),
        ("in_another_order", 1.0),
        ("with_default", 3.0),
        ("asynchronous", 2.0),
        ("parts", 0.75),
        ("scored", 0.5),
        ("column", 4.0),
        ("prompted", 1.0),
        ("talk", 3.0),
        ("tries", 1.0),
    ],
)
def test_a_function_of_a_file_gets_what_it_names(
    pool: Pool, file: str, function: str, reward: float
) -> None:
    name = f"{file}:{function}"
    assert graded(pool, name, EARLIER).parts[name] == reward


def test_named_parts_are_metrics_and_their_sum_is_the_score(pool: Pool, file: str) -> None:
    settings = RewardConfig(("accuracy", f"{file}:parts"), weights=(1.0, 2.0))
    grade = graded(pool, f"{file}:parts")

    [summed] = rewards.add_batch_rewards([grade], [1], [1], settings)

    assert grade.correct and summed.score == 1.0 + 2 * 0.75
    named = {name.rpartition(".")[2]: value for name, value in summed.parts.items()}
    assert named["style"] == 0.5 and named["facts"] == 0.25


def test_named_parts_have_names_of_metrics() -> None:
    grade = Grade(1.0, True, "", parts={"mine:judge": 1.0, "mine:judge.style": 0.5})
    rollout = Rollout(PROBLEM, 0, Tokens([0]), (), grade)

    metrics = reward_metrics([rollout], group_size=1)

    assert metrics["reward/mine.judge.style"] == 0.5


def test_an_episode_carries_what_is_asked_for_and_no_more(file: str) -> None:
    def keys(*functions: str) -> set[str]:
        names = ("accuracy", *(f"{file}:{function}" for function in functions))
        task = TaskConfig(name="math", reward=RewardConfig(names))
        return set(make_request(PROBLEM, 0, "7", EARLIER, task, is_last=True).values)

    assert keys("parts", "by_other_names") == set()
    assert keys("column", "talk") == {"row", "messages"}
    assert keys("tries", "prompted") == {"prompt"}  # the turns are part of every request


@pytest.mark.parametrize(
    "function, message",
    [
        ("strange", "has the parameter mood: name its parameters response, gold, task, prompt"),
        ("mixed", "has the parameter answer: name its"),
        ("nothing", "has no parameter that is filled"),
        (
            "absent",
            r"no such module:function or FILE.py:function \(AttributeError: no absent; there",
        ),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(
    file: str, function: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        rewards.check_rewards(RewardConfig((f"{file}:{function}",)))


def test_a_file_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match="absent/rewards.py:mine: .*No such file or directory"):
        rewards.check_rewards(RewardConfig(("absent/rewards.py:mine",)))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = 1\nimport nowhere_at_all\n", "ModuleNotFoundError, line 2: No module named"),
        ("x = 1\n\ny = x / 0\n", "ZeroDivisionError, line 3: division by zero"),
        ("def f(:\n", r"SyntaxError: invalid syntax \(broken.py, line 1\)"),
    ],
)
def test_a_file_that_cannot_be_imported_is_named_with_its_line(
    text: str, reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=f"broken.py:f: .*{reason}") as refused:
        rewards.check_rewards(RewardConfig((f"{file}:f",)))
    assert len(str(refused.value).splitlines()) == 1


def test_columns_are_kept_where_a_function_asks_for_them(file: str, tmp_path: Path) -> None:
    data = tmp_path / "sums.jsonl"
    rows = [
        {"problem": f"{i} + 1?", "answer": str(i + 1), "difficulty": i, "tags": ["sum"]}
        for i in range(4)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def problems(function: str) -> list[Problem]:
        reward = RewardConfig((f"{file}:{function}",))
        task = TaskConfig(name="math", data=str(data), template="no", reward=reward)
        return math_problems.train_problems(task, 0, 0, 4)

    with_rows, without = problems("column"), problems("parts")

    assert [problem.row for problem in without] == [None] * 4
    assert [problem.id for problem in with_rows] == [problem.id for problem in without]
    for problem in with_rows:
        assert problem.row in rows
        assert problem.row["answer"] == problem.gold["answer"]


def test_columns_that_are_no_json_are_refused_by_name() -> None:
    dataset = datasets.Dataset.from_dict({"problem": ["1?"], "answer": ["1"], "raw": [b"\xff"]})
    with pytest.raises(UserError, match="the column raw holds"):
        problem_sets.read_rows(dataset, "", "", "set", with_columns=True)


@pytest.mark.parametrize("result", [{}, {"a": float("inf")}, "1.0", [1.0, 2.0]])
def test_a_result_that_is_no_reward_is_an_error(result: object) -> None:
    with pytest.raises((TypeError, ValueError), match="returned"):
        bounds.read_reward(result)
