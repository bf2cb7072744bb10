"""Matrices and vectors: their entries, and a scalar in front of them.

A vector may be written as a column or in brackets with commas, (1, 2). A row is a different matrix.
The only operations that may be left to do are a product with a scalar and a transposition.
"""

import re
from fractions import Fraction

from jzero.answers.evaluation import is_exact, symbol_names, value
from jzero.answers.expressions import Node, negative

Rows = tuple[tuple[Node, ...], ...]
_ZERO, _ONE = (Node("number", value=Fraction(number)) for number in (0, 1))
_UNIT_VECTORS = {name: name for name in "ijk"}
_UNIT_VECTORS |= {f"hat {name}": unit for name, unit in zip("ijkxyz", "ijkijk", strict=True)}
_UNIT_VECTORS |= {"hat imath": "i", "hat jmath": "j"}
_SIZE = re.compile(r"kind='number'.*value=Fraction\(([0-9]{1,2}), 1\)")
_TRANSPOSED = ("T", "\\top", "t", "top")


def rows_of(node: Node) -> Rows | None:
    """Returns the entries of a matrix or vector, row by row. None for any other tree."""
    if node.kind == "matrix":
        return _entries(node)
    if node.kind == "tuple":
        return _rows_of_tuple(node)
    if node.kind == "apply" and node.name == "diag":
        return _diagonal(node.parts)
    if node.kind == "negative":
        return _scaled(rows_of(node.parts[0]), Node("number", value=Fraction(-1)))
    if node.kind == "power":
        return _rows_of_power(*node.parts)
    if node.kind == "divide":
        above, below = node.parts
        return _scaled(rows_of(above), Node("divide", (_ONE, below)))
    if node.kind == "add":
        return _sum(node.parts) or _from_unit_vectors(node)
    if node.kind == "multiply":
        return _rows_of_product(node.parts)
    return None


def _rows_of_power(base: Node, exponent: Node) -> Rows | None:
    """Returns a transposed matrix; powers are not computed."""
    # (1, 2)^T is how a column is written in a line.
    if base.kind == "tuple" and exponent.name in _TRANSPOSED:
        return rows_of(base)
    is_transposed = exponent.kind == "symbol" and exponent.name in _TRANSPOSED
    rows = rows_of(base) if is_transposed else None
    return None if rows is None else tuple(zip(*rows, strict=True))


def _rows_of_product(factors: tuple[Node, ...]) -> Rows | None:
    """Returns the product of one matrix and scalars; two matrices are not multiplied."""
    matrices = [factor for factor in factors if rows_of(factor) is not None]
    scalars = tuple(factor for factor in factors if factor not in matrices)
    if len(matrices) != 1 or not scalars:
        return None
    return _scaled(rows_of(matrices[0]), _product_of(scalars))


def _rows_of_tuple(node: Node) -> Rows | None:
    """Returns the column (1, 2) or [1, 2, 3], or the rows of [[1, 2], [3, 4]]."""
    # Two numbers in square brackets are an interval.
    if node.name == "()" or (node.name == "[]" and len(node.parts) > 2):
        return tuple((part,) for part in node.parts)
    are_rows = all(part.kind == "tuple" and part.name == "[]" for part in node.parts)
    if node.name != "[]" or not are_rows:
        return None
    return _if_rectangular(tuple(part.parts for part in node.parts))


def _if_rectangular(rows: Rows) -> Rows | None:
    return rows if len(set(map(len, rows))) == 1 else None


def identity_scale(node: Node) -> Node | None:
    """Returns c of a multiple c·I of the identity matrix, None for other trees."""
    if node.kind == "symbol" and node.name.partition("_")[0] == "I":
        return _ONE
    if node.kind == "multiply":
        *scalars, last = node.parts
        if identity_scale(last) == _ONE and not any(map(_has_identity, scalars)):
            return _product_of(tuple(scalars))
    return None


def identity_size(node: Node) -> int:
    """Returns 3 for 2I_3, 0 for trees that name no size."""
    if node.kind == "multiply":
        return max(map(identity_size, node.parts))
    is_sized = node.kind == "symbol" and node.name.startswith("I_")
    number = _SIZE.search(node.name) if is_sized else None
    return int(number[1]) if number else 0


def _has_identity(node: Node) -> bool:
    return identity_scale(node) is not None


def scaled_identity(scale: Node, size: int) -> Rows:
    return _diagonal((scale,) * size)


def _diagonal(entries: tuple[Node, ...]) -> Rows:
    rows = []
    for index, entry in enumerate(entries):
        zeros_before, zeros_after = (_ZERO,) * index, (_ZERO,) * (len(entries) - index - 1)
        rows.append((*zeros_before, entry, *zeros_after))
    return tuple(rows)


def _entries(matrix: Node) -> Rows | None:
    if len(matrix.parts) != 1:
        return None
    (inside,) = matrix.parts
    rows = inside.parts if inside.kind == "rows" else (inside,)
    return _if_rectangular(tuple(row.parts if row.kind == "row" else (row,) for row in rows))


def _scaled(rows: Rows | None, scalar: Node) -> Rows | None:
    if rows is None:
        return None
    scaled = []
    for row in rows:
        scaled.append(tuple(_product(scalar, entry) for entry in row))
    return tuple(scaled)


def _product_of(factors: tuple[Node, ...]) -> Node:
    return factors[0] if len(factors) == 1 else Node("multiply", factors)


def _sum(terms: tuple[Node, ...]) -> Rows | None:
    """Returns the sum of vectors, entry by entry, without adding the numbers."""
    matrices = [rows_of(term) for term in terms]
    total = matrices[0]
    for rows in matrices[1:]:
        if total is None or rows is None or len(rows) != len(total):
            return None
        if len(rows[0]) != len(total[0]):
            return None
        total = tuple(map(_sum_of_rows, total, rows))
    return total


def _sum_of_rows(row: tuple[Node, ...], other: tuple[Node, ...]) -> tuple[Node, ...]:
    return tuple(map(_sum_of_two, row, other))


def _sum_of_two(entry: Node, other: Node) -> Node:
    if _ZERO in (entry, other):
        return entry if other == _ZERO else other
    return Node("add", (entry, other))


def _from_unit_vectors(node: Node) -> Rows | None:
    """Returns (3, 4) for 3i + 4j, if each term has one of i, j and k."""
    coefficients: dict[str, Node] = {}
    for term in node.parts:
        is_negative = term.kind == "negative"
        inside = term.parts[0] if is_negative else term
        factors = inside.parts if inside.kind == "multiply" else (inside,)
        names = [_UNIT_VECTORS[part.name] for part in factors if part.name in _UNIT_VECTORS]
        scalars = tuple(part for part in factors if part.name not in _UNIT_VECTORS)
        if len(names) != 1 or names[0] in coefficients:
            return None
        coefficient = _product_of(scalars) if scalars else _ONE
        coefficients[names[0]] = negative(coefficient) if is_negative else coefficient
    # i without j and k is the imaginary unit.
    if not coefficients.keys() & {"j", "k"}:
        return None
    size = "ijk" if "k" in coefficients else "ij"
    return tuple((coefficients.get(name, _ZERO),) for name in size)


def _product(scalar: Node, entry: Node) -> Node:
    """Returns the product, computed if both are rational numbers."""
    if entry == _ZERO or scalar == _ONE:
        return entry
    if entry == _ONE:
        return scalar
    product = Node("multiply", (scalar, entry))
    number = None if symbol_names(product) else value(product)
    if number is None or not is_exact(number):
        return product
    size = Node("number", value=abs(number))
    return negative(size) if number < 0 else size
