"""A base in 8 bits: the same integers however it comes to be, never in more bits on a device."""

from pathlib import Path

import jax
import numpy as np
import pytest
import reference
from reference import blueprint_of
from test_adapter_training import ADAPTER, MODEL
from tiny import critic_learner, policy_learner

from jzero.hosts import collectives
from jzero.model import adapters, huggingface, qwen
from jzero.model.quantized import QuantizedWeight, is_quantized, quantize
from jzero.service.weights import load
from jzero.sharding.mesh import train_mesh
from jzero.training.learner import Learner

pytestmark = pytest.mark.usefixtures("quick_compilation")


def learner_on(sizes: tuple[int, int, int], dtype: str) -> Learner:
    settings = reference.settings(model={"adapter": ADAPTER, "base": "int8", "dtype": dtype})
    mesh = train_mesh(*sizes, jax.devices()[: np.prod(sizes)])
    return policy_learner(MODEL, settings, mesh)


def assert_as_described(base: qwen.Params, described: qwen.Params) -> None:
    """Asserts shapes, types and shardings."""

    def check(array: jax.Array, like: jax.ShapeDtypeStruct) -> None:
        assert (array.shape, array.dtype) == (like.shape, like.dtype)
        assert array.sharding.is_equivalent_to(like.sharding, array.ndim)

    jax.tree.map(check, base, described)


@pytest.mark.parametrize(
    ("sizes", "dtype"), [((1, 1, 1), "bfloat16"), ((1, 2, 2), "bfloat16"), ((2, 1, 2), "float32")]
)
def test_a_run_that_resumes_finds_the_same_integers(
    sizes: tuple[int, int, int], dtype: str, tmp_path: Path
) -> None:
    """The run made the weights, in fp32, and stored them in the type of the computation."""
    policy = learner_on(sizes, dtype)
    params = policy.init_params(0)
    huggingface.save(tmp_path / "base", MODEL, params, dtype=dtype, hf_config_extra={})

    frozen = policy.freeze(params)
    resumed = load(blueprint_of(policy), tmp_path / "base")

    assert_as_described(frozen, policy.abstract_base())
    assert_as_described(resumed, policy.abstract_base())
    jax.tree.map(np.testing.assert_array_equal, frozen, resumed)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def test_a_base_is_quantized_as_the_function_says() -> None:
    policy = learner_on((1, 1, 1), "float32")
    params = jax.tree.map(np.asarray, policy.init_params(0))

    base = policy.freeze(policy.init_params(0))

    for name, target in adapters.linear_layers(MODEL).items():
        weight = base["layers"][name]
        assert is_quantized(weight)
        expected = quantize(params["layers"][name], len(target.inputs), num_stacked=1)
        np.testing.assert_array_equal(weight.values, expected.values.reshape(weight.values.shape))
        np.testing.assert_array_equal(weight.scale, expected.scale.reshape(weight.scale.shape))
    np.testing.assert_array_equal(base["embed"], params["embed"])
    np.testing.assert_array_equal(base["layers"]["q_bias"], params["layers"]["q_bias"])


def test_scales_are_split_as_the_outputs_of_their_weight() -> None:
    """o has heads as inputs, which tensor splits, and its outputs are split by fsdp."""
    base = learner_on((1, 2, 2), "bfloat16").abstract_base()["layers"]
    fsdp, tensor = "fsdp", "tensor"
    splits = {
        name: (tuple(weight.values.sharding.spec), tuple(weight.scale.sharding.spec))
        for name, weight in base.items()
        if isinstance(weight, QuantizedWeight)
    }
    assert splits["q"] == ((None, fsdp, tensor), (None, None, tensor))
    assert splits["o"] == ((None, tensor, None, fsdp), (None, None, None, fsdp))
    assert splits["down"] == ((None, tensor, fsdp), (None, None, fsdp))


def test_no_device_holds_a_linear_layer_in_more_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = learner_on((1, 2, 2), "bfloat16")
    params = policy.init_params(0)
    huggingface.save(tmp_path / "base", MODEL, params, dtype="bfloat16", hf_config_extra={})
    put = collectives.put_global
    seen = []

    def put_and_note(x: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
        seen.append((x.shape, x.dtype.name))
        return put(x, sharding)

    monkeypatch.setattr(collectives, "put_global", put_and_note)
    load(blueprint_of(policy), tmp_path / "base")

    large = MODEL.num_hidden_layers * MODEL.hidden_size * MODEL.head_dim
    types = {dtype for shape, dtype in seen if len(shape) > 2 and np.prod(shape) >= large}
    assert types == {"int8"}
    assert len(seen) == len(jax.tree.leaves(policy.abstract_base()))


def test_a_critic_has_the_same_base() -> None:
    settings = reference.settings(
        model={"adapter": ADAPTER, "base": "int8"}, algorithm={"advantage": "gae"}
    )
    mesh = train_mesh(1, 1, 1, jax.devices()[:1])
    critic = critic_learner(MODEL, settings, mesh)
    policy = policy_learner(MODEL, settings, mesh)
    assert critic.abstract_base() == policy.abstract_base()
