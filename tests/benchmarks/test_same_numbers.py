"""The comparison of two checkouts: what it counts as equal, and what it finds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT

from benchmarks import same_numbers
from jzero.files import JsonObject

METRICS: list[JsonObject] = [
    {"step": 1, "loss": 0.25, "time/update": 3.0, "rollout/tokens_per_second": 9.0},
    {"step": 2, "loss": 0.125, "time/update": 2.0, "rollout/tokens_per_second": 8.0},
]
SAMPLES: list[JsonObject] = [{"step": 1, "response": "3+4"}, {"step": 1, "response": "4+3"}]


def write_run(folder: Path, metrics: list[JsonObject], samples: list[JsonObject]) -> Path:
    folder.mkdir()
    for name, rows in (("metrics", metrics), ("samples", samples)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def test_times_may_differ_and_nothing_else(tmp_path: Path) -> None:
    old = write_run(tmp_path / "old", METRICS, SAMPLES)
    slower = [row | {"time/update": 99.0, "memory/host": 1} for row in METRICS]

    comparison = same_numbers.compare(old, write_run(tmp_path / "new", slower, SAMPLES))

    assert comparison.is_equal
    assert (comparison.steps, comparison.numbers, comparison.samples) == (2, 4, 2)


def test_rollouts_may_be_described_by_more_keys_and_not_by_fewer(tmp_path: Path) -> None:
    old = write_run(tmp_path / "old", METRICS, SAMPLES)
    more = [row | {"group": 0} for row in SAMPLES]
    new = write_run(tmp_path / "new", METRICS, more)

    assert same_numbers.compare(old, new).is_equal
    assert same_numbers.compare(new, old).other_samples == 2


@pytest.mark.parametrize(
    ("metrics", "samples", "found"),
    [
        ([METRICS[0], METRICS[1] | {"loss": 0.1250001}], SAMPLES, "line 1, loss: 0.125"),
        ([METRICS[0] | {"kl": 0.0}, METRICS[1]], SAMPLES, "kl"),
        (METRICS[:1], SAMPLES, "2 and 1 lines"),
        (METRICS, [SAMPLES[0], SAMPLES[1] | {"response": "7"}], "1"),
        (METRICS, SAMPLES[:1], "1"),
        ([], [], "2 and 0 lines"),
    ],
)
def test_any_other_difference_is_found(
    tmp_path: Path, metrics: list[JsonObject], samples: list[JsonObject], found: str
) -> None:
    old = write_run(tmp_path / "old", METRICS, SAMPLES)

    comparison = same_numbers.compare(old, write_run(tmp_path / "new", metrics, samples))

    assert not comparison.is_equal
    told = [*comparison.differ, *comparison.missing, comparison.failure]
    assert any(found in text for text in [*told, str(comparison.other_samples)])


def test_two_runs_without_files_are_not_equal(tmp_path: Path) -> None:
    assert not same_numbers.compare(tmp_path / "old", tmp_path / "new").is_equal


@pytest.mark.slow
def test_a_checkout_equals_itself() -> None:
    command = [sys.executable, "benchmarks/same_numbers.py", ".", ".", "--only=math with turns"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
