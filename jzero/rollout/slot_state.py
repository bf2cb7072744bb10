"""What a slot of the decoder keeps beside its pages: the states of the model's gated delta nets.

Layers with attention keep a key and a value of every token, in pages. A gated delta net keeps one
state of a fixed size instead (`delta_net.DeltaState`), which every token overwrites. A shard has
the states of all its slots in one `DeltaState`, whose leaves are [L, slots, ...] with L gated delta
nets. A model without gated delta nets has None in its place, and nothing here is called.

    prefill    computes the state after the last token of every prompt, from no tokens
    insert     copies the state of a prompt into the slot of each of its samples
    generate   overwrites the states of the slots that decode, step by step
    score      goes on with the states of the rows for scoring, which are separate arrays

Two things are not as with pages. A state cannot be shared, so every sample of a prompt has a copy.
`insert` overwrites all of it, and nothing of the sequence before is left in the slot. And a state
cannot go back: pages may be written again from any token on, but a state that has seen a token too
many is lost. `Scheduler._end_turn` says when that happens, and prefills the sequence again.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, PyTree

from jzero.model.architecture import QwenConfig
from jzero.model.delta_net import DeltaState, empty_state

OF_SLOTS = P(None, "slots")
"""How the leaves [L, slots, ...] are split over the shards."""


def specs_of(model: QwenConfig) -> P | None:
    """Returns how the states are split over the slot shards, or None if the model has none."""
    return OF_SLOTS if model.delta_net else None


def empty_slots(model: QwenConfig, slots: int) -> DeltaState | None:
    """Returns the states of slots without tokens, or None if the model keeps none."""
    if model.delta_net is None:
        return None
    return empty_state(model.delta_net, len(model.delta_layers), slots)


def sharding_specs(model: QwenConfig, tensor: int) -> PyTree:
    """Returns a DeltaState of how the states lie on a mesh of the axes (slots, tensor), or None.

    Value heads and channels are split, as XLA splits the products that make them, if `tensor`
    divides their numbers.
    """
    sizes = model.delta_net
    if sizes is None:
        return None
    heads = "tensor" if sizes.num_value_heads % tensor == 0 else None
    channels = "tensor" if sizes.num_channels % tensor == 0 else None
    of_recurrent, of_convolution = P(None, "slots", heads), P(None, "slots", None, channels)
    return DeltaState._make((of_recurrent, of_convolution))


def of_layer(states: DeltaState, layer: Int[Array, ""]) -> DeltaState:
    """Returns the states of one gated delta net, [slots, ...]."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, layer, 0, keepdims=False), states)


def with_layer(states: DeltaState, layer: Int[Array, ""], new: DeltaState) -> DeltaState:
    """Returns the states with those of one gated delta net replaced."""

    def update(stack: jax.Array, of_layer: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(stack, of_layer.astype(stack.dtype), layer, 0)

    return jax.tree.map(update, states, new)


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
        rows = source.at[:, source_rows].get(mode="clip")
        return target.at[:, target_rows].set(rows, mode="drop")

    return jax.tree.map(copy, source, target)


def begin_rows(
    states: DeltaState, rows: Int[Array, " rows"], starts: Int[Array, " rows"]
) -> DeltaState:
    """Returns the states of `rows`, [L, rows, ...]: those of no tokens where `starts` is 0."""

    def take(x: jax.Array) -> jax.Array:
        taken = x.at[:, rows].get(mode="clip")
        goes_on = (starts > 0).reshape(1, -1, *(1 for _ in x.shape[2:]))
        return jnp.where(goes_on, taken, 0)

    return jax.tree.map(take, states)
