"""The verdict on an answer to a mathematical question: `grade`.

An answer is correct only if the one final answer, where the template wants it, is the gold, and
does not merely repeat the question.

Reasons of a grade:
- correct
- wrong value
- no answer: there is none where the template wants it
- unparsed: the answer is beyond the grammar or its limits, or a word after its number is no unit
- echo: the answer equals the gold, but is the question's own formula
- no gold: there was nothing to compare with

The verifier "fast" takes only a number where the gold is written as a number. The verifier
"math_verify" takes arithmetic, too, and notes where the package math-verify disagrees; the score
stays ours. The verifier "last_number" is oat's for GSM8K (`jzero.grading.last_number`): it reads
the response without its template.
"""

import functools
import re

from jzero.grading import last_number
from jzero.grading.applications import function_names
from jzero.grading.equivalence import equal
from jzero.grading.expressions import Node, split_unit, unit_names
from jzero.grading.extract import extract_answer
from jzero.grading.latex_lexer import tokenize, with_euler_number
from jzero.grading.latex_parser import Reading, parse
from jzero.grading.units import MULTIPLIERS, is_unit, singular, unit_name
from jzero.types import Grade

_WORD = re.compile("[a-z]+")
_COUNTED = re.compile(r"\bhow many ([a-z]+)")


def grade(
    response: str,
    gold: object,
    *,
    template: str,
    question: str = "",
    verifier: str = "fast",
) -> Grade:
    """Grades a response: the score is 1.0 or 0.0.

    `gold` is an answer, or a list of answers any of which will do. `template` says how the response
    marks its answer (`extract.TEMPLATES`). A formula that occurs in `question` does not count,
    unless it is the gold as it is written.
    """
    if verifier == "last_number":
        return last_number.grade(response, gold)
    answer = extract_answer(response, template)
    if answer is None:
        return Grade(0.0, False, "no answer")
    candidates = gold if isinstance(gold, list) else [gold]
    golds = [str(item) for item in candidates if item is not None and str(item).strip()]
    reasons = [_reason(answer, item, question, verifier == "fast") for item in golds]
    correct = "correct" in reasons
    if correct:
        reason = "correct"
    else:
        reason = reasons[0] if reasons else "no gold"
    if verifier == "math_verify" and _math_verify(answer, golds, default=correct) != correct:
        reason += "; math-verify disagrees"
    return Grade(float(correct), correct, reason)


def _reason(answer: str, gold: str, question: str, strict: bool) -> str:
    gold = extract_answer(gold, "answer") or ""
    if tokenize(answer) and tokenize(answer) == tokenize(gold):
        return "correct"
    functions, counted = function_names(answer, gold), _counted_numerals(question)
    gold_tree = parse(gold, Reading(functions, True, counted))
    tree = parse(answer, Reading(functions, _has_euler_number(gold), counted))
    if tree is None:
        return "unparsed"
    if gold_tree is None or not equal(tree, gold_tree, strict):
        return "wrong value"
    if not _has_known_units(tree, gold, question):
        return "unparsed"
    # A number or a name may well occur in the question, also with its unit.
    is_atom = split_unit(tree)[0].kind in ("number", "symbol", "text")
    if tree == gold_tree or is_atom or not _is_in_question(answer, question):
        return "correct"
    return "echo"


def _has_known_units(tree: Node, gold: str, question: str) -> bool:
    """Returns whether the words after numbers are units, or are nouns of the question or gold."""
    names = unit_names(tree)
    if not names:
        return True
    nouns = _nouns(gold) | _nouns(question)
    return all(is_unit(name, nouns) for name in names)


@functools.lru_cache(4096)
def _has_euler_number(gold: str) -> bool:
    return "e" in with_euler_number(tokenize(gold))


@functools.lru_cache(1024)
def _nouns(text: str) -> frozenset[str]:
    return frozenset(map(unit_name, _WORD.findall(text.lower())))


@functools.lru_cache(1024)
def _counted_numerals(question: str) -> frozenset[str]:
    """Returns the numerals that a question counts: "dozen" for "How many dozen eggs ...?"."""
    words = map(singular, _COUNTED.findall(question.lower()))
    return frozenset(word for word in words if word in MULTIPLIERS)


def _is_in_question(answer: str, question: str) -> bool:
    return _without_braces(answer) in _without_braces(question)


def _without_braces(text: str) -> str:
    return "".join(f" {token} " for token in tokenize(text) if token not in "{}")


def _math_verify(answer: str, golds: list[str], default: bool) -> bool:
    """Returns the verdict of the package math-verify, `default` where it has none."""
    import math_verify  # an extra

    try:
        prediction = math_verify.parse(f"${answer}$", parsing_timeout=1)
        for gold in golds:
            parsed_gold = math_verify.parse(f"${gold}$", parsing_timeout=1)
            if math_verify.verify(parsed_gold, prediction, timeout_seconds=1):
                return True
        return False
    except Exception:  # whatever the package raises on a hostile answer
        return default
