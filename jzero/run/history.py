"""The training history of a model: the stages of training that led to it, for its model card.

Every export has a file `training_history.json` with the stages in order. A run that starts from
such an export appends its own stage, so that a model card can describe supervised fine-tuning
followed by reinforcement learning. Data sets and models have their hub names, or the last part of
their path: the file contains no directory of the machine that trained the model.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from jzero import algorithms, json_values
from jzero.config import Config, flatten, teachers, to_json
from jzero.config.data_sources import read_source, split_sources
from jzero.errors import UserError, reason_of
from jzero.files import JsonObject, parse_json, read_text
from jzero.model.hub import public_name
from jzero.problems import row_loader
from jzero.tasks import draws_examples
from jzero.types import JsonValue

FILE = "training_history.json"
MAX_TEXT = 1 << 20  # characters of a text of a stage
MAX_ITEMS = 1000  # data sets or teachers of a stage
SFT = "supervised fine-tuning"
RL = "reinforcement learning"
DISTILLATION = "on-policy distillation"  # rewards do not count in this stage

# Kind of stage -> config sections that it does not read.
UNUSED_SECTIONS = {
    SFT: ("hub", "algorithm", "critic", "teacher"),
    RL: ("hub", "sft"),
    DISTILLATION: ("hub", "sft", "critic"),
}


@dataclass(frozen=True)
class Stage:
    """One run of training."""

    kind: str  # SFT, RL or DISTILLATION
    name: str  # of the preset
    steps: int  # number of finished steps
    start: str  # public name of the model that it started from; "" for random weights
    data: list[str]  # public names of the data sets; empty if a task generates its problems
    task: str  # "" if the examples do not come from a task
    template: str = ""  # prompt template, if there is a task
    algorithm: str = ""  # for RL and distillation
    warm_start_steps: int = 0  # supervised steps before RL
    # Models that wrote the examples, or that scored the policy's responses.
    teachers: list[str] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)  # non-default settings, as JSON


def history_of(config: Config, step: int, directory: Path | None) -> list[Stage]:
    """Returns the stages that led to checkpoint `step` of a run that started from `directory`."""
    earlier = read_history(directory) if directory else []
    return [*earlier, stage_of(config, step)]


def read_history(directory: Path) -> list[Stage]:
    """Returns the stages of the model in `directory`; an empty list if jzero did not train it.

    Raises UserError if the file is damaged.
    """
    path = directory / FILE
    if not path.is_file():
        return []
    try:
        stages = parse_json(read_text(path), path)["stages"]
        return [_read_stage(stage) for stage in stages]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} is not a training history of jzero ({reason_of(error)}): restore or remove it"
        ) from None


def _read_stage(fields: object) -> Stage:
    """Returns a stage. Raises TypeError or ValueError if a field is missing or has another type."""
    stage = json_values.from_fields(Stage, fields)
    for name in ("kind", "name", "start", "task", "template", "algorithm"):
        json_values.bounded_text(getattr(stage, name), MAX_TEXT, name)
    for name in ("steps", "warm_start_steps"):
        json_values.bounded_int(getattr(stage, name), 0, 2**53, name)
    for name in ("data", "teachers"):
        for text in json_values.bounded_list(getattr(stage, name), MAX_ITEMS, name):
            json_values.bounded_text(text, MAX_TEXT, name)
    for text in json_values.as_object(stage.settings, "settings").values():
        json_values.bounded_text(text, MAX_TEXT, "settings")
    return stage


def history_json(stages: Sequence[Stage]) -> str:
    """Returns the content of `training_history.json`."""
    return json.dumps({"stages": [asdict(stage) for stage in stages]}, indent=1) + "\n"


def stage_of(config: Config, step: int) -> Stage:
    """Returns the stage of a run with these settings after `step` steps."""
    kind = kind_of(config)
    sft = config.sft
    is_sft = sft is not None
    # The sources of an SFT run can be data sets and tasks that generate examples.
    if sft is not None:
        sources = [rows.path for rows in sft.data]
        task = next((source for source in sources if draws_examples(source)), "")
    else:
        sources = [rows.path for rows in row_loader.selection_of(config.task).train]
        task = config.task.name
    warm = config.warm_start
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
        warm_start_steps=warm.steps if warm and not is_sft else 0,
        teachers=authors_of_sets(sets) if is_sft else teacher_names(config),
        settings=changed_settings(config, kind),
    )


def kind_of(config: Config) -> str:
    """Returns the kind of training for these settings: SFT, RL or DISTILLATION."""
    if config.sft is not None:
        return SFT
    has_teacher = algorithms.needs_teacher(config.algorithm)
    # With advantage=zero the rewards have no effect, so the teacher gives the only signal.
    is_distillation = has_teacher and isinstance(config.algorithm.advantage, algorithms.Zero)
    return DISTILLATION if is_distillation else RL


def teacher_names(config: Config) -> list[str]:
    """Returns a list with the public name of the teacher; an empty list without a teacher."""
    if not algorithms.needs_teacher(config.algorithm):
        return []
    teacher = config.teacher
    assert teacher is not None, "the algorithm needs a teacher"
    match teacher:
        case teachers.Model():
            name = public_name(teacher.path or config.model.path)
            if teacher.adapter:
                name += f" with the adapter {public_name(teacher.adapter)}"
        case teachers.Policy():
            name = "the policy itself"
        case teachers.Reference():
            name = "its own reference policy"
        case teachers.Server():
            name = public_name(teacher.model) or "the model of a server"
    return [f"{name} with another prompt" if teacher.prompt else name]


def without_config(source: str) -> str:
    """Returns the name of a data set without the config that `config@id` names."""
    return source.rpartition("@")[2]


def authors_of_sets(sources: Sequence[str]) -> list[str]:
    """Returns the models that wrote those data sets that `jzero.generate` made on this machine."""
    teachers: list[str] = []
    for source in sources:
        # `python -m jzero.generate` keeps its settings in a hidden directory next to its output
        # file.
        path = Path(source)
        settings = path.with_name(f".{path.name}") / "config.json" if path.name else path
        if path.is_file() and settings.is_file():
            command = parse_json(read_text(settings), settings)
            try:
                path_of_teacher = json_values.member(command, ("config", "model", "path"), str)
            except ValueError as error:
                raise UserError(f"{settings} is damaged ({error}): restore it") from None
            teacher = public_name(path_of_teacher)
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
    """Returns {"section.field": value as JSON}, with public names instead of paths."""
    values: dict[str, str] = {}
    for name, value in flatten(settings).items():
        values[name] = json.dumps(public_value(value))
    return values


def public_value(value: JsonValue) -> JsonValue:
    """Returns a value of a setting with public names instead of the paths in its texts."""
    if isinstance(value, str):
        return public_text(value)
    if isinstance(value, list):
        return [public_value(item) for item in value]
    return value


def public_source(item: str) -> str:
    """Returns rows(...), or NAME=rows(...), with a public name instead of its path."""
    name, equals, source = item.partition("=")
    if item.startswith("rows(") or not equals:
        name, equals, source = "", "", item
    rows = read_source("a data set", source)
    return f"{name}{equals}{replace(rows, path=public_name(rows.path))}"


def public_text(value: str) -> str:
    """Returns a setting's text with public names instead of the paths of a list of sources.

    A source may have a name in front of its path, as in `eval.suites=sums=FILE`.
    """
    if re.search(r"(^|[,=]\s*)rows\(", value):
        try:
            return ",".join(map(public_source, split_sources(value)))
        except UserError:  # a prompt
            pass
    parts = value.split(",")
    # Text with spaces may contain commas without being a list of paths.
    is_text = any(character.isspace() for character in value)  # such as a system prompt
    if is_text and not any(os.path.exists(part.rpartition("=")[2]) for part in parts):
        return value
    # Names of columns may follow the path: FILE:problem=question.
    names = []
    for part in parts:
        names.append("=".join(public_name(piece) for piece in part.split("=")))
    return ",".join(names)
