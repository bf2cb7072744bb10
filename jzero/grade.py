"""Grades a JSONL file of answers, and writes one result per row in the same order.

    python -m jzero.grade --in cases.jsonl --out scores.jsonl

A row has these fields:
  id          copied to the result
  task        math, gsm8k or countdown
  prediction  the response
  gold        a string, a number, or a list of accepted answers;
              for countdown {"numbers", "target"}, or the target with that object in "meta"
and may have these:
  template    how the response marks its answer; default: boxed, and gsm8k for gsm8k
  mode        "answer": the prediction is the bare answer
  prompt      the question; an answer that only repeats it scores 0

A result is {"id", "score", "reason", "seconds"}. At the end the command prints counts of reasons
and of restarted workers.

    python -m jzero.grade --in cases.jsonl --out scores.jsonl --verifiers fast,math_verify,open_r1

compares several verifiers (docs/data-and-rewards.md lists them). The first one decides the score. A
result has the scores of all verifiers as "verdicts", with null for a verifier that does not grade
the row's task. At the end the command prints how often each two verifiers agree, and the first rows
on which they differ. A published verifier parses the prediction as its original does: a bare answer
must be in a box.
"""

import argparse
import contextlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jzero import cli, json_values, terminal
from jzero.answers import published
from jzero.answers.extract import TEMPLATES
from jzero.config import RewardConfig, TaskConfig
from jzero.cores import num_cores
from jzero.errors import UserError, reason_of, shown
from jzero.fields import build
from jzero.files import (
    check_not_input,
    check_output,
    exit_on_mistake,
    read_lines,
    split_commas,
)
from jzero.types import JsonValue
from jzero.workers.pipe import TurnRequest
from jzero.workers.pool import Pool

# The default template of each task.
DEFAULT_TEMPLATES = {"math": "boxed", "gsm8k": "gsm8k", "countdown": "answer"}
CHUNK = 4096  # rows in memory
SHOWN = 10  # maximum number of printed rows on which two verifiers differ

Lines = Iterator[tuple[str, bytes]]  # the location of a line ("cases.jsonl:7"), and the line


def row_settings(template: str, verifier: str, grade_seconds: float = 5.0) -> TaskConfig:
    """Returns the settings of a row. Its score is that of its task's grader, without rewards."""
    settings = {
        "template": template,
        "verifier": verifier,
        "grade_seconds": grade_seconds,
        "options": ("format_score=0",),  # of countdown; the graders of mathematics have no options
        "reward": RewardConfig(functions=()),
    }
    return build(TaskConfig, settings)


class Row(NamedTuple):
    """A row of the input, in the form that the pool requires."""

    id: object
    task: str
    prediction: str
    gold: JsonValue
    template: str


def parse_row(line: bytes) -> Row:
    """Parses a row.

    Raises:
        ValueError, KeyError, TypeError: the line is not a valid row.
    """
    # Numbers of an answer may be NaN; the grader refuses them.
    row = json_values.as_object(json_values.parse(line.decode(), allows_nan=True), "the row")
    task = json_values.as_text(row["task"], "task")
    gold, prediction = row["gold"], row["prediction"]
    template = DEFAULT_TEMPLATES[task]
    if task == "countdown":
        gold = gold if isinstance(gold, dict) else row["meta"]
    else:
        # gsm8k is graded as math: only the template, which marks the answer, differs.
        task = "math"
        gold = {"answer": gold, "question": row.get("prompt") or ""}
        template = row.get("template") or template
        if row.get("mode") == "answer":
            template = "answer"
    template = json_values.as_text(template, "template")
    # Graders assume text and a known template, so reject anything else here, with the line.
    if not isinstance(prediction, str):
        raise UserError("prediction must be a string")
    if template not in TEMPLATES:
        raise UserError(
            f"template={shown(template)} is unknown: send a template of {', '.join(TEMPLATES)}"
        )
    return Row(row["id"], task, prediction, gold, template)


def submit(pool: Pool, where: str, line: bytes, verifiers: Sequence[str]) -> object:
    """Submits a row under the key (where, verifier) for each verifier, and returns the row's id.

    Raises:
        UserError: the line is not a valid row; the message begins with `where`.
    """
    try:
        row = parse_row(line)
    except KeyError as error:
        raise UserError(f"{where}: {shown(error.args[0])} is missing, or no task") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{where}: {reason_of(error)}") from None
    # A verifier may not grade the row's task; then the row has no verdict of this verifier.
    for verifier in verifiers:
        if published.grades(verifier, row.task):
            settings = row_settings(row.template, verifier)
            request = TurnRequest(row.task, row.prediction, row.gold, settings)
            pool.step((where, verifier), request)
    return row.id


class Agreement:
    """Counts how often the verifiers agree, and keeps the first rows on which they differ."""

    def __init__(self, verifiers: Sequence[str]) -> None:
        self._pairs = list(itertools.combinations(verifiers, 2))
        self._equal: Counter[tuple[str, str]] = Counter()
        self._graded: Counter[tuple[str, str]] = Counter()
        self._differing: list[str] = []

    def add(self, where: str, verdicts: Mapping[str, float | None]) -> None:
        """Counts the verdicts of one row."""
        for pair in self._pairs:
            first, second = verdicts[pair[0]], verdicts[pair[1]]
            # Count only rows that both verifiers grade.
            if first is None or second is None:
                continue
            self._graded[pair] += 1
            self._equal[pair] += first == second
        scores = {score for score in verdicts.values() if score is not None}
        if len(scores) > 1 and len(self._differing) < SHOWN:
            self._differing.append(f"{where} {json.dumps(verdicts)}")

    def table(self) -> str:
        """Returns a line for each pair of verifiers, and then the differing rows."""
        lines = []
        for pair in self._pairs:
            graded, equal = self._graded[pair], self._equal[pair]
            share = f"{100 * equal / graded:.1f} %" if graded else "no rows"
            lines.append(f"{pair[0]} and {pair[1]} agree on {equal} of {graded} rows ({share})")
        return "\n".join(lines + self._differing)


def grade_lines(
    pool: Pool,
    lines: Lines,
    verifiers: Sequence[str],
    agreement: Agreement | None = None,
) -> Iterator[str]:
    """Yields a line of output for every line of input, in order. Holds CHUNK rows at a time."""
    while chunk := list(itertools.islice(lines, CHUNK)):
        # A chunk is graded in any order; its rows are written in the order of the input.
        ids = {where: submit(pool, where, line, verifiers) for where, line in chunk}
        grades = dict(pool.drain())
        for where, row_id in ids.items():
            row_grades = {verifier: grades.get((where, verifier)) for verifier in verifiers}
            # The first verifier decides the score.
            grade = row_grades[verifiers[0]]
            # Without a grade, the first verifier does not grade this task.
            result: dict[str, object] = {"id": row_id, "score": None, "reason": "another task"}
            if grade is not None:
                result["score"], result["reason"] = grade.score, grade.reason
            seconds = sum(grade.seconds for grade in row_grades.values() if grade is not None)
            result["seconds"] = round(seconds, 6)
            if len(verifiers) > 1:
                verdicts = {name: grade and grade.score for name, grade in row_grades.items()}
                result["verdicts"] = verdicts
                if agreement is not None:
                    agreement.add(where, verdicts)
            yield json.dumps(result) + "\n"


def numbered_lines(path: Path) -> Lines:
    """Yields the lines of a file that are not blank, and shows how many it has read."""
    with terminal.phase("grade", unit="rows") as phase:
        for number, line in read_lines(path):
            if line.strip():
                yield f"{path}:{number}", line
            phase.advance()


def make_parser() -> cli.Parser:
    """Returns the parser of the command."""
    parser = cli.make_parser("jzero.grade", __doc__)
    parser.add_argument("--in", dest="source", type=Path, required=True, help="rows, JSON lines")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="grades, JSON lines; the file appears when all rows are graded",
    )
    parser.add_argument("--force", action="store_true", help="replace --out if it exists")
    parser.add_argument(
        "--verifiers",
        "--verifier",
        default="fast",
        help="who grades: one or several of "
        f"{', '.join((published.OWN_VERIFIER, *published.VERIFIERS))}, with commas between",
    )
    parser.add_argument("--workers", type=int, default=num_cores(), help="grader processes")
    return parser


def arguments() -> argparse.Namespace:
    """Returns the values of the flags. A mistake ends the process."""
    parser = make_parser()
    args = parser.parse_args()
    args.verifiers = split_commas(args.verifiers)
    if args.workers < 1:
        parser.error(f"--workers {args.workers} must be at least 1")
    if not args.source.is_file():
        parser.error(f"--in {args.source} is not a file")
    try:
        check_verifiers(args.verifiers)
        check_not_input(args.out, args.source, "--in")
        check_output(args.out, args.force)
    except UserError as error:
        parser.error(str(error))
    return args


def check_verifiers(verifiers: Sequence[str]) -> None:
    """Raises UserError unless each name is a verifier, given once, with working packages."""
    verifier_names = (published.OWN_VERIFIER, *published.VERIFIERS)
    for name, count in Counter(verifiers).items():
        if name not in verifier_names:
            raise UserError(f"--verifiers {name} is not one of {', '.join(verifier_names)}")
        if count > 1:
            raise UserError(f"--verifiers names {name} {count} times: name it once")
        published.load(name)
    if not verifiers:
        raise UserError(f"--verifiers names none: give one of {', '.join(verifier_names)}")


def main() -> None:
    args = arguments()
    agreement = Agreement(args.verifiers)
    # The grades of an earlier run are replaced only when all grades of this run are complete.
    partial = Path(f"{args.out}.partial")
    try:
        with exit_on_mistake():
            with partial.open("w") as file, Pool(args.workers) as pool:
                lines = numbered_lines(args.source)
                file.writelines(grade_lines(pool, lines, args.verifiers, agreement))
            os.replace(partial, args.out)
    finally:
        with contextlib.suppress(OSError):  # of a read-only folder
            partial.unlink()
    terminal.write(json.dumps(pool.counters))
    if len(args.verifiers) > 1:
        terminal.write(agreement.table())


if __name__ == "__main__":
    terminal.run_command(main)
