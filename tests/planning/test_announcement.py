"""The hours that a run announces after its third step, from the steps of recorded runs."""

import json
from pathlib import Path

import pytest

from jzero.planning.announcement import typical_seconds

# 12 steps of each of three recipes, as their metrics.jsonl has them.
RUNS = json.loads((Path(__file__).parents[1] / "run" / "healthy_runs.json").read_text())


@pytest.mark.parametrize("name", RUNS)
def test_the_hours_after_the_third_step_are_those_of_the_clock(name: str) -> None:
    steps = RUNS[name]["metrics"]
    clock = [row["time/step"] for row in steps]
    first = [row["time/step"] - row["compile/seconds"] for row in steps[:3]]

    announced = sum(clock[:3]) + (len(steps) - 3) * typical_seconds(first)

    assert announced == pytest.approx(sum(clock), rel=0.2)


def test_the_first_step_is_no_measure() -> None:
    assert typical_seconds([100.0, 2.0, 4.0]) == 3.0
    assert typical_seconds([5.0]) == 5.0
