"""Flags of settings that have moved, and still mean the same: `--config.model.arch.head_dim=16`.

    arguments, old_values = take_old_flags(sys.argv[1:])    # before the flags are parsed
    put_old_value(config, name, text)                       # afterwards, for each old value

Flags of removed settings fail (`schema.REPLACED`).
"""

import re
from collections.abc import Callable, Sequence

from jzero.config.architecture import with_entry
from jzero.config.schema import Config, JudgeServer, set_part
from jzero.errors import UserError, shown

OldValue = tuple[str, str]  # name of the old setting, and the text of its flag

# The rest of the arguments of a flag's function is the name of the old setting, and its text.
_FLAG = re.compile(r"--?config\.([^=]+)(=?)(.*)", re.DOTALL)


def change_architecture(config: Config, name: str, text: str) -> None:
    """Changes one entry of a tiny model: model.arch.head_dim=16."""
    entry = name.removeprefix("model.arch.")
    config.model.arch = with_entry(config.model.arch, entry, text)


def add_option(config: Config, name: str, text: str) -> None:
    """Sets an option of the task: task.value_max=15."""
    option = name.removeprefix("task.")
    config.task.options = (*config.task.options, f"{option}={text}")


def change_judge(config: Config, name: str, text: str) -> None:
    """Changes an argument of the judge; the first one chooses it: task.reward.judge.url=URL."""
    reward = config.task.reward
    reward.judge = reward.judge or JudgeServer()
    set_part(config, name, text)


def change_search(config: Config, name: str, text: str) -> None:
    """Adds an argument to the tool search in task.tools.names: task.tools.corpus=FILE."""
    tools = config.task.tools
    if not any(entry.partition("(")[0] == "search" for entry in tools.names):
        raise UserError(f"{name}={shown(text)} is of the tool search: add it to task.tools.names")
    argument = {
        "task.tools.corpus": f"corpus={text!r}",
        "task.tools.search_results": f"results={text}",
    }[name]
    tools.names = tuple(with_argument(entry, argument) for entry in tools.names)


def with_argument(tool: str, argument: str) -> str:
    """Returns "search(corpus='FILE',results=5)" for "search(corpus='FILE')" and "results=5"."""
    name, _, arguments = tool.removesuffix(")").partition("(")
    if name != "search":
        return tool
    return f"search({arguments},{argument})" if arguments else f"search({argument})"


def change_warmup(config: Config, name: str, text: str) -> None:
    """Sets the warm-up of the learning rate: optimizer.warmup_ratio=0.03."""
    argument = name.removeprefix("optimizer.warmup_")
    if argument == "from_zero":
        set_part(config, "optimizer.warmup.from_zero", text)
        return
    part = {"steps": f"steps(number={text})", "ratio": f"share(ratio={text})"}[argument]
    is_none = text.strip() in ("0", "0.0")
    warmup = config.optimizer.warmup
    set_part(config, "optimizer.warmup", "none" if is_none else part)
    if warmup is not None and warmup.from_zero and not is_none:
        set_part(config, "optimizer.warmup.from_zero", True)


COUNTDOWN_OPTIONS = (
    "numbers_min",
    "numbers_max",
    "value_max",
    "target_max",
    "format_score",
    "malformed_score",
)

# Prefix of the name of an old setting -> the function that applies its value to a config.
REWRITTEN: dict[str, Callable[[Config, str, str], None]] = {
    "model.arch.": change_architecture,
    "optimizer.warmup_steps": change_warmup,
    "optimizer.warmup_ratio": change_warmup,
    "optimizer.warmup_from_zero": change_warmup,
    "task.reward.judge.": change_judge,
    "task.tools.corpus": change_search,
    "task.tools.search_results": change_search,
    **{f"task.{option}": add_option for option in COUNTDOWN_OPTIONS},
}


def take_old_flags(arguments: Sequence[str]) -> tuple[list[str], list[OldValue]]:
    """Returns the arguments without flags of settings that have moved, and these flags' values.

    A flag without "=" has its value in the next argument.
    """
    others: list[str] = []
    old_values: list[OldValue] = []
    waiting = ""  # the old setting that takes the next argument as its value
    for argument in arguments:
        if waiting:
            old_values.append((waiting, argument))
            waiting = ""
            continue
        flag = _FLAG.match(argument)
        if flag is None or not flag[1].startswith(tuple(REWRITTEN)):
            others.append(argument)
        elif flag[2]:
            old_values.append((flag[1], flag[3]))
        else:
            waiting = flag[1]
    return others, old_values


def put_old_value(config: Config, name: str, text: str) -> None:
    """Changes a config as the old flag `--config.NAME=TEXT` does. Raises UserError if it cannot."""
    for prefix, put in REWRITTEN.items():
        if name.startswith(prefix):
            put(config, name, text)
