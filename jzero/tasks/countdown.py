"""Countdown: reach the target with + - * / from the given numbers, each used exactly once. A problem's split is a hash
of what it is, so train and held-out problems never meet. Imports no jax: grader processes load this module."""

import ast
import functools
import hashlib
import itertools
import json
import operator
import random
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from jzero.errors import UserError
from jzero.tasks import problem_sets
from jzero.types import Grade, Problem

TEMPLATES = problem_sets.TEXTS["countdown"]
HELD_OUT = 4  # one problem in so many is held out
LARGEST = 9999  # intermediate value a procedural problem may need
DRAWS = 20000  # random draws without a fitting problem before giving up
REPEATS = 1000  # draws without a new problem after which there is no other
LONGEST = 200  # characters of an equation
DEPTH = 32  # nested parentheses of an equation
WARM_LARGEST = 99  # intermediate value of a warm start's try: two digits keep lines short and arithmetic learnable
HINDSIGHT = (
    0.25  # share of its examples whose target is their last try's value: how " yes" is learnt
)
MOST = 6  # tries of an example


class Row(NamedTuple):
    """One problem; `prompt` is "" but of a published set that has prompts of its own."""

    numbers: tuple[int, ...]
    target: int
    prompt: str = ""

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        """What it is: problems that share it are the same."""
        return tuple(sorted(self.numbers)), self.target


class Attempt(NamedTuple):
    """Numbers combined pairwise until one is left."""

    steps: list[str]  # ["7-3=4", "12+4=16"]
    expression: str  # "12+(7-3)"
    value: int


def held_out(numbers: Sequence[int], target: int) -> bool:
    """The split of a problem, by what it is: True is never trained on."""
    return (
        hashlib.blake2b(f"{sorted(numbers)}={target}".encode(), digest_size=4).digest()[0]
        % HELD_OUT
        == 0
    )


def attempt(numbers: Sequence[int], rng: random.Random, largest: int) -> Attempt:
    """Random pairs combined by random operations, larger operand first, within 0..largest."""
    left = [(n, str(n)) for n in numbers]
    steps = []
    while len(left) > 1:
        pair = [left.pop(int(rng.random() * len(left))) for _ in range(2)]
        (a, a_text), (b, b_text) = sorted(pair, key=lambda node: -node[0])
        results = [("-", a - b)] + [
            (op, v) for op, v in (("+", a + b), ("*", a * b)) if v <= largest
        ]
        if b and a % b == 0:
            results.append(("/", a // b))
        op, value = results[int(rng.random() * len(results))]
        steps.append(f"{a}{op}{b}={value}")
        left.append((value, f"({a_text}{op}{b_text})"))
    value, text = left[0]
    return Attempt(steps, text[1:-1] if steps else text, value)


def draw(task: problem_sets.Settings, rng: random.Random, wanted: bool) -> Row:
    """Random numbers and a target one of their expressions reaches, from the held-out split if `wanted`."""
    for _ in range(DRAWS):
        count = task.numbers_min + int(rng.random() * (task.numbers_max - task.numbers_min + 1))
        numbers = tuple(1 + int(rng.random() * task.value_max) for _ in range(count))
        target = attempt(numbers, rng, LARGEST).value
        if 1 <= target <= task.target_max and held_out(numbers, target) == wanted:
            return Row(numbers, target)
    raise UserError(
        f"no countdown problem found in {DRAWS} draws: widen task.numbers_min..numbers_max={task.numbers_min}.."
        f"{task.numbers_max}, value_max={task.value_max} or target_max={task.target_max}"
    )


def prompt(template: str, numbers: Sequence[int], target: int) -> str:
    question = problem_sets.TEXTS["words"]["countdown"].format(numbers=list(numbers), target=target)
    return TEMPLATES[template].format(
        question=question, spaced=" ".join(map(str, numbers)), target=target
    )


def made(row: Row, template: str, id: str) -> Problem:
    text = row.prompt or prompt(template, row.numbers, row.target)
    return Problem(id, "countdown", text, {"numbers": list(row.numbers), "target": row.target})


def train_problems(task: problem_sets.Settings, seed: int, step: int, count: int) -> list[Problem]:
    """The problems of one step; a published set is shuffled anew every epoch."""
    indices = range(step * count, (step + 1) * count)
    if task.data:
        rows = problem_sets.stream([_published(task.data)[0]], (), seed)
    else:
        rows = {
            i: draw(task, random.Random(f"countdown/{seed}/train/{i}"), wanted=False)
            for i in indices
        }
    return [made(rows[i], task.template, f"countdown/train/{i}") for i in indices]


def eval_problems(task: problem_sets.Settings, count: int) -> list[Problem]:
    """`count` distinct held-out problems, the same in every run."""
    if task.data:
        rows = _published(task.data)[1]
        drawn = iter(random.Random(problem_sets.EVAL_SEED).sample(rows, min(count, len(rows))))
    else:
        rng = random.Random(f"countdown/{problem_sets.EVAL_SEED}/eval")
        drawn = iter(lambda: draw(task, rng, wanted=True), None)
    found, misses = dict[Any, Row](), 0
    while len(found) < count and misses < REPEATS and (row := next(drawn, None)):
        misses = (misses + 1) * (row.key in found)
        found.setdefault(row.key, row)
    if len(found) < count:
        raise UserError(
            f"eval.problems={count} is more than the {len(found)} distinct held-out problems of {task.data or 'task'}: "
            "lower it or, without task.data, widen task.numbers_min..numbers_max, value_max or target_max"
        )
    return [made(row, task.template, f"countdown/eval/{i}") for i, row in enumerate(found.values())]


def to_rows(dataset: Any, source: str) -> list[Row]:
    """The problems of a published set: columns nums (or numbers) and target, or input and gt_answer."""
    names = set(dataset.column_names)
    if {"input", "gt_answer"} <= names:
        golds = [
            json.loads(gold) if isinstance(gold, str) else gold for gold in dataset["gt_answer"][:]
        ]
        columns = (
            [gold["numbers"] for gold in golds],
            [gold["target"] for gold in golds],
            dataset["input"][:],
        )
    elif {"nums", "numbers"} & names and "target" in names:
        columns = dataset["nums" if "nums" in names else "numbers"][:], dataset["target"][:]
    else:
        raise UserError(
            f"task.data={source} has columns {sorted(names)}: countdown needs nums (or numbers) and target, or input "
            "and gt_answer"
        )
    rows = zip(*columns, strict=True)
    return [
        Row(tuple(map(int, numbers)), int(target), *prompt) for numbers, target, *prompt in rows
    ]


@functools.cache
def _published(source: str) -> tuple[list[Row], list[Row]]:
    """(train, held-out) rows. Held out are the distinct rows of its test split or, without one, those the hash says."""
    rows = to_rows(problem_sets.load_split(source, "train"), source)
    apart = problem_sets.load(source).get("test")
    test = [row for row in rows if held_out(*row.key)] if apart is None else to_rows(apart, source)
    distinct = {row.key: row for row in test}
    train = [row for row in rows if row.key not in distinct]
    if not train:
        raise UserError(f"task.data={source} has {len(rows)} rows and none is left to train on")
    return train, list(distinct.values())


_TOKEN = re.compile(
    r"[ \t\r\n]*(0|[1-9][0-9]*|[-+*/(){}×·⋅÷−]|\\(?:times|cdot|div|d?frac)(?![a-zA-Z]))[ \t\r\n]*"
)
_SPELLINGS = {
    "×": "*",
    "·": "*",
    "⋅": "*",
    "÷": "/",
    "−": "-",
    "\\times": "*",
    "\\cdot": "*",
    "\\div": "/",
}
_PYTHON = _SPELLINGS | {"\\frac": "frac", "\\dfrac": "frac", "{": "[", "}": "]"}
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def parse(text: str) -> tuple[list[int], Fraction | None]:
    """The numbers of an expression and its value, None where something is divided by zero. ValueError where it is not
    an expression of the game: integers, + - * / ( ) and \\frac{}{}, which Python's parser reads as frac[][]."""
    tokens: list[str] = _TOKEN.findall(text)
    depths = itertools.accumulate((token in "({") - (token in ")}") for token in tokens)
    if _TOKEN.sub("", text) or max(depths, default=0) > DEPTH:
        raise UserError(text)
    numbers = [int(token) for token in tokens if token.isdigit()]
    try:
        return numbers, _value(
            ast.parse(" ".join(_PYTHON.get(token, token) for token in tokens), mode="eval").body
        )
    except SyntaxError as error:
        raise UserError(text) from error
    except ZeroDivisionError:
        return numbers, None


def _value(node: ast.AST) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left), _value(right))
        case ast.Subscript(value=ast.Subscript(value=ast.Name(), slice=left), slice=right):
            return _value(left) / _value(right)
    raise UserError(ast.dump(node))


def extract(response: str) -> str | None:
    """The last <answer> block after the last </think>, if there is one, else of the whole response."""
    before = response.rpartition("</think>")[2].rpartition("</answer>")[0]
    _, tag, answer = before.rpartition("<answer>")
    return answer.strip() if tag else None


def grade(response: str, gold: Any, task: problem_sets.Settings) -> Grade:
    """1 for an expression, or equation, that has the target's value, task.format_score for another, else 0."""
    answer = extract(response)
    if answer is None:
        return Grade(0.0, False, "no answer")
    if len(answer) > LONGEST:
        return Grade(0.0, False, "too long")
    sides = [side.strip() for side in answer.split("=")]
    if len(sides) == 2 and str(gold["target"]) in sides:
        sides.remove(str(gold["target"]))
    try:
        numbers, found = parse("=".join(sides))
    except ValueError:
        return Grade(0.0, False, "malformed")
    if sorted(numbers) != sorted(gold["numbers"]):
        return Grade(task.format_score, False, "wrong numbers")
    if found != gold["target"]:
        return Grade(task.format_score, False, "wrong value")
    return Grade(1.0, True, "correct")


def example(task: problem_sets.Settings, seed: int, index: int, tries: float) -> tuple[str, str]:
    """The index-th (prompt, response) before RL: "3 7 12=16", then
        12-3=9,9*7=63?16 no
        7-3=4,12+4=16?16 yes
        <answer>12+(7-3)</answer>
    about `tries` random tries, the solution never consulted; it gives up with the same chance after each."""
    rng = random.Random(f"warm_start/{seed}/{index}")
    numbers, target, _ = draw(task, rng, wanted=False)
    attempts = [attempt(numbers, rng, WARM_LARGEST)]
    while len(attempts) < MOST and rng.random() > 1 / tries:
        for _ in range(10):  # draws, for one that was not tried yet
            new = attempt(numbers, rng, WARM_LARGEST)
            if new.steps not in [old.steps for old in attempts]:
                break
        attempts.append(new)
    value = attempts[-1].value
    if rng.random() < HINDSIGHT and 1 <= value <= task.target_max and not held_out(numbers, value):
        target = value
    lines = []
    for a in attempts:
        lines.append(f"{','.join(a.steps)}?{target} {'yes' if a.value == target else 'no'}")
        if a.value == target:
            break
    asked = prompt(task.template, numbers, target)
    lines += ["</think>"] if asked.endswith("<think>") else []
    return asked, "\n".join([*lines, f"<answer>{a.expression}</answer>"])


def max_tokens(task: problem_sets.Settings, tries: float) -> int:
    """Upper bound on a response's tokens under the countdown tokenizer: one a character, words and tags one each."""
    steps, most = task.numbers_max - 1, max(WARM_LARGEST, task.value_max)
    # A line's last step has no comma, but a verdict.
    line = steps * len(f"{most}*{most}={most},") + len(f"?{task.target_max}\n")
    answer = 2 + task.numbers_max * len(str(task.value_max)) + steps + 2 * max(steps - 1, 0)
    return (
        (MOST if tries > 1 else 1) * line + answer + 3
    )  # </think>, its newline and the end of the sequence
