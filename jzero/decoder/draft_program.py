"""The program `generate` with drafts: several tokens of a slot in one pass of the model.

The noise of a token is a function of its request and its position (`sampling.uniforms`). A pass
computes the input of a slot and the k tokens of its draft, and samples the token after each of
them. A token of the draft is accepted if it equals the token that was sampled at its position; the
first one that differs is replaced by the sampled token, and later ones are dropped. So the tokens
are the same as if they were decoded one at a time, with any filter and any temperature. Speculative
sampling (Leviathan et al. 2023) keeps only their distribution.

A pass computes 1 + k tokens of a slot as 1 + k slots of `programs.decode_step`: neighboring rows
with the same pages, each one token longer than the row before it. All keys and values of a layer
are written before attention reads them, so that a row sees the rows before it. Rows after the last
accepted token have written keys and values beyond the end of the sequence; later passes overwrite
these before they read them. A recurrent state has no such end, so a gated delta net computes the
rows of a slot from its state and does not change the state. After sampling, only the used inputs
advance it (`slot_state.after_draft`).

Passes without drafts and with drafts of each length (`Drafting.lengths`) alternate as
`drafts.gains` decides, in nested loops: a loop updates the pool in place, where a conditional would
copy it.
"""

from collections.abc import Callable
from functools import partial
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Key

from jzero.decoder import drafts, head_drafts, slot_state
from jzero.decoder.decode_state import Choices, DecodeState, ResultTokens, ResumePoint
from jzero.decoder.drafts import Drafting, Drafts, Leaf
from jzero.decoder.program_settings import ProgramSettings
from jzero.decoder.programs import (
    compile_program,
    decode_step,
    is_stop,
    resume_slots,
    state_specs_of,
    with_flat_outputs,
)
from jzero.decoder.sampling import SlotFilters
from jzero.model import qwen
from jzero.model.linear import RowAdapters
from jzero.tokens import TRACKS

NUM_COUNTS = 3  # of every slot: passes, tokens of drafts, accepted tokens of drafts


class DraftInputs(NamedTuple, Generic[Leaf]):
    """The inputs of a call that only drafts need."""

    costs: Leaf  # f32[shards, lengths] times of a pass with drafts of a length, in passes without
    references: Leaf | None  # i32[slots, reach]; None without references


class Loop(NamedTuple):
    """What the passes of a call carry."""

    num_passes: jax.Array  # i32[]
    is_due: jax.Array  # bool[] whether another pass is due
    kind: jax.Array  # i32[] 0: without drafts; i: with drafts of the i-th length
    drafts: Drafts
    state: DecodeState[jax.Array]
    result: ResultTokens[jax.Array]
    # Of a head: the state that predicts the token after the input of every slot.
    head_state: Float[Array, "slots E"] | None


class Call(NamedTuple):
    """What the passes of a call share."""

    settings: ProgramSettings
    drafting: Drafting
    params: qwen.Params
    seed: Key[Array, ""]
    table: Int[Array, "slots pages_per_slot"]
    shared_pages: Int[Array, " blocks"]
    costs: Float[Array, " lengths"]
    num_passes: int | jax.Array
    forced: Int[Array, "slots steps"] | None
    most_tokens: Int[Array, " slots"]  # of this call
    filters: SlotFilters | None
    adapters: RowAdapters | None


def compile_generate(settings: ProgramSettings, mesh: Mesh) -> jax.stages.Wrapped:
    """Compiles `generate_with_drafts`. It donates the state."""
    by_slot, everywhere = P("slots"), P()
    state_specs = state_specs_of(settings)
    function: Callable = generate_with_drafts
    last_inputs = (by_slot, by_slot) if settings.max_turns > 1 else ()
    if settings.has_choices:
        function, last_inputs = generate_as_chosen, (by_slot,)
    inputs = (everywhere, state_specs, everywhere, *[by_slot] * 4, *last_inputs)
    return compile_program(settings, mesh, function, inputs, (state_specs, by_slot), donate=(1,))


def compile_remember(settings: ProgramSettings, mesh: Mesh) -> jax.stages.Wrapped:
    """Compiles `remember`. It donates the texts."""
    by_slot = P("slots")
    return compile_program(settings, mesh, remember, (by_slot,) * 3, by_slot, donate=(0,))


def remember(
    settings: ProgramSettings,
    texts: Int[Array, "slots width"],
    slots: Int[Array, "1 n"],
    sequences: Int[Array, "1 n longest"],
) -> Int[Array, "slots width"]:
    """Writes the tokens of sequences that begin in slots. Slots that do not exist are padding."""
    reach = numbers_of(settings).reach
    return texts.at[slots[0], reach:].set(sequences[0], mode="drop")


def numbers_of(settings: ProgramSettings) -> Drafting:
    """Returns the numbers of rollout.draft."""
    assert settings.drafting is not None
    return settings.drafting


def generate_as_chosen(
    settings: ProgramSettings,
    params: qwen.Params,
    state: DecodeState[jax.Array],
    seed: Key[Array, ""],
    table: Int[Array, "slots pages_per_slot"],
    keep: Bool[Array, " slots"],
    shared_pages: Int[Array, " blocks"],
    inputs: DraftInputs[jax.Array],
    choices: Choices,
) -> tuple[DecodeState[jax.Array], ResultTokens[jax.Array]]:
    """`generate_with_drafts` for requests to a server, whose choices are data."""
    return generate_with_drafts(
        settings, params, state, seed, table, keep, shared_pages, inputs, choices=choices
    )


def generate_with_drafts(
    settings: ProgramSettings,
    params: qwen.Params,
    state: DecodeState[jax.Array],
    seed: Key[Array, ""],
    table: Int[Array, "slots pages_per_slot"],
    keep: Bool[Array, " slots"],
    shared_pages: Int[Array, " blocks"],
    inputs: DraftInputs[jax.Array],
    resume_points: Int[Array, "slots 3"] | None = None,
    forced_tokens: Int[Array, "slots decode_steps"] | None = None,
    choices: Choices | None = None,
) -> tuple[DecodeState[jax.Array], ResultTokens[jax.Array]]:
    """Runs up to `decode_steps` passes, each with 1 to 1 + k tokens for every active slot.

    See `programs.generate`. The result has room for decode_steps * (1 + k) tokens of a slot. A slot
    with a forced token in every step takes only these: its reply continues in the next call.
    """
    drafting = numbers_of(settings)
    # Once in a call, and not once in a pass.
    params = with_flat_outputs(qwen.cast(params, settings.dtype))
    state = state._replace(active=state.active & keep)
    if resume_points is not None:
        points = ResumePoint(*(resume_points[:, i] for i in range(3)))
        state = resume_slots(state, points)

    if not drafting.by_head:
        state = state._replace(drafts=with_inputs(drafting, state, inputs.references))
    slots, steps = settings.slots_per_shard, settings.decode_steps
    # If every draft of every pass is accepted.
    room = steps * drafting.passed
    most_tokens = jnp.full(slots, room)
    if forced_tokens is not None:
        most_tokens = jnp.where(forced_tokens[:, -1] >= 0, steps, room)
    call = Call(
        settings=settings,
        drafting=drafting,
        params=params,
        seed=seed,
        table=table,
        shared_pages=shared_pages,
        costs=inputs.costs[0],
        num_passes=steps if choices is None else choices.num_steps[0],
        forced=forced_tokens,
        most_tokens=most_tokens,
        filters=None if choices is None else choices.filters,
        adapters=None if choices is None else choices.adapters,
    )
    empty_result = ResultTokens(
        tracks={
            name: jnp.zeros((slots, room, *shape), TRACKS[name].dtype)
            for name, shape in (settings.sampled_shapes | settings.input_shapes).items()
        },
        counts=jnp.zeros(slots, jnp.int32),
        drafts=jnp.zeros((slots, NUM_COUNTS), jnp.int32),
    )

    passes = [partial(plain_pass, call)]
    passes += [partial(draft_pass, call, length) for length in drafting.lengths]

    def is_next(kind: int, loop: Loop) -> jax.Array:
        return loop.is_due & (loop.kind == kind)

    def alternate(loop: Loop) -> Loop:
        for kind, run_pass in enumerate(passes):
            loop = lax.while_loop(partial(is_next, kind), run_pass, loop)
        return loop

    head_state = None
    if drafting.by_head:
        # Of the last token of every slot: the device keeps the state of the model, not of the head.
        state, head_state = head_drafts.run_head(
            decoder_of(call),
            state,
            state._replace(positions=state.positions - 1),
            state.drafts.hidden,
            state.tokens,
        )
    first = next_loop(call, jnp.int32(0), state, empty_result, head_state)
    last = lax.while_loop(lambda loop: loop.is_due, alternate, first)
    return last.state, last.result


def with_inputs(
    drafting: Drafting,
    state: DecodeState[jax.Array],
    references: Int[Array, "slots reach"] | None,
) -> drafts.DraftState[jax.Array]:
    """Returns the texts of the slots with their references and with the input of the next pass."""
    texts = state.drafts.texts
    if references is not None:
        texts = texts.at[:, : drafting.reach].set(references)
    # The first token of a new sequence was sampled on the device.
    texts = drafts.append(
        drafting, texts, state.positions, state.tokens[:, None], state.active[:, None]
    )
    return state.drafts._replace(texts=texts)


def next_loop(
    call: Call,
    num_passes: jax.Array,
    state: DecodeState[jax.Array],
    result: ResultTokens[jax.Array],
    head_state: Float[Array, "slots E"] | None,
) -> Loop:
    """Finds drafts for the next pass, and decides about it."""
    tensor = call.settings.tensor
    running = is_running(call, state, result)
    if call.drafting.by_head:
        found = drafts.expected_of_head(call.drafting, len(state.tokens))
    else:
        found = drafts.find(call.drafting, state.drafts.texts, state.positions)
    if call.forced is not None:
        found = drafts.with_forced(found, call.forced, result.counts)
    gains = drafts.gains(call.drafting, found, state.drafts.outcomes, running, call.costs)
    gains = drafts.agree(gains, tensor)
    num_running = drafts.agree(running.sum(), tensor)
    return Loop(
        num_passes,
        is_due=(num_running > 0) & (num_passes < call.num_passes),
        kind=jnp.where(gains.max() > 0, 1 + jnp.argmax(gains), 0),
        drafts=found,
        state=state,
        result=result,
        head_state=head_state,
    )


def decoder_of(call: Call) -> head_drafts.Decoder:
    """Returns what drafts of a head need of a call."""
    return head_drafts.Decoder(
        call.settings, call.params, call.seed, call.table, call.shared_pages, call.filters
    )


def is_running(
    call: Call, state: DecodeState[jax.Array], result: ResultTokens[jax.Array]
) -> Bool[Array, " slots"]:
    """Returns whether each slot takes part in the next pass."""
    return state.active & (result.counts < call.most_tokens)


def plain_pass(call: Call, loop: Loop) -> Loop:
    """Computes one token of every slot, as without drafts."""
    state, result = loop.state, loop.result
    running = is_running(call, state, result)
    forced = forced_at(call, result.counts[:, None])
    next_state, sampled, hidden = decode_step(
        call.settings,
        call.params,
        state._replace(active=running),
        call.seed,
        call.table,
        call.shared_pages,
        None if forced is None else forced[:, 0],
        call.filters,
        call.adapters,
    )
    # A slot that only waits for the rest of its reply stays active.
    next_state = next_state._replace(active=jnp.where(running, next_state.active, state.active))
    head_state = None
    if call.drafting.by_head:
        next_state, head_state = head_drafts.run_head(
            decoder_of(call),
            next_state,
            state._replace(active=running),
            hidden,
            sampled["ids"],
        )
        next_state = head_drafts.keep_hidden(next_state, hidden, running)
    sampled = {name: values[:, None] for name, values in sampled.items()}
    counts = jnp.stack([running, jnp.zeros_like(running), jnp.zeros_like(running)], axis=1)
    return emit(call, loop, next_state, head_state, sampled, running[:, None], counts)


def draft_pass(call: Call, length: int, loop: Loop) -> Loop:
    """Computes the input and the draft of every slot, and keeps the tokens up to a mistake.

    length: most tokens of a draft.
    """
    settings, state, result = call.settings, loop.state, loop.result
    found = drafts.cut(loop.drafts, length)
    width = 1 + length
    slots = len(state.tokens)
    offset = jnp.arange(width)
    running = is_running(call, state, result)
    positions = state.positions[:, None] + offset
    is_input = running[:, None] & (offset <= found.counts[:, None])
    # A row beyond the limit of its sequence has no page, and a row beyond the reply no token.
    is_input &= positions + 1 < state.limits[:, None]
    is_input &= result.counts[:, None] + offset < call.most_tokens[:, None]
    if loop.head_state is not None:
        state, tokens = head_drafts.propose(decoder_of(call), state, loop.head_state, is_input)
        # Replies are known.
        is_reply = found.matches == 0
        found = found._replace(tokens=jnp.where(is_reply[:, None], found.tokens, tokens))
    inputs = jnp.concatenate([state.tokens[:, None], found.tokens], axis=1)

    def for_each_row(x: jax.Array) -> jax.Array:
        """[slots, ...] -> [slots * width, ...]"""
        return jnp.repeat(x, width, axis=0)

    rows = state._replace(
        tokens=inputs.ravel(),
        positions=positions.ravel(),
        limits=for_each_row(state.limits),
        requests=for_each_row(state.requests),
        temperature=for_each_row(state.temperature),
        active=is_input.ravel(),
        slot_state=slot_state.before_draft(settings.model, settings.dtype, state.slot_state, width),
    )
    # The rows of a slot share its pages before the page of its input.
    shared_pages = jnp.where(running, state.positions // settings.page_size, 0)
    forced = forced_at(call, result.counts[:, None] + offset)
    after, sampled, hidden = decode_step(
        settings,
        call.params,
        rows,
        call.seed,
        for_each_row(call.table),
        shared_pages,
        None if forced is None else forced.ravel(),
        jax.tree.map(for_each_row, call.filters),
        jax.tree.map(for_each_row, call.adapters),
    )
    sampled = {name: x.reshape(slots, width, *x.shape[1:]) for name, x in sampled.items()}

    ids = sampled["ids"]
    stops = is_stop(settings, ids.ravel()).reshape(ids.shape)
    if forced is not None:
        stops &= forced < 0
    # As in `decode_step`: a sequence ends with a stop token, or with its last position.
    continues = ~stops & (positions + 2 < state.limits[:, None])
    is_tried = is_input[:, 1:] & continues[:, :-1]
    is_next = is_tried & is_accepted(inputs[:, 1:], ids[:, :-1])
    is_used = jnp.cumprod(jnp.concatenate([running[:, None], is_next], axis=1), axis=1) > 0
    num_used = is_used.sum(axis=1)
    num_accepted = jnp.maximum(num_used - 1, 0)

    # What follows the last token that is used is the state after the pass.
    def at_last(x: jax.Array) -> jax.Array:
        index = num_accepted.reshape(-1, 1, *(1 for _ in x.shape[2:]))
        return jnp.take_along_axis(x, index, axis=1)[:, 0]

    # The token after the accepted ones, unless the sequence or the draft has ended.
    is_rejected = at_last(jnp.pad(is_tried, ((0, 0), (0, 1))))
    outcomes = drafts.with_outcomes(
        state.drafts.outcomes, found, num_accepted, is_rejected, running
    )
    next_state = state._replace(
        k_pool=after.k_pool,
        v_pool=after.v_pool,
        slot_state=slot_state.after_draft(
            settings.model, settings.arithmetic, after.slot_state, num_used
        ),
        tokens=jnp.where(running, at_last(ids), state.tokens),
        positions=state.positions + num_used,
        active=jnp.where(running, at_last(continues), state.active),
        drafts=state.drafts._replace(outcomes=outcomes),
    )
    head_state = None
    if call.drafting.by_head:
        # The rows up to the last one that is used get their true tokens.
        next_state, head_states = head_drafts.run_head(
            decoder_of(call)._replace(table=for_each_row(call.table), shared_pages=shared_pages),
            next_state,
            rows._replace(active=is_used.ravel()),
            hidden,
            ids.ravel(),
        )
        head_state = at_last(head_states.reshape(slots, width, -1))
        last_hidden = at_last(hidden.reshape(slots, width, -1))
        next_state = head_drafts.keep_hidden(next_state, last_hidden, running)
    # Replies are no drafts, so they do not count.
    is_draft = running & (found.matches > 0)
    counts = jnp.stack(
        [running, jnp.where(is_draft, found.counts, 0), jnp.where(is_draft, num_accepted, 0)],
        axis=1,
    )
    return emit(call, loop, next_state, head_state, sampled, is_used, counts)


def is_accepted(
    drafted: Int[Array, "slots k"], sampled: Int[Array, "slots k"]
) -> Bool[Array, "slots k"]:
    """Returns whether each drafted token is the one that the noise of its position picks."""
    return drafted == sampled


def forced_at(call: Call, columns: Int[Array, "slots n"]) -> Int[Array, "slots n"] | None:
    """Returns the environment's tokens at `columns` of the call's tokens; -1 where it has none."""
    if call.forced is None:
        return None
    steps = call.forced.shape[1]
    tokens = jnp.take_along_axis(call.forced, jnp.minimum(columns, steps - 1), axis=1)
    return jnp.where(columns < steps, tokens, -1)


def emit(
    call: Call,
    loop: Loop,
    state: DecodeState[jax.Array],
    head_state: Float[Array, "slots E"] | None,
    tracks: dict[str, jax.Array],
    is_used: Bool[Array, "slots n"],
    counts: Int[Array, "slots counts"],
) -> Loop:
    """Appends the used tokens of a pass to the result and to the texts.

    state: after the pass, with the texts before it.
    tracks: of the tokens, [slots, n, *shape]. The used ones come first.
    """
    result = loop.result
    assert result.drafts is not None
    slots, n = is_used.shape
    room = result.tracks["ids"].shape[1]
    columns = jnp.where(is_used, result.counts[:, None] + jnp.arange(n), room)
    slot = jnp.arange(slots)[:, None]

    def write(values: jax.Array, track: jax.Array) -> jax.Array:
        return track.at[slot, columns].set(values.astype(track.dtype), mode="drop")

    result = ResultTokens(
        jax.tree.map(write, tracks, result.tracks),
        result.counts + is_used.sum(axis=1),
        result.drafts + counts,
    )
    outcomes = state.drafts.outcomes * (1 - drafts.FORGETTING)
    draft_state = state.drafts._replace(outcomes=outcomes)
    if draft_state.texts is not None:
        # The first token of the pass follows the input of the pass.
        begin = loop.state.positions + 1
        texts = drafts.append(call.drafting, draft_state.texts, begin, tracks["ids"], is_used)
        draft_state = draft_state._replace(texts=texts)
    state = state._replace(drafts=draft_state)
    return next_loop(call, loop.num_passes + 1, state, result, head_state)
