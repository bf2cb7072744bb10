"""Qwen3.5: our model against transformers, and its checkpoints on the way in and out."""

import json
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file
from tiny import HYBRID_ENTRIES, assert_same_tensors, hybrid_forward

from jzero.config import AdapterConfig
from jzero.errors import UserError
from jzero.model import adapters, huggingface, qwen
from jzero.planning.models import KNOWN_MODELS

pytestmark = pytest.mark.usefixtures("quick_compilation")

TOKENS = 80  # more than a chunk


@cache
def torch_model():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(**HYBRID_ENTRIES, tie_word_embeddings=False)
    model = transformers.Qwen3_5ForCausalLM(config).to(torch.float32).eval()
    return tiny.shaken(model)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3_5")
    torch_model().save_pretrained(path)
    return path


def random_tokens(rows: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 96, (rows, TOKENS))


def test_logits_and_gradients_are_those_of_transformers(directory):
    torch = pytest.importorskip("torch")
    model = torch_model()
    model.zero_grad()
    tokens = random_tokens(2)
    expected = model(input_ids=torch.from_numpy(tokens)).logits
    weights = np.random.default_rng(1).normal(size=expected.shape).astype(np.float32)
    (expected * torch.from_numpy(weights)).sum().backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}

    config, _ = huggingface.load_config(directory)
    params = huggingface.load(directory, config)

    def loss(params):
        logits = hybrid_forward(config, params, tokens, jnp.ones_like(tokens))
        return jnp.sum(logits * weights), logits

    (_, logits), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    np.testing.assert_allclose(logits, expected.detach().numpy(), rtol=1e-4, atol=1e-4)
    leaves = huggingface.flatten(gradient)
    compared = set()
    for leaf, layers in huggingface.checkpoint_tensors(config).items():
        for tensor in layers:
            ours = np.asarray(leaves[leaf])
            ours = tensor.to_stored(ours if tensor.layer is None else ours[tensor.layer])
            theirs = gradients[tensor.name]
            assert np.abs(ours - theirs).max() <= 1e-3 * np.abs(theirs).max(), tensor.name
            compared.add(tensor.name)
    assert compared == gradients.keys()


def test_an_export_gives_transformers_the_same_logits(directory, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config, hf_config = huggingface.load_config(directory)
    params = huggingface.load(directory, config)

    huggingface.save(tmp_path / "out", config, params, dtype="float32", hf_config_extra=hf_config)

    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(again).__name__ == "Qwen3_5ForCausalLM"
    tokens = torch.from_numpy(random_tokens(1))
    with torch.no_grad():
        expected, actual = torch_model()(input_ids=tokens).logits, again(input_ids=tokens).logits
    np.testing.assert_array_equal(actual.numpy(), expected.numpy())


def test_packed_sequences_are_the_sequences_alone(directory):
    config, _ = huggingface.load_config(directory)
    params = huggingface.load(directory, config)
    tokens = jnp.asarray(random_tokens(1))
    lengths = [23, 50]
    ids = np.repeat([1, 2], lengths)
    segments = jnp.asarray(np.pad(ids, (0, TOKENS - len(ids))))[None]

    packed = hybrid_forward(config, params, tokens, segments)

    first = 0
    for length in lengths:
        columns = slice(first, first + length)
        alone = hybrid_forward(config, params, tokens[:, columns], jnp.ones((1, length), jnp.int32))
        np.testing.assert_allclose(packed[:, columns], alone, rtol=1e-4, atol=1e-4)
        first += length


# -- a checkpoint with a vision tower --------------------------------------------------------------


@pytest.fixture
def with_vision(directory: Path, tmp_path: Path) -> Path:
    """Returns a checkpoint of the same model as the hub has it: nested, and with other parts."""
    path = tmp_path / "vision"
    path.mkdir()
    tensors = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        is_exact = name.endswith(("A_log", "linear_attn.norm.weight"))
        stored = tensor if is_exact else tensor.astype(jnp.bfloat16)
        tensors[name.replace("model.", "model.language_model.", 1)] = stored
    tensors["model.visual.blocks.0.attn.qkv.weight"] = np.full((3, 5), 0.5, jnp.bfloat16)
    tensors["mtp.fc.weight"] = np.arange(6, dtype=np.float32).reshape(2, 3)
    save_file(tensors, path / "model.safetensors")
    text = json.loads((directory / "config.json").read_text())
    del text["tie_word_embeddings"]
    whole = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "image_token_id": 90,
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": {"model_type": "qwen3_5_vision", "depth": 1},
    }
    (path / "config.json").write_text(json.dumps(whole))
    return path


def test_a_checkpoint_with_a_vision_tower_comes_back_as_it_was(with_vision, tmp_path):
    config, hf_config = huggingface.load_config(with_vision)
    params = huggingface.load(with_vision, config)
    assert params["layers"]["delta_decay"].shape == (2, 4)

    out = tmp_path / "out"
    huggingface.save(
        out, config, params, dtype="bfloat16", hf_config_extra=hf_config, original=with_vision
    )

    assert_same_tensors(out, with_vision)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["vision_config"] == hf_config["vision_config"]
    assert written["model_type"] == "qwen3_5"
    assert huggingface.load_config(tmp_path / "out")[0] == config


def test_gates_are_not_rounded_where_the_model_is(with_vision):
    config, _ = huggingface.load_config(with_vision)

    params = huggingface.load(with_vision, config, dtype="bfloat16")

    assert params["layers"]["delta_decay"].dtype == jnp.float32
    assert params["layers"]["delta_qkv"].dtype == jnp.bfloat16
    cast = qwen.cast(params, jnp.bfloat16)
    np.testing.assert_array_equal(
        cast["layers"]["delta_decay"],
        huggingface.load(with_vision, config)["layers"]["delta_decay"],
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate=false"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"layer_types": ["linear_attention", "sliding_attention"] * 2}, "sliding_attention"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type=yarn"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type=linear"),
        ({"rope_parameters": {"partial_rotary_factor": 0}}, "partial_rotary_factor=0"),
        ({"layer_types": None, "full_attention_interval": 1}, "full_attention_interval"),
        ({"linear_num_key_heads": 3}, "linear_num_key_heads=3"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_what_the_layers_do_not_compute_is_refused(change, message):
    entries = {**HYBRID_ENTRIES, "model_type": "qwen3_5_text", "tie_word_embeddings": True}

    with pytest.raises(UserError, match=message):
        huggingface.parse_config(entries | change)


SHARES = [
    ({"rope_scaling": {"type": "default", "partial_rotary_factor": 0.5}}, 0.5),
    ({"rope_parameters": {"rope_type": "default"}, "partial_rotary_factor": 0.5}, 0.5),
    ({"rope_parameters": None, "partial_rotary_factor": None}, 1.0),
    ({"rope_parameters": None}, 0.25),
]


@pytest.mark.parametrize(("change", "share"), SHARES)
def test_the_rotated_share_is_read_as_transformers_reads_it(change, share):
    transformers = pytest.importorskip("transformers")
    entries = {**HYBRID_ENTRIES, "model_type": "qwen3_5_text", "tie_word_embeddings": True}

    config = huggingface.parse_config(entries | change)

    assert config.partial_rotary_factor == share
    # The entries of the original do not hide those of the export.
    written = huggingface.config_json(config, "float32", extra=entries | change)
    theirs = transformers.Qwen3_5TextConfig(**written)
    assert theirs.rope_parameters["partial_rotary_factor"] == share


def test_an_adapter_is_on_every_layer_of_a_kind():
    entries = {**HYBRID_ENTRIES, "model_type": "qwen3_5_text", "tie_word_embeddings": True}
    config = huggingface.parse_config(entries)
    adapter = adapters.init(config, AdapterConfig(rank=2), jax.random.key(0))["layers"]

    assert {name: len(factors["a"]) for name, factors in adapter.items()} == {
        "q": 2, "k": 2, "v": 2, "o": 2, "gate": 4, "up": 4, "down": 4,
        "delta_qkv": 2, "delta_z": 2, "delta_out": 2,
    }  # fmt: skip


def test_a_gradient_keeps_no_copy_of_frozen_layers() -> None:
    """The scan over blocks of layers kept the weights that it had taken out of each block."""
    entries = {
        **HYBRID_ENTRIES,
        "model_type": "qwen3_5_text",
        "tie_word_embeddings": False,
        "intermediate_size": 512,
        "num_hidden_layers": 16,
        "layer_types": ["linear_attention", "full_attention"] * 8,
    }
    config = huggingface.parse_config(entries)
    params = qwen.abstract(config)
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)

    @jax.jit
    def gradient(embed: jax.Array, params: qwen.Params, tokens: jax.Array) -> jax.Array:
        def total(embed: jax.Array) -> jax.Array:
            trained = params | {"embed": embed}
            return hybrid_forward(
                config, trained, tokens, jnp.ones_like(tokens), remat="full"
            ).sum()

        return jax.grad(total)(embed)

    compiled = gradient.lower(params["embed"], params, tokens).compile()
    sizes = [4 * leaf.size for leaf in jax.tree.leaves(params["layers"])]
    assert compiled.memory_analysis().temp_size_in_bytes < sum(sizes) / 2


def test_sizes_of_the_hub():
    models = KNOWN_MODELS
    counts = {name: qwen.num_params(model) for name, model in models.items() if "3.5" in name}

    # Of the language models alone, without vision and MTP.
    assert 0.7e9 < counts["Qwen/Qwen3.5-0.8B"] < 0.9e9
    assert 4.0e9 < counts["Qwen/Qwen3.5-4B"] < 4.5e9
    assert 8.5e9 < counts["Qwen/Qwen3.5-9B"] < 9.5e9
    assert 26e9 < counts["Qwen/Qwen3.5-27B"] < 28e9
    four = models["Qwen/Qwen3.5-4B"]
    assert four.delta_net is not None
    assert len(four.attention_layers) == 8
    state = len(four.delta_layers) * four.delta_net.state_numbers * 4
    assert 50e6 < state < 54e6
