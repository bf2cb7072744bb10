"""The command `jzero`: `jzero train --model DIR --data FILE`, `jzero chat RUN`, `jzero --help`.

Each subcommand is a line of COMMANDS. Its module is imported when the subcommand runs, so that
`jzero --help` needs no JAX. `python -m jzero train` is the same as `jzero train`.
"""

import difflib
import pkgutil
import sys
from typing import NamedTuple

import jzero
from jzero import terminal
from jzero.errors import slips


class Command(NamedTuple):
    """A subcommand: its function, which reads sys.argv, and what it does."""

    function: str  # "module:function"
    purpose: str
    # "module:function" that returns the parser of the command, and imports no JAX. Flags are read
    # with it before the module of `function`, which may use JAX, is imported. "": `function` itself
    # reads them before.
    parser: str


COMMANDS = {
    "train": Command("jzero.sizing.flags:main", "train a model on your data, or run a recipe", ""),
    "evaluate": Command(
        "jzero.commands.evaluate:main",
        "measure the accuracy of a run or of a model",
        "jzero.command_flags:evaluate",
    ),
    "chat": Command(
        "jzero.chat:main", "talk to a model in the terminal", "jzero.command_flags:chat"
    ),
    "compare": Command(
        "jzero.compare:main",
        "compare two models on the same problems",
        "jzero.command_flags:compare",
    ),
    "sample": Command(
        "jzero.sample:main",
        "sample for a run that trains on another machine",
        "jzero.command_flags:sample",
    ),
    "serve": Command(
        "jzero.serve:main",
        "serve a model over OpenAI's HTTP API",
        "jzero.serving.flags:make_parser",
    ),
    "tinker": Command(
        "jzero.tinker.__main__:main",
        "serve the Tinker API: train and sample",
        "jzero.tinker.flags:make_parser",
    ),
    "export": Command(
        "jzero.export:main",
        "write a checkpoint as a Hugging Face directory",
        "jzero.command_flags:export",
    ),
    "plan": Command(
        "jzero.plan:command",
        "compute what fits a TPU or a GPU that is not attached",
        "jzero.command_flags:plan",
    ),
    "generate": Command(
        "jzero.generate:main",
        "write graded responses to a set of problems",
        "jzero.command_flags:generate",
    ),
    "grade": Command(
        "jzero.grade:main", "grade answers that another program produced", "jzero.grade:make_parser"
    ),
    "watch": Command(
        "jzero.watch:main",
        "show running and finished runs as a live page",
        "jzero.watch:make_parser",
    ),
    "report": Command(
        "jzero.report:main", "write the page of runs as one HTML file", "jzero.report:make_parser"
    ),
    "replay": Command(
        "jzero.replay:main",
        "sample the logged rollouts of separate jobs again",
        "jzero.command_flags:replay",
    ),
    "audit": Command(
        "jzero.audit:main",
        "find rollouts that a model cannot have sampled",
        "jzero.command_flags:audit",
    ),
    "filter": Command(
        "jzero.filter:main",
        "choose the problems that are worth training on",
        "jzero.filter:make_parser",
    ),
    "play": Command(
        "jzero.play:main", "step through an environment without a model", "jzero.play:make_parser"
    ),
}


def usage() -> str:
    """Returns the help of the command."""
    lines = [
        "jzero COMMAND [ARGUMENTS]: reinforcement learning of language models in JAX.",
        "",
        *(f"  {name:<10}{command.purpose}" for name, command in COMMANDS.items()),
        "",
        "  jzero train --model DIR_OR_ID --data FILE_OR_ID    your model, your data",
        "  jzero train gsm8k:tiny                             a recipe of jzero",
        "",
        "`jzero COMMAND --help` explains a command. RUN stands for the workdir of a run.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Runs the subcommand in sys.argv."""
    terminal.run_command(run_subcommand)


def run_subcommand() -> None:
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help", "help"):
        terminal.write(usage())
        return
    if name == "--version":
        terminal.write(f"jzero {jzero.__version__}")
        return
    if name not in COMMANDS:
        similar = slips(name, COMMANDS) or difflib.get_close_matches(name, COMMANDS, 1)
        advice = (
            f"did you mean {' or '.join(similar)}?"
            if similar
            else f"there are {', '.join(COMMANDS)}"
        )
        terminal.write(f"error: jzero has no command {name}; {advice}", sys.stderr)
        sys.exit(2)
    # Parsers show this as the name of the program.
    sys.argv = [f"jzero {name}", *arguments]
    with terminal.imports():
        if COMMANDS[name].parser:
            check_flags(COMMANDS[name].parser, arguments)
        function = pkgutil.resolve_name(COMMANDS[name].function)
    function()


def check_flags(parser_name: str, arguments: list[str]) -> None:
    """Ends the process at a mistake in the flags of a command.

    A process that others wait for has to join them first, so that they hear of its mistake: its
    command finds the same one.
    """
    from jzero import cli  # not at the top: it takes a third of a second
    from jzero.config.flags import check_texts, split_flags

    parser = pkgutil.resolve_name(parser_name)()
    joining, own_arguments = cli.split_process_flags(arguments)
    if cli.asked_help(arguments) is not None or joining.coordinator:
        return
    _, others = parser.parse_known_args(own_arguments if parser.has_processes else arguments)
    with cli.user_errors():
        check_texts(split_flags(others)[0])


if __name__ == "__main__":
    main()
