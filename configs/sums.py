"""Sums of two numbers, from three solved ones: a pretrained model learns on a CPU in minutes.

    python -m jzero.main --config configs/sums.py:smollm2-135m
    python -m jzero.main --config configs/sums.py:smollm2-135m-lora
    python -m jzero.main --config configs/sums.py:tiny              # from scratch, in a minute

Presets: smollm2-135m, gemma-3-270m, qwen2.5-0.5b and qwen3-0.6b, each also with -lora, which trains
an adapter on the frozen model; and tiny, random weights and a warm start.

Models: the presets load their models from the hub, where Gemma's license has to be accepted, or
from --config.model.path=DIRECTORY.
Hardware: two CPU cores; smollm2-135m needs 5 GB of memory and its adapter 3 GB, and the models of
0.5b and 0.6b four times as much. Any accelerator with 16 GB holds each of them.
Cost: 12 seconds a step of smollm2-135m on two idle CPU cores (lab/speed.md), 13 minutes in all.
Target: smollm2-135m goes from 14 % to 74 % of the held-out problems at temperature 1, and from 21 %
to 80 % greedily (three seeds, lab/learning.md).
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

PROMPT = 41  # tokens of three solved problems and a question: each digit is one, and Gemma's <bos>
RESPONSE = 8  # twice the tokens of a space, two digits and a line break

_MODELS = {
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "gemma-3-270m": "google/gemma-3-270m",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
}
LEARNING_RATES = {"gemma-3-270m": 3e-6}  # others have 1e-5
HUB = _MODELS | {f"{name}-lora": path for name, path in _MODELS.items()}


def get_config(preset: str = "") -> Config:
    """Returns the config of "preset", "preset,algorithm" or ""."""
    return choose_preset(preset, tiny, pretrained, HUB, "qwen2.5-0.5b")


def pretrained(preset: str) -> Config:
    """16 problems x 16 answers a step, in full precision."""
    model = preset.removesuffix("-lora")
    config = Config(
        name=f"sums-{preset}",
        model=ModelConfig(path=HUB[preset], dtype="float32", remat="none"),
        task=TaskConfig(name="sums", template="plain"),
        rollout=RolloutConfig(
            num_prompts=16,
            group_size=16,
            max_prompt_tokens=PROMPT,
            max_new_tokens=RESPONSE,
            page_size=16,
            decode_steps=RESPONSE,
        ),
        algorithm=algorithms.dr_grpo(),
        # With a constant rate, accuracy hardly rises after 20 steps (lab/learning.md).
        optimizer=OptimizerConfig(lr=LEARNING_RATES.get(model, 1e-5), schedule=schedules.Cosine()),
        train=TrainConfig(
            steps=60,
            # Two responses in most packs, a group in a row, and two rows in a microbatch: groups of
            # equal scores are left out, so a step has 8 to 12 rows.
            microbatch_tokens=2 * (PROMPT + 10 * RESPONSE),
            pack="longest",
            packs_per_row=10,
            checkpoint_every=20,
        ),
        eval=EvalConfig(problems=128, samples=4, every=20),
    )
    if preset != model:
        add_adapter(config)
    return config


def tiny() -> Config:
    """Random weights: a warm start with sums and differences of numbers up to 20, then RL."""
    return Config(
        name="sums-tiny",
        model=tiny_model(),
        task=TaskConfig(
            name="sums", template="plain", options=("value_max=20", "shots=0", "differences=true")
        ),
        rollout=RolloutConfig(
            num_prompts=32,
            group_size=8,
            max_prompt_tokens=16,
            max_new_tokens=RESPONSE,
            num_slots=256,
            page_size=16,
            decode_steps=RESPONSE,
        ),
        algorithm=algorithms.dr_grpo(),
        optimizer=OptimizerConfig(lr=1e-3),
        warm_start=WarmStart(steps=300, batch_size=32, lr=3e-3),
        train=TrainConfig(
            steps=20, microbatch_tokens=4096, pack="longest", packs_per_row=8, checkpoint_every=20
        ),
        eval=EvalConfig(problems=64, samples=4, every=20),
        mesh=MeshConfig(data=-1, fsdp=1),
    )
