"""GSM8K: grade-school word problems with a number for an answer, 7,473 to train on and 1,319 held out.

    python -m jzero.main --config configs/gsm8k.py:tiny             # a random tiny Qwen, seconds a step on a laptop CPU
    python -m jzero.main --config configs/gsm8k.py:qwen2.5-1.5b     # GRPO on a base model
    python -m jzero.main --config configs/gsm8k.py:qwen2.5-1.5b-ppo # PPO with a critic, as in oat's documentation
    python -m jzero.main --config configs/gsm8k.py:tiny,dapo        # any preset with another algorithm

Presets: tiny, qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, the latter four also with -ppo. Data, models and
tokenizers come from the hub, or from --config.task.data=DIRECTORY (train.jsonl and test.jsonl),
--config.model.path=DIRECTORY and, for tiny, --config.model.tokenizer=DIRECTORY. Hardware: one accelerator host, 80 GiB
for 3b. tiny learns nothing: it shows that all parts fit.
Published: PPO from a supervised 1B model (oat's documentation), test accuracy 40.6 % -> 55.7 % in 6 hours on 8 A100."""

from jzero import algorithms
from jzero.config import (
    QWEN25_HUB_IDS,
    ArchitectureConfig,
    Config,
    CriticConfig,
    EvalConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
    choose_preset,
)

HUB = QWEN25_HUB_IDS | {f"{name}-ppo": path for name, path in QWEN25_HUB_IDS.items()}


def get_config(preset: str = "") -> Config:
    return choose_preset(preset, tiny, qwen, HUB, accelerator="qwen2.5-1.5b")


def qwen(preset: str) -> Config:
    """64 prompts x 8, 1,024 new tokens; held out is the whole test split, greedy."""
    config = Config(
        name=f"gsm8k-{preset}",
        model=ModelConfig(path=HUB[preset]),
        task=TaskConfig(name="gsm8k", template="qwen_math"),
        rollout=RolloutConfig(
            num_prompts=64, group_size=8, max_prompt_tokens=512, max_new_tokens=1024
        ),
        algorithm=algorithms.grpo(),
        optimizer=OptimizerConfig(lr=1e-6),
        critic=CriticConfig(optimizer=OptimizerConfig(lr=1e-5)),
        train=TrainConfig(steps=700, microbatch_tokens=8 * (512 + 4 * 1024), packs_per_row=4),
        eval=EvalConfig(problems=1319, samples=0, every=50),
    )
    return ppo(config) if preset.endswith("-ppo") else config


def ppo(config: Config) -> Config:
    """oat's: 8 minibatches, 2 epochs, temperature 1.2 (and top_p 0.9, which is 1 here: the ratio is to the sampler,
    whose probabilities are over the full vocabulary), both learning rates polynomial to 0 over 6 epochs of the
    problems."""
    config.algorithm = algorithms.PRESETS["oat_ppo"]()
    config.rollout.temperature = 1.2
    config.train.minibatches, config.train.epochs = 8, 2
    for optimizer in (config.optimizer, config.critic.optimizer):
        optimizer.lr, optimizer.schedule, optimizer.min_lr_ratio = 1e-6, "polynomial", 0.0
    return config


def tiny() -> Config:
    """Random weights with the real vocabulary: most of the parameters are its embedding."""
    arch = ArchitectureConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=16,
    )
    arch.num_key_value_heads = 1
    reward = RewardConfig(
        functions=("accuracy", "length")
    )  # nothing it says is right: only lengths differ
    return Config(
        name="gsm8k-tiny",
        model=ModelConfig(tokenizer="Qwen/Qwen2.5-0.5B", arch=arch, dtype="float32"),
        task=TaskConfig(name="gsm8k", template="qwen_math", reward=reward),
        rollout=RolloutConfig(
            num_prompts=4,
            group_size=4,
            max_prompt_tokens=256,
            max_new_tokens=16,
            num_slots=16,
            page_size=32,
            decode_steps=8,
        ),
        algorithm=algorithms.grpo(),
        optimizer=OptimizerConfig(lr=1e-3),
        train=TrainConfig(steps=5, microbatch_tokens=4096, pack_buckets=1, packs_per_row=4),
        eval=EvalConfig(problems=16, samples=2),
        mesh=MeshConfig(data=-1, fsdp=1),
    )
