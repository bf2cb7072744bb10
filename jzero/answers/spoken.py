r"""Answers in words: sets ("all real numbers except 2") and conclusions ("Yes, it converges").

`spoken` returns the notation of a whole answer in words: a set, a relation, or the one word that
the sentence states. The forms are positive: a sentence in no form below is left as it is.
"""

import functools
import re
from collections.abc import Callable
from fractions import Fraction

from jzero.answers.units import MULTIPLIERS, NUMBER_WORDS
from jzero.answers.vocabulary import words

_MARKUP = re.compile(r"\\text\s*\{|[{}$]")
_SPACES = re.compile(r"\s+")
_WORD_OF_THREE = re.compile(r"[A-Za-z]{2}")
LONGEST = 200  # characters

_VALUE = r"(?P<value>[^a-z]*(?:\\[a-z]+[^a-z]*)*)"
_NAME = r"(?P<name>[a-z])"
_NUMBERS = r"(?:numbers?|values?|values? of [a-z]|reals?|[a-z])"
_ALL = r"(?:(?:the )?(?:set of )?(?:all|any|every|each) )"
_SIGNS = {
    "positive": r"(0,\infty)",
    "negative": r"(-\infty,0)",
    **dict.fromkeys(("nonnegative", "non-negative"), r"[0,\infty)"),
    **dict.fromkeys(("nonpositive", "non-positive"), r"(-\infty,0]"),
    **dict.fromkeys(("nonzero", "non-zero"), r"\mathbb{R}\setminus\{0\}"),
}
_COMPARISONS = {
    **dict.fromkeys(("at least", "no less than", "greater than or equal to", "not less than"), "≥"),
    **dict.fromkeys(("at most", "no more than", "less than or equal to", "not more than"), "≤"),
    **dict.fromkeys(("more than", "greater than", "larger than", "strictly greater than"), ">"),
    **dict.fromkeys(("less than", "smaller than", "fewer than", "strictly less than"), "<"),
}
_INTERVALS = {"≥": r"[{},\infty)", ">": r"({},\infty)", "≤": r"(-\infty,{}]", "<": r"(-\infty,{})"}
_DOMAINS = {
    "integers": "ℤ",
    "integer": "ℤ",
    "whole numbers": "ℤ",
    "natural numbers": "ℕ",
    "naturals": "ℕ",
    "rational numbers": "ℚ",
    "rationals": "ℚ",
    "complex numbers": "ℂ",
}
_WRITTEN_RELATIONS = {"\\geq": "≥", "\\ge": "≥", "\\leq": "≤", "\\le": "≤"}
_WRITTEN_RELATIONS |= {operator: operator for operator in "<>≤≥"}
_MOST_RESIDUES = 30
_COMPARISON = "|".join(sorted(_COMPARISONS, key=len, reverse=True))
_RELATION_WORD = rf"(?P<relation>{_COMPARISON}|\\[gl]eq?|[<>≤≥])"
_SIGN = "|".join(_SIGNS)
_DOMAIN = "|".join(_DOMAINS)

# A conclusion, and the first words of a clause that only explains it.
_EXPLANATION = (
    r"(?:it|they|this|that|there|he|she|we|the|because|since|as|for|by|every|all|both|always)\b"
)
_CONTRADICTIONS = re.compile(
    r"\b(?:yes|no|but|maybe|perhaps|however|although|or|true|false"
    r"|if|iff|only|unless|except|provided|whenever|when)\b"
)
_VERB = r"(?:is|are|was|has|have|does|do|can|cannot|holds?|exists?|converges?|diverges?)"
_WEEKDAY = r"(?:mon|tues|wednes|thurs|fri|satur|sun)day"


def _except(match: re.Match[str]) -> str:
    values = re.sub(r"\s+and\s+|\s+or\s+", ",", match["values"])
    values = re.sub(r"[a-z]\s*=\s*", "", values)
    values = re.sub(r"(?:\\pm|±)\s*([^,]+)", r"\1,-\1", values)
    return rf"\mathbb{{R}}\setminus\{{{values}\}}"


def _compared(match: re.Match[str]) -> str:
    operator, number = _COMPARISONS[match["comparison"]], match["value"].strip()
    if match["name"]:
        return f"{match['name']}{operator}{number}"
    return _INTERVALS[operator].format(number)


def _compared_twice(match: re.Match[str]) -> str:
    first = _INTERVALS[_COMPARISONS[match["comparison"]]].format(match["value"].strip())
    second = _COMPARISONS[match["other_comparison"]]
    return rf"{first}\cup {_INTERVALS[second].format(match['other_value'].strip())}"


def _enumerated(match: re.Match[str]) -> str:
    return r"\{2,4,6,\ldots\}" if match["parity"] == "even" else r"\{1,3,5,\ldots\}"


def _identity(match: re.Match[str]) -> str:
    return f"I_{match['size']}" if match["size"] else "I"


def _signed(match: re.Match[str]) -> str:
    if match["domain"]:
        return {"positive": "ℤ₊", "nonnegative": "ℕ₀", "non-negative": "ℕ₀"}.get(match["sign"], "")
    return _SIGNS[match["sign"]]


def _named_sign(match: re.Match[str]) -> str:
    return rf"{match['name']}\in{_SIGNS[match['sign']]}"


def _between(match: re.Match[str]) -> str:
    low, high = match["low"].strip(), match["high"].strip()
    name = match["name"] or "x"
    operator = "≤" if match["inclusive"] else "<"
    return f"{low}{operator}{name}{operator}{high}"


def _whole_compared(match: re.Match[str]) -> str:
    """Returns n>5, n ∈ ℤ for all integers n greater than 5, and an intersection without a name."""
    domain = _DOMAINS[match["domain"]]
    if domain not in "ℤℕ" or not match["value"].strip():
        return ""
    number = match["value"].strip()
    operator = (_COMPARISONS | _WRITTEN_RELATIONS)[match["relation"]]
    if match["positive"] and operator not in (">", "≥"):
        return ""  # 1, 2, 3, ... up to the number
    if match["name"]:
        return rf"{match['name']}{operator}{number},{match['name']}\in {domain}"
    return rf"{_INTERVALS[operator].format(number)}\cap {domain}"


def _other_residues(match: re.Match[str]) -> str:
    """Returns n ≡ 1, 2 (mod 3) for numbers that are not divisible by 3."""
    groups = match.groupdict()
    modulus = int(groups["modulus"] or groups["divisor"] or groups["mod"])
    if not 2 <= modulus <= _MOST_RESIDUES:
        return ""
    excluded = {int(number) % modulus for number in (groups["excluded"] or "0").split(",")}
    residues = [str(number) for number in range(modulus) if number not in excluded]
    name = groups["name"] or groups["divided"] or groups["left"]
    congruences = rf"{','.join(residues)}\pmod{{{modulus}}}"
    if not residues or not name:
        return congruences if len(residues) == 1 else ""
    return rf"{name}\equiv {congruences}"


def _figure(match: re.Match[str]) -> str:
    who = match["who"].replace("right isosceles", "isosceles right").removesuffix("-angled")
    return rf"\text{{{who} triangle}}"


def _residue(match: re.Match[str]) -> str:
    groups = match.groupdict()
    name = groups.get("name") or groups.get("after")
    parity = groups.get("parity")
    modulus = "2" if parity else match["modulus"].strip()
    residue = "1" if parity == "odd" else "0"
    congruence = rf"{residue}\pmod{{{modulus}}}"
    return rf"{name}\equiv {congruence}" if name else congruence


def _converging(match: re.Match[str]) -> str:
    kind = (match["how"] or match["after"] or "").strip()
    verb = "diverges" if match["verb"].startswith("diverge") else "converges"
    return rf"\text{{{kind}{verb}}}"


def _text(word: str) -> Callable[[re.Match[str]], str]:
    return lambda _: rf"\text{{{word}}}"


def _group(name: str) -> Callable[[re.Match[str]], str]:
    return lambda match: rf"\text{{{match[name]}}}"


# "Yes, it does not" and "No, it does" contradict themselves; "Yes, the limit does not exist" does
# not.
_AUXILIARY = r"(?:it|they|this|that|he|she|we|there) (?:is|are|was|do|does|can|will|has|have)"
_DENIAL = re.compile(rf"{_AUXILIARY}(?: ?not|n't)\b")
_ASSENT = re.compile(rf"{_AUXILIARY}\W*")


def _contradicts(word: str, clause: str) -> bool:
    if word in ("yes", "true"):
        return _DENIAL.match(clause) is not None
    return _ASSENT.fullmatch(clause) is not None


def _explained(match: re.Match[str]) -> str:
    clause = match["clause"]
    is_clear = not _CONTRADICTIONS.search(clause) and not _contradicts(match["word"], clause)
    return rf"\text{{{match['word']}}}" if is_clear else ""


def _truth(match: re.Match[str]) -> str:
    return r"\text{true}" if match["truth"] in ("true", "correct") else r"\text{false}"


# Three quarters, one half, a third.
_COUNT = "a|an|" + "|".join(word for word, number in NUMBER_WORDS.items() if 0 < number < 20)
_PARTS = {word: part for word, part in MULTIPLIERS.items() if part < 1} | {"halve": Fraction(1, 2)}
_PART = "|".join(_PARTS)


def _fraction(match: re.Match[str]) -> str:
    number = NUMBER_WORDS.get(match["above"], 1) * _PARTS[match["part"]]
    sign = "-" if match["sign"] else ""
    return rf"{sign}\frac{{{number.numerator}}}{{{number.denominator}}}"


def _quotient(above: str, below: str) -> str:
    return rf"\frac{{{NUMBER_WORDS.get(above, 1)}}}{{{NUMBER_WORDS.get(below, 1)}}}"


_TIMES = "second|minute|hour|day|week|month|year"
_NOT_A_NAME = words("not no or and if but maybe never either neither nobody")


def _named(match: re.Match[str]) -> str:
    spoken_words = match["who"].split()
    return "" if _NOT_A_NAME & {*spoken_words} else rf"\text{{{match['who']}}}"


_VERDICTS = dict.fromkeys(("don't reject", "fail to reject", "cannot reject"), "do not reject")
_SUBJECT = (
    r"(?:(?:the |this |that )?(?:given |improper )?(?:series|integral|sequence|sum|limit|function"
    r"|derivative|value|inverse|maximum|minimum|it)\s+)?"
)
_FORMS: list[tuple[re.Pattern[str], Callable[[re.Match[str]], str]]] = [
    (re.compile(pattern), write)
    for pattern, write in (
        # Sets.
        (r"no (?:real )?(?:numbers?|values?)(?: of [a-z])?", lambda _: r"\emptyset"),
        (rf"{_ALL}?positive (?P<parity>even|odd) (?:integers|numbers)", _enumerated),
        (rf"{_ALL}?negative integers", lambda _: r"\{-1,-2,-3,\ldots\}"),
        (
            rf"{_ALL}?(?:real )?{_NUMBERS} (?P<comparison>{_COMPARISON}) (?P<value>[^a-z]+) or "
            rf"(?P<other_comparison>{_COMPARISON}) (?P<other_value>[^a-z]+)",
            _compared_twice,
        ),
        (
            r"(?:the )?(?:closed )?interval (?:from|between) (?P<low>[^a-z]+) (?:to|and) "
            r"(?P<high>[^a-z,]+)"
            r",? \(?inclusive\)?",
            lambda match: f"[{match['low'].strip()},{match['high'].strip()}]",
        ),
        (r"(?:the )?identity function", lambda _: "f(x)=x"),
        (r"(?:the )?zero function", lambda _: "f(x)=0"),
        (
            r"(?:the )?(?:(?P<size>[2-9]) ?(?:x|×|\\times|by) ?(?P=size) )?identity matrix",
            _identity,
        ),
        (r"(?:the )?quaternion group(?: q ?_ ?8)?", lambda _: "Q_8"),
        (rf"{_ALL}?real {_NUMBERS}|{_ALL}reals?|{_ALL}{_NUMBERS}", lambda _: r"\mathbb{R}"),
        (
            r"(?:[a-z] (?:can be|is|may be) )?"
            rf"{_ALL}?(?:real )?{_NUMBERS} (?:\\in ?\\mathbb ?r |∈ ?ℝ )?(?:except|other than"
            rf"|besides|excluding|not equal to"
            r"|except for|apart from|but) (?:for |at |when )?(?P<values>.+)",
            _except,
        ),
        (
            rf"{_ALL}(?:real )?(?:numbers? |values? of )?"
            r"(?:[a-z] (?:such that|with|where|satisfying|for which) )?(?P<relation>[a-z]\s*"
            r"(?:\\ne|≠|[<>≤≥]|\\[gl]e).+)",
            lambda match: match["relation"],
        ),
        (
            rf"{_ALL}?(?P<sign>{_SIGN}) "
            rf"(?:(?:real )?{_NUMBERS}|(?P<domain>integers?|whole numbers))",
            _signed,
        ),
        (rf"(?:{_ALL}|the )?(?P<domain>{_DOMAIN})", lambda match: _DOMAINS[match["domain"]]),
        (rf"{_NAME} (?:is|must be|has to be) (?P<sign>{_SIGN})", _named_sign),
        (rf"{_NAME} (?:can be|is|may be) any real number", lambda _: r"\mathbb{R}"),
        (
            rf"{_NAME} (?:is )?not equal to {_VALUE}",
            lambda match: f"{match['name']}≠{match['value']}",
        ),
        (
            rf"(?:{_ALL}?(?:real )?(?:numbers?|values?) |(?:{_NAME} (?:is |must be |has to be )?)?)"
            rf"(?P<comparison>{_COMPARISON}) {_VALUE}",
            _compared,
        ),
        (
            rf"(?:{_ALL}?(?:real )?(?:numbers?|values?) |(?:{_NAME} is )?)(?:strictly )?between "
            r"(?P<low>[^a-z]+) and (?P<high>[^a-z,]+)(?P<inclusive>,? \(?inclusive\)?)?",
            _between,
        ),
        (
            rf"{_ALL}?(?P<positive>positive )?(?P<domain>{_DOMAIN})(?: (?P<name>[a-z]))? ?"
            rf"(?:(?:such that|with|which are|that are)(?: [a-z])? )?"
            rf"(?:{_RELATION_WORD}) ?{_VALUE}",
            _whole_compared,
        ),
        (
            rf"(?:{_NAME} (?:is |must be )?|(?:the )?function (?:f )?is )?"
            rf"{_ALL}?(?:an? )?(?P<parity>odd|even)"
            r"(?: (?:integers?|numbers?))?(?: (?P<after>[a-z]))?",
            _residue,
        ),
        (
            rf"(?:{_NAME} (?:is|must be) (?:an? )?)?{_ALL}?(?:integers |integral )?"
            r"(?:multiples? of|divisible by) (?P<modulus>[0-9]+)",
            _residue,
        ),
        (
            rf"{_ALL}?(?:(?:integers?|numbers?) )?(?:(?P<name>[a-z]) )?(?:is "
            rf"|are )?of the form (?P<value>[^,]+)",
            lambda match: (f"{match['name']}=" if match["name"] else "") + match["value"],
        ),
        (r"(?P<modulus>[0-9]+) ?(?:\\mid|∣) ?(?P<name>[a-z])", _residue),
        (
            rf"{_ALL}?(?:integers? |numbers? )?(?:(?P<name>[a-z]) )?(?:is |are |that are )?"
            r"not (?:divisible by|(?:an? )?multiples? of) (?P<modulus>[0-9]+)"
            r"|(?P<divisor>[0-9]+) ?(?:\\nmid|∤) ?(?P<divided>[a-z])"
            r"|(?P<left>[a-z]) ?(?:\\not ?\\equiv|≢|\\not ?≡) ?(?P<excluded>-?[0-9]+"
            r"(?: ?, ?-?[0-9]+)*) ?"
            r"(?:\\pmod|\(mod) ?(?P<mod>[0-9]+)\)?",
            _other_residues,
        ),
        (
            rf"{_ALL}?(?:the )?(?:primes|prime numbers)|\\ ?[a-z] prime ?\\"
            r"|[a-z] (?:is )?(?:an? )?prime(?: number)?",
            _text("primes"),
        ),
        (
            r"(?:an? |(?:the )?triangle is )?(?P<who>isosceles right|right isosceles|isosceles"
            r"|equilateral|scalene|obtuse|acute|right|right-angled)(?: triangle)?",
            _figure,
        ),
        (
            r"(?:there (?:is|are|exists?) )?no (?:real |such )?solutions?(?: exists?)?"
            r"|has no (?:real )?solutions?|empty set|the empty set",
            lambda _: r"\emptyset",
        ),
        # Numbers, ratios and curves.
        (rf"(?P<sign>minus |negative )?(?P<above>{_COUNT}) (?P<part>{_PART})s?", _fraction),
        (r"(?P<above>a|one) dozen", lambda _: "12"),
        (r"(?:exactly|precisely) (?P<value>[^a-z]*[0-9][^a-z]*)", lambda match: match["value"]),
        (
            r"(?:negative|minus) (?P<value>[0-9][0-9.,]*)",
            lambda match: f"-{match['value']}",
        ),
        (
            r"(?P<above>[0-9]+) (?:in|out of) (?:every )?(?P<below>[0-9]+)",
            lambda match: rf"\frac{{{match['above']}}}{{{match['below']}}}",
        ),
        (
            rf"(?P<above>{_COUNT}) (?:in|out of) (?:every )?(?P<below>{_COUNT})",
            lambda match: _quotient(match["above"], match["below"]),
        ),
        (
            rf"(?:after|in) (?P<time>[0-9.]+ (?:{_TIMES})s?)",
            lambda match: rf"\text{{{match['time']}}}",
        ),
        (r"(?:at|when) (?P<relation>[a-z] ?= ?[^a-z]+)", lambda match: match["relation"]),
        (
            r"(?P<first>[0-9]+) to (?P<second>[0-9]+)",
            lambda match: f"{match['first']}:{match['second']}",
        ),
        # Groups.
        (
            r"(?:the )?(?:symmetric|dihedral|alternating|cyclic|quaternion) group "
            r"(?P<letter>[sdacq]) ?_ ?(?P<order>[0-9]+)",
            lambda match: f"{match['letter'].upper()}_{{{match['order']}}}",
        ),
        (
            r"(?:(?:the|a) )?cyclic(?: group)? of order (?P<order>[0-9]+)",
            lambda match: rf"\mathbb{{Z}}_{{{match['order']}}}",
        ),
        (
            r"(?:the )?symmetric group on (?P<order>[0-9]+) (?:letters|elements|symbols|points)",
            lambda match: f"S_{{{match['order']}}}",
        ),
        (r"(?:the )?klein(?:'s)? (?:four|4)[- ]?group", lambda _: "V_4"),
        # Conclusions.
        (rf"(?P<word>yes|no|true|false)\b[.,;:!]?\s+(?P<clause>{_EXPLANATION}.*)", _explained),
        (rf"(?P<word>yes|no|true|false)\b\s*[.,;:(]\s*(?P<clause>.*\b{_VERB}\b.*)", _explained),
        (
            rf"{_SUBJECT}(?:diverges?|tends|goes) to (?P<sign>negative |minus |-)?infinity",
            lambda match: r"-\infty" if match["sign"] else r"\infty",
        ),
        (
            rf"{_SUBJECT}(?:converges?|tends|is equal|diverges?) to (?:the value )?{_VALUE}",
            lambda match: match["value"],
        ),
        (
            r"(?:the (?:statement|claim|assertion|proposition|answer)|it|this) is (?:indeed )?"
            r"(?P<truth>true|false|correct|incorrect)",
            _truth,
        ),
        (
            rf"{_SUBJECT}(?:is )?(?P<how>absolutely |conditionally )?(?P<verb>converges?|convergent"
            r"|diverges?|divergent)(?P<after> absolutely| conditionally)?",
            _converging,
        ),
        (
            rf"{_SUBJECT}(?:do(?:es)? not exist|doesn't exist|is undefined|undefined|d\.?n\.?e\.?)"
            r"|(?:there (?:is|are|exists?) )?no such [a-z]+(?: exists?)?",
            _text("does not exist"),
        ),
        (
            r"(?:the )?(?P<who>[a-z]+(?: [a-z]+)?) (?:always )?"
            r"(?:wins|win|will win|has a winning strategy|can always win|(?:is"
            r"|will be) the winner)",
            _named,
        ),
        (
            r"(?:we )?(?P<who>(?:do not |don't |fail to |cannot )?(?:reject|accept)) "
            r"(?:the null hypothesis|the null|h ?_ ?0|h0)",
            lambda match: rf"\text{{{_VERDICTS.get(match['who'], match['who'])} null}}",
        ),
        (r"(?:there are |it has )?infinitely many(?: solutions?)?", _text("infinitely many")),
        (rf"(?:it is |on )(?P<day>{_WEEKDAY})", _group("day")),
        (
            r"(?:it|the (?:curve|graph|shape|figure|surface|conic|conic section|triangle))"
            r" is (?:an? |the )?(?P<who>[a-z]+(?: [a-z]+)?)",
            _named,
        ),
    )
]


@functools.lru_cache(4096)
def spoken(text: str) -> str:
    """Returns the notation of a whole answer in words; other answers unchanged."""
    if len(text) > LONGEST or not _WORD_OF_THREE.search(text):
        return text
    plain = _SPACES.sub(" ", _MARKUP.sub(" ", text)).strip(" .!,").lower()
    for pattern, write in _FORMS:
        match = pattern.fullmatch(plain)
        if match is not None:
            return write(match) or text
    return text
