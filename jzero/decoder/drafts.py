"""Finds drafts on the device, and decides whether a pass with drafts pays.

A draft is the continuation of the place where the last tokens of a sequence have occurred before:
in its prompt, in its own tokens, or in other responses to the same problem (references). Slots keep
these tokens on the device (`DraftState`), so that the loop over passes needs no host. The drafts of
rollout.draft=mtp come from a head of the model instead (`head_drafts.py`).

A pass of the model computes 1 + n tokens of every slot, for one of a few lengths n. Longer drafts
take more time and save more passes where they are accepted. `gains` compares the two: the time was
measured (`draft_cost`), and the expected number of accepted tokens follows from the recent share of
accepted tokens in drafts whose match was as long.
"""

from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jzero import attention
from jzero.config import drafts
from jzero.errors import UserError

Leaf = TypeVar("Leaf")

SEPARATOR = -1
"""Between two references, and after the last one. No token equals it."""

# Every match length starts with a share of accepted tokens that counts as much as this many tokens:
# FIRST_SHARE after the longest match, and proportionally less after shorter ones.
PRIOR_TOKENS = 6
FIRST_SHARE = 0.7
# A pass forgets this share of all drafts so far. The shares of accepted tokens therefore return to
# their start, and match lengths that did not pay are tried again: once in some hundred passes.
FORGETTING = 1e-3


class Drafting(NamedTuple):
    """The numbers of rollout.draft that are compiled into a program."""

    tokens: int  # k
    match: int
    reach: int  # tokens of references; 0: none
    by_head: bool = False  # from the model's own head, and not looked up

    @property
    def passed(self) -> int:
        """Returns the most tokens of a slot in one pass."""
        return 1 + self.tokens

    @property
    def lengths(self) -> tuple[int, ...]:
        """Returns the lengths of drafts that a pass may check: k, its half and its quarter."""
        return tuple(sorted({self.tokens // part for part in (1, 2, 4)} - {0}))


class DraftState(NamedTuple, Generic[Leaf]):
    """What the slots keep for drafts, and how many drafts were accepted."""

    # i32[slots, reach + longest sequence]: references, then the sequence. A token at position p of
    # the sequence is at reach + p. None for drafts of a head.
    texts: Leaf | None
    # f32[shards, 2, match]: accepted and rejected tokens, by length of the match. A draft has at
    # most one rejected token: what follows it was not tried.
    outcomes: Leaf
    # [slots, E] the model's hidden state at the position before the input, for drafts of a head.
    hidden: Leaf | None = None


class Drafts(NamedTuple):
    """The drafts of all slots for one pass."""

    tokens: Int[Array, "slots k"]
    counts: Int[Array, " slots"]  # tokens of each draft
    # Tokens before the draft that were found; 0: no draft. 1 for every draft of a head.
    matches: Int[Array, " slots"]


def specs_of(drafting: Drafting | None) -> DraftState[P] | None:
    """Returns how the state is split over the slot shards, or None without drafts."""
    if drafting is None:
        return None
    by_slot = P("slots")
    if drafting.by_head:
        return DraftState(texts=None, outcomes=by_slot, hidden=by_slot)
    return DraftState(texts=by_slot, outcomes=by_slot)


def numbers_of(draft: drafts.Draft | None) -> Drafting | None:
    """Returns the numbers of rollout.draft that are compiled into programs; None: no drafts."""
    if draft is None:
        return None
    if isinstance(draft, drafts.Mtp):
        return Drafting(draft.tokens, match=1, reach=0, by_head=True)
    reach = 0 if isinstance(draft, drafts.Ngram) else draft.reach
    return Drafting(draft.tokens, draft.match, reach)


def check(backend: attention.Backend) -> None:
    """Raises UserError if the decoder cannot compute several tokens of a slot in one pass."""
    if backend.decode is not None:
        raise UserError(
            "rollout.draft: the kernel of model.attention=tpu_fused writes one token of a slot in "
            "a pass: set rollout.draft=none, or leave model.attention out"
        )


def find(
    drafting: Drafting,
    texts: Int[Array, "slots width"],
    positions: Int[Array, " slots"],
) -> Drafts:
    """Returns a draft for every slot, from the longest match; of equally long ones the latest.

    positions: of the last token of each slot, which is in `texts`.
    """
    slots, width = texts.shape
    ends = drafting.reach + positions
    column = jnp.arange(width)

    # lengths[s, j]: how many tokens up to column j equal the last tokens of slot s.
    is_equal = jnp.ones((slots, width), bool)
    lengths = jnp.zeros((slots, width), jnp.int32)
    for back in range(drafting.match):
        place = ends - back
        last = jnp.take_along_axis(texts, jnp.maximum(place, 0)[:, None], axis=1)
        # Tokens before the first one of the sequence equal nothing.
        last = jnp.where((place >= drafting.reach)[:, None], last, SEPARATOR - 1)
        shifted = jnp.pad(texts, ((0, 0), (back, 0)), constant_values=SEPARATOR)[:, :width]
        # The first difference ends a match: longer ones need every token before it.
        is_equal &= shifted == last
        lengths += is_equal

    # The end of the sequence would match itself.
    lengths = jnp.where(column < ends[:, None], lengths, 0)
    # The length decides, and the column only among equal lengths.
    best = jnp.argmax(lengths * width + column, axis=1)
    matches = jnp.take_along_axis(lengths, best[:, None], axis=1)[:, 0]
    # A match that ends shortly before the last token is a period: the draft repeats it.
    steps = jnp.arange(drafting.tokens) % jnp.maximum(ends - best, 1)[:, None]
    columns = jnp.minimum(best[:, None] + 1 + steps, width - 1)
    tokens = jnp.take_along_axis(texts, columns, axis=1)
    # A draft from a reference ends with the reference.
    is_token = jnp.cumprod(tokens >= 0, axis=1)
    counts = jnp.where(matches > 0, is_token.sum(axis=1), 0)
    return Drafts(tokens, counts, jnp.where(counts > 0, matches, 0))


def expected_of_head(drafting: Drafting, slots: int) -> Drafts:
    """Returns drafts of a head before their tokens are known: all of them are equally likely."""
    tokens = jnp.zeros((slots, drafting.tokens), jnp.int32)
    return Drafts(tokens, jnp.full(slots, drafting.tokens), jnp.ones(slots, jnp.int32))


def with_forced(
    found: Drafts,
    forced: Int[Array, "slots steps"],
    counts: Int[Array, " slots"],
) -> Drafts:
    """Replaces the drafts of slots that take a reply by the next tokens of the reply.

    forced, counts: as in `programs.generate`, and the tokens that this call has emitted.
    """
    columns = counts[:, None] + jnp.arange(found.tokens.shape[1])
    is_inside = columns < forced.shape[1]
    columns = jnp.minimum(columns, forced.shape[1] - 1)
    replies = jnp.take_along_axis(forced, columns, axis=1)
    # A reply is known in advance, so a draft of it is always accepted.
    num_replies = jnp.cumprod(is_inside & (replies >= 0), axis=1).sum(axis=1)
    is_reply = num_replies > 0
    return Drafts(
        jnp.where(is_reply[:, None], replies, found.tokens),
        jnp.where(is_reply, num_replies, found.counts),
        # Replies are no matches, and stay out of the averages.
        jnp.where(is_reply, 0, found.matches),
    )


def gains(
    drafting: Drafting,
    found: Drafts,
    outcomes: Float[Array, "1 2 match"],
    running: Bool[Array, " slots"],
    costs: Float[Array, " lengths"],
) -> Float[Array, " lengths"]:
    """Returns what a pass is expected to gain with drafts of each length, beyond what it costs.

    In tokens, relative to a pass without drafts, and summed over the slots of a shard.

    costs: times of a pass with drafts of each length, in passes without.
    """
    accepted, rejected = outcomes[0]
    first_shares = FIRST_SHARE * jnp.arange(1, drafting.match + 1) / drafting.match
    shares = (accepted + PRIOR_TOKENS * first_shares) / (accepted + rejected + PRIOR_TOKENS)
    share = shares[jnp.maximum(found.matches - 1, 0)]
    # Replies have no match: all of their tokens are accepted.
    share = jnp.where(found.matches > 0, share, 1.0)
    # A token is accepted if all tokens before it are.
    number = jnp.arange(1, drafting.tokens + 1)
    is_drafted = running[:, None] & (number <= found.counts[:, None])
    expected = jnp.where(is_drafted, share[:, None] ** number, 0).sum(axis=0).cumsum()
    by_length = expected[jnp.array(drafting.lengths) - 1]
    return by_length - (costs - 1) * running.sum()


def cut(found: Drafts, length: int) -> Drafts:
    """Returns the first `length` tokens of every draft."""
    counts = jnp.minimum(found.counts, length)
    return found._replace(tokens=found.tokens[:, :length], counts=counts)


def with_outcomes(
    outcomes: Float[Array, "1 2 match"],
    found: Drafts,
    accepted: Int[Array, " slots"],
    is_rejected: Bool[Array, " slots"],
    running: Bool[Array, " slots"],
) -> Float[Array, "1 2 match"]:
    """Returns the sums after one more pass.

    accepted: tokens of the draft of each slot. is_rejected: whether the next one was wrong.
    """
    is_tried = running & (found.matches > 0)
    # An index out of range is dropped: a slot without a draft counts nowhere.
    index = jnp.where(is_tried, found.matches - 1, outcomes.shape[2])
    values = jnp.stack([accepted, is_rejected], axis=1).astype(jnp.float32)
    return outcomes.at[0, :, index].add(values, mode="drop")


def append(
    drafting: Drafting,
    texts: Int[Array, "slots width"],
    positions: Int[Array, " slots"],
    tokens: Int[Array, "slots n"],
    is_used: Bool[Array, "slots n"],
) -> Int[Array, "slots width"]:
    """Returns the texts with `tokens` at `positions` and after, where they are used."""
    slots, width = texts.shape
    columns = drafting.reach + positions[:, None] + jnp.arange(tokens.shape[1])
    # An index out of range is dropped, so that unused tokens are written nowhere.
    columns = jnp.where(is_used, columns, width)
    return texts.at[jnp.arange(slots)[:, None], columns].set(tokens, mode="drop")


def agree(value: jax.Array, tensor: int) -> jax.Array:
    """Returns the sum over all shards if they must take the same passes, else this shard's."""
    # See `programs.generate`: with tensor > 1 a step has collectives of all devices.
    return value if tensor == 1 else lax.psum(value, "slots")
