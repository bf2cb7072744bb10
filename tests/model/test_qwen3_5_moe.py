"""Qwen3.5 with experts: our model against transformers, and both forms of its checkpoints."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file
from tiny import assert_same_tensors, hybrid_forward

from jzero.errors import UserError
from jzero.model import adapters, huggingface, qwen
from jzero.planning.models import KNOWN_MODELS

pytestmark = pytest.mark.usefixtures("quick_compilation")

TEXT_ENTRIES = {
    **{name: value for name, value in tiny.HYBRID_ENTRIES.items() if name != "intermediate_size"},
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
    "tie_word_embeddings": False,
}
TOKENS = 80  # more than a chunk of the delta net


@cache
def torch_model() -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3_5MoeTextConfig(**TEXT_ENTRIES)
    model = transformers.Qwen3_5MoeForCausalLM(config).to(torch.float32).eval()
    return tiny.shaken(model)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a checkpoint that `transformers` has written."""
    path = tmp_path_factory.mktemp("qwen3_5_moe")
    torch_model().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def fused(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the same checkpoint in the form of the hub: all experts of a layer in two tensors."""
    path = tmp_path_factory.mktemp("fused")
    stored = load_file(directory / "model.safetensors")
    tensors = {name: tensor for name, tensor in stored.items() if ".experts." not in name}
    for layer in range(TEXT_ENTRIES["num_hidden_layers"]):
        mlp = f"model.layers.{layer}.mlp.experts"
        tensors[f"{mlp}.gate_up_proj"] = np.stack(
            [
                np.concatenate(
                    [stored[f"{mlp}.{expert}.{part}_proj.weight"] for part in ("gate", "up")]
                )
                for expert in range(TEXT_ENTRIES["num_experts"])
            ]
        )
        tensors[f"{mlp}.down_proj"] = np.stack(
            [
                stored[f"{mlp}.{expert}.down_proj.weight"]
                for expert in range(TEXT_ENTRIES["num_experts"])
            ]
        )
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text((directory / "config.json").read_text())
    return path


def random_tokens(rows: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, TEXT_ENTRIES["vocab_size"], (rows, TOKENS))


def test_logits_and_gradients_are_those_of_transformers(fused: Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch_model()
    model.zero_grad()
    tokens = random_tokens(2)
    expected = model(input_ids=torch.from_numpy(tokens)).logits
    weights = np.random.default_rng(1).normal(size=expected.shape).astype(np.float32)
    (expected * torch.from_numpy(weights)).sum().backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}

    config, _ = huggingface.load_config(fused)
    params = huggingface.load(fused, config)

    def loss(params: qwen.Params) -> tuple[jax.Array, jax.Array]:
        logits = hybrid_forward(config, params, tokens, jnp.ones_like(tokens))
        return jnp.sum(logits * weights), logits

    (_, logits), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    np.testing.assert_allclose(logits, expected.detach().numpy(), rtol=1e-4, atol=1e-4)
    leaves = huggingface.flatten(gradient)
    parts: dict[str, list[np.ndarray]] = {}
    for leaf, layers in huggingface.checkpoint_tensors(config).items():
        for tensor in layers:
            stored = tensor.to_stored(tensor.of(np.asarray(leaves[leaf])))
            parts.setdefault(tensor.name, []).append(stored)
    assert parts.keys() == gradients.keys()
    for name, stored in parts.items():
        ours = np.concatenate(stored, axis=1) if len(stored) > 1 else stored[0]
        assert np.abs(ours - gradients[name]).max() <= 1e-3 * np.abs(gradients[name]).max(), name


def test_both_forms_of_a_checkpoint_are_one_model(directory: Path, fused: Path) -> None:
    config, _ = huggingface.load_config(directory)

    single, whole = (huggingface.load(path, config) for path in (directory, fused))

    jax.tree.map(np.testing.assert_array_equal, single, whole)
    assert whole["layers"]["experts_gate"].shape == (4, 6, 32, 24)


@pytest.mark.parametrize("form", ["directory", "fused"])
def test_tensors_round_trip_byte_for_byte_in_the_form_they_had(
    form: str, directory: Path, fused: Path, tmp_path: Path
) -> None:
    original = {"directory": directory, "fused": fused}[form]
    config, hf_config = huggingface.load_config(original)
    params = huggingface.load(original, config)

    out = tmp_path / "out"
    huggingface.save(
        out, config, params, dtype="float32", hf_config_extra=hf_config, original=original
    )

    assert_same_tensors(out, original)
    assert huggingface.load_config(tmp_path / "out")[0] == config


def test_an_export_gives_transformers_the_same_logits(fused: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config, hf_config = huggingface.load_config(fused)
    params = huggingface.load(fused, config)

    huggingface.save(tmp_path / "out", config, params, dtype="float32", hf_config_extra=hf_config)

    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(again).__name__ == "Qwen3_5MoeForCausalLM"
    tokens = torch.from_numpy(random_tokens(1))
    with torch.no_grad():
        expected, actual = torch_model()(input_ids=tokens).logits, again(input_ids=tokens).logits
    np.testing.assert_array_equal(actual.numpy(), expected.numpy())


def test_a_checkpoint_with_a_vision_tower_comes_back_as_it_was(fused: Path, tmp_path: Path) -> None:
    before = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(fused / "model.safetensors").items()
    }
    before["model.visual.patch_embed.weight"] = np.full((3, 5), 0.5, np.float32)
    (tmp_path / "vision").mkdir()
    save_file(before, tmp_path / "vision/model.safetensors")
    whole = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "text_config": json.loads((fused / "config.json").read_text()),
    }
    (tmp_path / "vision/config.json").write_text(json.dumps(whole))
    config, hf_config = huggingface.load_config(tmp_path / "vision")
    params = huggingface.load(tmp_path / "vision", config)

    huggingface.save(
        tmp_path / "out",
        config,
        params,
        dtype="float32",
        hf_config_extra=hf_config,
        original=tmp_path / "vision",
    )

    assert_same_tensors(tmp_path / "out", tmp_path / "vision")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["text_config"]["model_type"] == "qwen3_5_moe_text"
    assert huggingface.load_config(tmp_path / "out")[0] == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob=false"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7"),
        ({"num_experts": 0}, "its model_type is qwen3_5_text"),
        ({"attention_bias": True}, "attention_bias=true"),
    ],
)
def test_what_the_layers_do_not_compute_is_refused(change: dict, message: str) -> None:
    entries = {**TEXT_ENTRIES, "model_type": "qwen3_5_moe_text"}

    with pytest.raises(UserError, match=message):
        huggingface.parse_config(entries | change)


def test_an_adapter_is_on_the_mixers_and_all_mlps() -> None:
    config = huggingface.parse_config({**TEXT_ENTRIES, "model_type": "qwen3_5_moe_text"})

    assert set(adapters.linear_layers(config)) == {
        "q", "k", "v", "o", "delta_qkv", "delta_z", "delta_out",
        "shared_gate", "shared_up", "shared_down", "experts_gate", "experts_up", "experts_down",
    }  # fmt: skip


def test_sizes_of_the_hub() -> None:
    model = KNOWN_MODELS["Qwen/Qwen3.5-35B-A3B"]

    # Of the language model alone, without vision and MTP.
    assert 34e9 < qwen.num_params(model) < 36e9
