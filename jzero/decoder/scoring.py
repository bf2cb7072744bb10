"""Scores given token sequences next to decoding ones: decides which chunks go into which call.

    scoring = Scoring(tokens, first=len(prompt), alternatives=5)
    scheduler.scorer.submit(scoring)     # `scoring.scores` is complete once `scoring.is_finished`
    score_all(engine, params, scorings)  # the same with an engine that decodes nothing

A sequence reserves all of its pages at once, and every call scores one chunk of its tokens. It
therefore always finishes, however few pages there are. While the first sequence of the queue lacks
pages, the scheduler places no sequence in a slot.

Prefix sharing: a sequence reuses pages that already hold its beginning, computed with the same
weights. They belong to sequences in slots, or to sequences that were scored before, which keep
their pages until the space is needed. Sequences with a common beginning compute it once, except for
tokens with requested scores. Models with recurrent layers (`slot_state.py`) share nothing, because
pages do not hold their states, and neither do decoders with rings (`rings.py`).
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import jax
import numpy as np
from jaxtyping import Float32, Int32

from jzero.decoder.adapter_bank import BASE_MODEL, HeldAdapter, has_bank, row_adapters
from jzero.decoder.decode_state import DecodeState
from jzero.decoder.engine import Engine
from jzero.decoder.pages import SCRATCH_PAGE, OutOfPages
from jzero.decoder.score_program import (
    ALTERNATIVES,
    MAX_ALTERNATIVES,
    Draws,
    ScoreInputs,
    TokenScores,
)
from jzero.decoder.sequence import DecodeCounters, Sequence
from jzero.hosts import collectives
from jzero.model import qwen
from jzero.model.delta_net import DeltaState
from jzero.numerics.sizes import divide_up, power_of_two


@dataclass(eq=False)
class Scoring:
    """A sequence whose tokens are scored from `first` on, and their scores.

    Raises ValueError if `first` is 0, because no token predicts the first token of a sequence, or
    if there are more alternatives than the engine returns.
    """

    tokens: Int32[np.ndarray, " tokens"]
    first: int = 1  # the first token to score
    alternatives: int = 0  # number of most probable tokens to return for each scored token
    temperature: float = 1.0  # at which the tokens are scored; above 0
    # Tokens before this one are scored at temperature 1.
    temperature_from: int = 0
    adapter: HeldAdapter = BASE_MODEL  # its weights, if the engine's have an adapter bank
    owner: str = ""  # see `Sequence.owner`
    # Other tokens that are scored at temperature 1 in the place of each token from `first` on; -1
    # is padding.
    given: Int32[np.ndarray, "scored K"] | None = None
    # Draws in the place of each token from `first` on: a number in [0, 1) for each.
    uniforms: Float32[np.ndarray, "scored n"] | None = None
    draw_temperature: float = 1.0  # 0: the most probable token
    scores: TokenScores[np.ndarray] = field(init=False)  # one row, for tokens[first:]
    num_scored: int = 0  # number of tokens from `first` on with scores

    def __post_init__(self) -> None:
        if self.first < 1:
            raise ValueError(f"first={self.first}: the first token of a sequence has no score")
        if not 0 <= self.alternatives <= MAX_ALTERNATIVES:
            raise ValueError(
                f"alternatives={self.alternatives}: give a number from 0 to {MAX_ALTERNATIVES}"
            )
        count = max(0, len(self.tokens) - self.first)
        self.scores = TokenScores(
            logps=np.zeros(count, np.float32),
            ranks=np.zeros(count, np.int32),
            top_tokens=np.zeros((count, self.alternatives), np.int32),
            top_logps=np.zeros((count, self.alternatives), np.float32),
            given_logps=zeros_like(self.given, np.float32),
            drawn_tokens=zeros_like(self.uniforms, np.int32),
            drawn_logps=zeros_like(self.uniforms, np.float32),
        )
        for more in (self.given, self.uniforms):
            assert more is None or len(more) == count, f"{len(more)=} {count=}"

    @property
    def is_finished(self) -> bool:
        """Whether all scores have been computed."""
        return self.num_scored == len(self.scores.logps)

    def temperatures(self, start: int, end: int) -> Float32[np.ndarray, " targets"]:
        """Returns the temperatures of tokens start..end."""
        positions = np.arange(start, end)
        return np.where(positions < self.temperature_from, 1.0, self.temperature).astype(np.float32)


def zeros_like(array: np.ndarray | None, dtype: type) -> np.ndarray | None:
    """Returns zeros in the shape of an array, or None."""
    return None if array is None else np.zeros(array.shape, dtype)


def wider(scorings: Iterable[Scoring], name: str) -> int:
    """Returns the columns that a call needs for a field of its scorings; 0: none has it."""
    arrays = [array for scoring in scorings if (array := getattr(scoring, name)) is not None]
    # Powers of two keep compilations few.
    most = max((array.shape[1] for array in arrays), default=0)
    return power_of_two(most) if most else 0


@dataclass(eq=False)
class ScoredRow:
    """A sequence in one of a shard's rows of pages for scoring."""

    scoring: Scoring
    shard: int
    row: int  # index among the shard's rows for scoring
    position: int  # tokens whose keys and values the calls dispatched so far write
    has_ended: bool = False  # all chunks were dispatched; the pages are kept for prefix sharing

    @property
    def num_inputs(self) -> int:
        """Returns the number of tokens to compute: the last token predicts no other."""
        return len(self.scoring.tokens) - 1


def running(rows: Iterable[ScoredRow]) -> list[ScoredRow]:
    """Returns the rows that have chunks left to dispatch."""
    return [row for row in rows if not row.has_ended]


@dataclass(frozen=True)
class Part:
    """One sequence's chunk in a call."""

    scoring: Scoring
    row: int  # row in the call's arrays
    start: int  # the chunk's tokens
    end: int

    @property
    def scored(self) -> tuple[slice, slice]:
        """Returns the columns of the call with requested scores, and their places in the scores."""
        # The chunk's token t scores token t + 1. Tokens before `first` have no requested score.
        first = self.scoring.first
        begin = max(self.start + 1, first)
        end = max(self.end + 1, begin)
        return (
            slice(begin - 1 - self.start, end - 1 - self.start),
            slice(begin - first, end - first),
        )


@dataclass(frozen=True, eq=False)
class ScoreCall:
    """A call that was dispatched and not yet read."""

    scores: TokenScores[jax.Array]
    parts: list[Part]


class Scorer:
    """Tracks the sequences that one engine scores, and the pages that they hold."""

    def __init__(self, engine: Engine, params: qwen.Params, counters: DecodeCounters) -> None:
        """`params` are the engine's weights. Work is added to `counters`."""
        self.engine = engine
        self.params = params
        self.counters = counters
        self.queue: deque[Scoring] = deque()
        # By shard, in the order of their last use: running sequences, and ended ones that keep
        # pages.
        self.rows: list[list[ScoredRow]] = [[] for _ in range(engine.num_shards)]
        self.in_flight: deque[ScoreCall] = deque()
        self.finished: list[Scoring] = []
        # Whether the first sequence of the queue lacked pages at the last attempt
        self.lacks_pages = False
        # The recurrent states of the rows (`slot_state.py`), created at the first call.
        self.row_states: DeltaState | None = None

    def submit(self, scoring: Scoring) -> None:
        """Queues a sequence. Its length limit is rollout.max_prompt_tokens + max_new_tokens."""
        room = self.engine.max_sequence_tokens
        assert len(scoring.tokens) <= room, f"{len(scoring.tokens)=} tokens exceed {room=}"
        if scoring.is_finished:
            self.finished.append(scoring)
        else:
            self.queue.append(scoring)

    @property
    def is_busy(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.queue or self.in_flight or any(self._running()))

    @property
    def is_out_of_pages(self) -> bool:
        """Whether the first sequence of the queue waits for pages."""
        return self.lacks_pages and bool(self.queue)

    def take_finished(self) -> list[Scoring]:
        """Returns the sequences that finished since the last call."""
        finished = self.finished
        self.finished = []
        return finished

    def step(
        self,
        state: DecodeState[jax.Array],
        in_slots: Mapping[int, Sequence],
        make_room: Callable[[int], bool],
    ) -> DecodeState[jax.Array]:
        """Dispatches one call, and reads the call before it.

        Args:
            in_slots: the sequences in slots, whose pages may be shared.
            make_room: frees pages of a shard that are not needed at the moment; returns whether it
                did.
        """
        self._begin(in_slots, make_room)
        has_more = any(self._running())
        if has_more:
            state = self._dispatch(state)
        # With another call dispatched, one call stays in flight, so that the device never waits.
        while len(self.in_flight) > has_more:
            self._read(self.in_flight.popleft())
        return state

    def give_up_pages(self, shard: int) -> bool:
        """Frees the pages of the least recently used ended sequence, if any. Returns whether."""
        for row in self.rows[shard]:
            if row.has_ended:
                self._free(row)
                return True
        return False

    def give_up_all_pages(self) -> None:
        """Frees the pages of all ended sequences."""
        for shard in range(self.engine.num_shards):
            while self.give_up_pages(shard):
                pass

    def drop(self, unwanted: list[Scoring]) -> list[Scoring]:
        """Removes the unwanted sequences that have not started from the queue, and returns them."""
        dropped = [scoring for scoring in unwanted if scoring in self.queue]
        for scoring in dropped:
            self.queue.remove(scoring)
        return dropped

    def cancel(self) -> None:
        """Drops all sequences and frees all pages."""
        self.queue.clear()
        self.in_flight.clear()
        self.finished.clear()
        self.lacks_pages = False
        self.row_states = None
        for rows in self.rows:
            for row in rows.copy():
                self._free(row)

    # -- pages -------------------------------------------------------------------------------------

    def _running(self) -> Iterable[ScoredRow]:
        return itertools.chain.from_iterable(map(running, self.rows))

    def _begin(self, in_slots: Mapping[int, Sequence], make_room: Callable[[int], bool]) -> None:
        """Assigns rows and pages to the next sequences of the queue."""
        postponed: list[Scoring] = []
        self.lacks_pages = False
        while self.queue and not self.lacks_pages:
            scoring = self.queue[0]
            # Free a row before looking for pages to share: this may evict an ended sequence.
            for shard in range(self.engine.num_shards):
                if self._free_row(shard) is None:
                    self.give_up_pages(shard)
            shard, shared_pages, will_grow = self._find_pages(scoring, in_slots)
            if will_grow:
                postponed.append(self.queue.popleft())
                continue
            row = self._free_row(shard)
            if row is None:
                break  # all rows are running
            try:
                self._reserve(scoring, shard, row, shared_pages, make_room)
            except OutOfPages:
                self.lacks_pages = True
            else:
                self.queue.popleft()
        # extendleft reverses the order.
        self.queue.extendleft(reversed(postponed))

    def _find_pages(
        self, scoring: Scoring, in_slots: Mapping[int, Sequence]
    ) -> tuple[int, list[int], bool]:
        """Returns a shard, its pages that the sequence can share, and whether to wait.

        The sequence waits if a running one will soon have more of its pages.
        """
        engine = self.engine
        page_size = engine.settings.page_size
        # The token before `first` is computed, because its output gives the score of `first`.
        most_pages = (scoring.first - 1) // page_size

        def count_pages(other: Sequence | Scoring, tokens: Int32[np.ndarray, " tokens"]) -> int:
            # Other weights compute other keys and values from the same tokens, and the pages of
            # another owner are not shared.
            if (other.adapter, other.owner) != (scoring.adapter, scoring.owner):
                return 0
            return min(most_pages, count_common(scoring.tokens, tokens) // page_size)

        num_running = [len(running(rows)) for rows in self.rows]
        shard, best = int(np.argmin(num_running)), []
        # Pages without the recurrent state at their end cannot be shared, nor those of a ring.
        if not most_pages or engine.has_slot_state or engine.has_rings:
            return shard, best, False
        for slot, sequence in in_slots.items():
            # A prefill has written the prompt. The tokens after it may belong to a reply, which
            # later calls will write.
            count = count_pages(sequence, sequence.prompt_tokens)
            if count > len(best):
                shard = engine.shard_of(slot)
                best = engine.pages_of(shard, slot % engine.slots_per_shard)[:count]
        most_coming = 0
        used: ScoredRow | None = None
        for row in itertools.chain.from_iterable(self.rows):
            tokens = row.scoring.tokens
            if (count := count_pages(row.scoring, tokens[: row.position])) > len(best):
                used, shard = row, row.shard
                best = engine.pages_of(shard, engine.slots_per_shard + row.row)[:count]
            if not row.has_ended:
                most_coming = max(most_coming, count_pages(row.scoring, tokens[: row.num_inputs]))
        if used is not None and used.has_ended:
            self.rows[shard].remove(used)
            self.rows[shard].append(used)  # the rows are in the order of their last use
        return shard, best, most_coming > len(best)

    def _free_row(self, shard: int) -> int | None:
        """Returns an unused row of a shard, or None."""
        taken = {row.row for row in self.rows[shard]}
        return next((row for row in range(self.engine.scoring_rows) if row not in taken), None)

    def _reserve(
        self,
        scoring: Scoring,
        shard: int,
        row: int,
        shared_pages: list[int],
        make_room: Callable[[int], bool],
    ) -> None:
        """Reserves the pages of a sequence for all of its chunks. Raises OutOfPages."""
        allocator = self.engine.page_allocators[shard]
        page_row = self.engine.slots_per_shard + row
        # Hold the shared pages first: making room below could free them otherwise.
        allocator.reserve(page_row, len(shared_pages) * allocator.page_size, shared_pages)
        while True:
            try:
                allocator.reserve(page_row, len(scoring.tokens) - 1)
            except OutOfPages:
                if self.give_up_pages(shard) or make_room(shard):
                    continue
                allocator.release(page_row)
                raise
            break
        position = len(shared_pages) * allocator.page_size
        self.counters.shared_tokens += position
        self.rows[shard].append(ScoredRow(scoring, shard, row, position))

    def _free(self, row: ScoredRow) -> None:
        self.rows[row.shard].remove(row)
        page_row = self.engine.slots_per_shard + row.row
        self.engine.page_allocators[row.shard].release(page_row)

    # -- calls -------------------------------------------------------------------------------------

    def _dispatch(self, state: DecodeState[jax.Array]) -> DecodeState[jax.Array]:
        """Dispatches the call of the next chunks, and starts copying its scores to the host."""
        inputs, parts = self._take_chunks()
        # Few numbers of alternatives are compiled: take the smallest that is enough for every part.
        most_alternatives = max(part.scoring.alternatives for part in parts)
        alternatives = next(number for number in ALTERNATIVES if number >= most_alternatives)
        if self.row_states is None:
            self.row_states = self.engine.empty_row_states()
        state, self.row_states, scores = self.engine.score(
            self.params, state, self.row_states, inputs, alternatives
        )
        collectives.start_fetch(scores)
        self.in_flight.append(ScoreCall(scores, parts))
        self.counters.score_calls += 1
        self.counters.scored_tokens += sum(part.end - part.start for part in parts)
        return state

    def _take_chunks(self) -> tuple[ScoreInputs[np.ndarray], list[Part]]:
        """Returns the next chunk of the sequences of every shard, as the arrays of a call."""
        engine = self.engine
        page_size = engine.settings.page_size
        by_shard = list(map(running, self.rows))
        # The first sequence of a shard decides the chunk width; as many others as fit join the
        # call.
        width = max(self._chunk_width(rows[0]) for rows in by_shard if rows)
        most_rows = max(1, engine.score_tokens // width)
        by_shard = [rows[:most_rows] for rows in by_shard]
        rows_per_shard = power_of_two(max(len(rows) for rows in by_shard))
        most_context = max(row.position for row in itertools.chain.from_iterable(by_shard))

        num_rows = engine.num_shards * rows_per_shard
        context_pages = engine.context_pages(most_context)
        inputs = ScoreInputs(
            tokens=np.zeros((num_rows, width), np.int32),
            targets=np.zeros((num_rows, width), np.int32),
            temperature=np.zeros((num_rows, width), np.float32),
            starts=np.zeros(num_rows, np.int32),
            lengths=np.zeros(num_rows, np.int32),
            context_pages=np.full((num_rows, context_pages), SCRATCH_PAGE, np.int32),
            write_pages=np.full((num_rows, width // page_size), SCRATCH_PAGE, np.int32),
            state_rows=(
                np.full(num_rows, engine.scoring_rows, np.int32) if engine.has_slot_state else None
            ),
            row_rings=engine.unused_rings(num_rows),
        )
        scorings = [row.scoring for row in itertools.chain.from_iterable(by_shard)]
        if num_given := wider(scorings, "given"):
            inputs = inputs._replace(given=np.full((num_rows, width, num_given), -1, np.int32))
        if num_draws := wider(scorings, "uniforms"):
            draws = Draws(
                uniforms=np.zeros((num_rows, width, num_draws), np.float32),
                temperature=np.zeros((num_rows, width), np.float32),
            )
            inputs = inputs._replace(draws=draws)
        assert inputs.targets is not None and inputs.temperature is not None
        parts = []
        held = [BASE_MODEL] * num_rows
        for shard, rows in enumerate(by_shard):
            for i, row in enumerate(rows, start=shard * rows_per_shard):
                start, end = row.position, min(row.position + width, row.num_inputs)
                tokens = row.scoring.tokens
                inputs.tokens[i, : end - start] = tokens[start:end]
                inputs.targets[i, : end - start] = tokens[start + 1 : end + 1]
                inputs.temperature[i, : end - start] = row.scoring.temperatures(start + 1, end + 1)
                fill_more(inputs, i, Part(row.scoring, i, start, end))
                inputs.starts[i] = start
                inputs.lengths[i] = end - start
                pages = engine.pages_of(shard, engine.slots_per_shard + row.row)
                first_page, end_page = start // page_size, divide_up(end, page_size)
                inputs.context_pages[i, :first_page] = pages[:first_page]
                inputs.write_pages[i, : end_page - first_page] = pages[first_page:end_page]
                if inputs.state_rows is not None:
                    inputs.state_rows[i] = row.row
                if inputs.row_rings is not None:
                    inputs.row_rings[i] = engine.slots_per_shard + row.row
                parts.append(Part(row.scoring, i, start, end))
                held[i] = row.scoring.adapter
                row.position = end
                row.has_ended = end == row.num_inputs
        if has_bank(self.params):
            inputs = inputs._replace(adapters=row_adapters(held))
        return inputs, parts

    def _chunk_width(self, row: ScoredRow) -> int:
        return self.engine.score_width(row.num_inputs - row.position)

    def _read(self, call: ScoreCall) -> None:
        """Waits for a call, and stores its scores in their sequences."""
        scores = jax.device_get(call.scores)
        for part in call.parts:
            scoring = part.scoring
            source, target = part.scored
            if target.start >= target.stop:
                continue
            scoring.scores.logps[target] = scores.logps[part.row, source]
            scoring.scores.ranks[target] = scores.ranks[part.row, source]
            kept = (part.row, source, slice(scoring.alternatives))
            scoring.scores.top_tokens[target] = scores.top_tokens[kept]
            scoring.scores.top_logps[target] = scores.top_logps[kept]
            copy_columns(scoring.scores.given_logps, target, scores.given_logps, part.row, source)
            copy_columns(scoring.scores.drawn_tokens, target, scores.drawn_tokens, part.row, source)
            copy_columns(scoring.scores.drawn_logps, target, scores.drawn_logps, part.row, source)
            scoring.num_scored += target.stop - target.start
            if scoring.is_finished:
                self.finished.append(scoring)


def fill_more(inputs: ScoreInputs[np.ndarray], row: int, part: Part) -> None:
    """Writes the given tokens and the draws of a chunk into a row of a call."""
    scoring = part.scoring
    columns, places = part.scored
    if scoring.given is not None:
        assert inputs.given is not None
        inputs.given[row, columns, : scoring.given.shape[1]] = scoring.given[places]
    if scoring.uniforms is not None:
        draws = inputs.draws
        draws.uniforms[row, columns, : scoring.uniforms.shape[1]] = scoring.uniforms[places]
        draws.temperature[row, columns] = scoring.draw_temperature


def copy_columns(
    target: np.ndarray | None,
    places: slice,
    source: np.ndarray | None,
    row: int,
    columns: slice,
) -> None:
    """Copies the results of a chunk [columns, n] from a row of a call, if they are wanted."""
    if target is not None:
        assert source is not None
        target[places] = source[row, columns, : target.shape[1]]


def count_common(left: Int32[np.ndarray, " a"], right: Int32[np.ndarray, " b"]) -> int:
    """Returns the length of the common beginning of two sequences."""
    length = min(len(left), len(right))
    differs = np.flatnonzero(left[:length] != right[:length])
    return int(differs[0]) if len(differs) else length


def score_all(engine: Engine, params: qwen.Params, scorings: list[Scoring]) -> DecodeCounters:
    """Scores sequences with an engine that decodes nothing. Returns the counters."""
    assert not engine.placements, "the engine is busy: an unfinished run was not cancelled"
    counters = DecodeCounters()
    scorer = Scorer(engine, params, counters)
    for scoring in scorings:
        scorer.submit(scoring)
    state = engine.init_decode_state()
    try:
        while scorer.is_busy:
            state = scorer.step(state, {}, no_room)
    finally:
        scorer.cancel()
    return counters


def no_room(shard: int) -> bool:
    """The `make_room` of an engine that decodes nothing."""
    return False
