"""The benchmark of samplers in 8 bits, at a size that takes seconds."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
from test_train import tiny_run

from jzero import algorithms

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.usefixtures("quick_runs")
def test_the_table_has_a_row_for_each_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark = importlib.import_module("int8_sampler")
    algorithm = replace(algorithms.PRESETS["grpo"](), correction="token_truncate")
    settings = tiny_run(1, algorithm)
    settings.rollout.kv_dtype = "float32"

    results = benchmark.measure(settings, steps=2)

    native, int8_cache, int8_weights, both = results
    assert (native.weights, native.kv_dtype) == ("native", "float32")
    assert (both.weights, both.kv_dtype) == ("int8", "int8")
    # A third of this model is its embedding, which is not quantized.
    assert both.weight_bytes == int8_weights.weight_bytes < 0.6 * native.weight_bytes
    assert both.cache_bytes == int8_cache.cache_bytes < 0.4 * native.cache_bytes
    mismatches = [max(step["policy/mismatch"] for step in result.metrics) for result in results]
    assert mismatches[0] < 1e-5
    assert all(1e-5 < mismatch < 0.05 for mismatch in mismatches[1:])
    lines = benchmark.format_table(results).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["native"] * 2 + ["int8"] * 2
