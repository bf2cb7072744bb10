"""The limit of time of a run, and the watch over its memory."""

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import reference

from jzero.config import Config, tiny_arch
from jzero.hosts.interrupt import Interrupted
from jzero.loops import sft
from jzero.run.budget import TimeBudget
from jzero.run.memory import SLACK, Growth, MemoryWatch, live_bytes

MIB = 2**20
SMALLEST = tiny_arch(hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=8)


# -- Time ------------------------------------------------------------------------------------------


def test_a_step_is_refused_that_may_end_after_the_time() -> None:
    budget = TimeBudget(minutes=1)
    assert budget.reason_to_stop() == ""
    budget.add("step", 20.0)
    budget.add("step", 5.0)  # the longest counts
    budget.add("checkpoint", 10.0)
    assert budget.reserve(has_evaluation=True) == 20 + 2 * 10
    assert budget.reason_to_stop() == ""

    budget.add("evaluation", 30.0)
    assert budget.reason_to_stop(has_evaluation=False) == ""
    assert "another step may take 70 seconds" in budget.reason_to_stop(has_evaluation=True)
    with pytest.raises(Interrupted, match=r"train.minutes=1: 0\.0 minutes have passed"):
        budget.raise_if_over(has_evaluation=True)


def test_without_a_limit_no_time_is_too_long() -> None:
    budget = TimeBudget(minutes=0)
    budget.add("step", 1e9)
    budget.raise_if_over(has_evaluation=True)
    budget.raise_if_over_in_warm_start()


def test_the_time_that_has_passed_counts() -> None:
    budget = TimeBudget(minutes=1e-4)
    time.sleep(0.01)
    with pytest.raises(Interrupted, match="the warm start is not over, and begins anew"):
        budget.raise_if_over_in_warm_start()


def fine_tuning(minutes: float) -> Config:
    return reference.settings(
        model={"arch": SMALLEST},
        task={"template": "plain"},
        train={"microbatch_tokens": 1024, "minutes": minutes, "checkpoint_every": 100},
        warm_start={"steps": 12, "batch_size": 1, "tries": 1},
        sft={"data": "countdown", "batch_size": 4, "pack_length": 128},
        eval={"problems": 0},
    )


@pytest.mark.usefixtures("quick_runs")
def test_a_run_ends_with_its_time_and_goes_on_with_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The time is over before the first step is; a process makes one step at least."""
    workdir = tmp_path / "run"
    summary = sft.train(fine_tuning(minutes=1e-4), workdir)
    assert summary["steps"] == 1
    assert summary["export"] is None
    printed = capsys.readouterr().out
    assert "train.minutes=0.0001: " in printed
    assert "stopped after step 1; the same command resumes" in printed
    assert (workdir / "checkpoints" / "1").is_dir()

    summary = sft.train(fine_tuning(minutes=60), workdir)  # another budget is the same run
    assert summary["steps"] == 3
    assert summary["export"] == str(workdir / "export-3")


# -- Memory ----------------------------------------------------------------------------------------


def alarms(sizes: list[float]) -> list[bool]:
    """Returns after which steps the rule says that the bytes grow."""
    rule = Growth()
    return [rule.add(size * MIB) for size in sizes]


def test_bytes_that_grow_step_by_step_raise_an_alarm() -> None:
    # The bound is 120 MiB: the second step has 100.
    sizes: list[float] = [900, 100, 110, 119, 125, 130, 135, 140, 145]
    assert alarms(sizes) == 8 * [False] + [True]


@pytest.mark.parametrize(
    "sizes",
    [
        [100, 100, *(50 * [300])],  # taken once, and kept
        [100, 100, *(20 * [300, 90, 320, 80])],  # comes and goes
        [100, 100, *(20 * [121, 130, 140, 150, 145])],  # four steps up and one down
        [100, 100, *range(101, 120)],  # below the share
        [1, 1, *range(2, 17)],  # a small model, below the slack
        [100, 500, *range(90, 190, 10)],  # the second step was the largest
    ],
)
def test_no_other_bytes_raise_one(sizes: list[float]) -> None:
    assert SLACK == 16 * MIB
    assert not any(alarms(sizes))


def test_arrays_that_share_a_buffer_count_once() -> None:
    kind = "float32[1031,7]"
    array = jnp.zeros((1031, 7), jnp.float32)
    same = jax.device_put(array, array.sharding)
    assert same is not array and same.unsafe_buffer_pointer() == array.unsafe_buffer_pointer()

    sizes, counts = live_bytes()
    assert (sizes[kind], counts[kind]) == (array.nbytes, 1)

    other = array + 1
    sizes, counts = live_bytes()
    assert (sizes[kind], counts[kind]) == (2 * other.nbytes, 2)


def test_the_watch_names_what_became_more() -> None:
    watch = MemoryWatch(planned_bytes=2**31)
    leaked = []
    for step in range(1, 9):
        values = watch.step_metrics()
        assert watch.growth == "", step
        assert values["memory/peak_gib"] >= values["memory/live_gib"]
        assert values["memory/planned_gib"] == 2
        # More than any share of what other tests have left behind.
        size = int(values["memory/live_gib"] * 2**26) + 5 * MIB if step >= 3 else 0
        if size:
            leaked.append(jnp.zeros((size,), jnp.float32))
        if step == 7:
            break
    watch.step_metrics()

    assert "grown in 5 steps in a row, from " in watch.growth
    assert f"1 more float32[{leaked[-1].size}]" in watch.growth
