"""Words around an answer: "Answer: 5", "(B) 7", "Janet makes $18 every day".

`without_lead_in` drops words that only announce an answer, `read_choice` reads the letter of a
choice and the value after it, and `number_of_sentence` reads the only number of a sentence. Words
that change a number into another answer (not 5, more than 5, 5 or 6, half of 5) are never dropped.
"""

import re
from typing import NamedTuple

from jzero.answers.units import MULTIPLIERS, POWERS, REFUSED_WORDS, singular, unit_name
from jzero.answers.vocabulary import words

# Words that may be in a sentence with an answer, although they are not part of a unit.
_HARMLESS = words("is it was are and to if then than over by out when where also base score answer")
# Words that change the number in a sentence into another answer.
_CHANGING = words(
    """no never nor either perhaps possibly probably except instead unlike negative minus
    plus times least most below above under beyond about approximately approx almost nearly around
    roughly between greater exceed exceeds exceeding up estimate estimated guess
    sum product difference quotient square cube cubed squared root power digit multiple
    divisible factor factorial mod modulo remainder reciprocal inverse opposite percent percentage
    double twice triple thrice half halves quarter thirds dozen hundred thousand million billion
    other another others unknown cannot can't isn't wasn't aren't doesn't don't didn't"""
)
_UNITS_IN_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9}
_TENS_IN_WORDS = "ten twenty thirty forty fifty sixty seventy eighty ninety"
_HEDGES = words(
    "or and not nor either neither both maybe perhaps possibly probably but none wrong incorrect"
)
_NUMBER_WORDS = {word: number for number, word in enumerate(_UNITS_IN_WORDS.split())} | {
    word: 10 * tens for tens, word in enumerate(_TENS_IN_WORDS.split(), start=1)
}

_ANNOUNCEMENT = r"""
    # Signs of a conclusion, and words such as "so" in front of a comma or another word.
    (?:(?:\\therefore|\\Rightarrow|\\Leftrightarrow|\\to)(?![A-Za-z])
    |(?:so|hence|thus|therefore|finally|consequently)\b(?=\s*[,:}]|\s+\S)
    # We get ...; I conclude that ...
    |(?:we|i)\s+(?:get|have|find|obtain|see|conclude)\b(?:\s+that\b)?
    # The final answer is ...; Solution: ...
    |(?:(?:the|my|our|your|this)\s+)?(?:(?:final|correct|right|required|desired|exact)\s+)*
        (?:answers?|ans|solutions?|results?)\b\.?\s*\}?\s*(?:is\b|are\b|was\b|equals\b|=|:)(?:\s*:)?
    # The final answer, and a bare answer in front of a value.
    |(?:(?:the|my|our)\s+)?(?:(?:final|correct|right)\s+)+(?:answer|ans)\b
    |(?:answer|ans)\b\.?(?=\s+[-0-9$(\\]|\s*\})
    # That is, ...
    |i\.e\.(?=[\s,])|(?:namely|that\s+is|viz\.)(?=[\s,]*\}|,|\s+[-0-9])
    )"""
_LEAD_IN = re.compile(
    rf"""\s*\{{?\s*(?:\\text\{{\s*)?(?:{_ANNOUNCEMENT}[\s,:*]*(?:\}}\s*(?:\\text\{{\s*)?)?)+""",
    re.VERBOSE | re.IGNORECASE,
)
_MAY_HAVE_LEAD_IN = re.compile(r"\s*\{?\s*(?:\\(?:text|there|Right|Left|to)|[A-Za-z]{2}|i\.e)")

_CHOICE = re.compile(
    r"""[\s{]*(?:\\text\{[\s{]*)?
    # The correct option is ...
    (?:(?i:(?:the\s+)?(?:correct\s+|right\s+)?(?P<word>option|choice|letter)\b[\s:]*(?:is\b)?)
        [\s}]*)?
    (?:\\text\{\s*)?
    # (A), [A] or a bare A. A bare letter needs a mark after it, the end of the text, or a word such
    # as "option" before it.
    (?:\(\s*(?:\\text\{)?\{?\s*(?P<round>[A-J])\s*\}*\s*\)
    |\[\s*(?P<square>[A-J])\s*\]
    |(?P<bare>[A-J])\s*\}*\s*(?:\\text\{\s*(?=[).:]))?
        (?:[).:](?=[\s}]|$|\\)|[):]|(?=\s*\}*\s*$)|(?(word)(?=\s)|(?!))))
    [\s.:]*\}*""",
    re.VERBOSE,
)
_ANOTHER_CHOICE = re.compile(
    r"\(\s*[A-J]\s*\)|(?<![A-Za-z\\])[A-J]\s*\)|(?<![A-Za-z\\])[B-HJ](?![A-Za-z'(])"
)
_WORD = re.compile(r"[A-Za-z']+")
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9.,])(?:\\?\$\s*)?-?\s*(?:\\?\$\s*)?"
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:\s*\\?%)?"
)
_OPERATORS = frozenset("^_'!*/+<>°,;&")  # in front of these, "(A)" is an operand, not a choice
LONGEST_SENTENCE = 400  # characters


# A label and a word or colon before a value: "the area is 12", "Area: 12".
_SPOKEN_RELATION = re.compile(
    r"\s*(?:\\text\{)?\s*(?!(?i:option|choice|letter)\b)"
    r"(?P<label>[A-Za-z]+(?:[ ]+[A-Za-z]+){0,9})\s*"
    r"(?:(?P<colon>:)|\s(?:is|are|equals)(?=[\s}])(?:\s+equal\s+to\b)?)\s*\}?\s*(?P<value>\S)"
)


class Choice(NamedTuple):
    """The letter of a choice, and the text after it, which may be empty."""

    letter: str
    value: str


def without_lead_in(text: str) -> str:
    """Returns a text without words that only announce an answer: "Answer: 5" is 5.

    `text` no longer has layout. If no text follows, the words are the answer.
    """
    if not _MAY_HAVE_LEAD_IN.match(text):
        return text
    match = _LEAD_IN.match(text)
    if match is None:
        return text
    answer = _balanced(match[0], text[match.end() :])
    return answer if answer.strip(" .{}\n") else text


def _balanced(dropped: str, remainder: str) -> str:
    """Reopens, in front of `remainder`, the groups that were opened in the dropped text."""
    opened = dropped.count("{") - dropped.count("}")
    if opened <= 0:
        return remainder
    if "\\text{" in dropped:
        return "{" * (opened - 1) + "\\text{" + remainder
    return "{" * opened + remainder


def with_relation(text: str) -> str:
    r"""Returns a text with "=" instead of the words or colon between a label and its value.

    "The area is 12" is \text{The area}=12. Hedging words are not a label.
    """
    match = _SPOKEN_RELATION.match(text)
    if match is None:
        return text
    label = match["label"]
    value = text[match.start("value") :]
    is_word = any(len(word) > 2 and word[1:].islower() for word in label.split())
    # A colon needs a word in front of it, because "A:B" is a ratio.
    if (match["colon"] and not is_word) or _is_hedged(label) or value.startswith(("not", "no ")):
        return text
    dropped = text[: match.start("value")]
    if len(label) == 1:
        return f"{label}={_balanced(dropped, value)}"
    return rf"\text{{{label}}}={_balanced(dropped, value)}"


def read_choice(text: str) -> Choice | None:
    r"""Returns the choice that a text without layout names: \text{(B) }7 is B with the value 7.

    Returns None if the text names no choice, or more than one.
    """
    match = _CHOICE.match(text)
    if match is None:
        return None
    letter = match["round"] or match["square"] or match["bare"]
    remainder = text[match.end() :]
    dropped = match[0]
    excess = dropped.count("{") - dropped.count("}")
    if excess < 0:  # the group of the letter was opened before the match
        return None
    value = _balanced(dropped, remainder)
    if not remainder.strip(" .}\n"):
        value = ""
    # (A)^2 is a formula, and "A, B" names two choices.
    if remainder[:1] in _OPERATORS or re.fullmatch("[^A-Za-z]*[A-J][^A-Za-z]*", value):
        return None
    if _ANOTHER_CHOICE.search(value) or _is_hedged(value):
        return None
    return Choice(letter, value)


def _is_hedged(text: str) -> bool:
    return any(word.lower() in _HEDGES for word in _WORD.findall(text))


def number_of_sentence(text: str) -> str:
    """Returns the only number of a sentence that states an answer, otherwise "".

    "Janet makes $18 every day." has $18. At least two words must be before the number or, as in "18
    more eggs than before", three after it. A word in brackets may repeat the number: "18
    (eighteen)".
    """
    if len(text) > LONGEST_SENTENCE:
        return ""
    plain = re.sub(r"\\text\{|[{}]", " ", text)
    numbers = list(_NUMBER.finditer(plain))
    if len(numbers) != 1:
        return ""
    number = numbers[0]
    # The words on both sides decide whether the sentence states this number.
    text_before, text_after = plain[: number.start()], plain[number.end() :]
    # Signs of arithmetic or further digits mean that the sentence is a calculation.
    if (
        re.search(r"[0-9\\=+*/^_<>|~-]", text_before + text_after.rstrip(" .!"))
        or text_after[:1].isalnum()
    ):
        return ""
    words_before, words_after = _WORD.findall(text_before), _WORD.findall(text_after)
    repeated = _repeats(number[0], words_after, text_after)
    if not repeated and len(words_before) < 2 and len(words_after) < 3:
        return ""
    spoken = [] if repeated else words_after
    if any(map(_changes_number, [*words_before, *spoken])):
        return ""
    if words_before and words_before[-1].lower() in ("than", "to", "by"):
        return ""
    return number[0].strip()


def number_in_words(text: str) -> str:
    """Returns 1205 for "one thousand two hundred and five", "" for any other text."""
    plain = re.sub(r"\\text\{|[{}]", " ", text[:LONGEST_SENTENCE]).lower().strip(" .\n")
    spoken = re.split(r"[\s-]+", plain)
    sign = "-" if spoken[0] in ("minus", "negative") else ""
    spoken = spoken[1:] if sign else spoken
    total = below = 0  # `below` is the number since the last thousand or million
    limit = largest_scale = 10**12  # the next word must be below `limit`
    for index, word in enumerate(spoken):
        # Each word must be smaller than the place that the previous words leave open.
        if word in _NUMBER_WORDS and _NUMBER_WORDS[word] < limit:
            value = _NUMBER_WORDS[word]
            below += value
            limit = 10 if 20 <= value < 100 else 1
        # "and" may only follow "hundred" or a scale, because "twenty and five" are two numbers.
        elif word == "hundred" and 0 < below < 100:
            below *= 100
            limit = 100
        elif word in _SCALES and below and _SCALES[word] < largest_scale:
            largest_scale = _SCALES[word]
            total += below * largest_scale
            below = 0
            limit = 10**12
        elif word != "and" or index in (0, len(spoken) - 1) or limit < 100:
            return ""
    return f"{sign}{total + below}"


def _changes_number(word: str) -> bool:
    word = word.lower()
    noun = singular(word)
    if word in _HARMLESS:
        return False
    return (
        word in _CHANGING
        or word in REFUSED_WORDS
        or noun in MULTIPLIERS
        or noun in _CHANGING
        or word in POWERS
        or unit_name(word) == "percent"
    )


def _repeats(number: str, words_after: list[str], text: str) -> bool:
    """Returns whether the text after a number repeats it in words, in brackets."""
    inside = text.strip(" .")
    if not (inside.startswith("(") and inside.endswith(")")) or not words_after:
        return False
    value = 0
    for word in words_after:
        if word.lower() not in _NUMBER_WORDS:
            return False
        value += _NUMBER_WORDS[word.lower()]
    return re.sub(r"[^0-9.]", "", number) == str(value)
