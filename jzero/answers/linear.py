"""The rank of vectors of numbers, which decides whether they span the same space."""

from collections.abc import Sequence

from jzero.answers.evaluation import MP, NEGLIGIBLE, Value


def matrix_rank(vectors: Sequence[Sequence[Value]]) -> int:
    """Returns the rank of some vectors, by elimination with the largest pivot."""
    rows = [[MP.convert(number) for number in vector] for vector in vectors]
    rank = 0
    largest = max((abs(number) for row in rows for number in row), default=MP.mpf(0))
    small = NEGLIGIBLE * (1 + largest)
    for column in range(len(rows[0]) if rows else 0):
        pivot = max(range(rank, len(rows)), key=lambda row: abs(rows[row][column]), default=None)
        if pivot is None or abs(rows[pivot][column]) <= small:
            continue
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        for row in range(rank + 1, len(rows)):
            factor = rows[row][column] / rows[rank][column]
            pairs = zip(rows[row], rows[rank], strict=True)
            rows[row] = [number - factor * other for number, other in pairs]
        rank += 1
    return rank
