"""Prints what sympy would decide where the default grader cannot read an answer, as one JSON line.

    python benchmarks/undecided.py PAIRS.jsonl

A line of a file has an answer and a gold, and tells whether they are equal: the fields "answer" (or
"pred_answer"), "gold", "equal" (or "right", "expected") and perhaps "question". A pair is undecided
if the default grader cannot read one of its sides. Each undecided pair is graded by the verifier
math_verify, which parses LaTeX to sympy, in one process of the grader pool with its deadline.

With --refused, sympy decides all pairs that the default grader refuses, for whatever reason.

- undecided: pairs that are equal, and pairs that are not
- gained: equal pairs that sympy credits; false: other pairs that it credits
- seconds: the mean and the maximum of an undecided pair; late: pairs stopped at the deadline
"""

import argparse
import json
import time
from pathlib import Path
from typing import NamedTuple

from jzero.answers import verdict
from jzero.answers.latex_parser import parse
from jzero.grade import row_settings
from jzero.workers.pipe import TurnRequest
from jzero.workers.pool import Pool

DEADLINE = 5.0  # seconds of a pair


class Pair(NamedTuple):
    answer: str
    gold: str
    question: str
    is_equal: bool


def read_pairs(path: Path) -> list[Pair]:
    pairs = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        answer = row.get("answer", row.get("pred_answer"))
        label = row.get("equal", row.get("right", row.get("expected")))
        if isinstance(answer, str) and isinstance(row.get("gold"), str) and label is not None:
            pairs.append(Pair(answer, row["gold"], row.get("question", ""), bool(label)))
    return pairs


def is_undecided(pair: Pair, with_refused: bool) -> bool:
    graded = verdict.grade(pair.answer, pair.gold, template="answer", question=pair.question)
    if graded.correct:
        return False
    return with_refused or graded.reason == "unparsed" or parse(pair.gold) is None


def report(paths: list[Path], with_refused: bool) -> dict[str, object]:
    pairs = [pair for path in paths for pair in read_pairs(path)]
    undecided = [pair for pair in pairs if is_undecided(pair, with_refused)]
    settings = row_settings("boxed", "math_verify", grade_seconds=DEADLINE)
    credited: list[Pair] = []
    seconds = []
    with Pool(1) as pool:
        pool.step(-1, TurnRequest("math", r"\boxed{1}", {"answer": "1", "question": ""}, settings))
        pool.drain()
        for key, pair in enumerate(undecided):
            start = time.perf_counter()
            response = rf"$\boxed{{{pair.answer}}}$"
            gold = {"answer": pair.gold, "question": pair.question}
            pool.step(key, TurnRequest("math", response, gold, settings))
            ((_, graded),) = pool.drain()
            seconds.append(time.perf_counter() - start)
            if graded.correct:
                credited.append(pair)
    num_equal = sum(pair.is_equal for pair in undecided)
    return {
        "pairs": len(pairs),
        "undecided": [num_equal, len(undecided) - num_equal],
        "gained": sum(pair.is_equal for pair in credited),
        "false": [[pair.answer, pair.gold] for pair in credited if not pair.is_equal],
        "seconds": [
            round(sum(seconds) / max(1, len(seconds)), 3),
            round(max(seconds, default=0), 3),
        ],
        "late": sum(second >= DEADLINE for second in seconds),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pairs", type=Path, nargs="+", help="files of pairs, in JSON lines")
    parser.add_argument(
        "--refused", action="store_true", help="take all pairs that the default grader refuses"
    )
    options = parser.parse_args()
    print(json.dumps(report(options.pairs, options.refused)))
