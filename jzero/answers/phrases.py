"""Words around an answer: "Answer: 5", "(B) 7", "Janet makes $18 every day".

`without_lead_in` drops words that only announce an answer, `read_choice` reads the letter of a
choice and the value after it, and `number_of_sentence` reads the only number of a sentence. Words
that change a number into another answer (not 5, more than 5, 5 or 6, half of 5) are never dropped.
"""

import itertools
import re
from typing import NamedTuple

from jzero.answers.quantities import named_unit
from jzero.answers.units import (
    MULTIPLIERS,
    NUMBER_WORDS,
    POWERS,
    REFUSED_WORDS,
    folded,
    is_unit,
    singular,
    unit_name,
)
from jzero.answers.vocabulary import words

# The forms of a sentence that states a number: "Janet makes $18 every day", "there are 5 left".
_SUBJECT = (
    r"(?:(?i:(?:it|she|he|they|there|we|i|you)|(?:the|his|her|their|its|our|my|each|every)(?:\s+[a-z'-]+){1,5}"
    r"|total(?:\s+[a-z]+){0,3})|[A-Z][a-z]+(?:'s(?:\s+[a-z]+){1,3})?)"
)
_COPULAS = words("is are was were be has have had")
_NEGATORS = words("no nobody none neither nothing not never")
_VERBS = words(
    """is are was were be equals has have had makes make made needs need needed gets get
    got earns earn earned spends spend spent takes take took costs cost pays pay paid sells sell
    sold buys buy bought travels travel traveled weighs weigh weighed measures contains contain
    produces produce produced uses use used eats eat ate reads read walks walk walked runs run ran
    drives drive drove saves save saved leaves left receives receive received gives give gave
    collects collect collected catches caught bakes bake baked plants plant planted grows grew
    drinks drink drank owns own owned owes owe owed works work worked plays play played scores
    scored wins won loses lost swims swam rides rode carries carried holds hold held totals
    requires require finishes lasts lasted watches watched writes wrote charges charged donates
    donated picks picked shares shared brings brought finds found keeps kept puts put sees saw
    learns learned fills filled serves served cooks cooked climbs jumps jumped studies studied
    visited lays laid reaches reached covers covered"""
)
_BEFORE_NUMBER = r"(?:\s+(?:only|exactly|now|then|also|a\s+total\s+of|equal\s+to|\$))*"
_STATES_NUMBER = re.compile(
    rf"\s*(?P<subject>{_SUBJECT})\s+(?:(?:will|would|now|then|also|only)\s+)*"
    rf"(?P<verb>[a-z]+){_BEFORE_NUMBER}\s*(?::\s*)?"
)
_TOTAL = re.compile(
    r"\s*(?:(?:exactly|precisely|only|just|(?:a |in )?total(?: of)?)\s+)+", re.IGNORECASE
)
# After the number: a noun with its modifiers, and words such as "in total" and "per hour".
_TAILS = words(
    """left remaining total altogether overall today now each old more in all every a an per of for
    the his her their its him them himself herself day days week weeks month months year years hour
    hours minute minutes second seconds night game person people away long tall high wide deep back
    there still at to home from on this that school work money time and cents"""
)
# Words that begin another clause, and words that compare: no nouns.
_CLAUSES = words(
    """that which who if whether than not no cannot can can't may might could must should would
    isn't aren't wasn't weren't doesn't don't didn't won't false wrong incorrect"""
)
_NO_NOUNS = words("less fewer than before after apart percent percentage")
_TAIL_STARTS = words("in every each a an per of for left remaining altogether overall today now")
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9}
_HEDGES = words(
    "or and not nor either neither both maybe perhaps possibly probably but none wrong incorrect"
)

_ANNOUNCEMENT = r"""
    # Signs of a conclusion, and words such as "so" in front of a comma or another word.
    (?:(?:\\therefore|\\Rightarrow|\\Leftrightarrow|\\to)(?![A-Za-z])
    |(?:so|hence|thus|therefore|finally|consequently)\b(?=\s*[,:}]|\s+\S)
    # We get ...; I conclude that ...
    |(?:we|i)\s+(?:get|have|find|obtain|see|conclude)\b(?:\s+that\b)?
    # The final answer is ...; Solution: ...
    |(?:(?:the|my|our|your|this)\s+)?(?:(?:final|correct|right|required|desired|exact|only|unique)\s+)*
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
# A second choice after the first one, and words that take the first one back.
_ANOTHER_CHOICE = re.compile(
    r"\(\s*[A-J]\s*\)|(?<![A-Za-z\\])[A-J]\s*[).:](?=[\s}]|$)"
    r"|\b(?:or|and|not|nor|but)\s+(?:option\s+|choice\s+)?[A-J](?![A-Za-z'(])"
    r"|\A[\s{}]*(?:\\text\{\s*)?(?:(?:or|and|nor|but|is|was|if)\b|[A-J]\s*\}*\s*\Z)"
)
# "C is correct" names the choice C.
_IS_CORRECT = re.compile(
    r"(?<=[A-J)\]}])\s+is\s+(?:the\s+)?(?:correct|right)(?:\s+(?:answer|option|choice))?(?=[\s.}]*\Z)"
)
_REASON = re.compile(
    r"(?<=[0-9)}a-z])\s*(?:\\text\s*\{)?\s*,?\s*\b(?:since|because)\b.*\Z", re.DOTALL
)
_APPROXIMATION_IN_BRACKETS = re.compile(
    r"(?<=[0-9)}])\s*\(\s*\\approx\s*(-?[0-9][0-9.]*)\s*\)\s*\Z"
)
# Runs of spaces are read once: from their first space, and without a way back.
_EQUIVALENTLY = re.compile(
    r"(?<!\s)\s*+(?:,\s*+)?\b(?:or,?\s++equivalently|i\.e\.(?=,?\s*+\}?\s*+[-0-9\\])),?\s*+"
)
# Either x=1 or x=2.
_EITHER = re.compile(
    r"\A\s*(?P<text>\\text\s*\{)?\s*[Ee]ither\s+(?=[^\n]*\bor\b)|\A\s*[Ee]ither\s+(?=[a-z]\s*=)"
)
# only f(x)=x; f(x)=x is the only solution
_ONLY = re.compile(
    r"\A\s*(?:\\text\s*\{)?\s*[Oo]nly\s*(?:\}\s*(?=[a-z]\s*(?:\(|=))|(?=[a-z]\s*(?:\(|=)))"
    r"|(?<=[0-9)}a-z])\s*(?:\\text\s*\{)?\s*\bis the only (?:such )?(?:solution|function"
    r"|answer|one|possibility)\s*\}?\s*\Z"
)
_MAY_HAVE_REMARK = re.compile(r"\)\s*\}*\s*(?:\Z|,)|only\s*\}?\s*\Z")
# Whether a solution is the only one, and how a number is rounded.
_REMARK = re.compile(
    r"(?<=[0-9)}a-z])\s*,?\s*(?:\\text\s*\{)?\s*(?:only|\(\s*(?:\\text\s*\{)?\s*(?:(?:is )?"
    r"(?:the )?(?:only|unique)"
    r"(?: (?:real|integer|positive|such|possible|valid))?(?: (?:solutions?|answer|value|root"
    r"|pair))?"
    r"|approx(?:imately|\.)?|(?:rounded )?(?:to )?[0-9a-z]+ (?:s\.?f\.?|d\.?p\.?|significant "
    r"(?:figures|digits)|decimal places?))"
    r"\s*\}?\s*\))\s*\}?\s*\Z"
)
_REMARK_ON_ROOT = re.compile(
    r"(?<=[0-9)}A-Za-z])\s*(?:\\text\s*\{)?\s*\((?:\\text\s*\{)?(?:a )?(?:double|repeated"
    r"|triple|simple)(?: root)?\s*\}?\)"
    r"(?:\s*\})?|(?<=[a-z])\s*\((?:exothermic|endothermic|attractive|repulsive)\)(?=\s*\}?\s*\Z)"
)
_UNIT_IN_BRACKETS = re.compile(
    r"(?<=[0-9)}])\s*(?:\\text\s*\{\s*\(|\(\s*\\text\s*\{)"
    r"(?P<unit>[A-Za-zμΩ/^0-9{}·* -]+?)\)\s*\}?\s*\Z"
)
_TEXT = re.compile(r"\\text\s*\{|[{}$]|\\(?=\s)")
# Letters before any number: the case of 5 Mbar counts.
_PLAIN_PROSE = re.compile(r"[A-Za-z'-]*[ ,]+[A-Za-z][A-Za-z0-9 ,.;:'()/-]*")
_SPACES = re.compile(r"\s+")
_HYPHEN = re.compile(r"(?<=[a-z])-(?=[a-z])")
_ONLY_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*")
_PLAIN_WORD = r"(?!(?:not|no|never|neither|nor|opposite|if|either|or|but|false|wrong)\b)[a-z]+ "
_SUBJECT_OF_PREDICATE = re.compile(
    rf"\A(?:(?:the|this|these|both) (?:{_PLAIN_WORD}){{1,5}}?|it |they )"
    r"(?:is|are|was|were|must be|will be|falls on|lies on) (?:(?:an? |the )(?!same))?"
    r"|\A[A-Za-z]{1,5} (?:is|are) (?:an? |the )?|\A(?:an? |the )(?!same)"
)
_NOUN_OF_KIND = re.compile(
    r" (?:triangle|geometry|shape|distribution|series|sequence|reaction|one|player|group"
    r"|bonds?|motion|law|process"
    r"|mutation|selection|test|model|type|kind)\Z"
)
# In "A, B, D" and "a, b" the letter is a member of a list.
_FIRST_ARTICLE = re.compile(r"\A\s*(?:An?|The)\s+(?=[A-Za-z]{2})")
_PUNCTUATION = re.compile(r"[,.;:](?=\s|\Z)")
_WORD = re.compile(r"[A-Za-z']+")
_POINT = re.compile(r"([A-Z](?:_\{?[0-9]\}?)?'?)\s*(\([^(),]+(?:,[^(),]+)+\))")
_POINTS = re.compile(rf"{_POINT.pattern}(?:\s*,\s*{_POINT.pattern})*")
_RUNS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]+")  # of letters outside of commands
_MORE_THAN = re.compile(r"more\s+[a-z]{3,}\s+than\s+[A-Za-z]{3,}")
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
    r"(?:(?P<colon>:)|\s(?:is|are|was|were|equals)(?=[\s}])(?:\s+(?:equal\s+to|exactly|precisely)\b)?)\s*\}?\s*(?!(?:the\s+)?(?:correct|right)\b)"
    r"(?P<value>\S)"
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


def without_remarks(text: str) -> str:
    r"""Returns a text without a remark at its end, and without brackets around its unit.

    "x=7 (the only solution)" is x=7, "5.2 (to 2 s.f.)" is 5.2, and "5 \text{ (m/s)}" is 5 m/s.
    """
    if "only" in text:
        text = _ONLY.sub("", text)
    if "since" in text or "because" in text:
        text = _without_reason(text)
    if "approx" in text:
        text = _APPROXIMATION_IN_BRACKETS.sub(r"\\approx \1", text)
    text = _EITHER.sub(lambda match: match["text"] or "", _EQUIVALENTLY.sub(" or ", text))
    if not _MAY_HAVE_REMARK.search(text):
        return text
    text = _REMARK_ON_ROOT.sub("", _REMARK.sub("", text))
    match = _UNIT_IN_BRACKETS.search(text)
    if match is None:
        return text
    unit = re.sub(r"[{}]|\\text", "", match["unit"]).strip()
    first = re.split(r"[^A-Za-zμΩ]", unit)[0]
    is_known = named_unit(first) or named_unit(singular(first)) or singular(first) == "unit"
    return rf"{text[: match.start()]}\text{{ {unit}}}" if is_known else text


def _without_reason(text: str) -> str:
    """Returns 5 for "5, because ..."."""
    shortened = _REASON.sub("", text)
    opened = shortened.count("{") - shortened.count("}")
    return shortened + "}" * opened if shortened.strip(" {}") else text


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
    if (match["colon"] and not is_word) or _is_clause(label) or value.startswith(("not", "no ")):
        return text
    dropped = text[: match.start("value")]
    if len(label) == 1:
        return f"{label}={_balanced(dropped, value)}"
    return rf"\text{{{label}}}={_balanced(dropped, value)}"


def _is_clause(label: str) -> bool:
    """Returns whether the words before a relation are more than a noun: it is false that there."""
    spoken = {word.lower() for word in label.split()}
    return _is_hedged(label) or bool(spoken & (_COPULAS | _CLAUSES | _NEGATORS))


def read_choice(text: str) -> Choice | None:
    r"""Returns the choice that a text without layout names: \text{(B) }7 is B with the value 7.

    Returns None if the text names no choice, or more than one.
    """
    match = _CHOICE.match(_IS_CORRECT.sub("", text) if " is " in text else text)
    if match is None:
        return None
    text = match.string
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
    if _ANOTHER_CHOICE.search(value):
        return None
    return Choice(letter, value)


def _is_hedged(text: str) -> bool:
    return any(word.lower() in _HEDGES for word in _WORD.findall(text))


def with_names_of_points(text: str) -> str:
    """Returns A=(1,2),B=(3,4) for the points A(1,2),B(3,4), "" for any other text."""
    return _POINT.sub(r"\1=\2", text) if _POINTS.fullmatch(text.strip()) else ""


def has_other_segments(text: str, other: str) -> bool:
    r"""Returns whether two formulas of segments, AB\cdot CD and AC\cdot BD, have others."""
    runs, other_runs = _RUNS.findall(text), _RUNS.findall(other)
    if len(runs) < 2 or len(other_runs) < 2:
        return False
    if not all(len(run) == 2 and run.isupper() for run in runs + other_runs):
        return False
    # AB and BA are the same segment.
    return {frozenset(run) for run in runs} != {frozenset(run) for run in other_runs}


def same_prose(text: str, other: str) -> bool:
    """Returns whether two texts of several words differ in case, articles or punctuation only."""
    if " " not in other.strip():
        return False
    texts = [_TEXT.sub(" ", written).strip() for written in (text, other)]
    if len(texts[1]) > LONGEST_SENTENCE or not all(map(_PLAIN_PROSE.fullmatch, texts)):
        return False
    words_of_texts = []
    for written in texts:
        # The A of hepatitis A is no article.
        spoken = _FIRST_ARTICLE.sub("", _PUNCTUATION.sub(" ", written)).split()
        words_of_text: list[str] = []
        for word, following in itertools.zip_longest(spoken, spoken[1:], fillvalue=""):
            is_unit_symbol = bool(words_of_text) and words_of_text[-1][-1:].isdigit()
            is_article = word in ("a", "an", "the") and len(following) > 1
            if not is_article:
                words_of_text.append(word if is_unit_symbol else folded(word))
        words_of_texts.append(words_of_text)
    return len(words_of_texts[0]) > 1 and words_of_texts[0] == words_of_texts[1]


def same_predicate(text: str, other: str) -> bool:
    """Returns whether two texts say the same of one thing: "the matrix is singular", "singular".

    One of them may leave the subject out, and the noun of a kind: "trigonal planar geometry".
    """
    spoken = [
        _SPACES.sub(" ", _HYPHEN.sub(" ", _TEXT.sub(" ", written))).strip(" .")
        for written in (text, other)
    ]
    if max(map(len, spoken)) > LONGEST_SENTENCE or not all(map(_ONLY_WORDS.fullmatch, spoken)):
        return False
    shorter, longer = sorted((_folded_words(words) for words in spoken), key=len)
    if shorter == longer and " " in shorter:
        return True  # first-order, first order
    predicate = _SUBJECT_OF_PREDICATE.sub("", longer)
    if len(shorter) < 3 or not predicate:
        return False
    kinds = (_NOUN_OF_KIND.sub("", words) for words in (longer, predicate))
    return shorter in (predicate, *kinds)


def _folded_words(text: str) -> str:
    return " ".join(map(folded, text.split()))


def number_of_sentence(text: str) -> str:
    """Returns the only number of a sentence that states an answer, otherwise "".

    "Janet makes $18 every day." has $18: a subject, a verb, the number and a counted noun. A word
    in brackets may repeat the number: "18 (eighteen)".
    """
    if len(text) > LONGEST_SENTENCE:
        return ""
    plain = re.sub(r"\\text\{|[{}]", " ", text)
    numbers = list(_NUMBER.finditer(plain))
    if len(numbers) != 1:
        return ""
    number = numbers[0]
    text_before, text_after = plain[: number.start()], plain[number.end() :]
    if not text_before.strip() and _repeats(number[0], _WORD.findall(text_after), text_after):
        return number[0].strip()
    if not text_before.strip() and _MORE_THAN.fullmatch(text_after.strip(" .!\n")):
        return number[0].strip()
    is_stated = _TOTAL.fullmatch(text_before) or _states_number(text_before)
    is_counted = _is_counted(text_after.strip(" .!\n"))
    return number[0].strip() if is_stated and is_counted else ""


def _states_number(text: str) -> bool:
    """Returns whether a text is a subject and a verb: "Janet makes"."""
    match = _STATES_NUMBER.fullmatch(text + " ")
    if match is None or match["verb"] not in _VERBS:
        return False
    first, *others = match["subject"].lower().split()
    # A second verb makes another sentence: "it is false that there are".
    return first not in _NEGATORS and not _VERBS & {*others} and not _CLAUSES & {*others}


def _is_counted(text: str) -> bool:
    """Returns whether a text only names what is counted: "apples left", "dollars per hour"."""
    spoken = text.lower().split()
    if not all(re.fullmatch("[a-z'-]+", word) and word != "x" for word in spoken):
        return False
    start = 0
    while start < len(spoken) and spoken[start] not in _TAIL_STARTS:
        start += 1
    nouns, tail = spoken[:start], spoken[start:]
    if any(word in REFUSED_WORDS or word in _NO_NOUNS or len(word) == 1 for word in nouns):
        return False
    has_multiplier = any(singular(word) in MULTIPLIERS or word in POWERS for word in spoken)
    is_tail = all(word in _TAILS or is_unit(unit_name(word), frozenset()) for word in tail)
    return len(nouns) <= 3 and is_tail and not has_multiplier


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
        if word in NUMBER_WORDS and NUMBER_WORDS[word] < limit:
            value = NUMBER_WORDS[word]
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


def _repeats(number: str, words_after: list[str], text: str) -> bool:
    """Returns whether the text after a number repeats it in words, in brackets."""
    inside = text.strip(" .")
    if not (inside.startswith("(") and inside.endswith(")")) or not words_after:
        return False
    value = 0
    for word in words_after:
        if word.lower() not in NUMBER_WORDS:
            return False
        value += NUMBER_WORDS[word.lower()]
    return re.sub(r"[^0-9.]", "", number) == str(value)
