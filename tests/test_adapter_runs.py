"""Whole runs that train an adapter: what they write, how they resume, and what they hold in memory.

The policy's base, the critic's, the reference and the decoder's weights are the same arrays.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import reference
from safetensors.numpy import load_file, save_file
from test_train import reproducible_metrics, tiny_run

from jzero import algorithms, export, setup
from jzero.algorithms import Algorithm
from jzero.config import AdapterConfig, Apart, Config, RewardConfig, tiny_arch
from jzero.errors import UserError
from jzero.loops import rl, sft
from jzero.model import adapters, huggingface
from jzero.run.checkpoint import Checkpoints

ADAPTER = AdapterConfig(rank=2, alpha=4.0)

whole_runs = pytest.mark.usefixtures("quick_runs", "explicit_transfers")


def with_adapter(config: Config, adapter: AdapterConfig = ADAPTER) -> Config:
    config.model.adapter = adapter
    return config


def adapter_run(steps: int, algorithm: Algorithm) -> Config:
    config = with_adapter(tiny_run(steps, algorithm))
    config.train.export_merged = True
    config.optimizer.lr = 1e-2
    config.rollout.kv_dtype = "float32"
    return config


def leaf_names(workdir: Path, step: int) -> set[str]:
    """Returns the names of the arrays in a checkpoint."""
    path = workdir / f"checkpoints/{step}/host/metadata"
    return set(json.loads(path.read_text())["leaves"])


# -- whole runs ------------------------------------------------------------------------------------


@whole_runs
def test_a_run_with_an_adapter_resumes_to_the_same_numbers(tmp_path: Path) -> None:
    """The critic is one more adapter, and the reference is an adapter of an earlier step."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"

    def run(steps: int, workdir: Path) -> Config:
        ppo = algorithms.PRESETS["ppo"](
            kl_reward=0.05, kl=algorithms.KL(coef=0.01), reference_every=2
        )
        config = adapter_run(steps, ppo)
        rl.train(config, workdir)
        return config

    config = run(4, whole)
    run(2, resumed)
    run(4, resumed)

    metrics = reproducible_metrics(whole)
    assert len(metrics) == 4
    assert reproducible_metrics(resumed) == metrics
    # Sampler and trainer compute the same function, also of an adapter that is trained.
    assert all(row["policy/mismatch"] < 1e-5 for row in metrics[1:])
    assert metrics[3]["policy/kl"] > 0
    for step in (2, 4):
        assert (resumed / f"reference/{step}/adapter.safetensors").exists()

    # A checkpoint holds the adapters and the value head, and nothing of the base.
    names = leaf_names(whole, 4)
    params = {name for name in names if name.startswith("params/")}
    assert params == {
        f"params/layers/{layer}/{factor}"
        for layer in ("q", "k", "v", "o", "gate", "up", "down")
        for factor in "ab"
    }
    assert "optimizer/critic/params/value" in names
    assert not any("embed" in name for name in names)

    # Each step publishes the adapter alone.
    model = setup.build(setup.resolve(config), None).base.model
    expected_bytes = 4 * adapters.num_params(model, ADAPTER)
    assert {row["publish/bytes"] for row in metrics} == {expected_bytes}

    # The export is the base with the adapter merged in fp32.
    exported = huggingface.load(whole / "export-4", model)
    base = jax.device_get(huggingface.load(whole / "base", model))
    abstract = {"params": adapters.abstract(model, ADAPTER)}
    items, record = Checkpoints(whole, keep=None).read_items(4, abstract)
    adapter = jax.device_get(items["params"])
    merged = adapters.merge(model, base, adapter, ADAPTER.scale)
    jax.tree.map(assert_close, exported, merged)
    assert not np.array_equal(exported["layers"]["q"], base["layers"]["q"])
    assert record["base"]["name"] == "base"
    again = Path(export.run(export.Options(whole, tmp_path / "export")))
    jax.tree.map(np.testing.assert_array_equal, huggingface.load(again, model), exported)

    # Another base is refused, by the run and by the export.
    path = whole / "base/model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] += 1
    save_file(tensors, path)
    for command in (
        lambda: run(6, whole),
        lambda: export.run(export.Options(whole, tmp_path / "other")),
    ):
        with pytest.raises(UserError, match=r"base holds other weights \(SHA-256 ") as refusal:
            command()
        assert "\n" not in str(refusal.value)


def assert_close(found: jax.Array, expected: jax.Array) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@whole_runs
def test_a_run_on_an_int8_base_resumes_and_exports_the_original_weights(tmp_path: Path) -> None:
    """The warm start's weights are stored before they are quantized, and read to resume."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"

    def run(steps: int, workdir: Path) -> Config:
        config = adapter_run(steps, algorithms.PRESETS["ppo"]())
        config.model.base = "int8"
        # The lengths of responses differ, so that every step has something to train on.
        config.task.reward = RewardConfig(functions=("accuracy", "length"))
        config.mesh.fsdp = 2
        config.mesh.tensor = 2
        rl.train(config, workdir)
        return config

    config = run(4, whole)
    run(2, resumed)
    run(4, resumed)

    metrics = reproducible_metrics(whole)
    assert reproducible_metrics(resumed) == metrics
    assert len(metrics) == 4
    # The first step trains the critic alone.
    assert all(row["policy/mismatch"] < 1e-5 for row in metrics[1:])
    model = setup.build(setup.resolve(config), None).base.model
    adapter_bytes = 4 * adapters.num_params(model, ADAPTER)
    assert all(row["publish/bytes"] <= adapter_bytes for row in metrics)

    items, _ = Checkpoints(whole, keep=None).read_items(
        4, {"params": adapters.abstract(model, ADAPTER)}
    )
    original = jax.device_get(huggingface.load(whole / "base", model))
    merged = adapters.merge(model, original, jax.device_get(items["params"]), ADAPTER.scale)
    exported = huggingface.load(whole / "export-4", model)
    jax.tree.map(assert_close, exported, merged)
    again = Path(export.run(export.Options(whole, tmp_path / "export")))
    jax.tree.map(np.testing.assert_array_equal, huggingface.load(again, model), exported)

    config.model.base = "native"
    with pytest.raises(UserError, match=r'model.base: "int8" -> "native"'):
        rl.train(config, whole)


@whole_runs
def test_devices_of_their_own_decode_while_others_train(tmp_path: Path) -> None:
    """The decoder has a copy of the base, and gets a new adapter after every step."""
    config = adapter_run(3, algorithms.PRESETS["grpo"]())
    # The lengths of responses differ, so that every step has something to train on.
    config.task.reward = RewardConfig(functions=("accuracy", "length"))
    config.rollout.placement = Apart(devices=4)
    config.mesh.fsdp = 2

    rl.train(config, tmp_path)

    metrics = reproducible_metrics(tmp_path)
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert metrics[0]["policy/mismatch"] < 1e-5  # both at version 0
    assert sum(row["async/staleness"] for row in metrics) > 0
    [published] = {row["publish/bytes"] for row in metrics}
    assert published < 0.2 * (tmp_path / "base/model.safetensors").stat().st_size


@pytest.mark.parametrize(("base", "dropout"), [("native", 0.1), ("int8", 0.0)])
@whole_runs
def test_fine_tuning_an_adapter_learns_and_resumes(
    base: str, dropout: float, tmp_path: Path
) -> None:
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(12)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arch = tiny_arch(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )

    def run(epochs: float, workdir: Path) -> None:
        settings = {"data": str(data), "batch_size": 6, "pack_length": 16, "epochs": epochs}
        config = reference.settings(
            model={"arch": arch}, sft=settings, optimizer={"lr": 3e-2}, eval={"problems": 0}
        )
        config.model.base = base
        sft.train(with_adapter(config, AdapterConfig(rank=4, dropout=dropout)), workdir)

    run(8, tmp_path / "whole")
    run(4, tmp_path / "resumed")
    run(8, tmp_path / "resumed")

    metrics = reproducible_metrics(tmp_path / "whole")
    assert reproducible_metrics(tmp_path / "resumed") == metrics
    assert metrics[-1]["sft/loss"] < metrics[0]["sft/loss"] - 0.1
    assert all("embed" not in name for name in leaf_names(tmp_path / "whole", 16))
