"""Compiles the update of long responses for a slice that need not be there, and prints its memory.

    python benchmarks/long_rows.py --model Qwen2.5-7B --topology v6e:2x4 --tokens 32768 --context 4
    python benchmarks/long_rows.py --model Qwen2.5-7B --topology v6e:2x4 --program extend

Every row holds one response, and each device, or each group of devices that share rows, has one
row. Weights are split over all devices. The line has the memory of a device by the compiled program
and by the planner's arithmetic, and the collectives in the text of the program.

`--program extend` compiles the last chunk of the prefill of a sequence that comes back with so many
tokens, instead. Its memory is that of the program alone, with the decoder's weights and one slot of
pages on each device.
"""

import argparse
import re
from dataclasses import replace
from pathlib import Path

import jax

from jzero import main as command
from jzero.config import Config
from jzero.planning.arithmetic import bytes_of_phases, totals
from jzero.planning.chips import GIB
from jzero.planning.compiling import compile_only_devices
from jzero.planning.largest import smallest_batch
from jzero.planning.models import hub_id_of
from jzero.planning.planned_run import build

RECIPE = Path(__file__).resolve().parents[1] / "configs/countdown.py"
COLLECTIVES = ("all-to-all", "all-gather", "reduce-scatter", "all-reduce", "collective-permute")


def settings_of(model: str, num_devices: int, tokens: int, context: int) -> Config:
    settings = command.parse(["--config", f"{RECIPE}:qwen2.5-3b"]).settings
    settings.model.path = hub_id_of(model)
    settings.rollout.num_slots = num_devices  # sampling is not looked at
    settings = replace(settings, mesh=replace(settings.mesh, context=context))
    return smallest_batch(settings, num_devices, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="Qwen2.5-7B", help="a model that jzero.plan knows")
    parser.add_argument("--topology", default="v5p:2x2x2", help="a slice of TPUs")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of a response")
    parser.add_argument("--context", type=int, default=1, help="devices that share a row")
    parser.add_argument("--program", default="update", choices=("update", "extend"))
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")

    devices = compile_only_devices(args.topology)
    run = build(settings_of(args.model, len(devices), args.tokens, args.context), devices)
    counted = totals(bytes_of_phases(run))
    [name] = [name for name in run.programs if name.split()[0] == args.program]
    function, arguments = run.programs[name]
    compiled = function.lower(*arguments).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None

    counts = {name: len(re.findall(name + r"[a-z-]*\(", text)) for name in COLLECTIVES}
    by_arithmetic = f"{counted['update'] / GIB:.1f} by arithmetic; "
    if args.program == "extend":
        by_arithmetic = f"{memory.temp_size_in_bytes / GIB:.2f} of them temporaries; "
    print(
        f"{args.model} {args.topology} {args.tokens:,} tokens, context {args.context}: {name} "
        f"{memory.peak_memory_in_bytes / GIB:.1f} GiB compiled, {by_arithmetic}"
        f"{', '.join(f'{count} {name}' for name, count in counts.items())}"
    )


if __name__ == "__main__":
    main()
