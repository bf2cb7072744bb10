"""Gemma 2 and 3, against transformers' PyTorch and against a dense definition of its windows."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import PyTree
from test_qwen import (
    assert_same_gradients,
    assert_tensors_round_trip,
    model_of_transformers,
    random_params,
)

from jzero import attention
from jzero.attention import xla
from jzero.config import AdapterConfig
from jzero.errors import UserError
from jzero.model import adapters, huggingface, peft, qwen
from jzero.model.architecture import ATTENTION, NO_WINDOW, SLIDING
from jzero.model.layers import window_in_rows
from jzero.model.rope import LinearScaling, Llama3Scaling, YarnScaling
from jzero.planning.models import KNOWN_MODELS
from jzero.sharding.mesh import make_mesh
from jzero.types import RowLayout

pytestmark = pytest.mark.usefixtures("quick_compilation")

WINDOW = 5
PLAIN = qwen.QwenConfig(
    "gemma3_text",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    tie_word_embeddings=True,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    layer_types=(SLIDING, SLIDING, ATTENTION, SLIDING),
    sliding_window=WINDOW,
    local_rope_theta=1e4,
)
# As the larger models: a stretched context, and scores that another number divides.
STRETCHED = replace(PLAIN, rope_scaling=LinearScaling(8.0), query_scale=21)
# No published model scales the rotation of windows; YaRN's ramp begins at fast pairs here.
SCALED_WINDOWS = replace(
    PLAIN,
    rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 32),
    local_rope_scaling=YarnScaling(4.0, 64, beta_fast=4.0, beta_slow=0.5),
)
# Gemma 2, with bounds that change every score and logit of a random model.
BOUNDED = replace(
    PLAIN,
    model_type="gemma2",
    rope_theta=1e4,
    layer_types=(SLIDING, ATTENTION, SLIDING, ATTENTION),
    local_rope_theta=0.0,
    query_scale=21,
    attn_logit_softcapping=0.7,
    final_logit_softcapping=1.5,
)
every_config = pytest.mark.parametrize(
    "config",
    [
        pytest.param(PLAIN, id="plain"),
        pytest.param(STRETCHED, id="stretched"),
        pytest.param(SCALED_WINDOWS, id="scaled windows"),
        pytest.param(BOUNDED, id="bounded"),
    ],
)

# Without token 0: it pads in transformers, which drops the gradient of its embedding.
TOKENS = jnp.asarray(np.random.default_rng(0).integers(1, 97, (2, 23)), jnp.int32)


@partial(jax.jit, static_argnums=0)
def logits_of(
    config: qwen.QwenConfig,
    params: qwen.Params,
    tokens: jax.Array,
    positions: jax.Array,
    segments: jax.Array,
) -> jax.Array:
    """Returns the logits of rows without a prefix."""
    layout = RowLayout(0, 1, tokens.shape[1])

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, carry: PyTree
    ) -> tuple[jax.Array, PyTree]:
        window = window_in_rows(config, layer, positions)
        cap = config.attn_logit_softcapping
        return xla.packed(q, k, v, segments, layout, window, soft_cap=cap), carry

    hidden, _ = qwen.forward(config, params, tokens, positions, attend, dtype=jnp.float32)
    return qwen.head(config, params, hidden, jnp.float32)


def logits_of_tokens(config: qwen.QwenConfig, params: qwen.Params) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    return logits_of(config, params, TOKENS, positions, jnp.ones_like(TOKENS))


# -- against transformers --------------------------------------------------------------------------


@pytest.mark.peer
@every_config
def test_logits_and_gradients_equal_those_of_transformers(
    config: qwen.QwenConfig, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    model = model_of_transformers(config)
    model.save_pretrained(tmp_path)
    tokens = torch.tensor(np.asarray(TOKENS), dtype=torch.long)
    expected = model(tokens).logits
    predictions = expected[:, :-1].reshape(-1, 97)
    torch.nn.functional.cross_entropy(predictions, tokens[:, 1:].reshape(-1)).backward()

    read, _ = huggingface.load_config(tmp_path)
    params = huggingface.load(tmp_path, read)

    def loss(params: qwen.Params) -> tuple[jax.Array, jax.Array]:
        logits = logits_of_tokens(read, params)
        logps = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.take_along_axis(logps, TOKENS[:, 1:, None], axis=-1).mean(), logits

    gradients, logits = jax.jit(jax.grad(loss, has_aux=True))(params)

    assert read == config
    np.testing.assert_allclose(logits, expected.detach().numpy(), atol=1e-4, rtol=0)
    assert_same_gradients(config, gradients, model)


@pytest.mark.peer
@every_config
def test_transformers_computes_the_same_from_an_export(
    config: qwen.QwenConfig, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    params = random_params(config)

    extra = {"max_position_embeddings": 256}
    huggingface.save(tmp_path / "model", config, params, dtype="float32", hf_config_extra=extra)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")

    assert type(model).__name__.startswith("Gemma")
    with torch.no_grad():
        expected = model(torch.tensor(np.asarray(TOKENS), dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(logits_of_tokens(config, params), expected, atol=2e-4, rtol=0)


@pytest.mark.peer
@every_config
def test_tensors_of_transformers_round_trip_byte_for_byte(
    config: qwen.QwenConfig, tmp_path: Path
) -> None:
    assert_tensors_round_trip(config, tmp_path)


@pytest.mark.peer
def test_a_model_with_a_vision_tower(tmp_path: Path) -> None:
    """The form of 4B, 12B and 27B: the tower is neither read nor lost in an export."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    text = huggingface.config_json(STRETCHED, "float32")
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
    }  # fmt: skip
    hf_config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=96
    )
    model = transformers.Gemma3ForConditionalGeneration(hf_config).float().eval()
    model.save_pretrained(tmp_path / "theirs")

    read, extra = huggingface.load_config(tmp_path / "theirs")
    params = huggingface.load(tmp_path / "theirs", read)
    huggingface.save(
        tmp_path / "ours", read, params, dtype="float32", hf_config_extra=extra,
        original=tmp_path / "theirs",
    )  # fmt: skip
    again = transformers.Gemma3ForConditionalGeneration.from_pretrained(tmp_path / "ours")

    assert read == replace(STRETCHED, model_type="gemma3")
    tokens = torch.tensor(np.asarray(TOKENS), dtype=torch.long)
    with torch.no_grad():
        expected = model(tokens).logits.numpy()
        exported = again(tokens).logits.numpy()
    np.testing.assert_allclose(logits_of_tokens(read, params), expected, atol=2e-4, rtol=0)
    np.testing.assert_array_equal(exported, expected)


@pytest.mark.peer
def test_an_adapter_is_read_by_peft(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peft_package = pytest.importorskip("peft")
    params = random_params(PLAIN)
    huggingface.save(
        tmp_path / "base", PLAIN, params, dtype="float32",
        hf_config_extra={"max_position_embeddings": 256},
    )  # fmt: skip
    adapter = AdapterConfig(rank=4, alpha=8.0)
    trained = adapters.init(PLAIN, adapter, jax.random.key(0))
    trained = jax.tree.map(lambda leaf: leaf + 0.05, trained)

    peft.save(
        tmp_path / "adapter", PLAIN, adapter, trained, base=str(tmp_path / "base"), dtype="float32"
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = peft_package.PeftModel.from_pretrained(base, tmp_path / "adapter")

    with torch.no_grad():
        expected = model(torch.tensor(np.asarray(TOKENS), dtype=torch.long)).logits.numpy()
    adapted = adapters.join(params, trained, adapter.alpha / adapter.rank)
    np.testing.assert_allclose(logits_of_tokens(PLAIN, adapted), expected, atol=5e-4, rtol=0)


# -- windows ---------------------------------------------------------------------------------------


def dense_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, is_visible: np.ndarray
) -> np.ndarray:
    """Returns the attention of q [N, H, D] to k and v [M, K, D], in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("nhd,mhd->hnm", q.astype(np.float64), k) / np.sqrt(q.shape[-1])
    scores = np.where(is_visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hnm,mhd->nhd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("window", [1, 3, 7, NO_WINDOW])
@pytest.mark.parametrize("query_block", [4, 512])
def test_packed_rows_see_the_window_of_their_own_sequence(
    window: int, query_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefix of 6 tokens with room for 8, and two slots that continue it."""
    monkeypatch.setattr(xla, "QUERY_BLOCK", query_block)
    rng = np.random.default_rng(0)
    prefix, slot = 8, 10
    layout = RowLayout(prefix, 2, slot)
    q, k, v = (
        rng.standard_normal((1, layout.tokens, heads, 8)).astype(np.float32) for heads in (4, 2, 2)
    )
    lengths = (10, 7)
    segments = np.zeros((1, layout.tokens), np.int32)
    positions = np.zeros((1, layout.tokens), np.int32)
    segments[0, :6], positions[0, :6] = 1, np.arange(6)
    sequences = []
    for number, length in enumerate(lengths):
        start = prefix + number * slot
        part = slice(start, start + length)
        segments[0, part], positions[0, part] = number + 2, 6 + np.arange(length)
        sequences.append(np.r_[0:6, part])

    packed = attention.BACKENDS["xla"]().packed
    in_rows = attention.Window(jnp.int32(window), jnp.asarray(positions))
    out = packed(q, k, v, jnp.asarray(segments), layout, in_rows)

    for places in sequences:
        n = len(places)
        distance = np.arange(n)[:, None] - np.arange(n)
        is_visible = (distance >= 0) & (distance < window)
        expected = dense_attention(q[0, places], k[0, places], v[0, places], is_visible)
        np.testing.assert_allclose(out[0, places], expected, atol=1e-5)


@pytest.mark.parametrize("window", [1, 6, 11, NO_WINDOW])
def test_decoding_sees_the_window_of_every_slot(window: int) -> None:
    """Four slots in two blocks; the slots of the first block share their first two pages."""
    rng = np.random.default_rng(0)
    page, pages = 4, 5
    lengths = np.array([17, 9, 20, 1], np.int32)
    table = np.arange(1, 1 + 4 * pages).reshape(4, pages).astype(np.int32)
    table[1, :2] = table[0, :2]
    pools = [rng.standard_normal((2, 1 + 4 * pages, page, 8)).astype(np.float32) for _ in "kv"]
    q = rng.standard_normal((4, 4, 8)).astype(np.float32)

    out = xla.paged(
        jnp.asarray(q), jnp.asarray(pools[0]), jnp.asarray(pools[1]), jnp.asarray(table),
        jnp.asarray(lengths), jnp.asarray([2, 0], jnp.int32), 2, jnp.int32(window),
    )  # fmt: skip

    for slot, length in enumerate(lengths):
        k, v = (pool[:, table[slot]].reshape(2, -1, 8).swapaxes(0, 1)[:length] for pool in pools)
        is_visible = np.arange(length) > length - 1 - window
        expected = dense_attention(q[slot : slot + 1], k, v, is_visible[None])
        np.testing.assert_allclose(out[slot], expected[0], atol=1e-5)


def test_a_packed_sequence_is_as_alone() -> None:
    """Two sequences in one row, both longer than the window."""
    params = random_params(STRETCHED)
    lengths = (12, 9)
    tokens = jnp.concatenate([TOKENS[0, :12], TOKENS[1, :9]])[None]
    positions = jnp.concatenate([jnp.arange(n) for n in lengths])[None]
    segments = jnp.concatenate([jnp.full(n, i + 1) for i, n in enumerate(lengths)])[None]

    together = logits_of(STRETCHED, params, tokens, positions, segments)[0]
    alone = logits_of_tokens(STRETCHED, params)

    np.testing.assert_allclose(together[:12], alone[0, :12], atol=1e-4)
    np.testing.assert_allclose(together[12:], alone[1, :9], atol=1e-4)


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (PLAIN, {"sliding_window": 3}),
        (PLAIN, {"local_rope_theta": 50.0}),
        (PLAIN, {"query_scale": 64}),
        (BOUNDED, {"sliding_window": 3}),
        (BOUNDED, {"query_scale": 64}),
        (BOUNDED, {"attn_logit_softcapping": 0.0}),
        (BOUNDED, {"final_logit_softcapping": 0.0}),
    ],
)
def test_every_entry_matters(config: qwen.QwenConfig, change: dict[str, float]) -> None:
    """Or the comparisons above would compare nothing."""
    params = random_params(config)

    changed = logits_of_tokens(replace(config, **change), params)

    assert np.abs(logits_of_tokens(config, params) - changed).max() > 1e-2


@pytest.mark.parametrize(
    ("needs", "missing"),
    [({"window": 512}, "sliding windows"), ({"soft_cap": 50.0}, "bounded scores")],
)
def test_a_backend_without_windows_or_soft_caps_is_refused(
    needs: dict[str, float], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernel that rotates, writes and attends in one call is on a TPU."""
    without = attention.tpu_with_fused_decoding
    assert not without().has_windows
    monkeypatch.setitem(attention.BACKENDS, "without", without)
    mesh = make_mesh(jax.devices()[:1], {"slots": 1, "tensor": 1})
    with pytest.raises(UserError) as raised:
        attention.choose("without", mesh, **needs)
    assert f"have no {missing}, which this model needs" in str(raised.value)
    assert "leave model.attention out, or set model.attention=xla" in str(raised.value)


# -- config.json -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in KNOWN_MODELS if n.startswith("google/")])
def test_config_round_trips(name: str) -> None:
    model = KNOWN_MODELS[name]

    written = json.loads(json.dumps(huggingface.config_json(model, "bfloat16")))

    assert huggingface.parse_config(written) == model


def test_the_file_of_gemma_2_is_read() -> None:
    """The one of google/gemma-2-2b, which does not list the kinds of its layers."""
    hf_config = {
        "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "vocab_size": 256_000,
        "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "query_pre_attn_scalar": 256, "sliding_window": 4096, "rope_theta": 10000.0,
        "rms_norm_eps": 1e-06, "attention_bias": False, "cache_implementation": "hybrid",
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }  # fmt: skip

    assert huggingface.parse_config(hf_config) == KNOWN_MODELS["google/gemma-2-2b"]


def test_the_old_form_is_read() -> None:
    """The file of google/gemma-3-4b-pt names only what differs from the defaults."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34,
        "model_type": "gemma3_text", "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }  # fmt: skip
    hf_config = {
        "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text, "vision_config": {"hidden_size": 1152}, "mm_tokens_per_image": 256,
    }  # fmt: skip

    assert huggingface.parse_config(hf_config) == KNOWN_MODELS["google/gemma-3-4b-pt"]


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"hidden_activation": "gelu"}, "hidden_activation=gelu: only gelu_pytorch_tanh"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 on gemma3_text"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 on gemma3_text"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=true"),
        ({"attention_bias": True}, "attention_bias=true on gemma3"),
        ({"layer_types": 4 * ["chunked_attention"]}, "layer_types with chunked_attention"),
        ({"sliding_window": None}, "no sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_what_the_layer_does_not_compute_is_refused(entries: dict, reason: str) -> None:
    hf_config = {**huggingface.config_json(PLAIN, "float32"), **entries}
    with pytest.raises(UserError) as raised:
        huggingface.parse_config(hf_config)
    assert reason in str(raised.value)


def test_damaged_ropes_are_refused() -> None:
    hf_config = huggingface.config_json(PLAIN, "float32")
    hf_config["rope_parameters"]["sliding_attention"]["rope_theta"] = "many"
    with pytest.raises(UserError, match="rope_local_base_freq=many is not a number"):
        huggingface.parse_config(hf_config)
