"""Exports of a run: what their config says, and that no half-written export is left."""

import json
from pathlib import Path

import jax
import pytest
import reference
from transformers import GenerationConfig

from jzero.model import huggingface, qwen
from jzero.model.base_model import BaseModel, read_base_model
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
    assert written["eos_token_id"] == [*base.stop_tokens, 99]
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


# What a real chat model's file says, with fields that a run decides and one of a later version.
SOURCE = {
    "_from_model_config": True,
    "bos_token_id": 3,
    "eos_token_id": [4, 5],
    "pad_token_id": 4,
    "max_length": 777,
    "stop_strings": ["Question:"],
    "do_sample": False,
    "temperature": 0.2,
    "top_k": 20,
    "top_p": 0.8,
    "repetition_penalty": 1.05,
    "field_of_a_later_version": 1,
}


def exported_generation_config(base: BaseModel, source: dict[str, object], path: Path) -> Path:
    """Exports a model that was loaded from a directory with the source's generation_config.json."""
    directory = path / "base"
    directory.mkdir()
    (directory / "generation_config.json").write_text(json.dumps(source))
    target = path / "export"
    loaded = base._replace(directory=directory)
    export(target, loaded, reference.random_params(base.model))
    return target / "generation_config.json"


def test_the_generation_config_of_an_export_is_the_loaded_one_but_for_how_to_sample(
    base: BaseModel, tmp_path: Path
) -> None:
    path = exported_generation_config(base, SOURCE, tmp_path)

    own_end = base.tokenizer.eos_token_id
    assert json.loads(path.read_text()) == {
        "bos_token_id": 3,
        "pad_token_id": 4,
        "max_length": 777,
        "stop_strings": ["Question:"],
        "field_of_a_later_version": 1,
        "eos_token_id": [own_end, 4, 5],
        "do_sample": True,
        "temperature": reference.settings().rollout.temperature,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
    }


@pytest.mark.parametrize("source", [{}, {"pad_token_id": None}], ids=str)
def test_padding_and_beginning_come_from_the_config_and_the_tokenizer_without_a_generation_config(
    base: BaseModel, source: dict[str, object], tmp_path: Path
) -> None:
    path = exported_generation_config(base, source, tmp_path)

    written = json.loads(path.read_text())
    assert written["bos_token_id"] == 3  # of config.json
    assert written["pad_token_id"] == base.tokenizer.pad_token_id


def test_transformers_reads_the_same_tokens_from_an_export_as_from_the_base(
    base: BaseModel, tmp_path: Path
) -> None:
    path = exported_generation_config(base, SOURCE, tmp_path)

    theirs = GenerationConfig.from_pretrained(tmp_path / "base")
    ours = GenerationConfig.from_pretrained(path.parent)
    assert (ours.pad_token_id, ours.bos_token_id) == (theirs.pad_token_id, theirs.bos_token_id)
    assert set(ours.eos_token_id) == {*theirs.eos_token_id, base.tokenizer.eos_token_id}
    assert ours.max_length == theirs.max_length
    assert (ours.do_sample, ours.top_k, ours.repetition_penalty) == (True, 0, None)
