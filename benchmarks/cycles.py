"""Prints where a decode step spends its time, by XLA's own estimate. No TPU is needed.

    python benchmarks/cycles.py --model Qwen2.5-3B --topology v5e:2x4 [--top 20]

A compiled TPU program says how many cycles XLA expects of every operation. This script sums them
over the loops of decoding. Calls of Pallas kernels, gathers and scatters have no estimate and count
as nothing. An operation costs about 2,000 cycles however small it is. Compare totals before and
after a change, not with a clock.
"""

import argparse
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from jzero import main as command
from jzero.planning.compiling import compile_only_devices
from jzero.planning.models import hub_id_of
from jzero.planning.planned_run import build

ROOT = Path(__file__).resolve().parents[1]

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
    program: HloProgram, computation: str = "ENTRY", turns: int = 1
) -> Iterator[Operation]:
    """Yields the operations that run, inside loops and calls too.

    Of a condition's branches the most expensive counts.
    """
    for line in program[computation]:
        cycles = first_group(r'estimated_cycles":"(\d+)"', line)
        if " while(" in line:
            body = first_group(r"body=%?([\w.\-]+)", line)
            yield from operations(program, body, turns * trip_count(program, line))
        elif " conditional(" in line:
            branches = [list(operations(program, name, turns)) for name in branch_names(line)]
            yield from max(branches, key=total_cycles)
        elif " call(" in line:
            yield from operations(program, first_group(r"to_apply=%?([\w.\-]+)", line), turns)
        elif cycles:
            name = first_group(r"%?([\w.\-]+) = ", line)
            source = first_group(r'op_name="([^"]*)"', line)
            yield Operation(int(cycles) * turns, turns, name, source)


def trip_count(program: HloProgram, loop: str) -> int:
    """Returns the turns of a loop: those that XLA knows, else the limit that its condition has."""
    known = first_group(r'known_trip_count":\{"n":"(\d+)"', loop)
    if known:
        return int(known)
    condition = program[first_group(r"condition=%?([\w.\-]+)", loop)]
    limits = [first_group(r"constant\((\d+)\)", line) for line in condition]
    return max((int(limit) for limit in limits if limit), default=1)


def branch_names(line: str) -> list[str]:
    names = first_group(r"branch_computations=\{([^}]*)\}", line)
    if not names:
        names = " ".join(re.findall(r"_computation=(\S+)", line))
    return re.findall(r"[\w.\-]+", names)


def total_cycles(found: list[Operation]) -> int:
    return sum(operation.cycles for operation in found)


def compiled_decoding(model: str, topology: str) -> tuple[str, int]:
    """Returns the compiled program of a cell of benchmarks/plan.py, and the steps of one call."""
    # By its path: `plan` is also the name of a command.
    spec = importlib.util.spec_from_file_location("plan_benchmark", ROOT / "benchmarks/plan.py")
    assert spec and spec.loader
    plan_benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plan_benchmark)

    recipe = f"{ROOT / 'configs/countdown.py'}:qwen2.5-3b"
    flags = plan_benchmark.setting_flags(model, topology)
    settings = command.parse(["--config", recipe, *flags]).settings
    settings.model.path = hub_id_of(model)
    run = build(settings, compile_only_devices(topology))
    function, arguments = run.programs["generate"]
    text = function.lower(*arguments).compile().as_text()
    assert text is not None
    return text, settings.rollout.decode_steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="Qwen2.5-3B", help="a model that jzero.plan knows")
    parser.add_argument("--topology", default="v5e:2x4", help="a slice of TPUs")
    parser.add_argument("--top", type=int, default=20, help="operations to print")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")

    text, steps = compiled_decoding(args.model, args.topology)
    found = sorted(operations(computations(text)), reverse=True)

    print(f"{args.model} {args.topology}: {total_cycles(found) // steps:,} cycles a decode step")
    for operation in found[: args.top]:
        cycles, turns = operation.cycles // steps, operation.turns // steps
        print(f"{cycles:10,} in {turns:4} turns  {operation.name:32} {operation.source[-80:]}")


if __name__ == "__main__":
    main()
