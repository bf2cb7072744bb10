"""`python -m jzero.main --config configs/countdown.py[:preset] [--workdir DIR] [--config.section.field=value ...]`

Trains, or resumes what the workdir holds. The config file's docstring says what a preset is and costs."""

import difflib
import os
import sys
import time
from pathlib import Path

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from jzero import config
from jzero.tasks import TASKS

CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Recipe, e.g. configs/countdown.py or configs/countdown.py:tiny"
)
WORKDIR = flags.DEFINE_string("workdir", None, "Where the run writes and resumes; default runs/<name>-<date>-<time>")


def parse(argv: list[str]) -> list[str]:
    """absl's flags, with a mistake in a config path or value as one line."""
    try:
        return flags.FLAGS(argv)
    except (flags.Error, KeyError, AttributeError, TypeError, ValueError, FileNotFoundError) as error:
        fail(" ".join(str(error.args[0] if error.args else error).split()) + suggestion(argv))


def suggestion(argv: list[str]) -> str:
    """Close names for an override whose field does not exist."""
    for argument in argv:
        if argument.startswith("--config."):
            at, path = config.Config(), argument[len("--config.") :].split("=")[0].split(".")
            for name in path:
                if not hasattr(at, name):
                    near = difflib.get_close_matches(name, vars(at) if hasattr(at, "__dict__") else [], 3, 0.5)
                    return f" (in {argument}: no field {name}" + (
                        f"; did you mean {', '.join(near)}?)" if near else ")"
                    )
                at = getattr(at, name)
            return f" (in {argument})" if False else ""
    return ""


def fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def main(argv: list[str]) -> None:
    from jzero.train import train

    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # libraries log every save at INFO
    if len(argv) > 1:
        fail(f"unknown arguments {argv[1:]}; settings are given as --config.section.field=value")
    settings = CONFIG.value
    if settings is None:
        fail("give a recipe: --config configs/countdown.py")
    try:
        config.validate(settings)
        if settings.task.name not in TASKS:
            raise ValueError(f"task.name={settings.task.name!r} is not one of {', '.join(TASKS)}")
        workdir = Path(WORKDIR.value or f"runs/{settings.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        print(f"config {settings.name}, workdir {workdir}", flush=True)
        train(settings, workdir)
    except ValueError as error:
        if os.environ.get("JZERO_TRACEBACK"):
            raise
        fail(f"{error}")


def use_cores() -> None:
    """Without an accelerator, one virtual device a core (at most 2): decoding on two beats threads inside one."""
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", min(2, os.cpu_count() or 1))


def run() -> None:
    use_cores()
    app.run(main, flags_parser=parse)


if __name__ == "__main__":
    run()
