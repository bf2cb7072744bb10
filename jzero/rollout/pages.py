"""Who owns which KV page: bookkeeping for one shard of the pool. Page 0 is scratch, pages are reference-counted."""

from collections.abc import Sequence

import numpy as np


class OutOfPages(Exception):
    """The pool has no free page; the caller preempts a sequence and tries again."""


class PageAllocator:
    def __init__(self, count: int, page: int, slots: int, per_slot: int):
        self.page = page
        self.free = list(range(count - 1, 0, -1))
        self.refs = np.zeros(count, np.int32)
        self.table = np.zeros(
            (slots, per_slot), np.int32
        )  # page ids of each slot; unused entries are scratch
        self.owned: list[list[int]] = [[] for _ in range(slots)]

    def reserve(self, slot: int, tokens: int, shared: Sequence[int] = ()) -> list[int]:
        """Give the slot pages until it can hold `tokens`: an empty one first those that another holds, then
        its own, which are returned. All or nothing."""
        owned = self.owned[slot]
        assert not (shared and owned), f"{slot=} holds pages"
        need = -(-tokens // self.page) - len(owned) - len(shared)
        if need > len(self.free):
            raise OutOfPages
        new = [self.free.pop() for _ in range(need)]
        if added := [*shared, *new]:
            self.refs[added] += 1
            self.table[slot, len(owned) : len(owned) + len(added)] = added
            owned += added
        return new

    def release(self, slot: int) -> None:
        self.refs[self.owned[slot]] -= 1
        self.free += [page for page in self.owned[slot] if self.refs[page] == 0]
        self.owned[slot] = []
        self.table[slot] = 0
