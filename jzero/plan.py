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

from jzero import cli, command_flags, main, recipe_files, terminal
from jzero.config import Config
from jzero.files import write_atomic

# Modules that import JAX are imported by the functions that use them: a mistake in the command or
# in its recipe is reported before.

HERE = "here"  # the name of the machine that the command runs on


def print_largest(settings: Config, topology: str, json_file: str | None) -> None:
    """Prints the largest models for a topology."""
    from jzero.planning.chips import described_devices
    from jzero.planning.largest import as_json, format_largest, largest_models, memory_of

    devices = described_devices(topology)
    available = memory_of(devices[0])
    cells = largest_models(settings, devices, available)
    if json_file:
        write_atomic(json_file, json.dumps(as_json(cells, topology, available), indent=1))
    show(format_largest(cells, topology, devices, available))


def with_model(settings: Config, name: str | None) -> Config:
    """Returns the settings with another known model, in place."""
    if name:
        from jzero.planning.models import hub_id_of

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
        has_recipe = not (args.packs or args.table)
        if has_recipe and not (args.topology or args.machine):
            parser.error("give the devices to plan for: --topology v5e:2x4, or --machine v5e-8")
        if args.largest and not args.machine and not has_flag(remaining, "--config"):
            # Every known model is tried in the place of the recipe's model.
            recipe = f"--config={recipe_files.RECIPES / 'countdown.py'}:qwen2.5-3b"
            remaining = [recipe, *remaining]
        # None: the recipe imports JAX.
        parsed = main.parse_before_jax(remaining) if has_recipe else None
        choose_platform(args.machine)
        if args.packs:
            from jzero.planning.packs import format_packs

            show(format_packs(args.packs))
            return
        if args.table:
            from jzero.sizing.table import format_table

            show(format_table())
            return
        settings = (parsed or main.parse(remaining)).settings
        if args.machine:
            fits = plan_machine(with_model(settings, args.model), args.machine)
        elif args.largest:
            print_largest(settings, args.topology, args.json)
            return
        else:
            settings = with_model(settings, args.model)
            fits = plan_topology(settings, args.topology, args.json, has_scores=args.score)
    sys.exit(0 if fits else 1)


def has_flag(arguments: list[str], name: str) -> bool:
    """Returns whether a flag is among the arguments."""
    return any(argument.split("=")[0] == name for argument in arguments)


def choose_platform(machine: str | None) -> None:
    """Starts JAX for the devices of this machine, or for none."""
    with terminal.imports():
        import jax

    if machine == HERE:
        cli.start_jax([])
    else:
        # Compilation needs no device, and must not take one from a run on this machine.
        jax.config.update("jax_platforms", "cpu")


def plan_machine(settings: Config, name: str) -> bool:
    """Prints the plan for a machine by arithmetic. Returns whether the run fits."""
    with terminal.imports():
        from jzero import setup
        from jzero.planning.fitting import set_cpu_devices
        from jzero.planning.machines import find_machine, format_verdict, plan_on
        from jzero.planning.sizing import choose_sizes, hold_a_row
        from jzero.sizing.choices import this_machine

    if name == HERE:
        set_cpu_devices(settings.model.path)
        settings = setup.resolve(settings).config
        machine, note = this_machine(settings, Path()), ""
    else:
        machine = find_machine(name)
        settings, note = hold_a_row(settings, machine.devices)
        settings = choose_sizes(settings, machine.devices, machine.device_bytes)
    verdict = plan_on(settings, machine)
    write_note(note)
    show(format_verdict(settings, name, verdict))
    return verdict.fits


def plan_topology(
    settings: Config, topology: str, json_file: str | None, *, has_scores: bool
) -> bool:
    """Compiles the programs of a run for a topology and prints the report.

    Returns whether every phase fits.
    """
    with terminal.imports():
        from jzero.planning.chips import described_devices
        from jzero.planning.compiling import cache_directory
        from jzero.planning.largest import memory_of
        from jzero.planning.report import format_report, make_report
        from jzero.planning.sizing import choose_sizes, hold_a_row

    devices = described_devices(topology)
    settings, note = hold_a_row(settings, devices)
    write_note(note)
    settings = choose_sizes(settings, devices, memory_of(devices[0]))
    report = make_report(settings, topology, cache_directory(), has_scores)
    if json_file:
        write_atomic(json_file, json.dumps(report.as_json(), indent=1))
    show(format_report(report))
    return report.fits


if __name__ == "__main__":
    terminal.run_command(command)
