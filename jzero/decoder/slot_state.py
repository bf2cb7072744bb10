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

A pass with drafts (`draft_program.py`) therefore leaves the states as they are until it has
sampled. It keeps the inputs of its tokens, which take about a hundredth of a state for each token,
and then computes the accepted tokens a second time:

    before_draft   makes room for the inputs of all gated delta nets
    recur_draft    computes the tokens of a slot in one layer, and keeps their inputs
    after_draft    advances the states of all layers by the used tokens
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jzero.model.architecture import QwenConfig
from jzero.model.arithmetic import Arithmetic
from jzero.model.delta_net import DeltaInputs, DeltaState, empty_state
from jzero.model.layers import unrolls_layers

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


# -- drafts ----------------------------------------------------------------------------------------


class PassInputs(NamedTuple):
    """The arrays of `DeltaInputs` of all gated delta nets, for n tokens of every slot."""

    channels: Float[Array, "L slots n C"]
    kernel: Float[Array, "L C W"]
    log_decay: Float[Array, "L slots n H"]
    strength: Float[Array, "L slots n H"]


class DraftStates(NamedTuple):
    """The states before a pass with drafts, and the inputs of its tokens."""

    states: DeltaState  # leaves [L, slots, ...]
    inputs: PassInputs


def before_draft(
    model: QwenConfig,
    dtype: DTypeLike,
    states: DeltaState | None,
    width: int,
) -> DraftStates | None:
    """Returns the states with room for the inputs of `width` tokens of every slot.

    dtype: of weights and activations.
    """
    if states is None or model.delta_net is None:
        return None
    sizes = model.delta_net
    layers, slots = states.recurrent.shape[:2]
    gates = jnp.zeros((layers, slots, width, sizes.num_value_heads), jnp.float32)
    inputs = PassInputs(
        channels=jnp.zeros((layers, slots, width, sizes.num_channels), dtype),
        kernel=jnp.zeros((layers, sizes.num_channels, sizes.kernel_size), dtype),
        log_decay=gates,
        strength=gates,
    )
    return DraftStates(states, inputs)


def recur_draft(
    arithmetic: Arithmetic,
    inputs: DeltaInputs,
    is_token: Bool[Array, " rows"],
    layer: Int[Array, ""],
    draft: DraftStates,
) -> tuple[Float[Array, "rows 1 H V"], DraftStates]:
    """Computes the tokens of every slot in one layer from the slot's state, and keeps their inputs.

    inputs, is_token: of rows of one token each; the tokens of a slot are neighbors, in order.
    """
    slots = draft.states.recurrent.shape[1]

    def by_slot(x: jax.Array) -> jax.Array:
        """[rows, 1, ...] -> [slots, n, ...]"""
        return x.reshape(slots, -1, *x.shape[2:])

    inputs = inputs._replace(
        channels=by_slot(inputs.channels),
        log_decay=by_slot(inputs.log_decay),
        strength=by_slot(inputs.strength),
    )
    segments = by_slot(is_token[:, None]).astype(jnp.int32)
    out, _ = arithmetic.recurrence.drafts(inputs, segments, take_layer(draft.states, layer))

    def keep(stack: jax.Array, value: jax.Array) -> jax.Array:
        # `after_draft` has to compute with the same numbers.
        assert value.dtype == stack.dtype, f"{value.dtype=} {stack.dtype=}"
        return lax.dynamic_update_index_in_dim(stack, value, layer, 0)

    kept = jax.tree.map(keep, draft.inputs, PassInputs(*inputs[:4]))
    return out.reshape(-1, 1, *out.shape[2:]), draft._replace(inputs=kept)


def after_draft(
    model: QwenConfig,
    arithmetic: Arithmetic,
    draft: DraftStates | None,
    num_used: Int[Array, " slots"],
) -> DeltaState | None:
    """Returns the states after the first `num_used` tokens of every slot, which may be none."""
    if draft is None or model.delta_net is None:
        return None
    sizes = model.delta_net
    layers, _, width, _ = draft.inputs.channels.shape
    is_used = (jnp.arange(width) < num_used[:, None]).astype(jnp.int32)

    def advance_layer(
        states: DeltaState, scanned: tuple[jax.Array, PassInputs]
    ) -> tuple[DeltaState, None]:
        layer, inputs = scanned
        _, next_states = arithmetic.recurrence.drafts(
            DeltaInputs(*inputs, sizes), is_used, take_layer(states, layer)
        )
        return with_layer(states, layer, next_states), None

    with arithmetic.products():
        scanned = jnp.arange(layers), draft.inputs
        states, _ = lax.scan(advance_layer, draft.states, scanned, unroll=unrolls_layers())
    return states
