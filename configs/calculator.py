"""Multiply two numbers of two digits: a tiny model learns to call a calculator instead of guessing.

    python -m jzero.main --config configs/calculator.py:tiny

Preset: tiny. lab/learning.md compares it with runs that have no tool.

The warm start shows the model answers, calls, and answers after a call, in shares of 40, 20 and 40
percent. So it calls the calculator in a third of its first responses, and knows no reason to.
"""

from jzero import algorithms
from jzero.config import (
    Config,
    EvalConfig,
    MeshConfig,
    OptimizerConfig,
    RolloutConfig,
    TaskConfig,
    ToolsConfig,
    TrainConfig,
    WarmStart,
    choose_preset,
    schedules,
    tiny_model,
    turns,
)
from jzero.errors import UserError

PROMPT = 8  # tokens of "12*34=" and a newline, and one to spare
RESPONSE = 88  # a call has 79 tokens
EPISODE = 128  # a call, its answer, and the response to that


HUB: dict[str, str] = {}  # no preset has a model of the hub


def get_config(preset: str = "") -> Config:
    """Returns the config of "tiny", "tiny,algorithm" or ""."""
    name, separator, algorithm = preset.partition(",")
    argument = f"{name or 'tiny'}{separator}{algorithm}"
    return choose_preset(argument, tiny, of_the_hub, HUB, "tiny")


def of_the_hub(preset: str) -> Config:
    """Raises UserError: HUB has no preset."""
    raise UserError(f"configs/calculator.py has the preset tiny, and not {preset}")


def tiny() -> Config:
    """Products of 10*10 to 99*99 on a laptop."""
    return Config(
        name="calculator-tiny",
        model=tiny_model(),
        task=TaskConfig(
            name="arithmetic",
            template="plain",
            turn_reward=turns.Score(),
            tools=ToolsConfig(names=("calculator",)),
        ),
        rollout=RolloutConfig(
            num_prompts=32,
            group_size=8,
            max_prompt_tokens=PROMPT,
            max_new_tokens=RESPONSE,
            max_turns=2,
            max_episode_tokens=EPISODE,
            num_slots=256,
            page_size=16,
            decode_steps=8,
        ),
        algorithm=algorithms.dr_grpo(),
        optimizer=OptimizerConfig(lr=1e-3, schedule=schedules.Linear(), warmup=schedules.Steps(5)),
        warm_start=WarmStart(steps=1000, batch_size=32, lr=3e-3),
        train=TrainConfig(
            steps=40,
            # 8 rows of a prompt and 8 packs: a quarter of a step.
            microbatch_tokens=8 * (PROMPT + 8 * (EPISODE - PROMPT)),
            pack="longest",
            packs_per_row=8,
            checkpoint_every=40,
        ),
        eval=EvalConfig(problems=64, samples=4, every=40),
        mesh=MeshConfig(data=-1, fsdp=1),
    )
