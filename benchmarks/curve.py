"""The learning curves of several runs of one recipe as a picture, and their figures as a table.

python benchmarks/curve.py runs/seed0 runs/seed1 runs/seed2 --out docs/countdown-tiny.png"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PANELS = (  # metric, label, metric of the evaluations drawn over it
    ("reward/accuracy", "accuracy", "eval/accuracy"),
    ("rollout/length", "response length, tokens", "eval/length"),
    ("policy/entropy", "entropy, nats a token", ""),
)


def read(workdir: Path) -> tuple[list[dict], dict]:
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], json.loads((workdir / "summary.json").read_text())


def draw(runs: list[tuple[list[dict], dict]], out: Path) -> None:
    figure, axes = plt.subplots(
        1, len(PANELS), figsize=(4.2 * len(PANELS), 3.2), constrained_layout=True
    )
    for axis, (metric, label, evaluated) in zip(axes, PANELS, strict=True):
        for number, (rows, summary) in enumerate(runs):
            axis.plot(
                [r["step"] for r in rows],
                [r[metric] for r in rows],
                color=f"C{number}",
                alpha=0.35,
                lw=1,
            )
            points = [(r["step"], r[evaluated]) for r in rows if evaluated in r]
            warm = summary["eval_all"].get("after_warm_start", {}).get(evaluated)
            points = [(0, warm), *points] if warm is not None else points
            if points:
                name = f"seed {summary['config']['train']['seed']}, held out"
                axis.plot(*zip(*points, strict=True), "o-", ms=3.5, color=f"C{number}", label=name)
                axis.legend(fontsize=8)
        axis.set(xlabel="RL step", title=label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.savefig(out, dpi=110)


def table(runs: list[tuple[list[dict], dict]]) -> str:
    head = "| seed | before | warm start | after RL | gain | greedy: warm start | after RL | minutes | peak MiB |"
    lines = [head, "|" + "---|" * 9]
    for _, summary in runs:
        (sampled,), (greedy,) = summary["eval"].values(), summary["eval_greedy"].values()
        cells = [sampled["before"], sampled["after_warm_start"], sampled["after"]]
        cells += [
            sampled["after"] - sampled["after_warm_start"],
            greedy["after_warm_start"],
            greedy["after"],
        ]
        minutes, peak = summary["seconds"] / 60, summary["peak_rss_bytes"] / 2**20
        percent = " | ".join(f"{100 * cell:.1f} %" for cell in cells)
        lines.append(
            f"| {summary['config']['train']['seed']} | {percent} | {minutes:.1f} | {peak:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workdirs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    loaded = [read(workdir) for workdir in arguments.workdirs]
    draw(loaded, arguments.out)
    print(table(loaded))
