"""Sampling from a base and its adapter, unmerged, as the trainer's publisher hands them over."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_engine

from jzero.config import AdapterConfig
from jzero.decoder.engine import Engine
from jzero.decoder.scheduler import Scheduler
from jzero.decoder.sequence import make_groups
from jzero.model import adapters, qwen
from jzero.sharding.mesh import train_mesh
from jzero.sharding.publish import publisher
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


def joined(dtype: str, adapter: qwen.Params, has_int8_base: bool = False) -> qwen.Params:
    """Returns a frozen base with an adapter."""
    mesh = train_mesh(1, 1, 1, jax.devices()[:1])
    base = freeze(base_params(), MODEL, mesh, dtype, has_int8_base)
    return adapters.join(base, adapter, ADAPTER.scale)


def complete(dtype: str, params: qwen.Params) -> test_engine.Completions:
    """Samples every prompt twice from the parameters of a whole model."""
    engine = engine_in(dtype)
    scheduler = Scheduler(engine, published(dtype, params), test_engine.text_of)
    groups = make_groups(test_engine.PROMPTS, test_engine.GROUP, test_engine.MAX_NEW)
    seed = test_engine.seed_on(engine)
    return test_engine.by_key(list(scheduler.run(groups, test_engine.GROUP, 0.7, seed)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_untrained_adapter_samples_the_base_bit_for_bit(dtype: str) -> None:
    adapter = adapters.init(MODEL, ADAPTER, jax.random.key(0))

    found = complete(dtype, joined(dtype, adapter))

    expected = complete(dtype, base_params())
    assert found.keys() == expected.keys()
    for key, sequence in found.items():
        assert sequence.new_tokens == expected[key].new_tokens
        np.testing.assert_array_equal(sequence.new_logps, expected[key].new_logps)


def trained_adapter() -> qwen.Params:
    """Returns an adapter whose B is random as well."""
    rng = np.random.default_rng(3)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.1 * rng.standard_normal(leaf.shape), jnp.float32),
        adapters.abstract(MODEL, ADAPTER),
    )


def mismatch(params: qwen.Params) -> float:
    """Returns how far log-probs of the engine are from those of a forward pass of the trainer.

    Both read the same arrays, in fp32.
    """
    samples = complete("float32", params).values()
    rows = [sequence.tokens.ids for sequence in samples]
    lengths = np.array([len(row) for row in rows])
    tokens = np.stack([np.pad(row, (0, test_engine.TOTAL - len(row))) for row in rows])
    _, logps = test_engine.scorer("qwen2")(params, tokens, lengths, 0.7)
    gaps = []
    for row, length, sequence in zip(np.asarray(logps), lengths, samples, strict=True):
        response = row[len(sequence.prompt_tokens) - 1 : length - 1]
        gaps.append(np.abs(sequence.new_logps - response))
    return float(np.concatenate(gaps).max())


def test_with_an_int8_base_sampler_and_trainer_compute_the_same_function() -> None:
    """The mismatch is that of rounding in fp32, as it is without. The tokens are others."""
    adapter = trained_adapter()
    plain = joined("float32", adapter)
    int8 = joined("float32", adapter, has_int8_base=True)

    found = {"native": mismatch(plain), "int8": mismatch(int8)}

    print(f"largest difference of log-probs: {found}")
    assert found["native"] < 1e-5
    assert found["int8"] < 1e-5
    samples = complete("float32", int8), complete("float32", plain)
    int8_logps, plain_logps = ([seq.new_logps[0] for seq in each.values()] for each in samples)
    assert np.abs(np.subtract(int8_logps, plain_logps)).max() > 1e-4


def test_an_int8_base_samples_what_the_dequantized_model_does() -> None:
    adapter = trained_adapter()
    params = joined("float32", adapter, has_int8_base=True)

    found = complete("float32", params)

    merged = adapters.merge(MODEL, *adapters.split(params), ADAPTER.scale)
    test_engine.assert_same(found, complete("float32", merged))


def test_a_trained_adapter_samples_what_the_merged_model_does() -> None:
    adapter = trained_adapter()

    found = complete("float32", joined("float32", adapter))

    merged = adapters.merge(MODEL, base_params(), adapter, ADAPTER.scale)
    test_engine.assert_same(found, complete("float32", merged))
    base_tokens = [sequence.new_tokens for sequence in test_engine.base().values()]
    assert [sequence.new_tokens for sequence in found.values()] != base_tokens
