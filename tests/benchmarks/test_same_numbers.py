"""The comparison of two checkouts: what it counts as equal, what it finds, and planted faults."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from runs import ROOT
from safetensors.numpy import save_file

from jzero.files import JsonObject

sys.path.insert(0, str(ROOT / "benchmarks"))  # its scripts import each other by their names

import same_numbers
from same_numbers_cases import CASES, adapter_norm, differs_from, longest_evaluated, metric
from same_numbers_faults import FAULTS, plant

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


def test_slots_wait_for_replies_as_long_as_these_take(tmp_path: Path) -> None:
    runs = []
    for name, share in (("old", 0.5), ("new", 0.25)):
        turns = [{"turns/mean": 2.0, "rollout/slot_utilization": share}]
        runs.append(write_run(tmp_path / name, turns, SAMPLES))
    assert same_numbers.compare(*runs).is_equal


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


def test_evaluations_and_their_responses_are_compared(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, METRICS, SAMPLES) for name in ("old", "new")]
    for accuracy, workdir in enumerate(runs):
        summary = {"seconds": accuracy, "eval_all": {"before": {"eval/accuracy": accuracy}}}
        (workdir / "summary.json").write_text(json.dumps(summary))
        folder = workdir / "evaluations" / "before"
        folder.mkdir(parents=True)
        (folder / "problems-greedy.jsonl").write_text(json.dumps({"accuracy": accuracy}) + "\n")

    comparison = same_numbers.compare(*runs)

    assert comparison.differ == ["evaluation before, eval/accuracy: 0 and 1"]
    assert (comparison.samples, comparison.other_samples) == (3, 1)


def test_exported_weights_are_compared(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, METRICS, SAMPLES) for name in ("old", "new")]
    for number, workdir in enumerate(runs):
        (workdir / "export-3").mkdir()
        weights = {"embed": np.full(4, number, np.float32)}
        save_file(weights, workdir / "export-3" / "model.safetensors")

    comparison = same_numbers.compare(*runs)

    assert not comparison.is_equal
    assert (comparison.weights, comparison.other_weights) == (1, 1)


# -- events ----------------------------------------------------------------------------------------


def test_a_metric_is_above_its_bound_in_some_step(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", METRICS, SAMPLES)
    assert metric("loss").measure(run) == 0.25
    assert metric("loss", above=0.25).measure(run) <= 0
    assert metric("async/carried_tokens").measure(run) <= 0


def test_a_response_of_an_evaluation_is_longer(tmp_path: Path) -> None:
    folder = tmp_path / "evaluations" / "before"
    folder.mkdir(parents=True)
    line = {"samples": [{"tokens": 7}, {"tokens": 25}]}
    (folder / "problems-avg@2.jsonl").write_text(json.dumps(line) + "\n")
    assert longest_evaluated(24).measure(tmp_path) == 1
    assert longest_evaluated(25).measure(tmp_path) <= 0


def test_an_untrained_adapter_has_no_norm(tmp_path: Path) -> None:
    (tmp_path / "export-3").mkdir()
    path = tmp_path / "export-3" / "adapter_model.safetensors"
    factors = {"q.lora_A.weight": np.ones(4), "q.lora_B.weight": np.zeros(4)}
    save_file(factors, path)
    assert adapter_norm(tmp_path) == 0
    save_file(factors | {"q.lora_B.weight": np.array([3.0, 4.0])}, path)
    assert adapter_norm(tmp_path) == 5


def test_a_case_may_have_to_differ_from_another_one(tmp_path: Path) -> None:
    rows: list[JsonObject] = [{"policy/entropy": 0.5}]
    for name, loss in (("adapter", 0.5), ("int8-base", 0.25), ("same", 0.5)):
        write_run(tmp_path / name, [rows[0] | {"policy/entropy": loss}], SAMPLES)
    event = differs_from("adapter")
    assert event.measure(tmp_path / "int8-base") > 0
    assert event.measure(tmp_path / "same") <= 0


@pytest.mark.parametrize("name", CASES)
def test_a_case_has_an_event_and_comes_after_the_case_it_needs(name: str) -> None:
    case = CASES[name]
    names = list(CASES)
    assert case.events
    assert not case.needs or names.index(case.needs) < names.index(name)


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAULTS)
def test_the_text_of_a_fault_stands_once(tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    path = tmp_path / fault.path
    path.parent.mkdir(parents=True)
    path.write_text((ROOT / fault.path).read_text(encoding="utf-8"), encoding="utf-8")

    plant(fault, tmp_path)

    assert fault.case in CASES
    with pytest.raises(ValueError, match="stands 0 times, and has to stand once"):
        plant(fault, tmp_path)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name: str) -> None:
    command = [sys.executable, "benchmarks/same_numbers.py", "--faults", f"--only={name}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_checkout_equals_itself() -> None:
    command = [sys.executable, "benchmarks/same_numbers.py", ".", ".", "--only=math with turns"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
