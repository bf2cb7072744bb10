"""The decoder: JetStream's Engine methods over a paged KV cache.

In: padded prompts, and where each of their samples shall decode. Out: sampled tokens with their
log-probabilities. `Engine` is the host's side: it knows which sample decodes in which slot, which
pages every slot holds, and calls the jitted programs of `programs.py`. It decides nothing: the
scheduler (`scheduler.py`) says what is prefilled when, and who gives up pages when they run out.

One request from beginning to end:

    prefix = engine.prefill(params=params, padded_tokens=..., true_length=..., seed=seed)
    placement = Placement(slot=0, prefix_row=0, sample_index=0, length=..., limit=..., ...)
    state = engine.insert(prefix, engine.init_decode_state(), placement, temperature=1.0)
    state, result = engine.generate(params, state, seed)  # until the slot has ended
    engine.free_resource(slot=0)

The device state is no attribute of the engine: it is passed in, donated, and handed back.

The mesh has the axes (slots, tensor). The devices of one index of `slots` are a shard: a decoder
of its own with its own slots and pages.
"""

import contextlib
import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, PyTree

from jzero import attention
from jzero.config import RolloutConfig
from jzero.errors import UserError
from jzero.model import qwen
from jzero.model.delta_net import DeltaState
from jzero.model.experts import num_routes
from jzero.rollout import slot_state
from jzero.rollout.decode_state import (
    Arrival,
    DecodeState,
    Prefix,
    ResultTokens,
    ResumePoint,
    Start,
)
from jzero.rollout.pages import PageAllocator
from jzero.rollout.program_settings import (
    ProgramSettings,
    make_program_settings,
    num_kept,
    with_top_p,
)
from jzero.rollout.programs import Programs, compile_programs
from jzero.rollout.score_program import (
    ScoreInputs,
    TokenScores,
    compile_extend,
    compile_score,
)

# Sequences that a shard scores at a time, or whose pages it keeps after they were scored.
SCORING_ROWS = 16
SCORE_TOKENS = 2048  # tokens of one call of `score` on each shard; longer inputs take several
# A sequence that comes back with more tokens than this is prefilled in chunks of so many.
CHUNK_TOKENS = 8192
SMALLEST_INSERT = 8  # samples; an insert of fewer is padded, so that few shapes are compiled


class PageCopy(NamedTuple):
    """A page that `insert` copies."""

    prefix_page: int  # its place among the pages of the prompt
    pool_page: int


@dataclass
class Placement:
    """One sample of a prefix that decodes in a slot, and how far it is there."""

    slot: int  # among the slots of all shards
    prefix_row: int  # the row of its prompt in the Prefix
    sample_index: int  # among the samples of this prompt
    length: int  # tokens whose KV the prefix holds
    limit: int  # number of tokens at which the sample ends
    request: int  # keys the noise of the sample
    group: Hashable  # samples of the same group share the full pages
    shared_tokens: int  # of their first `shared_tokens` tokens
    reserved_tokens: int = 0  # tokens whose KV the calls up to now may have written
    is_paused: bool = False  # the slot keeps its pages and does not decode: between two turns
    resume_point: ResumePoint[int] | None = None  # for the next call, after a pause
    forced_tokens: list[int] = field(default_factory=list)  # taken by its next steps, not sampled


class Engine:
    """Owns the pages and the host's view of the slots.

    Attributes:
        num_shards: decoders, which work side by side.
        placements: slot -> what decodes there.
        page_allocators: one for each shard.
        program_settings: replace it before the first call to change what the programs do.
    """

    # These two belong to JetStream's interface.
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
        longest_evaluation: int = 0,
        remembers_kept: bool = False,
        exact: bool = False,
        remembers_routes: bool = False,
    ) -> None:
        """Makes an engine without device state; no program is compiled yet.

        Args:
            settings: the slots and pages of this host.
            mesh: axes (slots, tensor), the devices of this host.
            stop_ids: tokens that end a response.
            dtype: of weights and activations.
            attention_name: `config.model.kernels`.
            longest_evaluation: tokens of the longest sequence of an evaluation. Where it is longer
                than the rollouts, fewer of its sequences may find pages at the same time.
            remembers_kept: returns the tokens that the filters kept, for every sampled token.
            exact: `config.model.exact`.
            remembers_routes: returns the experts that every token went to.

        Raises:
            UserError: the pages of a shard do not hold one sequence of full length.
        """
        self.model = model
        self.settings = settings
        self.mesh = mesh
        self.dtype = jnp.dtype(dtype)

        self.num_shards = mesh.shape["slots"]
        self.slots_per_shard = divide_up(settings.num_slots, self.num_shards)
        self.max_concurrent_decodes = self.num_shards * self.slots_per_shard
        # Attention reads the pages that a block of neighboring slots shares only once. The samples
        # of a group tend to sit side by side.
        self.slots_per_block = math.gcd(self.slots_per_shard, settings.group_size)

        self.max_sequence_tokens = max(settings.longest_episode, longest_evaluation)
        self.pages_per_slot = divide_up(self.max_sequence_tokens, settings.page_size)
        self.max_prefill_length = self.pages_per_slot * settings.page_size
        # Longer evaluations take no more memory than the rollouts, as far as one sequence fits.
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
        self.pages_per_shard = usable_pages + 1  # and the scratch page

        self.program_settings = make_program_settings(
            model=model,
            settings=settings,
            mesh=mesh,
            stop_ids=stop_ids,
            dtype=self.dtype,
            attention_name=attention_name,
            slots_per_shard=self.slots_per_shard,
            pages_per_shard=self.pages_per_shard,
            exact=exact,
        )
        self.program_settings = replace(
            self.program_settings,
            remembers_kept=remembers_kept,
            remembers_routes=remembers_routes,
        )
        # Behind the rows of the slots every shard has rows for the sequences that are scored.
        self.page_allocators = [
            PageAllocator(
                self.pages_per_shard,
                settings.page_size,
                self.slots_per_shard + SCORING_ROWS,
                self.pages_per_slot,
            )
            for _ in range(self.num_shards)
        ]
        self.score_tokens = SCORE_TOKENS
        self.chunk_tokens = CHUNK_TOKENS
        self.placements: dict[int, Placement] = {}
        self._top_p = settings.top_p
        self._is_trained = True  # whether what is sampled now will be trained on
        # By top_p, and whether the tokens that the filters kept, and the experts of every token,
        # are returned: all of this is compiled in.
        self._programs: dict[tuple[float, bool, bool], Programs] = {}
        self._score_programs: dict[int, jax.stages.Wrapped] = {}  # by their alternatives

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Returns the tokens that end a response."""
        return self.program_settings.stop_ids

    @property
    def jitted(self) -> Programs:
        """Returns the programs, which are compiled at their first call with each shape."""
        settings = self._settings_of_samples
        key = self._top_p, settings.remembers_kept, settings.remembers_routes
        if key not in self._programs:
            if self._top_p != self.settings.top_p:
                settings = with_top_p(settings, self._top_p, self.settings, self.mesh)
            self._programs[key] = compile_programs(settings, self.mesh)
        return self._programs[key]

    @property
    def num_kept(self) -> int:
        """Returns how many tokens are remembered as kept, for every sampled token; 0: none."""
        return num_kept(self._settings_of_samples)

    @property
    def num_routes(self) -> int:
        """Returns how many numbers of experts are remembered for every token; 0: none."""
        return num_routes(self.model) if self._settings_of_samples.remembers_routes else 0

    @property
    def _settings_of_samples(self) -> ProgramSettings:
        """Returns the program settings; what is not trained on is not remembered."""
        if self._is_trained:
            return self.program_settings
        return replace(self.program_settings, remembers_kept=False, remembers_routes=False)

    def score_program(self, alternatives: int) -> jax.stages.Wrapped:
        """Returns the program `score` that returns so many alternatives of every token."""
        if alternatives not in self._score_programs:
            program = compile_score(self.program_settings, self.mesh, alternatives)
            self._score_programs[alternatives] = program
        return self._score_programs[alternatives]

    @contextlib.contextmanager
    def sampling_with(
        self, top_p: float = 0.0, max_new_tokens: int = 0, is_trained: bool = True
    ) -> Iterator[None]:
        """Samples with other settings than the rollout's. 0 leaves a setting as it is.

        Another `top_p` has programs of its own. `max_new_tokens` may be as large as the sequences
        that the engine was made for. What is not trained on remembers neither the tokens that were
        kept nor the experts of tokens.
        """
        settings = self.settings
        self._top_p = top_p or settings.top_p
        self._is_trained = is_trained
        if max_new_tokens:
            self.settings = replace(settings, max_new_tokens=max_new_tokens)
        longest = self.settings.longest_episode
        assert longest <= self.max_sequence_tokens, f"{longest=} {self.max_sequence_tokens=}"
        try:
            yield
        finally:
            self.settings = settings
            self._top_p = settings.top_p
            self._is_trained = True

    # -- device state -----------------------------------------------------------------------------

    def get_prefix_destination_sharding(self) -> Prefix[NamedSharding]:
        """Returns where `insert` wants a prefix."""
        kv_axis = self.program_settings.kv_axis
        kv = NamedSharding(self.mesh, P(None, "slots", None, kv_axis))
        rest = NamedSharding(self.mesh, P("slots"))
        return Prefix(
            k=kv,
            v=kv,
            tokens=rest,
            logps=rest,
            kept=rest if self.num_kept else None,
            routes=rest if self.num_routes else None,
            slot_state=jax.tree.map(lambda x: x.sharding, self.abstract_slot_state(1)),
        )

    def load_params(self, params: qwen.Params, shardings: qwen.Params) -> qwen.Params:
        """Returns weights in the decoder's dtype and layout.

        The weights of a trainer come by `distributed.publish` instead.
        """
        return jax.device_put(qwen.cast(params, self.dtype), shardings)

    def abstract_state(self) -> DecodeState[jax.ShapeDtypeStruct]:
        """Returns shapes and shardings of the decode state."""
        static, model = self.program_settings, self.model
        split = static.tensor if static.kv_axis else 1
        # A kernel may want several heads in one row, or a head padded to a wider row.
        rows, width = static.attention.pool_rows(model.num_key_value_heads // split, model.head_dim)
        num_pages = self.num_shards * len(model.attention_layers) * self.pages_per_shard
        shape = split * rows, num_pages, self.settings.page_size, width
        spec = P(static.kv_axis, "slots")
        pool = self.abstract_array(shape, static.kv_storage, spec)
        if static.kv_storage == jnp.int8:
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
        )

    @property
    def has_slot_state(self) -> bool:
        """Whether a slot keeps more of its sequence than pages: see `slot_state.py`."""
        return self.model.delta_net is not None

    def abstract_slot_state(self, rows_per_shard: int) -> DeltaState | None:
        """Returns shapes and shardings of the states of so many sequences a shard, or None."""
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
        """Returns shapes and shardings of the states of the rows that `score` computes, or None."""
        return self.abstract_slot_state(SCORING_ROWS)

    def abstract_array(
        self, shape: tuple[int, ...], dtype: DTypeLike, spec: P
    ) -> jax.ShapeDtypeStruct:
        """Returns a shape that is split over the engine's mesh as `spec` says."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec))

    def init_decode_state(self) -> DecodeState[jax.Array]:
        """Returns a new state of empty slots."""
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
        """Returns the slots of a shard in which nothing decodes."""
        first = shard * self.slots_per_shard
        slots = range(first, first + self.slots_per_shard)
        return [slot for slot in slots if slot not in self.placements]

    def place(self, placement: Placement) -> list[PageCopy]:
        """Takes the pages that a sample needs for its prompt and its first call.

        The full pages of the tokens that it shares with its group are taken over from a sample of
        the group that is on the same shard. Nobody writes them again: a sample writes only behind
        its prompt. The last page of the prompt is copied for each sample, because the sample
        writes its first tokens there.

        Returns:
            The pages that `bulk_insert` has to write.

        Raises:
            OutOfPages: nothing was taken.
        """
        assert placement.slot not in self.placements, f"{placement.slot=} is taken"
        shard, slot = divmod(placement.slot, self.slots_per_shard)
        shared_pages = self._shared_pages(placement)
        first_call_end = placement.length + self.settings.decode_steps
        new_pages = self.page_allocators[shard].reserve(
            slot, min(first_call_end, placement.limit), shared_pages
        )
        self.placements[placement.slot] = placement
        placement.reserved_tokens = placement.length
        pages_of_prompt = divide_up(placement.length, self.settings.page_size)
        to_write = new_pages[: pages_of_prompt - len(shared_pages)]
        return [PageCopy(i, page) for i, page in enumerate(to_write, start=len(shared_pages))]

    def _shared_pages(self, placement: Placement) -> list[int]:
        """Returns the full pages of its group's tokens that the shard of `placement` has."""
        shard = self.shard_of(placement.slot)
        full_pages = placement.shared_tokens // self.settings.page_size
        for other in self.placements.values():
            if other.group == placement.group and self.shard_of(other.slot) == shard:
                slot = other.slot % self.slots_per_shard
                return self.page_allocators[shard].pages_of_slot[slot][:full_pages]
        return []

    def pages_of(self, shard: int, row: int) -> list[int]:
        """Returns the pages of a slot of a shard, or of a row behind the slots, in order."""
        return self.page_allocators[shard].pages_of_slot[row]

    def reserve(self, slot: int) -> int:
        """Takes the pages that the slot's next call may write.

        Returns the number of tokens that the slot may have after this call. To reserve twice before
        a call is to reserve once. Raises OutOfPages, and then nothing was taken.
        """
        shard, local_slot = divmod(slot, self.slots_per_shard)
        placement = self.placements[slot]
        call_end = placement.reserved_tokens + self.settings.decode_steps
        call_end = min(call_end, placement.limit)
        self.page_allocators[shard].reserve(local_slot, call_end)
        return call_end

    def free_resource(self, slot: int) -> None:
        """Takes the slot's pages back. The next call no longer decodes it."""
        shard, local_slot = divmod(slot, self.slots_per_shard)
        self.page_allocators[shard].release(local_slot)
        del self.placements[slot]

    def resume(self, slot: int, position: int, tokens: list[int], limit: int) -> None:
        """Lets a paused slot go on in the next call, with the environment's reply.

        Args:
            position: tokens of the sequence whose KV is in the slot's pages.
            tokens: the tokens of the sequence from `position` on. The first is the input of the
                next step; the steps after it take the others instead of sampling. So a reply needs
                no prefill, and no program of its own.
            limit: the number of tokens at which the next turn ends.
        """
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
    ) -> Prefix[jax.Array]:
        """Prefills prompts and samples the first token of each of their samples.

        Args:
            padded_tokens: as many rows for each shard, one shard after the other; T is a multiple
                of the page size.
            true_length: tokens of each prompt.
            requests: the number that keys the noise of each sample.
            seed: a PRNG key.
        """
        arrays = self._to_device(padded_tokens, true_length, requests, temperature)
        return self.jitted.prefill(params, seed, *arrays)

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
        """Prefills one prompt for one sample, as JetStream does. It is row 0 of shard 0."""
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
    ) -> DecodeState[jax.Array]:
        """Starts samples of one prefix in their slots.

        Args:
            placements: samples, and what `place` returned for each.
            temperature: of all of these samples.
        """
        rows = prefix.k.shape[1] // self.num_shards
        pages_per_row = prefix.k.shape[2] // self.settings.page_size
        by_shard: list[list[tuple[Placement, list[PageCopy]]]] = [
            [] for _ in range(self.num_shards)
        ]
        for placement, page_copies in placements:
            by_shard[self.shard_of(placement.slot)].append((placement, page_copies))

        # Few sizes, so that few programs are compiled. A slot that does not exist is padding.
        longest = max(len(items) for items in by_shard)
        count = next_power_of_two(longest, SMALLEST_INSERT)
        fields = len(Arrival._fields)
        arrivals = np.full((self.num_shards, fields, count), self.slots_per_shard, np.int32)
        # At most every page of the prefix once, and the last page of the prompt once a sample.
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
                for prefix_page, pool_page in page_copies:
                    copies[shard, :, end] = row * pages_per_row + prefix_page, pool_page
                    end += 1
        temperatures = np.full(self.num_shards, temperature, np.float32)
        arrays = self._to_device(arrivals, copies, temperatures)
        return self.jitted.insert(decode_state, prefix, *arrays)

    def generate(
        self, params: qwen.Params, decode_state: DecodeState[jax.Array], seed: jax.Array
    ) -> tuple[DecodeState[jax.Array], ResultTokens[jax.Array]]:
        """Decodes up to `decode_steps` tokens for every slot that is neither free nor paused.

        Slots that were freed since the last call stop here. Raises OutOfPages, and then no slot
        decodes; this cannot happen after `reserve` was called for every slot.
        """
        running = [slot for slot, item in self.placements.items() if not item.is_paused]
        call_ends = [self.reserve(slot) for slot in running]
        for slot, call_end in zip(running, call_ends, strict=True):
            self.placements[slot].reserved_tokens = call_end
        tables = [allocator.table[: self.slots_per_shard] for allocator in self.page_allocators]
        table = np.concatenate(tables)
        keep = np.zeros(self.max_concurrent_decodes, np.bool_)
        keep[running] = True
        shared_pages = self._count_shared_pages(table, keep)
        arrays = self._to_device(table, keep, shared_pages, *self._take_turn_inputs())
        return self.jitted.generate(params, decode_state, seed, *arrays)

    @cached_property
    def extend_program(self) -> jax.stages.Wrapped:
        """Returns the program that writes the keys and values of a chunk."""
        return compile_extend(self.program_settings, self.mesh)

    @property
    def can_prefill_in_chunks(self) -> bool:
        """Whether a sequence may come back without a prefill of all its tokens at once.

        Not where more than pages is wanted of it: the state of a gated delta net, the experts of
        tokens, or the same bits as in the trainer.
        """
        is_exact = self.program_settings.exact is not None
        return not (self.has_slot_state or self.num_routes or is_exact)

    @property
    def chunk_width(self) -> int:
        """Returns the tokens of a chunk, which are whole pages."""
        page_size = self.settings.page_size
        return max(1, self.chunk_tokens // page_size) * page_size

    @property
    def longest_prefill(self) -> int:
        """Returns the tokens of the longest prefill."""
        if not self.can_prefill_in_chunks:
            return self.max_sequence_tokens
        longest = max(self.chunk_width, self.settings.max_prompt_tokens)
        return min(longest, self.max_sequence_tokens)

    def extend(
        self,
        params: qwen.Params,
        decode_state: DecodeState[jax.Array],
        inputs: ScoreInputs[np.ndarray],
    ) -> DecodeState[jax.Array]:
        """Writes the keys and values of one chunk of each of some sequences into their pages."""
        arrays = jax.tree.map(self._split_over_shards, inputs)
        return self.extend_program(params, decode_state, arrays)

    def start(
        self,
        decode_state: DecodeState[jax.Array],
        starts: list[tuple[Start[int], float]],
    ) -> DecodeState[jax.Array]:
        """Starts sequences whose keys and values their pages have.

        starts: where each goes on, with its slot among those of all shards, and its temperature.
        """
        by_shard: list[list[tuple[Start[int], float]]] = [[] for _ in range(self.num_shards)]
        for begun, temperature in starts:
            shard, slot = divmod(begun.slot, self.slots_per_shard)
            by_shard[shard].append((begun._replace(slot=slot), temperature))
        count = next_power_of_two(max(map(len, by_shard)), SMALLEST_INSERT)
        columns = np.full(
            (self.num_shards, len(Start._fields), count), self.slots_per_shard, np.int32
        )
        temperatures = np.zeros((self.num_shards, count), np.float32)
        for shard, items in enumerate(by_shard):
            for i, (begun, temperature) in enumerate(items):
                columns[shard, :, i] = begun
                temperatures[shard, i] = temperature
        return self.jitted.start(decode_state, *self._to_device(columns, temperatures))

    def score(
        self,
        params: qwen.Params,
        decode_state: DecodeState[jax.Array],
        row_states: DeltaState | None,
        inputs: ScoreInputs[np.ndarray],
        alternatives: int,
    ) -> tuple[DecodeState[jax.Array], DeltaState | None, TokenScores[jax.Array]]:
        """Scores one chunk of given sequences. Slots go on as if the call had not been.

        The pages that it writes must be nobody else's. `row_states` are those that the call before
        has returned, or `empty_row_states`; they are donated. `alternatives` is one of
        score_program.ALTERNATIVES. Most code calls it through `scoring.Scorer`.
        """
        arrays = jax.tree.map(self._split_over_shards, inputs)
        return self.score_program(alternatives)(params, decode_state, row_states, arrays)

    def empty_row_states(self) -> DeltaState | None:
        """Returns what the rows for scoring keep beside pages, of no tokens; None: nothing."""
        return self._empty_row_states() if self.has_slot_state else None

    def score_width(self, num_tokens: int) -> int:
        """Returns the padded width of the next chunk of a sequence with `num_tokens` to come."""
        page_size = self.settings.page_size
        num_pages = next_power_of_two(divide_up(num_tokens, page_size), 1)
        most_pages = max(1, self.score_tokens // page_size)
        return min(num_pages, most_pages, self.pages_per_slot) * page_size

    def context_pages(self, num_tokens: int) -> int:
        """Returns how many pages a call of `score` reads for contexts of up to `num_tokens`."""
        if not num_tokens:
            return 0
        num_pages = next_power_of_two(num_tokens // self.settings.page_size, 1)
        return min(num_pages, self.pages_per_slot)

    def _count_shared_pages(
        self, table: Int[np.ndarray, "slots pages_per_slot"], keep: Bool[np.ndarray, " slots"]
    ) -> Int[np.ndarray, " blocks"]:
        """Counts the leading full pages that the decoding slots of a block have in common.

        Slots that do not decode do not matter. `attention.backend.Paged` reads the pages of a
        block's first slot for all, so this slot must decode. `attention.backend.Decode` reads those
        of the first slot that decodes.
        """
        tables = table.reshape(-1, self.slots_per_block, self.pages_per_slot)
        keeps = keep.reshape(-1, self.slots_per_block)
        owners = np.zeros(len(keeps), int)
        if self.program_settings.attention.decode is not None:
            owners = keeps.argmax(axis=1)
        blocks = np.arange(len(keeps))
        is_same_page = (tables == tables[blocks, owners][:, None]) | ~keeps[..., None]
        is_common = is_same_page.all(axis=1) & keeps[blocks, owners][:, None]
        common_pages = np.cumprod(is_common, axis=1).sum(axis=1)

        # A page behind the prompt may be full or not, so only pages of the prompt count.
        lengths = np.full(self.max_concurrent_decodes, self.max_sequence_tokens)
        for slot, placement in self.placements.items():
            lengths[slot] = placement.length
        shortest = lengths.reshape(-1, self.slots_per_block).min(axis=1)
        return np.minimum(common_pages, shortest // self.settings.page_size).astype(np.int32)

    def _take_turn_inputs(self) -> list[np.ndarray]:
        """Returns what the next call does to slots between turns, and forgets it.

        Nothing if episodes have one turn; otherwise the fields of `ResumePoint` i32[slots, 3], and
        the forced tokens of the next steps i32[slots, decode_steps], -1 where a step samples.
        """
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
            tokens = placement.forced_tokens[:steps]
            forced_tokens[slot, : len(tokens)] = tokens
            placement.forced_tokens = placement.forced_tokens[steps:]
        return [resume_points, forced_tokens]

    def _to_device(self, *arrays: np.ndarray) -> list[jax.Array]:
        """Splits the first axis of each array over the shards."""
        return [self._split_over_shards(array) for array in arrays]

    def _split_over_shards(self, array: np.ndarray) -> jax.Array:
        return jax.device_put(array, NamedSharding(self.mesh, P("slots")))


def zeros_program(abstract: PyTree) -> jax.stages.Wrapped:
    """Returns a program that makes zeros of abstract arrays, where their shardings say."""

    def zeros() -> PyTree:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)

    return jax.jit(zeros, out_shardings=jax.tree.map(lambda x: x.sharding, abstract))


def divide_up(numerator: int, denominator: int) -> int:
    """Divides and rounds up."""
    return -(-numerator // denominator)


def next_power_of_two(count: int, smallest: int) -> int:
    """Returns the next power of two that is at least `count` and `smallest`.

    Sizes of arrays are rounded up to it, so that few shapes come up and few programs are compiled.
    """
    return max(smallest, 1 << (count - 1).bit_length())
