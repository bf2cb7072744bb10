"""Guess a number of 1..task.value_max; a wrong guess is told whether the number is higher or lower. With t turns 2^t -
1 numbers can always be found. Imports no jax: grader processes load this module."""

import random
import re
import sys

from jzero.tasks import of, problem_sets
from jzero.types import Grade, Problem

TEMPLATES = {
    "plain": "1-{largest}\n",
    "chat": "I think of a whole number from 1 to {largest}. Guess it: reply with the number alone.",
}
HINDSIGHT = 0.5  # share of warm-start examples whose last guess is right
NUMBER = re.compile(r"\s*([0-9]{1,9})\s*")


def problems(task: problem_sets.Settings, split: str, seed: int, indices: range) -> list[Problem]:
    """Every number equally often: all of them in a random order, then in another."""
    count, text = task.value_max, TEMPLATES[task.template].format(largest=task.value_max)
    prompt = [{"role": "user", "content": text}] if task.template == "chat" else text
    order = lambda n: random.Random(f"guess/{split}/{seed}/{n}").sample(range(1, count + 1), count)
    return [
        Problem(f"guess/{split}/{i}", task.name, prompt, order(i // count)[i % count])
        for i in indices
    ]


def train_problems(task: problem_sets.Settings, seed: int, step: int, count: int) -> list[Problem]:
    return problems(task, "train", seed, range(step * count, (step + 1) * count))


def eval_problems(task: problem_sets.Settings, count: int) -> list[Problem]:
    return problems(task, "eval", problem_sets.EVAL_SEED, range(count))


def read(response: str) -> int | None:
    found = NUMBER.fullmatch(response)
    return int(found[1]) if found else None


def grade(response: str, gold: int, task: problem_sets.Settings) -> Grade:
    guess = read(response)
    if guess is None:
        return Grade(0.0, False, "no answer")
    return Grade(1.0, True, "correct") if guess == gold else Grade(0.0, False, "wrong value")


def hint(guess: int | None, gold: int) -> str:
    return "no number" if guess is None else "higher" if guess < gold else "lower"


def reply(gold: int, turns: list[tuple[str, Grade]], task: problem_sets.Settings) -> str | None:
    """The hint; None to a right guess."""
    response, grade = turns[-1]
    return None if grade.correct else hint(read(response), gold)


def example(task: problem_sets.Settings, seed: int, index: int, tries: float) -> tuple[str, str]:
    """A random guess, after random wrong ones (at most `tries` in all) and their hints. It is right in HINDSIGHT of the
    examples: how hints are to be read, and nothing of where to ask. Of template plain."""
    rng = random.Random(f"guess/warm_start/{seed}/{index}")
    draw = lambda: 1 + int(rng.random() * task.value_max)
    gold, text = draw(), TEMPLATES["plain"].format(largest=task.value_max)
    for _ in range(int(rng.random() * tries)):
        if (guess := draw()) != gold:
            text += f"{guess}<|endoftext|>{hint(guess, gold)}\n"
    return text, str(gold if rng.random() < HINDSIGHT else draw())


def max_tokens(task: problem_sets.Settings, tries: float) -> int:
    return len(str(task.value_max)) + 1


TASK = of(sys.modules[__name__], example, max_tokens, reply=reply)
