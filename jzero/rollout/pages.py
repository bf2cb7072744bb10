"""Who owns which KV page: bookkeeping for one shard of the pool. Page 0 is scratch, pages are reference-counted."""

import numpy as np


class OutOfPages(Exception):
    """The pool has no free page; the caller preempts a sequence and tries again."""


class Pages:
    def __init__(self, count: int, page: int, slots: int, per_slot: int):
        self.page = page
        self.free = list(range(count - 1, 0, -1))
        self.refs = np.zeros(count, np.int32)
        self.table = np.zeros((slots, per_slot), np.int32)  # page ids of each slot; unused entries are scratch
        self.owned: list[list[int]] = [[] for _ in range(slots)]

    def share(self, slot: int, pages: list[int]) -> None:
        """Start an empty slot on pages that another sequence of its group holds."""
        assert not self.owned[slot], f"{slot=} holds pages"
        self.refs[pages] += 1
        self._append(slot, pages)

    def reserve(self, slot: int, tokens: int) -> list[int]:
        """Give the slot pages of its own until it can hold `tokens`; the new ones. All or nothing."""
        need = -(-tokens // self.page) - len(self.owned[slot])
        if need > len(self.free):
            raise OutOfPages
        new = [self.free.pop() for _ in range(need)]
        self.refs[new] = 1
        self._append(slot, new)
        return new

    def release(self, slot: int) -> None:
        self.refs[self.owned[slot]] -= 1
        self.free += [page for page in self.owned[slot] if self.refs[page] == 0]
        self.owned[slot] = []
        self.table[slot] = 0

    def in_use(self) -> int:
        return len(self.refs) - 1 - len(self.free)

    def _append(self, slot: int, pages: list[int]) -> None:
        held = len(self.owned[slot])
        self.table[slot, held : held + len(pages)] = pages
        self.owned[slot] += pages
