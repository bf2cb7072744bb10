"""Whether two numbers or formulas are the same: exactly, numerically, or by their form."""

import functools
import operator
from collections.abc import Callable

from jzero.grading.evaluation import (
    MP,
    Value,
    is_exact,
    is_real,
    near,
    num_bits,
    symbol_names,
    value,
)
from jzero.grading.expressions import Node
from jzero.grading.sampling import (
    BASIC_POINTS,
    INDEX_POINTS,
    PART_POINTS,
    WHOLE_POINTS,
    WIDE_POINTS,
    is_index,
)
from jzero.grading.vocabulary import words

LEAST_DIGITS = 6  # of a decimal that may stand for an exact constant
MAX_BITS_OF_FORM = 64  # larger rationals are opaque to sympy
LEAST_POINTS = 2  # where both formulas have a value
LEAST_WHOLE_POINTS = 8  # at 0, 1 and -1 alone, n^9000 is n^8000
# Relative, where symbols are large: differences of large terms have fewer digits there.
TOLERANCE_OF_LARGE = 1e-40
# Kinds of formulas that a few points tell apart.
_IN_ONE_PIECE = words(
    """number symbol negative add multiply divide mixed scaled ratio factorial binomial degree apply
    sin cos tan cot sec csc sinh cosh tanh exp"""
)


def is_literal(node: Node) -> bool:
    """Returns whether a number is written out: no arithmetic is left to do.

    Decimals, fractions, mixed numbers, powers and scientific notation are written out.
    """
    if node.kind == "multiply":
        return len(node.parts) == 2 and _is_scientific(*node.parts)
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

    They must agree at every sampled point where both are real. Where they are real nowhere, they
    must agree as complex numbers. Where they have no value, they must have the same form. If
    `strict`, a gold that is written out as a number takes only a prediction that is, too.
    """
    if symbol_names(prediction) != symbol_names(gold):
        return False
    if strict and is_literal(gold) and not is_literal(prediction):
        return False

    points = sample_points(prediction, gold)
    known = []
    num_real = 0
    for point in points:
        x, y = value(prediction, point), value(gold, point)
        if x is None or y is None:
            continue
        both_real = is_real(x) and is_real(y)
        if both_real and not agree(x, y, point):
            # Most formulas that differ, differ at the first point.
            return _stands_for(prediction, x, y)
        num_real += both_real
        known.append((x, y, point))
    least = min(LEAST_WHOLE_POINTS if points[-1] in WHOLE_POINTS else LEAST_POINTS, len(points))
    if num_real >= least:
        return True
    if len(known) >= least:
        return all(agree(x, y, point) for x, y, point in known)
    has_no_value = all(
        value(prediction, point) is None and value(gold, point) is None for point in points
    )
    return has_no_value and _form(prediction) == _form(gold)


def agree(x: Value, y: Value, point: int) -> bool:
    """Returns whether the values of two formulas at a point are the same."""
    if point in BASIC_POINTS or is_exact(x, y):
        return near(x, y)
    return near(MP.convert(x), MP.convert(y), TOLERANCE_OF_LARGE)


@functools.lru_cache(4096)
def sample_points(prediction: Node, gold: Node) -> tuple[int, ...]:
    """Returns the points where two formulas of the same symbols are compared.

    Formulas that round letters such as n, or have them as powers of a negative number, are compared
    where these are whole: the ceiling of n/2 is the floor of (n+1)/2.
    """
    names = symbol_names(prediction)
    if not names:
        return (0,)
    kinds = _kinds(prediction) | _kinds(gold)
    if kinds <= _IN_ONE_PIECE:
        return tuple(BASIC_POINTS)
    whole = _whole_names(prediction) | _whole_names(gold)
    if whole and all(map(is_index, whole)):
        only_indices = all(map(is_index, names))
        return tuple(WHOLE_POINTS) if only_indices else (*INDEX_POINTS, *WHOLE_POINTS)
    real = (*BASIC_POINTS, *WIDE_POINTS)
    return (*real, *WHOLE_POINTS, *PART_POINTS) if kinds & {"floor", "ceil"} else real


@functools.lru_cache(4096)
def _kinds(node: Node) -> frozenset[str]:
    """Returns the kinds of the nodes in a tree; powers count where the exponent is not whole."""
    own = frozenset[str]() if _is_whole_power(node) else frozenset({node.kind})
    return own.union(*map(_kinds, node.parts))


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


def _stands_for(prediction: Node, x: Value, y: Value) -> bool:
    """Returns whether the prediction is a decimal for a constant that no decimal equals.

    The decimal must have LEAST_DIGITS digits or more, rounded or cut off: 2.33333 for 7/3, and
    3.14159 or 3.1415926 for pi, but not 1.000001 for 1. `x` is the value of the prediction and `y`
    the value of the gold; both are real, and they differ.
    """
    written = prediction.parts[0] if prediction.kind == "negative" else prediction
    place = written.decimal_place
    if not place or x.denominator == 1:
        return False
    if abs(x) < 10 ** (LEAST_DIGITS - 1) * place:
        return False
    if is_exact(y) and 10 ** num_bits(y) % y.denominator == 0:
        return False  # a decimal equals the gold
    is_cut_off = abs(y) - abs(x) > 0
    return bool(abs(y - x) / place <= (1 if is_cut_off else 0.5))


def _form(node: Node) -> object:
    """Returns the tree as an expression of sympy, which brings sums and products into one order.

    All operations but sums, products and signs are opaque functions to sympy, and large numbers are
    opaque symbols, so that sympy computes nothing large.
    """
    import sympy  # takes half a second; few answers come here

    number = value(node)
    if number is not None and is_exact(number) and num_bits(number) <= MAX_BITS_OF_FORM:
        return sympy.Rational(number)
    builders: dict[str, Callable[..., object]] = {
        "add": sympy.Add,
        "multiply": sympy.Mul,
        "negative": operator.neg,
    }
    build = builders.get(node.kind) or sympy.Function(node.kind)
    fields = [node.name, node.value, node.decimal_place] if not node.parts else [node.name]
    leaves = [sympy.Symbol(str(field)) for field in fields if field != ""]
    return build(*leaves, *map(_form, node.parts))
