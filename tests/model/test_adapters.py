"""Adapters on a frozen base: an untrained one changes nothing, a trained one is what it stands for.

Gradients are compared with projections of the whole model's gradient: with W' = W + s A B,
dA = s dW' B^T and dB = s A^T dW'.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_qwen

from jzero.config import AdapterConfig
from jzero.errors import UserError
from jzero.model import adapters, qwen
from jzero.model.families import FAMILIES
from jzero.model.linear import (
    LINEAR_OUTPUT,
    LOW_RANK_PRODUCT,
    AdaptedWeight,
    Dropout,
    linear,
    with_dropout,
)
from jzero.sharding.mesh import RULES

pytestmark = pytest.mark.usefixtures("quick_compilation")

SETTINGS = AdapterConfig(rank=3, alpha=6.0)
LINEAR = ("q", "k", "v", "o", "gate", "up", "down")
CONFIGS = {
    name: replace(config, num_hidden_layers=2, hidden_size=32, intermediate_size=48, head_dim=8)
    for name, config in [("qwen2", test_qwen.QWEN2), ("qwen3", test_qwen.CONFIGS["qwen3-tied"])]
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def new_adapter(config: qwen.QwenConfig, settings: AdapterConfig = SETTINGS) -> qwen.Params:
    return adapters.init(config, settings, jax.random.key(1))


def trained_adapter(config: qwen.QwenConfig, settings: AdapterConfig = SETTINGS) -> qwen.Params:
    """Returns an adapter whose B is random as well."""
    rng = np.random.default_rng(2)

    def random_leaf(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(0.1 * rng.standard_normal(leaf.shape), jnp.float32)

    return jax.tree.map(random_leaf, adapters.abstract(config, settings))


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def hidden_states(
    config: qwen.QwenConfig,
    params: qwen.Params,
    dtype: str = "float32",
    remat: str = "none",
    dropout: Dropout | None = None,
) -> jax.Array:
    hidden, _ = qwen.forward(
        config,
        params,
        test_qwen.TOKENS,
        test_qwen.POSITIONS,
        test_qwen.causal,
        dtype=jnp.dtype(dtype),
        remat=remat,
        dropout=dropout,
    )
    return hidden


def loss(
    config: qwen.QwenConfig,
    params: qwen.Params,
    remat: str = "none",
    dropout: Dropout | None = None,
) -> jax.Array:
    hidden = hidden_states(config, params, "float32", remat, dropout)
    return (hidden * jnp.arange(hidden.size).reshape(hidden.shape) / hidden.size).sum()


# -- parameters ------------------------------------------------------------------------------------


@every_config
def test_the_targets_are_the_linear_layers_of_the_family(config: qwen.QwenConfig) -> None:
    assert tuple(adapters.linear_layers(config)) == LINEAR
    table = FAMILIES[config.model_type].tensors
    for name, target in adapters.linear_layers(config).items():
        assert len(target.inputs) == table[f"layers.{name}"].inputs


@every_config
def test_factors_have_the_shapes_and_the_axes_of_their_weight(config: qwen.QwenConfig) -> None:
    layers = adapters.abstract(config, SETTINGS)["layers"]
    axes = adapters.logical_axes(config, SETTINGS)["layers"]
    weights = qwen.abstract(config)["layers"]
    weight_axes = qwen.logical_axes(config)["layers"]
    assert layers.keys() == axes.keys() == set(LINEAR)
    for name, factors in layers.items():
        a, b = factors["a"], factors["b"]
        assert (*a.shape[:-1], *b.shape[2:]) == weights[name].shape
        assert a.shape[-1] == b.shape[1] == SETTINGS.rank
        a_axes, b_axes = axes[name]["a"], axes[name]["b"]
        assert (*a_axes[:-1], *b_axes[2:]) == weight_axes[name]
        assert a_axes[-1] == b_axes[1] == "rank"
    assert RULES["rank"] is None


def test_a_new_adapter_is_drawn_by_the_rule() -> None:
    config = CONFIGS["qwen2"]
    layers = new_adapter(config)["layers"]
    for name, target in adapters.linear_layers(config).items():
        bound = 1 / np.sqrt(np.prod(target.inputs))
        a = np.asarray(layers[name]["a"])
        assert np.abs(a).max() <= bound
        assert np.abs(a).max() > 0.9 * bound
        assert not layers[name]["b"].any()
    assert not np.array_equal(layers["gate"]["a"], layers["up"]["a"])


def test_the_choice_of_targets_changes_no_values() -> None:
    config = CONFIGS["qwen2"]
    every = new_adapter(config)["layers"]
    some = new_adapter(config, replace(SETTINGS, targets=("down", "q")))["layers"]
    assert some.keys() == {"q", "down"}
    for name, factors in some.items():
        np.testing.assert_array_equal(factors["a"], every[name]["a"])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((), LINEAR),
        (("all",), LINEAR),
        (("q,v",), ("q", "v")),
        (("v", "q"), ("q", "v")),
        (("lm_head",), ("lm_head",)),
        (("lm_head,all",), (*LINEAR, "lm_head")),
        (("lm_head", "v"), ("v", "lm_head")),
    ],
    ids=str,
)
def test_targets_are_named_one_by_one_or_all_at_once(
    given: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    settings = replace(SETTINGS, targets=given)
    assert tuple(adapters.targets(CONFIGS["qwen3"], settings)) == expected


def test_a_critic_trains_its_head_beside_the_adapter() -> None:
    config = replace(CONFIGS["qwen2"], value_head=True)
    tree = adapters.abstract(config, SETTINGS)
    assert tree["value"].shape == (config.hidden_size,)
    assert tree.keys() == adapters.logical_axes(config, SETTINGS).keys() == {"layers", "value"}


def test_the_number_of_parameters_is_rank_times_inputs_and_outputs() -> None:
    config = CONFIGS["qwen2"]
    E, F, L = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    heads = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    per_rank = L * ((E + heads) + 2 * (E + kv) + (heads + E) + 3 * (E + F))
    assert adapters.num_params(config, SETTINGS) == SETTINGS.rank * per_rank


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (AdapterConfig(rank=4, targets=("q", "query")), "no linear layer query; it has q, k, v, o"),
        (AdapterConfig(rank=4, targets=("norm",)), "no linear layer norm"),
        (AdapterConfig(rank=4, targets=("all", "q")), "no linear layer all"),
        (AdapterConfig(rank=17), "model.adapter.rank=17 is above 16, the rank of the weight k"),
        (AdapterConfig(rank=33, targets=("q",)), "above 32, the rank of the weight q"),
        (AdapterConfig(rank=33, targets=("lm_head",)), "above 32, the rank of the weight lm_head"),
        (
            AdapterConfig(rank=4, targets=("all", "lm_head"), dropout=0.1),
            "model.adapter.dropout=0.1: the adapter of the output layer .lm_head. has no dropout",
        ),
    ],
)
def test_an_impossible_adapter_is_refused_in_one_line(
    settings: AdapterConfig, message: str
) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        adapters.check(CONFIGS["qwen2"], settings)
    assert "\n" not in str(refusal.value)


def test_a_rank_up_to_that_of_the_smallest_weight_is_accepted() -> None:
    adapters.check(CONFIGS["qwen2"], AdapterConfig(rank=16))
    adapters.check(CONFIGS["qwen2"], AdapterConfig(rank=0, targets=("query",)))


# -- what the model computes -----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [("qwen2", "bfloat16"), ("qwen3", "float32")])
def test_an_untrained_adapter_changes_no_bit(name: str, dtype: str) -> None:
    config = CONFIGS[name]
    base = test_qwen.random_params(config)
    joined = adapters.join(base, new_adapter(config), SETTINGS.scale)

    found = hidden_states(config, joined, dtype)

    np.testing.assert_array_equal(found, hidden_states(config, base, dtype))


def test_the_merged_model_computes_what_the_adapter_does() -> None:
    config = CONFIGS["qwen3"]
    base, adapter = test_qwen.random_params(config), trained_adapter(config)

    merged = adapters.merge(config, base, adapter, SETTINGS.scale)

    joined = adapters.join(base, adapter, SETTINGS.scale)
    unmerged = hidden_states(config, joined)
    assert test_qwen.relative_error(hidden_states(config, merged), unmerged) < 1e-5
    assert test_qwen.relative_error(hidden_states(config, base), unmerged) > 1e-2
    shapes = jax.tree.map(jnp.shape, merged)
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, qwen.abstract(config))


def test_numpy_merges_what_jax_does() -> None:
    config = CONFIGS["qwen2"]
    factors = trained_adapter(config)["layers"]["o"]
    weight = AdaptedWeight(
        test_qwen.random_params(config)["layers"]["o"], factors["a"], factors["b"], 2.0
    )
    on_host = jax.tree.map(np.asarray, weight)
    expected = np.asarray(weight.weight) + 2.0 * np.einsum(
        "lhdr,lre->lhde", factors["a"], factors["b"]
    )
    np.testing.assert_allclose(on_host.merged(num_stacked=1), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weight.merged(num_stacked=1), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_gradients_are_projections_of_the_whole_gradient(remat: str) -> None:
    config = CONFIGS["qwen2"]
    base, adapter = test_qwen.random_params(config), trained_adapter(config)
    scale = SETTINGS.scale

    def adapted_loss(adapter: qwen.Params) -> jax.Array:
        return loss(config, adapters.join(base, adapter, scale), remat)

    found = jax.grad(adapted_loss)(adapter)["layers"]

    merged = adapters.merge(config, base, adapter, scale)
    whole = jax.grad(lambda params: loss(config, params))(merged)["layers"]
    for name, factors in adapter["layers"].items():
        layers, rank = factors["b"].shape[:2]
        a, b = factors["a"].reshape(layers, -1, rank), factors["b"].reshape(layers, rank, -1)
        gradient = whole[name].reshape(layers, a.shape[1], b.shape[2])
        projections = {
            "a": scale * jnp.einsum("lio,lro->lir", gradient, b),
            "b": scale * jnp.einsum("lir,lio->lro", a, gradient),
        }
        for factor, expected in projections.items():
            shaped = expected.reshape(found[name][factor].shape)
            assert test_qwen.relative_error(found[name][factor], shaped) < 1e-5, (name, factor)


def test_a_change_below_the_last_bit_of_the_output_is_not_lost() -> None:
    """Added to an output that is bf16 already, a change of 1/1000 would always be rounded away."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((64, 32)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal((32, 512)), jnp.bfloat16)
    a = jnp.asarray(rng.standard_normal((32, 1)), jnp.bfloat16)
    b = jnp.asarray(1e-3 * rng.standard_normal((1, 512)), jnp.bfloat16)

    plain = np.asarray(linear(x, weight), np.float32)
    adapted = np.asarray(linear(x, AdaptedWeight(weight, a, b, 1.0)), np.float32)

    wanted = np.asarray(x @ a, np.float32) @ np.asarray(b, np.float32)
    survived = np.sum((adapted - plain) * wanted) / np.sum(wanted**2)
    assert survived == pytest.approx(1, abs=0.15)


# -- recomputation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_the_backward_pass_keeps_the_narrow_product_and_no_fp32_term(remat: str) -> None:
    rows, inputs, outputs, rank = 5, 8, 16, 3
    weight = jnp.ones((inputs, outputs), jnp.bfloat16)

    def layer(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.nn.silu(linear(jax.nn.silu(x), AdaptedWeight(weight, a, b, 2.0)))

    x, a, b = (
        jnp.ones(shape, jnp.bfloat16) for shape in [(rows, inputs), (inputs, rank), (rank, outputs)]
    )
    y, backward = jax.vjp(qwen.REMAT[remat](layer), x, a, b)

    kept = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(backward)]
    assert ((rows, rank), jnp.bfloat16) in kept
    assert (((rows, outputs), jnp.bfloat16) in kept) == (remat == "dots")
    assert all(dtype == jnp.bfloat16 for _, dtype in kept)
    computed_again = str(jax.make_jaxpr(backward)(y))
    assert f"name={LOW_RANK_PRODUCT}" not in computed_again
    assert (f"name={LINEAR_OUTPUT}" in computed_again) == (remat == "full")


# -- dropout ---------------------------------------------------------------------------------------

RATE = 0.25
ROWS, TOKENS_OF_ROW, INPUTS, OUTPUTS, RANK = 3, 4, 8, 5, 2


def layer_arrays() -> dict[str, jax.Array]:
    """Returns x, W, A and B of one linear layer, and a gradient of its output."""
    rng = np.random.default_rng(3)
    shapes = {
        "x": (ROWS * TOKENS_OF_ROW, INPUTS),
        "w": (INPUTS, OUTPUTS),
        "a": (INPUTS, RANK),
        "b": (RANK, OUTPUTS),
        "gradient": (ROWS * TOKENS_OF_ROW, OUTPUTS),
    }
    return {
        name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()
    }


def row_keys(seed: int) -> jax.Array:
    return jax.random.split(jax.random.key(seed), ROWS)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_dropout_is_on_the_inputs_of_the_adapter_only(remat: str) -> None:
    """Output and gradients are those of NumPy with the same masks."""
    arrays = layer_arrays()
    dropout = Dropout(row_keys(0), RATE)

    def layer(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return linear(x, AdaptedWeight(arrays["w"], a, b, 2.0, dropout))

    y, backward = jax.vjp(qwen.REMAT[remat](layer), arrays["x"], arrays["a"], arrays["b"])
    to_x, to_a, to_b = backward(arrays["gradient"])

    masks = [jax.random.bernoulli(key, 1 - RATE, (TOKENS_OF_ROW, INPUTS)) for key in row_keys(0)]
    mask = np.concatenate(masks) / (1 - RATE)
    x, w, a, b, gradient = (np.asarray(array, np.float64) for array in arrays.values())
    dropped = x * mask
    to_low_rank = 2.0 * gradient @ b.T
    for got, expected in [
        (y, x @ w + 2.0 * dropped @ a @ b),
        (to_x, gradient @ w.T + mask * (to_low_rank @ a.T)),
        (to_a, dropped.T @ to_low_rank),
        (to_b, 2.0 * (dropped @ a).T @ gradient),
    ]:
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_the_backward_pass_of_the_model_draws_the_same_masks_again() -> None:
    config, targets = CONFIGS["qwen2"], ("q", "down")
    base = test_qwen.random_params(config)
    adapter = trained_adapter(config, replace(SETTINGS, targets=targets))
    dropout = Dropout(jax.random.split(jax.random.key(0), len(test_qwen.TOKENS)), RATE)

    def gradient(remat: str) -> qwen.Params:
        def adapted_loss(adapter: qwen.Params) -> jax.Array:
            return loss(config, adapters.join(base, adapter, 2.0), remat, dropout)

        return jax.grad(adapted_loss)(adapter)["layers"]

    kept, recomputed = gradient("none"), gradient("full")

    for name in targets:
        assert test_qwen.relative_error(recomputed[name]["a"], kept[name]["a"]) < 1e-5


def test_the_mean_over_many_masks_is_the_output_without_dropout() -> None:
    arrays = layer_arrays()
    weight = AdaptedWeight(arrays["w"], arrays["a"], arrays["b"], 2.0)

    def output(seed: jax.Array) -> jax.Array:
        keys = jax.random.split(jax.random.key(seed), ROWS)
        return linear(arrays["x"], replace(weight, dropout=Dropout(keys, RATE)))

    outputs = jax.vmap(output)(jnp.arange(4000))

    spread = outputs.std(axis=0)
    assert (spread > 0.1).all()
    error = np.abs(outputs.mean(axis=0) - linear(arrays["x"], weight))
    assert (error < 5 * spread / np.sqrt(4000)).all()


def test_every_row_layer_and_weight_has_its_own_mask() -> None:
    config = CONFIGS["qwen2"]
    joined = adapters.join(test_qwen.random_params(config), trained_adapter(config), 2.0)

    layers = with_dropout(joined["layers"], Dropout(row_keys(0), RATE))

    keys = [jax.random.key_data(layers[name].dropout.keys).reshape(-1, 2) for name in LINEAR]
    found = {tuple(key) for key in np.concatenate(keys).tolist()}
    assert len(found) == len(LINEAR) * config.num_hidden_layers * ROWS
    # The choice of targets does not change the masks of a weight.
    some = {name: joined["layers"][name] for name in layers}
    some["q"] = some["q"].weight
    without_q = with_dropout(some, Dropout(row_keys(0), RATE))
    np.testing.assert_array_equal(
        jax.random.key_data(without_q["v"].dropout.keys),
        jax.random.key_data(layers["v"].dropout.keys),
    )
