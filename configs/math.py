"""Competition mathematics with Dr. GRPO: Oat-Zero's recipe (arXiv:2503.20783), MATH levels 3 to 5.

    python -m jzero.main --config configs/math.py:tiny             # random weights, on a laptop
    python -m jzero.main --config configs/math.py:qwen2.5-math-7b  # the recipe of record
    python -m jzero.main --config configs/math.py:qwen2.5-math-1.5b,grpo

Presets: tiny, qwen2.5-math-1.5b, qwen2.5-math-7b. tiny learns nothing: it shows that all parts fit.

Data and models come from the hub, or from --config.task.data=FILE and
--config.model.path=DIRECTORY. tiny takes its tokenizer from the hub, or from
--config.model.tokenizer=DIRECTORY. --config.eval.suites=... takes name=FILE, too.
Hardware: 8 accelerators of 80 GiB for 7b. The paper's run took 27 hours on 8 A100 of 40 GiB.
Published, greedy with 3,000 new tokens, in percent:

        AIME24   AMC  MATH500  Minerva  Olympiad  average
    1.5b  20.0  53.0     74.2     25.7      37.6     42.1
    7b    43.3  62.7     80.0     30.1      41.0     51.4

The average is the target, since AIME24 has only 30 problems.
"""

from jzero import algorithms
from jzero.algorithms.presets import drgrpo_paper
from jzero.config import (
    ArchitectureConfig,
    Config,
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

HUB = {
    "qwen2.5-math-1.5b": "Qwen/Qwen2.5-Math-1.5B",
    "qwen2.5-math-7b": "Qwen/Qwen2.5-Math-7B",
}
SUITES = ("aime24", "amc", "math500", "minerva", "olympiad_bench")


def get_config(preset: str = "") -> Config:
    """Returns the config of "preset", "preset,algorithm" or ""."""
    return choose_preset(preset, tiny, qwen, HUB, accelerator="qwen2.5-math-1.5b")


def qwen(preset: str) -> Config:
    """Oat-Zero's setting: 8 optimizer steps in an RL step, no KL, five suites every 16 steps."""
    return Config(
        name=f"math-{preset}",
        model=ModelConfig(path=HUB[preset]),
        task=TaskConfig(name="math", template="qwen_math", level_min=3, level_max=5),
        rollout=RolloutConfig(
            num_prompts=128,
            group_size=8,
            max_prompt_tokens=1024,
            max_new_tokens=3000,
        ),
        algorithm=drgrpo_paper(),
        optimizer=OptimizerConfig(lr=1e-6),
        train=TrainConfig(
            steps=300,
            minibatches=8,
            # A row on each of 8 devices: a prompt and 4 packs.
            microbatch_tokens=8 * (1024 + 4 * 3000),
            packs_per_row=4,
        ),
        eval=EvalConfig(problems=0, samples=0, every=16, suites=SUITES),
    )


def tiny() -> Config:
    """Random weights with the real vocabulary, on the problems of MATH."""
    return Config(
        name="math-tiny",
        model=ModelConfig(
            tokenizer="Qwen/Qwen2.5-0.5B",
            arch=ArchitectureConfig(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=16,
            ),
            dtype="float32",
        ),
        task=TaskConfig(
            name="math",
            template="qwen_math",
            level_min=3,
            level_max=5,
            # No answer of a random model is right, so only the lengths of its responses differ.
            reward=RewardConfig(functions=("accuracy", "length")),
        ),
        rollout=RolloutConfig(
            num_prompts=4,
            group_size=4,
            max_prompt_tokens=256,
            max_new_tokens=16,
            num_slots=16,
            page_size=32,
            decode_steps=8,
        ),
        algorithm=algorithms.dr_grpo(),
        optimizer=OptimizerConfig(lr=1e-3),
        train=TrainConfig(steps=5, microbatch_tokens=4096, pack_buckets=1, packs_per_row=4),
        eval=EvalConfig(problems=0, samples=2, suites=("math500",), limit=16),
        mesh=MeshConfig(data=-1, fsdp=1),
    )
