"""Packs ragged sequences into rows of a few fixed layouts, on the host.

The input at position t predicts the target at position t, which is the next token. A response of n
tokens therefore needs n inputs: the prompt's last token, and the response without its last token.

There are two kinds of rows (`types.RowLayout`):
  shared prefix   a row has a prompt once, without its last token, and the responses to this prompt
                  in slots. A group of G responses computes one prompt instead of G.
  plain           (prefix 0) every sequence includes its prompt, and the row is one slot.

    groups of TrainingSequence -> plan_rows -> pack -> one PackedBatch for each layout

Every layout is one compiled shape, so a run has only a few layouts: see `make_layouts`.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jzero.errors import UserError
from jzero.tokens import TRACKS, Tokens, TrackShapes
from jzero.types import Batch, RowLayout

INTEGER_FIELDS = ("tokens", "targets", "segments", "positions")
FLOAT_FIELDS = ("weights", "sampler_logps")


@dataclass(frozen=True)
class TrainingSequence:
    """A sequence to train on."""

    tokens: Tokens  # prompt and response
    prompt_length: int
    weights: np.ndarray  # f32[T] weight of the token's loss term; 0 = not trained


@dataclass(frozen=True)
class PlannedSlot:
    """Indices of the sequences in one slot, in order."""

    sequences: tuple[int, ...]


@dataclass(frozen=True)
class PlannedRow:
    """The non-empty slots of one row. With a shared prefix they have the same prompt."""

    slots: tuple[PlannedSlot, ...]


@dataclass(frozen=True)
class Placement:
    """The place of a sequence: its last `inputs` inputs are `row[column : column + inputs]`."""

    sequence: int  # index among all sequences of the groups
    row: int  # counted over all microbatches
    column: int
    inputs: int


@dataclass(frozen=True)
class PackedBatch:
    """All rows of one layout, and the place of each sequence in the rows."""

    layout: RowLayout
    batch: Batch[np.ndarray]  # fields [M, B, T]
    num_microbatches: int  # number of non-empty microbatches; the others, at the end, are padding
    num_inputs: int  # inputs without padding, including shared prefixes
    placements: list[Placement]

    @property
    def computed_inputs(self) -> int:
        """The number of inputs that a program computes for these rows, including padding."""
        return self.num_microbatches * self.batch.tokens[0].size

    def to_rows(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Moves values of tokens to the inputs that predict those tokens.

        `values` has one f32[T] for each sequence, over its tokens. Returns f32[M, B, T], 0 in all
        other places.
        """
        microbatches, rows, tokens = self.batch.tokens.shape
        flat = np.zeros((microbatches * rows, tokens), np.float32)
        for place in self.placements:
            # The inputs predict the last `inputs` tokens of the sequence.
            columns = slice(place.column, place.column + place.inputs)
            flat[place.row, columns] = values[place.sequence][-place.inputs :]
        return flat.reshape(self.batch.tokens.shape)

    def with_field(self, name: str, values: Sequence[np.ndarray]) -> "PackedBatch":
        """Returns the same rows with a field of the batch set from `values`, as in `to_rows`."""
        return replace(self, batch=replace(self.batch, **{name: self.to_rows(values)}))

    def from_rows(self, rows: np.ndarray, values: Sequence[np.ndarray]) -> None:
        """Copies [M, B, T] into one array for each sequence: the inverse of `to_rows`.

        A token that no input predicts, such as the first token of a sequence, keeps its value.
        """
        flat = np.asarray(rows).reshape(-1, self.layout.tokens)
        for place in self.placements:
            columns = slice(place.column, place.column + place.inputs)
            values[place.sequence][-place.inputs :] = flat[place.row, columns]


def layouts_of_lengths(
    max_prompt_tokens: int,
    pack_lengths: Sequence[int],
    packs_per_row: int,
) -> list[RowLayout]:
    """Returns a layout for each length of a pack.

    packs_per_row = 0 means rows without a shared prefix: their slot includes the prompt.
    """
    if packs_per_row == 0:
        return [RowLayout(0, 1, max_prompt_tokens + length) for length in pack_lengths]
    return [RowLayout(max_prompt_tokens, packs_per_row, length) for length in pack_lengths]


def make_layouts(
    max_prompt_tokens: int,
    slot_tokens: int,
    num_lengths: int,
    packs_per_row: int,
) -> list[RowLayout]:
    """Returns layouts with slots of slot_tokens, slot_tokens / 2, ..., longest first.

    packs_per_row = 0 means rows without a shared prefix: their slot includes the prompt.
    """
    if packs_per_row == 0:
        longest = max_prompt_tokens + slot_tokens
        return [RowLayout(0, 1, longest >> bucket) for bucket in range(num_lengths)]
    return [
        RowLayout(max_prompt_tokens, packs_per_row, slot_tokens >> bucket)
        for bucket in range(num_lengths)
    ]


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Distributes items over bins by best-fit decreasing.

    Items are placed from the longest to the shortest (ties: in order), each into the fullest bin
    that has room for it. Returns the indices of `lengths` in each bin.

    Raises UserError if an item is longer than the capacity.
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (remaining room, index of the bin), sorted
    # Longest first, so that short items fill the room that long ones leave (at most 11/9 of the
    # fewest bins).
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        if length > capacity:
            raise UserError(
                f"a sequence of {length} tokens does not fit a slot of {capacity}; "
                "give train.pack longer lengths"
            )

        # The first entry with room of at least `length` is the fullest bin that fits.
        position = bisect_left(rooms, (length, -1))
        if position < len(rooms):
            room, number = rooms.pop(position)
        else:
            room, number = capacity, len(bins)
            bins.append([])
        bins[number].append(index)
        insort(rooms, (room - length, number))
    return bins


def plan_rows(
    groups: Sequence[Sequence[TrainingSequence]],
    layouts: Sequence[RowLayout],
) -> list[list[PlannedRow]]:
    """Decides which sequences share rows. Returns the rows of each layout.

    Sequences are numbered consecutively over all groups. A group has one prompt.
    """
    # All layouts of a run are of one kind.
    if layouts[0].prefix == 0:
        sequences = [sequence for group in groups for sequence in group]
        return plan_plain_rows(sequences, layouts)
    return plan_shared_rows(groups, layouts)


def plan_plain_rows(
    sequences: Sequence[TrainingSequence],
    layouts: Sequence[RowLayout],
) -> list[list[PlannedRow]]:
    """Puts every sequence into the shortest layout that fits; a row can mix prompts."""
    lengths = [len(sequence.tokens) - 1 for sequence in sequences]
    members: list[list[int]] = [[] for _ in layouts]
    for index, length in enumerate(lengths):
        # Layouts are sorted from long to short, so the last layout that fits is the shortest. If a
        # sequence fits no layout, it goes to the longest layout, where `best_fit` raises UserError.
        fits = [number for number, layout in enumerate(layouts) if length <= layout.slot]
        members[fits[-1] if fits else 0].append(index)

    rows: list[list[PlannedRow]] = []
    for layout, indices in zip(layouts, members, strict=True):
        bins = best_fit([lengths[index] for index in indices], layout.slot)
        slots = [PlannedSlot(tuple(indices[item] for item in items)) for items in bins]
        rows.append([PlannedRow((slot,)) for slot in slots])
    return rows


def plan_shared_rows(
    groups: Sequence[Sequence[TrainingSequence]],
    layouts: Sequence[RowLayout],
) -> list[list[PlannedRow]]:
    """Puts every group into the layout in which its rows have the fewest tokens."""
    # Slots of a group fill as few rows as possible; the last row can have empty slots.
    rows: list[list[PlannedRow]] = [[] for _ in layouts]
    first = 0  # index of the group's first sequence
    for group in groups:
        lengths = [len(sequence.tokens) - sequence.prompt_length for sequence in group]
        best, bins = best_layout(lengths, layouts)
        slots = [PlannedSlot(tuple(first + item for item in items)) for items in bins]
        per_row = layouts[best].slots
        for start in range(0, len(slots), per_row):
            rows[best].append(PlannedRow(tuple(slots[start : start + per_row])))
        first += len(group)
    return rows


def best_layout(
    lengths: Sequence[int],
    layouts: Sequence[RowLayout],
) -> tuple[int, list[list[int]]]:
    """Returns the layout in which the rows of a group have the fewest tokens, and its slots.

    lengths: the lengths of the group's responses. A slot is a list of indices of `lengths`.
    """
    longest = max(lengths)
    # If the longest response fits no layout, the group goes to layout 0, where `best_fit` raises
    # UserError.
    fits = [number for number, layout in enumerate(layouts) if longest <= layout.slot] or [0]
    bins_by_layout = {number: best_fit(lengths, layouts[number].slot) for number in fits}
    tokens_by_layout = {
        number: tokens_of_rows(len(bins), layouts[number])
        for number, bins in bins_by_layout.items()
    }
    best = min(fits, key=lambda number: tokens_by_layout[number])
    return best, bins_by_layout[best]


def num_rows(num_slots: int, layout: RowLayout) -> int:
    """Returns the number of rows of a layout for `num_slots` slots."""
    return -(-num_slots // layout.slots)


def tokens_of_rows(num_slots: int, layout: RowLayout) -> int:
    """Returns the tokens of the rows for `num_slots` slots, including padding."""
    return num_rows(num_slots, layout) * layout.tokens


def pack(
    groups: Sequence[Sequence[TrainingSequence]],
    layouts: Sequence[RowLayout],
    rows: Sequence[int],
    microbatches: Sequence[int],
    tracks: TrackShapes = (),
) -> list[PackedBatch]:
    """Packs groups of sequences into one PackedBatch for each layout.

    `rows` (B) and `microbatches` (M) have one number for each layout: a batch has B rows in a
    microbatch and at least M microbatches. More than M microbatches give another shape, with M
    doubled until it suffices, which is compiled separately. `tracks` are the optional tracks to
    pack.
    """
    sequences = [sequence for group in groups for sequence in group]
    plan = plan_rows(groups, layouts)
    return [
        pack_layout(sequences, *arguments, tracks)
        for arguments in zip(plan, layouts, rows, microbatches, strict=True)
    ]


def pack_layout(
    sequences: Sequence[TrainingSequence],
    planned_rows: Sequence[PlannedRow],
    layout: RowLayout,
    rows: int,
    microbatches: int,
    tracks: TrackShapes,
) -> PackedBatch:
    """Builds the PackedBatch of one layout from its planned rows."""
    # At least one microbatch, even if all sequences are left out.
    used = -(-len(planned_rows) // rows)
    # Agents have any number of sequences: their batches grow by doubling, so that few shapes are
    # compiled.
    most = max(microbatches, 1)
    while most < used:
        most *= 2
    shape = (most, rows, layout.tokens)
    batch = Batch(
        **{name: np.zeros(shape, np.int32) for name in INTEGER_FIELDS},
        **{name: np.zeros(shape, np.float32) for name in FLOAT_FIELDS},
        tracks={
            name: np.full((*shape, *track_shape), TRACKS[name].blank, TRACKS[name].dtype)
            for name, track_shape in tracks
        },
    )

    placements = []
    num_inputs = 0
    for row, planned_row in enumerate(planned_rows):
        if layout.prefix:
            # All sequences of the row have the same prompt. The prompt's last token is not in the
            # prefix: it is an input of each response and predicts the response's first token.
            owner = sequences[planned_row.slots[0].sequences[0]]
            num_inputs += write_sequence(batch, row, 0, 1, owner, 0, owner.prompt_length - 1)

        for number, slot in enumerate(planned_row.slots):
            column = layout.prefix + number * layout.slot
            for segment, index in enumerate(slot.sequences, start=1):
                sequence = sequences[index]
                first = sequence.prompt_length - 1 if layout.prefix else 0
                last = len(sequence.tokens) - 1
                inputs = write_sequence(batch, row, column, segment, sequence, first, last)
                placements.append(Placement(index, row, column, inputs))
                column += inputs
                num_inputs += inputs
    return PackedBatch(layout, batch, used, num_inputs, placements)


def write_sequence(
    batch: Batch[np.ndarray],
    row: int,
    column: int,
    segment: int,
    sequence: TrainingSequence,
    first: int,
    last: int,
) -> int:
    """Writes tokens first..last of a sequence as inputs from `column` on, and returns their number.

    Targets, weights and tracks belong to the tokens that follow the inputs.
    """
    inputs = last - first
    microbatch, row_of_microbatch = divmod(row, batch.tokens.shape[1])
    place = (microbatch, row_of_microbatch, slice(column, column + inputs))
    following = slice(first + 1, last + 1)
    tokens = sequence.tokens
    batch.tokens[place] = tokens.ids[first:last]
    # Segments count from 1 in every slot; 0 is padding.
    batch.segments[place] = segment
    # Positions count from the start of the prompt, so that RoPE sees the sequence as the sampler
    # did.
    batch.positions[place] = np.arange(first, last)
    batch.targets[place] = tokens.ids[following]
    batch.weights[place] = sequence.weights[following]
    batch.sampler_logps[place] = tokens.logps[following]
    for name, rows in batch.tracks.items():
        values = tokens.get(name)
        if values is not None:
            rows[place] = values[following]
    return inputs
