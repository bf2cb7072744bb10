"""The engine and its driver against the full forward pass, and against themselves under every other arrangement."""

import math
import re
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jzero import attention
from jzero.attention import tpu, xla
from jzero.config import RolloutConfig as Settings
from jzero.distributed.mesh import make_mesh, param_shardings
from jzero.model import logprobs, qwen
from jzero.rollout.engine import Engine, Placement
from jzero.rollout.pages import OutOfPages
from jzero.rollout.scheduler import Scheduler
from jzero.rollout.sequence import Sequence, make_groups
from jzero.types import RowLayout

CONFIGS = {
    "qwen2": qwen.QwenConfig("qwen2", 96, 64, 96, 2, 4, 2, 16, True, 10000.0, 1e-6),
    "qwen3": qwen.QwenConfig("qwen3", 96, 64, 96, 3, 4, 2, 24, False, 10000.0, 1e-6),
}
MAX_PROMPT, MAX_NEW, GROUP, TEMPERATURE = 20, 20, 2, 0.7
TOTAL = MAX_PROMPT + MAX_NEW
STOP_IDS = (3, 50)
PROMPTS = [
    np.random.default_rng(length).integers(0, 96, length).astype(np.int32)
    for length in (20, 10, 16, 19)
]

Completions = dict[tuple[int, int], Sequence]  # (prompt, sample) -> what came of it


pytestmark = pytest.mark.usefixtures("quick_compilation")


@cache
def host_params(name: str) -> qwen.Params:
    """Every leaf random, norms around 1, so that each of them matters."""
    rng = np.random.default_rng(1)
    around = lambda path: 1.0 if "norm" in path[-1].key else 0.0
    leaf = lambda path, x: (around(path) + 0.12 * rng.standard_normal(x.shape)).astype(np.float32)
    return jax.tree_util.tree_map_with_path(leaf, qwen.abstract(CONFIGS[name]))


@cache
def make(name="qwen2", shape=(1, 1), stop_ids=STOP_IDS, dtype="float32", **settings) -> Engine:
    """Engines are shared by the tests: their programs are compiled once, and none may leave a trace."""
    defaults = {
        "max_prompt_tokens": MAX_PROMPT,
        "max_new_tokens": MAX_NEW,
        "num_slots": 8,
        "page_size": 16,
        "decode_steps": 8,
        "kv_dtype": "float32",
    }
    mesh = make_mesh(jax.devices()[: shape[0] * shape[1]], {"slots": shape[0], "tensor": shape[1]})
    return Engine(CONFIGS[name], Settings(**(defaults | settings)), mesh, stop_ids, dtype)


def name_of(engine: Engine) -> str:
    return engine.model.model_type


@cache
def params_on(engine: Engine) -> qwen.Params:
    return engine.load_params(
        host_params(name_of(engine)), param_shardings(engine.model, engine.mesh)
    )


def seed_on(engine: Engine, seed: int = 0) -> jax.Array:
    return jax.device_put(jax.random.key(seed), NamedSharding(engine.mesh, P()))


def text_of(tokens) -> str:
    return "".join(chr(ord("!") + token) for token in tokens)


def in_use(engine: Engine) -> int:
    """Pages, of all shards."""
    return sum(len(pages.reference_counts) - 1 - len(pages.free_pages) for pages in engine.pages)


def assert_empty(engine: Engine) -> None:
    assert in_use(engine) == 0
    assert not engine.placements and not any(
        pages.reference_counts.any() or pages.table.any() for pages in engine.pages
    )


def complete(
    engine: Engine,
    prompts=PROMPTS,
    group=GROUP,
    temperature=TEMPERATURE,
    max_new=MAX_NEW,
    decode=text_of,
    **settings,
) -> tuple[Completions, Scheduler]:
    """Everything to its end; nothing may stay behind. `settings` are those only the driver reads: stop strings."""
    driver, seed = Scheduler(engine, params_on(engine), decode), seed_on(engine)
    driver.settings = replace(driver.settings, **settings)
    with jax.transfer_guard("disallow"):
        done = list(driver.run(make_groups(prompts, group, max_new), group, temperature, seed))
    completions = {(sequence.prompt_id, sequence.sample_index): sequence for sequence in done}
    assert len(done) == len(completions) == len(prompts) * group
    assert_empty(engine)
    return completions, driver


@cache
def base(name="qwen2", temperature=TEMPERATURE) -> Completions:
    return complete(make(name), temperature=temperature)[0]


def assert_same(got: Completions, want: Completions) -> None:
    for key, sequence in got.items():
        assert sequence.tokens == want[key].tokens, key
        assert (sequence.finish_reason, sequence.turn_text) == (
            want[key].finish_reason,
            want[key].turn_text,
        )
        np.testing.assert_allclose(sequence.logps, want[key].logps, atol=1e-5, err_msg=str(key))


@pytest.mark.parametrize("shape", [(1, 1), (1, 2)], ids=["tensor 1", "tensor 2"])
def test_kernels_may_lay_out_the_pools(shape):
    """As on a TPU: several heads in a row, splash attention for prompts; the pages read by the definition."""

    def paged(q, k_pool, v_pool, table, lengths, shared, kv_heads):
        heads = lambda pool: [
            pool[..., i : i + q.shape[-1]] for i in range(0, pool.shape[-1], q.shape[-1])
        ]
        pools = (
            jnp.stack(heads(pool), axis=1).reshape(-1, *pool.shape[1:3], q.shape[-1])
            for pool in (k_pool, v_pool)
        )
        return xla.paged(q, *(pool[:kv_heads] for pool in pools), table, lengths, shared)

    engine = make.__wrapped__(shape=shape)
    packed = partial(tpu.packed, interpret=True)
    engine.attention = attention.Backend(packed, paged, tpu.pool_rows, attention.write)
    assert engine.init_decode_state()["k"].shape[::3] == (shape[1], 128)
    assert_same(complete(engine)[0], base())


# -- against the full forward pass ------------------------------------------------------------------------------------


def rows_of(completions: Completions) -> tuple[np.ndarray, np.ndarray]:
    """tokens i32[N, TOTAL] padded, lengths i32[N]."""
    rows = [sequence.all_tokens() for sequence in completions.values()]
    return np.stack([np.pad(row, (0, TOTAL - len(row))) for row in rows]), np.array(
        [len(row) for row in rows]
    )


@cache
def scorer(name: str):
    """tokens [N, TOTAL], lengths [N] -> logits [N, TOTAL, V], and log-probs of each next token: the trainer's way."""
    config = CONFIGS[name]

    @jax.jit
    def score(params, tokens, lengths, temperature):
        segments = (jnp.arange(TOTAL)[None] < lengths[:, None]).astype(jnp.int32)
        attend = lambda q, k, v, layer, carry: (
            xla.packed(q, k, v, segments, RowLayout(0, 1, TOTAL)),
            carry,
        )
        positions = jnp.broadcast_to(jnp.arange(TOTAL), tokens.shape)
        hidden, _ = qwen.forward(config, params, tokens, positions, attend, dtype=jnp.float32)
        options = {"temperature": temperature, "decode_steps": 64, "dtype": jnp.float32}
        logps, _ = logprobs.token_logps(
            config, params, hidden, jnp.roll(tokens, -1, axis=1), **options
        )
        return qwen.head(config, params, hidden, jnp.float32), logps

    return score


def scored(engine: Engine, completions: Completions, temperature: float):
    """For every completion: itself, logits [n, V] that led to its n tokens, and their log-probs."""
    tokens, lengths = rows_of(completions)
    name = name_of(engine)
    logits, logps = scorer(name)(host_params(name), tokens, lengths, temperature)
    for i, sequence in enumerate(completions.values()):
        at = slice(len(sequence.prompt_tokens) - 1, lengths[i] - 1)
        yield sequence, np.asarray(logits[i, at], np.float64), np.asarray(logps[i, at])


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_is_the_argmax_of_the_full_forward(name):
    completions = base(name, 0.0)
    for sequence, logits, logps in scored(make(name), completions, 1.0):
        assert sequence.tokens == logits.argmax(-1).tolist()
        np.testing.assert_allclose(sequence.logps, logps, atol=1e-5)
    assert completions[0, 0].tokens == completions[0, 1].tokens != completions[1, 0].tokens


@cache
def uniform():
    fold, key = jax.random.fold_in, jax.random.key(0)
    return jax.jit(lambda request, position: jax.random.uniform(fold(fold(key, request), position)))


@pytest.mark.parametrize("lengths", [None, (17, 1, 2, 15)], ids=["usual", "short"])
@pytest.mark.parametrize("name", CONFIGS)
def test_samples_invert_the_full_forwards_distribution_at_their_own_noise(name, lengths):
    """Token t of request r is where the cumulative distribution passes the uniform number of (seed, r, t)."""
    engine = make(name)
    completions = complete(engine, [PROMPTS[3][:n] for n in lengths])[0] if lengths else base(name)
    drawn = 0
    for sequence, logits, logps in scored(engine, completions, TEMPERATURE):
        np.testing.assert_allclose(sequence.logps, logps, atol=1e-5)
        upto = np.cumsum(np.exp(logits / TEMPERATURE), axis=-1)
        request = sequence.prompt_id * GROUP + sequence.sample_index
        for i, token in enumerate(sequence.tokens):
            u = float(uniform()(request, len(sequence.prompt_tokens) + i)) * upto[i, -1]
            assert token == np.searchsorted(upto[i], u, side="right"), (
                sequence.prompt_id,
                sequence.sample_index,
                i,
            )
            drawn += token != logits[i].argmax()
    assert drawn > 20  # sampled, not greedy


@pytest.mark.parametrize("dtype, bound", [("float32", 0.03), ("bfloat16", 0.15)])
def test_logps_with_a_bfloat16_cache_are_near(dtype, bound):
    """bfloat16 keeps 8 bits: 0.4% of every key and value (float32 compute), and of every activation (bfloat16)."""
    engine = make(dtype=dtype, kv_dtype="bfloat16")
    gaps = [
        np.abs(sequence.logps - logps)
        for sequence, _, logps in scored(engine, complete(engine)[0], TEMPERATURE)
    ]
    worst = np.concatenate(gaps).max()
    assert 1e-5 < worst < bound


@pytest.mark.parametrize("name", CONFIGS)
def test_no_device_gathers_the_logits(name):
    """Of a vocabulary that is split over tensor: what is gathered of it is smaller than a row of logits a slot."""
    engine = make(name, shape=(1, 2))
    jitted, arguments = engine.programs(params_on(engine), [])["generate"]
    text = jitted.lower(*arguments).compile().as_text()
    gathered = [
        math.prod(map(int, size.split(",")))
        for size in re.findall(r"f32\[([\d,]+)\]\S* all-gather", text)
    ]
    assert gathered and max(gathered) < engine.max_concurrent_decodes * engine.model.vocab_size


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_may_be_made_in_parts(name):
    """As where VMEM is small. Greedy tokens are the same; sampled ones are others of the same distribution."""
    engine = make.__wrapped__(name)
    engine.vocabulary = [slice(0, 40), slice(40, 41), slice(41, 96)]
    assert_same(complete(engine, temperature=0.0)[0], base(name, 0.0))
    sampled, _ = complete(engine)
    for sequence, _, logps in scored(engine, sampled, TEMPERATURE):
        np.testing.assert_allclose(sequence.logps, logps, atol=1e-5)
    assert [s.tokens for s in sampled.values()] != [s.tokens for s in base(name).values()]


# -- against other arrangements ---------------------------------------------------------------------------------------

ARRANGEMENTS = {
    "2 slots": {"num_slots": 2, "page_size": 4, "decode_steps": 3},
    "3 slots, 1-token calls": {"num_slots": 3, "page_size": 1, "decode_steps": 1},
    "page of 12": {"num_slots": 8, "page_size": 12, "decode_steps": 32},
    "4 shards": {"shape": (4, 1), "num_slots": 8, "page_size": 4, "decode_steps": 5},
    "tensor 2": {"shape": (1, 2), "num_slots": 8, "page_size": 16, "decode_steps": 6},
    "2 shards x tensor 2": {
        "name": "qwen3",
        "shape": (2, 2),
        "num_slots": 8,
        "page_size": 4,
        "decode_steps": 7,
    },
    "tensor 4, 2 kv heads": {"shape": (1, 4), "num_slots": 8, "page_size": 16, "decode_steps": 8},
    "preempted": {"num_slots": 6, "page_size": 4, "decode_steps": 4, "num_pages": 14},
    "preempted, 2 shards": {
        "name": "qwen3",
        "shape": (2, 1),
        "num_slots": 8,
        "page_size": 2,
        "decode_steps": 3,
        "num_pages": 46,
    },
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS.values(), ids=ARRANGEMENTS)
def test_completions_do_not_depend_on_the_arrangement(arrangement):
    engine = make(**arrangement)
    got, driver = complete(engine)
    assert_same(got, base(name_of(engine)))
    assert (driver.counters.preempted > 0) == ("num_pages" in arrangement)
    first = driver.births  # tokens that came with a prefill
    assert driver.counters.decoded_tokens + first == sum(
        len(sequence.tokens) for sequence in got.values()
    )


def test_completions_do_not_depend_on_their_company():
    engine = make()
    alone, _ = complete(engine, PROMPTS[:1])
    assert_same(alone, base())
    other_company, _ = complete(engine, [PROMPTS[0], PROMPTS[3], PROMPTS[1], PROMPTS[1]])
    assert_same({key: other_company[key] for key in alone}, base())
    last, _ = complete(
        engine, [PROMPTS[0], PROMPTS[0], PROMPTS[0], PROMPTS[3]]
    )  # in the same place: the same noise
    assert_same({key: last[key] for key in last if key[0] == 3}, base())
    assert [last[0, j].tokens for j in range(GROUP)] != [last[1, j].tokens for j in range(GROUP)]


# -- pages ------------------------------------------------------------------------------------------------------------


def test_a_shard_without_work_does_not_hold_up_the_others():
    """With tensor > 1 a step has collectives that wait for every device: this one aborted after 40 seconds."""
    completions, _ = complete(make(shape=(2, 2)), PROMPTS[:1], group=1)
    assert_same(completions, {(0, 0): base()[0, 0]})


def test_a_group_holds_the_full_pages_of_its_prompt_once():
    engine = make(num_slots=8, page_size=4, decode_steps=8)
    length, limit = 18, 26
    shared, whole = length // 4, -(-limit // 4)
    writes = [
        engine.place(Placement(slot, 0, slot, length, limit, slot, "a", length))
        for slot in range(8)
    ]
    assert [len(pages) for pages in writes] == [5] + 7 * [
        1
    ]  # the first writes the prompt, the others its last page
    table = engine.pages[0].table
    assert in_use(engine) == shared + 8 * (whole - shared)
    assert (table[:, :shared] == table[0, :shared]).all() and len(
        set(table[:, shared].tolist())
    ) == 8
    for slot in range(8):
        engine.free_resource(slot)
    assert_empty(engine)
    engine, used = make(), []  # before every call
    driver = Scheduler(engine, params_on(engine), text_of)
    more = lambda: used.append(in_use(engine)) or []
    list(
        driver.run(make_groups(PROMPTS[:1], 8, 8), 8, TEMPERATURE, seed_on(engine), admit_more=more)
    )
    assert max(used) == 1 + 8


def test_a_group_larger_than_the_slots_is_no_special_case():
    want, _ = complete(make(), PROMPTS[:1], group=8)
    assert_same(complete(make(**ARRANGEMENTS["2 slots"]), PROMPTS[:1], group=8)[0], want)
    assert len({tuple(sequence.tokens) for sequence in want.values()}) == 8


def test_a_pool_too_small_for_one_sequence_is_refused():
    with pytest.raises(
        ValueError,
        match=r"rollout.num_pages=9 is too small: one sequence of 40 tokens takes 10 pages of 4",
    ):
        make(page_size=4, num_pages=9)
    with pytest.raises(ValueError, match=r"rollout.num_pages=18 is too small.*on each of 2"):
        make(page_size=4, num_pages=18, shape=(2, 1))
    make(page_size=4, num_pages=10)


def test_generate_takes_the_pages_of_its_call_or_none_runs():
    engine = make(**ARRANGEMENTS["preempted"])
    params, state, seed = params_on(engine), engine.init_decode_state(), seed_on(engine)
    for slot in range(2):
        engine.place(Placement(slot, 0, 0, 20, TOTAL, slot, slot, 20))
    for held in (6, 7):  # 24 tokens, then 28, in pages of 4
        state, _ = engine.generate(params, state, seed)
        assert [len(owned) for owned in engine.pages[0].pages_of_slot[:2]] == [held, held]
    with pytest.raises(OutOfPages):  # 16 pages of 14
        engine.generate(params, state, seed)
    for slot in range(2):
        engine.free_resource(slot)
    assert_empty(engine)


@pytest.mark.parametrize("shape", [(1, 1), (2, 2)], ids=str)
def test_pages_are_written_in_place(shape):
    jax.config.update("jax_disable_most_optimizations", False)
    engine = make(shape=shape, num_slots=8, num_pages=4096, kv_dtype="bfloat16")
    state, put = engine.init_decode_state(), engine._put
    pool = (state["k"].nbytes + state["v"].nbytes) / engine.mesh.size
    table = np.zeros((engine.max_concurrent_decodes, engine.pages_per_slot), np.int32)
    keep = np.zeros(engine.max_concurrent_decodes, np.bool_)
    arguments = put(table, keep, engine._shared(table, keep))
    memory = (
        engine._programs["generate"]
        .lower(params_on(engine), state, seed_on(engine), *arguments)
        .compile()
        .memory_analysis()
    )
    assert memory.temp_size_in_bytes < pool / 4 and memory.alias_size_in_bytes > pool


# -- ends -------------------------------------------------------------------------------------------------------------


def test_stop_ids_end_a_sequence_and_stay_in_it():
    finishes = set()
    for sequence in base().values():
        *before, last = sequence.tokens
        finishes.add(sequence.finish_reason)
        assert not set(before) & set(STOP_IDS) and len(sequence.tokens) == len(sequence.logps)
        assert sequence.finish_reason == ("stop" if last in STOP_IDS else "length")
        assert last in STOP_IDS or len(sequence.tokens) == MAX_NEW
        assert sequence.turn_text == text_of(sequence.tokens)
    assert finishes == {"stop", "length"}


def test_without_stop_ids_every_sequence_runs_to_its_limit():
    engine = make(stop_ids=(), top_k=1)
    got, _ = complete(engine, group=1)
    for (prompt, _), sequence in got.items():
        greedy = base(temperature=0.0)[prompt, 0].tokens
        assert sequence.tokens[: len(greedy)] == greedy and len(sequence.tokens) == MAX_NEW


@pytest.mark.parametrize("max_new", [1, 2, 9, 10])
def test_a_limit_cuts_and_changes_nothing_before(max_new):
    got, _ = complete(make(), max_new=max_new)
    for key, sequence in got.items():
        want = base()[key]
        assert sequence.tokens == want.tokens[:max_new]
        assert sequence.finish_reason == ("stop" if sequence.tokens[-1] in STOP_IDS else "length")


def longest() -> tuple[int, int]:
    return max(base(), key=lambda key: len(base()[key].tokens))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(
    "begin, end", [(0, 1), (3, 5), (7, 10), (MAX_NEW - 2, MAX_NEW)]
)  # calls end after 1, 9, 17
def test_stop_strings_end_a_sequence_at_the_token_that_completes_them(begin, end, keep):
    stops = (text_of(base()[longest()].tokens[begin:end]), "never")
    got, _ = complete(make(), stop=stops, keep_stop=keep)
    assert got[longest()].tokens == base()[longest()].tokens[:end]
    for key, sequence in got.items():
        want = base()[key]
        at = want.turn_text.find(stops[0])
        kept = len(want.turn_text) if at < 0 else at + end - begin
        assert sequence.tokens == want.tokens[:kept] and len(sequence.logps) == kept
        assert sequence.finish_reason == ("stop" if at >= 0 else want.finish_reason)
        assert sequence.turn_text == want.turn_text[: kept if keep or at < 0 else at]


def test_a_stop_string_of_many_bytes_may_span_as_many_tokens():
    ids = base()[longest()].tokens[6:10]  # a call ends after token 9
    letters = dict(zip(ids, "éé".encode(), strict=True))
    assert len(letters) == 4
    decode = lambda tokens: bytes(letters.get(token, ord("x")) for token in tokens).decode(
        errors="replace"
    )
    got, _ = complete(make(), decode=decode, stop=("éé",))
    assert got[longest()].tokens == base()[longest()].tokens[:10] and got[longest()].text.endswith(
        "éé"
    )


def test_stop_strings_and_preemption():
    stops = tuple(
        {sequence.turn_text[8:10] for sequence in base().values() if len(sequence.tokens) > 12}
    )
    want, _ = complete(make(), stop=stops)
    got, driver = complete(make(**ARRANGEMENTS["preempted"]), stop=stops)
    assert_same(got, want)
    assert driver.counters.preempted > 0 and any(
        len(want[key].tokens) < len(base()[key].tokens) for key in want
    )


# -- the life of a driver ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arrangement", ["2 slots", "preempted"])
def test_cancel_frees_everything_and_the_engine_serves_the_next(arrangement):
    engine = make(**ARRANGEMENTS[arrangement])
    driver = Scheduler(engine, params_on(engine), text_of)
    for finished in range(1, len(PROMPTS) * GROUP):
        run = driver.run(make_groups(PROMPTS, GROUP, MAX_NEW), GROUP, TEMPERATURE, seed_on(engine))
        first = [next(run) for _ in range(finished)]
        driver.cancel()
        assert_empty(engine)
        assert list(run) == []  # what was in flight is nobody's
        assert_same({(s.prompt_id, s.sample_index): s for s in first}, base())
    again = {
        (s.prompt_id, s.sample_index): s
        for s in driver.run(
            make_groups(PROMPTS, GROUP, MAX_NEW), GROUP, TEMPERATURE, seed_on(engine)
        )
    }
    assert_same(again, base())  # the same driver
    assert_same(complete(engine)[0], base())  # another one


def test_an_abandoned_run_must_be_cancelled():
    engine = make()
    driver = Scheduler(engine, params_on(engine), text_of)
    next(driver.run(make_groups(PROMPTS, GROUP, MAX_NEW), GROUP, TEMPERATURE, seed_on(engine)))
    with pytest.raises(AssertionError, match="not cancelled"):
        next(
            Scheduler(engine, params_on(engine), text_of).run(
                make_groups(PROMPTS, GROUP, MAX_NEW), GROUP, TEMPERATURE, seed_on(engine)
            )
        )
    driver.cancel()
    assert_same(complete(engine)[0], base())


def test_prompts_that_do_not_fit_are_refused():
    driver = Scheduler(make(), params_on(make()), text_of)
    with pytest.raises(AssertionError, match="longest=41"):
        next(
            driver.run(
                make_groups([np.zeros(21, np.int32)], 1, MAX_NEW), 1, TEMPERATURE, seed_on(make())
            )
        )


# -- JetStream's methods ----------------------------------------------------------------------------------------------

METHODS = """load_params init_decode_state prefill prefill_multisampling insert bulk_insert generate free_resource
max_concurrent_decodes samples_per_slot max_prefill_length mesh get_prefix_destination_sharding colocated_cpus"""


def test_the_engine_has_jetstreams_methods():
    engine = make()
    assert all(hasattr(engine, name) for name in METHODS.split())
    assert (engine.max_concurrent_decodes, engine.samples_per_slot, engine.max_prefill_length) == (
        8,
        1,
        48,
    )
    shardings = param_shardings(engine.model, engine.mesh)
    params = engine.load_params(host_params("qwen2"), shardings)
    assert jax.tree.map(lambda x: x.sharding, params) == shardings
    assert {
        x.dtype
        for x in jax.tree.leaves(
            make(dtype="bfloat16", kv_dtype="bfloat16").load_params(params, shardings)
        )
    } == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("arrangement, slot", [("3 slots, 1-token calls", 2), ("4 shards", 6)])
def test_prefill_insert_generate_by_hand(arrangement, slot):
    """One request as JetStream's orchestrator drives it, on a slot of the last shard."""
    engine = make(**ARRANGEMENTS[arrangement])
    params, seed, prompt = params_on(engine), seed_on(engine), PROMPTS[3]
    padded = np.pad(prompt, (0, 32 - len(prompt)))
    prefix = engine.prefill(
        params=params,
        padded_tokens=padded,
        true_length=len(prompt),
        request=6,
        temperature=TEMPERATURE,
        seed=seed,
    )
    assert prefix.k.sharding.is_equivalent_to(
        engine.get_prefix_destination_sharding().k, prefix.k.ndim
    )
    tokens, logps = [int(prefix.tokens[0, 0])], [float(prefix.logps[0, 0])]
    place = Placement(slot, 0, 0, len(prompt), len(prompt) + MAX_NEW, 6, "request", len(prompt))
    state = engine.insert(prefix, engine.init_decode_state(), place, TEMPERATURE)
    for _ in range(MAX_NEW):
        state, result = engine.generate(params, state, seed)
        result = jax.device_get(result)
        tokens += result.tokens[slot, : result.counts[slot]].tolist()
        logps += result.logps[slot, : result.counts[slot]].tolist()
        assert result.counts.sum() == result.counts[slot]
    engine.free_resource(slot)
    assert_empty(engine)
    want = base()[3, 0]  # request 3 * GROUP + 0
    assert tokens == want.tokens
    np.testing.assert_allclose(logps, want.logps, atol=1e-5)


def test_out_of_pages_takes_nothing():
    engine = make(**ARRANGEMENTS["preempted"])
    engine.place(Placement(0, 0, 0, 20, TOTAL, 0, "a", 20))
    engine.place(Placement(1, 0, 1, 20, TOTAL, 1, "a", 20))  # shares 5 of its 6 pages
    assert in_use(engine) == 7
    engine.place(Placement(2, 0, 0, 20, TOTAL, 2, "b", 20))
    with pytest.raises(OutOfPages):
        engine.place(Placement(3, 0, 0, 20, TOTAL, 3, "c", 20))
    assert in_use(engine) == 13 and 3 not in engine.placements
    for slot in range(3):
        engine.free_resource(slot)
    assert_empty(engine)
