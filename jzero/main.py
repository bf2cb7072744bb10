"""`python -m jzero.main --config configs/countdown.py[:preset] [--workdir DIR] [--config.section.field=value ...]`

Trains a model with RL, or with supervised fine-tuning if `sft.data` is set. The same command
resumes a run that was stopped or killed: it continues from the workdir's last checkpoint.
"""  # noqa: E501 (the first line is the usage that --help prints)

import ast
import json
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

RECIPES = Path(__file__).resolve().parents[1] / "configs"
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
    given = cli.split_flags(arguments)
    argv = ["jzero", *given.arguments]
    values = flags.FlagValues()
    recipe = config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
    workdir = flags.DEFINE_string("workdir", None, "", flag_values=values)
    unfinished_status = flags.DEFINE_integer(
        "unfinished_status", 0, "", lower_bound=0, upper_bound=255, flag_values=values
    )
    settings = cli.parse_config_flag(values, argv, recipe, given.parts)
    if not isinstance(settings, config.Config):
        cli.exit_with_error("give a recipe: --config configs/countdown.py")
    return Command(
        settings, Path(workdir.value) if workdir.value else None, unfinished_status.value
    )


def usage() -> str:
    """Returns the help: the command, the docstrings of the recipes, and every setting."""
    recipes = []
    for path in sorted(RECIPES.glob("*.py")):
        # Parsed instead of imported: only the docstring is needed.
        recipes.append(str(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))))

    process_flags = ["Several hosts:"]
    for name, meaning in cli.PROCESS_FLAGS.items():
        process_flags.append(f"  {f'--{name}':<52}{meaning}")

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
            "\n".join(end_flags),
            "\n".join(settings),
        ]
    )


if __name__ == "__main__":
    run()
