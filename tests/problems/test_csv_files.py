"""CSV files and files that are packed with gzip, as problem data sets."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from jzero.errors import UserError
from jzero.problems import arrow_files, problem_sets

ROWS = [
    {"question": 'Say "a, b"\nand c.', "answer": "007"},
    {"question": "1 + 1?", "answer": "0.50"},
    {"question": "2 + 2?", "answer": ""},
]
CSV = 'question,answer\n"Say ""a, b""\nand c.",007\n1 + 1?,0.50\n\n2 + 2?,\n'


def packed_csv(path: Path) -> Path:
    path = path.with_suffix(".csv.gz")
    path.write_bytes(gzip.compress(CSV.encode()))
    return path


def plain_csv(path: Path) -> Path:
    """Writes a file as spreadsheets do: with a byte order mark, and rows that end in CR LF."""
    path = path.with_suffix(".csv")
    text = CSV.replace("\n", "\r\n").replace('b""\r\n', 'b""\n')
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    return path


def packed_lines(path: Path) -> Path:
    path = path.with_suffix(".jsonl.gz")
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))
    return path


def packed_array(path: Path) -> Path:
    path = path.with_suffix(".json.gz")
    path.write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    return path


@pytest.mark.parametrize("write", [plain_csv, packed_csv, packed_lines, packed_array])
def test_all_values_are_the_texts_of_the_file(write: Callable, tmp_path: Path) -> None:
    dataset = problem_sets.load(str(write(tmp_path / "rows")))["train"]
    assert list(dataset) == ROWS


def test_a_directory_has_a_split_for_each_file(tmp_path: Path) -> None:
    plain_csv(tmp_path / "train")
    packed_lines(tmp_path / "test")

    splits = problem_sets.load(str(tmp_path))

    assert set(splits) == {"train", "test"}
    assert list(splits["train"]) == list(splits["test"])
    packed_csv(tmp_path / "train")
    with pytest.raises(UserError, match="two files of the split train"):
        problem_sets.load.__wrapped__(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("question,answer\n1,2,3\n", "line 2 has 3 values, and the header 2: put texts with"),
        ("question,question\n1,2\n", "line 1 is question,question: a CSV file begins with the"),
        ("question,\n1,2\n", "line 1 is question,: a CSV file begins with the names"),
        ("question,answer\n", "has no rows"),
        ('question,answer\n"1,2\n', "line 2 is not CSV .*: save the file again as CSV"),
        ("", "is empty: it needs a row"),
        ("question,answer\n\xff,2\n", "is not in UTF-8"),
    ],
)
def test_a_mistake_in_a_csv_file_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=message) as caught:
        problem_sets.load(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.json.gz", "rows.csv.gz"])
def test_a_file_that_unpacks_to_far_more_than_its_size_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow_files, "ALWAYS_ALLOWED_BYTES", 1 << 16)
    rows = b'{"question": "1 + 1?", "answer": "2"}\n' * 200_000
    if "csv" in name:
        rows = b"question,answer\n" + b"1 + 1?,2\n" * 1_000_000
    elif "jsonl" not in name:
        rows = b"[" + b'{"question": "1 + 1?", "answer": "2"},' * 200_000 + b"{}]"
    (tmp_path / name).write_bytes(gzip.compress(rows))

    with pytest.raises(UserError, match="bytes or more when it is unpacked"):
        problem_sets.load(str(tmp_path / name))


def test_damaged_gzip_files_are_refused(tmp_path: Path) -> None:
    whole = packed_lines(tmp_path / "rows").read_bytes()
    for name, data in (
        ("cut", whole[:-9]),
        ("other", b"not gzip"),
        ("changed", whole[:-5] + b"12345"),
    ):
        path = tmp_path / f"{name}.jsonl.gz"
        path.write_bytes(data)
        with pytest.raises(UserError, match="cannot be loaded"):
            problem_sets.load(str(path))
