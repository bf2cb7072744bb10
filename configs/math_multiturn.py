"""Competition mathematics with a second try: the environment says whether an answer is right, and if not asks for more.

    python -m jzero.main --config configs/math_multiturn.py:tiny           # a random tiny Qwen, seconds a step on a CPU
    python -m jzero.main --config configs/math_multiturn.py:qwen2.5-math-7b
    python -m jzero.main --config configs/math_multiturn.py:qwen2.5-math-1.5b,grpo

AReaL's multi-turn agent as one sequence an episode; --config.train.turn_rows=True trains one a turn, as that does.
--config.task.feedback_wrong=... says it in other words, --config.task.stop_on_success=False goes on after a success.
Presets and flags are those of configs/math.py. The suites are answered in one turn, to compare with other runs'."""

from jzero import algorithms
from jzero.config import Arch, Config, Eval, Mesh, Model, Optimizer, Rollout, Task, Train, choose

HUB = {"qwen2.5-math-1.5b": "Qwen/Qwen2.5-Math-1.5B", "qwen2.5-math-7b": "Qwen/Qwen2.5-Math-7B"}
SUITES = ("aime24", "amc", "math500", "minerva", "olympiad_bench")


def get_config(preset: str = "") -> Config:
    return choose(preset, tiny, qwen, HUB, accelerator="qwen2.5-math-1.5b")


def qwen(preset: str) -> Config:
    """Two responses of 1,500 tokens and a reply fit the models' 4,096 positions."""
    return Config(
        name=f"math-multiturn-{preset}",
        model=Model(path=HUB[preset]),
        task=Task(name="math_multiturn", template="qwen_math", level_min=3, level_max=5, turn_discount=0.9),
        rollout=Rollout(prompts=128, group=8, max_prompt=1024, max_new=1500, turns=2, max_reply=64),
        algorithm=algorithms.dr_grpo(),
        optimizer=Optimizer(lr=1e-6),
        train=Train(steps=300, minibatches=8, tokens=8 * (1024 + 4 * 3064), row_slots=4),
        eval=Eval(problems=0, samples=0, every=16, suites=SUITES),
    )


def tiny() -> Config:
    """Random weights with the real vocabulary, on whatever of MATH is there: nothing it says is right."""
    arch = Arch(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, head_dim=16)
    arch.num_key_value_heads = 1
    return Config(
        name="math-multiturn-tiny",
        model=Model(tokenizer="Qwen/Qwen2.5-0.5B", arch=arch, dtype="float32"),
        task=Task(name="math_multiturn", template="qwen_math", level_min=3, level_max=5),
        rollout=Rollout(prompts=4, group=4, max_prompt=256, max_new=16, turns=2, slots=16, page=32, chunk=8),
        algorithm=algorithms.dr_grpo(),
        optimizer=Optimizer(lr=1e-3),
        train=Train(steps=5, tokens=4096, buckets=1, row_slots=4),
        eval=Eval(problems=0, samples=2, suites=("math500",), limit=16),
        mesh=Mesh(data=-1, fsdp=1),
    )
