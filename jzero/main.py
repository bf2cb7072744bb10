"""`python -m jzero.main --config configs/countdown.py[:preset] [--workdir DIR] [--config.section.field=value ...]`

Trains a model with RL, or with supervised fine-tuning if `sft` is set. The same command
resumes a run that was stopped or killed: it continues from the workdir's last checkpoint.
"""  # noqa: E501 (the first line is the usage that --help prints)

import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jzero
from jzero import cli, command_flags, config, terminal
from jzero.config import describe
from jzero.config.flags import check_texts
from jzero.errors import UserError
from jzero.files import JsonObject
from jzero.recipe_files import (
    ImportsJaxError,
    load_recipe,
    read_flags,
    recipe_files,
    recipe_help,
    split_recipe,
    without_jax,
)

# Modules that import JAX are imported by the functions that use them: a mistake in the command is
# reported before.

UNFINISHED_STATUS_HELP = (
    "exit status of a run that stops with a checkpoint before its last step. The manifests in "
    "clusters/ set 75 and start such a run again"
)


class Command(NamedTuple):
    """The parsed command line."""

    settings: config.Config
    workdir: Path | None  # None: a directory in runs/ with the time in its name
    unfinished_status: int  # the exit status of a run that stops before its last step


def run() -> None:
    run_arguments(sys.argv[1:])


def run_arguments(arguments: list[str]) -> None:
    """Runs the training of a command line. A mistake in it ends the process."""
    command = check_arguments(arguments)
    arguments = cli.start_jax(arguments)
    command = command or parse(arguments)
    with terminal.imports():
        from jzero.hosts import peers
        from jzero.planning.fitting import set_cpu_devices
        from jzero.run import buckets

    set_cpu_devices(command.settings.model.path)
    with cli.user_errors():
        # Hosts with different settings would compile different programs, and wait for each other in
        # their collectives.
        peers.check_same_start(start_values(command.settings, command.workdir))
        workdir = command.workdir or default_workdir(command.settings.name)
        with buckets.open_workdir(workdir) as directory:
            summary = start(command.settings, directory)
        # Only a run that finished all of its steps has an export.
        if summary["export"] is None:
            sys.exit(command.unfinished_status)


def default_workdir(name: str) -> Path:
    """Returns a new directory in runs/ for a run of this name. Every process has to call this."""
    from jzero.hosts import collectives

    # The clocks of several hosts may differ, so all of them use the name from the first host.
    directory = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Path(collectives.gather_json(directory)[0])


def start(settings: config.Config, workdir: Path) -> JsonObject:
    """Trains, by RL or by supervised fine-tuning, and returns the summary of the run."""
    with terminal.imports():
        from jzero.hosts import processes
        from jzero.loops.rl import train
        from jzero.loops.sft import train as fine_tune

    processes.print_once(f"config {settings.name}, workdir {workdir}")
    cli.keep_compiled_programs(workdir / "programs")
    loop = fine_tune if settings.sft is not None else train
    cli.end_quietly_at_ctrl_c()  # before and after the loop, which saves a checkpoint first
    return loop(settings, workdir)


def start_values(settings: config.Config, workdir: Path | None) -> dict[str, object]:
    """Returns the values that all hosts of a run must have in common, by name, as JSON values."""
    import jax

    return {
        "--workdir": str(workdir or ""),
        "jzero": jzero.__version__,
        "jax": jax.__version__,
        **config.flatten(json.loads(config.to_json(settings))),
    }


def parse_before_jax(arguments: list[str]) -> Command | None:
    """Returns the parsed command line, or None if the recipe imports JAX.

    A mistake ends the process. Settings that cannot be combined, and options that the task does
    not have, are mistakes too.
    """
    try:
        with without_jax():
            command = parse(arguments)
            with cli.user_errors():
                check_settings(command.settings)
            return command
    except ImportsJaxError:
        return None


def check_settings(settings: config.Config) -> None:
    """Raises UserError for settings that cannot be combined, as far as they are known without JAX.

    A run makes these checks again, with all others, after it has computed the sizes that are 0.
    """
    config.validate(settings, is_training=settings.sft is None, has_jax=False)
    if settings.sft is None:
        from jzero.tasks import check_task_options  # not at the top: it takes half a second

        check_task_options(settings.task)


def check_arguments(arguments: list[str]) -> Command | None:
    """Ends the process at a mistake in a flag or a recipe that can be seen without JAX.

    Answers `--help`, too. Returns the parsed command line, or None if it has to be parsed with JAX:
    the recipe imports JAX, for example to choose a preset for the devices, or other processes wait
    for this one. It then has to join them first, so that they hear of its mistake.
    """
    answer_help(arguments)
    joining, arguments = cli.split_process_flags(arguments)
    if joining.coordinator:
        return None
    with cli.user_errors():
        options, given = read_flags(command_flags.recipe(), cli.expand_price(arguments))
        check_texts(given)
        split_recipe(options.config)
    return parse_before_jax(arguments)


def answer_help(arguments: list[str]) -> None:
    """Prints the help and ends the process if the arguments ask for it."""
    if (name := cli.asked_help(arguments)) is not None:
        with cli.user_errors():
            terminal.write(describe.describe(name) if name else usage())
        sys.exit(0)


def parse(arguments: list[str]) -> Command:
    """Parses a command line.

    Prints the help and exits if the arguments request it. A mistake ends the process.
    """
    answer_help(arguments)
    with cli.user_errors():
        options, given = read_flags(command_flags.recipe(), cli.expand_price(arguments))
        settings = cli.with_flags(load_recipe(options.config), given)
    if options.show:
        terminal.write(show(settings, [flag.name for flag in given]))
        sys.exit(0)
    workdir = Path(options.workdir) if options.workdir else None
    return Command(settings, workdir, options.unfinished_status)


def show(settings: config.Config, given: list[str]) -> str:
    """Returns every setting of a run, with the place that its value comes from.

    The places are the schema (default), the recipe, a flag, and `setup.with_computed_settings`
    (computed), which fills in what follows from other settings and from the devices.

    given: the names of the settings that flags set.
    """
    from jzero.setup import with_computed_settings  # not at the top: it takes seconds

    try:
        resolved = with_computed_settings(settings)
    except UserError:  # the run itself reports its mistakes; its other settings are shown
        resolved = settings
    given_values = {item.name: item.value for item in config.list_settings(settings)}
    lines = []
    for item in config.list_settings(resolved):
        origin = "recipe" if item.value != item.default else "default"
        # The last place that applies counts: a flag overrides the recipe, and `resolve` may change
        # both.
        if item.name in given:
            origin = "flag"
        if item.value != given_values[item.name]:
            origin = "computed"
        lines.append(f"{item.name + '=' + describe.shown_default(item):<60}  # {origin}")
    return "\n".join(lines)


def usage() -> str:
    """Returns the help: the command, the docstrings of the recipes, and every setting."""
    recipes = [recipe_help(path) for path in recipe_files()]

    process_flags = ["Several hosts:"]
    for name, meaning in cli.PROCESS_FLAGS.items():
        process_flags.append(f"  {f'--{name}':<52}{meaning}")

    show_flags = [
        "Before a run:",
        f"  {'--show':<52}prints every setting with the place that its value comes from, and ends",
        f"  {'--price=0':<52}dollars an hour of the machine, for the announced cost",
    ]
    end_flags = ["The end:", f"  {'--unfinished_status=0':<52}{UNFINISHED_STATUS_HELP}"]

    settings = [
        "Settings, with the defaults that a recipe overrides. `--help rollout` shows one section, "
        "`--help rollout.stop` one setting:"
    ]
    for setting in config.list_settings(config.Config()):
        flag = f"--config.{setting.name}={describe.shown_default(setting)}"
        settings.append(f"  {flag:<52}{describe.describe_value(setting)}".rstrip())

    return "\n\n".join(
        [
            str(__doc__).strip(),
            *recipes,
            "\n".join(process_flags),
            "\n".join(show_flags),
            "\n".join(end_flags),
            "\n".join(settings),
        ]
    )


if __name__ == "__main__":
    terminal.run_command(run)
