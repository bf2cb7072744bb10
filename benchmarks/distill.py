"""Compares on-policy distillation with RL alone, from the same student, on the tiny Countdown.

    python benchmarks/distill.py --teacher runs/countdown-tiny/export-50 --workdir runs/distill \\
        [--seeds 0 1 2] [--steps 50] [--every 10] [--names distill,grpo] [--lr distill=1e-3 ...] \\
        [-- --config.section.field=value ...]

The student of configs/distill.py:tiny is made once, by its warm start. Every algorithm trains it
with every seed, and a run that is finished is not repeated. The table has the accuracy on held-out
problems after every --every steps: the mean over seeds, and its standard error over seeds. Settings
after -- go to every run, that of the warm start included.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jzero.files import JsonObject, read_jsonl

ROOT = Path(__file__).resolve().parents[1]
METRIC = "eval/accuracy"


def run(algorithm: str, workdir: Path, *settings: str) -> JsonObject:
    """Runs or resumes `jzero.main`, and returns the summary of the run."""
    command = [sys.executable, "-m", "jzero.main"]
    command += [f"--config=configs/distill.py:tiny,{algorithm}", f"--workdir={workdir}", *settings]
    subprocess.run(command, cwd=ROOT, check=True)
    return json.loads((workdir / "summary.json").read_text(encoding="utf-8"))


def accuracies(workdir: Path, summary: JsonObject) -> dict[int, float]:
    """Returns the accuracy of a run by step: before the first, and at every evaluation."""
    found = {0: summary["eval_all"]["before"][METRIC]}
    for row in read_jsonl(workdir / "metrics.jsonl"):
        if METRIC in row:
            found[row["step"]] = row[METRIC]
    return found


def mean_and_error(values: Sequence[float]) -> str:
    """Returns a mean in percent, with its standard error over the values if there are several."""
    percent = 100 * np.array(values)
    text = f"{percent.mean():.1f}"
    if len(values) > 1:
        text += f" ± {percent.std(ddof=1) / math.sqrt(len(values)):.1f}"
    return f"{text} %"


def table_row(name: str, seconds: float, curves: Sequence[Mapping[int, float]]) -> str:
    cells = [name, *(mean_and_error([curve[step] for curve in curves]) for step in curves[0])]
    return f"| {' | '.join([*cells, f'{seconds:.0f}'])} |"


def rates_of(flags: Sequence[str]) -> dict[str, str]:
    """Returns {"distill": "1e-3"} of --lr distill=1e-3."""
    return dict(flag.split("=", 1) for flag in flags)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--teacher", type=Path, required=True, help="export of a run of countdown")
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--names", default="distill,grpo", help="algorithms, with commas")
    parser.add_argument("--steps", type=int, default=50, help="RL steps of every run")
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lr", nargs="+", default=[], metavar="NAME=LR", help="learning rates")
    parser.add_argument("settings", nargs="*", help="settings for jzero.main, after --")
    args = parser.parse_args()
    workdir = args.workdir.absolute()
    rates = rates_of(args.lr)

    # The student, which all runs begin with.
    no_training = ("--config.train.steps=0", "--config.eval.problems=0", "--config.eval.every=0")
    run("grpo", workdir / "student", *args.settings, *no_training)
    shared = (
        *args.settings,
        f"--config.model.path={workdir}/student/export-0",
        "--config.warm_start.steps=0",
        f"--config.train.steps={args.steps}",
        f"--config.eval.every={args.every}",
    )

    rows = []
    steps: list[int] = []
    for name in args.names.split(","):
        settings = [*shared]
        if name.startswith("distill"):
            settings.append(f"--config.teacher.path={args.teacher.absolute()}")
        if name in rates:
            settings.append(f"--config.optimizer.lr={rates[name]}")
        curves = []
        seconds = []
        for seed in args.seeds:
            directory = workdir / f"{name}-seed{seed}"
            summary = run(name, directory, *settings, f"--config.train.seed={seed}")
            curves.append(accuracies(directory, summary))
            seconds.append(summary["seconds"])
        steps = list(curves[0])
        rows.append(table_row(name, float(np.mean(seconds)), curves))
    headings = ["algorithm", *(f"step {step}" for step in steps), "seconds"]
    print(f"| {' | '.join(headings)} |", "|---" * len(headings) + "|", *rows, sep="\n")


if __name__ == "__main__":
    main()
