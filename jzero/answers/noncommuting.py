r"""Compares formulas of vectors and matrices, whose products have an order.

\mathbf a\times\mathbf b is not \mathbf b\times\mathbf a, and A^{-1}B^{-1} is not (AB)^{-1}. Symbols
that `letters_of_vectors` and `letters_of_matrices` find are sampled as vectors of three numbers and
as matrices of three rows. The operator \nabla is sampled as a vector, too, as in Fourier space, but
only in front of a single field: products have a rule of their own. Without a sign, \nabla F is the
gradient of each component of a vector F, and neither \nabla\cdot F nor \nabla\times F.
"""

import functools
import random
import re
from collections.abc import Sequence
from fractions import Fraction

from jzero.answers.evaluation import MP, Value, is_close, is_exact, value, value_of_operation
from jzero.answers.expressions import MATRIX, VECTOR, Node, mentions, symbol

NABLA = symbol(f"{VECTOR}nabla")
POINTS = (0, 1, 2, 3)
TRANSPOSED = ("T", "t", "top", "intercal")
MAX_POWER = 12

# A number, a vector as a tuple of three numbers, or a matrix as a tuple of three rows.
Sample = Value
_AXES = range(3)
_IDENTITY = tuple(tuple(Fraction(row == column) for column in _AXES) for row in _AXES)

_MARKED = re.compile(
    r"\\(?:vec|mathbf|bm|boldsymbol|pmb|vv|overrightarrow)\s*\{?\s*([A-Za-z]|\\[a-z]+)\s*\}?"
)
_HAT_IN_CROSS_PRODUCT = re.compile(
    r"\\hat\s*\{?\s*(?P<first>[a-z])\s*\}?\s*(?:\\times|×)"
    r"|(?:\\times|×)\s*\\hat\s*\{?\s*(?P<second>[a-z])"
)
_PRODUCT_OF_MARKED = re.compile(r"\\times|×|\\nabla|∇|\\cdot|·|⋅|\b(?:div|curl|rot)\b")
_FIELD = re.compile(
    r"(?:(?:\\nabla|∇)\s*(?:\\cdot|\\times|[·⋅×])|\b(?:div|curl|rot)\b\s*\}?)\s*\(?\s*"
    r"(?:\\(?:vec|mathbf|bm|boldsymbol)\s*\{?\s*)?([A-Za-z])"
)
# A transposed letter, a determinant or trace, the inverse of a product, a conjugation, and a
# commutator.
_SIGN_OF_MATRICES = re.compile(
    r"[A-Z)]\s*\^\s*\{?\s*(?:\\top|\\intercal|(?:\\(?:mathrm|text|mathsf)\s*\{?)?T)\b"
    r"|\\det|\\operatorname\{(?:det|tr|rank)\}|\\(?:tr|rank)\b"
    r"|\(\s*[A-Z]\s*[A-Z]+\s*\)\s*\^\s*\{?\s*-1"
    r"|([A-Z])\s*\^\s*\{\s*-1\s*\}\s*[A-Z]\s*\1(?![A-Za-z])"
    r"|([A-Z])\s*[A-Z]\s*\2\s*\^\s*\{\s*-1"
    r"|(?<![A-Za-z])([A-Z])\s*([A-Z])\s*-\s*\4\s*\3(?![A-Za-z])"
)
# A^{-1}b and A^Tb: the letter is a column.
_COLUMN = re.compile(r"[A-Z]\s*\^\s*\{?\s*(?:-1\s*\}|(?:T|\\top)\b\s*\}?)\s*([bcuv])(?![A-Za-z_^])")
_INVERSE_OF_CAPITAL = re.compile(r"[A-Z]\s*\^\s*\{\s*-1\s*\}")
_LOWER_CASE = re.compile(r"(?<![\\A-Za-z])[a-z]")
_CAPITAL = re.compile(r"(?<![\\A-Za-z])[A-Z]+(?![a-z])")
_QUESTION_ABOUT_MATRICES = re.compile(
    r"\bmatri(?:x|ces)|linear operator|quaternion|invertible|elements? of (?:a|the) group", re.I
)


def letters_of_vectors(answer: str, gold: str) -> frozenset[str]:
    r"""Returns the letters that are marked as vectors, by \vec or \mathbf, in a product of them."""
    texts = (answer, gold)
    if not any(map(_PRODUCT_OF_MARKED.search, texts)) and not any(map(_COLUMN.search, texts)):
        return frozenset()
    marked: set[str] = set()
    for text in (answer, gold):
        marked |= {name.lstrip("\\") for name in _MARKED.findall(text)}
        for match in _HAT_IN_CROSS_PRODUCT.finditer(text):
            marked.add(f"hat {match['first'] or match['second']}")
        marked |= {*_FIELD.findall(text), *_COLUMN.findall(text)}
        if "\\nabla" in text or "∇" in text or _FIELD.search(text):
            marked.add("nabla")
    return frozenset(marked)


def letters_of_matrices(answer: str, gold: str, question: str) -> frozenset[str]:
    """Returns the capitals that are matrices, if the answers or the question show matrices."""
    if not any(map(str.isupper, gold + answer)):
        return frozenset()
    texts = (answer, gold)
    has_sign = any(map(_SIGN_OF_MATRICES.search, texts))
    has_inverse = any(map(_INVERSE_OF_CAPITAL.search, texts))
    has_lower_case = any(map(_LOWER_CASE.search, texts))
    has_column = any(map(_COLUMN.search, texts))
    shows_matrices = has_sign or has_column or (has_inverse and not has_lower_case)
    if not shows_matrices and not _QUESTION_ABOUT_MATRICES.search(question):
        return frozenset()
    capitals = "".join(run for text in texts for run in _CAPITAL.findall(text))
    return frozenset(capitals) - {"T"}  # the exponent of a transposed matrix


@functools.lru_cache(4096)
def is_noncommuting(node: Node) -> bool:
    """Returns whether a tree has a vector, a matrix or a cross product."""
    if node.kind == "cross" or (node.kind == "symbol" and node.name.startswith((VECTOR, MATRIX))):
        return True
    return any(map(is_noncommuting, node.parts))


def same_ordered(prediction: Node, gold: Node) -> bool:
    """Returns whether two formulas have the same values at all points, with their kinds."""
    # (A^TA)^{-1}A^T is A^{-1} for the square matrices of the samples only.
    if _inverts_matrices(prediction) and _has_transposed(prediction) != _has_transposed(gold):
        return False
    for point in POINTS:
        x, y = sampled(prediction, point), sampled(gold, point)
        if x is None or y is None:
            return False
        entries, gold_entries = _entries(x), _entries(y)
        if len(entries) != len(gold_entries):
            return False
        if not all(map(is_close, entries, gold_entries)):
            return False
    return True


def _inverts_matrices(node: Node) -> bool:
    is_inverse = node.kind == "power" and node.parts[1].kind == "negative"
    return is_inverse or any(map(_inverts_matrices, node.parts))


def _has_transposed(node: Node) -> bool:
    name = (
        node.parts[1].name.removeprefix(MATRIX).removeprefix("\\") if node.kind == "power" else ""
    )
    return name in TRANSPOSED or any(map(_has_transposed, node.parts))


def _entries(sample: Sample) -> list[Value]:
    if not isinstance(sample, tuple):
        return [sample]
    entries: list[Value] = []
    for part in sample:
        entries += _entries(part)
    return entries


@functools.lru_cache(4096)
def sampled(node: Node, point: int) -> Sample:
    """Returns a number, a vector or a matrix; None if the formula has no value at a point."""
    if not is_noncommuting(node):
        is_identity = node.kind == "symbol" and node.name == "I"
        return _IDENTITY if is_identity else value(node, point)
    if node.kind == "symbol":
        return _sampled_symbol(node.name, point)
    if node.kind == "power":
        return _power(node, point)
    if node.kind == "multiply" and not _has_order_of_operators(node.parts):
        return None
    parts = [sampled(part, point) for part in node.parts]
    if any(part is None for part in parts):
        return None
    return _combined(node, parts)


def _num_axes(sample: Sample) -> int:
    """Returns 0 for a number, 1 for a vector and 2 for a matrix."""
    if not isinstance(sample, tuple):
        return 0
    return 2 if isinstance(sample[0], tuple) else 1


def _combined(node: Node, parts: Sequence[Sample]) -> Sample:
    first = parts[0]
    match node.kind:
        case "negative":
            return _scaled(first, Fraction(-1))
        case "add":
            return functools.reduce(_sum, parts)
        case "multiply":
            return functools.reduce(_product, parts)
        case "cross":
            return functools.reduce(_cross, parts)
        case "outer" if _num_axes(first) == _num_axes(parts[1]) == 1:
            return tuple(_scaled(parts[1], entry) for entry in first)
        case "divide" if _num_axes(parts[1]) == 0:
            return _scaled(first, 1 / parts[1]) if parts[1] else None
        case "abs" if _num_axes(first) == 1:
            return _norm(first)
        case "abs" if _num_axes(first) == 2:
            return _determinant(first)
        case "apply" if node.name == "det" and _num_axes(first) == 2:
            return _determinant(first)
        case "apply" if node.name == "tr" and _num_axes(first) == 2:
            return _trace(first)
    # A function of numbers, such as the cosine of a dot product.
    if any(map(_num_axes, parts)):
        return None
    return value_of_operation(node.kind, list(parts))


def _has_order_of_operators(factors: Sequence[Node]) -> bool:
    """Returns whether each nabla of a product is applied to one field, with numbers before it."""
    positions = [index for index, part in enumerate(factors) if mentions(part, NABLA)]
    if not positions:
        return True
    before, after = factors[: positions[0]], factors[positions[-1] + 1 :]
    fields = [part for part in after if part.kind not in ("number", "negative")]
    return len(fields) == 1 and all(part.kind == "number" for part in before)


def _sampled_symbol(name: str, point: int) -> Sample:
    draw = random.Random(f"{name}/{point}/ordered")
    numbers = [Fraction(draw.randint(-30, 30), draw.choice((1, 2, 3))) for _ in range(9)]
    if name == f"{MATRIX}I":
        return _IDENTITY
    if name.startswith(VECTOR):
        return (numbers[0], numbers[1], numbers[2])
    return tuple(tuple(numbers[3 * row : 3 * row + 3]) for row in _AXES)


def _power(node: Node, point: int) -> Sample:
    base, exponent = sampled(node.parts[0], point), node.parts[1]
    num_axes = _num_axes(base)
    if num_axes == 0:
        power = sampled(exponent, point)
        if base is None or power is None or _num_axes(power) > 0:
            return None
        return value_of_operation("power", [base, power])
    name = exponent.name.removeprefix(MATRIX).removeprefix("\\")
    if num_axes == 2 and exponent.kind == "symbol" and name in TRANSPOSED:
        return tuple(zip(*base, strict=True))
    number = value(exponent, point)
    if number is None or not is_exact(number) or number.denominator != 1:
        return None
    if num_axes == 1:  # a^2 is the square of a vector's length
        return _dot(base, base) if number == 2 else None
    if abs(number) > MAX_POWER:
        return None
    if number < 0:
        inverse = _inverse(base)
        if inverse is None:
            return None
        base = inverse
    return functools.reduce(_product, [base] * abs(int(number)), _IDENTITY)


def _scaled(sample: Sample, number: Value) -> Sample:
    if isinstance(sample, tuple):
        parts = [_scaled(part, number) for part in sample]
        return None if None in parts else tuple(parts)
    return None if sample is None else _multiplied(sample, number)


def _multiplied(x: Value, y: Value) -> Value:
    return x * y if is_exact(x, y) else MP.convert(x) * MP.convert(y)


def _added(x: Value, y: Value) -> Value:
    return x + y if is_exact(x, y) else MP.convert(x) + MP.convert(y)


def _sum(x: Sample, y: Sample) -> Sample:
    # A number and a matrix have no sum, although A + 2 may stand for A + 2I.
    if x is None or y is None or _num_axes(x) != _num_axes(y):
        return None
    return _added(x, y) if _num_axes(x) == 0 else tuple(map(_sum, x, y))


def _product(x: Sample, y: Sample) -> Sample:
    """Returns a product: of vectors their dot product, of matrices the matrix product."""
    if x is None or y is None:
        return None
    match _num_axes(x), _num_axes(y):
        case 0, _:
            return _scaled(y, x)
        case _, 0:
            return _scaled(x, y)
        case 1, 1:
            return _dot(x, y)
        case 2, 1:
            return tuple(_dot(row, y) for row in x)
        case 2, 2:
            columns = tuple(zip(*y, strict=True))
            return tuple(tuple(_dot(row, column) for column in columns) for row in x)
    # A vector before a matrix would be a row, which has no sample.
    return None


def _dot(x: Sequence[Value], y: Sequence[Value]) -> Value:
    return functools.reduce(_added, map(_multiplied, x, y))


def _cross(x: Sample, y: Sample) -> Sample:
    numbers_of_axes = _num_axes(x), _num_axes(y)
    if 0 in numbers_of_axes:
        return _product(x, y)
    if 2 in numbers_of_axes:
        return None
    products = []
    for axis in _AXES:
        second, third = (axis + 1) % 3, (axis + 2) % 3
        minus = _multiplied(_multiplied(x[third], y[second]), Fraction(-1))
        products.append(_added(_multiplied(x[second], y[third]), minus))
    return tuple(products)


def _norm(x: Sequence[Value]) -> Value:
    return MP.sqrt(MP.convert(_dot(x, x)))


def _trace(matrix: Sequence[Sequence[Value]]) -> Value:
    return functools.reduce(_added, (matrix[axis][axis] for axis in _AXES))


def _determinant(matrix: Sequence[Sequence[Value]]) -> Value:
    rows = _cross(tuple(matrix[1]), tuple(matrix[2]))
    return _dot(matrix[0], rows)


def _inverse(matrix: Sequence[Sequence[Value]]) -> Sample:
    determinant = _determinant(matrix)
    if not determinant:
        return None
    # The columns of the inverse are cross products of the rows.
    columns = []
    for axis in _AXES:
        second, third = matrix[(axis + 1) % 3], matrix[(axis + 2) % 3]
        columns.append(_scaled(_cross(tuple(second), tuple(third)), 1 / determinant))
    return tuple(zip(*columns, strict=True))
