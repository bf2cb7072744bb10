"""Compares the memory of a process that trains all parameters with one that trains an adapter.

    python benchmarks/adapter_memory.py [--config.section.field=value ...]

Every run makes two steps of Countdown with a new model of 97 million parameters, on one CPU device.
Settings go to every run. The table has the peak of the resident memory of each process: weights,
optimizer state, gradients, activations, the compiler and Python itself; and the size of what a
checkpoint holds.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
MIB = 2**20

SETTINGS = {
    "model.arch.num_hidden_layers": 12,
    "model.arch.hidden_size": 768,
    "model.arch.intermediate_size": 2816,
    "model.arch.num_attention_heads": 12,
    "model.arch.num_key_value_heads": 4,
    "model.arch.head_dim": 64,
    "rollout.num_prompts": 4,
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 16,
    "rollout.num_slots": 16,
    "warm_start.steps": 0,
    "train.microbatch_tokens": 128,
    "train.steps": 2,
    "train.checkpoint_every": 2,
    "eval.every": 0,
    "eval.problems": 0,
}


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    settings: dict[str, int | str]


CASES = (
    Case("all parameters", {}),
    Case("adapter of rank 32", {"model.adapter.rank": 32}),
    Case("adapter of rank 32, base in 8 bits", {"model.adapter.rank": 32, "model.base": "int8"}),
)


def table_row(case: Case, workdir: Path, more_settings: list[str]) -> str:
    """Runs a case and returns its row."""
    command = [sys.executable, "-m", "jzero.main", f"--config={ROOT}/configs/countdown.py:tiny"]
    for setting, value in (SETTINGS | case.settings).items():
        command.append(f"--config.{setting}={value}")
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    subprocess.run(
        [*command, f"--workdir={workdir}", *more_settings], cwd=ROOT, env=environment, check=True
    )
    summary = json.loads((workdir / "summary.json").read_text(encoding="utf-8"))
    files = (workdir / "checkpoints").rglob("*")
    in_checkpoints = sum(file.stat().st_size for file in files if file.is_file())
    peak = summary["peak_rss_bytes"]
    return f"| {case.name} | {peak / MIB:,.0f} | {in_checkpoints / MIB:,.1f} |"


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return
    with tempfile.TemporaryDirectory() as directory:
        rows = [
            table_row(case, Path(directory) / f"run{index}", sys.argv[1:])
            for index, case in enumerate(CASES)
        ]
    print("| trained | peak RSS, MiB | checkpoint, MiB |", "|---|---|---|", *rows, sep="\n")


if __name__ == "__main__":
    main()
