r"""Finds the final answer in a response.

Each prompt template asks the policy to mark its answer in one way: a LaTeX box, an <answer> block,
a line after ####. `extract_answer` returns the text that is marked in the way of the template, and
nothing where the response does not follow the template: it never guesses.

The functions below run on text that a policy wrote, so none of them may take more than linear time.
"""

import re
from collections.abc import Callable

from jzero.errors import UserError
from jzero.grading.characters import FRACTIONS

LONGEST_ANSWER = 1200  # characters; a longer answer counts as no answer

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
# An escaped brace or backslash matches first, so that it does not count as a brace.
_BRACE = re.compile(r"\\[\\{}]|[{}]")
_BOX_WITHOUT_BRACES = re.compile(r"(-?[0-9][0-9.,]*[0-9]|-?[0-9]|[A-Za-z])(?![A-Za-z0-9])")
_ANSWER_BLOCK = re.compile(
    r"\s*<answer>(.*)</answer>(?:\s|<\|(?:im_end|endoftext)\|>|</s>)*", re.DOTALL
)
_LAST_WORDS = re.compile(rf"(?<=[0-9{FRACTIONS}])[ ]+([A-Za-z]+(?:[ ][A-Za-z]+){{0,5}})[ .]*\Z")
# Few characters may stand between: a search from every "answer" then takes linear time in all.
_ANSWER_BEFORE_FORMULA = re.compile(
    r"\banswer\b[^$\\\n]{0,50}?(?:\bis\b|:|=)[^$\\\n]{0,50}?(\$\$|\$|\\\(|\\\[)", re.IGNORECASE
)
_END_OF_FORMULA = {"$": "$", "$$": "$$", "\\(": "\\)", "\\[": "\\]"}
_NUMBER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


def last_box(text: str) -> str | None:
    r"""Returns the argument of the last \boxed or \fbox.

    Returns None where there is no box, and where the last box is not closed.
    """
    *before, after = _BOX.split(text)
    if not before:
        return None
    if not after.startswith("{"):
        bare = _BOX_WITHOUT_BRACES.match(after)  # \boxed 5
        return bare[1] if bare else None
    depth = 0
    for brace in _BRACE.finditer(after):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return after[1 : brace.start()]
    return None


def answer_block(text: str) -> str | None:
    """Returns the inside of the one <answer> block, which must be all of `text`.

    Special tokens that end a response may follow the block.
    """
    block = _ANSWER_BLOCK.fullmatch(text)
    if block is None or "answer>" in block[1]:  # a second block begins or ends inside
        return None
    return block[1]


def marked_line(text: str) -> str | None:
    r"""Returns the rest of the line of the last ####, which is how GSM8K marks its answers.

    Words after the number are taken for its unit: "#### 5 red apples" gives "5\text{ red apples}".
    """
    _, marker, after = text.rpartition("####")
    line = after.partition("\n")[0].lstrip(" :") if marker else ""
    return _LAST_WORDS.sub(r"\\text{ \1}", line[: 2 * LONGEST_ANSWER])


def final_answer(text: str) -> str | None:
    r"""Returns the last box or, without one, the last formula that "answer is" or "answer:" names.

    "The final answer is $\frac12$." gives "\frac12". A formula is between $, $$, \( and \), or
    \[ and \]. Source: what open-r1's accuracy reward reads of a chat model's response.
    """
    if _BOX.search(text):
        return last_box(text)
    answer = None
    for opening in _ANSWER_BEFORE_FORMULA.finditer(text):
        start = opening.end()
        end = text.find(_END_OF_FORMULA[opening[1]], start, start + LONGEST_ANSWER)
        if end >= 0:
            answer = text[start:end]
    return answer


def last_number(text: str) -> str | None:
    """Returns the last decimal number, with its commas, as "1,234.5"."""
    numbers: list[str] = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


TEMPLATES: dict[str, Callable[[str], str | None]] = {
    "boxed": last_box,
    "think_boxed": last_box,
    "r1": answer_block,
    "gsm8k": marked_line,
    "number": last_number,
    "final_answer": final_answer,
    "answer": str,  # the response is the answer
}
_TEMPLATES_WITH_THOUGHTS = ("think_boxed", "r1")  # these need a </think> before the answer


def extract_answer(response: str, template: str) -> str | None:
    r"""Returns the answer that a response gives in the way of `template`, None if it gives none.

    Only the text after the last </think> counts. Where the template's mark holds a box, as in
    "#### \boxed{5}", the answer is the inside of the box. An empty answer, and an answer of more
    than LONGEST_ANSWER characters, is None.

    Raises:
        UserError: `template` is not a key of TEMPLATES.
    """
    if template not in TEMPLATES:
        raise UserError(f"template={template!r} is not one of {', '.join(TEMPLATES)}")
    _, end_of_thoughts, text = response.rpartition("</think>")
    if template in _TEMPLATES_WITH_THOUGHTS and not end_of_thoughts:
        return None
    answer = TEMPLATES[template](text)
    if answer and "\\boxed" in answer:
        answer = last_box(answer)
    answer = (answer or "").strip().strip("*`").strip()  # Markdown's bold and code
    return answer if answer and len(answer) <= LONGEST_ANSWER else None
