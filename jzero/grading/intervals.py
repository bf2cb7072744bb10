"""Unions of intervals and points, brought to the one form in which no two pieces touch."""

from typing import NamedTuple

from jzero.grading.evaluation import MP, Value, is_real, near, symbol_names, value
from jzero.grading.expressions import INFINITY, Node, negative


class End(NamedTuple):
    """One end of an interval."""

    number: Value  # MP.mpf, which may be infinite
    node: Node
    is_closed: bool


class Piece(NamedTuple):
    """An interval; a point is closed, and its ends are equal."""

    low: End
    high: End


def merged(members: tuple[Node, ...]) -> tuple[Node, ...] | None:
    """Returns the intervals and points that a union is made of, from the lowest to the highest.

    Pieces that overlap or touch become one: (0,2) and (1,3) are (0,3), but (0,1) and (1,2) are two.
    Returns None if a member is neither an interval nor a set of real numbers.
    """
    pieces = []
    for member in members:
        found = _pieces(member)
        if found is None:
            return None
        pieces += found
    pieces.sort(key=_place)
    joined: list[Piece] = []
    for piece in pieces:
        if joined and _touches(joined[-1].high, piece.low):
            joined[-1] = _joined(joined[-1], piece)
        else:
            joined.append(piece)
    return tuple(map(_node, joined))


def _pieces(member: Node) -> list[Piece] | None:
    if member.kind == "set":
        ends = [_end(point, is_closed=True) for point in member.parts]
        return None if None in ends else [Piece(end, end) for end in ends if end is not None]
    if member.kind != "tuple" or len(member.parts) != 2:
        return None
    opening, closing = member.name
    low = _end(member.parts[0], opening == "[")
    high = _end(member.parts[1], closing == "]")
    if low is None or high is None:
        return None
    is_point = _same(low.number, high.number) and low.is_closed and high.is_closed
    is_interval = low.number < high.number and not _same(low.number, high.number)
    return [Piece(low, high)] if is_point or is_interval else None


def _end(node: Node, is_closed: bool) -> End | None:
    if node == INFINITY or node == negative(INFINITY):
        number = MP.inf if node == INFINITY else MP.ninf
        return End(number, node, is_closed=False)
    number = None if symbol_names(node) else value(node)
    if number is None or not is_real(number):
        return None
    return End(MP.convert(number), node, is_closed)


def _same(a: Value, b: Value) -> bool:
    is_finite = MP.isfinite(a) and MP.isfinite(b)
    return near(a, b) if is_finite else bool(a == b)


def _place(piece: Piece) -> tuple[Value, bool]:
    return piece.low.number, not piece.low.is_closed


def _touches(high: End, low: End) -> bool:
    """Returns whether a piece that begins at `low` leaves no gap after one that ends at `high`."""
    if _same(high.number, low.number):
        return high.is_closed or low.is_closed
    return low.number < high.number


def _joined(first: Piece, second: Piece) -> Piece:
    """Returns two pieces as one; the first does not begin after the second."""
    low, high = first.low, first.high
    if _same(low.number, second.low.number) and second.low.is_closed:
        low = second.low
    ends_together = _same(high.number, second.high.number)
    if second.high.is_closed if ends_together else second.high.number > high.number:
        high = second.high
    return Piece(low, high)


def _node(piece: Piece) -> Node:
    low, high = piece
    brackets = ("[" if low.is_closed else "(") + ("]" if high.is_closed else ")")
    if low.is_closed and high.is_closed and _same(low.number, high.number):
        return Node("set", (low.node,))
    return Node("tuple", (low.node, high.node), name=brackets)
