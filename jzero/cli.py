"""What the commands share: settings from flags, one line for a user's mistake, devices on a machine without any."""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import NoReturn, TypeVar

import jax
from absl import flags
from ml_collections import config_flags

Settings = TypeVar("Settings")


def fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


@contextlib.contextmanager
def mistakes() -> Iterator[None]:
    """Ends the process with one line for a ValueError that jzero raised; others are met by jzero, not meant for the
    user."""
    try:
        yield
    except ValueError as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        if not (where.line or "").startswith("raise ValueError"):
            raise
        fail(" ".join(str(error).split()))


def settings(defaults: Settings, arguments: Sequence[str]) -> Settings:
    """`defaults` changed by --config.section.field=value arguments."""
    values = flags.FlagValues()
    holder = config_flags.DEFINE_config_dataclass("config", defaults, flag_values=values)
    try:
        rest = values(["jzero", *arguments])[1:]
    except flags.Error as error:
        fail(str(error).strip().split("\n")[-1])
    if rest:
        fail(f"unknown arguments {' '.join(rest)}: settings are given as --config.section.field=value")
    return holder.value


def use_cores() -> None:
    """Without an accelerator, one virtual device a core (at most 2): decoding on two beats threads inside one."""
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", min(2, os.cpu_count() or 1))
