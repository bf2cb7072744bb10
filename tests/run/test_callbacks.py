"""User-defined functions that are called at the events of a run."""

import sys
from pathlib import Path

import pytest
import reference
from runs import timeless, write_jsonl

from jzero.config import Config, TrainConfig, tiny_arch
from jzero.errors import UserError
from jzero.loops import sft
from jzero.run.callbacks import Callbacks, check_callbacks
from jzero.run.session import Schedule

pytestmark = pytest.mark.usefixtures("quick_runs")

SOURCE = """
import random
import numpy as np

SEEN = []


def record(event, step, metrics, workdir):
    SEEN.append((event, step, sorted(metrics)))
    metrics.clear()
    random.seed(0)
    np.random.seed(0)


def every(**values):
    SEEN.append(tuple(values))


def fail(event):
    raise ValueError(f"no {event}")


def wants_more(event, trainer):
    pass
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "notify.py"
    path.write_text(SOURCE)
    return str(path)


def seen_by(file: str) -> list[tuple]:
    [module] = [m for m in sys.modules.values() if getattr(m, "__file__", "") == file]
    return module.SEEN


def test_functions_get_copies_and_what_they_name(file: str, tmp_path: Path) -> None:
    metrics = {"eval/accuracy": 0.5}
    called = Callbacks((f"{file}:record", f"{file}:every"), tmp_path)

    called.call("evaluation", 3, metrics)

    assert metrics == {"eval/accuracy": 0.5}
    first, second = seen_by(file)
    assert first == ("evaluation", 3, ["eval/accuracy"])
    assert second == ("event", "step", "metrics", "workdir")


def test_a_function_that_fails_is_named_once_for_each_event(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    called = Callbacks((f"{file}:fail",), tmp_path)
    for event in ("step", "step", "end"):
        called.call(event, 2, {})

    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"step 2: train.callbacks={file}:fail failed at the event step: ")
    assert "ValueError: no step. The run continues" in first
    assert "ValueError: no end" in second


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "no such module:function or FILE.py:function"),
        ("wants_more", "unknown parameter trainer; a callback may take event, step, metrics"),
    ],
)
def test_wrong_functions_are_refused_before_the_run(file: str, name: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"train.callbacks=.*:{name}: {message}"):
        check_callbacks((f"{file}:{name}",))


def settings_of(folder: Path, **train: object) -> Config:
    arch = tiny_arch(hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=8)
    rows = [{"prompt": f"{i}+1?", "completion": str(i + 1)} for i in range(10)]
    data = write_jsonl(folder / "rows.jsonl", rows)
    tune = {"data": data, "eval_data": "", "batch_size": 4, "pack_length": 16, "epochs": 2.0}
    return reference.settings(model={"arch": arch}, sft=tune, train=train, eval={"problems": 0})


@pytest.mark.usefixtures("explicit_transfers")
def test_a_run_calls_them_and_keeps_its_numbers(file: str, tmp_path: Path) -> None:
    """Checkpoints after each of two passes of three steps."""
    schedule = {"checkpoint_every": 0, "checkpoint_epochs": 1.0, "keep_checkpoints": 0}
    sft.train(settings_of(tmp_path, **schedule), tmp_path / "without")
    sft.train(
        settings_of(tmp_path, **schedule, callbacks=(f"{file}:record", f"{file}:fail")),
        tmp_path / "with",
    )

    events = [(event, step) for event, step, _ in seen_by(file)]
    steps = [("step", step) for step in range(1, 7)]
    steps.insert(3, ("checkpoint", 3))
    assert events == [*steps, ("checkpoint", 6), ("end", 6)]
    assert "sft/loss" in seen_by(file)[0][2]
    assert (tmp_path / "without/checkpoints/3").is_dir()
    rows = [timeless(tmp_path / name / "metrics.jsonl") for name in ("with", "without")]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("epochs", "steps_of_pass", "saved"),
    [(1.0, 3, [3, 6, 9]), (1.0, 2.5, [3, 5, 8, 10]), (0.5, 4, [2, 4, 6, 8, 10]), (2.0, 3, [6])],
)
def test_checkpoints_follow_the_passes(
    epochs: float, steps_of_pass: float, saved: list[int]
) -> None:
    train = TrainConfig(checkpoint_every=0, checkpoint_epochs=epochs)
    schedule = Schedule.for_run(train, 0, 1000, steps_of_pass)
    assert [step for step in range(1, 11) if schedule.checkpoint_is_due(step)] == saved


def test_passes_without_an_end_are_refused() -> None:
    with pytest.raises(
        UserError, match="train.checkpoint_epochs=1: this task generates problems without end"
    ):
        Schedule.for_run(TrainConfig(checkpoint_epochs=1.0), 0, 10)
