"""Optimizer offload: the optimizer state in host memory between updates.

With optimizer.offload Adam's moments are on the devices only during updates. While responses are
sampled, scored and graded, the moments are in the pinned memory of each device's host. A device
thus needs memory for either the decoder or the moments, but not for both.

    state = at_rest(trainer, state)  # after an update, and before the first update
    state = on_device(state)         # before an update

Both functions copy the state bit for bit.
"""

from dataclasses import replace

import jax
import optax
from jax.sharding import SingleDeviceSharding

from jzero.training.learner import Learner
from jzero.training.trainer import Trainer
from jzero.types import State

HOST_MEMORY = "pinned_host"  # JAX's name for host memory that devices can read


def at_rest(trainer: Trainer, state: State) -> State:
    """Moves the moments of the learners with optimizer.offload to host memory.

    `state` is donated.
    """
    rested = moments_at_rest(trainer.policy, replace(state, critic=None))
    if trainer.critic is None or state.critic is None:
        return rested
    return replace(rested, critic=moments_at_rest(trainer.critic, state.critic))


def moments_at_rest(learner: Learner, state: State) -> State:
    """Moves the moments of one learner's State to host memory, if the learner offloads them."""
    if not learner.settings.offload:
        return state
    return replace(state, opt_state=move_moments(state.opt_state, HOST_MEMORY, is_donated=True))


def on_device(state: State, is_donated: bool = True) -> State:
    """Moves the moments of a State to the devices. Arrays on the devices are not copied."""
    # The critic is a nested State inside the policy's State.
    critic = on_device(state.critic, is_donated) if state.critic else None
    return replace(state, opt_state=move_moments(state.opt_state, None, is_donated), critic=critic)


def device_memory(array: jax.Array) -> str:
    """Returns JAX's name for the default memory of the array's devices."""
    return next(iter(array.sharding.device_set)).default_memory().kind


def move_moments(moments: optax.OptState, memory: str | None, is_donated: bool) -> optax.OptState:
    """Moves arrays to another memory of the same devices; None: the devices' default memory.

    is_donated: deletes the originals of moved arrays. Scalars are not moved.
    """

    def move(array: jax.Array) -> jax.Array:
        kind = memory or device_memory(array)
        # The only scalars are counts of steps.
        if array.ndim == 0 or array.sharding.memory_kind == kind:
            return array
        # Shard by shard, because with several hosts no host has the complete array.
        shards = [
            jax.device_put(shard.data, SingleDeviceSharding(shard.device, memory_kind=kind))
            for shard in array.addressable_shards
        ]
        jax.block_until_ready(shards)
        sharding = array.sharding.with_memory_kind(kind)
        copied = jax.make_array_from_single_device_arrays(array.shape, sharding, shards)
        if is_donated:
            array.delete()
        return copied

    return jax.tree.map(move, moments)
