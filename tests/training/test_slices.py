"""Several slices train as one: data parallelism over the data-center network (mesh.slices).

The eight CPU devices are two slices of four, or four slices of two.
"""

from dataclasses import dataclass, replace

import jax
import numpy as np
import optax
import pytest
import reference
import test_learner
from test_hybrid_training import HYBRID

from jzero.errors import UserError
from jzero.model import qwen
from jzero.planning.compiling import device_bytes
from jzero.planning.crossing import crossing
from jzero.sharding.mesh import decode_mesh, param_shardings, train_mesh
from jzero.sharding.publish import publisher
from jzero.training.heads import Stats
from jzero.training.learner import check_experts_of_slices
from jzero.training.trainer import Trainer, abstract_batches, make_trainer

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Sizes of a slice: data, fsdp, tensor and, if it is not 1, context.
Sizes = tuple[int, ...]


def trainer_on(
    slices: int,
    sizes: Sizes,
    model: qwen.QwenConfig = reference.MODEL,
    compute: dict[str, object] | None = None,
) -> Trainer:
    """Returns a trainer without Adam."""
    data, fsdp, tensor, *context = sizes
    devices = jax.devices()[: slices * int(np.prod(sizes))]
    mesh = train_mesh(data, fsdp, tensor, devices, *context, slices=slices)
    packing = test_learner.PACKINGS["two slots"]
    settings = reference.settings(train=packing, model=compute or {})
    trainer = make_trainer(settings, model, None, mesh)
    trainer.policy.optimizer = optax.identity()
    return trainer


def gradient_on(
    slices: int, sizes: Sizes, model: qwen.QwenConfig = reference.MODEL
) -> tuple[qwen.Params, Stats]:
    trainer = trainer_on(slices, sizes, model)
    minibatch = test_learner.packed_minibatch(trainer)
    return test_learner.gradient_of(trainer, minibatch, reference.random_params(model))


# -- meshes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tpu:
    """A TPU of one of several slices."""

    id: int
    process_index: int
    slice_index: int
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"


# Two slices of two hosts of two chips. The hosts are numbered across the slices.
TPUS = [Tpu(number, number // 2, (number // 2) % 2) for number in range(8)]


def test_the_first_axis_separates_the_slices() -> None:
    mesh = train_mesh(1, -1, 2, TPUS, slices=2)

    assert dict(mesh.shape) == {"slices": 2, "data": 1, "fsdp": 2, "tensor": 2}
    for number, devices in enumerate(mesh.devices):
        assert {device.slice_index for device in devices.flat} == {number}
    # The devices of a host share its heads.
    for devices in mesh.devices.reshape(-1, 2):
        assert len({device.process_index for device in devices}) == 1


@pytest.mark.parametrize(
    ("devices", "slices", "sizes", "message"),
    [
        (TPUS, 4, (1, -1, 1), "mesh.slices=4: the devices belong to 2 slices; set mesh.slices=2"),
        (TPUS, 1, (-1, 1, 1), "mesh.slices=1: the devices belong to 2 slices; set mesh.slices=2"),
        (TPUS[:7], 2, (1, -1, 1), "mesh.slices=2: the slices have different numbers of devices"),
        (TPUS, 2, (1, 8, 1), "mesh data=1 fsdp=8 tensor=1 does not fill the 4 devices of a slice"),
        ([replace(tpu, platform="gpu") for tpu in TPUS], 3, (1, -1, 1), "the 4 hosts"),
        ([], 3, (1, -1, 1), "mesh.slices=3 does not divide the 8 devices"),
    ],
    ids=["more slices", "fewer slices", "uneven", "too large", "hosts", "devices"],
)
def test_slices_that_the_devices_are_not(
    devices: list[Tpu], slices: int, sizes: Sizes, message: str
) -> None:
    data, fsdp, tensor = sizes
    with pytest.raises(UserError, match=message):
        train_mesh(data, fsdp, tensor, devices or None, slices=slices)


# -- the update ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slices", "sizes"),
    [
        (2, (1, 2, 2)),  # each weight is split over a slice
        (2, (2, 2, 1)),
        (2, (1, 2, 1, 2)),  # two devices share the tokens of a row
        (4, (2, 1, 1)),  # each device has all weights
    ],
    ids=str,
)
def test_gradient_is_that_of_each_sequence_alone(slices: int, sizes: Sizes) -> None:
    gradient, stats = gradient_on(slices, sizes)

    slow_loss, slow_gradient = test_learner.slow_step()
    reference.assert_same_gradient(gradient, slow_gradient)
    reference.assert_same_loss(stats["loss"], slow_loss)
    np.testing.assert_allclose(stats["mismatch_max"], test_learner.largest_mismatch(), rtol=1e-4)


@pytest.mark.parametrize(
    ("model", "sizes"),
    [(reference.MOE, (1, 2, 2)), (HYBRID, (1, 2, 1, 2))],
    ids=["experts", "delta nets"],
)
def test_experts_and_delta_nets(model: qwen.QwenConfig, sizes: Sizes) -> None:
    gradient, stats = gradient_on(2, sizes, model)

    expected, expected_stats = gradient_on(1, (1, 1, 1), model)
    reference.assert_same_gradient(gradient, expected, 2e-5)
    for name, value in expected_stats.items():
        np.testing.assert_allclose(stats[name], value, rtol=2e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_head_that_is_split_by_vocabulary(is_tied: bool) -> None:
    model = replace(reference.MODEL, vocab_size=64, tie_word_embeddings=is_tied)
    compute: dict[str, object] = {"logit_chunk": 16}

    gradients = []
    for slices, sizes in ((2, (1, 2, 2)), (1, (1, 1, 1))):
        trainer = trainer_on(slices, sizes, model, compute)
        minibatch = test_learner.packed_minibatch(trainer)
        params = reference.random_params(model)
        gradients.append(test_learner.gradient_of(trainer, minibatch, params)[0])

    reference.assert_same_gradient(*gradients)


def test_experts_on_accelerators_are_refused() -> None:
    mesh = train_mesh(1, -1, 1, TPUS, slices=2)

    with pytest.raises(UserError, match="mesh.slices=2: with experts every device of a slice"):
        check_experts_of_slices(reference.MOE, mesh)

    check_experts_of_slices(reference.MOE, train_mesh(-1, 1, 1, TPUS, slices=2))


def test_scores_are_those_of_each_sequence_alone() -> None:
    scores = test_learner.scores_of_rollouts(trainer_on(2, (1, 2, 2)))

    test_learner.assert_scores_are_those_of_each_sequence_alone(scores)


# -- what crosses the slices -----------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(1, 4, 1), (2, 2, 1), (1, 2, 2), (1, 2, 1, 2)], ids=str)
def test_only_the_sum_of_the_gradients_crosses_slices(sizes: Sizes) -> None:
    """Once in a step, after all microbatches, and each device sends only its shard."""
    # 64 words are split over the devices of a slice, in chunks of 16 tokens.
    model = replace(reference.MODEL, vocab_size=64)
    trainer = trainer_on(2, sizes, model, {"logit_chunk": 16})
    policy = trainer.policy
    function, arguments = policy.programs(abstract_batches(trainer), trainer.layouts)["update"]

    program = function.lower(*arguments).compile().as_text()

    collectives = crossing(program, devices_per_slice=4)
    assert {collective.kind for collective in collectives} == {"all-reduce"}
    assert not any(collective.is_repeated for collective in collectives)
    state = policy.abstract_state()
    num_bytes = sum(collective.bytes for collective in collectives)
    # The others are the statistics of the step.
    assert device_bytes(state.params) <= num_bytes < device_bytes(state.params) + 400


def test_each_slice_publishes_its_own_copy() -> None:
    """No weight crosses slices on its way to the decoders."""
    mesh = train_mesh(1, 2, 2, slices=2)
    params = jax.device_put(reference.random_params(), param_shardings(reference.MODEL, mesh))

    published = publisher(reference.MODEL, mesh, decode_mesh(mesh), "float32")(params)

    expected = reference.random_params()
    np.testing.assert_array_equal(published["embed"], expected["embed"])
    np.testing.assert_array_equal(published["layers"]["up"], expected["layers"]["up"])
