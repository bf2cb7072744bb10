"""The adapter of the output layer on meshes that split the vocabulary, against one device."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jzero.config import AdapterConfig
from jzero.model import adapters, qwen
from jzero.sharding.mesh import train_mesh
from jzero.tinker import losses
from jzero.tinker.datums import Packed
from jzero.tinker.tenants import add_gradient
from jzero.training.learner import token_learner
from jzero.types import Batch, RowLayout, State

pytestmark = pytest.mark.usefixtures("quick_compilation")

ADAPTER = AdapterConfig(rank=3, alpha=6.0, targets=("q", "down", "lm_head"))
MODELS = {  # the vocabulary divides by every mesh
    "tied": replace(reference.MODEL, vocab_size=64),
    "untied": replace(reference.MODEL, vocab_size=64, tie_word_embeddings=False),
}
MESHES = {"tensor": (1, 1, 2), "fsdp": (1, 2, 1), "all": (1, 2, 2), "data": (2, 1, 1)}
M, B, T = 2, 4, 12
LAYOUT = RowLayout(0, 1, T)


def examples() -> Packed:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 64, (M, B, T)).astype(np.int32)
    ones = np.ones((M, B, T), np.float32)
    rows = Batch(
        tokens=tokens,
        targets=rng.integers(0, 64, (M, B, T, 1)).astype(np.int32),
        segments=ones.astype(np.int32),
        positions=np.broadcast_to(np.arange(T, dtype=np.int32), (M, B, T)).copy(),
        weights=rng.standard_normal((M, B, T, 1)).astype(np.float32),
        sampler_logps=-ones,
        advantages=ones,
        ratio_low=ones,
        ratio_high=ones,
    )
    return Packed(rows, LAYOUT, M, [], [])


@cache
def run(model: str, mesh: str) -> tuple[qwen.Params, np.ndarray, State]:
    """Returns the gradient of a call, its log-probs, and the shardings of the state."""
    compute = replace(reference.settings().model, adapter=ADAPTER, logit_chunk=16)
    sizes = MESHES.get(mesh, (1, 1, 1))
    devices = jax.devices()[: int(np.prod(sizes))]
    learner = token_learner(MODELS[model], compute, train_mesh(*sizes, devices))
    base = learner.freeze(
        jax.tree.map(
            lambda x, place: jax.device_put(np.asarray(x), place),
            reference.random_params(MODELS[model]),
            learner.model_shardings,
        )
    )
    rng = np.random.default_rng(1)
    factors = jax.tree.map(
        lambda leaf, place: jax.device_put(
            (0.2 * rng.standard_normal(leaf.shape)).astype(np.float32), place
        ),
        adapters.abstract(MODELS[model], ADAPTER),
        learner.shardings,
    )
    loss = losses.loss_of(losses.KINDS.index("cross_entropy"), 0.0)
    gradient, _, logps = add_gradient(
        learner, learner.start(factors), base, examples(), loss, learner.zero_gradient()
    )
    return jax.device_get(gradient), logps, learner.state_shardings


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_devices_that_split_the_vocabulary_have_the_gradient_of_one(model: str, mesh: str) -> None:
    gradient, logps, places = run(model, mesh)

    wanted, wanted_logps, _ = run(model, "one")

    np.testing.assert_allclose(logps, wanted_logps, atol=2e-5)
    reference.assert_same_gradient(gradient, wanted, 2e-5)
    assert jnp.linalg.norm(gradient["lm_head"]["b"]) > 0.1
    # B is split as the vocabulary of the base's output layer.
    split = places.params["lm_head"]["b"].spec
    assert split[1] == "tensor" and split[0] is None
