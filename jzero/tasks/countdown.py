"""Countdown: reach a target with + - * / from given numbers, each of which is used exactly once.

Problems are drawn at random (`task.data=""`) or come from a published set. The split of a problem
is a hash of the problem itself, so the problems that are trained on and the held-out ones never
meet, whatever the seed and the source. Responses give an equation between <answer> and </answer>,
which is graded exactly. `countdown_warm_start` has supervised examples for models from scratch.

Imports no jax: grader processes load this module.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from jzero.errors import UserError
from jzero.tasks import problem_sets
from jzero.tasks.countdown_equations import (
    LONGEST_EQUATION,
    MalformedEquation,
    parse_expression,
)
from jzero.tasks.prompts import (
    COUNTDOWN_QUESTION,
    COUNTDOWN_TEMPLATES,
    find_template,
    is_own_template,
)
from jzero.types import Grade, JsonValue, Problem, Prompt

if TYPE_CHECKING:
    import datasets

    from jzero.config import TaskConfig

# One problem in four is held out. With fewer, small spaces of problems such as the tiny recipe's
# (3 numbers up to 15) do not have the 512 distinct held-out problems that an evaluation wants.
HELD_OUT_ONE_IN = 4
LARGEST_INTERMEDIATE = 9999  # no solution of a random problem needs a larger value on the way
MOST_DRAWS = 20000  # random draws that may miss the wanted split and range before we give up
PROMPT_VALUES = ("question", "numbers", "spaced", "target")  # what prompts have values for
MOST_REPEATS = 1000  # draws without a problem that is new, after which there is none left


class Puzzle(NamedTuple):
    """Numbers, the target, and the prompt that a published set may have of its own ("" if none)."""

    numbers: tuple[int, ...]
    target: int
    prompt: str = ""

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        """What makes two puzzles the same: the numbers in any order, and the target."""
        return tuple(sorted(self.numbers)), self.target


class Attempt(NamedTuple):
    """Numbers that were combined two by two until one was left."""

    steps: list[str]  # ["7-3=4", "12+4=16"]
    expression: str  # "12+(7-3)"
    value: int  # 16


# Random puzzles.


def is_held_out(numbers: Sequence[int], target: int) -> bool:
    """Returns whether a puzzle is in the held-out split, which is never trained on."""
    text = f"{sorted(numbers)}={target}"
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return digest[0] % HELD_OUT_ONE_IN == 0


def random_attempt(numbers: Sequence[int], rng: random.Random, largest: int) -> Attempt:
    """Combines random pairs of numbers by random operations until one number is left.

    The larger operand comes first and all values stay within the integers 0..largest. Nothing is
    lost by refusing negative values: sums and differences of the absolute values of two expressions
    reach the absolute value of every sum and difference of the expressions.
    """
    # Pairs of a value and the expression that it is the value of.
    remaining = [(number, str(number)) for number in numbers]
    steps = []
    while len(remaining) > 1:
        first = remaining.pop(int(rng.random() * len(remaining)))
        second = remaining.pop(int(rng.random() * len(remaining)))
        if first[0] < second[0]:
            first, second = second, first
        (left, left_text), (right, right_text) = first, second

        results = [("-", left - right)]
        if left + right <= largest:
            results.append(("+", left + right))
        if left * right <= largest:
            results.append(("*", left * right))
        if right and left % right == 0:
            results.append(("/", left // right))

        operation, value = results[int(rng.random() * len(results))]
        steps.append(f"{left}{operation}{right}={value}")
        remaining.append((value, f"({left_text}{operation}{right_text})"))
    value, text = remaining[0]
    expression = text[1:-1] if steps else text  # without the outermost parentheses
    return Attempt(steps, expression, value)


def draw_puzzle(task: TaskConfig, rng: random.Random, held_out: bool) -> Puzzle:
    """Draws random numbers and a target that an expression of them reaches.

    `held_out` says which of the two splits the puzzle has to be in.

    Raises:
        UserError: no such puzzle was found.
    """
    counts = task.numbers_max - task.numbers_min + 1
    for _ in range(MOST_DRAWS):
        count = task.numbers_min + int(rng.random() * counts)
        numbers = tuple(1 + int(rng.random() * task.value_max) for _ in range(count))
        target = random_attempt(numbers, rng, LARGEST_INTERMEDIATE).value
        if 1 <= target <= task.target_max and is_held_out(numbers, target) == held_out:
            return Puzzle(numbers, target)
    raise UserError(
        f"no countdown problem found in {MOST_DRAWS} draws: widen "
        f"task.numbers_min..numbers_max={task.numbers_min}..{task.numbers_max}, "
        f"value_max={task.value_max} or target_max={task.target_max}"
    )


# Problems.


def render_prompt(template: str, numbers: Sequence[int], target: int) -> Prompt:
    """Returns the prompt of a puzzle by the template of that name."""
    values = {
        "question": COUNTDOWN_QUESTION.format(numbers=list(numbers), target=target),
        "numbers": list(numbers),
        "spaced": " ".join(str(number) for number in numbers),
        "target": target,
    }
    return find_template(template, COUNTDOWN_TEMPLATES).render(values)


def to_problem(puzzle: Puzzle, template: str, id: str) -> Problem:
    """Returns the problem of a puzzle; its gold is {"numbers", "target"}.

    The prompt that a published set has of its own comes before a template of jzero, and a template
    of the user's before that.
    """
    prompt = puzzle.prompt
    if not prompt or is_own_template(template):
        prompt = render_prompt(template, puzzle.numbers, puzzle.target)
    gold = {"numbers": list(puzzle.numbers), "target": puzzle.target}
    return Problem(id, "countdown", prompt, gold)


def train_problems(task: TaskConfig, seed: int, step: int, count: int) -> list[Problem]:
    """Returns the problems of one step; a published set is shuffled anew in every epoch."""
    indices = range(step * count, (step + 1) * count)
    if task.data:
        train, _ = _published_splits(task.data, task.train_split, task.eval_split, task.max_train)
        stream = problem_sets.stream([train], (), seed)
        puzzles = [stream[i] for i in indices]
    else:
        # Every problem has a generator of its own: a step needs none of the earlier steps.
        generators = [random.Random(f"countdown/{seed}/train/{i}") for i in indices]
        puzzles = [draw_puzzle(task, rng, held_out=False) for rng in generators]
    return [
        to_problem(puzzle, task.template, f"countdown/train/{i}")
        for i, puzzle in zip(indices, puzzles, strict=True)
    ]


def num_train_problems(task: TaskConfig) -> int | None:
    """Returns the number of problems to train on, None where they are drawn without end."""
    if not task.data:
        return None
    train, _ = _published_splits(task.data, task.train_split, task.eval_split, task.max_train)
    return len(train)


def eval_problems(task: TaskConfig, count: int) -> list[Problem]:
    """Returns `count` distinct held-out problems, the same in every run.

    Raises:
        UserError: there are not so many.
    """
    if task.data:
        _, held_out = _published_splits(
            task.data, task.train_split, task.eval_split, task.max_train
        )
        rng = random.Random(problem_sets.EVAL_SEED)
        puzzles = rng.sample(held_out, min(count, len(held_out)))
    else:
        puzzles = _draw_distinct(task, count)
    if len(puzzles) < count:
        raise UserError(
            f"eval.problems={count} is more than the {len(puzzles)} distinct held-out problems of "
            f"{task.data or 'task'}: lower it or, without task.data, widen "
            "task.numbers_min..numbers_max, value_max or target_max"
        )
    return [
        to_problem(puzzle, task.template, f"countdown/eval/{i}") for i, puzzle in enumerate(puzzles)
    ]


def _draw_distinct(task: TaskConfig, count: int) -> list[Puzzle]:
    """Draws held-out puzzles until `count` are distinct, or until only known puzzles come."""
    rng = random.Random(f"countdown/{problem_sets.EVAL_SEED}/eval")
    found: dict[tuple[tuple[int, ...], int], Puzzle] = {}
    repeats = 0
    while len(found) < count and repeats < MOST_REPEATS:
        puzzle = draw_puzzle(task, rng, held_out=True)
        if puzzle.key in found:
            repeats += 1
        else:
            repeats = 0
            found[puzzle.key] = puzzle
    return list(found.values())


# Published sets.


@functools.cache
def _published_splits(
    source: str, train_split: str, eval_split: str, max_train: int
) -> tuple[list[Puzzle], list[Puzzle]]:
    """Returns the puzzles of a published set that are trained on, and those that are held out.

    Held out are the distinct puzzles of the set's split `eval_split`, or of test where that is "".
    Of a set without one, they are the puzzles whose hash says so. Train puzzles that are held out
    as well are left out.
    """
    train_set = problem_sets.choose_split(source, train_split, "train", "task.train_split")
    puzzles = read_puzzles(train_set, source)
    if problem_sets.held_out_sources([source], eval_split, train_split, "task.eval_split"):
        test = problem_sets.choose_split(source, eval_split, "test", "task.eval_split")
        held_out = read_puzzles(test, source)
    else:
        held_out = [puzzle for puzzle in puzzles if is_held_out(*puzzle.key)]
    distinct = {puzzle.key: puzzle for puzzle in held_out}
    first = puzzles[:max_train] if max_train else puzzles
    train = [puzzle for puzzle in first if puzzle.key not in distinct]
    if not train:
        raise UserError(
            f"task.data={source}: all of its {len(first)} rows are held out and none is left to "
            "train on. Give a set with more rows"
        )
    return train, list(distinct.values())


def read_puzzles(dataset: datasets.Dataset, source: str) -> list[Puzzle]:
    """Returns the puzzles of a published set.

    The set has the columns `nums` (or `numbers`) and `target`, or `input`, a prompt, and
    `gt_answer`, {"numbers", "target"} as an object or as JSON.

    Raises:
        UserError: the set has other columns.
    """
    columns = set(dataset.column_names)
    if {"input", "gt_answer"} <= columns:
        golds = [_parse_gold(gold) for gold in dataset["gt_answer"][:]]
        return [
            _read_puzzle(gold["numbers"], gold["target"], prompt)
            for gold, prompt in zip(golds, dataset["input"][:], strict=True)
        ]
    numbers_column = "nums" if "nums" in columns else "numbers"
    if {numbers_column, "target"} <= columns:
        rows = zip(dataset[numbers_column][:], dataset["target"][:], strict=True)
        return [_read_puzzle(numbers, target) for numbers, target in rows]
    raise UserError(
        f"task.data={source} has columns {sorted(columns)}: countdown needs nums (or numbers) and "
        "target, or input and gt_answer"
    )


def _parse_gold(gold: JsonValue) -> JsonValue:
    return json.loads(gold) if isinstance(gold, str) else gold


def _read_puzzle(numbers: Sequence[int], target: int, prompt: str = "") -> Puzzle:
    return Puzzle(tuple(int(number) for number in numbers), int(target), prompt)


# Grading.


def extract_answer(response: str) -> str | None:
    """Returns the text of the last <answer> block after the thoughts, None without a block.

    The thoughts end with the last </think>; a response without this tag has no thoughts.
    """
    text = response.rpartition("</think>")[2]
    before_end = text.rpartition("</answer>")[0]
    _, tag, answer = before_end.rpartition("<answer>")
    return answer.strip() if tag else None


def grade(response: str, gold: JsonValue, task: TaskConfig) -> Grade:
    """Grades the equation of a response.

    The score is 1 for an expression that uses each number once and has the target's value exactly,
    `task.format_score` for any other expression, `task.malformed_score` for any other answer in its
    tags, and 0 without one. The answer may also be written as "expression = target" or
    "target = expression".
    """
    answer = extract_answer(response)
    if answer is None:
        return Grade(0.0, False, "no answer")
    if len(answer) > LONGEST_EQUATION:
        return Grade(task.malformed_score, False, "too long")

    target = str(gold["target"])
    sides = [side.strip() for side in answer.split("=")]
    if len(sides) == 2 and target in sides:
        sides.remove(target)
    try:
        # An equals sign that is left makes the expression malformed.
        numbers, value = parse_expression("=".join(sides))
    except MalformedEquation:
        return Grade(task.malformed_score, False, "malformed")

    if sorted(numbers) != sorted(gold["numbers"]):
        return Grade(task.format_score, False, "wrong numbers")
    if value != gold["target"]:
        return Grade(task.format_score, False, "wrong value")
    return Grade(1.0, True, "correct")
