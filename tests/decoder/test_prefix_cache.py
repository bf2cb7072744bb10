"""The prefix cache: the tree against a dictionary of prefixes, and sequences against no cache."""

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import jax
import numpy as np
import pytest
import test_adapter_bank
import test_engine
import test_turns
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import make, new_engine, params_on, seed_on, text_of

from jzero.decoder import chunked_prefill
from jzero.decoder.adapter_bank import HeldAdapter
from jzero.decoder.engine import ROLLOUTS, Engine, Samples
from jzero.decoder.pages import OutOfPages, PageAllocator
from jzero.decoder.prefix_cache import PrefixCache, page_keys, prefix_hashes
from jzero.decoder.scheduler import Scheduler
from jzero.decoder.sequence import DecodeCounters, Groups, Sequence, make_groups

pytestmark = pytest.mark.usefixtures("quick_compilation")

PAGE = 4
EVALUATION = Samples(is_trained=False)


# -- the tree --------------------------------------------------------------------------------------

NUM_PAGES = 10
NUM_SLOTS = 3


@dataclass
class Prefix:
    """A cached prefix in the model of the cache."""

    page: int
    last_use: int


class SlowCache:
    """The same cache as a dictionary of all prefixes."""

    def __init__(self) -> None:
        self.prefixes: dict[tuple[str, bytes], Prefix] = {}
        self.clock = 0

    def find(self, weights: str, keys: list[bytes]) -> list[int]:
        pages = []
        for count in range(1, len(keys) + 1):
            prefix = self.prefixes.get((weights, b"".join(keys[:count])))
            if prefix is None:
                break
            pages.append(prefix.page)
        return pages

    def insert(self, weights: str, keys: list[bytes], pages: list[int]) -> None:
        self.clock += 1
        for count in range(1, len(keys) + 1):
            prefix = b"".join(keys[:count])
            known = self.prefixes.get((weights, prefix), Prefix(pages[count - 1], 0))
            self.prefixes[weights, prefix] = Prefix(known.page, self.clock)

    def evict(self, held: set[int]) -> None:
        """Removes the least recently used prefix, the longest of several, and its extensions."""
        unheld = [key for key, prefix in self.prefixes.items() if prefix.page not in held]

        def age(key: tuple[str, bytes]) -> tuple[int, int]:
            return self.prefixes[key].last_use, -len(key[1])

        weights, oldest = min(unheld, key=age)
        for key in list(self.prefixes):
            if key[0] == weights and key[1].startswith(oldest):
                del self.prefixes[key]


def check_pages(allocators: list[PageAllocator], caches: list[PrefixCache]) -> None:
    """Asserts that every page is free or held, and that the counts are those of its holders."""
    for allocator, cache in zip(allocators, caches, strict=True):
        holders = Counter(node.page for node in cache.nodes)
        assert not holders or max(holders.values()) == 1
        for pages in allocator.pages_of_slot:
            holders.update(pages)
        counts = dict(enumerate(allocator.reference_counts.tolist()))
        assert {page: count for page, count in counts.items() if count} == dict(holders)
        assert not set(allocator.free_pages) & set(holders)
        assert len(allocator.free_pages) + len(holders) == len(counts) - 1


actions = st.lists(
    st.tuples(
        st.integers(0, NUM_SLOTS - 1),
        st.sampled_from("ab"),
        st.lists(st.integers(0, 1), min_size=1, max_size=4),  # one number for each page
        st.booleans(),
    ),
    max_size=30,
)


@given(actions)
@settings(max_examples=300, deadline=None)
def test_the_tree_is_a_dictionary_of_prefixes_with_the_oldest_evicted_first(actions) -> None:
    allocator = PageAllocator(NUM_PAGES + 1, PAGE, NUM_SLOTS, 4)
    cache, slow = PrefixCache(allocator), SlowCache()
    for slot, weights, numbers, is_cached in actions:
        tokens = np.repeat(np.array(numbers, np.int32), PAGE)
        keys = page_keys(tokens, PAGE)
        allocator.release(slot)
        shared = cache.find(weights, keys)
        assert shared == slow.find(weights, keys)

        held = {page for pages in allocator.pages_of_slot for page in pages} | set(shared)
        num_missing = len(keys) - len(shared) - len(allocator.free_pages)
        cached_before = {prefix.page for prefix in slow.prefixes.values()}
        if num_missing > len(cached_before - held):
            with pytest.raises(OutOfPages):
                allocator.reserve(slot, len(tokens), shared)
            num_missing = len(cached_before - held)
        else:
            allocator.reserve(slot, len(tokens), shared)
        for _ in range(num_missing):
            slow.evict(held)

        pages = allocator.pages_of_slot[slot]
        if is_cached and pages:
            cache.insert(weights, keys, pages)
            slow.insert(weights, keys, pages)
        check_pages([allocator], [cache])
        assert {node.page for node in cache.nodes} == {
            prefix.page for prefix in slow.prefixes.values()
        }

    for slot in range(NUM_SLOTS):
        allocator.release(slot)
    cache.evict(NUM_PAGES)
    assert not len(cache) and not cache.roots
    assert len(allocator.free_pages) == NUM_PAGES


def test_a_page_that_is_shared_is_not_reclaimed_for_its_own_sequence() -> None:
    allocator = PageAllocator(4, PAGE, 2, 4)
    cache = PrefixCache(allocator)
    keys = page_keys(np.arange(3 * PAGE, dtype=np.int32), PAGE)
    allocator.reserve(0, 3 * PAGE)
    cache.insert("weights", keys, allocator.pages_of_slot[0])
    allocator.release(0)

    shared = cache.find("weights", keys[:1])
    allocator.reserve(1, 3 * PAGE, shared)

    assert allocator.pages_of_slot[1][:1] == shared
    assert cache.find("weights", keys) == shared
    with pytest.raises(OutOfPages):
        allocator.reserve(0, PAGE)


def test_prefix_hashes_differ_in_the_weights_and_in_every_page() -> None:
    keys = page_keys(np.arange(2 * PAGE + 1, dtype=np.int32), PAGE)
    assert len(keys) == 2
    assert prefix_hashes("a", keys)[:1] == prefix_hashes("a", keys[:1])
    assert not set(prefix_hashes("a", keys)) & set(prefix_hashes("b", keys))
    assert prefix_hashes("a", keys)[1] not in prefix_hashes("a", keys[::-1])


# -- sequences -------------------------------------------------------------------------------------

SIZES = {"page_size": PAGE, "num_slots": 4, "decode_steps": 4}
PREFIX = np.random.default_rng(7).integers(0, 96, 16).astype(np.int32)
OTHER = np.random.default_rng(8).integers(0, 96, 12).astype(np.int32)


def prompts_with(prefix: np.ndarray, count: int, seed: int = 0) -> list[np.ndarray]:
    """Returns prompts that begin with `prefix` and differ in their last 2 to 4 tokens."""
    rng = np.random.default_rng(seed)
    suffixes = [rng.integers(0, 96, 2 + number % 3) for number in range(count)]
    return [np.concatenate([prefix, suffix]).astype(np.int32) for suffix in suffixes]


PROMPTS = [*prompts_with(PREFIX, 6), *prompts_with(OTHER, 3), PREFIX[:1], PREFIX[:9]]


def decode(
    engine: Engine,
    rounds: SequenceOf[Groups],
    samples: Samples = EVALUATION,
    temperature: float = 0.7,
    group_size: int = 1,
) -> DecodeCounters:
    """Decodes each round of groups once the one before has ended, in one run."""
    scheduler = Scheduler(engine, params_on(engine), text_of, samples)
    waiting: Iterator[Groups] = iter(rounds[1:])

    def admit_more() -> Groups:
        check_pages(engine.page_allocators, engine.prefix_caches)
        is_busy = scheduler.decoding or scheduler.queue or any(scheduler.pending)
        return [] if is_busy else next(waiting, [])

    seed = seed_on(engine)
    with jax.transfer_guard("disallow"):
        run = scheduler.run(rounds[0], group_size, temperature, seed, admit_more=admit_more)
        finished = list(run)
    assert len(finished) == sum(len(group) for groups in rounds for group in groups)
    test_engine.assert_empty(engine)
    return scheduler.counters


def in_rounds(prompts: list[np.ndarray], group: int = 1, size: int = 3) -> list[Groups]:
    """Returns the groups of prompts, a few for each round."""
    groups = make_groups(prompts, group, 6)
    return [groups[start : start + size] for start in range(0, len(groups), size)]


def completions(rounds: list[Groups]) -> test_engine.Completions:
    return test_engine.by_key([one for groups in rounds for group in groups for one in group])


ARRANGEMENTS = {
    "qwen2": {},
    # With auto, and without a cache, layers with a window keep only the window.
    "gemma3": {"name": "gemma3", "prefix_cache": "on"},
    "llama": {"name": "llama"},
    "few pages": {"num_pages": 14, "max_new_tokens": 8},
    "2 shards": {"shape": (2, 1), "num_slots": 6},
    "int8": {"kv_dtype": "int8"},
    "fp8": {"kv_dtype": "fp8"},
}


@pytest.mark.parametrize(
    "arrangement",
    ["qwen2", "few pages", "gemma3", "llama", "2 shards", "int8", "fp8"],
)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_tokens_are_the_same_with_the_cache_and_without(arrangement, temperature) -> None:
    chosen = SIZES | ARRANGEMENTS[arrangement]
    with_cache, without = in_rounds(PROMPTS), in_rounds(PROMPTS)

    counters = decode(make(**chosen), with_cache, temperature=temperature)
    without_cache = make(**(chosen | {"prefix_cache": "off"}))
    plain = decode(without_cache, without, temperature=temperature)
    assert without_cache.has_rings == (arrangement == "gemma3")

    atol = 2e-2 if arrangement in ("int8", "fp8") else 1e-4
    test_engine.assert_same(completions(with_cache), completions(without), atol)
    assert counters.cached_tokens > 0 and plain.cached_tokens == 0
    # The last token of a cached sequence is not prefilled either.
    if not counters.preempted and not plain.preempted:
        num_saved = plain.prefill_tokens - counters.prefill_tokens
        assert num_saved >= counters.cached_tokens
    assert counters.prefill_tokens < plain.prefill_tokens


def test_prompts_that_arrive_together_compute_their_prefix_once() -> None:
    groups = make_groups(prompts_with(PREFIX, 4), 1, 6)

    counters = decode(make(**SIZES), [groups])

    assert counters.cached_tokens == 3 * len(PREFIX)
    assert [group[0].cached_tokens for group in groups] == [0, 16, 16, 16]


def test_samples_of_a_prompt_start_from_its_cached_pages() -> None:
    """The second request asks for three samples of a prompt that is cached."""
    prompt = prompts_with(PREFIX, 1)[0]
    rounds, plain_rounds = in_rounds([prompt] * 2, 3, 1), in_rounds([prompt] * 2, 3, 1)

    counters = decode(make(**SIZES), rounds, group_size=3)
    plain = decode(make(**SIZES, prefix_cache="off"), plain_rounds, group_size=3)

    test_engine.assert_same(completions(rounds), completions(plain_rounds), 1e-4)
    assert counters.cached_tokens == len(PREFIX)
    assert counters.prefill_tokens < plain.prefill_tokens


def test_a_request_that_was_cancelled_in_the_queue_ends_and_leaves_its_pages() -> None:
    """Without a cached prefix, and with one; the request after it is answered."""
    prompt = prompts_with(PREFIX, 1)[0]
    rounds = in_rounds([prompt] * 4, 1, 1)
    for groups in (rounds[0], rounds[2]):
        groups[0][0].length_limit = 0  # as `serving.worker` cancels

    decode(make(**SIZES), rounds)

    assert all(group[0].is_finished for groups in rounds for group in groups)
    plain = in_rounds([prompt] * 4, 1, 1)
    decode(make(**SIZES, prefix_cache="off"), plain)
    for number in (1, 3):
        assert rounds[number][0][0].new_tokens == plain[number][0][0].new_tokens


def test_the_next_turn_of_a_chat_computes_only_what_is_new() -> None:
    """A client sends the conversation so far, with the answers that it got."""
    engine = make(**SIZES, max_new_tokens=40)
    scheduler = Scheduler(engine, params_on(engine), text_of, EVALUATION)
    tokens = PREFIX
    cached = []
    turns: list[Sequence] = []

    def admit_more() -> Groups:
        nonlocal tokens
        if len(turns) == 4 or (turns and not turns[-1].is_finished):
            return []
        if turns:
            message = np.array([5, 6, len(turns)], np.int32)
            tokens = np.concatenate([turns[-1].tokens.ids, message])
        number = len(turns)
        turns.append(Sequence(number, 0, number, tokens, len(tokens) + 6))
        return [[turns[-1]]]

    for sequence in scheduler.run([], 0, 0.7, seed_on(engine), admit_more=admit_more):
        cached.append(sequence.cached_tokens)

    assert cached[0] == 0
    for before, num_cached in zip(turns[:-1], cached[1:], strict=True):
        # All full pages of the conversation whose KV is known to be written.
        assert num_cached == (len(before) - 1) // PAGE * PAGE
    test_engine.assert_empty(engine)


def test_episodes_that_lose_their_slot_return_to_their_pages() -> None:
    kept = test_turns.converse(make("qwen2", **test_turns.SIZES))
    sizes = test_turns.SIZES | {"page_size": PAGE}

    evicted = test_turns.converse(make("qwen2", **sizes, prefix_cache="on"), evict=True)
    plain = test_turns.converse(make("qwen2", **sizes), evict=True)

    test_turns.assert_same(evicted, kept)
    assert evicted.counters.cached_tokens > 0 and plain.counters.cached_tokens == 0
    assert evicted.counters.prefill_tokens < plain.counters.prefill_tokens / 2


def test_rollouts_to_train_on_use_the_cache_only_if_asked_to() -> None:
    assert not make(**SIZES).caches_prefixes(ROLLOUTS)
    assert make(**SIZES).caches_prefixes(EVALUATION)
    assert make(**SIZES, prefix_cache="on").caches_prefixes(ROLLOUTS)
    assert not make(**SIZES, prefix_cache="off").caches_prefixes(EVALUATION)
    assert not make("hybrid", **SIZES, prefix_cache="on").caches_prefixes(EVALUATION)


# -- weights ---------------------------------------------------------------------------------------


def other_weights(engine: Engine) -> dict:
    """Returns other weights with the same shapes."""
    return jax.jit(lambda params: jax.tree.map(lambda leaf: leaf * 1.25, params))(params_on(engine))


def test_keys_and_values_of_an_older_version_are_never_used() -> None:
    """Sequences of the old weights end after the change, and are cached as what they are."""
    engine = make(**SIZES)
    new_params = other_weights(engine)
    scheduler = Scheduler(engine, params_on(engine), text_of, EVALUATION)
    old = make_groups(prompts_with(PREFIX, 3), 1, 12)
    new = make_groups(prompts_with(PREFIX, 3), 1, 6)
    ended: list[Sequence] = []
    num_looks = 0

    def admit_more() -> Groups:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 3:
            assert scheduler.decoding, "the weights change while sequences decode"
            scheduler.use_weights(new_params, version=1)
        is_first = len(ended) == len(old) and num_looks > 3
        if is_first and not scheduler.queue and not scheduler.decoding:
            groups = list(new)
            new_admitted.extend(groups)
            new.clear()
            return groups
        return []

    new_admitted: Groups = []
    for sequence in scheduler.run(old, 1, 0.7, seed_on(engine), admit_more=admit_more):
        ended.append(sequence)

    assert [group[0].cached_tokens for group in old] == [0, 16, 16]
    # The first of the new ones computes the prefix again, for the two others.
    assert [group[0].cached_tokens for group in new_admitted] == [0, 16, 16]
    expected = make_groups(prompts_with(PREFIX, 3), 1, 6)
    alone = Scheduler(engine, new_params, text_of, EVALUATION)
    list(alone.run(expected, 1, 0.7, seed_on(engine), version=1))
    test_engine.assert_same(completions([new_admitted]), completions([expected]), 1e-4)
    assert completions([new_admitted])[0, 0].tokens.versions[-1] == 1


def test_equal_tokens_of_other_adapters_share_nothing() -> None:
    prompts = prompts_with(PREFIX, 2)

    def groups_of(held: dict[str, HeldAdapter]) -> Groups:
        """Returns both prompts for every adapter, all with the same noise."""
        groups: Groups = []
        for adapter in held.values():
            for prompt in prompts:
                limit = len(prompt) + 6
                groups.append([Sequence(len(groups), 0, 0, prompt, limit, adapter=adapter)])
        return groups

    answers = {}
    for choice in ("auto", "off"):
        engine = new_engine(page_size=PAGE, num_slots=4, decode_steps=4, prefix_cache=choice)
        bank, held = test_adapter_bank.full_bank(engine, test_adapter_bank.base_of(engine))
        answers[choice] = groups_of(held)
        scheduler = Scheduler(engine, bank.params, text_of, test_adapter_bank.REQUESTS)
        list(scheduler.run(answers[choice], 0, 0.7, seed_on(engine)))

    # Of each adapter, the second prompt starts from the first one's pages.
    cached = [group[0].cached_tokens for group in answers["auto"]]
    assert cached == [0, 16] * (len(cached) // 2)
    with_cache, without = (completions([groups]) for groups in answers.values())
    test_engine.assert_same(with_cache, without, 1e-4)


# -- memory ----------------------------------------------------------------------------------------


def test_ten_thousand_requests_take_no_more_than_the_pool() -> None:
    """The host's side of an engine: requests come and go in random order, and pages run out."""
    engine = new_engine(page_size=PAGE, num_slots=6, num_pages=30)
    [cache], [allocator] = engine.prefix_caches, engine.page_allocators
    rng = np.random.default_rng(0)
    prefixes = [rng.integers(0, 96, 12).astype(np.int32) for _ in range(8)]
    num_cached = num_lacking = 0
    most_roots = 0
    for request in range(10_000):
        free = engine.free_slots(0)
        if not free or rng.random() < 0.4:
            for slot in rng.permutation(list(engine.placements))[: rng.integers(1, 4)]:
                engine.free_resource(int(slot))
            free = engine.free_slots(0)
        prompt = np.concatenate([prefixes[rng.integers(8)], rng.integers(0, 96, 5)]).astype(
            np.int32
        )
        sequence = Sequence(request, 0, request, prompt, len(prompt) + int(rng.integers(1, 20)))
        version = request // 1000
        keys = page_keys(prompt[:-1], PAGE)
        found = cache.find((version, sequence.adapter, sequence.owner), keys)
        try:
            item = chunked_prefill.place(engine, sequence, free[0], version, found)
        except OutOfPages:
            num_lacking += 1
            # The cache has given up all pages that it can.
            unheld = [n.page for n in cache.nodes if allocator.reference_counts[n.page] == 1]
            assert set(unheld) <= set(found)
            continue
        num_cached += item.first
        pages = engine.pages_of(0, free[0])
        cache.insert(engine.placements[free[0]].weights, keys, pages)
        assert len(cache) <= 30
        most_roots = max(most_roots, len(cache.roots))
        check_pages([allocator], [cache])

    assert num_cached > 10_000 and num_lacking
    assert most_roots <= 2, "the roots of old versions go with their last page"
    for slot in list(engine.placements):
        engine.free_resource(slot)
    engine.clear_prefix_caches()
    test_engine.assert_empty(engine)


def test_a_sequence_in_a_slot_keeps_its_place_as_long_as_there_is_a_cached_page() -> None:
    """The pool is full of cached pages; decoding takes them, the oldest first."""
    engine = make(**SIZES, num_pages=14, max_new_tokens=8)
    old, recent = OTHER, PREFIX[:12]
    rounds = in_rounds([*prompts_with(old, 1), *prompts_with(recent, 1)], size=1)
    rounds += in_rounds([*prompts_with(recent, 1, seed=3)], size=1)

    counters = decode(engine, rounds)

    assert counters.preempted == 0
    assert [group[0].cached_tokens for groups in rounds for group in groups][-1] == 12
