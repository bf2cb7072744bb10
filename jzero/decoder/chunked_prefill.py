"""Prefills sequences in chunks, into the pages of the slots in which they will decode.

A preempted sequence, or one whose next turn begins without a slot, returns with all of its tokens.
One prefill of them all would need memory for the longest episode, and one program for every such
width. Here the tokens go through the model one chunk at a time, as in `scoring.py`: the keys and
values of a chunk are written to pages, and the chunk attends to the pages before it. The last token
is the input of the first decode step, which samples the next token with the noise of that position.
The sequence therefore gets the same tokens as without the interruption.

A prompt whose beginning is in the prefix cache is placed in the same way: its first pages are the
cached ones, and chunks compute the rest.

Decoders with rings (`rings.py`) compute all tokens, because no slot has the ring of another one.
The pages that a sequence shares with its group in the other layers are not written again.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import jax
import numpy as np

from jzero.decoder.adapter_bank import BASE_MODEL, HeldAdapter, has_bank, row_adapters
from jzero.decoder.decode_state import DecodeState, Start
from jzero.decoder.engine import Engine, PageCopy, Placement, Samples
from jzero.decoder.pages import SCRATCH_PAGE
from jzero.decoder.prefill import prefill_width
from jzero.decoder.score_program import ScoreInputs
from jzero.decoder.sequence import Sequence
from jzero.model import qwen
from jzero.numerics.sizes import divide_up

# A cached prefix is used if the rest costs at most this share of a complete prefill, both counted
# in padded tokens. Chunks of a few rows use a device less well than a batch of prompts, and they
# read the cached pages: `benchmarks/prefix_cache.py --break-even` measures where the costs meet.
MOST_COMPUTED = 0.5
ROWS_FACTOR = 4  # numbers of rows in a call are powers of it, so that few programs are compiled


@dataclass(eq=False)
class Returning:
    """A sequence that was given a slot, and the number of its tokens with KV."""

    sequence: Sequence
    slot: int  # index among the slots of all shards
    first: int  # tokens with keys and values in shared pages, a multiple of the page size
    pages: list[int]  # of its shard, in the order of its tokens
    position: int  # tokens with keys and values after the calls dispatched so far

    @property
    def num_inputs(self) -> int:
        """Returns the number of tokens that chunks compute: all but the last."""
        return len(self.sequence) - 1

    @property
    def num_left(self) -> int:
        """Returns the number of tokens that further chunks compute."""
        return self.num_inputs - self.position


def is_for_chunks(engine: Engine, group: list[Sequence], samples: Samples) -> bool:
    """Returns whether a group of the queue is a single sequence to prefill in chunks."""
    if len(group) > 1 or not engine.can_prefill_in_chunks(samples):
        return False
    return len(group[0]) > engine.longest_prefill(samples)


def pays(engine: Engine, group: list[Sequence], num_cached: int) -> bool:
    """Returns whether a group should start from `num_cached` tokens in the prefix cache.

    The alternative is one prefill of all tokens, which serves all sequences of the group.
    """
    if not num_cached:
        return False
    num_inputs = len(group[0]) - 1
    page_size = engine.settings.page_size
    # The other sequences share the full pages of the first one and compute the tokens after them.
    num_computed = engine.extend_width(num_inputs - num_cached)
    num_computed += (len(group) - 1) * engine.extend_width(num_inputs % page_size)
    return num_computed <= MOST_COMPUTED * prefill_width(engine, len(group[0]))


def place(
    engine: Engine,
    sequence: Sequence,
    slot: int,
    version: int = 0,
    cached_pages: SequenceOf[int] = (),
) -> Returning:
    """Reserves a slot and the pages of a sequence. On OutOfPages nothing is reserved.

    version: the policy version of the weights.
    cached_pages: pages of the slot's shard that hold the beginning of the sequence.
    """
    # The last token is the input of the first decode step, so chunks write `len(sequence) - 1`
    # tokens.
    placement = Placement(
        slot=slot,
        prefix_row=0,
        sample_index=0,
        length=len(sequence) - 1,
        limit=sequence.length_limit,
        request=sequence.request_id,
        group=sequence.prompt_id,
        shared_tokens=min(len(sequence.prompt_tokens), len(sequence) - 1),
        filters=sequence.filters,
        adapter=sequence.adapter,
        version=version,
        owner=sequence.owner,
        beginning=sequence.tokens.ids,
    )
    to_write: list[PageCopy] = engine.place(placement, cached_pages)
    num_pages = divide_up(placement.length, engine.settings.page_size)
    first = (num_pages - len(to_write)) * engine.settings.page_size
    pages = engine.pages_of(engine.shard_of(slot), slot % engine.slots_per_shard)[:num_pages]
    position = 0 if engine.has_rings else first
    return Returning(sequence, slot, first, pages, position)


def prefill(
    engine: Engine,
    params: qwen.Params,
    state: DecodeState[jax.Array],
    returning: list[Returning],
    temperature: float,
    samples: Samples,
) -> DecodeState[jax.Array]:
    """Writes the missing keys and values of sequences, and starts the sequences.

    Sequences without their own temperature get `temperature`. A sequence may share pages that an
    earlier one of the list has to write.
    """
    by_shard: list[list[Returning]] = [[] for _ in range(engine.num_shards)]
    for item in returning:
        if item.num_left:
            by_shard[engine.shard_of(item.slot)].append(item)
    while any(by_shard):
        chunks = [take_ready(engine, items, samples) for items in by_shard]
        inputs = make_inputs(engine, chunks)
        if has_bank(params):
            inputs = inputs._replace(adapters=row_adapters(adapters_of(inputs, chunks)))
        state = engine.extend(params, state, inputs)
        width = inputs.tokens.shape[1]
        for items in chunks:
            for item in items:
                item.position = min(item.position + width, item.num_inputs)
        by_shard = [[item for item in items if item.num_left] for items in by_shard]
    starts = [make_start(item, temperature) for item in returning]
    return engine.start(state, starts, samples)


def take_ready(engine: Engine, items: list[Returning], samples: Samples) -> list[Returning]:
    """Returns the sequences of a shard whose next chunks one call computes.

    They have the width of the first sequence's chunk, and attend only to pages that are written.
    """
    if not items:
        return []
    page_size = engine.settings.page_size
    width = engine.extend_width(items[0].num_left)
    # A rollout that is trained on is computed in the same shapes with any others.
    most_rows = 1 if samples.is_trained else max(1, engine.score_tokens // width)
    ready: list[Returning] = []
    unwritten: set[int] = set()  # pages that earlier sequences of the list have to write
    for item in items:
        first_page = item.position // page_size
        has_width = engine.extend_width(item.num_left) == width
        if has_width and unwritten.isdisjoint(item.pages[:first_page]):
            ready.append(item)
        if len(ready) == most_rows:
            break
        unwritten.update(item.pages[first_page:])
    return ready


def make_inputs(engine: Engine, chunks: list[list[Returning]]) -> ScoreInputs[np.ndarray]:
    """Returns the arrays of a call, with the next chunk of the sequences of each shard."""
    page_size = engine.settings.page_size
    items = [item for shard_items in chunks for item in shard_items]
    width = max(engine.extend_width(item.num_left) for item in items)
    context_pages = engine.context_pages(max(item.position for item in items))
    rows_per_shard = 1
    while rows_per_shard < max(map(len, chunks)):
        rows_per_shard *= ROWS_FACTOR
    rows = engine.num_shards * rows_per_shard
    inputs = ScoreInputs(
        tokens=np.zeros((rows, width), np.int32),
        targets=None,
        temperature=None,
        starts=np.zeros(rows, np.int32),
        lengths=np.zeros(rows, np.int32),
        context_pages=np.full((rows, context_pages), SCRATCH_PAGE, np.int32),
        write_pages=np.full((rows, width // page_size), SCRATCH_PAGE, np.int32),
        row_rings=engine.unused_rings(rows),
    )
    for shard, shard_items in enumerate(chunks):
        for row, item in enumerate(shard_items, start=shard * rows_per_shard):
            start, end = item.position, min(item.position + width, item.num_inputs)
            inputs.tokens[row, : end - start] = item.sequence.tokens.ids[start:end]
            inputs.starts[row] = start
            inputs.lengths[row] = end - start
            first_page, end_page = start // page_size, divide_up(end, page_size)
            inputs.context_pages[row, :first_page] = item.pages[:first_page]
            # Without rings, chunks begin after the shared pages.
            first_own = max(first_page, item.first // page_size)
            own_pages = item.pages[first_own:end_page]
            inputs.write_pages[row, first_own - first_page : end_page - first_page] = own_pages
            if inputs.row_rings is not None:
                inputs.row_rings[row] = item.slot % engine.slots_per_shard
    return inputs


def adapters_of(
    inputs: ScoreInputs[np.ndarray], chunks: list[list[Returning]]
) -> list[HeldAdapter]:
    """Returns the adapter of every row of a call."""
    rows_per_shard = len(inputs.tokens) // len(chunks)
    held = [BASE_MODEL] * len(inputs.tokens)
    for shard, items in enumerate(chunks):
        for row, item in enumerate(items, start=shard * rows_per_shard):
            held[row] = item.sequence.adapter
    return held


def make_start(item: Returning, temperature: float) -> tuple[Start[int], float]:
    """Returns the start of a sequence's decoding, and its temperature."""
    sequence = item.sequence
    last = int(sequence.tokens.ids[-1])
    start = Start(
        slot=item.slot,
        token=last,
        position=item.num_inputs,
        limit=sequence.length_limit,
        request=sequence.request_id,
    )
    return start, sequence.temperature_or(temperature)
