r"""Letters that are complex numbers, such as z of z\bar z = |z|^2.

All other letters are real, and so is z unless an answer has a conjugate, a real part or a modulus,
or the question is about complex numbers.
"""

import re

from jzero.answers.expressions import COMPLEX, Node, symbol

_USUAL = frozenset("zw")
_LETTER = re.compile(r"(?<![A-Za-z\\])[a-z](?![A-Za-z])")
_MAY_BE_COMPLEX = re.compile(r"(?<![A-VX-Ya-vxy\\])[zw](?![A-Za-z])|\\Re|\\Im|\b(?:Re|Im)\b")
_CONJUGATE = re.compile(
    r"\\(?:bar|overline|conj)\s*\{?[^{}]*(?<![A-VX-Ya-vxy\\])[zw](?![A-Za-z])"
    r"|(?<![A-VX-Ya-vxy\\])[zw]\s*\^\s*\{?\s*(?:\*|\\ast)"
)
_PART = re.compile(
    r"(?:\\(?:Re|Im)|\\(?:operatorname|text|mathrm)\s*\{\s*(?:Re|Im)\s*\}|\b(?:Re|Im))"
    r"\s*[({]?\s*([a-z])(?![A-Za-z])"
)
_MODULUS = re.compile(r"(?:\||\\lvert)[^|]*(?<![A-VX-Ya-vxy\\])[zw](?![A-Za-z])[^|]*(?:\||\\rvert)")
_INEQUALITY = re.compile(r"[<>≤≥∈]|\\(?:l|g)(?:e|eq|t|eqslant)\b|\\in\b")
_IS_ABOUT_COMPLEX = re.compile(r"complex|imaginary|mathbb\s*\{?C|real part|i\^2\s*=", re.IGNORECASE)


def is_about_complex_numbers(question: str) -> bool:
    return _IS_ABOUT_COMPLEX.search(question) is not None


def letters_of_complex_numbers(answer: str, gold: str, question: str) -> frozenset[str]:
    """Returns the letters that are complex numbers in both answers."""
    texts = (answer, gold)
    if not any(map(_MAY_BE_COMPLEX.search, texts)):
        return frozenset()
    letters = {letter for text in texts for letter in _PART.findall(text)}
    if letters or any(map(_CONJUGATE.search, texts)) or is_about_complex_numbers(question):
        return _USUAL | letters
    # Next to x and y, the modulus of z is that of a coordinate.
    others = {letter for text in texts for letter in _LETTER.findall(text)} - _USUAL - {"i", "e"}
    has_modulus = any(map(_MODULUS.search, texts)) and all(map(_MAY_BE_COMPLEX.search, texts))
    is_real = any(map(_INEQUALITY.search, texts))  # -2 < z < 2 is |z| < 2
    return _USUAL if has_modulus and not others and not is_real else frozenset()


def is_complex(node: Node) -> bool:
    return node.kind == "symbol" and node.name.startswith(COMPLEX)


def conjugate_of_name(name: str, letters: frozenset[str]) -> Node | None:
    r"""Returns the conjugate of z for the name of \bar z or \overline{zw}, None for other names."""
    accent, _, written = name.partition(" ")
    if accent != "bar" or not set(written) <= letters:
        return None
    factors = tuple(symbol(COMPLEX + letter) for letter in written)
    return Node("conjugate", factors if len(factors) == 1 else (Node("multiply", factors),))
