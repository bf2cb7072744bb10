"""Countdown episodes for a model that starts from nothing: supervised steps before RL.

They teach the format, arithmetic and what a try looks like, not the search: tries are random, the solution is never
consulted, and after its last failed try an example gives up with a wrong answer. That trying on pays is left to RL.

    3 7 12=16
    12-3=9,9*7=63 no
    7-3=4,12+4=16 yes
    <answer>12+(7-3)</answer>"""

import random
from typing import TYPE_CHECKING

from jzero.tasks import countdown

if TYPE_CHECKING:
    from jzero import config

LARGEST = 999  # intermediate value of a try: three digits keep lines short and arithmetic learnable
HINDSIGHT = 0.25  # share of examples whose target is their last try's value: how " yes" is learnt


def example(task: "config.Task", seed: int, index: int, tries: int) -> tuple[str, str]:
    """The index-th (prompt, response): 1..tries random tries on a training problem."""
    rng = random.Random(f"warm_start/{seed}/{index}")
    numbers, target = countdown.draw(task, rng, wanted=False)
    attempts = [countdown.attempt(numbers, rng, LARGEST) for _ in range(1 + int(rng.random() * tries))]
    if rng.random() < HINDSIGHT:
        for _ in range(100):
            attempts[-1] = countdown.attempt(numbers, rng, LARGEST)
            value = attempts[-1].value
            if 1 <= value <= task.target_max and not countdown.held_out(numbers, value):
                target = value
                break
    lines = []
    for a in attempts:
        lines.append(",".join(a.steps) + (" yes" if a.value == target else " no"))
        if a.value == target:
            break
    prompt = countdown.TEMPLATES[task.template](numbers, target)
    lines += ["</think>"] if prompt.endswith("<think>") else []
    return prompt, "\n".join([*lines, f"<answer>{a.expression}</answer>"])


def max_tokens(task: "config.Task", tries: int) -> int:
    """Upper bound on a response's tokens under the countdown tokenizer: one a character, words and tags one each."""
    steps = task.numbers_max - 1
    most = max(LARGEST, task.value_max)
    line = steps * len(f"{most}*{most}={most},") + len("\n")  # the last step's comma is the verdict's token
    digits = len(str(task.value_max))
    answer = 2 + task.numbers_max * digits + steps + 2 * max(steps - 1, 0)
    return tries * line + answer + 2  # </think> and its newline
