"""The head for multi-token prediction against a slow definition, and in checkpoints."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import HYBRID_ENTRIES, assert_same_tensors

from jzero.attention import xla
from jzero.config import ModelConfig, tiny_arch
from jzero.config.drafts import Mtp, Ngram
from jzero.errors import UserError
from jzero.model import huggingface, mtp, qwen
from jzero.model.base_model import read_base_model
from jzero.types import RowLayout

pytestmark = pytest.mark.usefixtures("quick_compilation")

ENTRIES = {
    **HYBRID_ENTRIES,
    "model_type": "qwen3_5_text",
    "tie_word_embeddings": True,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
}


def model_with_head() -> qwen.QwenConfig:
    return mtp.with_head(huggingface.parse_config(ENTRIES), Mtp(), ENTRIES)


def shaken_params(config: qwen.QwenConfig) -> qwen.Params:
    """Returns random parameters none of which is zero or small."""
    params = qwen.init(config, jax.random.key(0))
    rng = np.random.default_rng(0)

    def shake(leaf: jax.Array) -> jax.Array:
        return jnp.asarray(leaf * 4 + 0.3 * rng.standard_normal(leaf.shape), jnp.float32)

    return params | {"mtp": jax.tree.map(shake, params["mtp"])}


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (1 + weight)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def turned(x: np.ndarray, position: int, theta: float = 1e4, width: int = 4) -> np.ndarray:
    """Rotates the first `width` numbers of a head by RoPE."""
    x = x.copy()
    half = width // 2
    for i in range(half):
        angle = position * theta ** (-i / half)
        first, second = x[i], x[i + half]
        x[i] = first * np.cos(angle) - second * np.sin(angle)
        x[i + half] = second * np.cos(angle) + first * np.sin(angle)
    return x


def slow_head(
    tensors: dict[str, np.ndarray], embed: np.ndarray, hidden: np.ndarray, next_tokens: np.ndarray
) -> np.ndarray:
    """Computes the head of one sequence from a checkpoint's tensors, position by position."""
    w = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    layer = "mtp.layers.0."
    keys, values, outputs = [], [], []
    for t, token in enumerate(next_tokens):
        e = norm(embed[token].astype(np.float64), w["mtp.pre_fc_norm_embedding.weight"])
        h = norm(hidden[t].astype(np.float64), w["mtp.pre_fc_norm_hidden.weight"])
        x = w["mtp.fc.weight"] @ np.concatenate([e, h])
        a = norm(x, w[layer + "input_layernorm.weight"])
        q_and_gate = (w[layer + "self_attn.q_proj.weight"] @ a).reshape(4, 2, 16)
        k = (w[layer + "self_attn.k_proj.weight"] @ a).reshape(2, 16)
        k = norm(k, w[layer + "self_attn.k_norm.weight"])
        keys.append([turned(head, t) for head in k])
        values.append((w[layer + "self_attn.v_proj.weight"] @ a).reshape(2, 16))
        mixed = []
        for head in range(4):
            q = norm(q_and_gate[head, 0], w[layer + "self_attn.q_norm.weight"])
            q = turned(q, t)
            scores = np.array([q @ past[head // 2] for past in keys]) / 4
            shares = np.exp(scores - scores.max())
            shares /= shares.sum()
            out = sum(s * past[head // 2] for s, past in zip(shares, values, strict=True))
            mixed.append(out * sigmoid(q_and_gate[head, 1]))
        x = x + w[layer + "self_attn.o_proj.weight"] @ np.concatenate(mixed)
        b = norm(x, w[layer + "post_attention_layernorm.weight"])
        gate = w[layer + "mlp.gate_proj.weight"] @ b
        up = w[layer + "mlp.up_proj.weight"] @ b
        x = x + w[layer + "mlp.down_proj.weight"] @ (gate * sigmoid(gate) * up)
        outputs.append(norm(x, w["mtp.norm.weight"]))
    return np.array(outputs)


def test_the_head_is_its_definition(tmp_path: Path) -> None:
    config = model_with_head()
    params = shaken_params(config)
    huggingface.save(tmp_path, config, params, dtype="float32", hf_config_extra=ENTRIES)
    tensors = load_file(tmp_path / "model.safetensors")
    rng = np.random.default_rng(1)
    hidden = jnp.asarray(rng.standard_normal((2, 12, 32)), jnp.float32)
    next_tokens = jnp.asarray(rng.integers(0, 96, (2, 12)))
    segments, layout = jnp.ones((2, 12), jnp.int32), RowLayout(0, 1, 12)

    def attend(q, k, v, layer, carry):
        return xla.packed(q, k, v, segments, layout), carry

    positions = jnp.tile(jnp.arange(12), (2, 1))
    out, _ = mtp.forward(config, params, hidden, next_tokens, positions, attend, dtype=jnp.float32)

    embed = tensors["model.embed_tokens.weight"]
    for row in range(2):
        want = slow_head(tensors, embed, np.asarray(hidden[row]), np.asarray(next_tokens[row]))
        np.testing.assert_allclose(out[row], want, rtol=2e-4, atol=2e-4)


# -- checkpoints -----------------------------------------------------------------------------------

NAMES = {
    "fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "layers.0.input_layernorm",
    "layers.0.post_attention_layernorm", "layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj",
    "layers.0.self_attn.v_proj", "layers.0.self_attn.o_proj", "layers.0.self_attn.q_norm",
    "layers.0.self_attn.k_norm", "layers.0.mlp.gate_proj", "layers.0.mlp.up_proj",
    "layers.0.mlp.down_proj",
}  # fmt: skip


@pytest.fixture(scope="module")
def with_vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a checkpoint with a head and a vision tower, as the hub has it."""
    path = tmp_path_factory.mktemp("mtp") / "model"
    config = model_with_head()
    huggingface.save(path, config, shaken_params(config), dtype="bfloat16", hf_config_extra=ENTRIES)
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    tensors["model.visual.merger.weight"] = np.ones((2, 3), jnp.bfloat16)
    save_file(tensors, path / "model.safetensors")
    text = json.loads((path / "config.json").read_text())
    whole = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "text_config": text,
    }
    (path / "config.json").write_text(json.dumps(whole))
    return path


def test_a_checkpoint_has_the_tensors_of_the_hub(with_vision: Path) -> None:
    tensors = load_file(with_vision / "model.safetensors")
    heads = {name for name in tensors if name.startswith("mtp.")}
    assert heads == {f"mtp.{name}.weight" for name in NAMES}
    assert tensors["mtp.fc.weight"].shape == (32, 64)
    assert tensors["mtp.layers.0.self_attn.q_proj.weight"].shape == (128, 32)


@pytest.mark.parametrize("draft", [None, Ngram(), Mtp()])
def test_a_checkpoint_comes_back_as_it_was(with_vision: Path, tmp_path: Path, draft) -> None:
    """The head is read if drafts need it, and copied otherwise."""
    plain, hf_config = huggingface.load_config(with_vision)
    config = mtp.with_head(plain, draft, hf_config)
    params = huggingface.load(with_vision, config)
    assert ("mtp" in params) == isinstance(draft, Mtp)

    out = tmp_path / "out"
    huggingface.save(
        out, config, params, dtype="bfloat16", hf_config_extra=hf_config, original=with_vision
    )

    assert_same_tensors(out, with_vision)
    again, written = huggingface.load_config(tmp_path / "out")
    assert mtp.with_head(again, Mtp(), written) == mtp.with_head(plain, Mtp(), hf_config)


def test_a_head_changes_no_other_parameter_of_a_new_model() -> None:
    plain = huggingface.parse_config(ENTRIES)
    with_head = qwen.init(model_with_head(), jax.random.key(3))
    del with_head["mtp"]
    jax.tree.map(np.testing.assert_array_equal, with_head, qwen.init(plain, jax.random.key(3)))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"mtp_num_hidden_layers": 0}, "config.json has no mtp_num_hidden_layers"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers=2 is not implemented"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings=true"),
    ],
)
def test_heads_that_are_not_implemented_are_refused(entries, message: str) -> None:
    model = huggingface.parse_config(ENTRIES)
    with pytest.raises(UserError, match=message):
        mtp.with_head(model, Mtp(), ENTRIES | entries)
    with pytest.raises(UserError, match=message):
        mtp.with_head(model, Mtp(), {"text_config": ENTRIES | entries})


@pytest.mark.parametrize(
    ("arch", "message"),
    [("tiny-qwen3", "only Qwen3.5 has one"), ("tiny-qwen3.5-moe", "has experts")],
)
def test_families_without_a_head_are_refused(arch: str, message: str) -> None:
    settings = ModelConfig(arch=tiny_arch(arch))
    assert not read_base_model(settings).model.mtp
    with pytest.raises(UserError, match=message):
        read_base_model(settings, Mtp())


def test_a_new_model_has_a_new_head() -> None:
    settings = ModelConfig(arch=tiny_arch("tiny-qwen3.5"))
    assert read_base_model(settings, Mtp()).model.mtp
    assert not read_base_model(settings, Ngram()).model.mtp
