"""Plans every model on every slice with `jzero.plan`, and prints one table.

    python benchmarks/plan.py --out DIR [--only TEXT,...]

A cell is a model on a slice. Every cell is a process of its own and a JSON file in DIR. A cell
whose file is there is not compiled again, so that the command goes on where it stopped. `--only`
chooses the cells whose name, such as "Qwen2.5-3B v5e:2x4", holds every TEXT.

The table is Markdown and goes to DIR/plan.md, too. It has one row for every cell whose file is in
DIR: whether the cell fits, the memory of its phases, and the predicted seconds of a step. What the
columns mean, `jzero.plan` and lab/memory.md say.
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

from jzero import terminal
from jzero.files import JsonObject
from jzero.planning.chips import GIB

ROOT = Path(__file__).resolve().parents[1]
RECIPE = "configs/countdown.py:qwen2.5-3b"
MODELS = (
    "Qwen2.5-0.5B",
    "Qwen2.5-1.5B",
    "Qwen2.5-3B",
    "Qwen2.5-7B",
    "Qwen3-0.6B",
    "Qwen3-4B",
    "Qwen3-8B",
)
SLICES = ("v5e:2x4", "v5e:4x4", "v5e:16x16", "v6e:2x4", "v5p:2x2x2", "tpu7x:2x2x1")
TENSOR = {"Qwen2.5-7B": 4, "Qwen3-4B": 2, "Qwen3-8B": 4}  # mesh.tensor on chips of 16 GB
HEADINGS = (
    "model",
    "slice",
    "data x fsdp x tensor",
    "fits",
    "publish GiB",
    "rollout GiB",
    "update GiB",
    "HBM GiB",
    "decode temporaries, % of KV",
    "compile s",
    "roofline step s",
)


def cell_settings(model: str, topology: str) -> dict[str, int]:
    """Returns the settings of a cell: the countdown recipe, larger with the slice.

    A device has 4 prompts, 32 slots, and one row of a microbatch.
    """
    family, shape = topology.split(":")
    devices_per_chip = 2 if family == "tpu7x" else 1
    num_devices = math.prod(map(int, shape.split("x"))) * devices_per_chip
    tensor = min(TENSOR.get(model, 1), num_devices) if family == "v5e" else 1
    # Beyond 16 devices the state is copied, not split further.
    fsdp = min(num_devices, 16) // tensor
    num_prompts = max(128, 4 * num_devices)
    row_tokens = 256 + 4 * 1024
    return {
        "mesh.data": num_devices // (fsdp * tensor),
        "mesh.fsdp": fsdp,
        "mesh.tensor": tensor,
        "rollout.num_prompts": num_prompts,
        "rollout.num_slots": min(32 * num_devices, 8 * num_prompts),
        "train.packs_per_row": 4,
        "train.microbatch_tokens": row_tokens * num_devices // tensor,
    }


def setting_flags(model: str, topology: str) -> list[str]:
    values = cell_settings(model, topology)
    return [f"--config.{name}={value}" for name, value in values.items()]


def plan_cell(model: str, topology: str, file: Path) -> None:
    """Plans one cell into `file`.

    If the command ends without a verdict, its error goes to a file beside, and the last line of
    the error is printed.
    """
    command = [sys.executable, "-m", "jzero.plan", "--config", RECIPE, "--model", model]
    command += ["--topology", topology, "--json", str(file)]
    command += setting_flags(model, topology)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode > 1 or not file.exists():
        file.with_suffix(".error").write_text(" ".join(command) + "\n" + done.stderr)
        terminal.say(f"{model} {topology}: {done.stderr.strip().splitlines()[-1]}")


def table_row(model: str, report: JsonObject) -> str:
    phases = report["phases"]
    generate = report["programs"]["generate"]
    compile_s = sum(program["compile_s"] for program in report["programs"].values())
    cells = [
        model,
        report["topology"],
        " x ".join(map(str, report["mesh"].values())),
        "yes" if report["fits"] else "no",
    ]
    for phase in ("publish", "rollout", "update"):
        cells.append(f"{phases[phase] / GIB:.1f}" if phase in phases else "")
    cells += [
        f"{report['hbm_bytes'] / GIB:.1f}",
        f"{100 * generate['temp_bytes'] / generate['kv_bytes']:.2f}",
        f"{compile_s:.0f}",
        f"{report['step_s']:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def cell_files(out: Path) -> dict[tuple[str, str], Path]:
    """Returns the file of every cell, by model and topology."""
    files = {}
    for model in MODELS:
        for topology in SLICES:
            name = f"{model}_{topology.replace(':', '_')}.json"
            files[model, topology] = (out / name).absolute()
    return files


def table(files: dict[tuple[str, str], Path]) -> str:
    """Returns the table of the cells whose file exists."""
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    for (model, _), file in files.items():
        if file.exists():
            lines.append(table_row(model, json.loads(file.read_text())))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="directory of the cells' JSON and of plan.md"
    )
    parser.add_argument(
        "--only", default="", help="parts of the names of the cells to plan, with commas"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    files = cell_files(args.out)
    wanted = args.only.lower().split(",")
    with terminal.phase("plan", total=len(files), unit="cells") as phase:
        for (model, topology), file in files.items():
            name = f"{model} {topology}".lower()
            is_chosen = all(text in name for text in wanted)
            if is_chosen and not file.exists():
                plan_cell(model, topology, file)
            phase.advance()

    text = table(files)
    (args.out / "plan.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
