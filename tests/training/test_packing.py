"""Packing: every input of every item is somewhere exactly once, with its own target, weight, advantage and position."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jzero.training.packing import TrainingSequence, best_fit, make_layouts, pack
from jzero.types import RowLayout

PROMPT, NEW = 5, 16  # longest


def items(rng: np.random.Generator, group_sizes: list[int]) -> list[list[TrainingSequence]]:
    """Groups of items with a common prompt; every token, weight and log-prob tells where it came from."""
    groups = []
    for size in group_sizes:
        head = rng.integers(1, 1000, rng.integers(1, PROMPT + 1))
        group = []
        for _ in range(size):
            new = int(rng.integers(1, NEW + 1))
            length = len(head) + new
            sampled = np.arange(length) >= len(head)
            sampled[len(head) + 1 :] &= rng.random(new - 1) < 0.7
            group.append(
                TrainingSequence(
                    tokens=np.concatenate([head, rng.integers(1, 1000, new)]).astype(np.int32),
                    prompt_length=len(head),
                    weights=(sampled * rng.random() * rng.integers(0, 2)).astype(np.float32),
                    logps=rng.normal(size=length).astype(np.float32),
                )
            )
        groups.append(group)
    return groups


class Cells:
    """A packed batch as rows; `take` returns a region and marks it, so that nothing is taken twice."""

    def __init__(self, packed):
        self.fields = {
            name: x.reshape(-1, x.shape[-1])
            for name, x in vars(packed.batch).items()
            if x is not None
        }
        self.taken = np.zeros(self.fields["tokens"].shape, bool)

    def take(self, row, start, stop):
        assert not self.taken[row, start:stop].any()
        self.taken[row, start:stop] = True
        return {name: x[row, start:stop] for name, x in self.fields.items()}


def check(groups, packed_list, rows):
    """Everything that `pack` promises."""
    flat = [item for group in groups for item in group]
    seen = Counter()
    for packed, row_count in zip(packed_list, rows, strict=True):
        layout, cells = packed.layout, Cells(packed)
        microbatches, *shape = packed.batch.tokens.shape
        assert shape == [row_count, layout.tokens] and packed.num_microbatches <= microbatches
        prompts = {}  # row -> the prompt its prefix must hold
        members = {}  # (row, slot) -> segments in it
        real = 0
        for place in packed.placements:
            index, row = place.sequence, place.row
            column, inputs = place.column, place.inputs
            item = flat[index]
            seen[index] += 1
            first = item.prompt_length - 1 if layout.prefix else 0
            assert inputs == len(item.tokens) - 1 - first
            slot, offset = divmod(column - layout.prefix, layout.slot)
            assert 0 <= slot < layout.slots and offset + inputs <= layout.slot
            got = cells.take(row, column, column + inputs)
            assert (got["tokens"] == item.tokens[first:-1]).all()
            assert (got["targets"] == item.tokens[first + 1 :]).all()
            assert (got["positions"] == np.arange(first, first + inputs)).all()
            assert (got["weights"] == item.weights[first + 1 :]).all()
            assert (got["sampler_logps"] == item.logps[first + 1 :]).all()
            [segment] = set(got["segments"].tolist())
            assert segment > 0
            members.setdefault((row, slot), []).append(segment)
            prompt = item.tokens[: item.prompt_length - 1].tolist()
            assert not layout.prefix or prompts.setdefault(row, prompt) == prompt
            assert row < packed.num_microbatches * row_count
            real += inputs
        for segments in members.values():
            assert len(set(segments)) == len(segments)
        for row, prompt in prompts.items():
            got = cells.take(row, 0, len(prompt))
            assert got["tokens"].tolist() == prompt and got["positions"].tolist() == list(
                range(len(prompt))
            )
            assert not got["weights"].any() and (got["segments"] == 1).all()
            real += len(prompt)
        assert packed.num_inputs == real
        for x in cells.fields.values():  # padding is seen by nothing, and trains nothing
            assert not x[~cells.taken].any()
        used = sorted({place.row for place in packed.placements})
        assert used == list(range(len(used))) and packed.num_microbatches == -(
            -len(used) // row_count
        )
        assert np.array_equal(packed.to_rows([item.weights for item in flat]), packed.batch.weights)
        back = [np.full(len(item.tokens), np.nan, np.float32) for item in flat]
        packed.from_rows(packed.batch.sampler_logps, back)
        for place in packed.placements:
            index, inputs = place.sequence, place.inputs
            assert np.array_equal(back[index][-inputs:], flat[index].logps[-inputs:])
            assert np.isnan(back[index][:-inputs]).all()
    assert seen == Counter(range(len(flat)))


@given(
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    row_slots=st.sampled_from([0, 1, 2, 3, 8]),
    buckets=st.integers(1, 4),
    extra=st.integers(0, 20),
    rows=st.integers(1, 5),
    microbatches=st.integers(0, 3),
)
@settings(deadline=None, max_examples=150)
def test_every_input_once(seed, sizes, row_slots, buckets, extra, rows, microbatches):
    groups = items(np.random.default_rng(seed), sizes)
    shapes = make_layouts(PROMPT, NEW + extra, buckets, row_slots)
    packed = pack(groups, shapes, [rows] * buckets, [microbatches] * buckets)
    check(groups, packed, [rows] * buckets)
    assert all(p.batch.tokens.shape[0] >= max(1, microbatches) for p in packed)


def test_layouts():
    assert make_layouts(10, 64, 3, 8) == [
        RowLayout(10, 8, 64),
        RowLayout(10, 8, 32),
        RowLayout(10, 8, 16),
    ]
    assert make_layouts(10, 64, 2, 0) == [RowLayout(0, 1, 74), RowLayout(0, 1, 37)]
    assert RowLayout(10, 8, 64).tokens == 10 + 8 * 64


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(30, 60))
@settings(deadline=None)
def test_best_fit(lengths, capacity):
    bins = best_fit(lengths, capacity)
    assert sorted(i for bin in bins for i in bin) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in bin) for bin in bins]
    assert all(load <= capacity for load in loads)
    assert (
        sum(load <= capacity / 2 for load in loads) <= 1
    )  # two half-empty bins would have been one


def test_best_fit_takes_the_fullest_bin_that_fits():
    assert best_fit([6, 5, 4, 3], 10) == [[0, 2], [1, 3]]
    assert best_fit([], 10) == []


@pytest.mark.parametrize("row_slots", [0, 2])
def test_a_response_longer_than_the_slot_is_refused(row_slots):
    item = TrainingSequence(np.zeros(3 + 20, np.int32), 3, *[np.zeros(23, np.float32)] * 2)
    shapes = make_layouts(PROMPT, NEW, 2, row_slots)
    with pytest.raises(
        ValueError,
        match=r"a sequence of 2[02] tokens does not fit a slot of (16|21); raise train.pack_length",
    ):
        pack([[item]], shapes, [1, 1], [1, 1])


def test_groups_go_where_they_pad_least():
    floats = np.zeros(3 + NEW, np.float32)
    item = lambda n: TrainingSequence(np.ones(n, np.int32), 3, floats[:n], floats[:n])
    short, long = [item(3 + 2)] * 8, [item(3 + NEW)] * 8
    packed = pack([short, long], make_layouts(PROMPT, NEW, 2, 8), [1, 1], [1, 1])
    assert [sorted({place.sequence // 8 for place in p.placements}) for p in packed] == [[1], [0]]


def test_the_same_items_pack_the_same_way():
    first, second = (
        pack(items(np.random.default_rng(5), [4, 7, 1]), make_layouts(5, 20, 2, 2), [2, 2], [1, 1])
        for _ in range(2)
    )
    for a, b in zip(first, second, strict=True):
        assert a.placements == b.placements
        assert all(
            (x == getattr(b.batch, name)).all()
            for name, x in vars(a.batch).items()
            if x is not None
        )
