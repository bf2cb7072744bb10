"""Countdown: reach a target with + - * / from given numbers, using each number exactly once.

Problems are drawn at random (`task.data=""`) or come from a published data set. A hash of the
problem decides its split, so training problems and held-out problems are disjoint for all seeds and
sources. Responses give an equation between <answer> and </answer>, which is graded exactly.
`countdown_warm_start` generates supervised examples for models from scratch.

Imports no jax: grader processes load this module.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from jzero.answers.published import VERIFIERS
from jzero.config.data_sources import Rows, Sources
from jzero.errors import UserError
from jzero.fields import (
    LARGEST_FLOAT,
    Field,
    record,
)
from jzero.json_values import as_list, as_object, member, to_integer
from jzero.problems import problem_sets, row_loader
from jzero.problems.options import read_options
from jzero.problems.prompts import (
    COUNTDOWN_QUESTION,
    COUNTDOWN_TEMPLATES,
    find_template,
    is_own_template,
)
from jzero.problems.row_loader import Selection
from jzero.tasks.countdown_equations import (
    LONGEST_EQUATION,
    NAME_OF_RESULT,
    MalformedEquation,
    parse_expression,
    unwrapped,
)
from jzero.types import Grade, JsonValue, Problem, Prompt

if TYPE_CHECKING:
    import datasets

    from jzero.config import TaskConfig

# One problem in four is held out. A smaller share would leave small problem spaces, such as the
# tiny recipe's (3 numbers up to 15), without the 512 distinct held-out problems of an evaluation.
HELD_OUT_ONE_IN = 4
LARGEST_INTERMEDIATE = 9999  # limit on intermediate values; a random problem needs none above it
MOST_NUMBERS = 100  # of a problem
MOST_DRAWS = 20000  # random draws before we give up finding the right split and range
PROMPT_VALUES = ("question", "numbers", "spaced", "target")  # placeholders in prompt templates
MOST_REPEATS = 1000  # consecutive repeated draws after which the problem space counts as exhausted


@record
class Options:
    """Settings of this task, `task.options=name=value`."""

    numbers_min: int = Field(default=3, ge=1, le=MOST_NUMBERS)
    """Fewest numbers in a problem."""
    numbers_max: int = Field(default=4, ge=1, le=MOST_NUMBERS)
    """Most numbers in a problem."""
    value_max: int = Field(default=99, ge=1)
    """Largest number. The smallest is 1."""
    target_max: int = 99
    """Largest target. The smallest is 1."""
    format_score: float = Field(default=0.1, ge=-LARGEST_FLOAT)
    """Score of a well-formed but wrong equation."""
    malformed_score: float = Field(default=0.0, ge=-LARGEST_FLOAT)
    """Score of an answer inside its tags that is not an equation. oat uses 0.1."""


def options_of(task: TaskConfig) -> Options:
    """Returns the options of countdown. A countdown suite of another task's run has the defaults.

    Raises UserError for a wrong value.
    """
    options = read_options(Options, task.options)
    if options.numbers_min > options.numbers_max:
        raise UserError(
            f"task.options=numbers_min={options.numbers_min} is above numbers_max="
            f"{options.numbers_max}: no problem has so many numbers; raise numbers_max"
        )
    return options


def check(task: TaskConfig) -> None:
    """Raises UserError for options that no problem meets."""
    options_of(task)


class Puzzle(NamedTuple):
    """Numbers, the target, and the prompt of a published data set ("" without a prompt)."""

    numbers: tuple[int, ...]
    target: int
    prompt: str = ""
    place: problem_sets.Place | None = None

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        """Identifies a puzzle: the numbers in sorted order, and the target."""
        return tuple(sorted(self.numbers)), self.target


class Attempt(NamedTuple):
    """Numbers combined two at a time until one number remains."""

    steps: list[str]  # ["7-3=4", "12+4=16"]
    expression: str  # "12+(7-3)"
    value: int  # 16


# Random puzzles.


def is_held_out(numbers: Sequence[int], target: int) -> bool:
    """Returns whether a puzzle belongs to the held-out split, which is never used in training."""
    text = f"{sorted(numbers)}={target}"
    # Not Python's hash, which differs between processes.
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return digest[0] % HELD_OUT_ONE_IN == 0


def random_attempt(numbers: Sequence[int], rng: random.Random, largest: int) -> Attempt:
    """Combines random pairs of numbers with random operations until one number remains.

    The larger operand comes first, and all values are integers in 0..largest. Excluding negative
    values loses no targets: sums and differences of the absolute values of two expressions reach
    the absolute value of every sum and difference of the expressions.
    """
    # Pairs of a value and its expression.
    remaining = [(number, str(number)) for number in numbers]
    steps = []
    while len(remaining) > 1:
        first = remaining.pop(int(rng.random() * len(remaining)))
        second = remaining.pop(int(rng.random() * len(remaining)))
        if first[0] < second[0]:
            first, second = second, first
        (left, left_text), (right, right_text) = first, second

        # The operations with a result in 0..largest. left >= right, so "-" is always among them.
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
    """Draws random numbers and a target that one of their expressions reaches.

    The puzzle is from the held-out split if `held_out`, else from the training split.

    Raises:
        UserError: no such puzzle was found.
    """
    options = options_of(task)
    counts = options.numbers_max - options.numbers_min + 1
    for _ in range(MOST_DRAWS):
        count = options.numbers_min + int(rng.random() * counts)
        numbers = tuple(1 + int(rng.random() * options.value_max) for _ in range(count))
        # The target is the value of a random expression, so every puzzle has a solution.
        target = random_attempt(numbers, rng, LARGEST_INTERMEDIATE).value
        if 1 <= target <= options.target_max and is_held_out(numbers, target) == held_out:
            return Puzzle(numbers, target)
    raise UserError(
        f"no countdown problem found in {MOST_DRAWS} draws: widen "
        f"numbers_min..numbers_max={options.numbers_min}..{options.numbers_max}, "
        f"value_max={options.value_max} or target_max={options.target_max} of task.options"
    )


# Problems.


def render_prompt(template: str, numbers: Sequence[int], target: int) -> Prompt:
    """Renders the prompt of a puzzle with the named template."""
    values = {
        "question": COUNTDOWN_QUESTION.format(numbers=list(numbers), target=target),
        "numbers": list(numbers),
        "spaced": " ".join(str(number) for number in numbers),
        "target": target,
    }
    return find_template(template, COUNTDOWN_TEMPLATES).render(values)


def to_problem(puzzle: Puzzle, template: str, id: str) -> Problem:
    """Returns the problem of a puzzle; its gold is {"numbers", "target"}."""
    # A user-defined template takes precedence over the prompt of a published data set, which takes
    # precedence over jzero's templates.
    prompt = puzzle.prompt
    if not prompt or is_own_template(template):
        prompt = render_prompt(template, puzzle.numbers, puzzle.target)
    gold = {"numbers": list(puzzle.numbers), "target": puzzle.target}
    return problem_sets.placed(Problem(id, "countdown", prompt, gold), puzzle.place)


def train_problems(task: TaskConfig, seed: int, step: int, count: int) -> list[Problem]:
    """Returns the problems of one step; a published data set is reshuffled in every epoch."""

    def draw(index: int) -> Puzzle:
        # A separate generator per problem: a step does not depend on the draws of earlier steps.
        rng = random.Random(f"countdown/{seed}/train/{index}")
        return draw_puzzle(task, rng, held_out=False)

    if task.data:
        train, _ = _published_splits(row_loader.selection_of(task))
        indices = problem_sets.step_indices(step, count, len(train), task)
        puzzles = problem_sets.stream([train], (), seed)
    else:
        indices = range(step * count, (step + 1) * count)
        puzzles = problem_sets.drawn(draw)
    return [to_problem(puzzles[i], task.template, f"countdown/train/{i}") for i in indices]


def num_train_problems(task: TaskConfig) -> int | None:
    """Returns the number of training problems, None if the problems are drawn endlessly."""
    if not task.data:
        return None
    train, _ = _published_splits(row_loader.selection_of(task))
    return len(train)


def eval_problems(task: TaskConfig, count: int) -> list[Problem]:
    """Returns `count` distinct held-out problems, the same in every run.

    Raises:
        UserError: there are fewer than `count`.
    """
    if task.data:
        _, held_out = _published_splits(row_loader.selection_of(task))
        rng = random.Random(problem_sets.EVAL_SEED)
        puzzles = rng.sample(held_out, min(count, len(held_out)))
    else:
        puzzles = _draw_distinct(task, count)
    if len(puzzles) < count:
        raise UserError(
            f"eval.problems={count} is more than the {len(puzzles)} distinct held-out problems of "
            f"{task.data or 'task'}: lower it or, without task.data, widen "
            "numbers_min..numbers_max, value_max or target_max of task.options"
        )
    return [
        to_problem(puzzle, task.template, f"countdown/eval/{i}") for i, puzzle in enumerate(puzzles)
    ]


def _draw_distinct(task: TaskConfig, count: int) -> list[Puzzle]:
    """Draws held-out puzzles until `count` are distinct, or MOST_REPEATS draws in a row repeat."""
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
def _published_splits(selection: Selection) -> tuple[list[Puzzle], list[Puzzle]]:
    """Returns the training puzzles and the held-out puzzles of a published data set.

    The held-out puzzles are the distinct puzzles of `task.eval_data`, or of the split "test". If
    the data set has no such split, the hash of each puzzle decides (`is_held_out`). Training
    puzzles exclude all held-out puzzles.

    Raises:
        UserError: there are several sets, or no puzzle is left to train on.
    """
    if len(selection.train) > 1:
        raise UserError(
            f"task.data={Sources(selection.train)}: countdown trains on one set, name one"
        )
    rows = next(iter(selection.train))
    source = rows.path
    # Read all rows, not only the first ones: the hash may hold out any of them.
    every_row = replace(rows, limit=0)
    puzzles = _placed_puzzles(every_row, "train", "task.data")
    held_out: list[Puzzle] = []
    held_out_sources = row_loader.held_out_sources(selection)
    for other in held_out_sources:
        held_out += _placed_puzzles(other, "test", "task.eval_data")
    if not held_out_sources:
        held_out = [puzzle for puzzle in puzzles if is_held_out(*puzzle.key)]
    distinct = {puzzle.key: puzzle for puzzle in held_out}
    first = puzzles[: rows.limit] if rows.limit else puzzles
    train = [puzzle for puzzle in first if puzzle.key not in distinct]
    if not train:
        raise UserError(
            f"task.data={source}: all of its {len(first)} rows are held out and none is left to "
            "train on. Give a set with more rows"
        )
    return train, list(distinct.values())


def _placed_puzzles(rows: Rows, usual_split: str, setting: str) -> list[Puzzle]:
    """Returns the puzzles of a source, with their places in it."""
    puzzles = read_puzzles(row_loader.open_rows(rows, usual_split, setting), rows.path)
    numbers = row_loader.row_numbers(rows, usual_split, setting)
    return [
        puzzle._replace(place=problem_sets.Place(rows.path, number))
        for puzzle, number in zip(puzzles, numbers, strict=True)
    ]


def read_puzzles(dataset: datasets.Dataset, source: str) -> list[Puzzle]:
    """Returns the puzzles of a published data set.

    The data set has the columns `nums` (or `numbers`) and `target`, or `input`, a prompt, and
    `gt_answer`, {"numbers", "target"} as an object or as JSON.

    Raises:
        UserError: the data set has other columns.
    """
    columns = set(dataset.column_names)
    # Data sets with a prompt for each puzzle.
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


def _parse_gold(gold: JsonValue) -> dict[str, JsonValue]:
    return as_object(json.loads(gold) if isinstance(gold, str) else gold, "gt_answer")


def _read_puzzle(numbers: JsonValue, target: JsonValue, prompt: str = "") -> Puzzle:
    read_numbers = [to_integer(number, "a number") for number in as_list(numbers, "the numbers")]
    return Puzzle(tuple(read_numbers), to_integer(target, "the target"), prompt)


# Grading.


def extract_answer(response: str) -> str | None:
    """Returns the text of the last <answer> block after the reasoning, None without a block.

    The reasoning ends with the last </think>; a response without this tag has no reasoning.
    """
    text = response.rpartition("</think>")[2]
    before_end = text.rpartition("</answer>")[0]
    _, tag, answer = before_end.rpartition("<answer>")
    return answer.strip() if tag else None


def grade(response: str, gold: JsonValue, task: TaskConfig) -> Grade:
    """Grades the equation of a response.

    The score is 1 for an expression that uses each number once and has exactly the value of the
    target, `format_score` of the options for any other expression, `malformed_score` for any other
    answer in its tags, and 0 without an answer. The answer may also have the form
    "expression = target" or "target = expression", follow a name as in "x = expression", stand in a
    formula, a box, code or bold type, and end with a full stop. `task.verifier=oat_countdown`
    scores like oat's run instead.
    """
    if task.verifier == "oat_countdown":
        return VERIFIERS[task.verifier].grade(response, gold)
    options = options_of(task)
    answer = extract_answer(response)
    if answer is None:
        return Grade(0.0, False, "no answer")
    # The limit bounds the work of the parser.
    if len(answer) > LONGEST_EQUATION:
        return Grade(options.malformed_score, False, "too long")

    # Reduce "x = expression", "expression = target" and "target = expression" to the expression.
    puzzle = as_object(gold, "gold")
    target = str(puzzle["target"])
    sides = [unwrapped(side) for side in unwrapped(answer).split("=")]
    if len(sides) > 1 and NAME_OF_RESULT.fullmatch(sides[0]):
        sides = sides[1:]
    if len(sides) == 2 and target in sides:
        sides.remove(target)
    try:
        # A remaining equals sign makes the expression malformed.
        numbers, value = parse_expression("=".join(sides))
    except MalformedEquation:
        return Grade(options.malformed_score, False, "malformed")

    if sorted(numbers) != sorted(member(puzzle, ("numbers",), list)):
        return Grade(options.format_score, False, "wrong numbers")
    if value != puzzle["target"]:
        return Grade(options.format_score, False, "wrong value")
    return Grade(1.0, True, "correct")
