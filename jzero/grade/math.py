"""Verdicts on mathematical answers: correct only if the one final answer is the gold and not the question again.

Reasons: correct, wrong value, no answer (none where the template wants it), unparsed (beyond the grammar or limits),
echo (the question's own formula), no gold. The verifier "fast" wants a number where the gold is written as one;
"math_verify" takes arithmetic, too, and notes where the math-verify package disagrees. The score stays ours."""

from typing import Any

from jzero.grade.equal import equal
from jzero.grade.extract import extract
from jzero.grade.parse import read
from jzero.types import Grade


def verdict(text: str, gold: str, question: str, strict: bool) -> str:
    (found, answer), (wanted, right) = read(text), read(extract(gold, "answer") or "")
    if found and found == wanted:
        return "correct"
    if answer is None:
        return "unparsed"
    if right is None or not equal(answer, right, strict):
        return "wrong value"
    if answer == right or answer[0] in ("num", "sym", "text"):
        return "correct"
    shown, asked = ("".join(f" {token} " for token in read(some)[0] if token not in "{}") for some in (text, question))
    return "echo" if shown in asked else "correct"


def peer(text: str, golds: list[str], ours: bool) -> bool:
    """The verdict of the math-verify package, ours where it has none."""
    import math_verify

    parsed = lambda text: math_verify.parse(f"${text}$", parsing_timeout=1)
    try:
        return any(math_verify.verify(parsed(gold), parsed(text), timeout_seconds=1) for gold in golds)
    except Exception:  # whatever it raises
        return ours


def grade(response: str, gold: Any, *, template: str, question: str = "", verifier: str = "fast") -> Grade:
    """`gold` is an answer or a list of them, any of which will do."""
    text = extract(response, template)
    if text is None:
        return Grade(0.0, False, "no answer")
    golds = [str(one) for one in (gold if isinstance(gold, list) else [gold]) if one is not None and str(one).strip()]
    reasons = [verdict(text, one, question, verifier == "fast") for one in golds]
    correct = "correct" in reasons
    reason = "correct" if correct else [*reasons, "no gold"][0]
    if verifier == "math_verify" and peer(text, golds, correct) != correct:
        reason += "; math-verify disagrees"
    return Grade(float(correct), correct, reason)
