"""The life of a slot's recurrent state: copied, kept, given up, never seen by another sequence.

The model is the hybrid of test_engine.py, which tests its plain decoding. Here its sequences stop
and go on: between turns, when pages run out, when the weights change. One engine of few slots and
few pages does all of that. What is right comes from the whole sequence at once, with the gated
delta nets token by token.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import PyTree
from test_engine import (
    CONFIGS,
    PROMPTS,
    SMALL,
    TEMPERATURE,
    assert_empty,
    base,
    by_key,
    complete,
    host_params,
    make,
    params_on,
    seed_on,
    text_of,
)
from test_turns import converse

from jzero.attention import xla
from jzero.config import RolloutConfig
from jzero.config.drafts import Ngram
from jzero.decoder import slot_state
from jzero.decoder.abstract_calls import abstract_calls
from jzero.decoder.engine import Engine
from jzero.decoder.scheduler import Scheduler
from jzero.decoder.scoring import Scoring, score_all
from jzero.decoder.sequence import Groups, Sequence, make_groups
from jzero.model import logprobs, qwen
from jzero.model.architecture import ATTENTION, DELTA_NET, DeltaNetConfig
from jzero.model.arithmetic import EXACT, PLAIN, Arithmetic
from jzero.model.delta_net import DeltaInputs, DeltaState, recur_tokens
from jzero.sharding.mesh import param_shardings
from jzero.types import RowLayout

MODEL = CONFIGS["hybrid"]
ROOM = 68  # tokens of a sequence
MAX_NEW = 6
GROUP = 2
STOP = ("!", "A", "Z", "k")

pytestmark = pytest.mark.usefixtures("quick_compilation")


def small_engine() -> Engine:
    """An engine of 3 slots for 8 sequences, with pages for little more than one whole episode."""
    return make(
        "hybrid",
        max_new_tokens=MAX_NEW,
        max_turns=3,
        max_reply_tokens=12,
        max_episode_tokens=ROOM,
        num_slots=3,
        num_pages=6,
        decode_steps=4,
    )


@cache
def whole_forward() -> Callable:
    """Weights, tokens [1, ROOM] and their number -> the log-probs of the next tokens [ROOM]."""

    @jax.jit
    def forward(params, tokens, length, temperature):
        segments = (jnp.arange(ROOM)[None] < length).astype(jnp.int32)

        def attend(q, k, v, layer, carry):
            return xla.packed(q, k, v, segments, RowLayout(0, 1, ROOM)), carry

        def recur(inputs, layer, carry):
            return recur_tokens(inputs, segments)[0], carry

        hidden, _ = qwen.forward(
            MODEL,
            params,
            tokens,
            jnp.arange(ROOM)[None],
            attend,
            dtype=jnp.float32,
            recur=recur,
        )
        targets = jnp.roll(tokens, -1, axis=1)
        options = {"temperature": temperature, "chunk": 64, "dtype": jnp.float32}
        return logprobs.token_logps(MODEL, params, hidden, targets, **options)[0][0]

    return forward


def expected_logps(
    tokens: np.ndarray, temperature: float = TEMPERATURE, params: qwen.Params | None = None
) -> np.ndarray:
    """Returns the log-probs of tokens 1, 2, ... of a sequence."""
    padded = np.zeros((1, ROOM), np.int32)
    padded[0, : len(tokens)] = tokens
    weights = host_params("hybrid") if params is None else params
    logps = whole_forward()(weights, padded, len(tokens), temperature)
    return np.asarray(logps)[: len(tokens) - 1]


def new_scheduler(engine: Engine, params: qwen.Params | None = None) -> Scheduler:
    """A scheduler whose slots hold the states of somebody else's sequences."""
    scheduler = Scheduler(engine, params or params_on(engine), text_of)
    spoiled = jax.tree.map(lambda x: jnp.full_like(x, 7.0), scheduler.state.slot_state)
    scheduler.state = scheduler.state._replace(slot_state=spoiled)
    return scheduler


def fresh_groups() -> Groups:
    return make_groups(PROMPTS, GROUP, 3 * MAX_NEW)


@cache
def each_alone() -> dict[tuple[int, int], Sequence]:
    """Every sequence of `fresh_groups`, decoded without any other."""
    engine = small_engine()
    finished = []
    for sequence in itertools.chain(*fresh_groups()):
        scheduler = new_scheduler(engine)
        finished += scheduler.run([[sequence]], GROUP, TEMPERATURE, seed_on(engine))
    return by_key(finished)


# -- the state of one sequence ---------------------------------------------------------------------


@pytest.mark.parametrize("stop", [STOP, ()], ids=["strings", "ids"])
def test_turns_go_on_with_the_state_of_all_tokens_before(stop: tuple[str, ...]) -> None:
    """Also after a stop string, which the device does not know: the slot decodes on behind it."""
    engine = small_engine()
    conversation = converse(engine, stop=stop)

    num_turns = max(len(turns) for turns in conversation.turns.values())
    assert num_turns == 3 and conversation.counters.preempted > 0
    for (prompt_id, sample_index), tokens in conversation.tokens.items():
        prompt = PROMPTS[prompt_id]
        logps = expected_logps(np.concatenate([prompt, tokens]))
        is_sampled = np.zeros(len(prompt) + len(tokens), bool)
        for start, end, _ in conversation.turns[prompt_id, sample_index]:
            is_sampled[start:end] = True
        is_sampled = is_sampled[len(prompt) :]
        want = np.where(is_sampled, logps[len(prompt) - 1 :], 0.0)
        got = np.where(is_sampled, conversation.logps[prompt_id, sample_index], 0.0)
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_a_carried_sequence_goes_on_under_new_weights() -> None:
    """The state of its tokens is that of the new weights, as their keys and values are."""
    engine = small_engine()
    first = new_scheduler(engine)
    groups = fresh_groups()
    num_looks = 0

    def stop_early() -> Groups | None:
        nonlocal num_looks
        num_looks += 1
        return None if num_looks > 3 else []

    seed = seed_on(engine)
    finished = list(first.run(groups, GROUP, TEMPERATURE, seed, admit_more=stop_early))
    first.cancel()
    unfinished = [sequence for group in groups for sequence in group if not sequence.is_finished]
    num_old = {id(sequence): sequence.num_new for sequence in unfinished}
    assert any(num_old.values()) and len(finished) + len(unfinished) == 8

    new_host_params = jax.tree.map(lambda x: 0.9 * x, host_params("hybrid"))
    new_params = jax.tree.map(lambda x: 0.9 * x, params_on(engine))
    second = new_scheduler(engine, new_params)
    list(second.run([[s] for s in unfinished], GROUP, TEMPERATURE, seed, version=1))

    assert_empty(engine)
    for sequence in unfinished:
        begin, prompt = num_old[id(sequence)], len(sequence.prompt_tokens)
        versions = sequence.tokens.versions[prompt:].tolist()
        assert versions == [0] * begin + [1] * (sequence.num_new - begin)
        logps = expected_logps(sequence.tokens.ids, params=new_host_params)[prompt - 1 :]
        np.testing.assert_allclose(sequence.new_logps[begin:], logps[begin:], atol=2e-5)


# -- the states of several sequences ---------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))  # they share their programs
def test_no_sequence_sees_the_state_of_another(seed: int) -> None:
    """Whatever the order of admission, the tokens are those of the same sequence alone."""
    engine = small_engine()
    order = random.Random(seed)
    singles = [[sequence] for group in fresh_groups()[:2] for sequence in group]
    arriving = [*singles, *fresh_groups()[2:]]
    order.shuffle(arriving)

    def admit_some() -> Groups:
        return [arriving.pop() for _ in range(min(len(arriving), order.randrange(3)))]

    scheduler = new_scheduler(engine)
    finished = list(
        scheduler.run([arriving.pop()], GROUP, TEMPERATURE, seed_on(engine), admit_more=admit_some)
    )

    # A run ends when nothing is left to do: what would have come later gets a run of its own.
    rest = new_scheduler(engine)
    finished += rest.run(arriving, GROUP, TEMPERATURE, seed_on(engine))
    assert len(finished) == 8
    assert_empty(engine)
    for key, sequence in by_key(finished).items():
        assert sequence.new_tokens == each_alone()[key].new_tokens, key
        np.testing.assert_allclose(sequence.new_logps, each_alone()[key].new_logps, atol=2e-5)


def test_shards_and_tensor_parallel_devices_compute_the_same() -> None:
    engine = make("hybrid", (2, 2))

    got, want = complete(engine)[0], base("hybrid")

    for key, sequence in got.items():
        assert sequence.new_tokens == want[key].new_tokens, key
        assert sequence.finish_reason == want[key].finish_reason
        # Each device adds up half of a product, and a state carries the rounding on from token to
        # token: the bound is that of the states' other tests.
        np.testing.assert_allclose(sequence.new_logps, want[key].new_logps, atol=2e-5)


# -- drafts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arithmetic", [PLAIN, EXACT], ids=["plain", "exact"])
def test_only_used_tokens_of_a_draft_advance_a_state(arithmetic: Arithmetic) -> None:
    """0 to all tokens of a slot are used, in every layer: the state is that of single steps."""
    layers, width = len(MODEL.delta_layers), 3
    slots = width + 1
    num_used = np.arange(slots)
    rng = np.random.default_rng(5)
    assert MODEL.delta_net is not None
    sizes = MODEL.delta_net

    def normal(*shape: int) -> jax.Array:
        return jnp.float32(rng.standard_normal(shape))

    states = jax.tree.map(lambda x: normal(*x.shape), slot_state.empty_slots(MODEL, slots))
    given = slot_state.PassInputs(
        channels=normal(layers, slots, width, sizes.num_channels),
        kernel=normal(layers, sizes.num_channels, sizes.kernel_size),
        log_decay=-jnp.abs(normal(layers, slots, width, sizes.num_value_heads)),
        strength=jax.nn.sigmoid(normal(layers, slots, width, sizes.num_value_heads)),
    )

    def rows_of(given: slot_state.PassInputs, layer: int, tokens: slice) -> DeltaInputs:
        """Returns the inputs of a layer as rows of one token."""

        def rows(x: jax.Array) -> jax.Array:
            return x[layer, :, tokens].reshape(-1, 1, x.shape[-1])

        gates = rows(given.log_decay), rows(given.strength)
        return DeltaInputs(rows(given.channels), given.kernel[layer], *gates, sizes)

    @jax.jit
    def one_pass(
        given: slot_state.PassInputs, states: DeltaState, num_used: jax.Array
    ) -> tuple[list[jax.Array], DeltaState]:
        draft = slot_state.before_draft(MODEL, jnp.float32, states, width)
        outputs = []
        for layer in range(layers):
            inputs = rows_of(given, layer, slice(None))
            is_token = jnp.ones(slots * width, bool)
            out, draft = slot_state.recur_draft(arithmetic, inputs, is_token, layer, draft)
            outputs.append(out.reshape(slots, width, *out.shape[2:]))
        return outputs, slot_state.after_draft(MODEL, arithmetic, draft, num_used)

    @jax.jit
    def one_by_one(
        given: slot_state.PassInputs, states: DeltaState, active: jax.Array
    ) -> tuple[list[jax.Array], DeltaState]:
        outputs = []
        for layer in range(layers):
            state, outs = slot_state.take_layer(states, layer), []
            for token in range(width):
                inputs = rows_of(given, layer, slice(token, token + 1))
                out, state = arithmetic.recurrence.slots(inputs, state, active[:, token])
                outs.append(out)
            outputs.append(jnp.concatenate(outs, axis=1))
            states = slot_state.with_layer(states, layer, state)
        return outputs, states

    is_used = np.arange(width) < num_used[:, None]
    # Arguments, because XLA would compute constants with other functions.
    outputs, after = one_pass(given, states, num_used)
    all_outputs, _ = one_by_one(given, states, np.ones_like(is_used))
    _, expected = one_by_one(given, states, is_used)

    atol = 0.0 if arithmetic.is_exact else 1e-5
    compare = partial(np.testing.assert_allclose, rtol=0, atol=atol)
    jax.tree.map(compare, outputs, all_outputs)
    jax.tree.map(compare, after, expected)
    assert not np.array_equal(after.recurrent[:, 1:], states.recurrent[:, 1:])


# -- scores ----------------------------------------------------------------------------------------


def test_scores_of_long_sequences_carry_the_state_from_chunk_to_chunk() -> None:
    """Of sequences that begin alike, too: pages are shared with nobody who lacks the state."""
    engine = small_engine()
    engine.score_tokens = 16
    sequence = np.resize(np.concatenate(PROMPTS), 33)
    scorings = [Scoring(sequence), Scoring(sequence, first=30, temperature=TEMPERATURE)]

    counters = score_all(engine, params_on(engine), scorings)

    assert counters.score_calls == 4 and counters.shared_tokens == 0
    assert_empty(engine)
    for scoring in scorings:
        want = expected_logps(scoring.tokens, scoring.temperature)[scoring.first - 1 :]
        np.testing.assert_allclose(scoring.scores.logps, want, atol=2e-5)


# -- memory ----------------------------------------------------------------------------------------


def test_only_layers_with_attention_have_pages() -> None:
    engine = small_engine()
    state = engine.abstract_state()
    assert state.k_pool.shape[1] == 2 * engine.pages_per_shard  # of two layers of four
    recurrent, convolution = state.slot_state
    assert recurrent.shape == (2, 3, 4, 8, 8) and recurrent.dtype == jnp.float32
    assert convolution.shape == (2, 3, 3, 64)
    assert make("qwen2").abstract_state().slot_state is None


def bytes_of(tree: PyTree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("draft", [None, Ngram(tokens=1)], ids=["none", "ngram"])
def test_states_are_planned_as_they_are_and_written_in_place(draft: Ngram | None) -> None:
    """XLA keeps no second copy of the states, and takes what `abstract_calls` describes."""
    jax.config.update("jax_disable_most_optimizations", False)
    model = replace(
        MODEL,
        num_hidden_layers=32,
        layer_types=16 * (DELTA_NET, ATTENTION),
        delta_net=DeltaNetConfig(2, 4, 32, 64, kernel_size=4),
    )
    settings = RolloutConfig(**(SMALL | {"draft": draft}))
    engine = Engine(model, settings, small_engine().mesh, (), "float32")
    weights = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        qwen.abstract(model),
        param_shardings(model, engine.mesh),
    )
    calls = abstract_calls(engine, weights, [(2, 16)])
    lowered = {name: program.lower(*inputs) for name, (program, inputs) in calls.items()}

    num_bytes = bytes_of(engine.abstract_state().slot_state)
    inputs_of_drafts = 0
    if draft is not None:
        states = slot_state.empty_slots(model, engine.slots_per_shard)
        with_inputs = partial(slot_state.before_draft, model, jnp.float32, width=1 + draft.tokens)
        inputs_of_drafts = bytes_of(jax.eval_shape(with_inputs, states)) - num_bytes
        assert 0 < inputs_of_drafts < num_bytes / 8
    memory = lowered["generate"].compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes > num_bytes
    assert memory.temp_size_in_bytes < num_bytes / 2 + inputs_of_drafts
