"""Shared parts of the commands: settings from flags, one-line user errors, and device set-up.

A command that uses a model is built like this:

    def main() -> None:
        parser = cli.make_parser("jzero.example", __doc__)
        parser.add_argument("--out", type=Path)
        args, rest = parser.parse_known_args(cli.start_jax(sys.argv[1:]))
        with cli.user_errors():
            run(args, cli.parse_settings(defaults, rest))
"""

import argparse
import ast
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
from typing import NamedTuple, NoReturn

import jax
from absl import flags
from ml_collections import config_flags

from jzero import config, files, terminal
from jzero.config import old_settings, other_names
from jzero.environments import environment, verifiers
from jzero.errors import UserError, causes, shown
from jzero.hosts import interrupt, peers, processes
from jzero.hosts.platform import busy_device, choose_platform, set_default_cpu_devices
from jzero.setting import class_of_part, field_types, part_name, read_tuple

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
        f"seconds for which a process waits until all have joined, {processes.JOIN_SECONDS:g} "
        "by default"
    ),
    "silence_seconds": (
        "seconds without a sign of life after which a process counts as lost, "
        f"{peers.SILENCE_SECONDS:g} by default. All processes say after "
        f"{peers.NOTICE_SECONDS:g} seconds which one does not answer"
    ),
}
PROCESS_FLAG_TYPES = {"coordinator": str, "join_seconds": float, "silence_seconds": float}


# -- Errors ----------------------------------------------------------------------------------------


def exit_with_error(message: str) -> NoReturn:
    """Prints `error: message` and ends the process with status 2."""
    if peers.has_peers():
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
        if not peers.has_peers():
            terminal.write("stopped", sys.stderr)
            sys.exit(terminal.STATUS_OF_CTRL_C)
        peers.end_process(f"{peers.this_host()} was stopped at once. {peers.advice()}", 1)
    except Exception as error:
        if message := files.mistake(error):
            if files.is_full_disk(error):
                exit_at_once(message)
            exit_with_error(message)
        if message := busy_device(error):
            exit_with_error(message)
        if not peers.has_peers():
            # The message of a fault may quote a response.
            sys.excepthook = terminal.show_traceback
            raise
        peers.wait_for_verdict()  # a lost host's line explains more than this traceback
        terminal.write(traceback.format_exc(), sys.stderr)
        # JAX reports a lost process as a runtime error of the collective that waited for it.
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


# Matches --config.section.field, and the form --noconfig.section.field that absl has for booleans.
_SETTING_FLAG = re.compile(r"--?(?:no)?config\.([^=]*)")


def given_settings(arguments: Sequence[str]) -> list[str]:
    """Returns the names of the settings that --config.section.field arguments set."""
    flags_of_settings = [_SETTING_FLAG.match(argument) for argument in arguments]
    return [flag[1] for flag in flags_of_settings if flag is not None]


def check_setting_names(arguments: Sequence[str]) -> None:
    """Ends the process at the first --config.section.field that names no setting.

    Settings without `config.`, such as --optimizer.lr or TRL's --num_generations, are told apart
    from other unknown flags.
    """
    names = config.known_names()
    for argument in arguments:
        bare = re.match(r"--([a-z][\w.]*)(=?.*)", argument, re.DOTALL)
        if bare is not None and not bare[1].startswith("config"):
            setting = bare[1] if bare[1] in names else other_names.other_name(bare[1])
            if setting in names:
                exit_with_error(f"{argument}: write --config.{setting}{bare[2]}")
            if setting:
                exit_with_error(f"{argument}: write {setting}{bare[2]}")
            if reason := other_names.EXPLAINED.get(bare[1].rpartition(".")[2]):
                exit_with_error(f"{argument}: {reason}")
            # Settings without their section, such as --lr=1e-5.
            meant = sorted(name for name in names if name.rpartition(".")[2] == bare[1])
            if meant and bare[1] not in flags.FLAGS:
                choices = " or ".join(f"--config.{name}{bare[2]}" for name in meant[:MOST_MEANT])
                exit_with_error(f"{argument}: write {choices}")
        flag = _SETTING_FLAG.match(argument)
        if flag is not None and (mistakes := config.unknown_names([flag[1]])):
            exit_with_error(f"{argument}: {mistakes}")


def check_flag_names(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Ends the process at the first argument that names no setting and resembles a flag.

    parser: has the flags of the command.
    """
    known = [name for action in parser._actions for name in action.option_strings]
    split = [argument.partition("=") for argument in arguments if argument.startswith("--")]
    for name, equals, value in split:
        if (meant := FLAGS_OF_OTHERS.get(name)) in known:
            exit_with_error(f"{name}{equals}{value}: did you mean {meant}{equals}{value}?")
    check_setting_names(arguments)
    for name, equals, value in split:
        if name.startswith(("--config", "--noconfig")):
            continue
        longer = [flag for flag in known if flag.startswith(name) or name.startswith(f"{flag}_")]
        if close := longer or difflib.get_close_matches(name, known, 1, MOST_DIFFERENT):
            exit_with_error(f"{name}{equals}{value}: did you mean {close[0]}{equals}{value}?")


class SplitFlags(NamedTuple):
    """The arguments of a command: those that absl parses, and those that change its result."""

    arguments: list[str]
    parts: list[tuple[str, str]]  # (dotted name, text) of flags that choose or change parts
    old_values: list[old_settings.OldValue]  # of settings that are part of another one today
    task: str | None  # the value of task.name, None without this flag

    @property
    def argv(self) -> list[str]:
        """Returns the arguments as absl takes them."""
        return ["jzero", *self.arguments]


TASK_NAME = "task.name"
MOST_DIFFERENT = 0.75  # names with a lower similarity (difflib) are not proposed
MOST_MEANT = 3  # settings that an error message proposes
# Flags of TRL's command line and close words, and the flag of a command that means the same.
FLAGS_OF_OTHERS = {
    "--use_peft": "--lora",
    "--dataset_name": "--data",
    "--reward_funcs": "--reward",
    "--rewards": "--reward",
    "--eval_data": "--eval",
}


def split_flags(arguments: Sequence[str]) -> SplitFlags:
    """Separates the flags that absl cannot parse, and completes the other flags.

    Flags of earlier versions are among them. A flag that names no setting ends the process.
    """
    arguments, old_values = old_settings.take_old_flags(arguments)
    check_setting_names(arguments)
    others: list[str] = []
    parts: list[tuple[str, str]] = []
    task = None
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        flag = _SETTING_FLAG.match(argument)
        is_task = flag is not None and flag[1] == TASK_NAME
        if flag is None or not (is_task or config.names_part(flag[1])):
            others.append(argument)
            continue
        _, equals, text = argument.partition("=")
        if not equals and argument.startswith(("--no", "-no")):
            # absl's form of a boolean: --noNAME.
            text = "False"
        elif not equals and config.is_boolean_argument(flag[1]):
            text = "True"
        elif not equals:
            # Without "=", the next argument is the value.
            text = remaining.pop(0) if remaining else ""
        if is_task:
            task = text
        else:
            parts.append((flag[1], text))
    return SplitFlags(complete_tuples(others), parts, old_values, task)


def set_parts(settings: config.Config, parts: Sequence[tuple[str, str]]) -> None:
    """Changes the parts of a config as their flags say.

    Parts are chosen before their arguments are changed, in any order of the flags. A repeated flag
    of a list adds an item; a flag without a value empties the list.

    Raises UserError for a part, or an argument of the chosen part, that does not exist.
    """
    items: dict[str, tuple[object, ...]] = {}  # of the lists
    # The name of a part has fewer dots than the names of its arguments.
    for name, text in sorted(parts, key=lambda flag: flag[0].count(".")):
        value: object = text
        if config.is_tuple_argument(name):
            try:
                added = read_tuple(as_tuple(text, str), str)
            except ValueError as error:
                raise UserError(f"{name}={shown(text)}: {error}") from None
            items[name] = (*items.get(name, ()), *added) if added else ()
            value = items[name]
        config.set_part(settings, name, value)


def check_chosen_parts(given: SplitFlags) -> None:
    """Raises UserError if a flag changes an argument that the part of another flag does not have.

    Without the check, --config.warm_start=none would do nothing next to --config.warm_start.lr=0.1,
    because an argument of a setting that is none chooses its part.
    """
    known = config.known_names()
    # Old values of a setting of today, such as train.resume_from=none, may choose a part, too.
    old_choices = [value for value in given.old_values if value[0] in known]
    # The last flag of a setting counts.
    for setting, choice in dict([*given.parts, *old_choices]).items():
        choices = config.parts_to_choose(setting)
        # `set_part` reports a part that does not exist.
        if chosen_part(choice) not in choices:
            continue
        # The class decides, because the numbers in brackets are arguments of the same part.
        part = choices[chosen_part(choice)]
        arguments = {} if part is None else field_types(part)
        for name, text in given.parts:
            argument = name.removeprefix(f"{setting}.").partition(".")[0]
            if name.startswith(f"{setting}.") and argument not in arguments:
                raise contradiction((setting, choice), (name, text))


def check_parts_are_kept(settings: config.Config, given: SplitFlags) -> None:
    """Raises UserError if an old flag has replaced the part that another flag chose.

    Old flags such as --config.warm_start.steps=10 and --config.mesh.decode_devices=2 choose a part.
    """
    for name, text in dict(given.parts).items():
        if not config.parts_to_choose(name):
            continue
        part = config.value_of(settings, name)
        if chosen_part(text) == part_name(class_of_part(part)):
            continue
        for old_name, old_text in given.old_values:
            if old_settings.changes(old_name, name):
                raise contradiction((name, text), (old_name, old_text))


def chosen_part(text: str) -> str:
    """Returns the name of the part that the text of a flag chooses: "clip" for "clip(low=0.2)"."""
    return text.partition("(")[0].strip()


def contradiction(chosen: tuple[str, str], other: tuple[str, str]) -> UserError:
    """Returns the error of a flag that chooses a part and another flag that needs another part."""
    (name, text), (other_name, other_text) = chosen, other
    # An old setting such as mesh.decode_devices is no argument of a part today.
    is_argument = other_name in config.known_names()
    parts = config.parts_with_argument(other_name) if is_argument else []
    owners = ", ".join(map(part_name, parts))
    advice = f", or choose {owners}" if parts else ""
    return UserError(
        f"--config.{name}={shown(text)} and --config.{other_name}={shown(other_text)} contradict "
        f"each other, because {name}={shown(chosen_part(text))} has no "
        f"{other_name.rpartition('.')[2]}: leave one of them out{advice}"
    )


def complete_tuples(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with the values of tuples written as Python literals.

    absl reads such a value as a literal, and concatenates the values of a repeated flag. A flag
    without a value empties its tuple, including values from earlier flags. Text that is not a
    literal, such as "math, code", becomes one item.
    """
    # item_kind is None for settings that are not tuples.
    kinds = {setting.name: setting.item_kind for setting in config.list_settings(config.Config())}
    completed: list[tuple[str | None, str]] = []  # (name of the tuple or None, argument)
    name = None  # a tuple setting that takes the next argument as its value
    for argument in arguments:
        flag = re.fullmatch(r"--?config\.([^=]*)(=?)(.*)", argument, re.DOTALL)
        if name is None and flag is not None and kinds.get(flag[1]) is not None:
            name, argument = flag[1], flag[3]
            # Without "=", the next argument is the value.
            if not flag[2]:
                continue
        if name is None:
            completed.append((None, argument))
            continue
        value = as_tuple(argument, kinds[name])
        if value == "()":
            completed = [item for item in completed if item[0] != name]
        completed.append((name, f"--config.{name}={value}"))
        name = None
    if name is not None:  # absl reports the missing value
        completed.append((name, f"--config.{name}"))
    return [argument for _, argument in completed]


# Names separated by commas, such as accuracy,my_rewards:short or FILE.py:f,length.
NAMES = re.compile(r"[\w./-]+(:[A-Za-z_]\w*)?(,[\w./-]+(:[A-Za-z_]\w*)?)+")


def as_tuple(text: str, item_kind: type | None) -> str:
    """Returns the value of a tuple's flag as a Python literal, if its items are text."""
    if not text.strip():
        return "()"
    if item_kind is not str:
        return text
    # A list of names as in a=x,b:y. Other texts with commas may be one item.
    if NAMES.fullmatch(text):
        return f"{tuple(text.split(','))!r}"
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return f"({text!r},)"
    except (MemoryError, RecursionError):  # absl's parser reports the error
        return text
    return text


def parse_settings(defaults: config.Config, arguments: Sequence[str]) -> config.Config:
    """Returns `defaults` with the changes from --config.section.field=value arguments.

    A mistake in the arguments ends the process.
    """
    given = split_flags(arguments)
    values = flags.FlagValues()
    holder = config_flags.DEFINE_config_dataclass(
        "config", defaults, flag_values=values, sys_argv=given.argv
    )
    settings = parse_config_flag(values, given, holder)
    assert isinstance(settings, config.Config), f"{settings=}"
    return settings


def parse_config_flag(
    values: flags.FlagValues,
    given: SplitFlags,
    holder: flags.FlagHolder[object],
) -> object:
    """Parses the arguments and returns the value of the config flag `holder`, changed by them.

    The value is None without the flag. A mistake in the arguments, or in the recipe that the flag
    names, ends the process.
    """
    try:
        unknown = values(given.argv)[1:]
        # absl raises the error of an unreadable recipe when the flag's value is first used.
        getattr(holder.value, "name", "")
    except (flags.Error, OSError) as error:
        exit_with_error(_last_line(_innermost_cause(error)))
    except AttributeError as error:
        # ml_collections names the module of a recipe "config_config".
        if "'get_config'" not in str(error):
            raise
        exit_with_error("--config: the recipe has no function get_config, which returns its Config")
    if unknown:
        exit_with_error(
            f"unknown arguments {' '.join(unknown)}: "
            "settings are given as --config.section.field=value"
        )
    if isinstance(holder.value, config.Config):
        with user_errors():
            # Flags change the arguments of parts, so the recipe's parts are checked before.
            config.check_parts(holder.value)
            change_task(holder.value.task, given)
            check_chosen_parts(given)
            set_parts(holder.value, given.parts)
            for name, text in given.old_values:
                old_settings.put_old_value(holder.value, name, text)
            check_parts_are_kept(holder.value, given)
            old_settings.rename_options(holder.value.task)
            config.validate_values(holder.value)
        expand_task_name(holder.value.task)
    return holder.value


def change_task(task: config.TaskConfig, given: SplitFlags) -> None:
    """Sets the task of the flag task.name. Options of the recipe's other task are dropped."""
    if given.task is None:
        return
    if given.task != task.name and "task.options" not in given_settings(given.arguments):
        task.options = ()
    task.name = given.task


def expand_task_name(task: config.TaskConfig) -> None:
    """Expands task.name=verifiers:ENV, which stands for two settings."""
    if task.name.startswith(verifiers.PREFIX):
        task.environment, task.name = task.name, environment.NAME


def _innermost_cause(error: BaseException) -> BaseException:
    """Returns the exception that absl wrapped, if absl's message is a full traceback."""
    chain = list(causes(error))
    return next((cause for cause in chain if "\n" not in str(cause)), chain[-1])


def _last_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[-1].strip()


def make_parser(command: str, doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the module's docstring as its help, and with one-line errors."""
    # The console script `jzero` names itself and its subcommand.
    is_script = sys.argv[0].startswith("jzero ")
    # Unknown arguments are settings, which argparse must not take for abbreviated flags.
    parser = argparse.ArgumentParser(
        sys.argv[0] if is_script else f"python -m {command}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = exit_with_error
    return parser


# -- Devices ---------------------------------------------------------------------------------------


def start_jax(arguments: Sequence[str]) -> list[str]:
    """Sets up the devices, and joins the other processes of the run, if there are any.

    Has to be called before any device is used. Returns the arguments without PROCESS_FLAGS.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in PROCESS_FLAGS:
        parser.add_argument(f"--{name}", type=PROCESS_FLAG_TYPES.get(name, int))
    parser.set_defaults(join_seconds=processes.JOIN_SECONDS, silence_seconds=peers.SILENCE_SECONDS)
    parser.error = exit_with_error
    args, remaining = parser.parse_known_args(arguments)

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
    if not interrupt.is_main_thread():
        return
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def keep_compiled_programs(directory: Path) -> None:
    """Caches compiled programs in `directory`, so that a resumed run starts without compiling.

    JAX_COMPILATION_CACHE_DIR takes precedence over `directory`.
    """
    if jax.config.values["jax_compilation_cache_dir"] in (None, "", str(shared_programs())):
        jax.config.update("jax_compilation_cache_dir", str(directory.absolute()))
        jax.config.update("jax_compilation_cache_max_size", -1)  # unlimited


def share_compiled_programs() -> None:
    """Caches compiled programs for all commands of this user that have no directory of their own.

    JAX deletes the programs that were not used for the longest time.
    """
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
