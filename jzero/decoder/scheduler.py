"""Keeps the engine's slots busy until all sequences are finished, or the caller has enough.

    queue --prefill--> pending --place--> a slot --decode calls--> finished
      ^                                    |  ^
      +----------- preempted --------------+  +-- the environment's reply begins the next turn

This is continuous batching. Groups of sequences that share a prompt wait in the queue. One prefill
computes the prompt's KV and the first token of every sequence of the group. Each prefilled sequence
is then placed into a slot of its shard, and decode calls extend it by up to `rollout.decode_steps`
tokens each. Three properties need care:

- **Calls run one ahead of the host.** The next call is dispatched before the last one is read, so
  the device never waits for Python. The host may therefore notice one call late that a sequence
  has finished; the tokens that this call emitted for the sequence are wasted.
- **Pages may run out (preemption).** When a shard has no page left for its next call, an episode
  that waits for a reply gives up its slot. Without such an episode the youngest sequence returns to
  the queue and continues from a prefill later. The noise is keyed by request and position, so the
  tokens are the same.
- **Prefixes may be cached** (`prefix_cache.py`). Full pages of sequences are cached once they are
  written, and a sequence of the queue whose beginning is cached computes only the rest. Groups that
  begin like one that is about to be prefilled wait for its pages.
"""

import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

import jax
import numpy as np

from jzero.decoder import chunked_prefill, draft_cost, stop_strings
from jzero.decoder.decode_state import Prefix, ResultTokens
from jzero.decoder.engine import ROLLOUTS, Engine, PageCopy, Placement, Samples
from jzero.decoder.pages import OutOfPages
from jzero.decoder.prefill import take_prefill_batch
from jzero.decoder.prefix_cache import page_keys, prefix_hashes
from jzero.decoder.references import PastResponses, References
from jzero.decoder.scoring import Scorer
from jzero.decoder.sequence import (
    AdmitMore,
    DecodeCounters,
    Groups,
    PollReplies,
    Sequence,
    admit_none,
    never_drain,
)
from jzero.hosts import collectives
from jzero.model import qwen
from jzero.tokens import TrackValues
from jzero.types import Turn

# An episode keeps its slot for this many decode calls while its turn is graded, if replies take no
# longer on average. A reply within this time saves a prefill of the whole episode so far.
PATIENCE = 2
WAIT_AVERAGE_WEIGHT = 0.1  # weight of the latest reply in the moving average


@dataclass(frozen=True, eq=False)
class PrefilledSample:
    """A prefilled sequence: its KV and its first sampled token are at (row, column) of a prefix."""

    sequence: Sequence
    prefix: Prefix
    row: int
    column: int
    version: int  # policy version of the weights


def without_kv(prefix: Prefix[jax.Array]) -> Prefix[jax.Array]:
    """Returns a prefix without what only `insert` reads, which is most of its memory."""
    return prefix._replace(k=None, v=None, slot_state=None, hidden=None)


def take(
    tracks: dict[str, np.ndarray], place: slice | tuple[int | slice, ...]
) -> dict[str, np.ndarray]:
    """Returns the values at `place` of every track."""
    return {name: values[place] for name, values in tracks.items()}


@dataclass(frozen=True, eq=False)
class CallInFlight:
    """A decode call that was dispatched and not yet read."""

    result: ResultTokens  # on the device
    # Slot -> its sequence, and how many of its turns had ended.
    turns: dict[int, tuple[Sequence, int]]
    # Slot -> how many of the call's first tokens are the environment's
    num_reply_tokens: dict[int, int]
    newly_placed: dict[int, PrefilledSample]  # slots whose first token is in a prefix


class Scheduler:
    """Runs sequences through one engine.

    Create one scheduler for each batch, and call `cancel` if its run is not iterated to the end.
    """

    def __init__(
        self,
        engine: Engine,
        params: qwen.Params,
        decode: Callable[[list[int]], str],
        samples: Samples = ROLLOUTS,
        past_responses: PastResponses | None = None,
    ) -> None:
        """`params` are the engine's weights; `decode` turns token ids into text.

        past_responses: of rollout.draft=history.
        """
        self.engine = engine
        self.params = params
        self.decode = decode
        self.samples = samples
        self.settings = samples.settings(engine.settings)
        self.caches_prefixes = engine.caches_prefixes(samples)
        self.version = 0  # policy version of the weights
        # Tables and buffers of the engine have this length.
        longest, room = self.settings.longest_episode, engine.max_sequence_tokens
        assert longest <= room, f"{longest=} {room=}"
        draft_cost.measure(engine, params, samples)
        self.state = engine.init_decode_state()
        self.counters = DecodeCounters()

        # A sequence is in at most one of the next four containers.
        self.queue: deque[list[Sequence]] = deque()  # groups to prefill
        self.pending: list[deque[PrefilledSample]] = [  # by shard: prefilled, waiting for a slot
            deque() for _ in range(engine.num_shards)
        ]
        self.decoding: dict[int, Sequence] = {}  # by slot
        # By slot: episodes between two turns, which keep their pages, longest wait first.
        self.waiting: dict[int, Sequence] = {}

        # Of episodes between two turns, in a slot or not: the number of decode calls at the start
        # of their wait, and the average number of calls that replies take.
        self.asked: dict[Sequence, int] = {}
        self.mean_wait = 0.0

        # Sequences to score; they do not decode.
        self.scorer = Scorer(engine, params, self.counters)
        self.references = References(engine.settings.draft, past_responses)
        self.unread_calls = 0  # dispatched and not read
        self.newly_placed: dict[int, PrefilledSample] = {}  # by slot: placed since the last call
        self.num_placed = 0
        self.poll_replies: PollReplies | None = None

    def run(
        self,
        groups: Groups,
        group_size: int,
        temperature: float,
        seed: jax.Array,
        *,
        version: int = 0,
        poll_replies: PollReplies | None = None,
        admit_more: AdmitMore = admit_none,
        drain: Callable[[], bool] = never_drain,
    ) -> Iterator[Sequence]:
        """Decodes `groups` and yields every sequence when it finishes, in finishing order.

        The sequences of one group, at most `group_size`, have the same tokens so far. If
        `group_size` is 0, groups may have any size, and every prefill samples as many first tokens
        as its largest group needs. `version` is the policy version that is recorded for the sampled
        tokens.

        `admit_more()` is called before every decode call. It returns further groups to decode, or
        None if the caller has enough: then the run ends and leaves unfinished sequences as they
        are.

        `drain()` is called after `admit_more()`. Once it returns True, no further turn begins, and
        the run ends when the turns that have begun are over.

        `poll_replies(wait)` enables episodes of several turns. Each sequence is then yielded at the
        end of every turn, and `poll_replies` must return it later, exactly once a turn, with the
        tokens that precede its next turn, or with None if the episode is over. If `wait` is true,
        `poll_replies` blocks until at least one reply arrives; it returns an empty list only when
        no sequence waits for a reply.
        """
        assert not self.engine.placements, "the engine is busy: an unfinished run was not cancelled"
        sequences = itertools.chain.from_iterable(groups)
        longest = max((sequence.length_limit for sequence in sequences), default=0)
        room = self.engine.max_sequence_tokens
        assert longest <= room, f"{longest=} prompt and response exceed {room=} tokens"
        self.group_size = group_size
        self.temperature = temperature
        self.seed = seed
        self.version = version
        self.poll_replies = poll_replies
        self.queue = deque(groups)
        self.references.add(groups)

        in_flight: deque[CallInFlight] = deque()
        while True:
            more_groups = admit_more()
            if more_groups is None:
                break
            self.queue.extend(more_groups)
            self.references.add(more_groups)

            is_draining = drain()
            if is_draining:
                self._drop_turns_to_begin()
            has_work = self.queue or self.decoding or in_flight or any(self.pending)
            if is_draining:
                if not has_work:
                    break
            else:
                # Begin the turns whose replies have arrived. Block only if there is no other work.
                must_wait = not (has_work or self.scorer.is_busy)
                num_replies = self._handle_replies(wait=must_wait)
                if must_wait and not num_replies:
                    self._free_kept_pages()
                    return

            # Decoding sequences reserve their pages first; the remaining pages admit other
            # sequences.
            yield from self._reserve_pages(in_flight)
            self._score()
            if not self.scorer.is_out_of_pages:
                self._fill_slots()

            # Dispatch the next call before reading the last one, so that the device stays busy.
            if self.decoding:
                in_flight.append(self._dispatch_call())
            if len(in_flight) > 1 or (in_flight and not self.decoding):
                yield from self._read_call(in_flight.popleft())

        # The caller has enough: read the dispatched calls, and wait for the grade and the reply of
        # every turn that ended.
        while in_flight:
            yield from self._read_call(in_flight.popleft())
        while self._handle_replies(wait=True):
            pass
        self._free_kept_pages()

    def use_weights(self, params: qwen.Params, version: int | None = None) -> None:
        """Replaces the weights for the next calls.

        Sequences continue with the adapters that they hold in an `adapter_bank.AdapterBank`.

        version: the policy version of the weights. Sequences continue with the KV that they have,
            and later ones share none of it. None: only the adapters of a bank have changed.
        """
        self.params = self.scorer.params = params
        if version is not None and version != self.version:
            self.version = version
            self.scorer.give_up_all_pages()

    def cancel(self) -> None:
        """Drops all unfinished sequences and frees their pages. A suspended `run` then ends."""
        for slot in (*self.decoding, *self.waiting):
            self._free_slot(slot)
        self._free_kept_pages()
        self.poll_replies = None
        self.queue.clear()
        self.asked.clear()
        self.newly_placed.clear()
        self.references.clear()
        self.unread_calls = 0
        for samples in self.pending:
            samples.clear()

    def _drop_turns_to_begin(self) -> None:
        """Removes the sequences that have no token of their turn yet."""
        # A sequence that was preempted returns to the queue within its turn, and stays.
        self.queue = deque(group for group in self.queue if group[0].is_in_turn)
        for shard, samples in enumerate(self.pending):
            in_turn = [sample for sample in samples if sample.sequence.is_in_turn]
            self.pending[shard] = deque(in_turn)

    def _free_kept_pages(self) -> None:
        """Frees the pages that are only kept for sharing."""
        self.scorer.cancel()
        self.engine.clear_prefix_caches()

    # -- scoring -----------------------------------------------------------------------------------

    def _score(self) -> None:
        """Dispatches one call for the sequences to score, if there are any."""
        if self.scorer.is_busy:
            placements = self.engine.placements
            in_slots = {
                slot: sequence
                for slot, sequence in (self.decoding | self.waiting).items()
                if placements[slot].version == self.version
            }
            self.state = self.scorer.step(self.state, in_slots, self.evict_waiting)

    # -- between two turns -------------------------------------------------------------------------

    def _handle_replies(self, wait: bool) -> int:
        """Begins the next turn of episodes with a reply. Returns the number of replies."""
        replies = self.poll_replies(wait) if self.poll_replies else []
        for sequence, reply_tokens in replies:
            self._remember_wait(sequence)
            slot = self._waiting_slot(sequence)
            if reply_tokens is not None:
                self._begin_turn(sequence, reply_tokens, slot)
                continue
            sequence.is_finished = True
            if slot is not None:
                self._free_slot(slot)
        return len(replies)

    def _remember_wait(self, sequence: Sequence) -> None:
        """Updates the average wait for a reply, in decode calls."""
        since_call = self.asked.pop(sequence, None)
        if since_call is not None:  # the last turn has no reply
            waited = self.counters.decode_calls - since_call
            self.mean_wait += (waited - self.mean_wait) * WAIT_AVERAGE_WEIGHT

    def _waiting_slot(self, sequence: Sequence) -> int | None:
        """Returns the slot in which `sequence` waits, or None if the sequence lost its slot."""
        for slot, waiting in self.waiting.items():
            if waiting is sequence:
                return slot
        return None

    def _begin_turn(self, sequence: Sequence, reply_tokens: list[int], slot: int | None) -> None:
        """Appends the reply, then resumes the sequence in `slot` or queues it."""
        num_cached = len(sequence) - 1  # the KV of a turn's last token may not have been written
        sequence.tokens.append(reply_tokens)
        sequence.turn_start = len(sequence.tokens)
        sequence.finish_reason = ""
        room = sequence.longest_length(self.settings)
        longest = self.settings.max_new_tokens
        if sequence.turn_tokens is not None:
            longest = min(longest, sequence.turn_tokens)
        sequence.length_limit = min(len(sequence) + longest, room)
        assert len(sequence) < room, f"{len(sequence)=} leaves no token for a turn: {room=}"

        if slot is None:
            self.queue.appendleft([sequence])
            return
        del self.waiting[slot]
        self.decoding[slot] = sequence
        new_tokens = sequence.tokens.ids[num_cached:].tolist()
        self.engine.resume(slot, num_cached, new_tokens, sequence.length_limit)

    def evict_waiting(self, shard: int, min_calls: int = 0) -> bool:
        """Frees the slot of the shard's episode that has waited longest for a reply.

        The episode must have waited for at least `min_calls` decode calls. It continues through the
        queue once its reply arrives. Returns whether a slot was freed.
        """
        # `waiting` is in the order of arrival: the first match has waited longest.
        for slot, sequence in self.waiting.items():
            has_waited = self.counters.decode_calls - self.asked[sequence] >= min_calls
            if self._shard_of(slot) == shard and has_waited:
                self._free_slot(slot)
                return True
        return False

    # -- from the queue into slots -----------------------------------------------------------------

    def _fill_slots(self) -> None:
        """Prefills groups for shards with free slots, and places prefilled sequences into slots."""
        engine = self.engine

        # Pending sequences claim free slots, so a number here may be negative.
        num_free = [
            len(engine.free_slots(shard)) - len(self.pending[shard])
            for shard in range(engine.num_shards)
        ]

        # Evict episodes that wait for a reply, as many as the queue can replace: at once if no
        # sequence decodes or if replies are slow, otherwise after PATIENCE calls.
        is_patient = self.decoding and self.mean_wait <= PATIENCE
        min_calls = PATIENCE if is_patient else 0
        num_queued = sum(map(len, self.queue))
        for shard in range(engine.num_shards):
            while num_free[shard] < 0 and self.evict_waiting(shard, min_calls):
                num_free[shard] += 1
        for shard in range(engine.num_shards):
            while sum(num_free) < num_queued and self.evict_waiting(shard, min_calls):
                num_free[shard] += 1

        # Every pass may cache prefixes for which groups wait.
        while self._admit_from_queue(num_free):
            pass

    def _admit_from_queue(self, num_free: list[int]) -> bool:
        """Prefills groups of the queue as long as there are free slots.

        num_free: free slots of each shard that no sequence has claimed; counts down.

        Returns whether to call again: groups were postponed until their prefixes are cached.
        """
        engine = self.engine
        groups_by_shard: list[Groups] = [[] for _ in range(engine.num_shards)]
        returning: list[chunked_prefill.Returning] = []
        postponed: list[tuple[int, list[Sequence]]] = []  # with the shard
        # By shard: the prefixes that the next prefills will write (`prefix_hashes`).
        coming: list[set[int]] = [set() for _ in range(engine.num_shards)]
        lacks_pages = False
        while self.queue and max(num_free) > 0 and not lacks_pages:
            group = self.queue.popleft()
            shard, num_cached, waits = self._choose_shard(group, num_free, coming)
            if waits:
                # It keeps its claim to slots, so that no later group overtakes it.
                postponed.append((shard, group))
                num_free[shard] -= len(group)
                continue
            is_cached = chunked_prefill.pays(engine, group, num_cached)
            if is_cached or chunked_prefill.is_for_chunks(engine, group, self.samples):
                placed = self._place_returning(group[: num_free[shard]], shard)
                returning += placed
                num_free[shard] -= len(placed)
                remaining = group[len(placed) :]
                if remaining:
                    self.queue.appendleft(remaining)
                    # If slots are lacking, there may be some on another shard.
                    lacks_pages = num_free[shard] > 0  # the first in line waits for pages
                continue
            groups_by_shard[shard].append(group)
            num_free[shard] -= len(group)
            if self.caches_prefixes:
                keys = page_keys(group[0].tokens.ids, engine.settings.page_size)
                coming[shard].update(prefix_hashes(self._weights_of(group[0]), keys))

        if returning:
            self.state = chunked_prefill.prefill(
                engine, self.params, self.state, returning, self.temperature, self.samples
            )
        while any(groups_by_shard):
            self._prefill(groups_by_shard)
        self._place_pending()

        for shard, group in reversed(postponed):
            self.queue.appendleft(group)
            num_free[shard] += len(group)
        # Prefixes of sequences that wait for pages are not cached yet.
        return bool(postponed) and not lacks_pages and not any(self.pending)

    def _choose_shard(
        self, group: list[Sequence], num_free: list[int], coming: list[set[int]]
    ) -> tuple[int, int, bool]:
        """Returns a shard with free slots, the group's cached tokens there, and whether to wait.

        A group goes to the shard with the longest cached prefix or, if none is long enough, to the
        one with the most free slots, because shards share no pages. The group waits if a longer
        prefix than the cached one is `coming`.
        """
        shard, num_cached, waits = int(np.argmax(num_free)), 0, False
        if not self.caches_prefixes:
            return shard, num_cached, waits
        page_size = self.engine.settings.page_size
        weights = self._weights_of(group[0])
        # The last token is the input of the first decode step.
        keys = page_keys(group[0].tokens.ids[:-1], page_size)
        hashes = prefix_hashes(weights, keys)
        for candidate, cache in enumerate(self.engine.prefix_caches):
            if num_free[candidate] <= 0:
                continue
            num_found = len(cache.find(weights, keys)) * page_size
            num_coming = sum(number in coming[candidate] for number in hashes) * page_size
            most = max(num_found, num_coming)
            if most > num_cached and chunked_prefill.pays(self.engine, group, most):
                shard, num_cached, waits = candidate, most, num_coming > num_found
        return shard, num_cached, waits

    def _weights_of(self, sequence: Sequence) -> Hashable:
        """Returns the weights that would compute a sequence now: `Placement.weights`."""
        return self.version, sequence.adapter, sequence.owner

    def _cached_pages(self, sequence: Sequence, shard: int) -> list[int]:
        """Returns the cached pages of a shard with the beginning of a sequence."""
        if not self.caches_prefixes:
            return []
        keys = page_keys(sequence.tokens.ids[:-1], self.engine.settings.page_size)
        return self.engine.prefix_caches[shard].find(self._weights_of(sequence), keys)

    def _cache_pages(self, sequence: Sequence, slot: int, num_tokens: int) -> None:
        """Caches the full pages of the first tokens of the sequence in a slot."""
        if not self.caches_prefixes:
            return
        shard, local_slot = divmod(slot, self.engine.slots_per_shard)
        weights = self.engine.placements[slot].weights
        keys = page_keys(sequence.tokens.ids[:num_tokens], self.engine.settings.page_size)
        pages = self.engine.pages_of(shard, local_slot)
        self.engine.prefix_caches[shard].insert(weights, keys, pages)

    def _place_returning(
        self, group: list[Sequence], shard: int
    ) -> list[chunked_prefill.Returning]:
        """Places sequences into slots of a shard, to be prefilled in chunks.

        Returns fewer than given if pages are lacking.
        """
        placed: list[chunked_prefill.Returning] = []
        for sequence in group:
            slot = self.engine.free_slots(shard)[0]
            while True:
                cached_pages = self._cached_pages(sequence, shard)
                try:
                    item = chunked_prefill.place(
                        self.engine, sequence, slot, self.version, cached_pages
                    )
                except OutOfPages:
                    if self._make_room(shard):
                        continue
                    return placed
                break
            self.counters.prefills += 1
            self.counters.prefill_tokens += item.num_left
            if self.caches_prefixes and not placed:
                # The others of a group would share its prefill without a cache as well.
                self.counters.cached_tokens += item.first
            if self.caches_prefixes and not sequence.num_new:
                sequence.cached_tokens = item.first
            # A later sequence may share pages that this one is about to write
            # (`chunked_prefill.prefill`).
            self._cache_pages(sequence, slot, item.num_inputs)
            self._admit(sequence, slot)
            placed.append(item)
        return placed

    def _admit(self, sequence: Sequence, slot: int) -> None:
        """Moves a sequence with pages into a slot, where it decodes."""
        self.num_placed += 1
        sequence.admission_number = self.num_placed
        self.decoding[slot] = sequence

    def _prefill(self, groups_by_shard: list[Groups]) -> None:
        """Prefills one batch of groups, taken from the front of every shard's list."""
        batch = take_prefill_batch(self.engine, groups_by_shard, self.group_size, self.temperature)
        prefix = self.engine.prefill_multisampling(
            params=self.params,
            padded_tokens=batch.padded_tokens,
            true_length=batch.true_length,
            requests=batch.requests,
            temperature=batch.temperature,
            seed=self.seed,
            samples=self.samples,
            filters=batch.filters,
            adapters=batch.adapters,
        )
        for item in batch.rows:
            self.counters.prefills += 1
            self.counters.prefill_tokens += int(batch.true_length[item.row])
            for column, sequence in enumerate(item.group):
                sample = PrefilledSample(sequence, prefix, item.row, column, self.version)
                self.pending[item.shard].append(sample)

    def _place_pending(self) -> None:
        """Moves prefilled sequences into free slots, as long as slots and pages last."""
        # One insert program copies from one prefix, at one temperature.
        inserts: dict[tuple[int, float], list[tuple[Placement, list[PageCopy]]]] = {}
        prefixes: dict[int, Prefix] = {}

        for shard, pending in enumerate(self.pending):
            for slot in self.engine.free_slots(shard):
                if not pending:
                    break
                sample = pending[0]
                sequence = sample.sequence
                placement = Placement(
                    slot=slot,
                    prefix_row=sample.row,
                    sample_index=sample.column,
                    length=len(sequence),
                    limit=sequence.length_limit,
                    request=sequence.request_id,
                    group=sequence.prompt_id,
                    shared_tokens=len(sequence.prompt_tokens),
                    filters=sequence.filters,
                    adapter=sequence.adapter,
                    version=sample.version,
                    owner=sequence.owner,
                    beginning=sequence.tokens.ids,
                )
                try:
                    # OutOfPages leaves the sequence first in line, so no later one overtakes it.
                    page_copies = self.engine.place(placement)
                except OutOfPages:
                    if self._make_room(shard):
                        continue
                    break
                pending.popleft()
                # A prefix cannot be hashed. `prefixes` keeps it alive, so that no other object
                # gets its id.
                prefixes[id(sample.prefix)] = sample.prefix
                insert_key = id(sample.prefix), sequence.temperature_or(self.temperature)
                inserts.setdefault(insert_key, []).append((placement, page_copies))
                self._cache_pages(sequence, slot, len(sequence))
                self._admit(sequence, slot)
                self.newly_placed[slot] = sample

        for (prefix_id, temperature), placements in inserts.items():
            self.state = self.engine.bulk_insert(
                prefixes[prefix_id], self.state, placements, temperature, self.samples
            )

    # -- pages -------------------------------------------------------------------------------------

    def _reserve_pages(self, in_flight: deque[CallInFlight]) -> Iterator[Sequence]:
        """Reserves the pages that the next call writes, and preempts sequences if pages run out."""
        # In order: pages that are only kept for sharing, episodes that wait for a reply, then
        # sequences that finished in an unread call (reading it yields them), and last the youngest
        # sequence.
        while True:
            shard = self._shard_out_of_pages()
            if shard is None:
                return
            if self._make_room(shard):
                continue
            if in_flight:
                yield from self._read_call(in_flight.popleft())
            else:
                self._preempt_youngest(shard)

    def _make_room(self, shard: int) -> bool:
        """Frees pages of a shard that no decoding sequence uses. Returns whether it did."""
        return self.scorer.give_up_pages(shard) or self.evict_waiting(shard)

    def _shard_out_of_pages(self) -> int | None:
        """Reserves pages, oldest sequences first. Returns the shard that ran out, or None."""
        for slot in sorted(self.decoding, key=self._admission_number):
            try:
                self.engine.reserve(slot)
            except OutOfPages:
                return self._shard_of(slot)
        return None

    def _preempt_youngest(self, shard: int) -> None:
        """Preempts the shard's youngest sequence: it returns to the front of the queue."""
        slots = [slot for slot in self.decoding if self._shard_of(slot) == shard]
        youngest = max(slots, key=self._admission_number)
        self.queue.appendleft([self._free_slot(youngest)])
        self.counters.preempted += 1

    def _free_slot(self, slot: int) -> Sequence:
        """Frees a slot and its pages. Returns the sequence that was in the slot."""
        in_slots = self.decoding if slot in self.decoding else self.waiting
        sequence = in_slots.pop(slot)
        self._cache_pages(sequence, slot, self._num_with_kv(sequence, slot))
        self.engine.free_resource(slot)
        return sequence

    def _num_with_kv(self, sequence: Sequence, slot: int) -> int:
        """Returns how many tokens have KV that neither later calls nor those in flight write."""
        # Calls in flight continue from the last known token: they write its KV and later ones.
        num_written = 0
        if sequence.tokens.sampled[-1]:
            num_written = len(sequence) - 1
        elif sequence.turns:
            # The device may not have taken all of the reply.
            num_written = sequence.turns[-1].end - 1
        return max(num_written, self.engine.placements[slot].length)

    def _admission_number(self, slot: int) -> int:
        return self.decoding[slot].admission_number

    def _shard_of(self, slot: int) -> int:
        return slot // self.engine.slots_per_shard

    # -- decode calls ------------------------------------------------------------------------------

    def _dispatch_call(self) -> CallInFlight:
        """Starts a decode call and the copy of its result to the host. Waits for neither."""
        self.counters.decode_calls += 1
        self.unread_calls += 1
        if self.engine.paying_drafter is not None:
            for slot, sequence in self.decoding.items():
                self.engine.placements[slot].references = self.references.of(sequence)
        turns = {slot: (sequence, len(sequence.turns)) for slot, sequence in self.decoding.items()}
        num_reply_tokens = {
            slot: len(placement.forced_tokens) for slot, placement in self.engine.placements.items()
        }
        self.state, result = self.engine.generate(self.params, self.state, self.seed, self.samples)
        collectives.start_fetch(result)
        newly_placed = self.newly_placed
        self.newly_placed = {}
        return CallInFlight(result, turns, num_reply_tokens, newly_placed)

    def _read_call(self, call: CallInFlight) -> Iterator[Sequence]:
        """Waits for a call and stores its tokens. Yields the sequences whose turn they end."""
        # The prefill sampled the first token of newly placed sequences; the call emitted the later
        # ones.
        prefixes = {id(sample.prefix): sample.prefix for sample in call.newly_placed.values()}
        first_tokens = jax.device_get({key: without_kv(prefix) for key, prefix in prefixes.items()})
        for slot, sample in call.newly_placed.items():
            if self._is_same_turn(call, slot):
                prefix = first_tokens[id(sample.prefix)]
                sequence = self.decoding[slot]
                # The input at each position predicts the next token: the last one the first sample.
                inputs = take(prefix.input_tracks, (sample.row, slice(len(sequence))))
                sequence.tokens.fill(1, take(inputs, slice(-1)))
                column = slice(sample.column, sample.column + 1)
                sampled = take(prefix.tracks, (sample.row, column))
                yield from self._append_tokens(slot, sampled | take(inputs, slice(-1, None)))

        result = jax.device_get(call.result)
        self.unread_calls -= 1
        num_steps = int(result.counts.max())
        if result.drafts is not None:
            num_steps = int(result.drafts[:, 0].max())
            passes, drafted, accepted = map(int, result.drafts.sum(axis=0))
            self.counters.draft_passes += passes
            self.counters.drafted_tokens += drafted
            self.counters.accepted_tokens += accepted
        self.counters.slot_steps += num_steps * len(result.counts)
        self.counters.decoded_tokens += int(result.counts.sum())
        for slot in call.turns:
            # The first tokens may belong to the environment's reply, which the sequence already
            # has.
            start = call.num_reply_tokens[slot]
            end = int(result.counts[slot])
            if not self._is_same_turn(call, slot):
                self.counters.wasted_tokens += end
                continue
            # The reply's tokens have only tracks of inputs.
            inputs = {name: result.tracks[name] for name in self.engine.input_tracks(self.samples)}
            replies = self.decoding[slot].tokens
            start_of_reply = len(replies) - start
            reply = slice(min(start, end))
            replies.fill(start_of_reply, take(inputs, (slot, reply)))
            if end > start:
                yield from self._append_tokens(slot, take(result.tracks, (slot, slice(start, end))))
            if result.drafts is not None and self._is_same_turn(call, slot):
                # A reply counts in full before the device has taken all of it.
                num_tokens = len(self.decoding[slot]) - max(start - end, 0)
                self.engine.note_tokens(slot, num_tokens, self.unread_calls)

    def _is_same_turn(self, call: CallInFlight, slot: int) -> bool:
        """Whether `slot` still holds the sequence that `call` decoded, in the same turn."""
        # Since the call was dispatched, the sequence may have finished, left its slot, or begun
        # another turn. Then it takes no more tokens from this call.
        sequence = self.decoding.get(slot)
        return sequence is not None and call.turns[slot] == (sequence, len(sequence.turns))

    def _append_tokens(self, slot: int, sampled: TrackValues) -> Iterator[Sequence]:
        """Appends sampled tokens to the sequence in `slot`, and yields it if they end its turn."""
        sequence = self.decoding[slot]
        first_new = len(sequence)
        sequence.tokens.append(**sampled, sampled=True, versions=self.version)

        # The device checks the engine's end tokens, but neither stop strings nor the stop ids of
        # one sequence: drop the tokens after one here.
        all_stop_strings = (*self.settings.stop, *sequence.stop_strings)
        stopped_length = stop_strings.num_tokens_to_keep(
            self.decode, sequence.tokens.ids, sequence.turn_start, first_new, all_stop_strings
        )
        if sequence.stop_ids:
            is_stop = np.isin(sequence.tokens.ids[first_new:stopped_length], sequence.stop_ids)
            if is_stop.any():
                stopped_length = first_new + int(is_stop.argmax()) + 1
        if stopped_length is not None:
            sequence.tokens.cut(stopped_length)

        if stopped_length is not None or sequence.tokens.ids[-1] in self.engine.stop_ids:
            sequence.finish_reason = "stop"
        elif len(sequence) >= sequence.length_limit:
            sequence.finish_reason = "length"
        if sequence.finish_reason:
            self._end_turn(slot, has_run_on=stopped_length is not None)
            yield sequence

    def _end_turn(self, slot: int, has_run_on: bool) -> None:
        """Records the turn that ended in `slot`. The episode waits for a reply or is over.

        has_run_on: whether the slot may have decoded tokens after the end of the turn.
        """
        sequence = self.decoding[slot]
        text = stop_strings.graded_text(
            self.decode,
            sequence.tokens.ids[sequence.turn_start :].tolist(),
            {*self.engine.stop_ids, *sequence.stop_ids},
            (*self.settings.stop, *sequence.stop_strings),
            keep_stop=self.settings.keep_stop,
        )
        sequence.turn_text = text
        turn = Turn(sequence.turn_start, len(sequence), text, sequence.finish_reason)
        sequence.turns.append(turn)

        if self.poll_replies is not None and len(sequence.turns) < self.settings.max_turns:
            self.asked[sequence] = self.counters.decode_calls
            if has_run_on and self.engine.has_slot_state:
                # The next turn would overwrite the pages after the end, but the recurrent state of
                # the slot cannot be rolled back: the episode continues from a prefill.
                self._free_slot(slot)
                return
            self.engine.placements[slot].is_paused = True
            del self.decoding[slot]
            self.waiting[slot] = sequence
        else:
            sequence.is_finished = True
            self._free_slot(slot)
