"""Settings of earlier versions: one table of their names, and the functions that apply it.

    arguments, old_values = take_old_flags(sys.argv[1:])    # before the flags are parsed
    put_old_value(config, name, value)                      # afterwards, for each old value

A flag of an old setting that still has a meaning works: `--config.task.level_min=3`. The
config.json of an earlier version is read in the same way (`serialization.from_json`). The flag of a
setting that was removed fails with the advice of the table.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jzero.config.architecture import Architecture, with_entry
from jzero.config.data_sources import DATA_SETTINGS, Rows, read_sources, show_sources
from jzero.config.other_names import advise
from jzero.config.placement import Apart, Together
from jzero.config.schema import (
    Card,
    Config,
    Local,
    Push,
    Remote,
    Sft,
    TaskConfig,
    known_names,
    set_part,
)
from jzero.errors import UserError, shown
from jzero.files import is_hub_id, split_revision
from jzero.setting import FieldType, field_types, parse_value, read_arguments, read_tuple

OldValue = tuple[str, str]  # name of the old setting, and the text of its flag


@dataclass(frozen=True)
class Moved:
    """The setting has another name, and the same values."""

    to: str


@dataclass(frozen=True)
class Merged:
    """The setting is a part of another one.

    `put(config, name, text)` changes a config as the flag `name=text` did. `default` was the
    default: with this value, the setting of a config.json had no effect. It also had none without
    the part `needs`, a dotted name.
    """

    to: str
    put: Callable[[Config, str, str], None]
    default: object = ""
    needs: str = ""


@dataclass(frozen=True)
class Removed:
    """The setting has no meaning today. The advice is the second half of an error message."""

    advice: str


# -- Functions of merged settings ------------------------------------------------------------------


def add_revision(config: Config, name: str, text: str) -> None:
    """Adds a revision to the hub id of the model: model.revision=v1."""
    path = config.model.path
    given, revision = split_revision(path)
    if not text or revision == text:
        return
    if not is_hub_id(path) or Path(path).expanduser().is_dir():
        raise UserError(
            f"model.revision={text} is of a model on the hub, and model.path={path} is none: leave "
            "it out"
        )
    # Neither of two revisions is more likely to be meant.
    if revision is not None:
        raise UserError(f"model.revision={text}: model.path={path} has a revision: set one")
    config.model.path = f"{given}#{text}"


def change_architecture(config: Config, name: str, text: str) -> None:
    """Changes one entry of a tiny model: model.arch.head_dim=16."""
    entry = name.removeprefix("model.arch.")
    config.model.arch = with_entry(config.model.arch, entry, text)


def add_option(config: Config, name: str, text: str) -> None:
    """Sets an option of the task: task.value_max=15."""
    option = name.removeprefix("task.")
    config.task.options = (*config.task.options, f"{option}={text}")


def add_math_option(config: Config, name: str, text: str) -> None:
    """Sets an option of the tasks of mathematics: task.units=convert."""
    task = config.task
    if task.name != "mixed":
        add_option(config, name, text)
        return
    named = [option.removeprefix("tasks=") for option in task.options if option[:6] == "tasks="]
    rows = (named[-1] if named else "math,code").split(",")
    option = f"{name.removeprefix('task.')}={text}"
    added = [f"{row}.options={option}" for row in rows if row != "code"]
    task.options = (*task.options, *added)


def change_search(config: Config, name: str, text: str) -> None:
    """Adds an argument to the tool search in task.tools.names: task.tools.corpus=FILE."""
    tools = config.task.tools
    if not any(tool.partition("(")[0] == "search" for tool in tools.names):
        raise UserError(f"{name}={shown(text)} is of the tool search: add it to task.tools.names")
    argument = {"task.tools.corpus": "corpus", "task.tools.search_results": "results"}[name]
    value = int(text) if argument == "results" and text.isdigit() else text
    tools.names = tuple(with_argument(tool, argument, value) for tool in tools.names)


def with_argument(tool: str, argument: str, value: object) -> str:
    """Returns the tool search with an argument, and other tools as they are."""
    name, _, text = tool.removesuffix(")").partition("(")
    if name != "search":
        return tool
    try:
        _, named = read_arguments(text)
    except ValueError:  # the tool reports it
        return tool
    named[argument] = value
    return f"search({','.join(f'{key}={item!r}' for key, item in named.items())})"


# Field of the section task or sft -> the argument of rows(...) in a setting of that section.
ROW_ARGUMENTS = {
    "train_split": "data.split",
    "eval_split": "eval_data.split",
    "problem_column": "data.problem",
    "answer_column": "data.answer",
    "max_train": "data.limit",
    "level_min": "data.level_min",
    "level_max": "data.level_max",
}


def change_rows(config: Config, name: str, text: str) -> None:
    """Changes an argument of every data set: task.data.level_min=3, or the old task.level_min=3."""
    section, _, field = name.partition(".")
    field, _, argument = ROW_ARGUMENTS.get(field, field).partition(".")
    if config.task.name == "mixed" and field == "data" and argument != "limit":
        raise UserError(
            f"{name}={shown(text)}: write task.options=math.data=rows({argument}={text!r}) for the "
            "rows of math, or task.data=rows('FILE',...) for all rows"
        )
    value = parse_value(name, field_types(Rows)[argument], text)
    # Without a source the argument belongs to the task's default set, which an empty path stands
    # for.
    sources = sources_of(config, section, field) or (Rows(),)
    put_sources(config, section, field, tuple(replace(row, **{argument: value}) for row in sources))


def sources_of(config: Config, section: str, field: str) -> tuple[Rows, ...]:
    """Returns the data sources of task.data, task.eval_data, sft.data or sft.eval_data."""
    owner = config.task if section == "task" else config.sft or Sft()
    return read_sources(f"{section}.{field}", getattr(owner, field))


def put_sources(config: Config, section: str, field: str, sources: tuple[Rows, ...]) -> None:
    """Changes one of these settings to other data sources."""
    text = show_sources(sources)
    if section == "task":
        setattr(config.task, field, text)
    else:
        config.sft = replace(config.sft or Sft(), **{field: text})


def change_weights(config: Config, name: str, text: str) -> None:
    """Sets the weight of every data set: task.weights=0.3,0.7."""
    section = name.partition(".")[0]
    sources = sources_of(config, section, "data")
    try:
        weights = [float(str(item)) for item in read_tuple(text, None)]
    except ValueError:
        weights = []
    if text.strip("() ") and (len(weights) != len(sources) or not all(w > 0 for w in weights)):
        raise UserError(
            f"{name}={shown(text)} must be a positive number for each of the {len(sources)} sets "
            f"of {section}.data"
        )
    weights = weights or [0.0] * len(sources)
    pairs = zip(sources, weights, strict=True)
    weighted = tuple(replace(rows, weight=weight) for rows, weight in pairs)
    put_sources(config, section, "data", weighted)


# Options of the rows of one task that were an argument of rows(...): math.answer_column=solutions.
_OLD_OPTION = re.compile(r"(\w+)\.(problem_column|answer_column|level_min|level_max)=(.*)")


def rename_options(task: TaskConfig) -> None:
    """Changes old options of task.name=mixed to those of today, in place.

    math.answer_column=solutions becomes math.data=rows(answer='solutions'), and
    math.feedback_wrong=No. becomes math.feedback.wrong=No.
    """
    if task.name != "mixed":
        return
    options: list[str] = []
    arguments: dict[str, Rows] = {}  # by the task of the rows
    for option in task.options:
        found = _OLD_OPTION.fullmatch(option)
        if found is None:
            options.append(rename_option(option))
            continue
        argument = ROW_ARGUMENTS[found[2]].partition(".")[2]
        value = int(found[3]) if argument.startswith("level") and found[3].isdigit() else found[3]
        arguments[found[1]] = replace(arguments.get(found[1], Rows()), **{argument: value})
    options += [f"{name}.data={rows}" for name, rows in arguments.items()]
    task.options = tuple(options)


def rename_option(option: str) -> str:
    """Returns an option of the rows of one task with the name that its setting has today."""
    place, equals, text = option.partition("=")
    rows, _, setting = place.partition(".")
    entry = OLD_SETTINGS.get(f"task.{setting}")
    if isinstance(entry, Moved):
        place = f"{rows}.{entry.to.removeprefix('task.')}"
    elif isinstance(entry, Merged) and entry.put is add_math_option:
        return f"{rows}.options={setting}={text}"
    return f"{place}{equals}{text}"


def change_sandbox(config: Config, name: str, text: str) -> None:
    """Changes the remote sandbox, or chooses it: task.sandbox.url=URL. The limits stay."""
    sandbox = config.task.sandbox
    if isinstance(sandbox, Local):
        sandbox = Remote(sandbox.seconds, sandbox.memory_gib, sandbox.output_mib)
    config.task.sandbox = replace(sandbox, **{name.rpartition(".")[2]: text})


def change_decode_devices(config: Config, name: str, text: str) -> None:
    """Sets the devices that only sample: mesh.decode_devices=2. 0: all devices do both."""
    devices = parse_value(name, FieldType(int), text)
    staleness, groups = config.rollout.max_staleness, config.rollout.max_running_groups
    if devices == 0:
        config.rollout.placement = Together(staleness, groups)
        return
    config.rollout.placement = replace(Apart(staleness or 1, groups), devices=devices)


def change_resume(config: Config, name: str, text: str) -> None:
    """Sets the checkpoint to continue from: train.resume_from=40. -1 is the newest one."""
    if text.strip().startswith("-"):
        config.train.resume_from = None
    elif text.strip().isdigit():
        set_part(config, f"{name}.step", text.strip())
    else:
        set_part(config, name, text)


def change_warm_start(config: Config, name: str, text: str) -> None:
    """Sets the steps of the warm start: warm_start.steps=60. 0 is no warm start."""
    if text.strip() == "0":
        config.warm_start = None
    else:
        set_part(config, name, text)


def change_warmup(config: Config, name: str, text: str) -> None:
    """Sets the warm-up of the learning rate: optimizer.warmup_ratio=0.03."""
    argument = name.removeprefix("optimizer.warmup_")
    if argument == "from_zero":
        set_part(config, "optimizer.warmup.from_zero", text)
        return
    part = {"steps": f"steps(number={text})", "ratio": f"share(ratio={text})"}[argument]
    is_none = text.strip() in ("0", "0.0")
    warmup = config.optimizer.warmup
    set_part(config, "optimizer.warmup", "none" if is_none else part)
    if warmup is not None and warmup.from_zero and not is_none:
        set_part(config, "optimizer.warmup.from_zero", True)


# -- The table -------------------------------------------------------------------------------------

COUNTDOWN_OPTIONS = {
    "numbers_min": 3,
    "numbers_max": 4,
    "value_max": 99,
    "target_max": 99,
    "format_score": 0.1,
    "malformed_score": 0.0,
}
# The functions of rewards whose numbers were settings of the section task.reward.
REWARD_ARGUMENTS = {
    "repetition_": "repetition_penalty(most=-1.0)",
    "cosine_": "cosine(length=1000)",
    "overlong_": "soft_overlong(length=16384)",
}

# Name of an old setting, or the beginning of the names of several with a last "." or "_".
OLD_SETTINGS: dict[str, Moved | Merged | Removed] = {
    # Algorithms.
    "algorithm": Removed(
        "choose a preset in a recipe, as in config.algorithm = algorithms.dapo(), or single "
        "settings, as in --config.algorithm.surrogate=cispo"
    ),
    "algorithm.truncated_score": Moved("algorithm.truncated.score"),
    "algorithm.std_eps": Moved("algorithm.advantage.eps"),
    "algorithm.gamma": Moved("algorithm.advantage.gamma"),
    "algorithm.lam": Moved("algorithm.advantage.lam"),
    "algorithm.value_clip": Moved("algorithm.advantage.value_clip"),
    "algorithm.value_coef": Moved("algorithm.advantage.value_coef"),
    "algorithm.length_norm": Moved("algorithm.weight.length"),
    "algorithm.clip_low": Moved("algorithm.surrogate.low"),
    "algorithm.clip_high": Moved("algorithm.surrogate.high"),
    "algorithm.dual_clip": Moved("algorithm.surrogate.dual"),
    "algorithm.sapo_tau_positive": Moved("algorithm.surrogate.tau_positive"),
    "algorithm.sapo_tau_negative": Moved("algorithm.surrogate.tau_negative"),
    "algorithm.vespo_k_positive": Moved("algorithm.surrogate.k_positive"),
    "algorithm.vespo_lambda_positive": Moved("algorithm.surrogate.lambda_positive"),
    "algorithm.vespo_k_negative": Moved("algorithm.surrogate.k_negative"),
    "algorithm.vespo_lambda_negative": Moved("algorithm.surrogate.lambda_negative"),
    "algorithm.correction_low": Moved("algorithm.correction.low"),
    "algorithm.correction_high": Moved("algorithm.correction.high"),
    "algorithm.kl_coef": Moved("algorithm.kl.coef"),
    "algorithm.kl_estimator": Moved("algorithm.kl.estimator"),
    "algorithm.kl_max": Moved("algorithm.kl.bound"),
    "algorithm.kl_weight": Moved("algorithm.kl.weight"),
    "algorithm.ce_coef": Moved("algorithm.cross_entropy.coef"),
    "algorithm.ce_weight": Moved("algorithm.cross_entropy.weight"),
    "algorithm.ce_tokens": Moved("algorithm.cross_entropy.tokens"),
    "algorithm.teacher_coef": Moved("algorithm.distillation.coef"),
    "algorithm.teacher_max": Moved("algorithm.distillation.bound"),
    "teacher.kind": Moved("teacher"),
    # Optimizers.
    "optimizer.decay_ratio": Moved("optimizer.schedule.decay_ratio"),
    "optimizer.decay_shape": Moved("optimizer.schedule.shape"),
    "optimizer.cycles": Moved("optimizer.schedule.cycles"),
    "optimizer.timescale": Moved("optimizer.schedule.timescale"),
    "optimizer.min_lr_ratio": Moved("optimizer.schedule.min_lr_ratio"),
    "optimizer.power": Moved("optimizer.schedule.power"),
    "optimizer.warmup_steps": Merged("optimizer.warmup", change_warmup, 0),
    "optimizer.warmup_ratio": Merged("optimizer.warmup", change_warmup, 0.0),
    "optimizer.warmup_from_zero": Merged(
        "optimizer.warmup", change_warmup, False, needs="optimizer.warmup"
    ),
    "critic.optimizer.lr": Moved("critic.lr"),
    "critic.optimizer.": Removed("the critic has the policy's optimizer, except for critic.lr"),
    # Today's settings, with values that they had: 0 stood for warm_start=none, and a number for the
    # step of a checkpoint.
    "warm_start.steps": Merged("warm_start", change_warm_start, 0),
    "train.resume_from": Merged("train.resume_from", change_resume, -1),
    "train.discard_later_steps": Moved("train.resume_from.discard_later"),
    # Sampling.
    "rollout.max_staleness": Moved("rollout.placement.max_staleness"),
    "rollout.max_running_groups": Moved("rollout.placement.max_running_groups"),
    "mesh.decode_devices": Merged("rollout.placement", change_decode_devices, 0),
    # Models.
    **{
        f"model.arch.{field.name}": Merged("model.arch", change_architecture, field.default)
        for field in dataclasses.fields(Architecture)
    },
    "model.revision": Merged("model.path", add_revision, ""),
    "model.arch.": Merged("model.arch", change_architecture),
    "model.adapter.init": Removed("every adapter begins as it was"),
    # Tasks.
    **{
        f"task.{option}": Merged("task.options", add_option, default)
        for option, default in COUNTDOWN_OPTIONS.items()
    },
    **{
        f"task.{field}": Merged(f"task.{to}", change_rows, getattr(Rows(), to.partition(".")[2]))
        for field, to in ROW_ARGUMENTS.items()
    },
    "task.answer_mark": Merged("task.options", add_math_option),
    "task.units": Merged("task.options", add_math_option, "exact"),
    "task.reward_bias": Moved("task.turn_reward.bias"),
    "task.reward_scaling": Moved("task.turn_reward.scaling"),
    "task.feedback_right": Moved("task.feedback.right"),
    "task.feedback_wrong": Moved("task.feedback.wrong"),
    "task.sandbox.url": Merged("task.sandbox", change_sandbox),
    "task.sandbox.protocol": Merged("task.sandbox", change_sandbox, "piston"),
    "task.weights": Merged("task.data", change_weights),
    "task.tools.corpus": Merged("task.tools.names", change_search),
    "task.tools.search_results": Merged("task.tools.names", change_search, 3),
    **{
        f"task.reward.{prefix}": Removed(
            f"write it as an argument in task.reward.functions={function}"
        )
        for prefix, function in REWARD_ARGUMENTS.items()
    },
    # Fine-tuning.
    "sft.train_split": Merged("sft.data.split", change_rows),
    "sft.eval_split": Merged("sft.eval_data.split", change_rows),
    "sft.weights": Merged("sft.data", change_weights),
    # Flags of one argument of all data sets.
    **{
        f"{setting}.{argument}": Merged(setting, change_rows)
        for setting in DATA_SETTINGS
        for argument in field_types(Rows)
    },
    # The training loop.
    "train.pack_length": Removed("set train.pack"),
    "train.pack_buckets": Removed("set train.pack"),
    "train.pack_lengths": Removed("set train.pack"),
    "train.wandb_project": Removed("set train.trackers='wandb(project=NAME)'"),
    "train.wandb_entity": Removed("set the environment variable WANDB_ENTITY"),
    "train.wandb_group": Removed("set the environment variable WANDB_RUN_GROUP"),
    "train.wandb_name": Removed("set the environment variable WANDB_NAME"),
    "train.trackio_project": Removed("set train.trackers='trackio(project=NAME)'"),
    "train.trackio_space": Removed("set train.trackers='trackio(project=NAME, space=USER/NAME)'"),
    "train.log_completions": Removed("train.trackers sends them unless it has completions=False"),
    "memory.max_growth": Removed("every run has this check"),
    "memory.growth_steps": Removed("every run has this check"),
    # The hub.
    **{f"hub.{field.name}": Moved(f"hub.push.{field.name}") for field in dataclasses.fields(Push)},
    **{f"hub.{field.name}": Moved(f"hub.card.{field.name}") for field in dataclasses.fields(Card)},
    "hub.wait_minutes": Removed("set hub.push.minutes"),
    "hub.on_push_minutes": Removed("a command may take an hour"),
    "hub.max_waiting": Removed("two exports may wait"),
}


# Parts that were sections: the setting that was 0 or "" in a run without the part.
SWITCHES = {"warm_start": "steps", "sft": "data"}


def old_setting(name: str) -> Moved | Merged | Removed | None:
    """Returns the entry of an old setting, None for any other name."""
    entry = OLD_SETTINGS.get(name)
    if entry is not None:
        return entry
    # A name of today may begin like several old settings.
    if name in known_names():
        return None
    beginnings = [key for key in OLD_SETTINGS if key[-1] in "._" and name.startswith(key)]
    # The longest prefix is the most specific entry.
    return OLD_SETTINGS[max(beginnings, key=len)] if beginnings else None


def unknown_names(names: Iterable[str]) -> str:
    """Returns a message on the dotted names that are not settings, with the closest settings.

    Returns "no field rollout.group_sise; did you mean rollout.group_size?", or "" if all names are
    settings, or arguments of any part that a setting may have.
    """
    known = known_names()
    mistakes = []
    for name in sorted(set(names) - set(known)):
        # The table has better advice than the settings with similar names.
        match old_setting(name):
            case Moved(to=to) | Merged(to=to):
                advice = f"set {to}"
            case Removed(advice=advice):
                pass
            case None:
                advice = advise(name, known)
        mistakes.append(f"no field {name}; {advice}")
    return "; ".join(mistakes)


# -- Flags -----------------------------------------------------------------------------------------

_FLAG = re.compile(r"(--?(?:no)?config\.)([^=]+)(=?)(.*)", re.DOTALL)


def take_old_flags(arguments: Sequence[str]) -> tuple[list[str], list[OldValue]]:
    """Returns the arguments without the flags of merged settings, and the values of these flags.

    Flags of moved settings get the name of today. A flag without "=" has its value in the next
    argument.
    """
    others: list[str] = []
    old_values: list[OldValue] = []
    waiting = ""  # the merged setting that takes the next argument as its value
    for argument in arguments:
        if waiting:
            old_values.append((waiting, argument))
            waiting = ""
            continue
        flag = _FLAG.match(argument)
        entry = None if flag is None else old_setting(flag[2])
        if flag is None or entry is None or isinstance(entry, Removed):
            others.append(argument)
        elif isinstance(entry, Moved):
            others.append(f"{flag[1]}{entry.to}{flag[3]}{flag[4]}")
        elif flag[3]:
            old_values.append((flag[2], flag[4]))
        else:
            waiting = flag[2]
    return others, old_values


def changes(name: str, setting: str) -> bool:
    """Returns whether the old flag `--config.NAME` changes a setting of today."""
    entry = old_setting(name)
    is_argument = name.startswith(f"{setting}.")
    return is_argument or (isinstance(entry, Merged) and entry.to == setting)


def put_old_value(config: Config, name: str, text: str) -> None:
    """Changes a config as the old flag `--config.NAME=TEXT` does. Raises UserError if it cannot."""
    entry = old_setting(name)
    assert isinstance(entry, Merged), f"{name=}"
    entry.put(config, name, text)
