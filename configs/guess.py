"""Guess a number with hints, "higher" or "lower": what one response cannot reach and three or four can.

    python -m jzero.main --config configs/guess.py:tiny             # from scratch, 2.5 minutes of CPU time
    python -m jzero.main --config configs/guess.py:qwen2.5-1.5b     # a number of 1..1000 with the base model
    python -m jzero.main --config configs/guess.py:tiny --config.rollout.max_turns=1 --config.rollout.group_size=24

Presets: tiny, qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b. The warm start of tiny shows true hints after random
guesses, and a last guess that is right in half of the examples and random in the others: what hints mean, and never
where to ask. After it a number of 1..7 is found in 44.5 % of the episodes, after 200 RL steps (0.44M sampled tokens)
in 99.0 %; trained with one response a number (the third command, 0.54M tokens) and then asked three times, in 38.5 %:
means of held-out accuracy over seeds 0 to 2, 2026-11-20 (benchmarks/turns.py)."""

from jzero import algorithms
from jzero.config import QWEN25_HUB_IDS as HUB
from jzero.config import (
    ArchitectureConfig,
    Config,
    EvalConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
    WarmStartConfig,
    choose_preset,
)


def get_config(preset: str = "") -> Config:
    return choose_preset(preset, tiny, qwen, HUB, accelerator="qwen2.5-1.5b")


def qwen(preset: str) -> Config:
    """10 guesses find each of 1,023 numbers."""
    return Config(
        name=f"guess-{preset}",
        model=ModelConfig(path=HUB[preset]),
        task=TaskConfig(name="configs.tasks.guess", template="chat", value_max=1000),
        rollout=RolloutConfig(
            num_prompts=64,
            group_size=8,
            max_prompt_tokens=128,
            max_new_tokens=32,
            max_turns=10,
            max_reply_tokens=16,
        ),
        algorithm=algorithms.grpo(),
        optimizer=OptimizerConfig(lr=1e-6),
        train=TrainConfig(steps=200, microbatch_tokens=8 * (128 + 4 * 464), packs_per_row=4),
        eval=EvalConfig(problems=1000, samples=1, every=20),
    )


def tiny() -> Config:
    """A number of 1..7 in 3 guesses: halving always finds it, random guesses 1 - (6/7)^3 = 37 % of times."""
    arch = ArchitectureConfig(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=16,
    )
    return Config(
        name="guess-tiny",
        model=ModelConfig(arch=arch, dtype="float32", logit_chunk=65536),
        task=TaskConfig(name="configs.tasks.guess", template="plain", value_max=7),
        rollout=RolloutConfig(
            num_prompts=56,
            group_size=8,
            max_prompt_tokens=8,
            max_new_tokens=2,
            max_turns=3,
            max_episode_tokens=36,
            num_slots=512,
            page_size=16,
            decode_steps=4,
        ),
        algorithm=algorithms.dr_grpo(entropy_coef=0.01),
        optimizer=OptimizerConfig(lr=2e-3, schedule="linear", warmup_steps=10),
        warm_start=WarmStartConfig(steps=500, batch_size=64, lr=3e-3, tries=3.0),
        train=TrainConfig(
            steps=200,
            minibatches=2,
            microbatch_tokens=14 * (8 + 8 * 28),
            pack_buckets=1,
            packs_per_row=8,
            checkpoint_every=50,
        ),
        eval=EvalConfig(problems=112, samples=4, every=50),
        mesh=MeshConfig(data=-1, fsdp=1),
    )
