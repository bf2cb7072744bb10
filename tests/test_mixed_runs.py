"""Whole runs on rows of mathematics and of code, with two turns for each row.

What the run says of each task is counted again from its files: the answers by a definition that has
no part of jzero. A model from nothing writes no program, and now and then it writes the right
number: the last number of a response is its answer here.
"""

import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import runs
from tiny import BEST, code_row, math_row, write_rows

from configs import mixed as recipe
from jzero.commands import evaluate
from jzero.config import Config, Local, put_value, tiny_arch, turns
from jzero.errors import UserError
from jzero.loops import rl

# The default suite has the same turns and metrics without a policy: rollout/test_mixed_turns.py.
pytestmark = pytest.mark.usefixtures("quick_runs")

GROUP = 4
NAMES = {"math": "math_multiturn", "code": "code"}


def digit_row(digit: int) -> dict[str, object]:
    """A question whose answer a random model often gives."""
    return math_row(digit) | {"problem": f"{digit}", "answer": str(digit)}


def write_data(folder: Path) -> Path:
    rows = [row for i in range(8) for row in (digit_row(i), code_row(i))]
    write_rows(folder / "train.jsonl", rows)
    write_rows(folder / "test.jsonl", [digit_row(8), code_row(8), digit_row(9), code_row(9)])
    return folder


def tiny(data: Path, **changes: object) -> Config:
    """Returns the recipe's tiny preset with a smaller model, on rows of `data`."""
    settings = recipe.get_config("tiny")
    settings.model.arch = tiny_arch(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=8
    )
    settings.task.data = str(data)
    settings.task.options = (*settings.task.options, "math.verifier=last_number")
    settings.task.feedback = turns.Feedback(wrong="No.")
    settings.task.sandbox = Local(level=BEST)
    settings.rollout.max_prompt_tokens = 16
    settings.rollout.max_reply_tokens = 80
    settings.rollout.temperature = 1.5
    settings.train.steps = 2
    settings.train.logged_rollouts = 16
    settings.train.checkpoint_every = 2
    settings.eval.every = 2
    settings.eval.samples = GROUP
    settings.eval.greedy = False
    for name, value in changes.items():
        put_value(settings, name.replace("__", "."), value)
    return settings


def is_right(gold: dict, response: str) -> bool:
    """Returns whether a response is right. None has a program, which the first test checks."""
    if "tests" in gold:
        return False
    numbers = re.findall(r"-?\d+\.?\d*", response.replace(",", ""))
    return bool(numbers) and float(numbers[-1]) == float(gold["answer"])


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, quickly: Callable[[], AbstractContextManager[None]]
) -> Path:
    """Returns the workdir of a run of two steps."""
    folder = tmp_path_factory.mktemp("mixed")
    data = folder / "data"
    data.mkdir()
    with quickly():
        rl.train(tiny(write_data(data)), folder / "run")
    return folder / "run"


def test_a_run_trains_on_both_tasks_in_several_turns(finished: Path) -> None:
    samples = runs.rows(finished / "samples.jsonl")
    assert {row["task"] for row in samples} == {"math", "code"}
    for row in samples:
        turns = row.get("turns", [])
        assert not any("```python" in turn["response"] for turn in turns)
        is_code = "tests" in row["gold"]
        assert row["task"] == ("code" if is_code else "math")
        for turn in turns[:-1]:
            expected = "No.\n\nYour answer has no block" if is_code else "No."
            assert turn["reply"].startswith(expected)
        right_turns = [is_right(row["gold"], turn["response"]) for turn in turns]
        assert True not in right_turns[:-1]  # a right answer ends the episode
    assert any(len(row["turns"]) == 2 for row in samples if row["task"] == "code")
    assert any(len(row.get("turns", [])) == 2 for row in samples if row["task"] == "math")


def test_metrics_by_task_are_those_of_the_files(finished: Path) -> None:
    steps = runs.rows(finished / "metrics.jsonl")
    samples = runs.rows(finished / "samples.jsonl")
    assert len(steps) == 2
    num_right = 0
    for step in steps:
        of_step = [row for row in samples if row["step"] == step["step"]]
        assert len(of_step) == 16
        for name in NAMES:
            rows = [row for row in of_step if row["task"] == name]
            if not rows:
                assert f"reward/mean/{name}" not in step
                continue
            right = [is_right(row["gold"], row["response"]) for row in rows]
            num_right += sum(right)
            # A wrong turn is worth -1, and a right one, which is the last, 1.
            rewards = [
                (1.0 if one else -1.0) - (len(row.get("turns", [0])) - 1)
                for row, one in zip(rows, right, strict=True)
            ]
            assert step[f"rollout/count/{name}"] == len(rows)
            assert step[f"reward/accuracy/{name}"] == pytest.approx(np.mean(right))
            assert step[f"reward/mean/{name}"] == pytest.approx(np.mean(rewards))
            lengths = [row["tokens"] for row in rows]
            assert step[f"rollout/length/{name}"] == pytest.approx(np.mean(lengths))
        if any(row["task"] == "code" for row in of_step):
            assert step["sandbox/level"] >= 0
    assert num_right > 0, "no answer was right, and the test says nothing: choose another seed"


def test_evaluations_and_episodes_are_written_for_both_tasks(finished: Path) -> None:
    [path] = (finished / "evaluations" / "after").iterdir()
    problems = runs.rows(path)
    assert [row["task"] for row in problems] == ["math", "code", "math", "code"]
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["eval"].keys() == {"mixed"}
    last = runs.rows(finished / "metrics.jsonl")[-1]
    for name in NAMES:
        accuracies = [row["accuracy"] for row in problems if row["task"] == name]
        assert last[f"eval/accuracy/{name}"] == pytest.approx(np.mean(accuracies))
        # The last response of an episode is in the file, and a right one is the last.
        for row in problems:
            if row["task"] == name:
                right = [is_right(row["gold"], sample["response"]) for sample in row["samples"]]
                assert row["accuracy"] == np.mean(right)
    episodes = [
        episode
        for path in (finished / "trajectories").rglob("*.jsonl")
        for episode in runs.rows(path)
    ]
    assert {episode["task"] for episode in episodes} == {"math", "code"}


def metrics_of(workdir: Path) -> list[dict]:
    """Returns the metrics that do not depend on when a grade arrives."""
    rows = runs.timeless(workdir / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k != "rollout/slot_utilization"} for row in rows]


def test_a_resumed_run_has_the_same_numbers(finished: Path, tmp_path: Path) -> None:
    data = finished.parent / "data"
    rl.train(tiny(data, train__steps=4), tmp_path / "whole")
    rl.train(tiny(data), tmp_path / "parts")
    rl.train(tiny(data, train__steps=4), tmp_path / "parts")

    assert metrics_of(tmp_path / "parts") == metrics_of(tmp_path / "whole")
    samples = [runs.rows(tmp_path / name / "samples.jsonl") for name in ("parts", "whole")]
    assert samples[0] == samples[1]
    [weights] = (tmp_path / "whole" / "export-4").glob("*.safetensors")
    resumed = tmp_path / "parts" / "export-4" / weights.name
    assert resumed.read_bytes() == weights.read_bytes()


def test_asynchronous_rollouts_have_both_tasks_before_and_after_a_resume(
    finished: Path, tmp_path: Path
) -> None:
    """Which group is finished first depends on when its grades arrive, and so do the numbers."""
    data = finished.parent / "data"
    for steps in (2, 4):
        settings = tiny(data, train__steps=steps, rollout__placement__max_staleness=2)
        rl.train(settings, tmp_path / "run")

    steps = runs.rows(tmp_path / "run" / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert all(step["async/staleness"] <= 2 for step in steps)
    samples = runs.rows(tmp_path / "run" / "samples.jsonl")
    for part in (samples[: len(samples) // 2], samples[len(samples) // 2 :]):
        assert {row["task"] for row in part} == {"math", "code"}
        assert {len(row.get("turns", [0])) for row in part} >= {2}


def test_an_unknown_task_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    rows = [digit_row(1), code_row(1), digit_row(2) | {"task": "poetry"}]
    settings = tiny(write_rows(tmp_path / "rows.jsonl", rows))
    with pytest.raises(UserError, match="row 2: the column task holds 'poetry'"):
        rl.train(settings, tmp_path / "run")
    assert not list((tmp_path / "run").glob("*.jsonl"))


def test_a_suite_of_such_rows_is_evaluated_by_the_command(finished: Path, tmp_path: Path) -> None:
    """`jzero evaluate --suite mine=FILE` with task.name=mixed, in two turns."""
    data = finished.parent / "data"
    settings = tiny(data, eval__samples=2)
    settings.model.path = str(finished / "export-2")
    settings.model.arch = tiny_arch()

    summary = evaluate.run([f"mine={data / 'test.jsonl'}"], tmp_path, settings)

    assert summary["mine"]["problems"] == 4
    assert summary["mine"]["graded_by"] == "code, task.verifier=last_number"
    metrics = summary["mine"]["kinds"]["avg@2"]
    for name in NAMES:
        rows = [row for row in runs.rows(tmp_path / "mine-avg@2.jsonl") if row["task"] == name]
        assert metrics[f"accuracy/{name}"] == pytest.approx(np.mean([r["accuracy"] for r in rows]))
    assert "mine/code" in evaluate.table(summary)


def test_checkpoints_can_be_turned_off(finished: Path, tmp_path: Path) -> None:
    """A run without them has the same numbers, and leaves its export."""
    for every, expected in ((0, ["0", "2"]), (-1, [])):
        workdir = tmp_path / str(every)
        settings = tiny(finished.parent / "data", train__checkpoint_every=every)
        rl.train(settings, workdir)
        assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == expected
        assert (workdir / "export-2" / "config.json").exists()
        if every == -1:
            with pytest.raises(UserError, match="metrics up to step 2 and no checkpoint"):
                rl.train(settings, workdir)
    assert metrics_of(tmp_path / "0") == metrics_of(tmp_path / "-1")
