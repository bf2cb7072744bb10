"""Verdicts on mathematical answers: correct only if the one final answer is the gold and not the question again.

Reasons: correct, wrong value, no answer (none where the template wants it), unparsed (beyond the grammar or limits),
echo (the question's own formula), no gold. The verifier "fast" wants a number where the gold is written as one;
"math_verify" takes arithmetic, too, and notes where the math-verify package disagrees. The score stays ours."""

import functools
from typing import Any, NamedTuple

from jzero.grade.equal import equal
from jzero.grade.extract import extract
from jzero.grade.parse import Node, Refused, parse, tokens
from jzero.types import Grade

PROMPT = 20_000  # characters of a question
DISAGREES = "; math-verify disagrees"


class Answer(NamedTuple):
    tokens: list[str]
    node: Node | None  # None: not parsed


def read(text: str) -> Answer:
    found = tokens(text)
    try:
        return Answer(found, parse(found))
    except Refused:
        return Answer(found, None)


@functools.lru_cache(8192)
def read_gold(text: str) -> Answer:
    return read(extract(text, "answer") or "")


def formula(found: list[str]) -> str:
    return f" {' '.join(token for token in found if token not in '{}')} "


@functools.lru_cache(1024)
def read_question(text: str) -> str:
    return formula(tokens(text[:PROMPT]))


def verdict(answer: Answer, gold: Answer, question: str, strict: bool) -> str:
    if answer.tokens and answer.tokens == gold.tokens:
        return "correct"
    if answer.node is None:
        return "unparsed"
    if gold.node is None or not equal(answer.node, gold.node, strict):
        return "wrong value"
    if answer.node == gold.node or answer.node[0] in ("num", "sym", "text") or not question:
        return "correct"
    return "echo" if formula(answer.tokens) in read_question(question) else "correct"


def peer_agrees(text: str, golds: list[str], correct: bool) -> bool:
    import math_verify

    try:
        answer = math_verify.parse(f"${text}$", parsing_timeout=1)
        theirs = any(
            math_verify.verify(math_verify.parse(f"${gold}$", parsing_timeout=1), answer, timeout_seconds=1)
            for gold in golds
        )
    except Exception:  # whatever it raises, it gives no verdict
        return True
    return theirs == correct


def grade(response: str, gold: Any, *, template: str, question: str = "", verifier: str = "fast") -> Grade:
    """`gold` is an answer or a list of them, any of which will do."""
    text = extract(response, template)
    if text is None:
        return Grade(0.0, False, "no answer")
    golds = [str(one) for one in (gold if isinstance(gold, list) else [gold]) if one is not None and str(one).strip()]
    answer, reason = read(text), "no gold"
    for one in golds:
        reason = verdict(answer, read_gold(one), question, verifier == "fast")
        if reason == "correct":
            break
    correct = reason == "correct"
    if verifier == "math_verify" and not peer_agrees(text, golds, correct):
        reason += DISAGREES
    return Grade(float(correct), correct, reason)


def grade_problem(response: str, gold: Any, task: Any) -> Grade:
    """A task's grader: `gold` is an answer, a list, or {"answer", "question"}; `task` has template and verifier."""
    answer, question = (gold["answer"], gold["question"]) if isinstance(gold, dict) else (gold, "")
    return grade(response, answer, template=task.template, question=question, verifier=task.verifier)
