"""Models of the setting model.arch, among them the hybrid of a preset."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from jzero import config
from jzero.config import TINY_MODELS, tiny_arch
from jzero.errors import UserError
from jzero.model import tokenizer
from jzero.model.architecture import ATTENTION, DELTA_NET
from jzero.model.base_model import read_base_model
from jzero.model.huggingface import config_json
from jzero.model.new_model import check_experts, new_model


def test_a_hybrid_has_attention_in_the_last_layer_of_every_interval():
    arch = tiny_arch(model_type="qwen3_5_text", num_hidden_layers=4, full_attention_interval=2)

    model = new_model(20, arch)

    assert model.layer_types == (DELTA_NET, ATTENTION) * 2
    assert model.rotary_dim == 8
    assert model.delta_net is not None
    assert model.delta_net.num_value_heads == 4


def test_the_settings_of_a_hybrid_change_no_other_family():
    model = new_model(20, tiny_arch(model_type="qwen3", partial_rotary_factor=0.5))

    assert model.rotary_dim == model.head_dim
    assert model.delta_net is None
    assert model.attention_layers == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        (tiny_arch(model_type="qwen3_5"), "set it to qwen3_5_text"),
        (
            tiny_arch(model_type="qwen3_5_text", linear_num_key_heads=3),
            "linear_num_key_heads=3 does not divide",
        ),
        (
            tiny_arch(model_type="qwen3_5_text", full_attention_interval=8),
            "only linear_attention",
        ),
    ],
)
def test_a_model_that_cannot_be_made_is_refused(arch, message):
    with pytest.raises(UserError, match=message):
        new_model(20, arch)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_tiny_model_can_be_made(name: str) -> None:
    config.validate(config.Config(model=config.ModelConfig(arch=name)))

    model = new_model(20, name)

    check_experts(model)
    assert (model.hidden_size, model.num_hidden_layers) == (128, 4)


def test_a_config_json_gives_the_architecture_and_the_tokenizer_the_vocabulary(
    tmp_path: Path,
) -> None:
    model = new_model(20, tiny_arch("tiny-qwen3", hidden_size=48, rope_theta=5e5))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_json(model, "float32", {"max_position_embeddings": 99})))
    settings = config.ModelConfig(arch=str(path))

    base = read_base_model(settings)

    num_ids = tokenizer.num_ids(base.tokenizer)
    assert base.model == replace(model, vocab_size=num_ids)
    assert num_ids != 20
    assert base.hf_config == {"max_position_embeddings": 99}


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("tiny-qwen9", "is not a tiny model: give one of tiny-qwen2"),
        ("tiny-qwen2(width=3)", "there is no width; there are model_type"),
        ("tiny-qwen2(head_dim=1.5)", "head_dim=1.5 must be a whole number"),
        ("tiny-qwen2(head_dim=True)", "head_dim=True must be a whole number"),
        (
            "tiny-qwen2(head_dim=0)",
            "model.arch=tiny-qwen2(head_dim=0): head_dim=0 must be at least 1",
        ),
        ("tiny-qwen2(head_dim=4", "close the bracket"),
        ("tiny-qwen2(__import__('os'))", "write each argument as NAME=VALUE"),
        ("nowhere/config.json", "model.arch=nowhere/config.json: no such file"),
    ],
)
def test_a_wrong_architecture_is_refused_before_the_run(arch: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        config.validate(config.Config(model=config.ModelConfig(arch=arch)))
