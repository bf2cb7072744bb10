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
from jaxtyping import Array, Float, Int, PyTree

from jzero.decoder import slot_state
from jzero.decoder.caches import ChunkCache, ChunkPages, KeysAndValues, chunk_cache
from jzero.decoder.decode_state import CacheArrays, DecodeState
from jzero.decoder.program_settings import ProgramSettings
from jzero.decoder.programs import compile_program, copy_layers, state_specs_of
from jzero.decoder.sampling import draw_many
from jzero.model import qwen
from jzero.model.delta_net import DeltaState
from jzero.model.linear import RowAdapters
from jzero.model.logprobs import split_columns
from jzero.model.run_model import ModelInputs, run_model
from jzero.model.softmax import softmax_statistics

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
    # i32[rows, C]: the sequence's first pages, of which `starts` tokens are read, in layers that
    # keep all pages
    context_pages: Leaf
    # i32[rows, T / page]: pages for the chunk's keys and values in these layers
    write_pages: Leaf
    # i32[rows]: the rows of the states that the chunks continue; Engine.scoring_rows and above:
    # padding. None in models without such states.
    state_rows: Leaf | None = None
    # RowAdapters of the rows, in an adapter bank; None without a bank.
    adapters: PyTree = None
    # i32[rows]: the ring of each row's sequence (`rings.py`); Rings.count and above: padding. None
    # in decoders without rings.
    row_rings: Leaf | None = None
    # i32[rows, T, K]: tokens that are scored at temperature 1 in the place of each target; -1:
    # padding. None: no row has any.
    given: Leaf | None = None
    draws: PyTree = None  # Draws in the place of each target; None: no row has any


class Draws(NamedTuple, Generic[Leaf]):
    """Random tokens, drawn with replacement from the distribution of every target."""

    uniforms: Leaf  # f32[rows, T, n], one number in [0, 1) for each draw
    temperature: Leaf  # f32[rows, T]; 0: the most probable token


class TokenScores(NamedTuple, Generic[Leaf]):
    """The scores of the targets. Log-probabilities are fp32, over the full vocabulary."""

    logps: Leaf  # f32[rows, T]
    ranks: Leaf  # i32[rows, T]: 1 for the most probable token
    top_tokens: Leaf  # i32[rows, T, alternatives]: the most probable tokens, best first
    top_logps: Leaf  # f32[rows, T, alternatives]
    given_logps: Leaf | None = None  # f32[rows, T, K], if there are given tokens
    drawn_tokens: Leaf | None = None  # i32[rows, T, n], if there are draws
    drawn_logps: Leaf | None = None  # f32[rows, T, n] at temperature 1


def compile_score(settings: ProgramSettings, mesh: Mesh, alternatives: int) -> jax.stages.Wrapped:
    """Wraps `score` for a mesh of axes (slots, tensor). It donates the states."""
    by_slot = P("slots")
    state_specs = state_specs_of(settings)
    input_specs = ScoreInputs(*(by_slot for _ in ScoreInputs._fields))
    if state_specs.slot_state is None:
        input_specs = input_specs._replace(state_rows=None)
    if settings.rings is None:
        input_specs = input_specs._replace(row_rings=None)
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
    if settings.rings is None:
        input_specs = input_specs._replace(row_rings=None)
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
    rows, width = inputs.tokens.shape
    is_token = jnp.arange(width)[None] < inputs.lengths[:, None]
    states = None
    if row_states is not None:
        assert inputs.state_rows is not None
        states = slot_state.begin_rows(row_states, inputs.state_rows, inputs.starts)
    cache = chunk_cache(
        settings,
        state,
        states,
        inputs.starts,
        is_token,
        ChunkPages(inputs.context_pages, inputs.write_pages),
        inputs.row_rings,
    )
    positions = inputs.starts[:, None] + jnp.arange(width)[None]
    outputs = run_model(
        settings.model,
        params,
        ModelInputs(inputs.tokens, positions, is_token, adapters=inputs.adapters),
        cache,
        settings.arithmetic,
        dtype=settings.dtype,
        placement=settings.experts,
    )
    k_pool, v_pool, next_states = outputs.cache
    if cache.pools is not None:
        k_pool, v_pool = write_chunks(settings, cache, cache.pools, outputs.cache)
    if row_states is not None:
        assert inputs.state_rows is not None
        all_rows = jnp.arange(rows)
        row_states = slot_state.copy_rows(next_states, all_rows, row_states, inputs.state_rows)
    return state._replace(k_pool=k_pool, v_pool=v_pool), row_states, outputs.hidden


def write_chunks(
    settings: ProgramSettings,
    cache: ChunkCache,
    pools: KeysAndValues,
    chunks: CacheArrays,
) -> KeysAndValues:
    """Writes the keys and values of chunks after all layers have read the pools."""
    return copy_layers(
        settings,
        pools,
        (chunks.k, chunks.v),
        jnp.arange(len(chunks.k)),
        jnp.arange(cache.pages.write.size),
        lambda layer: cache.rows_of(layer).write,
    )


class Columns(NamedTuple):
    """Some columns of the rows of a call, and what is wanted of them. See `ScoreInputs`."""

    hidden: Float[Array, "rows columns E"]
    targets: Int[Array, "rows columns"]
    temperature: Float[Array, "rows columns"]
    given: Int[Array, "rows columns K"] | None
    draws: Draws[jax.Array] | None


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
    all_columns = Columns(hidden, inputs.targets, inputs.temperature, inputs.given, inputs.draws)
    chunks = jax.tree.map(lambda x: split_columns(x, columns), all_columns)

    def score_chunk(chunk: Columns) -> TokenScores[jax.Array]:
        return score_columns(settings, params, chunk, alternatives, inputs.adapters)

    by_chunk = lax.map(score_chunk, chunks)

    def join(x: jax.Array) -> jax.Array:  # [chunks, rows, columns, ...] -> [rows, T, ...]
        joined = jnp.moveaxis(x, 0, 1)
        return joined.reshape(rows, len(x) * columns, *x.shape[3:])[:, :width]

    return jax.tree.map(join, by_chunk)


def score_columns(
    settings: ProgramSettings,
    params: qwen.Params,
    columns: Columns,
    alternatives: int,
    adapters: RowAdapters | None,
) -> TokenScores[jax.Array]:
    """Scores the targets of some columns. All of their logits exist at once.

    adapters: of the rows, in an adapter bank.
    """
    hidden, targets, temperature, given, draws = columns
    # Padding columns have temperature 0. Their scores are unused, but must not be NaN.
    scale = jnp.where(temperature > 0, temperature, 1.0)
    arithmetic = settings.arithmetic
    logits = qwen.head(
        settings.model,
        params,
        hidden,
        settings.dtype,
        arithmetic=arithmetic,
        row_adapters=adapters,
    )
    logps, _ = arithmetic.logps(logits, targets, scale)
    given_logps, drawn_tokens, drawn_logps = None, None, None
    if given is not None:
        given_logps = arithmetic.logps_of_many(logits, jnp.maximum(given, 0))
    if draws is not None:
        drawn_tokens = draw_many(logits, draws.uniforms, draws.temperature)
        drawn_logps = arithmetic.logps_of_many(logits, drawn_tokens)
    logits = logits / scale[..., None]
    log_total, _ = softmax_statistics(logits)
    target = jnp.take_along_axis(logits, targets[..., None], axis=-1)
    ranks = 1 + jnp.sum(logits > target, axis=-1, dtype=jnp.int32)
    top_logits, top_tokens = lax.top_k(logits, alternatives)
    return TokenScores(
        logps=logps,
        ranks=ranks,
        top_tokens=top_tokens.astype(jnp.int32),
        top_logps=top_logits - log_total[..., None],
        given_logps=given_logps,
        drawn_tokens=drawn_tokens,
        drawn_logps=drawn_logps,
    )
