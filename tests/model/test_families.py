"""The table of model families: an entry from outside works, an unknown name is refused."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_qwen import CONFIGS, POSITIONS, TOKENS, causal, random_params

from jzero.errors import UserError
from jzero.model import huggingface, qwen
from jzero.model.architecture import Params, QwenConfig
from jzero.model.families import FAMILIES, StoredTensor, family_of
from jzero.model.layers import DenseLayer, ForwardPass

pytestmark = pytest.mark.usefixtures("quick_compilation")


class TwiceTheLayer(DenseLayer):
    """A layer of one's own: a dense layer whose change of the hidden states counts twice."""

    def __call__(
        self, x: jax.Array, forward_pass: ForwardPass, layer: jax.Array, carry: object
    ) -> tuple[jax.Array, object]:
        out, carry = super().__call__(x, forward_pass, layer, carry)
        return x + 2 * (out - x), carry


@pytest.fixture
def my_family(monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns the name of a family with a layer and a tensor name of its own.

    The family "plain" differs from it in the layer alone, which is a dense one.
    """
    tensors = {**FAMILIES["qwen2"].tensors, "norm": StoredTensor("model.last_norm.weight")}
    mine = replace(
        FAMILIES["qwen2"],
        architecture="MineForCausalLM",
        layer=partial(TwiceTheLayer, attention_bias=False, query_key_norm=False),
        tensors=tensors,
    )
    plain = partial(DenseLayer, attention_bias=False, query_key_norm=False)
    monkeypatch.setitem(FAMILIES, "mine", mine)
    monkeypatch.setitem(FAMILIES, "plain", replace(mine, layer=plain))
    return "mine"


def test_a_family_from_outside_computes_its_own_layer(my_family: str) -> None:
    config = replace(CONFIGS["qwen2-tied"], model_type=my_family, num_hidden_layers=1)
    params = random_params(config)
    axes = qwen.logical_axes(config)["layers"]

    @partial(jax.jit, static_argnums=0)
    def hidden(config: QwenConfig, params: Params) -> jax.Array:
        output, _ = qwen.forward(config, params, TOKENS, POSITIONS, causal, dtype=jnp.float32)
        return output

    of_mine = hidden(config, params)
    of_plain = hidden(replace(config, model_type="plain"), params)

    assert set(params["layers"]) == set(axes)
    assert not {"q_bias", "q_norm"} & set(axes)
    assert not np.allclose(of_mine, of_plain, atol=1e-2)


def test_a_family_from_outside_has_checkpoints(my_family: str, tmp_path: Path) -> None:
    config = replace(CONFIGS["qwen2-untied"], model_type=my_family)
    params = random_params(config)

    huggingface.save(tmp_path / "model", config, params, dtype="float32", hf_config_extra={})
    read, hf_config = huggingface.load_config(tmp_path / "model")
    loaded = huggingface.load(tmp_path / "model", read)

    assert read == config
    assert hf_config["architectures"] == ["MineForCausalLM"]
    names = huggingface.checkpoint_tensors(config)
    assert [tensor.name for tensor in names["norm"]] == ["model.last_norm.weight"]
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="model_type='gpt_oss' is not one of qwen2, qwen3"):
        family_of("gpt_oss")
    with pytest.raises(UserError, match="model_type='gpt_oss' is not one of qwen2, qwen3"):
        qwen.num_params(replace(CONFIGS["qwen2-tied"], model_type="gpt_oss"))


# Computed by the first release.
PINNED = [-0.047566793859004974, 0.010863582603633404, -0.000992095097899437, -0.012040583416819572]


def test_first_values_are_pinned() -> None:
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
