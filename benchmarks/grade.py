"""Prints the accuracy and the speed of the grader as one JSON line.

    python benchmarks/grade.py ../shared/data

The folder holds grader/public_cases.jsonl, grader/hard_cases.jsonl and math/math500.jsonl.

Accuracy is "right/all" of the labelled cases, by task and tier. Speed is of the answers of MATH-500
in this process and through a pool of one worker: "same" grades each against itself in a box,
"changed" with one digit changed (where there is no digit, x is appended). Without the pool, seconds
are processor seconds of one core. The package math-verify is measured, too, where it is installed.
"""

import argparse
import importlib.util
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from jzero.answers import verdict
from jzero.grade import row_settings
from jzero.workers.pipe import TurnRequest
from jzero.workers.pool import Pool

REPEAT = 10  # golds and answers recur in RL, where some of their trees are still in a cache
TIERS = ("core", "must", "policy", "hostile")
PEER_TIERS = TIERS[:2]  # math-verify takes seconds for each hostile case
TEMPLATES = {"math": "boxed", "gsm8k": "gsm8k"}

Pair = tuple[str, str]  # a response and its gold


def read_rows(path: Path) -> list[SimpleNamespace]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [SimpleNamespace(**json.loads(line)) for line in lines]


def prediction(row: SimpleNamespace) -> str:
    """Returns the response of a case; long ones are stored as (text, how often) pairs."""
    if hasattr(row, "prediction"):
        return row.prediction
    return "".join(text * count for text, count in row.prediction_rle)


def is_bare_answer(row: SimpleNamespace) -> bool:
    return getattr(row, "mode", "") == "answer"


def accuracy(
    path: Path,
    tiers: Sequence[str],
    accepts: Callable[[SimpleNamespace], bool],
) -> dict[str, str]:
    """Returns {"task/tier": "right/all"} of a file of cases.

    `accepts` says whether a grader accepts the response of a case; the case says what is right.
    """
    results: dict[str, list[bool]] = {}
    for row in read_rows(path):
        if row.task != "countdown" and row.tier in tiers:
            is_right = accepts(row) == (row.expected == 1)
            results.setdefault(f"{row.task}/{row.tier}", []).append(is_right)
    return {name: f"{sum(right)}/{len(right)}" for name, right in results.items()}


def accepts(row: SimpleNamespace) -> bool:
    template = getattr(row, "template", "") or TEMPLATES[row.task]
    if is_bare_answer(row):
        template = "answer"
    question = getattr(row, "problem", "")
    grade = verdict.grade(prediction(row), row.gold, template=template, question=question)
    return grade.correct


def peer_accepts(row: SimpleNamespace) -> bool:
    golds = row.gold if isinstance(row.gold, list) else [row.gold]
    text = prediction(row)
    if is_bare_answer(row):
        text = f"$\\boxed{{{text}}}$"
    try:
        return any(peer_verdict(text, str(gold)) for gold in golds)
    except Exception:  # math-verify has no verdict
        return False


def box_verdict(text: str, gold: str) -> bool:
    return verdict.grade(text, gold, template="boxed").correct


def peer_verdict(text: str, gold: str) -> bool:
    import math_verify

    return math_verify.verify(math_verify.parse(f"${gold}$"), math_verify.parse(text))


def with_changed_digit(gold: str) -> str:
    """Returns an answer that is wrong: its last digit is one higher."""
    digits = [index for index, character in enumerate(gold) if character.isdigit()]
    if not digits:
        return gold + "x"
    index = digits[-1]
    digit = (int(gold[index]) + 1) % 10
    return f"{gold[:index]}{digit}{gold[index + 1 :]}"


def boxed(answer: str) -> str:
    return f"so $\\boxed{{{answer}}}$."


def speed(judge: Callable[[str, str], bool], pairs: list[Pair]) -> dict[str, float]:
    seconds = []
    for text, gold in pairs:
        start = time.process_time()
        judge(text, gold)
        seconds.append(time.process_time() - start)
    median, percentile_99 = np.percentile(seconds, [50, 99])
    return {
        "per_second": round(len(pairs) / sum(seconds)),
        "p50_ms": round(median * 1e3, 4),
        "p99_ms": round(percentile_99 * 1e3, 3),
        "max_ms": round(max(seconds) * 1e3, 2),
    }


def pool_speed(pairs: list[Pair]) -> dict[str, float]:
    settings = row_settings(template="boxed", verifier="fast")
    with Pool(1) as pool:
        start = time.perf_counter()
        pool.step(-1, TurnRequest("math", "", {"answer": "1", "question": ""}, settings))
        pool.drain()
        ready = time.perf_counter()
        for key, (text, gold) in enumerate(pairs):
            pool.step(key, TurnRequest("math", text, {"answer": gold, "question": ""}, settings))
        pool.drain()
        done = time.perf_counter()
    return {"per_second": round(len(pairs) / (done - ready)), "start_s": round(ready - start, 2)}


def report(data: Path) -> Iterator[tuple[str, dict[str, str] | dict[str, float]]]:
    """Yields the names and the figures of all measurements."""
    has_peer = importlib.util.find_spec("math_verify") is not None
    for name in ("public_cases", "hard_cases"):
        path = data / f"grader/{name}.jsonl"
        yield name, accuracy(path, TIERS, accepts)
        if has_peer:
            yield f"{name}/math_verify", accuracy(path, PEER_TIERS, peer_accepts)

    golds = [row.answer for row in read_rows(data / "math/math500.jsonl")]
    pairs_of = {
        "same": [(boxed(gold), gold) for gold in golds],
        "changed": [(boxed(with_changed_digit(gold)), gold) for gold in golds],
    }
    for name, pairs in pairs_of.items():
        yield f"{name}/first", speed(box_verdict, pairs)
        yield name, speed(box_verdict, pairs * REPEAT)
        yield f"{name}/pool", pool_speed(pairs * REPEAT)
        if has_peer:
            yield f"{name}/math_verify", speed(peer_verdict, pairs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="the folder of the cases")
    print(json.dumps(dict(report(parser.parse_args().data))))
