"""Layers with a sliding window keep a ring of pages for each slot, and give the same tokens."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
import test_drafts
import test_turns
from hypothesis import given
from hypothesis import strategies as st
from test_engine import (
    CONFIGS,
    GROUP,
    TEMPERATURE,
    Completions,
    assert_empty,
    assert_same,
    by_key,
    complete,
    make,
    new_engine,
    params_on,
    seed_on,
    text_of,
)
from tiny import spec_of, tiny_settings

from jzero.blueprint import without_training
from jzero.config import RolloutConfig
from jzero.config.drafts import History
from jzero.decoder import rings
from jzero.decoder.abstract_calls import abstract_calls
from jzero.decoder.engine import Engine, Samples
from jzero.decoder.rings import Rings, pages_of_ring
from jzero.decoder.scheduler import Scheduler
from jzero.decoder.scoring import Scoring, score_all
from jzero.decoder.sequence import Groups, make_groups
from jzero.model import qwen
from jzero.model.architecture import ATTENTION, SLIDING
from jzero.planning import kv_pool
from jzero.planning.models import KNOWN_MODELS
from jzero.planning.planned_run import pages_that_fit, pool_bytes
from jzero.sharding.mesh import make_mesh, param_shardings

WINDOW = 16
# As Gemma 3, whose first layers have windows, and as models in which every other layer has one.
CONFIGS["local"] = replace(
    CONFIGS["gemma3"],
    num_hidden_layers=4,
    layer_types=(SLIDING, SLIDING, ATTENTION, SLIDING),
    sliding_window=WINDOW,
)
CONFIGS["alternating"] = replace(
    CONFIGS["local"], layer_types=(SLIDING, ATTENTION, SLIDING, ATTENTION)
)
# Prompts of up to 20 tokens and 44 more: four windows.
MAX_NEW = 44
LONG = {"max_new_tokens": MAX_NEW, "num_slots": 8, "page_size": 4, "decode_steps": 4}
# Those of 17 and 18 tokens begin to decode with the window in five pages.
LENGTHS = (20, 17, 9, 18)
PROMPTS = [
    np.random.default_rng(length).integers(0, 96, length).astype(np.int32) for length in LENGTHS
]

pytestmark = pytest.mark.usefixtures("quick_compilation")


def decode(engine: Engine) -> Completions:
    return complete(engine, PROMPTS, max_new=MAX_NEW)[0]


def with_all_pages(name: str = "local", **settings: object) -> Engine:
    """Returns a decoder whose layers keep all pages."""
    engine = make(name, **(LONG | settings), prefix_cache="on")
    assert not engine.has_rings
    return engine


# -- the sizes -------------------------------------------------------------------------------------


@given(st.integers(1, 70), st.integers(1, 20), st.integers(0, 40))
def test_a_ring_holds_a_window_wherever_it_begins_and_no_page_more(
    window: int, page_size: int, ahead: int
) -> None:
    def pages_between(newest: int) -> int:
        return (newest + ahead) // page_size - (newest - window + 1) // page_size + 1

    most = max(pages_between(window + place) for place in range(page_size))

    assert pages_of_ring(window, page_size, ahead) == max(most, 1)


def test_rings_lie_apart_in_the_rows_of_their_layer() -> None:
    sizes = Rings(pages=3, slots=4, scoring_rows=2)
    pages = rings.pages_of_layers(CONFIGS["local"], sizes, 50)
    first_rows = rings.first_rows(pages)
    assert pages == [19, 19, 50, 19]
    assert list(first_rows) == [0, 19, 38, 88]

    rows = np.asarray(rings.ring_rows(sizes, np.arange(7), np.arange(6)[None].repeat(7, 0)))

    np.testing.assert_array_equal(rows[:, :3], rows[:, 3:])  # page 3 replaces page 0
    held = rows[:6, :3].ravel()
    assert sorted(held) == list(range(1, 19))  # all but the scratch page, each once
    assert not rows[6].any()  # there is no such ring


def test_a_pool_for_short_sequences_has_no_rings() -> None:
    """Rings of 8 slots and a row for scoring have 9 * 5 pages and the scratch page."""
    assert make("local", **LONG).program_settings.rings == Rings(5, 8, 1)
    assert new_engine("local", **LONG, num_pages=46).has_rings
    assert not new_engine("local", **LONG, num_pages=45).has_rings
    assert not new_engine("qwen2", **LONG).has_rings


def test_a_decoder_with_rings_caches_no_prefixes() -> None:
    evaluation = Samples(is_trained=False)
    assert not make("local", **LONG).caches_prefixes(evaluation)
    assert make("qwen2", **LONG).caches_prefixes(evaluation)
    assert with_all_pages().caches_prefixes(evaluation)

    spec = spec_of(tiny_settings())
    sampling = without_training(spec).sampling
    assert sampling and sampling.rollout.prefix_cache == "on"
    assert spec.sampling
    off = replace(spec.sampling.rollout, prefix_cache="off")
    without_cache = replace(spec, sampling=replace(spec.sampling, rollout=off))
    assert without_training(without_cache) is without_cache


# -- the same tokens -------------------------------------------------------------------------------

HISTORY = History(tokens=3, reach=48, cost=1.0)
ARRANGEMENTS = {
    "groups": {},
    "alternating": {"name": "alternating"},
    "page of 1": {"page_size": 1, "num_slots": 3},
    "preempted": {"num_pages": 60},
    "4 shards x tensor 2": {"shape": (4, 2)},
    "int8": {"kv_dtype": "int8"},
}


@pytest.mark.parametrize(
    "arrangement",
    ARRANGEMENTS,
)
def test_tokens_are_those_of_layers_that_keep_all_pages(arrangement: str) -> None:
    settings = {"name": "local"} | LONG | ARRANGEMENTS[arrangement]
    engine = make(**settings)
    assert engine.has_rings

    completions, scheduler = complete(engine, PROMPTS, max_new=MAX_NEW)

    kept = {name: settings[name] for name in ("name", "kv_dtype") if name in settings}
    # An int8 cache is rounded alike, so only the order of sums differs.
    assert_same(completions, decode(with_all_pages(**kept)), atol=1e-4)
    assert max(len(sequence) for sequence in completions.values()) > 3 * WINDOW
    assert (scheduler.counters.preempted > 0) == (arrangement == "preempted")


def test_a_ring_with_a_page_less_gives_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest page would replace one that the window still reaches."""
    monkeypatch.setattr(rings, "pages_of_ring", lambda *sizes: pages_of_ring(*sizes) - 1)

    completions = decode(new_engine("local", **LONG))

    with pytest.raises(AssertionError):
        assert_same(completions, decode(with_all_pages()), atol=1e-4)


@pytest.mark.parametrize("chunk_tokens", [24, pytest.param(4, id="4")])
def test_preempted_sequences_are_prefilled_in_chunks(chunk_tokens: int) -> None:
    """Chunks write over the window that they read, or take several calls for a window."""
    engine = new_engine("local", **LONG, num_pages=60)
    engine.chunk_tokens = chunk_tokens

    completions, scheduler = complete(engine, PROMPTS, max_new=MAX_NEW)

    assert scheduler.counters.preempted > 0
    assert "extend_program" in vars(engine)  # it was called
    assert_same(completions, decode(with_all_pages()), atol=1e-4)


def test_rejected_drafts_leave_the_window_as_it_was() -> None:
    expected = decode(with_all_pages())
    engine = make("local", **LONG, draft=HISTORY)
    assert engine.program_settings.rings == Rings(pages_of_ring(WINDOW, 4, 3), 8, 1)

    completions, scheduler = test_drafts.complete_with(
        engine, past=expected, prompts=PROMPTS, max_new=MAX_NEW
    )

    assert_same(completions, expected, atol=1e-4)
    assert scheduler.counters.accepted_tokens > 0
    assert scheduler.counters.drafted_tokens > scheduler.counters.accepted_tokens


TURNS = test_turns.SIZES | {"page_size": 2}
STOP = ("!", "A", "Z", "k")


@pytest.mark.parametrize(
    "evict", [False, pytest.param(True, id="evicted")], ids=["kept", "evicted"]
)
def test_a_turn_may_go_on_after_its_stop_string(evict: bool) -> None:
    """Calls in flight write tokens after the end of a turn, where the reply begins."""
    engine = make("local", **TURNS)
    assert engine.has_rings

    conversation = test_turns.converse(engine, stop=STOP, evict=evict)

    test_turns.assert_same(conversation, converse_with_all_pages(), atol=1e-4)


def test_a_ring_without_room_for_these_tokens_gives_other_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rings, "tokens_ahead", lambda *settings: 0)

    conversation = test_turns.converse(new_engine("local", **TURNS), stop=STOP)

    with pytest.raises(AssertionError):
        test_turns.assert_same(conversation, converse_with_all_pages(), atol=1e-4)


@cache
def converse_with_all_pages() -> test_turns.Conversation:
    return test_turns.converse(make("local", **TURNS, prefix_cache="on"), stop=STOP)


def test_chunks_replace_the_pages_that_they_read_without_a_copy_of_the_pool() -> None:
    engine = new_engine("local", **(LONG | {"num_slots": 128, "max_new_tokens": 512}))
    engine.chunk_tokens = 32
    shardings = param_shardings(engine.model, engine.mesh)
    params = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, np.float32, sharding=place),
        qwen.abstract(engine.model),
        shardings,
    )
    calls = abstract_calls(engine, params, [])
    [name] = [name for name in calls if name.startswith("extend")]
    program, arguments = calls[name]

    memory = program.lower(*arguments).compile().memory_analysis()

    assert memory.temp_size_in_bytes < pool_bytes(engine, engine.pages_per_shard - 1) / 4


# -- scoring ---------------------------------------------------------------------------------------

SCORED = [
    np.random.default_rng(length).integers(0, 96, length).astype(np.int32)
    for length in (62, 13, 50, 61)
]


def score(engine: Engine) -> list[np.ndarray]:
    """Returns the log-probs of the tokens of `SCORED`."""
    scorings = [Scoring(tokens) for tokens in SCORED]
    with jax.transfer_guard("disallow"):
        score_all(engine, params_on(engine), scorings)
    assert_empty(engine)
    return [scoring.scores.logps for scoring in scorings]


@cache
def scores_with_all_pages() -> list[np.ndarray]:
    return score(with_all_pages())


@pytest.mark.parametrize("score_tokens", [8, 64])
def test_given_tokens_have_the_scores_of_layers_that_keep_all_pages(score_tokens: int) -> None:
    """Chunks are shorter than a ring, or longer. The row for scoring serves all sequences."""
    engine = new_engine("local", **LONG)
    engine.score_tokens = score_tokens
    assert engine.scoring_rows == 1

    for found, expected in zip(score(engine), scores_with_all_pages(), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_scoring_and_sampling_do_not_touch_the_rings_of_each_other() -> None:
    """Prompts are inserted between the chunks of a sequence that is scored."""
    engine = make("local", **LONG)
    score_tokens, engine.score_tokens = engine.score_tokens, 8
    scheduler = Scheduler(engine, params_on(engine), text_of)
    groups = make_groups(PROMPTS, GROUP, MAX_NEW)
    scorings = [Scoring(tokens) for tokens in SCORED]
    for scoring in scorings:
        scheduler.scorer.submit(scoring)

    def admit_more() -> Groups:
        return [groups.pop()] if groups else []

    finished = list(scheduler.run([], GROUP, TEMPERATURE, seed_on(engine), admit_more=admit_more))

    engine.score_tokens = score_tokens
    assert_same(by_key(finished), decode(with_all_pages()), atol=1e-4)
    for scoring, expected in zip(scorings, scores_with_all_pages(), strict=True):
        np.testing.assert_allclose(scoring.scores.logps, expected, atol=1e-4)


# -- the size of the pool --------------------------------------------------------------------------


def test_sequences_that_a_pool_of_all_pages_does_not_hold_fit_with_rings() -> None:
    engine = make("local", **LONG)
    size = pool_bytes(engine, engine.pages_per_shard - 1)
    num_pages = pages_that_fit(with_all_pages(), size)
    assert num_pages < 0.52 * engine.pages_per_shard

    before, scheduler = complete(with_all_pages(num_pages=num_pages), PROMPTS, max_new=MAX_NEW)
    after, scheduler_after = complete(engine, PROMPTS, max_new=MAX_NEW)

    assert scheduler.counters.preempted > 0
    assert scheduler_after.counters.preempted == 0
    assert_same(after, before, atol=1e-4)


def test_the_pool_is_counted_by_kind_of_layer(capsys: pytest.CaptureFixture[str]) -> None:
    engine = make("local", **LONG)
    page = 2 * 2 * 16 * 4 * 4  # keys and values of 2 heads of 16 numbers, 4 tokens of 4 bytes
    assert pool_bytes(engine, 128) == page * (129 + 3 * 46)
    # Without rings, below their size.
    assert pool_bytes(engine, 45) == page * 4 * 46 and pool_bytes(engine, 30) == page * 4 * 31
    for pages in (20, 45, 46, 100, 128):
        assert pages_that_fit(engine, pool_bytes(engine, pages) + page / 2) == pages

    room = kv_pool.Room(pool_bytes(engine, 100), "the test says so", 1e9)
    assert kv_pool.size_pool(engine.settings, engine, room).num_pages == 100
    assert (
        "; 3 of 4 layers keep only the newest 20 tokens of each slot\n" in capsys.readouterr().out
    )
    kept = with_all_pages()
    kv_pool.size_pool(kept.settings, kept, None)
    assert "; 3 of 4 layers have a window of 16 tokens, and keep all" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, before, after",
    [("gemma-3-1b-pt", 104.0, 30.0), ("gemma-3-4b-pt", 544.0, 219.0)],
)
def test_gemma_keeps_a_fraction(name: str, before: float, after: float) -> None:
    """In MiB of a sequence of 4,096 tokens."""
    models = {n: m for n, m in KNOWN_MODELS.items() if n.startswith("google/gemma-3")}
    mesh = make_mesh(jax.devices()[:1], {"slots": 1, "tensor": 1})

    def mib_of_sequence(prefix_cache: str) -> float:
        settings = RolloutConfig(
            num_slots=64,
            max_prompt_tokens=1024,
            max_new_tokens=3072,
            kv_dtype="bfloat16",
            prefix_cache=prefix_cache,
        )
        engine = Engine(models[f"google/{name}"], settings, mesh, (), "bfloat16")
        return pool_bytes(engine, engine.pages_per_shard - 1) / 64 / 2**20

    assert mib_of_sequence("on") == pytest.approx(before, rel=0.01)
    assert mib_of_sequence("auto") == pytest.approx(after, rel=0.01)
