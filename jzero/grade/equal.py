"""Whether two parsed answers are the same answer.

Rationals are compared exactly, other constants and formulas numerically, at points that follow from their symbols'
names, to many digits. Where a value is beyond the limits, sympy's automatic canonical form decides. Powers
and factorials are sized before they are computed."""

import functools
import math
import operator
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath

from jzero.grade.parse import Node, refuse

BITS = 8192  # of the operands of exact arithmetic
LARGEST = 12000  # |log| of a value
SYMBOLS = 12
SIGNIFICANT = 6  # digits of a decimal that may stand for an exact value
RANGES = ((0.3, 1.0), (1.0, 3.0), (3.0, 8.0), (0.01, 0.3), (1.0, 2.0))  # where symbols are sampled
LITERAL = {"neg": ("num", "mixed", "div", "pow", "mul"), "div": ("num", "neg", "pow"), "pow": ("num", "neg")}
MP = mpmath.MPContext()
MP.dps = 140
TOLERANCE = 1e-80
PERCENT = ("num", Fraction(1, 100), 0)
BAD = (ArithmeticError, LookupError, ValueError, TypeError, MP.NoConvergence)  # there is no such value


def parts(node: Node) -> list[Node]:
    return [part for part in node[1:] if isinstance(part, tuple)]


@functools.lru_cache(4096)
def names(node: Node) -> frozenset[str]:
    """The symbols in a tree, and ± where it has plus-minus."""
    own = {"±"} if node[0] in ("pm", "mp") else set()
    if node[0] == "sym" and node[1] not in CONSTANTS:
        own = {node[1]}
    return frozenset(own).union(*map(names, parts(node)))


# Values


def bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def power(base: Any, exponent: Any) -> Any:
    if not base:
        return base if exponent.real > 0 else refuse("a power of 0")
    return base**exponent if abs(exponent * MP.log(base)) < LARGEST else refuse("size")


def root(radicand: Any, degree: Any) -> Any:
    """Real where the radicand is negative and the degree odd."""
    negative = not radicand.imag and radicand.real < 0 and degree.real % 2 == 1
    return -power(-radicand, 1 / degree) if negative else power(radicand, 1 / degree)


def bounded(name: str, largest: float = LARGEST) -> Callable[[Any], Any]:
    return lambda x: getattr(MP, name)(x) if abs(x) < largest else refuse("size")


factorial = bounded("factorial", 3000)
CONSTANTS = {"e": +MP.e, "π": +MP.pi, "i": MP.mpc(0, 1)}
BOUNDED = ("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp")
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "neg": operator.neg,
    "add": lambda *terms: sum(terms),
    "mixed": operator.add,
    "mul": lambda *factors: math.prod(factors),
    "div": operator.truediv,
}
EXACT = ARITHMETIC | {  # what is too large or does not exist is None
    "div": lambda a, b: a / b if b else None,
    "pow": lambda a, n: a ** int(n) if n.denominator == 1 and (a or n > 0) and bits(a) * abs(n) <= BITS / 2 else None,
    "factorial": lambda n: Fraction(math.factorial(int(n))) if n.denominator == 1 and 0 <= n <= 450 else None,
}
NUMERIC = ARITHMETIC | {
    **{name: bounded(name) for name in BOUNDED},
    "pow": power,
    "root": root,
    "deg": lambda a: a * MP.pi / 180,
    "log": lambda x, *base: MP.log(x, *base),
    "abs": lambda x: MP.mpf(abs(x)),
    "factorial": factorial,
    "binom": lambda n, k: factorial(n) / factorial(k) / factorial(n - k),
    "floor": lambda x: MP.floor(x) if not x.imag else refuse("complex"),
    "ceil": lambda x: MP.ceil(x) if not x.imag else refuse("complex"),
}


@functools.lru_cache(4096)
def exact(node: Node) -> Fraction | None:
    """The value of rational arithmetic, or None."""
    if node[0] == "num":
        return node[1]
    function = EXACT.get(node[0])
    if function is None:
        return None
    known = [x for x in map(exact, parts(node)) if x is not None]
    return function(*known) if len(known) == len(parts(node)) and sum(map(bits, known)) <= BITS else None


def value(node: Node, point: dict[str, Any]) -> Any:
    if node[0] == "num":
        return MP.mpf(node[1].numerator) / node[1].denominator
    if node[0] == "sym":
        return CONSTANTS[node[1]] if node[1] in CONSTANTS else point[node[1]]
    return NUMERIC[node[0]](*[value(part, point) for part in parts(node)])


def evaluate(node: Node, point: dict[str, Any]) -> Any:
    """A finite number, or None."""
    try:
        found = value(node, point)
        return found if MP.isfinite(found) else None
    except BAD:
        return None


def near(a: Any, b: Any, tolerance: float = TOLERANCE) -> bool:
    return bool(abs(a - b) <= tolerance * max(abs(a), abs(b)))


# Numbers and formulas


def literal(node: Node) -> bool:
    """A number as it is written: decimal, fraction, mixed, scientific, a power. No arithmetic is left to do."""
    if node[0] == "mul":
        return len(node) == 3 and node[1][0] == "num" and node[2][0] == "pow" and node[2][1][:2] == ("num", 10)
    inside = LITERAL.get(node[0], ())
    return node[0] in ("num", "mixed") or (node[0] in LITERAL and all(p[0] in inside and literal(p) for p in node[1:]))


def stands_for(a: Node, b: Node) -> bool:
    """A decimal of SIGNIFICANT digits or more, rounded or cut, for an exact constant that no decimal equals."""
    gold, written, number = exact(b), exact(a), a[1] if a[0] == "neg" else a
    if number[0] != "num" or not SIGNIFICANT <= number[2] < 40 or not written or names(b):
        return False
    if gold is not None and not 10 ** min(BITS, bits(gold)) % gold.denominator:
        return False
    y = evaluate(b, {})
    if y is None or y.imag or written.denominator == 1:
        return False
    x = MP.mpf(written.numerator) / written.denominator
    last = MP.mpf(10) ** (MP.floor(MP.log10(abs(x))) + 1 - number[2])
    return bool(abs(x - y) <= (last if abs(x) < abs(y) else last / 2))


@functools.lru_cache(4096)
def points(symbols: frozenset[str]) -> list[dict[str, Any]]:
    """Positive points of several sizes, then points of both signs."""
    found = []
    for k, (low, high) in enumerate(RANGES * 2):
        draws = {name: random.Random(f"{name}/{k}") for name in symbols}
        signs = (1, -1) if k >= len(RANGES) else (1,)
        found.append({name: MP.mpf(draw.choice(signs) * draw.uniform(low, high)) for name, draw in draws.items()})
    return found if symbols else [{}]


def same_formula(a: Node, b: Node) -> bool:
    """Identity at every sampled point where both are real or, where they never are, as complex numbers."""
    if names(a) != names(b) or len(names(a)) > SYMBOLS:
        return False
    sampled = points(names(a))
    beyond = True  # neither has a value anywhere
    agree: dict[bool, list[bool]] = {True: [], False: []}  # by whether both are real
    for point in sampled:
        x, y = evaluate(a, point), evaluate(b, point)
        beyond = beyond and x is None and y is None
        if x is not None and y is not None:
            real = near(x, x.real, 1e-15) and near(y, y.real, 1e-15)
            agree[real].append(near(x, y))
            if real and not agree[real][-1]:
                return False
    enough, both = min(2, len(sampled)), agree[True] + agree[False]
    if len(both) >= enough:
        return len(agree[True]) >= enough or all(both)
    return beyond and same_form(a, b)


def same_form(a: Node, b: Node) -> bool:
    """As sympy's sums and products. All else, large numbers too, stands for itself: nothing large is computed."""
    import sympy

    def form(node: Any) -> Any:
        if not isinstance(node, tuple):
            return sympy.Symbol(str(node))
        number = exact(node)
        if number is not None and bits(number) <= 64:
            return sympy.Rational(number.numerator, number.denominator)
        build = {"add": sympy.Add, "mul": sympy.Mul, "neg": operator.neg}.get(node[0]) or sympy.Function(node[0])
        return build(*map(form, node[1:]))

    return bool(form(a) == form(b))


def same_number(a: Node, b: Node, strict: bool) -> bool:
    """If `strict`, a gold that is written as a number takes only what is."""
    x, y = exact(a), exact(b)
    if strict and y is not None and literal(b) and not literal(a):
        return False
    if x is not None and x == y:
        return True
    return stands_for(a, b) or ((x is None or y is None) and same_formula(a, b))


# Relations


def is_name(node: Node) -> bool:
    """x, f(x), |AB|, A:B, (p, q), a fraction of names: no number, sum or power."""
    if node[0] == "sym":
        return node[1] not in CONSTANTS
    return node[0] in ("mul", "div", "tuple", "abs", "log", *BOUNDED) and all(map(is_name, parts(node)))


def assigned(node: Node) -> Node | None:
    """b of a = b or b = a, where a is a name and no part of b. A chain must hold; what follows ≈ must be near."""
    if node[0] != "rel" or set(node[1]) - {"=", "≈"}:
        return None
    chain = list(node[2:])
    if is_name(chain[-1]) and not is_name(chain[0]):
        chain.reverse()
    if is_name(chain[0]):
        name = chain.pop(0)
        if name[0] == "sym" and name[1] in names(chain[0]):
            return None
    elif "≈" not in node[1]:
        return None
    values = [evaluate(plain(part)[0], {}) for part in chain]
    near_enough = 1e-2 if "≈" in node[1] else 1e-20
    held = len(chain) == 1 or all(v is not None and near(v, values[0], near_enough) for v in values)
    return chain[0] if held else None


def flipped(node: Node) -> Node:
    return ("rel", node[1][::-1].translate(str.maketrans("<>≤≥", "><≥≤")), *node[:1:-1])


def interval(node: Node) -> Node | None:
    """Inequalities about one name as an interval."""
    if node[0] != "rel":
        return None
    _, operators, *sides = flipped(node) if node[1][0] in ">≥" else node
    if len(operators) == 1:
        below = is_name(sides[0])
        operators = "<" + operators if below else operators + "<"
        sides = [("neg", ("inf",)), *sides] if below else [*sides, ("inf",)]
    if set(operators) - set("<≤") or [is_name(side) for side in sides] != [False, True, False]:
        return None
    return ("tuple", "(["[operators[0] == "≤"] + ")]"[operators[1] == "≤"], sides[0], sides[2])


def same_relation(a: Node, b: Node, strict: bool) -> bool:
    """Link by link in either direction; the sides of a single link may be moved over and scaled."""
    a = a if a[1] == b[1] else flipped(a)
    if same_parts(a, b, False):
        return True
    p, q = (("add", node[2], ("neg", node[3])) for node in (a, b))
    if a[1] != b[1] or len(a) > 4 or names(p) != names(q) or not names(p):
        return False
    scales = [evaluate(("div", p, q), point) for point in points(names(p))]
    scales = [scale for scale in scales if scale is not None]
    same = len(scales) > 1 and scales[0] and all(near(scales[0], scale) for scale in scales)
    return bool(same and (a[1] in "=≠" or scales[0].real > 0))


# Answers


def plain(node: Node) -> tuple[Node, str]:
    """An answer without its unit, and that."""
    if node[0] == "neg" and node[1][0] in ("unit", "deg"):
        inside, unit = plain(node[1])
        return ("neg", inside), unit
    if node[0] == "unit":
        return plain(node[1])[0], node[2]
    return (node[1], "degree") if node[0] == "deg" else (node, "")


def one_of_two(node: Node, sign: int) -> Node:
    """One value of an expression with plus-minus."""
    found = tuple(one_of_two(part, sign) if isinstance(part, tuple) else part for part in node)
    if node[0] not in ("pm", "mp"):
        return found
    term = found[2] if (sign > 0) == (node[0] == "pm") else ("neg", found[2])
    return term if exact(found[1]) == 0 else ("add", found[1], term)


def members(node: Node) -> list[Node]:
    """Of a list, set or union; plus-minus makes two."""
    found = []
    for part in node[1:] if node[0] in ("list", "set", "union") else [node]:
        found += [one_of_two(part, 1), one_of_two(part, -1)] if "±" in names(part) else [part]
    return found


def same_members(a: Node, b: Node, strict: bool) -> bool:
    """As multisets, but what is said twice may be said once."""
    x, y = members(a), members(b)
    if max(len(x), len(y)) > 2 * min(len(x), len(y)):
        return False
    if len(x) != len(y):
        x, y = distinct(x), distinct(y)
    for item in x:
        match = next((k for k, other in enumerate(y) if equal(item, other, strict)), None)
        if match is None:
            return False
        del y[match]
    return not y


def distinct(items: list[Node]) -> list[Node]:
    return [item for k, item in enumerate(items) if not any(equal(item, other, False) for other in items[:k])]


def letters(node: Node) -> str:
    if node[0] == "mul" and all(part[0] == "sym" for part in node[1:]):
        return "".join(part[1] for part in node[1:]).lower()
    return node[1] if node[0] == "text" else "not text"


def same_parts(a: Node, b: Node, strict: bool) -> bool:
    pairs = zip(a, b, strict=False)
    return len(a) == len(b) and all(equal(p, q, strict) if isinstance(p, tuple) else p == q for p, q in pairs)


STRUCTURES: dict[str, Callable[[Node, Node, bool], bool]] = {  # the first kind that is in one of the two
    "text": lambda a, b, strict: letters(a) == letters(b),
    **dict.fromkeys(("matrix", "row", "tuple"), same_parts),
    **dict.fromkeys(("list", "set", "union", "pm", "mp"), same_members),
}


def equal(a: Node, b: Node, strict: bool) -> bool:
    """`a` is the prediction and `b` the gold."""
    if a == b:
        return True
    if (a[0] == "rel") != (b[0] == "rel"):
        a, b = (assigned(node) or interval(node) or node for node in (a, b))
    if "rel" in (a[0], b[0]):
        return a[0] == b[0] and same_relation(a, b, strict)
    (a, unit), (b, other) = plain(a), plain(b)
    if (unit and other and unit != other) or (unit[:1] == "_" and not other):
        return False
    if (unit == "percent") != (other == "percent") and literal(a):
        x, y = (exact(("mul", n, PERCENT)) if u == "percent" else exact(n) for n, u in ((a, unit), (b, other)))
        if x is not None and x == y:
            return True
    for kind, same in STRUCTURES.items():
        if kind in (a[0], b[0]):
            return same(a, b, strict)
    if "±" in names(a) | names(b):
        return same_members(a, b, strict)
    return same_number(a, b, strict)
