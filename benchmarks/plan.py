"""`python benchmarks/plan.py --out DIR [--only TEXT,...]`: `jzero.plan` of every model on every slice, as a table.

One process and one JSON file a cell; cells that are there are not compiled again, so the command goes on where it
stopped. Only cells whose name ("Qwen2.5-3B v5e:2x4") holds every TEXT."""

import argparse
import json
import subprocess
import sys
from math import prod
from pathlib import Path

from tqdm import tqdm

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
TENSOR = {"Qwen2.5-7B": 4, "Qwen3-4B": 2, "Qwen3-8B": 4}  # where a chip has 16 GB
GIB = 2**30


def settings(model: str, topology: str) -> dict[str, int]:
    """The countdown recipe, larger with the slice: 4 prompts and 32 slots a device, a row a device in a microbatch."""
    family, shape = topology.split(":")
    devices = prod(map(int, shape.split("x"))) * (2 if family == "tpu7x" else 1)
    tensor = TENSOR.get(model, 1) if family == "v5e" else 1
    fsdp = min(devices, 16) // tensor  # beyond 16 devices the state is copied, not split further
    prompts = max(128, 4 * devices)
    return {
        "mesh.data": devices // (fsdp * tensor),
        "mesh.fsdp": fsdp,
        "mesh.tensor": tensor,
        "rollout.num_prompts": prompts,
        "rollout.num_slots": min(32 * devices, 8 * prompts),
        "train.packs_per_row": 4,
        "train.microbatch_tokens": (256 + 4 * 1024) * devices // tensor,
    }


def plan(model: str, topology: str, file: Path) -> None:
    """One cell. What stops it without a verdict goes to a file beside."""
    flags = [f"--config.{name}={value}" for name, value in settings(model, topology).items()]
    recipe = [
        "--config",
        "configs/countdown.py:qwen2.5-3b",
        "--model",
        model,
        "--topology",
        topology,
    ]
    command = [sys.executable, "-m", "jzero.plan", *recipe, "--json", str(file), *flags]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    if done.returncode > 1 or not file.exists():
        file.with_suffix(".error").write_text(" ".join(command) + "\n" + done.stderr)
        tqdm.write(f"{model} {topology}: {done.stderr.strip().splitlines()[-1]}")


def row(model: str, report: dict) -> str:
    gib = lambda name: f"{report['phases'][name] / GIB:.1f}" if name in report["phases"] else ""
    generate = report["programs"]["generate"]
    cells = [
        model,
        report["topology"],
        " x ".join(map(str, report["mesh"].values())),
        "yes" if report["fits"] else "no",
        *map(gib, ("publish", "rollout", "update")),
        f"{report['hbm_bytes'] / GIB:.1f}",
        f"{100 * generate['temp_bytes'] / generate['kv_bytes']:.2f}",
        f"{sum(found['compile_s'] for found in report['programs'].values()):.0f}",
        f"{report['step_s']:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="directory of the cells' JSON and of plan.md"
    )
    parser.add_argument(
        "--only", default="", help="parts of the names of the cells to do, with commas"
    )
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    cells = [(model, topology) for model in MODELS for topology in SLICES]
    file_of = lambda model, topology: (
        given.out / f"{model}_{topology.replace(':', '_')}.json"
    ).absolute()
    chosen = [
        cell
        for cell in cells
        if all(text.lower() in " ".join(cell).lower() for text in given.only.split(","))
    ]
    for model, topology in tqdm(chosen, desc="plan", unit="cell"):
        if not file_of(model, topology).exists():
            plan(model, topology, file_of(model, topology))
    head = "model | slice | data x fsdp x tensor | fits | publish GiB | rollout GiB | update GiB | HBM GiB | "
    head += "decode temporaries, % of KV | compile s | roofline step s"
    rows = [
        row(model, json.loads(file.read_text()))
        for model, t in cells
        if (file := file_of(model, t)).exists()
    ]
    text = "\n".join([f"| {head} |", "|---" * 11 + "|", *rows]) + "\n"
    (given.out / "plan.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
