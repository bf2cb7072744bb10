"""Whether two parsed answers are the same answer.

`equal` takes units off, and then compares lists, sets, intervals, matrices and relations by their
structure, down to the formulas in them, which `formulas` compares.
"""

import functools
from collections.abc import Callable

from jzero.grading.evaluation import (
    CONSTANTS,
    Value,
    is_exact,
    is_real,
    near,
    symbol_names,
    value,
)
from jzero.grading.expressions import INFINITY, Node, negative, split_unit
from jzero.grading.formulas import agree, is_literal, same_formula, sample_points
from jzero.grading.intervals import merged
from jzero.grading.vocabulary import FUNCTIONS

# The relative difference that the links of a chain may have: x = 1/3 ≈ 0.333.
TOLERANCE_OF_APPROXIMATION = 1e-2


@functools.lru_cache(4096)
def equal(prediction: Node, gold: Node, strict: bool) -> bool:
    """Returns whether a prediction is the same answer as the gold.

    A unit may be missing on either side, but two units must be the same. If `strict`, a gold that
    is written out as a number takes only a prediction that is, too: not 6*7 for 42.
    """
    if prediction == gold:
        return True
    inside, unit = split_unit(prediction)
    gold_inside, gold_unit = split_unit(gold)
    if unit and gold_unit and unit != gold_unit:
        return False
    is_in_other_base = unit.startswith("_")
    if is_in_other_base and not gold_unit:
        return False
    if _same_percentage(inside, unit, gold_inside, gold_unit):
        return True
    if unit == "percent" and not gold_unit and _is_share(gold_inside):
        return False
    for kind, compare in _STRUCTURES.items():
        if kind in (inside.kind, gold_inside.kind):
            return compare(inside, gold_inside, strict)
    return same_formula(inside, gold_inside, strict)


def _same_percentage(inside: Node, unit: str, gold_inside: Node, gold_unit: str) -> bool:
    """Returns whether one answer is a percentage, and the other is the share of 1: 35% is 0.35."""
    if (unit == "percent") == (gold_unit == "percent") or not is_literal(inside):
        return False
    share = _share(inside, unit)
    return share is not None and is_exact(share) and share == _share(gold_inside, gold_unit)


def _share(inside: Node, unit: str) -> Value | None:
    number = value(inside)
    if number is None or unit != "percent":
        return number
    return number / 100


def _is_share(gold: Node) -> bool:
    """Returns whether a gold without a percent sign is a share of 1: 0.5% is not 0.5.

    A gold of 1 or more may answer "what percent": there the sign can be left out.
    """
    number = None if symbol_names(gold) else value(gold)
    return number is not None and is_real(number) and 0 < abs(number) < 1


# Structures


def _same_parts(prediction: Node, gold: Node, strict: bool) -> bool:
    """Compares part by part. Kinds, brackets and operators must be the same."""
    if prediction.kind != gold.kind or prediction.name != gold.name:
        return False
    if len(prediction.parts) != len(gold.parts):
        return False
    pairs = zip(prediction.parts, gold.parts, strict=True)
    return all(equal(part, gold_part, strict) for part, gold_part in pairs)


def _same_members(prediction: Node, gold: Node, strict: bool) -> bool:
    """Compares as multisets if the gold is a list that repeats a member, else as sets."""
    members, gold_members = _members(prediction), _members(gold)
    distinct = _without_repetitions(gold_members)
    if gold.kind != "list" or len(distinct) == len(gold_members):
        members, gold_members = _without_repetitions(members), distinct
    if len(members) != len(gold_members):
        return False
    for member in members:
        count = sum(equal(member, other, strict) for other in gold_members)
        if count == 0 or count != sum(equal(member, other, False) for other in members):
            return False
    return True


def _same_union(prediction: Node, gold: Node, strict: bool) -> bool:
    """Compares the numbers in two unions: (0, 2) ∪ (1, 3) is (0, 3)."""
    pieces, gold_pieces = merged(_of_union(prediction)), merged(_of_union(gold))
    if pieces is None or gold_pieces is None:
        return _same_members(prediction, gold, strict)
    if len(pieces) != len(gold_pieces):
        return False
    pairs = zip(pieces, gold_pieces, strict=True)
    return all(equal(piece, gold_piece, strict) for piece, gold_piece in pairs)


def _of_union(node: Node) -> tuple[Node, ...]:
    """Returns the members of a union, of x < 0 or x > 1, or of what is one member."""
    is_list_of_conditions = all(part.kind == "relation" for part in node.parts)
    if node.kind == "union" or (node.kind == "list" and is_list_of_conditions):
        return tuple(map(_solved, node.parts))
    return (node,)


def _same_ratio(prediction: Node, gold: Node, strict: bool) -> bool:
    """Compares the proportions of two ratios, and the parts of two times: 2:15 is not 4:30."""
    if prediction.kind != gold.kind:
        has_time = "time" in (prediction.name, gold.name)
        return not has_time and same_formula(prediction, gold, strict)
    sides, gold_sides = prediction.parts, gold.parts
    if len(sides) != len(gold_sides):
        return False
    is_time = "time" in (prediction.name, gold.name)
    if is_time or (_may_be_time(prediction) and _may_be_time(gold)):
        pairs = zip(sides, gold_sides, strict=True)
        return all(equal(side, gold_side, strict) for side, gold_side in pairs)
    if strict and all(map(is_literal, gold_sides)) and not all(map(is_literal, sides)):
        return False
    return _are_proportional(sides, gold_sides)


def _may_be_time(ratio: Node) -> bool:
    """Returns whether a ratio can be read as hours, minutes of two digits, and seconds."""
    hours, *rest = ratio.parts
    is_written = all(part.kind == "number" and part.value.denominator == 1 for part in ratio.parts)
    if not is_written or len(rest) > 2:
        return False
    has_minutes = ratio.name == "time" or all(part.value >= 10 for part in rest)
    return has_minutes and hours.value <= 24 and all(part.value < 60 for part in rest)


def _are_proportional(sides: tuple[Node, ...], gold_sides: tuple[Node, ...]) -> bool:
    for pivot, gold_pivot in zip(sides, gold_sides, strict=True):
        if not value(pivot):  # zero, or without a value
            continue
        if not value(gold_pivot):
            return False
        for side, gold_side in zip(sides, gold_sides, strict=True):
            product = Node("multiply", (side, gold_pivot))
            if not equal(product, Node("multiply", (gold_side, pivot)), False):
                return False
        return True
    return False


def _members(node: Node) -> tuple[Node, ...]:
    return node.parts if node.kind in ("list", "set", "union") else (node,)


def _without_repetitions(members: tuple[Node, ...]) -> tuple[Node, ...]:
    kept = []
    for index, member in enumerate(members):
        if not any(equal(member, earlier, False) for earlier in members[:index]):
            kept.append(member)
    return tuple(kept)


def _same_text(prediction: Node, gold: Node, strict: bool) -> bool:
    letters = _letters(prediction)
    return letters != "" and letters == _letters(gold)


def _letters(node: Node) -> str:
    """Returns the letters of words or symbols, "" for a tree that is not written with letters.

    A word can be read as a product of symbols: "A B C" is ABC.
    """
    if node.kind == "multiply":
        letters = [_letters(part) for part in node.parts]
        return "".join(letters).lower() if all(letters) else ""
    return node.name


# Relations


def _same_relation(prediction: Node, gold: Node, strict: bool) -> bool:
    """Compares side by side; of a single relation, all sides may be moved over and scaled.

    Where only one of the answers is a relation, what the relation says of its name is compared:
    x = 3 with 3, and 0 < x < 1 with (0, 1).
    """
    if prediction.kind != gold.kind:
        prediction, gold = _solved(prediction), _solved(gold)
        if "relation" in (prediction.kind, gold.kind):
            return False
        return equal(prediction, gold, strict)
    if _same_parts(prediction, gold, False):
        return True
    operators = prediction.name
    if operators != gold.name or len(operators) > 1:
        return False
    return _is_scaled(operators, _left_minus_right(prediction), _left_minus_right(gold))


def _left_minus_right(relation: Node) -> Node:
    left, right = relation.parts
    return Node("add", (left, negative(right)))


def _is_scaled(operator: str, difference: Node, gold_difference: Node) -> bool:
    """Returns whether one difference is a constant multiple of the other.

    An inequality turns around when its sides are multiplied by a negative number.
    """
    if symbol_names(difference) != symbol_names(gold_difference):
        return False
    quotient = Node("divide", (difference, gold_difference))
    scales = []
    for point in sample_points(difference, gold_difference):
        scale = value(quotient, point)
        if scale is not None and scales and not agree(scales[0], scale, point):
            return False
        if scale is not None:
            scales.append(scale)
    if len(scales) < 2 or not scales[0]:
        return False
    return operator in ("=", "≠") or scales[0].real > 0


def _is_name(node: Node) -> bool:
    """Returns whether a tree names something: x, f(x), |AB|, A:B, (p, q) or a fraction of names.

    Numbers, sums and powers are no names.
    """
    if node.kind == "symbol":
        return node.name not in CONSTANTS
    if node.kind == "apply":
        return True
    if node.kind in ("multiply", "divide", "ratio", "tuple", "abs", *FUNCTIONS):
        return all(map(_is_name, node.parts))
    return False


def _solved(node: Node) -> Node:
    """Returns what a relation says of a name: the value it is equal to, or the interval it is in.

    Returns any other node, and a relation that says nothing of one name, as it is.
    """
    if node.kind != "relation":
        return node
    if set(node.name) <= {"=", "≈"}:
        return _solved_equation(node)
    return _solved_inequality(node)


def _solved_equation(relation: Node) -> Node:
    """Returns 3 for x = 3 or x = 6/2 = 3, b for a = b, and 3/4 for 3/4 = 0.75.

    A relation whose sides are different numbers, as 2 = 3, is returned as it is.
    """
    sides = relation.parts
    # Where all sides are names, the first is the name, and the others are its values.
    values = [side for side in sides if not _is_name(side)] or list(sides[1:])

    # x = x + 1 says nothing of x alone.
    names_in_values = frozenset[str]().union(*map(symbol_names, values))
    for side in sides:
        if side.kind == "symbol" and side not in values and side.name in names_in_values:
            return relation

    if "≈" in relation.name:
        return values[0] if _are_near(values) else relation
    if not all(equal(side, values[0], False) for side in values[1:]):
        return relation
    literals = [side for side in values if is_literal(split_unit(side)[0])]
    return (literals or values)[0]


def _are_near(sides: list[Node]) -> bool:
    if len(sides) == 1:
        return True
    values = [value(split_unit(side)[0]) for side in sides]
    if any(number is None for number in values):
        return False
    return all(near(number, values[0], TOLERANCE_OF_APPROXIMATION) for number in values)


def _solved_inequality(relation: Node) -> Node:
    """Returns the interval [0, 1) for 0 ≤ x < 1, and (2, infinity) for 2 < x."""
    operators, sides = relation.name, relation.parts
    if len(sides) == 2:
        if _is_name(sides[0]):
            operators, sides = "<" + operators, (negative(INFINITY), *sides)
        else:
            operators, sides = operators + "<", (*sides, INFINITY)
    if not set(operators) <= {"<", "≤"}:
        return relation
    if [_is_name(side) for side in sides] != [False, True, False]:
        return relation
    opening = "[" if operators[0] == "≤" else "("
    closing = "]" if operators[1] == "≤" else ")"
    return Node("tuple", (sides[0], sides[2]), name=opening + closing)


# The first of these kinds that one of two answers has says how both are compared.
_STRUCTURES: dict[str, Callable[[Node, Node, bool], bool]] = {
    "relation": _same_relation,
    "text": _same_text,
    "matrix": _same_parts,
    "rows": _same_parts,
    "row": _same_parts,
    "ratio": _same_ratio,
    "union": _same_union,
    "tuple": _same_parts,
    "list": _same_members,
    "set": _same_members,
}
