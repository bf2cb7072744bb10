"""Checkpoints as they are published: other prefixes, leftovers of training runs, fuller files."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from reference import assert_equal
from safetensors.numpy import load_file, save_file
from test_gemma import PLAIN as GEMMA3
from test_qwen import CONFIGS, random_params
from tiny import HYBRID_ENTRIES

from jzero.errors import UserError
from jzero.model import huggingface, qwen
from jzero.model.huggingface import names
from jzero.model.rope import YarnScaling

Weights = dict[str, np.ndarray]
UNTIED = CONFIGS["qwen2-untied"]
QWEN3_5 = huggingface.parse_config({**HYBRID_ENTRIES, "model_type": "qwen3_5_text"})
MODELS = {"untied": UNTIED, "tied": CONFIGS["qwen2-tied"], "hybrid": QWEN3_5, "gemma3": GEMMA3}


def write(path: Path, config: qwen.QwenConfig) -> qwen.Params:
    params = random_params(config)
    huggingface.save(path, config, params, dtype="float32", hf_config_extra={})
    return params


def rewrite(path: Path, change: Callable[[Weights], Weights]) -> None:
    weights = load_file(path / "model.safetensors")
    save_file(change(weights), path / "model.safetensors")


def assert_reads_and_exports(path: Path, config: qwen.QwenConfig, params: qwen.Params) -> None:
    """Asserts that a checkpoint has these parameters, and its export the names of the family."""
    assert_equal(huggingface.load(path, config), params)
    out = path.parent / "export"
    huggingface.save(out, config, params, dtype="float32", hf_config_extra={}, original=path)
    written = load_file(out / "model.safetensors")
    tensors = huggingface.checkpoint_tensors(config).values()
    assert {tensor.name for layers in tensors for tensor in layers} == written.keys()
    assert_equal(huggingface.load(out, config), params)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("prefix", names.PREFIXES)
def test_every_prefix_is_read_and_exported_as_the_table_has_it(
    model: str, prefix: str, tmp_path: Path
) -> None:
    config = MODELS[model]
    params = write(tmp_path / "model", config)

    def rename(weights: Weights) -> Weights:
        renamed = {}
        for name, value in weights.items():
            is_inside = name.startswith("model.")
            renamed[prefix + name.removeprefix("model.") if is_inside else name] = value
        return renamed

    rewrite(tmp_path / "model", rename)

    assert_reads_and_exports(tmp_path / "model", config, params)


LEFTOVERS = (
    "model.layers.0.self_attn.rotary_emb.inv_freq",
    "model.rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "model.layers.1.attn.masked_bias",
    "v_head.summary.weight",
    "v_head.summary.bias",
    "value_head.weight",
    "score.weight",
    "classifier.bias",
)


def test_leftovers_are_skipped_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    params = write(tmp_path / "model", UNTIED)
    rewrite(tmp_path / "model", lambda weights: weights | dict.fromkeys(LEFTOVERS, np.ones(4)))

    assert_reads_and_exports(tmp_path / "model", UNTIED, params)

    [line] = [line for line in capsys.readouterr().out.splitlines() if "skipped" in line]
    assert f"and {len(LEFTOVERS) - 3} more" in line


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq2",
        "model.layers.0.self_attn.bias",
        "model.layers.0.mlp.score.weight",
        "model.layers.7.mlp.up_proj.weight",
        "scores.weight",
        "v_head",
        "model.model.norm.weight",
    ],
)
def test_other_unknown_tensors_are_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path / "model", UNTIED)
    rewrite(tmp_path / "model", lambda weights: weights | {name: np.ones(4)})

    with pytest.raises(UserError, match="unexpected"):
        huggingface.load(tmp_path / "model", UNTIED)


@pytest.mark.parametrize("unlisted", ["model.norm.weight", "someone.else", "both"])
def test_a_file_may_hold_more_than_its_index(unlisted: str, tmp_path: Path) -> None:
    """transformers reads all tensors of the files; one that the model does not need is skipped."""
    params = write(tmp_path / "model", UNTIED)
    rewrite(tmp_path / "model", lambda weights: weights | {"someone.else": np.ones(4)})
    part = tmp_path / "model" / "model-00001-of-00001.safetensors"
    (tmp_path / "model" / "model.safetensors").rename(part)
    extra = ["model.norm.weight", "someone.else"] if unlisted == "both" else [unlisted]
    listed = [name for name in load_file(part) if name not in (*extra, "someone.else")]
    index = {"weight_map": dict.fromkeys(listed, part.name)}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))

    assert_equal(huggingface.load(tmp_path / "model", UNTIED), params)


def test_the_entry_of_another_program_is_ignored_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSeek-R1-0528-Qwen3-8B has attn_factor, which transformers does not read."""
    scaling = YarnScaling(factor=4.0, original_max_position_embeddings=64)
    config = replace(CONFIGS["qwen3-tied"], rope_scaling=scaling)
    write(tmp_path / "model", config)
    file = tmp_path / "model" / "config.json"
    entries = json.loads(file.read_text())
    del entries["rope_parameters"]
    entries["rope_scaling"]["attn_factor"] = 0.8782488562869419
    file.write_text(json.dumps(entries))

    assert huggingface.load_config(tmp_path / "model")[0] == config
    huggingface.load_config(tmp_path / "model")

    line = f"{file}: rope_scaling.attn_factor=0.8782488562869419 has no effect, as in transformers"
    assert capsys.readouterr().out.count(line) == 1
