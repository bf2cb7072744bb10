"""Several algorithms on the tiny Countdown, from one warm start: one table.

    python benchmarks/algorithms.py --workdir runs/algorithms [--names grpo,ppo,...] [--steps 20] [-- --config.x=y ...]

Each is a run of jzero.main of its own; what is finished is not run again. Settings after -- go to every run."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMES = "grpo,dr_grpo,ppo,rloo,dapo,gspo"
LR = {"dr_grpo": 2e-4, "rloo": 1e-4}  # the recipe's 4e-4 is too much without the division by the standard deviation


def run(preset: str, workdir: Path, *settings: str) -> dict:
    """The summary of a run, finished or resumed."""
    command = [sys.executable, "-m", "jzero.main", f"--config=configs/countdown.py:{preset}", f"--workdir={workdir}"]
    subprocess.run([*command, *settings], cwd=ROOT, check=True)
    return json.loads((workdir / "summary.json").read_text())


def row(name: str, summary: dict) -> str:
    before, after = (summary["eval_all"][key] for key in ("before", "after"))
    seconds = sum(s for phase, s in summary["seconds_by_phase"].items() if phase not in ("eval", "warm_start"))
    cells = [
        name,
        f"{summary['config']['optimizer']['lr']:g}",
        *(f"{100 * values['eval/accuracy']:.1f} %" for values in (before, after)),
        *(f"{100 * values['eval_greedy/accuracy']:.1f} %" for values in (before, after)),
        *(f"{values['eval/length']:.0f}" for values in (before, after)),
        f"{seconds:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--names", default=NAMES, help="algorithms, by comma")
    parser.add_argument("--steps", type=int, default=20, help="RL steps of each")
    parser.add_argument("settings", nargs="*", help="for jzero.main, after --")
    arguments = parser.parse_args()
    workdir = arguments.workdir.absolute()
    run("tiny", workdir / "warm", "--config.train.steps=0", "--config.eval.problems=0", "--config.eval.every=0")
    settings = (
        f"--config.model.path={workdir}/warm/export-0",
        "--config.warm_start.steps=0",
        f"--config.train.steps={arguments.steps}",
        "--config.train.minibatches=2",
        "--config.eval.every=0",
        *arguments.settings,
    )
    rows = []
    for name in arguments.names.split(","):
        lr = [f"--config.optimizer.lr={LR[name]}"] if name in LR else []
        rows.append(row(name, run(f"tiny,{name}", workdir / name, *lr, *settings)))
    print("| algorithm | lr | avg@4 before | after | greedy before | after | length before | after | seconds of RL |")
    print("|---|---|---|---|---|---|---|---|---|", *rows, sep="\n")


if __name__ == "__main__":
    main()
