r"""Cuts the LaTeX or plain text of an answer into tokens.

A token is a string: a number ("1.5"; "0.¯6" is 0.666...), a letter ("x"), a word after a quotation
mark ('"meters'), a command ("\frac"), or one character of mathematics ("+", "≤", "("). All
spellings of an operation have one token: \cdot, \times and * are all "*".
"""

import functools
import itertools
import re
from typing import NamedTuple

from jzero.answers.characters import without_last_punctuation, written_out
from jzero.answers.declarations import with_declarations
from jzero.answers.labels import with_labels
from jzero.answers.languages import in_english
from jzero.answers.layout import simplified
from jzero.answers.names import with_names
from jzero.answers.numerals import plain_numerals, without_python
from jzero.answers.phrases import without_lead_in, without_remarks
from jzero.answers.quantities import LETTERS_OF_UNITS
from jzero.answers.siunitx import without_siunitx
from jzero.answers.spoken import spoken
from jzero.answers.units import MULTIPLIERS, UNIT_WORDS
from jzero.answers.vocabulary import COMMANDS_WITHOUT_BACKSLASH, TOKENS, TYPESETTING, words

# Rewrites of the whole text, before it is cut: a text that must occur, a pattern, a replacement.
# Looking for the text first is much cheaper than the pattern, and most answers have none of
# these.
_REWRITES = [
    (needed, re.compile(pattern), replacement)
    for needed, pattern, replacement in (
        ("frac", r"(\\[dtc]?frac)\s*([0-9])\s*([0-9])", r"\1{\2}{\3}"),  # \frac12
        ("binom", r"(\\[dtc]?binom)\s*([0-9])\s*([0-9])", r"\1{\2}{\3}"),
        (".", r"(?<![0-9.])\.(?=[0-9¯])", "0."),
        ("\\circ", r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))", "°"),
        ("\\circ", r"(?<=[0-9])\s*\\circ(?![A-Za-z])", "°"),
        ("∘", r"\^\s*(?:\{\s*∘\s*\}|∘)|(?<=[0-9])\s*∘", "°"),
        ("°", r"\^\s*(?:\{\s*°\s*\}|°)", "°"),
        ("\\prime", r"\^\s*\{\s*\\prime\s*\\prime\s*\}", "''"),
        ("\\prime", r"\^\s*\{\s*\\prime\s*\\prime\s*\\prime\s*\}", "'''"),
        ("\\imath", r"\\imath(?![A-Za-z])", "i"),
        ("\\jmath", r"\\jmath(?![A-Za-z])", "j"),
        (
            "pprox",
            r"\A\s*(?:\\text\s*\{\s*)?[Aa]pprox(?:imately|\.)\s*\}?\s*(?=[-$\\0-9])",
            "≈",
        ),
        ("\\prime", r"\^\s*(?:\{\s*\\prime\s*\}|\\prime(?![A-Za-z]))", "'"),
        ("\\Delta", r"\\Delta\s*(?=[A-Z]{3}(?![A-Za-z]))", r"\\triangle "),
        # 154 pm is a length, 3 pm a time, and 1.5 \\mu C a charge. An ohm stands after a space.
        (
            "pm",
            r"((?<![0-9:.])(?:1[3-9]|[2-9][0-9]|[0-9]{3,}|[0-9]+\.[0-9]+)\s*(?:\\text\{\s*)?)pm(?![a-z])",
            r"\1picometer",
        ),
        ("\\mu", r"(?<=[0-9}])\s*\\mu\s*\\text\{\s*(?=[A-Za-z])", r"\\text{ u"),
        (
            "\\Omega",
            r"(?<=[0-9}])(?:(?:\s|\\,)+|(?=\\text))(?:\\text\{\s*([kMm]?)\s*\}\s*)?\\Omega\s*\Z",
            r"\\text{ \1Omega}",
        ),
        ("\\Omega", r"\\text\{\s*([kMm]?)\\Omega\s*\}", r"\\text{ \1Omega}"),
        # USD 50 and US$50 are $50.
        ("US", r"(?:\\text\s*\{\s*)?\bUSD?\s*\}?\s*(?=[0-9]|\\\$)(?:\\\$)?", r"\\$"),
        ("Rs", r"(?:\\text\s*\{\s*)?\bRs\.?\s*\}?\s*(?=[0-9])", "₹"),
        ("EUR", r"(?:\\text\s*\{\s*)?\bEUR\s*\}?\s*(?=[0-9])", "€"),
        (
            "hybridi",
            r"(?:\\text\s*\{\s*)?sp\}?\s*\^?\s*\{?\s*([23]?)\s*\}?\s*(?:\\text\s*\{)?\s*-?hybridi[sz](?:ed|ation)\s*\}?",
            r"sp^\1",
        ),
        ("isomorphic", r"\A\s*(?:\\text\s*\{)?\s*(?:G\s+is\s+)?isomorphic to\s*\}?", ""),
        ("L_", r"\b(P?[GS]L)\s*_\s*\{?\s*([0-9n])\s*\}?\s*\(", r"\\text{\1}(\2,"),
        (
            "\\ldots",
            r"\\\{\s*1\s*,\s*2\s*,\s*3\s*,\s*(?:4\s*,\s*)?\\ldots\s*\\\}",
            "ℤ₊",
        ),
        (
            "const",
            r"\+\s*(?:\\text\s*\{\s*)?(?:an? |the )?(?:arbitrary )?const(?:ant|\.)?"
            r"(?: of integration)?\s*\}?",
            "+C",
        ),
        ("div", r"\\text\s*\{\s*div\s*\}", r"\\nabla\\cdot "),
        ("curl", r"\\text\s*\{\s*curl\s*\}", r"\\nabla\\times "),
        ("rot", r"\\text\s*\{\s*rot\s*\}", r"\\nabla\\times "),
        ("grad", r"\\text\s*\{\s*grad\s*\}", r"\\nabla "),
        ("\\|", r"(?<=[A-Z])\s*\\\|\s*(?=[A-Z]{2}(?![A-Za-z]))", "∥"),
        ("light", r"\blight[- ]years?\b", "lightyear"),
        ("Å", r"\\text\{\s*Å", r"\\text{ angstrom"),
        ("Å", "Å", r"\\text{ angstrom}"),
        ("\\AA", r"\\AA(?![A-Za-z])", r"\\text{ angstrom}"),
        ("\\mathring", r"\\mathring\s*\{?\s*A\s*\}?", r"\\text{ angstrom}"),
        ("per cent", r"\bper cent\b", "percent"),
        ("\\mathbb", r"\\mathbb\s*(?:\{R\}|R)", "ℝ"),
        ("\\mathbb", r"\\mathbb\s*(?:\{Z\}|Z)", "ℤ"),
        ("\\mathbb", r"\\mathbb\s*(?:\{N\}|N)", "ℕ"),
        ("\\mathbb", r"\\mathbb\s*(?:\{Q\}|Q)", "ℚ"),
        ("\\mathbb", r"\\mathbb\s*(?:\{C\}|C)", "ℂ"),
        ("ℝ", r"ℝ\s*(?:\^\s*\{?\s*\+\s*\}?|_\s*\{?\s*>\s*0\s*\}?)", r"(0,\\infty)"),
        ("ℝ", r"ℝ\s*(?:\^\s*\{?\s*-\s*\}?|_\s*\{?\s*<\s*0\s*\}?)", r"(-\\infty,0)"),
        ("ℝ", r"ℝ\s*_\s*\{?\s*(?:\\geq?|≥)\s*0\s*\}?", r"[0,\\infty)"),
        ("ℝ", r"ℝ\s*\^\s*\{?\s*(?:\*|\\ast|\\times)\s*\}?", r"ℝ\\setminus\\{0\\}"),
        ("ℤ", r"ℤ\s*(?:\^\s*\{?\s*\+\s*\}?|_\s*\{?\s*(?:>\s*0|\+)\s*\}?)", "ℤ₊"),
        ("ℕ", r"ℕ\s*(?:\^\s*\{?\s*[+*]\s*\}?|_\s*\{?\s*(?:>\s*0|\+)\s*\}?)", "ℤ₊"),
        ("ℤ", r"ℤ\s*_\s*\{?\s*(?:\\geq?|≥)\s*0\s*\}?", "ℕ₀"),
        ("ℕ", r"ℕ\s*_\s*\{?\s*0\s*\}?", "ℕ₀"),
        ("ℤ", r"ℤ\s*/\s*\(?\s*([0-9]+|[a-z])\s*(?:ℤ\s*\)?|\)|(?![0-9a-z\\]))", r"ℤ_{\1}"),
        ("\\begin", r"\\begin\s*\{cases\}", r"\\cases "),
        ("\\end", r"(?:\\\\\s*)?\\end\s*\{cases\}", r"\\endcases "),
        ("\\begin", r"\\begin\s*\{vmatrix\}", r"\\vmatrix "),
        ("\\end", r"(?:\\\\\s*)?\\end\s*\{vmatrix\}", r"\\endvmatrix "),
        ("\\end", r"(?:\\\\\s*)?\\(begin|end)\s*\{pmatrix\}", r"\\\1 "),
    )
]

# `run` is letters, or an abbreviation such as D.N.E.
_LEXER = re.compile(
    r"""
    # A control space, a delimiter of formulas, and the article of "an ellipse" count as spaces.
    (?P<space>\s+|\\[,!;:>\s()\[\]]|\ban\s+(?=[a-z]{4}))
    |\\text\s*\{(?P<text>[^{}]*)\}
    # A recurring decimal, or a decimal with an exponent. A digit after a sign may be a term, as in
    # 2e-3x or 2e-3^n.
    |(?P<number>[0-9]*\.[0-9]*¯[0-9]+
        |(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)
            (?:[eE](?:[0-9]+|[-+][0-9]{2,}|[-+][0-9](?![0-9]|\s*(?:[A-Za-z.^!({]|\\(?!(?:[,;]\s*\\)?text\b)))))?)
    |\\(?P<command>[a-zA-Z]+)
    |(?P<run>(?:[A-Za-z]\.){2,}|[A-Za-z]+)
    |(?P<other>[ℤℕ][₊₀]|\{[,:]\}|\\\\|\\[{}%&|$]|\*\*|<=|>=|!=|!!|.)""",
    re.VERBOSE | re.DOTALL,
)
_SHAPES_OF_LETTERS = [
    (f"\\var{name}", name) for name in words("epsilon phi theta rho sigma kappa pi")
]
# Longer spaces would make the patterns of announcements take more than linear time.
_LONG_SPACE = re.compile(r"(\s\s)\s+")
# ]0,1[ is (0,1), and [0,1[ is [0,1).
_OPEN_INTERVAL = re.compile(
    r"(?P<low>\])(?P<inside>\s*[-+\\\w][^][(),;]*[,;][^][(),;]+)(?P<high>[][])"
    r"|\[(?P<closed>\s*[-+\\\w][^][(),;]*[,;][^][(),;]+)\["
)
# Commands after two backslashes, in a text that was escaped twice.
_ESCAPED_TWICE = re.compile(
    r"\\\\(?=(?:[A-Za-z]{2,}|[{}%$,;!(]|\[(?!\s*-?[0-9.]+\s*[a-z]{2}\s*\])))"
)


_CAPITALS_AFTER_LETTERS = re.compile("[a-z]+[A-Z]")
# f(x) = 0 for all x.
_FOR_ALL = re.compile(
    r"(?<=.)\s*,?\s*(?:(?:\\text\s*\{\s*|\s)for\s+(?:all|every|any)(?:\s+real)?(?:\s+numbers?)?\s*\}?\s*[a-z]"
    r"|\\forall\s*[a-z])\s*\}?(?:\s*\\in\s*\\mathbb\s*\{?[RNZQ]\}?)?\s*\Z"
)
_OF_ARGUMENT = re.compile(r"\s*(?:[A-Za-z]\s*\(\s*[a-z]\s*\)|[fgh](?=\s*\\equiv))\s*(?:=|\\equiv)")
# f \equiv 0.
_CONSTANT_FUNCTION = re.compile(r"(?<![A-Za-z\\])([fgh])\s*\\equiv\s*(?=-?[0-9])")
# \text{f(x) = 2x for all x}.
_EQUATION_IN_PROSE = re.compile(r"\\text\s*\{([A-Za-z]\([a-z]\) ?=[^{}\\]*)\}")
# f: x \mapsto x^2 is f(x) = x^2.
_MAPPED = re.compile(
    r"\A\s*(?:(?P<name>[A-Za-z])\s*(?::|\\colon)\s*)?(?P<argument>[a-z])\s*\\mapsto(?![a-z])"
)
_RUNS = re.compile("[A-Za-z]+")
_OPERATORS = words("sgn sign arctg lcm gcd arcsinh arccosh arctanh")
# Words that may follow a number without a space.
_WORDS = UNIT_WORDS | MULTIPLIERS.keys()

# 2e-3, which is 2·e - 3 if the answer has Euler's number, and 0.002 otherwise.
_AMBIGUOUS_NUMBER = re.compile(r"([0-9]+)e([-+])([0-9])")


def _with_round_brackets(match: re.Match[str]) -> str:
    if match["closed"]:
        return f"[{match['closed']})"
    return f"({match['inside']}{')' if match['high'] == '[' else ']'}"


@functools.lru_cache(4096)
def simplified_text(text: str) -> str:
    """Returns a text without layout and announcements, its numbers in digits and a point."""
    text = written_out(in_english(without_last_punctuation(text)))
    text = _LONG_SPACE.sub(r"\1", text)
    # In a text that was escaped once, two backslashes separate the rows of an environment.
    if "\\\\" in text and ("\\\\begin" in text or "\\begin" not in text):
        text = _ESCAPED_TWICE.sub(r"\\", text)
    text = plain_numerals(simplified(without_siunitx(without_python(text))))
    if "]" in text or "[" in text:
        text = _OPEN_INTERVAL.sub(_with_round_brackets, text)
    text = without_remarks(without_lead_in(text))
    if "\\mapsto" in text:
        text = _MAPPED.sub(lambda map: f"{map['name'] or 'f'}({map['argument']})=", text)
    if (prose := _EQUATION_IN_PROSE.fullmatch(text)) is not None:
        text = prose[1]
    if "\\equiv" in text and "mod" not in text:
        text = _CONSTANT_FUNCTION.sub(r"\1(x)=", text)
    if _OF_ARGUMENT.match(text):
        text = _FOR_ALL.sub("", text)
        if "mod" not in text:
            text = text.replace("\\equiv", "=", 1)
    notation = spoken(text)
    return notation if notation != text else with_labels(text)


def tokenize(text: str, units: frozenset[str] = frozenset()) -> list[str]:
    r"""Returns the tokens of `text`; the caller must not change the list.

    `units` are the runs of letters outside of \text that are symbols of units. All others, such as
    the mg of 2mg, are products of symbols.
    """
    # The cache would keep a call with the default and one that passes the same value apart.
    return _tokenize(text, units)


@functools.lru_cache(4096)
def _tokenize(text: str, units: frozenset[str]) -> list[str]:
    text = simplified_text(text)
    for needed, pattern, replacement in _REWRITES:
        if needed in text:
            text = pattern.sub(replacement, text)
    if "\\var" in text:
        for shape, other in _SHAPES_OF_LETTERS:
            # Two shapes in one answer are two letters.
            if shape in text and not re.search(rf"\\{other}(?![a-z])", text):
                text = text.replace(shape, f"\\{other}")
    tokens = []
    # Punctuation at the end is not part of an answer.
    for match in _LEXER.finditer(text.rstrip(" \n.,;:\\")):
        tokens += _tokens_of_match(match, False, units)
    return with_names(with_declarations(tokens))


class UnitLetters(NamedTuple):
    """The runs of letters in a text that are symbols of units, or products of symbols."""

    bare: frozenset[str]  # outside of \\text: 5 km, 2mg
    after_spaced_number: bool  # the first of them is separated from a plain number: 5 km
    in_prose: frozenset[str]  # inside of \\text


_NO_LETTERS = UnitLetters(frozenset(), False, frozenset())
_TWO_LETTERS = re.compile("[A-Za-z]{2}")
_SPACED_NUMBER = re.compile(r"\s*-?[0-9][0-9.,]*\s+\Z")


@functools.lru_cache(4096)
def unit_letters(text: str) -> UnitLetters:
    if not _TWO_LETTERS.search(text):
        return _NO_LETTERS
    text = simplified_text(text)
    bare: dict[str, int] = {}
    in_prose: set[str] = set()
    for match in _LEXER.finditer(text):
        if match.lastgroup == "run" and is_unit_symbol(match["run"]):
            bare.setdefault(match["run"], match.start())
        elif match.lastgroup == "text":
            in_prose |= {run for run in _RUNS.findall(match["text"]) if is_unit_symbol(run)}
    first = min(bare.values(), default=0)
    is_spaced = bool(bare) and _SPACED_NUMBER.fullmatch(text[:first]) is not None
    return UnitLetters(frozenset(bare), is_spaced, frozenset(in_prose))


def is_unit_symbol(letters: str) -> bool:
    """Returns whether letters are the symbol of a unit, but may also be a product: km, mg."""
    return letters in LETTERS_OF_UNITS or letters.removesuffix("s") in LETTERS_OF_UNITS


def with_euler_number(tokens: list[str]) -> list[str]:
    """Returns the tokens with 2e-3 as a difference.

    1e-3 and 2.5e-3 are still numbers: the difference would be e-3 or, most likely, 2.5·e - 3. So is
    2e-3 with a unit.
    """
    result = []
    for token, following in itertools.zip_longest(tokens, tokens[1:], fillvalue=""):
        match = _AMBIGUOUS_NUMBER.fullmatch(token)
        if match is not None and match[1] != "1" and following[:1] != '"':
            result += [match[1], "e", match[2], match[3]]
        else:
            result.append(token)
    return result


def _tokens_of_match(
    match: re.Match[str], in_prose: bool, units: frozenset[str] = frozenset()
) -> list[str]:
    r"""Returns the tokens of one match; `in_prose` is true inside \text{...}."""
    kind = match.lastgroup or ""
    piece: str = match[kind]
    if kind == "command" or (piece in COMMANDS_WITHOUT_BACKSLASH and not in_prose):
        return [] if piece in TYPESETTING else [TOKENS.get(piece, "\\" + piece)]
    # \text{sin} x is the function.
    if kind == "text" and _is_operator(match, piece.strip()):
        return [TOKENS.get(piece.strip(), "\\" + piece.strip())]
    if kind == "text":
        tokens = []
        for inner in _LEXER.finditer(piece):
            tokens += _tokens_of_match(inner, in_prose=True)
        return tokens
    if kind == "run" and piece not in ("and", "or"):
        return _tokens_of_letters(match, piece, in_prose, units)
    if kind == "space" or (in_prose and piece == "."):
        return []
    return [TOKENS.get(piece, piece)]


def _is_operator(match: re.Match[str], name: str) -> bool:
    r"""Returns whether \text holds a function's name, the form of \operatorname at this stage."""
    # 5 \text{sec} is a time.
    before = match.string[: match.start()].rstrip()
    is_second = name == "sec" and before[-1:].isdigit()
    return not is_second and (name in COMMANDS_WITHOUT_BACKSLASH or name in _OPERATORS)


def _tokens_of_letters(
    match: re.Match[str], letters: str, in_prose: bool, units: frozenset[str]
) -> list[str]:
    """Returns a run of letters as one word, or as symbols that are multiplied.

    A run is a word if it is in prose, is the name of a unit or one of the symbols `units`, is
    separated by spaces and has more than three letters, or has more than two letters, all capital:
    "4 sides" ends with a word, "xyz" and "mg" are products, "DNE" is a word.
    """
    start = match.start()
    letters = letters.replace(".", "")
    # am and pm are words in prose and after a number; elsewhere they are products.
    is_time = letters in ("AM", "PM", "am", "pm")
    if is_time and (in_prose or match.string[:start].rstrip()[-1:].isdigit()):
        return ['"' + letters.lower()]
    stands_alone = start == 0 or match.string[start - 1] in " \n"
    is_unit = len(letters) > 1 and letters.removesuffix("s") in _WORDS
    if is_unit_symbol(letters):
        is_unit = letters in units
    if letters.lower() in ("no", "yes") and letters == match.string.strip(" .!"):
        return ['"' + letters]
    # nRTV is a product, because words have their capitals first.
    stands_alone = stands_alone and not _CAPITALS_AFTER_LETTERS.match(letters)
    is_raised = match.string[match.end() :].lstrip()[:1] == "^"  # PDP^{-1} is a product
    is_capital = letters.isupper() and len(letters) > 2 and not is_raised
    is_abbreviation = letters in ("mod", "per") or is_capital
    if in_prose or is_unit or is_abbreviation or (stands_alone and len(letters) > 3):
        return ['"' + letters]
    return list(letters)
