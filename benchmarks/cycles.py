"""Prints where a decode step or an update spends its time, by XLA's own estimate. No TPU is needed.

    python benchmarks/cycles.py --model Qwen2.5-3B --topology v5e:2x4 [--top 20]
    python benchmarks/cycles.py --model Qwen2.5-3B --topology v5e:2x4 --program update
    python benchmarks/cycles.py --model Qwen3-8B --topology v5e:1x1 -- --config.rollout.num_slots=4

Flags after -- change settings of the recipe, which is that of benchmarks/plan.py.

A compiled TPU program says how many cycles XLA expects of every operation. This script sums them
over the loops of the program. Calls of Pallas kernels, gathers and scatters have no estimate and
count as nothing. An operation costs about 2,000 cycles however small it is. Compare totals before
and after a change, not with a clock.

The share of the peak adds the kernels. Of the one that `--attention tpu_fused` decodes with, the
instructions are counted (`kernel_instructions.py`), and it takes as long as these, or as its bytes
at the chip's bandwidth, whichever is longer. The other kernels are added as if they ran at the peak
themselves: the pages of JAX's paged attention at the bandwidth, attention's FLOPs of the update at
the peak. So the share is the most that the program can reach, if XLA's estimates hold. Model FLOPs
are three forward passes; recomputed layers are not counted in them, but take their cycles.

In decoding every slot has 768 tokens, and its prompt is as long as the recipe's may be.
At the peak the full pages of a prompt are read once for all of its samples.
"""

import argparse
import importlib.util
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import kernel_instructions
from kernel_instructions import Work

from jzero import main as command
from jzero.attention.tpu import LANES
from jzero.attention.tpu_decode import Sizes, sizes_of
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
# are 4 units of 128 x 128 on v5e, 8 on the two cores of v5p, and 4 of 256 x 256 on v6e and on each
# of the two devices of a TPU7x. XLA expects of a large product 91 to 99 % of as many FLOPs in a
# cycle (lab/log.md, 2026-11-24).
CLOCKS = {"TPU v5 lite": 1.5e9, "TPU v5": 1.75e9, "TPU v6 lite": 1.75e9, "TPU7x": 2.2e9}
CORES = {"TPU v5": 2}  # of a device; others have one
SLOT_TOKENS = 768  # of each slot whose decoding is counted

HloProgram = dict[str, list[str]]  # the instructions of every computation, by its name


class Attention(NamedTuple):
    """What a step spends in kernels, for which XLA has no estimate."""

    seconds: float
    least_seconds: float  # at the peak bandwidth, or at the peak FLOPs
    bundles: int  # of instructions; 0 where nobody has counted them


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


def compiled_operations(
    function: jax.stages.Wrapped, arguments: Sequence[object], microbatches: int = 1
) -> list[Operation]:
    """Compiles a program, and returns its operations, the most expensive first.

    microbatches: the turns of a loop whose turns are data.
    """
    text = function.lower(*arguments).compile().as_text()
    assert text is not None
    return sorted(operations(computations(text), unknown_turns=microbatches), reverse=True)


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
    flags += ["--config.train.pack=longest", f"--config.model.remat={args.remat}"]
    flags += [f"--config.model.attention={args.attention}"]
    flags += [f"--config.rollout.weights={args.weights}", f"--config.rollout.kv_dtype={args.kv}"]
    settings = command.parse(["--config", recipe, *flags, *args.flags]).settings
    settings.model.path = hub_id_of(args.model)
    if settings.rollout.kv_dtype == "int8":
        settings.rollout.page_size = LANES
    return settings


def cores_of(run: PlannedRun) -> int:
    """Returns the cores of a device."""
    return CORES.get(run.devices[0].device_kind, 1)


def decode_work(run: PlannedRun, slot_tokens: int = SLOT_TOKENS) -> Work:
    """Returns what attention does in a decode step in which every slot has `slot_tokens` tokens."""
    return Work(
        slots=run.engine.slots_per_shard,
        tokens=slot_tokens,
        prompt=run.engine.settings.max_prompt_tokens,
        cores=cores_of(run),
    )


def kernel_sizes(run: PlannedRun) -> Sizes:
    """Returns the sizes of the kernel of `model.attention=tpu_fused` on one device."""
    engine = run.engine
    tensor = engine.mesh.shape["tensor"]
    S, D = engine.slots_per_shard, engine.model.head_dim
    K = max(1, engine.model.num_key_value_heads // tensor)
    q = jax.ShapeDtypeStruct((S, engine.model.num_attention_heads // tensor, D), jnp.bfloat16)

    def of_device(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype)

    pool = jax.tree.map(of_device, engine.abstract_state().k_pool)
    num_blocks = S // engine.slots_per_block
    return sizes_of(q, K, pool, engine.pages_per_slot, num_blocks, cores_of(run))


def page_seconds(run: PlannedRun, sizes: Sizes, work: Work) -> float:
    """Returns the seconds that a decode step takes to read all pages at the peak bandwidth."""
    num_layers = run.engine.model.num_hidden_layers
    bytes_of_token = kv_bytes_per_token(run.engine) / num_layers
    read = kernel_instructions.bytes_read(sizes, work, bytes_of_token)
    return num_layers * read / run.chip.bandwidth


def decode_seconds(run: PlannedRun, directory: Path | None, work: Work) -> Attention:
    """Returns the seconds of attention in a decode step.

    directory: where libtpu has written the bundles of the fused kernel, or None if another one
        decodes, which reads all pages of every slot.
    """
    sizes = kernel_sizes(run)
    least = page_seconds(run, sizes._replace(neighbors=sizes.sharing), work)
    if directory is None:
        return Attention(page_seconds(run, sizes._replace(neighbors=1), work), least, 0)
    text = kernel_instructions.final_bundles(directory, "decode_attention")
    kernel = kernel_instructions.loops_of(text)
    bundles = kernel_instructions.count(kernel, sizes, work)
    bundles *= run.engine.model.num_hidden_layers
    by_bundles = bundles / CLOCKS[run.devices[0].device_kind]
    return Attention(max(by_bundles, page_seconds(run, sizes, work)), least, bundles)


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
    parser.add_argument("flags", nargs="*", help="--config flags, after --")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")

    is_update = args.program == "update"
    settings = settings_of(args)
    counts_bundles = settings.model.attention == "tpu_fused" and not is_update
    with kernel_instructions.written_bundles() if counts_bundles else nullcontext() as directory:
        run = build(settings, compile_only_devices(args.topology))
        function, arguments = run.programs["update" if is_update else "generate"]
        microbatches = run.trainer.microbatches[0]
        found = compiled_operations(function, arguments, microbatches)
        if is_update:
            least_of_products, least_of_attention = update_peak_seconds(run)
            attention = Attention(least_of_attention, least_of_attention, 0)
        else:
            weights = run.parts["decoder weights"] + run.parts.get("frozen base", 0)
            least_of_products = weights / run.chip.bandwidth
            attention = decode_seconds(run, directory, decode_work(run))

    units = 1 if is_update else settings.rollout.decode_steps
    cycles = total_cycles(found) // units
    seconds = cycles / CLOCKS[run.devices[0].device_kind]
    least = least_of_products + attention.least_seconds
    share = least / (seconds + attention.seconds)
    unit = f"an optimizer step of {microbatches} microbatches" if is_update else "a decode step"
    of_kernels = "at the peak"
    if attention.bundles:
        of_kernels = (
            f"({attention.bundles:,} bundles; {1e3 * attention.least_seconds:.2f} ms at the peak)"
        )
    print(
        f"{args.model} {args.topology} {args.program}: {cycles:,} cycles {unit}, "
        f"{1e3 * seconds:.2f} ms and {1e3 * attention.seconds:.2f} ms of attention {of_kernels}; "
        f"at the peak all of it is {1e3 * least:.2f} ms: {share:.0%}"
    )
    for operation in found[: args.top]:
        cycles, turns = operation.cycles // units, operation.turns // units
        print(f"{cycles:10,} in {turns:4} turns  {operation.name:32} {operation.source[-80:]}")


if __name__ == "__main__":
    main()
