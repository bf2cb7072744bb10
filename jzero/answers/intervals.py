"""Sets of real numbers: unions of intervals and points, normalized so that no two of them touch."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from jzero.answers.evaluation import MP, Value, is_real, near, symbol_names, value
from jzero.answers.expressions import INFINITY, Node, negative


class End(NamedTuple):
    """One end of an interval."""

    number: Value  # MP.mpf, which may be infinite
    node: Node | None  # the end as written in the answer; None if it was computed
    is_closed: bool


class Piece(NamedTuple):
    """An interval. A point is a closed interval with equal ends."""

    low: End
    high: End


LOWEST = End(MP.ninf, negative(INFINITY), is_closed=False)
HIGHEST = End(MP.inf, INFINITY, is_closed=False)
Pieces = tuple[Piece, ...]  # disjoint, from the lowest to the highest
ALL_REALS: Pieces = (Piece(LOWEST, HIGHEST),)


def end(node: Node, is_closed: bool) -> End | None:
    """Returns an end from its formula, None if it is neither a real number nor infinite."""
    if node in (INFINITY, negative(INFINITY)):
        return HIGHEST if node == INFINITY else LOWEST
    number = None if symbol_names(node) else value(node)
    if number is None or not is_real(number):
        return None
    return End(MP.convert(number), node, is_closed)


def pieces_of(node: Node) -> Pieces | None:
    """Returns the real numbers of an interval, a set, or a formula of set algebra.

    Returns None if the tree is not a set of real numbers, or has symbols in it.
    """
    if node.kind == "set":
        ends = [end(point, is_closed=True) for point in node.parts]
        if None in ends:
            return None
        return union([Piece(x, x) for x in ends if x is not None])
    if node.kind == "tuple" and len(node.parts) == 2:
        low = end(node.parts[0], node.name[0] == "[")
        high = end(node.parts[1], node.name[1] == "]")
        return None if low is None or high is None else interval(low, high)
    if node.kind not in ("union", "intersection", "setminus"):
        return None
    parts = []
    for part in node.parts:
        pieces = pieces_of(part)
        if pieces is None:
            return None
        parts.append(pieces)
    if node.kind == "union":
        return union(list(itertools.chain.from_iterable(parts)))
    # A minus B is the intersection of A with the complement of B.
    if node.kind == "setminus":
        parts = [parts[0], *map(complement, parts[1:])]
    return intersection(parts)


def interval(low: End, high: End) -> Pieces:
    """Returns the numbers between two ends: none if the ends are in the wrong order."""
    if same_number(low.number, high.number):
        return (Piece(low, high),) if low.is_closed and high.is_closed else ()
    return (Piece(low, high),) if low.number < high.number else ()


def union(pieces: Sequence[Piece]) -> Pieces:
    """Joins pieces that overlap or touch: (0,2) and (1,3) are (0,3), (0,1) and (1,2) are two."""
    joined: list[Piece] = []
    for piece in sorted(pieces, key=_place):
        if joined and _touches(joined[-1].high, piece.low):
            joined[-1] = _joined(joined[-1], piece)
        else:
            joined.append(piece)
    return tuple(joined)


def complement(pieces: Pieces) -> Pieces:
    """Returns the real numbers that are in none of the pieces."""
    gaps: list[Piece] = []
    low = LOWEST
    for piece in pieces:
        # A gap contains exactly the ends that its neighbors leave out.
        high = piece.low._replace(is_closed=not piece.low.is_closed)
        # No number is below a piece that starts at minus infinity: the interval from LOWEST to
        # LOWEST is empty.
        gaps += interval(low, high if MP.isfinite(high.number) else LOWEST)
        low = piece.high._replace(is_closed=not piece.high.is_closed)
    if not pieces or MP.isfinite(low.number):
        gaps += interval(low, HIGHEST)
    return tuple(gaps)


def intersection(sets: Sequence[Pieces]) -> Pieces:
    # A number is in all sets if it is outside of none.
    outside = itertools.chain.from_iterable(map(complement, sets))
    return complement(union(list(outside)))


def same_number(a: Value, b: Value) -> bool:
    is_finite = MP.isfinite(a) and MP.isfinite(b)
    return near(a, b) if is_finite else bool(a == b)


def _place(piece: Piece) -> tuple[Value, bool]:
    # Of two pieces that start at one number, the closed one comes first.
    return piece.low.number, not piece.low.is_closed


def _touches(high: End, low: End) -> bool:
    """Returns whether a piece that starts at `low` leaves no gap after one that ends at `high`."""
    if same_number(high.number, low.number):
        return high.is_closed or low.is_closed
    return low.number < high.number


def _joined(first: Piece, second: Piece) -> Piece:
    """Returns two pieces as one; the first does not start after the second."""
    low, high = first.low, first.high
    if same_number(low.number, second.low.number) and second.low.is_closed:
        low = second.low
    ends_together = same_number(high.number, second.high.number)
    if second.high.is_closed if ends_together else second.high.number > high.number:
        high = second.high
    return Piece(low, high)
