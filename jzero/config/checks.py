"""The checks of a config that are made before anything is compiled or downloaded.

There are three kinds: a name that is not among its choices, a number outside its bounds, and
settings that do not fit together. `validate` collects all mistakes into one `UserError`. Each
message names the setting with its value, says what is wrong, and says what to do.

A check of settings that must fit together is a function that yields messages, and a line in CHECKS.
"""

import importlib.util
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub

from jzero import algorithms
from jzero.config.schema import Config, Setting, list_settings
from jzero.errors import UserError

EXACT_BLOCK = 64  # attention.exact.KEY_BLOCK; this module imports no JAX
POSITIONS = "max_position_embeddings"  # in config.json of a model


def validate(config: Config) -> None:
    """Raises a UserError that names every impossible setting. Compiles nothing."""
    settings = list_settings(config)
    unknown_names = [message for item in settings for message in check_choice(item)]
    wrong_numbers = [message for item in settings for message in check_bounds(item)]
    mistakes = unknown_names + wrong_numbers
    # The checks of combinations divide by some of the numbers.
    if not wrong_numbers:
        for check in CHECKS:
            mistakes += check(config)
    if mistakes:
        raise UserError("; ".join(mistakes))


# Single settings.


def check_choice(item: Setting) -> Iterator[str]:
    """Yields a message if a setting with choices has another value."""
    choices = item.rules.choices
    if choices and item.value not in choices:
        names = ", ".join(choice or "''" for choice in choices)
        yield f"{item.name}={item.value!r} is not one of {names}"


def check_bounds(item: Setting) -> Iterator[str]:
    """Yields a message if a number is outside its bounds, infinite, or no number at all."""
    value, rules = item.value, item.rules
    if not isinstance(value, int | float):
        return
    if math.isnan(value):
        yield f"{item.name}={value} is not a number"
    elif math.isinf(value):
        yield f"{item.name}={value} must be finite"
    elif rules.at_least is not None and value < rules.at_least:
        yield f"{item.name}={value} must be at least {rules.at_least:g}"
    elif rules.above is not None and value <= rules.above:
        yield f"{item.name}={value} must be above {rules.above:g}"
    elif rules.at_most is not None and value > rules.at_most:
        yield f"{item.name}={value} must be at most {rules.at_most:.10g}"
    elif rules.below is not None and value >= rules.below:
        yield f"{item.name}={value} must be below {rules.below:g}"


# Settings that must fit together.


def check_exact(config: Config) -> Iterator[str]:
    """With model.exact the sampler and the trainer must be able to compute the same bits."""
    model, rollout = config.model, config.rollout
    if not model.exact:
        return
    if model.attention not in ("", "exact"):
        yield (
            f"model.attention={model.attention} is not the attention of model.exact: set "
            "model.attention= or model.exact=false"
        )
    if model.dtype == "float32" and rollout.kv_dtype != "float32":
        yield (
            f"rollout.kv_dtype={rollout.kv_dtype} rounds the keys that the trainer does not round: "
            "with model.exact set rollout.kv_dtype=float32, or model.dtype=bfloat16"
        )
    if EXACT_BLOCK % rollout.page_size and rollout.page_size % EXACT_BLOCK:
        yield (
            f"rollout.page_size={rollout.page_size}: model.exact reads keys in blocks of "
            f"{EXACT_BLOCK}, which are whole pages or parts of a page; set "
            f"rollout.page_size={EXACT_BLOCK}"
        )
    if config.sft.data:
        yield (
            "model.exact=True compares the trainer with a sampler, and supervised fine-tuning has "
            "none: set model.exact=false"
        )


def check_architecture(config: Config) -> Iterator[str]:
    """Heads must be groups of equal size, and RoPE must find pairs."""
    arch = config.model.arch
    if arch.num_attention_heads % arch.num_key_value_heads:
        yield (
            f"model.arch.num_key_value_heads={arch.num_key_value_heads} does not divide "
            f"model.arch.num_attention_heads={arch.num_attention_heads}"
        )
    if arch.head_dim % 2:
        yield f"model.arch.head_dim={arch.head_dim} must be even: RoPE rotates pairs"


def check_adapter(config: Config) -> Iterator[str]:
    """The critic of a run with an adapter is one more adapter on the policy's base.

    An adapter that is given is of the base as it is. A new one has a rank.
    """
    adapter = config.model.adapter
    path = adapter.path
    if adapter.targets and not adapter.rank and not path:
        yield (
            f"model.adapter.targets={','.join(adapter.targets)} has no effect without "
            "model.adapter.rank: set both"
        )
    if path and not config.model.path:
        yield f"model.adapter.path={path} is of another model: set model.path to that model"
    if path and config.warm_start.steps and not config.sft.data:
        yield (
            f"warm_start.steps={config.warm_start.steps} trains the model that the adapter "
            f"model.adapter.path={path} is of: set warm_start.steps=0"
        )
    if path and config.critic.path:
        yield (
            f"critic.path={config.critic.path} is a model of its own, and with model.adapter.path "
            "the critic is an adapter on the policy's model: set critic.path="
        )
    elif adapter.rank and config.critic.path:
        yield (
            f"critic.path={config.critic.path} is a model of its own, and with model.adapter.rank="
            f"{adapter.rank} the critic is an adapter on the policy's model: set "
            "critic.path= or model.adapter.rank=0"
        )


def check_packages(config: Config) -> Iterator[str]:
    """Packages that jzero does not depend on must be installed if a setting needs them."""
    if config.task.verifier == "math_verify" and not is_installed("math_verify"):
        yield "task.verifier=math_verify needs the package: pip install math-verify"
    project = config.train.wandb_project
    if project and not is_installed("wandb"):
        yield f"train.wandb_project={project} needs the package: pip install wandb"


def check_wandb(config: Config) -> Iterator[str]:
    """What is said of a run on W&B needs a project."""
    train = config.train
    if train.wandb_project:
        return
    for name in ("wandb_entity", "wandb_group", "wandb_name"):
        if value := getattr(train, name):
            yield f"train.{name}={value} has no effect without train.wandb_project: set both"


def check_resume(config: Config) -> Iterator[str]:
    """Only a chosen checkpoint has later steps to discard."""
    if config.train.discard_later_steps and config.train.resume_from < 0:
        yield ("train.discard_later_steps=True needs the step to go back to: set train.resume_from")


def is_installed(package: str) -> bool:
    """Returns whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def check_sampling(config: Config) -> Iterator[str]:
    """The sampling distribution must exist, and stop strings must be strings."""
    rollout = config.rollout
    if rollout.temperature <= 0:
        yield (
            f"rollout.temperature={rollout.temperature} must be positive: "
            "RL needs samples that differ"
        )
    if not 0 < rollout.top_p <= 1:
        yield f"rollout.top_p={rollout.top_p} must be in (0, 1]"
    if not 0 <= rollout.min_p < 1:
        yield f"rollout.min_p={rollout.min_p} must be in [0, 1)"
    if not all(isinstance(stop, str) and stop for stop in rollout.stop):
        yield f"rollout.stop={rollout.stop} must hold non-empty strings"


def check_group_size(config: Config) -> Iterator[str]:
    """A baseline that is made of the group's other rollouts needs some."""
    advantage = algorithms.ADVANTAGES.get(config.algorithm.advantage)
    group_size = config.rollout.group_size
    if advantage and group_size < advantage.min_group_size:
        yield (
            f"rollout.group_size={group_size}: the {config.algorithm.advantage} baseline needs "
            f"a group of at least {advantage.min_group_size}"
        )


def check_correction(config: Config) -> Iterator[str]:
    """What divides by the sampler's probabilities needs them over the full vocabulary."""
    rollout = config.rollout
    algorithm = algorithms.resolve_correction(config.algorithm, rollout.max_staleness)
    is_filtered = bool(rollout.top_k or rollout.top_p < 1 or rollout.min_p)
    uses_sampler = algorithm.old_policy == "sampler"
    if is_filtered and (algorithm.correction or uses_sampler):
        setting = "algorithm.old_policy=sampler"
        if algorithm.correction:
            setting = f"algorithm.correction={algorithm.correction}"
        yield (
            f"{setting} divides by the sampler's probabilities, which are over the full "
            "vocabulary: set rollout.top_k=0 rollout.top_p=1 rollout.min_p=0"
        )
    if algorithm.correction and uses_sampler:
        yield (
            f"algorithm.correction={algorithm.correction} is always 1 with "
            "algorithm.old_policy=sampler: turn one of them off"
        )
    if algorithm.correction_low > algorithm.correction_high:
        yield (
            f"algorithm.correction_low={algorithm.correction_low} is above "
            f"algorithm.correction_high={algorithm.correction_high}"
        )


def check_algorithm_numbers(config: Config) -> Iterator[str]:
    """Numbers of the algorithm that have an upper bound or a bound beside 0."""
    algorithm = config.algorithm
    clip_bound = 1 + algorithm.clip_high
    if 0 < algorithm.dual_clip <= clip_bound:
        yield (
            f"algorithm.dual_clip={algorithm.dual_clip} must be above "
            f"1 + clip_high={clip_bound}, or 0"
        )
    if algorithm.overlong_share > 1:
        yield (
            f"algorithm.overlong_share={algorithm.overlong_share} is a share of "
            "rollout.max_new_tokens: at most 1"
        )


def check_lengths(config: Config) -> Iterator[str]:
    """An episode must have room for a response, and a pack for what may follow a prompt."""
    rollout = config.rollout
    train = config.train
    shortest = rollout.max_prompt_tokens + rollout.max_new_tokens
    if 0 < rollout.max_episode_tokens < shortest:
        yield (
            f"rollout.max_episode_tokens={rollout.max_episode_tokens} is shorter than "
            f"a prompt and a response, {shortest}: raise it, or set it to 0"
        )
    longest = rollout.longest_continuation
    if 0 < train.pack_length < longest:
        yield (
            f"train.pack_length={train.pack_length} is shorter than what may follow a prompt: "
            f"set it to {longest} or 0"
        )
    pack_length = train.pack_length or longest
    if pack_length >> (train.pack_buckets - 1) < 1:
        yield (
            f"train.pack_buckets={train.pack_buckets} halves a pack of {pack_length} tokens "
            f"to nothing: set it to at most {pack_length.bit_length()}"
        )


def check_schedule_of_a_step(config: Config) -> Iterator[str]:
    """Minibatches, staleness, dynamic sampling and the placement must agree."""
    rollout = config.rollout
    if rollout.num_prompts % config.train.minibatches:
        yield (
            f"train.minibatches={config.train.minibatches} does not divide "
            f"rollout.num_prompts={rollout.num_prompts}"
        )
    if rollout.max_staleness and config.algorithm.dynamic_sampling_rounds:
        yield (
            f"rollout.max_staleness={rollout.max_staleness} trains on groups as they come and "
            "cannot replace any: set algorithm.dynamic_sampling_rounds=0, "
            "or rollout.max_staleness=0"
        )
    if config.mesh.decode_devices and not rollout.max_staleness:
        yield (
            f"mesh.decode_devices={config.mesh.decode_devices} would wait for every update: "
            "set rollout.max_staleness=1, or mesh.decode_devices=0"
        )


def check_length_of_the_run(config: Config) -> Iterator[str]:
    """Passes over the problems are of RL; supervised fine-tuning has its own."""
    epochs = config.train.prompt_epochs
    if epochs and config.sft.data:
        yield (
            f"train.prompt_epochs={epochs} counts passes of RL, and this run has sft.data: "
            "set train.prompt_epochs=0 and sft.epochs"
        )


def check_evaluation(config: Config) -> Iterator[str]:
    """Evaluations during the run need problems."""
    settings = config.eval
    if settings.every and settings.problems < 1 and not settings.suites:
        yield (
            f"eval.every={settings.every} has no problems to evaluate on: "
            "set eval.problems to at least 1, or eval.suites"
        )


def check_context(config: Config) -> Iterator[str]:
    """No sequence may be longer than the model, if its config.json is on this machine already.

    A model of the hub that is not here yet is checked when its config.json has come.
    """
    model = config.model
    yield from context_mistakes(config, model.max_position_embeddings or read_positions(model.path))


def is_hub_id(name: str) -> bool:
    """Returns whether a name has the form of an id of the hub, such as Qwen/Qwen2.5-3B."""
    return name.count("/") == 1 and name[0] not in "./~"


def read_positions(path: str) -> int | None:
    """Returns max_position_embeddings of a model in a directory or in the cache of the hub.

    None: the model has no such entry, is not here, or its config.json cannot be read, which whoever
    loads the model reports.
    """
    if not path:
        return None
    file: object = Path(path).expanduser() / "config.json"
    if not Path(path).expanduser().is_dir():
        if not is_hub_id(path):
            return None
        try:
            file = huggingface_hub.try_to_load_from_cache(path, "config.json")
        except ValueError:  # no id of the hub
            return None
    if not isinstance(file, str | Path) or not Path(file).is_file():
        return None
    try:
        positions = json.loads(Path(file).read_text(encoding="utf-8")).get(POSITIONS)
    except (OSError, ValueError, AttributeError):
        return None
    return positions if isinstance(positions, int) else None


def context_mistakes(config: Config, positions: int | None) -> Iterator[str]:
    """Yields a message where sequences of the run may be longer than `positions` tokens.

    `positions` is max_position_embeddings of the model, None where it does not say.
    """
    if positions is None:
        return
    rollout, sft = config.rollout, config.sft
    name = config.model.path or "the model"
    if sft.data and sft.pack_length > positions:
        yield (
            f"sft.pack_length={sft.pack_length} takes examples of so many tokens, and {name} has "
            f"{POSITIONS}={positions}: set sft.pack_length={positions}{beyond(sft.pack_length)}"
        )
    generates = not sft.data or config.eval.suites
    longest = rollout.longest_episode
    if generates and longest > positions:
        room = positions - rollout.max_prompt_tokens
        advice = "lower rollout.max_prompt_tokens and rollout.max_new_tokens"
        if rollout.max_turns > 1 and room >= rollout.max_new_tokens:
            advice = f"set rollout.max_episode_tokens={positions}"
        elif room > 0 and rollout.max_turns == 1:
            advice = f"set rollout.max_new_tokens={room} rollout.max_episode_tokens=0"
        yield (
            f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} "
            f"rollout.max_new_tokens={rollout.max_new_tokens} "
            f"rollout.max_turns={rollout.max_turns} make sequences of {longest} tokens, and {name} "
            f"has {POSITIONS}={positions}: {advice}{beyond(longest)}"
        )


def beyond(length: int) -> str:
    """Returns the words on the two ways to more positions than the model has."""
    return (
        f". YaRN would stretch its positions to {length}, which jzero does not compute; "
        f"model.max_position_embeddings={length} goes on without, at positions that the model has "
        "not been trained at"
    )


CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    check_exact,
    check_architecture,
    check_adapter,
    check_packages,
    check_wandb,
    check_resume,
    check_sampling,
    check_group_size,
    check_correction,
    check_algorithm_numbers,
    check_lengths,
    check_context,
    check_schedule_of_a_step,
    check_length_of_the_run,
    check_evaluation,
)
