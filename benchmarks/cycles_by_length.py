"""Prints what a token costs on a TPU by the length of responses, by XLA's own estimate.

    python benchmarks/cycles_by_length.py --model Qwen2.5-7B --topology v6e:2x4 --context 4
    python benchmarks/cycles_by_length.py --model Qwen2.5-7B --topology v5p:2x2x2 --program decode

No TPU is needed. The update has one row of one response on each device, or on each group of devices
that share rows. XLA's cycles are those of everything but attention's kernels, so that of a token
they should not depend on the length; attention is added as if it ran at the peak FLOPs. In a decode
step every slot has a prompt and a response of this length. The kernel's cycles are its
instructions, or its bytes at the peak bandwidth, whichever take longer (`kernel_instructions.py`).
"""

import argparse
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import cycles
import jax
import kernel_instructions
import long_rows

from jzero.planning.compiling import compile_only_devices
from jzero.planning.planned_run import PlannedRun, build

HEADINGS = {
    "update": ("cycles of a token without attention", "attention at the peak"),
    "decode": ("million cycles of a step without the kernel", "the kernel"),
}


def planned_run(args: argparse.Namespace, tokens: int) -> PlannedRun:
    """Returns the run whose responses have `tokens` tokens."""
    devices = compile_only_devices(args.topology)
    settings = long_rows.settings_of(args.model, len(devices), tokens, args.context)
    if args.program == "decode":
        num_slots = args.slots * len(devices)
        settings = replace(
            settings,
            rollout=replace(settings.rollout, num_slots=num_slots),
            model=replace(settings.model, attention="tpu_fused"),
        )
    return build(settings, devices)


def update_row(run: PlannedRun) -> tuple[str, str]:
    """Returns the cycles of a token of a device: without attention, and those of attention."""
    microbatches = run.trainer.microbatches[0]
    found = cycles.compiled_operations(*run.programs["update"], microbatches)
    [layout], [rows] = run.trainer.layouts, run.trainer.rows
    tokens_of_device = microbatches * rows * layout.tokens / run.mesh.size
    _, attention_seconds = cycles.update_peak_seconds(run)
    of_attention = attention_seconds * cycles.CLOCKS[run.devices[0].device_kind]
    return (
        f"{cycles.total_cycles(found) / tokens_of_device:,.0f}",
        f"{of_attention / tokens_of_device:,.0f}",
    )


def decode_row(run: PlannedRun, directory: Path | None, tokens: int) -> tuple[str, str]:
    """Returns the million cycles of a step: without the kernel, and those of the kernel."""
    found = cycles.compiled_operations(*run.programs["generate"])
    work = cycles.decode_work(run, run.engine.settings.max_prompt_tokens + tokens)
    kernel = cycles.decode_seconds(run, directory, work)
    of_kernel = kernel.seconds * cycles.CLOCKS[run.devices[0].device_kind]
    steps = run.engine.settings.decode_steps
    return f"{cycles.total_cycles(found) / steps / 1e6:.2f}", f"{of_kernel / 1e6:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="Qwen2.5-7B", help="a model that jzero.plan knows")
    parser.add_argument("--topology", default="v5p:2x2x2", help="a slice of TPUs")
    parser.add_argument("--program", default="update", choices=tuple(HEADINGS))
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1024, 4096, 16384, 32768], help="of a response"
    )
    parser.add_argument("--context", type=int, default=1, help="devices that share a row")
    parser.add_argument("--slots", type=int, default=8, help="of a device, in decoding")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")

    is_decode = args.program == "decode"
    print(f"| tokens | {' | '.join(HEADINGS[args.program])} |", flush=True)
    print("|---|---|---|")
    with kernel_instructions.written_bundles() if is_decode else nullcontext() as directory:
        for tokens in args.tokens:
            run = planned_run(args, tokens)
            row = decode_row(run, directory, tokens) if is_decode else update_row(run)
            print(f"| {tokens:,} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
