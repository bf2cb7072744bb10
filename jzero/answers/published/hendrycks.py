r"""The normal form of MATH's answers: answers with the same normal form are equal.

The rules are the rules of the first evaluation on the MATH data set (Hendrycks et al. 2021,
arXiv:2103.03874), with the unit words that understand-r1-zero added. They are applied in the order
of the original, because later rules depend on earlier ones. They also keep the original's faults:
`\frac{2}{4}` is not `\frac12`, and "5 a" is 5.
"""

import functools
import re

# Words that are removed between any characters that are neither letters nor digits. A dot stands
# for any character, as in the original.
_WORDS = (
    "east|degree|mph|kmph|ft|m sqaure| m east|sq m|deg|mile|q .|monkey|prime|ratio|profit of rs|rd|"
    "o|gm|p . m|lb|tile|per|dm|lt|gain|ab|way|west|a .|b .|c .|d .|e .|f .|g .|h .|t|a|h|"
    "no change|men|soldier|pie|bc|excess|st|inches|noon|percent|by|gal|kmh|c|acre|rise|a . m|th|"
    "π r 2|sq|mark|l|toy|coin|sq . m|gallon|° f|profit|minw|yr|women|feet|am|pm|hr|cu cm|square|"
    "v â € ™|are|rupee|rounds|cubic|cc|mtr|s|ohm|number|kmph|day|hour|minute|min|second|man|woman|"
    "sec|cube|mt|sq inch|mp|∏ cm ³|hectare|more|sec|unit|cu . m|cm 2|rs .|rs|kg|g|month|km|m|cm|mm|"
    "apple|liter|loss|yard|pure|year|increase|decrease|d|less|Surface|litre|pi sq m|s .|metre|"
    "meter|inch"
)
_UNIT_WORDS = _WORDS.split("|")
_PLURALS = [word + "s" for word in _UNIT_WORDS]
_ENCLOSED_TEXT = re.compile(r"^\\text\{(.+?)\}$")
_ARRAY = re.compile(r"\\begin\{array\}\{.*?\}")
_LAST_TEXT = re.compile(r"\\text{.*?}$")
_SYNONYMS = (
    ("bmatrix", "pmatrix"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    (r"\neq", r"\ne"),
    (r"\leq", r"\le"),
    (r"\geq", r"\ge"),
    (r"\left", ""),
    (r"\right", ""),
)


def normal_form(answer: str) -> str:
    """Returns the normal form of an answer.

    If a rule of the original fails on an answer, such as one that ends in a bare square root, the
    answer is returned as it is.
    """
    answer = answer.strip()
    if enclosed := _ENCLOSED_TEXT.search(answer):
        answer = enclosed[1].strip()
    try:
        return _apply_rules(answer)
    except _RuleError:
        return answer


class _RuleError(Exception):
    """A rule of the original fails on this answer."""


def _apply_rules(text: str) -> str:
    text = text.replace("\n", "").replace(r"\!", "").replace("\\\\", "\\")
    text = _ARRAY.sub(r"\\begin{pmatrix}", text).replace(r"\end{array}", r"\end{pmatrix}")
    for synonym, name in _SYNONYMS:
        text = text.replace(synonym, name)
    text = _without_units(text)
    for dropped in (r"^{\circ}", r"^\circ", r"\$"):
        text = text.replace(dropped, "")
    text = _before_text(text).replace(r"\%", "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    if text.startswith("."):
        text = "0" + text
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:  # "x = 5"
        text = sides[1]
    text = _with_braced_roots(text).replace(" ", "")
    text = _with_braced_fractions(text)
    # The original has this rule for 0.5 only.
    if text == "0.5":
        return r"\frac{1}{2}"
    return _with_written_fraction(text)


@functools.cache
def _unit_patterns() -> list[re.Pattern[str]]:
    return [re.compile(rf"(^|\W){word}($|\W)") for word in (*_UNIT_WORDS, *_PLURALS)]


def _without_units(text: str) -> str:
    r"""Removes a last \text{...} and the unit words, unless the text would become empty."""
    shorter = _LAST_TEXT.sub("", text).strip()
    text = shorter or text
    # Twice, as in the original: removing a word may leave another one at the end.
    for pattern in 2 * _unit_patterns():
        text = pattern.sub(r"\1\2", text) or text
    return text


def _before_text(text: str) -> str:
    r"""Returns the text before "\text{ ", which MATH writes only before units."""
    head, *tails = text.split(r"\text{ ")
    if len(tails) > 1:
        raise _RuleError
    return head


def _with_braced_roots(text: str) -> str:
    r"""Writes \sqrt3 as \sqrt{3}."""
    head, *tails = text.split(r"\sqrt")
    parts = [head]
    for part in tails:
        if not part:
            raise _RuleError
        parts.append(part if part.startswith("{") else f"{{{part[0]}}}{part[1:]}")
    return r"\sqrt".join(parts)


def _with_braced_fractions(text: str) -> str:
    r"""Writes \frac12 and \frac1{72} with braces, but not \frac{72}1."""
    head, *tails = text.split(r"\frac")
    parts = [head]
    for part in tails:
        if not part:
            raise _RuleError
        if part.startswith("{"):
            parts.append(part)
        elif len(part) < 2:
            return text
        elif part[1] == "{":
            parts.append(f"{{{part[0]}}}{part[1:]}")
        else:
            parts.append(f"{{{part[0]}}}{{{part[1]}}}{part[2:]}")
    return r"\frac".join(parts)


def _with_written_fraction(text: str) -> str:
    r"""Writes 3/4 as \frac{3}{4}, if both numbers are integers as Python prints them."""
    parts = text.split("/")
    try:
        numerator, denominator = map(int, parts)
    except ValueError:
        return text
    if text != f"{numerator}/{denominator}":
        return text
    return rf"\frac{{{numerator}}}{{{denominator}}}"
