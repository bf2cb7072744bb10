"""Accuracy and speed of the grader as one JSON line: python benchmarks/grade.py [../shared/data]

Speed is of MATH-500 golds, in process and through a pool of one worker: against themselves in a box ("same") and with
one digit changed ("changed", "" where there is none: x is appended). math-verify beside it where it is installed."""

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from jzero.grading.pool import Pool
from jzero.grading.verdict import grade

REPEAT = 10  # golds and answers recur in RL: some of their parses are remembered
TIERS = ("core", "must", "policy", "hostile")
TEMPLATES = {"math": "boxed", "gsm8k": "gsm8k"}


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def prediction(row: dict[str, Any]) -> str:
    return (
        row["prediction"]
        if "prediction" in row
        else "".join(a * b for a, b in row["prediction_rle"])
    )


def accuracy(
    path: Path, tiers: Sequence[str], judge: Callable[[dict[str, Any]], bool]
) -> dict[str, str]:
    """ "right/all" of each task and tier, the verdict being whether a row's prediction is paid."""
    counts: dict[str, list[bool]] = {}
    for row in rows(path):
        if row["task"] != "countdown" and row["tier"] in tiers:
            counts.setdefault(f"{row['task']}/{row['tier']}", []).append(
                judge(row) == (row["expected"] == 1)
            )
    return {name: f"{sum(right)}/{len(right)}" for name, right in counts.items()}


def ours(row: dict[str, Any]) -> bool:
    template = (
        "answer" if row.get("mode") == "answer" else row.get("template") or TEMPLATES[row["task"]]
    )
    return grade(
        prediction(row), row["gold"], template=template, question=row.get("problem", "")
    ).correct


def theirs(row: dict[str, Any]) -> bool:
    golds = row["gold"] if isinstance(row["gold"], list) else [row["gold"]]
    text = f"$\\boxed{{{prediction(row)}}}$" if row.get("mode") == "answer" else prediction(row)
    try:
        return any(peer(text, str(gold)) for gold in golds)
    except Exception:  # no verdict
        return False


def changed(gold: str) -> str:
    at = next((k for k in reversed(range(len(gold))) if gold[k].isdigit()), None)
    return gold + "x" if at is None else f"{gold[:at]}{(int(gold[at]) + 1) % 10}{gold[at + 1 :]}"


def speed(function: Callable[[str, str], Any], pairs: list[tuple[str, str]]) -> dict[str, float]:
    seconds = []
    for text, gold in pairs:
        start = time.perf_counter()
        function(text, gold)
        seconds.append(time.perf_counter() - start)
    p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
    rate = len(pairs) / sum(seconds)
    return {
        "per_second": round(rate),
        "p50_ms": round(p50, 4),
        "p99_ms": round(p99, 3),
        "max_ms": round(max(seconds) * 1e3, 2),
    }


def pooled(pairs: list[tuple[str, str]]) -> dict[str, float]:
    task = SimpleNamespace(template="boxed", verifier="fast", grade_seconds=5.0)
    with Pool(1) as pool:
        start = time.perf_counter()
        pool.submit(-1, "math", "", {"answer": "1", "question": ""}, task)
        pool.drain()
        ready = time.perf_counter()
        for key, (text, gold) in enumerate(pairs):
            pool.submit(key, "math", text, {"answer": gold, "question": ""}, task)
        pool.drain()
        return {
            "per_second": round(len(pairs) / (time.perf_counter() - ready)),
            "start_s": round(ready - start, 2),
        }


def peer(text: str, gold: str) -> bool:
    import math_verify

    return math_verify.verify(math_verify.parse(f"${gold}$"), math_verify.parse(text))


def report(data: Path) -> Iterator[tuple[str, Any]]:
    known = importlib.util.find_spec("math_verify") is not None
    for name in ("public_cases", "hard_cases"):
        path = data / f"grader/{name}.jsonl"
        yield name, accuracy(path, TIERS, ours)
        if known:  # which takes seconds for each hostile one
            yield f"{name}/math_verify", accuracy(path, TIERS[:2], theirs)
    golds = [row["answer"] for row in rows(data / "math/math500.jsonl")]
    pairs = {
        "same": [(f"so $\\boxed{{{gold}}}$.", gold) for gold in golds],
        "changed": [(f"so $\\boxed{{{changed(gold)}}}$.", gold) for gold in golds],
    }
    for name, some in pairs.items():
        judge = lambda text, gold: grade(text, gold, template="boxed")
        yield f"{name}/first", speed(judge, some)
        yield name, speed(judge, some * REPEAT)
        yield f"{name}/pool", pooled(some * REPEAT)
        if known:
            yield f"{name}/math_verify", speed(peer, some)


if __name__ == "__main__":
    folder = (
        Path(sys.argv[1])
        if len(sys.argv) > 1
        else Path(__file__).resolve().parents[2] / "shared/data"
    )
    print(json.dumps(dict(report(folder))))
