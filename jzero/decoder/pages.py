"""Allocates the pages of the KV cache to slots: the host's bookkeeping for one shard.

The KV cache of a shard is a pool of pages, each with room for `page_size` tokens. A slot holds the
pages of its sequence, in order. Samples of one prompt share the full pages of the prompt (prefix
sharing): pages are reference-counted, and free again when their last holder releases them. A holder
is a slot or the prefix cache (`prefix_cache.py`), which gives pages back when a slot needs them.
Nothing here touches the device; `engine.py` sends `table` with every call.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int

SCRATCH_PAGE = 0
"""The page that no slot ever holds.

The decode program writes a key and a value for every slot in every step, because its shapes are
fixed. Idle slots write theirs to this page, and the unused entries of the table point to it.
"""


class OutOfPages(Exception):
    """The pool has no free page; the caller preempts a sequence and tries again."""


def reclaim_nothing(num_pages: int) -> None:
    """The `PageAllocator.reclaim` of a pool without a prefix cache."""


class PageAllocator:
    """The pages of one shard.

    Attributes:
        table: the page ids of each slot, in the order of its tokens; unused entries are
            SCRATCH_PAGE.
        pages_of_slot: the same page ids as lists, without the unused entries.
        reference_counts: the number of holders of each page.
        free_pages: the pages without a holder.
        reclaim: called with a number of pages before a reservation fails for lack of them; frees
            as many as it can.
    """

    table: Int[np.ndarray, "slots pages_per_slot"]
    reference_counts: Int[np.ndarray, " pages"]

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_slots: int,
        pages_per_slot: int,
    ) -> None:
        """Makes a pool of `num_pages` pages, including the scratch page, and empty slots."""
        self.page_size = page_size
        # `pop` takes pages in ascending order at first. The scratch page is never free.
        self.free_pages = list(range(num_pages - 1, SCRATCH_PAGE, -1))
        self.reference_counts = np.zeros(num_pages, np.int32)
        self.table = np.full((num_slots, pages_per_slot), SCRATCH_PAGE, np.int32)
        self.pages_of_slot: list[list[int]] = [[] for _ in range(num_slots)]
        self.reclaim: Callable[[int], None] = reclaim_nothing

    def reserve(self, slot: int, num_tokens: int, shared_pages: Sequence[int] = ()) -> list[int]:
        """Extends the pages of `slot` so that they hold `num_tokens` tokens.

        Args:
            shared_pages: pages with another holder that become the first pages of this slot.
                Requires that the slot has no pages yet.

        Returns:
            The pages that were free. Nothing else holds them.

        Raises:
            OutOfPages: too few pages are free. The slot is unchanged.
        """
        held_pages = self.pages_of_slot[slot]
        assert not (shared_pages and held_pages), f"{slot=} holds pages"
        pages_in_all = -(-num_tokens // self.page_size)
        missing = pages_in_all - len(held_pages) - len(shared_pages)
        # Hold the shared pages first: `reclaim` could free them otherwise.
        self.hold(shared_pages)
        if missing > len(self.free_pages):
            self.reclaim(missing - len(self.free_pages))
        # Check before the slot changes.
        if missing > len(self.free_pages):
            self.drop(shared_pages)
            raise OutOfPages
        new_pages = [self.free_pages.pop() for _ in range(missing)]
        self.hold(new_pages)
        added_pages = [*shared_pages, *new_pages]
        begin = len(held_pages)
        self.table[slot, begin : begin + len(added_pages)] = added_pages
        held_pages += added_pages
        return new_pages

    def release(self, slot: int) -> None:
        """Removes all pages from `slot`; pages without another holder become free."""
        self.drop(self.pages_of_slot[slot])
        self.pages_of_slot[slot] = []
        self.table[slot] = SCRATCH_PAGE

    def hold(self, pages: Sequence[int]) -> None:
        """Adds a holder to each of several different pages."""
        # `+=` counts an index once, so no page may occur twice. NumPy rejects an empty list.
        if len(pages):
            self.reference_counts[list(pages)] += 1

    def drop(self, pages: Sequence[int]) -> None:
        """Removes a holder from each of several different pages; they may become free."""
        if len(pages):
            self.reference_counts[list(pages)] -= 1
        self.free_pages += [page for page in pages if self.reference_counts[page] == 0]
