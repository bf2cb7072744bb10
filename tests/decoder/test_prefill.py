"""Batches of prompts for a prefill: every group in one batch, in rows that are little longer."""

import numpy as np
import pytest
import test_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from jzero.decoder.prefill import (
    PREFILL_TOKENS,
    PrefillBatch,
    prefill_shape,
    prefill_width,
    take_prefill_batch,
)
from jzero.decoder.sequence import Groups, make_groups

SHARDS = {"one shard": (1, 1), "four shards": (4, 1)}
LONGEST = 4000


def engine_of(shards: str) -> test_engine.Engine:
    return test_engine.make(
        shape=SHARDS[shards], num_slots=8, page_size=16, max_prompt_tokens=LONGEST
    )


def batches_of(engine: test_engine.Engine, by_shard: list[Groups]) -> list[PrefillBatch]:
    batches = []
    while any(by_shard):
        batches.append(take_prefill_batch(engine, by_shard, 2, 1.0))
    return batches


def groups_of(lengths: list[int]) -> Groups:
    return make_groups([np.arange(1, length + 1) for length in lengths], 2, 8)


@settings(max_examples=60, deadline=None)
@given(
    shards=st.sampled_from(sorted(SHARDS)),
    lengths=st.lists(st.integers(1, LONGEST), min_size=1, max_size=40),
)
def test_every_group_is_in_one_batch_with_its_tokens(shards: str, lengths: list[int]) -> None:
    engine = engine_of(shards)
    groups = groups_of(lengths)
    by_shard = [groups[shard :: engine.num_shards] for shard in range(engine.num_shards)]
    place_of = {id(group): shard for shard, of in enumerate(by_shard) for group in of}

    found = []
    for batch in batches_of(engine, by_shard):
        rows, width = batch.padded_tokens.shape
        rows_per_shard = rows // engine.num_shards
        assert rows_per_shard * engine.num_shards == rows
        assert rows_per_shard & (rows_per_shard - 1) == 0
        assert rows_per_shard == 1 or rows * width <= PREFILL_TOKENS
        for item in batch.rows:
            found.append(id(item.group))
            assert place_of[id(item.group)] == item.shard == item.row // rows_per_shard
            tokens = item.group[0].tokens.ids
            length = batch.true_length[item.row]
            np.testing.assert_array_equal(batch.padded_tokens[item.row, :length], tokens)
            assert not batch.padded_tokens[item.row, length:].any()
            assert list(batch.requests[item.row]) == [each.request_id for each in item.group]
            # Pages are 16 tokens, and widths are at most half more.
            assert width < max(2 * 16, 1.5 * (length + 16))

    assert sorted(found) == sorted(place_of)


def test_prompts_of_gsm8k_are_padded_by_a_half_at_most() -> None:
    """All of them were as wide as the longest: 2.6 times their tokens."""
    engine = engine_of("one shard")
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(95), 0.35, 32).astype(int).tolist()

    batches = batches_of(engine, [groups_of(lengths)])

    padded = sum(batch.padded_tokens.size for batch in batches)
    assert padded < 1.5 * sum(lengths)
    width, _ = prefill_shape(engine, max(lengths))
    assert padded < 0.7 * width * len(lengths)
    assert len(batches) <= 10


@pytest.mark.parametrize(
    ("length", "width"), [(1, 16), (17, 32), (33, 48), (49, 64), (65, 96), (97, 128), (129, 192)]
)
def test_widths_are_powers_of_two_or_three_quarters_of_one(length: int, width: int) -> None:
    assert prefill_width(engine_of("one shard"), length) == width
