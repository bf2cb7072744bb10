"""The optimizer's state in host memory, while nothing updates.

With optimizer.offload Adam's moments are on the devices in updates alone: while responses are
sampled, scored and graded, they lie in the pinned memory of each device's host. A device then needs
room for the decoder or for the moments, and not for both.

    state = at_rest(trainer, state)  # after an update, and before the first one
    state = on_device(state)         # before an update

Both move bits and change none.
"""

from dataclasses import replace

import jax
import optax
from jax.sharding import SingleDeviceSharding

from jzero.training.learner import Learner
from jzero.training.trainer import Trainer
from jzero.types import State

HOST_MEMORY = "pinned_host"  # JAX's name of memory of the host that devices can read


def at_rest(trainer: Trainer, state: State) -> State:
    """Returns a State whose moments are in host memory, for the learners that offload them.

    `state` is donated.
    """
    rested = moments_at_rest(trainer.policy, replace(state, critic=None))
    if trainer.critic is None or state.critic is None:
        return rested
    return replace(rested, critic=moments_at_rest(trainer.critic, state.critic))


def moments_at_rest(learner: Learner, state: State) -> State:
    """Returns the State of one learner with its moments where they wait for the next update."""
    if not learner.settings.offload:
        return state
    return replace(state, opt_state=moved(state.opt_state, HOST_MEMORY, is_donated=True))


def on_device(state: State, is_donated: bool = True) -> State:
    """Returns a State all of which is on the devices. What is there already is not copied."""
    critic = on_device(state.critic, is_donated) if state.critic else None
    return replace(state, opt_state=moved(state.opt_state, None, is_donated), critic=critic)


def device_memory(array: jax.Array) -> str:
    """Returns JAX's name of the own memory of the devices that an array belongs to."""
    return next(iter(array.sharding.device_set)).default_memory().kind


def moved(moments: optax.OptState, memory: str | None, is_donated: bool) -> optax.OptState:
    """Returns arrays in another memory of the same devices; None: the devices' own.

    is_donated: deletes arrays that move where they were. Numbers without axes stay where they are.
    """

    def move(array: jax.Array) -> jax.Array:
        kind = memory or device_memory(array)
        if array.ndim == 0 or array.sharding.memory_kind == kind:
            return array
        # Shard by shard: with several hosts none of them has all of an array.
        shards = [
            jax.device_put(shard.data, SingleDeviceSharding(shard.device, memory_kind=kind))
            for shard in array.addressable_shards
        ]
        jax.block_until_ready(shards)
        sharding = array.sharding.with_memory_kind(kind)
        there = jax.make_array_from_single_device_arrays(array.shape, sharding, shards)
        if is_donated:
            array.delete()
        return there

    return jax.tree.map(move, moments)
