"""Whether two answers are equal, by the grader's equivalence. See `tasks.votes`."""

from jzero.answers import verdict
from jzero.types import Grade

# With these reasons the grader has reached a verdict, but not with others such as "unparsed" and
# "timeout".
_VERDICTS = ("correct", "wrong value", "echo")


def same_answer(first: str, second: str) -> Grade:
    """Returns the grade of one answer with the other as gold, in the better of both directions.

    Both directions are needed, because the grader accepts only a number if the gold is written as a
    number. The rules are the rules of the verifier "fast". If the first answer cannot be read,
    `has_verdict` of the result is False.
    """
    forth = verdict.grade(first, second, template="answer")
    if forth.correct or not has_verdict(forth):
        return forth
    back = verdict.grade(second, first, template="answer")
    return back if back.correct else forth


def has_verdict(grade: Grade) -> bool:
    """Returns whether the grader could read an answer and decide about it within its limits."""
    return grade.reason.startswith(_VERDICTS)
