"""Compares adapters of several ranks with full fine-tuning on the tiny Countdown recipe.

    python benchmarks/adapters.py --workdir runs/adapters [--ranks 0 1 8 32] [--seeds 0 1 2] \\
        [-- --config.section.field=value ...]

All runs begin with the same model, of one warm start. Rank 0 is full fine-tuning. A row of the
table is the mean over the seeds with its standard error, in percent. A run that is finished is not
repeated. Settings after -- go to every run.

The learning rate of full fine-tuning is the recipe's, and that of an adapter ten times as much, of
every rank. --rates sets others: --rates 0=4e-4 32=2e-3.
"""

import argparse
from pathlib import Path

import numpy as np
from algorithms import run, seconds_of_rl

from jzero.config import ADAPTER_LR_FACTOR
from jzero.files import JsonObject, read_jsonl

RECIPE_RATE = 4e-4  # the learning rate of configs/countdown.py:tiny
HEADINGS = (
    "trained",
    "lr",
    "avg@4 before",
    "after",
    "greedy before",
    "after",
    "last 5 steps",
    "mismatch",
    "bytes published",
    "seconds of RL",
)
LAST_STEPS = 5


def name_of(rank: int) -> str:
    return f"adapter of rank {rank}" if rank else "all parameters"


def mean_and_error(values: list[float], form: str = ".1f") -> str:
    """Returns the mean and the standard error of the mean."""
    array = np.array(values)
    text = f"{array.mean():{form}}"
    if len(array) > 1:
        text += f" ± {array.std(ddof=1) / np.sqrt(len(array)):{form}}"
    return text


def mean_of_metric(workdir: Path, name: str, num_steps: int) -> float:
    """Returns a metric's mean over the last steps that have it."""
    values = [row[name] for row in read_jsonl(workdir / "metrics.jsonl") if name in row]
    return float(np.mean(values[-num_steps:]))


def table_row(rank: int, rate: float, workdirs: list[Path], summaries: list[JsonObject]) -> str:
    cells = [name_of(rank), f"{rate:g}"]
    for metric in ("eval/accuracy", "eval_greedy/accuracy"):
        for when in ("before", "after"):
            percent = [100 * summary["eval_all"][when][metric] for summary in summaries]
            cells.append(mean_and_error(percent))
    accuracies = [
        100 * mean_of_metric(workdir, "reward/accuracy", LAST_STEPS) for workdir in workdirs
    ]
    cells.append(mean_and_error(accuracies))
    mismatches = [mean_of_metric(workdir, "policy/mismatch", 10**6) for workdir in workdirs]
    cells.append(mean_and_error(mismatches, ".1e"))
    cells.append(f"{mean_of_metric(workdirs[0], 'publish/bytes', 1):,.0f}")
    cells.append(mean_and_error([seconds_of_rl(summary) for summary in summaries], ".0f"))
    return f"| {' | '.join(cells)} |"


def parse_rates(texts: list[str], ranks: list[int]) -> dict[int, float]:
    """Returns the learning rate of every rank."""
    rates = {rank: RECIPE_RATE * (ADAPTER_LR_FACTOR if rank else 1) for rank in ranks}
    for text in texts:
        rank, _, rate = text.partition("=")
        rates[int(rank)] = float(rate)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[0, 1, 8, 32])
    parser.add_argument("--rates", nargs="*", default=[], metavar="RANK=LR")
    parser.add_argument("--steps", type=int, default=50, help="RL steps of every run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--base", type=Path, help="a warm-started model, in place of a new one")
    parser.add_argument("settings", nargs="*", help="settings for jzero.main, after --")
    args = parser.parse_args()
    workdir = args.workdir.absolute()
    rates = parse_rates(args.rates, args.ranks)

    base = args.base and args.base.absolute()
    if base is None:
        no_training = (
            "--config.train.steps=0",
            "--config.eval.problems=0",
            "--config.eval.every=0",
        )
        run("tiny", workdir / "warm", *no_training)
        base = workdir / "warm/export-0"
    shared = (
        f"--config.model.path={base}",
        "--config.warm_start.steps=0",
        f"--config.train.steps={args.steps}",
        "--config.eval.every=0",
        *args.settings,
    )

    rows = []
    for rank in args.ranks:
        workdirs, summaries = [], []
        for seed in args.seeds:
            directory = workdir / f"rank{rank}-lr{rates[rank]:g}-seed{seed}"
            settings = (
                f"--config.model.adapter.rank={rank}",
                f"--config.optimizer.lr={rates[rank]}",
                f"--config.train.seed={seed}",
            )
            summaries.append(run("tiny", directory, *shared, *settings))
            workdirs.append(directory)
        rows.append(table_row(rank, rates[rank], workdirs, summaries))
        print(rows[-1], flush=True)
    print(f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|", *rows, sep="\n")


if __name__ == "__main__":
    main()
