"""The stages of benchmarks/gpu, rehearsed without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT

from benchmarks.gpu.running import Job, run_stage
from benchmarks.gpu.stages import STAGES, jobs_of


def printed_lines(capsys: pytest.CaptureFixture[str]) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def python_job(name: str, code: str, seconds: float = 60) -> Job:
    return Job(name, seconds, [sys.executable, "-c", code])


def test_lines_and_tables_of_a_job_are_its_measurements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = (
        "print('noise')\n"
        "print('| a | b |'); print('| --- | --- |'); print('| 1 | x y |'); print('| 2 | z |')\n"
        "print('noise')\n"
        "print('| c |'); print('| --- |'); print('| 3 |')\n"
        "print('{\"d\": 4}')\n"
    )

    failures = run_stage("s", [python_job("j", code)], 60, tmp_path, True)

    *found, end = printed_lines(capsys)
    assert failures == 0
    assert [{**line, "job": "j"} for line in found] == found
    assert [{name: line[name] for name in line if name != "job"} for line in found] == [
        {"a": "1", "b": "x y"},
        {"a": "2", "b": "z"},
        {"c": "3"},
        {"d": 4},
    ]
    assert end["status"] == 0
    kept = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert kept == [*found, end]
    assert "noise" in (tmp_path / "s.log").read_text()


def test_a_job_that_fails_or_hangs_is_a_line_and_the_next_one_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [
        python_job("fails", "print('out of memory'); raise SystemExit(3)"),
        python_job("hangs", "import time; time.sleep(600)", seconds=1),
        python_job("runs", "print('{}')"),
    ]

    failures = run_stage("s", jobs, 60, tmp_path, True)

    fails, hangs, empty, runs = printed_lines(capsys)
    assert failures == 2
    assert (fails["status"], fails["last_lines"]) == (3, ["out of memory"])
    assert (hangs["status"], hangs["killed_after"]) == (-9, 1)
    assert empty == {"job": "runs"}
    assert runs["status"] == 0


def test_what_no_longer_fits_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_stage("s", [python_job("late", "print(1)", seconds=600)], 10, tmp_path, True)

    [line] = printed_lines(capsys)
    assert line["job"] == "late"
    assert "seconds are left" in line["left_out"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_has_jobs_that_fit_into_ten_minutes(stage: str, tmp_path: Path) -> None:
    for is_tiny in (True, False):
        jobs = jobs_of(stage, tmp_path, is_tiny)
        assert jobs
        assert len({job.name for job in jobs}) == len(jobs)
        assert all(job.seconds <= 570 for job in jobs)


@pytest.mark.parametrize("stage", ["decode", "update", "recipe", "profile"])
def test_a_stage_runs_on_a_cpu(stage: str, environment: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", stage, "--tiny", f"--out={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stdout + done.stderr
    measured = {name for line in lines for name in line}
    expected = {
        "decode": {"tokens/s", "of its bandwidth"},
        "update": {"tokens/s", "MFU"},
        "recipe": {"step", "time/update"},
        "profile": {"tokens/s", "operation", "share"},
    }
    assert expected[stage] <= measured
