r"""Quantities in the notation of the package siunitx: \SI{9.8}{\metre\per\second\squared}."""

import re

from jzero.answers.quantities import PREFIXES

_QUANTITY = re.compile(
    r"\\(?:SI|qty)\s*\{(?P<number>[^{}]*)\}\s*\{(?P<unit>[^{}]*)\}|\\(?:si|unit)\s*\{(?P<bare>[^{}]*)\}"
)
_PIECE = re.compile(r"\\([A-Za-z]+)|([^\\\s]+)")
_SPOKEN = {"degreeCelsius": "degrees Celsius", "celsius": "degrees Celsius", "percent": "percent"}


def without_siunitx(text: str) -> str:
    """Returns a text with the quantities of siunitx as numbers with units in words."""
    return _QUANTITY.sub(_written, text) if "\\" in text else text


def _written(match: re.Match[str]) -> str:
    unit = match["unit"] if match["bare"] is None else match["bare"]
    return rf"{match['number'] or ''}\text{{ {_in_words(unit)}}}"


def _in_words(unit: str) -> str:
    spoken = ""
    for macro, text in _PIECE.findall(unit):
        # \kilo\gram is one word.
        is_prefix = macro in PREFIXES
        spoken += _SPOKEN.get(macro) or macro or text
        spoken += "" if is_prefix else " "
    return spoken.strip()
