"""The table of model families: an entry from outside works everywhere, an unknown name is refused."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_qwen import CONFIGS, POSITIONS, TOKENS, causal, random_params

from jzero.errors import UserError
from jzero.model import huggingface, qwen
from jzero.model.families import FAMILIES, StoredTensor, family_of
from jzero.model.layers import dense_layer, dense_parameters

pytestmark = pytest.mark.usefixtures("quick_compilation")


def twice_the_layer(config, weights, x, rope, attend, layer, carry):
    """A layer of one's own: a dense layer whose change of the hidden states counts twice."""
    out, carry = dense_layer(config, weights, x, rope, attend, layer, carry)
    return x + 2 * (out - x), carry


@pytest.fixture
def my_family(monkeypatch):
    """The name of a family without biases and norms, with a layer and a tensor name of its own."""
    tensors = {**FAMILIES["qwen2"].tensors, "norm": StoredTensor("model.last_norm.weight")}
    mine = replace(
        FAMILIES["qwen2"],
        architecture="MineForCausalLM",
        parameters=partial(dense_parameters, attention_bias=False, query_key_norm=False),
        layer=twice_the_layer,
        tensors=tensors,
    )
    monkeypatch.setitem(FAMILIES, "mine", mine)
    return "mine"


def test_a_family_from_outside_computes_its_own_layer(my_family):
    config = replace(CONFIGS["qwen2-tied"], model_type=my_family, num_hidden_layers=1)
    params = random_params(config)
    assert set(params["layers"]) == set(qwen.logical_axes(config)["layers"])
    assert not {"q_bias", "q_norm"} & set(params["layers"])

    @partial(jax.jit, static_argnums=0)
    def hidden(config, params):
        return qwen.forward(config, params, TOKENS, POSITIONS, causal, dtype=jnp.float32)[0]

    # The layer of qwen2 computes from the same weights, as it applies only biases that are there.
    of_mine = hidden(config, params)
    of_qwen2 = hidden(replace(config, model_type="qwen2"), params)
    assert not np.allclose(of_mine, of_qwen2, atol=1e-2)


def test_a_family_from_outside_has_checkpoints(my_family, tmp_path):
    config = replace(CONFIGS["qwen2-untied"], model_type=my_family)
    params = random_params(config)

    huggingface.save(tmp_path / "model", config, params, dtype="float32", hf_config_extra={})
    read, hf_config = huggingface.load_config(tmp_path / "model")
    loaded = huggingface.load(tmp_path / "model", read)

    assert read == config and hf_config["architectures"] == ["MineForCausalLM"]
    names = huggingface.checkpoint_tensors(config)
    assert [tensor.name for tensor in names["norm"]] == ["model.last_norm.weight"]
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_an_unknown_family_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="model_type='llama' is not one of qwen2, qwen3"):
        family_of("llama")
    with pytest.raises(UserError, match="model_type='llama' is not one of qwen2, qwen3"):
        qwen.num_params(replace(CONFIGS["qwen2-tied"], model_type="llama"))


# Computed by the first release, whose parameters were Flax modules.
PINNED = [-0.047566793859004974, 0.010863582603633404, -0.000992095097899437, -0.012040583416819572]


def test_first_values_are_pinned():
    """Runs with random weights repeat those of earlier versions: the keys of parameters stay."""
    draw = jax.jit(qwen.init, static_argnums=0)
    params = draw(CONFIGS["qwen2-untied"], jax.random.key(3))
    found = [
        float(params["embed"][0, 0]),
        float(params["layers"]["q"][1, 0, 0, 0]),
        float(params["layers"]["down"][0, 0, 0]),
        float(params["lm_head"][0, 0]),
    ]
    assert found == pytest.approx(PINNED, abs=1e-7)
