"""The order of training problems: a run that is resumed, or repeated, gets the same ones."""

import hashlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import grain
import pytest

from jzero.config import Sources, TaskConfig
from jzero.problems import problem_sets
from jzero.tasks import countdown, math_problems
from jzero.types import Problem


def digest(values: list[object]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def write_rows(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def math_sets(tmp_path: Path) -> str:
    """Returns the sources of two sets, of 50 and of 30 problems."""
    sums = [{"problem": f"{i}+1?", "answer": str(i + 1)} for i in range(50)]
    products = [{"problem": f"{i}*2?", "answer": str(i * 2)} for i in range(30)]
    return ",".join(
        [write_rows(tmp_path / "m.jsonl", sums), write_rows(tmp_path / "n.jsonl", products)]
    )


# The digests are those of the commit before the loader batched its rows: the published curves
# were made with this order.


def test_countdown_draws_the_problems_that_it_always_drew() -> None:
    task = TaskConfig(options=("numbers_min=3", "numbers_max=4"))
    problems: list[Problem] = []
    for step in (0, 1, 5):
        problems += countdown.train_problems(task, 7, step, 16)

    assert digest([[problem.gold, problem.prompt] for problem in problems]) == "570ec06411a32f7d"
    assert problems[-1].id == "countdown/train/95"


def test_a_published_countdown_set_keeps_its_order(tmp_path: Path) -> None:
    rows = []
    for i in range(100):
        rows.append({"nums": [i % 9 + 1, i % 7 + 2, 3], "target": (i * 7) % 90 + 1})
    task = TaskConfig(data=write_rows(tmp_path / "c.jsonl", rows))
    problems: list[Problem] = []
    for step in (1, 4, 21):
        problems += countdown.train_problems(task, 7, step, 16)

    assert digest([problem.prompt for problem in problems]) == "175e21270470fa0a"


def with_weights(sets: str, weights: tuple[float, ...]) -> str:
    """Returns the sources with these weights; () for none."""
    sources = Sources.from_text(sets)
    pairs = zip(sources, weights or (0.0,) * len(sources), strict=True)
    return ",".join(str(replace(rows, weight=weight)) for rows, weight in pairs)


@pytest.mark.parametrize(
    ("weights", "expected"), [((), "60f4bc95024fe8e1"), ((0.7, 0.3), "7b57dd781481d7c2")]
)
def test_shuffled_and_mixed_sets_keep_their_order(
    math_sets: str, weights: tuple[float, ...], expected: str
) -> None:
    task = TaskConfig(name="math", data=with_weights(math_sets, weights))
    problems: list[Problem] = []
    for step in (1, 4, 21):
        problems += math_problems.train_problems(task, 7, step, 16)

    assert digest([problem.gold for problem in problems]) == expected


@pytest.mark.parametrize("weights", [(), (0.7, 0.3)])
def test_a_step_is_read_without_the_steps_before_it(
    math_sets: str, weights: tuple[float, ...]
) -> None:
    task = TaskConfig(name="math", data=with_weights(math_sets, weights))
    golds = []
    for step in range(1, 21):
        golds += [p.gold for p in math_problems.train_problems(task, 7, step, 4)]

    [later] = [[p.gold for p in math_problems.train_problems(task, 7, 2, 40)]]

    assert later == golds[40:]


def test_grain_feeds_every_row_once_an_epoch() -> None:
    rows = problem_sets.stream([list(range(30))], (), seed=3)
    assert isinstance(rows, grain.MapDataset)

    epochs = [[rows[index] for index in range(30 * step, 30 * (step + 1))] for step in range(3)]

    for epoch in epochs:
        assert Counter(epoch) == Counter(range(30))
    assert epochs[0] != epochs[1] != epochs[2]


def test_countdowns_problems_come_through_grain() -> None:
    rows = problem_sets.drawn(lambda index: index * index)

    assert isinstance(rows, grain.MapDataset)
    assert [rows[index] for index in (15, 16, 17)] == [225, 256, 289]
