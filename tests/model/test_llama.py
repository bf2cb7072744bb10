"""Llama, Mistral and scaled rotary embeddings, against transformers' PyTorch."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import PyTree
from test_qwen import (
    POSITIONS,
    QWEN2,
    TOKENS,
    assert_equal_to_transformers,
    assert_tensors_round_trip,
    logits_of,
    random_params,
)

from jzero.attention import xla
from jzero.config import AdapterConfig
from jzero.errors import UserError
from jzero.model import adapters, huggingface, peft, qwen
from jzero.model.families import FAMILIES, window_of
from jzero.model.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from jzero.planning.models import KNOWN_MODELS
from jzero.types import RowLayout

pytestmark = pytest.mark.usefixtures("quick_compilation")

LLAMA2 = replace(
    QWEN2,
    model_type="llama",
    hidden_size=32,
    num_hidden_layers=2,
    head_dim=16,
    tie_word_embeddings=False,
    rms_norm_eps=1e-5,
)
# With 64 tokens of context, pairs of all three bands: fast, between, slow.
LLAMA3 = replace(LLAMA2, tie_word_embeddings=True, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 64))
YARN = YarnScaling(4.0, 64)
CONFIGS = {
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "llama-linear": replace(LLAMA2, rope_scaling=LinearScaling(3.0)),
    "mistral": replace(LLAMA2, model_type="mistral"),
    "qwen2-yarn": replace(LLAMA2, model_type="qwen2", rope_scaling=YARN),
    "qwen3-yarn": replace(
        LLAMA2,
        model_type="qwen3",
        rope_scaling=YarnScaling(4.0, 64, attention_factor=1.3, beta_fast=8.0, truncate=False),
    ),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())

LINEAR = ("q", "k", "v", "o", "gate", "up", "down")


# -- the model -------------------------------------------------------------------------------------


@pytest.mark.peer
@every_config
def test_logits_and_gradients_equal_those_of_transformers(
    config: qwen.QwenConfig, tmp_path: Path
) -> None:
    assert_equal_to_transformers(config, tmp_path)


@pytest.mark.peer
@every_config
def test_transformers_computes_the_same_from_an_export(
    config: qwen.QwenConfig, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    params = random_params(config)
    path = tmp_path / "model"

    extra = {"max_position_embeddings": 256}
    huggingface.save(path, config, params, dtype="float32", hf_config_extra=extra)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)

    assert type(model).__name__ == FAMILIES[config.model_type].architecture
    with torch.no_grad():
        expected = model(torch.tensor(np.asarray(TOKENS), dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(logits_of(config, params), expected, atol=1e-4, rtol=0)


@pytest.mark.peer
@every_config
def test_tensors_of_transformers_round_trip_byte_for_byte(
    config: qwen.QwenConfig, tmp_path: Path
) -> None:
    assert_tensors_round_trip(config, tmp_path)


@pytest.mark.parametrize("name", ["llama3", "llama-linear", "qwen2-yarn"])
def test_the_scaling_matters(name: str) -> None:
    """Or the comparisons above would compare nothing."""
    config = CONFIGS[name]
    params = random_params(config)

    plain = logits_of(replace(config, rope_scaling=None), params)

    assert np.abs(logits_of(config, params) - plain).max() > 1e-2


@pytest.mark.parametrize("name", ["llama3", "qwen2-yarn"])
def test_a_packed_sequence_is_as_alone(name: str) -> None:
    """Two sequences in one row, the second with positions that begin anew."""
    config = CONFIGS[name]
    params = random_params(config)
    first, second = TOKENS[0, :7], TOKENS[1, :6]

    @jax.jit
    def logits(tokens: jax.Array, positions: jax.Array, segments: jax.Array) -> jax.Array:
        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, carry: PyTree
        ) -> tuple[jax.Array, PyTree]:
            layout = RowLayout(0, 1, tokens.shape[1])
            return xla.packed(q, k, v, segments, layout), carry

        hidden, _ = qwen.forward(config, params, tokens, positions, attend, dtype=jnp.float32)
        return qwen.head(config, params, hidden, jnp.float32)

    packed = logits(
        jnp.concatenate([first, second])[None],
        jnp.concatenate([jnp.arange(7), jnp.arange(6)])[None],
        jnp.array([[1] * 7 + [2] * 6]),
    )
    alone = logits_of(config, params)

    np.testing.assert_allclose(packed[0, :7], alone[0, :7], atol=1e-4)
    np.testing.assert_allclose(packed[0, 7:], alone[1, :6], atol=1e-4)


def trained_adapter(settings: AdapterConfig) -> qwen.Params:
    """Returns an adapter of LLAMA3 of which both factors are random."""
    factors = adapters.init(LLAMA3, settings, jax.random.key(0))
    rng = np.random.default_rng(2)

    def random_leaf(leaf: jax.Array) -> jax.Array:
        return jnp.asarray(0.1 * rng.standard_normal(leaf.shape), jnp.float32)

    return jax.tree.map(random_leaf, factors)


def test_an_untrained_adapter_of_llama_changes_no_bit() -> None:
    settings = AdapterConfig(rank=2)
    params = random_params(LLAMA3)

    factors = adapters.init(LLAMA3, settings, jax.random.key(0))
    joined = adapters.join(params, factors, settings.scale)

    assert set(factors["layers"]) == set(LINEAR)
    np.testing.assert_array_equal(logits_of(LLAMA3, joined), logits_of(LLAMA3, params))


def test_an_adapter_of_llama_goes_through_peft_files_and_through_a_merged_export(
    tmp_path: Path,
) -> None:
    settings = AdapterConfig(rank=3, alpha=6.0, targets=LINEAR)
    params, factors = random_params(LLAMA3), trained_adapter(settings)
    joined = adapters.join(params, factors, settings.scale)

    peft.save(tmp_path / "adapter", LLAMA3, settings, factors, base="a/b", dtype="float32")
    huggingface.save(tmp_path / "model", LLAMA3, joined, dtype="float32", hf_config_extra={})

    assert peft.read_settings(tmp_path / "adapter", LLAMA3) == settings
    read = peft.load(tmp_path / "adapter", LLAMA3, settings)
    jax.tree.map(np.testing.assert_array_equal, read, factors)
    exported = huggingface.load(tmp_path / "model", LLAMA3)
    expected = logits_of(LLAMA3, joined)
    np.testing.assert_allclose(logits_of(LLAMA3, exported), expected, atol=1e-4)
    assert np.abs(expected - logits_of(LLAMA3, params)).max() > 1e-2


# -- rotary frequencies ----------------------------------------------------------------------------

SCALED = {
    "llama-3.1-8b": KNOWN_MODELS["meta-llama/Llama-3.1-8B"],
    "llama-3.2-1b": KNOWN_MODELS["meta-llama/Llama-3.2-1B"],
    "qwen2.5": replace(KNOWN_MODELS["Qwen/Qwen2.5-7B"], rope_scaling=YarnScaling(4.0, 32768)),
    "qwen3": replace(KNOWN_MODELS["Qwen/Qwen3-8B"], rope_scaling=YarnScaling(4.0, 32768)),
    "all options": replace(
        KNOWN_MODELS["Qwen/Qwen2.5-0.5B"],
        rope_scaling=YarnScaling(40.0, 4096, None, 16.0, 2.0, 1.0, 0.7, False),
    ),
    "a ramp of one pair": replace(
        KNOWN_MODELS["Qwen/Qwen2.5-0.5B"],
        rope_scaling=YarnScaling(2.0, 64, beta_fast=1.0, beta_slow=1.0, truncate=False),
    ),
    "nothing stretched": replace(
        KNOWN_MODELS["Qwen/Qwen2.5-0.5B"], rope_scaling=YarnScaling(1.0, 32768)
    ),
}


@pytest.mark.peer
@pytest.mark.parametrize("config", SCALED.values(), ids=SCALED.keys())
def test_frequencies_and_amplitude_equal_those_of_transformers(config: qwen.QwenConfig) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    hf_config = transformers.AutoConfig.for_model(**huggingface.config_json(config, "float32"))
    scaling = config.rope_scaling
    assert scaling is not None
    expected, amplitude = ROPE_INIT_FUNCTIONS[scaling.kind](hf_config, "cpu")

    found = scaling.frequencies(config.rope_theta, config.head_dim)
    np.testing.assert_allclose(found, expected.numpy(), rtol=5e-7, atol=0)
    assert scaling.amplitude == pytest.approx(amplitude, rel=1e-12)


@pytest.mark.parametrize(
    "scaling", [Llama3Scaling(8.0, 1.0, 4.0, 64), YARN, SCALED["all options"].rope_scaling]
)
def test_config_json_keeps_the_scaling(scaling: RopeScaling) -> None:
    config = replace(LLAMA2, rope_scaling=scaling)

    written = json.loads(json.dumps(huggingface.config_json(config, "float32")))

    assert huggingface.parse_config(written) == config
    del written["rope_parameters"]  # which transformers 4 does not read
    assert huggingface.parse_config(written) == config


# -- known sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("hub_id", KNOWN_MODELS)
def test_a_known_model_is_exported_as_it_is_read(hub_id: str) -> None:
    model = KNOWN_MODELS[hub_id]
    assert model.model_type in FAMILIES
    written = huggingface.config_json(model, "bfloat16")
    assert huggingface.parse_config(written) == model


# -- config.json -----------------------------------------------------------------------------------


def config_of_llama(**changes: object) -> dict[str, object]:
    return huggingface.config_json(LLAMA2, "float32") | changes


def test_a_llama_without_key_value_heads_has_as_many_as_heads() -> None:
    entries = config_of_llama()
    del entries["num_key_value_heads"]

    assert huggingface.parse_config(entries).num_key_value_heads == LLAMA2.num_attention_heads


@pytest.mark.parametrize("name", ["attention_bias", "mlp_bias"])
def test_biases_of_llama_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"{name}=true on llama: only false"):
        huggingface.parse_config(config_of_llama(**{name: True}))


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"sliding_window": 4096, "max_position_embeddings": 32768}, 4096),
        ({"max_position_embeddings": 32768}, 4096),  # what transformers takes
        ({"sliding_window": 4096}, 4096),
        ({"sliding_window": None, "max_position_embeddings": 32768}, None),
        ({"sliding_window": 4096, "max_position_embeddings": 4096}, None),
        ({"sliding_window": "all", "max_position_embeddings": 4096}, None),  # refused later
    ],
    ids=str,
)
def test_a_window_below_the_positions_limits_sequences(
    changes: dict[str, object], window: int | None
) -> None:
    assert window_of({"model_type": "mistral"} | changes) == window


def test_an_export_keeps_the_window_that_the_model_had() -> None:
    config = CONFIGS["mistral"]
    of_hub = huggingface.config_json(config, "float32")
    assert of_hub["sliding_window"] is None  # of random weights
    del of_hub["sliding_window"]

    assert huggingface.config_json(config, "float32", of_hub)["sliding_window"] == 4096
    of_hub["sliding_window"] = 128
    assert huggingface.config_json(config, "float32", of_hub)["sliding_window"] == 128


def test_a_window_of_another_family_is_not_in_use() -> None:
    assert window_of({"model_type": "qwen2", "sliding_window": 4096}) is None
    assert window_of({"model_type": "llama", "sliding_window": 4096}) is None


@pytest.mark.peer
def test_sequences_within_the_window_are_computed_as_transformers_does(tmp_path: Path) -> None:
    """And the limit is the number of tokens itself: a window of one token less differs."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = CONFIGS["mistral"]
    params = random_params(config)
    num_tokens = POSITIONS.shape[1]
    logits = {}
    for window in (num_tokens, num_tokens - 1):
        path = tmp_path / str(window)
        extra = {"sliding_window": window, "max_position_embeddings": 256}
        huggingface.save(path, config, params, dtype="float32", hf_config_extra=extra)
        model = transformers.AutoModelForCausalLM.from_pretrained(path)
        with torch.no_grad():
            logits[window] = model(
                torch.tensor(np.asarray(TOKENS), dtype=torch.long)
            ).logits.numpy()

    found = logits_of(config, params)
    np.testing.assert_allclose(found, logits[num_tokens], atol=1e-4)
    assert np.abs(found - logits[num_tokens - 1]).max() > 1e-3
