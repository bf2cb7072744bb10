"""Write a text backwards: a curve that prime-rl publishes for one GPU, from generated words.

    python -m jzero.main --config configs/reverse_text.py:tiny          # from scratch on a laptop
    python -m jzero.main --config configs/reverse_text.py:qwen3-0.6b    # the published model
    python -m jzero.main --config configs/reverse_text.py:qwen2.5-0.5b-lora

Presets: tiny, random weights and a warm start; smollm2-135m, qwen2.5-0.5b and qwen3-0.6b, which
learn to reverse by a short warm start and go on by RL, each also with -lora, which has no warm
start: it trains an adapter on the frozen model.

Models: the presets load their models from the hub, or from --config.model.path=DIRECTORY.
Hardware: any accelerator with 16 GB, or two CPU cores and minutes for a step.
Result of tiny, 2026-11-29, seed 0: the mean score of ten steps goes from 0.65 to 0.82 in 100 steps,
and on held-out texts from 0.69 to 0.83. The other presets have not been run yet.
prime-rl reports for Qwen3-0.6B and paragraphs, which is another problem: from 0.05 to about 0.8 in
20 steps of 128 responses after a short supervised training.
"""

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
    add_adapter,
    choose_preset,
    schedules,
    tiny_model,
)

_MODELS = {
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
}
HUB = _MODELS | {f"{name}-lora": path for name, path in _MODELS.items()}


def get_config(preset: str = "") -> Config:
    """Returns the config of "preset", "preset,algorithm" or ""."""
    return choose_preset(preset, tiny, pretrained, HUB, "qwen3-0.6b")


def pretrained(preset: str) -> Config:
    """16 texts x 8 answers a step, in full precision: 128 responses, as published."""
    model = preset.removesuffix("-lora")
    config = Config(
        name=f"reverse-text-{preset}",
        model=ModelConfig(path=HUB[preset], dtype="float32", remat="none"),
        task=TaskConfig(name="reverse_text", template="plain"),
        rollout=RolloutConfig(
            num_prompts=16,
            group_size=8,
            max_prompt_tokens=32,
            max_new_tokens=48,
            page_size=16,
            decode_steps=16,
        ),
        algorithm=algorithms.dr_grpo(),
        optimizer=OptimizerConfig(lr=5e-6),
        warm_start=WarmStart(steps=100, batch_size=16, lr=1e-5),
        train=TrainConfig(
            steps=20,
            microbatch_tokens=2 * (32 + 8 * 48),
            pack="longest",
            packs_per_row=8,
            checkpoint_every=5,
        ),
        eval=EvalConfig(problems=128, samples=1, every=5),
    )
    if preset != model:
        add_adapter(config)
        config.warm_start = None
    return config


def tiny() -> Config:
    """One and two words, from random weights: a short warm start, then RL."""
    return Config(
        name="reverse-text-tiny",
        model=tiny_model(),
        task=TaskConfig(
            name="reverse_text", template="plain", options=("words_min=1", "words_max=2")
        ),
        rollout=RolloutConfig(
            num_prompts=32,
            group_size=8,
            max_prompt_tokens=24,
            max_new_tokens=20,
            num_slots=256,
            page_size=16,
            decode_steps=20,
        ),
        algorithm=algorithms.dr_grpo(),
        optimizer=OptimizerConfig(lr=1e-3, schedule=schedules.Cosine()),
        # With 600 steps nine in ten texts are right before RL.
        warm_start=WarmStart(steps=200, batch_size=32, lr=3e-3),
        train=TrainConfig(
            steps=100, microbatch_tokens=4096, pack="longest", packs_per_row=8, checkpoint_every=50
        ),
        eval=EvalConfig(problems=64, samples=4, every=50),
        mesh=MeshConfig(data=-1, fsdp=1),
    )
