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
from jzero.config.schema import Config, Setting, TrainConfig, list_settings
from jzero.errors import UserError
from jzero.files import JsonObject

EXACT_BLOCK = 64  # attention.exact.KEY_BLOCK; this module imports no JAX
POSITIONS = "max_position_embeddings"  # in config.json of a model


def validate(config: Config, is_training: bool = False) -> None:
    """Raises a UserError that names every impossible setting. Compiles nothing.

    is_training: whether the settings are those of reinforcement learning, and not of a command that
        samples alone.
    """
    settings = list_settings(config)
    unknown_names = [message for item in settings for message in check_choice(item)]
    wrong_numbers = [message for item in settings for message in check_bounds(item)]
    mistakes = unknown_names + wrong_numbers
    # The checks of combinations divide by some of the numbers.
    if not wrong_numbers:
        for check in (*CHECKS, *(TRAINING_CHECKS if is_training else ())):
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
    if rollout.quantizes_weights or rollout.kv_dtype == "int8":
        yield (
            f"rollout.weights={rollout.weights} rollout.kv_dtype={rollout.kv_dtype}: what the "
            "sampler rounds to 8 bits the trainer does not; with model.exact set "
            "rollout.weights=native rollout.kv_dtype=bfloat16, or model.exact=false"
        )
    if EXACT_BLOCK % rollout.page_size and rollout.page_size % EXACT_BLOCK:
        yield (
            f"rollout.page_size={rollout.page_size}: model.exact reads keys in blocks of "
            f"{EXACT_BLOCK}, which are whole pages or parts of a page; set "
            f"rollout.page_size={EXACT_BLOCK}"
        )
    if model.is_base_quantized:
        yield (
            f"model.base={model.base}: products with weights in 8 bits are not exact; set "
            "model.base=native or model.exact=false"
        )
    if rollout.routing_replay:
        yield (
            "rollout.routing_replay=True: with model.exact the trainer's router chooses what the "
            "sampler's did; set it to False"
        )
    if remembers_kept(config):
        yield (
            f"rollout.top_k={rollout.top_k}: ratios over the tokens that it keeps are not exact; "
            "with model.exact set algorithm.old_policy=trainer algorithm.correction=none, or "
            "rollout.top_k=0"
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
    chosen = arch.num_experts_per_tok
    if arch.num_experts and not 1 <= chosen <= arch.num_experts:
        yield (
            f"model.arch.num_experts_per_tok={chosen} is not between 1 and "
            f"model.arch.num_experts={arch.num_experts}"
        )
    if arch.num_experts and not arch.moe_intermediate_size:
        yield (
            f"model.arch.num_experts={arch.num_experts} needs model.arch.moe_intermediate_size, "
            "the width of one expert"
        )
    if not arch.num_experts and (chosen or arch.moe_intermediate_size):
        yield (
            f"model.arch.num_experts_per_tok={chosen} and "
            f"model.arch.moe_intermediate_size={arch.moe_intermediate_size} have no effect without "
            "model.arch.num_experts: set it, or set both to 0"
        )
    shared = arch.shared_expert_intermediate_size
    if shared and not arch.model_type.startswith("qwen3_5_moe"):
        yield (
            f"model.arch.shared_expert_intermediate_size={shared}: model_type={arch.model_type} "
            "has no MLP beside experts; set it to 0, or model_type to qwen3_5_moe_text"
        )


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
    if config.model.is_base_quantized and not adapter.rank and not path:
        yield (
            f"model.base={config.model.base} is of a frozen model, and without an adapter nothing "
            "is frozen: set model.adapter.rank, or model.base=native"
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


def divides_by_sampler(config: Config) -> bool:
    """Returns whether the loss divides by the probabilities of the sampler."""
    algorithm = algorithms.resolve_correction(config.algorithm, config.rollout.max_staleness)
    return bool(algorithm.correction) or algorithm.old_policy == "sampler"


def remembers_kept(config: Config) -> bool:
    """Returns whether rollouts remember which tokens the sampler's filters kept.

    Ratios to the sampler are then over these tokens. Their number has a bound, rollout.top_k.
    """
    return config.rollout.top_k > 0 and divides_by_sampler(config)


def check_correction(config: Config) -> Iterator[str]:
    """What divides by the sampler's probabilities needs them over the tokens it could draw."""
    rollout = config.rollout
    algorithm = algorithms.resolve_correction(config.algorithm, rollout.max_staleness)
    is_filtered = bool(rollout.top_k or rollout.top_p < 1 or rollout.min_p)
    uses_sampler = algorithm.old_policy == "sampler"
    if is_filtered and divides_by_sampler(config) and not rollout.top_k:
        setting = "algorithm.old_policy=sampler"
        if algorithm.correction:
            setting = f"algorithm.correction={algorithm.correction}"
        yield (
            f"{setting} divides by the sampler's probabilities, over the tokens that rollout.top_p="
            f"{rollout.top_p} rollout.min_p={rollout.min_p} keep: bound their number with "
            "rollout.top_k, such as 512, or set rollout.top_p=1 rollout.min_p=0"
        )
    if remembers_kept(config) and algorithm.kl_reward:
        yield (
            f"algorithm.kl_reward={algorithm.kl_reward} compares with a reference policy over the "
            f"full vocabulary, and rollout.top_k={rollout.top_k} samples from a part of it: set "
            "algorithm.kl_reward=0, or rollout.top_k=0 rollout.top_p=1 rollout.min_p=0"
        )
    if remembers_kept(config) and algorithm.teacher_coef:
        yield (
            f"algorithm.teacher_coef={algorithm.teacher_coef} compares with a teacher over the "
            f"full vocabulary, and rollout.top_k={rollout.top_k} samples from a part of it: set "
            "rollout.top_k=0 rollout.top_p=1 rollout.min_p=0"
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


def check_corrected_sampler(config: Config) -> Iterator[str]:
    """What a sampler in 8 bits draws must be corrected."""
    rollout = config.rollout
    for name, value in (("weights", rollout.weights), ("kv_dtype", rollout.kv_dtype)):
        if value == "int8" and not divides_by_sampler(config):
            yield (
                f"rollout.{name}=int8 samples from another distribution than the trainer's: set "
                "algorithm.correction=token_truncate (truncated importance sampling), or "
                "algorithm.old_policy=sampler"
            )


def check_offload(config: Config) -> Iterator[str]:
    """Supervised fine-tuning does nothing but update."""
    if config.optimizer.offload and config.sft.data:
        yield (
            "optimizer.offload=True moves Adam's moments to the host while responses are sampled, "
            "and supervised fine-tuning samples none: set it to False"
        )


def check_quantized_weights(config: Config) -> Iterator[str]:
    """A frozen base has bits of its own."""
    rollout, adapter = config.rollout, config.model.adapter
    if rollout.quantizes_weights and (adapter.rank or adapter.path):
        yield (
            f"rollout.weights={rollout.weights} is of a model that is trained as a whole: with an "
            "adapter set model.base=int8 and rollout.weights=native"
        )


def check_parts_of_the_algorithm(config: Config) -> Iterator[str]:
    """Parts of an algorithm that are not defined together, and those that would have no effect."""
    algorithm, rollout = config.algorithm, config.rollout
    surrogate = algorithms.SURROGATES.get(algorithm.surrogate)
    if surrogate and surrogate.needs_token_ratio and algorithm.ratio != "token":
        yield (
            f"algorithm.ratio={algorithm.ratio} is not the ratio of one token's probabilities, "
            f"which algorithm.surrogate={algorithm.surrogate} compares: set algorithm.ratio=token"
        )
    if algorithm.environment_coef and rollout.max_turns == 1:
        yield (
            f"algorithm.environment_coef={algorithm.environment_coef} trains on an environment's "
            "replies, and rollout.max_turns=1 has none: raise rollout.max_turns, or set "
            "algorithm.environment_coef=0"
        )
    yield from named_reward_mistakes(config)


def named_reward_mistakes(config: Config) -> Iterator[str]:
    """An advantage of the named rewards knows no reward besides them."""
    algorithm = config.algorithm
    advantage = algorithms.ADVANTAGES.get(algorithm.advantage)
    if not advantage or not advantage.needs_parts:
        return
    for name in ("truncated_penalty", "overlong_share", "kl_reward"):
        if value := getattr(algorithm, name):
            yield (
                f"algorithm.{name}={value} is in no function of "
                f"task.reward.functions, which algorithm.advantage={algorithm.advantage} "
                f"normalizes one by one: set algorithm.{name}=0"
            )
    if config.rollout.max_turns > 1 and config.task.turn_reward == "success":
        yield (
            f"task.turn_reward=success replaces a score, and algorithm.advantage="
            f"{algorithm.advantage} reads the functions of task.reward.functions one by one: set "
            "task.turn_reward=score"
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


def check_parts_of_the_loss(config: Config) -> Iterator[str]:
    """A loss has a part, and what a part reads has an effect."""
    algorithm = config.algorithm
    factors = (algorithm.rl_coef, algorithm.ce_coef, algorithm.kl_coef, algorithm.entropy_coef)
    if not any(factors):
        yield (
            "algorithm.rl_coef=0 leaves no part of the loss: set algorithm.rl_coef, "
            "algorithm.ce_coef or algorithm.kl_coef"
        )
    if not algorithm.ce_coef:
        default = algorithms.Algorithm()
        for name in ("ce_weight", "ce_tokens"):
            value = getattr(algorithm, name)
            if value != getattr(default, name):
                yield f"algorithm.{name}={value} has no effect without algorithm.ce_coef: set both"
    if algorithm.teacher_coef and not algorithm.rl_coef:
        yield (
            f"algorithm.teacher_coef={algorithm.teacher_coef} is in the advantages, which "
            "algorithm.rl_coef=0 leaves out of the loss: set one of them"
        )
    is_blind = algorithm.advantage == "zero" and algorithm.rl_coef and not algorithm.teacher_coef
    if is_blind and not config.sft.data:
        yield (
            "algorithm.advantage=zero without algorithm.teacher_coef learns nothing: set "
            "algorithm.teacher_coef, or another advantage"
        )


# Settings of the teacher that only one kind of teacher reads.
OF_MODEL = ("path", "adapter")
OF_SERVER = ("url", "model", "request", "concurrency", "seconds", "retries", "key_variable")


def check_teacher(config: Config) -> Iterator[str]:
    """An algorithm with a teacher has one, and the teacher's settings belong to its kind."""
    teacher, coef = config.teacher, config.algorithm.teacher_coef
    kind = teacher.kind
    if config.sft.data:
        if kind:
            yield f"teacher.kind={kind} is of RL, and this run has sft.data: set teacher.kind="
        return
    if coef and not kind:
        yield (
            f"algorithm.teacher_coef={coef} needs a teacher: set teacher.kind, and teacher.path "
            "for kind=model"
        )
    if kind and not coef:
        yield (
            f"teacher.kind={kind} has no effect with algorithm.teacher_coef=0: set "
            "algorithm.teacher_coef, or teacher.kind="
        )

    default = type(teacher)()
    unread = [name for name in OF_MODEL if kind != "model"]
    unread += [name for name in OF_SERVER if kind != "server"]
    unread += [] if kind else ["prompt"]
    unread += [] if kind and teacher.prompt else ["max_prompt_tokens"]
    for name in unread:
        value = getattr(teacher, name)
        if value != getattr(default, name):
            needed = "server" if name in OF_SERVER else "model"
            if name in ("prompt", "max_prompt_tokens"):
                needed = "..." if name == "prompt" else f"{kind or '...'} and teacher.prompt"
            yield f"teacher.{name}={value} has no effect without teacher.kind={needed}"

    if kind == "model" and not (teacher.path or teacher.adapter):
        yield "teacher.kind=model needs teacher.path or teacher.adapter"
    if teacher.adapter and not (teacher.path or config.model.path):
        yield (
            f"teacher.adapter={teacher.adapter} is of a model in a directory or on the hub: set "
            "teacher.path, or model.path"
        )
    if kind == "policy" and not teacher.prompt:
        yield (
            "teacher.kind=policy without teacher.prompt is the policy itself, which has nothing to "
            "teach: set teacher.prompt"
        )
    if kind == "server":
        yield from check_teacher_server(config)


def check_teacher_server(config: Config) -> Iterator[str]:
    """A server has an address, and its log-probs are at temperature 1."""
    url, temperature = config.teacher.url, config.rollout.temperature
    if not url.startswith(("http://", "https://")):
        yield (
            f"teacher.url={url} is no address of an API: give one such as http://localhost:8000/v1"
        )
    if temperature != 1:
        yield (
            f"rollout.temperature={temperature}: the log-probs of teacher.kind=server are at "
            "temperature 1; set rollout.temperature=1, or use teacher.kind=model"
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
    if train.pack_lengths:
        yield from check_pack_lengths(train, longest)
        return
    pack_length = train.pack_length or longest
    if pack_length >> (train.pack_buckets - 1) < 1:
        yield (
            f"train.pack_buckets={train.pack_buckets} halves a pack of {pack_length} tokens "
            f"to nothing: set it to at most {pack_length.bit_length()}"
        )


def check_pack_lengths(train: TrainConfig, longest: int) -> Iterator[str]:
    """The first pack holds any response, and the others are shorter and shorter."""
    lengths = train.pack_lengths
    flag = f"train.pack_lengths={','.join(map(str, lengths))}"
    if train.pack_length:
        yield f"train.pack_length={train.pack_length} has no effect beside {flag}: set it to 0"
    if lengths[0] < longest:
        yield (
            f"{flag}: the first is shorter than what may follow a prompt: set it to {longest} at "
            "least"
        )
    if lengths[-1] < 1 or list(lengths) != sorted(set(lengths), reverse=True):
        yield f"{flag}: give lengths above 0, the longest first, each of them once"


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
    rollout = config.rollout
    shortest = rollout.max_prompt_tokens + settings.max_new_tokens
    if settings.max_new_tokens and 0 < rollout.max_episode_tokens < shortest:
        yield (
            f"rollout.max_episode_tokens={rollout.max_episode_tokens} is shorter than a prompt and "
            f"eval.max_new_tokens={settings.max_new_tokens}: set it to at least {shortest}, or to 0"
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
    """Returns the positions of a model in a directory or in the cache of the hub.

    None: the model does not say, is not here, or its config.json cannot be read, which whoever
    loads the model reports.
    """
    return positions_of(read_cached_config(path))


def read_cached_config(path: str) -> JsonObject:
    """Returns config.json of a model in a directory or in the cache of the hub, or {}."""
    if not path:
        return {}
    file: object = Path(path).expanduser() / "config.json"
    if not Path(path).expanduser().is_dir():
        if not is_hub_id(path):
            return {}
        try:
            file = huggingface_hub.try_to_load_from_cache(path, "config.json")
        except ValueError:  # no id of the hub
            return {}
    if not isinstance(file, str | Path) or not Path(file).is_file():
        return {}
    try:
        entries = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def positions_of(hf_config: JsonObject) -> int | None:
    """Returns how many positions a config.json says that the model has, or None.

    YaRN multiplies the positions that the model was first trained with. Those who add it to a
    config.json, as model cards say, seldom change max_position_embeddings.
    """
    text_config = hf_config.get("text_config")  # beside that of a vision tower
    positions = hf_config.get(POSITIONS)
    if positions is None and isinstance(text_config, dict):
        return positions_of(text_config)
    if not isinstance(positions, int):
        return None
    rope = hf_config.get("rope_scaling") or hf_config.get("rope_parameters")
    if not isinstance(rope, dict) or "yarn" not in (rope.get("rope_type"), rope.get("type")):
        return positions
    factor, original = rope.get("factor"), rope.get(f"original_{POSITIONS}", positions)
    if not isinstance(factor, int | float) or not isinstance(original, int):
        return positions
    return max(positions, int(factor * original))


def context_mistakes(
    config: Config, positions: int | None, window: int | None = None
) -> Iterator[str]:
    """Yields a message where sequences of the run may be longer than the model allows.

    `positions` is what `positions_of` the model returns. `window` is the number of tokens from
    which on a model of a family with sliding windows attends to the last ones alone. None: the
    model has no such limit.
    """
    windowed = window is not None and (positions is None or window < positions)
    limit = window if windowed else positions
    if limit is None:
        return
    rollout, sft = config.rollout, config.sft
    name = config.model.path or "the model"
    has = f"{name} has {POSITIONS}={limit}"
    if windowed:
        has = f"{name} has sliding_window={limit}, and jzero attends to all tokens alone"

    def ways_out(length: int) -> str:
        return "" if windowed else beyond(length)

    if sft.data and sft.pack_length > limit:
        yield (
            f"sft.pack_length={sft.pack_length} takes examples of so many tokens, and {has}: "
            f"set sft.pack_length={limit}{ways_out(sft.pack_length)}"
        )
    generates = not sft.data or config.eval.suites
    longest = rollout.longest_episode
    if generates and longest > limit:
        room = limit - rollout.max_prompt_tokens
        advice = "lower rollout.max_prompt_tokens and rollout.max_new_tokens"
        if rollout.max_turns > 1 and room >= rollout.max_new_tokens:
            advice = f"set rollout.max_episode_tokens={limit}"
        elif room > 0 and rollout.max_turns == 1:
            advice = f"set rollout.max_new_tokens={room} rollout.max_episode_tokens=0"
        yield (
            f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} "
            f"rollout.max_new_tokens={rollout.max_new_tokens} "
            f"rollout.max_turns={rollout.max_turns} make sequences of {longest} tokens, and {has}: "
            f"{advice}{ways_out(longest)}"
        )
    longest_evaluation = config.eval.longest_episode(rollout)
    if generates and longest <= limit < longest_evaluation:
        yield (
            f"eval.max_new_tokens={config.eval.max_new_tokens} makes sequences of "
            f"{longest_evaluation} tokens, and {has}: lower "
            f"eval.max_new_tokens{ways_out(longest_evaluation)}"
        )


def beyond(length: int) -> str:
    """Returns the words on the two ways to more positions than the model has."""
    return (
        f". YaRN would stretch its positions to {length}: give a directory whose config.json has "
        f"rope_scaling with rope_type=yarn. model.max_position_embeddings={length} goes on "
        "without, at positions that the model has not been trained at"
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
    check_quantized_weights,
    check_offload,
    check_parts_of_the_algorithm,
    check_algorithm_numbers,
    check_parts_of_the_loss,
    check_teacher,
    check_lengths,
    check_context,
    check_schedule_of_a_step,
    check_length_of_the_run,
    check_evaluation,
)
# Of reinforcement learning alone.
TRAINING_CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (check_corrected_sampler,)
