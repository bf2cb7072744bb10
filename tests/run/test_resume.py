"""Going back to a chosen checkpoint: what is refused, what is removed, and what stays."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from jzero import setup
from jzero.clock import Clock
from jzero.config import Checkpoint, Config, TrainConfig, to_json, validate
from jzero.errors import UserError
from jzero.model.base_model import read_base_model
from jzero.run.resume import go_back, steps_to_discard
from jzero.run.session import RunSession
from jzero.run.workdir import claim_workdir

DISCARD = TrainConfig(resume_from=Checkpoint(4, discard_later=True))


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    """Returns a workdir with checkpoints of steps 0, 4, 8 and 12, as a finished run leaves it."""
    for step in (0, 4, 8, 12):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
        (tmp_path / "reference" / str(step)).mkdir(parents=True)
        (tmp_path / f"export-{step}").mkdir()
    (tmp_path / "checkpoints/16.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "export-notes.txt").write_text("mine")
    (tmp_path / "config.json").write_text(to_json(Config()))
    return tmp_path


def files(workdir: Path) -> set[str]:
    return {str(path.relative_to(workdir)) for path in workdir.rglob("*")}


def test_without_the_setting_nothing_is_removed(workdir: Path) -> None:
    before = files(workdir)
    go_back(workdir, TrainConfig())
    assert files(workdir) == before


def test_later_steps_are_refused_unless_told(workdir: Path) -> None:
    before = files(workdir)
    train = TrainConfig(resume_from=Checkpoint(4))

    with pytest.raises(UserError, match="step=4: .* steps up to 12, which would be lost"):
        steps_to_discard(workdir, train)
    with pytest.raises(UserError, match="set train.resume_from.discard_later=True"):
        go_back(workdir, train)

    assert files(workdir) == before
    go_back(workdir, TrainConfig(resume_from=Checkpoint(12)))
    assert files(workdir) == before


@pytest.mark.parametrize("step", [3, 16])
def test_a_step_without_a_checkpoint_is_refused(workdir: Path, step: int) -> None:
    with pytest.raises(UserError, match="has no checkpoint of this step, it has 0, 4, 8, 12"):
        steps_to_discard(workdir, TrainConfig(resume_from=Checkpoint(step, discard_later=True)))


def test_a_new_workdir_has_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="it has none"):
        steps_to_discard(tmp_path / "new", DISCARD)


def test_told_to_it_removes_later_steps_and_nothing_else(workdir: Path) -> None:
    before = files(workdir)
    assert steps_to_discard(workdir, DISCARD) == [8, 12]

    go_back(workdir, DISCARD)

    removed = set()
    for step in (8, 12):
        removed |= {f"checkpoints/{step}", f"reference/{step}", f"export-{step}"}
    assert before - files(workdir) == removed


def test_the_same_command_goes_on_after_a_kill(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Config(train=DISCARD)
    go_back(workdir, settings.train)
    claim_workdir(workdir, to_json(settings))
    (workdir / "checkpoints/8").mkdir()
    capsys.readouterr()

    go_back(workdir, settings.train)

    assert (workdir / "checkpoints/8").exists()
    assert "it continues from its newest checkpoint" in capsys.readouterr().out


def test_permission_that_comes_later_discards(workdir: Path) -> None:
    claim_workdir(workdir, to_json(Config(train=TrainConfig(resume_from=Checkpoint(4)))))
    go_back(workdir, DISCARD)
    assert not (workdir / "checkpoints/8").exists()


def test_a_session_goes_on_from_the_chosen_step(workdir: Path) -> None:
    settings = Config(train=DISCARD)
    rows = [json.dumps({"step": step}) + "\n" for step in range(1, 13)]
    (workdir / "metrics.jsonl").write_text("".join(rows))
    base = read_base_model(settings.model)

    with closing(RunSession(settings, workdir, base, Clock(), last_step=12)) as session:
        assert session.resume_step == 4

    assert (workdir / "metrics.jsonl").read_text() == "".join(rows[:4])
    assert json.loads((workdir / "config.json").read_text())["train"]["resume_from"]["step"] == 4


def test_a_run_is_refused_before_anything_is_loaded(workdir: Path) -> None:
    settings = Config(train=TrainConfig(resume_from=Checkpoint(4)))
    with pytest.raises(UserError, match="which would be lost"):
        setup.check(settings, workdir)


def test_permission_without_a_step_is_a_mistake() -> None:
    with pytest.raises(UserError, match="train.resume_from.step=-1 must be at least 0"):
        validate(Config(train=TrainConfig(resume_from=Checkpoint(discard_later=True))))
