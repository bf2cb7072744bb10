"""What `jzero train` chooses on usual machines fits, and `jzero plan` of its recipe agrees."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jzero import main, plan
from jzero.planning.fitting import fit_run
from jzero.planning.machines import MACHINES, find_machine, plan_on
from jzero.planning.models import hub_id_of
from jzero.planning.sizing import choose_sizes
from jzero.sizing import recipe
from jzero.sizing.table import PAIRS, choose_row, format_table


@pytest.mark.parametrize("pair", PAIRS)
def test_no_choice_exceeds_memory_or_disk_and_the_plan_of_its_recipe_agrees(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    machine = MACHINES[pair[0]]
    row = choose_row(*pair)
    path = tmp_path / "recipe.py"
    path.write_text(recipe.recipe_source(row.sheet.settings, row.sheet.choices, "Title.", path))

    read = main.parse([f"--config={path}"]).settings
    verdict = plan_on(read, machine)

    assert read == row.sheet.settings
    assert verdict.fits, str(verdict)
    assert verdict.memory is not None and row.verdict.memory is not None
    assert 0 < verdict.memory.needed == row.verdict.memory.needed <= machine.device_bytes
    assert 0 < verdict.disk.needed == row.verdict.disk.needed <= machine.disk_bytes
    # Nothing is left to choose, so the run and every plan have these sizes.
    assert choose_sizes(read, machine.devices, machine.device_bytes) == read


@pytest.mark.parametrize("pair", [("v5e-8", "Qwen2.5-3B"), ("laptop-24gb", "Qwen2.5-0.5B")])
def test_a_recipe_that_leaves_sizes_open_gets_those_of_jzero_train(pair: tuple[str, str]) -> None:
    machine = MACHINES[pair[0]]
    settings = choose_row(*pair).sheet.settings
    opened = replace(
        settings,
        train=replace(settings.train, microbatch_tokens=0),
        rollout=replace(settings.rollout, num_slots=0),
    )

    assert choose_sizes(opened, machine.devices, machine.device_bytes) == settings


def test_the_memory_of_twice_the_microbatch_would_not_fit() -> None:
    """The verdict counts what it says: it changes with the settings."""
    machine = MACHINES["T4"]
    settings = choose_row("T4", "Qwen2.5-0.5B").sheet.settings
    larger = replace(settings, train=replace(settings.train, microbatch_tokens=4 * 26_112))
    larger.rollout.num_prompts = 64

    assert machine.device_bytes is not None
    needed = fit_run(settings, machine.devices, machine.device_bytes).needed
    assert fit_run(larger, machine.devices, machine.device_bytes).needed > 1.2 * needed
    assert not plan_on(replace(settings, memory=replace(settings.memory, disk_gb=5)), machine).fits


def test_the_table_has_20_pairs_of_9_machines() -> None:
    assert len(set(PAIRS)) == 20
    assert {machine for machine, _ in PAIRS} == set(MACHINES)
    assert len(MACHINES) == 9
    for _, model in PAIRS:
        assert hub_id_of(model)
    lines = format_table([("T4", "Qwen2.5-0.5B"), ("v5e-8", "Qwen2.5-3B")]).splitlines()
    assert lines[-2].startswith("T4          Qwen2.5-0.5B")
    assert all(len(line) <= 80 for line in lines), lines
    # Every title that is not a word of its own is explained above.
    [heads] = [line.split() for line in lines if line.startswith("machine ")]
    for head in heads[3:]:
        assert any(line.startswith(f"  {head} ") for line in lines), head
    seconds = float(lines[-1].split()[-1].replace(",", ""))
    assert 1 < seconds < 3600


@pytest.mark.parametrize(("disk", "status"), [(0, 0), (1, 1)])
def test_plan_confirms_a_recipe_for_a_machine(
    disk: int,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sheet = choose_row("T4", "Qwen2.5-0.5B").sheet
    path = tmp_path / "recipe.py"
    path.write_text(recipe.recipe_source(sheet.settings, sheet.choices, "Title.", path))
    flags = ["--config", str(path), "--machine", "t4", f"--config.memory.disk_gb={disk}"]
    monkeypatch.setattr(sys, "argv", ["jzero.plan", *flags])

    with pytest.raises(SystemExit) as ended:
        plan.command()

    assert ended.value.code == status
    out = capsys.readouterr().out
    assert ("the workdir DOES NOT FIT" in out) == bool(disk)
    assert out.splitlines()[-1] == ("does not fit" if disk else "fits")
    assert max(map(len, out.splitlines())) <= 80


def test_a_plan_for_more_chips_takes_microbatches_that_hold_a_row_on_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--config", "configs/countdown.py:qwen2.5-7b", "--machine", "v5litepod-16"]
    monkeypatch.setattr(sys, "argv", ["jzero.plan", *flags])

    with pytest.raises(SystemExit) as ended:
        plan.command()

    assert ended.value.code in (0, 1)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    note = " ".join(out.partition("\n\n")[0].split())
    assert note.startswith("note: train.microbatch_tokens=34816 holds less than one row on each")
    assert note.endswith("run with --config.train.microbatch_tokens=69632")


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(Exception, match="--machine=v9: there are v5e-1, v5e-8"):
        find_machine("v9")
