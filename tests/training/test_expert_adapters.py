"""Adapters on experts and experts in 8 bits: what they compute, their gradients, and meshes.

Every expert has an adapter of its own. As in test_adapters.py and test_int8_base.py, an adapter is
compared with the merged model, its gradient with projections of the whole model's gradient, and
8 bits with the dequantized weights.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from test_expert_training import HYBRID_MOE, MOE
from test_learner import FAR, PACKINGS, gradient_in, gradient_of, packed_minibatch, trainer_on

from jzero.config import AdapterConfig
from jzero.model import adapters, qwen
from jzero.model.quantized import QuantizedWeight, dequantize, is_quantized
from jzero.sharding.mesh import decode_mesh
from jzero.sharding.publish import publisher
from jzero.training.learner import Learner, Stats
from jzero.types import State

pytestmark = pytest.mark.usefixtures("quick_compilation")

ADAPTER = AdapterConfig(rank=3, alpha=6.0)
EXPERTS = ("experts_gate", "experts_up", "experts_down")
MODELS = {"experts": MOE, "experts in a hybrid": HYBRID_MOE}
every_model = pytest.mark.parametrize("name", MODELS)
every_base = pytest.mark.parametrize("base", ["native", "int8"])


def random_adapter(model: qwen.QwenConfig) -> qwen.Params:
    """Returns an adapter whose B is random as well."""
    rng = np.random.default_rng(1)

    def random_leaf(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(0.15 * rng.standard_normal(leaf.shape), jnp.float32)

    return jax.tree.map(random_leaf, adapters.abstract(model, ADAPTER))


def state_on(policy: Learner, adapter: qwen.Params) -> State:
    """Returns a State of `adapter` on random parameters as its base."""

    def place(leaf: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
        return jax.device_put(np.asarray(leaf), sharding)

    params = reference.random_params(policy.model)
    base = policy.freeze(jax.tree.map(place, params, policy.model_shardings))
    return replace(policy.start(reference.placed(policy, adapter)), base=base)


def step_on(
    sizes: tuple[int, int, int], model: qwen.QwenConfig, base: str
) -> tuple[qwen.Params, Stats, State]:
    """Returns the gradient of an adapter on a mesh, the stats, and the State before the step."""
    settings = reference.settings(
        model={"adapter": ADAPTER, "base": base}, train=PACKINGS["two slots"]
    )
    trainer = trainer_on(settings, sizes, model)
    policy = trainer.policy
    policy.optimizer = optax.identity()
    before = state_on(policy, random_adapter(model))
    minibatch = packed_minibatch(trainer)
    state, stats = policy.update(
        state_on(policy, random_adapter(model)),
        minibatch.batches,
        minibatch.counts,
        trainer.layouts,
        FAR,
    )
    return gradient_in(state.params), stats, before


def restored(base: qwen.Params) -> qwen.Params:
    """Returns a base without weights in 8 bits."""

    def restore(leaf: jax.Array | QuantizedWeight) -> jax.Array:
        return dequantize(leaf, jnp.float32) if is_quantized(leaf) else leaf

    return jax.tree.map(restore, base, is_leaf=is_quantized)


def test_experts_are_linear_layers_with_an_axis_of_their_own() -> None:
    targets = adapters.linear_layers(MOE)
    assert tuple(targets) == ("q", "k", "v", "o", *EXPERTS)
    assert [name for name, target in targets.items() if target.is_of_experts] == [*EXPERTS]
    assert set(EXPERTS) < set(adapters.linear_layers(HYBRID_MOE))

    L, X, E, F, R = 2, 8, 16, 8, 3
    layers = adapters.abstract(MOE, ADAPTER)["layers"]
    axes = adapters.logical_axes(MOE, ADAPTER)["layers"]
    assert layers["experts_up"]["a"].shape == (L, X, E, R)
    assert layers["experts_up"]["b"].shape == (L, X, R, F)
    assert layers["experts_down"]["a"].shape == (L, X, F, R)
    assert layers["experts_down"]["b"].shape == (L, X, R, E)
    assert axes["experts_up"]["a"] == ("layers", "experts", "embed", "rank")
    assert axes["experts_up"]["b"] == ("layers", "experts", "rank", "expert_mlp")


@every_model
@every_base
def test_gradients_are_projections_of_the_whole_gradient(base: str, name: str) -> None:
    model, adapter = MODELS[name], random_adapter(MODELS[name])

    found, stats, state = step_on((1, 1, 1), model, base)

    merged = adapters.merge(model, restored(state.base), adapter, ADAPTER.scale)
    whole_trainer = trainer_on(reference.settings(train=PACKINGS["two slots"]), (1, 1, 1), model)
    whole_trainer.policy.optimizer = optax.identity()
    minibatch = packed_minibatch(whole_trainer)
    whole, whole_stats = gradient_of(whole_trainer, minibatch, merged)
    tolerance = 1e-5 if model is MOE else 3e-5  # gated delta nets keep what was rounded
    for target in EXPERTS:
        a, b = (np.asarray(adapter["layers"][target][factor], np.float64) for factor in "ab")
        gradient = np.asarray(whole["layers"][target], np.float64)
        projections = {
            "a": ADAPTER.scale * gradient @ b.swapaxes(-1, -2),
            "b": ADAPTER.scale * a.swapaxes(-1, -2) @ gradient,
        }
        for factor, expected in projections.items():
            error = np.abs(found["layers"][target][factor] - expected).max()
            assert error < tolerance * np.abs(expected).max(), (target, factor)
    reference.assert_same_loss(stats["loss"], whole_stats["loss"])


@every_model
@every_base
@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2)], ids=str)
def test_the_gradient_does_not_depend_on_the_mesh(
    sizes: tuple[int, int, int], base: str, name: str
) -> None:
    model = MODELS[name]

    gradient, stats, state = step_on(sizes, model, base)
    expected, expected_stats, _ = step_on((1, 1, 1), model, base)

    reference.assert_same_gradient(gradient, expected, 2e-5)
    np.testing.assert_array_equal(stats["expert_load"], expected_stats["expert_load"])
    assert is_quantized(state.base["layers"]["experts_up"]) == (base == "int8")


@every_base
def test_the_decoder_reads_whole_experts_with_their_adapters(base: str) -> None:
    settings = reference.settings(model={"adapter": ADAPTER, "base": base})
    trainer = trainer_on(settings, (2, 2, 2), MOE)
    policy, mesh = trainer.policy, trainer.policy.mesh
    state = state_on(policy, random_adapter(MOE))

    publish = publisher(MOE, mesh, decode_mesh(mesh), jnp.float32, ADAPTER)
    weights = publish(policy.weights(state))

    adapted = weights["layers"]["experts_up"]
    np.testing.assert_array_equal(adapted.a, state.params["layers"]["experts_up"]["a"])
    assert {shard.data.shape for shard in adapted.a.addressable_shards} == {(2, 4, 16, 3)}
    frozen = adapted.weight.values if base == "int8" else adapted.weight
    assert {shard.data.shape for shard in frozen.addressable_shards} == {(2, 4, 16, 8)}
    if base == "int8":
        scales = adapted.weight.scale
        assert {shard.data.shape for shard in scales.addressable_shards} == {(2, 4, 1, 8)}
