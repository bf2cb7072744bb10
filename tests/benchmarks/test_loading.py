"""The benchmark of reading a checkpoint, on a model of which everything fits one part."""

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import reference
from runs import ROOT

from jzero.model import huggingface


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("loading")


@pytest.mark.parametrize("part", [1, 1 << 22], ids=["a row", "everything"])
def test_a_random_checkpoint_is_read_whatever_the_parts(
    part: int,
    loading: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loading.write_checkpoint(reference.MODEL, tmp_path)
    expected = huggingface.load(tmp_path, reference.MODEL)
    monkeypatch.setattr(huggingface.reading, "PART_NUMBERS", part)

    loading.measure(tmp_path, "float32")

    assert "times as much" in capsys.readouterr().out
    found = huggingface.load(tmp_path, reference.MODEL)
    np.testing.assert_array_equal(found["embed"], expected["embed"])
    np.testing.assert_array_equal(found["layers"]["q"], expected["layers"]["q"])
