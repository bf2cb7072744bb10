"""The driver: keeps the engine's slots busy until every sample of every prompt is finished, or enough are.

Calls run one ahead of the host; slots are refilled between calls. When a shard runs out of pages its youngest sequence
is preempted, and goes on from a prefill. A sequence between two turns waits in its slot, if nothing else needs it."""

from collections import deque
from collections.abc import Callable, Iterator

import jax
import numpy as np

from jzero.rollout.engine import Engine, Placement, Prefix, ResultTokens, next_power_of_two
from jzero.rollout.pages import OutOfPages
from jzero.rollout.sequence import NO_REPLIES, DecodeCounters, Groups, More, Sequence
from jzero.types import Turn

PATIENCE = 2  # calls that an episode keeps its slot from the queue while its turn is graded
PREFILL_TOKENS = 8192  # padded prompt tokens of one prefill call, over all shards


def prefill_shape(engine: Engine, longest: int) -> tuple[int, int]:
    """Padded tokens of a prefill whose longest prompt has `longest`, and prompts a shard that it takes at most."""
    page = engine.settings.page_size
    width = min(next_power_of_two(-(-longest // page), 1) * page, engine.max_prefill_length)
    return width, max(1, PREFILL_TOKENS // (width * engine.num_shards))


def prefill_shapes(engine: Engine) -> list[tuple[int, int]]:
    """(rows a shard, tokens a row) of the largest prefill of every width; long ones are of preempted sequences."""
    shapes = sorted(
        {prefill_shape(engine, tokens) for tokens in range(1, engine.max_sequence_tokens)}
    )
    return [
        (min(next_power_of_two(rows, 1), next_power_of_two(engine.slots_per_shard, 1)), width)
        for width, rows in shapes
    ]


class Scheduler:
    """One engine, its device state, and the queue of one batch. `run` yields each sequence as it finishes."""

    def __init__(self, engine: Engine, params, decode: Callable[[list[int]], str]):
        self.engine, self.params, self.decode = engine, params, decode
        self.settings = engine.settings
        self.state = engine.init_decode_state()
        self.counters = DecodeCounters()
        self.queue: deque[list[Sequence]] = deque()  # groups to prefill
        self.pending: list[deque] = [
            deque() for _ in range(engine.num_shards)
        ]  # prefilled, waiting for a slot
        self.owners: dict[int, Sequence] = {}  # slot -> sequence
        self.waiting: dict[
            int, tuple[Sequence, int]
        ] = {}  # slot -> sequence between turns, calls when its last ended
        self.replies = NO_REPLIES
        self.fresh: list[tuple[int, Prefix, int, int]] = []  # put into a slot since the last call
        self.births = 0

    def run(
        self,
        groups: Groups,
        group: int,
        temperature: float,
        seed,
        version=0,
        replies=NO_REPLIES,
        more: More = list,
    ) -> Iterator[Sequence]:
        """Groups, of `group` sequences at most, share what they have -> finished sequences, in finishing order; who
        stops iterating calls `cancel`. `more`, asked before every call, says which groups come too, or None: that is
        enough. With `replies` a sequence is yielded at every turn's end; it then gives the tokens before its next turn,
        once, or None where it is over. Told to wait it says one at least, unless all is said."""
        assert not self.engine.placements, "the engine is busy: an unfinished run was not cancelled"
        longest, room = (
            max((s.limit for each in groups for s in each), default=0),
            self.engine.max_sequence_tokens,
        )
        assert longest <= room, f"{longest=} prompt and response exceed {room=} tokens"
        self.group, self.temperature, self.seed = group, temperature, seed
        self.version, self.replies = version, replies
        self.queue = deque(groups)
        inflight: deque[tuple] = deque()
        while (new := more()) is not None:
            self.queue.extend(new)
            if not self._go_on(
                wait=not (self.queue or self.owners or inflight or any(self.pending))
            ):
                return
            # Those that run come first: pages left over admit new ones.
            while (shard := self._reserve()) is not None:
                if self._evict(shard):
                    continue
                if inflight:
                    yield from self._read(*inflight.popleft())
                else:
                    self._preempt(shard)
            self._admit()
            if self.owners:
                inflight.append(self._dispatch())
            if inflight and (len(inflight) > 1 or not self.owners):
                yield from self._read(*inflight.popleft())
        while inflight:
            yield from self._read(*inflight.popleft())
        while self._go_on(wait=True):
            pass  # every turn that ended has its grade and its reply

    def cancel(self) -> None:
        """Forget what is unfinished and free its pages; a `run` that is resumed ends."""
        for slot in (*self.owners, *self.waiting):
            self._leave(slot)
        self.replies = NO_REPLIES
        for each in (self.queue, self.fresh, *self.pending):
            each.clear()

    def _go_on(self, wait: bool) -> bool:
        """Begin the next turn of every episode that has its reply. False: waited, and there is nothing left to do."""
        said = self.replies(wait)
        for sequence, tokens in said:
            slot = next(
                (slot for slot, (owner, _) in self.waiting.items() if owner is sequence), None
            )
            if tokens is not None:
                self._begin(sequence, tokens, slot)
                continue
            sequence.over = True
            if slot is not None:
                self._leave(slot)
        return not wait or bool(said)

    def _begin(self, sequence: Sequence, tokens: list[int], slot: int | None) -> None:
        """Of the next turn, after `tokens`: in its slot, or through the queue."""
        known = len(sequence) - 1  # the KV of the last token may not be there
        sequence.tokens += tokens
        sequence.logps += [0.0] * len(tokens)
        sequence.versions += [-1] * len(tokens)
        sequence.start, sequence.finish = len(sequence.tokens), ""
        room = sequence.room(self.settings)
        sequence.limit = min(len(sequence) + self.settings.max_new_tokens, room)
        assert len(sequence) < room, f"a reply up to {len(sequence)}, of {room=} tokens"
        if slot is None:
            self.queue.appendleft([sequence])
        else:
            del self.waiting[slot]
            self.owners[slot] = sequence
            self.engine.resume(slot, known, sequence.full()[known:].tolist(), sequence.limit)

    def _evict(self, shard: int, calls: int = 0) -> bool:
        """Free the slot of the episode of the shard that waits the longest, if that is for `calls` calls or more."""
        old = lambda slot: self.counters.calls - self.waiting[slot][1] >= calls
        slot = next(
            (s for s in self.waiting if s // self.engine.slots_per_shard == shard and old(s)), None
        )
        if slot is not None:
            self._leave(slot)
        return slot is not None

    def _admit(self) -> None:
        """Prefill groups for shards with free slots, and put what is prefilled into slots."""
        engine = self.engine
        rows: list[list[list[Sequence]]] = [[] for _ in range(engine.num_shards)]
        room = [len(engine.free_slots(s)) - len(self.pending[s]) for s in range(engine.num_shards)]
        for s in range(engine.num_shards):
            while room[s] < bool(self.queue) and self._evict(s, PATIENCE if self.owners else 0):
                room[s] += 1
        while self.queue and max(room) > 0:
            shard = int(np.argmax(room))
            group = self.queue.popleft()
            rows[shard].append(group)
            room[shard] -= len(group)
        while any(rows):
            self._prefill(rows)
        self._insert()

    def _prefill(self, rows: list[list[list[Sequence]]]) -> None:
        """One prefill of groups of similar length, taken from the front of every shard's rows."""
        engine = self.engine
        width, cap = prefill_shape(engine, max(len(shard[0][0]) for shard in rows if shard))
        taken: list[list[list[Sequence]]] = []
        for shard in rows:
            fits = next((i for i, group in enumerate(shard) if len(group[0]) > width), len(shard))
            taken.append(shard[: min(fits, cap)])
            del shard[: len(taken[-1])]
        count = next_power_of_two(max(len(shard) for shard in taken), 1)
        every = [
            (s, s * count + r, group)
            for s, shard in enumerate(taken)
            for r, group in enumerate(shard)
        ]
        tokens = np.zeros((engine.num_shards * count, width), np.int32)
        lengths = np.ones(len(tokens), np.int32)
        requests = np.zeros(
            (len(tokens), self.group), np.int32
        )  # one shape, also for the preempted
        temperature = np.zeros(len(tokens), np.float32)
        for _, row, group in every:
            context = group[0].full()
            tokens[row, : len(context)], lengths[row] = context, len(context)
            requests[row, : len(group)] = [sequence.request for sequence in group]
            temperature[row] = self._heat(group[0])
            self.counters.prefill_tokens += len(context)
        arrays = {
            "padded_tokens": tokens,
            "true_length": lengths,
            "requests": requests,
            "temperature": temperature,
        }
        prefix = engine.prefill_multisampling(params=self.params, seed=self.seed, **arrays)
        for s, row, group in every:
            self.pending[s].extend((sequence, prefix, row, j) for j, sequence in enumerate(group))

    def _insert(self) -> None:
        """Move pending samples into free slots, as far as slots and pages go."""
        chosen: dict[tuple[int, float], tuple[Prefix, list]] = {}  # an insert has one temperature
        for shard, pending in enumerate(self.pending):
            for slot in self.engine.free_slots(shard) if pending else ():
                if not pending:
                    break
                sequence, prefix, row, sample = pending[0]
                where, context = (slot, row, sample, len(sequence)), len(sequence.context)
                placement = Placement(
                    *where, sequence.limit, sequence.request, sequence.prompt, shared_tokens=context
                )
                try:
                    writes = self.engine.place(placement)
                except OutOfPages:
                    if self._evict(shard):
                        continue
                    break
                pending.popleft()
                heat = self._heat(sequence)
                chosen.setdefault((id(prefix), heat), (prefix, []))[1].append((placement, writes))
                self.births += 1
                sequence.born = self.births
                self.owners[slot] = sequence
                self.fresh.append((slot, prefix, row, sample))
        for (_, heat), (prefix, placements) in chosen.items():
            self.state = self.engine.bulk_insert(prefix, self.state, placements, heat)

    def _heat(self, sequence: Sequence) -> float:
        return self.temperature if sequence.temperature is None else sequence.temperature

    def _reserve(self) -> int | None:
        """Pages for the next call, oldest sequences first -> None, or the shard that ran out."""
        for slot in sorted(self.owners, key=lambda slot: self.owners[slot].born):
            try:
                self.engine.reserve(slot)
            except OutOfPages:
                return slot // self.engine.slots_per_shard
        return None

    def _preempt(self, shard: int) -> None:
        """Send the shard's youngest sequence back to the queue's front, with the tokens it has."""
        here = [slot for slot in self.owners if slot // self.engine.slots_per_shard == shard]
        self.queue.appendleft([self._leave(max(here, key=lambda slot: self.owners[slot].born))])
        self.counters.preempted += 1

    def _leave(self, slot: int) -> Sequence:
        """Free a slot; whose it was."""
        self.engine.free_resource(slot)
        return self.owners.pop(slot) if slot in self.owners else self.waiting.pop(slot)[0]

    def _dispatch(self) -> tuple:
        """A call, as `_read` takes it: its result; by slot its sequence and which of its turns, and how many of its
        first tokens are a reply's; (slot, prefix, row, sample) of those whose first token is in a prefix."""
        self.counters.calls += 1
        owners = {slot: (owner, len(owner.turns)) for slot, owner in self.owners.items()}
        given = {
            slot: len(placement.forced_tokens) for slot, placement in self.engine.placements.items()
        }
        self.state, result = self.engine.generate(self.params, self.state, self.seed)
        jax.copy_to_host_async(result)
        fresh, self.fresh = self.fresh, []
        return result, owners, given, fresh

    def _read(
        self, result: ResultTokens, owners: dict, given: dict, fresh: list
    ) -> Iterator[Sequence]:
        """Hand out what a call sampled; a sequence that left its slot since, or is in a later turn, takes no more."""
        still = lambda slot: (
            (owner := self.owners.get(slot)) and owners[slot] == (owner, len(owner.turns))
        )
        firsts = jax.device_get(
            {id(prefix): (prefix.tokens, prefix.logps) for _, prefix, _, _ in fresh}
        )
        for slot, prefix, row, sample in fresh:
            tokens, logps = firsts[id(prefix)]
            if still(slot):
                yield from self._extend(
                    slot, tokens[row, sample : sample + 1], logps[row, sample : sample + 1]
                )
        result = jax.device_get(result)
        self.counters.slot_steps += int(result.counts.max()) * len(result.counts)
        self.counters.tokens += int(result.counts.sum())
        for slot in owners:
            first, count = given[slot], result.counts[slot]
            if not still(slot):
                self.counters.wasted += int(count)
            elif count > first:
                yield from self._extend(
                    slot, result.tokens[slot, first:count], result.logps[slot, first:count]
                )

    def _extend(self, slot: int, tokens: np.ndarray, logps: np.ndarray) -> Iterator[Sequence]:
        """Append what a call sampled; yield the sequence if that ended it."""
        sequence = self.owners[slot]
        start = len(sequence.tokens)
        sequence.tokens += tokens.tolist()
        sequence.logps += logps.tolist()
        sequence.versions += [self.version] * len(tokens)
        if (cut := self._stop_string(sequence, start)) is not None:
            del sequence.tokens[cut:], sequence.logps[cut:], sequence.versions[cut:]
        if cut is not None or sequence.tokens[-1] in self.engine.stop_ids:
            sequence.finish = "stop"
        elif len(sequence) >= sequence.limit:
            sequence.finish = "length"
        if sequence.finish:
            sequence.text = self._text(sequence)
            start = len(sequence.context) + sequence.start
            sequence.turns.append(Turn(start, len(sequence), sequence.text, sequence.finish))
            if len(sequence.turns) < self.settings.max_turns and self.replies is not NO_REPLIES:
                self.engine.placements[slot].is_paused = True
                self.waiting[slot] = self.owners.pop(slot), self.counters.calls
            else:
                sequence.over = True
                self._leave(slot)
            yield sequence

    def _stop_string(self, sequence: Sequence, start: int) -> int | None:
        """How many tokens the sequence keeps if a stop string completes at or after token `start`."""
        stops = (*self.settings.stop, *sequence.stop)
        longest = max(
            (len(stop.encode()) for stop in stops), default=0
        )  # a token is at least a byte
        window = max(sequence.start, start - longest)
        hit = lambda end: any(stop in self.decode(sequence.tokens[window:end]) for stop in stops)
        if not stops or not hit(len(sequence.tokens)):
            return None
        return next(end for end in range(start + 1, len(sequence.tokens) + 1) if hit(end))

    def _text(self, sequence: Sequence) -> str:
        """The response as text; a stop string at its end is cut from the text (never from the tokens) unless kept."""
        text = self.decode(sequence.tokens[sequence.start :])
        stops = () if self.settings.keep_stop else (*self.settings.stop, *sequence.stop)
        return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]
