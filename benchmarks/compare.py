"""Runs `jzero.main` once for each of several runs and seeds, and prints a table of the results.

    python benchmarks/compare.py --out runs/algorithms \\
        --recipe configs/countdown.py:tiny-long --warm-start \\
        --run "grpo: ,grpo" --run "dr_grpo: ,dr_grpo --config.optimizer.lr=2e-4" \\
        --seeds 0 1 2 [--metrics eval/accuracy ...] [-- --config.section.field=value ...]

A run is "NAME: FLAGS". The flags are settings. A word that begins with a comma, such as `,grpo`, is
appended to the recipe, and `{NAME}` in a flag is the export of the run NAME with the same seed.
Settings after -- go to every run. With --warm-start, the recipe's warm start is made once, and all
runs begin from its export. `--warm-start ,grpo` makes it with another algorithm of the recipe.

A run with `--config.rollout.placement=jobs` gets --samplers processes of `python -m jzero.sample`,
and a store of its own next to its workdir.

A run writes to OUT/NAME-seedN. A run that was stopped resumes, and a finished run is not repeated.

Each cell is the mean over the seeds with its standard error. --metrics chooses the columns:

    eval/accuracy          an evaluation: before, after the warm start, and after RL
    eval/accuracy:each     the same evaluation at every step that had one
    policy/mismatch:mean   a metric of the steps: :first, :last, :mean or :sum
    reward/accuracy:by10   the means of a metric over every ten steps, or another number of them
    peak_rss_bytes         the peak of the process's resident memory
    checkpoint_bytes       the size of the checkpoints that the run has kept
    remarks                the number of remarks of jzero.run.doctor; they follow the table

The last column is the seconds of RL, without evaluations and the warm start.
"""

import argparse
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from job_processes import run_with_samplers, sampler_command

from jzero.files import JsonObject, read_jsonl
from jzero.run.metrics import find_metric

EVALUATIONS = {"before": "before", "after_warm_start": "warm start", "after": "after"}
JOBS = "--config.rollout.placement=jobs"
PHASES_BESIDES_RL = ("eval", "warm_start")
MIB = 2**20
REDUCTIONS = {"first": lambda values: values[0], "last": lambda values: values[-1]}
REDUCTIONS |= {"mean": np.mean, "sum": np.sum}


class Variant(NamedTuple):
    """One row of the table: a name, and what its runs add to the recipe and to the flags."""

    name: str
    recipe_suffix: str  # such as ",grpo"
    flags: list[str]


class FinishedRun(NamedTuple):
    """What a run has left in its workdir."""

    summary: JsonObject
    rows: list[JsonObject]  # the metrics of every step
    checkpoint_bytes: int


def parse_variant(text: str) -> Variant:
    """Reads "NAME: FLAGS"."""
    name, _, words = text.partition(":")
    flags = shlex.split(words)
    suffixes = [word for word in flags if word.startswith(",")]
    return Variant(name.strip(), "".join(suffixes), [word for word in flags if word[0] != ","])


def run(recipe: str, workdir: Path, flags: Sequence[str], num_samplers: int = 0) -> FinishedRun:
    """Runs or resumes `jzero.main`, with samplers if its decoder is separate jobs."""
    command = [sys.executable, "-m", "jzero.main", f"--config={recipe}", f"--workdir={workdir}"]
    command += flags
    if any(flag.startswith(JOBS) for flag in flags):
        jobs = workdir.with_name(f"{workdir.name}-jobs")
        command.append(f"--config.rollout.placement.store={jobs}/store")
        run_with_samplers(command, [sampler_command(jobs / "store")] * num_samplers, jobs)
    else:
        subprocess.run(command, check=True)
    summary = json.loads((workdir / "summary.json").read_text(encoding="utf-8"))
    files = [path for path in (workdir / "checkpoints").rglob("*") if path.is_file()]
    checkpoint_bytes = sum(path.stat().st_size for path in files)
    return FinishedRun(summary, read_jsonl(workdir / "metrics.jsonl"), checkpoint_bytes)


def warm_start(recipe: str, workdir: Path, flags: Sequence[str]) -> list[str]:
    """Makes the recipe's warm start, and returns the flags with which a run begins from it."""
    only_warm_start = [f"--config.{name}=0" for name in ("train.steps", "eval.problems")]
    run(recipe, workdir, [*flags, *only_warm_start, "--config.eval.every=0"])
    return [f"--config.model.path={workdir}/export-0", "--config.warm_start=none"]


def run_all(
    variants: Sequence[Variant],
    recipe: str,
    out: Path,
    seeds: Sequence[int],
    flags: Sequence[str],
    num_samplers: int,
) -> dict[str, list[FinishedRun]]:
    """Makes every run with every seed. Returns the runs of each variant, in the order of seeds."""
    finished: dict[str, list[FinishedRun]] = {variant.name: [] for variant in variants}
    for seed in seeds:
        exports: dict[str, str] = {}
        for variant in variants:
            workdir = out / f"{variant.name}-seed{seed}"
            all_flags = flags_of_run(variant, flags, exports, seed)
            result = run(recipe + variant.recipe_suffix, workdir, all_flags, num_samplers)
            exports[variant.name] = result.summary["export"]
            finished[variant.name].append(result)
    return finished


def flags_of_run(
    variant: Variant, shared: Sequence[str], exports: dict[str, str], seed: int
) -> list[str]:
    """Returns the flags of one run. A flag of the variant takes precedence over a shared one.

    `exports` are those of the earlier runs of the seed.
    """
    flags = [*shared, *variant.flags, f"--config.train.seed={seed}"]
    for name, export in exports.items():
        flags = [flag.replace(f"{{{name}}}", export) for flag in flags]
    return flags


# -- The table -------------------------------------------------------------------------------------


def figures(result: FinishedRun, column: str) -> dict[str, float]:
    """Returns the figures that one run has in a column, by their headings."""
    name, _, reduction = column.partition(":")
    if name == "checkpoint_bytes":
        return {name: result.checkpoint_bytes}
    if name == "peak_rss_bytes":
        return {name: result.summary[name]}
    if name == "remarks":
        return {name: len(result.summary["remarks"])}
    evaluations = result.summary["eval_all"]
    if not reduction:
        label = name.removesuffix("/accuracy")
        return {
            f"{label} {heading}": evaluations[when][name]
            for when, heading in EVALUATIONS.items()
            if name in evaluations.get(when, {})
        }
    if reduction == "each":
        by_step = {0: evaluations["before"][name]}
        by_step |= {row["step"]: row[name] for row in result.rows if name in row}
        return {f"step {step}": value for step, value in by_step.items()}
    if reduction.startswith("by"):
        return means_by_steps(result.rows, name, int(reduction.removeprefix("by")))
    values = [row[name] for row in result.rows if name in row]
    return {f"{name}, {reduction}": float(REDUCTIONS[reduction](values))} if values else {}


def means_by_steps(rows: Sequence[JsonObject], name: str, size: int) -> dict[str, float]:
    """Returns the means of a metric over every `size` steps, by their headings."""
    blocks: dict[int, list[float]] = {}
    for row in rows:
        if name in row:
            blocks.setdefault((row["step"] - 1) // size, []).append(row[name])
    return {
        f"{name}, steps {block * size + 1} to {(block + 1) * size}": float(np.mean(values))
        for block, values in blocks.items()
    }


def seconds_of_rl(summary: JsonObject) -> float:
    phases = summary["seconds_by_phase"].items()
    return sum(seconds for phase, seconds in phases if phase not in PHASES_BESIDES_RL)


def cell(values: Sequence[float], name: str) -> str:
    """Returns a mean with its standard error, shares in percent and bytes in MiB."""
    metric = find_metric(name)
    factor, form, unit = 1.0, ".4g", ""
    if metric is not None and metric.unit == "share":
        factor, form, unit = 100.0, ".1f", " %"
    elif name.endswith("bytes"):
        factor, form, unit = 1 / MIB, ",.1f", " MiB"
    array = np.array(values) * factor
    text = f"{array.mean():{form}}"
    if len(array) > 1:
        text += f" ± {array.std(ddof=1) / math.sqrt(len(array)):{form}}"
    return text + unit


def table(finished: dict[str, list[FinishedRun]], columns: Sequence[str]) -> str:
    """Returns the table as Markdown, with a row for each variant."""
    rows: dict[str, dict[str, str]] = {}
    headings: list[str] = []
    for name, results in finished.items():
        cells: dict[str, str] = {}
        for column in columns:
            of_seeds = [figures(result, column) for result in results]
            for heading in dict.fromkeys(name for figure in of_seeds for name in figure):
                # A step that trained on no token has no metrics of the policy.
                values = [figure[heading] for figure in of_seeds if heading in figure]
                cells[heading] = cell(values, column.partition(":")[0])
        seconds = [seconds_of_rl(result.summary) for result in results]
        cells["seconds of RL"] = f"{np.mean(seconds):.0f}"
        headings += [heading for heading in cells if heading not in headings]
        rows[name] = cells
    headings.remove("seconds of RL")
    headings.append("seconds of RL")
    lines = [markdown_row("run", *headings), "|---" * (len(headings) + 1) + "|"]
    for name, cells in rows.items():
        lines.append(markdown_row(name, *(cells.get(heading, "") for heading in headings)))
    return "\n".join(lines)


def remarks(finished: dict[str, list[FinishedRun]]) -> list[str]:
    """Returns a line for each remark about a run."""
    return [
        f"{name}: step {remark['step']}, {remark['name']}: {remark['sentence']}"
        for name, results in finished.items()
        for result in results
        for remark in result.summary["remarks"]
    ]


def markdown_row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of all workdirs")
    parser.add_argument("--recipe", required=True, help="FILE.py:PRESET of all runs")
    parser.add_argument("--run", action="append", required=True, type=parse_variant, dest="runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--warm-start",
        nargs="?",
        const="",
        metavar=",ALGORITHM",
        help="begin all runs from one warm start, which is made with this algorithm's preset",
    )
    parser.add_argument("--metrics", nargs="+", default=["eval/accuracy", "eval_greedy/accuracy"])
    parser.add_argument(
        "--samplers", type=int, default=2, help="of each run with rollout.placement=jobs"
    )
    parser.add_argument("settings", nargs="*", help="settings of all runs, after --")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse(sys.argv[1:])
    out = args.out.absolute()
    flags = list(args.settings)
    if args.warm_start is not None:
        start = warm_start(args.recipe + args.warm_start, out / "warm-start", flags)
        # The runs begin after the warm start, and its settings would contradict warm_start=none.
        flags = [flag for flag in flags if not flag.startswith("--config.warm_start")] + start
    finished = run_all(args.runs, args.recipe, out, args.seeds, flags, args.samplers)
    print(table(finished, args.metrics))
    if "remarks" in args.metrics:
        print(*remarks(finished), sep="\n")


if __name__ == "__main__":
    main()
