"""Dates in words: January 5, 5 January 2024, Jan. 5th, 2024."""

from collections.abc import Sequence

from jzero.answers.expressions import Node
from jzero.answers.vocabulary import words

_MONTHS = (
    "january",
    "february",
    "march",
    "april",
    "may",
    "june",
    "july",
    "august",
    "september",
    "october",
    "november",
    "december",
)
_DAY_ENDINGS = words("st nd rd th")
_WORDS_BETWEEN = words("of the on")
MAX_TOKENS = 12


def date_of(tokens: Sequence[str]) -> Node | None:
    """Returns a node named month-day or month-day-year, None if the tokens are not a date."""
    if len(tokens) > MAX_TOKENS or not any(token[:1] == '"' for token in tokens):
        return None
    months, numbers = [], []
    for token in tokens:
        word = token.removeprefix('"').lower()
        if token == "," or word in _DAY_ENDINGS or word in _WORDS_BETWEEN:
            continue
        if token.isdigit():
            numbers.append(int(token))
        elif token[:1] == '"' and _month(word):
            months.append(_month(word))
        else:
            return None
    # One month, a day and perhaps a year, in any order of day and month.
    if len(months) != 1 or not 1 <= len(numbers) <= 2:
        return None
    # In all accepted orders the day comes before the year.
    day, *year = numbers
    if not 1 <= day <= 31:
        return None
    return Node("date", name="-".join(map(str, (*months, day, *year))))


def _month(word: str) -> int:
    """Returns the number of a month, 0 if the word is not a month. Three letters are enough."""
    for number, name in enumerate(_MONTHS, start=1):
        if word == name or (len(word) in (3, 4) and name.startswith(word)):
            return number
    return 0


def same_date(name: str, other: str) -> bool:
    """Returns whether two dates are the same. The year may be missing on either side."""
    parts, other_parts = name.split("-"), other.split("-")
    # zip stops where the year is missing.
    return all(one == second for one, second in zip(parts, other_parts, strict=False))
