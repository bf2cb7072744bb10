"""Drafts of the model's own head: the tokens are the same as without, and the head sees its text.

Arrangements, turns and helpers are those of test_drafts.py. The model without drafts is "hybrid",
which has the same parameters but for the head.
"""

from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_turns
from test_drafts import ARRANGEMENTS, STATE_TOLERANCE, accept_all, complete_with
from test_engine import (
    CONFIGS,
    MAX_NEW,
    PROMPTS,
    SMALL,
    STOP_IDS,
    TOTAL,
    Completions,
    assert_empty,
    assert_same,
    base,
    make,
    new_engine,
    params_on,
    seed_on,
    text_of,
)

from jzero.attention import xla
from jzero.config import RolloutConfig
from jzero.config.drafts import Mtp
from jzero.decoder import draft_program, head_drafts
from jzero.decoder.abstract_calls import abstract_calls
from jzero.decoder.engine import Engine, Samples
from jzero.decoder.sampling import Filters
from jzero.decoder.scheduler import Scheduler
from jzero.decoder.sequence import make_groups
from jzero.model import mtp, qwen
from jzero.model.delta_net import recur_tokens
from jzero.sharding.mesh import make_mesh
from jzero.types import RowLayout

pytestmark = pytest.mark.usefixtures("quick_compilation")

DRAFT = Mtp(tokens=3, cost=1.0)  # at this cost every draft is tried
ONE = Mtp(tokens=1, cost=1.0)


@cache
def slow_model(engine: Engine) -> tuple[Callable, Callable]:
    """Returns functions over one row: the model, and its head.

    They take tokens, or hidden states and next tokens, and the number of positions that count.
    """
    config, params = engine.model, params_on(engine)
    layout, positions = RowLayout(0, 1, TOTAL), jnp.arange(TOTAL)[None]

    def attention(number: jax.Array) -> tuple[Callable, Callable]:
        segments = (jnp.arange(TOTAL)[None] < number).astype(jnp.int32)

        def attend(q, k, v, layer, carry):
            return xla.packed(q, k, v, segments, layout), carry

        def recur(inputs, layer, carry):
            return recur_tokens(inputs, segments)[0], carry

        return attend, recur

    @jax.jit
    def model(tokens: jax.Array, number: jax.Array) -> jax.Array:
        attend, recur = attention(number)
        options = {"dtype": jnp.float32, "recur": recur}
        return qwen.forward(config, params, tokens, positions, attend, **options)[0]

    @jax.jit
    def head(hidden: jax.Array, following: jax.Array, number: jax.Array) -> jax.Array:
        attend, _ = attention(number)
        return mtp.forward(config, params, hidden, following, positions, attend, dtype=jnp.float32)[
            0
        ]

    return model, head


def guesses(
    engine: Engine, hidden: np.ndarray, tokens: np.ndarray, position: int, count: int
) -> list[int]:
    """Returns what the head proposes after the token at `position`, from the text before."""
    _, head = slow_model(engine)
    embed = np.asarray(params_on(engine)["embed"])
    following = np.zeros((1, TOTAL), np.int32)
    following[0, :position] = tokens[1 : position + 1]
    hidden = hidden.copy()
    found: list[int] = []
    for place in range(position - 1, position - 1 + count):
        state = np.asarray(head(hidden, following, place + 1))[0, place]
        found.append(int((embed @ state).argmax()))
        # The guess takes the place of the next token, and the head's state that of the model's.
        hidden[0, place + 1], following[0, place + 1] = state, found[-1]
    return found


class Proposals:
    """Records what the head proposes, in every pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[tuple[int, int, list[int]]] = []  # request, position, tokens
        propose = head_drafts.propose

        def recording(decoder, state, head_state, is_input):
            next_state, tokens = propose(decoder, state, head_state, is_input)
            jax.debug.callback(self.record, state.requests, state.positions, is_input, tokens)
            return next_state, tokens

        monkeypatch.setattr(head_drafts, "propose", recording)

    def record(self, *arrays: jax.Array) -> None:
        for request, position, is_input, tokens in zip(*map(np.asarray, arrays), strict=True):
            # Guesses beyond the last position of a sequence are not used.
            if is_input[0]:
                self.rows.append((int(request), int(position), tokens[: is_input.sum()].tolist()))

    def wrong(self, engine: Engine, completions: Completions) -> list[tuple[int, int]]:
        """Returns requests and positions at which the slow head guesses otherwise."""
        jax.effects_barrier()
        model, _ = slow_model(engine)
        sequences = {sequence.request_id: sequence for sequence in completions.values()}
        hidden = {}
        for request, sequence in sequences.items():
            padded = np.zeros((1, TOTAL), np.int32)
            padded[0, : len(sequence)] = sequence.tokens.ids
            hidden[request] = np.asarray(model(padded, len(sequence)))
        wrong: list[tuple[int, int]] = []
        for request, position, tokens in self.rows:
            ids = np.asarray(sequences[request].tokens.ids)
            want = guesses(engine, hidden[request], ids, position, len(tokens))
            if tokens != want:
                wrong.append((request, position))
        return wrong


@pytest.mark.parametrize("draft", [DRAFT, ONE], ids=["three", "one"])
def test_drafts_are_those_of_the_head(monkeypatch: pytest.MonkeyPatch, draft: Mtp) -> None:
    """Its attention sees the whole text, in the prompt, after rejections, and over pages."""
    proposals = Proposals(monkeypatch)
    engine = new_engine("hybrid_mtp", draft=draft, page_size=4)
    got, scheduler = complete_with(engine, 0.0)
    assert_same(got, base("hybrid", 0.0), STATE_TOLERANCE)
    counters = scheduler.counters
    assert 0 < counters.accepted_tokens < counters.drafted_tokens
    assert counters.draft_passes == counters.decoded_tokens - counters.accepted_tokens
    assert len(proposals.rows) == counters.draft_passes
    assert proposals.wrong(engine, got) == []


def test_a_wrong_pair_of_the_head_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are still the same: only the drafts are others."""
    run_head = head_drafts.run_head

    def faulty(decoder, state, rows, hidden, next_tokens):
        return run_head(decoder, state, rows, jnp.roll(hidden, 1, axis=0), next_tokens)

    monkeypatch.setattr(head_drafts, "run_head", faulty)
    proposals = Proposals(monkeypatch)
    engine = new_engine("hybrid_mtp", draft=DRAFT, page_size=4)
    got, _ = complete_with(engine, 0.0)
    assert_same(got, base("hybrid", 0.0), STATE_TOLERANCE)
    assert proposals.wrong(engine, got)


def test_sampled_drafts_have_the_noise_of_their_position() -> None:
    got, scheduler = complete_with(make("hybrid_mtp", draft=DRAFT, page_size=4))
    assert_same(got, base("hybrid"), STATE_TOLERANCE)
    assert 0 < scheduler.counters.accepted_tokens < scheduler.counters.drafted_tokens


def test_a_wrong_rule_of_acceptance_gives_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_program, "is_accepted", accept_all)
    got, _ = complete_with(new_engine("hybrid_mtp", draft=DRAFT))
    with pytest.raises(AssertionError):
        assert_same(got, base("hybrid"), STATE_TOLERANCE)


@pytest.mark.parametrize("arrangement", [*ARRANGEMENTS])
def test_drafts_of_a_head_do_not_depend_on_the_arrangement(arrangement: str) -> None:
    engine = make("hybrid_mtp", draft=DRAFT, **ARRANGEMENTS[arrangement])
    got, scheduler = complete_with(engine)
    assert_same(got, base("hybrid"), STATE_TOLERANCE)
    assert scheduler.counters.accepted_tokens > 0
    assert (scheduler.counters.preempted > 0) == (arrangement == "preempted")


@pytest.mark.parametrize("evict", [False, True])
def test_turns_give_the_same_episodes(evict: bool) -> None:
    want = test_turns.converse(make("hybrid", **test_turns.SIZES))
    engine = make("hybrid_mtp", draft=DRAFT, **test_turns.SIZES)
    got = test_turns.converse(engine, evict=evict)
    test_turns.assert_same(got, want, STATE_TOLERANCE)
    assert got.tokens.keys() == want.tokens.keys()


def test_exact_numbers_have_the_same_bits() -> None:
    mesh = make_mesh(jax.devices()[:1], {"slots": 1, "tensor": 1})

    def decode(name: str, draft: Mtp | None) -> tuple[Completions, Scheduler]:
        settings = RolloutConfig(**(SMALL | {"draft": draft}))
        engine = Engine(CONFIGS[name], settings, mesh, STOP_IDS, "float32", exact=True)
        return complete_with(engine)

    want, _ = decode("hybrid", None)
    got, scheduler = decode("hybrid_mtp", DRAFT)
    assert_same(got, want, atol=0)
    assert 0 < scheduler.counters.accepted_tokens < scheduler.counters.drafted_tokens


def test_requests_keep_their_filters_and_their_temperature() -> None:
    samples = Samples(is_trained=False, has_choices=True)
    choices = [Filters(), Filters(top_k=3), Filters(top_p=0.5), Filters(min_p=0.2)]
    temperatures = [1.0, 0.0, 1.2, 0.8]

    def decode(engine: Engine) -> list[list[int]]:
        scheduler = Scheduler(engine, params_on(engine), text_of, samples)
        groups = make_groups(PROMPTS, 1, MAX_NEW)
        for group, filters, temperature in zip(groups, choices, temperatures, strict=True):
            group[0].filters, group[0].temperature = filters, temperature
        for _ in scheduler.run(groups, 0, 1.0, seed_on(engine)):
            pass
        assert_empty(engine)
        return [group[0].new_tokens for group in groups]

    assert decode(make("hybrid_mtp", draft=DRAFT)) == decode(make("hybrid"))


def test_a_plan_compiles_the_programs_of_a_head() -> None:
    engine = make("hybrid_mtp", draft=DRAFT)
    calls = abstract_calls(engine, params_on(engine), [(1, 32)])
    for program, arguments in calls.values():
        program.lower(*arguments)
    # One layer more than the model has, in the pool and in prefixes.
    prefix = calls["insert 1x32"][1][1]
    assert len(prefix.k) == len(engine.model.attention_layers) + 1
    assert prefix.hidden.shape == (1, engine.model.hidden_size)
