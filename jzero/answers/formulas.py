"""Whether two numbers or formulas are the same: exactly, numerically, by residues or by form.

docs/data-and-rewards.md describes the policies in its section on grading. In short, two formulas
are the same if they agree wherever both are real, and are real at the same places.
"""

import functools
from collections import Counter
from fractions import Fraction
from typing import NamedTuple

from jzero.answers.evaluation import (
    MP,
    Place,
    Value,
    is_defined,
    is_exact,
    is_real,
    may_be_complex,
    near,
    nodes,
    num_bits,
    symbol_names,
    value,
)
from jzero.answers.expressions import COMPLEX, Node
from jzero.answers.residues import residue
from jzero.answers.sampling import (
    BASIC_POINTS,
    INDEX_POINTS,
    PART_POINTS,
    WHOLE_POINTS,
    WIDE_POINTS,
    is_index,
    num_negative,
)
from jzero.answers.vocabulary import BINDERS, words

LEAST_DIGITS = 6  # of a decimal that may replace an exact constant
DIGITS_OF_DOUBLES = (16, 17, 18)
ERROR_OF_DOUBLES = Fraction(4, 2**53)
MAX_STEPS = 12  # constants of a formula at which it may step from one piece to the next
LEAST_POINTS = 2  # at which both formulas must have a value
LEAST_WHOLE_POINTS = 8  # with only 0, 1 and -1, n^9000 would be n^8000
# Relative tolerance for large symbols, because differences of large terms have fewer digits.
TOLERANCE_OF_LARGE = 1e-40
# Kinds of formulas that a few points distinguish.
_IN_ONE_PIECE = words(
    """number symbol negative add multiply divide mixed scaled ratio factorial binomial degree apply
    sin cos tan cot sec csc sinh cosh tanh exp"""
)
# Kinds of formulas that consist of pieces.
_OF_PIECES = words("floor ceil abs cases sgn modulo extremum")


class Rules(NamedTuple):
    """How strictly answers are compared."""

    # A gold that is a literal number accepts only a literal prediction: not 6*7 for 42.
    strict: bool = True
    converts_units: bool = False  # 100 cm is 1 m
    is_ordered: bool = False  # the question asks for a list in an order


LENIENT = Rules(strict=False)


def is_literal(node: Node) -> bool:
    """Returns whether a number is written out: no arithmetic is left to do.

    Decimals, fractions, mixed numbers, whole powers and scientific notation are written out.
    """
    if node.kind == "multiply":
        return len(node.parts) == 2 and _is_scientific(*node.parts)
    if node.kind == "power" and not _is_whole_power(node):
        return False
    if node.kind in ("negative", "divide", "ratio", "power", "scaled"):
        return all(map(is_literal, node.parts))
    return node.kind in ("number", "mixed")


def _is_scientific(mantissa: Node, scale: Node) -> bool:
    if mantissa.kind != "number" or scale.kind != "power":
        return False
    base = scale.parts[0]
    return base.kind == "number" and base.value == 10


def same_formula(prediction: Node, gold: Node, strict: bool) -> bool:
    """Returns whether two formulas are identical.

    They must agree at every sampled point where both are real, and no point may be found where only
    one of them is. If they are real nowhere, they must agree as complex numbers. If they have no
    value, they must have the same residue or the same form. If `strict`, a gold that is a literal
    number accepts only a literal prediction, and a gold without sums, integrals and limits accepts
    no prediction with them.
    """
    if symbol_names(prediction) != symbol_names(gold):
        return False
    if strict and _is_undone(prediction, gold):
        return False

    points = sample_points(prediction, gold)
    has_domain = _has_domain(prediction, gold)
    values = []
    num_real = 0
    for point in points:
        x, y = value(prediction, point), value(gold, point)
        if x is None or y is None:
            continue
        both_real = is_real(x) and is_real(y)
        # A point where only one formula is defined separates them, unless the point does not count.
        if has_domain and (not both_real or not agree(x, y, point)):
            both_defined = is_defined(prediction, point) and is_defined(gold, point)
            if not both_defined and (is_real(x) or is_real(y)):
                if _counts_in_domain(gold, point):
                    return False
                continue
        if both_real and not agree(x, y, point):
            # Most different formulas already differ at the first point.
            return _approximates(prediction, x, y)
        num_real += both_real
        values.append((x, y, point))
    is_whole = not isinstance(points[-1], Place) and points[-1] in WHOLE_POINTS
    least = min(LEAST_WHOLE_POINTS if is_whole else LEAST_POINTS, len(points))
    if num_real >= least:
        return True
    if len(values) >= least:
        return all(agree(x, y, point) for x, y, point in values)
    return _same_without_values(prediction, gold, points)


def _same_without_values(prediction: Node, gold: Node, points: tuple[int | Place, ...]) -> bool:
    # The values may only be too large to compute.
    number, gold_number = residue(prediction), residue(gold)
    if number is not None and gold_number is not None:
        return number == gold_number
    for point in points:
        if value(prediction, point) is not None or value(gold, point) is not None:
            return False
    return _form(prediction) == _form(gold)


def _is_undone(prediction: Node, gold: Node) -> bool:
    """Returns whether a prediction leaves a step undone that the gold has done: 6·7 for 42."""
    if is_literal(gold) and not is_literal(prediction):
        return True
    return bool((_kinds(prediction) & BINDERS) - (_kinds(gold) & BINDERS))


@functools.lru_cache(4096)
def _has_domain(prediction: Node, gold: Node) -> bool:
    """Returns whether formulas in real symbols may be real at some points only."""
    formulas = (prediction, gold)
    names = symbol_names(gold)
    has_complex = any(name.startswith(COMPLEX) for name in names)
    if not names or has_complex or any(map(_mentions_i, formulas)):
        return False
    return any(map(may_be_complex, formulas))


def _mentions_i(node: Node) -> bool:
    is_i = node.kind == "symbol" and node.name == "i"
    return is_i or any(map(_mentions_i, node.parts))


def _counts_in_domain(gold: Node, point: int | Place) -> bool:
    """Returns whether a point counts at which only one of two formulas is real.

    It counts if at most one symbol is negative there. With two negative symbols, rules of textbooks
    do not hold: the square root of ab is real, and the square roots of a and b are not.
    """
    index = point.point if isinstance(point, Place) else point
    return num_negative(symbol_names(gold), index) <= 1


def agree(x: Value, y: Value, point: int | Place) -> bool:
    """Returns whether the values of two formulas at a point are the same."""
    is_basic = not isinstance(point, Place) and point in BASIC_POINTS
    if is_basic or is_exact(x, y):
        return near(x, y)
    return near(MP.convert(x), MP.convert(y), TOLERANCE_OF_LARGE)


@functools.lru_cache(4096)
def sample_points(prediction: Node, gold: Node) -> tuple[int | Place, ...]:
    """Returns the points at which two formulas of the same symbols are compared.

    Formulas that round letters such as n, or have them as powers of a negative number, are compared
    at whole values of these letters: the ceiling of n/2 is the floor of (n+1)/2.
    """
    names = symbol_names(prediction)
    if not names:
        return (0,)
    if any(map(_needs_whole_numbers, (prediction, gold))):
        return tuple(WHOLE_POINTS)
    kinds = _kinds(prediction) | _kinds(gold)
    # A few points distinguish formulas that are in one piece.
    if kinds <= _IN_ONE_PIECE:
        return tuple(BASIC_POINTS)
    steps = _steps(prediction, gold) if kinds & _OF_PIECES else ()
    whole_names = _whole_names(prediction) | _whole_names(gold)
    if whole_names and all(map(is_index, whole_names)):
        only_indices = all(map(is_index, names))
        points = tuple(WHOLE_POINTS) if only_indices else (*INDEX_POINTS, *WHOLE_POINTS)
        return (*steps, *points)
    real = (*steps, *BASIC_POINTS, *WIDE_POINTS)
    return (*real, *WHOLE_POINTS, *PART_POINTS) if kinds & {"floor", "ceil", "modulo"} else real


@functools.lru_cache(4096)
def _needs_whole_numbers(node: Node) -> bool:
    """Returns whether a formula has values at whole numbers only."""
    is_divisor = node.kind == "apply" and node.name in ("gcd", "lcm") and symbol_names(node)
    if is_divisor or node.kind == "whole" or (node.kind == "modulo" and symbol_names(node)):
        return True
    if node.kind in ("sum", "product") and any(map(symbol_names, node.parts[2:])):
        return True
    return any(map(_needs_whole_numbers, node.parts))


def _steps(prediction: Node, gold: Node) -> tuple[Place, ...]:
    """Returns points near the constants of two formulas of pieces.

    A formula may step from piece to piece if a symbol equals one of its constants, such as 0 and
    10^6 in |x - 10^6|, or twice a constant, such as the floor of n/10^6.
    """
    constants = {}
    for node in (*nodes(prediction), *nodes(gold)):
        number = _constant(node)
        if number is None or not is_exact(number) or node.kind == "symbol":
            continue
        # A formula may step at multiples of the parts of a fraction.
        for size in (abs(number.numerator), number.denominator, abs(number)):
            constants[Fraction(size)] = None
    sizes = list(constants)[:MAX_STEPS]
    points = []
    names = [name for name in symbol_names(gold) if not name.endswith("()")]
    for name in sorted(name for name in names if not name.startswith(COMPLEX)):
        for size in sizes:
            # At the step and twice the step, a whole number and half a number off it, and at its
            # mirror image.
            for number in (size, 2 * size, size - 1, -size, size + Fraction(1, 2)):
                # Letters such as n are sampled at whole numbers only.
                if number.denominator == 1 or not is_index(name):
                    points.append(Place(WHOLE_POINTS[-1], ((name, number),)))
    return tuple(points[: 4 * MAX_STEPS])


@functools.lru_cache(4096)
def _kinds(node: Node) -> frozenset[str]:
    """Returns the kinds of the nodes in a tree; powers count only if the exponent is not whole."""
    kinds = frozenset[str]() if _is_whole_power(node) else frozenset({node.kind})
    if node.kind == "apply" and node.name in ("max", "min"):
        kinds = frozenset({"extremum"})
    return kinds.union(*map(_kinds, node.parts))


def _is_whole_power(node: Node) -> bool:
    if node.kind != "power":
        return False
    exponent = _constant(node.parts[1])
    return exponent is not None and is_exact(exponent) and exponent.denominator == 1


def _constant(node: Node) -> Value | None:
    return None if symbol_names(node) else value(node)


@functools.lru_cache(4096)
def _whole_names(node: Node) -> frozenset[str]:
    """Returns the symbols that are rounded, or are in the exponent of a negative constant."""
    if node.kind in ("floor", "ceil"):
        return symbol_names(node)
    names = frozenset[str]().union(*map(_whole_names, node.parts))
    if node.kind == "power":
        base = _constant(node.parts[0])
        if base is not None and not (is_real(base) and base >= 0):
            names |= symbol_names(node.parts[1])
    return names


def _approximates(prediction: Node, x: Value, y: Value) -> bool:
    """Returns whether the prediction is a decimal for a constant that no decimal equals.

    The decimal must have at least LEAST_DIGITS digits, rounded or cut off: 2.33333 for 7/3, and
    3.14159 or 3.1415926 for pi, but not 1.000001 for 1. `x` is the value of the prediction and `y`
    the value of the gold; both are real, and they differ.
    """
    written = prediction.parts[0] if prediction.kind == "negative" else prediction
    place = written.decimal_place
    if not place or x.denominator == 1:
        return False
    # As a program prints a double, which is rounded in each of its operations.
    num_digits = len(str(abs(x / place)))
    if num_digits in DIGITS_OF_DOUBLES and abs(y - x) <= ERROR_OF_DOUBLES * abs(y):
        return True
    # The decimal has too few digits.
    if abs(x) < 10 ** (LEAST_DIGITS - 1) * place:
        return False
    # The denominator divides a power of ten. Its factors 2 and 5 occur at most as often as it has
    # bits.
    if is_exact(y) and 10 ** num_bits(y) % y.denominator == 0:
        return False  # a decimal equals the gold
    # A rounded decimal differs by half a place at most, and one that was cut off by one place.
    is_cut_off = abs(y) - abs(x) > 0
    return bool(abs(y - x) / place <= (1 if is_cut_off else 0.5))


@functools.lru_cache(4096)
def _form(node: Node) -> object:
    """Returns the tree with its sums and products in one order, and rationals computed."""
    number = _constant(node)
    if number is not None and is_exact(number):
        return number
    match node.kind:
        case "add":
            # A set of counts is a multiset that can be hashed.
            return "add", frozenset(Counter(map(_form, node.parts)).items())
        case "multiply":
            return "multiply", frozenset(Counter(map(_form, node.parts)).items())
        case "negative":
            factors = Counter((Fraction(-1), _form(node.parts[0])))
            return "multiply", frozenset(factors.items())
    return node.kind, node.name, node.value, tuple(map(_form, node.parts))
