"""Writes docs/reference/ from the code: `python docs/reference.py`.

The pages list every setting, every metric, every recipe and every published run that a recipe
follows. `--check` writes nothing, and fails if a page differs from the code; a test does the same.
"""

import argparse
import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for benchmarks, which are not part of the package

from benchmarks.published.settings import RUNS, PublishedRun, Row  # noqa: E402
from jzero import config  # noqa: E402
from jzero.config import describe  # noqa: E402
from jzero.fields import (  # noqa: E402
    bounds_of,
    choices_of,
    fields_of,
    help_of,
    is_part,
    part_name,
)
from jzero.run import doctor, metrics  # noqa: E402
from jzero.tasks import TASKS  # noqa: E402

PAGES = ROOT / "docs" / "reference"
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
REMARKS_BEGIN = "<!-- made by docs/reference.py from jzero/run/doctor.py -->"
REMARKS_END = "<!-- end of the made table -->"
MADE_BY = "<!-- made by docs/reference.py: change the code and run it again -->\n"


def cell(text: str) -> str:
    """Returns a text for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


# -- Settings --------------------------------------------------------------------------------------

SETTINGS_HEAD = f"""# Settings

{MADE_BY}
A recipe sets these fields in Python, and the command line as `--config.NAME=VALUE`. A tuple takes
the flag once for each item; a flag without a value empties it. The defaults below are those of the
schema; a recipe has its own. [start.md](../start.md#settings-to-choose-for-your-model) explains
which settings to choose for a model.

0 turns a number off, and an empty text turns a name off, unless the description says otherwise."""


def settings_page() -> str:
    """Returns the page of all settings, with a table for each section and each part."""
    rows: dict[str, list[str]] = {}
    parts: dict[str, list[str]] = {}  # the tables of parts, after the table of their section
    for setting in config.list_settings(config.Config()):
        if setting.part:
            continue
        section, _, _ = setting.name.rpartition(".")
        rows.setdefault(section, []).append(setting_row(setting))
        if setting.parts:
            parts.setdefault(section, []).append(parts_table(setting))
    tables = []
    for section, section_rows in rows.items():
        tables.append("\n".join([settings_heading(section), *section_rows]))
        tables += parts.get(section, [])
    return "\n\n".join([SETTINGS_HEAD, *tables, *option_tables()]) + "\n"


def option_tables() -> Iterator[str]:
    """Yields a table of `task.options` for each task whose options have descriptions."""
    for name, task in TASKS.items():
        if task.options is None:
            continue
        rows = [
            setting_row(config.Setting(option, field.default, field))
            for option, field in fields_of(task.options).items()
            if field.description
        ]
        if rows:
            head = "| option | default | meaning |\n|---|---|---|"
            yield "\n".join([f"## `task.options` of `{name}`\n\n{head}", *rows])


def parts_table(setting: config.Setting) -> str:
    """Returns a table of the parts that a setting may have, with their arguments."""
    lines = [
        f"### `{setting.name}`",
        "",
        "| part | argument | default | meaning |",
        "|---|---|---|---|",
    ]
    for part in setting.parts:
        meaning = (part.__doc__ or "").partition("\n\n")[0] if part else "No part."
        lines.append(f"| `{part_name(part)}` | | | {cell(' '.join(meaning.split()))} |")
        for argument in describe.arguments_of_part(setting.name, part) if part else []:
            name = argument.name.removeprefix(f"{setting.name}.")
            meaning = " ".join([" ".join(help_of(argument.field).split()), *bounds(argument)])
            default = f"`{shown(argument)}`" if shown(argument) else ""
            lines.append(f"| | `{name}` | {cell(default)} | {cell(meaning)} |")
    return "\n".join(lines)


def settings_heading(section: str) -> str:
    """Returns the heading of a section, its docstring, and the head of its table."""
    value: object = config.Config()
    for name in section.split(".") if section else []:
        value = getattr(value, name)
    sentence = (type(value).__doc__ or "").partition("\n\n")[0].replace("\n", " ")
    title = f"`{section}`" if section else "The run"
    head = "| setting | default | meaning |\n|---|---|---|"
    return f"## {title}\n\n{' '.join(sentence.split())}\n\n{head}"


def setting_row(setting: config.Setting) -> str:
    description = " ".join(help_of(setting.field).split())
    facts = [description, *bounds(setting)]
    default = f"`{shown(setting)}`" if shown(setting) else ""
    return f"| `{setting.name}` | {cell(default)} | {cell(' '.join(facts))} |"


def shown(setting: config.Setting) -> str:
    """Returns a default as the command line takes it."""
    if isinstance(setting.value, tuple):
        return ", ".join(str(item) for item in setting.value)
    return describe.shown_default(setting)


def bounds(setting: config.Setting) -> Iterator[str]:
    """Yields the choices and the bounds of a setting that its description does not imply."""
    if setting.parts:
        yield f"One of {', '.join(f'`{part_name(part)}`' for part in setting.parts)}."
    if choices := choices_of(setting.field):
        yield f"One of {', '.join(f'`{choice}`' for choice in choices if choice)}."
    limits = [limit for limit in bounds_of(setting.field) if limit != "at least 0"]
    if limits:
        yield f"{', '.join(limits).capitalize()}."


# -- Metrics ---------------------------------------------------------------------------------------

METRICS_HEAD = f"""# Metrics

{MADE_BY}
Every step of a run appends one line to `metrics.jsonl` in its workdir. The same numbers go to
TensorBoard and, if configured, to Weights & Biases and Trackio
([start.md](../start.md#watch-a-run)).

```json
{{"step": 12, "reward/mean": 0.312, "reward/accuracy": 0.25, "time/step": 9.4}}
```

A run writes the metrics that its settings give a meaning: `async/...` needs asynchronous rollouts,
`critic/...` an algorithm with a critic. In a name, `<word>` stands for any text and `[...]` for a
part that may be absent. [Troubleshooting](../troubleshooting.md) explains which metrics to look at
when a run does not learn."""

# The heading of each group of metrics, and what all of its metrics have in common.
GROUPS = {
    "reward": ("Rewards", ""),
    "rollout": ("Sampling", ""),
    "turns": ("Episodes of several turns", ""),
    "<task>": (
        "Rows of different tasks",
        "`task.name=mixed` ([data](../data-and-rewards.md#a-task-for-each-row)) has these "
        "metrics for each task that rows of the step name, as in `reward/mean/code`.",
    ),
    "async": ("Asynchronous rollouts", "See [scale.md](../scale.md#asynchronous-rollouts)."),
    "jobs": ("Separate jobs", "See [clusters.md](../clusters.md#samplers-as-separate-jobs)."),
    "grade": ("Grading", ""),
    "tools": (
        "Tools",
        "A step in which no tool was called has none of these: see "
        "[environments.md](../environments.md#tools).",
    ),
    "agent": (
        "Agents",
        "Metrics of `task.name=agent`: see [agents.md](../agents.md#requests-become-a-tree).",
    ),
    "sandbox": (
        "Sandbox",
        "Metrics of `task.name=code`; `sandbox/level` is also a metric of the tool `python`: "
        "see [environments.md](../environments.md#the-sandbox).",
    ),
    "experts": (
        "Experts",
        "Metrics of MoE models: see [models.md](../models.md#mixtures-of-experts-moe).",
    ),
    "mtp": (
        "The head for drafts",
        "Metrics of runs with `rollout.draft=mtp` that train the head: see "
        "[architecture.md](../architecture.md#the-decoder). They count the tokens after the first "
        "of a response.",
    ),
    "policy": (
        "Policy",
        "Means over the tokens that the step trained on. Responses that add exactly nothing to "
        "the gradient are not computed again and are in none of these means; `update/left_out` "
        "is their share. They are the groups whose scores are all equal, unless the loss has a "
        "KL term or an entropy bonus, or the algorithm has a critic. A step that trains on no "
        "token has none of these metrics.",
    ),
    "distill": (
        "Distillation",
        "Metrics of runs with a teacher ([algorithms.md](../algorithms.md#distillation)). Means"
        " are over the sampled tokens that the teacher has scored, before the first optimizer "
        "step.",
    ),
    "optimizer": ("Optimizer", ""),
    "critic": ("Critic", ""),
    "update": ("Packed batches", ""),
    "publish": ("Publishing", ""),
    "memory": ("Memory", ""),
    "sft": ("Supervised fine-tuning", ""),
    "eval": ("Evaluation", ""),
    "eval_greedy": ("Greedy evaluation", ""),
    "time": ("Time", ""),
    "compile": ("Compilation", ""),
}


def group_of(name: str) -> str:
    """Returns the key in GROUPS of a metric."""
    prefix = name.partition("/")[0].partition("[")[0]
    return "<task>" if name.endswith("<task>") and not prefix.startswith("eval") else prefix


def metrics_page() -> str:
    """Returns the page of all metrics, by their groups."""
    rows: dict[str, list[str]] = {group: [] for group in GROUPS}
    for name, metric in metrics.all_metrics().items():
        row = f"| `{name}` | {metric.unit} | {cell(metric.meaning)} |"
        rows[group_of(name)].append(row)

    parts = [METRICS_HEAD]
    for group, group_rows in rows.items():
        title, note = GROUPS[group]
        table = "\n".join(["| metric | unit | meaning |", "|---|---|---|", *group_rows])
        parts += [f"## {title}", *([note] if note else []), table]
    labels = [f"| {column.label} | `{name}` |" for name, column in metrics.STEP_LINE.items()]
    step_table = "\n".join(["| shown as | metric |", "|---|---|", *labels])
    note = "The terminal shows some metrics by shorter names, as many as 80 columns have room for:"
    parts += ["## The table of steps", note, step_table]
    return "\n\n".join(parts) + "\n"


# -- Recipes ---------------------------------------------------------------------------------------

RECIPES_HEAD = f"""# Recipes

{MADE_BY}
The docstring of each file in `configs/`: its commands, its presets, the hardware and the cost. A
preset follows the file after a colon, and an algorithm ([algorithms.md](../algorithms.md#presets))
after a comma: `--config configs/countdown.py:tiny,dr_grpo`. [Published runs](published-runs.md)
compares presets that follow a published run with its command."""


def recipes_page() -> str:
    """Returns the docstrings of all recipes."""
    parts = [RECIPES_HEAD]
    for path in sorted((ROOT / "configs").glob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        parts += [f"## `configs/{path.name}`", f"```text\n{docstring}\n```"]
    return "\n\n".join(parts) + "\n"


PUBLISHED_HEAD = f"""# Published runs

{MADE_BY}
Some presets follow a run that others have published. The tables hold every setting of the published
command that changes what is learned, and the defaults of the published code that the command does
not show, next to jzero's setting and the value of the preset. Flags of hardware, memory and logging
are left out. Each run has rows about its prompts, stop strings, verifier, reward values and
evaluation.

A row that **differs** says why; the docstring of the recipe lists these rows, too. A published
figure can be expected only of a run without such a row. Today every run has some, so the published
figures stand only in the docstrings of the recipes.

A preset of a published run computes its number of steps from passes over the problems
(`train.prompt_epochs`); `--config.train.steps=N` ends it earlier, and the schedule of the learning
rate with it. `configs/distill.py` follows no published run. [Data and
rewards](../data-and-rewards.md#published-prompts) explains how to use the published words of a
prompt."""


COLUMNS = ("published setting", "published value", "jzero", "value of the preset", "note")


def published_page() -> str:
    """Returns the page with a section for every published run."""
    return f"{PUBLISHED_HEAD}\n\n" + "\n".join(run_section(run) for run in RUNS)


def preset_config(recipe: str, preset: str) -> config.Config:
    """Returns the config of a preset of configs/RECIPE.py."""
    path = ROOT / f"configs/{recipe}.py"
    spec = importlib.util.spec_from_file_location(f"{recipe}_recipe", path)
    assert spec is not None and spec.loader is not None, f"{path=}"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(preset)


def find(settings: object, name: str) -> object:
    """Returns the setting with a dotted name, of data sources the argument of the first one."""
    setting, _, argument = name.rpartition(".")
    if setting.endswith("data"):
        sources = find(settings, setting)
        assert isinstance(sources, config.Sources), f"{name=}"
        first, *_ = sources
        return getattr(first, argument)
    for part in name.split("."):
        settings = getattr(settings, part)
    return settings


def run_section(run: PublishedRun) -> str:
    """Returns a heading, the source and a table of all rows of a run."""
    settings = preset_config(run.recipe, run.preset)
    lines = [
        f"## {run.title}",
        "",
        f"`--config configs/{run.recipe}.py:{run.preset}`. Source: {run.source}. "
        f"Prompts: `{run.prompt}`."
        if run.prompt
        else "Prompts: the text of the data.",
        "",
        markdown_row(*COLUMNS),
        markdown_row(*["---"] * len(COLUMNS)),
    ]
    for row in run.rows:
        value = as_a_reader_writes(find(settings, row.setting)) if row.setting else ""
        setting = f"`{row.setting}`" if row.setting else ""
        lines.append(markdown_row(flag(row), row.published, setting, value, note(row)))
    return "\n".join(lines) + "\n"


def markdown_row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def flag(row: Row) -> str:
    """Returns a flag as code, and a default, which is no flag, as text."""
    return row.flag[1:-1] if row.flag.startswith("(") else f"`{row.flag}`"


def note(row: Row) -> str:
    return f"**differs**: {row.note}" if row.differs else row.note


def as_a_reader_writes(value: object) -> str:
    if is_part(value):
        return part_name(type(value))
    if isinstance(value, tuple) and not isinstance(value, config.Sources):
        return ", ".join(repr(item).strip("'") for item in value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value) or "(its default)"


def pages() -> dict[str, str]:
    """Returns the text of every page by its file name."""
    return {
        "settings.md": settings_page(),
        "metrics.md": metrics_page(),
        "recipes.md": recipes_page(),
        "published-runs.md": published_page(),
    }


def troubleshooting_page() -> str:
    """Returns docs/troubleshooting.md with the table of the run doctor's remarks."""
    page = TROUBLESHOOTING.read_text(encoding="utf-8")
    before, begin, rest = page.partition(REMARKS_BEGIN)
    _, end, after = rest.partition(REMARKS_END)
    assert begin and end, f"{TROUBLESHOOTING} has lost its marks"
    return f"{before}{begin}\n{doctor.markdown_table()}\n{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a difference")
    args = parser.parse_args()
    all_pages = {PAGES / name: text for name, text in pages().items()}
    all_pages[TROUBLESHOOTING] = troubleshooting_page()
    for path, text in all_pages.items():
        if args.check:
            is_same = path.exists() and path.read_text(encoding="utf-8") == text
            if not is_same:
                name = path.relative_to(ROOT)
                sys.exit(f"{name} differs from the code: python docs/reference.py")
        else:
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
