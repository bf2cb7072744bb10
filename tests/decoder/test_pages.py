"""The page allocator: after any history every page is free, or held and counted right."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jzero.decoder.pages import SCRATCH_PAGE, OutOfPages, PageAllocator

NUM_PAGES = 12
PAGE_SIZE = 4
NUM_SLOTS = 5
PAGES_PER_SLOT = 6


def make_allocator() -> PageAllocator:
    return PageAllocator(NUM_PAGES, PAGE_SIZE, NUM_SLOTS, PAGES_PER_SLOT)


def num_pages_in_use(allocator: PageAllocator) -> int:
    return NUM_PAGES - 1 - len(allocator.free_pages)


def count_holders(allocator: PageAllocator) -> Counter[int]:
    """Returns the number of slots that hold each page that is held."""
    holders: Counter[int] = Counter()
    for pages in allocator.pages_of_slot:
        holders.update(pages)
    return holders


def check_invariants(allocator: PageAllocator) -> None:
    """Asserts that free pages, counts, lists and table say the same."""
    holders = count_holders(allocator)
    counts = {page: int(count) for page, count in enumerate(allocator.reference_counts) if count}
    assert counts == holders

    # Every page but the scratch page is either free, once, or held.
    free_pages = allocator.free_pages
    assert len(set(free_pages)) == len(free_pages)
    assert not set(free_pages) & set(holders)
    assert len(free_pages) + len(holders) == NUM_PAGES - 1
    assert num_pages_in_use(allocator) == len(holders)
    assert SCRATCH_PAGE not in holders
    assert SCRATCH_PAGE not in free_pages

    for slot, pages in enumerate(allocator.pages_of_slot):
        assert len(set(pages)) == len(pages)
        unused = [SCRATCH_PAGE] * (PAGES_PER_SLOT - len(pages))
        assert allocator.table[slot].tolist() == pages + unused


def reserve(allocator: PageAllocator, slot: int, num_tokens: int) -> None:
    """Reserves room for tokens, and asserts that the slot gets all of the pages or none."""
    before = [list(pages) for pages in allocator.pages_of_slot]
    num_missing = -(-num_tokens // PAGE_SIZE) - len(before[slot])

    if num_missing > len(allocator.free_pages):
        with pytest.raises(OutOfPages):
            allocator.reserve(slot, num_tokens)
        assert allocator.pages_of_slot == before
        return

    held_before = set().union(*before)
    new_pages = allocator.reserve(slot, num_tokens)
    assert allocator.pages_of_slot[slot] == before[slot] + new_pages
    assert len(new_pages) == max(num_missing, 0)
    assert not held_before & set(new_pages)


def share(allocator: PageAllocator, slot: int, other_slot: int, num_pages: int) -> None:
    """Gives the first pages of another slot to `slot`, if it has no pages."""
    if not allocator.pages_of_slot[slot]:
        allocator.reserve(slot, 0, allocator.pages_of_slot[other_slot][:num_pages])


def release_twice(allocator: PageAllocator, slot: int) -> None:
    """Releases a slot. The second time changes nothing, or else the invariants do not hold."""
    allocator.release(slot)
    allocator.release(slot)


SLOTS = st.integers(0, NUM_SLOTS - 1)
# Calls of the functions above: the function, and its arguments after the allocator.
CALLS = st.one_of(
    st.tuples(st.just(reserve), SLOTS, st.integers(1, PAGES_PER_SLOT * PAGE_SIZE)),
    st.tuples(st.just(share), SLOTS, SLOTS, st.integers(0, PAGES_PER_SLOT)),
    st.tuples(st.just(release_twice), SLOTS),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(CALLS, max_size=40))
def test_any_history_leaves_every_page_free_or_counted(calls: list[tuple]) -> None:
    allocator = make_allocator()

    for function, *arguments in calls:
        function(allocator, *arguments)
        check_invariants(allocator)

    for slot in range(NUM_SLOTS):
        allocator.release(slot)
    check_invariants(allocator)
    assert num_pages_in_use(allocator) == 0


def test_shared_pages_outlive_the_slot_that_took_them() -> None:
    allocator = make_allocator()
    prompt_pages = allocator.reserve(0, 2 * PAGE_SIZE)
    allocator.reserve(1, 0, prompt_pages)
    new_pages = allocator.reserve(1, 3 * PAGE_SIZE)

    allocator.release(0)

    assert num_pages_in_use(allocator) == 3
    assert allocator.pages_of_slot[1] == prompt_pages + new_pages
    pages_of_another = allocator.reserve(2, 6 * PAGE_SIZE)
    assert not set(pages_of_another) & {*prompt_pages, *new_pages}


def test_only_a_slot_without_pages_may_be_given_shared_pages() -> None:
    allocator = make_allocator()
    prompt_pages = allocator.reserve(0, 2 * PAGE_SIZE)
    allocator.reserve(1, 3 * PAGE_SIZE)

    with pytest.raises(AssertionError, match="holds pages"):
        allocator.reserve(1, 0, prompt_pages)
