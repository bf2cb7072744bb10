"""Steps through an environment without a model: `jzero play shop.py:Shop`.

    jzero play FILE.py:Class [--data FILE [--row N]] [--seed S] [--answers FILE]

Resets the environment and prints the first observation. Then every line of --answers, by default of
the terminal, is a response: the command prints the reply, the reward and its parts, and whether the
episode is over. A line that is a JSON string, such as "two\\nlines", may have line breaks.

Before the first answer the environment is reset twice, and after the last one a second instance
gets the same responses: both must return the same as the first, because jzero resets an environment
for a prompt, again for every episode of a group, and again after a kill. The exit status is 1 if
they differ. --data takes a row of a data set for `reset`; without it the row is empty.

The class runs in this process with your rights, and is the same class as task.environment=.
"""

import json
import sys
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TextIO, TypeVar

from jzero import cli, terminal
from jzero.config import TaskConfig
from jzero.environments import environment, environment_task
from jzero.environments.environment import Environment, Observation, Step
from jzero.environments.tools import classes
from jzero.errors import UserError, reason_of
from jzero.problems import problem_sets
from jzero.problems.bounds import MAX_REPLY_BYTES
from jzero.types import JsonValue, Prompt

T = TypeVar("T")

QUIT = "/quit"
NO_VERDICT = (
    "note: every step with a reward above 0 counts as correct, and accuracies count such episodes. "
    'If rewards are shaped, return the part "correct" in each step: {"progress": 0.1, "correct": 0}'
)


class Start(NamedTuple):
    """The arguments of `reset`."""

    row: dict[str, JsonValue]
    seed: int


@dataclass(frozen=True)
class Episode:
    """What an instance of the environment has returned."""

    observation: Observation
    steps: list[Step]


def make(name: str) -> Environment:
    """Returns a new instance of an environment.

    Raises UserError if there is no such class, or it is no environment.
    """
    environment_task.check(TaskConfig(name=environment.NAME, environment=name))
    if classes.is_tool_class(name):
        raise UserError(
            f"{name} has tools as methods, which a chat template has to show to a model: `jzero "
            "play` steps through classes with reset(row, seed) and step(response)"
        )
    # The same limit and the same checks of values as in training, so that a class that plays here
    # also trains.
    return environment.make_environment(name, MAX_REPLY_BYTES)


def call(what: str, coroutine: Coroutine[None, None, T]) -> T:
    """Returns the result of a method of the environment.

    Raises UserError, with the method and the reason, if the method fails.
    """
    try:
        return environment.run(coroutine)
    except Exception as error:  # the class is the user's: it may raise anything
        raise UserError(f"{what} failed ({type(error).__name__}: {reason_of(error)})") from error


def replay(name: str, start: Start, responses: Sequence[str]) -> Episode:
    """Returns what a new instance answers to the same responses."""
    instance = make(name)
    observation = call("reset", instance.reset(*start))
    steps = [call("step", instance.step(response)) for response in responses]
    call("close", instance.close())
    return Episode(observation, steps)


def difference(first: Episode, second: Episode) -> str:
    """Returns the first difference between two episodes with the same responses, or ""."""
    prompt, other_prompt = first.observation.prompt, second.observation.prompt
    if prompt != other_prompt:
        return (
            f"reset is not a function of row and seed: it returned {shown(prompt)}, "
            f"then {shown(other_prompt)}"
        )
    for number, (old, new) in enumerate(zip(first.steps, second.steps, strict=True), 1):
        if old != new:
            return f"step {number} is not a function of the responses: {old}, then {new}"
    return ""


def play(
    name: str,
    start: Start,
    answers: Iterator[str],
    target: TextIO,
) -> bool:
    """Plays an episode with `answers`; returns whether the environment is deterministic.

    Raises UserError if a method of the environment fails or returns a wrong value.
    """
    instance = make(name)
    observation = call("reset", instance.reset(*start))
    first = Episode(observation, [])
    # Another instance: state that a class shares between instances shows here.
    again = replay(name, start, [])
    terminal.write(f"observation\n{indented(observation.prompt)}", target)
    for tool in observation.tools:
        terminal.write(f"tool {json.dumps(tool)}", target)
    if reason := difference(first, again):
        terminal.write(f"not deterministic: {reason}", target)
        return False
    terminal.write("reset twice: the same", target)

    responses: list[str] = []
    steps: list[Step] = []
    for response in answers:
        responses.append(response)
        step = call(f"step {len(responses)}", instance.step(response))
        steps.append(step)
        terminal.write(f"\nstep {len(steps)}: {shown(response)}", target)
        terminal.write(describe(step), target)
        if step.done:
            break
    call("close", instance.close())
    total = sum(step.rewards.value for step in steps)
    end = "over" if steps and steps[-1].done else "not over"
    terminal.write(f"\n{len(steps)} steps, total reward {total:g}, {end}", target)

    if any(step.is_correct and not step.has_verdict for step in steps):
        terminal.write(NO_VERDICT, target)

    # Training rebuilds a lost episode in the same way, from its responses.
    second = replay(name, start, responses)
    reason = difference(Episode(observation, steps), second)
    terminal.write(f"not deterministic: {reason}" if reason else "played again: the same", target)
    return not reason


def describe(step: Step) -> str:
    """Returns the reward, its parts, and the reply of a step."""
    parts = "".join(f", {name} {value:g}" for name, value in step.rewards.parts.items())
    solved = ", correct" if step.is_correct else ""
    line = f"  reward {step.rewards.value:g}{parts}{solved}, done {step.done}"
    return line if step.reply is None else f"{line}\n{indented(step.reply)}"


def shown(value: Prompt) -> str:
    return json.dumps(value, ensure_ascii=False)


def indented(prompt: Prompt) -> str:
    """Returns text, or messages with their roles, indented."""
    if isinstance(prompt, str):
        lines = prompt.splitlines() or [""]
    else:
        lines = [f"[{message['role']}] {message['content']}" for message in prompt]
    return "\n".join(f"  | {line}" for line in lines)


def read_answers(source: TextIO, target: TextIO | None) -> Iterator[str]:
    """Yields the responses in the lines of a file; asks for them in the terminal `target`."""
    while True:
        if target is not None:
            terminal.write("> ", target, end="")
        line = source.readline()
        if not line or line.strip() == QUIT:
            return
        yield read_answer(line.rstrip("\n"))


def read_answer(line: str) -> str:
    """Returns a line, or the text of a JSON string."""
    # A response that merely begins and ends with quotes is taken as it is.
    if line.startswith('"') and line.endswith('"'):
        try:
            return str(json.loads(line))
        except ValueError:
            return line
    return line


def read_row(data: str, index: int) -> dict[str, JsonValue]:
    """Returns a row of a data set. Raises UserError if there is none with this index."""
    dataset = problem_sets.load_split(data, "train")
    if not 0 <= index < len(dataset):
        raise UserError(f"--row {index}: {data} has {len(dataset)} rows, from 0")
    return problem_sets.read_readable_columns(dataset.select([index]))[0]


def make_parser() -> cli.Parser:
    """Returns the parser of the command."""
    parser = cli.make_parser("jzero.play", __doc__)
    parser.add_argument("environment", metavar="FILE.py:Class", help="or module:Class")
    parser.add_argument("--data", help="data set whose row `reset` gets")
    parser.add_argument("--row", type=int, default=0, help="its row, from 0")
    parser.add_argument("--seed", type=int, default=0, help="seed that `reset` gets")
    parser.add_argument("--answers", type=Path, help="file with a response a line; default: stdin")
    return parser


def main() -> None:
    """Runs the command."""
    args = make_parser().parse_args()
    with cli.user_errors():
        row = read_row(args.data, args.row) if args.data else {}
        start = Start(row, args.seed)
        if args.answers is None:
            answers = read_answers(sys.stdin, sys.stdout if sys.stdin.isatty() else None)
            is_same = play(args.environment, start, answers, sys.stdout)
        else:
            try:
                with args.answers.open(encoding="utf-8") as file:
                    is_same = play(args.environment, start, read_answers(file, None), sys.stdout)
            except OSError as error:
                raise UserError(f"--answers {args.answers}: {error.strerror}") from None
    sys.exit(0 if is_same else 1)


if __name__ == "__main__":
    terminal.run_command(main)
