"""Where the decoder's programs keep keys, values and recurrent states: one class for each use.

    PromptCache      prefill: prompts attend to themselves; their keys and values are returned
    PagedCache       decoding: one token of every slot, which attends to the pages of its slot
    FusedPagedCache  the same, on backends that rotate, write and attend in one kernel
    ChunkCache       scoring: a chunk of every sequence, after the pages of its earlier tokens

Each is a `run_model.Cache`. Its fields are the same in all layers, except `arrays`, which passes
from layer to layer as an argument of `attend` and `recur`. All arrays are of one shard.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jzero import attention
from jzero.attention import pools
from jzero.decoder import rings, slot_state
from jzero.decoder.decode_state import CacheArrays, DecodeState
from jzero.decoder.pages import SCRATCH_PAGE
from jzero.decoder.program_settings import ProgramSettings
from jzero.errors import UserError
from jzero.model.delta_net import DeltaInputs, DeltaState
from jzero.model.layers import rotary, window_in_rows, window_of_layer
from jzero.types import RowLayout

Function = TypeVar("Function", bound=Callable)
KeysAndValues = tuple[attention.Pool, attention.Pool]  # of one device


def with_repeated_heads(
    settings: ProgramSettings, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns keys and values [..., K, D] with a KV head for every device of a shard."""
    repeats = settings.kv_heads // settings.model.num_key_value_heads
    if repeats == 1:
        return k, v
    return jnp.repeat(k, repeats, axis=-2), jnp.repeat(v, repeats, axis=-2)


def split_over_tensor(
    settings: ProgramSettings,
    function: Function,
    in_specs: tuple,
    out_specs: object,
) -> Function:
    """Maps `function` over the devices of a shard, each with its own heads or columns."""
    # XLA's partitioner can split matrix products, but neither a Pallas kernel nor a write to the
    # pool.
    if settings.tensor == 1:
        return function
    return jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, axis_names={"tensor"}, check_vma=False
    )


# -- prefill ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptCache:
    """The keys and values of prompts. Its arrays are [L, prompts, T, K, D]."""

    settings: ProgramSettings
    segments: Int[Array, "prompts T"]  # 1 for a prompt's tokens, 0 for padding
    arrays: CacheArrays
    rotates: bool = False

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        layer: jax.Array,
        arrays: CacheArrays,
    ) -> tuple[jax.Array, CacheArrays]:
        """Attends to the prompt, and stores its keys and values."""
        settings = self.settings
        packed = settings.attention.packed
        if settings.tensor > 1:
            packed = attention.split_over_mesh(packed, settings.tensor)
        # Prompts attend to keys and values in the precision that decoding will read from the pool.
        # The returned ones are not rounded here, because `insert` rounds them.
        stored_k = attention.as_stored(k, settings.kv_storage, settings.dtype)
        stored_v = attention.as_stored(v, settings.kv_storage, settings.dtype)
        width = self.segments.shape[1]
        layout = RowLayout(0, 1, width)
        positions = jnp.broadcast_to(jnp.arange(width), self.segments.shape)
        window = attention.given(window_in_rows(settings.model, layer, positions))
        out = packed(q, stored_k, stored_v, self.segments, layout, *window)
        k, v = with_repeated_heads(settings, k, v)
        all_k = lax.dynamic_update_index_in_dim(arrays.k, k, layer, 0)
        all_v = lax.dynamic_update_index_in_dim(arrays.v, v, layer, 0)
        return out, arrays._replace(k=all_k, v=all_v)

    def recur(
        self,
        inputs: DeltaInputs,
        layer: jax.Array,
        arrays: CacheArrays,
    ) -> tuple[jax.Array, CacheArrays]:
        """Computes the prompts from a state of zeros, and stores their last states."""
        recurrence = self.settings.arithmetic.recurrence
        out, layer_states = recurrence.rows(inputs, self.segments)
        states = slot_state.with_layer(arrays.slot_state, layer, layer_states)
        return out, arrays._replace(slot_state=states)


def prompt_cache(settings: ProgramSettings, segments: Int[Array, "prompts T"]) -> PromptCache:
    """Returns an empty cache for prompts."""
    prompts, width = segments.shape
    empty = empty_keys(settings, prompts, width)
    arrays = CacheArrays(empty, empty, slot_state.empty_slots(settings.model, prompts))
    return PromptCache(settings, segments, arrays)


def empty_keys(settings: ProgramSettings, rows: int, width: int) -> jax.Array:
    """Returns zeros for the keys, or the values, of rows in all layers: [L, rows, T, K, D]."""
    model = settings.model
    kv_shape = (model.num_cached_layers, rows, width, settings.kv_heads, model.head_dim)
    return jnp.zeros(kv_shape, settings.dtype)


# -- decoding --------------------------------------------------------------------------------------


def first_row_of(settings: ProgramSettings, layer: Int[Array, ""]) -> Int[Array, ""]:
    """Returns the first row of a layer in the pool of a shard."""
    if settings.rings is None:
        return layer * settings.pages_per_shard
    pages = rings.pages_of_layers(settings.model, settings.rings, settings.pages_per_shard)
    return jnp.asarray(rings.first_rows(pages))[layer]


class StepPages(NamedTuple):
    """The pages of one decode step in a layer, numbered within the layer."""

    table: Int[Array, "slots pages_per_slot"]
    write_page: Int[Array, " slots"]  # the page of each slot's token
    shared_pages: Int[Array, " blocks"]  # see attention.backend.Paged


@dataclass(frozen=True)
class PagedCache:
    """The pages and the recurrent states of slots, each of which decodes one token.

    Idle slots write to the scratch page, and keep their recurrent state. In a pass with drafts
    several neighboring rows are tokens of one slot (`draft_program.py`).
    """

    settings: ProgramSettings
    arrays: CacheArrays
    active: Bool[Array, " slots"]
    pages: StepPages
    ring_pages: StepPages | None  # of layers with rings, see `rings.py`
    write_offset: Int[Array, " slots"]  # the place of each slot's token in its page
    lengths: Int[Array, " slots"]  # tokens with the new one; 1 for idle slots
    rotates: bool = False

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        layer: jax.Array,
        arrays: CacheArrays,
    ) -> tuple[jax.Array, CacheArrays]:
        """Writes the tokens' keys and values, and attends to the pages of each slot."""
        settings = self.settings
        first_row = first_row_of(settings, layer)
        pages = self.pages
        if self.ring_pages is not None:
            has_ring = rings.has_ring(settings.model, layer)
            pages = jax.tree.map(partial(jnp.where, has_ring), self.ring_pages, pages)

        def write_and_attend(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            pools: KeysAndValues,
            write_rows: jax.Array,
            write_offset: jax.Array,
            read_rows: jax.Array,
            lengths: jax.Array,
            shared_pages: jax.Array,
            window: jax.Array | None,
        ) -> tuple[jax.Array, KeysAndValues]:
            # This runs on every device of `tensor`, with the device's heads.
            k_pool = settings.attention.write(pools[0], k[:, 0], write_rows, write_offset)
            v_pool = settings.attention.write(pools[1], v[:, 0], write_rows, write_offset)
            kv_heads = k.shape[2]
            out = settings.attention.paged(
                q[:, 0],
                k_pool,
                v_pool,
                read_rows,
                lengths,
                shared_pages,
                kv_heads,
                *attention.given(window),
            )
            return out[:, None], (k_pool, v_pool)

        pool_spec = P(settings.kv_axis)
        heads_spec = P(None, None, settings.kv_axis)
        k, v = with_repeated_heads(settings, k, v)
        write_and_attend = split_over_tensor(
            settings,
            write_and_attend,
            in_specs=(heads_spec, heads_spec, heads_spec, pool_spec, *[P()] * 6),
            out_specs=(heads_spec, pool_spec),
        )
        out, (k_pool, v_pool) = write_and_attend(
            q,
            k,
            v,
            (arrays.k, arrays.v),
            first_row + pages.write_page,
            self.write_offset,
            first_row + pages.table,
            self.lengths,
            pages.shared_pages,
            window_of_layer(settings.model, layer),
        )
        return out.astype(q.dtype), arrays._replace(k=k_pool, v=v_pool)

    def recur(
        self,
        inputs: DeltaInputs,
        layer: jax.Array,
        arrays: CacheArrays,
    ) -> tuple[jax.Array, CacheArrays]:
        """Computes one token of every slot from the slot's state."""
        return recur_in_slots(self.settings, self.active, inputs, layer, arrays)


def recur_in_slots(
    settings: ProgramSettings,
    active: Bool[Array, " slots"],
    inputs: DeltaInputs,
    layer: jax.Array,
    arrays: CacheArrays,
) -> tuple[jax.Array, CacheArrays]:
    """Computes one token of every slot, and replaces the states of the active slots.

    In a pass with drafts, computes several tokens of every slot, and keeps their inputs.
    """
    if isinstance(arrays.slot_state, slot_state.DraftStates):
        out, draft = slot_state.recur_draft(
            settings.arithmetic, inputs, active, layer, arrays.slot_state
        )
        return out, arrays._replace(slot_state=draft)
    layer_states = slot_state.take_layer(arrays.slot_state, layer)
    recurrence = settings.arithmetic.recurrence
    out, next_states = recurrence.slots(inputs, layer_states, active)
    states = slot_state.with_layer(arrays.slot_state, layer, next_states)
    return out, arrays._replace(slot_state=states)


@dataclass(frozen=True)
class FusedPagedCache:
    """A `PagedCache` whose backend rotates, writes and attends in one kernel."""

    settings: ProgramSettings
    arrays: CacheArrays
    active: Bool[Array, " slots"]
    cos: Float[Array, "slots D"]
    sin: Float[Array, "slots D"]
    table: Int[Array, "slots pages_per_slot"]
    lengths: Int[Array, " slots"]
    shared_pages: Int[Array, " blocks"]
    owners: Int[Array, " blocks"]  # see attention.backend.Decode
    rotates: bool = True

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        layer: jax.Array,
        arrays: CacheArrays,
    ) -> tuple[jax.Array, CacheArrays]:
        """Rotates q and k, writes keys and values, and attends to the pages of each slot."""
        settings = self.settings
        assert settings.attention.decode is not None
        assert settings.rings is None, "attention.choose refuses windows"
        pool_spec = P(settings.kv_axis)
        heads_spec = P(None, settings.kv_axis)
        pools_specs = (pool_spec, pool_spec)
        k, v = with_repeated_heads(settings, k, v)
        decode = split_over_tensor(
            settings,
            settings.attention.decode,
            (*[heads_spec] * 3, P(), P(), *pools_specs, *[P()] * 5),
            (heads_spec, *pools_specs),
        )
        out, k_pool, v_pool = decode(
            q[:, 0],
            k[:, 0],
            v[:, 0],
            self.cos,
            self.sin,
            arrays.k,
            arrays.v,
            self.table,
            self.lengths,
            layer * settings.pages_per_shard,
            self.shared_pages,
            self.owners,
        )
        return out[:, None].astype(q.dtype), arrays._replace(k=k_pool, v=v_pool)

    def recur(
        self,
        inputs: DeltaInputs,
        layer: jax.Array,
        arrays: CacheArrays,
    ) -> tuple[jax.Array, CacheArrays]:
        """Computes one token of every slot from the slot's state."""
        return recur_in_slots(self.settings, self.active, inputs, layer, arrays)


def slot_cache(
    settings: ProgramSettings,
    state: DecodeState[jax.Array],
    table: Int[Array, "slots pages_per_slot"],
    shared_pages: Int[Array, " blocks"],
) -> PagedCache | FusedPagedCache:
    """Returns the cache of one decode step. table, shared_pages: as in `programs.generate`.

    Raises UserError for a fused kernel and a model that rotates only a part of each head.
    """
    # These values are the same in every layer, so they are computed once.
    active, positions = state.active, state.positions
    arrays = CacheArrays(state.k_pool, state.v_pool, state.slot_state)
    # Softmax needs a token: an idle slot attends to one, and its output is unused.
    lengths = jnp.where(active, positions + 1, 1)
    if settings.attention.decode is None:
        # The page that holds the position of each slot's input.
        page_numbers = (positions // settings.page_size)[:, None]

        def pages_of_step(table: jax.Array, shared_pages: jax.Array) -> StepPages:
            page_of_token = jnp.take_along_axis(table, page_numbers, axis=1)
            write_page = jnp.where(active, page_of_token[:, 0], SCRATCH_PAGE)
            return StepPages(table, write_page, shared_pages)

        ring_pages = None
        if settings.rings is not None:
            ring_table = rings.ring_table(settings.rings, *table.shape)
            ring_pages = pages_of_step(ring_table, jnp.zeros_like(shared_pages))
        return PagedCache(
            settings,
            arrays,
            active,
            pages=pages_of_step(table, shared_pages),
            ring_pages=ring_pages,
            write_offset=positions % settings.page_size,
            lengths=lengths,
        )
    if settings.model.partial_rotary_factor != 1:
        raise UserError(
            "model.attention=tpu_fused rotates whole heads, and "
            f"{settings.model.model_type} a part of each: leave model.attention out"
        )
    # The kernel writes an idle slot's token as well, at the start of its first page, which may
    # hold a prompt that other slots read.
    table = jnp.where(active[:, None], table, SCRATCH_PAGE)
    shared_pages, owners = shared_pages_and_owners(shared_pages, active)
    cos, sin = full_rotary(settings, positions)
    return FusedPagedCache(settings, arrays, active, cos, sin, table, lengths, shared_pages, owners)


def shared_pages_and_owners(
    shared_pages: Int[Array, " blocks"],
    active: Bool[Array, " slots"],
) -> tuple[Int[Array, " blocks"], Int[Array, " blocks"]]:
    """Returns the number of pages that each block's slots share, and its first active slot.

    Slots are numbered within the shard. A block without active slots shares nothing.
    """
    # Slots end in the middle of a call, each at its own step. The kernel reads the pages of a block
    # through the row of its owner, so the owner must be a slot that has not ended.
    is_active = active.reshape(len(shared_pages), -1)
    slots_per_block = is_active.shape[1]
    first_slots = jnp.arange(len(shared_pages), dtype=jnp.int32) * slots_per_block
    owners = first_slots + jnp.argmax(is_active, axis=1).astype(jnp.int32)
    return jnp.where(is_active.any(axis=1), shared_pages, 0), owners


def full_rotary(
    settings: ProgramSettings,
    positions: Int[Array, " slots"],
) -> tuple[Float[Array, "slots D"], Float[Array, "slots D"]]:
    """Returns cosines and sines for both halves of a head, as `backend.Decode` requires."""
    rope = rotary(settings.model, positions[:, None])
    cos, sin = rope.cos[:, 0, 0], rope.sin[:, 0, 0]
    return jnp.concatenate([cos, cos], axis=1), jnp.concatenate([-sin, sin], axis=1)


# -- scoring ---------------------------------------------------------------------------------------


class ChunkPages(NamedTuple):
    """The pages of one chunk of every row in a layer, numbered within the layer."""

    context: Int[Array, "rows C"]
    write: Int[Array, "rows W"]  # the pages of the chunk


@dataclass(frozen=True)
class ChunkCache:
    """Pages of sequences, each of which computes a chunk of tokens after its earlier pages.

    Attention sees one packed row: the context's tokens, then the chunk's. Padding has segment 0.

    In decoders with rings a chunk replaces pages that it reads, and XLA would copy the pool to keep
    them. So the pools stay as they are, and `arrays` has the keys and values of the chunk, as those
    of a prompt: [L, rows, T, K, D]. `score_program` writes them after the last layer.
    """

    settings: ProgramSettings
    arrays: CacheArrays
    is_token: Bool[Array, "rows T"]
    segments: Int[Array, "rows S"]  # S tokens: the context pages, then the chunk
    positions: Int[Array, "rows S"]  # of the same tokens in their sequences
    pages: ChunkPages
    ring_pages: ChunkPages | None  # of layers with rings, see `rings.py`
    pools: KeysAndValues | None  # in decoders with rings
    rotates: bool = False

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        layer: jax.Array,
        arrays: CacheArrays,
    ) -> tuple[jax.Array, CacheArrays]:
        """Writes the chunk's keys and values, and attends to the context and the chunk."""
        settings, page_size = self.settings, self.settings.page_size
        rows, width = self.is_token.shape
        num_context = self.pages.context.shape[1] * page_size
        layout = RowLayout(num_context, 1, width)

        def write_and_attend(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            pools_of_layer: KeysAndValues,
            write_rows: jax.Array,
            read_rows: jax.Array,
            segments: jax.Array,
            window: attention.Window | None,
        ) -> tuple[jax.Array, KeysAndValues]:
            # This runs on every device of `tensor`, with the device's heads.
            kv_heads, head_dim = k.shape[2:]

            def join_context(
                pool: attention.Pool,
                x: jax.Array,
            ) -> tuple[attention.Pool, jax.Array]:
                """Writes x into the pool. Returns the pool, and x after the context."""
                if self.pools is None:
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
            out = settings.attention.packed(q, k, v, segments, layout, *attention.given(window))
            return out, (k_pool, v_pool)

        pool_spec = P(settings.kv_axis)
        heads_spec = P(None, None, settings.kv_axis)
        k, v = with_repeated_heads(settings, k, v)
        write_and_attend = split_over_tensor(
            settings,
            write_and_attend,
            in_specs=(heads_spec, heads_spec, heads_spec, pool_spec, P(), P(), P(), P()),
            out_specs=(heads_spec, pool_spec),
        )
        rows_of_layer = self.rows_of(layer)
        window = window_in_rows(settings.model, layer, self.positions)
        pools_of_layer = self.pools or (arrays.k, arrays.v)
        out, (next_k, next_v) = write_and_attend(
            q,
            k,
            v,
            pools_of_layer,
            rows_of_layer.write,
            rows_of_layer.context,
            self.segments,
            window,
        )
        if self.pools is not None:
            next_k = lax.dynamic_update_index_in_dim(arrays.k, k, layer, 0)
            next_v = lax.dynamic_update_index_in_dim(arrays.v, v, layer, 0)
        return out, arrays._replace(k=next_k, v=next_v)

    def rows_of(self, layer: jax.Array) -> ChunkPages:
        """Returns the rows of the pool of a layer's pages, without the axis of rows."""
        pages = self.pages
        if self.ring_pages is not None:
            has_ring = rings.has_ring(self.settings.model, layer)
            pages = jax.tree.map(partial(jnp.where, has_ring), self.ring_pages, pages)
        first_row = first_row_of(self.settings, layer)
        write_rows = first_row + pages.write.ravel()
        return ChunkPages(first_row + pages.context.ravel(), write_rows)

    def recur(
        self,
        inputs: DeltaInputs,
        layer: jax.Array,
        arrays: CacheArrays,
    ) -> tuple[jax.Array, CacheArrays]:
        """Computes the chunks from the rows' states, and stores the states after them."""
        layer_states = slot_state.take_layer(arrays.slot_state, layer)
        segments = self.is_token.astype(jnp.int32)
        recurrence = self.settings.arithmetic.recurrence
        out, next_states = recurrence.rows(inputs, segments, layer_states)
        states = slot_state.with_layer(arrays.slot_state, layer, next_states)
        return out, arrays._replace(slot_state=states)


def chunk_cache(
    settings: ProgramSettings,
    state: DecodeState[jax.Array],
    row_states: DeltaState | None,
    starts: Int[Array, " rows"],
    is_token: Bool[Array, "rows T"],
    pages: ChunkPages,
    row_rings: Int[Array, " rows"] | None,
) -> ChunkCache:
    """Returns the cache of one chunk of every row.

    row_states: the recurrent states before the chunks, [L, rows, ...].
    starts, pages, row_rings: as in `score_program.ScoreInputs`.
    """
    rows, width = is_token.shape
    page_size = settings.page_size
    num_context = pages.context.shape[1] * page_size
    context = jnp.broadcast_to(jnp.arange(num_context), (rows, num_context))
    segments = jnp.concatenate([context < starts[:, None], is_token], axis=1).astype(jnp.int32)
    positions = jnp.concatenate([context, starts[:, None] + jnp.arange(width)], axis=1)
    arrays = CacheArrays(state.k_pool, state.v_pool, row_states)
    ring_pages, pools = None, None
    if settings.rings is not None:
        assert row_rings is not None
        lengths = starts + is_token.sum(axis=1)
        ring_pages = chunk_pages_in_rings(
            settings.rings, page_size, row_rings, starts, lengths, pages
        )
        pools = state.k_pool, state.v_pool
        empty = empty_keys(settings, rows, width)
        arrays = CacheArrays(empty, empty, row_states)
    return ChunkCache(settings, arrays, is_token, segments, positions, pages, ring_pages, pools)


def chunk_pages_in_rings(
    sizes: rings.Rings,
    page_size: int,
    row_rings: Int[Array, " rows"],
    starts: Int[Array, " rows"],
    lengths: Int[Array, " rows"],
    pages: ChunkPages,
) -> ChunkPages:
    """Returns the pages of a chunk in layers with rings.

    lengths: tokens of each sequence after the chunk.
    pages: in layers with full attention.
    """
    num_context, num_written = pages.context.shape[1], pages.write.shape[1]
    # Pages of the context that the ring no longer holds are outside of the window.
    context = jnp.broadcast_to(jnp.arange(num_context), pages.context.shape)
    written = (starts // page_size)[:, None] + jnp.arange(num_written)
    is_kept = rings.is_newest(sizes, written, -(-lengths // page_size))
    return ChunkPages(
        context=rings.ring_rows(sizes, row_rings, context),
        write=rings.ring_rows(sizes, row_rings, written, is_kept),
    )
