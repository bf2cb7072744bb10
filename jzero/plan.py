"""Plans a run: checks whether it fits on a topology, and estimates the time of a step.

    python -m jzero.plan --config configs/countdown.py:qwen2.5-3b --topology v5e:2x4 \\
        [--config.section.field=value ...]

The command compiles every program of the run with the run's own code, for devices that need not be
attached. It prints the HBM of a device by part, the total of each phase, and a step's roofline.
Nothing is downloaded. The exit status is 1 if a phase does not fit; the output then suggests
changes.

    python -m jzero.plan --topology v5e:1x1 --largest

prints the largest known model that can be trained on the devices, for responses of 1,024 and 8,192
tokens. This mode uses arithmetic and compiles nothing; verify its settings with a plan that does.

    python -m jzero.plan --config RECIPE --machine v5e-8

says by arithmetic whether a recipe fits the memory and the disk of a usual machine: v5e-1, v5e-8,
v6e-1, v6e-8, H100, L4, T4, laptop-24gb or laptop-8gb, or a slice of Cloud TPUs by its accelerator
type, such as v5litepod-16. RECIPE may be the file that `jzero train` has written. `--machine here`
takes the attached devices, and prints the sizes that the run has on them. The exit status is 1 if
it does not fit.

    python -m jzero.plan --table

prints what `jzero train` chooses for 20 pairs of a known model and such a machine, by arithmetic.

    python -m jzero.plan --packs runs/countdown-tiny-DATE

compares values of train.pack for the responses that a run has logged, and needs no topology.

Topologies of TPUs, with libtpu:    v5e:2x4 v5e:4x4 ... v5e:16x16, v6e:2x4 ..., v5p:2x2x1 v5p:2x2x2
                                    ..., tpu7x:2x2x1 ...; two slices: 2xv5e:2x4
Topologies of the GPUs of one host, with jax-cuda12-plugin:    a100:8 h100:8 h200:8
                                                              l4:1 rtx4090:1 a100-40gb:1
"""

import json
import sys
from pathlib import Path

import jax

from jzero import cli, command_flags, main, recipe_files, setup, terminal
from jzero.config import Config
from jzero.files import write_atomic
from jzero.planning.chips import described_devices
from jzero.planning.compiling import cache_directory
from jzero.planning.fitting import set_cpu_devices
from jzero.planning.largest import as_json, format_largest, largest_models, memory_of
from jzero.planning.machines import find_machine, format_verdict, plan_on
from jzero.planning.models import hub_id_of
from jzero.planning.packs import format_packs
from jzero.planning.report import format_report, make_report
from jzero.planning.sizing import choose_sizes, hold_a_row
from jzero.sizing.choices import this_machine
from jzero.sizing.table import format_table

HERE = "here"  # the name of the machine that the command runs on


def print_largest(topology: str, arguments: list[str], json_file: str | None) -> None:
    """Prints the largest models for a topology. The default recipe is countdown."""
    has_recipe = any(argument.split("=")[0] == "--config" for argument in arguments)
    if not has_recipe:
        # Every known model is tried in the place of the recipe's model.
        arguments = [f"--config={recipe_files.RECIPES / 'countdown.py'}:qwen2.5-3b", *arguments]
    settings = main.parse(arguments).settings
    devices = described_devices(topology)
    available = memory_of(devices[0])
    cells = largest_models(settings, devices, available)
    if json_file:
        write_atomic(json_file, json.dumps(as_json(cells, topology, available), indent=1))
    show(format_largest(cells, topology, devices, available))


def with_model(settings: Config, name: str | None) -> Config:
    """Returns the settings with another known model, in place."""
    if name:
        settings.model.path = hub_id_of(name)
    return settings


def show(text: str) -> None:
    """Prints a text with lines that fit the terminal, or 80 columns in a pipe."""
    terminal.write(terminal.fit_lines(text))


def write_note(note: str) -> None:
    if note:
        show(f"note: {note}\n")


def command() -> None:
    parser = command_flags.plan(__doc__)
    with cli.user_errors():
        args, remaining = parser.parse_known_args()
        if args.machine == HERE:
            cli.start_jax([])
        else:
            # Compilation needs no device, and must not take one from a run on this machine.
            jax.config.update("jax_platforms", "cpu")
        if args.packs:
            show(format_packs(args.packs))
            return
        if args.table:
            show(format_table())
            return
        if args.machine:
            settings = with_model(main.parse(remaining).settings, args.model)
            if args.machine == HERE:
                set_cpu_devices(settings.model.path)
                described = setup.describe_run(setup.resolve(settings))
                settings, machine, note = described.config, this_machine(settings, Path()), ""
            else:
                machine = find_machine(args.machine)
                settings, note = hold_a_row(settings, machine.devices)
                settings = choose_sizes(settings, machine.devices, machine.device_bytes)
            verdict = plan_on(settings, machine)
            write_note(note)
            show(format_verdict(settings, args.machine, verdict))
            sys.exit(0 if verdict.fits else 1)
        if not args.topology:
            parser.error("give the devices to plan for: --topology v5e:2x4, or --machine v5e-8")
        if args.largest:
            print_largest(args.topology, remaining, args.json)
            return
        settings = with_model(main.parse(remaining).settings, args.model)
        devices = described_devices(args.topology)
        settings, note = hold_a_row(settings, devices)
        write_note(note)
        settings = choose_sizes(settings, devices, memory_of(devices[0]))
        report = make_report(settings, args.topology, cache_directory(), args.score)
        if args.json:
            write_atomic(args.json, json.dumps(report.as_json(), indent=1))
    show(format_report(report))
    sys.exit(0 if report.fits else 1)


if __name__ == "__main__":
    terminal.run_command(command)
