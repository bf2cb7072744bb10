"""Drafts from the model's own head (rollout.draft=mtp): what `model/mtp.py` computes in slots.

At position t the head reads the model's hidden state h_t and the token x_{t+1}, and writes the key
and value of this pair at position t of a layer of its own in the pages of the slot. So the pages of
a prompt are shared and copied as those of the other layers, and no shape depends on the length.

    prefill      writes the pairs of the prompt, except for the last: its token is not sampled yet
    insert       keeps the hidden state of the prompt's last token in the slot
    generate     begins with the pair of the last token of every slot
    every pass   replaces the pairs of its draft by those of the tokens that it used

The head guesses a token as the model samples one: with the noise of the token's position, the
temperature and the filters. The model picks the same token wherever both distributions put the same
token at this noise, which is far more often than the most probable token would be picked.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jzero.decoder.caches import slot_cache
from jzero.decoder.decode_state import DecodeState
from jzero.decoder.program_settings import ProgramSettings
from jzero.decoder.programs import sample_tokens
from jzero.decoder.sampling import SlotFilters
from jzero.model import mtp, output_adapter, qwen


class Decoder(NamedTuple):
    """What the passes of a call share. See `programs.generate`."""

    settings: ProgramSettings
    params: qwen.Params
    seed: Key[Array, ""]
    table: Int[Array, "rows pages_per_slot"]
    shared_pages: Int[Array, " blocks"]
    filters: SlotFilters | None


def run_head(
    decoder: Decoder,
    state: DecodeState[jax.Array],
    rows: DecodeState[jax.Array],
    hidden: Float[Array, "rows E"],
    next_tokens: Int[Array, " rows"],
) -> tuple[DecodeState[jax.Array], Float[Array, "rows E"]]:
    """Computes the head for one position of every row.

    state: with the pools, which the head reads and writes.
    rows: `positions` of the hidden states, and whether each row is `active`.
    hidden, next_tokens: as in `mtp.forward`.
    Returns the state with the new pools, and the states of the head.
    """
    settings = decoder.settings
    rows = rows._replace(k_pool=state.k_pool, v_pool=state.v_pool, slot_state=None)
    cache = slot_cache(settings, rows, decoder.table, decoder.shared_pages)
    out, arrays = mtp.forward(
        settings.model,
        decoder.params,
        hidden[:, None],
        next_tokens[:, None],
        rows.positions[:, None],
        cache.attend,
        cache.arrays,
        dtype=settings.dtype,
        arithmetic=settings.arithmetic,
    )
    return state._replace(k_pool=arrays.k, v_pool=arrays.v), out[:, 0]


def propose(
    decoder: Decoder,
    state: DecodeState[jax.Array],
    head_state: Float[Array, "slots E"],
    is_input: Bool[Array, "slots 1+k"],
) -> tuple[DecodeState[jax.Array], Int[Array, "slots k"]]:
    """Returns the drafts of all slots, and the state with the pairs of the drafts in its pools.

    head_state: the state of the head that predicts the token after the input of every slot.
    is_input: which of the input and the tokens of its draft the pass will compute.
    """
    # Measures and kept tokens belong to tokens that are sampled, not to guesses.
    settings = replace(decoder.settings, tracks=())
    # The head is trained with the base's output layer (`training.draft_head`).
    params = {n: leaf for n, leaf in decoder.params.items() if n != output_adapter.NAME}
    length = is_input.shape[1] - 1
    tokens: list[jax.Array] = []
    for number in range(length):
        positions = state.positions + number  # of the token before
        sampled = sample_tokens(
            settings,
            params,
            head_state,
            decoder.seed,
            state.requests,
            positions + 1,
            state.temperature,
            decoder.filters,
        )
        tokens.append(sampled["ids"])
        if number + 1 < length:
            rows = state._replace(positions=positions, active=is_input[:, number])
            state, head_state = run_head(decoder, state, rows, head_state, tokens[-1])
    return state, jnp.stack(tokens, axis=1)


def keep_hidden(
    state: DecodeState[jax.Array],
    hidden: Float[Array, "slots E"],
    running: Bool[Array, " slots"],
) -> DecodeState[jax.Array]:
    """Returns the state with the hidden states of the slots that took part in a pass."""
    kept = jnp.where(running[:, None], hidden, state.drafts.hidden)
    return state._replace(drafts=state.drafts._replace(hidden=kept))
