"""Values of trees: exact if the tree is rational, otherwise numbers of 140 digits.

A formula has a value at a point. A point is the number of a sample of the formula's symbols
(`sampling`). A symbol's value depends only on its name and the point, so that equal symbols of two
formulas have equal values. The trees are hostile, so every operation checks sizes before it
computes.
"""

import functools
import itertools
import math
import operator
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import mpmath

from jzero.answers.expressions import COMPLEX, MATRIX, VECTOR, Node, num_nodes
from jzero.answers.sampling import POINTS, sample
from jzero.answers.vocabulary import BINDERS, FUNCTIONS, words

MAX_BITS = 8192  # of the operands of one exact operation
# Operands of numeric operations are below this size, and above its inverse: with 140 digits, the
# small terms of a sum still count then.
# Without this bound, 2^{10000} + 1 would equal 2^{10000}.
LARGEST = 1e40
LARGEST_FACTORIAL = 450  # larger factorials are not exact

# A separate context: mpmath's default context is global, and other code may change its precision.
MP = mpmath.MPContext()
MP.dps = 140
# Rounding errors of 140 digits stay below this, and differences between terms of sizes up to
# LARGEST apart stay above it.
TOLERANCE = 1e-80  # relative
# Absolute: a difference that is 0 stays below this, even if its formula enlarges rounding errors.
NEGLIGIBLE = MP.mpf(10) ** -60
_ROUNDING_ERROR = 1e-100  # relative; a smaller imaginary part or distance to an integer counts as 0
_DIGITS_OF_ARGUMENTS = 60  # that distinguish the arguments of an unknown function

Value = Any  # Fraction, MP.mpf or MP.mpc; mpmath makes the classes of a context at run time

# Expansion along a row takes n! products: 120 for five rows.
MAX_DETERMINANT = 5  # rows
MAX_TERMS = 2000  # of a computed sum or product, in nodes of all its terms
MAX_WHOLE_ARGUMENT = 10**40  # of a greatest common divisor


class Place(NamedTuple):
    """A numbered point at which some symbols have given values."""

    point: int
    values: tuple[tuple[str, Value], ...]


def place(point: "int | Place", name: str, number: Value) -> Place:
    """Returns a point at which one more symbol has a given value."""
    if isinstance(point, Place):
        other_values = tuple(pair for pair in point.values if pair[0] != name)
        return Place(point.point, (*other_values, (name, number)))
    return Place(point, ((name, number),))


# The errors that mpmath raises if a function has no value, or has too many arguments.
_NO_VALUE = (ArithmeticError, LookupError, ValueError, TypeError, MP.NoConvergence)

CONSTANTS: dict[str, Value] = {"e": +MP.e, "pi": +MP.pi, "i": MP.mpc(0, 1)}


def is_exact(*values: Value) -> bool:
    return all(type(value) is Fraction for value in values)


def is_real(value: Value) -> bool:
    return type(value) is not MP.mpc


def num_bits(value: Fraction) -> int:
    """Returns the number of bits of the numerator or the denominator, whichever is larger."""
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _sum(*terms: Value) -> Value:
    return sum(terms)


def _product(*factors: Value) -> Value:
    return math.prod(factors)


def _power(base: Value, exponent: Value) -> Value:
    """Returns a power. With an odd denominator in the exponent it is real: (-8)^{1/3} is -2."""
    if is_exact(base, exponent) and exponent.denominator == 1:
        # The result would have about this many bits.
        if num_bits(base) * abs(exponent) > MAX_BITS / 2:
            return MP.nan
        return base ** int(exponent)
    has_odd_root = is_exact(exponent) and exponent.denominator % 2 and exponent.denominator > 1
    if has_odd_root and is_real(base) and base < 0:
        size = MP.convert(-base) ** MP.convert(exponent)
        return -size if exponent.numerator % 2 else size
    # Even and irrational roots of negative numbers are complex: mpmath returns the principal
    # value.
    return MP.convert(base) ** MP.convert(exponent)


def _root(degree: Value, radicand: Value) -> Value:
    """Returns the real root if it exists: the cube root of -8 is -2."""
    is_negative = not radicand.imag and radicand.real < 0
    if is_negative and degree.real % 2 == 1:
        return -_power(-radicand, 1 / degree)
    return _power(radicand, 1 / degree)


def _factorial(n: Value) -> Value:
    # `in range` is also false for fractions: mpmath extends the factorial to them by the gamma
    # function.
    if is_exact(n) and n in range(LARGEST_FACTORIAL):
        return Fraction(math.factorial(int(n)))
    return MP.factorial(n)


def _floor(x: Value) -> Value:
    return Fraction(math.floor(x)) if is_exact(x) else MP.floor(_near_integer(x))


def _ceil(x: Value) -> Value:
    return Fraction(math.ceil(x)) if is_exact(x) else MP.ceil(_near_integer(x))


def _near_integer(x: Value) -> Value:
    """Removes the rounding error of an integer: the logarithm of 8 to base 2 is 3."""
    nearest = MP.nint(x)
    return nearest if abs(x - nearest) <= _ROUNDING_ERROR * abs(x) else x


def _abs(x: Value) -> Value:
    return abs(x) if is_exact(x) else MP.fabs(x)


def _integers(values: tuple[Value, ...]) -> list[int]:
    """Returns values as integers.

    Raises:
        ArithmeticError: A value is not an integer, or exceeds the limit.
    """
    for number in values:
        if not is_exact(number) or number.denominator != 1 or abs(number) > MAX_WHOLE_ARGUMENT:
            raise ArithmeticError("not a whole number")
    return [int(number) for number in values]


def _gcd(*values: Value) -> Value:
    return Fraction(math.gcd(*_positive(values)))


def _lcm(*values: Value) -> Value:
    return Fraction(math.lcm(*_positive(values)))


def _positive(values: tuple[Value, ...]) -> list[int]:
    """Returns values as positive integers, because symbols are never sampled as other divisors.

    Raises:
        ArithmeticError: A value is not a positive integer, or exceeds the limit.
    """
    numbers = _integers(values)
    if min(numbers) <= 0:
        raise ArithmeticError("not a positive number")
    return numbers


def _largest(*values: Value) -> Value:
    if not all(map(is_real, values)):
        raise ArithmeticError("complex numbers have no order")
    return max(values, key=MP.convert)


def _least(*values: Value) -> Value:
    return -_largest(*(-number for number in values))


def _sign(x: Value) -> Value:
    if not is_real(x):
        raise ArithmeticError("complex numbers have no order")
    return Fraction((x > 0) - (x < 0))


def _residue(number: Value, modulus: Value) -> Value:
    dividend, divisor = _integers((number, modulus))
    return Fraction(dividend % divisor)


def _common_logarithm(x: Value) -> Value:
    return MP.log(x, 10)


def _cis(angle: Value) -> Value:
    return MP.cos(angle) + MP.mpc(0, 1) * MP.sin(angle)


# Applied functions that have a value, such as \max(a, b).
_APPLICATIONS: dict[str, Callable[..., Value]] = {
    "gcd": _gcd,
    "lcm": _lcm,
    "max": _largest,
    "min": _least,
}
KNOWN_APPLICATIONS = frozenset(_APPLICATIONS)


_OPERATIONS: dict[str, Callable[..., Value]] = {
    **{name: getattr(MP, name) for name in FUNCTIONS - {"sgn", "cis", "lg"}},
    "sgn": _sign,
    "cis": _cis,
    "conjugate": MP.conj,
    "re": MP.re,
    "im": MP.im,
    "lg": _common_logarithm,
    "modulo": _residue,
    "binomial": MP.binomial,
    "floor": _floor,
    "ceil": _ceil,
    "abs": _abs,
    # 90° is the number π/2.
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
# Operations that return a rational for rationals, unless it is too large.
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
        "sgn",
        "modulo",
    )
)


# A comparison evaluates the same parts at the same points many times: each form of an answer,
# each scale and each member of a set asks again.
@functools.lru_cache(8192)
def value(node: Node, point: int | Place = 0) -> Value | None:
    """Returns the value of a tree at a point.

    The value is a Fraction if only rational operations remain, otherwise a finite MP.mpf or, if it
    is not real, MP.mpc. It is None if there is no value, or if the computation exceeds the limits
    of size.
    """
    if node.kind == "number":
        return node.value
    if node.kind == "symbol":
        return CONSTANTS[node.name] if node.name in CONSTANTS else _sample(node.name, point)
    try:
        result = _value_of_parts(node, point)
    except _NO_VALUE:
        return None
    return result if result is None or is_exact(result) or MP.isfinite(result) else None


def _value_of_parts(node: Node, point: int | Place) -> Value | None:
    # These kinds need the point or their unevaluated parts.
    special = _SPECIAL.get(node.kind)
    if special is not None:
        return special(node, point)
    operation = _OPERATIONS.get(node.kind)
    if operation is None:
        return None
    values = [value(part, point) for part in node.parts]
    if any(part is None for part in values):
        return None
    if node.kind in _EXACT_OPERATIONS and is_exact(*values):
        return _exact_result(operation, values)
    return _numeric_result(operation, values)


def value_of_operation(kind: str, values: list[Value]) -> Value | None:
    """Returns the value of a function or operation of numbers, None if it has none."""
    operation = _OPERATIONS.get(kind)
    if operation is None:
        return None
    is_exact_operation = kind in _EXACT_OPERATIONS and is_exact(*values)
    try:
        result = (_exact_result if is_exact_operation else _numeric_result)(operation, values)
    except _NO_VALUE:
        return None
    return result if is_exact(result) or MP.isfinite(result) else None


def _sample(name: str, point: int | Place) -> Value | None:
    if name.startswith((VECTOR, MATRIX)):  # see `noncommuting`
        return None
    if isinstance(point, Place):
        # A place fixes some symbols; all others are sampled.
        for given_name, number in point.values:
            if given_name == name:
                return number
        point = point.point
    if name.startswith(COMPLEX):
        return MP.mpc(sample(f"{name} re", point), sample(f"{name} im", point))
    number = sample(name, point)
    return number if is_exact(number) else MP.mpf(number)


# Applications


def _value_of_application(node: Node, point: int | Place) -> Value | None:
    """Returns the value of a known function, or a random one for an unknown function.

    A random value depends only on the function, its arguments and the point, so that f(2) is
    sampled like a separate symbol. Sets may also be arguments: P(A ∪ B).
    """
    name, arguments = node.name, node.parts
    # C(n, k) is the number of combinations.
    if name == "C" and len(arguments) == 2:
        name = "binomial"
    values = [_argument(part, point) for part in arguments]
    if any(part is None for part in values):
        return None
    if name == "binomial":
        return _numeric_result(MP.binomial, values)
    if name in _APPLICATIONS:
        return _APPLICATIONS[name](*values)
    texts = [part if isinstance(part, str) else _written(part) for part in values]
    written = "; ".join(texts)
    # Only the digits that `_written` keeps enter the key, so that f(1/3) and f(2/6) are one
    # symbol.
    return _random_value(f"{name}({written})", point)


def _argument(node: Node, point: int | Place) -> Value | str | None:
    is_complement = node.kind == "power" and node.parts[1].name in ("c", "complement")
    members = region(node) if is_complement or node.kind in REGION_KINDS else None
    return value(node, point) if members is None else f"set {members}"


def _random_value(key: str, point: int | Place) -> Value:
    number = point.point if isinstance(point, Place) else point
    draw = random.Random(f"{key}/{number}")
    size = draw.uniform(0.3, 3.0)
    sign = draw.choice((1, -1)) if POINTS[number].may_be_negative else 1
    return MP.mpf(sign * size)


# Sets and propositions without a value, such as A ∪ B and p → q, are modeled as subsets of
# NUM_ELEMENTS elements. Each letter has a random half of the elements.
# With 256 elements each combination of a few letters, such as "in A, not in B, in C", has
# members, so that formulas that differ in one combination differ in an element.
NUM_ELEMENTS = 256
_ALL_ELEMENTS = (1 << NUM_ELEMENTS) - 1
REGION_KINDS = frozenset(("union", "intersection", "setminus", "complement", "and", "or", "not"))
REGION_KINDS |= {"implies", "equivalent"}


@functools.lru_cache(4096)
def region(node: Node) -> int | None:
    """Returns the elements of a set in letters, as the bits of an integer. None for other trees.

    Propositions are sets, too: "and" is an intersection. Two trees are equal by the laws of sets,
    or of logic, if they have the same elements.
    """
    if node.kind == "symbol" and node.name not in CONSTANTS:
        # The complement of A may be written \bar{A} or A'.
        letter = node.name.removeprefix("bar ").removesuffix("'")
        members = random.Random(f"{letter}/set").getrandbits(NUM_ELEMENTS)
        return members if letter == node.name else _ALL_ELEMENTS & ~members
    # A^c is the complement of A.
    if node.kind == "power" and node.parts[1].name in ("c", "C", "complement"):
        members = region(node.parts[0])
        return None if members is None else _ALL_ELEMENTS & ~members
    if node.kind == "text" and len(node.name) == 1:
        return random.Random(f"{node.name}/set").getrandbits(NUM_ELEMENTS)
    if node.kind == "set" and not node.parts:
        return 0
    if node.kind not in REGION_KINDS:
        return None
    parts = []
    for part in node.parts:
        members = region(part)
        if members is None:
            return None
        parts.append(members)
    if node.kind in ("complement", "not"):
        return _ALL_ELEMENTS & ~parts[0]
    if node.kind == "setminus":
        return parts[0] & ~parts[1]
    # p → q is (not p) or q.
    if node.kind == "implies":
        return (_ALL_ELEMENTS & ~parts[0]) | parts[1]
    if node.kind == "equivalent":
        return _ALL_ELEMENTS & ~(parts[0] ^ parts[1])
    is_union = node.kind in ("union", "or")
    return functools.reduce(operator.or_ if is_union else operator.and_, parts)


# Piecewise formulas


def _value_of_cases(node: Node, point: int | Place) -> Value | None:
    """Returns the value of the first row whose condition holds."""
    for row in node.parts:
        formula, *conditions = row.parts
        holds = holds_at(conditions[0], point) if conditions else True
        if holds is None:
            return None
        if holds:
            return value(formula, point)
    return None


def holds_at(condition: Node, point: int | Place) -> bool | None:
    """Returns whether a condition on symbols holds at a point, None if this is unknown."""
    if condition.kind == "relation":
        return _relation_holds(condition, point)
    if condition.kind == "text":
        return True if condition.name == "otherwise" else None
    if condition.kind == "whole":  # parity: the value and the residue modulo 2
        number = value(condition.parts[0], point)
        if number is None or not is_exact(number) or number.denominator != 1:
            return None
        return number % 2 == int(condition.name)
    # Unknown if any part is unknown.
    if condition.kind in ("and", "list", "or"):
        results = [holds_at(part, point) for part in condition.parts]
        if any(result is None for result in results):
            return None
        return any(results) if condition.kind == "or" else all(results)
    return None


def _relation_holds(relation: Node, point: int | Place) -> bool | None:
    pairs = itertools.pairwise(relation.parts)
    for operator_name, (left, right) in zip(relation.name, pairs, strict=True):
        holds = _link_holds(operator_name, left, right, point)
        # The first link that fails, or is unknown, decides the chain.
        if not holds:
            return holds
    return True


def _link_holds(operator_name: str, left: Node, right: Node, point: int | Place) -> bool | None:
    if operator_name == "∈":
        return _is_member(value(left, point), right, point)
    x, y = _extended_value(left, point), _extended_value(right, point)
    if x is None or y is None:
        return None
    # `near` compares finite numbers only.
    is_finite = MP.isfinite(MP.convert(x)) and MP.isfinite(MP.convert(y))
    same = near(x, y) if is_finite else x == y
    if operator_name in "=≠":
        return same if operator_name == "=" else not same
    if operator_name not in "<>≤≥" or not (is_real(x) and is_real(y)):
        return None
    if same:
        return operator_name in "≤≥"
    is_less = bool(MP.convert(x) < MP.convert(y))
    return is_less if operator_name in "<≤" else not is_less


def _extended_value(node: Node, point: int | Place) -> Value | None:
    """Returns a value that may be infinite."""
    if node.kind == "infinity":
        return MP.inf
    if node.kind == "negative" and node.parts[0].kind == "infinity":
        return MP.ninf
    return value(node, point)


def _is_member(number: Value | None, collection: Node, point: int | Place) -> bool | None:
    if number is None or not is_real(number):
        return None
    if collection.kind == "domain":
        if collection.name == "ℝ":
            return True
        if not is_exact(number):
            # A numeric value may be rational, but does not count as an integer.
            return None if collection.name == "ℚ" else False
        is_whole = number.denominator == 1
        return {"ℚ": True, "ℤ": is_whole, "ℕ": is_whole and number >= 0}.get(collection.name)
    if collection.kind == "tuple" and len(collection.parts) == 2:
        low, high = (_extended_value(part, point) for part in collection.parts)
        if low is None or high is None or not (is_real(low) and is_real(high)):
            return None
        number, low, high = map(MP.convert, (number, low, high))
        above = number >= low if collection.name[0] == "[" else number > low
        return above and (number <= high if collection.name[1] == "]" else number < high)
    return None


# Sums, products, integrals and limits


def _value_of_binder(node: Node, point: int | Place) -> Value | None:
    """Returns the value of a finite sum or product, or a random value with the laws of a limit.

    An expression that cannot be computed is replaced by one with the same laws. An integral, or an
    infinite sum, is a weighted sum over random places, which depend on its limits: it is linear in
    the formula, and changes its sign if the limits are exchanged. A limit is the formula at a
    random place.
    """
    formula, bound, *limits = node.parts
    if node.kind == "integral" and not limits:
        return _functional(f"antiderivative {bound.name}", formula, bound.name, point)
    if node.kind in ("sum", "product"):
        return _finite_sum(node, formula, bound.name, limits, point)
    ends = []
    for limit in limits:
        number = _extended_value(limit, point)
        if number is None:
            return None
        ends.append("inf" if number == MP.inf else "-inf" if number == MP.ninf else number)
    written = [end if isinstance(end, str) else _written(end) for end in ends]
    if node.kind == "limit":
        key = f"limit {node.name} {written}"
        # Point 0 for all points: the place depends only on the limit, so that two limits at the
        # same number agree.
        return value(formula, place(point, bound.name, _random_value(key, 0)))
    sign = 1
    # The integral from b to a is minus the integral from a to b, and from a to a it is 0.
    # The numbers are compared as texts. Any fixed order will do, because only the sign of an
    # exchange counts.
    if len(written) == 2 and written[0] > written[1]:
        written, sign = written[::-1], -1
    if len(written) == 2 and written[0] == written[1]:
        return Fraction(0)
    return _functional(f"integral {written}", formula, bound.name, point, sign)


def _functional(
    key: str,
    formula: Node,
    name: str,
    point: int | Place,
    sign: int = 1,
) -> Value | None:
    total: Value = Fraction(0)
    # The places and weights depend only on the key, and not on the formula or the point: that
    # makes the result linear in the formula.
    draw = random.Random(key)
    for _ in range(3):
        number = MP.mpf(draw.uniform(0.3, 3.0))
        weight = MP.mpf(draw.uniform(0.3, 3.0))
        term = value(formula, place(point, name, number))
        if term is None:
            return None
        total += MP.convert(weight) * MP.convert(term)
    return sign * total


def _infinite_sum(formula: Node, name: str, low: Fraction, point: int | Place) -> Value | None:
    """Returns a weighted sum of the first terms, which does not change if the index is shifted."""
    total: Value = Fraction(0)
    draw = random.Random("infinite sum")
    for index in range(6):
        term = value(formula, place(point, name, low + index))
        if term is None:
            return None
        total += MP.convert(draw.uniform(0.3, 3.0)) * MP.convert(term)
    return total


def _finite_sum(
    node: Node,
    formula: Node,
    name: str,
    limits: list[Node],
    point: int | Place,
) -> Value | None:
    if len(limits) != 2:
        return None
    low, high = (_extended_value(limit, point) for limit in limits)
    if low is None or high is None:
        return None
    if not is_exact(low, high):
        if node.kind == "sum" and is_exact(low) and low.denominator == 1 and high == MP.inf:
            return _infinite_sum(formula, name, low, point)
        return None
    if low.denominator != 1 or high.denominator != 1:
        return None
    # A sum inside of a sum costs more than its nodes show.
    has_binder = any(part.kind in BINDERS for part in nodes(formula))
    size = num_nodes(formula) * (20 if has_binder else 1)
    # high = low - 1 is an empty sum or product.
    if high < low - 1 or (high - low) * size > MAX_TERMS:
        return None
    # The neutral element: 1 for a product, 0 for a sum.
    total: Value = Fraction(node.kind == "product")
    for number in range(int(low), int(high) + 1):
        term = value(formula, place(point, name, Fraction(number)))
        if term is None:
            return None
        operation = _sum if node.kind == "sum" else _product
        is_exact_term = is_exact(total, term)
        result = _exact_result if is_exact_term else _numeric_result
        total = result(operation, [total, term])
    return total


def _value_of_power(node: Node, point: int | Place) -> Value | None:
    """Returns a power. Its exponent stays exact as long as possible, because 1/3 selects a real
    root.
    """
    base, exponent = (value(part, point) for part in node.parts)
    if base is None or exponent is None:
        return None
    if is_exact(base, exponent):
        return _exact_result(_power, [base, exponent])
    if not all(1 / LARGEST < abs(x) < LARGEST for x in (base, exponent) if x):
        return MP.nan
    return _without_rounding_error(_power(base, exponent))


def _value_of_determinant(node: Node, point: int | Place) -> Value | None:
    (inside,) = node.parts[0].parts
    rows = inside.parts if inside.kind == "rows" else (inside,)
    entries = []
    for row in rows:
        cells = row.parts if row.kind == "row" else (row,)
        entries.append([value(cell, point) for cell in cells])
    size = len(entries)
    if size > MAX_DETERMINANT or any(len(row) != size or None in row for row in entries):
        return None
    if any(not is_exact(*row) for row in entries):
        entries = [list(map(MP.convert, row)) for row in entries]
    return _without_rounding_error(_determinant(entries))


def _determinant(rows: list[list[Value]]) -> Value:
    """Expands along the first row."""
    if len(rows) == 1:
        return rows[0][0]
    total: Value = Fraction(0)
    for column, entry in enumerate(rows[0]):
        minor = [row[:column] + row[column + 1 :] for row in rows[1:]]
        total += (-1) ** column * entry * _determinant(minor)
    return total


_SPECIAL: dict[str, Callable[[Node, int | Place], Value | None]] = {
    "apply": _value_of_application,
    "power": _value_of_power,
    "cases": _value_of_cases,
    "determinant": _value_of_determinant,
    **dict.fromkeys(BINDERS, _value_of_binder),
}

# Kinds of nodes that may have complex values for real parts.
_MAY_BE_COMPLEX = words("root power log lg asin acos acosh atanh asec acsc acoth asech")


@functools.lru_cache(8192)
def is_defined(node: Node, point: int | Place) -> bool:
    """Returns whether a formula has a value at a point, with all of its parts real there."""
    number = value(node, point)
    if number is None or not is_real(number):
        return False
    # The square of \sqrt{x} is real for negative x, but its root is not. Bound symbols have no
    # value outside of their binder, and only one case of a piecewise formula holds, so these are
    # judged by their value.
    if not may_be_complex(node) or node.kind in BINDERS or node.kind == "cases":
        return True
    return all(is_defined(part, point) for part in node.parts)


@functools.lru_cache(4096)
def may_be_complex(node: Node) -> bool:
    return node.kind in _MAY_BE_COMPLEX or any(map(may_be_complex, node.parts))


def nodes(node: Node) -> list[Node]:
    """Returns all nodes of a tree."""
    all_nodes = [node]
    for part in node.parts:
        all_nodes += nodes(part)
    return all_nodes


def _written(argument: Value) -> str:
    """Returns a number in fewer digits than it was computed with, so that equal numbers look alike.

    Raises:
        ArithmeticError: The number has more digits than the computation.
    """
    if _has_many_bits(argument):
        raise ArithmeticError("an argument of too many digits")
    argument = MP.convert(argument)
    if abs(argument) < TOLERANCE:  # the rounding error of a difference that is 0
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
    """Returns the real part of a number with an imaginary part that is only a rounding error."""
    if type(result) is MP.mpc and abs(result.imag) <= _ROUNDING_ERROR * abs(result):
        return result.real
    return result


def near(a: Value, b: Value, tolerance: float = TOLERANCE) -> bool:
    """Returns whether two values are equal within a relative tolerance.

    At the default tolerance, two rationals must be exactly equal, and so must a number and a
    rational of many bits, because 140 digits cannot hold it.
    """
    must_be_exact = is_exact(a, b) or _has_many_bits(a) or _has_many_bits(b)
    if must_be_exact and tolerance == TOLERANCE:
        return a == b
    a, b = MP.convert(a), MP.convert(b)
    larger = max(abs(a), abs(b))
    return bool(abs(a - b) <= tolerance * larger)


def is_close(a: Value, b: Value) -> bool:
    """Returns whether two values are near, or both 0 except for rounding errors."""
    return near(a, b) or bool(abs(MP.convert(a) - MP.convert(b)) < NEGLIGIBLE)


def _has_many_bits(value: Value) -> bool:
    return is_exact(value) and num_bits(value) > 256


@functools.lru_cache(4096)
def symbol_names(node: Node) -> frozenset[str]:
    """Returns the names of the symbols in a tree, without constants such as pi.

    The name of an unknown function is followed by brackets, "f()". Bound symbols are left out.
    """
    if node.kind == "symbol":
        return frozenset({node.name} - CONSTANTS.keys())
    is_unknown = node.kind == "apply" and node.name not in KNOWN_APPLICATIONS
    names = frozenset({f"{node.name}()"} if is_unknown and not is_combination(node) else ())
    names = names.union(*map(symbol_names, node.parts))
    return names - {node.parts[1].name} if node.kind in BINDERS else names


def is_combination(node: Node) -> bool:
    """Returns whether an application is C(n, k), the number of combinations."""
    return node.kind == "apply" and node.name == "C" and len(node.parts) == 2
