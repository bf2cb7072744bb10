"""The matrix of runs with `model.exact`: its cases are runs, and its table says what they found."""

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from configs import countdown
from jzero import cli, config
from jzero.tokens import Tokens
from jzero.training.exactness import Difference, describe
from jzero.types import Problem, Rollout, Turn

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("exact_matrix")


def test_every_case_is_an_exact_run_that_shares_and_preempts(matrix: ModuleType) -> None:
    cases = list(matrix.cases(""))
    assert len({case.name for case in cases}) == len(cases) == 20
    assert [case.layout for case in cases if not case.is_exact] == ["not exact, 1 device"] * 4
    for case in cases:
        recipe, *flags = case.flags()
        assert recipe.endswith("countdown.py:tiny-long")
        settings = cli.parse_settings(countdown.tiny(), flags)
        config.validate(settings)
        assert settings.model.exact == case.is_exact
        assert settings.model.dtype == settings.rollout.kv_dtype == case.dtype
        assert config.read_architecture(settings.model.arch).model_type == case.model_type
        assert settings.mesh.data * settings.mesh.tensor == case.devices
        assert settings.rollout.group_size > 1
        assert settings.train.packs_per_row > 0
        rollout = settings.rollout
        pages_of_sequence = -(-rollout.longest_episode // rollout.page_size)
        assert rollout.num_pages < rollout.num_slots * pages_of_sequence


def test_cases_are_chosen_by_all_texts(matrix: ModuleType) -> None:
    chosen = [case.name for case in matrix.cases("qwen3, bfloat16, tensor 2")]
    assert chosen == ["qwen3 bfloat16, 8 devices, tensor 2"]
    assert {case.model_type for case in matrix.cases("", ["llama"])} == {"llama"}


def metrics_of_step(compared: int) -> dict[str, float]:
    return {
        "policy/exact_tokens": compared,
        "policy/mismatch_tokens": 0.0,
        "policy/mismatch_max": 0.0,
        "rollout/preempted": 3,
        "reward/accuracy": compared / 100,
        "time/score": 0.0,
    }


def test_a_run_without_differences_has_ratios_of_1(matrix: ModuleType) -> None:
    result = matrix.read_result([metrics_of_step(10), metrics_of_step(15)], "", is_done=True)
    assert (result.steps, result.compared, result.differ, result.preempted) == (2, 25, 0, 6)
    line = matrix.format_result(next(matrix.cases("")), result, 1.0)
    assert " 1 .. 1 " in line
    assert " 0.125 " in line


def test_a_run_without_the_mode_compares_nothing(matrix: ModuleType) -> None:
    rows: list[dict[str, float]] = []
    for accuracy in range(12):
        row = metrics_of_step(0) | {"reward/accuracy": accuracy, "policy/mismatch_tokens": 3.0}
        del row["policy/exact_tokens"]
        rows.append(row)

    result = matrix.read_result(rows, "", is_done=True)

    assert (result.steps, result.compared, result.differ) == (12, 0, 36)
    assert result.accuracy == 6.5  # of the last ten


def test_the_step_in_which_log_probs_differ_is_counted(matrix: ModuleType) -> None:
    """The run ends there, before it writes that step's metrics."""
    rollout = Rollout(
        problem=Problem("p", "countdown", "", None),
        sample_index=0,
        tokens=Tokens([0, 0], sampled=[False, True], versions=[-1, 1]),
        turns=(Turn(1, 2, "", "stop"),),
    )
    difference = Difference(0, 1, np.float32(-0.5), np.float32(-0.25))
    output = "Traceback\nInexactError: " + describe([difference], 7, [rollout], 2) + "\nthe end"

    result = matrix.read_result([metrics_of_step(10)], output, is_done=False)

    assert (result.steps, result.compared, result.differ, result.largest) == (1, 17, 1, 0.25)
    assert "step 2, sequence 0" in result.message


def test_a_run_that_fails_otherwise_gives_its_last_line(matrix: ModuleType) -> None:
    result = matrix.read_result([], "one\nout of memory\n", is_done=False)
    assert result.message == "out of memory"
    assert result.compared == 0
