"""Grades a file of answers: one JSON object a line in, one {"id", "score", "reason", "seconds"} a line out, in order.

Rows: {"id", "task": math | gsm8k | countdown, "prediction", "gold"} and, as wanted, "template" (default: boxed, and
gsm8k for gsm8k), "prompt" (the question, for the echo check), "mode": "answer" (the prediction is the bare answer). The
gold of countdown is {"numbers", "target"}, or the target with that in "meta"; elsewhere a string, a number or a list of
which any will do. Counts of reasons and of worker restarts follow on stdout."""

import argparse
import importlib.util
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from tqdm import tqdm

from jzero.errors import UserError
from jzero.grading.extract import TEMPLATES
from jzero.grading.pool import Pool

TASKS = {
    "math": "boxed",
    "gsm8k": "gsm8k",
    "countdown": "answer",
}  # the template where a row has none
CHUNK = 4096  # rows in memory


def submit(pool: Pool, where: str, line: bytes, verifier: str) -> object:
    """A row to the pool, under where it stands; its id."""
    try:
        row = json.loads(line)
        task, gold, prediction, template = (
            row["task"],
            row["gold"],
            row["prediction"],
            TASKS[row["task"]],
        )
        if task != "countdown":
            template = "answer" if row.get("mode") == "answer" else row.get("template") or template
            task, gold = "math", {"answer": gold, "question": row.get("prompt") or ""}
        elif not isinstance(gold, dict):
            gold = row["meta"]
        if not isinstance(prediction, str) or template not in TEMPLATES:
            raise UserError(f"prediction must be a string, template one of {', '.join(TEMPLATES)}")
        settings = SimpleNamespace(
            template=template, verifier=verifier, grade_seconds=5.0, format_score=0.0
        )
        pool.submit(where, task, prediction, gold, settings)
        return row["id"]
    except (ValueError, KeyError, TypeError) as error:
        kind = f"{error} is missing, or no task" if isinstance(error, KeyError) else error
        raise SystemExit(f"{where}: {kind}") from None


def grades(pool: Pool, lines: Iterator[tuple[str, bytes]], verifier: str) -> Iterator[str]:
    """The lines of the output, for those of the input and where each stands."""
    while ids := {
        where: submit(pool, where, line, verifier) for where, line in itertools.islice(lines, CHUNK)
    }:
        found = {
            key: {"score": g.score, "reason": g.reason, "seconds": round(g.seconds, 6)}
            for key, g in pool.drain()
        }
        yield from (json.dumps({"id": id, **found[where]}) + "\n" for where, id in ids.items())


def main() -> None:
    parser = argparse.ArgumentParser("python -m jzero.grade", description=__doc__)
    parser.add_argument(
        "--in", dest="source", type=argparse.FileType("rb"), required=True, help="rows, JSON lines"
    )
    parser.add_argument(
        "--out", required=True, help="grades, JSON lines; appears when all are graded"
    )
    parser.add_argument(
        "--verifier", choices=("fast", "math_verify"), default="fast", help="the second also audits"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    args = parser.parse_args()
    if args.verifier == "math_verify" and importlib.util.find_spec("math_verify") is None:
        parser.error("--verifier math_verify needs the package: pip install math-verify")
    if args.workers < 1:
        parser.error(f"--workers {args.workers} must be at least 1")
    partial = Path(f"{args.out}.partial")
    try:
        with args.source, partial.open("w") as file, Pool(args.workers) as pool:
            lines = (
                (f"{args.source.name}:{k}", line)
                for k, line in enumerate(tqdm(args.source), 1)
                if line.strip()
            )
            file.writelines(grades(pool, lines, args.verifier))
        os.replace(partial, args.out)
    finally:
        partial.unlink(missing_ok=True)
    print(json.dumps(pool.counters))


if __name__ == "__main__":
    main()
