"""Plans every model on every slice with `jzero.plan`, and prints one table.

    python benchmarks/plan.py --out DIR [--only TEXT,...]

A cell is a model on a slice. Every cell is a process of its own and a JSON file in DIR. A cell
whose file is there is not compiled again, so that the command goes on where it stopped. `--only`
chooses the cells whose name, such as "Qwen2.5-3B v5e:2x4", holds every TEXT.

The table is Markdown and goes to DIR/plan.md, too. It has one row for every cell whose file is in
DIR: whether the cell fits, the memory of its phases, and the predicted seconds of a step. What the
columns mean, `jzero.plan` and lab/memory.md say.

    python benchmarks/plan.py --check [--only CELL,...]
    python benchmarks/plan.py --record [--only CELL,...]

compile the programs of a small run for one v5e, eight v5e and one H100 (`CHECKED`), and compare
their bytes with those of plan_bytes.json, or write them there. The status of --check is 1 if a
figure differs by more than 1 %. The H100 needs jax-cuda12-plugin and cuDNN, the others libtpu.
benchmarks/landing.py makes this check before each landing.
"""

import argparse
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
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


# The devices whose plans are compared with recorded figures, and their topologies.
CHECKED = {"v5e-1": "v5e:1x1", "v5e-8": "v5e:2x4", "H100": "h100:1"}
RECORDED = ROOT / "benchmarks/plan_bytes.json"
TOLERANCE = 0.01
COMPILERS = {"h100": "jax-cuda12-plugin", "v5e": "libtpu"}
# A run of few shapes: the heads of Qwen2.5-3B, so that the kernels of accelerators are chosen, and
# the small vocabulary of the tiny recipe. A vocabulary of 150,000 tokens compiles for minutes.
SMALL_RUN = """
model.arch=tiny-qwen2(hidden_size=256,intermediate_size=512,num_hidden_layers=2,\
num_attention_heads=16,num_key_value_heads=2,head_dim=128)
rollout.num_prompts=16 rollout.group_size=4 rollout.max_prompt_tokens=32 rollout.max_new_tokens=32
rollout.num_slots=32 rollout.page_size=64 rollout.num_pages=1024
train.microbatch_tokens=1280 train.pack=longest train.packs_per_row=4
""".replace("\\\n", "")


@dataclass
class Check:
    """The bytes of a cell, compared with the recorded ones."""

    values: dict[str, int] = field(default_factory=dict)  # of phases and programs
    failures: list[str] = field(default_factory=list)


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


def versions_of(topology: str) -> dict[str, str]:
    """Returns the versions of jax and of the compiler for a topology; "none" if it is missing."""
    versions = {}
    for package in ("jax", COMPILERS[topology.partition(":")[0]]):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "none"
    return versions


def bytes_of(report: JsonObject) -> dict[str, int]:
    """Returns the bytes in a report of `jzero.plan`: of each phase, and the peak of each program.

    They are of one device.
    """
    values = {f"phase {name}": round(value) for name, value in report["phases"].items()}
    for name, program in report["programs"].items():
        values[f"arguments of {name}"] = round(program["argument_bytes"])
        values[f"peak of {name}"] = round(program["peak_bytes"])
    return values


def compile_cell(cell: str, checkout: Path) -> Check:
    """Compiles the programs of a cell of CHECKED with the code of a checkout."""
    command = [sys.executable, "-m", "jzero.plan", f"--topology={CHECKED[cell]}"]
    command.append(f"--config={checkout}/configs/countdown.py:tiny")
    command += [f"--config.{setting}" for setting in SMALL_RUN.split()]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        done = subprocess.run(
            [*command, f"--json={file}"],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": path_of(checkout), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
        )
        if file.exists():
            return Check(bytes_of(json.loads(file.read_text())))
    last_line = (done.stderr.strip().splitlines() or ["nothing was printed"])[-1]
    return Check(failures=[f"{cell}: jzero.plan ended with {done.returncode}: {last_line}"])


def path_of(checkout: Path) -> str:
    """Returns PYTHONPATH with a checkout in front."""
    existing = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([str(checkout), *filter(None, [existing])])


def compare_bytes(cell: str, recorded: Mapping[str, int], values: Mapping[str, int]) -> list[str]:
    """Returns a line for every figure of a cell that is new, gone, or differs by over 1 %."""
    lines = []
    for name in sorted({*recorded, *values}):
        old, new = recorded.get(name), values.get(name)
        if old is None or new is None:
            lines.append(f"{cell}, {name}: {old} -> {new} bytes")
        elif abs(new - old) > TOLERANCE * old:
            lines.append(
                f"{cell}, {name}: {old:,} -> {new:,} bytes, {100 * (new / old - 1):+.1f} %"
            )
    return lines


def check_cell(cell: str, checkout: Path = ROOT) -> Check:
    """Compiles a cell of CHECKED, and compares its bytes with the file RECORDED of a checkout."""
    again = f"record anew with python benchmarks/plan.py --record --only {cell}"
    file = checkout / RECORDED.relative_to(ROOT)
    recorded = json.loads(file.read_text()).get(cell) if file.exists() else None
    if recorded is None:
        return Check(failures=[f"{cell}: no recorded figures: {again}"])
    versions = versions_of(CHECKED[cell])
    missing = [package for package, version in versions.items() if version == "none"]
    if missing:
        return Check(failures=[f"{cell}: {missing[0]} is not installed"])
    check = compile_cell(cell, checkout)
    if not check.values:
        return check
    check.failures = compare_bytes(cell, recorded["bytes"], check.values)
    if check.failures:
        if versions != recorded["versions"]:
            was, now = (json.dumps(found) for found in (recorded["versions"], versions))
            check.failures.append(f"{cell}: recorded with {was}, compiled with {now}")
        check.failures.append(f"{cell}: if this is intended, {again}")
    return check


def check_or_record(is_recorded: bool, only: list[str]) -> bool:
    """Compares or records the cells that `only` names, all without it. Returns if all hold."""
    is_good = True
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    for cell, topology in CHECKED.items():
        if only and cell.lower() not in only:
            continue
        check = compile_cell(cell, ROOT) if is_recorded else check_cell(cell)
        for line in check.failures:
            print(line, flush=True)
        is_good &= not check.failures
        if check.values:
            verb = "recorded" if is_recorded else "compared"
            print(f"{cell}: {len(check.values)} figures {verb}", flush=True)
        if is_recorded and check.values:
            recorded[cell] = {"versions": versions_of(topology), "bytes": check.values}
            RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")
    return is_good


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
    parser.add_argument("--out", type=Path, help="directory of the cells' JSON and of plan.md")
    parser.add_argument("--check", action="store_true", help="compare with plan_bytes.json")
    parser.add_argument("--record", action="store_true", help="write plan_bytes.json")
    parser.add_argument(
        "--only", default="", help="parts of the names of the cells to plan, with commas"
    )
    args = parser.parse_args()
    if args.check or args.record:
        only = [name for name in args.only.lower().split(",") if name]
        sys.exit(0 if check_or_record(args.record, only) else 1)
    if not args.out:
        parser.error("give --out DIR, --check or --record")
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
