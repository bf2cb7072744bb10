"""Prefills long sequences in chunks, into the pages of the slots in which they will decode.

A preempted sequence, or one whose next turn begins without a slot, returns with all of its tokens.
One prefill of them all would need memory for the longest episode, and one program for every such
width. Here the tokens go through the model one chunk at a time, as in `scoring.py`: the keys and
values of a chunk are written to pages, and the chunk attends to the pages before it. The last token
is the input of the first decode step, which samples the next token with the noise of that position.
The sequence therefore gets the same tokens as without the interruption.
"""

import itertools
from dataclasses import dataclass

import jax
import numpy as np

from jzero.decoder.adapter_bank import BASE_MODEL, has_bank, row_adapters
from jzero.decoder.decode_state import DecodeState, Start
from jzero.decoder.engine import Engine, PageCopy, Placement, Samples
from jzero.decoder.pages import SCRATCH_PAGE
from jzero.decoder.score_program import ScoreInputs
from jzero.decoder.sequence import Sequence
from jzero.model import qwen
from jzero.numerics.sizes import divide_up


@dataclass(frozen=True, eq=False)
class Returning:
    """A sequence that was given a slot, and the number of its tokens with KV."""

    sequence: Sequence
    slot: int  # index among the slots of all shards
    first: int  # tokens with keys and values in shared pages, a multiple of the page size

    @property
    def num_inputs(self) -> int:
        """Returns the number of tokens that chunks compute: all but the last."""
        return len(self.sequence) - 1


def is_for_chunks(engine: Engine, group: list[Sequence], samples: Samples) -> bool:
    """Returns whether a group of the queue is a single sequence to prefill in chunks."""
    if len(group) > 1 or not engine.can_prefill_in_chunks(samples):
        return False
    return len(group[0]) > engine.longest_prefill(samples)


def place(engine: Engine, sequence: Sequence, slot: int) -> Returning:
    """Reserves a slot and the pages of a sequence. On OutOfPages nothing is reserved."""
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
        beginning=sequence.tokens.ids,
    )
    to_write: list[PageCopy] = engine.place(placement)
    num_pages = divide_up(placement.length, engine.settings.page_size)
    num_shared = num_pages - len(to_write)
    return Returning(sequence, slot, num_shared * engine.settings.page_size)


def prefill(
    engine: Engine,
    params: qwen.Params,
    state: DecodeState[jax.Array],
    returning: list[Returning],
    temperature: float,
    samples: Samples,
) -> DecodeState[jax.Array]:
    """Writes the missing keys and values of sequences, and starts the sequences.

    Sequences without their own temperature get `temperature`.
    """
    by_shard: list[list[Returning]] = [[] for _ in range(engine.num_shards)]
    for item in returning:
        by_shard[engine.shard_of(item.slot)].append(item)
    chunks_of_shard: list[list[tuple[Returning, int, int]]] = []
    for items in by_shard:
        chunks = (split_into_chunks(engine, item) for item in items)
        chunks_of_shard.append(list(itertools.chain.from_iterable(chunks)))
    # Each shard computes one sequence at a time: a sequence may share pages that the previous one
    # has written.
    for number in range(max(map(len, chunks_of_shard))):
        next_chunks = [chunks[number : number + 1] for chunks in chunks_of_shard]
        inputs = make_inputs(engine, next_chunks)
        if has_bank(params):
            held = [
                chunks[0][0].sequence.adapter if chunks else BASE_MODEL for chunks in next_chunks
            ]
            inputs = inputs._replace(adapters=row_adapters(held))
        state = engine.extend(params, state, inputs)
    starts = [make_start(item, temperature) for item in returning]
    return engine.start(state, starts, samples)


def split_into_chunks(engine: Engine, item: Returning) -> list[tuple[Returning, int, int]]:
    """Returns the chunks of a sequence, each as (sequence, start, end)."""
    width = engine.chunk_width
    starts = range(item.first, item.num_inputs, width)
    return [(item, start, min(start + width, item.num_inputs)) for start in starts]


def make_inputs(
    engine: Engine, chunks: list[list[tuple[Returning, int, int]]]
) -> ScoreInputs[np.ndarray]:
    """Returns the arrays of a call, with one chunk or padding for each shard."""
    page_size, width = engine.settings.page_size, engine.chunk_width
    most_context = max(start for _, start, _ in itertools.chain.from_iterable(chunks))
    shards, context_pages = engine.num_shards, engine.context_pages(most_context)
    inputs = ScoreInputs(
        tokens=np.zeros((shards, width), np.int32),
        targets=None,
        temperature=None,
        starts=np.zeros(shards, np.int32),
        lengths=np.zeros(shards, np.int32),
        context_pages=np.full((shards, context_pages), SCRATCH_PAGE, np.int32),
        write_pages=np.full((shards, width // page_size), SCRATCH_PAGE, np.int32),
    )
    for shard, shard_chunks in enumerate(chunks):
        for item, start, end in shard_chunks:
            inputs.tokens[shard, : end - start] = item.sequence.tokens.ids[start:end]
            inputs.starts[shard] = start
            inputs.lengths[shard] = end - start
            pages = engine.pages_of(shard, item.slot % engine.slots_per_shard)
            first_page, end_page = start // page_size, divide_up(end, page_size)
            inputs.context_pages[shard, :first_page] = pages[:first_page]
            inputs.write_pages[shard, : end_page - first_page] = pages[first_page:end_page]
    return inputs


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
