"""What the commands share: settings from flags, one line for a user's mistake, devices on a machine without any."""

import argparse
import contextlib
import difflib
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
from absl import flags
from ml_collections import config_flags

from jzero import config
from jzero.distributed import processes
from jzero.errors import UserError


def fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr, flush=True)
    if processes.has_peers():
        os._exit(2)  # an orderly exit would wait for the others
    sys.exit(2)


@contextlib.contextmanager
def mistakes() -> Iterator[None]:
    """Ends the process with one line, and status 2, for a UserError. Other errors keep their traceback."""
    try:
        yield
    except UserError as error:
        fail(" ".join(str(error).split()))
    except Exception as error:
        if not processes.has_peers():
            raise
        traceback.print_exc()
        why = (
            "another host may be gone"
            if isinstance(error, jax.errors.JaxRuntimeError)
            else type(error).__name__
        )
        processes.exit_without_peers(
            f"host {jax.process_index()} of {jax.process_count()} cannot go on: {why}"
        )


def fields() -> Iterator[tuple[str, object, str]]:
    """Yields the dotted name, the default and the description of every setting."""
    for setting in config.list_settings(config.Config()):
        yield setting.name, setting.value, describe(setting)


def describe(setting: config.Setting) -> str:
    """Returns what `--help` says of a setting: its description, and its choices if it has some."""
    choices = setting.rules.choices
    if not choices:
        return setting.rules.description
    names = ", ".join(choice or "''" for choice in choices)
    return f"{setting.rules.description} One of: {names}."


def check_names(arguments: Sequence[str]) -> None:
    """Ends the process at the first --config.section.field that names no setting."""
    names = [name for name, _, _ in fields()]
    for argument in arguments:
        flag = re.match(r"--?(?:no)?config\.([^=]*)", argument)
        if flag is None or flag[1] in names:
            continue
        name = flag[1]
        if new_name := config.new_names([name]):
            fail(f"{argument}: {new_name}")
        similar = ", ".join(difflib.get_close_matches(name, names))
        advice = f"did you mean {similar}?" if similar else "--help lists them"
        fail(f"{argument}: no field {name}; {advice}")


def read(values: flags.FlagValues, argv: Sequence[str], holder: flags.FlagHolder) -> Any:
    """The config of a flag, changed by --config.section.field=value; a mistake ends the process."""
    try:
        rest = values(argv)[1:]
        getattr(
            holder.value, "name", ""
        )  # a recipe that could not be read is an error on its first use
    except (flags.Error, OSError) as error:
        last: BaseException = error
        while "\n" in str(last) and (inner := last.__cause__ or last.__context__):
            last = inner  # the message is a whole traceback: what is at the bottom of it
        fail(str(last).strip().split("\n")[-1].strip())
    if rest:
        fail(
            f"unknown arguments {' '.join(rest)}: settings are given as --config.section.field=value"
        )
    return holder.value


def settings(defaults: config.Config, arguments: Sequence[str]) -> config.Config:
    """`defaults` changed by --config.section.field=value arguments."""
    check_names(arguments)
    argv, values = ["jzero", *arguments], flags.FlagValues()
    holder = config_flags.DEFINE_config_dataclass(
        "config", defaults, flag_values=values, sys_argv=argv
    )
    return read(values, argv, holder)


def parser(command: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the module's docstring and whose errors are one line."""
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(
        f"python -m {command}", description=doc, formatter_class=raw, allow_abbrev=False
    )
    made.error = fail
    return made


def use_cache(directory: Path) -> None:
    """Compiled programs are kept there (or in JAX_COMPILATION_CACHE_DIR): a resumed run starts at once."""
    if not jax.config.values["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", str(directory.absolute()))


JOINING = {
    "coordinator": "of several processes: HOST:PORT of process 0. A Cloud TPU, SLURM and Open MPI need none of these",
    "num_processes": "how many there are",
    "process_id": "which one this is, from 0",
}


def start(arguments: Sequence[str]) -> list[str]:
    """Devices, and the other processes of the run where there are any; returns the other arguments. Without an
    accelerator one virtual device a core (at most 2): decoding on two beats threads inside one."""
    takes = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in JOINING:
        takes.add_argument(f"--{name}", type=str if name == "coordinator" else int)
    takes.error = fail
    given, rest = takes.parse_known_args(arguments)
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", min(2, os.cpu_count() or 1))
    if not {"-h", "-help", "--help"} & set(rest):
        with mistakes():
            processes.join_processes(given.coordinator, given.num_processes, given.process_id)
    return rest
