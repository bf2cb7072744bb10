"""Adam's moments in host memory between updates: the same bits, and no room on the devices."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import reference
from test_train import exported_weights, reproducible_metrics, tiny_run
from tiny import policy_learner

from jzero import algorithms
from jzero.loops import rl
from jzero.run.memory import live_bytes
from jzero.sharding.mesh import train_mesh
from jzero.training.offload import HOST_MEMORY, at_rest, on_device
from jzero.training.trainer import make_trainer
from jzero.types import State


def moments(state: State) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]


@pytest.mark.usefixtures("quick_compilation")
def test_moments_move_to_the_host_and_back_bit_for_bit() -> None:
    mesh = train_mesh(1, 2, 2, jax.devices()[:4])
    settings = reference.settings(optimizer={"offload": True})
    trainer = make_trainer(settings, reference.MODEL, None, mesh)
    policy = policy_learner(reference.MODEL, settings, mesh)
    first = policy.start(reference.placed(policy, reference.random_params()))
    state = replace(first, opt_state=jax.tree.map(lambda x: x + 1, first.opt_state))
    before = jax.device_get(state.opt_state)
    on_devices = moments(state)
    places = [leaf.sharding for leaf in on_devices]

    rested = at_rest(trainer, state)

    assert all(leaf.is_deleted() for leaf in on_devices)
    assert {leaf.sharding.memory_kind for leaf in moments(rested)} == {HOST_MEMORY}
    assert rested.params is state.params
    copy = on_device(rested, is_donated=False)
    assert [leaf.sharding for leaf in moments(copy)] == places
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(copy.opt_state), before)
    again = on_device(rested)
    assert all(leaf.is_deleted() for leaf in moments(rested))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(again.opt_state), before)


def test_what_is_on_the_host_takes_no_memory_of_a_device() -> None:
    device = jax.devices()[0]
    there = jax.sharding.SingleDeviceSharding(device, memory_kind=HOST_MEMORY)
    kind = "float32[31,17]"
    held = jax.device_put(np.ones((31, 17), np.float32), there)
    assert kind not in live_bytes()[0]
    moved = jax.device_put(held, jax.sharding.SingleDeviceSharding(device))
    assert live_bytes()[0][kind] == moved.nbytes


@pytest.mark.usefixtures("quick_runs", "explicit_transfers")
def test_a_run_with_offloaded_moments_has_the_same_numbers(tmp_path: Path) -> None:
    """Policy and critic, from the start and from a checkpoint."""

    def run(name: str, steps: int, offload: bool) -> None:
        config = tiny_run(steps, algorithms.PRESETS["ppo"]())
        config.optimizer = replace(config.optimizer, offload=offload)
        rl.train(config, tmp_path / name)

    run("on devices", 3, offload=False)
    run("offloaded", 2, offload=True)
    run("offloaded", 3, offload=True)

    metrics = reproducible_metrics(tmp_path / "on devices")
    assert len(metrics) == 3
    assert reproducible_metrics(tmp_path / "offloaded") == metrics
    weights = [exported_weights(tmp_path / name, 3) for name in ("on devices", "offloaded")]
    assert weights[0] == weights[1]
