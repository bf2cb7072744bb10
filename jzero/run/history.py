"""How a model came to be: the stages of training that led to it, for its model card.

Every export has a file `training_history.json` with the stages in their order. A run that starts
from such an export adds a stage of its own, so that a card can tell of supervised fine-tuning that
reinforcement learning followed. Names of data sets and models are those of the hub, or the last
part of a path: no directory of whoever made the run gets into the file.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from jzero import algorithms
from jzero.config import Config, flatten, to_json
from jzero.errors import UserError
from jzero.files import JsonObject, parse_json
from jzero.model.hub import public_name
from jzero.tasks import draws_examples, suites
from jzero.tasks.problem_sets import DEFAULT_SETS

FILE = "training_history.json"
SFT = "supervised fine-tuning"
RL = "reinforcement learning"
DISTILLATION = "on-policy distillation"  # whose rewards do not count

# Sections whose settings a run of the kind does not read.
UNUSED_SECTIONS = {
    SFT: ("algorithm", "critic", "teacher"),
    RL: ("sft",),
    DISTILLATION: ("sft", "critic"),
}


@dataclass(frozen=True)
class Stage:
    """One run of training."""

    kind: str  # SFT, RL or DISTILLATION
    name: str  # of the preset
    steps: int  # that were made
    start: str  # public name of the model that it started from; "" for random weights
    data: list[str]  # public names of the sets; empty where a task makes its problems
    task: str  # "" where the examples do not come from a task
    template: str = ""  # of the prompts, where there is a task
    algorithm: str = ""  # of RL and distillation
    warm_start_steps: int = 0  # supervised steps before those of RL
    # Models that wrote the examples, or that scored the policy's responses.
    teachers: list[str] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)  # that differ from the defaults, as JSON


def history_of(config: Config, step: int, directory: Path | None) -> list[Stage]:
    """Returns the stages behind the checkpoint `step` of a run that started from `directory`."""
    earlier = read_history(directory) if directory else []
    return [*earlier, stage_of(config, step)]


def read_history(directory: Path) -> list[Stage]:
    """Returns the stages behind the model in `directory`; none where jzero did not train it.

    Raises UserError where the file is damaged.
    """
    path = directory / FILE
    if not path.is_file():
        return []
    try:
        stages = parse_json(path.read_text(encoding="utf-8"), path)["stages"]
        return [Stage(**stage) for stage in stages]
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} is not a training history of jzero: {error}") from None


def history_json(stages: Sequence[Stage]) -> str:
    """Returns the content of the file."""
    return json.dumps({"stages": [asdict(stage) for stage in stages]}, indent=1) + "\n"


def stage_of(config: Config, step: int) -> Stage:
    """Returns the stage that a run with these settings is after `step` steps."""
    kind = kind_of(config)
    is_sft = kind == SFT
    if is_sft:
        sources = suites.split_commas(config.sft.data)
        task = next((source for source in sources if draws_examples(source)), "")
    else:
        sources = suites.split_commas(config.task.data or DEFAULT_SETS.get(config.task.name, ""))
        task = config.task.name
    sets = [source for source in sources if not is_sft or not draws_examples(source)]
    return Stage(
        kind=kind,
        name=config.name,
        steps=step,
        start=public_name(config.model.path),
        data=[public_name(without_config(name)) for name in sets],
        task=task,
        template=public_name(config.task.template) if task else "",
        algorithm="" if is_sft else config.algorithm.name,
        warm_start_steps=0 if is_sft else config.warm_start.steps,
        teachers=teachers_of(sets) if is_sft else names_of_teacher(config),
        settings=changed_settings(config, kind),
    )


def kind_of(config: Config) -> str:
    """Returns the kind of training that a run with these settings is."""
    if config.sft.data:
        return SFT
    has_teacher = algorithms.needs_teacher(config.algorithm)
    is_distillation = has_teacher and config.algorithm.advantage == "zero"
    return DISTILLATION if is_distillation else RL


def names_of_teacher(config: Config) -> list[str]:
    """Returns the public name of the teacher in a list; an empty list without a teacher."""
    if not algorithms.needs_teacher(config.algorithm):
        return []
    teacher = config.teacher
    names = {
        "model": public_name(teacher.path or config.model.path),
        "policy": "the policy itself",
        "reference": "its own reference policy",
        "server": public_name(teacher.model) or "the model of a server",
    }
    name = names[teacher.kind]
    if teacher.adapter:
        name += f" with the adapter {public_name(teacher.adapter)}"
    return [f"{name} behind another prompt" if teacher.prompt else name]


def without_config(source: str) -> str:
    """Returns the name of a set without the config that `config@id` names."""
    return source.rpartition("@")[2]


def teachers_of(sources: Sequence[str]) -> list[str]:
    """Returns the models that answered the sets which `python -m jzero.generate` wrote here.

    The command ties its file to its settings by a hidden directory beside the file.
    """
    teachers: list[str] = []
    for source in sources:
        path = Path(source)
        settings = path.with_name(f".{path.name}") / "config.json" if path.name else path
        if path.is_file() and settings.is_file():
            command = parse_json(settings.read_text(encoding="utf-8"), settings)
            teacher = public_name(command["config"]["model"]["path"])
            if teacher not in teachers:
                teachers.append(teacher)
    return teachers


def changed_settings(config: Config, kind: str) -> dict[str, str]:
    """Returns the settings that differ from the defaults and that a run of this kind reads."""
    values = flat_values(json.loads(to_json(config)))
    defaults = flat_values(json.loads(to_json(Config())))
    unused = UNUSED_SECTIONS[kind]
    return {
        name: value
        for name, value in sorted(values.items())
        if value != defaults.get(name) and name.split(".")[0] not in unused
    }


def flat_values(settings: JsonObject) -> Mapping[str, str]:
    """Returns {"section.field": value as JSON}, with public names in place of paths."""
    values: dict[str, str] = {}
    for name, value in flatten(settings).items():
        values[name] = json.dumps(public_text(value) if isinstance(value, str) else value)
    return values


def public_text(value: str) -> str:
    """Returns a setting's text with public names in place of the paths of a list of sources."""
    parts = value.split(",")
    is_text = any(character.isspace() for character in value)  # such as a system prompt
    if is_text and not any(os.path.exists(part) for part in parts):
        return value
    return ",".join(public_name(part) for part in parts)
