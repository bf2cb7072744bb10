"""The values that the decoder's programs take from the host and from each other.

`prefill` makes a `Prefix`, `insert` writes it into a `DecodeState`, and `generate` takes the state,
gives it back and returns `ResultTokens` beside it (`programs.py`). The names are JetStream's. An
`Arrival` and a `ResumePoint` are what the host says about one slot; they travel as columns of an
integer array.

Dimensions: L layers with attention, or in `slot_state` those with a gated delta net, K KV heads,
D head dim, T tokens of a padded prompt, G samples of a prompt.
"slots" and "prompts" are those of all slot shards; inside a program they are those of one shard.
"""

from typing import Generic, NamedTuple, TypeVar

from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

Leaf = TypeVar("Leaf")
"""A jax.Array, or what describes one: its PartitionSpec, its sharding, its ShapeDtypeStruct."""


class Prefix(NamedTuple, Generic[Leaf]):
    """Prefilled prompts: the keys and values of their tokens, and the first token of each sample.

    `prefill` samples the first token because it has the hidden state of the last prompt token.
    """

    k: Leaf  # [L, prompts, T, K, D] in the decoder's dtype
    v: Leaf  # the same for the values
    tokens: Leaf  # i32[prompts, G]
    logps: Leaf  # f32[prompts, G], as in ResultTokens
    kept: Leaf | None = None  # i32[prompts, G, K], as in ResultTokens
    # i16[prompts, T, L * k] the experts of every token, in all layers (`experts.routes_of`). None:
    # they are not remembered.
    routes: Leaf | None = None
    slot_state: PyTree = None  # leaves [L, prompts, ...], after the last tokens; or None


class DecodeState(NamedTuple, Generic[Leaf]):
    """The KV cache and the slots.

    All layers of a shard are in one pool, and page p of layer l is row l * pages_per_shard + p.
    The pool so is one array that the loop over layers carries and that every layer writes in place:
    an array per layer, cut out of a stack and put back, would be copied in every layer of every
    step. KV heads come first because TPU kernels want [heads, pages, page_size, width].
    """

    # [K, shards * L * pages_per_shard, page_size, D], rows as the kernels want them; or a
    # pools.QuantizedPool of this shape.
    k_pool: PyTree
    v_pool: PyTree  # the same for the values
    tokens: Leaf  # i32[slots] the input of the next step
    positions: Leaf  # i32[slots] where this input sits, which is the number of tokens with KV
    limits: Leaf  # i32[slots] the number of tokens at which the sequence ends
    requests: Leaf  # i32[slots] the number that keys the noise of the sequence
    temperature: Leaf  # f32[slots]
    active: Leaf  # bool[slots] whether the slot decodes
    # What layers without attention keep of the sequence in a slot (`slot_state.py`): a DeltaState
    # of leaves [L, slots, ...]. None if all layers have attention.
    slot_state: PyTree = None


class ResultTokens(NamedTuple, Generic[Leaf]):
    """What one call of `generate` sampled: slot s has tokens[s, :counts[s]].

    Log-probabilities are fp32, at the sampling temperature (at 1 where it is 0), over the full
    vocabulary. Where the tokens that the filters kept are remembered, they are over these.
    """

    tokens: Leaf  # i32[slots, decode_steps]
    logps: Leaf  # f32[slots, decode_steps]
    counts: Leaf  # i32[slots]
    kept: Leaf | None = None  # i32[slots, decode_steps, K] tokens that the filters kept; -1: none
    # i16[slots, decode_steps, L * k] the experts of the step's input, which predicted the token.
    routes: Leaf | None = None


class SampledTokens(NamedTuple, Generic[Leaf]):
    """What is known of the tokens that one step sampled, or several: as in `ResultTokens`."""

    tokens: Leaf
    logps: Leaf
    kept: Leaf | None = None
    routes: Leaf | None = None


class Arrival(NamedTuple, Generic[Leaf]):
    """A sample that `insert` starts in a slot: integers, or i32[arrivals] on the device."""

    slot: Leaf  # of the shard; slots_per_shard and above: no slot, the column is padding
    prefix_row: Leaf  # the row of its prompt in the shard's Prefix
    sample_index: Leaf  # among the samples of this prompt
    length: Leaf  # tokens whose KV the prefix holds
    limit: Leaf
    request: Leaf


class Start(NamedTuple, Generic[Leaf]):
    """A sequence that begins to decode in a slot whose pages have all but its last token.

    Integers, or i32[starts] on the device.
    """

    slot: Leaf  # of the shard; slots_per_shard and above: no slot, the column is padding
    token: Leaf  # the last token, which is the input of the next step
    position: Leaf  # where it sits
    limit: Leaf
    request: Leaf


class ResumePoint(NamedTuple, Generic[Leaf]):
    """Where a slot goes on after a pause between two turns; a limit of 0 changes nothing."""

    token: Leaf  # the input of the next step
    position: Leaf  # where it sits
    limit: Leaf  # the new number of tokens at which the sequence ends


# How the values are split over the slot shards. Only the axis "slots" is manual in the programs,
# so only this axis is named here. The split over "tensor" follows from the weights.
PREFIX_SPECS = Prefix(P(None, "slots"), P(None, "slots"), P("slots"), P("slots"))
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


class LayerCarry(NamedTuple):
    """What the layers read and change, from one layer to the next."""

    k: PyTree  # the keys of all layers with attention, in pages or as in Prefix
    v: PyTree
    slot_state: PyTree  # as in DecodeState or Prefix
