"""Rounding that a question asks for: 3.14 answers 3.142 "to two decimal places"."""

import functools
import re
from fractions import Fraction

_COUNTS = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6}
_PLACES = {
    "integer": 0,
    "whole number": 0,
    "unit": 0,
    "dollar": 0,
    "degree": 0,
    "percent": 0,
    "tenth": 1,
    "hundredth": 2,
    "cent": 2,
    "thousandth": 3,
    "ten-thousandth": 4,
}
_TO_NEAREST = re.compile(rf"\bto the nearest (?P<place>{'|'.join(_PLACES)})\b", re.IGNORECASE)
_TO_PLACES = re.compile(
    rf"\b(?:to|with) (?:the )?(?P<count>[0-9]|{'|'.join(_COUNTS)}) (?:decimal (?:places?"
    rf"|digits?)|d\.?p\.?)",
    re.IGNORECASE,
)
_DECIMAL = re.compile(r"-?[0-9]+(?:\.(?P<decimals>[0-9]+))?")


@functools.lru_cache(1024)
def asked_places(question: str) -> int | None:
    """Returns the number of decimal places that a question asks for, None if it asks for none."""
    match = _TO_NEAREST.search(question)
    if match is not None:
        return _PLACES[match["place"].lower()]
    match = _TO_PLACES.search(question)
    if match is None:
        return None
    count = match["count"].lower()
    return _COUNTS[count] if count in _COUNTS else int(count)


def is_rounded_as_asked(answer: str, gold: str, question: str) -> bool:
    """Returns whether an answer is a longer decimal gold, rounded as the question asks."""
    places = asked_places(question)
    match, gold_match = _DECIMAL.fullmatch(answer), _DECIMAL.fullmatch(gold)
    if places is None or match is None or gold_match is None:
        return False
    if len(match["decimals"] or "") != places or len(gold_match["decimals"] or "") <= places:
        return False
    # Halves may be rounded up or to even.
    distance = abs(Fraction(answer) - Fraction(gold))
    return distance <= Fraction(1, 2 * 10**places)
