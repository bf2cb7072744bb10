"""Grades a file of answers: one JSON object a line in, one {"id", "score", "reason", "seconds"} a line out, in order.

Rows: {"id", "task": math | gsm8k | countdown, "prediction", "gold"} and, as wanted, "template" (default: boxed, and
gsm8k for gsm8k), "prompt" (the question, for the echo check), "mode": "answer" (the prediction is the bare answer). The
gold of countdown is {"numbers", "target"}, or the target with that in "meta"; elsewhere a string, a number or a list of
which any will do. Counts of reasons and of worker restarts follow on stdout."""

import argparse
import importlib.util
import json
import os
from types import SimpleNamespace
from typing import Any

from jzero.grade.extract import TEMPLATES
from jzero.grade.pool import Pool

MATH = "jzero.grade.math:grade_problem"
TASKS = {"math": (MATH, "boxed"), "gsm8k": (MATH, "gsm8k"), "countdown": ("countdown", "answer")}  # grader, template


def question(line: bytes, where: str, verifier: str) -> tuple[Any, tuple[str, str, Any, Any]]:
    """A row's id and what Pool.submit takes."""
    try:
        row = json.loads(line)
        (grader, template), gold, prediction = TASKS[row["task"]], row["gold"], row["prediction"]
        if row["task"] != "countdown":
            template = "answer" if row.get("mode") == "answer" else row.get("template") or template
            gold = {"answer": gold, "question": row.get("prompt") or ""}
        elif not isinstance(gold, dict):
            gold = row["meta"]
        if not isinstance(prediction, str) or template not in TEMPLATES:
            raise ValueError(f"prediction must be a string, template one of {', '.join(TEMPLATES)}")
        settings = SimpleNamespace(template=template, verifier=verifier, grade_seconds=5.0, format_score=0.0)
        return row["id"], (grader, prediction, gold, settings)
    except (ValueError, KeyError, TypeError) as error:
        kind = f"{error} is missing, or no task" if isinstance(error, KeyError) else error
        raise SystemExit(f"{where}: {kind}") from None


def main() -> None:
    parser = argparse.ArgumentParser("python -m jzero.grade", description=__doc__)
    parser.add_argument(
        "--in", dest="source", type=argparse.FileType("rb"), required=True, help="rows to grade, JSON lines"
    )
    parser.add_argument("--out", required=True, help="grades, JSON lines; written when all are graded")
    parser.add_argument("--verifier", choices=("fast", "math_verify"), default="fast", help="the second also audits")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    args = parser.parse_args()
    if args.verifier == "math_verify" and importlib.util.find_spec("math_verify") is None:
        parser.error("--verifier math_verify needs the package: pip install math-verify")
    with args.source, Pool(max(1, args.workers)) as pool:
        lines = [(f"{args.source.name}:{number}", line) for number, line in enumerate(args.source, 1) if line.strip()]
        rows = [question(line, where, args.verifier) for where, line in lines]
        for number, (_, item) in enumerate(rows):
            pool.submit(number, *item)
        grades = dict(pool.drain())
    with open(args.out, "w", encoding="utf-8") as file:
        for number, (id, _) in enumerate(rows):
            score, reason, seconds = grades[number].score, grades[number].reason, round(grades[number].seconds, 6)
            file.write(json.dumps({"id": id, "score": score, "reason": reason, "seconds": seconds}) + "\n")
    print(json.dumps(pool.counters))


if __name__ == "__main__":
    main()
