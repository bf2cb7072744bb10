"""Evaluation suites: published sets that are answered as a whole, from the hub or from local files.

`--suite math500,gsm8k=FILE` and `eval.suites` name suites. `load_suite` returns the problems of
one. Imports no jax: grader processes load this module for `grade_choice`.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jzero.errors import UserError
from jzero.grading.extract import last_box, last_number
from jzero.tasks import countdown, math_problems, problem_sets, rewards
from jzero.tasks.prompts import BOXED, COUNTDOWN_TEMPLATES
from jzero.types import Grade, JsonValue, Problem

if TYPE_CHECKING:
    from jzero.config import TaskConfig


@dataclass(frozen=True)
class Suite:
    """Where the problems of a suite are, and what grades them."""

    data: str  # as `task.data`; "" for random countdown problems
    split: str = "test"
    kind: str = "math"  # `problem.task`: a key of TASKS, or "module:function" of a grader
    instruction: str = BOXED  # what the templates of questions tell the policy to do


MULTIPLE_CHOICE = "jzero.tasks.suites:grade_choice"

ANSWER_LINE = (
    "The question has four choices, and one of them is right. Reason step by step, then end with a "
    "line of its own: Answer: and the letter of that choice, as in Answer: B."
)

SUITES: dict[str, Suite] = {
    "aime24": Suite("lkevinzc/math-eval", split="aime"),
    "aime25": Suite("math-ai/aime25"),
    "amc": Suite("lkevinzc/math-eval", split="amc"),
    "math500": Suite("lkevinzc/math-eval", split="math"),
    "minerva": Suite("lkevinzc/math-eval", split="minerva"),
    "olympiad_bench": Suite("lkevinzc/math-eval", split="olympiad_bench"),
    "gsm8k": Suite("main@openai/gsm8k", kind="gsm8k"),
    "gpqa_diamond": Suite("gpqa_diamond@Idavidrein/gpqa", split="train", kind=MULTIPLE_CHOICE),
    # The same questions, asked as the published evaluations ask them: no box, but a last line.
    "gpqa_diamond_line": Suite(
        "gpqa_diamond@Idavidrein/gpqa",
        split="train",
        kind=MULTIPLE_CHOICE,
        instruction=ANSWER_LINE,
    ),
    "countdown": Suite("", kind="countdown"),
}

RANDOM_COUNTDOWN_PROBLEMS = 512  # of the suite countdown, where there is no limit
_CHOICE_SENTENCE = "The answer is the letter of one choice."
_CHOICES = f"{{question}}\n\nA) {{}}\nB) {{}}\nC) {{}}\nD) {{}}\n\n{_CHOICE_SENTENCE}"
# The letter of a choice in a box or tag, or after such words as "Answer: C", "ANSWER: C", "the
# option is (D)" and "the right choice is: D". After "answer" the letter may follow directly.
_LETTER = re.compile(
    r"(?:\\boxed\{|<answer>|(?i:answer)\b(?:\s+(?i:is)\b)?"
    r"|\b(?i:option|choice)\b\**\s*(?:(?i:is)\b|:))"
    r"(?:[\s:*($\"'`]|\\\(|\\text\{|\\mathrm\{|\b(?i:option|choice)\b)*([A-D])\b"
)


# Names of suites.


def split_commas(*specs: str) -> list[str]:
    """Returns the parts of comma-separated lists: "aime24,math500=FILE" has two."""
    parts = [part.strip() for spec in specs for part in spec.split(",")]
    return [part for part in parts if part]


def parse_suite(spec: str) -> tuple[str, Suite]:
    """Returns the name and the suite of "math500" or "math500=FILE".

    "any-name=FILE" is a suite of the user's own, a set of math problems.

    Raises:
        UserError: there is no suite of this name, and no file is given.
    """
    name, _, path = spec.partition("=")
    name, path = name.strip(), path.strip()
    if not name or (name not in SUITES and not path):
        raise UserError(
            f"no suite {name!r}: there are {', '.join(SUITES)}, or name=FILE for a set of your own"
        )
    suite = SUITES.get(name, Suite(path))
    return name, replace(suite, data=path or suite.data)


def check_suites(specs: Sequence[str]) -> None:
    """Raises UserError if `eval.suites` names a suite that does not exist, or one of them twice."""
    names = [parse_suite(spec)[0] for spec in split_commas(*specs)]
    for name, count in Counter(names).items():
        if count > 1:
            raise UserError(f"eval.suites names {name} {count} times: name it once")


# Problems.


def load_suite(spec: str, task: TaskConfig, limit: int, seed: int) -> tuple[str, list[Problem]]:
    """Returns the name and the problems of a suite.

    Args:
        spec: as `parse_suite` reads it.
        task: prompts have the template `task.template`, where the suite's kind of problem has a
            template of this name, and the default template of their kind otherwise.
        limit: the number of problems, the first of the suite; 0 for all.
        seed: of the order in which the answers of a multiple-choice question are listed.
    """
    name, suite = parse_suite(spec)
    # A template of questions in words, such as a user's own, does not fit countdown.
    countdown_template = task.template if task.template in COUNTDOWN_TEMPLATES else "r1"
    if not suite.data:
        settings = type(task)(template=countdown_template)
        return name, countdown.eval_problems(settings, limit or RANDOM_COUNTDOWN_PROBLEMS)

    dataset = problem_sets.load_split(suite.data, suite.split, "test")
    if suite.kind == "countdown":
        problems = [
            countdown.to_problem(puzzle, countdown_template, f"{name}/{i}")
            for i, puzzle in enumerate(countdown.read_puzzles(dataset, suite.data))
        ]
    elif suite.kind == MULTIPLE_CHOICE:
        problems = [
            choice_problem(task, f"{name}/{i}", row, seed, suite.instruction)
            for i, row in enumerate(dataset)
        ]
    else:
        prompt_column = math_problems.math_template(task.template).column
        rows = problem_sets.read_rows(
            dataset,
            "",
            "",
            suite.data,
            prompt_column,
            with_columns=rewards.need_columns(task.reward),
        )
        problems = [
            math_problems.to_problem(task, suite.kind, f"{name}/{i}", row)
            for i, row in enumerate(rows)
        ]
    return name, problems[:limit] if limit else problems


def load_questions(spec: str) -> list[str]:
    """Returns the questions of a suite as they are published.

    Raises:
        UserError: the problems of the suite are numbers, not questions.
    """
    name, suite = parse_suite(spec)
    if suite.kind == "countdown":
        raise UserError(f"suite {name} has numbers, no questions: leave it out")
    dataset = problem_sets.load_split(suite.data, suite.split, "test")
    return problem_sets.read_questions(dataset, suite.data)


# Multiple choice.


def choice_problem(
    task: TaskConfig, id: str, row: JsonValue, seed: int, instruction: str = BOXED
) -> Problem:
    """Returns the problem of a row of GPQA; its gold is the letter of the right choice.

    The order of the choices is a function of (id, seed). The question of a template file is the
    question with its choices, and no word of ours: a published prompt says the rest.
    """
    columns = ["Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3))]
    answers = [str(row[column]).strip() for column in columns]
    order = random.Random(f"{id}/{seed}").sample(range(4), 4)
    choices = [answers[i] for i in order]
    question = _CHOICES.format(*choices, question=str(row["Question"]).strip())
    if math_problems.math_template(task.template).path:
        question = question.removesuffix(f"\n\n{_CHOICE_SENTENCE}")
    asked = problem_sets.Row(question, None)
    problem = math_problems.to_problem(task, MULTIPLE_CHOICE, id, asked, instruction)
    return replace(problem, gold="ABCD"[order.index(0)])


def grade_choice(response: str, gold: JsonValue, task: TaskConfig) -> Grade:
    """Grades the last letter after the thoughts that is boxed, tagged or called the answer."""
    letters = _LETTER.findall(response.rpartition("</think>")[2])
    if not letters:
        return Grade(0.0, False, "no answer")
    if letters[-1] != gold:
        return Grade(0.0, False, "wrong choice")
    return Grade(1.0, True, "correct")


# Votes.


def vote(response: str) -> str:
    """Returns what a response votes for in maj@n: its answer without white space.

    The answer is the last boxed or tagged text after the thoughts or, without one, the last number.
    It is "" for a response without any.
    """
    text = response.rpartition("</think>")[2]
    answer = last_box(text) or countdown.extract_answer(text)
    if not answer:
        answer = (last_number(text) or "").replace(",", "")
    return re.sub(r"\s", "", answer)
