"""The benchmark of precisions, at a size that takes seconds."""

import importlib
from pathlib import Path

import pytest
from test_train import tiny_run

from jzero import algorithms
from jzero.types import Problem

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["fp32", "fp8 KV cache", "int8 weights", "fp8 weights", "int8 base"]


@pytest.mark.usefixtures("quick_runs")
def test_the_table_has_a_row_for_each_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark = importlib.import_module("precision")
    settings = tiny_run(1, algorithms.PRESETS["grpo"]())
    settings.warm_start = None
    gold = {"numbers": [1, 2], "target": 3}
    problem = Problem("one", "countdown", "1 2 = 3", gold)
    texts = [benchmark.Text(problem, "<answer>1 + 2</answer>")] * 3

    results = benchmark.measure(settings, texts, 2, NAMES)

    fp32, fp8_cache, int8, fp8, base = results
    assert fp32.mismatch < 1e-5
    assert all(1e-5 < result.mismatch <= result.percentile < 0.5 for result in results[1:])
    assert int8.weight_bytes == fp8.weight_bytes == base.weight_bytes < 0.6 * fp32.weight_bytes
    assert fp8_cache.cache_bytes < 0.4 * fp32.cache_bytes
    assert len({result.perplexity for result in (fp32, int8, fp8)}) == 3
    assert all(abs(r.perplexity / fp32.perplexity - 1) < 0.1 for r in results)
    lines = benchmark.format_table(results).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == NAMES
