"""Exports of a run: what their config says, and that no half-written export is left."""

import json
from pathlib import Path

import jax
import pytest
import reference

from jzero.model import huggingface, qwen
from jzero.run.base_model import BaseModel, read_base_model
from jzero.run.export_model import export_model


@pytest.fixture
def base() -> BaseModel:
    """Returns the tiny model as if it had been loaded from a directory with this config."""
    hf_config = {
        "max_position_embeddings": 32768,
        "bos_token_id": 3,
        "eos_token_id": 99,
        "dtype": "float16",
    }
    return read_base_model(reference.settings().model)._replace(hf_config=hf_config)


def export(target: Path, base: BaseModel, params: qwen.Params) -> str:
    return export_model(target, base, reference.settings().rollout, params, "float32")


def contents_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_config_of_an_export_is_the_loaded_one_but_for_what_the_run_decides(
    base: BaseModel, tmp_path: Path
) -> None:
    target = tmp_path / "export-3"

    path = export(target, base, reference.random_params(base.model))

    assert path == str(target)
    written = json.loads((target / "config.json").read_text())
    assert written["max_position_embeddings"] == 32768
    assert written["bos_token_id"] == 3
    assert written["dtype"] == "float32"
    assert written["torch_dtype"] == "float32"
    assert written["eos_token_id"] == base.stop_tokens[0]
    model, _ = huggingface.load_config(target)
    assert model == base.model


def test_an_export_that_was_killed_before_its_end_is_made_again(
    base: BaseModel, tmp_path: Path
) -> None:
    target = tmp_path / "export-3"
    params = reference.random_params(base.model)
    export(target, base, params)
    whole = contents_of(target)

    (target / "generation_config.json").unlink()
    (target / "tokenizer.json").write_text("{")
    export(target, base, params)

    assert contents_of(target) == whole


def test_a_whole_export_stays(base: BaseModel, tmp_path: Path) -> None:
    target = tmp_path / "export-3"
    params = reference.random_params(base.model)
    export(target, base, params)
    whole = contents_of(target)

    other_params = jax.tree.map(lambda x: x + 1, params)
    export(target, base, other_params)

    assert contents_of(target) == whole
