"""Loads generated data files, most of them damaged, and counts what became of them.

    python tests/attacks/data_files.py              # some as whole commands, too
    python tests/attacks/data_files.py --no-runs    # without the commands

A file is loaded as `task.data` of mathematics. It is fine if it is accepted with the right rows, or
refused as it should be: by one line that names the file and, where a row is to blame, the row. The
table counts what is not fine:

    tracebacks   exceptions other than UserError
    hangs        files that take more than 20 seconds
    silent       files that are accepted although a row is wrong
    wrong        lines that do not name the file or the row, or files that are refused without cause

The command exits with status 1 unless all counts are 0.
"""

import argparse
import datetime
import decimal
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import datasets
import pyarrow
import pyarrow.parquet

from jzero.config import TaskConfig
from jzero.errors import UserError
from jzero.tasks import math_problems

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 20
ADDRESS_SPACE = 12 << 30
NUM_ROWS = 12
PLACES = (0, 5, NUM_ROWS - 1)
MUCH = 70 << 20
Rows = list[dict[str, Any]]
Write = Callable[[Path], Path]


class Case(NamedTuple):
    """A file, and what has to become of it."""

    name: str
    write: Write  # writes into a folder, and returns what `task.data` names
    row: int | None = None  # the row that the line has to name
    accepted: int | None = None  # the rows that are left; None: the file is refused


def good_rows() -> Rows:
    return [{"question": f"What is {i}+{i}?", "answer": str(2 * i)} for i in range(NUM_ROWS)]


def with_value(column: str, place: int, value: object) -> Rows:
    rows = good_rows()
    rows[place][column] = value
    return rows


# Writers.


def as_lines(rows: Rows, end: str = "\n") -> bytes:
    lines = [json.dumps(row) + end for row in rows]
    return "".join(lines).encode()


def as_array(rows: Rows) -> bytes:
    return json.dumps(rows).encode()


def file_of(name: str, content: bytes) -> Write:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def parquet_of(columns: dict[str, Any]) -> Write:
    def write(folder: Path) -> Path:
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / "a.parquet")
        return folder / "a.parquet"

    return write


def arrow_of(columns: dict[str, Any]) -> Write:
    def write(folder: Path) -> Path:
        datasets.Dataset.from_dict(columns).save_to_disk(str(folder / "set"))
        [file] = (folder / "set").glob("*.arrow")
        return file.rename(folder / "a.arrow")

    return write


def columns_of(rows: Rows) -> dict[str, Any]:
    return {name: [row.get(name) for row in rows] for name in rows[0]}


# Cases.

# Values of an answer, and whether a row with it is refused, kept or left out.
REFUSED, KEPT, LEFT_OUT = "refused", "kept", "left out"
ANSWERS: dict[str, tuple[object, str]] = {
    "NaN": (float("nan"), REFUSED),
    "inf": (float("inf"), REFUSED),
    "-inf": (float("-inf"), REFUSED),
    "object": ({"a": 1}, REFUSED),
    "empty object": ({}, REFUSED),
    "object in a list": ([{"a": 1}], REFUSED),
    "list in a list": ([["1"]], REFUSED),
    "70,000 letters": ("x" * 70_000, REFUSED),
    "true": (True, KEPT),
    "number": (5, KEPT),
    "fraction": (0.5, KEPT),
    "30 digits": (10**30, KEPT),
    "list of one": (["5"], KEPT),
    "list of two": (["5", "6"], KEPT),
    "null": (None, LEFT_OUT),
    "empty text": ("", LEFT_OUT),
    "empty list": ([], LEFT_OUT),
}
QUESTIONS: dict[str, object] = {
    "number": 5,
    "fraction": 0.5,
    "true": True,
    "list": ["x"],
    "object": {"a": 1},
    "messages": [{"role": "user", "content": "x"}],
    "null": None,
    "NaN": float("nan"),
    "5 MB": "x" * 5_000_000,
}


def answer_cases() -> Iterator[Case]:
    """Yields files one row of which has another answer, and files all rows of which have it."""
    for name, (value, fate) in ANSWERS.items():
        for place in PLACES:
            rows = with_value("answer", place, value)
            accepted = {REFUSED: None, KEPT: NUM_ROWS, LEFT_OUT: NUM_ROWS - 1}[fate]
            for form, text in (("jsonl", as_lines(rows)), ("json", as_array(rows))):
                write = file_of(f"a.{form}", text)
                yield Case(f"{form}, answer {name} in row {place}", write, place, accepted)
        rows = [{**row, "answer": value} for row in good_rows()]
        accepted = NUM_ROWS if fate == KEPT else None
        row = 0 if fate == REFUSED else None
        yield Case(f"answers {name}", file_of("a.jsonl", as_lines(rows)), row, accepted)


def question_cases() -> Iterator[Case]:
    for name, value in QUESTIONS.items():
        for place in PLACES:
            rows = with_value("question", place, value)
            yield Case(f"question {name} in row {place}", file_of("a.jsonl", as_lines(rows)), place)
        rows = [{**row, "question": value} for row in good_rows()]
        yield Case(f"questions {name}", file_of("a.jsonl", as_lines(rows)), 0)


def damaged_lines() -> Iterator[Case]:
    """Yields files of lines, one of which is damaged."""
    damages: dict[str, bytes] = {
        "cut": b'{"question": "x", "ans\n',
        "no JSON": b"hello\n",
        "a list": b'["x", "1"]\n',
        "null": b"null\n",
        "a number": b"5\n",
        "empty object": b"{}\n",
        "two objects": b'{"question": "x", "answer": "1"} {"question": "y", "answer": "1"}\n',
        "a name twice": b'{"question": "x", "question": "y", "answer": "1"}\n',
        "5000 digits": b'{"question": "x", "answer": ' + b"9" * 5000 + b"}\n",
        "5000 lists": b'{"question": "x", "answer": "1", "z": '
        + b"[" * 5000
        + b"]" * 5000
        + b"}\n",
        "100 lists": b'{"question": "x", "answer": "1", "z": ' + b"[" * 100 + b"]" * 100 + b"}\n",
        "bad UTF-8": b'{"question": "\xff\xfe", "answer": "1"}\n',
        "half of a surrogate": b'{"question": "\\ud800", "answer": "1"}\n',
        "half of a surrogate as answer": b'{"question": "x", "answer": "\\udfff"}\n',
        "NUL": b'{"question": "x\0", "answer": "1"}\n',
        "comments": b'{"question": "x", "answer": "1"} // a comment\n',
        "single quotes": b"{'question': 'x', 'answer': '1'}\n",
        "70 MB": b'{"question": "x", "answer": "1", "z": "' + b"x" * MUCH + b'"}\n',
    }
    for name, line in damages.items():
        for place in PLACES:
            # A file that begins with a list is read as an array.
            if (place == 11 and len(line) > MUCH) or (place == 0 and name == "a list"):
                continue
            lines = as_lines(good_rows()).splitlines(keepends=True)
            lines[place] = line
            yield Case(f"line {name}, {place}", file_of("a.jsonl", b"".join(lines)), place)


def whole_files() -> Iterator[Case]:
    """Yields files that are damaged as a whole, and odd ones that are right."""
    text = as_lines(good_rows())
    array = as_array(good_rows())
    refused = {
        "empty": ("a.jsonl", b""),
        "blank lines": ("a.jsonl", b"\n\n \n"),
        "white space": ("a.json", b"  "),
        "UTF-16": ("a.jsonl", text.decode().encode("utf-16")),
        "UTF-32": ("a.jsonl", b"\0\0\xfe\xff" + text.decode().encode("utf-32-be")),
        "Latin-1": ("a.jsonl", text.replace(b"What", "Wé".encode("latin-1"))),
        "NULs": ("a.jsonl", bytes(10_000)),
        "cut array": ("a.json", array[:-20]),
        "rows that are lists": ("a.jsonl", b"[1]\n[2]\n"),
        "array of numbers": ("a.json", b"[1, 2]"),
        "empty array": ("a.json", b"[]"),
        "one object": ("a.json", b'{\n"question": "x",\n"answer": "1"}\n'),
        "carriage returns": ("a.jsonl", text.replace(b"\n", b"\r")),
        "CSV": ("a.jsonl", b"question,answer\n1,2\n"),
        "name of CSV": ("a.csv", b"question,answer\n1,2\n"),
        "pickle": ("a.pkl", b"\x80\x04."),
        "ZIP": ("a.jsonl", b"PK\3\4"),
        "junk as parquet": ("a.parquet", b"PAR1junkPAR1"),
        "lines as parquet": ("a.parquet", text),
        "empty parquet": ("a.parquet", b""),
        "junk as arrow": ("a.arrow", b"ARROW1xx"),
        "empty arrow": ("a.arrow", b""),
        "no answers": ("a.jsonl", as_lines([{"question": "x"}] * 3)),
        "no questions": ("a.jsonl", as_lines([{"answer": "1"}] * 3)),
        "array with a name twice": ("a.json", b'[{"question": "x", "answer": "1", "answer": "2"}]'),
    }
    for name, (file, content) in refused.items():
        yield Case(name, file_of(file, content))
    accepted = {
        "good": ("a.jsonl", text),
        "array": ("a.json", array),
        "array with white space": ("a.jsonl", b" \n" + array),
        "BOM": ("a.jsonl", b"\xef\xbb\xbf" + text),
        "BOM and array": ("a.json", b"\xef\xbb\xbf" + array),
        "CRLF": ("a.jsonl", as_lines(good_rows(), "\r\n")),
        "blank lines between": ("a.jsonl", as_lines(good_rows(), "\n\n")),
        "no last line break": ("a.jsonl", text[:-1]),
        "escaped NUL": ("a.jsonl", text.replace(b"What", b"\\u0000What")),
        "pairs of surrogates": ("a.jsonl", text.replace(b"What", b"\\ud83d\\ude00 what")),
        "line separators": ("a.jsonl", text.replace(b"What", "\u2028What".encode())),
        "NaN in another column": ("a.jsonl", as_lines(with_value("z", 5, float("nan")))),
    }
    for name, value in {"types": {"a": [1, {"b": 2}]}, "objects": [{"a": 1}, "b"]}.items():
        rows = with_value("z", 5, value)
        yield Case(f"another column of mixed {name}", file_of("a.jsonl", as_lines(rows)), 5)
    for name, (file, content) in accepted.items():
        yield Case(name, file_of(file, content), accepted=NUM_ROWS)


def tables() -> Iterator[Case]:
    """Yields parquet and arrow files."""
    good = columns_of(good_rows())
    answers: dict[str, tuple[Any, int | None]] = {
        "NaN": ([*[1.0] * 5, float("nan"), *[2.0] * 6], None),
        "inf": ([*[1.0] * 5, float("inf"), *[2.0] * 6], None),
        "objects": ([{"a": i} for i in range(NUM_ROWS)], None),
        "bytes": ([b"1"] * NUM_ROWS, None),
        "dates": ([datetime.date(2025, 1, 1)] * NUM_ROWS, None),
        "lists in lists": ([[["1"]]] * NUM_ROWS, None),
        "missing in a list": ([["1", None]] * NUM_ROWS, None),
        "long": (["x" * 70_000] * NUM_ROWS, None),
        "booleans": ([True] * NUM_ROWS, NUM_ROWS),
        "integers": (list(range(NUM_ROWS)), NUM_ROWS),
        "decimals": ([decimal.Decimal("0.50")] * NUM_ROWS, NUM_ROWS),
        "lists": ([["1", "2"]] * NUM_ROWS, NUM_ROWS),
        "some missing": (["1", None] * (NUM_ROWS // 2), NUM_ROWS // 2),
        "all missing": ([None] * NUM_ROWS, None),
    }
    for name, (values, accepted) in answers.items():
        row = 5 if name in ("NaN", "inf") else 0
        row_named = None if accepted is not None or name == "all missing" else row
        columns = {**good, "answer": values}
        yield Case(f"parquet, answers {name}", parquet_of(columns), row_named, accepted)
        if name not in ("dates", "decimals"):
            yield Case(f"arrow, answers {name}", arrow_of(columns), row_named, accepted)
    long = {**good, "question": ["x", "x" * 5_000_000] * (NUM_ROWS // 2)}
    yield Case("parquet, long question", parquet_of(long), 1)
    yield Case("parquet", parquet_of(good), accepted=NUM_ROWS)
    yield Case("arrow", arrow_of(good), accepted=NUM_ROWS)
    for make, name in ((parquet_of(good), "parquet"), (arrow_of(good), "arrow")):
        for share in (0.1, 0.5, 0.9, 0.99):
            yield Case(f"{name} cut at {share}", cut(make, share))
    yield Case("parquet, a column twice", write_twice)
    yield Case("parquet without rows", parquet_of({"question": [], "answer": []}))


def cut(make: Write, share: float) -> Write:
    def write(folder: Path) -> Path:
        path = make(folder)
        os.truncate(path, int(path.stat().st_size * share))
        return path

    return write


def write_twice(folder: Path) -> Path:
    arrays = [["x"] * 3, ["1"] * 3, ["2"] * 3]
    table = pyarrow.table(list(map(pyarrow.array, arrays)), ["question", "answer", "answer"])
    pyarrow.parquet.write_table(table, folder / "a.parquet")
    return folder / "a.parquet"


def special_files() -> Iterator[Case]:
    """Yields names of what is no file, and folders."""
    text = as_lines(good_rows())

    def make(function: Callable[[Path], object], name: str = "a.jsonl") -> Write:
        def write(folder: Path) -> Path:
            function(folder)
            return folder / name

        return write

    def loop(folder: Path) -> None:
        (folder / "b.jsonl").symlink_to(folder / "a.jsonl")
        (folder / "a.jsonl").symlink_to(folder / "b.jsonl")

    def hole(folder: Path) -> None:
        with (folder / "a.jsonl").open("wb") as file:
            file.truncate(1 << 40)

    def folder_with(function: Callable[[Path], object]) -> Write:
        def write(folder: Path) -> Path:
            (folder / "set").mkdir()
            function(folder / "set")
            return folder / "set"

        return write

    def two_of_a_split(folder: Path) -> None:
        (folder / "train.jsonl").write_bytes(text)
        (folder / "train.json").write_bytes(text)

    def script(folder: Path) -> None:
        (folder / "set.py").write_text("import os; os.mkdir('code-was-run')")

    def train(folder: Path) -> None:
        (folder / "train.jsonl").write_bytes(text)

    for form in ("jsonl", "json", "parquet", "arrow"):
        name = f"a.{form}"
        yield Case(f"fifo {form}", make(lambda path, n=name: os.mkfifo(path / n), name))
        zero = make(lambda path, n=name: (path / n).symlink_to("/dev/zero"), name)
        yield Case(f"/dev/zero {form}", zero)
        yield Case(f"folder {form}", make(lambda path, n=name: (path / n).mkdir(), name))
        yield Case(f"no file {form}", make(lambda path: None, name))
    yield Case("loop of links", make(loop))
    yield Case("1 TB of NUL", make(hole))
    yield Case("empty folder", folder_with(lambda path: None))
    yield Case("folder of folders", folder_with(lambda path: (path / "train.jsonl").mkdir()))
    yield Case("folder with a fifo", folder_with(lambda path: os.mkfifo(path / "train.jsonl")))
    yield Case("two files of a split", folder_with(two_of_a_split))
    yield Case("folder with a script", folder_with(script))
    yield Case("folder", folder_with(train), accepted=NUM_ROWS)


def all_cases() -> list[Case]:
    makers = (answer_cases, question_cases, damaged_lines, whole_files, tables, special_files)
    return [case for make in makers for case in make()]


# Loading.


class TookTooLong(BaseException):
    """A file is at its limit."""


def stop(number: int, frame: FrameType | None) -> None:
    raise TookTooLong


def load(data: Path) -> int:
    """Returns the number of problems of a file."""
    task = TaskConfig(name="math", data=str(data), template="no")
    return sum(map(len, math_problems.load_sets(task).train))


def judge(case: Case) -> tuple[str, str]:
    """Returns the count that a case belongs to, "" if it is fine, and what happened."""
    with tempfile.TemporaryDirectory(prefix="data-files-") as folder:
        data = case.write(Path(folder))
        signal.alarm(SECONDS)
        try:
            num_rows = load(data)
        except TookTooLong:
            return "hangs", ""
        except UserError as error:
            line = str(error)
        except BaseException as error:
            return "tracebacks", f"{type(error).__name__}: {str(error)[:300]}"
        else:
            if case.accepted is None:
                return "silent", f"{num_rows} rows"
            return ("", "") if num_rows == case.accepted else ("wrong", f"{num_rows} rows")
        finally:
            signal.alarm(0)
    if case.accepted is not None or str(data) not in line or not is_line(line):
        return "wrong", line[:400]
    places = () if case.row is None else (f"row {case.row}", f"line {case.row + 1}")
    if places and not any(place in line for place in places):
        return "wrong", line[:400]
    return "", line


def is_line(text: str) -> bool:
    return text.isprintable() and len(text) < 1500


def judge_command(case: Case) -> tuple[str, str]:
    """Judges a refused case as `judge` does, by a whole command."""
    with tempfile.TemporaryDirectory(prefix="data-files-") as folder:
        data = case.write(Path(folder))
        arguments = [
            f"--config={ROOT}/configs/countdown.py:tiny",
            f"--workdir={folder}/run",
            "--config.task.name=math",
            "--config.task.template=no",
            "--config.warm_start=none",
            f"--config.task.data={data}",
        ]
        try:
            process = subprocess.run(
                [sys.executable, "-m", "jzero.main", *arguments],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=180,
                env=os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"},
            )
        except subprocess.TimeoutExpired:
            return "hangs", ""
    lines = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    if "Traceback" in process.stderr or process.returncode not in (0, 2):
        return "tracebacks", process.stderr[-1000:]
    if process.returncode == 0:
        return "silent", ""
    return ("", lines[0]) if len(lines) == 1 and str(data) in lines[0] else ("wrong", str(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-runs", action="store_true", help="without whole commands")
    parser.add_argument("--every", type=int, default=1, help="only each N-th file")
    parser.add_argument("--show", action="store_true", help="prints the line of each file")
    args = parser.parse_args()
    datasets.disable_progress_bars()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, most))
    signal.signal(signal.SIGALRM, stop)

    cases = all_cases()[:: args.every]
    counts = {"tracebacks": 0, "hangs": 0, "silent": 0, "wrong": 0}
    refused = accepted = 0
    start = time.monotonic()
    judged = [(case, judge) for case in cases]
    if not args.no_runs:
        commands = [case for case in cases if case.accepted is None][:: max(len(cases) // 5, 1)]
        judged += [(case, judge_command) for case in commands]
    for case, function in judged:
        count, line = function(case)
        if count:
            counts[count] += 1
            print(f"{count}: {case.name}: {line}")
        elif case.accepted is None:
            refused += 1
        else:
            accepted += 1
        if args.show and not count:
            print(f"{case.name}: {line}")
    table = "  ".join(f"{name} {number}" for name, number in counts.items())
    seconds = time.monotonic() - start
    print(
        f"files {len(cases)}  commands {len(judged) - len(cases)}  refused {refused}  "
        f"accepted {accepted}  {table}  {seconds:.0f} s"
    )
    sys.exit(1 if any(counts.values()) or Path("code-was-run").exists() else 0)


if __name__ == "__main__":
    main()
