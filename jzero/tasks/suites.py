"""Evaluation suites: whole published sets, from the hub or from local files. Imports no jax."""

import random
import re
from dataclasses import replace
from typing import Any

from jzero.errors import UserError
from jzero.grading.extract import last_box, last_number
from jzero.tasks import countdown, math_problems, problem_sets
from jzero.types import Grade, Problem

COUNTDOWN = 512  # procedural problems
LAYOUT = "{question}\n\nA) {}\nB) {}\nC) {}\nD) {}\n\nThe answer is the letter of one choice."
LETTER = re.compile(r"(?:\\boxed\{|<answer>|[Aa]nswer(?: is)?:?)(?:\s|\\text\{|[*($])*([A-D])\b")
SUITES: dict[str, list[str]] = problem_sets.PUBLISHED["suites"]
CHOICE = SUITES["gpqa_diamond"][2]


def split_commas(*specs: str) -> list[str]:
    """ "aime24,math500=FILE" -> one a suite."""
    return [part.strip() for spec in specs for part in spec.split(",") if part.strip()]


def parse(spec: str) -> tuple[str, str, str, str]:
    """ "math500" or "math500=FILE" -> name, data, split, task; any other name with a file is a set of math problems."""
    name, _, path = (part.strip() for part in spec.partition("="))
    if not name or (name not in SUITES and not path):
        raise UserError(
            f"no suite {name!r}: there are {', '.join(SUITES)}, or name=FILE for a set of your own"
        )
    source, part, kind = SUITES.get(name, ["", "test", "math"])
    return name, path or source, part, kind


def problems(
    spec: str, task: problem_sets.Settings, limit: int, seed: int
) -> tuple[str, list[Problem]]:
    """Name and problems of a suite, the first `limit` (0: all); prompts by task.template where it is the suite's."""
    name, source, part, kind = parse(spec)
    template = task.template if task.template in countdown.TEMPLATES else "r1"
    if not source:
        return name, countdown.eval_problems(type(task)(template=template), limit or COUNTDOWN)
    dataset = problem_sets.load_split(source, part, "test")
    if kind == "countdown":
        rows = countdown.to_rows(dataset, source)
        made = [countdown.made(row, template, f"{name}/{i}") for i, row in enumerate(rows)]
    elif kind == CHOICE:
        made = [choices(task, f"{name}/{i}", row, seed) for i, row in enumerate(dataset)]
    else:
        rows = problem_sets.rows(dataset, "", "", source)
        made = [math_problems.problem(task, kind, f"{name}/{i}", row) for i, row in enumerate(rows)]
    return name, made[: limit or None]


def texts(spec: str) -> list[str]:
    """The questions of a suite, as they are published."""
    name, source, part, kind = parse(spec)
    if kind == "countdown":
        raise UserError(f"suite {name} has numbers, no questions")
    return problem_sets.questions(problem_sets.load_split(source, part, "test"), source)


def choices(task: problem_sets.Settings, id: str, row: dict[str, Any], seed: int) -> Problem:
    """A question of GPQA; the order of its choices is a function of (id, seed)."""
    answers = [row["Correct Answer"], *(row[f"Incorrect Answer {i}"] for i in (1, 2, 3))]
    order = random.Random(f"{id}/{seed}").sample(range(4), 4)
    question = LAYOUT.format(
        *(str(answers[i]).strip() for i in order), question=str(row["Question"]).strip()
    )
    return replace(
        math_problems.problem(task, CHOICE, id, problem_sets.Row(question, None)),
        gold="ABCD"[order.index(0)],
    )


def grade_choice(response: str, gold: Any, task: problem_sets.Settings) -> Grade:
    """The last letter that is boxed, tagged or called the answer, after the thoughts."""
    said = [None, *LETTER.findall(response.rpartition("</think>")[2])][-1]
    return Grade(
        float(said == gold),
        said == gold,
        {None: "no answer", gold: "correct"}.get(said, "wrong choice"),
    )


def answer(response: str) -> str:
    """What a response answers, for votes: the last boxed or tagged text or, without one, the last number."""
    text = response.rpartition("</think>")[2]
    found = last_box(text) or countdown.extract(text) or (last_number(text) or "").replace(",", "")
    return re.sub(r"\s", "", found)
