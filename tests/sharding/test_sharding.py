"""Meshes, the table of axes, and where copies of the parameters lie."""

import re
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
import reference
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tiny import policy_learner

from jzero.config import AdapterConfig, OptimizerConfig
from jzero.model import adapters, qwen
from jzero.model.quantized import is_quantized, quantize
from jzero.sharding.mesh import (
    RULES,
    adapter_shardings,
    decode_mesh,
    param_shardings,
    train_mesh,
)
from jzero.sharding.publish import decoder_shardings, gather_program, publisher

pytestmark = pytest.mark.usefixtures("quick_compilation")

Sizes = tuple[int, int, int]  # of the axes data, fsdp and tensor

every_mesh = pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 2)], ids=str
)


def mesh_of(sizes: Sizes) -> Mesh:
    """Returns a mesh over as many of the eight devices as it takes."""
    return train_mesh(*sizes, jax.devices()[: np.prod(sizes)])


def specs_of(model: qwen.QwenConfig, sizes: Sizes) -> qwen.Params:
    """Returns the partition spec of every parameter."""

    def spec(sharding: NamedSharding) -> P:
        return sharding.spec

    return jax.tree.map(spec, param_shardings(model, mesh_of(sizes)))


def assert_placed(tree: qwen.Params, shardings: qwen.Params) -> None:
    """Fails unless every leaf of `tree` has its sharding."""

    def assert_leaf_placed(leaf: jax.Array, sharding: NamedSharding) -> None:
        assert leaf.sharding == sharding

    jax.tree.map(assert_leaf_placed, tree, shardings)


# -- meshes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "filled"),
    [
        ((-1, 1, 1), (8, 1, 1)),
        ((1, -1, 2), (1, 4, 2)),
        ((2, 2, -1), (2, 2, 2)),
        ((8, 1, 1), (8, 1, 1)),
    ],
)
def test_one_size_is_what_the_others_leave(sizes: Sizes, filled: Sizes) -> None:
    mesh = train_mesh(*sizes)

    assert mesh.axis_names == ("data", "fsdp", "tensor")
    assert mesh.devices.shape == filled
    assert mesh.devices.size == 8


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, -1, 1), "data=3 fsdp=-1 tensor=1 does not fill the 8 devices"),
        ((16, -1, 1), "does not fill the 8 devices"),
        ((2, 2, 1), "does not fill the 8 devices"),
        ((-1, -1, 1), "at most one is -1"),
        ((0, 8, 1), "sizes are positive"),
        ((1, -2, 1), "sizes are positive"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: Sizes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_mesh(*sizes)


@every_mesh
def test_decoding_uses_the_same_devices(sizes: Sizes) -> None:
    data, fsdp, tensor = sizes
    train = mesh_of(sizes)

    decode = decode_mesh(train)

    assert dict(decode.shape) == {"slots": data * fsdp, "tensor": tensor}
    assert list(decode.devices.flat) == list(train.devices.flat)


# -- where parameters lie --------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_every_logical_axis_is_in_the_table(model_type: str) -> None:
    model = replace(reference.MODEL, model_type=model_type, tie_word_embeddings=False)

    axes = qwen.logical_axes(model)

    assert set(jax.tree.leaves(axes)) <= set(RULES)


def test_parameters_are_split_by_the_table() -> None:
    specs = specs_of(reference.MODEL, (2, 2, 2))

    assert specs["layers"]["q"] == P(None, "fsdp", "tensor", None)
    assert specs["layers"]["down"] == P(None, "tensor", "fsdp")
    assert specs["layers"]["k_bias"] == P(None, "tensor", None)
    assert specs["norm"] == P(None)


def test_a_vocabulary_is_split_where_it_divides() -> None:
    even = replace(reference.MODEL, vocab_size=64, tie_word_embeddings=False)

    specs = specs_of(even, (2, 2, 2))

    assert specs["embed"] == P("tensor", "fsdp")
    assert specs["lm_head"] == P("fsdp", "tensor")
    # The reference has 61 words, which two devices cannot share.
    assert specs_of(reference.MODEL, (2, 2, 2))["embed"] == P(None, "fsdp")


def test_heads_that_do_not_divide_are_whole() -> None:
    model = replace(reference.MODEL, num_key_value_heads=1)

    specs = specs_of(model, (2, 2, 2))

    assert specs["layers"]["k"] == P(None, "fsdp", None, None)


@every_mesh
def test_moments_lie_where_their_parameters_do(sizes: Sizes) -> None:
    _, fsdp, tensor = sizes
    config = reference.settings()
    config.optimizer = OptimizerConfig(weight_decay=0.1, clip_norm=1.0)
    policy = policy_learner(reference.MODEL, config, mesh_of(sizes))

    state = policy.start(reference.placed(policy, reference.random_params()))

    adam = next(part for part in state.opt_state if isinstance(part, optax.ScaleByAdamState))
    assert_placed(adam.mu, policy.shardings)
    assert_placed(adam.nu, policy.shardings)
    assert adam.count.sharding.spec == P()
    largest = state.params["layers"]["gate"]
    assert largest.addressable_shards[0].data.size == largest.size // (fsdp * tensor)


@every_mesh
def test_the_abstract_state_describes_the_state(sizes: Sizes) -> None:
    config = reference.settings()
    config.optimizer = OptimizerConfig(weight_decay=0.1, clip_norm=1.0)
    policy = policy_learner(reference.MODEL, config, mesh_of(sizes))

    state = policy.start(reference.placed(policy, reference.random_params()))

    leaves = jax.tree.leaves(state)
    abstract_leaves = jax.tree.leaves(policy.abstract_state())
    for leaf, abstract in zip(leaves, abstract_leaves, strict=True):
        assert leaf.shape == abstract.shape
        assert leaf.dtype == abstract.dtype
        assert leaf.sharding == abstract.sharding


def test_init_does_not_depend_on_the_mesh() -> None:
    def init_on(sizes: Sizes) -> qwen.Params:
        policy = policy_learner(reference.MODEL, reference.settings(), mesh_of(sizes))
        return policy.init_params(3)

    on_one, on_eight = init_on((1, 1, 1)), init_on((2, 2, 2))

    jax.tree.map(np.testing.assert_array_equal, on_one, on_eight)
    assert float(np.std(on_one["layers"]["gate"])) == pytest.approx(0.02, rel=0.1)


# -- publishing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((2, 2, 2), "float32"),
        ((2, 2, 2), "bfloat16"),
        ((1, 1, 1), "bfloat16"),
        ((8, 1, 1), "bfloat16"),
        ((1, 1, 1), "float32"),
        ((8, 1, 1), "float32"),
        ((1, 8, 1), "float32"),
        ((1, 1, 2), "float32"),
        ((1, 8, 1), "bfloat16"),
        ((1, 1, 2), "bfloat16"),
    ],
    ids=str,
)
def test_publish_casts_and_keeps_values(sizes: Sizes, dtype: str) -> None:
    _, _, tensor = sizes
    train = mesh_of(sizes)
    decode = decode_mesh(train)
    policy = policy_learner(reference.MODEL, reference.settings(), train)
    params = reference.placed(policy, reference.random_params())

    published = publisher(reference.MODEL, train, decode, dtype)(params)

    def assert_same_values(found: jax.Array, param: jax.Array) -> None:
        expected = np.asarray(param).astype(dtype).reshape(found.shape)
        np.testing.assert_array_equal(found, expected)

    jax.tree.map(assert_same_values, published, params)
    assert_placed(published, decoder_shardings(reference.MODEL, decode))
    # A device holds whole parameters, split over tensor alone.
    on_device = published["layers"]["gate"].addressable_shards[0].data
    assert on_device.size == params["layers"]["gate"].size // tensor
    # The learner still needs its own.
    assert not params["embed"].is_deleted()


@pytest.mark.parametrize("name", ["qwen2", "experts"])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2), (1, 4, 1)], ids=str)
def test_publish_may_round_linear_layers_to_8_bits(sizes: Sizes, name: str) -> None:
    model = {"qwen2": reference.MODEL, "experts": reference.MOE}[name]
    train = mesh_of(sizes)
    decode = decode_mesh(train)
    rng = np.random.default_rng(0)
    host = jax.tree.map(
        lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), qwen.abstract(model)
    )
    params = jax.tree.map(jax.device_put, host, param_shardings(model, train))

    published = publisher(model, train, decode, "bfloat16", precision="int8")(params)

    assert_placed(published, decoder_shardings(model, decode, True))
    linear_layers = adapters.linear_layers(model)
    assert {"q", "k", "v", "o"} < set(linear_layers)
    for leaf, weight in published["layers"].items():
        assert is_quantized(weight) == (leaf in linear_layers)
        if not is_quantized(weight):
            np.testing.assert_array_equal(weight, host["layers"][leaf].astype(weight.dtype))
            continue
        target = linear_layers[leaf]
        by_numpy = quantize(host["layers"][leaf], len(target.inputs), len(target.stacked))
        scale = by_numpy.scale.reshape(weight.scale.shape)
        np.testing.assert_allclose(weight.scale, scale, rtol=1e-6)
        steps = np.asarray(weight.values, int) - by_numpy.values.reshape(weight.values.shape)
        assert np.abs(steps).max() <= 1
        assert np.mean(steps != 0) < 1e-3


def test_devices_gather_integers_of_8_bits() -> None:
    train = mesh_of((1, 4, 1))
    policy = policy_learner(reference.MODEL, reference.settings(), train)
    program = gather_program(reference.MODEL, train, "bfloat16", precision="int8")
    text = program.lower(policy.abstract_state().params).compile().as_text()
    assert text is not None
    gathers = [line for line in text.splitlines() if " all-gather(" in line]
    of_layers = [line for line in gathers if "/while/" in line]
    assert len([line for line in of_layers if "= s8[" in line]) == 7
    assert not [line for line in of_layers if re.search(r"= (f32|bf16)\[[\d,]*\d{3}", line)]


@pytest.mark.parametrize("base_type", ["native", "int8"])
@pytest.mark.parametrize(("sizes", "is_shared"), [((2, 1, 2), True), ((2, 2, 2), False)], ids=str)
def test_a_base_is_published_once_and_its_adapter_every_time(
    sizes: Sizes, is_shared: bool, base_type: str
) -> None:
    """Where both meshes split the base alike, the decoder reads the trainer's own arrays."""
    settings = AdapterConfig(rank=3, alpha=6.0)
    train = mesh_of(sizes)
    decode = decode_mesh(train)
    config = reference.settings(model={"adapter": settings, "base": base_type})
    policy = policy_learner(reference.MODEL, config, train)
    full = jax.tree.map(
        jax.device_put, reference.random_params(), param_shardings(reference.MODEL, train)
    )
    base = policy.freeze(full)
    publish = publisher(reference.MODEL, train, decode, "float32", settings)
    adapter = policy.init_adapter(0)

    first = publish(policy.whole(base, adapter))
    changed = jax.tree.map(lambda leaf: leaf + 1, adapter)
    second = publish(policy.whole(base, changed))

    found_base, found_adapter = adapters.split(second)
    first_base, _ = adapters.split(first)
    is_int8 = base_type == "int8"
    assert_placed(found_base, decoder_shardings(reference.MODEL, decode, is_int8))
    assert is_quantized(found_base["layers"]["gate"]) == is_int8
    assert_placed(found_adapter, adapter_shardings(reference.MODEL, settings, decode))
    jax.tree.map(np.testing.assert_array_equal, found_base, base)
    jax.tree.map(np.testing.assert_array_equal, found_adapter, changed)
    leaves = zip(jax.tree.leaves(found_base), jax.tree.leaves(first_base), strict=True)
    assert all(found is published for found, published in leaves)
    assert pointers(found_base) == pointers(base) or not is_shared
    assert not pointers(found_adapter) & pointers(changed)


def pointers(params: qwen.Params) -> set[int]:
    """Returns where the arrays lie in the devices' memory."""
    return {
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(params)
        for shard in leaf.addressable_shards
    }
