"""Finds the final answer in a response.

Each prompt template asks the policy to mark its answer in one way: a LaTeX box, an <answer> block,
a line after ####. `extract_answer` returns the text that is marked as the template requires. If the
response does not follow the template, it returns None and never guesses.

The functions below run on text that a policy wrote, so none of them may take more than linear time.
"""

import re
from collections.abc import Callable

from jzero.answers.characters import FRACTIONS
from jzero.answers.phrases import number_of_sentence
from jzero.errors import UserError

LONGEST_ANSWER = 1200  # characters; a longer answer counts as no answer

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
# A box, a command that hides its argument, a brace, or an escaped brace or backslash, which does
# not count as a brace. In a text that was escaped twice a box has two backslashes.
_BOX_OR_BRACE = re.compile(
    rf"(?P<box>{_BOX.pattern})|(?P<hidden>\\[hv]?phantom\s*)|\\[{{}}]|\\\\(?!boxed|fbox)|[{{}}]"
)
_BOX_WITHOUT_BRACES = re.compile(r"(-?[0-9][0-9.,]*[0-9]|-?[0-9]|[A-Za-z])(?![A-Za-z0-9])")
_ANSWER_BLOCK = re.compile(r"\s*<answer>(.*)</answer>\s*", re.DOTALL)
_LAST_WORDS = re.compile(rf"(?<=[0-9{FRACTIONS}])[ ]+([A-Za-z]+(?:[ ][A-Za-z]+){{0,5}})[ .!]*\Z")
# Few characters may stand between, so that a search from every "answer" takes linear time in total.
_ANSWER_BEFORE_FORMULA = re.compile(
    r"\banswer\b[^$\\\n]{0,50}?(?:\bis\b|:|=)[^$\\\n]{0,50}?(\$\$|\$|\\\(|\\\[)", re.IGNORECASE
)
# Text that may stand between #### and the line of the answer.
_HEADINGS = ("", "answer", "final answer", "the answer", "the final answer", "solution", "result")
# The shapes of control tokens. jzero cuts the token that ended a response before it grades; the
# texts of other programs may still have it. A name between bars stands in no answer. A tag can be
# a part of one, so it counts only at the end of a text.
_MARKED_TOKEN = re.compile(r"<\|[A-Za-z_][\w.-]{1,40}\|>|<｜[^｜<>]{1,40}｜>")
_LAST_TAG = re.compile(r"<(/?)\|?([A-Za-z_]\w{0,40})\|?>\s*\Z")
_LONGEST_TAG = 60  # characters at the end of a text that are searched for a tag
_MOST_END_TOKENS = 4
_STATEMENT = re.compile(
    r"\b(?:answer|solution|result)\b[^.$\\\n]{0,50}?(?:\bis\b|\bare\b|:|=)[ *:]*\s?", re.IGNORECASE
)
_END_OF_SENTENCE = re.compile(r"[.!?](?=\s|$)|\n")
_END_OF_FORMULA = {"$": "$", "$$": "$$", "\\(": "\\)", "\\[": "\\]"}
_NUMBER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")
# Commands of LaTeX around words, and signs of money and percent.
_TEXT_IN_FORMULA = re.compile(r"\\(?:text|mathrm|textbf|mathbf)(?![A-Za-z])|[{}$%~]|\\[$%, ;!]")
_WORDS = re.compile(r"[A-Za-z\s.,:;']*")


def last_box(text: str) -> str | None:
    r"""Returns the argument of the last \boxed or \fbox that is not inside of another box.

    Returns None without a box, and if the last box is not closed.
    """
    if text.count("box{") == 1 and (start := text.find("\\boxed{")) >= 0 and "phantom" not in text:
        # Fast path: most responses have one box, and most boxes have no braces inside.
        end = text.find("}", start)
        inside = text[start + len("\\boxed{") : end]
        if end >= 0 and "{" not in inside and not inside.endswith("\\"):
            return inside
    if not _BOX.search(text):
        return None
    opened: list[int] = []  # positions of the open braces
    boxes: dict[int, int | None] = {}  # {position of a box's brace: where it closes}
    hidden: set[int] = set()
    for match in _BOX_OR_BRACE.finditer(text):
        token = match[0]
        if match["box"] or match["hidden"]:
            boxes[match.end()] = None
            hidden |= {match.end()} if match["hidden"] else set()
        elif token == "{":
            opened.append(match.start())
        elif token == "}" and opened:
            start = opened.pop()
            if start in boxes:
                boxes[start] = match.start()

    # Skips inner boxes: a box counts only if it starts after the end of the previous outer one.
    last, end_of_box = None, -1
    for start, end in boxes.items():
        if start > end_of_box:
            last = last if start in hidden else start
            end_of_box = end if end is not None else end_of_box
    if last is None:
        return None
    if text.startswith("{", last):
        end = boxes[last]
        return None if end is None else text[last + 1 : end]
    bare = _BOX_WITHOUT_BRACES.match(text, last)  # \boxed 5
    return bare[1] if bare else None


def without_end_tokens(text: str) -> str:
    """Returns a text without the control tokens that end it, such as <|im_end|> or <end_of_turn>.

    Tokens are recognized by their shape, not by their names: the text ends at the first name
    between bars, and before tags at its end. A closing tag whose opening tag is in the text, as in
    <answer>5</answer>, is no control token.
    """
    text = _MARKED_TOKEN.split(text, maxsplit=1)[0].rstrip()
    for _ in range(_MOST_END_TOKENS):
        tail = text[-_LONGEST_TAG:]
        tag = _LAST_TAG.search(tail)
        if tag is None or (tag[1] and f"<{tag[2]}>" in text):
            break
        text = text[: len(text) - len(tail) + tag.start()].rstrip()
    return text


def answer_block(text: str) -> str | None:
    """Returns the content of the only <answer> block, which must be all of `text`.

    Control tokens that end a response may follow the block.
    """
    block = _ANSWER_BLOCK.fullmatch(without_end_tokens(text))
    if block is None or "answer>" in block[1]:  # a second block starts or ends inside
        return None
    return block[1]


def marked_line(text: str) -> str | None:
    r"""Returns the line of the last ####, the mark of answers in GSM8K.

    If only a heading such as "Answer" follows ####, the answer is the next line. Words after the
    number become its unit: "#### 5 red apples" gives "5\text{ red apples}". If a sentence has one
    number, that number is the answer: "#### Janet makes $18 every day" gives $18.
    """
    _, marker, marked = text.rpartition("####")
    if not marker:
        return None
    # A response may continue for megabytes after its last ####.
    for line in marked[: 4 * LONGEST_ANSWER].splitlines():
        line = without_end_tokens(line).strip(" \t:*`")
        if line.rstrip(":.").lower() not in _HEADINGS:
            # The line is cut above the limit of an answer, so that `extract_answer` refuses a
            # longer line instead of crediting its beginning.
            return _with_unit(line[: 2 * LONGEST_ANSWER])
    return ""


def _with_unit(line: str) -> str:
    return number_of_sentence(line) or _LAST_WORDS.sub(r"\\text{ \1}", line)


def stated_answer(text: str) -> str | None:
    r"""Returns the last box, or the text after the last ####, or after the last "the answer is".

    Without a box and ####, the answer is the end of the sentence after "the answer is" or
    "answer:", with or without a formula: "The answer is 18 eggs." gives "18\text{ eggs}".
    """
    if _BOX.search(text):
        return last_box(text)
    if "####" in text:
        return marked_line(text)
    answer = None
    # The last statement counts.
    for statement in _STATEMENT.finditer(text):
        answer = text[statement.end() : statement.end() + LONGEST_ANSWER]
    if answer is None:
        return None
    # The text ends where its first line does, which the end of the response may share.
    answer = without_end_tokens(answer.lstrip().partition("\n")[0])
    return _with_unit(_END_OF_SENTENCE.split(answer.strip(), maxsplit=1)[0].strip(" *`"))


def final_answer(text: str) -> str | None:
    r"""Returns the last box or, without one, the last formula after "answer is" or "answer:".

    "The final answer is $\frac12$." gives "\frac12". A formula is between $, $$, \( and \), or \[
    and \]. Source: the formulas that open-r1's accuracy reward reads in a chat model's response.
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
    """Returns the last decimal number, with its commas, such as "1,234.5"."""
    numbers: list[str] = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def boxed_or_last_number(text: str) -> str | None:
    r"""Returns the last box or, without one, the last decimal number.

    A box decides over a number after it: "\boxed{558}, so 542 more than the 16 lawns" gives 558. A
    number with words, as in \boxed{558 lawns}, gives the number. A box that is empty, as in the
    prompt's "\boxed{}", or not closed marks nothing.
    """
    box = last_box(text)
    return _number_among_words(box) if box and box.strip() else last_number(text)


def _number_among_words(box: str) -> str:
    r"""Returns the only number of a box that otherwise has words; any other box unchanged."""
    if len(box) > LONGEST_ANSWER:  # `extract_answer` refuses it
        return box
    text = _TEXT_IN_FORMULA.sub(" ", box)
    numbers: list[str] = _NUMBER.findall(text)
    has_only_words = _WORDS.fullmatch(_NUMBER.sub(" ", text)) is not None
    return numbers[0] if len(numbers) == 1 and has_only_words else box


TEMPLATES: dict[str, Callable[[str], str | None]] = {
    "boxed": last_box,
    "think_boxed": last_box,
    "r1": answer_block,
    "gsm8k": marked_line,
    "number": boxed_or_last_number,
    "final_answer": final_answer,
    "stated": stated_answer,
    "answer": str,  # the whole response is the answer
}
_TEMPLATES_WITH_THOUGHTS = ("think_boxed", "r1")  # these need a </think> before the answer


def extract_answer(response: str, template: str) -> str | None:
    r"""Returns the answer that a response marks as `template` requires, None without an answer.

    Only the text after the last </think> counts. If the marked text contains a box, as in "####
    \boxed{5}", the answer is the content of the box. An empty answer, and an answer of more than
    LONGEST_ANSWER characters, is None.

    Raises:
        UserError: `template` is not a key of TEMPLATES.
    """
    if template not in TEMPLATES:
        raise UserError(f"template={template!r} is not one of {', '.join(TEMPLATES)}")
    _, end_of_thoughts, text = response.rpartition("</think>")
    if template in _TEMPLATES_WITH_THOUGHTS and not end_of_thoughts:
        return None
    answer = TEMPLATES[template](text)
    # If the answer is a whole text or a box, `layout` handles the boxes in it.
    if answer and "\\boxed" in answer and TEMPLATES[template] not in (last_box, str):
        answer = last_box(answer)
    answer = (answer or "").strip().strip("*`").strip()  # Markdown's bold and code
    return answer if answer and len(answer) <= LONGEST_ANSWER else None
