"""Compares algorithms, or bounds of staleness, on the tiny Countdown recipe from one warm start.

    python benchmarks/algorithms.py --workdir runs/algorithms [--names grpo,ppo,...] [--steps 20] \\
        [-- --config.section.field=value ...]
    python benchmarks/algorithms.py --workdir runs/staleness --names grpo --seeds 0 1 2 \\
        --max_staleness 0 1 --steps 50

Every row is a run of `jzero.main`, or the mean and standard deviation over several seeds. A run
that is finished is not repeated. Settings after -- go to every run.
"""

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from jzero.files import JsonObject

ROOT = Path(__file__).resolve().parents[1]
NAMES = "grpo,dr_grpo,ppo,rloo,dapo,gspo"
# The recipe's 4e-4 is too much without the division by the standard deviation.
LEARNING_RATES = {"dr_grpo": 2e-4, "rloo": 1e-4}
PHASES_BESIDE_RL = ("eval", "warm_start")
HEADINGS = (
    "algorithm",
    "max. staleness",
    "lr",
    "avg@4 before",
    "after",
    "greedy before",
    "after",
    "length before",
    "after",
    "seconds of RL",
)


def run(recipes: str, workdir: Path, *settings: str) -> JsonObject:
    """Runs or resumes `jzero.main`, and returns the summary of the run."""
    command = [sys.executable, "-m", "jzero.main"]
    command += [f"--config=configs/countdown.py:{recipes}", f"--workdir={workdir}", *settings]
    subprocess.run(command, cwd=ROOT, check=True)
    return json.loads((workdir / "summary.json").read_text())


def mean_and_deviation(values: Iterable[float], digits: int = 1) -> str:
    array = np.array(list(values))
    text = f"{array.mean():.{digits}f}"
    if len(array) > 1:
        text += f" ± {array.std(ddof=1):.{digits}f}"
    return text


def seconds_of_rl(summary: JsonObject) -> float:
    phases = summary["seconds_by_phase"].items()
    return sum(seconds for phase, seconds in phases if phase not in PHASES_BESIDE_RL)


def table_row(name: str, max_staleness: int, summaries: list[JsonObject]) -> str:
    learning_rate = summaries[0]["config"]["optimizer"]["lr"]
    cells = [name, str(max_staleness), f"{learning_rate:g}"]
    for metric in ("eval/accuracy", "eval_greedy/accuracy"):
        for when in ("before", "after"):
            percent = [100 * summary["eval_all"][when][metric] for summary in summaries]
            cells.append(f"{mean_and_deviation(percent)} %")
    for when in ("before", "after"):
        lengths = [summary["eval_all"][when]["eval/length"] for summary in summaries]
        cells.append(mean_and_deviation(lengths, digits=0))
    cells.append(mean_and_deviation(map(seconds_of_rl, summaries), digits=0))
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--names", default=NAMES, help="algorithms, with commas")
    parser.add_argument("--steps", type=int, default=20, help="RL steps of every run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--max_staleness", type=int, nargs="+", default=[0])
    parser.add_argument("settings", nargs="*", help="settings for jzero.main, after --")
    args = parser.parse_args()
    workdir = args.workdir.absolute()

    # The warm start, which all runs begin with.
    no_training = ("--config.train.steps=0", "--config.eval.problems=0", "--config.eval.every=0")
    run("tiny", workdir / "warm", *no_training)
    shared = (
        f"--config.model.path={workdir}/warm/export-0",
        "--config.warm_start.steps=0",
        f"--config.train.steps={args.steps}",
        "--config.train.minibatches=2",
        "--config.eval.every=0",
        *args.settings,
    )

    rows = []
    for name, max_staleness in itertools.product(args.names.split(","), args.max_staleness):
        settings = [*shared, f"--config.rollout.max_staleness={max_staleness}"]
        if name in LEARNING_RATES:
            settings.append(f"--config.optimizer.lr={LEARNING_RATES[name]}")
        summaries = []
        for seed in args.seeds:
            directory = workdir / f"{name}-staleness{max_staleness}-seed{seed}"
            seeded = (*settings, f"--config.train.seed={seed}")
            summaries.append(run(f"tiny,{name}", directory, *seeded))
        rows.append(table_row(name, max_staleness, summaries))
    print(f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|", *rows, sep="\n")


if __name__ == "__main__":
    main()
