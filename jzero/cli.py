"""Shared parts of the commands: settings from flags, one-line user errors, and device set-up.

A command that uses a model is built like this:

    def main() -> None:
        parser = command_flags.example(__doc__)
        args, rest = parser.parse_known_args(cli.start_jax(sys.argv[1:]))
        with cli.user_errors():
            run(args, cli.parse_settings(defaults, rest))
"""

import argparse
import atexit
import contextlib
import difflib
import hashlib
import os
import platform
import re
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from jzero import config, files, terminal
from jzero.config.flags import FOREIGN_NAMES, MOST_MEANT, Flag, apply_flags, split_flags
from jzero.errors import UserError, slips
from jzero.fields import editable
from jzero.hosts.waits import JOIN_SECONDS, NOTICE_SECONDS, SILENCE_SECONDS

# JAX and the modules that need it are imported by the functions that use them: a mistake in a
# command line is reported before.

HELP_FLAGS = {"-h", "-help", "--help"}
SHARED_PROGRAMS_BYTES = 2**31  # of compiled programs in the user's cache
SHARED_PROGRAM_SECONDS = 0.2  # a program that compiles faster is not kept there

# The flags that join the processes of one run, with their help.
PROCESS_FLAGS = {
    "coordinator": (
        "HOST:PORT of process 0, where a run has several processes. "
        "A Cloud TPU, SLURM and Open MPI need none of these flags"
    ),
    "num_processes": "number of processes",
    "process_id": "index of this process, from 0",
    "join_seconds": (
        f"seconds for which a process waits until all have joined, {JOIN_SECONDS:g} by default"
    ),
    "silence_seconds": (
        "seconds without a sign of life after which a process counts as lost, "
        f"{SILENCE_SECONDS:g} by default. All processes say after "
        f"{NOTICE_SECONDS:g} seconds which one does not answer"
    ),
}
PROCESS_FLAG_TYPES = {"coordinator": str, "join_seconds": float, "silence_seconds": float}


# -- Errors ----------------------------------------------------------------------------------------


def joined_peers() -> ModuleType | None:
    """Returns the module `hosts.peers` if this process has joined others, else None."""
    peers = sys.modules.get("jzero.hosts.peers")
    return peers if peers is not None and peers.has_peers() else None


def exit_with_error(message: str) -> NoReturn:
    """Prints `error: message` and ends the process with status 2."""
    if peers := joined_peers():
        peers.end_process(message, 2, f"{peers.this_host()} ended: {message}")
    # Otherwise the bars could be drawn over the message.
    terminal.close()
    terminal.write(f"error: {message}", sys.stderr)
    sys.exit(2)


def exit_at_once(message: str) -> NoReturn:
    """Does the same as `exit_with_error`, without Python's orderly exit."""
    try:
        # After a full disk, library threads that are still writing would print tracebacks during an
        # orderly exit.
        exit_with_error(message)
    finally:
        sys.stdout.flush()
        os._exit(2)


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turns a `files.mistake` in the body into one line and status 2, and Ctrl-C into one word.

    Every other exception keeps its traceback. If the run has other processes, this process then
    ends at once and ends the others, because they would wait for it forever.
    """
    try:
        yield
    except KeyboardInterrupt:  # during a run, this is the second signal
        peers = joined_peers()
        if peers is None:
            terminal.write("stopped", sys.stderr)
            sys.exit(terminal.STATUS_OF_CTRL_C)
        peers.end_process(f"{peers.this_host()} was stopped at once. {peers.advice()}", 1)
    except Exception as error:
        if message := files.mistake(error):
            if files.is_full_disk(error):
                exit_at_once(message)
            exit_with_error(message)
        platform_module = sys.modules.get("jzero.hosts.platform")
        if platform_module and (message := platform_module.busy_device(error)):
            exit_with_error(message)
        peers = joined_peers()
        if peers is None:
            # The message of a fault may quote a response.
            sys.excepthook = terminal.show_traceback
            raise
        peers.wait_for_verdict()  # a lost host's line explains more than this traceback
        terminal.write(traceback.format_exc(), sys.stderr)
        # JAX reports a lost process as a runtime error of the collective that waited for it.
        import jax

        is_runtime_error = isinstance(error, jax.errors.JaxRuntimeError)
        reason = "another host may be gone" if is_runtime_error else type(error).__name__
        peers.end_process(f"{peers.this_host()} cannot continue: {reason}. {peers.advice()}", 1)


# -- Settings --------------------------------------------------------------------------------------


def asked_help(arguments: Sequence[str]) -> str | None:
    """Returns the subject of a request for help, as in `--help rollout` or `--help=rollout`.

    "" stands for everything, None for arguments without such a request.
    """
    for index, argument in enumerate(arguments):
        flag, _, name = argument.partition("=")
        if flag in HELP_FLAGS:
            following = "".join(arguments[index + 1 : index + 2])
            return name or ("" if following.startswith("-") else following)
    return None


def expand_price(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with --price, which is short for a setting, in its long form."""
    return [re.sub(r"^--price(?==|$)", "--config.train.price", item) for item in arguments]


def given_settings(arguments: Sequence[str]) -> list[str]:
    """Returns the names of the settings that --config.section.field arguments set."""
    return [flag.name for flag in split_flags(arguments)[0]]


# Similarities of names (difflib): those that are proposed, and those that are proposed first.
MOST_DIFFERENT = 0.75
LEAST_ALIKE = 0.9
SETTINGS_FORM = "settings are given as --config.section.field=VALUE"


def check_others(arguments: Sequence[str], known: Sequence[str] = ()) -> None:
    """Raises UserError at the first argument, which is neither a setting nor a known flag.

    known: the flags of the command.
    """
    names = list(config.known_names())
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        bare = flag.lstrip("-")
        meant_flags = flags_like(flag, known)
        if meant_flags and (flag.startswith("--") or slips(flag, meant_flags)):
            raise UserError(f"{argument}: did you mean {' or '.join(meant_flags)}{equals}{value}?")
        if not flag.startswith("--") or not bare:
            raise UserError(f"{argument}: unknown argument; {SETTINGS_FORM}")
        meant = [name for name in names if name == bare or name.rpartition(".")[2] == bare]
        if 0 < len(meant) <= MOST_MEANT:
            choices = " or ".join(f"--config.{name}{equals}{value}" for name in meant)
            raise UserError(f"{argument}: write {choices}")
        close = difflib.get_close_matches(flag, known, 1, MOST_DIFFERENT)
        if close:
            raise UserError(f"{argument}: did you mean {close[0]}{equals}{value}?")
        fields = [name.rpartition(".")[2] for name in names]
        similar = difflib.get_close_matches(bare.rpartition(".")[2], fields, 1, MOST_DIFFERENT)
        proposal = next((name for name in names if name.rpartition(".")[2] in similar), None)
        advice = f"did you mean --config.{proposal}? " if proposal else ""
        raise UserError(f"{argument}: unknown flag; {advice}{SETTINGS_FORM}, and {FOREIGN_NAMES}")


def flags_like(flag: str, known: Sequence[str]) -> list[str]:
    """Returns the flags of a command that are meant more likely than a setting of that name."""
    known = [name for name in known if name.startswith("--")]
    close = slips(flag, known)
    # A flag that begins alike.
    close += [name for name in known if name.startswith(flag) or flag.startswith(f"{name}_")]
    close = close or difflib.get_close_matches(flag, known, 1, LEAST_ALIKE)
    return list(dict.fromkeys(close))[:MOST_MEANT]


def parse_settings(defaults: config.Config, arguments: Sequence[str]) -> config.Config:
    """Returns a copy of `defaults` with the changes of --config.section.field=value arguments.

    A mistake in the arguments ends the process.
    """
    with user_errors():
        given, others = split_flags(arguments)
        check_others(others)
        return with_flags(defaults, given)


def with_flags(settings: config.Config, given: Sequence[Flag]) -> config.Config:
    """Returns a copy of a config, changed by flags. Raises UserError at a mistake."""
    changed = editable(settings)
    apply_flags(changed, given)
    expand_task_name(changed.task)
    return changed


def expand_task_name(task: config.TaskConfig) -> None:
    """Expands task.name=verifiers:ENV, which stands for two settings."""
    if ":" not in task.name:
        return
    from jzero.environments import environment, verifiers  # not at the top: it takes half a second

    if task.name.startswith(verifiers.PREFIX):
        task.environment, task.name = task.name, environment.NAME


class Parser(argparse.ArgumentParser):
    """The parser of a command. Its mistakes are one line that ends the process.

    An unknown flag is reported before a missing one, with the flag that was meant: it may be the
    missing one with a slip.
    """

    has_settings = False  # whether the command has the flags --config.section.field=VALUE
    has_processes = False  # whether it has PROCESS_FLAGS, which `start_jax` reads
    passes_on: Sequence[str] = ()  # flags that it returns for another parser

    def error(self, message: str) -> NoReturn:
        """Ends the process with a message."""
        exit_with_error(message)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Returns the values of the flags, and the other arguments: settings, and `passes_on`."""
        arguments = sys.argv[1:] if args is None else list(args)
        given: list[Flag] = []
        if asked_help(arguments) is None:
            try:
                if self.has_settings:
                    given, arguments = split_flags(arguments)
                self.check_names(arguments)
            except UserError as error:
                self.error(str(error))
        # Without the settings: argparse would take the value of `--config.a.b VALUE` for its own.
        values, others = super().parse_known_args(arguments, namespace or argparse.Namespace())
        # Commands that pass flags on pass on their values, too.
        if others and self.has_settings and not self.passes_on:
            try:
                check_others(others, self.flags())
            except UserError as error:
                self.error(str(error))
        return values, [*others, *(f"--config.{flag.name}={flag.text}" for flag in given)]

    def flags(self) -> list[str]:
        """Returns the names of the flags, such as --out."""
        return [*self._option_string_actions]

    def check_names(self, arguments: Sequence[str]) -> None:
        """Raises UserError at the first argument that looks like a flag and is unknown."""
        known = [*self.flags(), *self.passes_on]
        known += [f"--{name}" for name in PROCESS_FLAGS] if self.has_processes else []
        for argument in arguments:
            flag, equals, value = argument.partition("=")
            if argument == "--":
                return
            # argparse takes text with spaces, and negative numbers, for values.
            is_value = " " in flag or re.match(r"-?\.?\d|-?$", flag)
            if is_value or not flag.startswith("-") or flag in known:
                continue
            if self.has_settings:
                check_others([argument], known)
            close = flags_like(flag, known)
            close = close or difflib.get_close_matches(flag, known, 1, MOST_DIFFERENT)
            advice = f"did you mean {' or '.join(close)}{equals}{value}?" if close else ""
            raise UserError(
                f"{argument}: {advice or f'unknown flag; {self.prog} --help lists the flags'}"
            )


def make_parser(command: str, doc: str | None) -> Parser:
    """Returns the parser of a command with a docstring as its help."""
    # The console script `jzero` names itself and its subcommand.
    is_script = sys.argv[0].startswith("jzero ")
    # Unknown arguments are settings, which argparse must not take for abbreviated flags.
    return Parser(
        sys.argv[0] if is_script else f"python -m {command}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def make_model_parser(command: str, doc: str | None) -> Parser:
    """Returns the parser of a command that uses a model: with settings, on one or more hosts."""
    parser = make_parser(command, doc)
    parser.has_settings = parser.has_processes = True
    return parser


# -- Devices ---------------------------------------------------------------------------------------


def split_process_flags(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the values of PROCESS_FLAGS, and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in PROCESS_FLAGS:
        parser.add_argument(f"--{name}", type=PROCESS_FLAG_TYPES.get(name, int))
    parser.set_defaults(join_seconds=JOIN_SECONDS, silence_seconds=SILENCE_SECONDS)
    parser.error = exit_with_error
    return parser.parse_known_args(arguments)


def start_jax(arguments: Sequence[str]) -> list[str]:
    """Sets up the devices, and joins the other processes of the run, if there are any.

    Has to be called before any device is used. Returns the arguments without PROCESS_FLAGS.
    """
    args, remaining = split_process_flags(arguments)
    with terminal.imports():
        from jzero.hosts import processes
        from jzero.hosts.platform import choose_platform, set_default_cpu_devices

    terminal.quiet_libraries()
    choose_platform()
    atexit.register(end_quietly_at_ctrl_c)
    set_default_cpu_devices()
    share_compiled_programs()

    # --help must not wait for other processes.
    if asked_help(remaining) is None:
        with user_errors():
            processes.join_processes(
                args.coordinator,
                args.num_processes,
                args.process_id,
                args.join_seconds,
                args.silence_seconds,
            )
    return remaining


def end_quietly_at_ctrl_c() -> None:
    """Makes Ctrl-C end the process at once: in Python's exit handlers it prints a traceback."""
    # Python accepts signal handlers in the main thread only. A program that calls jzero from
    # another thread handles its signals itself.
    from jzero.hosts import interrupt

    if not interrupt.is_main_thread():
        return
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def keep_compiled_programs(directory: Path) -> None:
    """Caches compiled programs in `directory`, so that a resumed run starts without compiling.

    JAX_COMPILATION_CACHE_DIR takes precedence over `directory`.
    """
    import jax

    if jax.config.values["jax_compilation_cache_dir"] in (None, "", str(shared_programs())):
        jax.config.update("jax_compilation_cache_dir", str(directory.absolute()))
        jax.config.update("jax_compilation_cache_max_size", -1)  # unlimited


def share_compiled_programs() -> None:
    """Caches compiled programs for all commands of this user that have no directory of their own.

    JAX deletes the programs that were not used for the longest time.
    """
    import jax

    directory = shared_programs()
    if jax.config.values["jax_compilation_cache_dir"]:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # a user without a writable home: every command compiles its programs
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_compilation_cache_max_size", SHARED_PROGRAMS_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", SHARED_PROGRAM_SECONDS)


def shared_programs() -> Path:
    """Returns the directory of `share_compiled_programs`.

    Machines that share a home may have other instructions. JAX's names of programs do not depend on
    the instructions of a CPU, so the directory does.
    """
    instructions = ""
    # The file has an entry for each core, and making it takes time on a machine with many.
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        instructions = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    kind = hashlib.sha256(f"{platform.machine()} {instructions.strip()}".encode()).hexdigest()[:16]
    return files.user_cache() / "programs" / kind
