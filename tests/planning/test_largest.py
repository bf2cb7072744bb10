"""The largest model for a topology, and its table."""

import json
import sys
from pathlib import Path

import pytest

from configs import countdown
from jzero import plan
from jzero.cli import parse_settings
from jzero.planning import largest
from jzero.planning.chips import GIB, described_devices
from jzero.planning.fitting import fit
from jzero.planning.models import KNOWN_MODELS

CHIP = described_devices("v5e:1x1")


@pytest.fixture
def small_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves three models of the table: others only take time."""
    names = ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-1.5B")
    few = {name: KNOWN_MODELS[name] for name in names}
    monkeypatch.setattr(largest, "KNOWN_MODELS", few)


def test_models_come_largest_first_and_one_of_each_size() -> None:
    names = largest.models_by_size()
    assert names[:3] == ["Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3.5-27B"]
    assert names[-2:] == ["Qwen/Qwen2.5-0.5B", "HuggingFaceTB/SmolLM2-135M-Instruct"]
    assert "Qwen/Qwen2.5-1.5B-Instruct" not in names  # as large as the model it was made from


def test_the_largest_fits_with_its_settings_and_the_next_does_not(
    small_table: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an adapter the next does."""
    monkeypatch.setattr(largest, "RESPONSE_TOKENS", (1024,))
    settings = countdown.get_config("qwen2.5-3b")
    available = 15 * GIB
    full, adapter, int8 = largest.largest_models(settings, CHIP, available)

    assert (full.method, full.response_tokens, full.model) == ("full", 1024, "Qwen/Qwen3-0.6B")
    fitting = fit(parse_settings(settings, full.flags), CHIP, available)
    assert fitting.needed == full.needed_bytes <= available
    larger = parse_settings(settings, [*full.flags, "--config.model.path=Qwen/Qwen2.5-1.5B"])
    assert not fit(larger, CHIP, available).fits
    assert adapter.model == "Qwen/Qwen2.5-1.5B"
    assert "--config.model.adapter.rank=32" in adapter.flags
    assert "--config.model.base=int8" in int8.flags
    assert int8.needed_bytes < adapter.needed_bytes


def test_experts_have_adapters_and_8_bits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen2.5-0.5B")
    monkeypatch.setattr(largest, "KNOWN_MODELS", {name: KNOWN_MODELS[name] for name in names})
    monkeypatch.setattr(largest, "RESPONSE_TOKENS", (1024,))

    cells = largest.largest_models(countdown.get_config("qwen2.5-3b"), CHIP, 10_000 * GIB)

    full, adapter, int8 = cells
    assert [cell.model for cell in cells] == [names[0]] * 3
    assert int8.needed_bytes < adapter.needed_bytes < full.needed_bytes


def test_methods_are_rows(small_table: None, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = {"once": largest.train_everything, "twice": largest.train_everything}
    monkeypatch.setattr(largest, "METHODS", methods)
    monkeypatch.setattr(largest, "RESPONSE_TOKENS", (1024,))
    cells = largest.largest_models(countdown.get_config("qwen2.5-3b"), CHIP, 1 * GIB)
    text = largest.format_largest(cells, "v5e:1x1", CHIP, 1 * GIB)
    assert text.splitlines()[1].split() == ["response", "tokens", "1024"]
    assert [line.split() for line in text.splitlines()[2:]] == [["once", "none"], ["twice", "none"]]


def test_the_command_prints_the_table_and_writes_it(
    small_table: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(largest, "RESPONSE_TOKENS", (1024,))
    out = tmp_path / "largest.json"
    flags = ["--topology=l4:1", "--largest", f"--json={out}"]
    monkeypatch.setattr(sys, "argv", ["jzero.plan", *flags])

    plan.command()

    printed = capsys.readouterr().out
    assert printed.startswith("largest known model that trains on l4:1: 1 x NVIDIA L4, 20.95 GiB")
    assert "response tokens   1024" in printed
    assert "Qwen3-0.6B (" in printed
    assert max(map(len, printed.splitlines())) <= 80
    written = json.loads(out.read_text())
    assert written["largest"][0]["model"] == "Qwen/Qwen3-0.6B"
