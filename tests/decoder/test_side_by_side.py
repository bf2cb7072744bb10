"""Weights that a decoder holds side by side: where their columns lie, and what it samples."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_engine
from jax.sharding import Mesh

from jzero.config import AdapterConfig, ModelConfig
from jzero.decoder.scheduler import Scheduler
from jzero.decoder.sequence import make_groups
from jzero.model import qwen
from jzero.model.linear import (
    JoinedWeight,
    PartOfJoined,
    join_outputs,
    linear,
    plus_bias,
    products,
    split_outputs,
)
from jzero.sharding.mesh import make_mesh, param_shardings, train_mesh
from jzero.sharding.publish import abstract_decoder_weights, decoder_shardings, publisher
from jzero.sharding.side_by_side import AS_TRAINED, WeightLayout, neighbors, weight_layout
from jzero.sharding.tpu_options import tpu_options

pytestmark = pytest.mark.usefixtures("quick_compilation")

QKV, GATE_UP = ("q", "k", "v"), ("gate", "up")


def decode_mesh_of(shape: tuple[int, int]) -> Mesh:
    """Returns a mesh of so many shards of slots, each on so many devices."""
    slots, tensor = shape
    return make_mesh(jax.devices()[: slots * tensor], {"slots": slots, "tensor": tensor})


JOINED = WeightLayout(joins=True)
APART = WeightLayout(joins=True, apart=True)


def published(
    name: str, decode: Mesh, precision: str = "native", layout: WeightLayout = JOINED
) -> qwen.Params:
    """Returns the decoder's weights of a model of test_engine.py, in fp32."""
    model = test_engine.CONFIGS[name]
    slots, tensor = decode.devices.shape
    train = train_mesh(1, slots, tensor, list(decode.devices.flat))
    params = jax.tree.map(
        jax.device_put, test_engine.host_params(name), param_shardings(model, train)
    )
    publish = publisher(model, train, decode, "float32", precision=precision, layout=layout)
    return publish(params)


# -- which weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensor", "groups"),
    [
        ("qwen2", 1, {QKV: 1, GATE_UP: 1}),
        ("qwen2", 2, {QKV: 2, GATE_UP: 2}),
        ("qwen2", 4, {GATE_UP: 4}),  # every device has both heads of keys and values
        ("qwen3_moe", 2, {QKV: 2}),
        ("hybrid", 1, {}),
    ],
)
def test_neighbors_are_weights_that_devices_split_alike(
    name: str, tensor: int, groups: dict[tuple[str, ...], int]
) -> None:
    found = neighbors(test_engine.CONFIGS[name], decode_mesh_of((1, tensor)))

    assert {together.names: together.shards for together in found} == groups


def test_biases_go_with_their_weights() -> None:
    mesh = decode_mesh_of((1, 1))
    with_biases, without = neighbors(test_engine.CONFIGS["qwen2"], mesh)

    assert with_biases.biases == ("q_bias", "k_bias", "v_bias")
    assert with_biases.sizes == (64, 32, 32)
    assert without.biases == ()


def test_decoders_on_cpus_hold_every_weight_by_itself() -> None:
    model = test_engine.CONFIGS["qwen2"]
    assert weight_layout(model, ModelConfig(), decode_mesh_of((1, 1))) == AS_TRAINED


class AbsentDevice(NamedTuple):
    """Stands for a device that this machine need not have."""

    platform: str
    device_kind: str = "TPU v5 lite"


def mesh_of_absent(platform: str) -> Mesh:
    """Returns what stands for a mesh of absent devices."""
    stand_in: Any = SimpleNamespace(devices=np.array([None], object))
    stand_in.devices[0] = AbsentDevice(platform)
    return stand_in


@pytest.mark.parametrize(("platform", "layout"), [("tpu", JOINED), ("gpu", APART)])
def test_decoders_on_accelerators_have_a_layout_of_their_own(
    platform: str, layout: WeightLayout
) -> None:
    model, mesh = test_engine.CONFIGS["qwen2"], mesh_of_absent(platform)

    assert weight_layout(model, ModelConfig(), mesh) == layout
    # The loop of a hybrid has stacks of each kind of layer.
    assert weight_layout(test_engine.CONFIGS["hybrid"], ModelConfig(), mesh) == JOINED
    # The decoder shares a frozen base with the trainer.
    adapted = ModelConfig(adapter=AdapterConfig(rank=4))
    assert weight_layout(model, adapted, mesh) == AS_TRAINED
    assert weight_layout(model, ModelConfig(exact=True), mesh) == AS_TRAINED


# -- where the columns lie -------------------------------------------------------------------------


def test_a_shard_has_its_part_of_every_weight() -> None:
    first, second = np.arange(6), np.arange(10, 12)

    joined = join_outputs([jnp.asarray(first), jnp.asarray(second)], 2)

    np.testing.assert_array_equal(joined, [0, 1, 2, 10, 3, 4, 5, 11])
    apart = split_outputs(joined, (6, 2), 2)
    np.testing.assert_array_equal(apart[0], first)
    np.testing.assert_array_equal(apart[1], second)


def columns_of(weight: np.ndarray, shard: int, shards: int) -> np.ndarray:
    """Returns the part of a weight [L, inputs, *outputs] that device `shard` has, as columns."""
    by_device = np.split(weight, shards, axis=2)
    return by_device[shard].reshape(*weight.shape[:2], -1)


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (4, 2)], ids=str)
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3_moe"])
def test_publication_joins_the_trainers_numbers(name: str, shape: tuple[int, int]) -> None:
    mesh = decode_mesh_of(shape)
    host = test_engine.host_params(name)["layers"]

    layers = published(name, mesh)["layers"]

    for together in neighbors(test_engine.CONFIGS[name], mesh):
        joined = layers[together.names[0]]
        assert isinstance(joined, JoinedWeight)
        assert all(layers[other] == PartOfJoined() for other in together.names[1:])
        for device, piece in enumerate(joined.weight.addressable_shards):
            shard = device % shape[1]
            parts = [columns_of(host[each], shard, shape[1]) for each in together.names]
            np.testing.assert_array_equal(piece.data, np.concatenate(parts, axis=-1))
        if together.biases:
            biases = [host[bias][:, None] for bias in together.biases]
            for device, piece in enumerate(joined.bias.addressable_shards):
                shard = device % shape[1]
                parts = [columns_of(bias, shard, shape[1])[:, 0] for bias in biases]
                np.testing.assert_array_equal(piece.data, np.concatenate(parts, axis=-1))
    np.testing.assert_array_equal(layers["o"], host["o"])


@pytest.mark.parametrize("layout", [JOINED, APART], ids=["joined", "apart"])
@pytest.mark.parametrize("precision", ["native", "int8", "fp8"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_plans_and_publication_agree_on_the_decoders_weights(
    name: str, precision: str, layout: WeightLayout
) -> None:
    model, mesh = test_engine.CONFIGS[name], decode_mesh_of((2, 2))
    planned = abstract_decoder_weights(model, mesh, "float32", precision, layout)

    found = published(name, mesh, precision, layout)

    def assert_as_planned(leaf: jax.Array, plan: jax.ShapeDtypeStruct) -> None:
        assert (leaf.shape, leaf.dtype) == (plan.shape, plan.dtype)
        assert leaf.sharding == plan.sharding

    jax.tree.map(assert_as_planned, found, planned)
    places = decoder_shardings(model, mesh, precision != "native", layout)
    assert jax.tree.structure(places) == jax.tree.structure(planned)


# -- products --------------------------------------------------------------------------------------


def test_products_with_joined_weights_are_those_with_each() -> None:
    rng = np.random.default_rng(0)
    x, first, second = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in [(5, 6), (6, 8), (6, 4)]
    )
    bias = jnp.arange(12, dtype=jnp.float32)
    joined = JoinedWeight(join_outputs([first, second], 2), bias, (8, 4), 2)

    found = products(x, [joined, PartOfJoined()])

    expected = products(x, [first, second])
    biases = split_outputs(bias, (8, 4), 2)
    for out, without_bias, of_bias in zip(found, expected, biases, strict=True):
        np.testing.assert_allclose(out, without_bias + of_bias, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(plus_bias(found[0], PartOfJoined()), found[0])


def test_a_layer_with_other_products_is_told_what_to_do() -> None:
    with pytest.raises(TypeError, match="SIDE_BY_SIDE"):
        linear(jnp.ones((1, 2)), PartOfJoined())


# -- sampling --------------------------------------------------------------------------------------


def sampled(
    name: str, shape: tuple[int, int], precision: str, layout: WeightLayout
) -> test_engine.Completions:
    """Returns samples of a model whose weights have a layout."""
    engine = test_engine.make(name, shape)
    weights = published(name, engine.mesh, precision, layout)
    layers = weights["layers"][0] if layout.apart else weights["layers"]
    assert layout.joins == isinstance(layers["q"], JoinedWeight)
    scheduler = Scheduler(engine, weights, test_engine.text_of)
    groups = make_groups(test_engine.PROMPTS, test_engine.GROUP, test_engine.MAX_NEW)
    seed = test_engine.seed_on(engine)
    return test_engine.by_key(list(scheduler.run(groups, test_engine.GROUP, 0.7, seed)))


@pytest.mark.parametrize("layout", [JOINED, APART], ids=["joined", "apart"])
@pytest.mark.parametrize("precision", ["native", "int8"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3_moe"])
def test_a_decoder_samples_the_same_from_every_layout(
    name: str, shape: tuple[int, int], precision: str, layout: WeightLayout
) -> None:
    found = sampled(name, shape, precision, layout)

    expected = sampled(name, shape, precision, AS_TRAINED)
    assert found.keys() == expected.keys()
    test_engine.assert_same(found, expected)


def test_a_family_names_what_its_layer_multiplies_by_together() -> None:
    dense = test_engine.CONFIGS["qwen2"]

    assert qwen.side_by_side(dense) == (QKV, GATE_UP)
    assert qwen.side_by_side(replace(dense, model_type="qwen3")) == (QKV, GATE_UP)
    assert qwen.side_by_side(test_engine.CONFIGS["qwen3_moe"]) == (QKV,)
    assert qwen.side_by_side(test_engine.CONFIGS["hybrid"]) == ()


def test_a_tpu_gives_more_of_its_memory_to_an_operation_than_xla_would() -> None:
    tpus = mesh_of_absent("tpu")
    assert tpu_options(tpus) == {"xla_tpu_scoped_vmem_limit_kib": "81920"}
    assert tpu_options(decode_mesh_of((1, 1))) == {}
