"""The benchmark of int8 bases, at a size that takes seconds."""

import importlib
from pathlib import Path

import numpy as np
import pytest
from test_train import tiny_run

from jzero import algorithms
from jzero.config import AdapterConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.usefixtures("quick_runs")
def test_the_table_has_a_row_for_each_base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark = importlib.import_module("int8_base")
    settings = tiny_run(1, algorithms.PRESETS["grpo"]())
    settings.rollout.kv_dtype = "float32"
    settings.model.adapter = AdapterConfig(rank=2)

    native, int8 = benchmark.measure(settings, steps=2)

    # A third of this model is its embedding, which is not quantized.
    assert int8.base_bytes < 0.6 * native.base_bytes
    error, _ = benchmark.compare(int8.logits, native.logits)
    assert 1e-4 < error < 0.05
    assert abs(int8.accuracies["eval/accuracy"] - native.accuracies["eval/accuracy"]) <= 0.5
    assert len(native.mismatches) == len(int8.mismatches) == 2
    assert max(native.mismatches + int8.mismatches) < 1e-5
    lines = benchmark.format_table([native, int8]).splitlines()
    assert [line.split("|")[1].strip() for line in lines] == ["base", "---", "native", "int8"]
    assert "| 0.0000 | 1.0000 |" in lines[2]
    assert np.isfinite(int8.logits).all()
