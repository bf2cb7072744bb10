"""Draws the learning curves of several runs of one recipe, and prints their figures as a table.

    python benchmarks/curve.py runs/seed0 runs/seed1 runs/seed2 --out docs/countdown-tiny.png

With --peer FILE..., what `trl_grpo.py` has printed in each file is drawn over the accuracy, and a
second table has the held-out accuracy of both at every step that all runs have evaluated.
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")  # before pyplot: there may be no display
import matplotlib.pyplot as plt
import numpy as np
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


class PeerRun(NamedTuple):
    """What a run of `trl_grpo.py` has printed."""

    name: str
    heldout: dict[int, float]  # accuracy by step

    @classmethod
    def read(cls, path: Path) -> "PeerRun":
        found = json.loads(path.read_text().splitlines()[-1])
        heldout = {int(step): share for step, share in found["heldout"].items()}
        return cls(f"{found['peer']}, {path.stem}", heldout)


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


def heldout_of(run: FinishedRun, metric: str = "eval/accuracy") -> dict[int, float]:
    """Returns the held-out values of a run by RL step."""
    values = {row["step"]: row[metric] for row in run.rows if metric in row}
    for step, name in ((0, start_of_rl(run)), (run.rows[-1]["step"], "after")):
        value = run.summary["eval_all"].get(name, {}).get(metric)
        if value is not None:
            values[step] = value
    return dict(sorted(values.items()))


def draw(runs: list[FinishedRun], peers: list[PeerRun], out: Path) -> None:
    size = (4.2 * len(PANELS), 3.2)
    figure, axes = plt.subplots(1, len(PANELS), figsize=size, constrained_layout=True)
    for axis, panel in zip(axes, PANELS, strict=True):
        for number, run in enumerate(runs):
            draw_run(axis, panel, run, color=f"C{number}")
        if panel is PANELS[0]:
            for number, peer in enumerate(peers):
                steps, shares = zip(*sorted(peer.heldout.items()), strict=True)
                axis.plot(steps, shares, "s--", ms=3.5, color=f"C{number}", label=peer.name)
            if peers:
                axis.legend(fontsize=6)
        axis.set(xlabel="RL step", title=panel.title)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.savefig(out, dpi=110)


def draw_run(axis: Axes, panel: Panel, run: FinishedRun, color: str) -> None:
    # A step that trains nothing has no metrics of its update.
    rows = [row for row in run.rows if panel.metric in row]
    values = [row[panel.metric] for row in rows]
    axis.plot([row["step"] for row in rows], values, color=color, alpha=0.35, lw=1)

    points = heldout_of(run, panel.eval_metric).items() if panel.eval_metric else ()
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


def comparison(runs: list[FinishedRun], peers: list[PeerRun]) -> list[str]:
    """Returns the rows of the second table: mean, smallest and largest accuracy of the seeds."""
    sides = ([heldout_of(run) for run in runs], [peer.heldout for peer in peers])
    steps = sorted(set.intersection(*(set(values) for side in sides for values in side)))
    rows = ["| step | jzero | peer |", "|---|---|---|"]
    for step in steps:
        cells = []
        for side in sides:
            shares = [100 * values[step] for values in side]
            cells.append(f"{np.mean(shares):.1f} % ({min(shares):.1f} to {max(shares):.1f})")
        rows.append(f"| {step} | {' | '.join(cells)} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workdirs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="the picture")
    parser.add_argument("--peer", nargs="*", type=Path, default=[], help="lines of trl_grpo.py")
    args = parser.parse_args()
    runs = [read_run(workdir) for workdir in args.workdirs]
    peers = [PeerRun.read(path) for path in args.peer]
    draw(runs, peers, args.out)
    print(f"| {' | '.join(HEADINGS)} |", "|" + "---|" * len(HEADINGS), sep="\n")
    for run in runs:
        print(table_row(run))
    if peers:
        print("", *comparison(runs, peers), sep="\n")


if __name__ == "__main__":
    main()
