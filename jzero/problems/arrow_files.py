"""Bounds the size of Parquet and Arrow files before their rows are read.

    check_parquet(path)
    check_arrow(path)

Both formats compress equal values: a file of 100 KB may hold 20 million rows. The rows and the
bytes that a file holds are counted in batches, without building the column of a repeated value.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jzero.errors import UserError

if TYPE_CHECKING:
    import pyarrow

# Texts compress to a tenth of their size, and a column with one value to almost nothing. A file
# that grows more than this is not a set of problems.
MAX_GROWTH = 200
ALWAYS_ALLOWED_BYTES = 256 << 20
ALWAYS_ALLOWED_ROWS = 1_000_000
BATCH_ROWS = 16_384


def most_bytes(path: Path) -> int:
    """Returns the bytes that a compressed file may hold."""
    return max(ALWAYS_ALLOWED_BYTES, MAX_GROWTH * path.stat().st_size)


class _Bounds:
    """What a file of this size may hold, and a count of what it holds."""

    def __init__(self, path: Path) -> None:
        size = path.stat().st_size
        self._path = path
        self._most_rows = max(ALWAYS_ALLOWED_ROWS, size)  # a row takes more than a byte
        self._most_bytes = most_bytes(path)
        self._rows = 0
        self._bytes = 0

    def add(self, rows: int, num_bytes: int) -> None:
        """Raises UserError if there are too many rows or bytes in the file by now."""
        self._rows += rows
        self._bytes += num_bytes
        if self._rows > self._most_rows or self._bytes > self._most_bytes:
            raise UserError(
                f"data {self._path} has {self._rows:,} rows and {self._bytes:,} bytes or more, "
                f"and the file {self._path.stat().st_size:,}: save it without repeated rows, or as "
                "JSON lines"
            )


def check_parquet(path: Path) -> None:
    """Raises UserError if a file holds far more than its size."""
    import pyarrow
    from pyarrow import parquet

    bounds = _Bounds(path)
    metadata = parquet.read_metadata(path)
    bounds.add(metadata.num_rows, 0)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    bounds.add(0, sum(max(0, group.total_byte_size) for group in groups))

    # The pages of a repeated value are short. Read as a dictionary, the value is built once.
    bounds = _Bounds(path)
    schema = parquet.read_schema(path)
    texts = [field.name for field in schema if _is_text(field.type)]
    with parquet.ParquetFile(path, read_dictionary=texts) as file:
        for batch in file.iter_batches(batch_size=BATCH_ROWS):
            assert isinstance(batch, pyarrow.RecordBatch), f"{type(batch)=}"
            bounds.add(batch.num_rows, sum(map(_decoded_bytes, batch.columns)))


def check_arrow(path: Path) -> None:
    """Raises UserError if a file of record batches holds far more than its size."""
    import pyarrow

    bounds = _Bounds(path)
    with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as reader:
        for batch in reader:
            bounds.add(batch.num_rows, sum(map(_decoded_bytes, batch.columns)))


def _is_text(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    return types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind)


def _decoded_bytes(column: pyarrow.Array) -> int:
    """Returns the bytes of a column with its dictionary decoded."""
    import pyarrow
    import pyarrow.compute

    if not isinstance(column, pyarrow.DictionaryArray) or not _is_text(column.type.value_type):
        return column.nbytes
    # By name, because the module makes its functions when it is imported.
    lengths = pyarrow.compute.call_function("binary_length", [column.dictionary])
    total = pyarrow.compute.call_function("sum", [lengths.take(column.indices)]).as_py()
    return int(total or 0)
