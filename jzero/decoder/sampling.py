"""Draws one token for every slot from the logits of the model's head.

Input: the hidden state, the temperature and a few uniform random numbers of every slot. Output: a
token of every slot, and its log-probability. `programs.py` calls `uniforms` and `sample` inside the
jitted prefill and decode programs.

The token is the inverse of the cumulative distribution at one uniform number u, i.e. the first
token v with

    p_0 + ... + p_v > u (p_0 + ... + p_{V-1}),  p_v = exp((logit_v - largest logit) / temperature)

The search has two levels. The first level finds the block of 128 tokens, from the sums of the
blocks; the second level finds the token in this block.

Reasons for this method instead of Gumbel noise (argmax of logit / temperature + Gumbel):

* Gumbel noise takes one random number for every entry of the vocabulary, as large as the logits
  themselves (152,064 entries a slot for Qwen2.5). The inverse takes one number a slot.
* The two levels need no sort, and no running sum over the whole vocabulary. Such a sum in fp32
  loses the small masses; sums over 128 tokens and over 1,188 blocks are short enough.

The uniform number depends only on (seed, request, position). A response therefore does not depend
on the other sequences in the batch, on its slot, or on its host.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from jzero.model.softmax import exact_logps

BLOCK = 128  # tokens of a block: the lanes of a TPU's vector register
# Tokens of a part, if logits are computed in parts: a third of Qwen's vocabulary. Five parts would
# save memory, and take more time by XLA's estimate (lab/log.md, 2026-11-21).
PART = 396 * BLOCK

# (hidden states [rows, E], part of the vocabulary) -> fp32 logits [slots, tokens of the part].
Head = Callable[[jax.Array, slice], jax.Array]


class Filters(NamedTuple):
    """Restricts the tokens that may be drawn. The defaults allow every token.

    The values are compiled into a program. `SlotFilters` are data instead.
    """

    top_k: int = 0  # the k most probable tokens; 0: all
    top_p: float = 1.0  # the most probable tokens that hold this share of the mass
    min_p: float = 0.0  # tokens with at least this share of the largest probability

    @property
    def allow_all(self) -> bool:
        return self == Filters()


class SlotFilters(NamedTuple):
    """The filters of every slot, as arrays: one program serves all values."""

    top_k: jax.Array | np.ndarray  # i32[slots]
    top_p: jax.Array | np.ndarray  # f32[slots]
    min_p: jax.Array | np.ndarray  # f32[slots]


class Draw(NamedTuple):
    """A running sample over the parts of the vocabulary processed so far."""

    token: Int[Array, " slots"]
    logit: Float[Array, " slots"]  # the logit of `token`
    mass: Float[Array, " slots"]  # sum of exp((logit - largest) / temperature) over the tokens seen
    largest: Float[Array, " slots"]  # the largest logit seen


def uniforms(
    seed: Key[Array, ""],
    requests: Int[Array, " slots"],
    positions: Int[Array, " slots"],
    count: int = 1,
) -> Float[Array, "slots count"]:
    """Returns `count` uniform numbers in [0, 1) per slot, a function of (seed, request, position).

    Args:
        requests: the number of the request that decodes in each slot.
        positions: the position in the sequence of the token to draw.
    """

    def slot_uniforms(request: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(seed, request), position)
        return jax.random.uniform(key, (count,))

    return jax.vmap(slot_uniforms)(requests, positions)


def sample(
    head: Head,
    parts: Sequence[slice],
    hidden: Float[Array, "rows E"],
    noise: Float[Array, "slots parts"],
    temperature: Float[Array, " slots"],
    filters: Filters | SlotFilters,
    axis: str = "",
) -> tuple[Int[Array, " slots"], Float[Array, " slots"]]:
    """Draws a token for every slot.

    The logits of only one part of the vocabulary exist at a time. Tokens are drawn over the parts
    like a weighted reservoir sample: with m the mass of this part and M the mass of all earlier
    parts, a token of this part replaces the earlier token with probability m / (M + m). By
    induction every token is drawn with probability p_v / (sum of all p).

    Args:
        hidden: the input of `head`; several slots may share a row.
        parts: slices of the vocabulary, in order. Filters need the whole vocabulary in one part.
        noise: one uniform number in [0, 1) per part.
        temperature: 0 chooses the most probable token.
        axis: the mesh axis that the logits are split over, "" if every device has all logits. The
            function then runs inside a shard_map over this axis, and `head` returns the columns
            of this device.

    Returns:
        The tokens, and their log-probabilities in fp32 at the sampling temperature (at 1 if the
        temperature is 0), over the full vocabulary, regardless of filters.
    """
    is_greedy = temperature == 0
    device = lax.axis_index(axis) if axis else 0
    scale = jnp.where(is_greedy, 1.0, temperature)
    slots = scale.shape
    draw = Draw(
        token=jnp.full(slots, 0),
        logit=jnp.full(slots, 0.0),
        mass=jnp.full(slots, 0.0),
        largest=jnp.full(slots, -jnp.inf),
    )
    for part, uniform in zip(parts, noise.T, strict=True):
        # Without the barrier XLA computes the logits of all parts at the same time, and the parts
        # would not save any memory.
        hidden, draw = lax.optimization_barrier((hidden, draw))
        logits = head(hidden, part)
        first_token = part.start + device * logits.shape[1]
        draw = draw_from_part(
            draw, logits, first_token, uniform, is_greedy, scale, filters, axis, device
        )
    return draw.token, (draw.logit - draw.largest) / scale - jnp.log(draw.mass)


def sample_exactly(
    head: Head,
    parts: Sequence[slice],
    hidden: Float[Array, "rows E"],
    noise: Float[Array, "slots 1"],
    temperature: Float[Array, " slots"],
    filters: Filters | SlotFilters,
    axis: str = "",
) -> tuple[Int[Array, " slots"], Float[Array, " slots"]]:
    """Draws a token for every slot, with log-probabilities bit-identical to the trainer's.

    See `sample`. All logits are on this device, in one part.
    """
    assert len(parts) == 1 and not axis, f"{parts=} {axis=}"
    # The logits are computed once, behind the barrier, and used for both the draw and the
    # log-probabilities.
    logits = lax.optimization_barrier(head(hidden, slice(None)))

    def all_logits(hidden: jax.Array, part: slice) -> jax.Array:
        return logits

    vocabulary = slice(0, logits.shape[1])
    tokens, _ = sample(all_logits, (vocabulary,), hidden, noise, temperature, filters)
    logps, _ = exact_logps(logits, tokens, jnp.where(temperature == 0, 1.0, temperature))
    return tokens, logps


def draw_from_part(
    draw: Draw,
    logits: Float[Array, "slots columns"],
    first_token: int | Int[Array, ""],
    uniform: Float[Array, " slots"],
    is_greedy: Bool[Array, " slots"],
    scale: Float[Array, " slots"],
    filters: Filters | SlotFilters,
    axis: str,
    device: int | Int[Array, ""],
) -> Draw:
    """Returns `draw` after one more part of the vocabulary.

    Args:
        draw: the sample over the earlier parts.
        logits: this device's columns of the logits of this part.
        first_token: the token of the first of these columns.
        uniform: one uniform number in [0, 1) per slot, the same on all devices.
        scale: the temperature, 1 where `is_greedy`.
        axis: the mesh axis that the columns are split over, or "".
        device: the index of this device on that axis.
    """
    columns = logits.shape[1]
    logits = jnp.pad(logits, ((0, 0), (0, -columns % BLOCK)), constant_values=-jnp.inf)

    # Masses relative to the largest logit of this device. The subtraction comes before the
    # division: logit / scale - largest / scale would lose digits in fp32 at low temperatures.
    largest_here = logits.max(axis=-1)
    probs = jnp.exp((logits - largest_here[:, None]) / scale[:, None])
    mass_here = block_sums(probs).sum(axis=-1)

    # The devices exchange two numbers a slot, and no logits.
    if axis:
        largests, masses = lax.all_gather((largest_here, mass_here), axis)
    else:
        largests, masses = largest_here[None], mass_here[None]

    # Express all masses relative to one largest logit. On the line of masses the first device's
    # columns come first, then the second device's, and so on; the earlier parts are at its end.
    largest = jnp.maximum(draw.largest, largests.max(axis=0))
    end_of_device = jnp.cumsum(masses * jnp.exp((largests - largest) / scale), axis=0)
    total = end_of_device[-1] + draw.mass * jnp.exp((draw.largest - largest) / scale)

    # Every device draws as if the point u * total fell on its columns.
    start = jnp.where(device > 0, end_of_device[device - 1], 0)
    uniform_here = (uniform * total - start) / (end_of_device[device] - start)
    column = invert(restrict(probs, filters), uniform_here)
    column = jnp.where(is_greedy, logits.argmax(axis=-1), column).astype(jnp.int32)
    block_of_column = take_block(logits, column // BLOCK)
    logit = jnp.take_along_axis(block_of_column, column[:, None] % BLOCK, axis=1)[:, 0]

    # The device on whose columns the point falls sends its token to the others. If the point falls
    # on the earlier parts, no device is the owner and the earlier token stays.
    owner = (end_of_device <= uniform * total).sum(axis=0)
    owner = jnp.where(is_greedy, largests.argmax(axis=0), owner)
    is_replaced = owner < len(end_of_device)
    is_replaced = jnp.where(is_greedy, largests.max(axis=0) > draw.largest, is_replaced)
    token = jnp.where(owner == device, first_token + column, 0)
    logit = jnp.where(owner == device, logit, 0)
    if axis:
        token, logit = lax.psum((token, logit), axis)

    return Draw(
        token=jnp.where(is_replaced, token, draw.token),
        logit=jnp.where(is_replaced, logit, draw.logit),
        mass=total,
        largest=largest,
    )


def draw_many(
    logits: Float[Array, "*batch V"],
    uniform: Float[Array, "*batch n"],
    temperature: Float[Array, "*batch"],
) -> Int[Array, "*batch n"]:
    """Draws n tokens with replacement at every position, without filters.

    uniform: one number in [0, 1) for each draw. Temperature 0 draws the most probable token.
    """
    is_greedy = temperature == 0
    scale = jnp.where(is_greedy, 1.0, temperature)
    largest = logits.max(axis=-1, keepdims=True)
    probs = jnp.exp((logits - largest) / scale[..., None])
    rows = probs.reshape(-1, probs.shape[-1])
    rows = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % BLOCK)))
    draws = uniform.reshape(len(rows), -1)
    tokens = jax.vmap(lambda column: invert(rows, column), in_axes=1, out_axes=1)(draws)
    most_probable = logits.argmax(axis=-1)[..., None]
    return jnp.where(is_greedy[..., None], most_probable, tokens.reshape(uniform.shape))


def sample_kept(
    head: Head,
    part: slice,
    hidden: Float[Array, "rows E"],
    uniform: Float[Array, " slots"],
    temperature: Float[Array, " slots"],
    filters: Filters,
) -> tuple[Int[Array, " slots"], Float[Array, " slots"], Int[Array, "slots K"]]:
    """Draws a token for every slot, and returns the tokens that could have been drawn.

    The filters are top-k, then top-p, then min-p, with `top_k` above 0. At most `top_k` tokens are
    kept: of equally probable tokens at the end, the first ones of the vocabulary. The drawn tokens
    equal those of `sample` with the same noise, unless logits are equal at this boundary.

    Args:
        part: the whole vocabulary.
        uniform: one uniform number in [0, 1) per slot.

    Returns:
        The tokens; their log-probabilities in fp32 at the sampling temperature (at 1 if the
        temperature is 0), over the kept tokens; and the kept tokens, the most probable first,
        padded with -1.
    """
    is_greedy = temperature == 0
    scale = jnp.where(is_greedy, 1.0, temperature)
    logits = head(hidden, part)
    vocab_size = logits.shape[1]
    logits = jnp.pad(logits, ((0, 0), (0, -vocab_size % BLOCK)), constant_values=-jnp.inf)
    largest = logits.max(axis=-1)
    probs = jnp.exp((logits - largest[:, None]) / scale[:, None])

    kept_probs, kept = lax.top_k(probs, min(filters.top_k, vocab_size))
    kept_probs = restrict(kept_probs, filters._replace(top_k=0))
    slots = jnp.arange(len(probs))[:, None]
    restricted = jnp.zeros_like(probs).at[slots, kept].set(kept_probs)
    token = invert(restricted, uniform)
    token = jnp.where(is_greedy, logits.argmax(axis=-1), token).astype(jnp.int32)

    logit = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    logp = (logit - largest) / scale - jnp.log(kept_probs.sum(axis=-1))
    return token, logp, jnp.where(kept_probs > 0, kept, -1)


def restrict(
    probs: Float[Array, "slots vocabulary"],
    filters: Filters | SlotFilters,
) -> Float[Array, "slots vocabulary"]:
    """Sets the mass of the tokens that top-k, then top-p, then min-p exclude to zero.

    `probs` need not sum to 1, but the largest of a row must be 1. Tokens of the same mass are kept
    or excluded together, so slightly more than `top_k` tokens may remain.
    """
    if isinstance(filters, SlotFilters):
        return restrict_slots(probs, filters)
    if 0 < filters.top_k < probs.shape[-1]:
        smallest = lax.top_k(probs, filters.top_k)[0][:, -1:]
        probs = jnp.where(probs >= smallest, probs, 0)
    if filters.top_p < 1:
        probs = jnp.where(probs >= nucleus_threshold(probs, filters.top_p), probs, 0)
    if filters.min_p > 0:
        probs = jnp.where(probs >= filters.min_p, probs, 0)
    return probs


def restrict_slots(
    probs: Float[Array, "slots vocabulary"],
    filters: SlotFilters,
) -> Float[Array, "slots vocabulary"]:
    """Restricts every row by the filters of its slot. See `restrict`.

    A slot gets the same masses, bit for bit, as from a `Filters` with its values.
    """
    top_k, top_p, min_p = (jnp.asarray(column)[:, None] for column in filters)
    vocab_size = probs.shape[-1]

    def cut(
        probs: jax.Array,
        is_used: jax.Array,
        threshold_of: Callable[[jax.Array], jax.Array],
    ) -> jax.Array:
        """Sets what is below the threshold to zero, in the slots that use the filter."""

        def drop(probs: jax.Array) -> jax.Array:
            return jnp.where(is_used & (probs < threshold_of(probs)), 0, probs)

        # A filter that no slot uses costs no time.
        return lax.cond(is_used.any(), drop, lambda probs: probs, probs)

    uses_top_k = (top_k > 0) & (top_k < vocab_size)
    probs = cut(probs, uses_top_k, lambda probs: kth_largest(probs, top_k))
    probs = cut(probs, top_p < 1, lambda probs: nucleus_threshold(probs, top_p))
    return cut(probs, min_p > 0, lambda probs: min_p)


def nucleus_threshold(
    probs: Float[Array, "slots vocabulary"],
    top_p: float | Float[Array, "slots 1"],
) -> Float[Array, "slots 1"]:
    """Returns the largest threshold such that the tokens at or above it hold `top_p` of the mass.

    Nucleus sampling: Holtzman et al. 2020.
    """
    wanted_mass = top_p * probs.sum(axis=-1, keepdims=True)

    def holds_enough(threshold: jax.Array) -> jax.Array:
        mass_above = jnp.where(probs >= threshold, probs, 0).sum(axis=-1, keepdims=True)
        return mass_above >= wanted_mass

    return largest_threshold(holds_enough, len(probs))


def kth_largest(
    probs: Float[Array, "slots vocabulary"],
    count: Int[Array, "slots 1"],
) -> Float[Array, "slots 1"]:
    """Returns the `count`-th largest probability of every row."""

    def holds_enough(threshold: jax.Array) -> jax.Array:
        return (probs >= threshold).sum(axis=-1, keepdims=True) >= count

    return largest_threshold(holds_enough, len(probs))


def largest_threshold(
    holds_enough: Callable[[jax.Array], jax.Array],
    num_slots: int,
) -> Float[Array, "slots 1"]:
    """Returns the largest number in [0, 1] of every row for which `holds_enough` is true.

    Such thresholds are usually found by a sort. This is a bisection: the bits of non-negative fp32
    numbers, read as integers, have the same order as the numbers, so 31 halvings find the exact
    threshold. Each of them reads the probabilities once.

    holds_enough: maps thresholds [slots, 1] to booleans [slots, 1]; true for 0, and false above
        a row's threshold.
    """

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        is_enough = holds_enough(lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(is_enough, middle, low), jnp.where(is_enough, high, middle)

    # No probability is above 1, so that the mass at or above this number is 0.
    above_one = lax.bitcast_convert_type(jnp.float32(1), jnp.int32) + 1
    low = jnp.zeros((num_slots, 1), jnp.int32)
    low, _ = lax.fori_loop(0, 31, halve, (low, jnp.full_like(low, above_one)))
    return lax.bitcast_convert_type(low, jnp.float32)


def invert(
    probs: Float[Array, "slots padded"],
    uniform: Float[Array, " slots"],
) -> Int[Array, " slots"]:
    """Returns the first token whose cumulative mass exceeds `uniform` times the row's mass.

    `probs` has a multiple of BLOCK columns and need not sum to 1. A token of mass 0 is never
    returned, even at `uniform` 0, or if rounding puts the point after the last token.
    """
    sums = block_sums(probs)
    threshold = uniform * sums.sum(axis=-1)
    block, preceding_mass = first_above(sums, threshold)
    token, _ = first_above(take_block(probs, block), threshold - preceding_mass)
    return block * BLOCK + token


def block_sums(x: Float[Array, "slots padded"]) -> Float[Array, "slots blocks"]:
    """Sums every block of BLOCK columns."""

    def by_window(x: jax.Array) -> jax.Array:
        # On TPUs a reshape to blocks would copy all of x.
        return lax.reduce_window(x, 0.0, lax.add, (1, BLOCK), (1, BLOCK), "valid")

    def by_reshape(x: jax.Array) -> jax.Array:
        # Faster than the window on CPUs and GPUs.
        return x.reshape(len(x), -1, BLOCK).sum(axis=-1)

    return lax.platform_dependent(x, tpu=by_window, default=by_reshape)


def take_block(
    x: Float[Array, "slots padded"],
    block: Int[Array, " slots"],
) -> Float[Array, "slots 128"]:
    """Returns one block of BLOCK columns of every row."""

    def slice_block(x: jax.Array, row: int | jax.Array, block: jax.Array) -> jax.Array:
        return lax.dynamic_slice(x, (row, block * BLOCK), (1, BLOCK))[0]

    def one_slice_a_row(x: jax.Array, block: jax.Array) -> jax.Array:
        return jnp.stack([slice_block(x, row, block[row]) for row in range(len(x))])

    def mapped(x: jax.Array, block: jax.Array) -> jax.Array:
        return jax.vmap(slice_block, (None, 0, 0))(x, jnp.arange(len(x)), block)

    # XLA for TPUs turns the mapped slice into a loop over the rows, which took longer than the
    # softmax. One slice per row compiles to one operation, but a program with thousands of slices
    # would take long to compile.
    on_tpu = one_slice_a_row if len(x) <= 512 else mapped
    return lax.platform_dependent(x, block, tpu=on_tpu, default=mapped)


def first_above(
    mass: Float[Array, "slots n"],
    threshold: Float[Array, " slots"],
) -> tuple[Int[Array, " slots"], Float[Array, " slots"]]:
    """Finds where the running sum of `mass` first exceeds `threshold`, at an entry above 0.

    Returns the index of this entry (of the last entry above 0 if the sum never exceeds the
    threshold), and the sum of the entries before it.
    """
    entries = mass.shape[-1]
    running = jnp.cumsum(mass, axis=-1)
    index = jnp.arange(entries)
    is_above = (running > threshold[:, None]) & (mass > 0)
    first = jnp.where(is_above, index, entries).min(axis=-1)
    last = jnp.where(mass > 0, index, 0).max(axis=-1)
    position = jnp.minimum(first, last)

    def at_position(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, position[:, None], axis=1)[:, 0]

    return position, at_position(running) - at_position(mass)
