"""Draws the learning curves of several runs of one recipe, and prints their figures as a table.

python benchmarks/curve.py runs/seed0 runs/seed1 runs/seed2 --out docs/countdown-tiny.png
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")  # before pyplot: there may be no display
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from jzero.files import JsonObject, read_jsonl


class Panel(NamedTuple):
    """One of the pictures side by side."""

    metric: str
    title: str
    eval_metric: str = ""  # drawn over the metric, where there is one


class FinishedRun(NamedTuple):
    """What a run has left in its workdir."""

    rows: list[JsonObject]  # the metrics of every step
    summary: JsonObject


PANELS = (
    Panel("reward/accuracy", "accuracy", "eval/accuracy"),
    Panel("rollout/length", "response length, tokens", "eval/length"),
    Panel("policy/entropy", "entropy, nats a token"),
)
HEADINGS = (
    "seed",
    "before",
    "before RL",
    "after RL",
    "gain",
    "greedy: before RL",
    "after RL",
    "minutes",
    "peak MiB",
)


def read_run(workdir: Path) -> FinishedRun:
    summary = json.loads((workdir / "summary.json").read_text())
    return FinishedRun(read_jsonl(workdir / "metrics.jsonl"), summary)


def draw(runs: list[FinishedRun], out: Path) -> None:
    size = (4.2 * len(PANELS), 3.2)
    figure, axes = plt.subplots(1, len(PANELS), figsize=size, constrained_layout=True)
    for axis, panel in zip(axes, PANELS, strict=True):
        for number, run in enumerate(runs):
            draw_run(axis, panel, run, color=f"C{number}")
        axis.set(xlabel="RL step", title=panel.title)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.savefig(out, dpi=110)


def draw_run(axis: Axes, panel: Panel, run: FinishedRun, color: str) -> None:
    steps = [row["step"] for row in run.rows]
    values = [row[panel.metric] for row in run.rows]
    axis.plot(steps, values, color=color, alpha=0.35, lw=1)

    points = [(row["step"], row[panel.eval_metric]) for row in run.rows if panel.eval_metric in row]
    start = run.summary["eval_all"].get(start_of_rl(run), {}).get(panel.eval_metric)
    if start is not None:
        points = [(0, start), *points]
    if points:
        eval_steps, eval_values = zip(*points, strict=True)
        settings = run.summary["config"]
        label = f"{settings['name']}, seed {settings['train']['seed']}, held out"
        axis.plot(eval_steps, eval_values, "o-", ms=3.5, color=color, label=label)
        axis.legend(fontsize=8)


def start_of_rl(run: FinishedRun) -> str:
    """Returns the name of the last evaluation before RL."""
    return "after_warm_start" if "after_warm_start" in run.summary["eval_all"] else "before"


def table_row(run: FinishedRun) -> str:
    summary = run.summary
    (sampled,), (greedy,) = summary["eval"].values(), summary["eval_greedy"].values()
    start = start_of_rl(run)
    shares = (
        sampled["before"],
        sampled[start],
        sampled["after"],
        sampled["after"] - sampled[start],
        greedy[start],
        greedy["after"],
    )
    cells = [
        str(summary["config"]["train"]["seed"]),
        *(f"{100 * share:.1f} %" for share in shares),
        f"{summary['seconds'] / 60:.1f}",
        f"{summary['peak_rss_bytes'] / 2**20:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workdirs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="the picture")
    args = parser.parse_args()
    runs = [read_run(workdir) for workdir in args.workdirs]
    draw(runs, args.out)
    print(f"| {' | '.join(HEADINGS)} |", "|" + "---|" * len(HEADINGS), sep="\n")
    for run in runs:
        print(table_row(run))


if __name__ == "__main__":
    main()
