"""Packing ragged rollouts into rows of a few fixed layouts, on the host. Input t predicts target t: a response of n
tokens takes n inputs, the prompt's last token and all but its own last. With a shared prefix a row holds a prompt
(without its last token) once, and its responses in slots; with prefix 0 a sequence carries its own prompt."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jzero.errors import UserError
from jzero.types import Batch, RowLayout

INTEGER_FIELDS = ("tokens", "targets", "segments", "positions")


@dataclass(frozen=True)
class TrainingSequence:
    """A sequence to train on."""

    tokens: np.ndarray  # i32[T]
    prompt: int  # length of the prompt
    weights: np.ndarray  # f32[T] in the loss; 0 = not trained
    logps: np.ndarray  # f32[T] under the sampler


@dataclass(frozen=True)
class PackedBatch:
    """A batch of one layout: fields [M, B, T], of which the first `count` microbatches hold something."""

    layout: RowLayout
    batch: Batch
    count: int
    real: int  # input tokens that are not padding
    where: list[
        tuple[int, int, int, int]
    ]  # (item, row, first column, inputs): the inputs before its last tokens

    def fill(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """One f32[T] an item, over its tokens -> f32[M, B, T] at the inputs that predict them."""
        flat = np.zeros(
            (self.batch.tokens.shape[0] * self.batch.tokens.shape[1], self.layout.tokens),
            np.float32,
        )
        for item, row, column, inputs in self.where:
            flat[row, column : column + inputs] = arrays[item][-inputs:]
        return flat.reshape(self.batch.tokens.shape)

    def read(self, values: np.ndarray, arrays: Sequence[np.ndarray]) -> None:
        """The other way: values [M, B, T] -> into the items' arrays."""
        flat = np.asarray(values).reshape(-1, self.layout.tokens)
        for item, row, column, inputs in self.where:
            arrays[item][-inputs:] = flat[row, column : column + inputs]


def make_layouts(max_prompt: int, slot: int, buckets: int, row_slots: int) -> list[RowLayout]:
    """Slot lengths slot, slot/2, ..., longest first. row_slots = 0: no shared prefix, the slot holds the prompt too."""
    prefix, slots, longest = (
        (max_prompt, row_slots, slot) if row_slots else (0, 1, max_prompt + slot)
    )
    return [RowLayout(prefix, slots, longest >> b) for b in range(buckets)]


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing: indices of `lengths` in bins of `capacity`."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (room left, bin), sorted
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        if length > capacity:
            raise UserError(
                f"a sequence of {length} tokens does not fit a slot of {capacity}; raise train.pack_length"
            )
        at = bisect_left(room, (length, -1))
        left, bin = room.pop(at) if at < len(room) else (capacity, len(bins))
        if bin == len(bins):
            bins.append([])
        bins[bin].append(index)
        insort(room, (left - length, bin))
    return bins


def plan_rows(
    groups: Sequence[Sequence[TrainingSequence]], layouts: Sequence[RowLayout]
) -> list[list[list[list[int]]]]:
    """Rows of each layout: lists of slots, which are lists of items. A group goes to the layout that pads it least."""
    rows: list[list[list[list[int]]]] = [[] for _ in layouts]
    if layouts[0].prefix == 0:
        inputs = [len(item.tokens) - 1 for group in groups for item in group]
        shortest = [
            max((b for b, layout in enumerate(layouts) if n <= layout.slot), default=0)
            for n in inputs
        ]
        for b, layout in enumerate(layouts):
            mine = [n for n, its in enumerate(shortest) if its == b]
            rows[b] = [
                [[mine[n] for n in bin]] for bin in best_fit([inputs[n] for n in mine], layout.slot)
            ]
        return rows
    first = 0
    for group in groups:
        lengths = [len(item.tokens) - item.prompt for item in group]
        fits = [b for b, layout in enumerate(layouts) if max(lengths) <= layout.slot] or [0]
        packings = {b: best_fit(lengths, layouts[b].slot) for b in fits}
        b = min(fits, key=lambda b: -(-len(packings[b]) // layouts[b].slots) * layouts[b].tokens)
        slots = [[first + n for n in bin] for bin in packings[b]]
        rows[b] += [slots[n : n + layouts[b].slots] for n in range(0, len(slots), layouts[b].slots)]
        first += len(group)
    return rows


def pack(
    groups: Sequence[Sequence[TrainingSequence]],
    layouts: Sequence[RowLayout],
    rows: Sequence[int],
    microbatches: Sequence[int],
) -> list[PackedBatch]:
    """One Packed a layout, with `rows` B a microbatch and at least `microbatches` M; more recompiles."""
    items = [item for group in groups for item in group]
    out = []
    for layout, B, M, planned in zip(
        layouts, rows, microbatches, plan_rows(groups, layouts), strict=True
    ):
        count = -(-len(planned) // B)
        shape = (max(count, M, 1) * B, layout.tokens)
        flat = {name: np.zeros(shape, np.int32) for name in INTEGER_FIELDS}
        flat |= {name: np.zeros(shape, np.float32) for name in ("weights", "sampler_logps")}
        where, real = [], 0
        for r, slots in enumerate(planned):
            if layout.prefix:
                item = items[slots[0][0]]
                real += write_sequence(flat, r, 0, 1, item, 0, item.prompt - 1)
            for s, members in enumerate(slots):
                column = layout.prefix + s * layout.slot
                for segment, n in enumerate(members, start=1):
                    item, first = items[n], items[n].prompt - 1 if layout.prefix else 0
                    inputs = write_sequence(
                        flat, r, column, segment, item, first, len(item.tokens) - 1
                    )
                    where.append((n, r, column, inputs))
                    column, real = column + inputs, real + inputs
        batch = Batch(**{name: x.reshape(-1, B, layout.tokens) for name, x in flat.items()})
        out.append(PackedBatch(layout, batch, count, real, where))
    return out


def write_sequence(
    flat: dict[str, np.ndarray],
    row: int,
    column: int,
    segment: int,
    item: TrainingSequence,
    first: int,
    last: int,
) -> int:
    """An item's tokens first..last as inputs, with what follows each as its target, from `column` on; how many."""
    at = (row, slice(column, column + last - first))
    flat["tokens"][at] = item.tokens[first:last]
    flat["segments"][at] = segment
    flat["positions"][at] = np.arange(first, last)
    for name, values in {
        "targets": item.tokens,
        "weights": item.weights,
        "sampler_logps": item.logps,
    }.items():
        flat[name][at] = values[first + 1 : last + 1]
    return last - first
