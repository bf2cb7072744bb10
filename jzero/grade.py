"""Grades a file of answers: one JSON object a line in, one a line out, in the same order.

    python -m jzero.grade --in cases.jsonl --out scores.jsonl

A row has these fields:
  id          comes back with the score
  task        math, gsm8k or countdown
  prediction  the response
  gold        a string, a number, or a list of which any will do;
              of countdown {"numbers", "target"}, or the target with that in "meta"
and may have these:
  template    how the response marks its answer; default: boxed, and gsm8k for gsm8k
  mode        "answer": the prediction is the bare answer
  prompt      the question; an answer that only repeats it scores 0

A row of the output is {"id", "score", "reason", "seconds"}. Counts of reasons and of restarted
workers follow on stdout.
"""

import argparse
import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tqdm import tqdm

from jzero.errors import UserError
from jzero.files import check_not_input, check_output
from jzero.grading.extract import TEMPLATES
from jzero.grading.pool import Pool

# The template of a row that names none, for every task.
DEFAULT_TEMPLATES = {"math": "boxed", "gsm8k": "gsm8k", "countdown": "answer"}
CHUNK = 4096  # rows in memory

Lines = Iterator[tuple[str, bytes]]  # where a line stands ("cases.jsonl:7"), and the line


@dataclass(frozen=True)
class RowSettings:
    """The fields of `config.TaskConfig` that the graders of the rows read."""

    template: str
    verifier: str
    answer_mark: str = ""  # the mark of every row is its template
    grade_seconds: float = 5.0
    format_score: float = 0.0
    malformed_score: float = 0.0


class Row(NamedTuple):
    """A row of the input, as the pool wants it."""

    id: object
    task: str
    prediction: str
    gold: object
    template: str


def parse_row(line: bytes) -> Row:
    """Reads a row.

    Raises:
        ValueError, KeyError, TypeError: The line is no such row.
    """
    row = json.loads(line)
    task, gold, prediction = row["task"], row["gold"], row["prediction"]
    template = DEFAULT_TEMPLATES[task]
    if task == "countdown":
        gold = gold if isinstance(gold, dict) else row["meta"]
    else:
        # gsm8k is graded as math: its template alone says where the answer stands.
        task = "math"
        gold = {"answer": gold, "question": row.get("prompt") or ""}
        template = row.get("template") or template
        if row.get("mode") == "answer":
            template = "answer"
    if not isinstance(prediction, str):
        raise UserError("prediction must be a string")
    if template not in TEMPLATES:
        raise UserError(f"{template=} is unknown: send a template of {', '.join(TEMPLATES)}")
    return Row(row["id"], task, prediction, gold, template)


def submit(pool: Pool, where: str, line: bytes, verifier: str) -> object:
    """Submits a row under the key `where`, and returns its id.

    Raises:
        UserError: The line is no row; the message begins with `where`.
    """
    try:
        row = parse_row(line)
    except KeyError as error:
        raise UserError(f"{where}: {error} is missing, or no task") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{where}: {error}") from None
    settings = RowSettings(row.template, verifier)
    pool.submit(where, row.task, row.prediction, row.gold, settings)
    return row.id


def grade_lines(pool: Pool, lines: Lines, verifier: str) -> Iterator[str]:
    """Yields a line of output for every line of input, in order. Holds CHUNK rows at a time."""
    while chunk := list(itertools.islice(lines, CHUNK)):
        ids = {where: submit(pool, where, line, verifier) for where, line in chunk}
        grades = dict(pool.drain())
        for where, row_id in ids.items():
            grade = grades[where]
            result = {
                "id": row_id,
                "score": grade.score,
                "reason": grade.reason,
                "seconds": round(grade.seconds, 6),
            }
            yield json.dumps(result) + "\n"


def numbered_lines(file: BinaryIO) -> Lines:
    """Yields the lines of a file that are not blank, with a progress bar on stderr."""
    for number, line in enumerate(tqdm(file), 1):
        if line.strip():
            yield f"{file.name}:{number}", line


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m jzero.grade",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--in", dest="source", type=Path, required=True, help="rows, JSON lines")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="grades, JSON lines; the file appears when all rows are graded",
    )
    parser.add_argument("--force", action="store_true", help="replace --out if it exists")
    parser.add_argument(
        "--verifier",
        choices=("fast", "math_verify"),
        default="fast",
        help="math_verify also notes where the package math-verify disagrees",
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="grader processes")
    args = parser.parse_args()
    if args.verifier == "math_verify" and importlib.util.find_spec("math_verify") is None:
        parser.error("--verifier math_verify needs the package: pip install math-verify")
    if args.workers < 1:
        parser.error(f"--workers {args.workers} must be at least 1")
    if not args.source.is_file():
        parser.error(f"--in {args.source} is no file")
    try:
        check_not_input(args.out, args.source, "--in")
        check_output(args.out, args.force)
    except UserError as error:
        parser.error(str(error))
    return args


def main() -> None:
    args = arguments()
    # Grades of an earlier run stay until all of the new ones are there.
    partial = Path(f"{args.out}.partial")
    try:
        with args.source.open("rb") as rows, partial.open("w") as file, Pool(args.workers) as pool:
            lines = numbered_lines(rows)
            file.writelines(grade_lines(pool, lines, args.verifier))
        os.replace(partial, args.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    finally:
        partial.unlink(missing_ok=True)
    print(json.dumps(pool.counters))


if __name__ == "__main__":
    main()
