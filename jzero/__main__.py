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


class Command(NamedTuple):
    """A subcommand: its function, which reads sys.argv, and what it does."""

    function: str  # "module:function"
    purpose: str


COMMANDS = {
    "train": Command("jzero.sizing.flags:main", "train a model on your data, or run a recipe"),
    "evaluate": Command(
        "jzero.commands.evaluate:main", "measure the accuracy of a run or of a model"
    ),
    "chat": Command("jzero.chat:main", "talk to a model in the terminal"),
    "compare": Command("jzero.compare:main", "compare two models on the same problems"),
    "sample": Command("jzero.sample:main", "sample for a run that trains on another machine"),
    "serve": Command("jzero.serve:main", "serve a model over OpenAI's HTTP API"),
    "tinker": Command("jzero.tinker.__main__:main", "serve the Tinker API: train and sample"),
    "export": Command("jzero.export:main", "write a checkpoint as a Hugging Face directory"),
    "plan": Command("jzero.plan:command", "compute what fits a TPU or a GPU that is not attached"),
    "generate": Command("jzero.generate:main", "write graded responses to a set of problems"),
    "grade": Command("jzero.grade:main", "grade answers that another program produced"),
    "watch": Command("jzero.watch:main", "show running and finished runs as a live page"),
    "report": Command("jzero.report:main", "write the page of runs as one HTML file"),
    "replay": Command("jzero.replay:main", "sample the logged rollouts of separate jobs again"),
    "audit": Command("jzero.audit:main", "find rollouts that a model cannot have sampled"),
    "filter": Command("jzero.filter:main", "choose the problems that are worth training on"),
    "play": Command("jzero.play:main", "step through an environment without a model"),
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
        similar = difflib.get_close_matches(name, COMMANDS)
        advice = f"did you mean {similar[0]}?" if similar else f"there are {', '.join(COMMANDS)}"
        terminal.write(f"error: jzero has no command {name}; {advice}", sys.stderr)
        sys.exit(2)
    # Parsers show this as the name of the program.
    sys.argv = [f"jzero {name}", *arguments]
    with terminal.imports():
        function = pkgutil.resolve_name(COMMANDS[name].function)
    function()


if __name__ == "__main__":
    main()
