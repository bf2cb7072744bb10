r"""The tree of a parsed answer.

`latex_parser` builds trees, `evaluation` computes their values, `equivalence` compares them.

| kind                     | written as      | parts                 | name                       |
|--------------------------|-----------------|-----------------------|----------------------------|
| number                   | 12, 0.5         |                       | (it has a `value`)         |
| symbol                   | x, \pi          |                       | the symbol's name          |
| text                     | \text{Tuesday}  |                       | the words, without spaces  |
| infinity                 | \infty          |                       | inf                        |
| negative                 | -a              | a                     |                            |
| add, multiply            | a+b, ab         | all terms or factors  |                            |
| divide, power            | a/b, a^b        | a, b                  |                            |
| mixed                    | 2\frac13        | 2, 1/3                |                            |
| root                     | \sqrt[n]{a}     | n, a                  |                            |
| factorial, abs, floor... | a!, \|a\|       | a                     |                            |
| binomial                 | \binom{n}{k}    | n, k                  |                            |
| sin, log, ...            | \sin a, \log_b a| a, then b of a log    |                            |
| apply                    | f(a, b), \gcd(a) | all arguments         | the function's name        |
| scaled                   | a million        | a, 1000000            |                            |
| given                    | A \mid B         | A, B                  |                            |
| unit                     | a\text{ cm}     | a                     | the unit; _... is a base   |
| degree                   | a^\circ         | a                     | degree                     |
| ratio                    | a:b             | all sides             | time, where b is as in :05 |
| list, set, union         | a,b {a,b} a∪b   | all members           |                            |
| intersection             | a∩b             | all sides             |                            |
| tuple                    | (a,b] (0,1)     | all coordinates       | its two brackets           |
| matrix, rows, row        | a&b\\c&d        | all rows, or entries  |                            |
| relation                 | a<b≤c           | all sides             | its operators, here <≤     |
| and, or                  | a<1 and b>2     | all statements        |                            |
| not, implies, equivalent | p → q           | all propositions      |                            |
| congruence               | a ≡ b (mod m)   | a relation, or b; m   |                            |
| modulo                   | a mod m         | a, m                  |                            |
| setminus, complement     | A \ B          | A, B                  |                            |
| domain                   | ℤ               |                       | ℤ, ℕ, ℚ or ℂ               |
| sum, product, integral   | \sum_{k=1}^n a | a, k, limits          |                            |
| limit                    | \lim_{x\to a} f | f, x, a             | + or - for a side          |
| cases                    | \begin{cases}   | cases: formula, condition |                        |
| whole                    | n is even       | n                     | 0, or 1 for odd            |
| determinant              | \begin{vmatrix} | a matrix             |                            |
| cross                    | a × b           | two vectors           |                            |
| conjugate, re, im        | \bar z, \Re z   | a complex number      |                            |
| outer                    | ∇a              | two vectors           |                            |
| cartesian, compose       | A × B, f ∘ g    | sets, or functions, in order |                     |
| compound                 | 6 ft 2 in       | all quantities        |                            |
"""

import functools
from fractions import Fraction
from typing import NamedTuple

# Members of lists and sets are compared in pairs, which takes the square of their number.
MAX_PARTS = 40  # parts of one node


class Refused(Exception):
    """An answer that the grammar does not know, or that exceeds one of its limits."""


class Node(NamedTuple):
    """One node of a tree.

    Nodes are tuples, because trees are keys of caches: nodes must hash and compare fast.
    """

    kind: str
    parts: tuple["Node", ...] = ()
    name: str = ""
    value: Fraction | int = 0  # of a number; otherwise the int 0, which is fast to hash
    # The value of a number's last decimal place, 1/100 for 0.25; 0 for a number without decimals.
    decimal_place: Fraction | int = 0


INFINITY = Node("infinity", name="inf")
TWO = Node("number", value=Fraction(2))
# In front of the names of vectors and matrices, whose products have an order.
VECTOR, MATRIX = "vec ", "matrix "
COMPLEX = "complex "  # in front of the names of complex numbers
REAL_LINE = Node("tuple", (Node("negative", (INFINITY,)), INFINITY), name="()")
EMPTY_SET = Node("set")


def symbol(name: str) -> Node:
    return Node("symbol", name=name)


def has_unit(node: Node) -> bool:
    return node.kind in ("unit", "degree")


def negative(node: Node) -> Node:
    """Returns -node. The sign goes inside a unit: -5 cm is (-5) cm."""
    if has_unit(node):
        return node._replace(parts=(negative(node.parts[0]),))
    return Node("negative", (node,))


def mentions(node: Node, name: Node) -> bool:
    """Returns whether a symbol occurs in a tree."""
    return node == name or any(mentions(part, name) for part in node.parts)


def plainly_named(node: Node) -> Node:
    """Returns a tree with plain names for vectors, matrices and complex numbers."""
    if node.kind == "symbol":
        for mark in (VECTOR, MATRIX, COMPLEX):
            node = node._replace(name=node.name.removeprefix(mark))
        return node
    parts = tuple(map(plainly_named, node.parts))
    if node.kind == "conjugate" and parts[0].kind == "symbol":
        return symbol(f"bar {parts[0].name}")
    if node.kind in ("re", "im"):
        return Node("apply", parts, name=node.kind.title())
    return node._replace(parts=parts) if parts != node.parts else node


def replaced(node: Node, old: Node, replacement: Node) -> Node:
    """Returns a tree with all occurrences of `old` replaced by `new`."""
    if node == old:
        return replacement
    if not node.parts:
        return node
    parts = tuple(replaced(part, old, replacement) for part in node.parts)
    return node._replace(parts=parts)


@functools.lru_cache(4096)
def unit_names(node: Node) -> frozenset[str]:
    """Returns the names of the units in a tree, without bases."""
    names = frozenset[str]().union(*map(unit_names, node.parts))
    is_unit = node.kind == "unit" and node.name[0] != "_"
    return names | {node.name} if is_unit else names


@functools.lru_cache(4096)
def num_nodes(node: Node) -> int:
    return 1 + sum(map(num_nodes, node.parts))


def joined(kind: str, left: Node, right: Node) -> Node:
    """Returns `left` and `right` under one node; `right` is added to a left node of the same kind.

    Raises:
        Refused: The node would have more than MAX_PARTS parts.
    """
    parts = left.parts if left.kind == kind else (left,)
    if len(parts) >= MAX_PARTS:
        raise Refused(f"{kind} of more than {MAX_PARTS} parts")
    return Node(kind, (*parts, right))


def split_unit(node: Node) -> tuple[Node, str]:
    """Returns an answer without its units, and the outermost unit, "" without one."""
    if not has_unit(node):
        return node, ""
    inside, _ = split_unit(node.parts[0])
    return inside, node.name
