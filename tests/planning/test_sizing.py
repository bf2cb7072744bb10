"""Sizes of 0 become what fits, and no size exceeds what a step has."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from configs import countdown
from jzero.blueprint import most_sequences, with_needed_slots
from jzero.config import Config, RolloutConfig
from jzero.planning import sizing
from jzero.planning.chips import CHIPS, described_devices
from jzero.planning.fitting import fit
from jzero.sharding.mesh import make_mesh
from jzero.training.trainer import row_shapes

V5E = float(CHIPS["TPU v5 lite"].hbm_bytes)


def open_sizes(config: Config) -> Config:
    """Returns the config with the sizes that `sizing` chooses left at 0."""
    return replace(
        config,
        train=replace(config.train, microbatch_tokens=0),
        rollout=replace(config.rollout, num_slots=0),
    )


def test_chosen_sizes_fit_and_are_nearly_the_largest() -> None:
    devices = described_devices("v5e:2x4")
    config = open_sizes(countdown.get_config("qwen2.5-3b"))

    chosen = sizing.choose_sizes(config, devices, V5E)

    tokens, slots = chosen.train.microbatch_tokens, chosen.rollout.num_slots
    assert tokens > 0 and slots > 0
    verdict = fit(chosen, devices, V5E)
    # A KV cache that is too large is made smaller by `kv_pool`.
    assert verdict.excess.keys() <= {"rollout"}
    # Given sizes stay as they are.
    assert sizing.choose_sizes(chosen, devices, V5E) == chosen
    # With half of the memory the sizes are smaller, and with unknown memory the smallest.
    less = sizing.choose_sizes(config, devices, 0.6 * V5E)
    assert (less.train.microbatch_tokens, less.rollout.num_slots) < (tokens, slots)
    unknown = sizing.choose_sizes(config, devices, None)
    assert unknown.rollout.num_slots == len(devices)


def needed_slots(config: Config) -> int:
    return with_needed_slots(config.rollout, config.eval).num_slots


def test_a_recipe_s_padded_sizes_do_not_stay_in_a_toy_run() -> None:
    """4 x 4 answers of 32 tokens, with sizes for 8 devices and 8 packs of 1,024 tokens."""
    config = Config()
    config.rollout = RolloutConfig(num_prompts=4, group_size=4, max_new_tokens=32)
    config.train.microbatch_tokens, config.eval.problems, config.eval.samples = 36_864, 8, 0
    mesh = make_mesh(described_devices("v5e:1x1"), {"data": 1, "fsdp": 1, "tensor": 1})

    shapes = row_shapes(config.train, config.rollout, mesh, config.rollout.max_prompt_tokens)

    assert shapes.layouts[0].slots == 4  # not 8 packs
    assert shapes.rows[0] == 4
    assert shapes.rows[0] * shapes.layouts[0].tokens == 4 * (256 + 4 * 32)
    assert most_sequences(config.rollout, config.eval, config.sft is not None) == 16
    assert needed_slots(config) == 16
    config.rollout.num_slots = 4
    assert needed_slots(config) == 4


def test_suites_may_use_every_slot() -> None:
    config = Config()
    config.rollout = RolloutConfig(num_prompts=1, group_size=2, num_slots=64)
    config.eval.problems = 0
    assert needed_slots(config) == 2
    config.eval.suites = ("math500",)
    assert needed_slots(config) == 64


def test_a_resumed_run_keeps_its_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = {"train": {"microbatch_tokens": 4608}, "rollout": {"num_slots": 24}}
    (tmp_path / "config.json").write_text(json.dumps(recorded))
    config = open_sizes(countdown.get_config("tiny"))

    sized = sizing.with_sizes(config, tmp_path)

    assert (sized.train.microbatch_tokens, sized.rollout.num_slots) == (4608, 24)
    # A new run chooses by the free memory.
    monkeypatch.setattr(sizing, "cpu_bytes", lambda: 64.0 * 2**30)
    new = sizing.with_sizes(config, tmp_path / "new")
    assert new.train.microbatch_tokens > 0 and 0 < new.rollout.num_slots <= 512
