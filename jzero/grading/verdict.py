"""Verdicts on mathematical answers: correct only if the one final answer, where the template wants it, is the gold and
not the question again. An unclosed or empty last box, two blocks, a box in the thoughts alone: no answer.

Reasons: correct, wrong value, no answer (none where the template wants it), unparsed (beyond the grammar or limits),
echo (the question's own formula), no gold. The verifier "fast" wants a number where the gold is written as one;
"math_verify" takes arithmetic, too, and notes where the math-verify package disagrees. The score stays ours."""

import re
from typing import Any

from jzero.errors import UserError
from jzero.grading.equivalence import equal
from jzero.grading.latex_parser import read
from jzero.types import Grade

LONGEST = 1200  # characters of an answer
BLOCK = re.compile(r"\s*<answer>(.*)</answer>(?:\s|<\|(?:im_end|endoftext)\|>|</s>)*", re.DOTALL)
BOX = re.compile(r"\\(?:boxed|fbox)\s*")
BRACE = re.compile(r"\\[\\{}]|[{}]")
BARE_BOX = re.compile(r"(-?[0-9][0-9.,]*[0-9]|-?[0-9]|[A-Za-z])(?![A-Za-z0-9])")
WORDS = re.compile(r"(?<=[0-9])[ ]+([A-Za-z]+(?:[ ][A-Za-z]+){0,5})[ .]*\Z")
NUMBER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


def last_box(text: str) -> str | None:
    r"""The argument of the last \boxed or \fbox; escaped braces do not count."""
    *before, rest = BOX.split(text)
    if not before or rest[:1] != "{":
        bare = BARE_BOX.match(rest) if before else None
        return bare and bare[1]
    depth = 0
    for brace in BRACE.finditer(rest):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return rest[1 : brace.start()]
    return None


def answer_block(text: str) -> str | None:
    """The one <answer> block that directly follows the thoughts and ends the response."""
    found = BLOCK.fullmatch(text)
    return found[1] if found and "answer>" not in found[1] else None


def marked_line(text: str) -> str | None:
    """The rest of the line of the last ####; words that end it are a unit."""
    _, marker, after = text.rpartition("####")
    line = after.partition("\n")[0].lstrip(" :") if marker else ""
    return WORDS.sub(r"\\text{ \1}", line[: 2 * LONGEST])


def last_number(text: str) -> str | None:
    return [None, *NUMBER.findall(text)][-1]


TEMPLATES = dict(
    boxed=last_box,
    think_boxed=last_box,
    r1=answer_block,
    gsm8k=marked_line,
    number=last_number,
    answer=str,
)


def extract(response: str, template: str) -> str | None:
    if template not in TEMPLATES:
        raise UserError(f"template={template!r} is not one of {', '.join(TEMPLATES)}")
    _, thought, text = response.rpartition("</think>")
    answer = TEMPLATES[template](text) if thought or template not in ("think_boxed", "r1") else None
    answer = last_box(answer) if answer and "\\boxed" in answer else answer
    answer = (answer or "").strip().strip("*`").strip()
    return answer if answer and len(answer) <= LONGEST else None


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
    shown, asked = (
        "".join(f" {token} " for token in read(some)[0] if token not in "{}")
        for some in (text, question)
    )
    return "echo" if shown in asked else "correct"


def peer(text: str, golds: list[str], ours: bool) -> bool:
    """The verdict of the math-verify package, ours where it has none."""
    import math_verify

    parsed = lambda text: math_verify.parse(f"${text}$", parsing_timeout=1)
    try:
        return any(
            math_verify.verify(parsed(gold), parsed(text), timeout_seconds=1) for gold in golds
        )
    except Exception:  # whatever it raises
        return ours


def grade(
    response: str, gold: Any, *, template: str, question: str = "", verifier: str = "fast"
) -> Grade:
    """`gold` is an answer or a list of them, any of which will do."""
    text = extract(response, template)
    if text is None:
        return Grade(0.0, False, "no answer")
    golds = [
        str(one)
        for one in (gold if isinstance(gold, list) else [gold])
        if one is not None and str(one).strip()
    ]
    reasons = [verdict(text, one, question, verifier == "fast") for one in golds]
    correct = "correct" in reasons
    reason = "correct" if correct else [*reasons, "no gold"][0]
    if verifier == "math_verify" and peer(text, golds, correct) != correct:
        reason += "; math-verify disagrees"
    return Grade(float(correct), correct, reason)
