"""Training an adapter on a frozen base: its gradients, an update, and what is in memory."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import test_learner
from reference import reference_of

from jzero import algorithms, setup
from jzero.config import AdapterConfig
from jzero.model import adapters, qwen
from jzero.sharding.publish import published_bytes
from jzero.training.learner import Learner
from jzero.training.step import Minibatch
from jzero.training.trainer import Trainer
from jzero.types import RowLayout, State

pytestmark = pytest.mark.usefixtures("quick_compilation")

ADAPTER = AdapterConfig(rank=3, alpha=6.0)
MODEL, PARAMS = reference.MODEL, test_learner.PARAMS


def random_adapter(shift: int = 0) -> qwen.Params:
    """Returns an adapter whose B is random as well."""
    rng = np.random.default_rng(1)

    def random_leaf(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(shift + 0.15 * rng.standard_normal(leaf.shape), jnp.float32)

    return jax.tree.map(random_leaf, adapters.abstract(MODEL, ADAPTER))


def state_on(policy: Learner, adapter: qwen.Params) -> State:
    """Returns a State of `adapter` on PARAMS as its base."""

    def place(leaf: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
        return jax.device_put(np.asarray(leaf), sharding)

    base = policy.freeze(jax.tree.map(place, PARAMS, policy.model_shardings))
    return replace(policy.start(reference.placed(policy, adapter)), base=base)


def projections(name: str, gradient: np.ndarray, adapter: qwen.Params) -> dict[str, np.ndarray]:
    """Returns dA = s dW B^T and dB = s A^T dW of one weight, in the shapes of A and B."""
    a, b = (np.asarray(adapter["layers"][name][factor], np.float64) for factor in "ab")
    layers, rank = b.shape[:2]
    flat_a, flat_b = a.reshape(layers, -1, rank), b.reshape(layers, rank, -1)
    flat = np.asarray(gradient, np.float64).reshape(layers, flat_a.shape[1], flat_b.shape[2])
    return {
        "a": ADAPTER.scale * (flat @ flat_b.swapaxes(1, 2)).reshape(a.shape),
        "b": ADAPTER.scale * (flat_a.swapaxes(1, 2) @ flat).reshape(b.shape),
    }


def weights_in(base: str) -> qwen.Params:
    """Returns PARAMS as they are after they were in the base."""
    if base == "native":
        return PARAMS
    compute = reference.settings(model={"adapter": ADAPTER, "base": base})
    on_one_device = test_learner.trainer_on(compute, (1, 1, 1)).policy
    frozen = state_on(on_one_device, random_adapter()).base
    return adapters.merge(MODEL, frozen, {"layers": {}}, 0.0)


@pytest.mark.parametrize(
    ("packing", "sizes", "base"),
    [
        ("eight slots, two buckets", (2, 1, 1), "native"),
        ("eight slots, two buckets", (2, 1, 1), "int8"),
        ("plain", (2, 2, 2), "native"),
        ("plain", (2, 2, 2), "int8"),
        ("plain", (1, 2, 2, 2), "int8"),
    ],
    ids=str,
)
def test_gradients_are_projections_of_the_whole_gradient(
    packing: str, sizes: tuple[int, ...], base: str
) -> None:
    """Under any packing, on meshes that split rows, rows and inputs, and heads."""
    adapter = random_adapter()
    merged = adapters.merge(MODEL, weights_in(base), adapter, ADAPTER.scale)
    whole_trainer = test_learner.gradient_trainer("own slot")
    whole_minibatch = test_learner.packed_minibatch(whole_trainer)
    whole, whole_stats = test_learner.gradient_of(whole_trainer, whole_minibatch, merged)

    settings = reference.settings(
        model={"adapter": ADAPTER, "base": base},
        train=test_learner.PACKINGS[packing] | {"microbatch_tokens": 512},
    )
    trainer = test_learner.trainer_on(settings, sizes)
    policy = trainer.policy
    policy.optimizer = optax.identity()
    state = state_on(policy, adapter)
    frozen = state.base
    minibatch = test_learner.packed_minibatch(trainer)
    state, stats = policy.update(
        state, minibatch.batches, minibatch.counts, trainer.layouts, test_learner.FAR
    )

    found = test_learner.gradient_in(state.params)
    assert found.keys() == {"layers"}
    for name, factors in found["layers"].items():
        for factor, expected in projections(name, whole["layers"][name], adapter).items():
            error = np.abs(factors[factor] - expected).max() / np.abs(expected).max()
            assert error < 1e-5, (name, factor)
    reference.assert_same_loss(stats["loss"], whole_stats["loss"])

    # The base went through the update as it was: neither donated nor copied.
    assert all(
        after is before
        for after, before in zip(jax.tree.leaves(state.base), jax.tree.leaves(frozen), strict=True)
    )
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(frozen))


# -- dropout ---------------------------------------------------------------------------------------


def dropped_gradient(
    policy: Learner, layouts: Sequence[RowLayout], minibatch: Minibatch, step: int = 0
) -> qwen.Params:
    """Returns the gradient of the update at a step, by way of the state that it leaves."""
    state = state_on(policy, random_adapter())
    state = replace(state, step=jax.device_put(np.int32(step), policy.replicated))

    def put(field: jax.Array) -> jax.Array:
        return jax.device_put(np.asarray(field), policy.row_sharding)

    batches = jax.tree.map(put, minibatch.batches)
    counts = jax.device_put(np.asarray(minibatch.counts), policy.replicated)
    state, _ = policy.update(state, batches, counts, layouts, test_learner.FAR)
    return test_learner.gradient_in(state.params)


def trainer_with(dropout: float, sizes: tuple[int, ...], seed: int = 0) -> Trainer:
    settings = reference.settings(
        model={"adapter": replace(ADAPTER, dropout=dropout)},
        train={"packs_per_row": 0, "microbatch_tokens": 72, "seed": seed},
    )
    trainer = test_learner.trainer_on(settings, sizes)
    trainer.policy.optimizer = optax.identity()
    return trainer


def relative_difference(a: qwen.Params, b: qwen.Params) -> float:
    """Returns the largest difference of two gradients, relative to the largest value."""
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    return max(np.abs(x - y).max() / np.abs(y).max() for x, y in pairs)


def test_dropout_depends_on_the_step_and_not_on_the_mesh() -> None:
    """A mesh that splits the rows drops what one that splits the weights does."""
    trainer = trainer_with(0.5, (2, 1, 1))
    minibatch = test_learner.packed_minibatch(trainer)
    layouts = trainer.layouts

    gradient = dropped_gradient(trainer.policy, layouts, minibatch)

    again = dropped_gradient(trainer.policy, layouts, minibatch)
    assert relative_difference(again, gradient) == 0
    assert (
        relative_difference(dropped_gradient(trainer.policy, layouts, minibatch, 1), gradient) > 0.1
    )
    other = dropped_gradient(trainer_with(0.5, (1, 2, 1)).policy, layouts, minibatch)
    assert relative_difference(other, gradient) < 1e-4


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2), (1, 2, 1, 2)], ids=str)
def test_dropout_depends_on_the_seed(sizes: tuple[int, ...]) -> None:
    trainer = trainer_with(0.5, sizes)
    minibatch = test_learner.packed_minibatch(trainer)

    gradient = dropped_gradient(trainer.policy, trainer.layouts, minibatch)

    other_seed = trainer_with(0.5, sizes, seed=1).policy
    other = dropped_gradient(other_seed, trainer.layouts, minibatch)
    assert relative_difference(other, gradient) > 0.1


def programs_of(trainer: Trainer) -> dict[str, str]:
    """Returns the traced score and update of a trainer's policy."""
    batches = test_learner.packed_minibatch(trainer).batches
    programs = trainer.policy.programs(batches, trainer.layouts)
    return {name: str(jitted.trace(*args).jaxpr) for name, (jitted, args) in programs.items()}


def test_only_the_update_has_dropout() -> None:
    without = programs_of(trainer_with(0.0, (1, 1, 1)))
    with_dropout = programs_of(trainer_with(0.5, (1, 1, 1)))

    assert with_dropout["score"] == without["score"]
    assert "random_bits" in with_dropout["update"]
    assert "random" not in without["update"]


# -- memory ----------------------------------------------------------------------------------------


def live_bytes() -> int:
    """Returns the bytes of all arrays on the first device; views of one buffer count once."""
    device = jax.devices()[0]
    buffers = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            if shard.device == device:
                buffers[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(buffers.values())


def bytes_on_first_device(tree: object) -> int:
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


def bytes_of_base(model: qwen.QwenConfig, base: str) -> int:
    """Returns the bytes of a base in bfloat16, whose linear layers may be in 8 bits."""
    if base == "native":
        return 2 * qwen.num_params(model)
    linear = adapters.linear_layers(model).values()
    L = model.num_hidden_layers
    num_quantized = L * sum(math.prod(target.inputs + target.outputs) for target in linear)
    num_scales = L * sum(math.prod(target.outputs) for target in linear)
    return num_quantized + 4 * num_scales + 2 * (qwen.num_params(model) - num_quantized)


@pytest.mark.parametrize("base_type", ["native", "int8"])
def test_policy_critic_reference_and_decoder_share_one_base(base_type: str, tmp_path: Path) -> None:
    """No second copy of any weight: beside the base there is only what the adapters need."""
    settings = reference.settings(
        model={"adapter": ADAPTER, "dtype": "bfloat16", "base": base_type},
        algorithm=vars(algorithms.PRESETS["ppo"](kl=algorithms.KL(coef=0.1))),
        train={"microbatch_tokens": 240},
    )
    run = setup.build(setup.resolve(settings), None)
    policy = run.trainer.policy
    before = live_bytes()

    base = policy.freeze(policy.init_params(0))
    state = setup.initial_state(run, base)
    kl_reference = reference_of(policy, tmp_path, settings.algorithm, 0, state, 0)
    weights = jax.block_until_ready(run.publish(policy.weights(state)))
    in_use = live_bytes() - before

    assert state.critic is not None and run.trainer.critic is not None
    base_bytes = bytes_of_base(policy.model, base_type)
    assert bytes_on_first_device(base) == base_bytes
    trained = bytes_on_first_device(
        [state.params, state.opt_state, state.critic.params, state.critic.opt_state]
    )
    adapter_bytes = 2 * adapters.num_params(policy.model, ADAPTER)
    assert published_bytes(weights) == adapter_bytes
    scalars = 1024
    assert in_use <= base_bytes + trained + adapter_bytes + scalars
    assert scalars < base_bytes / 100
    # Nothing is written for a reference that is the base itself.
    assert kl_reference is base and not list(tmp_path.iterdir())


# -- the reference ---------------------------------------------------------------------------------


def test_a_later_reference_is_the_adapter_of_its_step(tmp_path: Path) -> None:
    settings = reference.settings(
        model={"adapter": ADAPTER},
        algorithm={"kl_coef": 0.1, "reference_every": 2},
        train={"microbatch_tokens": 512},
    )
    policy = test_learner.trainer_on(settings, (1, 2, 2)).policy
    algorithm = settings.algorithm
    saved = state_on(policy, random_adapter(shift=1))
    other = state_on(policy, random_adapter(shift=2))

    reference_of(policy, tmp_path, algorithm, 2, saved, 0)
    resumed = reference_of(policy, tmp_path, algorithm, 3, other, 0)

    jax.tree.map(np.testing.assert_array_equal, resumed, policy.weights(saved))
    size = (tmp_path / "reference/2/adapter.safetensors").stat().st_size
    assert size < 4 * adapters.num_params(MODEL, ADAPTER) + 4096
    assert reference_of(policy, tmp_path, algorithm, 1, other, 0) is other.base
