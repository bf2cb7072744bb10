"""A whole run of configs/code.py:tiny: a model from nothing writes programs, which really run."""

from pathlib import Path

from runs import rows

from configs import code as recipes
from jzero.config import Local, WarmStart, tiny_arch
from jzero.loops.rl import train
from jzero.sandbox import levels

BEST = next(level for level in reversed(levels.LEVELS) if not levels.failure(level))


def test_a_run_of_tiny_runs_the_programs_of_its_policy(tmp_path: Path, quick_runs: None) -> None:
    config = recipes.get_config("tiny")
    config.model.arch = tiny_arch(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    config.task.sandbox = Local(level=BEST)
    config.task.reward.functions = ("accuracy", "code")
    config.rollout.num_prompts, config.rollout.group_size = 4, 2
    config.rollout.num_slots = 16
    config.warm_start = WarmStart(steps=150, batch_size=16, lr=1e-2)
    config.train.steps = 2
    config.train.microbatch_tokens = 8 * (8 + 2 * 64)
    config.train.packs_per_row = 2
    config.train.logged_rollouts = 8
    config.eval.problems, config.eval.samples, config.eval.every = 2, 1, 0

    train(config, tmp_path)

    metrics = rows(tmp_path / "metrics.jsonl")[-1]
    assert metrics["sandbox/level"] == levels.LEVELS.index(BEST)
    assert metrics["sandbox/seconds"] > 0
    assert metrics["reward/failed"] == 0
    samples = rows(tmp_path / "samples.jsonl")
    reasons = {sample["reason"] for sample in samples}
    # Programs were run, and their outputs compared.
    assert any(reason == "correct" or "test" in reason for reason in reasons), reasons
