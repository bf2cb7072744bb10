"""Countdown: reach a target with some numbers and + - * /, by reinforcement learning alone.

    python -m jzero.main --config configs/countdown.py               # the default for this machine
    python -m jzero.main --config configs/countdown.py:tiny          # from scratch on a laptop
    python -m jzero.main --config configs/countdown.py:tiny-long     # the same with three numbers
    python -m jzero.main --config configs/countdown.py:qwen2.5-3b    # a base model
    python -m jzero.main --config configs/countdown.py:oat-3b        # oat's published run
    python -m jzero.main --config configs/countdown.py:tiny,dr_grpo  # a preset, another algorithm

Presets: tiny, with two numbers; tiny-long, with three; tiny-hybrid (tiny-long with three gated
delta nets and one attention, as Qwen3.5 has them), tiny-moe (tiny-long with experts), qwen2.5-0.5b,
qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, oat-3b, qwen3-8b-lora-int8, qwen3-4b-lora and qwen3-1.7b-lora,
which train an adapter on one device; -int8 has the frozen model in 8 bits; and gemma-3-1b,
gemma-3-1b-lora and gemma-3-270m, whose license has to be accepted on the hub. Without a preset it
is the first of LARGEST_FIRST that the attached accelerators hold, and tiny on a CPU.

Models: the Qwen presets load the base models from the hub, or from --config.model.path=DIRECTORY.
Hardware: tiny needs two CPU cores. The Qwen presets need one accelerator host; up to 3b that is
8 chips of 16 GB (v5e:2x4) by `python -m jzero.plan`. A microbatch has one row for each of 8
devices: raise train.microbatch_tokens with the number of devices. Those with -lora need one chip of
16 GB, and have one row in a microbatch.
Cost: tiny takes about 4 minutes, and tiny-long 11.
Target: 0.5b fails and 3b learns, as TinyZero saw with PPO.
Published for oat-3b: the reward rises from 0.07 to about 0.40 in 75 steps.

docs/reference/published-runs.md has every setting of oat's command next to that of oat-3b. What
differs:

- top_p: 1 instead of 0.9. The ratio is to the sampler, which has to bound the tokens it keeps:
  rollout.top_k=512 rollout.top_p=0.9 is nearly as published.
- (metrics of an evaluation): the share of scores above 1/2 is the accuracy, and lengths are in
  tokens.
"""

from jzero import algorithms
from jzero.algorithms.presets import oat_v006
from jzero.config import (
    GEMMA3_HUB_IDS,
    QWEN3_ADAPTER_HUB_IDS,
    QWEN25_HUB_IDS,
    QWEN_LARGEST_FIRST,
    Config,
    Critic,
    EvalConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
    WarmStart,
    has_adapter,
    schedules,
    with_adapter,
)
from jzero.planning.presets import choose_fitting_preset

HUB = QWEN25_HUB_IDS | {"oat-3b": QWEN25_HUB_IDS["qwen2.5-3b"]} | QWEN3_ADAPTER_HUB_IDS
HUB |= GEMMA3_HUB_IDS
# Without a preset, an accelerator gets the first of these that its memory holds.
LARGEST_FIRST = QWEN_LARGEST_FIRST


def get_config(preset: str = "") -> Config:
    """Returns the config of "preset", "preset,algorithm" or ""."""
    variants = {"tiny-long": tiny_long, "tiny-hybrid": tiny_hybrid, "tiny-moe": tiny_moe}
    name, comma, algorithm = preset.partition(",")
    make = tiny
    if name in variants:
        make, preset = variants[name], f"tiny{comma}{algorithm}"
    return choose_fitting_preset(preset, make, qwen, HUB, LARGEST_FIRST)


def qwen(preset: str) -> Config:
    """TinyZero's problems, of 3 to 4 numbers, a base model, GRPO, 1,024 new tokens."""
    config = Config(
        name=f"countdown-{preset}",
        model=ModelConfig(path=HUB[preset]),
        task=TaskConfig(template="r1", options=("format_score=0.1",)),
        rollout=RolloutConfig(
            num_prompts=128,
            group_size=8,
            max_prompt_tokens=256,
            max_new_tokens=1024,
            stop=("</answer>",),
        ),
        algorithm=algorithms.grpo(),
        optimizer=OptimizerConfig(lr=1e-6),
        train=TrainConfig(
            steps=200,
            # A row on each of 8 devices: a prompt and 4 packs.
            microbatch_tokens=8 * (256 + 4 * 1024),
            packs_per_row=4,
        ),
        eval=EvalConfig(every=20),
    )
    if has_adapter(preset):
        return with_adapter(config, preset)
    return with_oat_grpo(config) if preset == "oat-3b" else config


def with_oat_grpo(config: Config) -> Config:
    """Changes a config to oat's GRPO of January 2025 and returns it."""
    config.task.data = "lkevinzc/CountDownZero"
    config.task.verifier = "oat_countdown"
    config.task.drop_last = True
    config.rollout.stop = ("\nUser:", "<|im_end|>", "</s>")
    config.rollout.keep_stop = False
    config.algorithm = oat_v006()
    config.optimizer.schedule = schedules.Cosine(min_lr_ratio=0.1)
    # One step, whose rate is 0.
    config.optimizer.warmup = schedules.Share(1e-7, from_zero=True)
    config.train.minibatches = 8
    config.train.steps = 0  # as many as a pass over the problems takes
    config.train.prompt_epochs = 1.0
    config.eval = EvalConfig(samples=0, every=8, problems=1000)
    return config


def tiny() -> Config:
    """1M parameters from scratch, on 2 numbers up to 25.

    The warm start teaches the format, arithmetic and what a try is. It never shows a solution.
    """
    config = tiny_long()
    config.name = "countdown-tiny"
    config.task.options = (
        "numbers_min=2",
        "numbers_max=2",
        "value_max=25",
        "target_max=60",
        "format_score=0",
    )
    config.rollout.max_new_tokens = 96
    config.warm_start = WarmStart(steps=300, batch_size=64, lr=3e-3, tries=1.5)
    config.train.steps = 25
    config.eval = EvalConfig(problems=128)
    return config


def tiny_long() -> Config:
    """1M parameters from scratch, on 3 numbers up to 15: a search that RL makes three times longer.

    The warm start is that of `tiny`, with more steps.
    """
    return Config(
        name="countdown-tiny-long",
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
        algorithm=algorithms.grpo(),
        optimizer=OptimizerConfig(lr=4e-4, b2=0.99),
        critic=Critic(lr=1e-3),
        warm_start=WarmStart(steps=1200, batch_size=64, lr=2e-3, tries=1.5),
        train=TrainConfig(
            steps=50,
            microbatch_tokens=4096,
            pack="longest",
            packs_per_row=1,
            checkpoint_every=20,
        ),
        eval=EvalConfig(every=20),
        mesh=MeshConfig(data=-1, fsdp=1),
    )


def tiny_hybrid() -> Config:
    """The problems of `tiny_long`, and a model of three gated delta nets and one attention."""
    config = tiny_long()
    config.name = "countdown-tiny-hybrid"
    config.model.arch = "tiny-qwen3.5"
    return config


def tiny_moe() -> Config:
    """The problems of `tiny_long`, and a model in which a token goes to 2 of 8 experts.

    Both experts together are as wide as the MLP of `tiny_long`, so that a token costs the same.
    """
    config = tiny_long()
    config.name = "countdown-tiny-moe"
    config.model.arch = "tiny-qwen3-moe"
    return config
