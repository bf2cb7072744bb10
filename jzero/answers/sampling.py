"""The points at which the symbols of two formulas are sampled, to compare the formulas.

Formulas of arithmetic, of functions such as sin and of whole powers are the same if they agree at a
few points. Others consist of pieces: 12-x is |12-x| as long as x is small, and the ceiling of x,
minus one, is the floor of x unless x is whole. So there are groups of points:

- BASIC_POINTS: small reals, positive at first, of either sign later.
- WIDE_POINTS: reals of all sizes and signs, for formulas of pieces.
- WHOLE_POINTS: whole numbers, small and large, for floors, ceilings and powers such as (-1)^n.
  At INDEX_POINTS, only letters such as n are whole, and the other symbols are real.
- PART_POINTS: halves, thirds, quarters and fifths, at which floors of reals may also step.

A sample depends only on the symbol's name and the point.
"""

import functools
import random
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

# Letters that are whole numbers in formulas that round them, or have them as powers of -1.
INDEX_LETTERS = frozenset("jklmnpqKMN")


class Point(NamedTuple):
    """The range that symbols are sampled from."""

    low: float
    high: float
    signs: tuple[int, ...] = (1,)
    whole: str = ""  # symbols that are whole numbers: "", "all" or "letters" for INDEX_LETTERS
    parts: int = 1  # above 1, symbols are multiples of 1/parts that are not whole

    @property
    def may_be_negative(self) -> bool:
        return -1 in self.signs


BOTH = (1, -1)
_BASIC_RANGES = ((0.3, 1.0), (1.0, 3.0), (3.0, 8.0), (0.01, 0.3), (1.0, 2.0))
_WIDE_RANGES = (
    (8, 14),
    (14, 25),
    (25, 45),
    (45, 80),
    (80, 140),
    (140, 400),
    (400, 2000),
    (1e4, 1e6),
    (1e10, 1e13),
    (1e15, 1e18),
)
_LARGE_WHOLE_RANGES = ((30, 100), (100, 1000), (1000, 1100), (10**4, 10**5))
_SMALL_WHOLE = range(-6, 30)  # all of these numbers are sampled

_BASIC = [Point(low, high) for low, high in _BASIC_RANGES]
_BASIC += [Point(low, high, BOTH) for low, high in _BASIC_RANGES]
_WIDE = [Point(low, high, (1,)) for low, high in _WIDE_RANGES]
_WIDE += [Point(low, high, (-1,)) for low, high in _WIDE_RANGES]
_WIDE += [Point(low, high, BOTH) for low, high in _WIDE_RANGES]
_WHOLE = [Point(low, high, BOTH, "all") for low, high in _LARGE_WHOLE_RANGES]
_WHOLE += [Point(_SMALL_WHOLE[0], _SMALL_WHOLE[-1], BOTH, "all") for _ in _SMALL_WHOLE]
_INDEX: list[Point] = []
for _low, _high in _BASIC_RANGES:
    _INDEX += 4 * [Point(_low, _high, BOTH, "letters")]
_PARTS: list[Point] = []
for _num_parts in (2, 3, 4, 5):
    _PARTS += (_num_parts + 2) * [Point(-6, 30, BOTH, parts=_num_parts)]

POINTS = (*_BASIC, *_WIDE, *_WHOLE, *_INDEX, *_PARTS)
BASIC_POINTS = range(len(_BASIC))
WIDE_POINTS = range(BASIC_POINTS.stop, BASIC_POINTS.stop + len(_WIDE))
WHOLE_POINTS = range(WIDE_POINTS.stop, WIDE_POINTS.stop + len(_WHOLE))
INDEX_POINTS = range(WHOLE_POINTS.stop, WHOLE_POINTS.stop + len(_INDEX))
PART_POINTS = range(INDEX_POINTS.stop, len(POINTS))
_SMALL_WHOLE_POINTS = range(WHOLE_POINTS.stop - len(_SMALL_WHOLE), WHOLE_POINTS.stop)


def is_index(name: str) -> bool:
    """Returns whether a symbol is a letter such as n or k_1, which denotes whole numbers."""
    return name.partition("_")[0] in INDEX_LETTERS


def num_negative(names: Iterable[str], point: int) -> int:
    """Returns the number of symbols that are negative at a point."""
    if not POINTS[point].may_be_negative:
        return 0
    return sum(sample(name, point) < 0 for name in names)


def sample(name: str, point: int) -> Fraction | float:
    """Returns the value of a symbol at a point, a Fraction if it is whole or has parts."""
    place = POINTS[point]
    if point in INDEX_POINTS and is_index(name):
        return Fraction(_whole_numbers(name)[point - INDEX_POINTS.start])
    # Each small whole number is drawn once.
    if point in _SMALL_WHOLE_POINTS:
        return Fraction(_whole_numbers(name)[point - _SMALL_WHOLE_POINTS.start])
    # Random seeds itself from the SHA-512 of a text, so all processes draw the same value. hash()
    # would differ between processes.
    draw = random.Random(f"{name}/{point}")
    if place.parts > 1:
        integer = _whole_numbers(name)[point - PART_POINTS.start]
        return integer + Fraction(draw.randint(1, place.parts - 1), place.parts)
    if place.whole == "all":
        number = draw.randint(int(place.low), int(place.high))
        return Fraction(number * draw.choice(place.signs))
    return draw.uniform(place.low, place.high) * draw.choice(place.signs)


@functools.lru_cache(1024)
def _whole_numbers(name: str) -> list[int]:
    """Returns the small whole numbers in an order that differs from symbol to symbol."""
    return random.Random(f"{name}/whole").sample(_SMALL_WHOLE, len(_SMALL_WHOLE))
