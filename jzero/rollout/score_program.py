"""The program that scores given tokens: their log-probabilities, ranks and alternatives.

Each row of a call is one chunk of one sequence. The program computes the keys and values of the
chunk as prefill does, writes them into pages of the pool, and attends to the chunk and to the pages
before it (the context). A long sequence is therefore scored in several calls, and its context may
be pages that another sequence has written. `scoring.py` decides which chunks go together.

As in `programs.py`, the function sees the rows and the pages of one shard.
"""

from functools import partial
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jzero import attention
from jzero.attention import pools
from jzero.model import experts, qwen
from jzero.model.delta_net import DeltaInputs, DeltaState
from jzero.model.exact import exact_token_logps
from jzero.model.exact_delta_net import recurrence
from jzero.model.logprobs import split_columns
from jzero.rollout import slot_state
from jzero.rollout.decode_state import DecodeState, LayerCarry
from jzero.rollout.program_settings import ProgramSettings
from jzero.rollout.programs import (
    KeysAndValues,
    compile_program,
    split_over_tensor,
    state_specs_of,
)
from jzero.types import RowLayout

# Tokens whose logits exist at a time, on each shard: 160 MB for a vocabulary of 152,064.
LOGIT_TOKENS = 256

# The numbers of alternatives that a program may return. A short list keeps compilations few.
ALTERNATIVES = (0, 1, 5, 20)
MAX_ALTERNATIVES = ALTERNATIVES[-1]

Leaf = TypeVar("Leaf")
"""A jax.Array, or what describes one: its PartitionSpec, its ShapeDtypeStruct, a numpy array."""


class ScoreInputs(NamedTuple, Generic[Leaf]):
    """One chunk per row, each from a different sequence. Rows count all shards together.

    A chunk starts at a page boundary, `starts`; the keys and values before it are in the pages
    `context_pages`. A padding row has length 0 and only scratch pages.
    """

    tokens: Leaf  # i32[rows, T], T a multiple of the page size
    # i32[rows, T]: the token after each of `tokens`, which is scored. None: score nothing.
    targets: Leaf | None
    temperature: Leaf | None  # f32[rows, T], above 0: temperature at which each target is scored
    starts: Leaf  # i32[rows]: tokens of the sequence before the chunk
    lengths: Leaf  # i32[rows]: tokens of the chunk without padding
    # i32[rows, C]: the sequence's first pages, of which `starts` tokens are read
    context_pages: Leaf
    write_pages: Leaf  # i32[rows, T / page]: pages for the chunk's keys and values
    # i32[rows]: the rows of the states that the chunks continue; SCORING_ROWS and above: padding.
    # None in models without such states.
    state_rows: Leaf | None = None


class TokenScores(NamedTuple, Generic[Leaf]):
    """The scores of the targets. Log-probabilities are fp32, over the full vocabulary."""

    logps: Leaf  # f32[rows, T]
    ranks: Leaf  # i32[rows, T]: 1 for the most probable token
    top_tokens: Leaf  # i32[rows, T, alternatives]: the most probable tokens, best first
    top_logps: Leaf  # f32[rows, T, alternatives]


def compile_score(settings: ProgramSettings, mesh: Mesh, alternatives: int) -> jax.stages.Wrapped:
    """Wraps `score` for a mesh of axes (slots, tensor). It donates the states."""
    by_slot = P("slots")
    state_specs = state_specs_of(settings)
    input_specs = ScoreInputs(*(by_slot for _ in ScoreInputs._fields))
    if state_specs.slot_state is None:
        input_specs = input_specs._replace(state_rows=None)
    score_specs = TokenScores(*(by_slot for _ in TokenScores._fields))
    return compile_program(
        settings,
        mesh,
        partial(score, alternatives),
        in_specs=(P(), state_specs, state_specs.slot_state, input_specs),
        out_specs=(state_specs, state_specs.slot_state, score_specs),
        donate=(1, 2),
    )


def compile_extend(settings: ProgramSettings, mesh: Mesh) -> jax.stages.Wrapped:
    """Wraps `extend_slots` for a mesh of axes (slots, tensor). It donates the state."""
    by_slot = P("slots")
    state_specs = state_specs_of(settings)
    input_specs = ScoreInputs(*(by_slot for _ in ScoreInputs._fields))
    input_specs = input_specs._replace(targets=None, temperature=None, state_rows=None)
    return compile_program(
        settings,
        mesh,
        extend_slots,
        in_specs=(P(), state_specs, input_specs),
        out_specs=state_specs,
        donate=(1,),
    )


def extend_slots(
    settings: ProgramSettings,
    params: qwen.Params,
    state: DecodeState[jax.Array],
    inputs: ScoreInputs[jax.Array],
) -> DecodeState[jax.Array]:
    """Writes the keys and values of one chunk of every row into its pages, without scoring."""
    state, _, _ = extend(settings, params, state, None, inputs)
    return state


def score(
    alternatives: int,
    settings: ProgramSettings,
    params: qwen.Params,
    state: DecodeState[jax.Array],
    row_states: DeltaState | None,
    inputs: ScoreInputs[jax.Array],
) -> tuple[DecodeState[jax.Array], DeltaState | None, TokenScores[jax.Array]]:
    """Scores the targets of one chunk of every row, and writes the chunk's keys and values.

    row_states: the recurrent states of the rows for scoring, as `slot_state.py` defines them for
        slots. The rows of the call are replaced by their states after the chunk.
    """
    state, row_states, hidden = extend(settings, params, state, row_states, inputs)
    scores = score_in_chunks(settings, params, hidden, inputs, alternatives)
    return state, row_states, scores


def extend(
    settings: ProgramSettings,
    params: qwen.Params,
    state: DecodeState[jax.Array],
    row_states: DeltaState | None,
    inputs: ScoreInputs[jax.Array],
) -> tuple[DecodeState[jax.Array], DeltaState | None, Float[Array, "rows T E"]]:
    """Writes the keys and values of one chunk of every row, and returns the hidden states.

    row_states: as in `score`.
    """
    model = settings.model
    rows, width = inputs.tokens.shape
    page_size = settings.page_size
    num_context = inputs.context_pages.shape[1] * page_size

    # Attention sees one packed row: the context's tokens, then the chunk's. Padding has segment 0.
    is_context = jnp.arange(num_context)[None] < inputs.starts[:, None]
    is_token = jnp.arange(width)[None] < inputs.lengths[:, None]
    segments = jnp.concatenate([is_context, is_token], axis=1).astype(jnp.int32)
    layout = RowLayout(num_context, 1, width)

    def write_and_attend(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        pools_of_layer: KeysAndValues,
        write_rows: jax.Array,
        read_rows: jax.Array,
        segments: jax.Array,
    ) -> tuple[jax.Array, KeysAndValues]:
        # Under split_over_tensor this runs on every device of `tensor`, with the device's heads.
        kv_heads, head_dim = k.shape[2:]

        def join_context(pool: attention.Pool, x: jax.Array) -> tuple[attention.Pool, jax.Array]:
            """Writes x into the pool. Returns the pool, and x after the context."""
            by_page = x.reshape(-1, page_size, kv_heads, head_dim)
            pool = settings.attention.write(pool, by_page, write_rows)
            # Attend to keys and values as decoding would read them from the pool.
            x = attention.as_stored(x, settings.kv_storage, settings.dtype)
            if not num_context:
                return pool, x
            context = pools.read(pool, read_rows, kv_heads, head_dim, settings.dtype)
            context = context.reshape(rows, num_context, kv_heads, head_dim)
            return pool, jnp.concatenate([context, x], axis=1)

        k_pool, k = join_context(pools_of_layer[0], k)
        v_pool, v = join_context(pools_of_layer[1], v)
        out = settings.attention.packed(q, k, v, segments, layout)
        return out, (k_pool, v_pool)

    pool_spec = P(settings.kv_axis)
    heads_spec = P(None, None, settings.kv_axis)
    write_and_attend = split_over_tensor(
        settings,
        write_and_attend,
        in_specs=(heads_spec, heads_spec, heads_spec, pool_spec, P(), P(), P()),
        out_specs=(heads_spec, pool_spec),
    )

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, carry: LayerCarry
    ) -> tuple[jax.Array, LayerCarry]:
        first_row = layer * settings.pages_per_shard
        write_rows = first_row + inputs.write_pages.ravel()
        read_rows = first_row + inputs.context_pages.ravel()
        pools_of_layer = carry.k, carry.v
        out, (k_pool, v_pool) = write_and_attend(
            q, k, v, pools_of_layer, write_rows, read_rows, segments
        )
        return out, carry._replace(k=k_pool, v=v_pool)

    def recur(
        inputs_of_layer: DeltaInputs, layer: jax.Array, carry: LayerCarry
    ) -> tuple[jax.Array, LayerCarry]:
        layer_states = slot_state.take_layer(carry.slot_state, layer)
        update_rows = recurrence(settings.exact is not None).rows
        out, next_states = update_rows(inputs_of_layer, is_token.astype(jnp.int32), layer_states)
        states = slot_state.with_layer(carry.slot_state, layer, next_states)
        return out, carry._replace(slot_state=states)

    states = None
    if row_states is not None:
        assert inputs.state_rows is not None
        states = slot_state.begin_rows(row_states, inputs.state_rows, inputs.starts)
    row_carry = LayerCarry(state.k_pool, state.v_pool, states)
    carry = experts.start(model, row_carry, is_token, settings.experts)
    hidden, carry = qwen.forward(
        model,
        params,
        inputs.tokens,
        inputs.starts[:, None] + jnp.arange(width)[None],
        attend,
        carry,
        dtype=settings.dtype,
        recur=recur,
        exact=settings.exact,
    )
    carry, _ = experts.finish(carry)
    if row_states is not None:
        assert inputs.state_rows is not None
        all_rows = jnp.arange(rows)
        row_states = slot_state.copy_rows(carry.slot_state, all_rows, row_states, inputs.state_rows)
    return state._replace(k_pool=carry.k, v_pool=carry.v), row_states, hidden


def score_in_chunks(
    settings: ProgramSettings,
    params: qwen.Params,
    hidden: Float[Array, "rows T E"],
    inputs: ScoreInputs[jax.Array],
    alternatives: int,
) -> TokenScores[jax.Array]:
    """Scores the targets from the hidden states, a few columns of logits at a time."""
    assert inputs.targets is not None and inputs.temperature is not None
    # All rows of a chunk have their logits at once, so fewer columns fit next to more rows.
    rows, width = inputs.targets.shape
    columns = min(width, max(1, LOGIT_TOKENS // rows))
    chunks = (
        split_columns(hidden, columns),
        split_columns(inputs.targets, columns),
        split_columns(inputs.temperature, columns),
    )

    def score_chunk(chunk: tuple[jax.Array, jax.Array, jax.Array]) -> TokenScores[jax.Array]:
        return score_columns(settings, params, *chunk, alternatives)

    by_chunk = lax.map(score_chunk, chunks)

    def join(x: jax.Array) -> jax.Array:  # [chunks, rows, columns, ...] -> [rows, T, ...]
        joined = jnp.moveaxis(x, 0, 1)
        return joined.reshape(rows, len(x) * columns, *x.shape[3:])[:, :width]

    return jax.tree.map(join, by_chunk)


def score_columns(
    settings: ProgramSettings,
    params: qwen.Params,
    hidden: Float[Array, "rows columns E"],
    targets: Int[Array, "rows columns"],
    temperature: Float[Array, "rows columns"],
    alternatives: int,
) -> TokenScores[jax.Array]:
    """Scores the targets of some columns. All of their logits exist at once."""
    # Padding columns have temperature 0. Their scores are unused, but must not be NaN.
    scale = jnp.where(temperature > 0, temperature, 1.0)
    logits = qwen.head(settings.model, params, hidden, settings.dtype, exact=settings.exact)
    exact_logps = None
    if settings.exact is not None:
        exact_logps, _ = exact_token_logps(logits, targets, scale)
    logits = logits / scale[..., None]
    log_total = jax.nn.logsumexp(logits, axis=-1)
    target = jnp.take_along_axis(logits, targets[..., None], axis=-1)
    ranks = 1 + jnp.sum(logits > target, axis=-1, dtype=jnp.int32)
    top_logits, top_tokens = lax.top_k(logits, alternatives)
    return TokenScores(
        logps=target[..., 0] - log_total if exact_logps is None else exact_logps,
        ranks=ranks,
        top_tokens=top_tokens.astype(jnp.int32),
        top_logps=top_logits - log_total[..., None],
    )
