r"""Declarations of parameters in words or brackets, as tokens of one form: k \in Z after a comma.

"x = 2k\pi for any integer k", "x = 2k\pi where k is an integer" and "x = 2k\pi (k \in Z)" have the
tokens of "x = 2k\pi, k \in Z".
"""

import re

from jzero.answers.vocabulary import words

_CUE = frozenset(
    f'"{word}'
    for word in words(
        "for where with when whenever provided if integer integers real any all every constant"
    )
)
_RELATIONS = frozenset("∈≥>≠=")
_SEPARATOR = "\x1f"  # in no token
_LETTER = r'"?(?P<name>[A-Za-z])'
_START = '(?:[,;]\x1f)?(?:\\(\x1f)?(?:"(?:for|where|with|and|when)\x1f)?'
_END = "(?P<end>\x1f\\))?"
_QUANTIFIER = '(?:"(?:any|all|every|each|some|arbitrary)\x1f)?'
_KIND = '"(?P<kind>integers?|real|natural)(?:\x1f"(?:numbers?|values?))?'
_BEGINS = '(?:"(?:is|are)\x1f)(?:"(?:an?|any|some|arbitrary)\x1f)?'
_FORMS = [
    re.compile(f"(?:(?<=\x1f)|^){form}{_END}(?=\x1f|$)")
    for form in (
        # for any integer k; where k is an integer; (k in Z)
        f'(?:[,;]\x1f)?(?:\\(\x1f)?"(?:for|where|with)\x1f{_QUANTIFIER}{_KIND}\x1f{_LETTER}',
        f"{_START}{_LETTER}\x1f{_BEGINS}{_KIND}",
        f'[,;]\x1f{_LETTER}\x1f(?:"an\x1f)?{_KIND}',
        f"(?:[,;]\x1f)?\\(\x1f{_LETTER}\x1f∈\x1f(?P<domain>[ℤℕ][₊₀]?|\\\\real)",
        f'(?:[,;]\x1f)?"(?:for|where|with|and)\x1f{_QUANTIFIER}{_LETTER}\x1f∈'
        "\x1f(?P<domain>[ℤℕ][₊₀]?|\\\\real)",
    )
]
# for n >= 1; (x != 1) after a formula; (n = 0, 1, 2, ...)
_NUMBERS = "(?:-\x1f)?[0-9][0-9.]*"
_RESTRICTION = re.compile(
    '(?<=\x1f)(?:[,;]\x1f)?(?:(?P<opened>\\(\x1f)|"(?:for|where|with|when|whenever|provided|if)\x1f)'
    f'(?:"that\x1f)?{_QUANTIFIER}(?:"integers?\x1f)?{_LETTER}\x1f'
    f"(?:(?P<relation>[≥>≠])\x1f(?P<number>{_NUMBERS})"
    f"|=\x1f(?P<first>[01])(?:\x1f,\x1f[0-9]+)+\x1f,\x1f\\\\ldots)(?P<closed>\x1f\\))?\\Z"
)
# for nonnegative integers k
_SIGNED = re.compile(
    '(?<=\x1f)(?:[,;]\x1f)?(?:\\(\x1f)?"(?:for|where|with)\x1f'
    f'{_QUANTIFIER}(?:{_LETTER}\x1f(?:"(?:is|are)\x1f)(?:"(?:an?|any|some)\x1f)?)?'
    '"(?P<sign>nonnegative|positive|non(?=\x1f-\x1f"negative))(?:\x1f-\x1f"negative)?'
    '\x1f"integers?(?:\x1f"?(?P<after>[A-Za-z]))?(?:\x1f\\))?\\Z'
)
# (a, b ∈ ℝ) after a formula
_SEVERAL = re.compile(
    "(?<=\x1f)(?:[,;]\x1f)?\\(\x1f(?P<names>[A-Za-z](?:\x1f,\x1f[A-Za-z])+)\x1f∈\x1f"
    "(?P<domain>[ℤℕ][₊₀]?|\\\\real)\x1f\\)\\Z"
)
# for some constant c; where c and d are arbitrary constants
_CONSTANTS = re.compile(
    '(?:(?<=\x1f)|^)(?:[,;]\x1f)?(?:\\(\x1f)?"(?:for|where|with)\x1f'
    '(?:(?:"(?:any|some|all|an?|arbitrary|real)\x1f)*"constants?'
    '(?:\x1f(?:"[A-Za-z]|[A-Za-z]|,|and|_|[0-9]))*'
    '|(?:"?[A-Za-z](?:\x1f_\x1f[0-9])?\x1f(?:[,]\x1f)?(?:and\x1f)?)+'
    '"(?:is|are)\x1f(?:"(?:any|some|an?|arbitrary|real|the)\x1f)*"constants?'
    '(?:\x1f"of\x1f"integration)?)(?:\x1f\\))?\\Z'
)
_DOMAINS = {"integer": "ℤ", "natural": "ℕ", "real": "\\real"}


def with_declarations(tokens: list[str]) -> list[str]:
    r"""Returns the tokens with , k ∈ ℤ for a declaration in words, or in brackets at the end."""
    if _CUE.isdisjoint(tokens) and not ("(" in tokens and not _RELATIONS.isdisjoint(tokens)):
        return tokens
    text = _CONSTANTS.sub("", _SEPARATOR.join(tokens))
    text = _SEVERAL.sub(",\x1f\\g<names>\x1f∈\x1f\\g<domain>", text)
    text = _SIGNED.sub(_with_sign, text)
    text = _RESTRICTION.sub(_restricted, text)
    for form in _FORMS:
        text = form.sub(_declared, text)
    return text.strip(_SEPARATOR).split(_SEPARATOR)


def _with_sign(match: re.Match[str]) -> str:
    name = match["name"] or match["after"]
    if name is None:
        return match[0]
    return _SEPARATOR.join((",", name, "≥", "1" if match["sign"] == "positive" else "0"))


def _restricted(match: re.Match[str]) -> str:
    if bool(match["opened"]) != bool(match["closed"]):
        return match[0]
    relation, number = match["relation"] or "≥", match["number"] or match["first"]
    return _SEPARATOR.join((",", match["name"], relation, number))


def _declared(match: re.Match[str]) -> str:
    groups = match.groupdict()
    domain = groups.get("domain") or _DOMAINS[groups["kind"].removesuffix("s")]
    if ("(" in match[0]) != bool(groups["end"]):
        return match[0]
    return _SEPARATOR.join((",", groups["name"], "∈", domain))
