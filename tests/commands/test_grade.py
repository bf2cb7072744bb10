"""python -m jzero.grade: rows in, grades out, and one line for a mistake."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from runs import write_jsonl

from jzero import grade
from jzero.errors import UserError
from jzero.workers.pool import Pool

COUNTDOWN = {"numbers": [2, 3, 4], "target": 10}
# (row, its score, the reason)
CASES = [
    ({"task": "math", "prediction": r"\boxed{5}", "gold": "5"}, 1.0, "correct"),
    ({"task": "math", "prediction": "5", "gold": [4, 5], "mode": "answer"}, 1.0, "correct"),
    (
        {"task": "math", "prediction": "</think> <answer>6</answer>", "gold": 5, "template": "r1"},
        0.0,
        "wrong value",
    ),
    (
        {
            "task": "math",
            "prediction": r"\boxed{x^2-1}",
            "gold": "(x-1)(x+1)",
            "prompt": "Factor $x^2-1$",
        },
        0.0,
        "echo",
    ),
    ({"task": "gsm8k", "prediction": "so\n#### 1,000 eggs", "gold": "1000"}, 1.0, "correct"),
    (
        {"task": "countdown", "prediction": "</think><answer>2*3+4</answer>", "gold": COUNTDOWN},
        1.0,
        "correct",
    ),
    (
        {
            "task": "countdown",
            "prediction": "</think><answer>2+3+4</answer>",
            "gold": 10,
            "meta": COUNTDOWN,
        },
        0.0,
        "wrong value",
    ),
]
ROW = {"id": 0, "task": "math", "prediction": r"\boxed{5}", "gold": "5"}


def file_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def run_main(monkeypatch: pytest.MonkeyPatch):
    """Runs the command in this process, with 64 rows in memory at a time."""

    def run(*arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["grade", *map(str, arguments)])
        grade.main()

    monkeypatch.setattr(grade, "CHUNK", 64)
    return run


def test_rows_are_graded_in_order(tmp_path: Path) -> None:
    source, out = tmp_path / "cases.jsonl", tmp_path / "scores.jsonl"
    repeats = 20
    rows = [row for row, _, _ in CASES] * repeats
    write_jsonl(source, [{"id": index, **row} for index, row in enumerate(rows)])

    command = [sys.executable, "-m", "jzero.grade", "--in", source, "--out", out, "--workers", "1"]
    process = subprocess.run(command, capture_output=True, text=True)

    assert process.returncode == 0
    assert "\r" not in process.stderr  # no bar in a log
    counters = json.loads(process.stdout)
    assert counters["graded"] == len(rows)
    assert counters["echo"] == repeats
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert [result["id"] for result in results] == list(range(len(rows)))
    expected = [(score, reason) for _, score, reason in CASES] * repeats
    assert [(result["score"], result["reason"]) for result in results] == expected
    assert file_names(tmp_path) == {"cases.jsonl", "scores.jsonl"}


def test_a_mistake_after_many_rows_keeps_the_old_grades(
    tmp_path: Path, run_main, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "rows", tmp_path / "scores.jsonl"
    out.write_text("old")
    source.write_text((json.dumps(ROW) + "\n") * 100 + "\n{\n")

    with pytest.raises(SystemExit) as end:
        run_main("--in", source, "--out", out, "--workers", 1, "--force")

    printed = capsys.readouterr()
    assert end.value.code == 2
    assert printed.err.splitlines()[-1].startswith(f"error: {source}:102: ")
    assert not printed.out
    assert out.read_text() == "old"
    assert file_names(tmp_path) == {"rows", "scores.jsonl"}


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "not valid JSON: "),
        ("[]", "not an object"),
        ('{"id": 1, "task": "math", "prediction": "5"}', "gold is missing"),
        (
            '{"id": 1, "task": "chess", "prediction": "5", "gold": "5"}',
            "chess is missing, or no task",
        ),
        (
            '{"id": 1, "task": "math", "prediction": 5, "gold": "5"}',
            "prediction must be a string",
        ),
        (
            '{"id": 1, "task": "math", "prediction": "5", "gold": "5", "template": "x"}',
            "template=x is unknown: send a template of boxed",
        ),
    ],
)
def test_a_mistake_says_which_row_is_wrong(line, message) -> None:
    with Pool(0) as pool, pytest.raises(UserError, match=message) as error:
        grade.submit(pool, "cases.jsonl:7", line.encode(), ["fast"])
    assert str(error.value).startswith("cases.jsonl:7: ")


def test_wrong_arguments_are_refused_before_anything_is_written(
    tmp_path: Path, run_main, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "cases.jsonl", tmp_path / "scores.jsonl"
    source.write_text("")
    for arguments, message in [
        (("--in", tmp_path / "absent", "--out", out), f"--in {tmp_path / 'absent'} is not a file"),
        (("--in", source, "--out", out, "--workers", 0), "--workers 0 must be at least 1"),
        (("--in", source, "--out", out, "--verifiers", "best"), "best is not one of fast"),
        (("--in", source, "--out", out, "--verifiers", "fast,fast"), "names fast 2 times"),
        (("--in", source, "--out", out, "--verifiers", ","), "--verifiers names none"),
    ]:
        with pytest.raises(SystemExit) as end:
            run_main(*arguments)
        assert end.value.code == 2
        assert message in capsys.readouterr().err.splitlines()[-1]
    assert file_names(tmp_path) == {"cases.jsonl"}


def test_verifiers_are_compared_row_by_row(
    tmp_path: Path, run_main, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pylatexenc")
    pytest.importorskip("math_verify")
    source, out = tmp_path / "cases.jsonl", tmp_path / "scores.jsonl"
    countdown = {"task": "countdown", "prediction": "<answer>2*3+4 </answer>", "gold": COUNTDOWN}
    rows = [
        {"task": "math", "prediction": r"\boxed{5}", "gold": "$5$"},
        # A box with a space is no box to oat, and open-r1 pays any answer to a gold without LaTeX.
        {"task": "math", "prediction": r"\boxed {5}", "gold": "5"},
        {"task": "math", "prediction": r"\boxed{6}", "gold": "5"},
        countdown,
    ]
    write_jsonl(source, [{"id": index, **row} for index, row in enumerate(rows)])

    names = "oat_fast,open_r1,oat_countdown"
    run_main("--in", source, "--out", out, "--workers", 1, "--verifiers", names)

    results = [json.loads(line) for line in out.read_text().splitlines()]
    none = None
    assert [tuple(result["verdicts"].values()) for result in results] == [
        (1.0, 1.0, none),
        (0.0, 1.0, none),
        (0.0, 1.0, none),
        (none, none, 1.0),
    ]
    assert [result["score"] for result in results] == [1.0, 0.0, 0.0, None]
    _, *table = capsys.readouterr().out.splitlines()
    assert table[0] == "oat_fast and open_r1 agree on 1 of 3 rows (33.3 %)"
    assert table[1] == "oat_fast and oat_countdown agree on 0 of 0 rows (no rows)"
    assert [line.split()[0] for line in table[3:]] == [f"{source}:2", f"{source}:3"]


def test_only_a_part_of_the_rows_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grade, "CHUNK", 64)
    endless = ((f"row {index}", json.dumps(ROW).encode()) for index in itertools.count())
    with Pool(1) as pool:
        lines = list(itertools.islice(grade.grade_lines(pool, endless, ["fast"]), 100))
    assert all(json.loads(line)["reason"] == "correct" for line in lines)
