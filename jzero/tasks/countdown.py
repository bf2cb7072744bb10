"""Countdown: reach the target with + - * / from the given numbers, each used exactly once.

A problem's split is a hash of what it is (sorted numbers, target), so train and held-out problems never meet,
procedural or published. Imports no jax: grader processes load this module."""

import functools
import hashlib
import json
import random
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from jzero.tasks import data as sets
from jzero.types import Grade, Problem

if TYPE_CHECKING:
    from jzero import config

EVAL_SEED = 20250124  # not the run's seed: runs are compared on the same held-out problems
HELD_OUT = 4  # one problem in so many is held out
LARGEST = 9999  # intermediate value a procedural problem may need
DRAWS = 20000  # random draws without a fitting problem before giving up
LONGEST = 200  # characters of an equation
DEPTH = 32  # nested parentheses of an equation


class Row(NamedTuple):
    """One published problem; `prompt` is "" where the set has no prompt of its own."""

    numbers: tuple[int, ...]
    target: int
    prompt: str


class Attempt(NamedTuple):
    """Numbers combined pairwise until one is left."""

    steps: list[str]  # ["7-3=4", "12+4=16"]
    expression: str  # "12+(7-3)"
    value: int


# Prompts


def _question(numbers: Sequence[int], target: int) -> str:
    return (
        f"Write an equation that equals {target}, using each of the numbers {list(numbers)} exactly once. "
        "Only + - * / and parentheses are allowed. Put your reasoning between <think> and </think>, then the "
        "equation alone between <answer> and </answer>, for example <answer>(1 + 2) / 3</answer>."
    )


def _r1(numbers: Sequence[int], target: int) -> str:
    return (
        "This is a conversation between User and Assistant. User asks a question; Assistant first thinks it through, "
        f"then replies with the answer.\nUser: {_question(numbers, target)}\n"
        "Assistant: Let me solve this step by step.\n<think>"
    )


def _qwen_chat(numbers: Sequence[int], target: int) -> str:
    return (
        "<|im_start|>system\nYou are a helpful assistant. You think before you answer.<|im_end|>\n"
        f"<|im_start|>user\n{_question(numbers, target)}<|im_end|>\n"
        "<|im_start|>assistant\nLet me solve this step by step.\n<think>"
    )


def _plain(numbers: Sequence[int], target: int) -> str:
    return f"{' '.join(map(str, numbers))}={target}\n"


TEMPLATES: dict[str, Callable[[Sequence[int], int], str]] = {"r1": _r1, "qwen_chat": _qwen_chat, "plain": _plain}


# Problems


def held_out(numbers: Sequence[int], target: int) -> bool:
    """The split of a problem, by what it is: True is never trained on."""
    key = f"{sorted(numbers)}={target}".encode()
    return hashlib.blake2b(key, digest_size=4).digest()[0] % HELD_OUT == 0


def attempt(numbers: Sequence[int], rng: random.Random, largest: int) -> Attempt:
    """Combine random pairs by random operations, larger operand first, within the integers 0..largest.

    Nothing is lost by refusing negative values: a tree's absolute value is reached by sums and differences of the
    absolute values below it."""
    left = [(n, str(n)) for n in numbers]
    steps = []
    while len(left) > 1:
        pair = [left.pop(int(rng.random() * len(left))) for _ in range(2)]
        (a, a_text), (b, b_text) = sorted(pair, key=lambda node: -node[0])
        results = [("-", a - b)] + [(op, v) for op, v in (("+", a + b), ("*", a * b)) if v <= largest]
        if b and a % b == 0:
            results.append(("/", a // b))
        op, value = results[int(rng.random() * len(results))]
        steps.append(f"{a}{op}{b}={value}")
        left.append((value, f"({a_text}{op}{b_text})"))
    value, text = left[0]
    return Attempt(steps, text[1:-1] if steps else text, value)


def draw(task: "config.Task", rng: random.Random, wanted: bool) -> tuple[tuple[int, ...], int]:
    """Random numbers and a target one of their expressions reaches, from the held-out split if `wanted`."""
    for _ in range(DRAWS):
        count = task.numbers_min + int(rng.random() * (task.numbers_max - task.numbers_min + 1))
        numbers = tuple(1 + int(rng.random() * task.value_max) for _ in range(count))
        target = attempt(numbers, rng, LARGEST).value
        if 1 <= target <= task.target_max and held_out(numbers, target) == wanted:
            return numbers, target
    raise ValueError(f"no countdown problem found in {DRAWS} draws: widen {_space(task)}")


def _space(task: "config.Task") -> str:
    return (
        f"task.numbers_min..numbers_max={task.numbers_min}..{task.numbers_max}, value_max={task.value_max} "
        f"or target_max={task.target_max}"
    )


def _problem(task: "config.Task", split: str, index: int, row: Row) -> Problem:
    prompt = row.prompt or TEMPLATES[task.template](row.numbers, row.target)
    return Problem(
        f"countdown/{split}/{index}", "countdown", prompt, {"numbers": list(row.numbers), "target": row.target}
    )


def problem(task: "config.Task", seed: int, split: str, index: int) -> Problem:
    """The index-th procedural problem of a split, "train" or "eval"."""
    numbers, target = draw(task, random.Random(f"countdown/{seed}/{split}/{index}"), wanted=split == "eval")
    return _problem(task, split, index, Row(numbers, target, ""))


def train_problems(task: "config.Task", seed: int, step: int, count: int) -> list[Problem]:
    """The problems of one step; a published set is shuffled anew every epoch."""
    indices = range(step * count, (step + 1) * count)
    if not task.data:
        return [problem(task, seed, "train", i) for i in indices]
    rows = _shuffled(task.data, seed)
    return [_problem(task, "train", i, rows[i]) for i in indices]


def eval_problems(task: "config.Task", count: int) -> list[Problem]:
    """`count` distinct held-out problems, the same in every run."""
    if task.data:
        rows = _published(task.data)[1]
        if len(rows) < count:
            raise ValueError(f"eval.problems={count} is more than the {len(rows)} held-out problems of {task.data}")
        chosen = random.Random(EVAL_SEED).sample(rows, count)
        return [_problem(task, "eval", i, row) for i, row in enumerate(chosen)]
    rng = random.Random(f"countdown/{EVAL_SEED}/eval")
    problems: dict[tuple[tuple[int, ...], int], Row] = {}
    repeats = 0
    while len(problems) < count:
        numbers, target = draw(task, rng, wanted=True)
        key = (tuple(sorted(numbers)), target)
        repeats = repeats + 1 if key in problems else 0
        if repeats > 1000:
            raise ValueError(
                f"eval.problems={count} is more than the {len(problems)} distinct held-out problems found: "
                f"lower it or widen {_space(task)}"
            )
        problems.setdefault(key, Row(numbers, target, ""))
    return [_problem(task, "eval", i, row) for i, row in enumerate(problems.values())]


# Published sets


def to_rows(dataset: Any, data: str) -> list[Row]:
    """The problems of a published set."""
    columns = set(dataset.column_names)
    numbers = "nums" if "nums" in columns else "numbers"
    if {"input", "gt_answer"} <= columns:
        table = dataset.select_columns(["input", "gt_answer"])[:]
        golds = [json.loads(gold) if isinstance(gold, str) else gold for gold in table["gt_answer"]]
        return [
            Row(tuple(map(int, g["numbers"])), int(g["target"]), prompt)
            for g, prompt in zip(golds, table["input"], strict=True)
        ]
    if {numbers, "target"} <= columns:
        table = dataset.select_columns([numbers, "target"])[:]
        return [Row(tuple(map(int, n)), int(t), "") for n, t in zip(table[numbers], table["target"], strict=True)]
    raise ValueError(
        f"task.data={data} has columns {sorted(columns)}: countdown needs nums (or numbers) and target, "
        "or input and gt_answer"
    )


@functools.cache
def _published(data: str) -> tuple[list[Row], list[Row]]:
    """(train, held-out) rows. Held out are the distinct rows of its test split or, without one, those the hash says."""
    splits = sets.load(data)
    if "train" not in splits:
        raise ValueError(f"task.data={data} has splits {list(splits)}: countdown needs train")
    rows = to_rows(splits["train"], data)
    if "test" in splits:
        test = to_rows(splits["test"], data)
    else:
        test = [row for row in rows if held_out(row.numbers, row.target)]
    distinct = {(tuple(sorted(row.numbers)), row.target): row for row in test}
    train = [row for row in rows if (tuple(sorted(row.numbers)), row.target) not in distinct]
    if not train:
        raise ValueError(f"task.data={data} has {len(rows)} rows and none is left to train on")
    return train, list(distinct.values())


@functools.cache
def _shuffled(data: str, seed: int) -> Any:
    return sets.stream([_published(data)[0]], (), seed)


# Grading

_SPELLINGS = str.maketrans({"×": "*", "·": "*", "⋅": "*", "÷": "/", "−": "-"})
_LATEX = {r"\times": "*", r"\cdot": "*", r"\div": "/", r"\dfrac": r"\frac"}
_TOKEN = re.compile(r"[ \t\r\n]*(0|[1-9][0-9]*|[-+*/(){}]|\\(?:times|cdot|div|d?frac)(?![a-zA-Z]))[ \t\r\n]*")


class _Malformed(ValueError):
    """The answer is not an expression of the game."""


class _Parser:
    """Recursive descent over one expression: sum := product (+|- product)*, product := atom (*|/ atom)*,
    atom := - atom | number | ( sum ) | \\frac{sum}{sum}. Values are Fractions, or None after a division by zero."""

    def __init__(self, text: str):
        self.tokens, at = [], 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if not match:
                raise _Malformed
            self.tokens.append(_LATEX.get(match[1], match[1]))
            at = match.end()
        self.tokens.reverse()  # the next token is the last: peek is [-1], advance is pop
        self.numbers: list[int] = []
        self.value = self._sum(0)
        if self.tokens:
            raise _Malformed

    def _accept(self, *tokens: str) -> str:
        return self.tokens.pop() if self.tokens and self.tokens[-1] in tokens else ""

    def _expect(self, token: str) -> None:
        if not self._accept(token):
            raise _Malformed

    def _sum(self, depth: int) -> Fraction | None:
        value = self._product(depth)
        while op := self._accept("+", "-"):
            value = _apply(op, value, self._product(depth))
        return value

    def _product(self, depth: int) -> Fraction | None:
        value = self._atom(depth)
        while op := self._accept("*", "/"):
            value = _apply(op, value, self._atom(depth))
        return value

    def _atom(self, depth: int) -> Fraction | None:
        if depth > DEPTH or not self.tokens:
            raise _Malformed
        token = self.tokens.pop()
        if token.isdigit():
            self.numbers.append(int(token))
            return Fraction(self.numbers[-1])
        if token == "-":
            return _apply("-", Fraction(0), self._atom(depth + 1))
        if token == "(":
            value = self._sum(depth + 1)
            self._expect(")")
            return value
        if token == r"\frac":
            return _apply("/", self._braced(depth + 1), self._braced(depth + 1))
        raise _Malformed

    def _braced(self, depth: int) -> Fraction | None:
        self._expect("{")
        value = self._sum(depth)
        self._expect("}")
        return value


def _apply(op: str, a: Fraction | None, b: Fraction | None) -> Fraction | None:
    if a is None or b is None or (op == "/" and b == 0):
        return None
    return a + b if op == "+" else a - b if op == "-" else a * b if op == "*" else a / b


def extract(response: str) -> str | None:
    """The last <answer> block after the last </think>, if there is one, else of the whole response."""
    text = response.rpartition("</think>")[2]
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else text[start + len("<answer>") : end].strip()


def grade(response: str, gold: Any, task: "config.Task") -> Grade:
    """1 for an expression that equals the target exactly, task.format_score for any other expression, else 0.

    "expression = target" and "target = expression" count as the expression."""
    answer = extract(response)
    if answer is None:
        return Grade(0.0, False, "no answer")
    if len(answer) > LONGEST:
        return Grade(0.0, False, "too long")
    left, equals, right = (side.strip() for side in answer.translate(_SPELLINGS).partition("="))
    target = str(gold["target"])
    if equals and target not in (left, right):
        return Grade(0.0, False, "malformed")
    try:
        parsed = _Parser(right if equals and right != target else left)
    except _Malformed:
        return Grade(0.0, False, "malformed")
    if sorted(parsed.numbers) != sorted(gold["numbers"]):
        return Grade(task.format_score, False, "wrong numbers")
    if parsed.value != gold["target"]:
        return Grade(task.format_score, False, "wrong value")
    return Grade(1.0, True, "correct")
