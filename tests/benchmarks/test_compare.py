"""The table of benchmarks/compare.py: its runs, its columns, and the error over seeds."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("compare")


def finished(benchmark: ModuleType, after: float) -> object:
    """Returns a run whose accuracy went from 0.125 to `after` in three steps."""
    summary = {
        "eval_all": {
            "before": {"eval/accuracy": 0.125, "eval/length": 30.0},
            "after": {"eval/accuracy": after, "eval/length": 90.0},
        },
        "seconds_by_phase": {"sample": 4.0, "update": 6.0, "eval": 50.0, "warm_start": 30.0},
        "peak_rss_bytes": 2**30,
        "remarks": [{"step": 3, "name": "kl", "sentence": "the KL is 9", "advice": "lower it"}],
    }
    rows = [
        {"step": 1, "policy/mismatch": 2e-4},
        {"step": 2, "policy/mismatch": 4e-4, "eval/accuracy": 0.25},
        {"step": 3, "eval/accuracy": after},
    ]
    return benchmark.FinishedRun(summary, rows, checkpoint_bytes=3 * 2**20)


def test_a_run_has_a_name_a_suffix_of_the_recipe_and_flags(benchmark: ModuleType) -> None:
    variant = benchmark.parse_variant("dr_grpo: ,dr_grpo --config.optimizer.lr=2e-4")

    assert variant == ("dr_grpo", ",dr_grpo", ["--config.optimizer.lr=2e-4"])
    assert benchmark.parse_variant("plain") == ("plain", "", [])


def test_an_error_is_the_standard_error_over_seeds(benchmark: ModuleType) -> None:
    # The standard deviation of 20 and 40 is 14.1, and the error of the mean of two seeds is 10.
    assert benchmark.cell([0.2, 0.4], "eval/accuracy") == "30.0 ± 10.0 %"
    assert benchmark.cell([0.5], "eval/accuracy") == "50.0 %"
    assert benchmark.cell([2e-4, 4e-4], "policy/mismatch") == "0.0003 ± 0.0001"
    assert benchmark.cell([2**20], "publish/bytes") == "1.0 MiB"


def test_the_table_has_a_row_for_each_run_and_the_columns_of_all(benchmark: ModuleType) -> None:
    runs = {"a": [finished(benchmark, 0.2), finished(benchmark, 0.4)]}
    runs["b"] = [finished(benchmark, 0.5)]

    lines = benchmark.table(runs, ["eval/accuracy", "policy/mismatch:first"]).splitlines()

    assert lines == [
        "| run | eval before | eval after | policy/mismatch, first | seconds of RL |",
        "|---|---|---|---|---|",
        "| a | 12.5 ± 0.0 % | 30.0 ± 10.0 % | 0.0002 ± 0 | 10 |",
        "| b | 12.5 % | 50.0 % | 0.0002 | 10 |",
    ]


def test_memory_is_in_mib(benchmark: ModuleType) -> None:
    runs = {"a": [finished(benchmark, 0.5)]}

    *_, row = benchmark.table(runs, ["peak_rss_bytes", "checkpoint_bytes"]).splitlines()

    assert row == "| a | 1,024.0 MiB | 3.0 MiB | 10 |"


def test_remarks_are_counted_and_listed(benchmark: ModuleType) -> None:
    runs = {"a": [finished(benchmark, 0.5)]}

    *_, row = benchmark.table(runs, ["remarks"]).splitlines()

    assert row == "| a | 1 | 10 |"
    assert benchmark.remarks(runs) == ["a: step 3, kl: the KL is 9"]


def test_a_column_for_each_step_begins_before_the_first(benchmark: ModuleType) -> None:
    figures = benchmark.figures(finished(benchmark, 0.5), "eval/accuracy:each")

    assert figures == {"step 0": 0.125, "step 2": 0.25, "step 3": 0.5}


def test_a_column_is_the_mean_of_some_steps(benchmark: ModuleType) -> None:
    figures = benchmark.figures(finished(benchmark, 0.5), "policy/mismatch:by2")

    # No step from 3 on has the metric.
    assert figures == pytest.approx({"policy/mismatch, steps 1 to 2": 3e-4})
    by_one = benchmark.figures(finished(benchmark, 0.5), "policy/mismatch:by1")
    assert list(by_one) == ["policy/mismatch, steps 1 to 1", "policy/mismatch, steps 2 to 2"]


def test_a_run_gets_its_flags_the_exports_of_earlier_runs_and_the_seed(
    benchmark: ModuleType,
) -> None:
    again = benchmark.parse_variant("again: --config.model.path={one} --config.train.steps=0")
    shared = ["--config.train.steps=3", "--config.model.path=warm/export-0"]

    flags = benchmark.flags_of_run(again, shared, {"one": "out/one-seed7/export-3"}, seed=7)

    # The last value of a flag counts.
    assert flags[:2] == shared
    assert flags[2:] == [
        "--config.model.path=out/one-seed7/export-3",
        "--config.train.steps=0",
        "--config.train.seed=7",
    ]


def test_settings_after_two_dashes_go_to_every_run(benchmark: ModuleType) -> None:
    arguments = ["--out", "runs/a", "--recipe", "r.py:tiny", "--warm-start", "--run", "a:"]

    args = benchmark.parse([*arguments, "--seeds", "0", "1", "--", "--config.train.steps=3"])

    assert args.settings == ["--config.train.steps=3"]
    assert (args.seeds, args.warm_start, args.runs) == ([0, 1], "", [("a", "", [])])
