"""Training of a hybrid: no packing changes the gradient, and the decoder gets the weights."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
import reference
from test_learner import gradient_of, packed_minibatch, trainer_on
from tiny import policy_learner

from jzero.config import AdapterConfig
from jzero.model import adapters, qwen
from jzero.model.architecture import ATTENTION, DELTA_NET, DeltaNetConfig
from jzero.model.quantized import is_quantized
from jzero.sharding.mesh import decode_mesh, param_shardings, train_mesh
from jzero.sharding.publish import publisher

pytestmark = pytest.mark.usefixtures("quick_compilation")

HYBRID = replace(
    reference.MODEL,
    model_type="qwen3_5_text",
    num_hidden_layers=2,
    layer_types=(DELTA_NET, ATTENTION),
    delta_net=DeltaNetConfig(
        num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=8, kernel_size=4
    ),
    partial_rotary_factor=0.5,
)


def gradient(train: dict[str, object], sizes: tuple[int, int, int]) -> qwen.Params:
    """Returns the gradient of one update on all rollouts, at parameters that are always the same.

    Weights are larger than those of a new model, so that every layer changes the loss.
    """
    trainer = trainer_on(reference.settings(train=train), sizes, HYBRID)
    trainer.policy.optimizer = optax.identity()
    minibatch = packed_minibatch(trainer)
    params = qwen.init(HYBRID, jax.random.key(3))
    layers = params["layers"]
    larger = {name: 5 * leaf if leaf.ndim > 2 else leaf for name, leaf in layers.items()}
    found, _ = gradient_of(trainer, minibatch, params | {"layers": larger})
    return found


def test_no_packing_changes_the_gradient():
    expected = gradient({"packs_per_row": 0, "microbatch_tokens": 36}, (1, 1, 1))
    shared_prefix = {"packs_per_row": 8, "microbatch_tokens": 102, "pack": "auto"}
    actual = gradient(shared_prefix, (1, 1, 1))

    for (path, found), wanted in zip(
        jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        assert np.isfinite(found).all(), path
        assert np.abs(wanted).max() > 0, path
        limit = 1e-4 * np.abs(wanted).max() + 1e-7
        assert np.abs(found - wanted).max() <= limit, jax.tree_util.keystr(path)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 2)], ids=str)
def test_the_decoder_gets_the_weights_and_exact_gates(sizes):
    mesh = train_mesh(*sizes, jax.devices()[: np.prod(sizes)])
    params = qwen.init(HYBRID, jax.random.key(0))
    placed = jax.device_put(params, param_shardings(HYBRID, mesh))

    published = publisher(HYBRID, mesh, decode_mesh(mesh), "bfloat16")(placed)

    expected = qwen.cast(params, "bfloat16")
    for name, weight in published["layers"].items():
        wanted = np.asarray(expected["layers"][name])
        np.testing.assert_array_equal(np.asarray(weight).reshape(wanted.shape), wanted)
        assert weight.dtype == wanted.dtype
    gates = np.asarray(published["layers"]["delta_decay"])
    np.testing.assert_array_equal(gates, params["layers"]["delta_decay"])
    assert gates.dtype == np.float32


def test_a_base_in_8_bits_keeps_its_gates_exact():
    adapter = AdapterConfig(rank=2)
    settings = reference.settings(model={"adapter": adapter, "base": "int8", "dtype": "bfloat16"})
    policy = policy_learner(HYBRID, settings, train_mesh(1, 1, 1, jax.devices()[:1]))
    params = jax.tree.map(np.asarray, policy.init_params(0))

    base = policy.freeze(policy.init_params(0))

    quantized = {name for name, leaf in base["layers"].items() if is_quantized(leaf)}
    assert quantized == adapters.linear_layers(HYBRID).keys()
    np.testing.assert_array_equal(base["layers"]["delta_decay"], params["layers"]["delta_decay"])
    described = policy.abstract_base()
    for array, like in zip(jax.tree.leaves(base), jax.tree.leaves(described), strict=True):
        assert (array.shape, array.dtype) == (like.shape, like.dtype)
