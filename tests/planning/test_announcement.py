"""The hours that a run announces after its third step, from the steps of recorded runs."""

import json
from pathlib import Path

import pytest

from jzero.config import Config, TrainConfig
from jzero.planning import sizing
from jzero.planning.announcement import typical_seconds
from jzero.planning.cpu_rates import cpu_chip
from jzero.planning.machines import MACHINES, Verdict, plan_on

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


def verdict_on(name: str, steps: int, price: float = 0.0) -> Verdict:
    machine = MACHINES[name]
    settings = Config(train=TrainConfig(steps=steps, price=price))
    settings.model.path = "Qwen/Qwen2.5-0.5B"
    settings = sizing.choose_sizes(settings, machine.devices, machine.device_bytes)
    return plan_on(settings, machine)


@pytest.mark.parametrize("name", ["laptop-24gb", "H100", "v5e-8"])
def test_a_plan_has_hours_and_dollars_on_every_machine(name: str) -> None:
    short, long = verdict_on(name, 10), verdict_on(name, 1000, price=2.5)

    assert short.hours is not None and long.hours == pytest.approx(100 * short.hours)
    assert str(short).endswith(" by estimate") and "$" not in str(short)
    assert f"(${2.5 * long.hours:.2f} at $2.5 an hour) by estimate" in str(long)


def test_a_slower_machine_takes_longer() -> None:
    hours = [verdict_on(name, 100).hours for name in ("laptop-24gb", "L4", "H100")]
    assert sorted(hours, reverse=True) == hours


def test_the_speed_of_a_cpu_is_that_of_a_short_product() -> None:
    one, two = cpu_chip(1), cpu_chip(2)
    assert one.flops == 2 * two.flops  # its devices share the cores
    assert 1e9 < one.flops < 1e14 and 1e8 < one.bandwidth < 1e13
