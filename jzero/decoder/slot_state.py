"""The recurrent states of the decoder's slots, for models with gated delta nets.

Layers with attention keep a key and a value of every token, in pages. A gated delta net keeps one
state of a fixed size instead (`delta_net.DeltaState`), which every token overwrites. A shard has
the states of all its slots in one `DeltaState` with leaves [L, slots, ...], L being the number of
gated delta nets. A model without gated delta nets has None instead, and calls nothing in this file.

    prefill    computes the state after the last token of every prompt, starting from zero
    insert     copies the state of a prompt into the slot of each of its samples
    generate   overwrites the states of the slots that decode, step by step
    score      continues the states of the rows for scoring, which are separate arrays

States differ from pages in two ways. A state cannot be shared, so every sample of a prompt has a
copy, and `insert` overwrites the complete state of the slot's previous sequence. And a state cannot
be rolled back: pages may be rewritten from any token on, but a state that has processed one token
too many is lost. `Scheduler._end_turn` detects this case, and the sequence is prefilled again.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from jzero.model.architecture import QwenConfig
from jzero.model.delta_net import DeltaState, empty_state

SLOT_SPEC = P(None, "slots")
"""How the leaves [L, slots, ...] are split over the shards."""


def specs_of(model: QwenConfig) -> P | None:
    """Returns how the states are split over the slot shards, or None without such states."""
    return SLOT_SPEC if model.delta_net else None


def empty_slots(model: QwenConfig, slots: int) -> DeltaState | None:
    """Returns the states of empty slots, or None without such states."""
    if model.delta_net is None:
        return None
    return empty_state(model.delta_net, len(model.delta_layers), slots)


class StateSpecs(NamedTuple):
    """Partition specs of the arrays of a `DeltaState`."""

    recurrent: P
    convolution: P


def sharding_specs(model: QwenConfig, tensor: int) -> StateSpecs | None:
    """Returns the partition specs of the states on a mesh with axes (slots, tensor)."""
    sizes = model.delta_net
    if sizes is None:
        return None
    # Value heads and channels are split if `tensor` divides their numbers, as XLA then splits the
    # products that compute them.
    heads = "tensor" if sizes.num_value_heads % tensor == 0 else None
    channels = "tensor" if sizes.num_channels % tensor == 0 else None
    return StateSpecs(
        recurrent=P(None, "slots", heads), convolution=P(None, "slots", None, channels)
    )


def take_layer(states: DeltaState, layer: Int[Array, ""]) -> DeltaState:
    """Returns the states of one gated delta net, [slots, ...]."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, layer, 0, keepdims=False), states)


def with_layer(states: DeltaState, layer: Int[Array, ""], new_states: DeltaState) -> DeltaState:
    """Returns `states` with the states of one gated delta net replaced by `new_states`."""

    def update(stack: jax.Array, layer_states: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(stack, layer_states.astype(stack.dtype), layer, 0)

    return jax.tree.map(update, states, new_states)


def copy_rows(
    source: DeltaState,
    source_rows: Int[Array, " copies"],
    target: DeltaState,
    target_rows: Int[Array, " copies"],
) -> DeltaState:
    """Returns `target` with copies of rows of `source`, in all layers.

    Copies to a row that does not exist are dropped.
    """

    def copy(source: jax.Array, target: jax.Array) -> jax.Array:
        # Padding rows are clipped to some row here, and dropped below.
        rows = source.at[:, source_rows].get(mode="clip")
        return target.at[:, target_rows].set(rows, mode="drop")

    return jax.tree.map(copy, source, target)


def begin_rows(
    states: DeltaState,
    rows: Int[Array, " rows"],
    starts: Int[Array, " rows"],
) -> DeltaState:
    """Returns the states of `rows`, [L, rows, ...], with zeros where `starts` is 0."""

    def take(x: jax.Array) -> jax.Array:
        taken = x.at[:, rows].get(mode="clip")
        continues = (starts > 0).reshape(1, -1, *(1 for _ in x.shape[2:]))
        return jnp.where(continues, taken, 0)

    return jax.tree.map(take, states)
