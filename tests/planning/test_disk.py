"""The disk of a run is planned like its memory, and a run that does not fit is refused in time."""

from dataclasses import replace
from pathlib import Path

import pytest

from configs import countdown
from jzero.cli import parse_settings
from jzero.config import Config
from jzero.errors import UserError
from jzero.planning.disk import (
    GB,
    check_disk,
    checkpoint_bytes,
    disk_need,
    export_bytes,
    most_checkpoints,
    parts_of_workdir,
    require_disk,
    used_bytes,
)
from jzero.planning.models import architecture

MODEL = "Qwen/Qwen2.5-3B"
PARAMETERS = 3.086e9


def recipe(*flags: str) -> Config:
    return parse_settings(
        countdown.get_config("qwen2.5-3b"), [f"--config.{flag}" for flag in flags]
    )


def test_a_checkpoint_has_12_bytes_a_parameter_and_4_without_moments() -> None:
    model = architecture(MODEL)
    assert checkpoint_bytes(recipe(), model) == pytest.approx(12 * PARAMETERS, rel=1e-3)
    small = recipe("train.save=no_optimizer")
    assert checkpoint_bytes(small, model) == pytest.approx(4 * PARAMETERS, rel=1e-3)
    for moment in ("mu", "nu"):
        shorter = recipe(f"optimizer.{moment}_dtype=bfloat16")
        assert checkpoint_bytes(shorter, model) == pytest.approx(10 * PARAMETERS, rel=1e-3)


def test_a_run_with_an_adapter_writes_no_complete_model_unless_asked() -> None:
    model = architecture(MODEL)
    adapter = "model.adapter.rank=32"
    assert export_bytes(recipe(adapter), model) < 0.2 * GB
    assert sum(parts_of_workdir(recipe(adapter), model).values()) < 5 * GB
    for asked in ("train.export_merged=True", "hub.push=end"):
        assert export_bytes(recipe(adapter, asked), model) == pytest.approx(
            2 * PARAMETERS, rel=1e-3
        )


@pytest.mark.parametrize(
    ("flags", "number"),
    [
        ((), 3),  # two are kept, and a third is written beside them
        (("train.keep_checkpoints=1",), 2),
        (("train.keep_checkpoints=0", "train.steps=100", "train.checkpoint_every=10"), 11),
        (("train.checkpoint_every=0",), 2),
        (("train.checkpoint_every=-1",), 1),
    ],
)
def test_checkpoints_on_the_disk_at_the_same_time(flags: tuple[str, ...], number: int) -> None:
    assert most_checkpoints(recipe(*flags)) == number


@pytest.mark.parametrize("disk_gb", [100, 60, 35, 25])
def test_a_run_that_does_not_fit_is_refused_with_settings_that_do(
    disk_gb: int, tmp_path: Path
) -> None:
    """3B on the boot disk of a TPU machine (100 GB) or on Kaggle's 20 GB."""
    config = recipe(f"memory.disk_gb={disk_gb}")
    with pytest.raises(UserError) as refused:
        check_disk(config, tmp_path)

    message = str(refused.value)
    assert "\n" not in message
    assert message.startswith("countdown-qwen2.5-3b needs 1")
    assert f"and there are {disk_gb}.0 GB: it fits with --config.train." in message
    assert "3 checkpoints 111.1 GB" in message
    flags = [word for word in message.split(";")[0].split() if word.startswith("--config.")]
    changed = parse_settings(config, flags)
    assert disk_need(changed, architecture(MODEL), tmp_path).fits
    check_disk(recipe(f"memory.disk_gb={disk_gb}", "memory.check=False"), tmp_path)


def test_what_no_setting_makes_fit_says_so(tmp_path: Path) -> None:
    config = recipe("memory.disk_gb=5")
    with pytest.raises(UserError, match="no setting makes it fit: use a larger disk"):
        require_disk(config, architecture(MODEL), tmp_path)


def test_the_files_of_a_resumed_run_are_no_extra_need(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "20").mkdir(parents=True)
    (tmp_path / "checkpoints" / "20" / "part").write_bytes(b"x" * 1000)
    config = recipe()
    free = disk_need(config, architecture(MODEL), tmp_path / "new").available
    resumed = disk_need(config, architecture(MODEL), tmp_path).available
    assert used_bytes(tmp_path) == 1000
    assert resumed == pytest.approx(free + 1000, abs=1e9)  # other programs write to the disk, too


def test_save_adapter_needs_an_adapter() -> None:
    from jzero.config import validate

    config = recipe("train.save=adapter")
    with pytest.raises(UserError, match=r"train\.save=adapter is for a run with an adapter"):
        validate(config)
    adapter = replace(config.model.adapter, rank=8)
    validate(replace(config, model=replace(config.model, adapter=adapter)))
