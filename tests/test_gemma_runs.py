"""Runs of RL with sliding windows, in the ways in which a run can differ from the plainest."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import read_jsonl
from test_train import tiny_run
from tiny import tiny_settings

from jzero import algorithms
from jzero.config import AdapterConfig, Config, RewardConfig, Together, tiny_arch
from jzero.loops import rl


def arch(name: str) -> str:
    """Returns a model with a window that is shorter than a prompt, in one of two layers."""
    return tiny_arch(
        name,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        head_dim=8,
        sliding_window=6,
        sliding_window_pattern=2,
    )


def one_turn(**changes: Any) -> Config:
    """Returns a run of three steps; `changes` are those of config.model."""
    config = tiny_run(3, algorithms.PRESETS["grpo"]())
    # The lengths of responses differ, so that every step has something to train on.
    config.task.reward = RewardConfig(functions=("accuracy", "length"))
    config.rollout.kv_dtype = "float32"
    for name, value in changes.items():
        setattr(config.model, name, value)
    return config


def several_turns() -> Config:
    """Returns a run on the game of guessing."""
    config = tiny_settings(rollout={"kv_dtype": "float32"}, train={"steps": 3})
    config.algorithm = algorithms.PRESETS["grpo"]()
    return config


def int8_cache() -> Config:
    config = one_turn()
    config.rollout.kv_dtype = "int8"
    config.algorithm = replace(config.algorithm, old_policy="sampler")
    return config


def asynchronous() -> Config:
    config = several_turns()
    config.rollout.placement = Together(max_staleness=1)
    return config


def context_parallel() -> Config:
    config = one_turn()
    config.mesh.data, config.mesh.fsdp, config.mesh.context = 4, 1, 2
    return config


def exact() -> Config:
    config = one_turn(exact=True)
    config.mesh.data, config.mesh.fsdp = -1, 1
    return config


ROUNDED = 1e-5  # mean difference of the log-probs of sampler and trainer, in fp32
RUNS = {
    "adapter": (lambda: one_turn(adapter=AdapterConfig(rank=4)), ROUNDED),
    "int8 base": (lambda: one_turn(base="int8", adapter=AdapterConfig(rank=4)), ROUNDED),
    "int8 KV cache": (int8_cache, 0.05),
    "several turns": (several_turns, ROUNDED),
    "asynchronous": (asynchronous, np.inf),  # rollouts are older than the policy
    "context parallel": (context_parallel, ROUNDED),
    "exact": (exact, 0.0),
    "gemma2": (one_turn, ROUNDED),
    "gemma2, exact": (exact, 0.0),
}


# An int8 base has an adapter, too; episodes of several turns are those of the asynchronous run.
@pytest.mark.usefixtures("quick_runs")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_windows(name: str, tmp_path: Path) -> None:
    make, difference = RUNS[name]
    config = make()
    config.model.arch = arch("tiny-gemma2" if "gemma2" in name else "tiny-gemma3")

    rl.train(config, tmp_path)

    rows = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "policy/mismatch" in row]
    assert len(rows) == 3
    # Sampler and trainer compute the same function, before and after the weights were published.
    assert all(row["policy/mismatch"] <= difference for row in rows)
    assert all(np.isfinite(row["optimizer/grad_norm"]) for row in rows)
    assert any(row["optimizer/grad_norm"] > 0 for row in rows)
