"""Whole runs with `model.exact`: in fifty steps of RL no log-probability differs in any bit.

A log-probability that differs ends the run, so a run that ends by itself had none.
"""

from pathlib import Path

import pytest
from runs import read_jsonl

from jzero import algorithms
from jzero.config import (
    Config,
    EvalConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
    WarmStart,
    tiny_arch,
)
from jzero.loops import rl

STEPS = 50


def countdown(model_type: str, dtype: str, microbatch_tokens: int, mesh: MeshConfig) -> Config:
    """Returns the config of a small run whose pages do not hold all sequences at once.

    Two minibatches make the old log-probs of the second one those of before the first.
    """
    return Config(
        model=ModelConfig(
            arch=tiny_arch(
                model_type=model_type,
                num_hidden_layers=2,
                hidden_size=64,
                intermediate_size=128,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
            ),
            dtype=dtype,
            exact=True,
        ),
        task=TaskConfig(
            template="plain", options=("numbers_min=2", "numbers_max=2", "value_max=9")
        ),
        rollout=RolloutConfig(
            num_prompts=8,
            group_size=4,
            max_prompt_tokens=16,
            max_new_tokens=80,
            kv_dtype=dtype,
            num_slots=16,
            page_size=8,
            num_pages=40,
            decode_steps=8,
        ),
        algorithm=algorithms.grpo(entropy_coef=1e-3),  # then no response is left out
        optimizer=OptimizerConfig(lr=1e-3),
        warm_start=WarmStart(steps=60, lr=2e-2, batch_size=8, tries=1),
        train=TrainConfig(
            steps=STEPS,
            minibatches=2,
            microbatch_tokens=microbatch_tokens,
            packs_per_row=2,
            pack="longest",
        ),
        eval=EvalConfig(problems=8, samples=1),
        mesh=mesh,
    )


@pytest.mark.parametrize(
    ("model_type", "dtype", "microbatch_tokens", "mesh"),
    [
        ("qwen2", "float32", 512, MeshConfig(data=1, fsdp=1)),
    ],
)
def test_fifty_steps_have_the_bits_of_the_sampler(
    model_type: str, dtype: str, microbatch_tokens: int, mesh: MeshConfig, tmp_path: Path
) -> None:
    rl.train(countdown(model_type, dtype, microbatch_tokens, mesh), tmp_path)

    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert len(rows) == STEPS
    assert all(row["policy/exact_tokens"] > 0 for row in rows)
    assert all(row["policy/mismatch_tokens"] == 0 for row in rows)
    assert all(row["policy/mismatch_max"] == 0 for row in rows)
    assert sum(row["rollout/preempted"] for row in rows) > 0
