"""Prints where a decode step or an update spends its time, by XLA's own estimate. No TPU is needed.

    python benchmarks/cycles.py --model Qwen2.5-3B --topology v5e:2x4 [--top 20]
    python benchmarks/cycles.py --model Qwen2.5-3B --topology v5e:2x4 --program update

A compiled TPU program says how many cycles XLA expects of every operation. This script sums them
over the loops of the program. Calls of Pallas kernels, gathers and scatters have no estimate and
count as nothing. An operation costs about 2,000 cycles however small it is. Compare totals before
and after a change, not with a clock.

The share of the peak adds the kernels as if they ran at the peak themselves: attention's pages at
the chip's bandwidth in decoding, its FLOPs at the chip's peak in the update. So it is the most that
the program can reach, if XLA's estimates hold. Model FLOPs are three forward passes; recomputed
layers are not counted in them, but take their cycles.
"""

import argparse
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from jzero import main as command
from jzero.attention.tpu import LANES
from jzero.config import Config
from jzero.planning.compiling import compile_only_devices
from jzero.planning.models import hub_id_of
from jzero.planning.planned_run import PlannedRun, build, kv_bytes_per_token
from jzero.planning.roofline import (
    FORWARD_AND_BACKWARD,
    attention_flops_per_pair,
    matmul_flops_per_token,
)

ROOT = Path(__file__).resolve().parents[1]

# Cycles a second: the peak FLOPs of a chip, divided by those of its matrix units in a cycle. These
# are 4 units of 128 x 128 on v5e, 8 on the two cores of v5p, and 4 of 256 x 256 on v6e.
CLOCKS = {"TPU v5 lite": 1.5e9, "TPU v5": 1.75e9, "TPU v6 lite": 1.75e9}
SLOT_TOKENS = 768  # of each slot whose decoding is counted

HloProgram = dict[str, list[str]]  # the instructions of every computation, by its name


class Operation(NamedTuple):
    cycles: int  # of all its turns, in one call of the program
    turns: int  # how often it runs in one call
    name: str
    source: str  # what JAX called it


def computations(text: str) -> HloProgram:
    """Splits the text of a compiled program; the program's own computation is "ENTRY"."""
    program: HloProgram = {}
    lines: list[str] = []
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head:
            lines = program["ENTRY" if head[1] else head[2]] = []
        elif " = " in line:
            lines.append(line)
    return program


def first_group(pattern: str, line: str) -> str:
    match = re.search(pattern, line)
    return match[1] if match else ""


def operations(
    program: HloProgram, computation: str = "ENTRY", turns: int = 1, unknown_turns: int = 1
) -> Iterator[Operation]:
    """Yields the operations that run, inside loops and calls too.

    Of a condition's branches the most expensive counts. A loop whose turns are data has
    `unknown_turns`.
    """
    for line in program[computation]:
        cycles = first_group(r'estimated_cycles":"(\d+)"', line)
        if " while(" in line:
            body = first_group(r"body=%?([\w.\-]+)", line)
            of_loop = trip_count(program, line, unknown_turns)
            yield from operations(program, body, turns * of_loop, unknown_turns)
        elif " conditional(" in line:
            branches = [
                list(operations(program, name, turns, unknown_turns)) for name in branch_names(line)
            ]
            yield from max(branches, key=total_cycles)
        elif " call(" in line:
            called = first_group(r"to_apply=%?([\w.\-]+)", line)
            yield from operations(program, called, turns, unknown_turns)
        elif cycles:
            name = first_group(r"%?([\w.\-]+) = ", line)
            source = first_group(r'op_name="([^"]*)"', line)
            yield Operation(int(cycles) * turns, turns, name, source)


def trip_count(program: HloProgram, loop: str, unknown: int) -> int:
    """Returns the turns of a loop: those that XLA knows, else the limit that its condition has.

    `unknown` is for loops that have neither.
    """
    known = first_group(r'known_trip_count":\{"n":"(\d+)"', loop)
    if known:
        return int(known)
    condition = program[first_group(r"condition=%?([\w.\-]+)", loop)]
    limits = [first_group(r"constant\((\d+)\)", line) for line in condition]
    return max((int(limit) for limit in limits if limit), default=unknown)


def branch_names(line: str) -> list[str]:
    names = first_group(r"branch_computations=\{([^}]*)\}", line)
    if not names:
        names = " ".join(re.findall(r"_computation=(\S+)", line))
    return re.findall(r"[\w.\-]+", names)


def total_cycles(found: list[Operation]) -> int:
    return sum(operation.cycles for operation in found)


def settings_of(args: argparse.Namespace) -> Config:
    """Returns the settings of a cell of benchmarks/plan.py, with rows of one length.

    Pages in 8 bits are as long as the TPU's kernel asks for.
    """
    # By its path: `plan` is also the name of a command.
    spec = importlib.util.spec_from_file_location("plan_benchmark", ROOT / "benchmarks/plan.py")
    assert spec and spec.loader
    plan_benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plan_benchmark)

    recipe = f"{ROOT / 'configs/countdown.py'}:qwen2.5-3b"
    flags = plan_benchmark.setting_flags(args.model, args.topology)
    flags += ["--config.train.pack_buckets=1", f"--config.model.remat={args.remat}"]
    settings = command.parse(["--config", recipe, *flags]).settings
    settings.model.path = hub_id_of(args.model)
    settings.model.attention = args.attention
    settings.rollout.weights = args.weights
    settings.rollout.kv_dtype = args.kv
    if args.kv == "int8":
        settings.rollout.page_size = LANES
    return settings


def decode_peak_seconds(run: PlannedRun) -> tuple[float, float]:
    """Returns the seconds of a step at the peak bandwidth: those of weights, and of pages."""
    engine = run.engine
    cached = engine.slots_per_shard * SLOT_TOKENS * kv_bytes_per_token(engine)
    bandwidth = run.chip.bandwidth
    return run.parts["decoder weights"] / bandwidth, cached / bandwidth


def update_peak_seconds(run: PlannedRun) -> tuple[float, float]:
    """Returns the seconds of an optimizer step at the peak FLOPs: of products, and of attention.

    It has as many microbatches as the recipe's longest responses take.
    """
    [layout], [rows] = run.trainer.layouts, run.trainer.rows
    prefix, slots, slot = layout
    pairs = prefix**2 / 2 + slots * (slot * prefix + slot**2 / 2)
    model = run.trainer.policy.model
    num_rows = FORWARD_AND_BACKWARD * rows * run.trainer.microbatches[0]
    peak = run.mesh.size * run.chip.flops
    products = num_rows * layout.tokens * matmul_flops_per_token(model)
    attention = num_rows * pairs * attention_flops_per_pair(model)
    return products / peak, attention / peak


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="Qwen2.5-3B", help="a model that jzero.plan knows")
    parser.add_argument("--topology", default="v5e:2x4", help="a slice of TPUs")
    parser.add_argument("--program", default="decode", choices=("decode", "update"))
    parser.add_argument("--attention", default="", help="model.attention, such as tpu_fused")
    parser.add_argument("--remat", default="full", choices=("none", "dots", "full"))
    parser.add_argument(
        "--weights", default="native", choices=("native", "int8"), help="rollout.weights"
    )
    parser.add_argument(
        "--kv", default="bfloat16", choices=("bfloat16", "int8"), help="rollout.kv_dtype"
    )
    parser.add_argument("--top", type=int, default=20, help="operations to print")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")

    settings = settings_of(args)
    run = build(settings, compile_only_devices(args.topology))
    is_update = args.program == "update"
    function, arguments = run.programs["update" if is_update else "generate"]
    text = function.lower(*arguments).compile().as_text()
    assert text is not None
    microbatches = run.trainer.microbatches[0]
    found = sorted(operations(computations(text), unknown_turns=microbatches), reverse=True)

    units = 1 if is_update else settings.rollout.decode_steps
    cycles = total_cycles(found) // units
    seconds = cycles / CLOCKS[run.devices[0].device_kind]
    by_xla, by_kernels = update_peak_seconds(run) if is_update else decode_peak_seconds(run)
    share = (by_xla + by_kernels) / (seconds + by_kernels)
    unit = f"an optimizer step of {microbatches} microbatches" if is_update else "a decode step"
    print(
        f"{args.model} {args.topology} {args.program}: {cycles:,} cycles {unit}, "
        f"{1e3 * seconds:.2f} ms and {1e3 * by_kernels:.2f} ms of attention at the peak; at the "
        f"peak all of it is {1e3 * (by_xla + by_kernels):.2f} ms: {share:.0%}"
    )
    for operation in found[: args.top]:
        cycles, turns = operation.cycles // units, operation.turns // units
        print(f"{cycles:10,} in {turns:4} turns  {operation.name:32} {operation.source[-80:]}")


if __name__ == "__main__":
    main()
