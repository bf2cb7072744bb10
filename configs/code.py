"""Programming: a response holds a Python program, which is run against tests in a sandbox.

    python -m jzero.main --config configs/code.py:tiny                   # from scratch on a laptop
    python -m jzero.main --config configs/code.py:qwen2.5-1.5b-instruct  # open-r1's recipe
    python -m jzero.main --config configs/code.py:r1-distill-qwen-1.5b   # DeepCoder's data

Presets: tiny, qwen2.5-1.5b-instruct, r1-distill-qwen-1.5b. Without a preset it is the first of
LARGEST_FIRST that the attached accelerator holds, and tiny on a CPU.

docs/environments.md says what a program can do, and what it cannot. A run stops at its start where
the machine cannot isolate programs.

tiny writes formulas of three numbers, given in prefix notation, as programs. Its warm start shows
what a program looks like, with the formula that was asked for in half of the examples and a random
one in the others.

qwen2.5-1.5b-instruct has the values of open-r1's config_demo_code.yaml for Qwen2.5-1.5B-Instruct:
the rewards code and format with the weights 1 and 0.1, and the loss of TRL 0.18 with 0.01 times
the KL, for seven GPUs that train. r1-distill-qwen-1.5b is in DeepCoder's style: its data, 1 for a
program that passes all of at most 15 tests and 0 otherwise, GRPO without a KL term, clip-higher.

Hardware: tiny needs two CPU cores. The others need one node of 8 GPUs of 80 GiB, and cores for
task.grade_workers programs at a time.

docs/reference/published-runs.md has every setting of open-r1's recipe next to that of
qwen2.5-1.5b-instruct. What differs:

- system_prompt: it says the same in other words. For the published words set
  --config.task.system_prompt="$(cat FILE)".
- (user's message): a sentence on the form of the program follows the problem.
  --config.task.template=chat:FILE takes a file with the text {question} only.
- (prompts above max_prompt_length): dropped, where the original cuts off their beginning.
- (loss_type): the mean over tokens is over the step, and over a microbatch there.
- (outputs of programs): compared word by word. open-r1 compares lines, and stops at the shorter
  output.
- (tests of a problem): the published sets are large, and a problem has the 15 tests with the
  longest inputs.
- (where programs run): open-r1 runs programs on E2B. Here they run in a sandbox of this machine, or
  on a server: --config.task.sandbox.url=URL.

Published: no result that these presets could be held against.
"""

from jzero import algorithms
from jzero.algorithms.presets import trl_018
from jzero.config import (
    Config,
    EvalConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
    WarmStart,
    schedules,
    tiny_model,
)
from jzero.planning.presets import choose_fitting_preset
from jzero.problems.prompts import TAGS_ON_LINES

HUB = {
    "qwen2.5-1.5b-instruct": "Qwen/Qwen2.5-1.5B-Instruct",
    "r1-distill-qwen-1.5b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
}
# Without a preset, an accelerator gets the first of these that its memory holds.
LARGEST_FIRST = ("qwen2.5-1.5b-instruct",)
OPEN_R1_DATA = "open-r1/verifiable-coding-problems-python"
DEEPCODER_DATA = (
    "taco@agentica-org/DeepCoder-Preview-Dataset,"
    "primeintellect@agentica-org/DeepCoder-Preview-Dataset,"
    "lcbv5@agentica-org/DeepCoder-Preview-Dataset"
)


def get_config(preset: str = "") -> Config:
    """Returns the config of "preset", "preset,algorithm" or ""."""
    return choose_fitting_preset(preset, tiny, on_hub, HUB, LARGEST_FIRST)


def on_hub(preset: str) -> Config:
    """Returns the config of a preset for a model on the hub."""
    return distilled(preset) if preset == "r1-distill-qwen-1.5b" else instruct(preset)


def instruct(preset: str) -> Config:
    """open-r1's demo: 14 programs for each problem, a share of the tests passed as the reward."""
    return Config(
        name=f"code-{preset}",
        model=ModelConfig(path=HUB[preset]),
        task=TaskConfig(
            name="code",
            data=OPEN_R1_DATA,
            template="chat",
            system_prompt=TAGS_ON_LINES,
            grade_seconds=10.0,
            grade_workers=16,
            reward=RewardConfig(functions=("code", "open_r1_format"), weights=(1.0, 0.1)),
        ),
        rollout=RolloutConfig(
            num_prompts=32,
            group_size=14,
            max_prompt_tokens=1024,
            max_new_tokens=2048,
        ),
        algorithm=trl_018(kl=algorithms.KL(coef=0.01)),
        optimizer=OptimizerConfig(
            lr=5e-6,
            schedule=schedules.Cosine(min_lr_ratio=0.1),
            warmup=schedules.Share(0.03, from_zero=True),
            b2=0.999,
        ),
        train=TrainConfig(
            steps=500,
            seed=42,
            # A row on each of 8 devices: a prompt and 4 packs.
            microbatch_tokens=8 * (1024 + 4 * 2048),
            packs_per_row=4,
        ),
        eval=EvalConfig(problems=0, samples=0),
    )


def distilled(preset: str) -> Config:
    """DeepCoder: long thoughts, and one reward for a program that passes every test."""
    config = instruct(preset)
    config.task.data = DEEPCODER_DATA
    config.task.template = "r1_distill_qwen"
    config.task.system_prompt = ""
    config.task.options = ("reward=all",)
    config.task.reward = RewardConfig()
    config.rollout.num_prompts = 128
    config.rollout.group_size = 8
    config.rollout.max_prompt_tokens = 2048
    config.rollout.max_new_tokens = 16384
    config.rollout.temperature = 0.6
    config.algorithm = algorithms.grpo(surrogate=algorithms.Clip(high=0.28))
    config.optimizer = OptimizerConfig(lr=1e-6)
    config.train.seed = 0
    config.train.microbatch_tokens = 8 * (2048 + 16384)
    config.train.packs_per_row = 1
    return config


def tiny() -> Config:
    """A model from nothing that writes one-line formulas, 108 of them, a quarter held out."""
    return Config(
        name="code-tiny",
        model=tiny_model(),
        task=TaskConfig(name="code", template="plain", options=("reward=all",)),
        rollout=RolloutConfig(
            num_prompts=16,
            group_size=8,
            max_prompt_tokens=8,
            max_new_tokens=64,
            num_slots=128,
            page_size=16,
            decode_steps=16,
        ),
        algorithm=algorithms.dr_grpo(),
        optimizer=OptimizerConfig(lr=4e-4),
        warm_start=WarmStart(steps=1000, batch_size=64, lr=3e-3),
        train=TrainConfig(
            steps=60,
            microbatch_tokens=8 * (8 + 8 * 64),
            pack="longest",
            packs_per_row=8,
            checkpoint_every=20,
        ),
        eval=EvalConfig(problems=27, samples=4, every=20),
        mesh=MeshConfig(data=-1, fsdp=1),
    )
