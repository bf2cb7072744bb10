"""Batches prompts for the engine's prefill: selects the groups of a batch, and pads their arrays.

A batch has prompts of similar length. Few widths and numbers of rows are in use, so that few
programs are compiled; for questions of GSM8K, 32 at once, the padded tokens are 1.3 to 1.6 times
the prompts' own.
"""

import itertools
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int32

from jzero.decoder.adapter_bank import BASE_MODEL, HeldAdapter
from jzero.decoder.engine import Engine
from jzero.decoder.sampling import Filters
from jzero.decoder.sequence import Groups, Sequence
from jzero.numerics.sizes import divide_up, power_of_two

# Bounds the memory of a prefill. A single longer prompt is still prefilled at once.
PREFILL_TOKENS = 8192  # padded prompt tokens of one prefill call, over all shards


def prefill_shape(engine: Engine, longest: int) -> tuple[int, int]:
    """Returns the largest padded width of a prefill, and its maximum number of rows per shard.

    `longest` is the number of tokens in its longest row. Batches of prompts may be a quarter
    narrower (`prefill_width`).
    """
    page_size = engine.settings.page_size
    num_pages = power_of_two(divide_up(longest, page_size))
    width = min(num_pages * page_size, engine.max_prefill_length)
    return width, most_rows(engine, width)


def prefill_width(engine: Engine, length: int) -> int:
    """Returns the padded width of prompts like one of `length` tokens.

    The pages of a row are a power of two, or three quarters of one.
    """
    page_size = engine.settings.page_size
    num_pages = divide_up(length, page_size)
    padded_pages = power_of_two(num_pages)
    if padded_pages >= 4 and num_pages <= padded_pages * 3 // 4:
        padded_pages = padded_pages * 3 // 4
    return min(padded_pages * page_size, engine.max_prefill_length)


def most_rows(engine: Engine, width: int) -> int:
    """Returns the maximum number of rows per shard."""
    return max(1, PREFILL_TOKENS // (width * engine.num_shards))


def prefill_shapes(engine: Engine) -> list[tuple[int, int]]:
    """Returns (rows per shard, tokens per row) of the largest prefill of every width."""
    # Widths go up to a complete episode, because a preempted sequence is prefilled with all of its
    # tokens, unless `chunked_prefill.py` prefills it in chunks.
    longest = max(engine.longest_prefill(), 2)
    shapes = {prefill_shape(engine, length) for length in range(1, longest)}
    most_rows = power_of_two(engine.slots_per_shard)
    return [(min(power_of_two(rows), most_rows), width) for width, rows in sorted(shapes)]


@dataclass(frozen=True)
class PrefillRow:
    """One row of a prefill: the tokens that all sequences of a group share."""

    shard: int
    row: int  # index over all shards
    group: list[Sequence]


@dataclass(frozen=True)
class PrefillBatch:
    """The arrays of one `Engine.prefill_multisampling`, and the groups of their rows."""

    rows: list[PrefillRow]
    padded_tokens: Int32[np.ndarray, "rows width"]
    true_length: Int32[np.ndarray, " rows"]  # 1 in padding rows
    requests: Int32[np.ndarray, "rows group_size"]
    temperature: Float32[np.ndarray, " rows"]
    filters: list[Filters | None]  # of the rows; None: the engine's
    adapters: list[HeldAdapter]  # of the rows


def take_prefill_batch(
    engine: Engine, groups_by_shard: list[Groups], group_size: int, temperature: float
) -> PrefillBatch:
    """Moves groups with the width of the first one from every shard's list into one batch.

    `requests` is `group_size` wide. If `group_size` is 0, it is as wide as the largest group of the
    batch, rounded up to a power of two. Sequences without their own temperature get `temperature`.
    """
    first_in_line = next(groups[0][0] for groups in groups_by_shard if groups)
    width = prefill_width(engine, len(first_in_line))
    same_width = [
        [group for group in groups if prefill_width(engine, len(group[0])) == width]
        for groups in groups_by_shard
    ]
    rows_per_shard = _number_of_rows(max(map(len, same_width)), most_rows(engine, width))
    taken = [groups[:rows_per_shard] for groups in same_width]
    for groups, batched in zip(groups_by_shard, taken, strict=True):
        is_taken = set(map(id, batched))
        groups[:] = [group for group in groups if id(group) not in is_taken]
    num_rows = engine.num_shards * rows_per_shard
    if not group_size:
        largest = max(map(len, itertools.chain.from_iterable(taken)))
        group_size = power_of_two(largest)
    # Smaller groups, such as a preempted sequence, are padded to group_size: one shape serves all.
    batch = PrefillBatch(
        rows=[],
        padded_tokens=np.zeros((num_rows, width), np.int32),
        true_length=np.ones(num_rows, np.int32),
        requests=np.zeros((num_rows, group_size), np.int32),
        temperature=np.zeros(num_rows, np.float32),
        filters=[None] * num_rows,
        adapters=[BASE_MODEL] * num_rows,
    )
    for shard, groups in enumerate(taken):
        for row, group in enumerate(groups, start=shard * rows_per_shard):
            first = group[0]
            tokens = first.tokens.ids
            batch.rows.append(PrefillRow(shard, row, group))
            batch.padded_tokens[row, : len(tokens)] = tokens
            batch.true_length[row] = len(tokens)
            request_ids = [sequence.request_id for sequence in group]
            batch.requests[row, : len(group)] = request_ids
            batch.filters[row] = first.filters
            batch.adapters[row] = first.adapter
            batch.temperature[row] = first.temperature_or(temperature)
    return batch


def _number_of_rows(num_groups: int, most: int) -> int:
    """Returns the rows of the next batch: a power of two of which at least three quarters are used.

    The groups that do not fit wait for the following batch.
    """
    wanted = min(num_groups, most)
    rows = power_of_two(wanted)
    is_filled = wanted >= rows * 3 // 4 and rows <= most
    return rows if is_filled else rows // 2
