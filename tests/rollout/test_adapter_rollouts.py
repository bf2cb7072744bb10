"""Sampling from a base and its adapter, unmerged, as the trainer's publisher hands them over."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_engine

from jzero.config import AdapterConfig
from jzero.distributed.mesh import train_mesh
from jzero.distributed.publish import publisher
from jzero.model import adapters, qwen
from jzero.rollout.engine import Engine
from jzero.rollout.scheduler import Scheduler
from jzero.rollout.sequence import make_groups
from jzero.training.frozen import freeze

pytestmark = pytest.mark.usefixtures("quick_compilation")

ADAPTER = AdapterConfig(rank=3, alpha=6.0)
MODEL = test_engine.CONFIGS["qwen2"]


@cache
def engine_in(dtype: str) -> Engine:
    return test_engine.new_engine(dtype=dtype)


def published(dtype: str, params: qwen.Params) -> qwen.Params:
    """Returns the decoder's weights for the parameters of a whole model."""
    mesh = train_mesh(1, 1, 1, jax.devices()[:1])
    return publisher(MODEL, mesh, engine_in(dtype).mesh, dtype, ADAPTER)(params)


def base_params() -> qwen.Params:
    return jax.tree.map(jnp.array, test_engine.host_params("qwen2"))


def joined(dtype: str, adapter: qwen.Params) -> qwen.Params:
    """Returns a frozen base with an adapter."""
    mesh = train_mesh(1, 1, 1, jax.devices()[:1])
    base = freeze(base_params(), MODEL, mesh, dtype)
    return adapters.join(base, adapter, ADAPTER.scale)


def complete(dtype: str, params: qwen.Params) -> test_engine.Completions:
    """Samples every prompt twice from the parameters of a whole model."""
    engine = engine_in(dtype)
    scheduler = Scheduler(engine, published(dtype, params), test_engine.text_of)
    groups = make_groups(test_engine.PROMPTS, test_engine.GROUP, test_engine.MAX_NEW)
    seed = test_engine.seed_on(engine)
    return test_engine.by_key(list(scheduler.run(groups, test_engine.GROUP, 0.7, seed)))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.thorough)])
def test_an_untrained_adapter_samples_the_base_bit_for_bit(dtype: str) -> None:
    adapter = adapters.init(MODEL, ADAPTER, jax.random.key(0))

    found = complete(dtype, joined(dtype, adapter))

    expected = complete(dtype, base_params())
    assert found.keys() == expected.keys()
    for key, sequence in found.items():
        assert sequence.tokens == expected[key].tokens
        np.testing.assert_array_equal(sequence.logps, expected[key].logps)


@pytest.mark.thorough
def test_a_trained_adapter_samples_what_the_merged_model_does() -> None:
    rng = np.random.default_rng(3)
    adapter = jax.tree.map(
        lambda leaf: jnp.asarray(0.1 * rng.standard_normal(leaf.shape), jnp.float32),
        adapters.abstract(MODEL, ADAPTER),
    )

    found = complete("float32", joined("float32", adapter))

    merged = adapters.merge(MODEL, base_params(), adapter, ADAPTER.scale)
    test_engine.assert_same(found, complete("float32", merged))
    base_tokens = [sequence.tokens for sequence in test_engine.base().values()]
    assert [sequence.tokens for sequence in found.values()] != base_tokens
