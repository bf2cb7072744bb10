"""`python -m jzero.export --workdir W --out DIR [--step N] [--adapter] [--push-to-hub USER/NAME [--revision BRANCH]]`

Exports a checkpoint of a run as a directory that `transformers` loads, with a model card. Where the
run trains an adapter, it is merged into its base in fp32 and rounded once; with --adapter it is
written alone, as a directory that `peft`, vLLM and SGLang load beside the base. The
command needs no accelerator, and it may read the workdir while the run goes on.
"""  # noqa: E501 (the first line is the usage that --help prints)

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import jax
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from jzero import cli, config
from jzero.errors import UserError
from jzero.files import JsonObject, read_jsonl
from jzero.model import adapters, hub, huggingface, peft, qwen
from jzero.model.hub import is_on_hub
from jzero.run import history
from jzero.run.base_model import BaseModel, read_base_model
from jzero.run.checkpoint import Checkpoints
from jzero.run.export_model import export_model
from jzero.run.frozen_base import base_directory, check_base, is_in_workdir
from jzero.run.history import Stage
from jzero.run.metrics import METRICS, STEP_LINE
from jzero.run.record import base_of, evaluations_of
from jzero.types import JsonValue

# What an export is made of.
EXPORTED = (
    "*.safetensors",
    "*.jinja",
    "README.md",
    peft.CONFIG,
    "added_tokens.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "model.safetensors.index.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    history.FILE,
    "vocab.json",
)

CURVE_ROWS = 12  # about so many steps of a run are in the card's table

# The evaluations of a run by name ("before", "after", ...), each {"eval/accuracy": 0.5, ...}.
Evaluations = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Options:
    """The flags of the command."""

    workdir: Path
    out: Path
    step: int | None = None  # None: the newest checkpoint
    dtype: str = "float32"
    license: str = "unknown"
    adapter: bool = False  # write the adapter alone, and not the model that it is merged into
    force: bool = False
    push_to_hub: str | None = None  # "user/name" of a model on the hub
    revision: str | None = None  # branch of that model


def run(options: Options) -> str:
    """Exports a checkpoint; returns the directory, or the address on the hub after a push."""
    check(options)
    settings, checkpoints = open_workdir(options.workdir)
    steps = checkpoints.steps()
    if not steps or options.step not in (None, *steps):
        raise UserError(
            f"--step={options.step}: {options.workdir} has checkpoints of steps {steps}"
        )
    step = steps[-1] if options.step is None else options.step
    base = read_base_model(settings.model)
    name_of_base = check_adapter(options, settings, base) if options.adapter else ""
    items, record = checkpoints.read_items(step, {"params": trained_params(settings, base)})
    try:
        evaluations = evaluations_of(record)
        expected_base = base_of(record)
    except ValueError as error:
        raise checkpoints.damaged(step, error) from None
    if settings.model.adapter.rank:
        check_base(settings, base_directory(settings, base, options.workdir), expected_base)

    # The directory gets its name when it is complete.
    unfinished = options.out.with_name(f".{options.out.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    if options.adapter:
        export_adapter(unfinished, settings, base, name_of_base, items["params"], options.dtype)
    else:
        params = whole_model(settings, base, options.workdir, items["params"])
        stages = history.history_of(settings, step, base.directory)
        export_model(unfinished, base, settings.rollout, params, options.dtype, stages)
    card = make_card(settings, step, evaluations, base, options)
    card.save(unfinished / "README.md")
    shutil.rmtree(options.out, ignore_errors=True)
    os.replace(unfinished, options.out)

    if options.push_to_hub:
        return hub.push(options.out, options.push_to_hub, options.revision, options.force)
    return str(options.out)


def trained_params(settings: config.Config, base: BaseModel) -> qwen.Params:
    """Returns the shapes of what a checkpoint of the run holds: the model, or an adapter."""
    adapter = settings.model.adapter
    return adapters.abstract(base.model, adapter) if adapter.rank else qwen.abstract(base.model)


def whole_model(
    settings: config.Config,
    base: BaseModel,
    workdir: Path,
    trained: qwen.Params,
) -> qwen.Params:
    """Returns the parameters of the whole model: `trained`, or the base with this adapter.

    The base has the type that the run computed with, so that what is exported is what was trained.
    """
    adapter = settings.model.adapter
    if not adapter.rank:
        return trained
    directory = base_directory(settings, base, workdir)
    frozen = huggingface.load(directory, base.model, dtype=settings.model.dtype)
    return adapters.join(frozen, trained, adapter.scale)


def check_adapter(options: Options, settings: config.Config, base: BaseModel) -> str:
    """Returns the name of the base for adapter_config.json: an id of the hub, or a directory.

    Raises UserError if the run has no adapter, or would push one whose base nobody else has.
    """
    path = settings.model.path
    if not settings.model.adapter.rank:
        raise UserError(
            f"--adapter: the run in {options.workdir} trains the whole model: leave out --adapter"
        )
    if is_on_hub(path) and not is_in_workdir(settings):
        return path
    directory = base_directory(settings, base, options.workdir).absolute()
    if options.push_to_hub:
        raise UserError(
            f"--adapter: the base is the directory {directory}, which is not on the hub: leave out "
            "--adapter and push the merged model, or leave out --push-to-hub"
        )
    return str(directory)


def export_adapter(
    directory: Path,
    settings: config.Config,
    base: BaseModel,
    name_of_base: str,
    adapter: qwen.Params,
    dtype: str,
) -> None:
    """Writes an adapter and the tokenizer that it was trained with."""
    peft.save(
        directory, base.model, settings.model.adapter, adapter, base=name_of_base, dtype=dtype
    )
    base.tokenizer.save_pretrained(str(directory))


def check(options: Options) -> None:
    """Raises UserError for flags that do not go together, or that would overwrite something."""
    if options.out.exists():
        if not options.force:
            raise UserError(
                f"--out {options.out} exists: give another, "
                "or --force to replace what was exported there"
            )
        others = files_of_others(options.out)
        if others:
            raise UserError(
                f"--out {options.out} holds {others[0]}, which no export writes: give another "
                "directory, --force replaces nothing but an earlier export"
            )
    if options.revision and not options.push_to_hub:
        raise UserError(
            f"--revision={options.revision} is a branch on the hub: give --push-to-hub, too"
        )


def files_of_others(directory: Path) -> list[str]:
    """Returns the names in `directory` that an export does not write, or its own name for a file.

    An export has files only, so that a workdir, with its folders, is never taken for one.
    """
    if not directory.is_dir():
        return [directory.name]
    names = sorted(path.name for path in directory.iterdir())
    return [name for name in names if not is_exported(directory / name)]


def is_exported(path: Path) -> bool:
    """Says whether a file has a name that an export writes: weights, JSON, tokenizer, card."""
    return path.is_file() and any(fnmatch(path.name, pattern) for pattern in EXPORTED)


def open_workdir(workdir: Path) -> tuple[config.Config, Checkpoints]:
    """Returns the settings and the checkpoints of a run, for reading."""
    try:
        path = workdir / "config.json"
        settings = config.from_json(path.read_text(encoding="utf-8"), str(path))
        return settings, Checkpoints(workdir, keep=None)
    except (OSError, ValueError) as error:
        raise UserError(
            f"--workdir {workdir} has no run of this version of jzero: {error}"
        ) from None


# -- The model card --------------------------------------------------------------------------------


@dataclass(frozen=True)
class CardValues:
    """The placeholders of card.md, as Markdown."""

    header: str  # YAML, read by the hub
    model_name: str
    subject: str  # the beginning of the first sentence
    base_model: str
    stages: str
    template: str
    dtype: str
    stop_tokens: str
    data: str
    recipe: str
    evaluations: str
    curve: str
    versions: str
    license: str


def make_card(
    settings: config.Config,
    step: int,
    evaluations: Evaluations,
    base: BaseModel,
    options: Options,
) -> ModelCard:
    """Returns the model card of the checkpoint `step`.

    The card tells of all stages of training that led to the model. It names models and data sets of
    the hub, and no directories of whoever made the run.
    """
    stages = history.history_of(settings, step, base.directory)
    header = card_header(settings, step, evaluations, stages, options)
    rows = read_jsonl(options.workdir / "metrics.jsonl")
    versions_json = (options.workdir / "versions.json").read_text(encoding="utf-8")
    license_note = ": whoever publishes this model says which"
    values = CardValues(
        header=header.to_yaml(),
        model_name=str(header.model_name),
        subject=describe_weights(settings, base, options),
        base_model=stages[0].start or "random weights",
        stages=stages_list(stages, settings),
        template=template_sentence(stages[-1], base),
        dtype=options.dtype,
        stop_tokens=" or ".join(str(token) for token in base.stop_tokens),
        data=data_section(stages),
        recipe=recipe_section(stages),
        evaluations=evaluations_section(settings, evaluations),
        curve=curve_table([row for row in rows if row["step"] <= step]),
        versions=table(["", ""], json.loads(versions_json).items()),
        license=f"`{options.license}`" + (license_note if options.license == "unknown" else ""),
    )
    text = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    return ModelCard(text.format(**vars(values)))


def describe_weights(settings: config.Config, base: BaseModel, options: Options) -> str:
    """Returns what the weights are, as the subject of a sentence."""
    millions = qwen.num_params(base.model) / 1e6
    model = f"a {base.model.model_type} model of {millions:.4g}M parameters"
    if not options.adapter:
        return f"A{model.removeprefix('a')}"
    adapter = settings.model.adapter
    millions = adapters.num_params(base.model, adapter) / 1e6
    return f"A LoRA adapter of rank {adapter.rank} with {millions:.4g}M parameters for {model}"


def card_header(
    settings: config.Config,
    step: int,
    evaluations: Evaluations,
    stages: Sequence[Stage],
    options: Options,
) -> ModelCardData:
    """Returns the part of the card that the hub reads."""
    results = []
    for name, accuracy in last_accuracies(evaluations).items():
        suite = (name.split("/")[1:-1] or [settings.task.name])[0]
        results.append(
            EvalResult(
                task_type="text-generation",
                dataset_type=suite,
                dataset_name=suite,
                metric_type="accuracy",
                metric_value=accuracy,
                metric_name=name,
            )
        )
    # The model that the last stage started from or, if that is in no public place, an earlier one.
    starts = [stage.start for stage in reversed(stages) if is_on_hub(stage.start)]
    data = unique(name for stage in stages for name in stage.data)
    return ModelCardData(
        model_name=f"{settings.name or 'jzero'}-{step}",
        license=options.license,
        library_name="peft" if options.adapter else "transformers",
        pipeline_tag="text-generation",
        base_model=starts[0] if starts else None,
        datasets=[name for name in data if is_on_hub(name)] or None,
        tags=card_tags(stages),
        eval_results=results or None,
    )


def card_tags(stages: Sequence[Stage]) -> list[str]:
    """Returns the kinds, algorithms and tasks of all stages as tags of the hub."""
    tags = ["jzero", "jax"]
    for stage in stages:
        if stage.kind != history.DISTILLATION:
            tags.append("sft" if stage.kind == history.SFT else "reinforcement-learning")
        if stage.teachers:
            tags.append("distillation")
        tags += [name for name in (stage.algorithm, stage.task) if name]
    return unique(tags)


def unique(names: Iterable[str]) -> list[str]:
    """Returns the names in their order, each of them once."""
    return list(dict.fromkeys(names))


def stages_list(stages: Sequence[Stage], settings: config.Config) -> str:
    """Returns a numbered list of the stages of training, the last with the steps of its run."""
    lines = []
    for number, stage in enumerate(stages, start=1):
        steps = str(stage.steps)
        if number == len(stages) and stage.kind != history.SFT:
            steps += f" of {settings.train.steps}"
        lines.append(f"{number}. {describe_stage(stage, steps)}")
    return "\n".join(lines)


def describe_stage(stage: Stage, steps: str) -> str:
    """Returns a sentence about a stage of training."""
    start = stage.start or "random weights"
    if stage.kind != history.SFT:
        sentence = f"{steps} steps of {stage.kind} from {start}: {stage.algorithm} on {stage.task}"
        if stage.teachers:
            sentence += f" with the teacher {' and '.join(stage.teachers)}"
        if stage.warm_start_steps:
            sentence += f", after {stage.warm_start_steps} supervised steps on examples of the task"
        return f"{sentence}."
    sources = list(stage.data)
    if stage.task:
        sources.append(f"examples of the task {stage.task}")
    sentence = f"{steps} steps of {stage.kind} from {start} on {', '.join(sources)}"
    if stage.teachers:
        sentence += f", which {' and '.join(stage.teachers)} wrote (distillation)"
    return f"{sentence}."


def template_sentence(stage: Stage, base: BaseModel) -> str:
    """Returns a sentence on the form of the prompts that the last stage trained on."""
    if stage.template:
        return f"Prompts have the template `{stage.template}`."
    if base.tokenizer.chat_template:
        return "Prompts have the chat template of the tokenizer."
    return "Prompts are plain text, without a template."


def data_section(stages: Sequence[Stage]) -> str:
    """Returns a line for each stage that says which data sets it trained on."""
    lines = []
    for stage in stages:
        names = ", ".join(stage.data) or (
            "problems are made procedurally; none is taken from a data set"
        )
        lines.append(f"- {stage.kind}: {names}")
    return "\n".join(lines)


def recipe_section(stages: Sequence[Stage]) -> str:
    """Returns a table for each stage of the settings that differ from the defaults."""
    parts = []
    for number, stage in enumerate(stages, start=1):
        rows = []
        for name, value in stage.settings.items():
            escaped = value.replace("|", "\\|")
            rows.append((f"`{name}`", f"`{escaped}`"))
        parts.append(f"Stage {number}, {stage.kind}:\n\n{table(['setting', 'value'], rows)}")
    return "\n\n".join(parts)


def last_accuracies(evaluations: Evaluations) -> dict[str, float]:
    """Returns the accuracies of the last evaluation."""
    if not evaluations:
        return {}
    last = list(evaluations.values())[-1]
    return {name: value for name, value in last.items() if name.endswith("accuracy")}


def evaluations_section(settings: config.Config, evaluations: Evaluations) -> str:
    """Returns a note, and the accuracies and losses of all evaluations; empty without any."""
    if not evaluations:
        return ""
    accuracies = list(last_accuracies(evaluations))
    losses = [name for name in list(evaluations.values())[-1] if name == "eval/loss"]
    rows = []
    for evaluation, values in evaluations.items():
        numbers = [format_number(values.get(name), ".3f") for name in (*losses, *accuracies)]
        rows.append([evaluation, *numbers])
    notes = []
    if losses:
        notes.append("`eval/loss` is the mean loss of a token of held-out examples.")
    if accuracies:
        notes.append(
            f"Accuracy on held-out problems: `eval` is the mean over {settings.eval.samples} "
            f"samples at temperature {settings.rollout.temperature}, `eval_greedy` is greedy."
        )
    note = "\n".join(notes)
    return f"\n{note}\n\n{table(['', *losses, *accuracies], rows)}\n"


def curve_table(rows: Sequence[JsonObject]) -> str:
    """Returns a table of the step line's metrics at about CURVE_ROWS steps, the last among them."""
    names = [name for name in STEP_LINE if any(name in row for row in rows)]
    every = 1 + len(rows) // CURVE_ROWS
    shown = rows[::-every][::-1]
    lines = []
    for row in shown:
        lines.append([row["step"], *(format_number(row.get(name), ".4g") for name in names)])
    return table(["step", *(METRICS[name].label for name in names)], lines)


def format_number(number: float | None, form: str) -> str:
    """Returns the number as text, and no text for None."""
    return "" if number is None else format(number, form)


def table(header: Sequence[str], rows: Iterable[Sequence[JsonValue]]) -> str:
    """Returns a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in rows:
        lines.append("| " + " | ".join(str(cell) for cell in row) + " |")
    return "\n".join(lines)


# -- The command -----------------------------------------------------------------------------------


def main() -> None:
    parser = cli.make_parser("jzero.export", __doc__)
    parser.add_argument("--workdir", required=True, type=Path, help="workdir of a run")
    parser.add_argument("--out", required=True, type=Path, help="directory to write")
    parser.add_argument("--step", type=int, help="step of a checkpoint; default the newest")
    parser.add_argument(
        "--dtype",
        choices=huggingface.DTYPES,
        default="float32",
        help="type of the weights; default float32, as trained",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write the run's adapter alone, in PEFT's format; default: merged into its base",
    )
    parser.add_argument(
        "--license",
        default="unknown",
        help="license of the model, as the hub names it: apache-2.0, ...",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace an earlier export, and push to a branch that exists",
    )
    parser.add_argument(
        "--push-to-hub", metavar="USER/NAME", help="model on the hub; created if there is none"
    )
    parser.add_argument(
        "--revision", help="branch to push to, created if there is none; default main"
    )
    args = parser.parse_args()
    options = Options(
        workdir=args.workdir,
        out=args.out,
        step=args.step,
        dtype=args.dtype,
        adapter=args.adapter,
        license=args.license,
        force=args.force,
        push_to_hub=args.push_to_hub,
        revision=args.revision,
    )
    jax.config.update("jax_platforms", "cpu")
    with cli.user_errors():
        print(run(options))


if __name__ == "__main__":
    main()
