"""The values that pass between the host and the decoder's programs, and between these programs.

`prefill` makes a `Prefix`, `insert` writes it into a `DecodeState`, and `generate` takes the state
and returns it with `ResultTokens` (`programs.py`). The names are JetStream's. An `Arrival`, a
`Start` and a `ResumePoint` describe one slot; the host sends them as columns of an integer array.

Dimensions: L layers with attention (the last one may be that of `model.mtp`), or in `slot_state`
layers with a gated delta net, K KV heads, D head dim, T tokens of a padded prompt, G samples of a
prompt. "slots" and "prompts" count all slot shards; inside a program they count one shard.
"""

from typing import Generic, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from jzero.decoder.sampling import SlotFilters
from jzero.model.linear import RowAdapters

Leaf = TypeVar("Leaf")
"""A jax.Array, or what describes one: its PartitionSpec, its sharding, its ShapeDtypeStruct."""


class Prefix(NamedTuple, Generic[Leaf]):
    """Prefilled prompts: the keys and values of their tokens, and the first token of each sample.

    `prefill` samples the first token because it has the hidden state of the last prompt token.
    """

    k: Leaf  # [L, prompts, T, K, D] in the decoder's dtype
    v: Leaf  # the same for the values
    # The first tokens: [prompts, G, *shape] by track, as in ResultTokens, without tracks of inputs.
    tracks: PyTree
    # Tracks of inputs, [prompts, T, *shape]: the values of all tokens of the prompts.
    input_tracks: PyTree
    slot_state: PyTree = None  # leaves [L, prompts, ...], after the last tokens; or None
    # For drafts of the model's own head: [prompts, E] the hidden states of the last tokens.
    hidden: Leaf | None = None


class DecodeState(NamedTuple, Generic[Leaf]):
    """The KV cache and the slots.

    All layers of a shard share one pool: page p of layer l is row l * pages_per_shard + p, or the
    row that `rings.py` gives it if layers with a window keep fewer pages than others. The loop over
    layers carries this one array, and every layer writes it in place. Separate arrays per layer,
    cut out of a stack and put back, would be copied in every layer of every step. KV heads come
    first because TPU kernels require [heads, pages, page_size, width].
    """

    # [K, shards * pages of all layers, page_size, D], with rows in the kernels' layout; or a
    # pools.QuantizedPool of this shape.
    k_pool: PyTree
    v_pool: PyTree  # the same for the values
    tokens: Leaf  # i32[slots] the input of the next step
    # i32[slots] position of this input, which equals the number of tokens with KV
    positions: Leaf
    limits: Leaf  # i32[slots] the number of tokens at which the sequence ends
    requests: Leaf  # i32[slots] the number that keys the noise of the sequence
    temperature: Leaf  # f32[slots]
    active: Leaf  # bool[slots] whether the slot decodes
    # The recurrent states of the slots (`slot_state.py`): a DeltaState with leaves [L, slots, ...].
    # None if all layers have attention.
    slot_state: PyTree = None
    drafts: PyTree = None  # with rollout.draft: a `drafts.DraftState`


class ResultTokens(NamedTuple, Generic[Leaf]):
    """The tokens that one call of `generate` sampled: slot s has the first counts[s] of its row."""

    # [slots, decode_steps, *shape] by track of `tokens.TRACKS`: "ids", "logps", and the optional
    # tracks that the engine records. A track of inputs has the values of the step's input. With
    # drafts the second axis has all tokens that decode_steps passes can emit.
    tracks: dict[str, Leaf]
    counts: Leaf  # i32[slots]
    # With drafts: i32[slots, 3] passes, tokens of drafts, accepted tokens of drafts.
    drafts: Leaf | None = None


class Arrival(NamedTuple, Generic[Leaf]):
    """A sample that `insert` starts in a slot: integers, or i32[arrivals] on the device."""

    slot: Leaf  # within the shard; slots_per_shard and above: padding column
    prefix_row: Leaf  # the row of the sample's prompt in the shard's Prefix
    sample_index: Leaf  # index among the samples of this prompt
    length: Leaf  # tokens whose KV the prefix holds
    limit: Leaf
    request: Leaf


class Start(NamedTuple, Generic[Leaf]):
    """A sequence that starts decoding in a slot with KV for all but its last token.

    Integers, or i32[starts] on the device.
    """

    slot: Leaf  # within the shard; slots_per_shard and above: padding column
    token: Leaf  # the last token, which is the input of the next step
    position: Leaf  # the position of `token`
    limit: Leaf
    request: Leaf


class ResumePoint(NamedTuple, Generic[Leaf]):
    """The point from which a slot resumes after a pause between two turns. Limit 0: no change."""

    token: Leaf  # the input of the next step
    position: Leaf  # the position of `token`
    limit: Leaf  # the number of tokens at which the next turn ends


class PromptChoices(NamedTuple):
    """What requests to a server choose for one call of `prefill`."""

    filters: SlotFilters  # of every prompt
    adapters: RowAdapters | None  # of every prompt, in an adapter bank; None without a bank


class Choices(NamedTuple):
    """What requests to a server choose for one call of `generate`."""

    filters: SlotFilters  # of every slot
    num_steps: (
        jax.Array | np.ndarray
    )  # i32[shards] of the call, at most `decode_steps`; the same for all shards
    adapters: RowAdapters | None  # of every slot, in an adapter bank; None without a bank


# How the values are split over the slot shards. Only the axis "slots" is manual in the programs, so
# only "slots" is named here. The split over "tensor" follows from the weights.
PREFIX_SPECS = Prefix(
    k=P(None, "slots"),
    v=P(None, "slots"),
    tracks=P("slots"),  # of every track
    input_tracks=P("slots"),
)
STATE_SPECS = DecodeState(
    k_pool=P(None, "slots"),
    v_pool=P(None, "slots"),
    tokens=P("slots"),
    positions=P("slots"),
    limits=P("slots"),
    requests=P("slots"),
    temperature=P("slots"),
    active=P("slots"),
)


class CacheArrays(NamedTuple):
    """The arrays that every layer updates and passes to the next layer. See `caches.py`."""

    k: PyTree  # the keys of all layers with attention, in pages or as in Prefix
    v: PyTree
    slot_state: PyTree  # as in DecodeState or Prefix, or in a pass with drafts: a DraftStates
