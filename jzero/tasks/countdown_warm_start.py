"""Supervised examples of Countdown for a randomly initialized model: `warm_start.steps`.

An example shows a few tries and an answer. For the prompt "3 7 12=16" of template plain:

    12-3=9,9*7=63?16 no
    7-3=4,12+4=16?16 yes
    <answer>12+(7-3)</answer>

The examples teach the format, arithmetic and the form of a try, but not the search: tries are
random, the solution is never used, and most examples end with a wrong answer after their last
failed try. RL has to learn that further tries pay off.

Three choices mattered; lab/log.md has the measurements (the tiny countdown recipe):
- A try ends with its value next to the target. If the model had to read the target from the prompt,
  a model with a million parameters gave 71 % correct verdicts; with the target in the line, 99 %.
  Without correct verdicts RL has no signal for stopping.
- An example gives up with the same probability, 1 / tries, after every try. The number of tries is
  then one behavior with one probability, which RL can change. With at most two tries in all
  examples, the model had never seen a third try, and RL shortened the responses instead.
- The tries of an example are distinct. Otherwise greedy decoding repeats the same try forever.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from jzero.errors import UserError
from jzero.tasks.countdown import (
    Attempt,
    draw_puzzle,
    is_held_out,
    options_of,
    random_attempt,
    render_prompt,
)

if TYPE_CHECKING:
    from jzero.config import TaskConfig

# Intermediate values have at most two digits: lines stay short and the arithmetic learnable.
LARGEST_INTERMEDIATE = 99
# The share of examples that take the value of their last try as the target. Random tries rarely
# reach the target, so without these examples the model would hardly ever see a " yes".
HINDSIGHT = 0.25
MOST_TRIES = 6  # per example, which bounds the length of a response
MOST_REDRAWS = 10  # draws for a try that differs from the earlier tries of the example


def example(task: TaskConfig, seed: int, index: int, tries: float) -> tuple[str, str]:
    """Returns the prompt and the response of the index-th example, with about `tries` tries.

    The puzzle is never held out.

    Raises:
        UserError: `task.template` is a chat template.
    """
    rng = random.Random(f"warm_start/{seed}/{index}")
    puzzle = draw_puzzle(task, rng, held_out=False)
    numbers, target = puzzle.numbers, puzzle.target

    attempts = [random_attempt(numbers, rng, LARGEST_INTERMEDIATE)]
    while len(attempts) < MOST_TRIES and rng.random() > 1 / tries:
        attempts.append(_another_attempt(attempts, numbers, rng))

    # A hindsight target changes the puzzle, which must not become a held-out puzzle.
    value = attempts[-1].value
    is_in_range = 1 <= value <= options_of(task).target_max
    is_allowed_target = is_in_range and not is_held_out(numbers, value)
    if rng.random() < HINDSIGHT and is_allowed_target:
        target = value

    # The example ends with the first try that reaches the target, or with the last try.
    values = [attempt.value for attempt in attempts]
    if target in values:
        attempts = attempts[: values.index(target) + 1]
    lines = [_line(attempt, target) for attempt in attempts]

    prompt = render_prompt(task.template, numbers, target)
    if not isinstance(prompt, str):
        raise UserError(
            f"task.template={task.template} is a chat template, and countdown has warm-start "
            "examples for plain text only: set warm_start=none"
        )
    # The template has opened the reasoning, so the response closes it.
    if prompt.endswith("<think>"):
        lines.append("</think>")
    lines.append(f"<answer>{attempts[-1].expression}</answer>")
    return prompt, "\n".join(lines)


def _another_attempt(
    attempts: list[Attempt],
    numbers: tuple[int, ...],
    rng: random.Random,
) -> Attempt:
    """Draws an attempt that is not in `attempts`; after MOST_REDRAWS draws accepts any attempt."""
    known_steps = [attempt.steps for attempt in attempts]
    attempt = random_attempt(numbers, rng, LARGEST_INTERMEDIATE)
    for _ in range(MOST_REDRAWS - 1):
        if attempt.steps not in known_steps:
            break
        attempt = random_attempt(numbers, rng, LARGEST_INTERMEDIATE)
    return attempt


def _line(attempt: Attempt, target: int) -> str:
    verdict = "yes" if attempt.value == target else "no"
    return f"{','.join(attempt.steps)}?{target} {verdict}"


def max_tokens(task: TaskConfig, tries: float) -> int:
    """Returns an upper bound on the tokens of a response.

    The bound holds for jzero's countdown tokenizer: every character is a token, and " yes", " no"
    and every tag are one token each.
    """
    options = options_of(task)
    steps = options.numbers_max - 1
    largest = max(LARGEST_INTERMEDIATE, options.value_max)
    # The last step of a line has no comma; the verdict, also one token, takes its place.
    line = steps * len(f"{largest}*{largest}={largest},") + len(f"?{options.target_max}\n")
    digits = options.numbers_max * len(str(options.value_max))
    parentheses = 2 * max(steps - 1, 0)
    answer = 2 + digits + steps + parentheses  # 2 tags, and one operation per step
    lines = MOST_TRIES if tries > 1 else 1
    return lines * line + answer + 3  # </think>, its newline and the end of the sequence
