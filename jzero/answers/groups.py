r"""Finitely generated abelian groups, small groups with several names, and permutations.

Z_6 is Z/6Z and Z_2 x Z_3, and Z_4 is not Z_2 x Z_2. (1 2 3) is (2 3 1), and (1 2)(2 3).
"""

import re
from collections import Counter

from jzero.answers.evaluation import is_exact, symbol_names, value
from jzero.answers.expressions import Node

MAX_ORDER = 10**6
MAX_RANK = 20
CYCLIC = "cyclic"  # the kind of Z_n
_INTEGERS = Node("domain", name="ℤ")
# Symmetric, alternating and Klein's groups, by the orders of their cyclic factors.
_ABELIAN = {("V", 4): {2: 2}, ("K", 4): {2: 2}, ("A", 3): {3: 1}, ("S", 2): {2: 1}}
_CYCLES = re.compile(r"(?:\(\s*[0-9](?:[\s~]*[0-9])*\s*\)\s*)+")
_CYCLE = re.compile(r"\(([^()]*)\)")


def is_group(node: Node) -> bool:
    """Returns whether a tree can only be a group: Z_6, Z^2, or a product with one of these."""
    if node.kind == "power":
        return node.parts[0] == _INTEGERS or is_group(node.parts[0])
    if node.kind != "cartesian":
        return node.kind == CYCLIC
    return any(map(is_group, node.parts)) or all(part == _INTEGERS for part in node.parts)


def invariants(node: Node) -> Counter[int] | None:
    """Returns how often each prime power occurs as the order of a cyclic factor, and 0 for Z."""
    if node == _INTEGERS:
        return Counter((0,))
    if node.kind == "symbol" and _index(node) in _ABELIAN:
        return Counter(_ABELIAN[_index(node)])
    if node.kind == CYCLIC or (node.kind == "symbol" and node.name.startswith("C_")):
        return _cyclic(node)
    if node.kind == "power":
        base, count = invariants(node.parts[0]), _whole(node.parts[1])
        if base is None or count is None or count > MAX_RANK:
            return None
        return Counter({order: number * count for order, number in base.items()})
    if node.kind != "cartesian":
        return None
    total: Counter[int] = Counter()
    for part in node.parts:
        group = invariants(part)
        if group is None:
            return None
        total += group
    return total


def _cyclic(node: Node) -> Counter[int] | None:
    if node.kind == CYCLIC:
        return _of_order(node.parts[0])
    order = _index(node)[1]
    return _factored(order) if order else None


def _index(node: Node) -> tuple[str, int]:
    """Returns S and 3 of the symbol S_3, and 0 for a symbol without a number below it."""
    # The name of S_3 has the tree of its index: see `Parser.subscript`.
    letter, _, below = node.name.partition("_Node(")
    written = below.partition("value=Fraction(")[2].partition(",")[0]
    digits = "".join(filter(str.isdigit, written))
    return letter, int(digits) if digits and len(digits) < 7 else 0


def same_small_group(node: Node, other: Node) -> bool:
    """Returns whether two symbols name the same group: S_3 and D_3."""
    return {_index(node), _index(other)} == {("S", 3), ("D", 3)}


def _of_order(node: Node) -> Counter[int] | None:
    order = _whole(node)
    return None if order is None else _factored(order)


def _whole(node: Node) -> int | None:
    number = None if symbol_names(node) else value(node)
    if number is None or not is_exact(number) or number.denominator != 1:
        return None
    return int(number) if 0 < number <= MAX_ORDER else None


def _factored(order: int) -> Counter[int]:
    """Returns the prime powers of which a number is the product."""
    factors: Counter[int] = Counter()
    divisor = 2
    while divisor * divisor <= order:
        power = 1
        while order % divisor == 0:
            order //= divisor
            power *= divisor
        if power > 1:
            factors[power] += 1
        divisor += 1
    if order > 1:
        factors[order] += 1
    return factors


# Permutations


def are_permutations(answer: str, gold: str) -> bool:
    """Returns whether two texts can only be products of cycles, such as (1 2)(3 4) or (12)(123)."""
    if not answer.lstrip("$ ").startswith("("):
        return False
    texts = [_without_spacing(text) for text in (answer, gold)]
    if not all(map(_CYCLES.fullmatch, texts)):
        return False
    cycles = [_cycles(text) for text in texts]
    if any(re.search(r"[0-9]\s+[0-9]", text) for text in texts):
        return True
    # Without spaces, a single bracket is a number, and a digit that occurs twice is no cycle.
    return all(
        len(product) > 1 and all(1 < len(cycle) == len({*cycle}) for cycle in product)
        for product in cycles
    )


def same_permutation(answer: str, gold: str) -> bool:
    """Returns whether two products of cycles are the same permutation."""
    return _permutation(_without_spacing(answer)) == _permutation(_without_spacing(gold))


def _without_spacing(text: str) -> str:
    return re.sub(r"\\[,;! ]", " ", text).strip("$ ")


def _cycles(text: str) -> list[list[str]]:
    return [[digit for digit in cycle if digit.isdigit()] for cycle in _CYCLE.findall(text)]


def _permutation(text: str) -> dict[str, str]:
    """Returns where each digit goes, without the digits that stay; the last cycle acts first."""
    cycles = _cycles(text)
    moved = {}
    for digit in {digit for cycle in cycles for digit in cycle}:
        place = digit
        for cycle in reversed(cycles):
            if place in cycle:
                place = cycle[(cycle.index(place) + 1) % len(cycle)]
        if place != digit:
            moved[digit] = place
    return moved
