"""Math answers through the pool, among hostile ones, and through the command."""

import itertools
import json
import os
import random
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from jzero import grade
from jzero.grading.pool import Pool

ATTACKS = """
import ctypes, os, time
def hang(*_): time.sleep(1000)
def spin(*_):
    while True: pass
def crash(*_): ctypes.string_at(0)
def grow(*_):
    blocks = []
    while True: blocks.append(bytes(1 << 28))
def nest(*_): return nest()
def fill(*_):
    with open("filled", "w") as file: file.write("x" * 10000)
"""
CASES = [
    (r"\boxed{\frac{2}{4}}", "0.5", 1.0),
    (r"\boxed{6}", "5", 0.0),
    (r"\boxed{x^2-1}", "(x-1)(x+1)", 1.0),
    ("5", "5", 0.0),
]
HOSTILE = [
    "9^{9^{9^9}}",
    "(10^9)!",
    "(" * 900,
    "9" * 1100,
    "1e999999999",
    "(x+1)^{99999999}",
    "1," * 550,
]


def asked(gold):
    return {"answer": gold, "question": ""}


def settings(seconds=5.0):
    return SimpleNamespace(template="boxed", verifier="fast", grade_seconds=seconds)


def test_honest_answers_survive_an_attack(tmp_path, monkeypatch):
    (tmp_path / "attacks.py").write_text(ATTACKS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    attacks = ["hang", "spin", "crash", "grow", "nest", "fill"]
    items = [(k, *CASES[k % len(CASES)]) for k in range(600)]
    with Pool(2) as pool:
        for k, response, gold, _ in items:
            pool.submit(("honest", k), "math", response, asked(gold), settings())
            if k % 10 == 0:
                pool.submit(
                    ("hostile", k),
                    "math",
                    rf"\boxed{{{rng.choice(HOSTILE)}}}",
                    asked("5"),
                    settings(),
                )
            if k % 100 == 0:
                pool.submit(("attack", k), f"attacks:{attacks[k // 100]}", "", "5", settings(0.2))
        grades = dict(pool.drain())
        assert all(grades["honest", k].score == expected for k, _, _, expected in items)
        assert all(
            grades["hostile", k].score == 0 and grades["hostile", k].seconds < 5
            for k in range(0, 600, 10)
        )
        assert [grades["attack", k].reason for k in range(0, 400, 100)] == [
            "timeout",
            "timeout",
            "killed",
            "killed",
        ]
        assert grades["attack", 400].reason.startswith("error: RecursionError")
        assert grades["attack", 500].reason.startswith("error: OSError")  # no file grows
        counters = pool.counters
        assert len(grades) == counters["graded"] == 666
        assert (
            counters["timeouts"],
            counters["killed"],
            counters["restarted"],
            counters["errors"],
        ) == (4, 4, 8, 2)
        assert counters["no_answer"] == 150 and counters["unparsed"] >= 1
        for k in range(100):  # both workers are back
            pool.submit(k, "math", r"\boxed{5}", asked("5"), settings())
        assert all(grade.correct for _, grade in pool.drain()) and pool.counters["restarted"] == 8


def test_a_worker_starts_light():
    code = "import sys, jzero.grading.verdict, jzero.grading.pool, jzero.tasks; print(*sys.modules)"
    loaded = set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )
    assert not loaded & {"jax", "torch", "tensorflow", "sympy", "datasets", "transformers"}
    with Pool(1) as pool:
        start = time.monotonic()
        pool.submit(0, "math", r"\boxed{5}", asked("5"), settings())
        assert (
            pool.drain()[0][1].correct and time.monotonic() - start < 10
        )  # 0.1 s on an idle machine


# python -m jzero.grade


ROW = {"id": 0, "task": "math", "prediction": r"\boxed{5}", "gold": "5"}


def command(*arguments):
    found = subprocess.run(
        [sys.executable, "-m", "jzero.grade", *map(str, arguments)], capture_output=True, text=True
    )
    return found.returncode, found.stdout, found.stderr


def test_command_grades_in_order(tmp_path):
    source, out = tmp_path / "cases.jsonl", tmp_path / "scores.jsonl"
    gold = {"numbers": [2, 3, 4], "target": 10}
    cases = [
        {"task": "math", "prediction": r"\boxed{5}", "gold": "5"},
        {"task": "math", "prediction": "5", "gold": [4, 5], "mode": "answer"},
        {"task": "math", "prediction": "</think> <answer>6</answer>", "gold": 5, "template": "r1"},
        {
            "task": "math",
            "prediction": r"\boxed{x^2-1}",
            "gold": "(x-1)(x+1)",
            "prompt": "Factor $x^2-1$",
        },
        {"task": "gsm8k", "prediction": "so\n#### 1,000 eggs", "gold": "1000"},
        {"task": "countdown", "prediction": "</think><answer>2*3+4</answer>", "gold": gold},
        {
            "task": "countdown",
            "prediction": "</think><answer>2+3+4</answer>",
            "gold": 10,
            "meta": gold,
        },
    ]
    source.write_text(
        "".join(json.dumps({"id": k, **case}) + "\n" for k, case in enumerate(cases * 700))
    )
    code, counters, progress = command("--in", source, "--out", out, "--workers", 2)
    assert code == 0 and "4900it" in progress
    assert json.loads(counters)["graded"] == 4900 and json.loads(counters)["echo"] == 700
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in found] == list(range(len(cases) * 700))
    assert [row["score"] for row in found] == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0] * 700
    assert [row["reason"] for row in found[:4]] == ["correct", "correct", "wrong value", "echo"]
    assert os.listdir(tmp_path) in (
        ["cases.jsonl", "scores.jsonl"],
        ["scores.jsonl", "cases.jsonl"],
    )


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "cases.jsonl:1"),
        ("[]", "cases.jsonl:1"),
        ('{"id": 1, "task": "math", "prediction": "5"}', "'gold' is missing"),
        (
            '{"id": 1, "task": "chess", "prediction": "5", "gold": "5"}',
            "'chess' is missing, or no task",
        ),
        ('{"id": 1, "task": "math", "prediction": 5, "gold": "5"}', "prediction must be a string"),
        (
            '{"id": 1, "task": "math", "prediction": "5", "gold": "5", "template": "x"}',
            "send a template of boxed",
        ),
    ],
)
def test_command_says_which_row_is_wrong(tmp_path, line, message):
    source, out = tmp_path / "cases.jsonl", tmp_path / "scores.jsonl"
    source.write_text(line + "\n")
    code, counters, errors = command("--in", source, "--out", out, "--workers", 1)
    assert code == 2 and message in errors and "Traceback" not in errors and not counters
    assert os.listdir(tmp_path) == ["cases.jsonl"]


def test_command_refuses_what_it_cannot_do(tmp_path):
    source, out = tmp_path / "cases.jsonl", tmp_path / "scores.jsonl"
    source.write_text("")
    for arguments, message in [
        (("--in", tmp_path / "absent", "--out", out), f"can't open '{tmp_path / 'absent'}'"),
        (("--in", source, "--out", out, "--workers", 0), "--workers 0 must be at least 1"),
    ]:
        code, _, errors = command(*arguments)
        assert code == 2 and message in errors.splitlines()[-1] and "Traceback" not in errors
    assert os.listdir(tmp_path) == ["cases.jsonl"]


def test_command_keeps_the_old_grades_on_failure(tmp_path):
    source, out = tmp_path / "rows", tmp_path / "scores.jsonl"
    out.write_text("old")
    source.write_text((json.dumps(ROW) + "\n") * 5000 + "\n{\n")
    code, _, errors = command("--in", source, "--out", out, "--workers", 1)
    assert code == 2 and "rows:5002: " in errors
    assert out.read_text() == "old" and sorted(os.listdir(tmp_path)) == ["rows", "scores.jsonl"]


def test_command_holds_a_part_of_the_rows_only():
    endless = ((f"row {k}", json.dumps(ROW).encode()) for k in itertools.count())
    with Pool(1) as pool:
        found = list(itertools.islice(grade.grade_lines(pool, endless, "fast"), 5000))
    assert all(json.loads(line)["reason"] == "correct" for line in found)
