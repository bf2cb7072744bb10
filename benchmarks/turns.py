"""Compares episodes of several turns with episodes of one, at an equal budget of responses.

    python benchmarks/turns.py --recipe configs/guess.py:tiny --seeds 0 1 2 --out runs/turns \\
        [--config.train.steps=60]

Every seed has two runs, which differ in what an episode is. "turns" has the recipe's episodes.
"one" has episodes of one response, and as many more rollouts of a prompt as there are turns, which
is no smaller budget. The policy of "one" is then evaluated with the recipe's turns ("asked again"):
what it gains there, it gains without having been trained for turns. The table has held-out
accuracy, as mean and standard deviation over the seeds.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jzero.config import Config
from jzero.files import read_jsonl

HEADINGS = ("episodes", "warm start", "greedy", "after RL", "greedy", "sampled tokens")


class Result(NamedTuple):
    """The end of one run."""

    sampled: dict[str, float]  # accuracy by when it was measured: before, after_warm_start, after
    greedy: dict[str, float]
    tokens: float  # sampled in training
    export: str  # the trained model


def read_recipe(recipe: str) -> Config:
    """Returns the config of "FILE.py:PRESET"."""
    path, _, preset = recipe.partition(":")
    spec = importlib.util.spec_from_file_location("recipe", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(preset)


def run(recipe: str, workdir: Path, *flags: str) -> Result:
    command = [sys.executable, "-m", "jzero.main", "--config", recipe, "--workdir", str(workdir)]
    subprocess.run([*command, *flags], check=True)
    summary = json.loads((workdir / "summary.json").read_text())
    [sampled], [greedy] = summary["eval"].values(), summary["eval_greedy"].values()
    rows = read_jsonl(workdir / "metrics.jsonl")
    tokens = sum(row.get("turns/sampled_tokens", row["rollout/tokens"]) for row in rows)
    return Result(sampled, greedy, tokens, summary["export"])


def accuracies(result: Result) -> list[float]:
    return [
        result.sampled["after_warm_start"],
        result.greedy["after_warm_start"],
        result.sampled["after"],
        result.greedy["after"],
        result.tokens,
    ]


def run_seed(recipe: str, workdir: Path, flags: list[str]) -> dict[str, list[float]]:
    """Makes the runs of one seed, and returns the figures of every row of the table."""
    rollout = read_recipe(recipe).rollout
    one_turn = [
        "--config.rollout.max_turns=1",
        f"--config.rollout.group_size={rollout.group_size * rollout.max_turns}",
    ]
    turns = run(recipe, workdir / "turns", *flags)
    one = run(recipe, workdir / "one", *flags, *one_turn)
    only_evaluation = [
        "--config.train.steps=0",
        "--config.warm_start.steps=0",
        f"--config.model.path={one.export}",
    ]
    again = run(recipe, workdir / "again", *flags, *only_evaluation)
    nothing = float("nan")
    return {
        "turns": accuracies(turns),
        "one": accuracies(one),
        "one, asked again": [
            nothing,
            nothing,
            again.sampled["before"],
            again.greedy["before"],
            nothing,
        ],
    }


def table_row(name: str, values: list[list[float]]) -> str:
    """`values` has one list of figures for every seed."""
    *means, tokens = np.mean(values, axis=0)
    *deviations, _ = np.std(values, axis=0)
    cells = [name]
    for mean, deviation in zip(means, deviations, strict=True):
        cells.append("" if np.isnan(mean) else f"{100 * mean:.1f} ± {100 * deviation:.1f} %")
    cells.append("" if np.isnan(tokens) else f"{tokens:,.0f}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="configs/guess.py:tiny")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, required=True, help="directory of all workdirs")
    args, flags = parser.parse_known_args()

    rows: dict[str, list[list[float]]] = {}
    for seed in args.seeds:
        seeded = [*flags, f"--config.train.seed={seed}"]
        for name, values in run_seed(args.recipe, args.out / str(seed), seeded).items():
            rows.setdefault(name, []).append(values)

    print(f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|", sep="\n")
    for name, values in rows.items():
        print(table_row(name, values))


if __name__ == "__main__":
    main()
