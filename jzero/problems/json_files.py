"""Reads a file of JSON lines, or of one JSON array, as the columns of a problem data set.

Every mistake in the file is a one-line UserError with the file and the line or row. Values keep
their text: `Dataset.from_json` would parse answers such as "[0, 1)" and "0.50" as nested JSON. A
column has one type, as Arrow requires: lists of text if some of its values are lists, or text if
its values mix numbers, booleans and text.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple, NoReturn, cast

from jzero.errors import UserError, quoted, shown
from jzero.files import open_file
from jzero.json_values import as_list
from jzero.problems import arrow_files
from jzero.types import JsonValue

MAX_ROW_BYTES = 64 << 20
MAX_ARRAY_BYTES = 1 << 30  # of a file with one array, which is parsed at once
MAX_DEPTH = 64  # of nested lists and objects

_BOM = b"\xef\xbb\xbf"
# Byte order marks of files in other encodings.
_OTHER_ENCODINGS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\0\0\xfe\xff": "UTF-32"}
_SCALARS = (str, int, float, bool)


class PlacedRow(NamedTuple):
    """A row and its place in the file."""

    place: str  # such as "line 7"
    values: dict[str, JsonValue]


def check_is_file(path: Path) -> None:
    """Raises UserError if a file is empty or not a regular file."""
    with open_file(path, name=f"data {path}") as file:
        size = os.fstat(file.fileno()).st_size
    if not size:
        raise UserError(f"data {path} is empty: it needs a row")


class _Unpacked(gzip.GzipFile):
    """The content of a gzip file, which may be at most `arrow_files.most_bytes` long."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(fileobj=file, mode="rb")
        self._path = path
        self._most = arrow_files.most_bytes(path)

    def read(self, size: int | None = -1) -> bytes:
        return self._checked(super().read(self._bounded(size)))

    def read1(self, size: int = -1) -> bytes:
        return self._checked(super().read1(self._bounded(size)))

    def readline(self, size: int | None = -1) -> bytes:
        return self._checked(super().readline(self._bounded(size)))

    def _bounded(self, size: int | None) -> int:
        return self._most + 1 if size is None or size < 0 else min(size, self._most + 1)

    def _checked(self, data: bytes) -> bytes:
        if self.tell() > self._most:
            raise UserError(
                f"data {self._path} has {self._most:,} bytes or more when it is unpacked: save it "
                "without repeated rows, or unpacked"
            )
        return data


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file of rows for reading; a file that ends in .gz is unpacked while it is read."""
    with open_file(path, name=f"data {path}") as file:
        if path.suffix != ".gz":
            yield file
            return
        with _Unpacked(file, path) as unpacked:
            yield cast(IO[bytes], unpacked)


def read_columns(path: Path, text_columns: Sequence[str]) -> dict[str, list[JsonValue]]:
    """Returns the values of each column, in the order in which the columns first appear.

    Args:
        path: the file.
        text_columns: names of columns that must not mix text with other types.

    Raises:
        UserError: the file does not consist of valid rows.
    """
    rows = list(_read_rows(path))
    if not rows:
        raise UserError(f"data {path} has no rows")
    names = dict.fromkeys(name for row in rows for name in row.values)
    columns = {}
    for name in names:
        is_text = name in text_columns
        columns[name] = _one_type(path, name, rows, is_text)
    return columns


# Rows.


def _read_rows(path: Path) -> Iterator[PlacedRow]:
    check_is_file(path)
    with open_bytes(path) as file:
        # Enough for a mark, and for white space before a bracket.
        start = file.read(4096)
        for mark, encoding in _OTHER_ENCODINGS.items():
            if start.startswith(mark):
                raise UserError(f"data {path} is in {encoding}: save it in UTF-8")
        begin = len(_BOM) if start.startswith(_BOM) else 0
        file.seek(begin)
        # A row is an object, so a file that starts with a bracket is one array.
        if start[begin:].lstrip().startswith(b"["):
            yield from _read_array(path, file.read(MAX_ARRAY_BYTES + 1))
            return
        number = 0
        # The limit of `readline` bounds the memory for a file without line breaks.
        while line := file.readline(MAX_ROW_BYTES + 1):
            number += 1
            place = f"line {number}"
            if len(line) > MAX_ROW_BYTES:
                _refuse(path, place, f"has more than {MAX_ROW_BYTES >> 20} MiB")
            if line.strip():
                yield _check_row(path, place, _parse(path, place, line), line)


def _read_array(path: Path, text: bytes) -> Iterator[PlacedRow]:
    if len(text) > MAX_ARRAY_BYTES:
        raise UserError(
            f"data {path} is one array of more than {MAX_ARRAY_BYTES >> 30} GiB: write a row a line"
        )
    for number, row in enumerate(as_list(_parse(path, "the array", text))):
        place = f"row {number}"
        # json.dumps escapes surrogates, as `_check_row` expects.
        yield _check_row(path, place, row, json.dumps(row).encode())


def _parse(path: Path, place: str, text: bytes) -> JsonValue:
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        _refuse(path, place, f"is not in UTF-8 (byte {error.start}): save the file in UTF-8")
    except json.JSONDecodeError as error:
        position = f"line {error.lineno} column {error.colno}"
        _refuse(path, place, f"is not JSON ({error.msg}, {position} of it)")
    except RecursionError:
        _refuse(path, place, f"has more than {MAX_DEPTH} lists and objects within each other")
    except ValueError as error:  # an integer of thousands of digits, or a repeated name
        _refuse(path, place, f"is not a row ({str(error)[:80]})")


def _unique(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has {shown(twice)} twice")
    return values


def _check_row(path: Path, place: str, row: JsonValue, text: bytes) -> PlacedRow:
    if not isinstance(row, dict) or not row:
        _refuse(path, place, f"is {quoted(row)}: a row is an object with names and values")
    if len(text) > MAX_ROW_BYTES:
        _refuse(path, place, f"has more than {MAX_ROW_BYTES >> 20} MiB")
    # `_depth` and `_has_surrogate` are slow. Searching the text first spares most rows both checks.
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH and _depth(row) > MAX_DEPTH:
        _refuse(path, place, f"has more than {MAX_DEPTH} lists and objects within each other")
    if b"\\ud" in text.lower() and _has_surrogate(row):
        _refuse(path, place, "has half of a pair of surrogates, which is not a character")
    return PlacedRow(place, row)


def _depth(value: JsonValue) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return 0
    return 1 + max(map(_depth, value), default=0)


def _has_surrogate(value: JsonValue) -> bool:
    if isinstance(value, str):
        return any("\ud800" <= char <= "\udfff" for char in value)
    if isinstance(value, dict):
        return any(map(_has_surrogate, value)) or any(map(_has_surrogate, value.values()))
    return isinstance(value, list) and any(map(_has_surrogate, value))


def _refuse(path: Path, place: str, what: str) -> NoReturn:
    raise UserError(f"data {path} {place} {what}")


# Columns.


def _one_type(path: Path, name: str, rows: Sequence[PlacedRow], is_text: bool) -> list[JsonValue]:
    """Returns the values of a column with one type: see the module's docstring."""
    values = [row.values.get(name) for row in rows]
    kinds = {type(value) for value in values if value is not None}
    if is_text and str in kinds and len(kinds) > 1:
        _refuse_other_types(path, name, rows, str)
    if dict in kinds and len(kinds) > 1:
        _refuse_other_objects(path, name, rows, values)
    if list in kinds:
        return _lists(path, name, rows, values, len(kinds) > 1)
    # Arrow stores a column of int and float as float. All other mixtures become text.
    is_long = any(_is_long(value, float in kinds) for value in values)
    is_mixed = len(kinds) > 1 and kinds != {int, float}
    if not is_mixed and not is_long:
        return values
    pairs = zip(rows, values, strict=True)
    return [None if value is None else _text(path, name, row, value) for row, value in pairs]


def _refuse_other_types(path: Path, name: str, rows: Sequence[PlacedRow], kind: type) -> None:
    """Raises UserError for the first row with a value of another type than `kind`."""
    for row in rows:
        value = row.values.get(name)
        if value is not None and not isinstance(value, kind):
            _refuse_value(path, name, row, value)


def _refuse_other_objects(
    path: Path,
    name: str,
    rows: Sequence[PlacedRow],
    values: Sequence[JsonValue],
) -> NoReturn:
    """Raises UserError for a row of a column that mixes objects with other values."""
    # The error names the first value of the minority.
    known = [value for value in values if value is not None]
    are_most = sum(isinstance(value, dict) for value in known) * 2 > len(known)
    for row, value in zip(rows, values, strict=True):
        if value is not None and isinstance(value, dict) != are_most:
            _refuse_value(path, name, row, value)
    raise AssertionError(f"{name=}: no value differs")


def _refuse_value(path: Path, name: str, row: PlacedRow, value: JsonValue) -> NoReturn:
    _refuse(
        path,
        row.place,
        f"has {quoted(value)} in the column {shown(name)}, whose other values have another type",
    )


def _lists(
    path: Path,
    name: str,
    rows: Sequence[PlacedRow],
    values: Sequence[JsonValue],
    is_mixed: bool,
) -> list[JsonValue]:
    """Returns the values of a column of lists. A mixed column becomes lists of text."""
    items = [item for value in values if isinstance(value, list) for item in value]
    kinds = {type(item) for item in items if item is not None}
    is_scalar = kinds <= set(_SCALARS)
    if not is_mixed and (not is_scalar or len(kinds) <= 1 or kinds == {int, float}):
        is_long = is_scalar and any(_is_long(item, float in kinds) for item in items)
        if not is_long:
            return list(values)
    # A value that is not a list becomes a list of one text. Missing items are dropped.
    lists = []
    for row, value in zip(rows, values, strict=True):
        row_items = value if isinstance(value, list) else [value]
        lists.append([_text(path, name, row, item) for item in row_items if item is not None])
    return lists


def _is_long(value: JsonValue, is_float: bool) -> bool:
    """Returns whether a value is an integer that is too large for a numeric column of Arrow."""
    # float64 represents all integers up to 53 bits, and int64 has 63 bits and a sign.
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return value.bit_length() > (53 if is_float else 63)


def _text(path: Path, name: str, row: PlacedRow, value: JsonValue) -> str:
    is_number = isinstance(value, float)
    if not isinstance(value, _SCALARS) or (is_number and not math.isfinite(value)):
        _refuse_value(path, name, row, value)
    return str(value)


def find_misfit(
    path: Path,
    columns: Mapping[str, Sequence[JsonValue]],
    fits: Callable[[list[JsonValue]], bool],
) -> NoReturn:
    """Raises UserError for the first value that prevents the values of a column from fitting.

    `fits` returns whether values fit in one column.
    """
    for name, values in columns.items():
        if fits(list(values)):
            continue
        # Binary search for the longest prefix that fits: every prefix of fitting values fits, too.
        first, last = 0, len(values)  # values[:first] fits, and values[:last] does not
        while last - first > 1:
            middle = (first + last) // 2
            first, last = (middle, last) if fits(list(values[:middle])) else (first, middle)
        _refuse(
            path,
            f"row {first}",
            f"has {quoted(values[first])} in the column {shown(name)}, whose other values are of "
            "another type",
        )
    raise UserError(f"data {path}: its columns do not fit together")
