"""Prints the reward curves of the cookbook's math_rl and of jzero.main with equal settings.

    python benchmarks/tinker/beside_main.py --cookbook OUT/math_rl-seed* --main runs/main-seed*

The first directories are those that `cookbook.py` wrote, the others workdirs of `arithmetic.py`.
Ends with an error if the settings of two runs differ. Prints a table with a row for each step: the
mean reward of its samples, before the step's update, of each run, and over the runs with their
standard deviation; and the share of the samples that end, over the runs.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jzero.files import JsonObject, read_jsonl

REWARD, ENDED = "env/all/reward/total", "env/all/format"  # metrics of the cookbook
MAIN_SCORE, MAIN_TRUNCATED = "reward/mean", "rollout/truncated"  # metrics of jzero.main
FORMAT_COEF = 0.1  # subtracted from the reward of a response without an end
# The cookbook always uses these (tinker_cookbook/rl/train.py), and a LoRA alpha of 32.
COOKBOOK_ADAM = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "clip_norm": 0.0}
COOKBOOK_ALPHA = 32.0


def read_config(directory: Path) -> JsonObject:
    return json.loads((directory / "config.json").read_text(encoding="utf-8"))


def cookbook_settings(config: JsonObject) -> JsonObject:
    """Returns the settings that count of a run of math_rl."""
    dataset = config["dataset_builder"]
    return {
        "groups": dataset["batch_size"],
        "group_size": dataset["group_size"],
        "max_tokens": config["max_tokens"],
        "temperature": config["temperature"],
        "lr": config["learning_rate"],
        "rank": config["lora_rank"],
        "alpha": COOKBOOK_ALPHA,
        "format_coef": FORMAT_COEF,
        **COOKBOOK_ADAM,
    }


def main_settings(config: JsonObject) -> JsonObject:
    """Returns the same settings of a run of jzero.main."""
    rollout, optimizer = config["rollout"], config["optimizer"]
    responses = rollout["num_prompts"] * rollout["group_size"]
    adam = {name: optimizer[name] for name in COOKBOOK_ADAM}
    # The loss of jzero.main is a mean over responses, and that of Tinker a sum. The product is
    # rounded because the recipe has divided.
    adam["eps"] = round(adam["eps"] * responses, 15)
    return {
        "groups": rollout["num_prompts"],
        "group_size": rollout["group_size"],
        "max_tokens": rollout["max_new_tokens"],
        "temperature": rollout["temperature"],
        "lr": optimizer["lr"],
        "rank": config["model"]["adapter"]["rank"],
        "alpha": config["model"]["adapter"]["alpha"],
        "format_coef": config["algorithm"]["truncated_penalty"],
        **adam,
    }


def check_equal(runs: Sequence[tuple[Path, JsonObject]]) -> None:
    """Ends with an error if two runs have different settings."""
    first, expected = runs[0]
    for directory, settings in runs:
        if settings != expected:
            raise SystemExit(f"error: {directory} has {settings}, and {first} has {expected}")


def curves(directories: Sequence[Path], metric: str) -> np.ndarray:
    """Returns a metric [runs, steps] of the steps that all runs have."""
    values = [
        [row[metric] for row in read_jsonl(directory / "metrics.jsonl") if metric in row]
        for directory in directories
    ]
    steps = min(map(len, values))
    return np.array([one[:steps] for one in values])


def cells(rewards: np.ndarray) -> str:
    """Returns the rewards of one step [runs], and their mean with its standard deviation."""
    each = ", ".join(f"{value:.3f}" for value in rewards)
    return f"{each} | {rewards.mean():.3f} ± {rewards.std(ddof=1):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cookbook", required=True, nargs="+", type=Path)
    parser.add_argument("--main", required=True, nargs="+", type=Path)
    options = parser.parse_args()
    runs = [(path, cookbook_settings(read_config(path))) for path in options.cookbook]
    runs += [(path, main_settings(read_config(path))) for path in options.main]
    check_equal(runs)
    rewards, ended = curves(options.cookbook, REWARD), curves(options.cookbook, ENDED)
    truncated = curves(options.main, MAIN_TRUNCATED)
    # The metric is the grader's score, before the penalty.
    main_rewards = curves(options.main, MAIN_SCORE) - FORMAT_COEF * truncated
    print("| updates | reward, cookbook | mean | reward, jzero.main | mean | ended | ended, main |")
    print("|---|---|---|---|---|---|---|")
    for step in range(min(rewards.shape[1], main_rewards.shape[1])):
        columns = [
            str(step),
            cells(rewards[:, step]),
            cells(main_rewards[:, step]),
            f"{ended[:, step].mean():.0%}",
            f"{1 - truncated[:, step].mean():.0%}",
        ]
        print(f"| {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
