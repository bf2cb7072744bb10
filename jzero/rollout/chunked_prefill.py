"""Prefills long sequences in chunks, into the pages of the slots in which they will decode.

A sequence that gave up its pages, or whose next turn begins without a slot, comes back with all of
its tokens. A prefill of all of them at once would take memory by the length of the longest episode,
and a program for every such width. Here the tokens go through the model a chunk at a time, as those
of `scoring.py` do: a chunk's keys and values go into pages, and it attends to the pages before it.
The last token is left to the first decode step, which samples what follows it with the noise of
that place. So the sequence has the tokens that it would have had.
"""

from dataclasses import dataclass

import jax
import numpy as np

from jzero.model import qwen
from jzero.rollout.decode_state import DecodeState, Start
from jzero.rollout.engine import Engine, PageCopy, Placement, divide_up
from jzero.rollout.pages import SCRATCH_PAGE
from jzero.rollout.score_program import ScoreInputs
from jzero.rollout.sequence import Sequence


@dataclass(frozen=True, eq=False)
class Returning:
    """A sequence that was given a slot, and what its pages lack."""

    sequence: Sequence
    slot: int  # among those of all shards
    first: int  # tokens whose keys and values its pages hold already, which are whole pages

    @property
    def num_inputs(self) -> int:
        """Returns the tokens that chunks compute: all but the last."""
        return len(self.sequence) - 1


def is_for_chunks(engine: Engine, group: list[Sequence]) -> bool:
    """Returns whether a group of the queue is one sequence that is prefilled in chunks."""
    return (
        engine.can_prefill_in_chunks and len(group) == 1 and len(group[0]) > engine.longest_prefill
    )


def place(engine: Engine, sequence: Sequence, slot: int) -> Returning:
    """Takes a slot and the pages of a sequence. Raises OutOfPages, and then nothing was taken."""
    placement = Placement(
        slot=slot,
        prefix_row=0,
        sample_index=0,
        length=len(sequence) - 1,
        limit=sequence.length_limit,
        request=sequence.request_id,
        group=sequence.prompt_id,
        shared_tokens=min(len(sequence.prompt_tokens), len(sequence) - 1),
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
) -> DecodeState[jax.Array]:
    """Writes what the pages of sequences lack, and starts the sequences.

    One sequence of each shard is computed at a time: a sequence may share pages that the one before
    it has written. Sequences without a temperature of their own get `temperature`.
    """
    by_shard: list[list[Returning]] = [[] for _ in range(engine.num_shards)]
    for item in returning:
        by_shard[engine.shard_of(item.slot)].append(item)
    chunks_of_shard = [
        [chunk for item in items for chunk in chunks_of(engine, item)] for items in by_shard
    ]
    for number in range(max(map(len, chunks_of_shard))):
        chunks = [chunks[number : number + 1] for chunks in chunks_of_shard]
        state = engine.extend(params, state, inputs_of(engine, chunks))
    return engine.start(state, [start_of(item, temperature) for item in returning])


def chunks_of(engine: Engine, item: Returning) -> list[tuple[Returning, int, int]]:
    """Returns the chunks of a sequence: itself, and where each begins and ends."""
    width = engine.chunk_width
    starts = range(item.first, item.num_inputs, width)
    return [(item, start, min(start + width, item.num_inputs)) for start in starts]


def inputs_of(
    engine: Engine, chunks: list[list[tuple[Returning, int, int]]]
) -> ScoreInputs[np.ndarray]:
    """Returns the arrays of a call: of each shard one chunk, or padding."""
    page_size, width = engine.settings.page_size, engine.chunk_width
    most_context = max(start for of_shard in chunks for _, start, _ in of_shard)
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
    for shard, of_shard in enumerate(chunks):
        for item, start, end in of_shard:
            inputs.tokens[shard, : end - start] = item.sequence.all_tokens()[start:end]
            inputs.starts[shard] = start
            inputs.lengths[shard] = end - start
            pages = engine.pages_of(shard, item.slot % engine.slots_per_shard)
            first_page, end_page = start // page_size, divide_up(end, page_size)
            inputs.context_pages[shard, :first_page] = pages[:first_page]
            inputs.write_pages[shard, : end_page - first_page] = pages[first_page:end_page]
    return inputs


def start_of(item: Returning, temperature: float) -> tuple[Start[int], float]:
    """Returns where a sequence goes on, and at which temperature."""
    sequence = item.sequence
    last = int(sequence.all_tokens()[-1])
    begun = Start(
        slot=item.slot,
        token=last,
        position=item.num_inputs,
        limit=sequence.length_limit,
        request=sequence.request_id,
    )
    return begun, sequence.temperature_or(temperature)
