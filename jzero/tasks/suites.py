"""Evaluation suites: published test sets, from the hub or from local files.

`--suite math500,gsm8k=FILE` and `eval.suites` name suites. `load_suite` returns all problems of a
suite. Imports no jax: grader processes load this module for `grade_choice`.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jzero.config.data_sources import Rows, read_source, split_sources
from jzero.errors import UserError
from jzero.json_values import as_object
from jzero.problems import problem_sets, row_loader
from jzero.problems.prompts import BOXED, COUNTDOWN_TEMPLATES
from jzero.rewards import rewards
from jzero.tasks import countdown, math_problems, mixed
from jzero.types import Grade, JsonValue, Problem

if TYPE_CHECKING:
    import datasets

    from jzero.config import TaskConfig


@dataclass(frozen=True)
class Suite:
    """The data set of a suite, its instruction and its grader."""

    rows: Rows  # without a path: random countdown problems
    kind: str = "math"  # `problem.task`: a key of TASKS, or "module:function" of a grader
    instruction: str = BOXED  # the instruction in templates of questions
    usual_split: str = "test"  # of a user-defined set whose rows name no split


MULTIPLE_CHOICE = "jzero.tasks.suites:grade_choice"

ANSWER_LINE = (
    "The question has four choices, and one of them is right. Reason step by step, then end with a "
    "line of its own: Answer: and the letter of that choice, as in Answer: B."
)

SUITES: dict[str, Suite] = {
    "aime24": Suite(Rows("lkevinzc/math-eval", split="aime")),
    "aime25": Suite(Rows("math-ai/aime25")),
    "aime25:part1": Suite(Rows("open-r1/aime_2025_1", split="train")),
    "aime25:part2": Suite(Rows("AIME2025-II@opencompass/AIME2025")),
    "amc": Suite(Rows("lkevinzc/math-eval", split="amc")),
    "math500": Suite(Rows("lkevinzc/math-eval", split="math")),
    "minerva": Suite(Rows("lkevinzc/math-eval", split="minerva")),
    "olympiad_bench": Suite(Rows("lkevinzc/math-eval", split="olympiad_bench")),
    "gsm8k": Suite(Rows("main@openai/gsm8k"), kind="gsm8k"),
    "gpqa_diamond": Suite(
        Rows("gpqa_diamond@Idavidrein/gpqa", split="train"), kind=MULTIPLE_CHOICE
    ),
    # The same questions in the format of the published evaluations: a last line instead of a box.
    "gpqa_diamond_line": Suite(
        Rows("gpqa_diamond@Idavidrein/gpqa", split="train"),
        kind=MULTIPLE_CHOICE,
        instruction=ANSWER_LINE,
    ),
    "countdown": Suite(Rows(), kind="countdown"),
}

RANDOM_COUNTDOWN_PROBLEMS = 512  # of the suite countdown, if there is no limit
_CHOICE_SENTENCE = "The answer is the letter of one choice."
_CHOICES = f"{{question}}\n\nA) {{}}\nB) {{}}\nC) {{}}\nD) {{}}\n\n{_CHOICE_SENTENCE}"
# The letter of a choice in a box or tag, or in phrases such as "Answer: C", "ANSWER: C", "the
# option is (D)" and "the right choice is: D". After "answer" the letter may follow directly.
_LETTER = re.compile(
    r"(?:\\boxed\{|<answer>|(?i:answer)\b(?:\s+(?i:is)\b)?"
    r"|\b(?i:option|choice)\b\**\s*(?:(?i:is)\b|:))"
    r"(?:[\s:*($\"'`]|\\\(|\\text\{|\\mathrm\{|\b(?i:option|choice)\b)*([A-D])\b"
)


# Names of suites.


def parse_suite(spec: str) -> tuple[str, Suite]:
    """Parses "math500" or "math500=FILE", and returns the name and the suite.

    "any-name=FILE" is a user-defined suite of math problems. The file may be rows(...), as in
    "any-name=rows('FILE',problem='input',answer='output')".

    Raises:
        UserError: the name is unknown and there is no file, or the suite has no columns to name.
    """
    name, _, source = spec.partition("=")
    name = name.strip()
    rows = read_source(f"suite {name}", source)
    if not name or (name not in SUITES and not rows.path):
        raise UserError(
            f"no suite {name!r}: there are {', '.join(SUITES)}, or name=FILE for a set of your own"
        )
    if name not in SUITES:
        return name, Suite(rows)
    suite = SUITES[name]
    # Countdown's rows hold numbers, and rows of multiple choice hold one column for each choice.
    if (rows.problem or rows.answer) and suite.kind in ("countdown", MULTIPLE_CHOICE):
        raise UserError(
            f"suite {spec} names columns of questions with one answer, and rows of {name} have "
            "other columns: remove them"
        )
    if rows.path:
        return name, replace(suite, rows=rows, usual_split=suite.rows.split or suite.usual_split)
    rows = replace(rows, path=suite.rows.path, split=rows.split or suite.rows.split)
    return name, replace(suite, rows=rows)


# The usual split of a suite, and the setting that names it.
SPLIT_OF_SUITES = ("test", "eval.suites")


def open_suite(suite: Suite) -> datasets.Dataset:
    """Returns the rows of a suite with a data set.

    Raises:
        UserError: the set cannot be loaded, or lacks the split.
    """
    return row_loader.open_rows(suite_rows(suite), *SPLIT_OF_SUITES)


def suite_rows(suite: Suite) -> Rows:
    """Returns the rows of a suite with the split that it usually has, if the set has that split."""
    rows = suite.rows
    if not rows.split and suite.usual_split in problem_sets.load(rows.path):
        rows = replace(rows, split=suite.usual_split)
    return rows


def check_suites(specs: Sequence[str]) -> None:
    """Raises UserError if `eval.suites` names an unknown suite, or a suite twice."""
    names = [parse_suite(spec)[0] for spec in split_sources(*specs)]
    for name, count in Counter(names).items():
        if count > 1:
            raise UserError(f"eval.suites names {name} {count} times: name it once")


# Problems.


def load_suite(spec: str, task: TaskConfig, limit: int, seed: int) -> tuple[str, list[Problem]]:
    """Returns the name and the problems of a suite.

    Args:
        spec: the name of a suite, or name=FILE (see `parse_suite`).
        task: the settings for prompts. Problems of a kind without the template `task.template` have
            the default template of their kind.
        limit: the number of problems, taken from the beginning of the suite; 0 for all.
        seed: the seed for the order of the choices of a multiple-choice question.
    """
    name, suite = parse_suite(spec)
    run_task = task
    task = mixed.settings_of_questions(task)
    # A template for questions, such as a user-defined one, does not fit countdown.
    countdown_template = task.template if task.template in COUNTDOWN_TEMPLATES else "r1"
    if not suite.rows.path:
        # The defaults of countdown, whatever the task of the run: a suite has the same problems in
        # every run.
        settings = type(task)(template=countdown_template)
        return name, countdown.eval_problems(settings, limit or RANDOM_COUNTDOWN_PROBLEMS)

    dataset = open_suite(suite)
    # A user-defined suite may name the task of each row, as the training data of mixed tasks does.
    if name not in SUITES and mixed.has_row_tasks(run_task, dataset):
        rows = mixed.read_rows(run_task, dataset, suite.rows, is_held_out=True)
        rows = row_loader.placed_rows(rows, suite_rows(suite), *SPLIT_OF_SUITES)
        usable = [row for row in rows if row is not None]
        problems = [
            problem_sets.placed(replace(row.problem, id=f"{name}/{i}"), row.place)
            for i, row in enumerate(usable)
        ]
    elif suite.kind == "countdown":
        problems = [
            countdown.to_problem(puzzle, countdown_template, f"{name}/{i}")
            for i, puzzle in enumerate(countdown.read_puzzles(dataset, suite.rows.path))
        ]
    elif suite.kind == MULTIPLE_CHOICE:
        problems = [
            choice_problem(task, f"{name}/{i}", as_object(row, "a row"), seed, suite.instruction)
            for i, row in enumerate(dataset)
        ]
    else:
        prompt_column = math_problems.math_template(task.template).column
        rows = problem_sets.read_rows(
            dataset,
            suite.rows.problem,
            suite.rows.answer,
            suite.rows.path,
            prompt_column,
            with_columns=rewards.need_columns(task.reward),
        )
        problems = [
            math_problems.to_problem(task, suite.kind, f"{name}/{i}", row)
            for i, row in enumerate(rows)
        ]
    numbers = row_loader.row_numbers(suite_rows(suite), *SPLIT_OF_SUITES)
    if len(problems) == len(numbers):
        problems = [
            problem_sets.placed(problem, problem_sets.Place(suite.rows.path, number))
            for problem, number in zip(problems, numbers, strict=True)
        ]
    return name, problems[:limit] if limit else problems


def load_questions(spec: str) -> list[str]:
    """Returns the unchanged questions of a suite.

    Raises:
        UserError: the problems of the suite are numbers, not questions.
    """
    name, suite = parse_suite(spec)
    if suite.kind == "countdown":
        raise UserError(f"suite {name} has numbers, no questions: remove it")
    return problem_sets.read_questions(open_suite(suite), suite.rows.path, suite.rows.problem)


# Multiple choice.


def choice_problem(
    task: TaskConfig,
    id: str,
    row: Mapping[str, JsonValue],
    seed: int,
    instruction: str = BOXED,
) -> Problem:
    """Returns the problem of a GPQA row. Its gold is the letter of the right choice.

    The right choice has a random position among the wrong choices, which keep their order, as in
    open-r1's and lighteval's evaluations. The position depends only on (id, seed).
    """
    columns = ["Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3))]
    answers = [str(row[column]).strip() for column in columns]
    place = random.Random(f"{id}/{seed}").randrange(4)
    choices = answers[1:]
    choices.insert(place, answers[0])
    question = _CHOICES.format(*choices, question=str(row["Question"]).strip())
    # A template file is a complete published prompt. Its question has the choices, but no sentence
    # of jzero's.
    if math_problems.math_template(task.template).path:
        question = question.removesuffix(f"\n\n{_CHOICE_SENTENCE}")
    asked = problem_sets.Row(question, None)
    problem = math_problems.to_problem(task, MULTIPLE_CHOICE, id, asked, instruction)
    return replace(problem, gold="ABCD"[place])


def grade_choice(response: str, gold: JsonValue, task: TaskConfig) -> Grade:
    """Grades the last letter after the thoughts that is boxed, tagged or called the answer."""
    letter = last_letter(response)
    if letter is None:
        return Grade(0.0, False, "no answer")
    if letter != gold:
        return Grade(0.0, False, "wrong choice")
    return Grade(1.0, True, "correct")


def last_letter(response: str) -> str | None:
    """Returns the last letter after the thoughts that is an answer, or None."""
    # A model weighs the choices in its thoughts, so only the text after them counts.
    letters = _LETTER.findall(response.rpartition("</think>")[2])
    return letters[-1] if letters else None
