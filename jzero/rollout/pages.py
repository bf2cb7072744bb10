"""Who owns which KV page: bookkeeping for one shard of the pool. Page 0 is scratch, pages are reference-counted."""

from collections.abc import Sequence

import numpy as np


class OutOfPages(Exception):
    """The pool has no free page; the caller preempts a sequence and tries again."""


class PageAllocator:
    def __init__(self, count: int, page: int, slots: int, per_slot: int):
        self.page = page
        self.free_pages = list(range(count - 1, 0, -1))
        self.reference_counts = np.zeros(count, np.int32)
        self.table = np.zeros(
            (slots, per_slot), np.int32
        )  # page ids of each slot; unused entries are scratch
        self.pages_of_slot: list[list[int]] = [[] for _ in range(slots)]

    def reserve(self, slot: int, tokens: int, shared: Sequence[int] = ()) -> list[int]:
        """Give the slot pages until it can hold `tokens`: an empty one first those that another holds, then
        its own, which are returned. All or nothing."""
        owned = self.pages_of_slot[slot]
        assert not (shared and owned), f"{slot=} holds pages"
        need = -(-tokens // self.page) - len(owned) - len(shared)
        if need > len(self.free_pages):
            raise OutOfPages
        new = [self.free_pages.pop() for _ in range(need)]
        if added := [*shared, *new]:
            self.reference_counts[added] += 1
            self.table[slot, len(owned) : len(owned) + len(added)] = added
            owned += added
        return new

    def release(self, slot: int) -> None:
        self.reference_counts[self.pages_of_slot[slot]] -= 1
        self.free_pages += [
            page for page in self.pages_of_slot[slot] if self.reference_counts[page] == 0
        ]
        self.pages_of_slot[slot] = []
        self.table[slot] = 0
