"""Packing: every input of every sequence has one place, with its own target and weight."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jzero.tokens import Tokens
from jzero.training.packing import (
    PackedBatch,
    Placement,
    TrainingSequence,
    best_fit,
    make_layouts,
    pack,
)
from jzero.types import RowLayout

MAX_PROMPT = 5
MAX_NEW = 16


def random_sequence(rng: np.random.Generator, prompt: np.ndarray) -> TrainingSequence:
    """Returns a response to the prompt. Some of its tokens, or all of them, have weight 0."""
    num_new = int(rng.integers(1, MAX_NEW + 1))
    length = len(prompt) + num_new
    sampled = np.arange(length) >= len(prompt)
    sampled[len(prompt) + 1 :] &= rng.random(num_new - 1) < 0.7
    weight = rng.random() * rng.integers(0, 2)
    response = rng.integers(1, 1000, num_new)
    return TrainingSequence(
        tokens=Tokens(np.concatenate([prompt, response]), logps=rng.normal(size=length)),
        prompt_length=len(prompt),
        weights=(sampled * weight).astype(np.float32),
    )


def random_groups(rng: np.random.Generator, group_sizes: list[int]) -> list[list[TrainingSequence]]:
    """Returns groups of sequences with a common prompt."""
    groups = []
    for size in group_sizes:
        prompt = rng.integers(1, 1000, rng.integers(1, MAX_PROMPT + 1))
        groups.append([random_sequence(rng, prompt) for _ in range(size)])
    return groups


@dataclass(frozen=True)
class Packing:
    """What was packed, how, and the result."""

    sequences: list[TrainingSequence]
    rows: int  # of a microbatch
    microbatches: int  # at least
    packed: list[PackedBatch]


@st.composite
def packings(draw: st.DrawFn) -> Packing:
    """Draws groups, layouts that hold all of them, and what `pack` makes of them."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    group_sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    slots_per_row = draw(st.sampled_from([0, 1, 2, 3, 8]))
    buckets = draw(st.integers(1, 4))
    slot_tokens = MAX_NEW + draw(st.integers(0, 20))
    rows = draw(st.integers(1, 5))
    microbatches = draw(st.integers(0, 3))

    groups = random_groups(rng, group_sizes)
    layouts = make_layouts(MAX_PROMPT, slot_tokens, buckets, slots_per_row)
    packed = pack(groups, layouts, [rows] * buckets, [microbatches] * buckets)
    sequences = [sequence for group in groups for sequence in group]
    return Packing(sequences, rows, microbatches, packed)


with_packings = given(packing=packings())
many_examples = settings(deadline=None, max_examples=150)


class Rows:
    """The rows of a packed batch. Every region of them can be taken once."""

    def __init__(self, packed: PackedBatch) -> None:
        self.fields = {
            name: array.reshape(-1, array.shape[-1])
            for name, array in vars(packed.batch).items()
            if array is not None and name != "tracks"
        }
        self.is_taken = np.zeros(self.fields["tokens"].shape, bool)

    def take(self, row: int, start: int, stop: int) -> dict[str, np.ndarray]:
        """Returns all fields of a region that nothing else has taken."""
        assert not self.is_taken[row, start:stop].any()
        self.is_taken[row, start:stop] = True
        return {name: array[row, start:stop] for name, array in self.fields.items()}


def slot_and_offset(place: Placement, layout: RowLayout) -> tuple[int, int]:
    """Returns the slot in which a sequence lies, and the column of the slot where it begins."""
    return divmod(place.column - layout.prefix, layout.slot)


def assert_sequence_lies_there(
    rows: Rows, place: Placement, layout: RowLayout, sequence: TrainingSequence
) -> None:
    # With a shared prefix, a sequence has only the prompt's last token as an input of its own.
    first = sequence.prompt_length - 1 if layout.prefix else 0
    assert place.inputs == len(sequence.tokens) - 1 - first
    slot, offset = slot_and_offset(place, layout)
    assert 0 <= slot < layout.slots
    assert offset + place.inputs <= layout.slot

    fields = rows.take(place.row, place.column, place.column + place.inputs)

    following = slice(first + 1, None)
    assert (fields["tokens"] == sequence.tokens.ids[first:-1]).all()
    assert (fields["targets"] == sequence.tokens.ids[following]).all()
    assert (fields["positions"] == np.arange(first, first + place.inputs)).all()
    assert (fields["weights"] == sequence.weights[following]).all()
    assert (fields["sampler_logps"] == sequence.tokens.logps[following]).all()
    [segment] = set(fields["segments"].tolist())
    assert segment > 0


def assert_prefix_is_prompt(rows: Rows, row: int, prompts: list[list[int]]) -> None:
    """Checks that all prompts of a row are one prompt, which the prefix holds and does not train.

    The prompts are without their last token.
    """
    prompt = prompts[0]
    assert all(other == prompt for other in prompts)

    fields = rows.take(row, 0, len(prompt))

    assert fields["tokens"].tolist() == prompt
    assert fields["positions"].tolist() == list(range(len(prompt)))
    assert not fields["weights"].any()
    assert (fields["segments"] == 1).all()


@with_packings
@many_examples
def test_every_input_has_one_place_and_the_rest_is_padding(packing: Packing) -> None:
    times_placed: Counter[int] = Counter()
    for packed in packing.packed:
        rows = Rows(packed)
        prompts_of_row: dict[int, list[list[int]]] = {}
        for place in packed.placements:
            sequence = packing.sequences[place.sequence]
            times_placed[place.sequence] += 1
            assert_sequence_lies_there(rows, place, packed.layout, sequence)
            prompt = sequence.tokens.ids[: sequence.prompt_length - 1].tolist()
            prompts_of_row.setdefault(place.row, []).append(prompt)
        if packed.layout.prefix:
            for row, prompts in prompts_of_row.items():
                assert_prefix_is_prompt(rows, row, prompts)

        assert packed.num_inputs == rows.is_taken.sum()
        # Padding is 0 in every field: nothing sees it, and it is not trained.
        for array in rows.fields.values():
            assert not array[~rows.is_taken].any()
    assert times_placed == Counter(range(len(packing.sequences)))


@with_packings
@many_examples
def test_sequences_of_one_slot_have_segments_of_their_own(packing: Packing) -> None:
    for packed in packing.packed:
        segments = packed.batch.segments.reshape(-1, packed.layout.tokens)
        segments_of_slot: dict[tuple[int, int], list[int]] = {}
        for place in packed.placements:
            slot, _ = slot_and_offset(place, packed.layout)
            segment = int(segments[place.row, place.column])
            segments_of_slot.setdefault((place.row, slot), []).append(segment)

        for numbers in segments_of_slot.values():
            assert len(set(numbers)) == len(numbers)


@with_packings
@many_examples
def test_rows_are_used_from_the_first_on(packing: Packing) -> None:
    for packed in packing.packed:
        used_rows = sorted({place.row for place in packed.placements})

        assert used_rows == list(range(len(used_rows)))
        assert packed.num_microbatches == -(-len(used_rows) // packing.rows)


@with_packings
@many_examples
def test_batches_have_the_shape_that_was_asked_for(packing: Packing) -> None:
    for packed in packing.packed:
        microbatches, rows, tokens = packed.batch.tokens.shape

        assert (rows, tokens) == (packing.rows, packed.layout.tokens)
        assert microbatches >= max(1, packing.microbatches, packed.num_microbatches)


@with_packings
@many_examples
def test_values_of_tokens_move_to_rows_and_back(packing: Packing) -> None:
    weights = [sequence.weights for sequence in packing.sequences]
    for packed in packing.packed:
        logps = [np.full(len(s.tokens), np.nan, np.float32) for s in packing.sequences]

        weight_rows = packed.to_rows(weights)
        packed.from_rows(packed.batch.sampler_logps, logps)

        assert np.array_equal(weight_rows, packed.batch.weights)
        for place in packed.placements:
            got = logps[place.sequence]
            want = packing.sequences[place.sequence].tokens.logps
            assert np.array_equal(got[-place.inputs :], want[-place.inputs :])
            # What no input predicts keeps its value.
            assert np.isnan(got[: -place.inputs]).all()


# -- layouts ---------------------------------------------------------------------------------------


def test_slots_of_layouts_halve_from_bucket_to_bucket() -> None:
    layouts = make_layouts(10, 64, 3, 8)

    assert layouts == [RowLayout(10, 8, 64), RowLayout(10, 8, 32), RowLayout(10, 8, 16)]


def test_a_row_without_a_prefix_holds_the_prompt_in_its_slot() -> None:
    layouts = make_layouts(10, 64, 2, 0)

    assert layouts == [RowLayout(0, 1, 74), RowLayout(0, 1, 37)]


def test_a_row_is_as_long_as_its_prefix_and_its_slots() -> None:
    assert RowLayout(10, 8, 64).tokens == 10 + 8 * 64


# -- bins ------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(30, 60))
@settings(deadline=None)
def test_best_fit_puts_every_item_into_one_bin_and_no_two_bins_could_be_one(
    lengths: list[int], capacity: int
) -> None:
    bins = best_fit(lengths, capacity)

    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
    loads = [sum(lengths[item] for item in items) for items in bins]
    assert all(load <= capacity for load in loads)
    half_empty = [load for load in loads if load <= capacity / 2]
    assert len(half_empty) <= 1


def test_best_fit_takes_the_fullest_bin_that_fits() -> None:
    assert best_fit([6, 5, 4, 3], 10) == [[0, 2], [1, 3]]
    assert best_fit([], 10) == []


def constant_sequence(num_new: int) -> TrainingSequence:
    """Returns a sequence with a prompt of 3 tokens; all its tokens are 1."""
    length = 3 + num_new
    zeros = np.zeros(length, np.float32)
    return TrainingSequence(Tokens(np.ones(length)), 3, zeros)


@pytest.mark.parametrize(("slots_per_row", "inputs", "capacity"), [(0, 22, 21), (2, 20, 16)])
def test_a_response_longer_than_the_slot_is_refused(
    slots_per_row: int, inputs: int, capacity: int
) -> None:
    groups = [[constant_sequence(20)]]
    layouts = make_layouts(MAX_PROMPT, MAX_NEW, 2, slots_per_row)

    message = (
        f"a sequence of {inputs} tokens does not fit a slot of {capacity}; "
        "give train.pack longer lengths"
    )
    with pytest.raises(ValueError, match=message):
        pack(groups, layouts, [1, 1], [1, 1])


def test_groups_go_where_they_pad_least() -> None:
    short_group = [constant_sequence(2)] * 8
    long_group = [constant_sequence(MAX_NEW)] * 8
    layouts = make_layouts(MAX_PROMPT, MAX_NEW, 2, 8)

    in_long_slots, in_short_slots = pack([short_group, long_group], layouts, [1, 1], [1, 1])

    assert {place.sequence // 8 for place in in_long_slots.placements} == {1}
    assert {place.sequence // 8 for place in in_short_slots.placements} == {0}


def test_the_same_sequences_pack_the_same_way() -> None:
    def pack_anew() -> list[PackedBatch]:
        groups = random_groups(np.random.default_rng(5), [4, 7, 1])
        return pack(groups, make_layouts(5, 20, 2, 2), [2, 2], [1, 1])

    for first, second in zip(pack_anew(), pack_anew(), strict=True):
        assert first.placements == second.placements
        fields_of_second = vars(second.batch)
        for name, array in vars(first.batch).items():
            if array is not None:
                np.testing.assert_array_equal(array, fields_of_second[name])
