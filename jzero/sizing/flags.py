"""Trains a model on your problems, or runs a recipe of jzero.

    jzero train --model DIR_OR_ID --data FILE_OR_ID [--reward my.py:f] [--algorithm NAME]
                [--eval FILE] [--lora] [--minutes M] [--workdir DIR]
                [--config.section.field=value ...]
    jzero train --model DIR_OR_ID --environment FILE.py:Class [--data FILE_OR_ID] [...]
    jzero train --workdir DIR [--minutes M] [--config.section.field=value ...]
    jzero train RECIPE[:PRESET] [--workdir DIR] [--config.section.field=value ...]

The first form reads the tokenizer, the data and the machine, chooses every setting that depends on
them, and prints the choices with their reasons. It writes them to recipe.py in the workdir, which
is a recipe like any other: `python -m jzero.main --config WORKDIR/recipe.py` is the same run.
`jzero train --workdir DIR` continues a run that was stopped.

A reward is a Python function of the response, the correct answer (gold) and the task, or a function
for TRL's GRPOTrainer. Several --reward are added, with the weights of --reward-weights. Without
--reward the task's grader compares the answers, or runs programs with the tests of the data.
Columns of the data are found by their names (problem, question, prompt, messages, ...; answer,
final_answer, reward_model.ground_truth, ...; test_list and others for tests). In a conversation
that ends with a message of the assistant, that message is the answer.

With --environment the policy plays episodes of a class with reset(row, seed) and step(response),
whose rewards it is trained on; `reset` gets the rows of --data, if there are any.

--machine v5e-8 chooses for a machine that is not attached, prints and writes the recipe, and stops.
`jzero plan --config WORKDIR/recipe.py --machine v5e-8` says whether a changed recipe still fits.

The last form is `python -m jzero.main --config RECIPE`. A name such as gsm8k:tiny is a recipe of
jzero, and a path is a file. `jzero train --help rollout` explains the settings of a section.
"""

# Imports no jax: a mistake in a flag is reported at once.

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from jzero import cli, recipe_files, terminal
from jzero import main as jzero_main
from jzero.algorithms import PRESETS
from jzero.config import Config
from jzero.config.describe import describe as describe_settings
from jzero.config.flags import check_texts, split_flags
from jzero.errors import UserError
from jzero.fields import record

HELD_OUT = {True: 32, False: 256}  # problems at most, on a CPU and elsewhere


@record
class Wishes:
    """The flags of `jzero train`."""

    model: str = ""
    """"" only if a run is continued"""
    data: str = ""
    """"" only with an environment, or if a run is continued"""
    rewards: tuple[str, ...] = ()
    reward_weights: tuple[float, ...] = ()
    """() or a weight for each of `rewards`"""
    algorithm: str = ""
    """a key of algorithms.PRESETS; "": the default"""
    environment: str = ""
    """FILE.py:Class, or another name as in task.environment"""
    eval_data: str = ""
    lora: bool = False
    minutes: float = 0.0


@dataclass(frozen=True)
class Request:
    """The parsed command line of the first form, or the arguments of `jzero.train`."""

    wishes: Wishes
    workdir: Path | None
    given: frozenset[str]  # names of the settings that `apply` sets
    apply: Callable[[Config], Config]  # returns a config with the settings that the user has given
    is_dry: bool = False  # stops before training
    machine: str = ""  # a usual machine to choose for; "": the attached devices


def main() -> None:
    """Runs the command."""
    arguments = sys.argv[1:]
    has_recipe = bool(arguments) and not arguments[0].startswith("-")
    if has_recipe:
        jzero_main.run_arguments(recipe_arguments(arguments))
        return
    joining, own_arguments = cli.split_process_flags(arguments)
    # A process that others wait for joins them first, so that they hear of its mistake.
    if joining.coordinator:
        own_arguments = cli.start_jax(arguments)
    request = parse(own_arguments)
    if not joining.coordinator:
        cli.start_jax(arguments)
    with terminal.imports():
        from jzero.sizing.command import run  # not at the top: it imports jax

    run(request, " ".join(arguments))


def recipe_arguments(arguments: list[str]) -> list[str]:
    """Returns the arguments of `jzero.main` for a recipe and further arguments."""
    name, colon, preset = arguments[0].partition(":")
    with cli.user_errors():
        path = recipe_files.recipe_path(name)
    if arguments[1:] in (["-h"], ["--help"]):
        terminal.write(recipe_files.recipe_help(path))
        sys.exit(0)
    return [f"--config={path}{colon}{preset}", *arguments[1:]]


def make_parser() -> cli.Parser:
    """Returns the parser of the first forms of the command."""
    parser = cli.make_model_parser("jzero train", __doc__)
    parser.add_argument("--model", default="", help="directory or hub id of the model")
    parser.add_argument(
        "--data", default="", help="file, directory or hub id of the problems to train on"
    )
    parser.add_argument(
        "--environment",
        default="",
        metavar="FILE.py:CLASS",
        help="an environment to train in, instead of questions with a reward",
    )
    parser.add_argument(
        "--reward",
        action="append",
        default=[],
        metavar="FILE.py:FUNCTION",
        help="the reward of a response; several are added",
    )
    parser.add_argument(
        "--reward-weights",
        default="",
        metavar="W1,W2,...",
        help="a weight for each --reward; default: 1",
    )
    parser.add_argument(
        "--algorithm",
        default="",
        metavar="NAME",
        help=f"default: grpo; or one of {', '.join(PRESETS)}",
    )
    parser.add_argument(
        "--eval",
        default="",
        metavar="DATA",
        help="held-out problems; default: the split test of --data, or a tenth of its rows, at "
        f"most {HELD_OUT[False]} (CPU: {HELD_OUT[True]})",
    )
    parser.add_argument(
        "--lora", action="store_true", help="train a LoRA adapter instead of the whole model"
    )
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="end before so many minutes, with a checkpoint"
    )
    parser.add_argument(
        "--workdir",
        type=Path,
        help="directory of the run, which the same --workdir continues; default: "
        "runs/MODEL-DATA-TIME",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="make all checks of the run, write the recipe, and stop before training",
    )
    parser.add_argument(
        "--machine",
        default="",
        metavar="NAME",
        help="choose for a machine that is not attached, such as v5e-8, and stop as --dry-run",
    )
    return parser


def parse(arguments: list[str]) -> Request:
    """Parses the first form of the command line. A mistake ends the process."""
    parser = make_parser()
    # The help must not wait for devices.
    if (name := cli.asked_help(arguments)) is not None:
        if not name:
            parser.parse_args(["--help"])
        with cli.user_errors():
            terminal.write(describe_settings(name))
        sys.exit(0)
    args, remaining = parser.parse_known_args(cli.expand_price(arguments))
    with cli.user_errors():
        check_texts(split_flags(remaining)[0])
    with cli.user_errors():
        wishes = Wishes(
            model=args.model,
            data=args.data,
            rewards=tuple(args.reward),
            reward_weights=read_weights(args.reward_weights, parser.error),
            algorithm=args.algorithm,
            environment=args.environment,
            eval_data=args.eval,
            lora=args.lora,
            minutes=args.minutes,
        )

    # With only a workdir, its run is continued.
    if args.workdir is None or wishes != Wishes(minutes=wishes.minutes):
        with cli.user_errors():
            check_wishes(wishes)

    def apply(settings: Config) -> Config:
        return cli.parse_settings(settings, remaining)

    given = frozenset(cli.given_settings(remaining))
    is_dry = args.dry_run or bool(args.machine)
    return Request(wishes, args.workdir, given, apply, is_dry, args.machine)


def read_weights(text: str, error: Callable[[str], NoReturn]) -> tuple[float, ...]:
    """Returns the weights of --reward-weights; `error` ends the process."""
    try:
        return tuple(float(weight) for weight in text.split(",")) if text else ()
    except ValueError:
        error(f"--reward-weights={text}: give a number for each --reward, as in 1,0.5")


def check_wishes(wishes: Wishes) -> None:
    """Raises UserError if flags of a new run are missing, or do not fit together."""
    if not wishes.model:
        raise UserError(
            "give the model to train, --model DIR_OR_ID; or a recipe, as in jzero train countdown; "
            "or --workdir DIR of a run to continue"
        )
    if not (wishes.data or wishes.environment):
        raise UserError(
            "give the problems to train on, --data FILE, or --environment FILE.py:Class"
        )
    weights, count = wishes.reward_weights, len(wishes.rewards)
    if weights and len(weights) != count:
        raise UserError(
            f"--reward-weights={shown_weights(weights)}: give a weight for each --reward; there "
            f"are {count}"
        )


def shown_weights(weights: Sequence[float]) -> str:
    """Returns weights as --reward-weights takes them."""
    return ",".join(f"{weight:g}" for weight in weights)
