"""An adapter of the output layer: its logits and gradients against their definition in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_qwen

from jzero.config import AdapterConfig
from jzero.errors import UserError
from jzero.model import adapters, qwen
from jzero.model.arithmetic import EXACT, PLAIN, PLAIN_ON_TPU, Arithmetic
from jzero.model.linear import BankedFactors, RowAdapters
from jzero.model.logprobs import token_logps
from jzero.model.output_adapter import NAME, BankedOutputAdapters

pytestmark = pytest.mark.usefixtures("quick_compilation")

SETTINGS = AdapterConfig(rank=3, alpha=6.0, targets=("lm_head",))
TIED = replace(test_qwen.QWEN2, num_hidden_layers=1, hidden_size=32, final_logit_softcapping=5.0)
UNTIED = replace(TIED, tie_word_embeddings=False, final_logit_softcapping=0.0)
V, E, R = TIED.vocab_size, TIED.hidden_size, SETTINGS.rank
both = pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
ARITHMETICS = {"plain": PLAIN, "one row": PLAIN_ON_TPU, "exact": EXACT}


def random_array(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def random_adapter(seed: int = 0, rank: int = R) -> qwen.Params:
    factors = {"a": random_array(seed, E, rank), "b": random_array(seed + 1, rank, V)}
    return {"layers": {}, "lm_head": jax.tree.map(jnp.asarray, factors)}


def joined(config: qwen.QwenConfig, adapter: qwen.Params) -> qwen.Params:
    return adapters.join(test_qwen.random_params(config), adapter, SETTINGS.scale)


def definition(
    config: qwen.QwenConfig, hidden: jax.Array, a: jax.Array, b: jax.Array, scale: float
) -> jax.Array:
    """Returns the logits of the merged output layer."""
    params = test_qwen.random_params(config)
    weight = params["embed"].T if config.tie_word_embeddings else params["lm_head"]
    logits = hidden @ (np.asarray(weight, np.float64) + scale * a @ b)
    cap = config.final_logit_softcapping
    return cap * jnp.tanh(logits / cap) if cap else logits


@both
@pytest.mark.parametrize("arithmetic", ARITHMETICS.values(), ids=ARITHMETICS.keys())
@pytest.mark.parametrize("batch", [(), (7,), (2, 5)], ids=str)
def test_logits_are_those_of_the_merged_output_layer(
    config: qwen.QwenConfig, arithmetic: Arithmetic, batch: tuple[int, ...]
) -> None:
    hidden, adapter = random_array(5, *batch or (1,), E), random_adapter()
    params = joined(config, adapter)

    found = qwen.head(config, params, hidden, jnp.float32, arithmetic=arithmetic)

    factors = adapter["lm_head"]
    with jax.enable_x64(True):
        a, b = (np.asarray(factors[name], np.float64) for name in "ab")
        expected = definition(config, hidden.astype(np.float64), a, b, SETTINGS.scale)
    assert test_qwen.relative_error(found, expected) < 1e-5
    part = qwen.head(config, params, hidden, jnp.float32, slice(20, 50), arithmetic)
    np.testing.assert_allclose(part, found[..., 20:50], rtol=1e-5, atol=1e-5)


def test_the_embedding_of_a_tied_model_stays_as_it_is() -> None:
    base = test_qwen.random_params(TIED)
    params = joined(TIED, random_adapter())

    tokens, positions = test_qwen.TOKENS, test_qwen.POSITIONS
    hidden, expected = (
        qwen.forward(TIED, one, tokens, positions, test_qwen.causal, dtype=jnp.float32)[0]
        for one in (params, base)
    )

    np.testing.assert_array_equal(hidden, expected)


@both
@pytest.mark.parametrize("arithmetic", [PLAIN, EXACT], ids=["plain", "exact"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_chunks_are_those_of_float64(
    config: qwen.QwenConfig, arithmetic: Arithmetic, dtype: str
) -> None:
    hidden, targets = random_array(5, 2, 13, E), np.arange(26).reshape(2, 13)
    slopes = random_array(6, 2, 13)
    base, adapter = test_qwen.random_params(config), random_adapter()

    def loss(adapter: qwen.Params, hidden: jax.Array) -> jax.Array:
        params = adapters.join(base, adapter, SETTINGS.scale)
        logps, _ = token_logps(
            config,
            params,
            hidden.astype(dtype),
            targets,
            temperature=0.8,
            chunk=8,  # four columns of two rows: four chunks
            dtype=dtype,
            arithmetic=arithmetic,
        )
        return (slopes * logps).sum()

    gradient, through_hidden = jax.grad(loss, argnums=(0, 1))(adapter, hidden)

    with jax.enable_x64(True):

        def naive(a: jax.Array, b: jax.Array, hidden: jax.Array) -> jax.Array:
            logits = definition(config, hidden, a, b, SETTINGS.scale) / 0.8
            logps = jax.nn.log_softmax(logits)
            at_targets = jnp.take_along_axis(logps, targets[..., None], axis=-1)[..., 0]
            return (slopes * at_targets).sum()

        a, b = (np.asarray(adapter["lm_head"][name], np.float64) for name in "ab")
        doubles = jnp.asarray(a), jnp.asarray(b), jnp.asarray(hidden, jnp.float64)
        expected = jax.device_get(jax.grad(naive, argnums=(0, 1, 2))(*doubles))
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    found = gradient["lm_head"]["a"], gradient["lm_head"]["b"], through_hidden
    for one, other in zip(found, expected, strict=True):
        assert test_qwen.relative_error(one, other) < tolerance


@both
@pytest.mark.parametrize("arithmetic", [PLAIN, PLAIN_ON_TPU, EXACT], ids=ARITHMETICS.keys())
@pytest.mark.parametrize("columns", [1, 3])
def test_rows_of_a_bank_use_their_own_adapter(
    config: qwen.QwenConfig, arithmetic: Arithmetic, columns: int
) -> None:
    base = test_qwen.random_params(config)
    trees = [random_adapter(2 * number, 2 + number // 2) for number in range(4)]

    def group(members: list[qwen.Params], first: int) -> BankedFactors:
        pairs = [member["lm_head"] for member in members]
        a = jnp.stack([pair["a"] for pair in pairs], axis=1)
        b = jnp.stack([pair["b"] for pair in pairs])
        return BankedFactors(a, b, first)

    # Slots 0 and 1 of rank 2, and 8 and 9 of rank 3.
    bank = BankedOutputAdapters((group(trees[:2], 0), group(trees[2:], 8)))
    slots, scales = [8, -1, 1, 9, 0, 8], [2.0, 0.0, 0.5, 1.0, 3.0, 0.25]
    rows = RowAdapters(np.array(slots, np.int32), np.array(scales, np.float32))
    hidden = random_array(5, len(slots), columns, E)

    found = qwen.head(
        config,
        base | {NAME: bank},
        hidden,
        jnp.float32,
        arithmetic=arithmetic,
        row_adapters=rows,
    )

    by_slot = dict(zip((0, 1, 8, 9), trees, strict=True))
    for row, (slot, scale) in enumerate(zip(slots, scales, strict=True)):
        params = base if slot < 0 else adapters.join(base, by_slot[slot], scale)
        expected = qwen.head(config, params, hidden[row], jnp.float32, arithmetic=arithmetic)
        np.testing.assert_allclose(found[row], expected, rtol=1e-5, atol=1e-5)


# -- with the rest of an adapter -------------------------------------------------------------------


def test_an_adapter_is_joined_split_and_merged() -> None:
    settings = AdapterConfig(rank=3, alpha=6.0, targets=("all", "lm_head"))
    rng = np.random.default_rng(0)
    adapter = jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), jnp.float32),
        adapters.abstract(UNTIED, settings),
    )
    base = test_qwen.random_params(UNTIED)

    params = adapters.join(base, adapter, settings.scale)

    found_base, found = adapters.split(params)
    jax.tree.map(np.testing.assert_array_equal, found, adapter)
    jax.tree.map(np.testing.assert_array_equal, found_base, base)
    assert adapters.scale_of(params) == settings.scale
    merged = adapters.merge(UNTIED, base, adapter, settings.scale)
    expected = np.asarray(base["lm_head"]) + settings.scale * np.asarray(
        adapter["lm_head"]["a"] @ adapter["lm_head"]["b"]
    )
    np.testing.assert_allclose(merged["lm_head"], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(merged["embed"], base["embed"])


def test_an_adapter_of_a_tied_output_layer_cannot_be_merged() -> None:
    with pytest.raises(UserError, match="lm_head, which this model ties to its embedding"):
        adapters.merge(TIED, test_qwen.random_params(TIED), random_adapter(), 1.0)


@both
def test_a_new_adapter_is_drawn_as_those_of_linear_layers(config: qwen.QwenConfig) -> None:
    settings = AdapterConfig(rank=R, targets=("all", "lm_head"))
    adapter = adapters.init(config, settings, jax.random.key(0))

    a, b = adapter["lm_head"]["a"], adapter["lm_head"]["b"]

    assert (a.shape, b.shape) == ((E, R), (R, V)) and not b.any()
    bound = 1 / np.sqrt(E)
    assert 0.9 * bound < np.abs(a).max() <= bound
    # The other factors are those of an adapter without the output layer.
    others = adapters.init(config, AdapterConfig(rank=R), jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, adapter["layers"], others["layers"])
    axes = adapters.logical_axes(config, settings)["lm_head"]
    assert axes == {"a": ("embed", "rank"), "b": ("rank", "vocab")}


def test_a_critic_has_no_adapter_of_the_output_layer() -> None:
    critic = replace(TIED, value_head=True)
    settings = AdapterConfig(rank=R, targets=("q", "lm_head"))
    assert [*adapters.targets(critic, settings)] == ["q"]
    assert adapters.abstract(critic, settings).keys() == {"layers", "value"}
