"""A run of RL that drafts with the model's own head, and trains it along."""

import json
from pathlib import Path

import numpy as np
import pytest
from runs import read_jsonl
from safetensors.numpy import load_file
from test_hybrid_runs import ARCH
from test_train import tiny_run

from jzero import algorithms
from jzero.config import RewardConfig
from jzero.config.drafts import Mtp
from jzero.loops import rl
from jzero.model import huggingface, mtp


@pytest.mark.usefixtures("quick_runs")
def test_a_head_is_trained_resumed_and_exported(tmp_path: Path) -> None:
    for steps in (2, 3):
        config = tiny_run(steps, algorithms.PRESETS["grpo"]())
        config.model.arch = ARCH
        config.rollout.kv_dtype = "float32"
        config.rollout.draft = Mtp(tokens=2, cost=1.0)
        # The lengths of responses differ, so that every step has something to train on.
        config.task.reward = RewardConfig(functions=("accuracy", "length"))
        rl.train(config, tmp_path)

    rows = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "mtp/nll" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(0 < row["mtp/accuracy"] <= 1 and np.isfinite(row["mtp/nll"]) for row in rows)
    # Sampler and trainer compute the same function.
    assert all(row["policy/mismatch"] < 1e-5 for row in rows)
    assert all(row["rollout/tokens_per_pass"] > 1 for row in rows)

    first, last = (tmp_path / f"export-{step}" for step in (2, 3))
    before, after = (load_file(path / "model.safetensors") for path in (first, last))
    heads = [name for name in after if name.startswith("mtp.")]
    assert len(heads) == 15
    assert not any(np.array_equal(before[name], after[name]) for name in heads)
    hf_config = json.loads((last / "config.json").read_text())
    model = mtp.with_head(huggingface.parse_config(hf_config), Mtp(), hf_config)
    assert "mtp" in huggingface.load(last, model)
