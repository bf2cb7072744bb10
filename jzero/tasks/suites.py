"""Evaluation suites: whole published sets, from the hub or from local files. Imports no jax."""

import random
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from jzero.grade.extract import last_box, last_number
from jzero.tasks import countdown, data, math
from jzero.types import Grade, Problem

if TYPE_CHECKING:
    from jzero import config

COUNTDOWN = 512  # procedural problems
CHOICES = "ABCD"
LAYOUT = "{question}\n\nA) {}\nB) {}\nC) {}\nD) {}\n\nThe answer is the letter of one choice."
LETTER = re.compile(r"(?:\\boxed\{|<answer>|[Aa]nswer(?: is)?:?)(?:\s|\\text\{|[*($])*([A-D])\b")


class Suite(NamedTuple):
    """Where a suite is and how its answers are graded."""

    data: str  # as task.data; "" = procedural
    split: str
    task: str = "math"  # Problem.task


CHOICE = f"{__name__}:grade_choice"
SUITES = {
    "aime24": Suite("lkevinzc/math-eval", "aime"),
    "aime25": Suite("math-ai/aime25", "test"),
    "amc": Suite("lkevinzc/math-eval", "amc"),
    "math500": Suite("lkevinzc/math-eval", "math"),
    "minerva": Suite("lkevinzc/math-eval", "minerva"),
    "olympiad_bench": Suite("lkevinzc/math-eval", "olympiad_bench"),
    "gsm8k": Suite("main@openai/gsm8k", "test", "gsm8k"),
    "gpqa_diamond": Suite("gpqa_diamond@Idavidrein/gpqa", "train", CHOICE),
    "countdown": Suite("", "test", "countdown"),
}


def split(*specs: str) -> list[str]:
    """ "aime24,math500=FILE" -> one a suite."""
    return [part.strip() for spec in specs for part in spec.split(",") if part.strip()]


def parse(spec: str) -> tuple[str, Suite]:
    """ "math500" or "math500=FILE"; any other name with a file is a set of math problems."""
    name, _, path = (part.strip() for part in spec.partition("="))
    if not name or (name not in SUITES and not path):
        raise ValueError(f"no suite {name!r}: there are {', '.join(SUITES)}, or name=FILE for a set of your own")
    suite = SUITES.get(name, Suite("", "test"))
    return name, suite._replace(data=path) if path else suite


def dataset(suite: Suite) -> Any:
    return data.split(suite.data, suite.split, "test")


def problems(spec: str, task: "config.Task", limit: int, seed: int) -> tuple[str, list[Problem]]:
    """Name and problems of a suite, the first `limit` of them (0 = all). Prompts follow task.template where it is one
    of the suite's, else they are qwen_math's or countdown's r1."""
    name, suite = parse(spec)
    if suite.task == "countdown":
        made = _countdown(name, suite, task, limit or COUNTDOWN)
    elif suite.task == CHOICE:
        made = [choices(task, f"{name}/{i}", row, seed) for i, row in enumerate(dataset(suite))]
    else:
        rows = data.rows(dataset(suite), "", "", suite.data)
        made = [math.problem(task, suite.task, f"{name}/{i}", row) for i, row in enumerate(rows)]
    return name, made[:limit] if limit else made


def texts(spec: str) -> list[str]:
    """The questions of a suite, as they are published."""
    name, suite = parse(spec)
    if suite.task == "countdown":
        raise ValueError(f"suite {name} has numbers, no questions")
    rows = dataset(suite)
    return list(map(str, rows[data.column(rows, "", data.PROBLEM, "problem", suite.data)]))


def _countdown(name: str, suite: Suite, task: "config.Task", count: int) -> list[Problem]:
    template = task.template if task.template in countdown.TEMPLATES else "r1"
    if not suite.data:
        return countdown.eval_problems(type(task)(template=template), count)
    rows = countdown.to_rows(dataset(suite), suite.data)
    return [countdown.made(row, template, f"{name}/{i}") for i, row in enumerate(rows)]


def choices(task: "config.Task", id: str, row: dict[str, Any], seed: int) -> Problem:
    """A question of GPQA; the order of its choices is a function of (id, seed)."""
    answers = [row["Correct Answer"], *(row[f"Incorrect Answer {i}"] for i in (1, 2, 3))]
    order = random.Random(f"{id}/{seed}").sample(range(4), 4)
    question = LAYOUT.format(*(str(answers[i]).strip() for i in order), question=str(row["Question"]).strip())
    return replace(math.problem(task, CHOICE, id, data.Row(question, None)), gold=CHOICES[order.index(0)])


def grade_choice(response: str, gold: Any, task: "config.Task") -> Grade:
    """The last letter that is boxed, tagged or called the answer, after the thoughts."""
    found = LETTER.findall(response.rpartition("</think>")[2])
    if not found:
        return Grade(0.0, False, "no answer")
    correct = found[-1] == gold
    return Grade(float(correct), correct, "correct" if correct else "wrong choice")


def answer(response: str) -> str:
    """What a response answers, for votes: the last boxed or tagged text or, without one, the last number."""
    text = response.rpartition("</think>")[2]
    found = last_box(text) or countdown.extract(text) or (last_number(text) or "").replace(",", "")
    return re.sub(r"\s", "", found)
