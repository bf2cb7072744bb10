"""Supervised fine-tuning: a base model on reasoning traces, or a tiny model on countdown examples.

    python -m jzero.main --config configs/sft.py:tiny               # 2 minutes on a laptop
    python -m jzero.main --config configs/sft.py:openr1-distill-7b  # OpenR1-Distill-7B's recipe
    python -m jzero.main --config configs/sft.py:qwen2.5-1.5b --config.sft.data=FILE.jsonl
    python -m jzero.main --config configs/sft.py:smollm2-135m       # solutions of GSM8K, on a CPU

Presets: tiny, openr1-distill-7b, qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b; smollm2-135m,
which shows SmolLM2-135M-Instruct the solutions of GSM8K before RL (configs/gsm8k.py:smollm2-135m).

Data: a set has a column messages, conversations or text, columns prompt and completion, or columns
problem and solution, or question and answer.
`python -m jzero.generate` writes such a set. The result, WORKDIR/export-<step>, is a model for any
other recipe: --config.model.path=WORKDIR/export-<step>.
Hardware: for openr1-distill-7b the original took one node of 8 H100. A microbatch has one row of
32,768 tokens for each of 8 devices.
Published: OpenR1-Distill-7B, 5 epochs on the 350k traces of Mixture-of-Thoughts, reached AIME24
52.7, MATH-500 89.0 and GPQA diamond 52.8, with the published chat template and evaluation.

docs/reference/published-runs.md has every setting of the published recipe next to that of
openr1-distill-7b. What differs:

- chat_template: the published one writes a system prompt of some 200 words before every
  conversation that has none, and --config.sft.chat_template=FILE takes it. Without the file the
  tokenizer's own template writes its own system prompt. `python benchmarks/published/prompts.py`
  writes the file from a copy of open-r1, and says whether a file is the published one.
- (mean of the loss): over the tokens of a step. TRL takes the mean of each GPU, and then the mean
  over the GPUs.
- (evaluation of the published figures): lighteval at temperature 0.6 and top_p 0.95, with 32,768
  tokens. Here: jzero evaluate with --suite and --config.eval.samples, .temperature and
  .top_p.

The published recipe pads its examples. Here they are packed, and do not see each other.
"""

from dataclasses import replace

from jzero.config import (
    QWEN25_HUB_IDS,
    Config,
    EvalConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    Sft,
    TaskConfig,
    TrainConfig,
    WarmStart,
    schedules,
)
from jzero.planning.presets import choose_fitting_preset
from jzero.problems.problem_sets import DEFAULT_SETS

HUB = {
    "openr1-distill-7b": "open-r1/Qwen2.5-Math-7B-RoPE-300k",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
} | QWEN25_HUB_IDS
LONGEST_EXAMPLE = 32768  # tokens
# Without a preset, an accelerator gets the first of these that its memory holds.
LARGEST_FIRST = ("openr1-distill-7b", "qwen2.5-3b", "qwen2.5-1.5b", "qwen2.5-0.5b")


def get_config(preset: str = "") -> Config:
    """Returns the config of "preset" or ""."""
    return choose_fitting_preset(preset, tiny, pretrained, HUB, LARGEST_FIRST)


def pretrained(preset: str) -> Config:
    return smollm2() if preset == "smollm2-135m" else qwen(preset)


def smollm2() -> Config:
    """The 7,473 solutions of GSM8K once, in full precision, as a CPU computes it fastest."""
    return Config(
        name="sft-gsm8k-smollm2-135m",
        model=ModelConfig(path=HUB["smollm2-135m"], dtype="float32", remat="none"),
        # Suites ask as the examples do, which have no instruction.
        task=TaskConfig(name="gsm8k", template="chat", system_prompt="none"),
        rollout=RolloutConfig(max_prompt_tokens=256, max_new_tokens=256),
        optimizer=OptimizerConfig(lr=1e-4, schedule=schedules.Cosine(), warmup=schedules.Steps(10)),
        sft=Sft(data=DEFAULT_SETS["gsm8k"], batch_size=32, pack_length=512),
        train=TrainConfig(microbatch_tokens=2 * 512, checkpoint_every=50),
        eval=EvalConfig(problems=128, every=100),
    )


def qwen(preset: str) -> Config:
    """OpenR1-Distill's setting: 5 epochs, a cosine to a tenth of the learning rate."""
    config = Config(
        name=f"sft-{preset}",
        model=ModelConfig(path=HUB[preset]),
        rollout=RolloutConfig(
            max_prompt_tokens=2048,
            max_new_tokens=LONGEST_EXAMPLE - 2048,
        ),
        optimizer=OptimizerConfig(
            lr=4e-5,
            schedule=schedules.Cosine(min_lr_ratio=0.1),
            warmup=schedules.Share(0.03),
            b2=0.999,
            clip_norm=0.2,
        ),
        sft=Sft(
            data="all@open-r1/Mixture-of-Thoughts",
            epochs=5.0,
            batch_size=128,
            pack_length=LONGEST_EXAMPLE,
        ),
        train=TrainConfig(microbatch_tokens=8 * LONGEST_EXAMPLE, checkpoint_every=200),
        eval=EvalConfig(every=200),
    )
    return as_published(config) if preset == "openr1-distill-7b" else config


def as_published(config: Config) -> Config:
    """Changes a config to the examples and the loss of OpenR1-Distill-7B's recipe."""
    assert config.sft is not None
    config.sft = replace(config.sft, loss="all", long_examples="cut")
    config.train.seed = 42
    config.optimizer.warmup = schedules.Share(0.03, from_zero=True)
    return config


def tiny() -> Config:
    """The warm start of configs/countdown.py:tiny-long as a run of its own.

    It trains 1M parameters from scratch on 1,200 * 64 = 76,800 examples.
    """
    return Config(
        name="sft-tiny",
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
        rollout=RolloutConfig(max_prompt_tokens=16, max_new_tokens=176),
        optimizer=OptimizerConfig(
            lr=2e-3, schedule=schedules.Cosine(), warmup=schedules.Steps(20), b2=0.99
        ),
        warm_start=WarmStart(steps=1200, batch_size=64, tries=1.5),
        sft=Sft(data="countdown", batch_size=64, pack_length=192),
        train=TrainConfig(microbatch_tokens=4096, checkpoint_every=400),
        eval=EvalConfig(problems=256, every=200),
        mesh=MeshConfig(data=-1, fsdp=1),
    )
