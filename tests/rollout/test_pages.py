"""The page allocator: whatever is shared, reserved and released, every page is free or counted right."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jzero.rollout.pages import OutOfPages, PageAllocator

COUNT, PAGE, SLOTS, PER_SLOT = 12, 4, 5, 6


def in_use(pages: PageAllocator) -> int:
    return COUNT - 1 - len(pages.free_pages)


def check(pages: PageAllocator):
    held = Counter(page for owned in pages.pages_of_slot for page in owned)
    assert {page: int(refs) for page, refs in enumerate(pages.reference_counts) if refs} == held
    assert len(set(pages.free_pages)) == len(pages.free_pages) and not set(pages.free_pages) & set(
        held
    )
    assert len(pages.free_pages) + len(held) == COUNT - 1 and in_use(pages) == len(held)
    assert 0 not in held and 0 not in pages.free_pages
    for slot, owned in enumerate(pages.pages_of_slot):
        assert len(set(owned)) == len(owned)
        assert pages.table[slot].tolist() == owned + [0] * (PER_SLOT - len(owned))


slots = st.integers(0, SLOTS - 1)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), slots, st.integers(1, PER_SLOT * PAGE)),
        st.tuples(st.just("share"), slots, slots, st.integers(0, PER_SLOT)),
        st.tuples(st.just("release"), slots),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(steps)
def test_any_history_leaves_every_page_free_or_counted(steps):
    pages = PageAllocator(COUNT, PAGE, SLOTS, PER_SLOT)
    for name, slot, *rest in steps:
        before = [list(owned) for owned in pages.pages_of_slot]
        if name == "reserve":
            need = -(-rest[0] // PAGE) - len(before[slot])
            if need > len(pages.free_pages):
                with pytest.raises(OutOfPages):
                    pages.reserve(slot, rest[0])
                assert pages.pages_of_slot == before  # all or nothing
            else:
                new = pages.reserve(slot, rest[0])
                assert pages.pages_of_slot[slot] == before[slot] + new and len(new) == max(need, 0)
                assert not {page for owned in before for page in owned} & set(new)
        elif name == "share" and not before[slot]:
            pages.reserve(slot, 0, before[rest[0]][: rest[1]])
        elif name == "release":
            pages.release(slot)
            pages.release(slot)  # twice is once
        check(pages)
    for slot in range(SLOTS):
        pages.release(slot)
    check(pages)
    assert in_use(pages) == 0


def test_shared_pages_outlive_the_slot_that_took_them():
    pages = PageAllocator(COUNT, PAGE, SLOTS, PER_SLOT)
    prompt = pages.reserve(0, 2 * PAGE)
    pages.reserve(1, 0, prompt)
    own = pages.reserve(1, 3 * PAGE)
    pages.release(0)
    assert in_use(pages) == 3 and pages.pages_of_slot[1] == prompt + own
    assert not set(pages.reserve(2, 6 * PAGE)) & {*prompt, *own}
    with pytest.raises(AssertionError, match="holds pages"):
        pages.reserve(1, 0, prompt)
