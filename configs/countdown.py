"""Countdown: reach a target with some numbers and + - * /, by reinforcement learning alone (TinyZero's task).

    python -m jzero.main --config configs/countdown.py              # qwen2.5-3b on an accelerator, tiny without one
    python -m jzero.main --config configs/countdown.py:tiny         # from scratch on a laptop CPU, about 11 minutes
    python -m jzero.main --config configs/countdown.py:qwen2.5-3b   # the recipe of record
    python -m jzero.main --config configs/countdown.py:tiny,dr_grpo # any preset with another algorithm

Presets: tiny, qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b. The Qwen presets load the base models from the hub
(or --config.model.path=DIRECTORY) and need one accelerator host: up to 3b, 8 chips of 16 GB (v5e:2x4) by
`python -m jzero.plan`, with a row of a microbatch a device; where there are more, train.tokens grows with them. Expect
0.5B to fail and 3B to learn, as TinyZero saw."""

from jzero import algorithms
from jzero.config import QWEN25 as HUB
from jzero.config import Arch, Config, Critic, Eval, Mesh, Model, Optimizer, Rollout, Task, Train, WarmStart, choose


def get_config(preset: str = "") -> Config:
    return choose(preset, tiny, qwen, HUB, accelerator="qwen2.5-3b")


def qwen(preset: str) -> Config:
    """TinyZero's setting: 3 to 4 numbers, a base model, GRPO with 8 rollouts of 128 prompts, 1,024 new tokens."""
    return Config(
        name=f"countdown-{preset}",
        model=Model(path=HUB[preset]),
        task=Task(template="r1", format_score=0.1),
        rollout=Rollout(prompts=128, group=8, max_prompt=256, max_new=1024, stop=("</answer>",)),
        algorithm=algorithms.grpo(),
        optimizer=Optimizer(lr=1e-6),
        train=Train(steps=200, tokens=8 * (256 + 4 * 1024), row_slots=4),
        eval=Eval(every=20),
    )


def tiny() -> Config:
    """1M parameters from scratch. The warm start teaches format, arithmetic and what a try is, never a solution."""
    return Config(
        name="countdown-tiny",
        model=Model(arch=Arch(), dtype="float32", remat="full", logit_chunk=65536),
        task=Task(template="plain", numbers_min=3, numbers_max=3, value_max=15, target_max=40, format_score=0.0),
        rollout=Rollout(prompts=64, group=8, max_prompt=16, max_new=176, slots=256, page=32, chunk=16),
        algorithm=algorithms.grpo(),
        optimizer=Optimizer(lr=4e-4, b2=0.99),
        critic=Critic(optimizer=Optimizer(lr=1e-3, b2=0.99)),
        warm_start=WarmStart(steps=1200, batch=64, lr=2e-3, tries=1.5),
        train=Train(steps=50, tokens=4096, buckets=1, row_slots=1, checkpoint_every=20),
        eval=Eval(every=20),
        mesh=Mesh(data=-1, fsdp=1),
    )
