"""Checks a config before anything is compiled or downloaded.

Single values are checked when they are assigned (`jzero.fields`). Here are the combinations of
settings. `validate` collects all mistakes into one `UserError`. Each message gives the setting with
its value, the mistake, and a remedy.

A check of a combination is a function that yields messages, and a line in CHECKS.
"""

import datetime
import re
import shlex
import shutil
import string
from collections.abc import Callable, Iterator
from pathlib import Path

from jzero import algorithms, http
from jzero.config import architecture, drafts, teachers, turns
from jzero.config.placement import Jobs, Together
from jzero.config.schema import (
    EIGHT_BITS,
    LARGEST_B1_IN_16_BITS,
    LARGEST_B2_IN_16_BITS,
    Config,
    RolloutConfig,
    TrainConfig,
)
from jzero.errors import UserError, shown
from jzero.fields import class_of_part, part_name, show_part
from jzero.files import JsonObject, is_hub_id, parse_json, read_text, split_revision

EXACT_BLOCK = 64  # = attention.exact.KEY_BLOCK; not imported, because attention imports config
# Placeholders of the command after a push (hub.push.on_push).
ON_PUSH_FIELDS = ("repo", "revision", "step")
BRANCH_NAME = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
POSITIONS = "max_position_embeddings"  # key in the config.json of a model


def validate(config: Config, is_training: bool = False, *, has_jax: bool = True) -> None:
    """Raises a UserError that names every combination of settings that cannot work.

    Args:
        config: the settings.
        is_training: whether the config is for an RL run. False for commands that only sample.
        has_jax: whether to make the checks that import JAX, too.
    """
    mistakes = []
    training_checks = TRAINING_CHECKS if is_training else ()
    for check in (*CHECKS, *(JAX_CHECKS if has_jax else ()), *training_checks):
        mistakes += check(config)
    if mistakes:
        raise UserError("; ".join(mistakes))


# Settings that must fit together.


def check_exact(config: Config) -> Iterator[str]:
    """model.exact requires settings with which sampler and trainer compute the same bits."""
    model, rollout = config.model, config.rollout
    if not model.exact:
        return
    if model.attention not in ("", "exact"):
        yield (
            f"model.attention={model.attention} is not the attention of model.exact: set "
            "model.attention= or model.exact=false"
        )
    # Sampler and trainer must attend to keys and values of the same precision.
    if model.dtype == "float32" and rollout.kv_dtype != "float32":
        yield (
            f"rollout.kv_dtype={rollout.kv_dtype} rounds the keys that the trainer does not round: "
            "with model.exact set rollout.kv_dtype=float32, or model.dtype=bfloat16"
        )
    # Only the sampler would round to 8 bits.
    if rollout.quantizes_weights or rollout.quantizes_kv:
        yield (
            f"rollout.weights={rollout.weights} rollout.kv_dtype={rollout.kv_dtype}: what the "
            "sampler rounds to 8 bits the trainer does not; with model.exact set "
            "rollout.weights=native rollout.kv_dtype=bfloat16, or model.exact=false"
        )
    # Exact attention reads blocks of keys. A block must be whole pages, or an equal part of a page.
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
    if model.adapter.dropout:
        yield (
            f"model.adapter.dropout={model.adapter.dropout}: the sampler has no dropout, so with "
            "model.exact its log-probs would differ from the trainer's; set "
            "model.adapter.dropout=0 or model.exact=false"
        )
    if rollout.routing_replay:
        yield (
            "rollout.routing_replay=True: with model.exact the trainer's router chooses what the "
            "sampler's did; set it to False"
        )
    if num_kept(config.algorithm, config.rollout):
        yield (
            f"rollout.top_k={rollout.top_k}: ratios over the tokens that it keeps are not exact; "
            "with model.exact set algorithm.old_policy=trainer algorithm.correction=none "
            "algorithm.off_policy_bound=0, or rollout.top_k=0"
        )
    if config.sft is not None:
        yield (
            "model.exact=True compares the trainer with a sampler, and supervised fine-tuning has "
            "none: set model.exact=false"
        )


def check_architecture(config: Config) -> Iterator[str]:
    """Checks the entries of a tiny model, or that the config.json in model.arch exists."""
    if config.model.path:
        return
    file = architecture.config_file(config.model.arch)
    if file is not None:
        if not file.is_file():
            yield f"model.arch={config.model.arch}: no such file"
        return
    try:
        arch = architecture.read_architecture(config.model.arch)
    except UserError as error:
        yield str(error)
        return
    yield from check_entries(arch)


def check_entries(arch: architecture.Architecture) -> Iterator[str]:
    """Checks that query heads divide into equal groups, that RoPE has pairs, and MoE entries."""
    if arch.num_attention_heads % arch.num_key_value_heads:
        yield (
            f"model.arch.num_key_value_heads={arch.num_key_value_heads} does not divide "
            f"model.arch.num_attention_heads={arch.num_attention_heads}"
        )
    if arch.head_dim % 2:
        yield f"model.arch.head_dim={arch.head_dim} must be even: RoPE rotates pairs"
    # The remaining checks are for MoE.
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
    """Checks settings that conflict with an adapter, or that need one.

    With an adapter the critic is a second adapter on the policy's base, so it has no model path. An
    initial adapter (model.adapter.path) belongs to the unmodified base, so a warm start is refused.
    """
    adapter = config.model.adapter
    path = adapter.path
    if adapter.targets and not adapter.rank and not path:
        yield (
            f"model.adapter.targets={','.join(adapter.targets)} has no effect without "
            "model.adapter.rank: set both"
        )
    if adapter.dropout and not adapter.rank and not path:
        yield (
            f"model.adapter.dropout={adapter.dropout} has no effect without model.adapter.rank: "
            "set both"
        )
    if config.model.is_base_quantized and not adapter.rank and not path:
        yield (
            f"model.base={config.model.base} needs a frozen model, and without an adapter nothing "
            "is frozen: set model.adapter.rank, or model.base=native"
        )
    if config.train.save == "adapter" and not adapter.rank and not path:
        yield (
            "train.save=adapter is for a run with an adapter: set model.adapter.rank, or "
            "train.save=no_optimizer"
        )
    # An adapter only fits the weights that it was trained on, not random weights.
    if path and not config.model.path:
        yield (
            f"model.adapter.path={path} was trained on a different base model: set model.path to "
            "that model"
        )
    # A warm start would change these weights.
    if path and config.is_warm_started:
        yield (
            f"warm_start={show_part(config.warm_start)} changes the base model of "
            f"model.adapter.path={path}: set warm_start=none"
        )
    # With an adapter the critic is a second adapter on the policy's base.
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


def check_hub(config: Config) -> Iterator[str]:
    """A push requires the model on the hub, and a name of a branch."""
    push = config.hub.push
    if push is None:
        return
    if not is_hub_id(push.repo):
        yield (
            f"hub.push={part_name(type(push))} needs the model that it pushes to: set "
            "hub.push.repo=USER/NAME"
        )
    if not BRANCH_NAME.fullmatch(push.revision):
        yield (
            f"hub.push.revision={push.revision} is not a branch name: use letters, digits, dots, "
            "hyphens and underscores"
        )
    yield from check_on_push(push.on_push)


def check_on_push(command: str) -> Iterator[str]:
    """The command after a push must split into arguments, and its program must exist."""
    try:
        arguments = shlex.split(command)
        fields = [field for _, *field in string.Formatter().parse(command)]
    except ValueError as error:
        yield f"hub.push.on_push={command} is not a command ({error}): quote it as in a shell"
        return
    # {repo:>10} or {repo!r} would not be filled in: only plain placeholders are allowed.
    for name, form, conversion in fields:
        if name is not None and (name not in ON_PUSH_FIELDS or form or conversion):
            yield (
                f"hub.push.on_push={command} has {{{name}}}: only "
                f"{', '.join(f'{{{field}}}' for field in ON_PUSH_FIELDS)} have a value"
            )
    # Checked now, because the command first runs hours later, after the first push.
    if arguments and shutil.which(arguments[0]) is None:
        yield f"hub.push.on_push={command}: there is no program {arguments[0]}: install it"


def check_group_size(config: Config) -> Iterator[str]:
    """A group baseline requires a minimum group size."""
    advantage = config.algorithm.advantage
    smallest = algorithms.ADVANTAGES[type(advantage)].min_group_size
    group_size = config.rollout.group_size
    if group_size < smallest:
        yield (
            f"rollout.group_size={group_size}: the {part_name(type(advantage))} baseline needs "
            f"a group of at least {smallest}"
        )


def divides_by_sampler(algorithm: algorithms.Algorithm, rollout: RolloutConfig) -> bool:
    """Returns whether the loss divides by the sampler's probabilities."""
    algorithm = algorithms.resolve_correction(algorithm, rollout.max_staleness)
    return algorithm.correction is not None or algorithm.old_policy == "sampler"


def num_kept(algorithm: algorithms.Algorithm, rollout: RolloutConfig) -> int:
    """Returns how many tokens kept by the sampler's filters rollouts store for each sampled token.

    The probabilities in ratios to the sampler are normalized over these tokens. 0: not stored.
    """
    return rollout.top_k if compares_with_sampler(algorithm, rollout) else 0


def compares_with_sampler(algorithm: algorithms.Algorithm, rollout: RolloutConfig) -> bool:
    """Returns whether the loss divides by the sampler's probabilities, or masks with them."""
    return divides_by_sampler(algorithm, rollout) or algorithm.off_policy_bound > 0


def check_correction(config: Config) -> Iterator[str]:
    """Checks the correction, and that filtered sampling is compatible with ratios to the sampler.

    A ratio to a filtered sampler needs the kept tokens, so rollout.top_k must bound their number.
    """
    rollout = config.rollout
    algorithm = algorithms.resolve_correction(config.algorithm, rollout.max_staleness)
    is_filtered = bool(rollout.top_k or rollout.top_p < 1 or rollout.min_p)
    correction = part_name(class_of_part(algorithm.correction))
    uses_sampler = algorithm.old_policy == "sampler"
    # The trainer normalizes over the kept tokens, which rollouts store only if top_k bounds them.
    if (
        is_filtered
        and compares_with_sampler(config.algorithm, config.rollout)
        and not rollout.top_k
    ):
        cause = "algorithm.old_policy=sampler divides by"
        if algorithm.correction is not None:
            cause = f"algorithm.correction={correction} divides by"
        elif not uses_sampler:
            cause = f"algorithm.off_policy_bound={algorithm.off_policy_bound} compares with"
        yield (
            f"{cause} the sampler's probabilities, over the tokens that rollout.top_p="
            f"{rollout.top_p} rollout.min_p={rollout.min_p} keep: bound their number with "
            "rollout.top_k, such as 512, or set rollout.top_p=1 rollout.min_p=0"
        )
    # Log-probs over the kept tokens cannot be compared with log-probs over the full vocabulary.
    if num_kept(config.algorithm, config.rollout) and algorithm.kl_reward:
        yield (
            f"algorithm.kl_reward={algorithm.kl_reward} compares with a reference policy over the "
            f"full vocabulary, and rollout.top_k={rollout.top_k} samples from a part of it: set "
            "algorithm.kl_reward=0, or rollout.top_k=0 rollout.top_p=1 rollout.min_p=0"
        )
    if num_kept(config.algorithm, config.rollout) and algorithm.distillation.coef:
        yield (
            f"algorithm.distillation.coef={algorithm.distillation.coef} compares with a teacher "
            f"over the full vocabulary, and rollout.top_k={rollout.top_k} samples from a part of "
            "it: set rollout.top_k=0 rollout.top_p=1 rollout.min_p=0"
        )
    # The correction is the ratio of the old policy to the sampler.
    if algorithm.correction is not None and uses_sampler:
        yield (
            f"algorithm.correction={correction} is always 1 with "
            "algorithm.old_policy=sampler: turn one of them off"
        )
    low = getattr(algorithm.correction, "low", 0.0)
    if algorithm.correction is not None and low > algorithm.correction.high:
        yield (
            f"algorithm.correction.low={low} is above "
            f"algorithm.correction.high={algorithm.correction.high}"
        )


def check_corrected_sampler(config: Config) -> Iterator[str]:
    """An 8-bit sampler requires a correction, or the sampler's log-probs as the old policy."""
    rollout = config.rollout
    if divides_by_sampler(config.algorithm, rollout):
        return
    for name, value in (("weights", rollout.weights), ("kv_dtype", rollout.kv_dtype)):
        if value in EIGHT_BITS:
            yield (
                f"rollout.{name}={value} samples from another distribution than the trainer's: set "
                "algorithm.correction=token_truncate (truncated importance sampling), or "
                "algorithm.old_policy=sampler"
            )


def check_offload(config: Config) -> Iterator[str]:
    """optimizer.offload is only for RL: supervised fine-tuning has no sampling phase."""
    if config.optimizer.offload and config.sft is not None:
        yield (
            "optimizer.offload=True moves Adam's moments to the host while responses are sampled, "
            "and supervised fine-tuning samples none: set it to False"
        )


def check_moments(config: Config) -> Iterator[str]:
    """A moment in bfloat16 must change by more than its rounding error."""
    settings = config.optimizer
    if settings.mu_dtype == "bfloat16" and settings.b1 > LARGEST_B1_IN_16_BITS:
        yield (
            f"optimizer.mu_dtype=bfloat16 rounds by up to 0.2 %, and with optimizer.b1="
            f"{settings.b1:g} a first moment stops before it reaches the mean of the gradients: "
            f"set optimizer.b1 to at most {LARGEST_B1_IN_16_BITS}, or mu_dtype to float32"
        )
    if settings.nu_dtype == "bfloat16" and settings.b2 > LARGEST_B2_IN_16_BITS:
        yield (
            f"optimizer.nu_dtype=bfloat16 rounds by up to 0.2 %, and with optimizer.b2="
            f"{settings.b2:g} a second moment may need smaller changes: set optimizer.b2 to at "
            f"most {LARGEST_B2_IN_16_BITS}, or nu_dtype to float32"
        )


def check_quantized_weights(config: Config) -> Iterator[str]:
    """With an adapter, model.base sets the precision of the base, not rollout.weights."""
    rollout, adapter = config.rollout, config.model.adapter
    if rollout.quantizes_weights and (adapter.rank or adapter.path):
        yield (
            f"rollout.weights={rollout.weights} quantizes a model that is trained as a whole: with "
            "an adapter set model.base=int8 and rollout.weights=native"
        )


def check_parts_of_the_algorithm(config: Config) -> Iterator[str]:
    """Rejects incompatible parts of an algorithm, and parts without effect."""
    from jzero.algorithms.surrogates import SURROGATES  # loads jax

    algorithm, rollout = config.algorithm, config.rollout
    surrogate = SURROGATES[type(algorithm.surrogate)]
    surrogate_name = part_name(type(algorithm.surrogate))
    if surrogate.needs_token_ratio and algorithm.ratio != "token":
        yield (
            f"algorithm.ratio={algorithm.ratio} is not the ratio of one token's probabilities, "
            f"which algorithm.surrogate={surrogate_name} compares: set algorithm.ratio=token"
        )
    if algorithm.top_entropy < 1 and not surrogate.scales_with_advantage:
        yield (
            f"algorithm.top_entropy={algorithm.top_entropy} sets advantages to 0, and "
            f"algorithm.surrogate={surrogate_name} does not scale with the advantage: set "
            "algorithm.top_entropy=1, or another surrogate"
        )
    if algorithm.environment_coef and rollout.max_turns == 1:
        yield (
            f"algorithm.environment_coef={algorithm.environment_coef} trains on an environment's "
            "replies, and rollout.max_turns=1 has none: raise rollout.max_turns, or set "
            "algorithm.environment_coef=0"
        )
    yield from named_reward_mistakes(config)


def named_reward_mistakes(config: Config) -> Iterator[str]:
    """An advantage that normalizes each reward function ignores all other rewards."""
    algorithm = config.algorithm
    if not algorithms.needs_parts(algorithm):
        return
    advantage = part_name(type(algorithm.advantage))
    for name in ("truncated_penalty", "overlong_share", "kl_reward"):
        if value := getattr(algorithm, name):
            yield (
                f"algorithm.{name}={value} is in no function of "
                f"task.reward.functions, which algorithm.advantage={advantage} "
                f"normalizes one by one: set algorithm.{name}=0"
            )
    if config.rollout.max_turns > 1 and isinstance(config.task.turn_reward, turns.Success):
        yield (
            f"task.turn_reward=success replaces a score, and algorithm.advantage="
            f"{advantage} reads the functions of task.reward.functions one by one: set "
            "task.turn_reward=score"
        )


def check_dual_clip(config: Config) -> Iterator[str]:
    """The bound of dual-clip PPO must be above the clip."""
    surrogate = config.algorithm.surrogate
    if isinstance(surrogate, algorithms.Clip) and 0 < surrogate.dual <= 1 + surrogate.high:
        yield (
            f"algorithm.surrogate.dual={surrogate.dual} must be above 1 + high="
            f"{1 + surrogate.high}, or 0"
        )


def check_parts_of_the_loss(config: Config) -> Iterator[str]:
    """The loss must have a term."""
    algorithm = config.algorithm
    factors = (
        algorithm.rl_coef,
        algorithm.cross_entropy.coef,
        algorithm.kl.coef,
        algorithm.entropy_coef,
    )
    if not any(factors):
        yield (
            "algorithm.rl_coef=0 leaves no part of the loss: set algorithm.rl_coef, "
            "algorithm.cross_entropy.coef or algorithm.kl.coef"
        )
    cross_entropy = algorithm.cross_entropy
    if not cross_entropy.coef and cross_entropy != algorithms.CrossEntropy():
        yield (
            f"algorithm.cross_entropy={show_part(cross_entropy)} has no effect without "
            "algorithm.cross_entropy.coef: set it"
        )
    coef = algorithm.distillation.coef
    if coef and not algorithm.rl_coef:
        yield (
            f"algorithm.distillation.coef={coef} is in the advantages, which "
            "algorithm.rl_coef=0 leaves out of the loss: set one of them"
        )
    is_zero = isinstance(algorithm.advantage, algorithms.Zero)
    if is_zero and algorithm.rl_coef and not coef and config.sft is None:
        yield (
            "algorithm.advantage=zero without algorithm.distillation.coef learns nothing: set "
            "algorithm.distillation.coef, or another advantage"
        )


def check_teacher(config: Config) -> Iterator[str]:
    """algorithm.distillation.coef and the teacher require each other."""
    teacher, coef = config.teacher, config.algorithm.distillation.coef
    name = part_name(class_of_part(teacher))
    if config.sft is not None:
        if teacher is not None:
            yield f"teacher={name} is only for RL, and this run has sft: set teacher=none"
        return
    if coef and teacher is None:
        yield (
            f"algorithm.distillation.coef={coef} needs a teacher: set teacher, such as "
            "teacher=model with teacher.path"
        )
    if teacher is None:
        return
    if not coef:
        yield (
            f"teacher={name} has no effect with algorithm.distillation.coef=0: set "
            "algorithm.distillation.coef, or teacher=none"
        )
    if teacher.max_prompt_tokens and not teacher.prompt:
        yield (
            f"teacher.max_prompt_tokens={teacher.max_prompt_tokens} has no effect without "
            "teacher.prompt: set both"
        )
    if isinstance(teacher, teachers.Model):
        if not (teacher.path or teacher.adapter):
            yield "teacher=model needs teacher.path or teacher.adapter"
        if teacher.adapter and not (teacher.path or config.model.path):
            yield (
                f"teacher.adapter={teacher.adapter} needs a base model from a directory or the "
                "hub: set teacher.path, or model.path"
            )
    if isinstance(teacher, teachers.Policy) and not teacher.prompt:
        yield (
            "teacher=policy without teacher.prompt is the policy itself, which has nothing to "
            "teach: set teacher.prompt"
        )
    if isinstance(teacher, teachers.Server):
        yield from check_teacher_server(teacher.url, config.rollout.temperature)


def check_teacher_server(url: str, temperature: float) -> Iterator[str]:
    """A teacher server needs a valid URL, and its log-probs are at temperature 1."""
    try:
        http.check_url("teacher.url", url)
    except UserError as error:
        yield str(error)
    if temperature != 1:
        yield (
            f"rollout.temperature={temperature}: the log-probs of teacher=server are at "
            "temperature 1; set rollout.temperature=1, or use teacher=model"
        )


def check_lengths(config: Config) -> Iterator[str]:
    """An episode must have room for a response, and a pack for the longest continuation."""
    rollout = config.rollout
    train = config.train
    shortest = rollout.max_prompt_tokens + rollout.max_new_tokens
    if 0 < rollout.max_episode_tokens < shortest:
        yield (
            f"rollout.max_episode_tokens={rollout.max_episode_tokens} is shorter than "
            f"a prompt and a response, {shortest}: raise it, or set it to 0"
        )
    # The first pack must have room for everything after a prompt.
    longest = rollout.longest_continuation
    try:
        lengths = train.pack_lengths
    except UserError as error:
        yield str(error)
        return
    if not lengths:
        return
    if lengths[0] < longest:
        yield (
            f"train.pack={train.pack} has no room for the {longest} tokens that may follow a "
            f"prompt: begin with {longest} or more"
        )
    if lengths[-1] < 1 or list(lengths) != sorted(set(lengths), reverse=True):
        yield f"train.pack={train.pack}: give lengths above 0, the longest first, each of them once"


def check_schedule_of_a_step(config: Config) -> Iterator[str]:
    """Minibatches, staleness and dynamic sampling must agree."""
    rollout = config.rollout
    if rollout.num_prompts % config.train.minibatches:
        yield (
            f"train.minibatches={config.train.minibatches} does not divide "
            f"rollout.num_prompts={rollout.num_prompts}"
        )
    if rollout.max_staleness and config.algorithm.dynamic_sampling_rounds:
        yield (
            f"rollout.placement.max_staleness={rollout.max_staleness} trains on groups as they "
            "come and cannot replace any: set algorithm.dynamic_sampling_rounds=0, or "
            "rollout.placement=together(max_staleness=0)"
        )


def check_decoders_of_hosts(config: Config) -> Iterator[str]:
    """Hosts that decode together decide everything alike, without a look at their clocks."""
    rollout = config.rollout
    if rollout.hosts_per_decoder == 1:
        return
    name = f"rollout.hosts_per_decoder={rollout.hosts_per_decoder}"
    if not isinstance(rollout.placement, Together) or rollout.max_staleness:
        yield (
            f"{name} samples synchronously, on the devices that train: set "
            "rollout.placement=together(max_staleness=0), or rollout.hosts_per_decoder=1"
        )
    if rollout.draft is not None and not rollout.draft.cost:
        yield (
            f"{name} needs rollout.draft.cost: each host would measure another cost, and draft at "
            "other places; set it to 1.2, for example"
        )


def check_draft_head(config: Config) -> Iterator[str]:
    """The head for drafts is trained with the full model, and within rows that are not split."""
    draft = config.rollout.draft
    if not isinstance(draft, drafts.Mtp) or not draft.weight:
        return
    name = f"rollout.draft=mtp(weight={draft.weight})"
    advice = 'set rollout.draft="mtp(weight=0)", which leaves the head as it is'
    if config.model.adapter.rank:
        yield f"{name} with model.adapter: the head is a part of the frozen base; {advice}"
    for axis in ("context", "slices"):
        size = getattr(config.mesh, axis)
        if size > 1:
            yield f"{name} with mesh.{axis}={size} is not implemented: {advice}"


def check_jobs(config: Config) -> Iterator[str]:
    """Separate jobs sample what depends only on the weights, the request and the seed."""
    rollout = config.rollout
    jobs = rollout.placement
    if not isinstance(jobs, Jobs) or config.sft is not None:  # check_placement_of_sft
        return
    name = "rollout.placement=jobs"
    if not jobs.store:
        yield f"{name} has no store: set rollout.placement.store to a directory or gs://bucket/run"
    if jobs.serve and not re.fullmatch(r"\S+:[0-9]{1,5}", jobs.serve):
        yield (
            f"rollout.placement.serve={jobs.serve} is not a valid address: use HOST:PORT, such as "
            "0.0.0.0:8400"
        )
    if jobs.schedule == "fixed" and jobs.switch != "requests":
        yield (
            f"rollout.placement.switch={jobs.switch} with schedule=fixed: rollouts would depend on "
            "the time at which weights arrive, and no run could be repeated: set "
            "rollout.placement.schedule=arrival, or switch=requests"
        )
    # What is listed here changes the samplers' work, and has not been tested with separate jobs. A
    # critic and a teacher score on the trainer, whoever samples.
    unsupported = {
        "algorithm.dynamic_sampling_rounds": config.algorithm.dynamic_sampling_rounds,
        "task.reward.judge": "judge" in config.task.reward.functions,
    }
    for setting, is_used in unsupported.items():
        if is_used:
            yield (
                f"{name} does not support {setting}: remove it, or set rollout.placement=together"
            )
    if config.model.adapter.rank and (config.is_warm_started or not config.model.path):
        yield (
            f"{name} with model.adapter.rank={config.model.adapter.rank}: samplers load the base "
            "from model.path: set it, and warm_start=none"
        )
    if jobs.groups_per_request and rollout.num_prompts % jobs.groups_per_request:
        yield (
            f"rollout.placement.groups_per_request={jobs.groups_per_request} does not divide "
            f"rollout.num_prompts={rollout.num_prompts}"
        )


def check_placement_of_sft(config: Config) -> Iterator[str]:
    """Supervised fine-tuning samples no rollouts, so there is nothing to place."""
    placement = config.rollout.placement
    if config.sft is None or isinstance(placement, Together):
        return
    yield (
        f"rollout.placement={part_name(type(placement))} places the rollouts of RL, and sft has "
        "none: set rollout.placement=together"
    )


def check_resume(config: Config) -> Iterator[str]:
    """An earlier checkpoint is named by its step."""
    checkpoint = config.train.resume_from
    if checkpoint is not None and checkpoint.step < 0:
        yield (
            "train.resume_from.step=-1 must be at least 0: set it to the step of the checkpoint to "
            "resume from"
        )


def check_length_of_the_run(config: Config) -> Iterator[str]:
    """Supervised fine-tuning has sft.epochs; the settings of the length of RL are refused."""
    if config.sft is None:
        return
    train, default = config.train, TrainConfig()
    for name in ("steps", "prompt_epochs"):
        value, usual = getattr(train, name), getattr(default, name)
        if value != usual:
            yield (
                f"train.{name}={value} is the length of RL, and this run has sft: leave it at "
                f"{usual}, and set sft.epochs"
            )


def check_examples(config: Config) -> Iterator[str]:
    """Supervised fine-tuning needs examples."""
    if config.sft is not None and not config.sft.data:
        yield "sft.data= names no examples: set sft.data, or sft=none for RL"


def check_evaluation(config: Config) -> Iterator[str]:
    """Evaluations during a run require problems, and room for eval.max_new_tokens."""
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
    """No sequence may be longer than the model's context.

    Applies only if the model's config.json is on this machine. A model that still has to be
    downloaded from the hub is checked after the download of its config.json.
    """
    model = config.model
    yield from context_mistakes(config, model.max_position_embeddings or read_positions(model.path))


def read_positions(path: str) -> int | None:
    """Returns the context length of a model in a directory or in the hub's cache.

    None if config.json does not contain it, is not on this machine, or cannot be read. Loading the
    model reports an unreadable config.json.
    """
    return positions_of(read_cached_config(path))


def read_cached_config(path: str) -> JsonObject:
    """Returns the config.json of a model in a directory or in the hub's cache, or {}."""
    if not path:
        return {}
    file: object = Path(path).expanduser() / "config.json"
    if not Path(path).expanduser().is_dir():
        if not is_hub_id(path):
            return {}
        import huggingface_hub  # not at the top: it takes a third of a second

        try:
            name, revision = split_revision(path)
            file = huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision)
        except ValueError:  # not a hub id
            return {}
    if not isinstance(file, str | Path) or not Path(file).is_file():
        return {}
    try:
        return parse_json(read_text(file), Path(file))
    except (OSError, UserError):
        return {}


def positions_of(hf_config: JsonObject) -> int | None:
    """Returns the context length of a model from its config.json, None if it has no such entry."""
    text_config = hf_config.get("text_config")  # in models with a vision tower
    positions = hf_config.get(POSITIONS)
    if positions is None and isinstance(text_config, dict):
        return positions_of(text_config)
    if not isinstance(positions, int):
        return None
    # YaRN multiplies the original context length. Users who add YaRN to a config.json, as model
    # cards advise, seldom update max_position_embeddings.
    rope = hf_config.get("rope_scaling") or hf_config.get("rope_parameters")
    if not isinstance(rope, dict) or "yarn" not in (rope.get("rope_type"), rope.get("type")):
        return positions
    factor, original = rope.get("factor"), rope.get(f"original_{POSITIONS}", positions)
    if not isinstance(factor, int | float) or not isinstance(original, int):
        return positions
    return max(positions, int(factor * original))


def context_mistakes(
    config: Config,
    positions: int | None,
    window: int | None = None,
) -> Iterator[str]:
    """Yields messages if sequences of the run may be longer than the model allows.

    Args:
        config: the config of the run.
        positions: the result of `positions_of` for the model; None for no limit.
        window: the sliding window of a model in tokens; None for no limit. jzero always attends to
            all tokens, so longer sequences are refused.
    """
    # The smaller of the two limits applies.
    windowed = window is not None and (positions is None or window < positions)
    limit = window if windowed else positions
    if limit is None:
        return
    rollout, sft = config.rollout, config.sft
    name = config.model.path or "the model"
    has = f"{name} has {POSITIONS}={limit}"
    if windowed:
        has = f"{name} has sliding_window={limit}, and jzero always attends to all tokens"

    def ways_out(length: int) -> str:
        return "" if windowed else beyond(length)

    if sft is not None and sft.pack_length > limit:
        yield (
            f"sft.pack_length={sft.pack_length} takes examples of so many tokens, and {has}: "
            f"set sft.pack_length={limit}{ways_out(sft.pack_length)}"
        )
    # Supervised fine-tuning samples only for suites.
    generates = sft is None or config.eval.suites
    longest = rollout.longest_episode
    if generates and longest > limit:
        # Advise to bound the episode, or to shorten the responses, if the prompts leave room.
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
    # Report evaluations only if the rollouts themselves fit.
    longest_evaluation = config.eval.longest_episode(rollout)
    if generates and longest <= limit < longest_evaluation:
        yield (
            f"eval.max_new_tokens={config.eval.max_new_tokens} makes sequences of "
            f"{longest_evaluation} tokens, and {has}: lower "
            f"eval.max_new_tokens{ways_out(longest_evaluation)}"
        )


def beyond(length: int) -> str:
    """Returns the part of a message on the two ways to extend the context length."""
    return (
        f". YaRN would stretch its positions to {length}: give a directory whose config.json has "
        f"rope_scaling with rope_type=yarn. model.max_position_embeddings={length} allows them "
        "without YaRN, at positions that the model has not been trained at"
    )


def check_agent(config: Config) -> Iterator[str]:
    """An agent needs rollouts and rows of the kinds that can hold a tree of sequences."""
    what, rollout = f"task.agent={config.task.agent}", config.rollout
    if not config.task.agent:
        return
    if not isinstance(rollout.placement, Together) or rollout.max_staleness:
        kind = part_name(type(rollout.placement))
        yield (
            f"rollout.placement={kind}(max_staleness={rollout.max_staleness}): {what} requests "
            "responses within a step; set rollout.placement=together"
        )
    if rollout.hosts_per_decoder > 1:
        yield (
            f"rollout.hosts_per_decoder={rollout.hosts_per_decoder}: the requests of {what} reach "
            "one host; set rollout.hosts_per_decoder=1"
        )
    if config.train.packs_per_row:
        yield (
            f"train.packs_per_row={config.train.packs_per_row}: the sequences of {what} have "
            "different prompts, and cannot share one in a row; set train.packs_per_row=0"
        )
    if config.train.sequence_per_turn:
        yield (
            f"train.sequence_per_turn=True: the sequences of {what} are those of its requests; "
            "set train.sequence_per_turn=False"
        )


def check_prompts(config: Config) -> Iterator[str]:
    """Validates the settings of prompts."""
    if config.rollout.thoughts == "drop" and config.rollout.max_turns > 1:
        yield (
            "rollout.thoughts=drop: the turns of an episode are one sequence of tokens, which "
            "keeps the thoughts of earlier turns: set rollout.thoughts=keep, or "
            "rollout.max_turns=1"
        )
    if date := config.model.prompt_date:
        try:
            datetime.date.fromisoformat(date)
        except ValueError:
            yield f"model.prompt_date={shown(date)} is not a date: give one such as 2026-12-31"


CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    check_prompts,
    check_agent,
    check_exact,
    check_architecture,
    check_adapter,
    check_hub,
    check_group_size,
    check_correction,
    check_quantized_weights,
    check_offload,
    check_moments,
    check_dual_clip,
    check_parts_of_the_loss,
    check_teacher,
    check_lengths,
    check_context,
    check_schedule_of_a_step,
    check_decoders_of_hosts,
    check_draft_head,
    check_jobs,
    check_placement_of_sft,
    check_resume,
    check_length_of_the_run,
    check_examples,
    check_evaluation,
)
JAX_CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (check_parts_of_the_algorithm,)
# Additional checks for reinforcement learning.
TRAINING_CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (check_corrected_sampler,)
