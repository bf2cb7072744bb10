"""Adds runs that are known to be healthy to those about which the run doctor has to be silent.

    python -m jzero.main --config configs/guess.py:tiny --config.train.steps=12 --workdir runs/guess
    python benchmarks/healthy.py "guess, as it is=runs/guess"

Writes the metrics that the doctor reads, and the settings, to tests/run/healthy_busy_runs.json,
which tests/run/test_doctor.py checks step by step. Ends with status 1 if the doctor has a remark
about one of the runs: read it, and see which of the two is wrong.
"""

import argparse
import json
import sys
from pathlib import Path

from jzero.config.serialization import flatten
from jzero.files import read_jsonl
from jzero.run.doctor import Doctor

FILE = Path(__file__).parents[1] / "tests" / "run" / "healthy_busy_runs.json"
SETTINGS = (
    "task.template",
    "task.reward.functions",
    "task.options",
    "rollout.num_prompts",
    "rollout.group_size",
    "rollout.max_new_tokens",
    "optimizer.skip_norm",
)
METRICS = (
    "step",
    "reward/mean",
    "reward/accuracy",
    "reward/zero_variance_groups",
    "reward/failed",
    "rollout/length",
    "rollout/truncated",
    "rollout/preempted",
    "rollout/slot_utilization",
    "grade/no_answer",
    "policy/entropy",
    "policy/kl",
    "policy/mismatch",
    "optimizer/grad_norm",
    "optimizer/skipped",
    "update/padding",
    "update/left_out",
    "time/sample",
    "time/grade",
    "time/update",
    "time/step",
    "compile/seconds",
)


def rounded(value: object) -> object:
    return float(f"{value:.3g}") if isinstance(value, float) else value


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="NAME=WORKDIR")
    args = parser.parse_args()
    known = json.loads(FILE.read_text(encoding="utf-8"))
    num_remarks = 0
    for argument in args.runs:
        name, _, workdir = argument.rpartition("=")
        settings = flatten(json.loads(Path(workdir, "config.json").read_text(encoding="utf-8")))
        rows = read_jsonl(Path(workdir, "metrics.jsonl"))
        doctor = Doctor(settings)
        for row in rows:
            doctor.check(int(row["step"]), row, is_last=row is rows[-1])
        for finding in doctor.findings:
            print(f"{name}: {finding.sentence}")
        num_remarks += len(doctor.findings)
        names = [metric for metric in METRICS if any(metric in row for row in rows)]
        known[name] = {
            "settings": {setting: settings[setting] for setting in SETTINGS if setting in settings},
            "metrics": {metric: [rounded(row.get(metric)) for row in rows] for metric in names},
        }
        print(f"{name}: {len(rows)} steps, {len(doctor.findings)} remarks")
    lines = [f"{json.dumps(name)}: {json.dumps(run)}" for name, run in known.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return 1 if num_remarks else 0


if __name__ == "__main__":
    sys.exit(main())
