"""Meshes, the table of axes, and where copies of the parameters go."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
import reference
from jax.sharding import PartitionSpec as P

from jzero.config import OptimizerConfig
from jzero.distributed.mesh import RULES, decode_mesh, param_shardings, train_mesh
from jzero.distributed.publish import decoder_shardings, publisher
from jzero.model import qwen
from jzero.training import learner

MESHES = [(1, 1, 1), (8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 2)]
every_mesh = pytest.mark.parametrize("sizes", MESHES, ids=str)


def make(sizes):
    return train_mesh(*sizes, jax.devices()[: np.prod(sizes)])


@pytest.mark.parametrize(
    "asked, got",
    [
        ((-1, 1, 1), (8, 1, 1)),
        ((1, -1, 2), (1, 4, 2)),
        ((2, 2, -1), (2, 2, 2)),
        ((8, 1, 1), (8, 1, 1)),
    ],
)
def test_one_size_is_what_the_others_leave(asked, got):
    mesh = train_mesh(*asked)
    assert tuple(mesh.shape.items()) == tuple(zip(("data", "fsdp", "tensor"), got, strict=True))
    assert mesh.devices.size == 8


@pytest.mark.parametrize(
    "asked, message",
    [
        ((3, -1, 1), "data=3 fsdp=-1 tensor=1 does not fill the 8 devices"),
        ((16, -1, 1), "does not fill the 8 devices"),
        ((2, 2, 1), "does not fill the 8 devices"),
        ((-1, -1, 1), "at most one is -1"),
        ((0, 8, 1), "sizes are positive"),
        ((1, -2, 1), "sizes are positive"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(asked, message):
    with pytest.raises(ValueError, match=message):
        train_mesh(*asked)


@every_mesh
def test_decoding_uses_the_same_devices(sizes):
    train = make(sizes)
    decode = decode_mesh(train)
    assert dict(decode.shape) == {"slots": sizes[0] * sizes[1], "tensor": sizes[2]}
    assert list(decode.devices.flat) == list(train.devices.flat)


def test_every_logical_axis_is_in_the_table():
    for model_type in ("qwen2", "qwen3"):
        axes = qwen.logical_axes(
            replace(reference.MODEL, model_type=model_type, tie_word_embeddings=False)
        )
        assert set(jax.tree.leaves(axes)) <= set(RULES)


def test_param_shardings():
    specs = jax.tree.map(lambda s: s.spec, param_shardings(reference.MODEL, make((2, 2, 2))))
    assert specs["embed"] == P(None, "fsdp")  # a vocabulary of 61 does not divide: whole
    assert specs["layers"]["q"] == P(None, "fsdp", "tensor", None)
    assert specs["layers"]["down"] == P(None, "tensor", "fsdp")
    assert specs["layers"]["k_bias"] == P(None, "tensor", None)
    assert specs["norm"] == P(None)
    even = replace(reference.MODEL, vocab_size=64, tie_word_embeddings=False)
    specs = jax.tree.map(lambda s: s.spec, param_shardings(even, make((2, 2, 2))))
    assert specs["embed"] == P("tensor", "fsdp") and specs["lm_head"] == P("fsdp", "tensor")
    odd = replace(reference.MODEL, num_key_value_heads=1)
    assert param_shardings(odd, make((2, 2, 2)))["layers"]["k"].spec == P(None, "fsdp", None, None)


@every_mesh
def test_moments_lie_where_their_parameters_do(sizes):
    config = reference.settings()
    config.optimizer = OptimizerConfig(weight_decay=0.1, clip_norm=1.0)
    policy = learner.policy_learner(reference.MODEL, config, make(sizes))
    state = policy.start(reference.placed(policy, reference.random_params()))
    adam = next(x for x in state.opt_state if isinstance(x, optax.ScaleByAdamState))
    for moments in (adam.mu, adam.nu):
        jax.tree.map(
            lambda m, s: m.sharding == s or pytest.fail(f"{m.sharding}"), moments, policy.shardings
        )
    assert adam.count.sharding.spec == P()
    largest = state.params["layers"]["gate"]
    assert largest.addressable_shards[0].data.size == largest.size // (sizes[1] * sizes[2])
    for leaf, like in zip(
        jax.tree.leaves(state), jax.tree.leaves(policy.abstract_state()), strict=True
    ):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (like.shape, like.dtype, like.sharding)


@pytest.mark.slow
def test_init_does_not_depend_on_the_mesh():
    first, second = (
        learner.policy_learner(reference.MODEL, reference.settings(), make(sizes)).init_params(3)
        for sizes in ((1, 1, 1), (2, 2, 2))
    )
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert float(np.std(first["layers"]["gate"])) == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(
    "sizes, dtype",
    [
        ((2, 2, 2), "float32"),
        ((2, 2, 2), "bfloat16"),
        ((1, 1, 1), "bfloat16"),
        ((8, 1, 1), "bfloat16"),
        *[
            pytest.param(sizes, dtype, marks=pytest.mark.slow)
            for sizes, dtype in [
                ((1, 1, 1), "float32"),
                ((8, 1, 1), "float32"),
                ((1, 8, 1), "float32"),
                ((1, 1, 2), "float32"),
                ((1, 8, 1), "bfloat16"),
                ((1, 1, 2), "bfloat16"),
            ]
        ],
    ],
    ids=str,
)
def test_publish_casts_and_keeps_values(sizes, dtype):
    train = make(sizes)
    decode = decode_mesh(train)
    params = reference.placed(
        learner.policy_learner(reference.MODEL, reference.settings(), train),
        reference.random_params(),
    )
    published = publisher(reference.MODEL, train, decode, dtype)(params)
    same = lambda x, y: np.testing.assert_array_equal(
        x, np.asarray(y).astype(dtype).reshape(x.shape)
    )
    jax.tree.map(same, published, params)
    jax.tree.map(
        lambda x, s: x.sharding == s or pytest.fail(),
        published,
        decoder_shardings(reference.MODEL, decode),
    )
    whole = published["layers"]["gate"].addressable_shards[0].data
    assert whole.size == params["layers"]["gate"].size // sizes[2]  # complete, but for tensor
    assert not params["embed"].is_deleted()
