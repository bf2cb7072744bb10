"""Countdown episodes for a model that starts from nothing: supervised steps before RL.

They teach the format, arithmetic and what a try looks like, not the search: tries are random, the solution is never
consulted, and after its last failed try an example gives up with a wrong answer. That trying on pays is left to RL.

    3 7 12=16
    12-3=9,9*7=63?16 no
    7-3=4,12+4=16?16 yes
    <answer>12+(7-3)</answer>

A try ends by writing the target beside its value. Without that the verdict has to be read off the prompt, which a model
of a million parameters does not learn in these few steps; with it 99 % of its verdicts are right."""

import random
from typing import TYPE_CHECKING

from jzero.tasks import countdown

if TYPE_CHECKING:
    from jzero import config

LARGEST = 99  # intermediate value of a try: two digits keep lines short and arithmetic learnable
HINDSIGHT = 0.25  # share of examples whose target is their last try's value: how " yes" is learnt
MOST = 6  # tries of an example


def example(task: "config.Task", seed: int, index: int, tries: float) -> tuple[str, str]:
    """The index-th (prompt, response) on a training problem: random tries, about `tries` of them. After every failed
    one it gives up with the same probability, so that how long to try is one habit, which RL can change."""
    rng = random.Random(f"warm_start/{seed}/{index}")
    numbers, target, _ = countdown.draw(task, rng, wanted=False)
    attempts = [countdown.attempt(numbers, rng, LARGEST)]
    while len(attempts) < MOST and rng.random() > 1 / tries:
        for _ in range(10):  # draws, for one that was not tried yet
            new = countdown.attempt(numbers, rng, LARGEST)
            if new.steps not in [old.steps for old in attempts]:
                break
        attempts.append(new)
    value = attempts[-1].value
    if rng.random() < HINDSIGHT and 1 <= value <= task.target_max and not countdown.held_out(numbers, value):
        target = value
    lines = []
    for a in attempts:
        lines.append(f"{','.join(a.steps)}?{target} {'yes' if a.value == target else 'no'}")
        if a.value == target:
            break
    prompt = countdown.prompt(task.template, numbers, target)
    lines += ["</think>"] if prompt.endswith("<think>") else []
    return prompt, "\n".join([*lines, f"<answer>{a.expression}</answer>"])


def max_tokens(task: "config.Task", tries: float) -> int:
    """Upper bound on a response's tokens under the countdown tokenizer: one a character, words and tags one each."""
    steps, most = task.numbers_max - 1, max(LARGEST, task.value_max)
    # A line's last step has no comma, but a verdict.
    line = steps * len(f"{most}*{most}={most},") + len(f"?{task.target_max}\n")
    answer = 2 + task.numbers_max * len(str(task.value_max)) + steps + 2 * max(steps - 1, 0)
    return (MOST if tries > 1 else 1) * line + answer + 3  # </think>, its newline and the end of the sequence
