"""Whole runs of RL in this process: resuming PPO, dynamic sampling, and arrays that leak."""

import json
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from runs import read_jsonl

from jzero import algorithms
from jzero.algorithms import Algorithm
from jzero.config import Config, TaskConfig, schedules
from jzero.errors import UserError
from jzero.loops import rl
from jzero.rollout.collect import ROUND_STRIDE
from jzero.tasks import find_task
from jzero.types import JsonValue, Problem

pytestmark = pytest.mark.usefixtures("quick_runs", "explicit_transfers")


def tiny_run(steps: int, algorithm: Algorithm) -> Config:
    return tiny.countdown_settings(
        algorithm=vars(algorithm),
        optimizer={"lr": 1e-3, "schedule": schedules.Constant()},
        critic={"warmup_steps": 1},
        train={"steps": steps, "minibatches": 2, "checkpoint_every": 2},
        eval={"problems": 8, "samples": 1, "greedy": False},
    )


def is_reproducible(metric: str) -> bool:
    """Whether a resumed run has the metric with the same value: times differ.

    A run also evaluates at its own last step, which is not that of the whole run.
    """
    is_timed = metric.startswith(("time/", "compile/", "memory/")) or metric.endswith("per_second")
    return not is_timed and not metric.startswith("eval")


def reproducible_metrics(workdir: Path) -> list[dict[str, JsonValue]]:
    rows = read_jsonl(workdir / "metrics.jsonl")
    return [{name: row[name] for name in row if is_reproducible(name)} for row in rows]


def exported_weights(workdir: Path, step: int) -> bytes:
    return (workdir / f"export-{step}/model.safetensors").read_bytes()


def test_ppo_with_a_refreshed_reference_resumes_to_the_same_numbers(tmp_path: Path) -> None:
    """The critic, both optimizers and the reference are as they were."""
    whole = tmp_path / "whole"
    resumed = tmp_path / "resumed"

    def run(steps: int, workdir: Path) -> None:
        ppo = algorithms.PRESETS["ppo"](
            kl_reward=0.05, kl=algorithms.KL(coef=0.01), reference_every=1
        )
        config = tiny_run(steps, ppo)
        config.train.export_every = 3
        rl.train(config, workdir)

    run(4, whole)
    run(2, resumed)
    run(4, resumed)

    metrics = reproducible_metrics(whole)
    assert len(metrics) == 4
    assert reproducible_metrics(resumed) == metrics
    assert all(row["critic/loss"] > 0 for row in metrics)

    # During the first step only the critic is trained.
    assert "optimizer/grad_norm" not in metrics[0]
    assert metrics[1]["optimizer/grad_norm"] > 0

    assert exported_weights(resumed, 4) == exported_weights(whole, 4)
    assert exported_weights(resumed, 3) == exported_weights(whole, 3)
    assert exported_weights(whole, 3) != exported_weights(whole, 4)
    # Step 2 is a multiple of no train.export_every, but there the first run of the two ended.
    assert not (whole / "export-2").exists()
    assert (resumed / "export-2").exists()

    summary = json.loads((whole / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["export"] == str(whole / "export-4")


def test_dynamic_sampling_replaces_groups_that_teach_nothing(tmp_path: Path) -> None:
    dapo = algorithms.PRESETS["dapo"](dynamic_sampling_rounds=6)

    rl.train(tiny_run(1, dapo), tmp_path)

    [metrics] = read_jsonl(tmp_path / "metrics.jsonl")
    assert 1 < metrics["rollout/rounds"] <= 7
    assert metrics["rollout/tokens"] > 0
    samples = read_jsonl(tmp_path / "samples.jsonl")
    problem_numbers = [int(sample["id"].split("/")[-1]) for sample in samples]
    assert any(number >= 4 * ROUND_STRIDE for number in problem_numbers)  # of a later round
    # Groups whose scores differ come first.
    assert len({sample["score"] for sample in samples[:4]}) > 1


def test_a_run_that_leaks_arrays_stops_and_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task of the user's keeps an array of each step, from the third on."""
    countdown = find_task("countdown")
    kept = []

    def leaking_problems(task: TaskConfig, seed: int, step: int, count: int) -> list[Problem]:
        if step > 2:
            # More than the share that is allowed, of whatever other tests have left behind.
            size = 2**23 + sum(array.nbytes for array in jax.live_arrays()) // 16
            kept.append(jax.device_put(np.zeros(size, np.int32)))
        return countdown.train_problems(task, seed, step, count)

    module = types.ModuleType("leaking_task")
    module.TASK = countdown._replace(train_problems=leaking_problems)
    monkeypatch.setitem(sys.modules, "leaking_task", module)
    config = tiny_run(9, algorithms.PRESETS["grpo"]())
    config.task.name = "leaking_task"
    config.warm_start = None

    with pytest.raises(UserError, match=r"^step 7: the arrays on a device have grown in 5 steps"):
        rl.train(config, tmp_path)

    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert rows[6]["memory/live_gib"] > rows[2]["memory/live_gib"] > rows[1]["memory/live_gib"]
    assert (tmp_path / "checkpoints" / "7").is_dir()
