r"""Multiple-choice questions: the options of a question, and the option that an answer names.

An answer may be a letter, a letter with the text of its option, or the text alone. With the options
at hand the text is compared with them, so that it may have any words, such as "and" and "not".
"""

import functools
import re
from collections.abc import Callable

from jzero.answers.latex_lexer import simplified_text
from jzero.answers.phrases import Choice

LETTERS = "ABCDEFGHIJ"
# The marks of options: (A), A), A. and A:, also in bold type. One question has one of these.
_STYLES = (
    r"\(\s*{}\s*\)",
    r"(?<![A-Za-z(]){}\s*\)",
    r"(?<![A-Za-z.]){}\.(?=[\s~\\}}])",
    r"(?<![A-Za-z]){}:(?=[\s~\\}}])",
)
_TYPE = re.compile(
    r"\\(?:text(?:bf|rm|it)?|mathrm|mathbf|mbox)\s*\{|[{}$]|\\\\|\\q?quad|\*\*|~|\\ "
)
_SPACES = re.compile(r"\s+")
_AND = re.compile(r"\band\b")
_ASKS_FOR_SEVERAL = re.compile(
    r"all that (?:apply|are|hold)|one or more|which (?:of the (?:following"
    r"|statements)\b.{0,80})?\bare\b"
    r"|select all|choose all|multiple (?:options|answers)",
    re.IGNORECASE,
)
LONGEST_OPTION = 400  # characters


@functools.lru_cache(1024)
def options(question: str) -> dict[str, str]:
    """Returns {letter: text} of the options at the end of a question, empty if it lists none."""
    for style in _STYLES:
        texts = _texts(question, style)
        if len(texts) >= 2:
            return texts
    return {}


def _texts(question: str, style: str) -> dict[str, str]:
    # The options are the last run of marks A, B, C in order.
    starts = [match.span() for match in re.finditer(style.format("A"), question)]
    for start, end in reversed(starts):
        texts: dict[str, str] = {}
        position = end
        for letter, following in zip(LETTERS, LETTERS[1:] + " ", strict=True):
            mark = re.compile(style.format(re.escape(following))).search(question, position)
            text = question[position : mark.start() if mark else len(question)]
            # The last option ends with its line, if options have lines of their own.
            if mark is None and "\n" in question[start:position]:
                text = text.strip().partition("\n")[0]
            texts[letter] = text[:LONGEST_OPTION].strip()
            if mark is None:
                break
            position = mark.end()
        if len(texts) >= 2 and all(texts.values()):
            return texts
    return {}


def plain(text: str) -> str:
    """Returns a text without its type, spaces and case, to compare it with an option."""
    text = _TYPE.sub(" ", simplified_text(_TYPE.sub(" ", text)))
    return _SPACES.sub("", text).strip(".,;:").lower()


def letters_of_choices(text: str) -> frozenset[str]:
    """Returns A, B and D of "ABD", "A, B and D" and "(A), (B), (D)"; empty for other answers."""
    written = _SPACES.sub("", _AND.sub(",", _TYPE.sub(" ", text))).strip(".,{}")
    letters = re.sub(r"[(),;&]", "", written)
    is_run = (
        bool(letters) and set(letters) <= set(LETTERS) and "".join(sorted(set(letters))) == letters
    )
    is_list = re.fullmatch(r"[(]?[A-J][)]?(?:[,;&]+[(]?[A-J][)]?)+", written) is not None
    return (
        frozenset(letters)
        if is_run or (is_list and len(set(letters)) == len(letters))
        else frozenset()
    )


@functools.lru_cache(1024)
def asks_for_several(question: str) -> bool:
    """Returns whether a question asks for all of its options that hold."""
    return _ASKS_FOR_SEVERAL.search(question) is not None


def option_of_text(text: str, texts: dict[str, str], equals: Callable[[str, str], bool]) -> str:
    """Returns the letter of the only option that has a text, "" for none and for several."""
    written = plain(text)
    letters = [letter for letter, option in texts.items() if plain(option) == written]
    if not letters:
        letters = [letter for letter, option in texts.items() if equals(text, option)]
    return letters[0] if len(letters) == 1 and written else ""


def named_option(
    text: str,
    choice: Choice | None,
    texts: dict[str, str],
    equals: Callable[[str, str], bool],
) -> str:
    """Returns the letter of the option that an answer names, "" if it names none or contradicts."""
    of_text = option_of_text(text, texts, equals)
    if of_text:
        return of_text
    if choice is None or choice.letter not in texts:
        return ""
    # The text after the letter may only be the text of its own option.
    if not plain(choice.value) or plain(choice.value) == plain(texts[choice.letter]):
        return choice.letter
    return choice.letter if equals(choice.value, texts[choice.letter]) else ""
