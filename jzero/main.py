"""`python -m jzero.main --config configs/countdown.py[:preset] [--workdir DIR] [--config.section.field=value ...]`

Trains a model with RL, or with supervised fine-tuning if `sft.data` is set. The same command
resumes a run that was stopped or killed: it continues from the workdir's last checkpoint.
"""  # noqa: E501 (the first line is the usage that --help prints)

import ast
import difflib
import json
import re
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
from absl import flags
from ml_collections import config_flags

import jzero
from jzero import cli, config
from jzero.config import describe
from jzero.distributed import collectives, peers, processes
from jzero.errors import UserError

RECIPES = Path(__file__).resolve().parents[1] / "configs"
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
    command = parse(cli.start_jax(sys.argv[1:]))
    settings, workdir = command.settings, command.workdir

    with cli.user_errors():
        # Not at the top: these imports take seconds, and a mistake in the command is reported
        # before.
        from jzero import sft, train

        peers.check_same_start(start_values(settings, workdir))
        # The clocks of several hosts may differ, so all of them use the name from the first host.
        name = f"runs/{settings.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        default_workdir = collectives.gather_json(name)[0]
        workdir = workdir or Path(default_workdir)
        processes.print_once(f"config {settings.name}, workdir {workdir}")
        cli.keep_compiled_programs(workdir / "programs")
        loop = sft.train if settings.sft.data else train.train
        cli.end_quietly_at_ctrl_c()  # before and after the loop, which saves a checkpoint first
        summary = loop(settings, workdir)
        # Only a run that finished all of its steps has an export.
        if summary["export"] is None:
            sys.exit(command.unfinished_status)


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
            print(describe.describe(name) if name else usage())
        sys.exit(0)
    # --price is short for a setting.
    arguments = [re.sub(r"^--price(?==|$)", "--config.train.price", item) for item in arguments]
    shows = "--show" in arguments
    arguments = [argument for argument in arguments if argument != "--show"]
    check_recipe(arguments)
    if cli.given_settings(arguments) and not has_recipe(arguments):
        cli.exit_with_error(NO_RECIPE)
    cli.check_setting_names(arguments)
    argv = ["jzero", *cli.complete_tuples(arguments)]
    values = flags.FlagValues()
    recipe = config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
    workdir = flags.DEFINE_string("workdir", None, "", flag_values=values)
    unfinished_status = flags.DEFINE_integer(
        "unfinished_status", 0, "", lower_bound=0, upper_bound=255, flag_values=values
    )
    settings = cli.parse_config_flag(values, argv, recipe)
    if not isinstance(settings, config.Config):
        cli.exit_with_error(NO_RECIPE)
    if shows:
        print(show(settings, arguments))
        sys.exit(0)
    return Command(
        settings, Path(workdir.value) if workdir.value else None, unfinished_status.value
    )


def has_recipe(arguments: list[str]) -> bool:
    """Returns whether the arguments name a recipe with --config."""
    return any(argument.partition("=")[0] in ("--config", "-config") for argument in arguments)


def check_recipe(arguments: list[str]) -> None:
    """Ends the process if --config names no file, with the recipes that exist."""
    for index, argument in enumerate(arguments):
        flag, _, value = argument.partition("=")
        if flag not in ("--config", "-config"):
            continue
        value = value or "".join(arguments[index + 1 : index + 2])
        path = value.partition(":")[0]
        if not path or Path(path).is_file():
            continue
        recipes = [recipe.stem for recipe in sorted(RECIPES.glob("*.py"))]
        similar = difflib.get_close_matches(Path(path).stem, recipes, 1)
        advice = f"did you mean {Path(path).with_name(f'{similar[0]}.py')}? " if similar else ""
        cli.exit_with_error(
            f"--config {path}: no such file. {advice}Recipes are {', '.join(recipes)}, as in "
            "--config configs/gsm8k.py"
        )


def show(settings: config.Config, arguments: list[str]) -> str:
    """Returns every setting of a run, with the place that its value comes from.

    The places are the schema (default), the recipe, a flag, and the sizing of sizes that are 0.
    """
    from jzero.planning.sizing import with_sizes  # not at the top: it takes seconds

    given = set(cli.given_settings(arguments))
    try:
        sized_settings = with_sizes(settings)
    except UserError:  # the run itself reports its mistakes; its other settings are shown
        sized_settings = settings
    sized = {item.name: item.value for item in config.list_settings(sized_settings)}
    defaults = {item.name: item.value for item in config.list_settings(config.Config())}
    lines = []
    for item in config.list_settings(settings):
        origin = "recipe" if item.value != defaults[item.name] else "default"
        if item.name in given:
            origin = "flag"
        value = sized[item.name]
        if value != item.value:
            origin = "chosen by sizing"
        lines.append(f"{item.name + '=' + describe.shown_default(value):<60}  # {origin}")
    return "\n".join(lines)


def usage() -> str:
    """Returns the help: the command, the docstrings of the recipes, and every setting."""
    recipes = []
    for path in sorted(RECIPES.glob("*.py")):
        # Parsed instead of imported: only the docstring is needed.
        recipes.append(str(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))))

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
        flag = f"--config.{setting.name}={setting.value}"
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
    run()
