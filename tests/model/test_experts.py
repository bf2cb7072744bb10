"""Layers with experts against transformers, and on several devices against one."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_qwen import (
    POSITIONS,
    QWEN2,
    TOKENS,
    assert_tensors_round_trip,
    causal,
    gradients_and_logits,
    logits_of,
    model_of_transformers,
    random_params,
    relative_error,
)

from jzero.config import AdapterConfig
from jzero.errors import UserError
from jzero.model import adapters, experts, huggingface, qwen
from jzero.model.huggingface import parse_config

pytestmark = pytest.mark.usefixtures("quick_compilation")

MOE = replace(
    QWEN2,
    model_type="qwen3_moe",
    hidden_size=32,
    num_hidden_layers=2,
    tie_word_embeddings=False,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    norm_topk_prob=True,
)
CONFIGS = {
    "renormalized": MOE,
    "plain": replace(MOE, norm_topk_prob=False, num_experts_per_tok=3, tie_word_embeddings=True),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


# -- transformers ----------------------------------------------------------------------------------


@pytest.mark.peer
@every_config
def test_logits_and_gradients_equal_those_of_transformers(
    config: qwen.QwenConfig, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    model = model_of_transformers(config)
    model.save_pretrained(tmp_path)
    tokens = torch.tensor(np.asarray(TOKENS), dtype=torch.long)
    expected_logits = model(tokens).logits
    predictions = expected_logits[:, :-1].reshape(-1, config.vocab_size)
    torch.nn.functional.cross_entropy(predictions, tokens[:, 1:].reshape(-1)).backward()

    read_config, _ = huggingface.load_config(tmp_path)
    params = huggingface.load(tmp_path, config)
    gradients, logits = gradients_and_logits(config, params, "none")

    assert read_config == config
    np.testing.assert_allclose(logits, expected_logits.detach().numpy(), atol=1e-4, rtol=0)
    expected = {name: weight.grad.numpy() for name, weight in model.named_parameters()}
    # In memory transformers has the gate and the up-projection of all experts in one tensor.
    compared = set()
    for leaf, tensors in huggingface.checkpoint_tensors(config).items():
        gradient = np.asarray(huggingface.flatten(gradients)[leaf])
        for tensor in tensors:
            name, row = tensor.name, slice(None)
            if tensor.expert is not None:
                which = leaf.split("_")[1]
                head = name[: name.index("experts.") + len("experts.")]
                name = head + ("down_proj" if which == "down" else "gate_up_proj")
                F = config.moe_intermediate_size
                row = {"gate": slice(0, F), "up": slice(F, 2 * F), "down": slice(None)}[which]
            theirs = expected[name]
            theirs = theirs if tensor.expert is None else theirs[tensor.expert][row]
            compared.add(name)
            ours = tensor.to_stored(tensor.of(gradient))
            if np.abs(theirs).max() == 0:  # an expert without tokens
                assert np.abs(ours).max() == 0
            else:
                assert relative_error(ours, theirs) < 1e-3, tensor.name
    assert compared == set(expected)


@pytest.mark.peer
@every_config
def test_transformers_computes_the_same_from_an_export(
    config: qwen.QwenConfig, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    params = random_params(config)

    huggingface.save(
        tmp_path / "model", config, params, dtype="float32", hf_config_extra={"eos_token_id": 5}
    )
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )

    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        expected = model(torch.tensor(np.asarray(TOKENS), dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(logits_of(config, params), expected, atol=1e-4, rtol=0)


@pytest.mark.peer
def test_tensors_of_transformers_round_trip_byte_for_byte(tmp_path: Path) -> None:
    assert_tensors_round_trip(MOE, tmp_path)


# -- config.json -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]: a model whose layers are partly dense"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2: only 1"),
        ({"num_experts": 0, "num_local_experts": 0}, "num_experts=0: such a model is dense"),
        ({"num_experts": 4}, "num_experts=4 and num_local_experts=8"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 is not between 1 and num_experts=8"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok=0 is not between 1"),
        ({"attention_bias": True}, "attention_bias=true on qwen3_moe"),
        ({"moe_intermediate_size": "x"}, "moe_intermediate_size=x is not a whole number"),
    ],
)
def test_what_the_layer_does_not_follow_is_refused(changes: dict, message: str) -> None:
    entries = huggingface.config_json(MOE, "float32") | changes

    with pytest.raises(UserError, match=message):
        parse_config(entries)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_the_number_of_experts_has_two_names(name: str) -> None:
    entries = huggingface.config_json(MOE, "float32")
    other = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}[name]
    del entries[other]

    assert parse_config(entries) == MOE


def test_a_dense_config_has_no_entry_of_experts() -> None:
    entries = huggingface.config_json(replace(QWEN2, model_type="qwen3"), "float32")

    assert not [name for name in entries if "expert" in name or "moe" in name or "topk" in name]


# -- tokens and experts ----------------------------------------------------------------------------


def run(
    params: qwen.Params, is_token: jax.Array, placement: experts.Placement
) -> tuple[jax.Array, jax.Array]:
    """Returns the hidden states of TOKENS and the load of every expert."""
    carry = experts.start(MOE, None, is_token, placement)
    hidden, carry = qwen.forward(
        MOE, params, TOKENS, POSITIONS, causal, carry, dtype=jnp.float32, remat="full"
    )
    return hidden, carry.load


@pytest.mark.parametrize("product", ["blocks", "ragged"])
def test_padding_goes_to_no_expert_and_changes_no_token(product: str) -> None:
    params = random_params(MOE)
    is_token = jnp.arange(11)[None] < jnp.array([[11], [7]])
    everywhere = jnp.ones_like(is_token)
    placement = experts.Placement(product)

    hidden, load = run(params, is_token, placement)
    all_hidden, all_load = run(params, everywhere, placement)

    # Tokens see only those before them, so that the padding's own states matter to none of them.
    np.testing.assert_allclose(hidden[is_token], all_hidden[is_token], atol=1e-5)
    assert load.sum(axis=1).tolist() == [18 * 2, 18 * 2]
    assert all_load.sum(axis=1).tolist() == [22 * 2, 22 * 2]


def test_a_token_goes_to_its_most_probable_experts() -> None:
    params = random_params(MOE)
    h = jnp.asarray(np.random.default_rng(0).standard_normal((30, 32)), jnp.float32)
    router = params["layers"]["router"][0]

    weights, chosen = experts.route(h, router, 2, True)
    plain, _ = experts.route(h, router, 2, False)

    probabilities = np.exp(np.asarray(h, np.float64) @ np.asarray(router, np.float64))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    best = np.argsort(-probabilities, axis=1)[:, :2]
    np.testing.assert_array_equal(chosen, best)
    of_best = np.take_along_axis(probabilities, best, axis=1)
    np.testing.assert_allclose(plain, of_best, rtol=1e-5)
    np.testing.assert_allclose(weights, of_best / of_best.sum(axis=1, keepdims=True), rtol=1e-5)
    np.testing.assert_array_equal(experts.count(chosen, 8), np.bincount(best.ravel(), minlength=8))


def test_the_router_computes_in_fp32() -> None:
    """In bf16 the two logits would be equal, and the first expert would be chosen."""
    h = jnp.array([[1.0, 2**-9]], jnp.bfloat16)
    router = jnp.array([[1.0, 1.0], [0.0, 1.0]], jnp.bfloat16)

    _, chosen = experts.route(h, router, 1, True)

    assert chosen.tolist() == [[1]]


# -- adapters --------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["router", "up"])
def test_an_adapter_on_the_router_is_refused(target: str) -> None:
    with pytest.raises(UserError, match=f"qwen3_moe has no linear layer {target}; it has q, k, v"):
        adapters.check(MOE, AdapterConfig(rank=2, targets=(target,)))
