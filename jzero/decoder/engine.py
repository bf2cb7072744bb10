"""The decoder: prefill, insert and generate over a paged KV cache.

The methods have the names of JetStream's Engine and parameters of their own: seeds, several samples
of a prompt, pages. `jzero.serving.jetstream` has JetStream's interface, for its server.

Input: padded prompts and the slot of each of their samples. Output: sampled tokens with their
log-probabilities. `Engine` is the host side: it records which sample decodes in which slot and
which pages every slot holds, and it calls the jitted programs of `programs.py`. It makes no
scheduling decisions: the scheduler (`scheduler.py`) decides when to prefill, and which sequence
gives up its pages when a shard runs out of them.

The life of one request:

    prefix = engine.prefill(params=params, padded_tokens=..., true_length=..., seed=seed)
    placement = Placement(slot=0, prefix_row=0, sample_index=0, length=..., limit=..., ...)
    state = engine.insert(prefix, engine.init_decode_state(), placement, temperature=1.0)
    state, result = engine.generate(params, state, seed)  # until the slot has ended
    engine.free_resource(slot=0)

The device state is not an attribute of the engine: every method takes it, donates its buffers and
returns the next state.

The mesh has the axes (slots, tensor). The devices at one index of `slots` form a shard: an
independent decoder with its own slots and pages.
"""

import math
from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, PyTree

from jzero import attention
from jzero.config import RolloutConfig
from jzero.decoder import drafts, rings, slot_state
from jzero.decoder.adapter_bank import BASE_MODEL, HeldAdapter, has_bank, row_adapters
from jzero.decoder.decode_state import (
    Arrival,
    Choices,
    DecodeState,
    Prefix,
    PromptChoices,
    ResultTokens,
    ResumePoint,
    Start,
)
from jzero.decoder.draft_program import DraftInputs, compile_generate
from jzero.decoder.drafter import Beginning, Drafter
from jzero.decoder.pages import PageAllocator
from jzero.decoder.prefix_cache import PrefixCache
from jzero.decoder.program_settings import make_program_settings, with_choices, with_filters
from jzero.decoder.programs import Programs, compile_programs
from jzero.decoder.rings import Rings
from jzero.decoder.sampling import Filters, SlotFilters
from jzero.decoder.score_program import ScoreInputs, TokenScores, compile_extend, compile_score
from jzero.errors import UserError
from jzero.hosts import collectives
from jzero.hosts.platform import platform_of
from jzero.model import qwen
from jzero.model.delta_net import DeltaState
from jzero.model.linear import RowAdapters
from jzero.numerics.sizes import divide_up, power_of_two
from jzero.tokens import TrackShapes

# Rows per shard for scoring: sequences being scored, or scored ones that keep their pages.
SCORING_ROWS = 16
SCORE_TOKENS = 2048  # tokens in one call of `score` on each shard; longer inputs take several calls
# A returning sequence with more tokens than this is prefilled in chunks of this size.
CHUNK_TOKENS = 8192
SMALLEST_INSERT = 8  # samples; smaller inserts are padded, so that few shapes are compiled


class PageCopy(NamedTuple):
    """A page of a prompt that `insert` copies into the pool."""

    prefix_page: int  # index among the pages of the prompt
    pool_page: int


@dataclass
class Placement:
    """One sample of a prefix that decodes in a slot, and its progress."""

    slot: int  # index among the slots of all shards
    prefix_row: int  # the row of the sample's prompt in the Prefix
    sample_index: int  # index among the samples of this prompt
    length: int  # tokens whose KV the prefix holds
    limit: int  # number of tokens at which the sample ends
    request: int  # keys the sample's noise
    group: Hashable  # samples with the same group share the full pages
    shared_tokens: int  # of their first `shared_tokens` tokens
    filters: Filters | None = None  # of a request to a server; None: the engine's
    # Samples share pages only if their weights are the same: the adapter, and the policy version.
    adapter: HeldAdapter = BASE_MODEL
    version: int = 0
    owner: str = ""  # see `Sequence.owner`
    reserved_tokens: int = 0  # tokens whose KV the calls dispatched so far may have written
    is_paused: bool = False  # between two turns: the slot keeps its pages and does not decode
    resume_point: ResumePoint[int] | None = None  # for the next call, after a pause
    # Inputs of the next steps, which take them instead of sampling.
    forced_tokens: list[int] = field(default_factory=list)
    # For drafts: the tokens of a sequence that the device does not know yet, and other texts.
    beginning: np.ndarray | None = None
    references: np.ndarray | None = None

    @property
    def weights(self) -> Hashable:
        """The weights that compute the sample's keys and values; equal only if they are.

        Those of two owners count as different. Whether a prompt is cached can be told from the time
        that it takes, so what is cached for one owner must not serve another.
        """
        return self.version, self.adapter, self.owner


@dataclass(frozen=True)
class Samples:
    """How the samples of one run of the scheduler differ from rollouts for training."""

    # 0: rollout.top_p and rollout.top_k. Other values compile separate programs.
    top_p: float = 0.0
    top_k: int = 0
    max_new_tokens: int = 0  # 0: rollout.max_new_tokens
    is_trained: bool = True  # if not, no optional track is recorded
    # Requests to a server: every sequence may have its own filters, and a call fewer steps.
    has_choices: bool = False

    def settings(self, rollout: RolloutConfig) -> RolloutConfig:
        """Returns the settings of the episodes."""
        if not self.max_new_tokens:
            return rollout
        return replace(rollout, max_new_tokens=self.max_new_tokens)


ROLLOUTS = Samples()
ResultT = TypeVar("ResultT")


class Engine:
    """Owns the pages and the host's view of the slots.

    Attributes:
        num_shards: number of independent decoders.
        placements: slot -> the sample that decodes there.
        page_allocators: one per shard.
        program_settings: replace this before the first call to change the compiled programs.
    """

    # Required by JetStream's interface.
    samples_per_slot = 1
    colocated_cpus = None

    def __init__(
        self,
        model: qwen.QwenConfig,
        settings: RolloutConfig,
        mesh: Mesh,
        stop_ids: tuple[int, ...],
        dtype: str,
        attention_name: str = "",
        *,
        longest_evaluation: int = 0,
        exact: bool = False,
        tracks: TrackShapes = (),
    ) -> None:
        """Makes an engine without device state. No program is compiled yet.

        Args:
            settings: the slots and pages of this decoder.
            mesh: the devices of this decoder, with axes (slots, tensor). If they belong to several
                hosts, they are one shard, and all of these hosts call the same methods in the same
                order.
            stop_ids: tokens that end a response.
            dtype: of weights and activations.
            attention_name: `config.model.attention`.
            longest_evaluation: tokens of the longest evaluation sequence. If evaluation sequences
                are longer than rollouts, fewer of them may find pages at the same time.
            exact: `config.model.exact`.
            tracks: the optional tracks to record for every token that is trained on.

        Raises:
            UserError: a shard has too few pages for one sequence of full length.
        """
        self.model = model
        self.settings = settings
        self.mesh = mesh
        self.dtype = jnp.dtype(dtype)

        self.num_shards = mesh.shape["slots"]
        self.slots_per_shard = divide_up(settings.num_slots, self.num_shards)
        self.max_concurrent_decodes = self.num_shards * self.slots_per_shard
        # Attention reads the pages that a block of neighboring slots shares only once. The samples
        # of a group usually occupy neighboring slots.
        self.slots_per_block = math.gcd(self.slots_per_shard, settings.group_size)

        # Tables and buffers are sized for the longest sequence of training and evaluation.
        self.max_sequence_tokens = max(settings.longest_episode, longest_evaluation)
        self.pages_per_slot = divide_up(self.max_sequence_tokens, settings.page_size)
        self.max_prefill_length = self.pages_per_slot * settings.page_size
        # Longer evaluations get no more memory than the rollouts, unless one sequence would not
        # fit.
        pages_per_rollout = divide_up(settings.longest_episode, settings.page_size)
        usable_pages = max(self.slots_per_shard * pages_per_rollout, self.pages_per_slot)
        if settings.num_pages:
            usable_pages = divide_up(settings.num_pages, self.num_shards)
        if usable_pages < self.pages_per_slot:
            raise UserError(
                f"rollout.num_pages={settings.num_pages} is too small: one sequence of "
                f"{self.max_sequence_tokens} tokens takes {self.pages_per_slot} pages of "
                f"{settings.page_size} on each of {self.num_shards} devices"
            )
        self.pages_per_shard = usable_pages + 1  # plus the scratch page
        # The rings of a pool with enough pages for them; None: all layers keep all pages.
        self.full_rings = rings.choose(
            model,
            settings,
            drafts.numbers_of(settings.draft),
            self.slots_per_shard,
            SCORING_ROWS,
        )

        self.program_settings = make_program_settings(
            model=model,
            settings=settings,
            mesh=mesh,
            stop_ids=stop_ids,
            dtype=self.dtype,
            attention_name=attention_name,
            slots_per_shard=self.slots_per_shard,
            pages_per_shard=self.pages_per_shard,
            rings=self.rings_of(self.pages_per_shard),
            exact=exact,
            tracks=tracks,
        )
        self.score_tokens = SCORE_TOKENS
        self.chunk_tokens = CHUNK_TOKENS
        self.placements: dict[int, Placement] = {}
        # Steps of the next call, at most `rollout.decode_steps`. Fewer need Samples.has_choices.
        self.call_steps = settings.decode_steps
        self.drafter: Drafter | None = None
        if settings.draft is not None and self.program_settings.drafting is not None:
            assert model.mtp or not self.program_settings.drafts_by_head, "the model has no head"
            self.drafter = Drafter(
                self.program_settings.drafting,
                self.program_settings,
                mesh,
                self.max_sequence_tokens,
                settings.draft.cost,
            )
        # Keyed by what the programs have compiled in: top_p, top_k, the tracks that are returned,
        # whether filters are data, and whether passes have drafts.
        self._programs: dict[tuple[float, int, TrackShapes, bool, bool], Programs] = {}
        self._score_programs: dict[int, jax.stages.Wrapped] = {}  # keyed by number of alternatives

    @cached_property
    def page_allocators(self) -> list[PageAllocator]:
        """The page allocator of each shard."""
        # Built on first use, so an engine that only serves for planning takes no memory, however
        # many slots it has.
        # After the rows of the slots, every shard has rows for the sequences that it scores.
        return [
            PageAllocator(
                self.pages_per_shard,
                self.settings.page_size,
                self.slots_per_shard + self.scoring_rows,
                self.pages_per_slot,
            )
            for _ in range(self.num_shards)
        ]

    @cached_property
    def prefix_caches(self) -> list[PrefixCache]:
        """The prefix cache of each shard. Its pages belong to the current decode state."""
        return list(map(PrefixCache, self.page_allocators))

    def clear_prefix_caches(self) -> None:
        """Frees all cached pages."""
        for cache in self.prefix_caches:
            cache.clear()

    def rings_of(self, pages_per_shard: int) -> Rings | None:
        """Returns the rings of a pool of this size; None if all layers keep all pages."""
        return self.full_rings if rings.fits(self.full_rings, pages_per_shard) else None

    def pool_pages(self, pages_per_shard: int) -> int:
        """Returns the pages of all layers of a shard, each with its scratch page.

        pages_per_shard: of a layer that keeps all pages.
        """
        sizes = self.rings_of(pages_per_shard)
        return sum(rings.pages_of_layers(self.model, sizes, pages_per_shard))

    @property
    def has_rings(self) -> bool:
        """Whether layers with a sliding window keep only the pages of it: see `rings.py`."""
        return self.program_settings.rings is not None

    @property
    def scoring_rows(self) -> int:
        """The rows of a shard for sequences that are scored."""
        sizes = self.program_settings.rings
        return SCORING_ROWS if sizes is None else sizes.scoring_rows

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Returns the tokens that end a response."""
        return self.program_settings.stop_ids

    @property
    def jitted(self) -> Programs:
        """Returns the programs that sample rollouts for training."""
        return self.programs(ROLLOUTS)

    def programs(self, samples: Samples) -> Programs:
        """Returns the programs that sample as `samples` describes.

        Each is compiled at its first call with a new shape.
        """
        tracks = self.recorded_tracks(samples)
        top_p = samples.top_p or self.settings.top_p
        top_k = samples.top_k or self.settings.top_k
        has_drafts = self.paying_drafter is not None
        key = top_p, top_k, tracks, samples.has_choices, has_drafts
        if key not in self._programs:
            settings = replace(self.program_settings, tracks=tracks)
            if samples.has_choices:
                settings = with_choices(settings, self.mesh)
            elif (top_p, top_k) != (self.settings.top_p, self.settings.top_k):
                filters = Filters(top_k, top_p, self.settings.min_p)
                settings = with_filters(settings, filters, self.mesh)
            programs = compile_programs(settings, self.mesh)
            if has_drafts:
                programs = programs._replace(generate=compile_generate(settings, self.mesh))
            self._programs[key] = programs
        return self._programs[key]

    @property
    def paying_drafter(self) -> Drafter | None:
        """The drafter, if passes of the model may check drafts."""
        return self.drafter if self.drafter is not None and self.drafter.pays else None

    def tokens_of(self, steps: int) -> int:
        """Returns the most tokens of a slot in a call of `steps` steps."""
        drafter = self.paying_drafter
        return steps if drafter is None else steps * drafter.drafting.passed

    @property
    def filters(self) -> Filters:
        """Returns the filters of the settings."""
        return self.program_settings.filters

    def filter_columns(self, filters: SequenceOf[Filters | None]) -> list[np.ndarray]:
        """Returns the arrays of `SlotFilters`; None becomes the engine's filters."""
        columns = zip(*(item or self.filters for item in filters), strict=True)
        top_k, top_p, min_p = map(np.array, columns)
        return [top_k.astype(np.int32), top_p.astype(np.float32), min_p.astype(np.float32)]

    def input_tracks(self, samples: Samples = ROLLOUTS) -> list[str]:
        """Returns the names of the recorded tracks of inputs."""
        return list(self.program_settings.input_shapes) if samples.is_trained else []

    def recorded_tracks(self, samples: Samples) -> TrackShapes:
        """Returns the optional tracks that are recorded for samples."""
        # They only serve training.
        return self.program_settings.tracks if samples.is_trained else ()

    def score_program(self, alternatives: int) -> jax.stages.Wrapped:
        """Returns the program `score` that returns `alternatives` alternatives of every token."""
        if alternatives not in self._score_programs:
            program = compile_score(self.program_settings, self.mesh, alternatives)
            self._score_programs[alternatives] = program
        return self._score_programs[alternatives]

    # -- device state -----------------------------------------------------------------------------

    def get_prefix_destination_sharding(self) -> Prefix[NamedSharding]:
        """Returns the sharding that `insert` requires of a prefix."""
        kv_axis = self.program_settings.kv_axis
        kv = NamedSharding(self.mesh, P(None, "slots", None, kv_axis))
        by_slot = NamedSharding(self.mesh, P("slots"))
        return Prefix(
            k=kv,
            v=kv,
            tracks=dict.fromkeys(self.program_settings.sampled_shapes, by_slot),
            input_tracks=dict.fromkeys(self.program_settings.input_shapes, by_slot),
            slot_state=jax.tree.map(lambda x: x.sharding, self.abstract_slot_state(1)),
            hidden=by_slot if self.program_settings.drafts_by_head else None,
        )

    def load_params(self, params: qwen.Params, shardings: qwen.Params) -> qwen.Params:
        """Returns weights in the decoder's dtype and layout.

        `sharding.publish` transfers a trainer's weights instead.
        """
        return jax.device_put(qwen.cast(params, self.dtype), shardings)

    def abstract_state(self) -> DecodeState[jax.ShapeDtypeStruct]:
        """Returns shapes and shardings of the decode state."""
        static, model = self.program_settings, self.model
        split = static.tensor if static.kv_axis else 1
        # A kernel may store several heads in one row, or pad a head to a wider row.
        rows, width = static.attention.pool_rows(static.kv_heads // split, model.head_dim)
        num_pages = self.num_shards * self.pool_pages(self.pages_per_shard)
        shape = split * rows, num_pages, self.settings.page_size, width
        spec = P(static.kv_axis, "slots")
        pool = self.abstract_array(shape, static.kv_storage, spec)
        if attention.number_of(static.kv_storage) is not None:
            scales_shape = attention.scales_shape(shape, model.head_dim)
            scales = self.abstract_array(scales_shape, jnp.float32, spec)
            pool = attention.QuantizedPool(pool, scales)

        def by_slot(dtype: DTypeLike) -> jax.ShapeDtypeStruct:
            return self.abstract_array((self.max_concurrent_decodes,), dtype, P("slots"))

        return DecodeState(
            k_pool=pool,
            v_pool=pool,
            tokens=by_slot(jnp.int32),
            positions=by_slot(jnp.int32),
            limits=by_slot(jnp.int32),
            requests=by_slot(jnp.int32),
            temperature=by_slot(jnp.float32),
            active=by_slot(jnp.bool_),
            slot_state=self.abstract_slot_state(self.slots_per_shard),
            drafts=self.drafter.abstract_state() if self.drafter else None,
        )

    @property
    def has_slot_state(self) -> bool:
        """Whether slots keep a recurrent state besides pages: see `slot_state.py`."""
        return self.model.delta_net is not None

    def abstract_slot_state(self, rows_per_shard: int) -> DeltaState | None:
        """Returns shapes and shardings of the recurrent states, or None without such states.

        `rows_per_shard` is the number of sequences of each shard.
        """
        rows = self.num_shards * rows_per_shard
        states = jax.eval_shape(lambda: slot_state.empty_slots(self.model, rows))
        specs = slot_state.sharding_specs(self.model, self.program_settings.tensor)

        def place(array: jax.ShapeDtypeStruct, spec: P) -> jax.ShapeDtypeStruct:
            return self.abstract_array(array.shape, array.dtype, spec)

        if states is None or specs is None:
            return None
        placed = [place(array, spec) for array, spec in zip(states, specs, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(states), placed)

    def abstract_row_states(self) -> DeltaState | None:
        """Returns shapes and shardings of the states of the rows for scoring, or None."""
        return self.abstract_slot_state(SCORING_ROWS)

    def abstract_array(
        self, shape: tuple[int, ...], dtype: DTypeLike, spec: P
    ) -> jax.ShapeDtypeStruct:
        """Returns a shape that `spec` splits over the engine's mesh."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec))

    def init_decode_state(self) -> DecodeState[jax.Array]:
        """Returns a state in which all slots are empty, and empties the prefix caches."""
        self.clear_prefix_caches()
        return self._empty_state()

    @cached_property
    def _empty_state(self) -> jax.stages.Wrapped:
        return zeros_program(self.abstract_state())

    @cached_property
    def _empty_row_states(self) -> jax.stages.Wrapped:
        return zeros_program(self.abstract_row_states())

    # -- slots and pages --------------------------------------------------------------------------

    def shard_of(self, slot: int) -> int:
        """Returns the shard that `slot` belongs to."""
        return slot // self.slots_per_shard

    def free_slots(self, shard: int) -> list[int]:
        """Returns the unoccupied slots of a shard."""
        first = shard * self.slots_per_shard
        slots = range(first, first + self.slots_per_shard)
        return [slot for slot in slots if slot not in self.placements]

    def place(self, placement: Placement, cached_pages: SequenceOf[int] = ()) -> list[PageCopy]:
        """Reserves the pages that a sample needs for its prompt and its first call.

        Full pages of tokens that the sample shares with its group (prefix sharing) are reused from
        another sample of the group on the same shard. The last page of the prompt is copied for
        each sample, because the sample writes its first tokens there.

        cached_pages: pages of the shard's prefix cache with the beginning of the sample. They are
            reused instead if they are more.

        Returns:
            The pages that `bulk_insert` has to write.

        Raises:
            OutOfPages: no page was reserved.
        """
        assert placement.slot not in self.placements, f"{placement.slot=} is taken"
        shard, slot = divmod(placement.slot, self.slots_per_shard)
        # Sharing is safe because a sample writes only after its prompt: it never modifies a full
        # page of the prompt.
        shared_pages = self._shared_pages(placement)
        if len(cached_pages) > len(shared_pages):
            shared_pages = cached_pages
        first_call_end = placement.length + self.tokens_of(self.call_steps)
        # Reserve the first call's pages as well: a sample that is placed can decode at least one
        # call.
        # A sequence that was given up has a limit below its length (`serving.worker`).
        end = max(min(first_call_end, placement.limit), placement.length)
        new_pages = self.page_allocators[shard].reserve(slot, end, shared_pages)
        self.placements[placement.slot] = placement
        placement.reserved_tokens = placement.length
        pages_of_prompt = divide_up(placement.length, self.settings.page_size)
        to_write = new_pages[: pages_of_prompt - len(shared_pages)]
        return [PageCopy(i, page) for i, page in enumerate(to_write, start=len(shared_pages))]

    def _shared_pages(self, placement: Placement) -> SequenceOf[int]:
        """Returns the full pages of the group's shared tokens on the shard of `placement`."""
        shard = self.shard_of(placement.slot)
        shared_tokens = placement.shared_tokens
        if self.model.mtp:
            # What the head keeps at the last token of the prompt depends on the sample's first one.
            shared_tokens -= 1
        full_pages = shared_tokens // self.settings.page_size
        for other in self.placements.values():
            is_same = (other.weights, other.group) == (placement.weights, placement.group)
            if is_same and self.shard_of(other.slot) == shard:
                slot = other.slot % self.slots_per_shard
                return self.page_allocators[shard].pages_of_slot[slot][:full_pages]
        return []

    def pages_of(self, shard: int, row: int) -> list[int]:
        """Returns the pages of a slot of a shard, or of a row for scoring, in sequence order.

        `row`: a slot of the shard; rows for scoring follow the slots.
        """
        return self.page_allocators[shard].pages_of_slot[row]

    def reserve(self, slot: int) -> int:
        """Reserves the pages that the slot's next call may write.

        Returns the maximum number of tokens in the slot after this call. A second call before the
        next decode call has no effect. Raises OutOfPages without reserving any page.
        """
        shard, local_slot = divmod(slot, self.slots_per_shard)
        placement = self.placements[slot]
        call_end = placement.reserved_tokens + self.tokens_of(self.call_steps)
        call_end = min(call_end, placement.limit)
        self.page_allocators[shard].reserve(local_slot, call_end)
        return call_end

    def note_tokens(self, slot: int, num_tokens: int, unread_calls: int) -> None:
        """Notes how far the calls that were read have come, because drafts make it uncertain.

        num_tokens: tokens of the sequence in `slot` after these calls.
        unread_calls: dispatched calls after them.
        """
        placement = self.placements[slot]
        most = num_tokens - 1 + unread_calls * self.tokens_of(self.settings.decode_steps)
        placement.reserved_tokens = min(placement.reserved_tokens, most)

    def free_resource(self, slot: int) -> None:
        """Frees the slot and its pages. The next call no longer decodes the slot."""
        shard, local_slot = divmod(slot, self.slots_per_shard)
        self.page_allocators[shard].release(local_slot)
        del self.placements[slot]

    def resume(self, slot: int, position: int, tokens: list[int], limit: int) -> None:
        """Resumes a paused slot in the next call, with the environment's reply.

        Args:
            position: tokens of the sequence whose KV is in the slot's pages.
            tokens: the tokens of the sequence from `position` on. The first is the input of the
                next step; the following steps take the others instead of sampling.
            limit: the number of tokens at which the next turn ends.
        """
        # Forcing the reply's tokens through decode steps needs neither a prefill nor another
        # program.
        placement = self.placements[slot]
        placement.is_paused = False
        placement.limit = limit
        placement.reserved_tokens = position
        placement.resume_point = ResumePoint(tokens[0], position, limit)
        placement.forced_tokens = tokens[1:]

    # -- calls ------------------------------------------------------------------------------------

    def prefill_multisampling(
        self,
        *,
        params: qwen.Params,
        padded_tokens: Int[np.ndarray, "prompts T"],
        true_length: Int[np.ndarray, " prompts"],
        requests: Int[np.ndarray, "prompts G"],
        temperature: Float[np.ndarray, " prompts"],
        seed: jax.Array,
        samples: Samples = ROLLOUTS,
        filters: SequenceOf[Filters | None] = (),
        adapters: SequenceOf[HeldAdapter] = (),
    ) -> Prefix[jax.Array]:
        """Prefills prompts and samples the first token of each of their samples.

        Args:
            padded_tokens: the same number of rows for each shard, in the order of the shards; T is
                a multiple of the page size.
            true_length: tokens of each prompt.
            requests: the number that keys the noise of each sample.
            seed: a PRNG key.
            filters: of the prompts, if `samples` has choices; None: the engine's.
            adapters: of the prompts, if `params` have an adapter bank; `samples` has choices then.
        """
        arrays = self._to_device(padded_tokens, true_length, requests, temperature)
        if samples.has_choices:
            columns = self._to_device(*self.filter_columns(filters))
            choices = PromptChoices(SlotFilters(*columns), self._adapters(params, adapters))
            return self._in_order(self.programs(samples).prefill(params, seed, *arrays, choices))
        assert not has_bank(params), "sequences choose their adapters: Samples.has_choices"
        return self._in_order(self.programs(samples).prefill(params, seed, *arrays))

    def prefill(
        self,
        *,
        params: qwen.Params,
        padded_tokens: Int[np.ndarray, " T"],
        true_length: int,
        request: int = 0,
        temperature: float = 1.0,
        seed: jax.Array,
    ) -> Prefix[jax.Array]:
        """Prefills one prompt for one sample, as JetStream does, in row 0 of shard 0."""
        shards = self.num_shards
        return self.prefill_multisampling(
            params=params,
            padded_tokens=np.array([padded_tokens] * shards, np.int32),
            true_length=np.full(shards, true_length, np.int32),
            requests=np.full((shards, 1), request, np.int32),
            temperature=np.full(shards, temperature, np.float32),
            seed=seed,
        )

    def insert(
        self,
        prefix: Prefix[jax.Array],
        decode_state: DecodeState[jax.Array],
        placement: Placement,
        temperature: float = 1.0,
    ) -> DecodeState[jax.Array]:
        """Places one sample and starts it. Raises OutOfPages."""
        page_copies = self.place(placement)
        return self.bulk_insert(prefix, decode_state, [(placement, page_copies)], temperature)

    def bulk_insert(
        self,
        prefix: Prefix[jax.Array],
        decode_state: DecodeState[jax.Array],
        placements: list[tuple[Placement, list[PageCopy]]],
        temperature: float,
        samples: Samples = ROLLOUTS,
    ) -> DecodeState[jax.Array]:
        """Starts samples of one prefix in their slots.

        Args:
            placements: samples, and the pages that `place` returned for each.
            temperature: of all of these samples.
            samples: as the prefix was sampled.
        """
        rows = prefix.k.shape[1] // self.num_shards
        pages_per_row = prefix.k.shape[2] // self.settings.page_size
        by_shard: list[list[tuple[Placement, list[PageCopy]]]] = [
            [] for _ in range(self.num_shards)
        ]
        for placement, page_copies in placements:
            by_shard[self.shard_of(placement.slot)].append((placement, page_copies))

        # Few sizes, so that few programs are compiled. Padding names a slot that does not exist.
        longest = max(len(items) for items in by_shard)
        count = power_of_two(longest, SMALLEST_INSERT)
        fields = len(Arrival._fields)
        arrivals = np.full((self.num_shards, fields, count), self.slots_per_shard, np.int32)
        # At most every page of the prefix once, and the last page of the prompt once per sample.
        copies = np.zeros((self.num_shards, 2, rows * pages_per_row + count), np.int32)

        for shard, items in enumerate(by_shard):
            end = 0
            for i, (placement, page_copies) in enumerate(items):
                row = placement.prefix_row % rows
                arrivals[shard, :, i] = Arrival(
                    slot=placement.slot % self.slots_per_shard,
                    prefix_row=row,
                    sample_index=placement.sample_index,
                    length=placement.length,
                    limit=placement.limit,
                    request=placement.request,
                )
                # The prefix numbers the pages of all its rows consecutively.
                for prefix_page, pool_page in page_copies:
                    copies[shard, :, end] = row * pages_per_row + prefix_page, pool_page
                    end += 1
        temperatures = np.full(self.num_shards, temperature, np.float32)
        arrays = self._to_device(arrivals, copies, temperatures)
        return self._in_order(self.programs(samples).insert(decode_state, prefix, *arrays))

    def generate(
        self,
        params: qwen.Params,
        decode_state: DecodeState[jax.Array],
        seed: jax.Array,
        samples: Samples = ROLLOUTS,
    ) -> tuple[DecodeState[jax.Array], ResultTokens[jax.Array]]:
        """Decodes up to `call_steps` tokens for every slot that is neither free nor paused.

        Slots that were freed since the last call stop here. Raises OutOfPages before any slot
        decodes; a prior `reserve` of every slot rules this out.
        """
        running = [slot for slot, item in self.placements.items() if not item.is_paused]
        call_ends = [self.reserve(slot) for slot in running]
        for slot, call_end in zip(running, call_ends, strict=True):
            self.placements[slot].reserved_tokens = call_end
        tables = [allocator.table[: self.slots_per_shard] for allocator in self.page_allocators]
        table = np.concatenate(tables)
        # The device learns from `keep` which slots were freed or paused since the last call.
        keep = np.zeros(self.max_concurrent_decodes, np.bool_)
        keep[running] = True
        shared_pages = self._count_shared_pages(table, keep)
        arrays: list[PyTree] = [*self._to_device(table, keep, shared_pages)]
        if (drafter := self.paying_drafter) is not None:
            texts = drafter.remember(decode_state.drafts, self._take_beginnings())
            decode_state = decode_state._replace(drafts=texts)
            arrays.append(drafter.inputs(self._references()))
        inputs = self._last_inputs(params, samples)
        program = self.programs(samples).generate
        return self._in_order(program(params, decode_state, seed, *arrays, *inputs))

    def idle_inputs(
        self, params: qwen.Params, drafts: DraftInputs[jax.Array], samples: Samples
    ) -> list[PyTree]:
        """Returns the inputs of `generate` after the seed, for slots on the scratch page."""
        slots = self.max_concurrent_decodes
        table = np.zeros((slots, self.pages_per_slot), np.int32)
        shared_pages = np.zeros(slots // self.slots_per_block, np.int32)
        arrays = self._to_device(table, np.ones(slots, np.bool_), shared_pages)
        return [*arrays, drafts, *self._last_inputs(params, samples)]

    def _last_inputs(
        self, params: qwen.Params, samples: Samples
    ) -> list[jax.Array] | list[Choices]:
        """Returns the last inputs of the next call, and clears those of slots between turns."""
        if samples.has_choices:
            return [self._choices(params)]
        assert not has_bank(params), "sequences choose their adapters: Samples.has_choices"
        assert self.call_steps == self.settings.decode_steps, f"{self.call_steps=}"
        return self._to_device(*self._take_turn_inputs())

    @cached_property
    def extend_program(self) -> jax.stages.Wrapped:
        """Returns the program that writes the keys and values of a chunk."""
        return compile_extend(self.program_settings, self.mesh)

    def can_prefill_in_chunks(self, samples: Samples = ROLLOUTS) -> bool:
        """Whether a returning sequence may be prefilled in chunks."""
        # Chunks only write pages. The state of a gated delta net, tracks of inputs and exact
        # numerics need one prefill of all tokens.
        is_exact = self.program_settings.arithmetic.is_exact
        return not (self.has_slot_state or self.input_tracks(samples) or is_exact)

    def caches_prefixes(self, samples: Samples) -> bool:
        """Whether sequences may start from cached keys and values (rollout.prefix_cache)."""
        # Chunks round otherwise than one prefill, and what is cached depends on other sequences. A
        # rollout for training is a function of the weights, the request and the seed.
        choice = self.settings.prefix_cache
        wants_cache = choice == "on" or (choice == "auto" and not samples.is_trained)
        # A ring belongs to one slot, so nothing can start from its pages.
        return wants_cache and not self.has_rings and self.can_prefill_in_chunks(samples)

    @property
    def chunk_width(self) -> int:
        """Returns the tokens of a chunk, a multiple of the page size."""
        page_size = self.settings.page_size
        return max(1, self.chunk_tokens // page_size) * page_size

    def extend_width(self, num_tokens: int) -> int:
        """Returns the padded width of the next chunk of a sequence with `num_tokens` left."""
        if not num_tokens:
            return 0
        page_size = self.settings.page_size
        num_pages = power_of_two(divide_up(num_tokens, page_size))
        return min(num_pages * page_size, self.chunk_width)

    def longest_prefill(self, samples: Samples = ROLLOUTS) -> int:
        """Returns the tokens of the longest prefill that this engine runs."""
        if not self.can_prefill_in_chunks(samples):
            return self.max_sequence_tokens
        longest = max(self.chunk_width, self.settings.max_prompt_tokens)
        return min(longest, self.max_sequence_tokens)

    def extend(
        self,
        params: qwen.Params,
        decode_state: DecodeState[jax.Array],
        inputs: ScoreInputs[np.ndarray],
    ) -> DecodeState[jax.Array]:
        """Writes the keys and values of one chunk per row into the pages of its sequence."""
        arrays = jax.tree.map(self._split_over_shards, inputs)
        return self._in_order(self.extend_program(params, decode_state, arrays))

    def start(
        self,
        decode_state: DecodeState[jax.Array],
        starts: list[tuple[Start[int], float]],
        samples: Samples = ROLLOUTS,
    ) -> DecodeState[jax.Array]:
        """Starts sequences whose keys and values are already in their pages.

        starts: the state in which each sequence starts, with its slot among the slots of all
            shards, and its temperature.
        """
        by_shard: list[list[tuple[Start[int], float]]] = [[] for _ in range(self.num_shards)]
        # The programs see one shard, so slots are numbered within their shard.
        for start, temperature in starts:
            shard, slot = divmod(start.slot, self.slots_per_shard)
            by_shard[shard].append((start._replace(slot=slot), temperature))
        count = power_of_two(max(map(len, by_shard)), SMALLEST_INSERT)
        columns = np.full(
            (self.num_shards, len(Start._fields), count), self.slots_per_shard, np.int32
        )
        temperatures = np.zeros((self.num_shards, count), np.float32)
        for shard, items in enumerate(by_shard):
            for i, (start, temperature) in enumerate(items):
                columns[shard, :, i] = start
                temperatures[shard, i] = temperature
        program = self.programs(samples).start
        return program(decode_state, *self._to_device(columns, temperatures))

    def score(
        self,
        params: qwen.Params,
        decode_state: DecodeState[jax.Array],
        row_states: DeltaState | None,
        inputs: ScoreInputs[np.ndarray],
        alternatives: int,
    ) -> tuple[DecodeState[jax.Array], DeltaState | None, TokenScores[jax.Array]]:
        """Scores one chunk of each of some sequences. Decoding slots are not affected.

        The pages that the call writes must not be in use elsewhere. `row_states` are the states
        that the previous call returned, or `empty_row_states`; they are donated. `alternatives` is
        one of score_program.ALTERNATIVES. Most code calls this through `scoring.Scorer`.
        """
        arrays = jax.tree.map(self._split_over_shards, inputs)
        program = self.score_program(alternatives)
        return self._in_order(program(params, decode_state, row_states, arrays))

    def empty_row_states(self) -> DeltaState | None:
        """Returns the recurrent states of empty rows for scoring, or None without such states."""
        return self._empty_row_states() if self.has_slot_state else None

    def unused_rings(self, num_rows: int) -> Int[np.ndarray, " rows"] | None:
        """Returns `ScoreInputs.row_rings` of padding rows; None without rings."""
        sizes = self.program_settings.rings
        return None if sizes is None else np.full(num_rows, sizes.count, np.int32)

    def score_width(self, num_tokens: int) -> int:
        """Returns the padded width of a sequence's next chunk, with `num_tokens` tokens left."""
        page_size = self.settings.page_size
        num_pages = power_of_two(divide_up(num_tokens, page_size))
        most_pages = max(1, self.score_tokens // page_size)
        return min(num_pages, most_pages, self.pages_per_slot) * page_size

    def context_pages(self, num_tokens: int) -> int:
        """Returns how many pages a call of `score` reads for contexts of up to `num_tokens`."""
        if not num_tokens:
            return 0
        num_pages = power_of_two(num_tokens // self.settings.page_size)
        return min(num_pages, self.pages_per_slot)

    def _count_shared_pages(
        self, table: Int[np.ndarray, "slots pages_per_slot"], keep: Bool[np.ndarray, " slots"]
    ) -> Int[np.ndarray, " blocks"]:
        """Counts the leading full pages that all decoding slots of a block share.

        Slots that do not decode are ignored. `attention.backend.Paged` reads the pages of the
        block's first slot for all slots, so the first slot must decode. `attention.backend.Decode`
        reads the pages of the first slot that decodes.
        """
        tables = table.reshape(-1, self.slots_per_block, self.pages_per_slot)
        keeps = keep.reshape(-1, self.slots_per_block)
        # The slot of each block whose pages the attention kernel reads for the block's other slots.
        owners = np.zeros(len(keeps), int)
        if self.program_settings.attention.decode is not None:
            owners = keeps.argmax(axis=1)
        blocks = np.arange(len(keeps))
        is_same_page = (tables == tables[blocks, owners][:, None]) | ~keeps[..., None]
        is_common = is_same_page.all(axis=1) & keeps[blocks, owners][:, None]
        common_pages = np.cumprod(is_common, axis=1).sum(axis=1)

        # A page after the prompt may be partly filled, so only pages of the prompt count.
        lengths = np.full(self.max_concurrent_decodes, self.max_sequence_tokens)
        for slot, placement in self.placements.items():
            lengths[slot] = placement.length
        shortest = lengths.reshape(-1, self.slots_per_block).min(axis=1)
        return np.minimum(common_pages, shortest // self.settings.page_size).astype(np.int32)

    def _choices(self, params: qwen.Params) -> Choices:
        """Returns what the sequences in the slots choose, and the steps of the next call."""
        by_slot: list[Filters | None] = [None] * self.max_concurrent_decodes
        held = [BASE_MODEL] * self.max_concurrent_decodes
        for slot, placement in self.placements.items():
            by_slot[slot] = placement.filters
            held[slot] = placement.adapter
        num_steps = np.full(self.num_shards, self.call_steps, np.int32)
        *columns, num_steps = self._to_device(*self.filter_columns(by_slot), num_steps)
        return Choices(SlotFilters(*columns), num_steps, self._adapters(params, held))

    def _adapters(self, params: qwen.Params, held: SequenceOf[HeldAdapter]) -> RowAdapters | None:
        """Returns the adapters of sequences; None if the weights have no adapter bank."""
        if not has_bank(params):
            return None
        return jax.tree.map(self._split_over_shards, row_adapters(held))

    def _take_turn_inputs(self) -> list[np.ndarray]:
        """Returns the inputs of the next call for slots between turns, and clears them.

        Empty if episodes have one turn. Otherwise the fields of `ResumePoint` i32[slots, 3], and
        the forced tokens of the next steps i32[slots, decode_steps], -1 for steps that sample.
        """
        # Without these inputs, single-turn runs compile a program that never forces tokens.
        if self.settings.max_turns == 1:
            return []
        steps = self.settings.decode_steps
        fields = len(ResumePoint._fields)
        resume_points = np.zeros((self.max_concurrent_decodes, fields), np.int32)
        forced_tokens = np.full((self.max_concurrent_decodes, steps), -1, np.int32)
        for slot, placement in self.placements.items():
            if placement.resume_point is not None:
                resume_points[slot] = placement.resume_point
                placement.resume_point = None
            # A reply may be longer than one call: later calls take the remaining tokens.
            tokens = placement.forced_tokens[:steps]
            forced_tokens[slot, : len(tokens)] = tokens
            placement.forced_tokens = placement.forced_tokens[steps:]
        return [resume_points, forced_tokens]

    def _take_beginnings(self) -> list[Beginning]:
        """Returns the sequences that began in slots since the last call."""
        beginnings = []
        for slot, placement in self.placements.items():
            if placement.beginning is not None:
                shard, local_slot = divmod(slot, self.slots_per_shard)
                beginnings.append(Beginning(shard, local_slot, placement.beginning))
                placement.beginning = None
        return beginnings

    def _references(self) -> dict[int, np.ndarray]:
        """Returns the texts besides their own in which slots find drafts."""
        references = {slot: placement.references for slot, placement in self.placements.items()}
        return {slot: tokens for slot, tokens in references.items() if tokens is not None}

    def _in_order(self, results: ResultT) -> ResultT:
        """Returns the results of a program after the next program may be dispatched."""
        # XLA:CPU runs independent programs, such as a prefill and a call in flight, at the same
        # time. Two hosts would begin their collectives in different orders, and wait forever.
        if self.mesh.is_multi_process and platform_of(self.mesh) == "cpu":
            jax.block_until_ready(results)
        return results

    def _to_device(self, *arrays: np.ndarray) -> list[jax.Array]:
        """Splits the first axis of each array over the shards."""
        return [self._split_over_shards(array) for array in arrays]

    def _split_over_shards(self, array: np.ndarray) -> jax.Array:
        return collectives.put(array, NamedSharding(self.mesh, P("slots")))


def zeros_program(abstract: PyTree) -> jax.stages.Wrapped:
    """Returns a program that makes zeros with the shapes and shardings of `abstract`."""

    def zeros() -> PyTree:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)

    return jax.jit(zeros, out_shardings=jax.tree.map(lambda x: x.sharding, abstract))
