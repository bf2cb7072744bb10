"""The table of benchmarks/distill.py: accuracies by step, and their error over seeds."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("distill")


def test_accuracies_are_those_of_the_evaluations(benchmark: ModuleType, tmp_path: Path) -> None:
    rows = [{"step": 1}, {"step": 2, "eval/accuracy": 0.25}, {"step": 3, "eval/accuracy": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {"eval_all": {"before": {"eval/accuracy": 0.125}}}

    assert benchmark.accuracies(tmp_path, summary) == {0: 0.125, 2: 0.25, 3: 0.5}


def test_an_error_is_the_standard_error_over_seeds(benchmark: ModuleType) -> None:
    curves = [{0: 0.1, 5: 0.2}, {0: 0.1, 5: 0.4}]

    # The standard deviation of 20 and 40 is 14.1, and that of the mean of two seeds is 10.
    row = benchmark.table_row("distill", 61.4, curves)

    assert row == "| distill | 10.0 ± 0.0 % | 30.0 ± 10.0 % | 61 |"
    assert benchmark.mean_and_error([0.5]) == "50.0 %"
