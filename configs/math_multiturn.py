"""Competition mathematics with a second try: the environment says whether an answer is right.

    python -m jzero.main --config configs/math_multiturn.py:tiny  # random weights, on a laptop
    python -m jzero.main --config configs/math_multiturn.py:qwen2.5-math-7b
    python -m jzero.main --config configs/math_multiturn.py:qwen2.5-math-1.5b,grpo

Presets: tiny, qwen2.5-math-1.5b, qwen2.5-math-7b. Data, models and hardware are those of
configs/math.py. tiny learns nothing: it shows that all parts fit.

After a wrong answer the environment asks for another one. This is AReaL's multi-turn agent, with
these settings:

- train.sequence_per_turn=True trains on one sequence for each turn, as AReaL does; the default is
  one sequence for the episode.
- task.feedback_wrong=... changes what the environment says after a wrong answer.
- task.stop_on_success=False goes on after a right answer.

The suites are answered in a single turn, so that the results compare with other runs.
"""

from jzero import algorithms
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
    """Two responses of 1,500 tokens and a reply: they fit into the models' 4,096 positions."""
    return Config(
        name=f"math-multiturn-{preset}",
        model=ModelConfig(path=HUB[preset]),
        task=TaskConfig(
            name="math_multiturn",
            template="qwen_math",
            level_min=3,
            level_max=5,
            turn_discount=0.9,
        ),
        rollout=RolloutConfig(
            num_prompts=128,
            group_size=8,
            max_prompt_tokens=1024,
            max_new_tokens=1500,
            max_turns=2,
            max_reply_tokens=64,
        ),
        algorithm=algorithms.dr_grpo(),
        optimizer=OptimizerConfig(lr=1e-6),
        train=TrainConfig(
            steps=300,
            minibatches=8,
            # A row on each of 8 devices: a prompt and 4 packs of two responses and a reply.
            microbatch_tokens=8 * (1024 + 4 * 3064),
            packs_per_row=4,
        ),
        eval=EvalConfig(problems=0, samples=0, every=16, suites=SUITES),
    )


def tiny() -> Config:
    """Random weights with the real vocabulary, on the problems of MATH. No answer is right."""
    return Config(
        name="math-multiturn-tiny",
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
        task=TaskConfig(name="math_multiturn", template="qwen_math", level_min=3, level_max=5),
        rollout=RolloutConfig(
            num_prompts=4,
            group_size=4,
            max_prompt_tokens=256,
            max_new_tokens=16,
            max_turns=2,
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
