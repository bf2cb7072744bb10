"""config.json: what is read computes what transformers does, and all else is refused by name."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_qwen import CONFIGS, TOKENS, logits_of, random_params

from jzero.errors import UserError
from jzero.model import huggingface
from jzero.model.huggingface import parse_config
from jzero.model.layers import rotary

TINY = CONFIGS["qwen3-tied"]
THETA = TINY.rope_theta
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
PLAIN = {"rope_type": "default", "rope_theta": THETA}
EXTRA = {"max_position_embeddings": 64}

ABSENT = object()  # an entry that is taken away
Changes = dict[str, Any]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    huggingface.save(path, TINY, random_params(TINY), dtype="float32", hf_config_extra=EXTRA)
    return path


def change_config(path: Path, changes: Changes) -> None:
    file = path / "config.json"
    entries = json.loads(file.read_text()) | changes
    kept = {name: value for name, value in entries.items() if value is not ABSENT}
    file.write_text(json.dumps(kept))


def logits_of_transformers(path: Path) -> np.ndarray:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        return model(torch.tensor(np.asarray(TOKENS), dtype=torch.long)).logits.numpy()


def logits_of_jzero(path: Path) -> np.ndarray:
    config, _ = huggingface.load_config(path)
    return np.asarray(logits_of(config, huggingface.load(path, config)))


# -- what is read ----------------------------------------------------------------------------------

SAME: dict[str, Changes] = {
    "rope_parameters": {"rope_theta": ABSENT},
    "of version 4": {"rope_parameters": ABSENT},
    "of version 4, with null": {"rope_parameters": ABSENT, "rope_scaling": None},
    "the old name of the kind": {"rope_scaling": {"type": "default", "rope_theta": THETA}},
    "both say the same": {"rope_scaling": {"rope_type": "default"}},
    "no base at all": {"rope_parameters": ABSENT, "rope_theta": ABSENT},
    "a kind without a base": {"rope_parameters": {"rope_type": "default"}, "rope_theta": ABSENT},
    "whole heads rotated": {"partial_rotary_factor": 1.0},
    "a window that is not in use": {"sliding_window": 4, "max_window_layers": 0},
    "layer types": {"layer_types": ["full_attention"] * 2},
    "yarn": {"rope_parameters": PLAIN | YARN},
    "yarn of version 4": {
        "rope_parameters": ABSENT,
        "rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 32},
    },
    "yarn of the context of the model": {
        "rope_parameters": ABSENT,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    },
    "entries that are null": {"hidden_act": "silu", "layer_types": None, "attention_bias": False},
}


@pytest.mark.peer
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("changes", SAME.values(), ids=SAME.keys())
def test_what_is_read_computes_what_transformers_does(checkpoint: Path, changes: Changes) -> None:
    change_config(checkpoint, changes)

    found = logits_of_jzero(checkpoint)

    np.testing.assert_allclose(found, logits_of_transformers(checkpoint), atol=1e-5, rtol=1e-5)


# -- what is refused -------------------------------------------------------------------------------

# What transformers computes otherwise, and words of the refusal.
OTHER: dict[str, tuple[Changes, str]] = {
    "yarn beside plain rope_parameters": (
        {"rope_parameters": PLAIN, "rope_scaling": YARN},
        "rope_scaling and rope_parameters differ",
    ),
    "longrope in rope_parameters": (
        {"rope_parameters": PLAIN | {"rope_type": "longrope", "factor": 4.0}},
        "with rope_type=longrope: only default, linear, llama3, yarn are implemented",
    ),
    "dynamic under its old name": (
        {"rope_parameters": ABSENT, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope_type=dynamic",
    ),
    "a scaling that hides the base": (
        {"rope_theta": ABSENT, "rope_scaling": {"rope_type": "default"}},
        "rope_scaling and rope_parameters differ",
    ),
    "two bases": ({"rope_theta": 123.0}, "rope_theta at the top"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act=gelu"),
    "a window in use": (
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
        "sliding-window",
    ),
    "biases": ({"attention_bias": True}, "attention_bias=true"),
}


@pytest.mark.parametrize(("changes", "message"), OTHER.values(), ids=OTHER.keys())
def test_another_model_is_refused_by_name(checkpoint: Path, changes: Changes, message: str) -> None:
    change_config(checkpoint, changes)

    with pytest.raises(UserError, match=message) as caught:
        huggingface.load_config(checkpoint)
    assert str(checkpoint / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.peer
@pytest.mark.parametrize(
    "name", ["yarn beside plain rope_parameters", "a scaling that hides the base"]
)
def test_transformers_computes_another_model(checkpoint: Path, name: str) -> None:
    """The refusals are needed: the logits differ, although rope_parameters are plain RoPE."""
    plain = logits_of_transformers(checkpoint)
    change_config(checkpoint, OTHER[name][0])

    assert np.abs(logits_of_transformers(checkpoint) - plain).max() > 1e-3


@pytest.mark.peer
def test_transformers_does_not_tie_a_head_that_differs(checkpoint: Path) -> None:
    plain = logits_of_transformers(checkpoint)
    weights = load_file(checkpoint / "model.safetensors")
    weights["lm_head.weight"] = -weights["model.embed_tokens.weight"]
    save_file(weights, checkpoint / "model.safetensors")

    np.testing.assert_allclose(logits_of_transformers(checkpoint), -plain, atol=1e-5)
    with pytest.raises(UserError, match="tie_word_embeddings=true"):
        huggingface.load(checkpoint, TINY)


CONTRADICTIONS: dict[str, tuple[Changes, str]] = {
    "two kinds in one place": (
        {"rope_scaling": {"type": "yarn", "rope_type": "default", "rope_theta": THETA}},
        "a type and another rope_type",
    ),
    "yarn without its factor": (
        {"rope_parameters": PLAIN | {"rope_type": "yarn"}},
        "rope_parameters with rope_type=yarn lacks factor",
    ),
    "yarn with an entry of llama3": (
        {"rope_parameters": PLAIN | YARN | {"low_freq_factor": 1.0}},
        "low_freq_factor, which rope_type=yarn",
    ),
    "llama3 upside down": (
        {
            "rope_parameters": PLAIN
            | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0}
            | {"high_freq_factor": 1.0, "original_max_position_embeddings": 16}
        },
        "high_freq_factor=1.0 is not above low_freq_factor=4.0",
    ),
    "two contexts of the first training": (
        {"rope_parameters": PLAIN | YARN, "original_max_position_embeddings": 32},
        "original_max_position_embeddings at the top and another one",
    ),
    "a factor without a kind": (
        {"rope_scaling": {"factor": 4.0}},
        "factor, which rope_type=default",
    ),
    "part of a head rotated": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    "part of a head rotated, in v5": (
        {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor=0.5",
    ),
}


@pytest.mark.parametrize(("changes", "message"), CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_entries_that_contradict_each_other_are_refused(
    checkpoint: Path, changes: Changes, message: str
) -> None:
    change_config(checkpoint, changes)

    with pytest.raises(UserError, match=message):
        huggingface.load_config(checkpoint)


def test_all_wrong_entries_are_named_at_once() -> None:
    entries = huggingface.config_json(TINY, "float32")
    del entries["vocab_size"]
    entries |= {"hidden_size": "64", "rms_norm_eps": -1}

    with pytest.raises(
        UserError, match=r"lacks vocab_size; hidden_size=64 is not .*; rms_norm_eps=-1"
    ):
        parse_config(entries)


def test_a_null_of_key_value_heads_means_as_many_as_heads() -> None:
    entries = huggingface.config_json(TINY, "float32") | {"num_key_value_heads": None}

    assert parse_config(entries).num_key_value_heads == TINY.num_attention_heads


def test_a_base_that_is_a_large_whole_number_is_read() -> None:
    """JAX holds whole numbers of a program in 32 bits."""
    entries = huggingface.config_json(TINY, "float32")
    entries |= {"rope_parameters": None, "rope_theta": 10**11}

    config = parse_config(entries)
    sin = rotary(config, jnp.ones((1, 1), jnp.int32)).sin

    half = TINY.head_dim // 2
    np.testing.assert_allclose(sin.ravel(), np.sin(1e11 ** (-np.arange(half) / half)), rtol=1e-4)


# -- what is written -------------------------------------------------------------------------------


@pytest.fixture(params=[0o022, 0o077, 0o002], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_files_have_the_permissions_of_the_umask(umask: int, tmp_path: Path) -> None:
    path = tmp_path / "model"
    params = random_params(TINY)

    huggingface.save(
        path, TINY, params, dtype="float32", hf_config_extra={}, max_shard_bytes=30_000
    )

    assert path.stat().st_mode & 0o777 == 0o777 & ~umask
    assert len(list(path.glob("*.safetensors"))) > 1
    for file in path.iterdir():
        assert file.stat().st_mode & 0o777 == 0o666 & ~umask, file.name
