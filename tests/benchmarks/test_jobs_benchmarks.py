"""The benchmarks of separate jobs: their figures, and the processes that they start."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
ENDS = (sys.executable, "-c", "")
FAILS = (sys.executable, "-c", "raise SystemExit(3)")
WAITS = (sys.executable, "-c", "import time; time.sleep(60)")


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the scripts of benchmarks/ modules."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.fixture
def idle(benchmarks: None) -> ModuleType:
    return importlib.import_module("jobs_idle")


@pytest.fixture
def processes(benchmarks: None) -> ModuleType:
    return importlib.import_module("job_processes")


@pytest.fixture
def snapshots(benchmarks: None) -> ModuleType:
    return importlib.import_module("jobs_snapshots")


def test_a_failed_sampler_ends_its_trainer(processes: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(processes.SamplerError, match="sampler 1 failed"):
        processes.run_with_samplers(WAITS, [ENDS, FAILS], tmp_path)


def test_a_run_ends_when_all_of_its_processes_have(processes: ModuleType, tmp_path: Path) -> None:
    done = "import pathlib, time; time.sleep(0.3); pathlib.Path('{}').touch()"
    sampler = [sys.executable, "-c", done.format(tmp_path / "done")]

    processes.run_with_samplers(ENDS, [sampler], tmp_path / "logs")

    assert (tmp_path / "done").exists()
    assert (tmp_path / "logs" / "sampler-0.log").exists()


def test_idle_share_is_of_the_counted_steps(idle: ModuleType) -> None:
    """Steps of 10 s: 4 s of rollouts and 1 s of weights on each of two samplers, 6 s of update."""
    trainer, sampler = [], []
    for version in range(6):
        start, used = 10.0 * version, 8.0 * version
        # 2 s of publication, then 0.5 s of the processor while the trainer waits for rollouts.
        collect = idle.Noted("collect", version, start, start + 4, used, used + 2.5)
        publish = idle.Noted("publish", version, start + 1, start + 2, used + 1, used + 2, 3000)
        trainer += [collect, publish]
        # The first requests are much longer, because they compile.
        seconds = 10.0 if version < 2 else 5.0
        busy = 5.0 * version
        sampler += [
            idle.Noted("request", version, start, start + seconds, busy, busy + 5),
            idle.Noted("read", version, start, start + 1, busy, busy + 1),
        ]

    figures = idle.figures(trainer, [sampler, sampler])

    # The window is from 24 to 54 s: three steps, in which each sampler works for 1 + 5 + 5 + 4 s.
    assert figures == idle.Figures(2, 10.0, 5.5, 2.0, 3000, 8.0, 1.0, 0.5)
    # A step takes 7.5 s of the trainer, and 1 + 8 / 2 s of each sampler.
    assert figures.computed_idle == pytest.approx(1 - 5 / 7.5)
    assert figures.row() == "| 2 | 10.0 | 5.5 | 2.0 | 0.0 | 8.0 | 1.00 | 50% | 33% |"


def test_full_snapshots_are_not_counted_as_differences(idle: ModuleType) -> None:
    trainer = []
    for version in range(5):
        start = 10.0 * version
        trainer.append(idle.Noted("collect", version, start, start + 4, start, start + 2))
        size, is_full = (90, True) if version == 3 else (7, False)
        trainer.append(
            idle.Noted("publish", version, start, start + 1, start, start + 1, size, is_full)
        )
    read = idle.Noted("read", 3, 30.0, 31.0, 0.0, 1.0)

    assert idle.figures(trainer, [[read]]).bytes == 7


def test_notes_are_read_again(idle: ModuleType, tmp_path: Path) -> None:
    notes = idle.Notes(tmp_path / "notes.jsonl")
    with notes.note("request", step=3):
        pass
    with notes.note("publish", version=2) as row:
        row["bytes"] = 5

    request, publish = idle.Noted.read(tmp_path / "notes.jsonl")

    assert (request.kind, request.version, request.bytes) == ("request", 3, 0)
    assert (publish.kind, publish.version, publish.bytes) == ("publish", 2, 5)
    assert request.start <= request.end <= publish.start


def test_each_version_has_a_row_with_its_difference(
    snapshots: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(0)
    first = random.normal(size=1000).astype(ml_dtypes.bfloat16)
    second = first.copy()
    second[:30] += ml_dtypes.bfloat16(1)

    snapshots.measure_each([4, 5, 6], [{"a": first}, {"a": second}, {"a": second}], every=5)

    _, _, *rows = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in cells] == ["5", "6", "median"]
    # A sum may round to the number that it had.
    assert 2.0 < float(cells[0][1].rstrip("%")) <= 3.0
    assert cells[1][1] == "0.00%"
    # Only version 5 is compared with a full snapshot, which is larger.
    assert float(cells[0][8]) > 3
    assert cells[1][5:] == ["", "", "", ""]


def test_a_tiny_run_has_figures(
    tmp_path: Path, environment: dict[str, str], idle: ModuleType
) -> None:
    import subprocess

    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "jobs_idle.py"),
        f"--out={tmp_path}",
        f"--recipe={ROOT}/configs/sums.py:tiny",
        "--samplers",
        "2",
        "--",
        "--config.warm_start=none",
        "--config.train.steps=5",
        "--config.eval.every=0",
        "--config.eval.problems=0",
        "--config.rollout.placement.groups_per_request=8",
        "--config.task.grade_workers=1",
    ]

    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )

    assert done.returncode == 0, done.stderr[-3000:]
    _, _, row = done.stdout.splitlines()[-3:]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[0] == "2"
    assert float(cells[4]) > 0
    assert 0 <= int(cells[7].rstrip("%")) <= 100
    logged = json.loads((tmp_path / "samplers-2" / "run" / "summary.json").read_text())
    assert logged["export"]
