"""Scores of given tokens, against the whole sequence at once and beside sequences that decode."""

import itertools
from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.attention import xla
from jzero.config import RolloutConfig
from jzero.decoder.engine import SCORING_ROWS, Engine
from jzero.decoder.scheduler import Scheduler
from jzero.decoder.scoring import Scoring, score_all
from jzero.decoder.sequence import DecodeCounters, Groups, Sequence, make_groups
from jzero.model import logprobs, qwen
from jzero.sharding.mesh import make_mesh, param_shardings
from jzero.types import RowLayout

MODEL = qwen.QwenConfig("qwen2", 64, 32, 64, 2, 4, 2, 8, True, 10000.0, 1e-6)
ROOM = 64  # tokens of a sequence
PAGE = 8
RNG = np.random.default_rng(0)
SEQUENCES = [RNG.integers(0, 64, length).astype(np.int32) for length in (64, 2, 33, 20)]
TEMPERATURE = 0.7

pytestmark = pytest.mark.usefixtures("quick_compilation")


@cache
def host_params() -> qwen.Params:
    return reference.random_params(MODEL)


@cache
def make(
    slots: int = 1, tensor: int = 1, score_tokens: int = 64, num_slots: int = 4, num_pages: int = 0
) -> Engine:
    mesh = make_mesh(jax.devices()[: slots * tensor], {"slots": slots, "tensor": tensor})
    settings = RolloutConfig(
        max_prompt_tokens=ROOM - 24,
        max_new_tokens=24,
        num_slots=num_slots,
        num_pages=num_pages,
        page_size=PAGE,
        decode_steps=4,
        kv_dtype="float32",
    )
    engine = Engine(MODEL, settings, mesh, (), "float32")
    engine.score_tokens = score_tokens
    return engine


@cache
def params_on(engine: Engine) -> qwen.Params:
    return engine.load_params(host_params(), param_shardings(MODEL, engine.mesh))


def seed_on(engine: Engine) -> jax.Array:
    return jax.device_put(jax.random.key(0), NamedSharding(engine.mesh, P()))


def score(engine: Engine, *scorings: Scoring) -> DecodeCounters:
    """Scores sequences, and checks that they leave nothing behind."""
    params = params_on(engine)
    with jax.transfer_guard("disallow"):
        counters = score_all(engine, params, list(scorings))
    assert all(scoring.is_finished for scoring in scorings)
    assert_empty(engine)
    return counters


def assert_empty(engine: Engine) -> None:
    for pages in engine.page_allocators:
        assert not pages.reference_counts.any() and not pages.table.any()


@cache
def whole_forward() -> Callable:
    """tokens [N, ROOM], lengths [N], temperature -> the trainer's log-probs and the logits."""

    @jax.jit
    def forward(params, tokens, lengths, temperature):
        segments = (jnp.arange(ROOM)[None] < lengths[:, None]).astype(jnp.int32)

        def attend(q, k, v, layer, carry):
            return xla.packed(q, k, v, segments, RowLayout(0, 1, ROOM)), carry

        positions = jnp.broadcast_to(jnp.arange(ROOM), tokens.shape)
        hidden, _ = qwen.forward(MODEL, params, tokens, positions, attend, dtype=jnp.float32)
        targets = jnp.roll(tokens, -1, axis=1)
        options = {"temperature": temperature, "chunk": 64, "dtype": jnp.float32}
        logps, _ = logprobs.token_logps(MODEL, params, hidden, targets, **options)
        return logps, qwen.head(MODEL, params, hidden, jnp.float32)

    return forward


def expected(tokens: np.ndarray, temperature: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Returns the log-probs of tokens 1.. of a sequence, and the logits before each of them."""
    padded = np.zeros((1, ROOM), np.int32)
    padded[0, : len(tokens)] = tokens
    lengths = np.array([len(tokens)])
    logps, logits = whole_forward()(host_params(), padded, lengths, temperature)
    return np.asarray(logps)[0, : len(tokens) - 1], np.asarray(logits)[0, : len(tokens) - 1]


def assert_scored(scoring: Scoring) -> None:
    logps, logits = expected(scoring.tokens, scoring.temperature)
    wanted = slice(scoring.first - 1, None)
    scores = scoring.scores
    np.testing.assert_allclose(scores.logps, logps[wanted], atol=1e-5)
    assert scores.logps.dtype == np.float32
    targets = logits[np.arange(len(logits)), scoring.tokens[1:]]
    ranks = 1 + (logits > targets[:, None]).sum(axis=1)
    np.testing.assert_array_equal(scores.ranks, ranks[wanted])
    best = np.argsort(-logits, axis=1, kind="stable")[wanted, : scoring.alternatives]
    np.testing.assert_array_equal(scores.top_tokens, best)
    scaled = logits[wanted] / scoring.temperature
    all_logps = scaled - np.logaddexp.reduce(scaled, axis=1, keepdims=True)
    best_logps = np.take_along_axis(all_logps, best, axis=1)
    np.testing.assert_allclose(scores.top_logps, best_logps, atol=1e-5)


ARRANGEMENTS = {
    "one chunk": {},
    "chunks of 16": {"score_tokens": 16},
    "chunks of a page": {"score_tokens": 1},
    "2 shards": {"slots": 2, "score_tokens": 16},
    "2 shards x tensor 2": {"slots": 2, "tensor": 2, "score_tokens": 32},
    "tensor 4, 2 kv heads": {"tensor": 4, "score_tokens": 32},
    "pages for one sequence": {"num_slots": 1, "score_tokens": 16},
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_scores_are_the_whole_forwards_and_the_trainers(arrangement) -> None:
    engine = make(**ARRANGEMENTS[arrangement])
    scorings = [Scoring(tokens, alternatives=3) for tokens in SEQUENCES]
    counters = score(engine, *scorings)
    for scoring in scorings:
        assert_scored(scoring)
    assert counters.scored_tokens == sum(len(tokens) - 1 for tokens in SEQUENCES)
    longest = max(map(len, SEQUENCES)) - 1
    assert counters.score_calls >= longest / max(engine.score_tokens, PAGE)


def test_scores_are_at_the_temperature_asked_for() -> None:
    scoring = Scoring(SEQUENCES[2], first=9, alternatives=2, temperature=TEMPERATURE)
    mixed = Scoring(SEQUENCES[2], temperature=TEMPERATURE, temperature_from=9)
    score(make(), scoring, mixed)
    assert_scored(scoring)
    np.testing.assert_allclose(mixed.scores.logps[8:], scoring.scores.logps, atol=1e-5)
    np.testing.assert_allclose(mixed.scores.logps[:8], expected(SEQUENCES[2])[0][:8], atol=1e-5)


def test_the_best_tokens_log_prob_is_that_of_the_token_to_the_last_bit() -> None:
    """lm-eval calls a token greedy where the two are equal."""
    tokens = SEQUENCES[3].copy()
    for position in range(1, len(tokens)):
        tokens[position] = expected(tokens[: position + 1])[1][-1].argmax()
    scoring = Scoring(tokens, alternatives=1)
    score(make(), scoring)
    np.testing.assert_array_equal(scoring.scores.logps, scoring.scores.top_logps[:, 0])
    np.testing.assert_array_equal(scoring.scores.ranks, 1)


def test_a_sequence_of_one_token_has_no_scores() -> None:
    scoring = Scoring(SEQUENCES[0][:1])
    counters = score(make(), scoring)
    assert len(scoring.scores.logps) == counters.score_calls == 0


@pytest.mark.parametrize("wrong", [{"first": 0}, {"alternatives": 21}, {"alternatives": -1}])
def test_what_cannot_be_scored_is_refused(wrong) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Scoring(SEQUENCES[0], **wrong)


@pytest.mark.parametrize("slots", [1, 2])
def test_answers_to_one_question_compute_the_question_once(slots) -> None:
    question = SEQUENCES[0][:26]
    answers = [RNG.integers(0, 64, 6).astype(np.int32) for _ in range(5)]
    scorings = [
        Scoring(np.concatenate([question, answer]), first=len(question)) for answer in answers
    ]
    counters = score(make(slots=slots), *scorings)
    for scoring in scorings:
        assert_scored(scoring)
    # The token before the answer is computed again: the first score comes from it.
    shared = (len(question) - 1) // PAGE * PAGE
    assert counters.shared_tokens == 4 * shared
    assert counters.scored_tokens == 5 * 31 - 4 * shared


def test_pages_that_are_kept_for_others_give_way() -> None:
    """More different beginnings than there are rows, and than there are pages."""
    rng = np.random.default_rng(3)
    engine = make(num_slots=1)
    scorings = [
        Scoring(rng.integers(0, 64, 60).astype(np.int32), first=50) for _ in range(SCORING_ROWS + 3)
    ]
    score(engine, *scorings, *(Scoring(scoring.tokens, first=50) for scoring in scorings))
    for scoring in scorings[:: SCORING_ROWS - 1]:
        assert_scored(scoring)


def fresh_groups() -> Groups:
    return make_groups([SEQUENCES[0][:30], SEQUENCES[3][:17]], 3, 24)


def decode(engine: Engine, scorings: list[Scoring]) -> tuple[dict, DecodeCounters]:
    """Samples, and begins to score in the middle of it. Returns tokens by (prompt, sample)."""
    scheduler = Scheduler(engine, params_on(engine), str)
    coming = [[], [], scorings[:2], [], scorings[2:]]

    def admit_more() -> Groups:
        for scoring in coming.pop(0) if coming else []:
            scheduler.scorer.submit(scoring)
        return []

    seed = seed_on(engine)
    finished = list(scheduler.run(fresh_groups(), 3, 1.0, seed, admit_more=admit_more))
    assert_empty(engine)
    assert all(scoring.is_finished for scoring in scorings)
    assert scheduler.scorer.take_finished() == [] or scorings
    return {(s.prompt_id, s.sample_index): s for s in finished}, scheduler.counters


@cache
def decoded_alone() -> dict[tuple[int, int], Sequence]:
    return decode(make(), [])[0]


@pytest.mark.parametrize(
    "arrangement",
    [
        pytest.param({"num_slots": 6, "score_tokens": 16}, id="enough pages"),
        pytest.param({"num_slots": 4, "num_pages": 18, "score_tokens": 16}, id="too few pages"),
        pytest.param({"num_slots": 6, "slots": 2, "score_tokens": 32}, id="two shards"),
    ],
)
def test_scoring_beside_sampling_changes_no_token(arrangement) -> None:
    scorings = [Scoring(tokens, alternatives=1) for tokens in SEQUENCES]
    got, counters = decode(make(**arrangement), scorings)
    for key, sequence in decoded_alone().items():
        assert got[key].new_tokens == sequence.new_tokens
        np.testing.assert_allclose(got[key].new_logps, sequence.new_logps, atol=1e-5)
    for scoring in scorings:
        assert_scored(scoring)
    assert counters.score_calls > 1
    assert bool(counters.preempted) == ("num_pages" in arrangement)


def test_the_prompt_of_a_sequence_in_a_slot_is_not_computed_again() -> None:
    prompt = fresh_groups()[0][0].prompt_tokens
    tokens = np.concatenate([prompt, SEQUENCES[3][:8]])
    scoring = Scoring(tokens, first=len(prompt))
    _, counters = decode(make(), [scoring])
    assert_scored(scoring)
    assert counters.shared_tokens == (len(prompt) - 1) // PAGE * PAGE


def test_the_engines_scores_of_its_samples_are_the_samplers() -> None:
    samples = list(decoded_alone().values())
    scorings = [Scoring(s.tokens.ids, first=len(s.prompt_tokens)) for s in samples]
    score(make(), *scorings)
    for sample, scoring in zip(samples, scorings, strict=True):
        np.testing.assert_allclose(scoring.scores.logps, sample.new_logps, atol=1e-5)


def test_a_cancelled_run_forgets_what_it_scores() -> None:
    engine = make()
    scheduler = Scheduler(engine, params_on(engine), str)
    for tokens in SEQUENCES:
        scheduler.scorer.submit(Scoring(tokens))
    next(scheduler.run(fresh_groups(), 3, 1.0, seed_on(engine)))
    scheduler.cancel()
    assert_empty(engine)
    assert not scheduler.scorer.is_busy


def test_a_scoring_that_is_dropped_while_it_lacks_pages_holds_nothing_up() -> None:
    """While it waits no sequence is placed; the second one has to be placed afterwards."""
    engine = make(num_slots=1)
    scheduler = Scheduler(engine, params_on(engine), str)
    scoring = Scoring(SEQUENCES[0])
    calls = itertools.count()

    def admit_more() -> Groups:
        number = next(calls)
        if number == 1:
            scheduler.scorer.submit(scoring)
        if number == 3:
            assert scheduler.scorer.is_out_of_pages
            assert scheduler.scorer.drop([scoring]) == [scoring]
        assert number < 100, "the second sequence is never placed"
        return []

    groups = make_groups([SEQUENCES[0][:30], SEQUENCES[3][:17]], 1, 24)
    finished = list(scheduler.run(groups, 1, 1.0, seed_on(engine), admit_more=admit_more))
    assert len(finished) == 2 and not scoring.is_finished
    assert_empty(engine)
