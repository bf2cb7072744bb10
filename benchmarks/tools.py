"""Compares a policy that may call a tool with one that may not.

    python benchmarks/tools.py --seeds 0 1 2 --out runs/tools [--config.train.steps=60]

Every seed has two runs of the recipe: "with the tool" as it is, and "without" with episodes of one
response and no tool. Printed for each seed are the held-out accuracies after the warm start and
after RL, and how many calls an episode of the last RL step made; below them their means.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jzero.files import read_jsonl

HEADINGS = ("seed", "episodes", "warm start", "after RL", "calls, first step", "calls, last step")
WITHOUT = ("--config.task.tools.names=()", "--config.rollout.max_turns=1")


class Result(NamedTuple):
    """The end of one run."""

    warm_start: float  # accuracy on held-out problems
    after: float
    first_calls: float  # of an episode of the first step, on average
    last_calls: float


def run(recipe: str, workdir: Path, flags: list[str]) -> Result:
    command = [sys.executable, "-m", "jzero.main", "--config", recipe, "--workdir", str(workdir)]
    subprocess.run([*command, *flags], check=True)
    summary = json.loads((workdir / "summary.json").read_text())
    [sampled] = summary["eval"].values()
    rows = read_jsonl(workdir / "metrics.jsonl")
    calls = [row.get("tools/calls", 0.0) for row in rows]
    return Result(sampled["after_warm_start"], sampled["after"], calls[0], calls[-1])


def table_row(seed: str, name: str, result: Result) -> str:
    cells = [
        seed,
        name,
        f"{100 * result.warm_start:.1f} %",
        f"{100 * result.after:.1f} %",
        f"{result.first_calls:.2f}",
        f"{result.last_calls:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="configs/calculator.py:tiny")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, required=True, help="directory of all workdirs")
    args, flags = parser.parse_known_args()

    kinds = {"with the tool": [], "without": list(WITHOUT)}
    results: dict[str, list[Result]] = {name: [] for name in kinds}
    lines = []
    for seed in args.seeds:
        for name, own in kinds.items():
            workdir = args.out / str(seed) / name.replace(" ", "-")
            result = run(args.recipe, workdir, [*flags, *own, f"--config.train.seed={seed}"])
            results[name].append(result)
            lines.append(table_row(str(seed), name, result))

    print(f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|", *lines, sep="\n")
    for name, of_seeds in results.items():
        mean = Result(*np.mean(of_seeds, axis=0).tolist())
        print(table_row("mean", name, mean))


if __name__ == "__main__":
    main()
