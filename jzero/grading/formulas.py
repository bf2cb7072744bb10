"""Whether two numbers or formulas are the same: exactly, numerically, or by their form."""

import operator
from collections.abc import Callable

from jzero.grading.evaluation import (
    NUM_POINTS,
    Value,
    is_exact,
    is_real,
    near,
    num_bits,
    symbol_names,
    value,
)
from jzero.grading.expressions import Node

LEAST_DIGITS = 6  # of a decimal that may stand for an exact constant
MAX_BITS_OF_FORM = 64  # larger rationals are opaque to sympy


def is_literal(node: Node) -> bool:
    """Returns whether a number is written out: no arithmetic is left to do.

    Decimals, fractions, mixed numbers, powers and scientific notation are written out.
    """
    if node.kind == "multiply":
        return len(node.parts) == 2 and _is_scientific(*node.parts)
    if node.kind in ("negative", "divide", "ratio", "power"):
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

    # Most formulas that differ, differ at the first point.
    x, y = value(prediction), value(gold)
    both_real = x is not None and y is not None and is_real(x) and is_real(y)
    if both_real and not near(x, y):
        return _stands_for(prediction, x, y)

    num_points = NUM_POINTS if symbol_names(prediction) else 1
    pairs = [(value(prediction, point), value(gold, point)) for point in range(num_points)]
    known = [(x, y) for x, y in pairs if x is not None and y is not None]
    real = [(x, y) for x, y in known if is_real(x) and is_real(y)]
    for found in (real, known):
        if len(found) >= min(2, num_points):
            return all(near(x, y) for x, y in found)
    has_no_value = all(x is None and y is None for x, y in pairs)
    return has_no_value and _form(prediction) == _form(gold)


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
