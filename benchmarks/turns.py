"""Several turns against one at an equal budget of responses, over seeds: a table of held-out accuracy.

    python benchmarks/turns.py --recipe configs/guess.py:tiny --seeds 0 1 2 --out runs/turns [--config.train.steps=60]

Two runs a seed, the same but for what an episode is: as the recipe has it; and of one response, with as many more
rollouts of a prompt as there are turns, which is no smaller budget. The latter's policy is then evaluated with the
recipe's turns, too: what is gained by being asked again without having been trained for it."""

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np


def settings(recipe: str) -> Any:
    path, _, preset = recipe.partition(":")
    spec = importlib.util.spec_from_file_location("recipe", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(preset)


def run(recipe: str, workdir: Path, *flags: str) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "jzero.main",
        "--config",
        recipe,
        "--workdir",
        str(workdir),
        *flags,
    ]
    subprocess.run(command, check=True)
    summary = json.loads((workdir / "summary.json").read_text())
    [sampled], [greedy] = summary["eval"].values(), summary["eval_greedy"].values()
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    tokens = sum(row.get("turns/sampled_tokens", row["rollout/tokens"]) for row in rows)
    return {"sampled": sampled, "greedy": greedy, "tokens": tokens, "export": summary["export"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="configs/guess.py:tiny")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, required=True)
    given, flags = parser.parse_known_args()
    rollout = settings(given.recipe).rollout
    one = [
        "--config.rollout.max_turns=1",
        f"--config.rollout.group_size={rollout.group_size * rollout.max_turns}",
    ]
    rows: dict[str, list[list[float]]] = {}
    for seed in given.seeds:
        mine, at = [*flags, f"--config.train.seed={seed}"], given.out / str(seed)
        each = {
            "turns": run(given.recipe, at / "turns", *mine),
            "one": run(given.recipe, at / "one", *mine, *one),
        }
        known = f"--config.model.path={each['one']['export']}"
        again = ["--config.train.steps=0", "--config.warm_start.steps=0", known]
        asked = run(given.recipe, at / "again", *mine, *again)
        for name, found in each.items():
            values = [
                found[kind][when]
                for when in ("after_warm_start", "after")
                for kind in ("sampled", "greedy")
            ]
            rows.setdefault(name, []).append([*values, found["tokens"]])
        rows.setdefault("one, asked again", []).append(
            [np.nan] * 2 + [asked[k]["before"] for k in ("sampled", "greedy")] + [np.nan]
        )
    print(
        "| episodes | warm start | greedy | after RL | greedy | sampled tokens |\n"
        + "|---" * 6
        + "|"
    )
    for name, values in rows.items():
        mean, spread = np.mean(values, axis=0), np.std(values, axis=0)
        cells = [
            f"{100 * m:.1f} ± {100 * s:.1f} %" for m, s in zip(mean[:-1], spread[:-1], strict=True)
        ]
        cells = ["" if "nan" in cell else cell for cell in [*cells, f"{mean[-1]:,.0f}"]]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
