"""Builds the model card of an export: a description of the model, its training and its results.

Both `python -m jzero.export` and the pushes of a run (`run.hub_pushes`) write a model card. The
card covers all stages of training that led to the model. It names models and data sets as the hub
does, and contains no directories of the machine that trained the model.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from jzero import config
from jzero.config.data_sources import split_sources
from jzero.files import JsonObject, parse_json, read_jsonl, read_text, split_commas, split_revision
from jzero.model import adapters, qwen
from jzero.model.base_model import BaseModel
from jzero.model.hub import is_on_hub, public_name
from jzero.problems import problem_sets, row_loader
from jzero.rollout.evaluation import evaluation_kinds
from jzero.run import history
from jzero.run.accuracy import accuracy_text
from jzero.run.history import Stage
from jzero.run.metrics import STEP_LINE
from jzero.tasks import suites
from jzero.types import JsonValue

CURVE_ROWS = 12  # approximate number of steps in the card's table

# The evaluations of a run by name ("before", "after", ...), each {"eval/accuracy": 0.5, ...}.
Evaluations = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class CardOptions:
    """The facts and options of one export that its card states.

    Attributes:
        workdir: the workdir of the run, with metrics.jsonl and versions.json.
        dtype: type of the exported weights.
        license: id of a license on the hub, such as apache-2.0.
        adapter: whether the export contains only the adapter.
        tags: tags in addition to the algorithm and the task of the run.
        language: languages of the model, such as en.
    """

    workdir: Path
    dtype: str
    license: str = "unknown"
    adapter: bool = False
    tags: tuple[str, ...] = ()
    language: tuple[str, ...] = ()


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
    options: CardOptions,
) -> ModelCard:
    """Returns the model card of the checkpoint `step`, with the `evaluations` up to that step."""
    stages = history.history_of(settings, step, base.directory)
    # Fine-tuning has the examples of a file, and no task whose problems were held out.
    subject = "held-out problems" if settings.sft is not None else held_out_subject(settings.task)
    verifier = settings.eval.verifier or settings.task.verifier
    accuracies = last_accuracies(
        evaluations, settings.eval, settings.rollout.temperature, subject, verifier
    )
    header = card_header(step, accuracies, stages, options)
    rows = read_jsonl(options.workdir / "metrics.jsonl")
    versions_file = options.workdir / "versions.json"
    versions = parse_json(read_text(versions_file), versions_file)
    license_note = ": the publisher of this model decides on it"
    values = CardValues(
        header=header.to_yaml(),
        model_name=str(header.model_name),
        subject=describe_weights(settings.model.adapter, base, options),
        base_model=stages[0].start or "random weights",
        stages=stages_list(stages, settings.train.steps),
        template=template_sentence(stages[-1], base),
        dtype=options.dtype,
        stop_tokens=" or ".join(str(token) for token in base.stop_tokens),
        data=data_section(stages),
        recipe=recipe_section(stages),
        evaluations=evaluations_section(evaluations, accuracies),
        # The run may have continued after this checkpoint.
        curve=curve_table([row for row in rows if row["step"] <= step]),
        versions=table(["", ""], versions.items()),
        license=f"`{options.license}`" + (license_note if options.license == "unknown" else ""),
    )
    text = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    return ModelCard(text.format(**vars(values)))


def describe_weights(adapter: config.AdapterConfig, base: BaseModel, options: CardOptions) -> str:
    """Returns a description of the weights that serves as the subject of a sentence."""
    millions = qwen.num_params(base.model) / 1e6
    model = f"a {base.model.model_type} model of {millions:.4g}M parameters"
    # The description starts the sentence.
    if not options.adapter:
        return f"A{model.removeprefix('a')}"
    millions = adapters.num_params(base.model, adapter) / 1e6
    return f"A LoRA adapter of rank {adapter.rank} with {millions:.4g}M parameters for {model}"


def card_header(
    step: int,
    accuracies: Sequence["Measured"],
    stages: Sequence[Stage],
    options: CardOptions,
) -> ModelCardData:
    """Returns the metadata of the card, which the hub parses."""
    results = []
    for measured in accuracies:
        # Only published test sets have a hub id. Readers take the name of a data set in the
        # metadata for the benchmark, so accuracies on local files and on held-out problems are only
        # in the text of the card.
        if not measured.hub_id:
            continue
        results.append(
            EvalResult(
                task_type="text-generation",
                dataset_type=measured.hub_id,
                dataset_name=measured.subject,
                dataset_split=measured.split,
                metric_type="accuracy",
                metric_value=measured.value,
                metric_name=f"accuracy, {measured.decoding}",
                metric_args=measured.details(),
            )
        )
    # The start of the last stage or, if that model is not public, of an earlier stage.
    starts = [stage.start for stage in reversed(stages) if is_on_hub(stage.start)]
    data = unique(name for stage in stages for name in stage.data)
    return ModelCardData(
        model_name=model_name(stages, step),
        license=options.license,
        library_name="peft" if options.adapter else "transformers",
        pipeline_tag="text-generation",
        base_model=split_revision(starts[0])[0] if starts else None,
        datasets=[split_revision(name)[0] for name in data if is_on_hub(name)] or None,
        tags=unique([*card_tags(stages), *options.tags]),
        language=list(options.language) or None,
        eval_results=results or None,
    )


def model_name(stages: Sequence[Stage], step: int) -> str:
    """Returns a name made of the first model, the last data, the last algorithm, and the step.

    The recipe's name is not used, because flags may have replaced its model and its data.
    """
    last = stages[-1]
    start = split_revision(stages[0].start)[0].rpartition("/")[2] or "jzero"
    data = subjects(last)[0].rpartition("/")[2]
    parts = [start, Path(data).stem if is_file_name(data) else data, last.algorithm or "sft"]
    return "-".join([*parts, str(step)])


def is_file_name(name: str) -> bool:
    """Returns whether the name of a data set is a file name."""
    return name.endswith(problem_sets.FILE_TYPES)


def subjects(stage: Stage) -> list[str]:
    """Returns the data sets of a stage, or the task that generates its problems."""
    return list(stage.data) or [stage.task]


def is_the_tasks_own(stage: Stage) -> bool:
    """Returns whether a stage trained on the default data set of its task."""
    own = split_commas(problem_sets.DEFAULT_SETS.get(stage.task, ""))
    return bool(stage.task) and list(stage.data) == [history.without_config(name) for name in own]


def card_tags(stages: Sequence[Stage]) -> list[str]:
    """Returns the kinds, the algorithms and the tasks of all stages as tags for the hub."""
    tags = ["jzero", "jax"]
    for stage in stages:
        if stage.kind != history.DISTILLATION:
            tags.append("sft" if stage.kind == history.SFT else "reinforcement-learning")
        if stage.teachers:
            tags.append("distillation")
        if stage.algorithm:
            tags.append(stage.algorithm)
        # A local file in the format of GSM8K is not GSM8K, although its task has this name.
        if is_the_tasks_own(stage):
            tags.append(stage.task)
    return unique(tags)


def unique(names: Iterable[str]) -> list[str]:
    """Returns the names in their order, without duplicates."""
    return list(dict.fromkeys(names))


def stages_list(stages: Sequence[Stage], num_steps: int) -> str:
    """Returns a numbered list of the training stages, the last one with the run's total steps."""
    lines = []
    for number, stage in enumerate(stages, start=1):
        steps = str(stage.steps)
        # train.steps counts RL steps. It does not apply to SFT.
        if number == len(stages) and stage.kind != history.SFT:
            steps += f" of {num_steps}"
        lines.append(f"{number}. {describe_stage(stage, steps)}")
    return "\n".join(lines)


def describe_stage(stage: Stage, steps: str) -> str:
    """Returns a sentence about one stage of training."""
    start = stage.start or "random weights"
    if stage.kind != history.SFT:
        subject = ", ".join(subjects(stage))
        sentence = f"{steps} steps of {stage.kind} from {start}: {stage.algorithm} on {subject}"
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
    """Returns a sentence on the prompt format of the last stage."""
    if stage.template:
        return f"Prompts have the template `{stage.template}`."
    if base.tokenizer.chat_template:
        return "Prompts have the chat template of the tokenizer."
    return "Prompts are plain text, without a template."


def data_section(stages: Sequence[Stage]) -> str:
    """Returns a line for each stage with the data sets that it trained on."""
    lines = []
    for stage in stages:
        names = ", ".join(stage.data) or (
            "problems are made procedurally; none is taken from a data set"
        )
        lines.append(f"- {stage.kind}: {names}")
    return "\n".join(lines)


def recipe_section(stages: Sequence[Stage]) -> str:
    """Returns, for each stage, a table of the settings that differ from the defaults."""
    parts = []
    for number, stage in enumerate(stages, start=1):
        rows = []
        for name, value in stage.settings.items():
            # An unescaped pipe would end the table cell.
            escaped = value.replace("|", "\\|")
            rows.append((f"`{name}`", f"`{escaped}`"))
        parts.append(f"Stage {number}, {stage.kind}:\n\n{table(['setting', 'value'], rows)}")
    return "\n\n".join(parts)


@dataclass(frozen=True)
class Measured:
    """An accuracy of an evaluation, with everything that its value depends on."""

    name: str  # name of the metric: "eval/math500/accuracy"
    value: float
    stderr: float | None  # over problems
    num_problems: int | None
    samples: int  # responses per problem
    temperature: float
    subject: str  # the problems: name of a suite, a file or a task
    verifier: str
    hub_id: str = ""  # hub id of a published test set; "" for anything else
    split: str | None = None

    @property
    def decoding(self) -> str:
        """How the responses were decoded."""
        if self.temperature == 0:
            return "greedy"
        return f"avg@{self.samples} at temperature {self.temperature:g}"

    @property
    def heading(self) -> str:
        """The heading of the accuracy's column in the card's table."""
        count = "" if self.num_problems is None else f"{self.num_problems} problems, "
        return f"{self.subject}: {count}{self.decoding}"

    def details(self) -> JsonObject:
        """Returns the arguments of the metric in the card's metadata."""
        return {
            "problems": self.num_problems,
            "standard_error": self.stderr,
            "samples": self.samples,
            "temperature": self.temperature,
            "verifier": self.verifier,
        }


def last_accuracies(
    evaluations: Evaluations,
    settings: config.EvalConfig,
    temperature: float,
    held_out: str,
    verifier: str,
) -> list[Measured]:
    """Returns the accuracies of the last evaluation, one for each problem set and decoding.

    temperature: of the rollouts. held_out: a description of the run's held-out problems. verifier:
    the grader of evaluations.
    """
    if not evaluations:
        return []
    # Metrics have the names "kind/accuracy" and, for suites, "kind/suite/accuracy".
    last = list(evaluations.values())[-1]
    chosen = dict(suites.parse_suite(spec) for spec in split_sources(*settings.suites))
    kinds = evaluation_kinds(settings, temperature)
    measured = []
    for name, value in last.items():
        kind, *suite_names, metric = name.split("/")
        if metric != "accuracy" or kind not in kinds or len(suite_names) > 1:
            continue
        samples, kind_temperature = kinds[kind]
        suite = chosen.get(suite_names[0]) if suite_names else None
        prefix = name.removesuffix("accuracy")
        count = last.get(f"{prefix}problems")
        hub_id, split, subject = "", None, held_out
        if suite_names:
            source = history.without_config(suite.rows.path) if suite else ""
            subject = suite_names[0]
            # Only an unchanged entry of SUITES is the published test set.
            if suite and suites.SUITES.get(subject) == suite and is_on_hub(source):
                hub_id, split = split_revision(source)[0], suite.rows.split or "test"
            elif source:
                subject = f"{subject} ({public_name(source)})"
        measured.append(
            Measured(
                name=name,
                value=value,
                stderr=last.get(f"{prefix}stderr"),
                num_problems=None if count is None else int(count),
                samples=samples,
                temperature=kind_temperature,
                subject=subject,
                verifier=verifier,
                hub_id=hub_id,
                split=split,
            )
        )
    return measured


def held_out_subject(task: config.TaskConfig) -> str:
    """Returns a description of the held-out problems of a run's task."""
    selection = row_loader.selection_of(task)
    held_out = [rows for rows in selection.held_out if rows.path] or selection.train
    names = [public_name(history.without_config(rows.path)) for rows in held_out]
    return f"held-out problems of {', '.join(names) or task.name}"


def evaluations_section(evaluations: Evaluations, accuracies: Sequence[Measured]) -> str:
    """Returns a note with the accuracies and losses of all evaluations; "" without evaluations."""
    if not evaluations:
        return ""
    losses = [name for name in list(evaluations.values())[-1] if name == "eval/loss"]
    rows = []
    for evaluation, values in evaluations.items():
        cells = [format_number(values.get(name), ".3f") for name in losses]
        for measured in accuracies:
            prefix = measured.name.removesuffix("accuracy")
            share = values.get(measured.name)
            count, error = values.get(f"{prefix}problems"), values.get(f"{prefix}stderr")
            cells.append("" if share is None else accuracy_text(share, count, error))
        rows.append([evaluation, *cells])
    notes = []
    if losses:
        notes.append("`eval/loss` is the mean loss of a token of held-out examples.")
    if accuracies:
        grader = accuracies[0].verifier
        notes.append(
            "Accuracy, with its standard error over problems. Responses are graded by "
            f"`{grader}` of jzero."
        )
    note = "\n".join(notes)
    headings = [*losses, *(measured.heading for measured in accuracies)]
    return f"\n{note}\n\n{table(['', *headings], rows)}\n"


def curve_table(rows: Sequence[JsonObject]) -> str:
    """Returns a table of the main metrics at about CURVE_ROWS steps, including the last."""
    names = [name for name in STEP_LINE if any(name in row for row in rows)]
    every = 1 + len(rows) // CURVE_ROWS
    # Counted from the end, so that the last step is always shown.
    shown = rows[::-every][::-1]
    lines = []
    for row in shown:
        lines.append([row["step"], *(format_number(row.get(name), ".4g") for name in names)])
    return table(["step", *(STEP_LINE[name].label for name in names)], lines)


def format_number(number: float | None, form: str) -> str:
    """Returns the number as text, or "" for None."""
    return "" if number is None else format(number, form)


def table(header: Sequence[str], rows: Iterable[Sequence[JsonValue]]) -> str:
    """Returns a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in rows:
        lines.append("| " + " | ".join(str(cell) for cell in row) + " |")
    return "\n".join(lines)
