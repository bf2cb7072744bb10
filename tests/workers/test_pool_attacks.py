"""Honest answers are graded right while others attack the workers in every way at once."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from jzero.grade import row_settings
from jzero.workers.pipe import TurnRequest
from jzero.workers.pool import Pool

# (response, gold, its score)
HONEST = [
    (r"\boxed{\frac{2}{4}}", "0.5", 1.0),
    (r"\boxed{6}", "5", 0.0),
    (r"\boxed{x^2-1}", "(x-1)(x+1)", 1.0),
    ("5", "5", 0.0),
]
HOSTILE_ANSWERS = [
    "9^{9^{9^9}}",
    "(10^9)!",
    "(" * 900,
    "9" * 1100,
    "1e999999999",
    "(x+1)^{99999999}",
    "1," * 550,
]
# A grader of tests/workers/hostile_graders.py, and the beginning of its reason.
ATTACKS = [
    ("hang", "timeout"),
    ("spin", "timeout"),
    ("crash", "killed"),
    ("grow", "killed"),
    ("nest", "error: RecursionError"),
    ("fill", "error: OSError"),  # no file grows
]
SETTINGS = row_settings(template="boxed", verifier="fast")
BRIEF = row_settings(template="boxed", verifier="fast", grade_seconds=0.2)


def with_answer(gold: str) -> dict[str, str]:
    return {"answer": gold, "question": ""}


def test_honest_answers_survive_an_attack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where an attack writes a file
    rng = random.Random(0)
    honest = {index: HONEST[index % len(HONEST)] for index in range(600)}
    hostile = range(0, 600, 10)

    with Pool(2) as pool:
        for index, (response, gold, _) in honest.items():
            pool.step(("honest", index), TurnRequest("math", response, with_answer(gold), SETTINGS))
            if index in hostile:
                answer = rf"\boxed{{{rng.choice(HOSTILE_ANSWERS)}}}"
                pool.step(
                    ("hostile", index), TurnRequest("math", answer, with_answer("5"), SETTINGS)
                )
            if index % 100 == 0:
                function, _ = ATTACKS[index // 100]
                grader = f"hostile_graders:{function}"
                pool.step(("attack", function), TurnRequest(grader, "", "5", BRIEF))
        grades = dict(pool.drain())
        counters = dict(pool.counters)

        # Both workers are back.
        for key in range(100):
            pool.step(key, TurnRequest("math", r"\boxed{5}", with_answer("5"), SETTINGS))
        assert all(grade.correct for _, grade in pool.drain())
        assert pool.counters["restarted"] == counters["restarted"]

    for index, (_, _, expected) in honest.items():
        assert grades["honest", index].score == expected
    for index in hostile:
        assert grades["hostile", index].score == 0
        assert grades["hostile", index].seconds < 5
    for function, reason in ATTACKS:
        assert grades["attack", function].reason.startswith(reason)
        assert grades["attack", function].score == 0
    assert len(grades) == 666
    unparsed = counters.pop("unparsed")
    assert unparsed >= 1
    assert counters == {
        "graded": 666,
        "no_answer": 150,
        "echo": 0,
        "errors": 2,  # the last two attacks
        "timeouts": 4,  # the first two attacks, each tried twice
        "killed": 4,
        "restarted": 8,
    }


def test_a_worker_starts_light() -> None:
    code = "import sys, jzero.tasks.worker, jzero.tasks; print(*sys.modules)"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    heavy = {"jax", "torch", "tensorflow", "sympy", "datasets", "transformers"}
    assert not heavy & set(process.stdout.split())


def test_a_worker_that_is_killed_while_it_starts_is_started_again() -> None:
    with Pool(1) as pool:
        first = None
        while first is None:
            first = pool._workers[0]
        first.process.kill()

        pool.step("key", TurnRequest("math", r"\boxed{5}", with_answer("5"), SETTINGS))
        [(_, grade)] = pool.drain()

        assert grade.correct
        assert pool.counters["restarted"] == 1


def test_workers_that_never_start_are_an_error(monkeypatch) -> None:
    monkeypatch.setattr("jzero.workers.pool.sys.executable", "/bin/false")
    with Pool(1) as pool:
        pool.step("key", TurnRequest("math", r"\boxed{5}", with_answer("5"), SETTINGS))
        with pytest.raises(RuntimeError, match="a grader process did not start"):
            pool.drain()
        assert pool.counters["restarted"] == 3
