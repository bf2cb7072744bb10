"""What the commands share: settings from flags, errors of the user as one line, devices.

A command that uses a model is built like this:

    def main() -> None:
        parser = cli.make_parser("jzero.example", __doc__)
        parser.add_argument("--out", type=Path)
        args, rest = parser.parse_known_args(cli.start_jax(sys.argv[1:]))
        with cli.user_errors():
            run(args, cli.parse_settings(defaults, rest))
"""

import argparse
import contextlib
import difflib
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import jax
from absl import flags
from ml_collections import config_flags

from jzero import config
from jzero.distributed import peers, processes
from jzero.errors import UserError
from jzero.tasks import environment, verifiers

HELP_FLAGS = {"-h", "-help", "--help"}

# The flags that join the processes of one run, with their help.
PROCESS_FLAGS = {
    "coordinator": (
        "HOST:PORT of process 0, where a run has several processes. "
        "A Cloud TPU, SLURM and Open MPI need none of these flags"
    ),
    "num_processes": "number of processes",
    "process_id": "index of this process, from 0",
}


# -- Errors ----------------------------------------------------------------------------------------


def exit_with_error(message: str) -> NoReturn:
    """Prints `error: message` and ends the process with status 2."""
    if peers.has_peers():
        peers.end_process(message, 2, f"{peers.this_host()} ended: {message}")
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turns a UserError of the body into one line and status 2.

    Every other exception keeps its traceback. Where the run has other processes, this process then
    ends at once, and the others with it, because they would wait for it forever.
    """
    try:
        yield
    except UserError as error:
        exit_with_error(" ".join(str(error).split()))
    except KeyboardInterrupt:  # a second signal
        if not peers.has_peers():
            raise
        peers.end_process(f"{peers.this_host()} was stopped at once. {peers.GO_ON}", 1)
    except Exception as error:
        if not peers.has_peers():
            raise
        traceback.print_exc()
        # JAX reports a lost process as a runtime error of the collective that waited for it.
        is_runtime_error = isinstance(error, jax.errors.JaxRuntimeError)
        reason = "another host may be gone" if is_runtime_error else type(error).__name__
        peers.end_process(f"{peers.this_host()} cannot go on: {reason}. {peers.GO_ON}", 1)


# -- Settings --------------------------------------------------------------------------------------


def describe(setting: config.Setting) -> str:
    """Returns what `--help` says of a setting: its description, and its choices if it has some."""
    choices = setting.rules.choices
    if not choices:
        return setting.rules.description
    names = ", ".join(choice or "''" for choice in choices)
    return f"{setting.rules.description} One of: {names}."


def check_setting_names(arguments: Sequence[str]) -> None:
    """Ends the process at the first --config.section.field that names no setting."""
    names = [setting.name for setting in config.list_settings(config.Config())]
    for argument in arguments:
        flag = re.match(r"--?(?:no)?config\.([^=]*)", argument)
        if flag is None or flag[1] in names:
            continue
        name = flag[1]
        if new_name := config.new_names([name]):
            exit_with_error(f"{argument}: {new_name}")
        similar = ", ".join(difflib.get_close_matches(name, names))
        advice = f"did you mean {similar}?" if similar else "--help lists them"
        exit_with_error(f"{argument}: no field {name}; {advice}")


def parse_settings(defaults: config.Config, arguments: Sequence[str]) -> config.Config:
    """Returns `defaults` with the changes that --config.section.field=value arguments ask for.

    A mistake in the arguments ends the process.
    """
    check_setting_names(arguments)
    argv = ["jzero", *arguments]
    values = flags.FlagValues()
    holder = config_flags.DEFINE_config_dataclass(
        "config", defaults, flag_values=values, sys_argv=argv
    )
    settings = parse_config_flag(values, argv, holder)
    assert isinstance(settings, config.Config), f"{settings=}"
    return settings


def parse_config_flag(
    values: flags.FlagValues, argv: Sequence[str], holder: flags.FlagHolder[object]
) -> object:
    """Parses `argv` and returns the value of the config flag `holder`.

    The value is None without the flag. A mistake in the arguments, or in the recipe that the flag
    names, ends the process.
    """
    try:
        unknown = values(argv)[1:]
        # absl raises the error of a recipe that cannot be read when the flag's value is first used.
        getattr(holder.value, "name", "")
    except (flags.Error, OSError) as error:
        exit_with_error(_last_line(_innermost_cause(error)))
    if unknown:
        exit_with_error(
            f"unknown arguments {' '.join(unknown)}: "
            "settings are given as --config.section.field=value"
        )
    if isinstance(holder.value, config.Config):
        expand_task_name(holder.value.task)
    return holder.value


def expand_task_name(task: config.TaskConfig) -> None:
    """Writes out task.name=verifiers:ENV, which stands for two settings."""
    if task.name.startswith(verifiers.PREFIX):
        task.environment, task.name = task.name, environment.NAME


def _innermost_cause(error: BaseException) -> BaseException:
    """Returns the exception that absl wrapped, where absl's message is a whole traceback."""
    while "\n" in str(error):
        inner = error.__cause__ or error.__context__
        if inner is None:
            break
        error = inner
    return error


def _last_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[-1].strip()


def make_parser(command: str, doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose help is the module's docstring and whose errors are one line."""
    parser = argparse.ArgumentParser(
        f"python -m {command}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = exit_with_error
    return parser


# -- Devices ---------------------------------------------------------------------------------------


def start_jax(arguments: Sequence[str]) -> list[str]:
    """Sets up the devices and joins the other processes of the run, where there are any.

    Has to be called before any device is used. Returns the arguments without PROCESS_FLAGS.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in PROCESS_FLAGS:
        parser.add_argument(f"--{name}", type=str if name == "coordinator" else int)
    parser.error = exit_with_error
    args, rest = parser.parse_known_args(arguments)

    # A machine without an accelerator gets one virtual device for a core, two at most: decoding on
    # two devices is faster than on two threads inside one.
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", min(2, os.cpu_count() or 1))

    if HELP_FLAGS.isdisjoint(rest):
        with user_errors():
            processes.join_processes(args.coordinator, args.num_processes, args.process_id)
    return rest


def keep_compiled_programs(directory: Path) -> None:
    """Keeps compiled programs in `directory`, so that a resumed run starts without compiling.

    JAX_COMPILATION_CACHE_DIR takes precedence over `directory`.
    """
    if not jax.config.values["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", str(directory.absolute()))
