"""The model against transformers' PyTorch, and the chunked log-probs against log_softmax."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PyTree
from safetensors.numpy import load_file

from jzero.model import huggingface, layers, logprobs, qwen

if TYPE_CHECKING:
    import transformers

pytestmark = pytest.mark.usefixtures("quick_compilation")

QWEN2 = qwen.QwenConfig(
    model_type="qwen2",
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    tie_word_embeddings=True,
    rope_theta=10000.0,
    rms_norm_eps=1e-6,
)
CONFIGS = {
    "qwen2-tied": QWEN2,
    "qwen2-untied": replace(
        QWEN2, num_hidden_layers=2, tie_word_embeddings=False, rope_theta=1000000.0
    ),
    "qwen3-tied": replace(
        QWEN2, model_type="qwen3", num_hidden_layers=2, head_dim=24, rope_theta=1000000.0
    ),
}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 97, (2, 11)), jnp.int32)
POSITIONS = jnp.tile(jnp.arange(11), (2, 1))

every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


# -- slow definitions and random values ------------------------------------------------------------


def causal(
    q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, carry: PyTree
) -> tuple[jax.Array, PyTree]:
    """Computes dense causal attention of q [B, T, H, D] and k, v [B, T, K, D]."""
    _, T, H, D = q.shape
    G = H // k.shape[2]
    k = jnp.repeat(k, G, axis=2)
    v = jnp.repeat(v, G, axis=2)
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * D**-0.5
    scores = jnp.where(np.tri(T, dtype=bool), scores, -1e30)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v), carry


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def logits_of(
    config: qwen.QwenConfig,
    params: qwen.Params,
    dtype: DTypeLike = jnp.float32,
    remat: str = "none",
) -> jax.Array:
    """Returns the logits of TOKENS under dense attention."""
    hidden, _ = qwen.forward(config, params, TOKENS, POSITIONS, causal, dtype=dtype, remat=remat)
    assert hidden.dtype == dtype
    return qwen.head(config, params, hidden, dtype)


@functools.partial(jax.jit, static_argnums=(0, 2))
def gradients_and_logits(
    config: qwen.QwenConfig, params: qwen.Params, remat: str
) -> tuple[qwen.Params, jax.Array]:
    """Returns the gradients of the mean cross-entropy of TOKENS, and their logits."""

    def loss(params: qwen.Params) -> tuple[jax.Array, jax.Array]:
        logits = logits_of(config, params, jnp.float32, remat)
        logps = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.take_along_axis(logps, TOKENS[:, 1:, None], axis=-1).mean(), logits

    return jax.grad(loss, has_aux=True)(params)


def random_params(config: qwen.QwenConfig) -> qwen.Params:
    """Returns random parameters: every leaf matters, and norms are around 1."""
    rng = np.random.default_rng(0)

    def random_leaf(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        mean = 1.0 if "norm" in path[-1].key else 0.0
        return jnp.asarray(mean + 0.1 * rng.standard_normal(leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(random_leaf, qwen.abstract(config))


def relative_error(found: ArrayLike, expected: ArrayLike) -> float:
    found, expected = np.asarray(found), np.asarray(expected)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


# -- the model -------------------------------------------------------------------------------------


def model_of_transformers(config: qwen.QwenConfig) -> "transformers.PreTrainedModel":
    """Returns transformers' own model, in which every weight is random, biases and norms too."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    hf_config = transformers.AutoConfig.for_model(**huggingface.config_json(config, "float32"))
    model = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager")
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model.float().eval()


@pytest.mark.peer
@every_config
def test_logits_and_gradients_equal_those_of_transformers(
    config: qwen.QwenConfig, tmp_path: Path
) -> None:
    assert_equal_to_transformers(config, tmp_path)


def assert_equal_to_transformers(config: qwen.QwenConfig, tmp_path: Path) -> None:
    """Compares logits and gradients of a random model of transformers, read from its checkpoint."""
    torch = pytest.importorskip("torch")
    model = model_of_transformers(config)
    model.save_pretrained(tmp_path)
    tokens = torch.tensor(np.asarray(TOKENS), dtype=torch.long)
    expected_logits = model(tokens).logits
    predictions = expected_logits[:, :-1].reshape(-1, 97)
    torch.nn.functional.cross_entropy(predictions, tokens[:, 1:].reshape(-1)).backward()

    read_config, _ = huggingface.load_config(tmp_path)
    params = huggingface.load(tmp_path, config)
    gradients, logits = gradients_and_logits(config, params, "none")

    assert read_config == config
    np.testing.assert_allclose(logits, expected_logits.detach().numpy(), atol=1e-4, rtol=0)
    assert_same_gradients(config, gradients, model)


def assert_same_gradients(
    config: qwen.QwenConfig, gradients: qwen.Params, model: "transformers.PreTrainedModel"
) -> None:
    """Compares the gradient of every tensor with the one of transformers' model."""
    leaves = huggingface.flatten(gradients)
    weights = dict(model.named_parameters())
    compared = set()
    for leaf, tensors in huggingface.checkpoint_tensors(config).items():
        for tensor in tensors:
            stacked = np.asarray(leaves[leaf])
            gradient = stacked if tensor.layer is None else stacked[tensor.layer]
            expected = weights[tensor.name].grad.numpy()
            assert relative_error(tensor.to_stored(gradient), expected) < 1e-3, tensor.name
            compared.add(tensor.name)
    assert compared == set(weights)


def assert_tensors_round_trip(config: qwen.QwenConfig, tmp_path: Path) -> None:
    """Writes the tensors of a random model of transformers again, and compares every byte."""
    model_of_transformers(config).save_pretrained(tmp_path / "theirs")

    read, hf_config = huggingface.load_config(tmp_path / "theirs")
    params = huggingface.load(tmp_path / "theirs", read)
    huggingface.save(tmp_path / "ours", read, params, dtype="float32", hf_config_extra=hf_config)

    theirs = load_file(tmp_path / "theirs/model.safetensors")
    ours = load_file(tmp_path / "ours/model.safetensors")
    assert read == config == huggingface.load_config(tmp_path / "ours")[0]
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].tobytes() == tensor.tobytes(), name


@every_config
def test_init_abstract_and_axes_have_one_tree(config: qwen.QwenConfig) -> None:
    def shape_and_dtype(leaf: jax.Array | jax.ShapeDtypeStruct) -> tuple:
        return leaf.shape, leaf.dtype

    def is_axes(node: object) -> bool:
        return isinstance(node, tuple)

    params = jax.jit(qwen.init, static_argnums=0)(config, jax.random.key(0))
    abstract = qwen.abstract(config)
    axes = qwen.logical_axes(config)

    assert jax.tree.map(shape_and_dtype, params) == jax.tree.map(shape_and_dtype, abstract)
    ranks = jax.tree.map(lambda leaf: leaf.ndim, params)
    assert ranks == jax.tree.map(len, axes, is_leaf=is_axes)
    assert qwen.num_params(config) == sum(leaf.size for leaf in jax.tree.leaves(params))


@every_config
def test_layers_have_different_first_values(config: qwen.QwenConfig) -> None:
    params = jax.jit(qwen.init, static_argnums=0)(config, jax.random.key(0))

    first, second = params["layers"]["q"][:2]

    assert 0.015 < float(first.std()) < 0.025
    assert not np.allclose(first, second)


@functools.cache
def gradients_with_remat(remat: str) -> qwen.Params:
    """Returns the gradients of one model. The tests of all values of `remat` share a reference."""
    config = CONFIGS["qwen3-tied"]
    gradients, _ = gradients_and_logits(config, random_params(config), remat)
    return gradients


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_remat_changes_no_gradient(remat: str) -> None:
    expected = gradients_with_remat("none")

    gradients = gradients_with_remat(remat)

    def assert_close(found: jax.Array, expected: jax.Array) -> None:
        np.testing.assert_allclose(found, expected, atol=1e-6, rtol=1e-4)

    jax.tree.map(assert_close, gradients, expected)


def test_carry_is_threaded_through_the_layers() -> None:
    config = CONFIGS["qwen2-tied"]

    def record_keys(
        q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, keys: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return q, keys.at[layer].set(k)

    @jax.jit
    def keys_of_layers(params: qwen.Params) -> jax.Array:
        keys = jnp.zeros((3, *TOKENS.shape, 2, 16))
        _, keys = qwen.forward(
            config, params, TOKENS, POSITIONS, record_keys, keys, dtype=jnp.float32
        )
        return keys

    keys = keys_of_layers(random_params(config))

    norms = np.linalg.norm(keys.reshape(3, -1), axis=1)
    assert (norms > 0).all()
    assert len(set(norms.tolist())) == 3


def test_bfloat16_is_close_to_float32() -> None:
    config = CONFIGS["qwen2-untied"]
    params = random_params(config)

    logits = logits_of(config, params, jnp.bfloat16)

    assert logits.dtype == jnp.float32
    assert relative_error(logits, logits_of(config, params)) < 0.05


# -- config.json -----------------------------------------------------------------------------------


def test_config_round_trips_and_keeps_extra_entries() -> None:
    config = CONFIGS["qwen3-tied"]

    written = huggingface.config_json(config, "bfloat16", {"eos_token_id": 5})

    assert huggingface.parse_config(written) == config
    assert written["eos_token_id"] == 5


def test_a_config_of_transformers_4_is_read() -> None:
    config = CONFIGS["qwen3-tied"]
    hf_config = huggingface.config_json(config, "bfloat16")

    del hf_config["rope_parameters"]
    hf_config["rope_scaling"] = None

    assert huggingface.parse_config(hf_config) == config


def test_head_dim_follows_from_hidden_size_where_config_lacks_it() -> None:
    hf_config = huggingface.config_json(CONFIGS["qwen2-tied"], "bfloat16")

    del hf_config["head_dim"]

    assert huggingface.parse_config(hf_config).head_dim == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt_oss"}, "model_type='gpt_oss'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type=longrope"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_type=linear"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"attention_bias": True}, "attention_bias=true on qwen3"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
    ids=str,
)
def test_config_refuses_what_is_not_implemented(change: dict[str, object], message: str) -> None:
    hf_config = huggingface.config_json(CONFIGS["qwen3-tied"], "float32") | change

    with pytest.raises(ValueError, match=message):
        huggingface.parse_config(hf_config)


def test_config_names_what_is_missing() -> None:
    hf_config = huggingface.config_json(CONFIGS["qwen2-tied"], "float32")
    del hf_config["intermediate_size"]
    del hf_config["vocab_size"]

    with pytest.raises(ValueError, match="lacks vocab_size, intermediate_size"):
        huggingface.parse_config(hf_config)


# -- log-probabilities in chunks -------------------------------------------------------------------

Scores = tuple[jax.Array, jax.Array]  # log-probs and entropies, [B, T] each


def naive_token_logps(
    config: qwen.QwenConfig, params: qwen.Params, hidden: jax.Array, temperature: float
) -> Scores:
    """Computes log-probs of TOKENS, and entropies, from all logits at once."""
    logps = jax.nn.log_softmax(qwen.head(config, params, hidden, jnp.float32) / temperature)
    logps_of_tokens = jnp.take_along_axis(logps, TOKENS[..., None], axis=-1)[..., 0]
    entropy = -(jnp.exp(logps) * logps).sum(-1)
    return logps_of_tokens, entropy


def scores_and_gradients(
    score: Callable[[qwen.Params, jax.Array], Scores], params: qwen.Params, hidden: jax.Array
) -> tuple[Scores, tuple[qwen.Params, jax.Array]]:
    """Returns what `score` returns, and the gradients of a random weighting of all of it."""
    weights = jax.random.normal(jax.random.key(4), (2, *TOKENS.shape))

    def loss(params: qwen.Params, hidden: jax.Array) -> tuple[jax.Array, Scores]:
        logps, entropy = score(params, hidden)
        return (weights[0] * logps + weights[1] * entropy).sum(), (logps, entropy)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    gradients, scores = gradient(params, hidden)
    return scores, gradients


@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        ("qwen2-tied", 7),
        ("qwen2-untied", 7),
        ("qwen2-tied", 10**6),
        ("qwen2-untied", 10**6),
        ("qwen2-tied", 1),
        ("qwen2-untied", 1),
    ],
)
def test_token_logps_equal_log_softmax(name: str, chunk: int) -> None:
    config = CONFIGS[name]
    params = random_params(config)
    hidden = jax.random.normal(jax.random.key(3), (*TOKENS.shape, 64))

    def in_chunks(params: qwen.Params, hidden: jax.Array) -> Scores:
        return logprobs.token_logps(
            config, params, hidden, TOKENS, temperature=0.7, chunk=chunk, dtype=jnp.float32
        )

    def at_once(params: qwen.Params, hidden: jax.Array) -> Scores:
        return naive_token_logps(config, params, hidden, temperature=0.7)

    scores, gradients = scores_and_gradients(in_chunks, params, hidden)

    expected_scores, expected_gradients = scores_and_gradients(at_once, params, hidden)
    for found, expected in zip(scores, expected_scores, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5, rtol=1e-5)

    def assert_close(found: jax.Array, expected: jax.Array) -> None:
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)

    jax.tree.map(assert_close, gradients, expected_gradients)


@pytest.mark.parametrize(("chunk", "holds_all"), [(8, False), (10**6, True)])
def test_the_gradient_in_chunks_never_holds_all_logits(chunk: int, holds_all: bool) -> None:
    config = replace(CONFIGS["qwen2-tied"], vocab_size=4099)
    params = qwen.abstract(config)
    hidden = jax.ShapeDtypeStruct((2, 512, 64), jnp.float32)
    tokens = jax.ShapeDtypeStruct((2, 512), jnp.int32)

    def loss(params: qwen.Params, hidden: jax.Array, tokens: jax.Array) -> jax.Array:
        logps, entropy = logprobs.token_logps(
            config, params, hidden, tokens, temperature=1.0, chunk=chunk, dtype=jnp.float32
        )
        return logps.sum() + entropy.sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, hidden, tokens).compile()

    memory = compiled.memory_analysis()
    bytes_of_all_logits = 2 * 512 * 4099 * 4
    assert memory is not None
    assert (memory.temp_size_in_bytes >= bytes_of_all_logits) == holds_all


def test_the_sums_over_the_vocabulary_are_made_once() -> None:
    """A chunk takes exp of its logits once forward and once backward."""
    config = CONFIGS["qwen2-tied"]
    params = random_params(config)
    hidden = jnp.ones((*TOKENS.shape, 64))

    def loss(hidden: jax.Array) -> jax.Array:
        logps, _ = logprobs.token_logps(
            config, params, hidden, TOKENS, temperature=1.0, chunk=8, dtype=jnp.float32
        )
        return logps.sum()

    jaxpr = str(jax.make_jaxpr(jax.grad(loss))(hidden))

    assert jaxpr.count("= exp ") == 2


# -- RoPE ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_rotation_by_a_product_is_the_rotation_of_pairs(dtype: DTypeLike) -> None:
    config = CONFIGS["qwen2-tied"]
    heads = jax.random.normal(jax.random.key(0), (*TOKENS.shape, 4, 16), dtype)
    weights = jax.random.normal(jax.random.key(1), heads.shape)
    rope = layers.rotary(config, POSITIONS)

    def output_and_gradient(rope: layers.Rotary) -> tuple[jax.Array, jax.Array]:
        def weighted(heads: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = layers.rotate(heads, rope)
            return (weights * out).sum(), out

        gradient, out = jax.jit(jax.grad(weighted, has_aux=True))(heads)
        return out, gradient

    found = output_and_gradient(rope._replace(by_product=True))

    expected = output_and_gradient(rope)
    # One unit of the last bit, where a sum of products is rounded once or twice.
    tolerance = 1e-6 if dtype == jnp.float32 else 0.02
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        np.testing.assert_allclose(
            ours.astype(jnp.float32), theirs.astype(jnp.float32), atol=tolerance, rtol=tolerance
        )
