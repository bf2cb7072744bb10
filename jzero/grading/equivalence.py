"""Whether two parsed answers are the same: rationals are compared exactly, other constants and formulas numerically, at
points that follow from their symbols' names, to many digits. Where a value is beyond the limits, sympy's automatic
canonical form decides. Powers are sized before they are computed."""

import functools
import math
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath

from jzero.grading.latex_parser import FUNCTIONS, REAL, Node, negative, refuse

BITS = 8192  # of rationals
LARGEST = 1e40  # of what else is computed with, and its inverse the smallest: beside it, small terms must count
RANGES = (
    (0.3, 1.0),
    (1.0, 3.0),
    (3.0, 8.0),
    (0.01, 0.3),
    (1.0, 2.0),
) * 2  # where symbols are sampled
MP = mpmath.MPContext()
MP.dps = 140
TOLERANCE = 1e-80
BAD = (
    ArithmeticError,
    LookupError,
    ValueError,
    TypeError,
    MP.NoConvergence,
)  # there is no such value
CONSTANTS = {"e": +MP.e, "pi": +MP.pi, "i": MP.mpc(0, 1)}


def parts(node: Node) -> list[Node]:
    return [part for part in node[1:] if isinstance(part, tuple)]


@functools.lru_cache(4096)
def names(node: Node) -> set[str]:
    """The symbols in a tree."""
    return (
        {node[1]} - CONSTANTS.keys() if node[0] == "sym" else set().union(*map(names, parts(node)))
    )


def exact(*values: Any) -> bool:
    return all(type(value) is Fraction for value in values)


def bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def power(base: Any, exponent: Any) -> Any:
    if not exact(base, exponent) or exponent.denominator != 1:
        return MP.convert(base) ** exponent
    return base ** int(exponent) if bits(base) * abs(exponent) <= BITS / 2 else refuse("size")


RATIONAL = ("neg", "add", "mixed", "mul", "div", "ratio", "pow", "factorial")
OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(MP, name) for name in (*FUNCTIONS, "binomial", "floor", "ceil")},
    "factorial": lambda n: (
        Fraction(math.factorial(int(n))) if exact(n) and n in range(450) else MP.factorial(n)
    ),
    "neg": lambda x: -x,
    **dict.fromkeys(("add", "mixed"), lambda *terms: sum(terms)),
    "mul": lambda *factors: math.prod(factors),
    **dict.fromkeys(("div", "ratio"), lambda x, y: x / y),
    "pow": power,  # a root is real if it can be
    "root": lambda n, x: (
        -power(-x, 1 / n) if not x.imag and x.real < 0 and n.real % 2 == 1 else power(x, 1 / n)
    ),
    "deg": MP.radians,
    "abs": MP.fabs,
}


@functools.lru_cache(8192)
def value(node: Node, k: int = 0) -> Any:
    """At the k-th point: a Fraction, a finite mpf or, if that is not real, mpc; None where there is none."""
    kind = node[0]
    if kind == "num":
        return node[1]
    if kind == "sym" and node[1] in CONSTANTS:
        return CONSTANTS[node[1]]
    if kind == "sym":  # positive at first, then of both signs
        draw = random.Random(f"{node[1]}/{k}")
        return MP.mpf(
            draw.uniform(*RANGES[k]) * draw.choice((1, -1 if k >= len(RANGES) // 2 else 1))
        )
    values = [value(part, k) for part in parts(node)]
    rational = kind in RATIONAL and exact(*values)
    try:
        fits = (
            sum(map(bits, values)) <= BITS
            if rational
            else all(1 / LARGEST < abs(x) < LARGEST for x in values if x)
        )
        found = (
            OPERATIONS[kind](*(values if rational else map(MP.convert, values))) if fits else MP.nan
        )
        found = (
            found.real
            if type(found) is MP.mpc and abs(found.imag) <= 1e-100 * abs(found)
            else found
        )
        return found if MP.isfinite(found) else None
    except BAD:
        return None


def near(a: Any, b: Any, tolerance: float = TOLERANCE) -> bool:
    if tolerance == TOLERANCE and (exact(a, b) or any(exact(x) and bits(x) > 256 for x in (a, b))):
        return a == b
    a, b = MP.convert(a), MP.convert(b)
    return bool(abs(a - b) <= tolerance * max(abs(a), abs(b)))


def literal(node: Node) -> bool:
    """A number as it is written: decimal, fraction, mixed, scientific, a power. No arithmetic is left to do."""
    if node[0] == "mul":
        return (
            len(node) == 3
            and node[1][0] == "num"
            and node[2][0] == "pow"
            and node[2][1][:2] == ("num", 10)
        )
    return node[0] in ("num", "mixed") or (
        node[0] in ("neg", "div", "ratio", "pow") and all(map(literal, parts(node)))
    )


def stands_for(a: Node, b: Node) -> bool:
    """A decimal of six digits or more, rounded or cut, for an exact constant that no decimal equals."""
    written, x, y = a[1] if a[0] == "neg" else a, value(a), value(b)
    place = written[2] if written[0] == "num" else 0
    if (
        not place
        or x.denominator == 1
        or abs(x) < 10**5 * place
        or (exact(y) and not 10 ** bits(y) % y.denominator)
    ):
        return False
    return bool(abs(y - x) / place <= (1 if abs(y) - abs(x) > 0 else 0.5))


def same_value(a: Node, b: Node, strict: bool) -> bool:
    """Identity at every point where both are real or, where they never are, as complex numbers. If `strict`, a gold
    that is written as a number takes only what is."""
    if names(a) != names(b) or (strict and literal(b) and not literal(a)):
        return False
    if not {type(value(a)), type(value(b))} - {Fraction, MP.mpf} and not near(value(a), value(b)):
        return stands_for(a, b)
    pairs = [(value(a, k), value(b, k)) for k in range(len(RANGES) if names(a) else 1)]
    known = [(x, y) for x, y in pairs if x is not None and y is not None]
    real = [(x, y) for x, y in known if MP.mpc not in (type(x), type(y))]
    for some in (real, known):
        if len(some) >= min(2, len(pairs)):
            return all(near(x, y) for x, y in some)
    return all(x is y for x, y in pairs) and form(a) == form(b)


def form(node: Node) -> Any:
    """As sympy's sums and products. All else, large numbers too, stands for itself: nothing large is computed."""
    import sympy

    if exact(number := value(node)) and bits(number) <= 64:
        return sympy.Rational(number)
    build = {"add": sympy.Add, "mul": sympy.Mul, "neg": lambda x: -x}.get(
        node[0]
    ) or sympy.Function(node[0])
    return build(
        *(form(part) if isinstance(part, tuple) else sympy.Symbol(str(part)) for part in node[1:])
    )


def is_name(node: Node) -> bool:
    """x, f(x), |AB|, A:B, (p, q), a fraction of names: no number, sum or power."""
    if node[0] == "sym":
        return node[1] not in CONSTANTS
    return node[0] in ("mul", "div", "ratio", "tuple", "abs", *FUNCTIONS) and all(
        map(is_name, parts(node))
    )


def solved(node: Node) -> Node:
    """What a relation says of a name: the value it is equal to, or the interval it is in; else the relation."""
    _, operators, *sides = node
    named = [is_name(side) for side in sides]
    if set(operators) <= {"=", "≈"}:
        rest = [side for side in sides if not is_name(side)] or sides[1:]
        own = {side[1] for side in sides if side[0] == "sym" and side not in rest} & set().union(
            *map(names, rest)
        )
        values, tolerance = (
            [value(plain(side)[0]) for side in rest],
            1e-2 if "≈" in operators else 1e-20,
        )
        held = len(rest) == 1 or (
            None not in values and all(near(v, values[0], tolerance) for v in values)
        )
        return rest[0] if held and not own and (any(named) or "≈" in operators) else node
    if len(sides) == 2:
        operators, sides = (
            ("<" + operators, [REAL[2], *sides])
            if named[0]
            else (operators + "<", [*sides, REAL[3]])
        )
    if set(operators) - set("<≤") or [is_name(side) for side in sides] != [False, True, False]:
        return node
    return ("tuple", "(["[operators[0] == "≤"] + ")]"[operators[1] == "≤"], sides[0], sides[2])


def same_relation(a: Node, b: Node, strict: bool) -> bool:
    """Side by side; what is left minus right of a single link may be scaled."""
    if a[0] != b[0]:
        a, b = (solved(node) if node[0] == "rel" else node for node in (a, b))
        return "rel" not in (a[0], b[0]) and equal(a, b, strict)
    if a[1] != b[1] or len(a[1]) > 1 or same_parts(a, b, False):
        return same_parts(a, b, False)
    p, q = (("add", node[2], negative(node[3])) for node in (a, b))
    known = [scale for k in range(len(RANGES)) if (scale := value(("div", p, q), k)) is not None]
    same = (
        names(p) == names(q)
        and len(known) > 1
        and known[0]
        and all(near(known[0], scale) for scale in known)
    )
    return bool(same and (a[1] in "=≠" or known[0].real > 0))


def plain(node: Node) -> tuple[Node, str]:
    """An answer without its unit, and that."""
    return (plain(node[1])[0], node[2]) if node[0] in ("unit", "deg") else (node, "")


def same_members(a: Node, b: Node, strict: bool) -> bool:
    """As multisets, but what is said twice may be said once."""
    x, y = ([*node[1:]] if node[0] in ("list", "set", "union") else [node] for node in (a, b))
    if len(x) != len(y):
        x, y = (
            [p for k, p in enumerate(z) if not any(equal(p, q, False) for q in z[:k])]
            for z in (x, y)
        )
    count = lambda item, z: sum(equal(item, other, strict and z is y) for other in z)
    return len(x) == len(y) and all(0 < count(item, y) == count(item, x) for item in x)


def spelled(node: Node) -> Any:
    return "".join(str(part[-1]) for part in node[1:]).lower() if node[0] == "mul" else node[-1]


def same_parts(a: Node, b: Node, strict: bool) -> bool:
    pairs = zip(a, b, strict=False)
    return len(a) == len(b) and all(
        equal(p, q, strict) if isinstance(p, tuple) else p == q for p, q in pairs
    )


STRUCTURES: dict[
    str, Callable[[Node, Node, bool], bool]
] = {  # the first kind that is in one of the two
    "rel": same_relation,
    "text": lambda a, b, strict: spelled(a) == spelled(b),
    **dict.fromkeys(("matrix", "rows", "row", "tuple"), same_parts),
    **dict.fromkeys(("list", "set", "union"), same_members),
}


@functools.lru_cache(4096)
def equal(a: Node, b: Node, strict: bool) -> bool:
    """`a` is the prediction and `b` the gold."""
    (x, unit), (y, other) = plain(a), plain(b)
    if a == b or (unit and other and unit != other) or (unit[:1] == "_" and not other):
        return a == b
    if (unit == "percent") != (other == "percent") and literal(x):
        p, q = (
            value(n) and value(n) / (100 if u == "percent" else 1)
            for n, u in ((x, unit), (y, other))
        )
        if p is not None and exact(p) and p == q:
            return True
    kind = next((kind for kind in STRUCTURES if kind in (x[0], y[0])), None)
    return STRUCTURES[kind](x, y, strict) if kind else same_value(x, y, strict)
