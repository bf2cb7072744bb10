"""On-policy distillation: a student samples, and a teacher scores its tokens.

    python -m jzero.main --config configs/countdown.py:tiny-long --workdir runs/countdown-tiny-long
    python -m jzero.main --config configs/distill.py:tiny          # from the model of that run
    python -m jzero.main --config configs/distill.py:tiny,grpo     # the same student by RL alone
    python -m jzero.main --config configs/distill.py:qwen3-1.7b    # from Qwen3-8B
    python -m jzero.main --config configs/distill.py:qwen2.5-1.5b-instruct-self  # from itself

Presets: tiny, qwen3-0.6b, qwen3-1.7b, and qwen2.5-1.5b-instruct-self, whose teacher is the student
itself behind a prompt with the answer. Without a preset it is the first of LARGEST_FIRST that the
attached accelerators hold, and tiny on a CPU. An algorithm without a teacher, such as grpo, turns
the teacher off.

Models: the teacher of tiny is the export of the first command, or --config.teacher.path=DIRECTORY
of another run of configs/countdown.py:tiny-long. The Qwen presets load student and teacher from the
hub, or from --config.model.path=DIRECTORY and --config.teacher.path=DIRECTORY.
Hardware: tiny needs two CPU cores. The Qwen presets need one accelerator host with 8 devices, which
hold the teacher in bfloat16 beside the student.
Cost: tiny takes a few minutes; the command before it takes about 11.
"""

from jzero.algorithms import needs_teacher
from jzero.algorithms.presets import distill
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
    teachers,
)
from jzero.planning.presets import choose_fitting_preset

# Preset -> hub id of the student.
HUB = {
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen2.5-1.5b-instruct-self": "Qwen/Qwen2.5-1.5B-Instruct",
}
# Without a preset, an accelerator gets the first of these that its memory holds.
LARGEST_FIRST = ("qwen3-1.7b", "qwen3-0.6b")
TEACHER = "Qwen/Qwen3-8B"
TINY_TEACHER = "runs/countdown-tiny-long/export-50"  # what configs/countdown.py:tiny-long writes

# What the student itself reads as a teacher: the answer behind the question.
PROMPT_WITH_ANSWER = (
    "{prompt}\n\nThe right answer is {gold}. Explain step by step how one finds it, as if you did "
    "not know it yet, and put it within \\boxed{} at the end."
)


def get_config(preset: str = "") -> Config:
    """Returns the config of "preset", "preset,algorithm" or ""."""
    config = choose_fitting_preset(preset, tiny, qwen, HUB, LARGEST_FIRST)
    if not needs_teacher(config.algorithm):
        config.teacher = None
    return config


def qwen(preset: str) -> Config:
    """GSM8K with 1,024 new tokens. One response of a problem is enough: there is no baseline."""
    is_self = preset.endswith("-self")
    config = Config(
        name=f"distill-{preset}",
        model=ModelConfig(path=HUB[preset]),
        task=TaskConfig(name="gsm8k", template="chat" if is_self else "qwen3"),
        rollout=RolloutConfig(
            num_prompts=128,
            group_size=4,
            max_prompt_tokens=512,
            max_new_tokens=1024,
        ),
        algorithm=distill(),
        teacher=teachers.Model(path=TEACHER),
        optimizer=OptimizerConfig(lr=1e-6),
        train=TrainConfig(
            steps=100,
            # A row on each of 8 devices: a prompt and 4 packs.
            microbatch_tokens=8 * (1024 + 4 * 1024),
            packs_per_row=4,
        ),
        eval=EvalConfig(problems=1319, samples=0, every=20),
    )
    if is_self:
        config.teacher = teachers.Policy(prompt=PROMPT_WITH_ANSWER)
    return config


def tiny() -> Config:
    """A student with the warm start of countdown.py:tiny-long, as the teacher was before its RL.

    A student of 0.2M parameters does not learn from this teacher: it takes over the long search and
    not the arithmetic (lab/log.md).
    """
    return Config(
        name="distill-tiny",
        model=ModelConfig(
            arch="tiny-qwen2",
            dtype="float32",
            remat="full",
            logit_chunk=65536,
        ),
        task=TaskConfig(
            template="plain",
            options=(
                "numbers_min=3",
                "numbers_max=3",
                "value_max=15",
                "target_max=40",
                "format_score=0",
            ),
        ),
        rollout=RolloutConfig(
            num_prompts=64,
            group_size=8,
            max_prompt_tokens=16,
            max_new_tokens=176,
            num_slots=256,
            page_size=32,
            decode_steps=16,
        ),
        algorithm=distill(),
        teacher=teachers.Model(path=TINY_TEACHER),
        optimizer=OptimizerConfig(lr=4e-4, b2=0.99),
        warm_start=WarmStart(steps=1200, batch_size=64, lr=2e-3, tries=1.5),
        train=TrainConfig(
            steps=50,
            microbatch_tokens=4096,
            pack="longest",
            packs_per_row=1,
            checkpoint_every=20,
        ),
        eval=EvalConfig(every=10),
        mesh=MeshConfig(data=-1, fsdp=1),
    )
