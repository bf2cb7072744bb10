"""Reads a CSV file with a header as the columns of a problem data set.

Every value is text, as it is in the file: `Dataset.from_csv` would read the answer "007" as a
number. Every mistake in the file is a one-line UserError with its line.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jzero.errors import UserError, shown
from jzero.problems import json_files
from jzero.types import JsonValue


def read_columns(path: Path) -> dict[str, list[JsonValue]]:
    """Returns the values of each column, in the order of the header.

    Raises:
        UserError: the file has no header or no rows, a row has another number of values than the
            header, or the file is not CSV in UTF-8.
    """
    json_files.check_is_file(path)
    with json_files.open_bytes(path) as file, _long_fields():
        # utf-8-sig skips a byte order mark, which spreadsheets write.
        reader = csv.reader(io.TextIOWrapper(file, "utf-8-sig", newline=""), strict=True)
        try:
            header = next(reader, [])
            if not all(header) or len(set(header)) < len(header):
                raise UserError(
                    f"data {path} line 1 is {shown(','.join(header))}: a CSV file begins with the "
                    "names of its columns, each of them once"
                )
            columns: dict[str, list[JsonValue]] = {name: [] for name in header}
            for row in reader:
                if not row:  # an empty line
                    continue
                if len(row) != len(header):
                    raise UserError(
                        f"data {path} line {reader.line_num} has {len(row)} values, and the header "
                        f"{len(header)}: put texts with commas in quotes"
                    )
                for name, value in zip(header, row, strict=True):
                    columns[name].append(value)
        except csv.Error as error:
            raise UserError(
                f"data {path} line {reader.line_num} is not CSV ({error}): save the file again as "
                "CSV, or as JSON lines"
            ) from None
        except UnicodeDecodeError as error:
            raise UserError(
                f"data {path} is not in UTF-8 ({error.reason}): save the file in UTF-8"
            ) from None
    if not header or not columns[header[0]]:
        raise UserError(f"data {path} has no rows")
    return columns


@contextmanager
def _long_fields() -> Iterator[None]:
    """Allows values as long as those of JSON files; the limit of the module is 128 KiB."""
    before = csv.field_size_limit(json_files.MAX_ROW_BYTES)
    try:
        yield
    finally:
        csv.field_size_limit(before)
