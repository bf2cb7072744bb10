"""Votes of maj@k: extracts the answer of each response, and merges equal answers into one vote.

`vote` returns the answer of a response as text. `count_as_one` merges answers that are written
differently, such as `\\frac12`, `\\dfrac{1}{2}` and `0.5`, or `1,000` and `1000`, whether they are
right or wrong: two answers are the same vote if the mathematics grader accepts one of them with the
other as the gold answer (`answers.same_answer`).

This relation need not be transitive, so the order matters. Answers are processed by frequency, the
most frequent first, and in text order at equal frequency. Each answer is compared with the first
answers of the existing votes in turn and joins the first vote that matches. Without a match it
starts a new vote.

Every comparison runs in a grader process within task.grade_seconds, since responses may be hostile.
k responses need at most k probes and k (k - 1) / 2 comparisons. An answer that the grader cannot
read, or that took part in MAX_FAILURES comparisons without a verdict, is not compared further.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from jzero.answers.extract import LONGEST_ANSWER, last_box, last_number
from jzero.answers.same_answer import has_verdict, same_answer
from jzero.json_values import from_fields
from jzero.tasks import countdown, suites
from jzero.types import Grade, JsonValue, Rollout
from jzero.workers.pool import CallError, Pool

if TYPE_CHECKING:
    from jzero.config import TaskConfig

COMPARER = "jzero.tasks.votes:compare_in_worker"
MAX_FAILURES = 2

# Values of `problem.task` with answers for the mathematics grader. Answers to other problems, such
# as countdown's equations, are compared as text.
MATHEMATICS = ("math", "gsm8k", "math_multiturn")
_NUMERAL = re.compile(r"-?(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|0|[1-9][0-9]*)(?:\.[0-9]+)?")

Compare = Callable[[str, str], Grade]


def vote(response: str, kind: str = "math") -> str:
    """Returns the vote of a response: its answer, or "" for a response without an answer.

    The answer is the last boxed or tagged text after the thoughts or, if there is none, the last
    number. For a multiple-choice question the answer is the letter. `kind` is `problem.task`.
    """
    if kind == suites.MULTIPLE_CHOICE:
        return suites.last_letter(response) or ""
    text = response.rpartition("</think>")[2]
    answer = last_box(text) or countdown.extract_answer(text) or last_number(text) or ""
    return " ".join(answer.split())


def votes_of(rollouts: Sequence[Rollout], pool: Pool, task: TaskConfig) -> list[str]:
    """Returns the votes of the responses to one problem. Equal votes have the same text."""
    # All rollouts belong to one problem.
    kind = rollouts[0].problem.task
    answers = [vote(rollout.text, kind) for rollout in rollouts]
    if kind not in MATHEMATICS:
        return [without_space(answer) for answer in answers]

    def compare(first: str, second: str) -> Grade:
        try:
            return from_fields(Grade, pool.call(COMPARER, first, second, task=task))
        except CallError as error:  # the comparison has no verdict
            return Grade(0.0, False, str(error))

    return count_as_one(answers, compare)


def compare_in_worker(task: TaskConfig, first: str, second: str) -> JsonValue:
    """Returns the fields of the grade of `same_answer`."""
    return vars(same_answer(first, second))


def votes_of_all(
    problems: Sequence[Sequence[Rollout]],
    pool: Pool,
    task: TaskConfig,
) -> list[list[str]]:
    """Returns `votes_of` for each problem. The grader processes compare in parallel."""
    # Two threads for each grader process, so that a process has its next comparison while a thread
    # reads the last one.
    with ThreadPoolExecutor(2 * max(1, task.grade_workers)) as threads:
        return list(threads.map(lambda rollouts: votes_of(rollouts, pool, task), problems))


def count_as_one(answers: Sequence[str], compare: Compare) -> list[str]:
    """Maps every answer to the first answer of its vote; "" stays "".

    `compare(first, second)` returns the grade of `same_answer`.
    """
    counts = Counter(plain_numeral(answer) for answer in answers if answer)
    first_answers: list[str] = []
    vote_of = {"": ""}
    failures = Counter[str]()
    for answer in sorted(counts, key=lambda answer: (-counts[answer], answer)):
        same = find_same(answer, first_answers, compare, failures)
        if same is None:
            first_answers.append(answer)
        vote_of[answer] = answer if same is None else same
    return [vote_of[plain_numeral(answer)] for answer in answers]


def find_same(
    answer: str,
    first_answers: Sequence[str],
    compare: Compare,
    failures: Counter[str],
) -> str | None:
    """Returns the first entry of `first_answers` that equals `answer`, None if there is none.

    `failures` counts for every answer the comparisons without a verdict, and is updated.
    """
    # Cheap tests first: equal texts need no grader, and neither do different integers.
    for other in first_answers:
        if without_space(answer) == without_space(other):
            return other
    others = [other for other in first_answers if not are_different_integers(answer, other)]
    if not others or not is_readable(answer, compare):
        return None
    for other in others:
        if max(failures[answer], failures[other]) >= MAX_FAILURES:
            continue
        grade = compare(answer, other)
        if grade.correct:
            return other
        if not has_verdict(grade):
            failures.update((answer, other))
    return None


def is_readable(answer: str, compare: Compare) -> bool:
    """Returns whether the grader can read an answer within its limits."""
    if len(answer) > LONGEST_ANSWER:
        return False
    # The probe compares the answer with 0, which the grader can read.
    return _NUMERAL.fullmatch(answer) is not None or has_verdict(compare(answer, "0"))


def plain_numeral(answer: str) -> str:
    """Normalizes a numeral: 1,000 and 1000.0 become 1000. Other answers stay unchanged."""
    if len(answer) > LONGEST_ANSWER or not _NUMERAL.fullmatch(answer):
        return answer
    digits = answer.replace(",", "")
    if "." in digits:
        digits = digits.rstrip("0").rstrip(".")
    return "0" if digits == "-0" else digits


def are_different_integers(first: str, second: str) -> bool:
    """Returns whether two answers are different integers, so that no grader has to compare them."""
    both = _NUMERAL.fullmatch(first) and _NUMERAL.fullmatch(second)
    return bool(both) and "." not in first + second and first != second


def without_space(answer: str) -> str:
    """Returns the answer without white space."""
    return re.sub(r"\s", "", answer)
