"""Values of trees: exact where the tree is rational, else numbers of 140 digits.

A formula has a value at a point: `point` numbers the places where its symbols are sampled
(`sampling`), and a symbol's value follows from its name and the point alone, so that equal symbols
of two formulas have equal values. Everything is sized before it is computed, because the trees are
hostile.
"""

import functools
import math
import operator
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath

from jzero.grading.expressions import Node
from jzero.grading.sampling import POINTS, sample
from jzero.grading.vocabulary import FUNCTIONS

MAX_BITS = 8192  # of the operands of one exact operation
# Operands of numeric operations are below this size, and above its inverse: with 140 digits, the
# small terms of a sum still count then.
LARGEST = 1e40
LARGEST_FACTORIAL = 450  # that is computed exactly

# A context of our own: mpmath's default context is global, and others may change its precision.
MP = mpmath.MPContext()
MP.dps = 140
TOLERANCE = 1e-80  # relative
_ROUNDING_ERROR = 1e-100  # relative: a smaller imaginary part or distance to an integer is none
_DIGITS_OF_ARGUMENTS = 60  # by which the arguments of an unknown function are told apart

Value = Any  # Fraction, MP.mpf or MP.mpc; mpmath makes the classes of a context at run time

# What mpmath raises where a function has no value, or is called with too many arguments.
_NO_VALUE = (ArithmeticError, LookupError, ValueError, TypeError, MP.NoConvergence)

CONSTANTS: dict[str, Value] = {"e": +MP.e, "pi": +MP.pi, "i": MP.mpc(0, 1)}


def is_exact(*values: Value) -> bool:
    return all(type(value) is Fraction for value in values)


def is_real(value: Value) -> bool:
    return type(value) is not MP.mpc


def num_bits(value: Fraction) -> int:
    """Returns the bits of the numerator or the denominator, whichever has more."""
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _sum(*terms: Value) -> Value:
    return sum(terms)


def _product(*factors: Value) -> Value:
    return math.prod(factors)


def _power(base: Value, exponent: Value) -> Value:
    if not is_exact(base, exponent) or exponent.denominator != 1:
        return MP.convert(base) ** exponent
    if num_bits(base) * abs(exponent) > MAX_BITS / 2:
        return MP.nan
    return base ** int(exponent)


def _root(degree: Value, radicand: Value) -> Value:
    """Returns the real root where there is one: the cube root of -8 is -2."""
    is_negative = not radicand.imag and radicand.real < 0
    if is_negative and degree.real % 2 == 1:
        return -_power(-radicand, 1 / degree)
    return _power(radicand, 1 / degree)


def _factorial(n: Value) -> Value:
    if is_exact(n) and n in range(LARGEST_FACTORIAL):
        return Fraction(math.factorial(int(n)))
    return MP.factorial(n)


def _floor(x: Value) -> Value:
    return Fraction(math.floor(x)) if is_exact(x) else MP.floor(_near_integer(x))


def _ceil(x: Value) -> Value:
    return Fraction(math.ceil(x)) if is_exact(x) else MP.ceil(_near_integer(x))


def _near_integer(x: Value) -> Value:
    """Returns the integer that x is but for a rounding error: the logarithm of 8 to base 2 is 3."""
    nearest = MP.nint(x)
    return nearest if abs(x - nearest) <= _ROUNDING_ERROR * abs(x) else x


def _abs(x: Value) -> Value:
    return abs(x) if is_exact(x) else MP.fabs(x)


_OPERATIONS: dict[str, Callable[..., Value]] = {
    **{name: getattr(MP, name) for name in FUNCTIONS},
    "binomial": MP.binomial,
    "floor": _floor,
    "ceil": _ceil,
    "abs": _abs,
    "degree": MP.radians,
    "root": _root,
    "factorial": _factorial,
    "negative": operator.neg,
    "add": _sum,
    "mixed": _sum,
    "multiply": _product,
    "scaled": _product,
    "divide": operator.truediv,
    "ratio": operator.truediv,
    "power": _power,
}
# Operations of rationals whose result is a rational, if it is not too large.
_EXACT_OPERATIONS = frozenset(
    (
        "negative",
        "add",
        "mixed",
        "multiply",
        "scaled",
        "divide",
        "ratio",
        "power",
        "factorial",
        "floor",
        "ceil",
        "abs",
    )
)


@functools.lru_cache(8192)
def value(node: Node, point: int = 0) -> Value | None:
    """Returns the value of a tree at the point of this number.

    The value is a Fraction where only rational operations are left to do, else a finite MP.mpf or,
    if it is not real, MP.mpc. It is None where there is no value, or where the computation is
    beyond the limits of size.
    """
    if node.kind == "number":
        return node.value
    if node.kind == "symbol":
        return CONSTANTS[node.name] if node.name in CONSTANTS else _sample(node.name, point)
    operation = _OPERATIONS.get(node.kind)
    if operation is None and node.kind != "apply":
        return None
    values = [value(part, point) for part in node.parts]
    if any(part is None for part in values):
        return None
    try:
        if operation is None:
            return _value_of_unknown_function(node.name, values, point)
        if node.kind in _EXACT_OPERATIONS and is_exact(*values):
            result = _exact_result(operation, values)
        else:
            result = _numeric_result(operation, values)
        return result if is_exact(result) or MP.isfinite(result) else None
    except _NO_VALUE:
        return None


def _sample(name: str, point: int) -> Value:
    number = sample(name, point)
    return number if is_exact(number) else MP.mpf(number)


def _value_of_unknown_function(name: str, arguments: list[Value], point: int) -> Value:
    """Returns a random value that depends on the function's name and on its arguments alone."""
    written = [_written(argument) for argument in arguments]
    draw = random.Random(f"{name}({'; '.join(written)})")
    size = draw.uniform(0.3, 3.0)
    sign = draw.choice((1, -1)) if POINTS[point].may_be_negative else 1
    return MP.mpf(sign * size)


def _written(argument: Value) -> str:
    """Returns a number in fewer digits than it is computed with: equal numbers are written alike.

    Raises:
        ArithmeticError: The number has more digits than are computed with.
    """
    if _has_many_bits(argument):
        raise ArithmeticError("an argument of too many digits")
    argument = MP.convert(argument)
    if abs(argument) < TOLERANCE:  # what is left of a difference
        return "0"
    return str(MP.nstr(argument, _DIGITS_OF_ARGUMENTS))


def _exact_result(operation: Callable[..., Value], values: list[Value]) -> Value:
    if sum(map(num_bits, values)) > MAX_BITS:
        return MP.nan
    return _without_rounding_error(operation(*values))


def _numeric_result(operation: Callable[..., Value], values: list[Value]) -> Value:
    if not all(1 / LARGEST < abs(x) < LARGEST for x in values if x):
        return MP.nan
    return _without_rounding_error(operation(*map(MP.convert, values)))


def _without_rounding_error(result: Value) -> Value:
    """Returns the real part of a number that is complex by a rounding error alone."""
    if type(result) is MP.mpc and abs(result.imag) <= _ROUNDING_ERROR * abs(result):
        return result.real
    return result


def near(a: Value, b: Value, tolerance: float = TOLERANCE) -> bool:
    """Returns whether two values are equal within a relative tolerance.

    At the default tolerance rationals are equal if they are exactly equal. So is a rational of many
    bits: 140 digits cannot hold it.
    """
    must_be_exact = is_exact(a, b) or _has_many_bits(a) or _has_many_bits(b)
    if must_be_exact and tolerance == TOLERANCE:
        return a == b
    a, b = MP.convert(a), MP.convert(b)
    return bool(abs(a - b) <= tolerance * max(abs(a), abs(b)))


def _has_many_bits(value: Value) -> bool:
    return is_exact(value) and num_bits(value) > 256


@functools.lru_cache(4096)
def symbol_names(node: Node) -> frozenset[str]:
    """Returns the names of the symbols in a tree, without constants such as pi.

    The name of an unknown function is followed by brackets, "f()".
    """
    if node.kind == "symbol":
        return frozenset({node.name} - CONSTANTS.keys())
    names = frozenset({f"{node.name}()"} if node.kind == "apply" else ())
    return names.union(*map(symbol_names, node.parts))
