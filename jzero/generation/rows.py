"""The rows of generated responses, and their JSONL file.

A flat row is one response to one problem. A grouped row is one problem with lists of its n
responses. Both have the columns of the problem's row in the data set, under the same names; a
column with the name of an output column becomes `source_<name>`.

`RowFile` appends rows in the order of their completion, and sorts them into the order of the
problems at the end. The file survives a kill at any byte: reopening it removes incomplete rows and
keeps all others.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jzero.errors import UserError
from jzero.files import JsonObject, naming_full_disk
from jzero.tasks import math_problems
from jzero.types import JsonValue, Problem, Turn, grade_of

MAX_LINE_BYTES = 1 << 30

# Columns with one value per response. A grouped row has a list of these values.
RESPONSE_COLUMNS = (
    "completion",
    "reasoning_content",
    "tokens",
    "finish",
    "score",
    "correct",
    "reason",
    "error",
)
COMPLETIONS = "completions"  # the name of the column `completion` in a grouped row
OWN_COLUMNS = ("id", "sample", "prompt", "gold", "model_name", COMPLETIONS, *RESPONSE_COLUMNS)


@dataclass(frozen=True)
class Response:
    """A response: a turn with its text and grade, or the error instead."""

    turn: Turn | None = None
    reasoning: str | None = None  # reasoning that the server sent separately from the content
    error: str | None = None


# -- Rows ------------------------------------------------------------------------------------------


def make_row(
    problem: Problem,
    sample_index: int,
    response: Response,
    model_name: str,
) -> JsonObject:
    """Returns the flat row of a response. Prompt and completion are both text or both messages."""
    row = {
        "id": problem.id,
        "sample": sample_index,
        "prompt": problem.prompt,
        **_response_columns(problem, response),
        "gold": json.dumps(problem.gold),  # text, because a column of a data set has one type
        "model_name": model_name,
    }
    # The columns of the data set come last; their names do not collide with ours.
    return row | _source_columns(problem.row or {})


def _response_columns(problem: Problem, response: Response) -> JsonObject:
    columns: JsonObject = dict.fromkeys(RESPONSE_COLUMNS)
    columns["error"] = response.error
    turn = response.turn
    if turn is None:
        return columns
    completion: JsonValue = turn.text
    if not isinstance(problem.prompt, str):
        # Prompt and completion have the same form: both are text or both are messages.
        completion = [{"role": "assistant", "content": turn.text}]
    grade = grade_of(turn)
    # Without gold answers there is a grade, but no score.
    is_graded = grade.reason != math_problems.NOT_GRADED
    return columns | {
        "completion": completion,
        "reasoning_content": response.reasoning,
        "tokens": turn.end - turn.start,
        "finish": turn.finish_reason,
        "score": grade.known_score if is_graded else None,
        "correct": grade.correct if is_graded else None,
        "reason": grade.reason,
    }


def _source_columns(row: Mapping[str, JsonValue]) -> JsonObject:
    """Returns the columns of a data set's row, renamed if they collide with OWN_COLUMNS."""
    columns: JsonObject = {}
    for name, value in row.items():
        kept = name
        # The renamed column must collide neither with ours nor with another column of the row.
        while kept in OWN_COLUMNS or (kept != name and kept in row):
            kept = f"source_{kept}"
        columns[kept] = value
    return columns


def group(rows: Sequence[JsonObject]) -> JsonObject:
    """Returns the grouped row of the flat rows of one problem, in the order of the samples."""
    grouped: JsonObject = {}
    for name, value in rows[0].items():
        if name in RESPONSE_COLUMNS:
            column = COMPLETIONS if name == "completion" else name
            grouped[column] = [row[name] for row in rows]
        elif name != "sample":
            grouped[name] = value
    return grouped


def ungroup(row: JsonObject) -> list[JsonObject]:
    """Returns the flat rows of a grouped one."""
    flat_rows = []
    for sample_index in range(len(row["error"])):
        flat: JsonObject = {"id": row["id"], "sample": sample_index}
        for name, value in row.items():
            if name == COMPLETIONS:
                flat["completion"] = value[sample_index]
            elif name in RESPONSE_COLUMNS:
                flat[name] = value[sample_index]
            else:
                flat[name] = value
        flat_rows.append(flat)
    return flat_rows


# -- The file --------------------------------------------------------------------------------------

Key = tuple[int, int]  # index of the problem and of the sample; the latter is 0 in a grouped row


class Place(NamedTuple):
    """The location of a row in the file, in bytes."""

    start: int
    length: int  # bytes, including the end of the line
    failed: tuple[int, ...]  # the samples with an error


class RowFile:
    """The file of the rows of some problems, open for appending.

    with RowFile(path, ids, n, is_grouped) as file:
        file.places             the rows in the file
        file.append(rows)
        file.sort()
    """

    def __init__(
        self,
        path: Path,
        ids: Sequence[str],
        num_samples: int,
        is_grouped: bool,
        scratch: Path,
    ) -> None:
        """Opens the file, and removes lines that are not a complete row of one of the problems.

        Args:
            path: the file, which may not exist yet.
            ids: the ids of the problems, in their order.
            num_samples: responses to each problem.
            is_grouped: whether a row holds all responses to its problem.
            scratch: a file on the same disk, which is overwritten while rows are sorted.
        """
        self.path = path
        self.is_grouped = is_grouped
        self._num_samples = num_samples
        self._numbers = {id: number for number, id in enumerate(ids)}
        self._scratch = scratch
        self.places: dict[Key, Place] = {}
        path.touch()
        is_clean = self._scan()
        if not is_clean:
            self._rewrite()
        self._file: BinaryIO = path.open("ab")

    def __enter__(self) -> "RowFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def num_errors(self) -> int:
        """Number of responses that failed; their rows have the error."""
        return sum(len(place.failed) for place in self.places.values())

    def append(self, rows: Sequence[JsonObject]) -> None:
        """Writes rows to the end of the file. A later row replaces an earlier one of its key."""
        lines = [json.dumps(row).encode() + b"\n" for row in rows]
        with naming_full_disk(self.path, sum(map(len, lines))):
            start = self._file.tell()
            self._file.write(b"".join(lines))
            self._file.flush()
        for row, line in zip(rows, lines, strict=True):
            key, failed = self._read_key(row)
            self.places[key] = Place(start, len(line), failed)
            start += len(line)

    def sync(self) -> None:
        """Flushes all rows to the disk."""
        with naming_full_disk(self.path):
            os.fsync(self._file.fileno())

    def read(self, key: Key) -> JsonObject:
        """Returns a row."""
        place = self.places[key]
        with self.path.open("rb") as file:
            file.seek(place.start)
            return json.loads(file.read(place.length))

    def sort(self) -> None:
        """Sorts the rows by problem and sample, without duplicates."""
        # Skip the rewrite if the file is already sorted and contains nothing else.
        position = 0
        for _, place in sorted(self.places.items()):
            if place.start != position:
                break
            position += place.length
        else:
            if position == self.path.stat().st_size:
                return
        self._file.close()
        self._rewrite()
        self._file = self.path.open("ab")

    def _scan(self) -> bool:
        """Finds the rows. Returns whether the file holds nothing else."""
        is_clean = True
        start = 0
        with self.path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                if len(line) > MAX_LINE_BYTES:
                    raise UserError(
                        f"--out {self.path} has a line of more than {MAX_LINE_BYTES >> 30} GiB: "
                        "give another --out"
                    )
                parsed = self._read_line(line)
                if parsed is None:
                    is_clean = False
                else:
                    key, failed = parsed
                    is_clean &= key not in self.places
                    # Of several rows with one key the last wins, unless it has more errors than an
                    # earlier one.
                    earlier = self.places.get(key)
                    if earlier is None or len(failed) <= len(earlier.failed):
                        self.places[key] = Place(start, len(line), failed)
                start += len(line)
        return is_clean

    def _read_line(self, line: bytes) -> tuple[Key, tuple[int, ...]] | None:
        """Returns the result of `_read_key`, or None for a line that is not a complete row."""
        # A kill in the middle of a write leaves a line without its end.
        if not line.endswith(b"\n"):
            return None
        try:
            return self._read_key(json.loads(line))
        except (ValueError, LookupError, TypeError, RecursionError):
            return None

    def _read_key(self, row: JsonObject) -> tuple[Key, tuple[int, ...]]:
        """Returns the key of a row, and the samples that have an error.

        Raises:
            ValueError, LookupError, TypeError: the row does not belong to the problems.
        """
        number = self._numbers[row["id"]]
        if self.is_grouped:
            errors = row["error"]
            if len(errors) != self._num_samples or len(row[COMPLETIONS]) != self._num_samples:
                raise ValueError("it has another number of samples")
            failed = [i for i, error in enumerate(errors) if error is not None]
            return (number, 0), tuple(failed)
        sample_index = row["sample"]
        # `type`, because JSON's true is an int in Python.
        if type(sample_index) is not int or not 0 <= sample_index < self._num_samples:
            raise ValueError("it has no such sample")
        is_failed = row["error"] is not None
        return (number, sample_index), (sample_index,) if is_failed else ()

    def _rewrite(self) -> None:
        """Replaces the file by one with the rows of `places` in their order."""
        places: dict[Key, Place] = {}
        size = sum(place.length for place in self.places.values())
        with (
            naming_full_disk(self.path, size),
            self.path.open("rb") as source,
            self._scratch.open("wb") as target,
        ):
            for key, place in sorted(self.places.items()):
                source.seek(place.start)
                places[key] = place._replace(start=target.tell())
                target.write(source.read(place.length))
            # The new file must be on the disk before it replaces the old one.
            target.flush()
            os.fsync(target.fileno())
        self._scratch.replace(self.path)
        self.places = places
