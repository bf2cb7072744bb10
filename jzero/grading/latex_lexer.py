r"""Cuts the LaTeX or plain text of an answer into tokens.

A token is a string: a number ("1.5"; "0.¯6" is 0.666...), a letter ("x"), a word after a quotation
mark ('"meters'), a command ("\frac"), or one character of mathematics ("+", "≤", "("). Whatever has
several spellings has one token: \cdot, \times and * are all "*".
"""

import functools
import re

from jzero.grading.characters import written_out
from jzero.grading.units import MULTIPLIERS, UNIT_WORDS
from jzero.grading.vocabulary import COMMANDS_WITHOUT_BACKSLASH, TOKENS, TYPESETTING

# Rewrites of the whole text, before it is cut.
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<!\\)\$", " "),  # $x$ is x
        (r"(\\[dtc]?(?:frac|binom))\s*([0-9])\s*([0-9])", r"\1{\2}{\3}"),  # \frac12
        (r"(?<![0-9.])\.(?=[0-9])", "0."),
        (r"(\.[0-9]*)\\overline\s*\{?([0-9]+)\}?", r"\1¯\2"),  # 0.1\overline{6}
        (r"\^\s*\{?\s*\\circ\s*\}?", "°"),
        (r"\^\s*\{?\s*\\prime\s*\}?", "'"),
        (r"\bper cent\b", "percent"),
        (r"\\mathbb\s*\{?R\}?", "ℝ"),
        (
            r"(?:\\\\\s*)?\\(begin|end)\s*\{(?:[pb]?matrix|array)\}(?:\{[lcr|\s]*\})?",
            r"\\\1 ",
        ),
    )
]

# `grouped` is a number with separators of thousands. `run` is letters, or an abbreviation as D.N.E.
_LEXER = re.compile(
    r"""(?P<space>[\s~]+|\\[,!;:>\s()\[\]]|\ban\s+(?=[a-z]{4}))
    |\\(?:text(?:bf|it|rm|normal)?|mbox|mathrm|operatorname)\s*\{(?P<text>[^{}]*)\}
    |(?P<grouped>[0-9]{1,3}
        (?:(?:,|\{,\}|\\,|[ ]|,\s*\\!\s*|\\!\s*,\s*|\\[ ])[0-9]{3}(?![0-9]))+
        (?:\.[0-9]+)?)
    |(?P<number>[0-9]*\.[0-9]*¯[0-9]+
        |(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)
            (?:[eE](?:[0-9]+|[-+][0-9]{2,}|[-+][0-9](?![0-9]|\s*[A-Za-z.^!({\\])))?)
    |\\(?P<command>[a-zA-Z]+)
    |(?P<run>(?:[A-Za-z]\.){2,}|[A-Za-z]+)
    |(?P<other>\{[,:]\}|\\\\|\\[{}%&|$]|\*\*|<=|>=|!=|!!|.)""",
    re.VERBOSE | re.DOTALL,
)


# Words that may follow a number without a space.
_WORDS = UNIT_WORDS | MULTIPLIERS.keys()

# 2e-3, which is 2·e - 3 where the answer has Euler's number, and 0.002 elsewhere.
_AMBIGUOUS_NUMBER = re.compile(r"([0-9]+)e([-+])([0-9])")


@functools.lru_cache(4096)
def tokenize(text: str) -> list[str]:
    """Returns the tokens of `text`; the caller must not change the list."""
    if "\\begin" not in text:  # where \\ ends a row
        text = text.replace("\\\\", "\\")  # the text was escaped twice
    text = written_out(text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    tokens = []
    for match in _LEXER.finditer(text.rstrip(" \n.,;\\")):
        tokens += _tokens_of_match(match, in_prose=False)
    return tokens


def with_euler_number(tokens: list[str]) -> list[str]:
    """Returns the tokens with 2e-3 as a difference.

    1e-3 and 2.5e-3 stay numbers: the difference would be e-3 or, most likely, 2.5·e - 3.
    """
    result = []
    for token in tokens:
        match = _AMBIGUOUS_NUMBER.fullmatch(token)
        is_ambiguous = match is not None and match[1] != "1"
        result += [match[1], "e", match[2], match[3]] if match and is_ambiguous else [token]
    return result


def _tokens_of_match(match: re.Match[str], in_prose: bool) -> list[str]:
    r"""Returns the tokens of one match; `in_prose` is true inside \text{...}."""
    kind = match.lastgroup or ""
    piece: str = match[kind]
    if kind == "command" or (piece in COMMANDS_WITHOUT_BACKSLASH and not in_prose):
        return [] if piece in TYPESETTING else [TOKENS.get(piece, "\\" + piece)]
    if kind == "text":
        tokens = []
        for inner in _LEXER.finditer(piece):
            tokens += _tokens_of_match(inner, in_prose=True)
        return tokens
    if kind == "run" and piece not in ("and", "or"):
        return _tokens_of_letters(match, piece, in_prose)
    if kind == "grouped":
        return _tokens_of_grouped_number(match, piece)
    if kind == "space" or (in_prose and piece == "."):
        return []
    return [TOKENS.get(piece, piece)]


def _tokens_of_letters(match: re.Match[str], letters: str, in_prose: bool) -> list[str]:
    """Returns a run of letters as one word, or as symbols that are multiplied.

    A run is a word if it is in prose, is a unit, stands alone with more than three letters, or has
    more than two capitals only: "4 sides" ends with a word, "xyz" is a product, "DNE" is a word.
    """
    start = match.start()
    stands_alone = start == 0 or match.string[start - 1] in " \n"
    is_unit = len(letters) > 1 and letters.removesuffix("s") in _WORDS
    is_abbreviation = letters.isupper() and len(letters) > 2
    if in_prose or is_unit or is_abbreviation or (stands_alone and len(letters) > 3):
        return ['"' + letters.replace(".", "")]
    return list(letters)


def _tokens_of_grouped_number(match: re.Match[str], grouped: str) -> list[str]:
    """Returns 1,200 as one number, but inside open brackets as several: (1,200) is a pair."""
    before = match.string[: match.start()]
    opened = len(re.findall(r"[(\[]|\\\{", before))
    closed = len(re.findall(r"[)\]]|\\\}", before))
    if opened > closed and not set(grouped) & set("\\{"):
        return re.findall(r"[0-9.]+|,", grouped)
    return [re.sub(r"[^0-9.]", "", grouped)]
