"""`python -m jzero.main --config configs/countdown.py[:preset] [--workdir DIR] [--config.section.field=value ...]`

Trains, or resumes what the workdir holds: the same command goes on where a run stopped or was killed."""

import ast
import sys
import time
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

from jzero import config, hosts
from jzero.cli import JOINING, check_names, fail, fields, mistakes, read, start, use_cache

CONFIG = config_flags.DEFINE_config_file("config", None, "Recipe, e.g. configs/countdown.py:tiny")
WORKDIR = flags.DEFINE_string("workdir", None, "Where the run writes and resumes; default runs/<name>-<date>-<time>")
RECIPES = Path(__file__).resolve().parents[1] / "configs"


def parse(argv: list[str]) -> config.Config:
    """The config that a command line asks for."""
    if {"-h", "-help", "--help"} & set(argv[1:]):
        print(usage())
        sys.exit(0)
    check_names(argv[1:])
    settings = read(flags.FLAGS, argv, CONFIG)
    if not isinstance(settings, config.Config):
        fail("give a recipe: --config configs/countdown.py")
    return settings


def usage() -> str:
    """The command, the recipes' docstrings and every field."""
    recipes = [ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(RECIPES.glob("*.py"))]
    lines = [f"  {f'--config.{name}={value}':<52}{comment}".rstrip() for name, value, comment in fields()]
    settings = "\n".join(["Settings, with the defaults that a recipe overrides:", *lines])
    processes = "\n".join(f"  {f'--{name}':<52}{meaning}" for name, meaning in JOINING.items())
    return "\n\n".join([str(__doc__), *map(str, recipes), f"Several hosts:\n{processes}", settings])


def main(settings: config.Config) -> None:
    from jzero import sft, train  # here: a mistake in the command shows without the time this takes

    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # libraries log every save at INFO
    with mistakes():
        name = hosts.agree(f"runs/{settings.name}-{time.strftime('%Y%m%d-%H%M%S')}")[0]
        workdir = Path(WORKDIR.value or name)
        hosts.say(f"config {settings.name}, workdir {workdir}")
        use_cache(workdir / "programs")
        (sft if settings.sft.data else train).train(settings, workdir)


def run() -> None:
    app.run(main, [sys.argv[0], *start(sys.argv[1:])], flags_parser=parse)


if __name__ == "__main__":
    run()
