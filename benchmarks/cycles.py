"""`python benchmarks/cycles.py --model Qwen2.5-3B --topology v5e:2x4 [--top 20]`: where a decode step spends its time,
by XLA's own estimate. No TPU is needed.

Compiled TPU programs say how many cycles XLA expects of every operation; this sums them over the loops of decoding
(calls of Pallas kernels, gathers and scatters have no estimate and count as nothing). An operation costs about 2,000
cycles however small it is. Compare totals before and after a change, not with a clock."""

import argparse
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from jzero import main as command
from jzero import plan as planner


class Operation(NamedTuple):
    cycles: int  # of all its turns, in one call of the program
    turns: int
    name: str
    source: str  # what JAX called it


def computations(text: str) -> dict[str, list[str]]:
    """Instructions of every computation of a compiled program; that of "ENTRY" is the program's."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            lines = found["ENTRY" if head[1] else head[2]] = []
        elif " = " in line:
            lines.append(line)
    return found


def of(pattern: str, line: str, default: str = "") -> str:
    match = re.search(pattern, line)
    return match[1] if match else default


def operations(
    program: dict[str, list[str]], computation: str = "ENTRY", turns: int = 1
) -> Iterator[Operation]:
    """Those that run, inside loops and calls too; of a condition's branches the dearest."""
    for line in program[computation]:
        if " while(" in line:
            limits = [
                of(r"constant\((\d+)\)", each)
                for each in program[of(r"condition=%?([\w.\-]+)", line)]
            ]
            count = of(r'known_trip_count":\{"n":"(\d+)"', line) or max(
                filter(None, limits), default="1"
            )
            yield from operations(program, of(r"body=%?([\w.\-]+)", line), turns * int(count))
        elif " conditional(" in line:
            named = of(r"branch_computations=\{([^}]*)\}", line) or " ".join(
                re.findall(r"_computation=(\S+)", line)
            )
            branches = [
                list(operations(program, name, turns)) for name in re.findall(r"[\w.\-]+", named)
            ]
            yield from max(branches, key=lambda branch: sum(each.cycles for each in branch))
        elif " call(" in line:
            yield from operations(program, of(r"to_apply=%?([\w.\-]+)", line), turns)
        elif cycles := of(r'estimated_cycles":"(\d+)"', line):
            yield Operation(
                int(cycles) * turns,
                turns,
                of(r"%?([\w.\-]+) = ", line),
                of(r'op_name="([^"]*)"', line),
            )


def decoding(model: str, topology: str) -> tuple[str, int]:
    """The compiled program of a cell of benchmarks/plan.py, and the steps of one call."""
    spec = importlib.util.spec_from_file_location(
        "plan_benchmark", Path(__file__).with_name("plan.py")
    )
    assert spec and spec.loader
    cells = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cells)
    recipe = str(Path(__file__).parents[1] / "configs" / "countdown.py")
    flags = [f"--config.{name}={value}" for name, value in cells.settings(model, topology).items()]
    settings, _ = command.parse(["--config", f"{recipe}:qwen2.5-3b", *flags])
    settings.model.path = planner.named(model)
    jitted, arguments = planner.build(settings, planner.devices(topology)).programs["generate"]
    return jitted.lower(*arguments).compile().as_text(), settings.rollout.decode_steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="Qwen2.5-3B", help="of jzero.plan")
    parser.add_argument("--topology", default="v5e:2x4", help="a slice of TPUs")
    parser.add_argument("--top", type=int, default=20, help="operations to print")
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    text, steps = decoding(given.model, given.topology)
    every = sorted(operations(computations(text)), reverse=True)
    print(
        f"{given.model} {given.topology}: {sum(each.cycles for each in every) // steps:,} cycles a decode step"
    )
    for each in every[: given.top]:
        print(
            f"{each.cycles // steps:10,} in {each.turns // steps:4} turns  {each.name:32} {each.source[-80:]}"
        )


if __name__ == "__main__":
    main()
