"""`python -m jzero.main --config configs/countdown.py[:preset] [--workdir DIR] [--config.section.field=value ...]`

Trains, or resumes what the workdir holds: the same command goes on where a run stopped or was killed."""

import ast
import sys
import time
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from jzero import config
from jzero.cli import JOINING, check_names, fail, fields, mistakes, read, start, use_cache
from jzero.distributed import collectives, processes

RECIPES = Path(__file__).resolve().parents[1] / "configs"


def parse(arguments: list[str]) -> tuple[config.Config, str | None]:
    """The config that a command line asks for, and its --workdir."""
    if {"-h", "-help", "--help"} & set(arguments):
        print(usage())
        sys.exit(0)
    check_names(arguments)
    argv, values = ["jzero", *arguments], flags.FlagValues()
    holder = config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
    workdir = flags.DEFINE_string("workdir", None, "", flag_values=values)
    settings = read(values, argv, holder)
    if not isinstance(settings, config.Config):
        fail("give a recipe: --config configs/countdown.py")
    return settings, workdir.value


def usage() -> str:
    """The command, the recipes' docstrings and every field."""
    recipes = [
        ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted(RECIPES.glob("*.py"))
    ]
    lines = [
        f"  {f'--config.{name}={value}':<51} {comment}".rstrip() for name, value, comment in fields()
    ]
    settings = "\n".join(["Settings, with the defaults that a recipe overrides:", *lines])
    processes = "\n".join(f"  {f'--{name}':<52}{meaning}" for name, meaning in JOINING.items())
    return "\n\n".join([str(__doc__), *map(str, recipes), f"Several hosts:\n{processes}", settings])


def run() -> None:
    settings, directory = parse(start(sys.argv[1:]))
    from jzero import (
        sft,  # here: a mistake in the command shows without the time this takes
        train,  # here: a mistake in the command shows without the time this takes
    )

    with mistakes():
        name = collectives.gather_json(f"runs/{settings.name}-{time.strftime('%Y%m%d-%H%M%S')}")[0]
        workdir = Path(directory or name)
        processes.print_once(f"config {settings.name}, workdir {workdir}")
        use_cache(workdir / "programs")
        (sft if settings.sft.data else train).train(settings, workdir)


if __name__ == "__main__":
    run()
