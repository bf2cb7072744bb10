"""The arithmetic of memory against compiled programs: the table of lab/memory.md.

tests/commands/test_plan.py compares it with programs that it compiles itself.
"""

import re
import time
from dataclasses import replace

import pytest
from runs import ROOT
from tiny import small_settings

from benchmarks.plan import cell_settings
from configs import countdown
from jzero.config import Config
from jzero.planning.arithmetic import bytes_of_phases, totals
from jzero.planning.chips import GIB, described_devices
from jzero.planning.models import hub_id_of
from jzero.planning.planned_run import build

ROUNDING = 0.05  # GiB, of the figures in the table
MOST_BELOW, MOST_ABOVE = 0.05, 0.16  # shares of what the compiled programs take
TOPOLOGY = "v5e:2x4"

# Every model, every slice, and every mesh of the table is in one of these.
CELLS = (
    ("Qwen2.5-0.5B", "v5e:4x4"),
    ("Qwen2.5-1.5B", "v5e:16x16"),
    ("Qwen2.5-3B", "v5e:2x4"),
    ("Qwen2.5-7B", "v5e:2x4"),
    ("Qwen3-0.6B", "tpu7x:2x2x1"),
    ("Qwen3-4B", "v5p:2x2x2"),
    ("Qwen3-8B", "v6e:2x4"),
)


def compiled_phases(model: str, topology: str) -> dict[str, float]:
    """Returns the GiB of every phase in the table of lab/memory.md, which compiled programs."""
    page = (ROOT / "lab" / "memory.md").read_text(encoding="utf-8")
    [row] = re.findall(rf"^\| {model} \| {topology} \| \d+ x .*\|$", page, re.MULTILINE)
    publish, rollout, update = (float(cell) for cell in row.split("|")[5:8])
    return {"publish": publish, "rollout": rollout, "update": update}


def settings_of_cell(model: str, topology: str) -> Config:
    settings = countdown.get_config("qwen2.5-3b")
    settings.model.path = hub_id_of(model)
    for name, value in cell_settings(model, topology).items():
        section, field = name.split(".")
        setattr(getattr(settings, section), field, value)
    return settings


@pytest.mark.parametrize(("model", "topology"), CELLS)
def test_the_arithmetic_is_a_little_above_what_programs_take(model: str, topology: str) -> None:
    run = build(settings_of_cell(model, topology), described_devices(topology))
    counted = totals(bytes_of_phases(run))

    for phase, compiled in compiled_phases(model, topology).items():
        gib = counted[phase] / GIB
        assert gib > (1 - MOST_BELOW) * compiled - ROUNDING, phase
        assert gib < (1 + MOST_ABOVE) * compiled + ROUNDING, phase


def largest(settings: Config) -> dict[str, float]:
    return totals(bytes_of_phases(build(settings, described_devices(TOPOLOGY))))


@pytest.mark.parametrize(
    ("section", "name", "factor", "phase"),
    [
        ("train", "microbatch_tokens", 2, "update"),
        ("rollout", "num_pages", 2, "rollout"),
        ("rollout", "num_slots", 2, "rollout"),
    ],
)
def test_more_of_a_setting_takes_more(section, name, factor, phase) -> None:
    settings = small_settings(num_prompts=64)
    part = getattr(settings, section)
    more = replace(part, **{name: factor * getattr(part, name)})
    changed = replace(settings, **{section: more})
    assert largest(changed)[phase] > largest(settings)[phase]


def test_recomputation_and_short_moments_take_less() -> None:
    settings = small_settings()
    by_remat = []
    for remat in ("full", "dots", "none"):
        changed = replace(settings, model=replace(settings.model, remat=remat))
        by_remat.append(largest(changed)["update"])
    assert by_remat == sorted(set(by_remat))

    run = build(settings, described_devices(TOPOLOGY))
    for moments in (["mu_dtype"], ["mu_dtype", "nu_dtype"]):
        shorter = dict.fromkeys(moments, "bfloat16")
        halved = replace(settings, optimizer=replace(settings.optimizer, **shorter))
        saved = largest(settings)["update"] - largest(halved)["update"]
        assert saved == pytest.approx(len(moments) * run.parts["weights"] / 2, rel=0.01)


def test_it_takes_no_time() -> None:
    """A second, of which this machine may have a tenth: nothing is compiled."""
    settings = settings_of_cell("Qwen3-8B", TOPOLOGY)
    start = time.process_time()
    largest(settings)
    assert time.process_time() - start < 5
