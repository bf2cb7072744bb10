"""Problems name the row of the data set that they are, for every task that reads data sets."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from jzero.config import TaskConfig
from jzero.run.samples import place_of
from jzero.tasks import find_task, math_problems, suites
from jzero.types import JsonValue, Problem

# Rows by the task that reads them: from a number, the only one of four digits in the row.
ROWS: dict[str, Callable[[int], dict[str, JsonValue]]] = {
    "math": lambda n: {"problem": f"What is {n} + 0?", "answer": str(n)},
    "gsm8k": lambda n: {"question": f"What is {n} + 0?", "answer": f"So\n#### {n}"},
    "open": lambda n: {"problem": f"Say {n}."},
    "countdown": lambda n: {"nums": [n % 50 + 1, 2, 3], "target": n},
    "code": lambda n: {
        "prompt": f"Write a function plus(x) that adds {n}.",
        "test_list": [f"assert plus(0) == {n}"],
    },
    "mixed": lambda n: {
        "task": ("math", "gsm8k")[n % 2],
        "problem": f"What is {n} + 0?",
        "answer": str(n),
    },
    "environment": lambda n: {"start": str(n)},
}
FIRST = 1000
ENVIRONMENT = """
class Echo:
    async def reset(self, row, seed):
        return f"say {row['start']}"

    async def step(self, response):
        return "", 1.0, True
"""
NUM_ROWS = 24


@pytest.fixture
def make_task(tmp_path: Path) -> Callable[[str], TaskConfig]:
    """Returns a function that writes rows with levels, and returns settings that select some."""
    (tmp_path / "echo.py").write_text(ENVIRONMENT)

    def make(name: str) -> TaskConfig:
        path, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
        rows = [ROWS[name](FIRST + i) | {"level": i % 3} for i in range(NUM_ROWS)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        held_out = [ROWS[name](FIRST + NUM_ROWS + i) | {"level": 1} for i in range(3)]
        test.write_text("".join(json.dumps(row) + "\n" for row in [rows[1], *held_out]))
        return TaskConfig(
            name=name,
            data=f"rows('{path}',level_min=1,level_max=2,limit=9)",
            eval_data=str(test),
            template="chat" if name in ("code", "environment") else "r1",
            environment=f"{tmp_path}/echo.py:Echo" if name == "environment" else "",
            grade_workers=1,
            options=("tasks=math,gsm8k",) if name == "mixed" else (),
        )

    return make


def check(problems: list[Problem], path: Path) -> None:
    """Asserts that every problem is the row of the file that it names."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert problems
    for problem in problems:
        assert problem.data == str(path)
        assert problem.data_row is not None
        [number] = set(re.findall(r"\d{4}", json.dumps(rows[problem.data_row])))
        assert number in json.dumps([problem.prompt, problem.gold])
        assert place_of(problem) == {"data": str(path), "row": problem.data_row}


@pytest.mark.parametrize("name", ROWS)
def test_a_problem_names_its_row(
    name: str, make_task: Callable[[str], TaskConfig], tmp_path: Path
) -> None:
    task = make_task(name)
    draw = find_task(name).train_problems
    # More than a pass: the places of the second one differ from the rows.
    problems = [problem for step in (1, 2, 3) for problem in draw(task, 0, step, 4)]
    check(problems, tmp_path / "train.jsonl")
    assert all(problem.data_row % 3 for problem in problems if problem.data_row is not None)
    check(find_task(name).eval_problems(task, 3), tmp_path / "test.jsonl")


@pytest.mark.parametrize("name", ["math", "countdown", "mixed"])
def test_a_problem_of_a_suite_names_its_row(
    name: str, make_task: Callable[[str], TaskConfig], tmp_path: Path
) -> None:
    task = make_task(name)
    spec = f"mine=rows('{tmp_path}/train.jsonl',level_min=1)"
    if name == "countdown":
        spec = f"countdown=rows('{tmp_path}/train.jsonl',level_min=1)"
    _, problems = suites.load_suite(spec, task, 5, 0)
    check(problems, tmp_path / "train.jsonl")


@pytest.mark.parametrize("with_gold", [True, False])
def test_a_problem_of_a_split_names_its_row(
    with_gold: bool, make_task: Callable[[str], TaskConfig], tmp_path: Path
) -> None:
    task = make_task("math")
    problems = math_problems.split_problems(task, "train", with_gold=with_gold)
    check(problems, tmp_path / "train.jsonl")


def test_a_problem_of_no_data_set_names_no_row() -> None:
    [problem] = find_task("countdown").train_problems(TaskConfig(name="countdown"), 0, 1, 1)
    assert place_of(problem) == {}
