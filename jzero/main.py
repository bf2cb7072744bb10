"""`python -m jzero.main --config configs/countdown.py[:preset] [--workdir DIR] [--config.section.field=value ...]`

Trains a model with RL, or with supervised fine-tuning if `sft` is set. The same command
resumes a run that was stopped or killed: it continues from the workdir's last checkpoint.
"""  # noqa: E501 (the first line is the usage that --help prints)

import ast
import difflib
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
from absl import flags
from ml_collections import config_flags

import jzero
from jzero import cli, config, terminal
from jzero.config import describe
from jzero.errors import UserError
from jzero.files import JsonObject
from jzero.hosts import collectives, peers, processes
from jzero.run import buckets

# A wheel has the recipes as jzero.recipes, a clone in the folder configs.
PACKAGED_RECIPES = Path(__file__).resolve().with_name("recipes")
CLONE_RECIPES = Path(__file__).resolve().parents[1] / "configs"
RECIPES = PACKAGED_RECIPES if PACKAGED_RECIPES.is_dir() else CLONE_RECIPES
UNFINISHED_STATUS_HELP = (
    "exit status of a run that stops with a checkpoint before its last step. The manifests in "
    "clusters/ set 75 and start such a run again"
)


NO_RECIPE = "give a recipe: --config configs/countdown.py"


class Command(NamedTuple):
    """The parsed command line."""

    settings: config.Config
    workdir: Path | None  # None: a directory in runs/ with the time in its name
    unfinished_status: int  # the exit status of a run that stops before its last step


def run() -> None:
    run_arguments(sys.argv[1:])


def run_arguments(arguments: list[str]) -> None:
    """Runs the training of a command line. A mistake in it ends the process."""
    command = parse(cli.start_jax(arguments))
    from jzero.planning.fitting import set_cpu_devices  # not at the top: it takes seconds

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
    # The clocks of several hosts may differ, so all of them use the name from the first host.
    directory = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Path(collectives.gather_json(directory)[0])


def start(settings: config.Config, workdir: Path) -> JsonObject:
    """Trains, by RL or by supervised fine-tuning, and returns the summary of the run."""
    # Not at the top: these imports take seconds, and a mistake in the command is reported before.
    from jzero.sft import train as fine_tune
    from jzero.train import train

    processes.print_once(f"config {settings.name}, workdir {workdir}")
    cli.keep_compiled_programs(workdir / "programs")
    loop = fine_tune if settings.sft is not None else train
    cli.end_quietly_at_ctrl_c()  # before and after the loop, which saves a checkpoint first
    return loop(settings, workdir)


def recipe_files() -> list[Path]:
    """Returns the recipes of jzero, by name."""
    return sorted(RECIPES.glob("[!_]*.py"))


def recipe_path(name: str) -> Path:
    """Returns the file of a recipe: a path as it is, or a recipe of jzero such as "gsm8k".

    Raises UserError if there is no such file.
    """
    path = Path(name)
    if not path.suffix and path.parent == Path():
        path = RECIPES / f"{name}.py"
    if not path.is_file():
        names = ", ".join(recipe.stem for recipe in recipe_files())
        raise UserError(f"no recipe {name}: give a file that exists, or one of {names}")
    return path


def start_values(settings: config.Config, workdir: Path | None) -> dict[str, object]:
    """Returns the values that all hosts of a run must have in common, by name, as JSON values."""
    return {
        "--workdir": str(workdir or ""),
        "jzero": jzero.__version__,
        "jax": jax.__version__,
        **config.flatten(json.loads(config.to_json(settings))),
    }


def parse(arguments: list[str]) -> Command:
    """Parses a command line.

    Prints the help and exits if the arguments request it. A mistake ends the process.
    """
    if (name := cli.asked_help(arguments)) is not None:
        with cli.user_errors():
            terminal.write(describe.describe(name) if name else usage())
        sys.exit(0)
    arguments = cli.expand_price(arguments)
    shows = "--show" in arguments
    arguments = [argument for argument in arguments if argument != "--show"]
    # Before absl reads the recipe, whose error for a missing file names no recipes.
    check_recipe(arguments)
    if cli.given_settings(arguments) and not has_recipe(arguments):
        cli.exit_with_error(NO_RECIPE)
    given = cli.split_flags(arguments)
    values = flags.FlagValues()
    recipe = config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=given.argv)
    workdir = flags.DEFINE_string("workdir", None, "", flag_values=values)
    unfinished_status = flags.DEFINE_integer(
        "unfinished_status", 0, "", lower_bound=0, upper_bound=255, flag_values=values
    )
    settings = cli.parse_config_flag(values, given, recipe)
    if not isinstance(settings, config.Config):
        cli.exit_with_error(NO_RECIPE)
    if shows:
        terminal.write(show(settings, arguments))
        sys.exit(0)
    return Command(
        settings, Path(workdir.value) if workdir.value else None, unfinished_status.value
    )


def recipe_help(path: Path) -> str:
    """Returns the docstring of a recipe."""
    # Parsed instead of imported: only the docstring is needed.
    return str(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))))


def has_recipe(arguments: list[str]) -> bool:
    """Returns whether the arguments name a recipe with --config."""
    return any(argument.partition("=")[0] in ("--config", "-config") for argument in arguments)


def check_recipe(arguments: list[str]) -> None:
    """Ends the process if --config names no file, with the recipes that exist."""
    for index, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag not in ("--config", "-config"):
            continue
        if not equals:
            value = "".join(arguments[index + 1 : index + 2])
        path = value.partition(":")[0]
        if not path or Path(path).is_file():
            continue
        recipes = [recipe.stem for recipe in recipe_files()]
        similar = difflib.get_close_matches(Path(path).stem, recipes, 1)
        advice = f"did you mean {Path(path).with_name(f'{similar[0]}.py')}? " if similar else ""
        cli.exit_with_error(
            f"--config {path}: no such file. {advice}Recipes are {', '.join(recipes)}, as in "
            "--config configs/gsm8k.py"
        )


def show(settings: config.Config, arguments: list[str]) -> str:
    """Returns every setting of a run, with the place that its value comes from.

    The places are the schema (default), the recipe, a flag, and `setup.resolve` (computed), which
    fills in what follows from other settings and from the devices.
    """
    from jzero.setup import resolve  # not at the top: it takes seconds

    given = set(cli.given_settings(arguments))
    try:
        resolved = resolve(settings)
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
