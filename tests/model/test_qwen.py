"""The model against transformers' PyTorch, and the chunked log-probs against log_softmax."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jzero.model import huggingface, logprobs, qwen

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIGS = {
    "qwen2-tied": qwen.QwenConfig("qwen2", 97, 64, 96, 3, 4, 2, 16, True, 10000.0, 1e-6),
    "qwen2-untied": qwen.QwenConfig("qwen2", 97, 64, 96, 2, 4, 2, 16, False, 1000000.0, 1e-6),
    "qwen3-tied": qwen.QwenConfig("qwen3", 97, 64, 96, 2, 4, 2, 24, True, 1000000.0, 1e-6),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 97, (2, 11)), jnp.int32)
POSITIONS = jnp.tile(jnp.arange(11), (2, 1))


def causal(q, k, v, layer, carry):
    """Dense causal attention, q [B,T,H,D], k and v [B,T,K,D]: the slow definition."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(np.tri(q.shape[1], dtype=bool), scores, -1e30)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v), carry


def logits_of(config, params, **options):
    hidden, _ = qwen.forward(
        config, params, TOKENS, POSITIONS, causal, dtype=jnp.float32, **options
    )
    return qwen.head(config, params, hidden, jnp.float32)


def nll(config, params, **options):
    logps = jax.nn.log_softmax(logits_of(config, params, **options)[:, :-1])
    return -jnp.take_along_axis(logps, TOKENS[:, 1:, None], axis=-1).mean()


def random_params(config):
    """Every leaf random, norms around 1, so that each of them matters."""
    rng = np.random.default_rng(0)

    def leaf(path, x):
        around = 1.0 if "norm" in path[-1].key else 0.0
        return jnp.asarray(around + 0.1 * rng.standard_normal(x.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, qwen.abstract(config))


def torch_model(config, seed=0):
    """transformers' own model, randomly initialised, biases and norms included."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    hf_config = transformers.AutoConfig.for_model(**huggingface.config_json(config, "float32"))
    model = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager")
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return torch, model.float().eval()


def relative(a, b):
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.peer
@every_config
def test_logits_and_gradients_equal_transformers(config, tmp_path):
    torch, model = torch_model(config)
    model.save_pretrained(tmp_path)
    read, _ = huggingface.load_config(tmp_path)
    assert read == config
    params = huggingface.load(tmp_path, config)

    tokens = torch.tensor(np.asarray(TOKENS), dtype=torch.long)
    theirs = model(tokens).logits
    ours = jax.jit(lambda params: logits_of(config, params))(params)
    np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=1e-4, rtol=0)

    torch.nn.functional.cross_entropy(
        theirs[:, :-1].reshape(-1, 97), tokens[:, 1:].reshape(-1)
    ).backward()
    grads = huggingface.flatten(jax.jit(jax.grad(lambda params: nll(config, params)))(params))
    weights = dict(model.named_parameters())
    compared = 0
    for leaf, group in huggingface.checkpoint_tensors(config).items():
        for tensor in group:
            grad = np.asarray(grads[leaf] if tensor.layer is None else grads[leaf][tensor.layer])
            want = weights[tensor.name].grad.numpy()
            assert relative(tensor.to_stored(grad), want) < 1e-3, tensor.name
            compared += 1
    assert compared == len(weights)


@every_config
def test_axes_abstract_and_init_have_one_tree(config):
    params = jax.jit(qwen.init, static_argnums=0)(config, jax.random.key(0))
    abstract, axes = qwen.abstract(config), qwen.logical_axes(config)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), abstract
    )
    ranks = jax.tree.map(len, axes, is_leaf=lambda x: isinstance(x, tuple))
    assert jax.tree.map(lambda x: x.ndim, params) == ranks
    assert qwen.num_params(config) == sum(x.size for x in jax.tree.leaves(params))
    first, second = params["layers"]["q"][:2]
    assert 0.015 < float(first.std()) < 0.025 and not np.allclose(first, second)


def test_config_round_trips_and_keeps_extra_entries():
    config = CONFIGS["qwen3-tied"]
    written = huggingface.config_json(config, "bfloat16", {"eos_token_id": 5})
    assert huggingface.parse_config(written) == config and written["eos_token_id"] == 5
    old = {k: v for k, v in written.items() if k != "rope_parameters"} | {"rope_scaling": None}
    assert huggingface.parse_config(old) == config
    headless = huggingface.config_json(CONFIGS["qwen2-tied"], "bfloat16")
    del headless["head_dim"]
    assert huggingface.parse_config(headless).head_dim == 16


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "llama"}, "model_type='llama'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type='yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_type='linear'"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=true on qwen3"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_config_refuses_what_is_not_implemented(change, message):
    with pytest.raises(ValueError, match=message):
        huggingface.parse_config(huggingface.config_json(CONFIGS["qwen3-tied"], "float32") | change)


def test_config_names_what_is_missing():
    written = huggingface.config_json(CONFIGS["qwen2-tied"], "float32")
    del written["intermediate_size"], written["vocab_size"]
    with pytest.raises(ValueError, match="lacks vocab_size, intermediate_size"):
        huggingface.parse_config(written)


def test_remat_changes_no_gradient():
    config = CONFIGS["qwen3-tied"]
    params = random_params(config)

    def gradient(remat):
        return jax.jit(jax.grad(lambda params: nll(config, params, remat=remat)))(params)

    want = gradient("none")
    for remat in ("dots", "full"):
        jax.tree.map(
            lambda got, want: np.testing.assert_allclose(got, want, atol=1e-6, rtol=1e-4),
            gradient(remat),
            want,
        )


def test_carry_is_threaded_through_the_layers():
    config = CONFIGS["qwen2-tied"]

    def record(q, k, v, layer, keys):
        return q, keys.at[layer].set(k)

    keys = jnp.zeros((3, *TOKENS.shape, 2, 16))
    _, keys = qwen.forward(
        config, random_params(config), TOKENS, POSITIONS, record, keys, dtype=jnp.float32
    )
    norms = np.linalg.norm(keys.reshape(3, -1), axis=1)
    assert (norms > 0).all() and len(set(norms.tolist())) == 3


def test_bfloat16_is_close_to_float32():
    config = CONFIGS["qwen2-untied"]
    params = random_params(config)
    hidden, _ = qwen.forward(config, params, TOKENS, POSITIONS, causal, dtype=jnp.bfloat16)
    logits = qwen.head(config, params, hidden, jnp.bfloat16)
    assert hidden.dtype == jnp.bfloat16 and logits.dtype == jnp.float32
    assert relative(logits, logits_of(config, params)) < 0.05


def naive_token_logps(config, params, hidden, targets, temperature):
    logps = jax.nn.log_softmax(qwen.head(config, params, hidden, jnp.float32) / temperature)
    return jnp.take_along_axis(logps, targets[..., None], axis=-1)[..., 0], -(
        jnp.exp(logps) * logps
    ).sum(-1)


@pytest.mark.parametrize(
    "name, chunk",
    [
        ("qwen2-tied", 7),
        ("qwen2-untied", 7),
        ("qwen2-tied", 10**6),
        pytest.param("qwen2-untied", 10**6, marks=pytest.mark.slow),
        pytest.param("qwen2-tied", 1, marks=pytest.mark.slow),
        pytest.param("qwen2-untied", 1, marks=pytest.mark.slow),
    ],
)
def test_token_logps_equal_log_softmax(name, chunk):
    config = CONFIGS[name]
    params = random_params(config)
    hidden = jax.random.normal(jax.random.key(3), (*TOKENS.shape, 64))
    weights = jax.random.normal(jax.random.key(4), (2, *TOKENS.shape))

    def loss(score, params, hidden):
        logps, entropy = score(params, hidden)
        return (weights[0] * logps + weights[1] * entropy).sum(), (logps, entropy)

    def chunked(params, hidden):
        return logprobs.token_logps(
            config, params, hidden, TOKENS, temperature=0.7, chunk=chunk, dtype=jnp.float32
        )

    def naive(params, hidden):
        return naive_token_logps(config, params, hidden, TOKENS, 0.7)

    (got_grads, got), (want_grads, want) = (
        jax.jit(
            jax.grad(lambda p, h, score=score: loss(score, p, h), argnums=(0, 1), has_aux=True)
        )(params, hidden)
        for score in (chunked, naive)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-5), got, want)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4), got_grads, want_grads
    )


@pytest.mark.parametrize("chunk, whole", [(8, False), (10**6, True)])
def test_gradient_never_holds_all_logits(chunk, whole):
    config = replace(CONFIGS["qwen2-tied"], vocab_size=4099)
    params, tokens = qwen.abstract(config), jax.ShapeDtypeStruct((2, 512), jnp.int32)
    hidden = jax.ShapeDtypeStruct((2, 512, 64), jnp.float32)

    def loss(params, hidden, targets):
        score = logprobs.token_logps(
            config, params, hidden, targets, temperature=1.0, chunk=chunk, dtype=jnp.float32
        )
        return sum(x.sum() for x in score)

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, hidden, tokens).compile()
    memory = compiled.memory_analysis()
    assert memory is not None and (memory.temp_size_in_bytes >= 2 * 512 * 4099 * 4) == whole
