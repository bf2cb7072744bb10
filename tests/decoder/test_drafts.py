"""Drafts: the tokens of a sequence are the same with every kind of draft and without.

Cases of the ordinary decoder, its models and its arrangements are those of test_engine.py and
test_turns.py.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_turns
from test_engine import (
    CONFIGS,
    GROUP,
    MAX_NEW,
    PROMPTS,
    SMALL,
    STOP_IDS,
    TEMPERATURE,
    Completions,
    assert_empty,
    assert_same,
    base,
    by_key,
    complete,
    make,
    new_engine,
    params_on,
    seed_on,
    text_of,
)

from jzero import attention
from jzero.config import RolloutConfig
from jzero.config.drafts import Draft, Group, History, Ngram
from jzero.decoder import draft_cost, draft_program, drafts, slot_state
from jzero.decoder.abstract_calls import abstract_calls
from jzero.decoder.engine import ROLLOUTS, Engine, Samples
from jzero.decoder.references import History as PastResponses
from jzero.decoder.references import References
from jzero.decoder.sampling import Filters
from jzero.decoder.scheduler import Scheduler
from jzero.decoder.sequence import Sequence, make_groups
from jzero.model.architecture import track_sizes
from jzero.sharding.mesh import make_mesh
from jzero.tokens import recorded_tracks

pytestmark = pytest.mark.usefixtures("quick_compilation")

# At this cost every draft is tried.
NGRAM = Ngram(tokens=3, cost=1.0)
KINDS: dict[str, Draft] = {
    "ngram": NGRAM,
    "one token": Ngram(tokens=1, match=1, cost=1.0),
    "group": Group(tokens=4, reach=64, cost=1.0),
    "history": History(tokens=5, reach=48, cost=1.0),
}


def past_of(completions: Completions) -> Callable[[Sequence], list[np.ndarray]]:
    """Returns the `past_responses` of a run whose earlier epoch gave `completions`."""

    def past_responses(sequence: Sequence) -> list[np.ndarray]:
        key = sequence.prompt_id, sequence.sample_index
        return [np.array(completions[key].new_tokens, np.int32)]

    return past_responses


def complete_with(
    engine: Engine,
    temperature: float = TEMPERATURE,
    past: Completions | None = None,
    prompts: list[np.ndarray] = PROMPTS,
    max_new: int = MAX_NEW,
    **settings: object,
) -> tuple[Completions, Scheduler]:
    """Decodes as `test_engine.complete` does, with the responses of an earlier epoch."""
    scheduler = Scheduler(
        engine, params_on(engine), text_of, past_responses=past_of(past) if past else None
    )
    scheduler.settings = replace(scheduler.settings, **settings)
    groups = make_groups(prompts, GROUP, max_new)
    seed = seed_on(engine)
    with jax.transfer_guard("disallow"):
        completions = by_key(list(scheduler.run(groups, GROUP, temperature, seed)))
    assert_empty(engine)
    return completions, scheduler


# -- the draft -------------------------------------------------------------------------------------


def slow_draft(
    references: list[int], tokens: list[int], k: int, match: int
) -> tuple[list[int], int]:
    """Returns the draft after `tokens` and the length of its match, searched one by one."""
    text = [*references, *tokens]
    end = len(text) - 1
    best, longest = -1, 0
    for place in range(end):
        length = 0
        while length < min(match, len(tokens), place + 1):
            if text[place - length] != text[end - length]:
                break
            length += 1
        if length and length >= longest:
            best, longest = place, length
    if not longest:
        return [], 0
    draft: list[int] = []
    for i in range(k):
        token = text[best + 1 + i % (end - best)]
        if token < 0:
            break
        draft.append(token)
    return draft, longest if draft else 0


@pytest.mark.parametrize("reach, match", [(0, 1), (0, 4), (9, 3)])
def test_a_draft_follows_the_latest_of_the_longest_matches(reach: int, match: int) -> None:
    rng = np.random.default_rng(reach + match)
    slots, longest, k = 200, 30, 4
    lengths = rng.integers(1, longest, slots)
    tokens = rng.integers(0, 4, (slots, longest)).astype(np.int32)
    references = rng.integers(-1, 4, (slots, reach)).astype(np.int32)
    references[:, reach - 1 :] = drafts.SEPARATOR
    texts = jnp.array(np.concatenate([references, tokens], axis=1))

    found = drafts.find(drafts.Drafting(k, match, reach), texts, jnp.array(lengths - 1))

    for slot, length in enumerate(lengths):
        want, want_match = slow_draft(
            references[slot].tolist(), tokens[slot, :length].tolist(), k, match
        )
        count = int(found.counts[slot])
        assert found.tokens[slot, :count].tolist() == want
        assert found.matches[slot] == want_match


# -- the same tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, TEMPERATURE])
@pytest.mark.parametrize("kind", [*KINDS])
def test_every_kind_of_draft_gives_the_same_tokens(kind: str, temperature: float) -> None:
    want = base("qwen2", temperature)
    got, scheduler = complete_with(make(draft=KINDS[kind]), temperature, want)
    assert_same(got, want)
    counters = scheduler.counters
    assert counters.drafted_tokens > 0
    assert counters.draft_passes == counters.decoded_tokens - counters.accepted_tokens
    # Responses at this temperature hardly repeat themselves.
    if temperature == 0 or kind == "history":
        assert counters.accepted_tokens > 0
    if kind == "history":
        # The earlier responses were the same: nearly every pass has a whole draft.
        assert counters.decoded_tokens > 3 * counters.draft_passes


FAMILIES = ["llama", "qwen3", "gemma3", "qwen3_moe"]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gives_the_same_tokens(name: str) -> None:
    want = base(name)
    got, scheduler = complete_with(make(name, draft=KINDS["history"]), past=want)
    assert_same(got, want)
    assert scheduler.counters.decoded_tokens > 3 * scheduler.counters.draft_passes


SHORT_HISTORY = History(tokens=3, reach=48, cost=1.0)
ARRANGEMENTS = {
    "8 shards": {"shape": (8, 1), "page_size": 4, "decode_steps": 5},
    "2 shards x tensor 2": {"shape": (2, 2), "page_size": 4, "decode_steps": 7},
    # Calls of 1 pass, because a pass reserves pages for its whole draft.
    "preempted": {"num_slots": 6, "page_size": 4, "decode_steps": 1, "num_pages": 14},
    "pages of 1": {"num_slots": 3, "page_size": 1, "decode_steps": 1},
}


@pytest.mark.parametrize("arrangement", [*ARRANGEMENTS])
def test_drafts_do_not_depend_on_the_arrangement(arrangement: str) -> None:
    engine = make(draft=SHORT_HISTORY, **ARRANGEMENTS[arrangement])
    got, scheduler = complete_with(engine, past=base())
    assert_same(got, base())
    assert scheduler.counters.accepted_tokens > 0
    assert (scheduler.counters.preempted > 0) == (arrangement == "preempted")


def test_preempted_sequences_are_prefilled_in_chunks() -> None:
    engine = new_engine(draft=SHORT_HISTORY, **ARRANGEMENTS["preempted"])
    engine.chunk_tokens = 8
    got, scheduler = complete_with(engine, past=base())
    assert scheduler.counters.preempted > 0
    assert_same(got, base())


def test_an_int8_cache_gives_the_same_tokens() -> None:
    settings = {"kv_dtype": "int8"}
    want, _ = complete(make(**settings))
    got, scheduler = complete_with(make(draft=KINDS["history"], **settings), past=want)
    assert scheduler.counters.accepted_tokens > 0
    # A prompt is read rounded by prefill and by decoding alike, so only the order of sums differs.
    assert_same(got, want, atol=1e-4)


@pytest.mark.parametrize(
    "filters",
    [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.1}, {"top_k": 7, "top_p": 0.8}],
    ids=str,
)
def test_filters_give_the_same_tokens(filters: dict[str, float]) -> None:
    want, _ = complete(make(**filters), temperature=1.3)
    got, scheduler = complete_with(make(draft=KINDS["history"], **filters), 1.3, want)
    assert_same(got, want)
    assert scheduler.counters.decoded_tokens > 3 * scheduler.counters.draft_passes


def test_stop_strings_end_the_same_responses() -> None:
    stop = ("A", "k", "Z", "5")
    uncut = base()
    want, _ = complete(make(), stop=stop)
    got, scheduler = complete_with(make(draft=KINDS["history"]), past=base(), stop=stop)
    assert_same(got, want)
    assert any(want[key].new_tokens != uncut[key].new_tokens for key in want)
    assert scheduler.counters.accepted_tokens > 0


@pytest.mark.parametrize("name", ["qwen2", "hybrid"])
def test_requests_keep_their_filters_and_their_temperature(name: str) -> None:
    """As in a server: every sequence has its own, and a call may have fewer steps."""
    samples = Samples(is_trained=False, has_choices=True)
    choices = [Filters(), Filters(top_k=3), Filters(top_p=0.5), Filters(min_p=0.2)]
    temperatures = [1.0, 0.0, 1.2, 0.8]

    def decode(engine: Engine, call_steps: int) -> tuple[list[list[int]], Scheduler]:
        scheduler = Scheduler(engine, params_on(engine), text_of, samples)
        engine.call_steps = call_steps
        groups = make_groups(PROMPTS, 1, MAX_NEW)
        for group, filters, temperature in zip(groups, choices, temperatures, strict=True):
            group[0].filters, group[0].temperature = filters, temperature
        for _ in scheduler.run(groups, 0, 1.0, seed_on(engine)):
            pass
        engine.call_steps = engine.settings.decode_steps
        assert_empty(engine)
        return [group[0].new_tokens for group in groups], scheduler

    want, _ = decode(make(name), 8)
    for call_steps in (8, 3):
        got, scheduler = decode(make(name, draft=NGRAM), call_steps)
        assert got == want
        assert scheduler.counters.accepted_tokens > 0


@pytest.mark.parametrize("evict", [False, True])
@pytest.mark.parametrize("stop", [(), ("!", "A", "Z", "k")], ids=["ids", "strings"])
def test_turns_give_the_same_episodes(stop: tuple[str, ...], evict: bool) -> None:
    """Replies of 2 to 12 tokens are longer than a draft, and longer than a call."""
    want = test_turns.converse(make(**test_turns.SIZES), stop=stop)
    engine = make(draft=NGRAM, **test_turns.SIZES)
    got = test_turns.converse(engine, stop=stop, evict=evict)
    test_turns.assert_same(got, want)
    assert got.tokens.keys() == want.tokens.keys()
    # The tokens of a reply need no pass of their own.
    if not evict:
        assert got.counters.draft_passes < got.counters.decoded_tokens / 1.4


def accept_all(drafted: jax.Array, sampled: jax.Array) -> jax.Array:
    """A wrong rule of acceptance."""
    return jnp.ones(drafted.shape, bool)


def test_a_wrong_rule_of_acceptance_gives_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_program, "is_accepted", accept_all)
    got, _ = complete_with(new_engine(draft=NGRAM))
    with pytest.raises(AssertionError):
        assert_same(got, base())


@pytest.mark.parametrize("name", ["qwen3_moe", "hybrid_moe"])
def test_recorded_tracks_are_those_of_the_same_tokens(name: str) -> None:
    """The routes of inputs, and the tokens that the filters keep."""
    mesh = make_mesh(jax.devices()[:1], {"slots": 1, "tensor": 1})
    tracks = recorded_tracks(track_sizes(CONFIGS[name], 5, True))
    assert {name for name, _ in tracks} >= {"routes", "kept"}

    def recorded(draft: Draft | None) -> Completions:
        settings = RolloutConfig(**(SMALL | {"top_k": 5, "draft": draft}))
        engine = Engine(CONFIGS[name], settings, mesh, STOP_IDS, "float32", tracks=tracks)
        return complete_with(engine)[0]

    want, got = recorded(None), recorded(NGRAM)
    assert_same(got, want, STATE_TOLERANCE if name in HYBRIDS else 1e-5)
    for key, sequence in want.items():
        for name, _ in tracks:
            np.testing.assert_array_equal(got[key].tokens[name], sequence.tokens[name])


# -- gated delta nets ------------------------------------------------------------------------------

HYBRIDS = ["hybrid", "hybrid_moe"]
# As in test_slot_state.py: a state carries the rounding on from token to token.
STATE_TOLERANCE = 2e-5


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("kind", [*KINDS])
@pytest.mark.parametrize("temperature", [0.0, TEMPERATURE])
def test_states_follow_the_accepted_tokens(temperature: float, kind: str, name: str) -> None:
    want = base(name, temperature)
    got, scheduler = complete_with(make(name, draft=KINDS[kind]), temperature, want)
    assert_same(got, want, STATE_TOLERANCE)
    counters = scheduler.counters
    # Some passes keep all of their tokens, and others only a part.
    assert 0 < counters.accepted_tokens < counters.drafted_tokens
    if kind == "history":
        assert counters.decoded_tokens > 3 * counters.draft_passes


@pytest.mark.parametrize("tokens", [2, 16])
def test_states_follow_drafts_of_any_length(tokens: int) -> None:
    draft = History(tokens=tokens, reach=48, cost=1.0)
    got, scheduler = complete_with(make("hybrid", draft=draft), past=base("hybrid"))
    assert_same(got, base("hybrid"), STATE_TOLERANCE)
    assert scheduler.counters.accepted_tokens > 0


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("arrangement", [*ARRANGEMENTS])
def test_states_do_not_depend_on_the_arrangement(arrangement: str, name: str) -> None:
    engine = make(name, draft=SHORT_HISTORY, **ARRANGEMENTS[arrangement])
    got, scheduler = complete_with(engine, past=base(name))
    assert_same(got, base(name), STATE_TOLERANCE)
    assert scheduler.counters.accepted_tokens > 0
    assert (scheduler.counters.preempted > 0) == (arrangement == "preempted")


@pytest.mark.parametrize("evict", [False, True])
@pytest.mark.parametrize("stop", [(), ("!", "A", "Z", "k")], ids=["ids", "strings"])
def test_states_follow_the_tokens_of_replies(stop: tuple[str, ...], evict: bool) -> None:
    """Accepted as a whole, over several passes and calls; also where an episode is prefilled."""
    want = test_turns.converse(make("hybrid", **test_turns.SIZES), stop=stop)
    engine = make("hybrid", draft=NGRAM, **test_turns.SIZES)
    got = test_turns.converse(engine, stop=stop, evict=evict)
    test_turns.assert_same(got, want, STATE_TOLERANCE)
    assert got.tokens.keys() == want.tokens.keys()
    if not evict:
        assert got.counters.draft_passes < got.counters.decoded_tokens


def test_stop_strings_end_the_same_responses_of_a_hybrid() -> None:
    stop = ("A", "k", "Z", "5")
    uncut = base("hybrid")
    want, _ = complete(make("hybrid"), stop=stop)
    got, scheduler = complete_with(make("hybrid", draft=KINDS["history"]), past=uncut, stop=stop)
    assert_same(got, want, STATE_TOLERANCE)
    assert any(want[key].new_tokens != uncut[key].new_tokens for key in want)
    assert scheduler.counters.accepted_tokens > 0


def test_exact_states_have_the_same_bits() -> None:
    mesh = make_mesh(jax.devices()[:1], {"slots": 1, "tensor": 1})

    def decode(draft: Draft | None, past: Completions | None) -> tuple[Completions, Scheduler]:
        settings = RolloutConfig(**(SMALL | {"draft": draft}))
        engine = Engine(CONFIGS["hybrid"], settings, mesh, STOP_IDS, "float32", exact=True)
        assert engine.program_settings.attention == attention.choose("exact", mesh)
        return complete_with(engine, past=past)

    want, _ = decode(None, None)
    got, scheduler = decode(SHORT_HISTORY, want)
    assert_same(got, want, atol=0)
    assert 0 < scheduler.counters.accepted_tokens < scheduler.counters.drafted_tokens


FAULTS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "one token too many": lambda num_used: num_used + 1,
    "all tokens": lambda num_used: jnp.full_like(num_used, 99),
    "one token too few": lambda num_used: num_used - 1,
}


@pytest.mark.parametrize("fault", [*FAULTS])
def test_a_state_of_other_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    after_draft = slot_state.after_draft

    def faulty(*arguments: object) -> object:
        *arguments, num_used = arguments
        return after_draft(*arguments, FAULTS[fault](num_used))

    monkeypatch.setattr(slot_state, "after_draft", faulty)
    engine = new_engine("hybrid", draft=SHORT_HISTORY)
    got, _ = complete_with(engine, past=base("hybrid"))
    with pytest.raises(AssertionError):
        assert_same(got, base("hybrid"), STATE_TOLERANCE)


# -- references ------------------------------------------------------------------------------------


def test_a_group_has_the_responses_of_its_other_sequences() -> None:
    group, *_ = make_groups([np.arange(3, dtype=np.int32)], 3, 9)
    for number, sequence in enumerate(group):
        sequence.tokens.append([10 + number] * number)
    references = References(Group(reach=8), None)
    references.add([group])
    end = drafts.SEPARATOR
    assert references.of(group[0]).tolist() == [11, end, 12, 12, end]
    assert references.of(group[2]).tolist() == [11, end]
    assert References(Group(reach=4), None).of(group[0]).tolist() == []
    assert References(Ngram(), None).of(group[0]) is None


def test_history_keeps_the_latest_responses_of_a_problem() -> None:
    history = PastResponses(History(), 2)
    for token in (7, 8, 9):
        sequence = Sequence(0, 0, 0, np.arange(3, dtype=np.int32), 9)
        sequence.tokens.append([token])
        history.add(("math", "1"), sequence)
    assert [tokens.tolist() for tokens in history.of(("math", "1"))] == [[8], [9]]
    assert [*history.of(("math", "2"))] == []


# -- costs -----------------------------------------------------------------------------------------


def test_drafts_are_tried_as_long_as_they_pay() -> None:
    drafting = drafts.Drafting(tokens=4, match=2, reach=0)
    found = drafts.Drafts(
        tokens=jnp.zeros((2, 4), jnp.int32), counts=jnp.array([4, 4]), matches=jnp.array([2, 0])
    )
    running = jnp.array([True, False])
    outcomes = jnp.zeros((1, 2, 2))

    def gains(outcomes: jax.Array, costs: list[float]) -> np.ndarray:
        return np.asarray(drafts.gains(drafting, found, outcomes, running, jnp.array(costs)))

    def after(outcomes: jax.Array, accepted: int) -> jax.Array:
        for _ in range(20):
            is_rejected = jnp.array([accepted < 4, False])
            numbers = jnp.array([accepted, 0])
            outcomes = drafts.with_outcomes(outcomes, found, numbers, is_rejected, running)
        return outcomes

    assert drafting.lengths == (1, 2, 4)
    costs = [1.2, 1.3, 1.5]
    assert (gains(outcomes, costs) > 0).all()
    outcomes = after(outcomes, 0)
    assert (gains(outcomes, costs) < 0).all()
    np.testing.assert_array_equal(outcomes[0], [[0, 0], [0, 20]])
    # One token of every draft, so half of all that were tried: s + s^2 + s^3 + s^4 with s = 1/2.
    once = after(after(jnp.zeros((1, 2, 2)), 1), 1)
    np.testing.assert_array_equal(once[0], [[0, 40], [0, 40]])
    np.testing.assert_allclose(gains(once, [1, 1, 1]), [0.5, 0.75, 0.9375], rtol=0.1)
    assert gains(once, [1.1, 1.2, 1.8]).argmax() == 1
    # All tokens of every draft: the longest pays most, unless it costs too much.
    always = after(after(outcomes, 4), 4)
    assert gains(always, costs).argmax() == 2
    assert gains(always, [1.1, 3.0, 5.0]).argmax() == 0


@pytest.mark.parametrize("name", ["qwen2", "hybrid"])
def test_an_engine_measures_the_cost_once(capsys: pytest.CaptureFixture[str], name: str) -> None:
    engine = new_engine(name, draft=Ngram(tokens=3))
    got, _ = complete_with(engine)
    assert_same(got, base(name), STATE_TOLERANCE if name in HYBRIDS else 1e-5)
    assert engine.drafter is not None
    costs = engine.drafter.costs
    assert len(costs) == 2
    assert min(costs) >= 1
    times = f"{costs[0]:.2f}, {costs[1]:.2f}"
    line = f"drafts of 1, 3 tokens: a pass takes {times} times as long with 8 slots"
    assert line in capsys.readouterr().out
    draft_cost.measure(engine, params_on(engine), ROLLOUTS)
    assert engine.drafter.costs == costs
    assert not capsys.readouterr().out


def test_drafts_that_cannot_pay_are_off() -> None:
    engine = make(draft=Ngram(tokens=3, cost=4.0))
    got, scheduler = complete_with(engine)
    assert_same(got, base(), atol=0)
    assert scheduler.counters.draft_passes == 0
    assert engine.paying_drafter is None


@pytest.mark.parametrize("name", ["qwen2", "hybrid"])
def test_a_plan_compiles_the_pass_with_drafts(name: str) -> None:
    engine = make(name, draft=KINDS["group"])
    program, arguments = abstract_calls(engine, params_on(engine), [])["generate"]
    assert any(isinstance(argument, draft_program.DraftInputs) for argument in arguments)
    program.lower(*arguments)
