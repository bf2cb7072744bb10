"""A run that is small enough to be compiled for a TPU slice in a test."""

import importlib.util

import pytest

from jzero.config import ArchitectureConfig, Config, ModelConfig, RolloutConfig, TrainConfig

TOPOLOGY = "v5e:2x4"
ROW_TOKENS = 160  # a prompt of 32 tokens and 4 responses of 32
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)


def small_settings(num_rows: int = 8, **rollout) -> Config:
    """Returns settings of few shapes and many pages: two layers with the heads of Qwen2.5-3B.

    A microbatch has `num_rows` rows; `rollout` replaces fields of that section.
    """
    arch = ArchitectureConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=128,
    )
    sizes = {
        "num_prompts": 16,
        "group_size": 4,
        "max_prompt_tokens": 32,
        "max_new_tokens": 32,
        "num_slots": 128,
        "page_size": 64,
        "num_pages": 16384,
    }
    return Config(
        name="small",
        model=ModelConfig(arch=arch),
        rollout=RolloutConfig(**sizes | rollout),
        train=TrainConfig(microbatch_tokens=num_rows * ROW_TOKENS, pack_buckets=1, packs_per_row=4),
    )
