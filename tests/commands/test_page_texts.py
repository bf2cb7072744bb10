"""What the page of a run shows: its numbers, names and titles, drawn in Node without a browser."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from jzero.report import make_report
from jzero.run.metrics_writer import MetricsWriter

PAGE = Path(__file__).with_name("page.js")
QUESTION = "How many eggs are left?"


def draw(workdir: Path) -> dict[str, Any]:
    """Returns the texts of the report of a run."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node: install nodejs")
    page = make_report([workdir])
    done = subprocess.run([node, str(PAGE)], input=page, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def write_run(
    workdir: Path,
    metrics: list[dict[str, float]],
    gold: object = "72",
    columns: dict[str, Any] | None = None,
) -> Path:
    workdir.mkdir()
    (workdir / "config.json").write_text('{"train": {"steps": 2}}')
    writer = MetricsWriter(workdir, None)
    for step, values in enumerate(metrics, 1):
        row = {"id": "p/1", "sample": 0, "prompt": f"Think.\n{QUESTION}", "response": "72"}
        row |= {"gold": gold, "score": 1.0, "advantage": 0.0, "tokens": 3, "group": 0}
        row |= {"reason": "correct", "correct": True, "finish": "stop"}
        row |= columns or {}
        row |= {"rewards": {"/home/me/rewards/my.py:short": 0.5}}
        writer.write_samples(step, [row])
        writer.write(step, {"rollout/tokens": 10, "time/step": 3, **values})
    writer.close()
    return workdir


@pytest.mark.parametrize("value", [0.0, 0.5, 0.97, 1.0])
def test_the_axis_of_a_share_ends_at_0_and_100(value: float, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"reward/accuracy": value}] * 2)
    [axis] = [
        marks
        for title, marks in draw(run)["figures"].items()
        if title.startswith("reward/accuracy") and "%" in title
    ]

    assert len(axis) >= 2
    assert all(0 <= float(mark) <= 100 for mark in axis)


def test_numbers_of_an_axis_have_one_notation(tmp_path: Path) -> None:
    losses = [7.8e-4, 1.053e-3]
    run = write_run(tmp_path / "run", [{"optimizer/grad_norm": loss} for loss in losses])
    [axis] = [
        marks
        for title, marks in draw(run)["figures"].items()
        if title.startswith("optimizer/grad_norm")
    ]

    assert len({"e" in mark for mark in axis}) == 1


@pytest.mark.parametrize(
    ("gold", "shown"),
    [
        ("72", "72"),
        ({"answer": "72", "question": QUESTION}, "72"),
        ({"answer": ["a", "b"], "question": QUESTION}, '["a","b"]'),
        ({"row": {}, "seed": 5, "observation": QUESTION}, "seed 5"),
        ({"row": {"id": 7}, "seed": 5}, 'row {"id":7}, seed 5'),
        ({"tests": ["x"]}, 'tests ["x"]'),
    ],
)
def test_the_gold_does_not_repeat_the_prompt(gold: object, shown: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"reward/mean": 1.0}], gold)

    bold = draw(run)["bold"]

    assert shown in bold
    assert not any(QUESTION in text for text in bold)


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        ({"row": 17, "data": "/home/me/sets/gsm8k.jsonl"}, "17 of sets/gsm8k.jsonl"),
        ({"row": 0, "data": "openai/gsm8k"}, "0 of openai/gsm8k"),
        ({"row": 3}, "3"),
        ({"row": {"a": 1}, "data": "x"}, None),  # written by another program
        ({}, None),
    ],
)
def test_the_row_of_the_data_set_is_shown(
    columns: dict[str, Any], shown: str | None, tmp_path: Path
) -> None:
    bold = draw(write_run(tmp_path / "run", [{"reward/mean": 1.0}], columns=columns))["bold"]

    assert (shown in bold) == (shown is not None)
    assert "p/1" in bold
    assert bold.count("72") == 1  # the gold


def test_a_reward_function_has_one_name(tmp_path: Path) -> None:
    metrics = [{"reward/my.py.short": 0.5}, {"reward/my.py.short": 0.7}]
    drawn = draw(write_run(tmp_path / "run", metrics))

    assert any(title.startswith("reward/my.py:short") for title in drawn["figures"]), drawn[
        "figures"
    ]
    assert "my.py:short 0.5" in drawn["chips"]
    assert not any("/home/me" in text for text in drawn["chips"])


def test_a_unit_does_not_repeat_the_title_of_its_column(tmp_path: Path) -> None:
    workdir = write_run(tmp_path / "run", [{"reward/mean": 1.0}])
    metrics = {"eval/accuracy": 0.5, "eval/stderr": 0.1, "eval/problems": 16}
    (workdir / "summary.json").write_text(json.dumps({"eval_all": {"before": metrics}}))

    heads = draw(workdir)["heads"]

    assert "problems" in heads
    assert "accuracy, %" in heads
    assert "problems, problems" not in heads


def test_short_cells_are_never_broken(tmp_path: Path) -> None:
    drawn = draw(write_run(tmp_path / "run", [{"reward/mean": 1.0}]))

    assert "1 of 2, not ended" in drawn["short"]
