"""Moved from jzero.config."""

import dataclasses
import importlib.util
import math
import tomllib
from collections.abc import Iterator
from pathlib import Path

from jzero import algorithms
from jzero.config.schema import Config, flatten
from jzero.errors import UserError

BOUNDS = tomllib.loads(Path(__file__).with_name("bounds.toml").read_text(encoding="utf-8"))
LEAST = dict.fromkeys(BOUNDS["at_least_1"], 1.0) | dict.fromkeys(
    BOUNDS["any"], -math.inf
)  # of every other 0
CHOICES = BOUNDS["choices"] | {
    f"algorithm.{name}": choices for name, choices in algorithms.CHOICES.items()
}


def validate(config: Config) -> None:
    """Raise one ValueError with every impossible setting, its value and what to do. Compiles nothing."""
    values = flatten(dataclasses.asdict(config))
    wrong, small = [], []
    for name, value in values.items():
        choices = CHOICES.get(name.removeprefix("critic."), (value,))
        if value not in choices:
            wrong.append(f"{name}={value!r} is not one of {', '.join(choices)}")
        if isinstance(value, int | float) and value < LEAST.get(name, 0):
            small.append(f"{name}={value} must be at least {LEAST.get(name, 0):g}")
    if wrong := [*wrong, *(small or combinations(config))]:  # which divide by some of them
        raise UserError("; ".join(wrong))


def combinations(config: Config) -> Iterator[str]:
    model, rollout, train = config.model, config.rollout, config.train
    if model.arch.num_attention_heads % model.arch.num_key_value_heads:
        yield f"{model.arch.num_key_value_heads=} does not divide {model.arch.num_attention_heads=}"
    if model.arch.head_dim % 2:
        yield f"{model.arch.head_dim=} must be even: RoPE turns pairs"
    if config.task.verifier == "math_verify" and importlib.util.find_spec("math_verify") is None:
        yield "task.verifier=math_verify needs the package: pip install math-verify"
    if train.wandb_project and importlib.util.find_spec("wandb") is None:
        yield f"train.wandb_project={train.wandb_project} needs the package: pip install wandb"
    if rollout.temperature <= 0:
        yield f"{rollout.temperature=} must be positive: RL needs samples that differ"
    if not 0 < rollout.top_p <= 1:
        yield f"{rollout.top_p=} must be in (0, 1]"
    if not 0 <= rollout.min_p < 1:
        yield f"{rollout.min_p=} must be in [0, 1)"
    yield from impossible_algorithm(config)
    if 0 < rollout.max_episode_tokens < rollout.max_prompt_tokens + rollout.max_new_tokens:
        least = f"a prompt and a response, {rollout.max_prompt_tokens + rollout.max_new_tokens}"
        yield f"{rollout.max_episode_tokens=} is shorter than {least}: raise it, or set it to 0"
    if 0 < train.pack_length < rollout.longest_continuation:
        yield f"{train.pack_length=} is shorter than what may follow a prompt: set it to {rollout.longest_continuation} or 0"
    slot = train.pack_length or rollout.longest_continuation
    if not slot >> (train.pack_buckets - 1):
        yield f"{train.pack_buckets=} halves a slot of {slot} tokens to nothing: at most {slot.bit_length()}"
    if rollout.num_prompts % train.minibatches:
        yield f"{train.minibatches=} does not divide {rollout.num_prompts=}"
    if rollout.max_staleness and config.algorithm.dynamic_sampling_rounds:
        yield f"{rollout.max_staleness=} takes groups as they come: set algorithm.dynamic_sampling_rounds=0, or rollout.max_staleness=0"
    if config.mesh.decode_devices and not rollout.max_staleness:
        yield f"mesh.decode_devices={config.mesh.decode_devices} would wait for every update: set rollout.max_staleness=1, or mesh.decode_devices=0"
    if not all(isinstance(stop, str) and stop for stop in rollout.stop):
        yield f"{rollout.stop=} must hold non-empty strings"
    if config.eval.every and config.eval.problems < 1 and not config.eval.suites:
        yield f"eval.every={config.eval.every} needs eval.problems of at least 1, or eval.suites"


def impossible_algorithm(config: Config) -> Iterator[str]:
    rollout, algorithm = (
        config.rollout,
        algorithms.resolved(config.algorithm, config.rollout.max_staleness),
    )
    advantage = algorithms.ADVANTAGES.get(algorithm.advantage)
    if advantage and rollout.group_size < advantage.group_min:
        yield f"{rollout.group_size=}: the {algorithm.advantage} baseline needs a group of at least {advantage.group_min}"
    filtered = rollout.top_k or rollout.top_p < 1 or rollout.min_p
    behaviour = "algorithm.correction" if algorithm.correction else "algorithm.old_policy=sampler"
    if filtered and (algorithm.correction or algorithm.old_policy == "sampler"):
        yield (
            f"{behaviour} divides by the sampler's probabilities, which are over the full vocabulary: set "
            "rollout.top_k=0 rollout.top_p=1 rollout.min_p=0"
        )
    if algorithm.correction and algorithm.old_policy == "sampler":
        yield f"algorithm.correction={algorithm.correction} is always 1 with algorithm.old_policy=sampler: turn one off"
    if algorithm.correction_low > algorithm.correction_high:
        yield f"{algorithm.correction_low=} is above {algorithm.correction_high=}"
    if 0 < algorithm.dual_clip <= 1 + algorithm.clip_high:
        yield f"{algorithm.dual_clip=} must be above 1 + clip_high={1 + algorithm.clip_high}, or 0"
    if algorithm.overlong_share > 1:
        yield f"{algorithm.overlong_share=} is a share of rollout.max_new_tokens: at most 1"
