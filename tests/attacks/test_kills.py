"""Runs that are interrupted end like runs left in peace: the quick form of kills.py, and its parts.

The whole form is `python tests/attacks/kills.py`.
"""

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from jzero import main
from tests.attacks import kills
from tests.attacks.conftest import Tries

ROOT = Path(__file__).resolve().parents[2]


# Full disks are also those of tests/run/test_no_space.py.
@pytest.mark.parametrize(
    "kinds",
    [
        "kill",
        "kill,full",
    ],
)
def test_killed_and_full_runs_end_like_one_left_in_peace(
    kinds: str, tmp_path: Path, tries: Tries
) -> None:
    results = tmp_path / "results.jsonl"
    command = [sys.executable, "tests/attacks/kills.py", "--modes", "lora"]
    command += ["--kinds", kinds, "--folder", str(tmp_path), "--results", str(results)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [row["kind"] for row in rows] == kinds.split(",")
    tries.count("kills", len(rows))
    assert all(row["is_resumed"] and row["is_equal"] for row in rows)


def test_the_plan_has_every_mode_and_kind() -> None:
    planned = kills.plan(list(kills.MODES), 50, random.Random(1))
    assert {mode: len(kinds) > 4 for mode, kinds in planned.items()} == dict.fromkeys(
        kills.MODES, True
    )
    counts = Counter(kind for kinds in planned.values() for kind in kinds)
    assert counts.keys() == kills.KINDS.keys()
    assert counts.total() == 50


@pytest.mark.parametrize("mode", kills.MODES)
def test_the_settings_of_every_mode_exist(mode: str, tmp_path: Path) -> None:
    arguments = kills.command(mode, tmp_path)[3:]  # without `python -m jzero.main`

    parsed = main.parse([argument for argument in arguments if argument.startswith("--config")])

    steps = parsed.settings.warm_start.steps if mode == kills.SFT else parsed.settings.train.steps
    assert steps == kills.STEPS


def write_run(workdir: Path, reward: float, seconds: float, weights: bytes) -> dict[str, str]:
    (workdir / "export-1").mkdir(parents=True)
    row = {"step": 1, "reward/mean": reward, "time/step": seconds}
    (workdir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (workdir / "samples.jsonl").write_text('{"step": 1}\n')
    (workdir / "export-1/model.safetensors").write_bytes(weights)
    return kills.results("lora", workdir)


@pytest.mark.parametrize(
    ("reward", "weights", "difference"),
    [
        (0.5, b"w", ""),
        (0.5000000000000001, b"w", "metrics 0 differs: reward/mean 0.5 -> 0.5000000000000001"),
        (0.5, b"v", "export-1/model.safetensors differs"),
    ],
)
def test_runs_are_compared_to_the_bit_and_not_by_their_times(
    tmp_path: Path, reward: float, weights: bytes, difference: str
) -> None:
    one = write_run(tmp_path / "one", 0.5, 1.0, b"w")
    other = write_run(tmp_path / "other", reward, 2.0, weights)
    assert kills.compare(one, other) == difference


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, True),
        ({"is_equal": False}, False),
        ({"is_resumed": False, "is_equal": False}, False),
        ({"is_silent": True}, False),
        ({"has_traceback": True}, False),
    ],
)
def test_the_table_says_whether_all_held(
    changes: dict[str, bool], holds: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"is_resumed": True, "is_equal": True} | changes
    good = kills.Interruption("lora", "kill", 0.5, is_resumed=True, is_equal=True)
    assert kills.print_table([good, kills.Interruption("lora", "kill", 1.5, **values)]) == holds
    last = capsys.readouterr().out.splitlines()[-1]
    lost = int(not values["is_equal"])
    resumed = 1 + int(values["is_resumed"])
    silent, traces = int(changes.get("is_silent", 0)), int(changes.get("has_traceback", 0))
    assert (
        last == f"| all |  | 2 | {resumed} | {2 - lost} | {lost} | {silent} | {traces} | 1.0, 1.5 |"
    )


def test_runs_by_the_clock_are_compared_by_their_steps_and_files(tmp_path: Path) -> None:
    def results(name: str, steps: list[int], age: float) -> dict[str, str]:
        workdir = tmp_path / name
        workdir.mkdir()
        rows = [{"step": step, "async/staleness": age, "reward/mean": age} for step in steps]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (workdir / "metrics.jsonl").write_text(text)
        (workdir / "samples.jsonl").write_text(text)
        return kills.results("split", workdir)

    want = results("undisturbed", [1, 2], 0.25)

    assert not kills.compare(want, results("other tokens", [1, 2], 0.5))
    assert (
        kills.compare(want, results("too old", [1, 2], 1.5)) == "oldest tokens are allowed differs"
    )
    assert kills.compare(want, results("a step twice", [1, 2, 2], 0.25))
    assert kills.compare(want, results("a step lost", [1], 0.25))
