"""Models of the settings model.arch, among them the hybrid of a preset."""

import pytest

from jzero.config.schema import ArchitectureConfig
from jzero.errors import UserError
from jzero.model.architecture import ATTENTION, DELTA_NET
from jzero.model.new_model import new_model


def test_a_hybrid_has_attention_in_the_last_layer_of_every_interval():
    arch = ArchitectureConfig(
        model_type="qwen3_5_text", num_hidden_layers=4, full_attention_interval=2
    )

    model = new_model(20, arch)

    assert model.layer_types == (DELTA_NET, ATTENTION) * 2
    assert model.rotary_dim == 8
    assert model.delta_net is not None
    assert model.delta_net.num_value_heads == arch.linear_num_value_heads


def test_the_settings_of_a_hybrid_change_no_other_family():
    model = new_model(20, ArchitectureConfig(model_type="qwen3", partial_rotary_factor=0.5))

    assert model.rotary_dim == model.head_dim
    assert model.delta_net is None
    assert model.attention_layers == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        (ArchitectureConfig(model_type="qwen3_5"), "set it to qwen3_5_text"),
        (
            ArchitectureConfig(model_type="qwen3_5_text", linear_num_key_heads=3),
            "linear_num_key_heads=3 does not divide",
        ),
        (
            ArchitectureConfig(model_type="qwen3_5_text", full_attention_interval=8),
            "only linear_attention",
        ),
    ],
)
def test_a_model_that_cannot_be_made_is_refused(arch, message):
    with pytest.raises(UserError, match=message):
        new_model(20, arch)
