"""The engine and its scheduler, against the full forward pass and against other arrangements.

`base` holds what one engine makes of four prompts. The other tests decode the same requests in
another arrangement (fewer slots, smaller pages, more devices, too few pages, ...) and must get the
same tokens, because the noise of a token depends only on (seed, request, position).
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jzero import attention
from jzero.attention import tpu, tpu_decode, xla
from jzero.config import RolloutConfig
from jzero.decoder import program_settings
from jzero.decoder.abstract_calls import abstract_calls
from jzero.decoder.engine import Engine, Placement
from jzero.decoder.pages import OutOfPages
from jzero.decoder.scheduler import Scheduler
from jzero.decoder.sequence import Groups, Sequence, make_groups
from jzero.errors import UserError
from jzero.model import adapters, logprobs, qwen
from jzero.model.architecture import ATTENTION, DELTA_NET, SLIDING, DeltaNetConfig
from jzero.model.arithmetic import FEW_ROWS, PLAIN_ON_TPU
from jzero.model.delta_net import recur_tokens
from jzero.model.layers import window_in_rows
from jzero.model.quantized import quantize_on_device
from jzero.model.rope import LinearScaling, Llama3Scaling
from jzero.numerics.eight_bits import FORMATS
from jzero.sharding.mesh import make_mesh, param_shardings
from jzero.types import RowLayout

CONFIGS = {
    "qwen2": qwen.QwenConfig("qwen2", 96, 64, 96, 2, 4, 2, 16, True, 10000.0, 1e-6),
    "qwen3": qwen.QwenConfig("qwen3", 96, 64, 96, 3, 4, 2, 24, False, 10000.0, 1e-6),
    "llama": qwen.QwenConfig(
        "llama",
        96,
        64,
        96,
        2,
        4,
        2,
        16,
        False,
        10000.0,
        1e-5,
        False,
        Llama3Scaling(8.0, 1.0, 4.0, 16),
    ),
    "hybrid": qwen.QwenConfig(
        "qwen3_5_text",
        96,
        32,
        48,
        4,
        4,
        2,
        16,
        True,
        10000.0,
        1e-6,
        layer_types=2 * (DELTA_NET, ATTENTION),
        delta_net=DeltaNetConfig(2, 4, 8, 8, kernel_size=4),
        partial_rotary_factor=0.5,
    ),
    "qwen3_moe": qwen.QwenConfig(
        "qwen3_moe",
        96,
        64,
        96,
        2,
        4,
        2,
        16,
        False,
        10000.0,
        1e-6,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
    ),
}
# Two layers with a window of 12 tokens, less than a page and less than most prompts, then one
# without.
CONFIGS["gemma3"] = qwen.QwenConfig(
    "gemma3_text",
    96,
    64,
    96,
    3,
    4,
    2,
    16,
    True,
    10000.0,
    1e-6,
    rope_scaling=LinearScaling(8.0),
    layer_types=(SLIDING, SLIDING, ATTENTION),
    sliding_window=12,
    local_rope_theta=100.0,
    query_scale=20,
)
# Bounds that change all scores and logits.
CONFIGS["gemma2"] = replace(
    CONFIGS["gemma3"],
    model_type="gemma2",
    rope_scaling=None,
    layer_types=(SLIDING, ATTENTION, SLIDING),
    local_rope_theta=0.0,
    attn_logit_softcapping=0.5,
    final_logit_softcapping=3.0,
)
CONFIGS["hybrid_mtp"] = replace(CONFIGS["hybrid"], mtp=True)
CONFIGS["hybrid_moe"] = replace(
    CONFIGS["hybrid"],
    model_type="qwen3_5_moe_text",
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    norm_topk_prob=True,
    shared_expert_intermediate_size=16,
)
MAX_PROMPT = 20
MAX_NEW = 20
TOTAL = MAX_PROMPT + MAX_NEW
GROUP = 2
TEMPERATURE = 0.7
STOP_IDS = (3, 50)
PROMPTS = [
    np.random.default_rng(length).integers(0, 96, length).astype(np.int32)
    for length in (20, 10, 16, 19)
]
SMALL = {
    "max_prompt_tokens": MAX_PROMPT,
    "max_new_tokens": MAX_NEW,
    "num_slots": 8,
    "page_size": 16,
    "decode_steps": 8,
    "kv_dtype": "float32",
}

Completions = dict[tuple[int, int], Sequence]  # (prompt, sample) -> its finished sequence

pytestmark = pytest.mark.usefixtures("quick_compilation")


@cache
def host_params(name: str) -> qwen.Params:
    """Every leaf is random, norms around 1, so that each of them matters.

    The norms of a hybrid are 1 plus their weights, but for that of its gated delta nets, which
    forget half of what they hold in 20 tokens or so. Those of Gemma are 1 plus their weights, too.
    """
    if name == "hybrid_mtp":
        return host_params("hybrid") | {"mtp": host_head()}
    adds_one = name in ("hybrid", "hybrid_moe", "gemma2", "gemma3")
    centers = {"delta_norm": 1.0, "delta_decay": -3.0}
    rng = np.random.default_rng(1)

    def random_leaf(path: tuple, x: jax.ShapeDtypeStruct) -> np.ndarray:
        leaf = path[-1].key
        of_norm = 1.0 if "norm" in leaf and not adds_one else 0.0
        center = centers.get(leaf, of_norm)
        return (center + 0.12 * rng.standard_normal(x.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(random_leaf, qwen.abstract(CONFIGS[name]))


def host_head() -> qwen.Params:
    """The head for multi-token prediction, for the parameters of "hybrid"."""
    rng = np.random.default_rng(2)

    def random_leaf(x: jax.ShapeDtypeStruct) -> np.ndarray:
        return (0.12 * rng.standard_normal(x.shape)).astype(np.float32)

    return jax.tree.map(random_leaf, qwen.abstract(CONFIGS["hybrid_mtp"])["mtp"])


def new_engine(
    name: str = "qwen2",
    shape: tuple[int, int] = (1, 1),
    stop_ids: tuple[int, ...] = STOP_IDS,
    dtype: str = "float32",
    **settings: object,
) -> Engine:
    """An engine on shape[0] shards of shape[1] devices."""
    devices = jax.devices()[: shape[0] * shape[1]]
    mesh = make_mesh(devices, {"slots": shape[0], "tensor": shape[1]})
    return Engine(CONFIGS[name], RolloutConfig(**(SMALL | settings)), mesh, stop_ids, dtype)


@cache
def make(*args: object, **settings: object) -> Engine:
    """`new_engine`, once: tests share engines and their compiled programs, and leave no trace."""
    return new_engine(*args, **settings)


def name_of(engine: Engine) -> str:
    return next(name for name, config in CONFIGS.items() if config == engine.model)


@cache
def params_on(engine: Engine) -> qwen.Params:
    shardings = param_shardings(engine.model, engine.mesh)
    return engine.load_params(host_params(name_of(engine)), shardings)


def seed_on(engine: Engine, seed: int = 0) -> jax.Array:
    return jax.device_put(jax.random.key(seed), NamedSharding(engine.mesh, P()))


def text_of(tokens: list[int]) -> str:
    """Every token is one character."""
    return "".join(chr(ord("!") + token) for token in tokens)


def pages_in_use(engine: Engine) -> int:
    """Pages that slots hold, of all shards."""
    allocators = engine.page_allocators
    return sum(len(pages.reference_counts) - 1 - len(pages.free_pages) for pages in allocators)


def assert_empty(engine: Engine) -> None:
    """No slot decodes, and every page is free."""
    assert pages_in_use(engine) == 0
    assert not engine.placements
    for pages in engine.page_allocators:
        assert not pages.reference_counts.any() and not pages.table.any()


def place_sample(
    slot: int, length: int, limit: int, group: object, sample_index: int = 0, request: int = 0
) -> Placement:
    """A sample of row 0 whose whole prefix is shared with its group."""
    return Placement(slot, 0, sample_index, length, limit, request, group, length)


def fresh_groups(max_new: int = MAX_NEW) -> Groups:
    return make_groups(PROMPTS, GROUP, max_new)


def by_key(sequences: list[Sequence]) -> Completions:
    return {(sequence.prompt_id, sequence.sample_index): sequence for sequence in sequences}


def complete(
    engine: Engine,
    prompts: list[np.ndarray] = PROMPTS,
    group: int = GROUP,
    temperature: float = TEMPERATURE,
    max_new: int = MAX_NEW,
    decode: Callable[[list[int]], str] = text_of,
    **settings: object,
) -> tuple[Completions, Scheduler]:
    """Decodes all samples to their ends and checks that nothing stays behind.

    `settings` are those that only the scheduler reads, as stop strings.
    """
    scheduler = Scheduler(engine, params_on(engine), decode)
    scheduler.settings = replace(scheduler.settings, **settings)
    groups = make_groups(prompts, group, max_new)
    seed = seed_on(engine)
    with jax.transfer_guard("disallow"):
        finished = list(scheduler.run(groups, group, temperature, seed))
    completions = by_key(finished)
    assert len(finished) == len(completions) == len(prompts) * group
    assert_empty(engine)
    return completions, scheduler


@cache
def base(name: str = "qwen2", temperature: float = TEMPERATURE) -> Completions:
    return complete(make(name), temperature=temperature)[0]


def assert_same(got: Completions, want: Completions, atol: float = 1e-5) -> None:
    for key, sequence in got.items():
        assert sequence.new_tokens == want[key].new_tokens, key
        assert sequence.finish_reason == want[key].finish_reason
        assert sequence.turn_text == want[key].turn_text
        np.testing.assert_allclose(
            sequence.new_logps, want[key].new_logps, atol=atol, err_msg=str(key)
        )


# -- against the full forward pass ----------------------------------------------------------------


@cache
def scorer(name: str) -> Callable:
    """Scores as the trainer does, with the whole sequence at once.

    tokens [N, TOTAL], lengths [N] -> logits [N, TOTAL, V], and log-probs of each next token.
    """
    config = CONFIGS[name]

    @jax.jit
    def score(params, tokens, lengths, temperature):
        segments = (jnp.arange(TOTAL)[None] < lengths[:, None]).astype(jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(TOTAL), tokens.shape)

        def attend(q, k, v, layer, carry):
            window = window_in_rows(config, layer, positions)
            cap = config.attn_logit_softcapping
            layout = RowLayout(0, 1, TOTAL)
            return xla.packed(q, k, v, segments, layout, window, soft_cap=cap), carry

        def recur(inputs, layer, carry):
            return recur_tokens(inputs, segments)[0], carry

        hidden, _ = qwen.forward(
            config, params, tokens, positions, attend, dtype=jnp.float32, recur=recur
        )
        targets = jnp.roll(tokens, -1, axis=1)
        options = {"temperature": temperature, "chunk": 64, "dtype": jnp.float32}
        logps, _ = logprobs.token_logps(config, params, hidden, targets, **options)
        return qwen.head(config, params, hidden, jnp.float32), logps

    return score


def scored(
    engine: Engine, completions: Completions, temperature: float
) -> Iterator[tuple[Sequence, np.ndarray, np.ndarray]]:
    """Yields each completion of n tokens, the logits [n, V] before its tokens, and their logps."""
    name = name_of(engine)
    rows = [sequence.tokens.ids for sequence in completions.values()]
    lengths = np.array([len(row) for row in rows])
    tokens = np.stack([np.pad(row, (0, TOTAL - len(row))) for row in rows])
    logits, logps = scorer(name)(host_params(name), tokens, lengths, temperature)
    for i, sequence in enumerate(completions.values()):
        response = slice(len(sequence.prompt_tokens) - 1, lengths[i] - 1)
        yield sequence, np.asarray(logits[i, response], np.float64), np.asarray(logps[i, response])


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma3", "gemma2", "llama"])
def test_greedy_is_the_argmax_of_the_full_forward(name) -> None:
    completions = base(name, 0.0)
    for sequence, logits, logps in scored(make(name), completions, 1.0):
        assert sequence.new_tokens == logits.argmax(-1).tolist()
        np.testing.assert_allclose(sequence.new_logps, logps, atol=1e-5)
    assert (
        completions[0, 0].new_tokens == completions[0, 1].new_tokens != completions[1, 0].new_tokens
    )


@cache
def uniform_number() -> Callable:
    """(request, position) -> the uniform number of this token, at seed 0."""
    key = jax.random.key(0)

    def draw(request, position):
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, request), position))

    return jax.jit(draw)


SHORT_PROMPTS = [PROMPTS[3][:length] for length in (17, 1, 2, 15)]


@pytest.mark.parametrize(
    "name, prompts",
    [
        pytest.param("qwen2", None, id="qwen2"),
        pytest.param("qwen3", None, id="qwen3"),
        pytest.param("hybrid", None, id="hybrid"),
        pytest.param("qwen2", SHORT_PROMPTS, id="qwen2-short"),
        pytest.param("qwen3", SHORT_PROMPTS, id="qwen3-short"),
    ],
)
def test_samples_invert_the_full_forwards_distribution_at_their_own_noise(name, prompts) -> None:
    """Token t of request r is where the cumulative distribution passes the number of (r, t)."""
    engine = make(name)
    completions = complete(engine, prompts)[0] if prompts else base(name)
    num_not_greedy = 0
    for sequence, logits, logps in scored(engine, completions, TEMPERATURE):
        np.testing.assert_allclose(sequence.new_logps, logps, atol=1e-5)
        cumulative = np.cumsum(np.exp(logits / TEMPERATURE), axis=-1)
        request = sequence.prompt_id * GROUP + sequence.sample_index
        for i, token in enumerate(sequence.new_tokens):
            u = float(uniform_number()(request, len(sequence.prompt_tokens) + i))
            point = u * cumulative[i, -1]
            where = (sequence.prompt_id, sequence.sample_index, i)
            assert token == np.searchsorted(cumulative[i], point, side="right"), where
            num_not_greedy += token != logits[i].argmax()
    assert num_not_greedy > 20


@pytest.mark.parametrize("dtype, bound", [("float32", 0.03), ("bfloat16", 0.15)])
def test_logps_with_a_bfloat16_cache_are_near(dtype, bound) -> None:
    """bfloat16 keeps 8 bits: 0.4% of every key and value, and of every activation in bfloat16."""
    engine = make(dtype=dtype, kv_dtype="bfloat16")
    gaps = [
        np.abs(sequence.new_logps - logps)
        for sequence, _, logps in scored(engine, complete(engine)[0], TEMPERATURE)
    ]
    worst = np.concatenate(gaps).max()
    assert 1e-5 < worst < bound


# Bounds of differences of log-probs: the numbers of fp8 are further apart than those of int8.
NEAR = {"int8": 0.1, "fp8": 0.3}
PREEMPTED_IN_8_BITS = {"num_slots": 6, "page_size": 4, "decode_steps": 4, "num_pages": 14}


def largest_gap(engine: Engine, completions: Completions) -> float:
    """Returns the largest difference between log-probs of the decoder and of the full forward."""
    gaps = [
        np.abs(sequence.new_logps - logps)
        for sequence, _, logps in scored(engine, completions, TEMPERATURE)
    ]
    return float(np.concatenate(gaps).max())


@pytest.mark.parametrize(
    ("shape", "kv_dtype"),
    [((1, 1), "int8"), ((2, 2), "int8"), ((1, 1), "fp8")],
    ids=str,
)
def test_an_8_bit_cache_is_near_and_does_not_depend_on_the_arrangement(shape, kv_dtype) -> None:
    """A prompt attends to what decoding reads, so a sequence goes on alike after a preemption.

    Not to the last digit: a sum in another order may be rounded to the next of 255 numbers.
    """
    engine = make(shape=shape, kv_dtype=kv_dtype)
    completions = complete(engine)[0]
    assert 1e-5 < largest_gap(engine, completions) < NEAR[kv_dtype]

    preempted = make(kv_dtype=kv_dtype, **PREEMPTED_IN_8_BITS)
    again, scheduler = complete(preempted)
    assert scheduler.counters.preempted > 0
    assert_same(again, completions, atol=2e-2)


@pytest.mark.parametrize(("precision", "bound"), [("int8", 0.2), ("fp8", 0.8)])
def test_8_bit_weights_are_near_and_need_their_scales(precision, bound) -> None:
    engine = make()
    replicated = NamedSharding(engine.mesh, P())

    def gap(weights: qwen.Params) -> float:
        groups = make_groups(PROMPTS, GROUP, MAX_NEW)
        scheduler = Scheduler(engine, jax.device_put(weights, replicated), text_of)
        finished = scheduler.run(groups, GROUP, TEMPERATURE, seed_on(engine))
        return largest_gap(engine, by_key(list(finished)))

    model, params = CONFIGS["qwen2"], host_params("qwen2")
    number = FORMATS[precision]
    layers = dict(params["layers"])
    for name, target in adapters.linear_layers(model).items():
        num_inputs, num_stacked = len(target.inputs), len(target.stacked)
        layers[name] = quantize_on_device(layers[name], num_inputs, num_stacked, number)

    assert 1e-4 < gap(params | {"layers": layers}) < bound

    # Without the scales of a single weight the log-probs are others.
    unscaled = replace(layers["o"], scale=jnp.ones_like(layers["o"].scale))
    assert gap(params | {"layers": layers | {"o": unscaled}}) > 2 * bound


def test_an_8_bit_cache_takes_a_quarter_of_the_memory() -> None:
    def bytes_of_pools(kv_dtype: str) -> int:
        state = make(kv_dtype=kv_dtype).abstract_state()
        leaves = jax.tree.leaves((state.k_pool, state.v_pool))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    head_dim = CONFIGS["qwen2"].head_dim
    share = (head_dim + 4) / (4 * head_dim)  # a byte a number, and a scale in fp32
    assert bytes_of_pools("int8") == share * bytes_of_pools("float32")
    assert bytes_of_pools("fp8") == bytes_of_pools("int8")


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_kernels_that_read_no_8_bit_pages_refuse_them(kv_dtype: str) -> None:
    mesh = make_mesh(jax.devices()[:1], {"slots": 1, "tensor": 1})
    settings = RolloutConfig(**(SMALL | {"kv_dtype": kv_dtype}))
    with pytest.raises(
        UserError,
        match=f"rollout.kv_dtype={kv_dtype}: .* not support an 8-bit KV cache; set rollout.kv_dty",
    ):
        Engine(CONFIGS["qwen2"], settings, mesh, STOP_IDS, "float32", "exact")


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "qwen3"])
def test_logits_may_be_made_in_parts(name) -> None:
    """As where VMEM is small. Greedy tokens stay; sampled ones are others of the distribution."""
    engine = new_engine(name)
    parts = (slice(0, 40), slice(40, 41), slice(41, 96))
    engine.program_settings = replace(engine.program_settings, vocabulary_parts=parts)
    assert_same(complete(engine, temperature=0.0)[0], base(name, 0.0))
    sampled, _ = complete(engine)
    for sequence, _, logps in scored(engine, sampled, TEMPERATURE):
        np.testing.assert_allclose(sequence.new_logps, logps, atol=1e-5)
    assert [s.new_tokens for s in sampled.values()] != [s.new_tokens for s in base(name).values()]


# -- against other arrangements -------------------------------------------------------------------

ARRANGEMENTS = {
    "2 slots": {"num_slots": 2, "page_size": 4, "decode_steps": 3},
    "3 slots, 1-token calls": {"num_slots": 3, "page_size": 1, "decode_steps": 1},
    "page of 12": {"page_size": 12, "decode_steps": 32},
    "4 shards": {"shape": (4, 1), "page_size": 4, "decode_steps": 5},
    "tensor 2": {"shape": (1, 2), "decode_steps": 6},
    "2 shards x tensor 2": {"name": "qwen3", "shape": (2, 2), "page_size": 4, "decode_steps": 7},
    "tensor 4, 2 kv heads": {"shape": (1, 4)},
    "preempted": {"num_slots": 6, "page_size": 4, "decode_steps": 4, "num_pages": 14},
    "preempted, 2 shards": {
        "name": "qwen3",
        "shape": (2, 1),
        "page_size": 2,
        "decode_steps": 3,
        "num_pages": 46,
    },
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_completions_do_not_depend_on_the_arrangement(arrangement) -> None:
    engine = make(**ARRANGEMENTS[arrangement])
    got, scheduler = complete(engine)
    assert_same(got, base(name_of(engine)))
    assert (scheduler.counters.preempted > 0) == arrangement.startswith("preempted")
    num_tokens = sum(sequence.num_new for sequence in got.values())
    tokens_of_prefills = scheduler.num_placed  # one for each placement
    assert scheduler.counters.decoded_tokens + tokens_of_prefills == num_tokens


CHUNKED = {
    "one shard": {"num_slots": 6, "page_size": 4, "decode_steps": 4, "num_pages": 14},
    "2 shards x tensor 2": {
        "shape": (2, 2),
        "num_slots": 8,
        "page_size": 4,
        "decode_steps": 4,
        "num_pages": 28,
    },
    "8 bits": {
        "num_slots": 6,
        "page_size": 4,
        "decode_steps": 4,
        "num_pages": 14,
        "kv_dtype": "int8",
    },
}


@pytest.mark.parametrize("arrangement", ["one shard", "2 shards x tensor 2", "8 bits"])
@pytest.mark.parametrize("chunk_tokens", [8, 20])
def test_preempted_sequences_may_be_prefilled_in_chunks(
    arrangement, chunk_tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the same tokens, and no prefill is longer than a prompt."""
    settings = CHUNKED[arrangement]
    engine = new_engine(**settings)
    engine.chunk_tokens = chunk_tokens
    num_chunks = 0
    longest_prefill = 0
    extend, prefill = engine.extend, engine.prefill_multisampling

    def counted_extend(params, state, inputs):
        nonlocal num_chunks
        num_chunks += int((inputs.lengths > 0).sum())
        assert inputs.tokens.shape[1] <= chunk_tokens
        return extend(params, state, inputs)

    def watched_prefill(**arguments):
        nonlocal longest_prefill
        longest_prefill = max(longest_prefill, int(arguments["true_length"].max()))
        return prefill(**arguments)

    monkeypatch.setattr(engine, "extend", counted_extend)
    monkeypatch.setattr(engine, "prefill_multisampling", watched_prefill)

    completions, scheduler = complete(engine)

    is_int8 = settings.get("kv_dtype") == "int8"
    expected = complete(make(kv_dtype="int8"))[0] if is_int8 else base()
    assert_same(completions, expected, atol=2e-2 if is_int8 else 1e-5)
    assert scheduler.counters.preempted > 0
    assert num_chunks >= scheduler.counters.preempted / 2
    assert longest_prefill <= MAX_PROMPT


def test_what_returns_with_more_than_pages_is_prefilled_at_once() -> None:
    assert make().can_prefill_in_chunks()
    assert not make("hybrid").can_prefill_in_chunks()


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "qwen3_moe", "hybrid_moe"])
def test_a_single_slot_of_a_tpu_is_multiplied_with_rows_of_padding(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_settings, "choose_arithmetic", lambda *_: PLAIN_ON_TPU)
    engine = new_engine(name, num_slots=1)
    completions, _ = complete(engine)
    assert_same(completions, base(name))

    calls = abstract_calls(engine, params_on(engine), [])
    function, arguments = calls["generate"]
    text = function.lower(*arguments).as_text()
    rows = re.findall(r"dot_general .*-> tensor<(\d+)x\d+xf32>", text)
    assert set(rows) == {str(FEW_ROWS)}


def test_completions_do_not_depend_on_their_company() -> None:
    engine = make()
    alone, _ = complete(engine, PROMPTS[:1])
    assert_same(alone, base())
    other_company, _ = complete(engine, [PROMPTS[0], PROMPTS[3], PROMPTS[1], PROMPTS[1]])
    assert_same({key: other_company[key] for key in alone}, base())
    # A prompt in the same place of the batch has the same noise.
    repeated, _ = complete(engine, [PROMPTS[0], PROMPTS[0], PROMPTS[0], PROMPTS[3]])
    assert_same({key: repeated[key] for key in repeated if key[0] == 3}, base())
    first, second = ([repeated[prompt, j].new_tokens for j in range(GROUP)] for prompt in (0, 1))
    assert first != second


def test_a_shard_without_work_does_not_hold_up_the_others() -> None:
    """With tensor > 1 a step has collectives that wait for all devices; this run used to abort."""
    completions, _ = complete(make(**ARRANGEMENTS["2 shards x tensor 2"]), PROMPTS[:1], group=1)
    assert_same(completions, {(0, 0): base("qwen3")[0, 0]})


@pytest.mark.parametrize("shape", [(1, 1), (1, 2)], ids=["tensor 1", "tensor 2"])
def test_kernels_may_lay_out_the_pools(shape) -> None:
    """As on a TPU: several heads in a row, and splash attention for prompts."""

    def heads_apart(pool: jax.Array, kv_heads: int, head_dim: int) -> jax.Array:
        heads = jnp.split(pool, pool.shape[-1] // head_dim, axis=-1)
        pools = jnp.stack(heads, axis=1).reshape(-1, *pool.shape[1:3], head_dim)
        return pools[:kv_heads]

    def paged(q, k_pool, v_pool, table, lengths, shared, kv_heads):
        k_pool, v_pool = (heads_apart(pool, kv_heads, q.shape[-1]) for pool in (k_pool, v_pool))
        return xla.paged(q, k_pool, v_pool, table, lengths, shared)

    packed = partial(tpu.packed, interpret=True)
    backend = attention.Backend(packed, paged, tpu.pool_rows, attention.write)
    engine = new_engine(shape=shape)
    engine.program_settings = replace(engine.program_settings, attention=backend)
    assert engine.init_decode_state().k_pool.shape[::3] == (shape[1], 128)
    assert_same(complete(engine)[0], base())


@pytest.mark.parametrize("shape", [(1, 1), (1, 2)], ids=["tensor 1", "tensor 2"])
def test_one_kernel_may_rotate_write_and_attend(shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `model.attention=tpu_fused`.

    The samples of a prompt share its first page, which one read serves. The first sample of the
    first prompt ends in the middle of a call, before others: the page is read for them still, in
    this call and in the next one.
    """
    stop_ids = (3, 7, 9, 11, 13, 20, 21, 50)
    packed = partial(tpu.packed, interpret=True)
    decode = partial(tpu_decode.decode, interpret=True)
    backend = attention.Backend(packed, xla.paged, tpu.pool_rows, attention.write, decode)
    engine = new_engine(shape=shape, group_size=4, stop_ids=stop_ids)
    engine.program_settings = replace(engine.program_settings, attention=backend)
    assert engine.slots_per_block == 4
    shares_without_first_slot = []
    count_shared_pages = engine._count_shared_pages

    def count(table: np.ndarray, keep: np.ndarray) -> np.ndarray:
        shared = count_shared_pages(table, keep)
        shares_without_first_slot.append((shared > 0) & ~keep[::4])
        return shared

    monkeypatch.setattr(engine, "_count_shared_pages", count)

    found, _ = complete(engine, group=4)

    expected, _ = complete(make(group_size=4, stop_ids=stop_ids), group=4)
    lengths = [expected[0, sample].num_new for sample in range(4)]
    steps_of_first = lengths[0] - 1  # its first token is of the prefill
    assert steps_of_first % SMALL["decode_steps"] and lengths[0] < max(lengths)
    assert_same(found, expected)
    assert np.any(shares_without_first_slot)


# -- the compiled programs ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "qwen3"])
def test_no_device_gathers_the_logits(name) -> None:
    """Of a vocabulary that is split over tensor, less is gathered than one slot's logits each."""
    engine = make(name, shape=(1, 2))
    program, arguments = abstract_calls(engine, params_on(engine), [])["generate"]
    text = program.lower(*arguments).compile().as_text()
    shapes = re.findall(r"f32\[([\d,]+)\]\S* all-gather", text)
    sizes = [math.prod(int(size) for size in shape.split(",")) for shape in shapes]
    assert sizes and max(sizes) < engine.max_concurrent_decodes * engine.model.vocab_size


@pytest.mark.parametrize("shape", [(1, 1), (2, 2)], ids=str)
def test_pages_are_written_in_place(shape) -> None:
    """XLA keeps no second copy of the pools."""
    jax.config.update("jax_disable_most_optimizations", False)
    engine = new_engine(shape=shape, num_pages=4096, kv_dtype="bfloat16")
    program, arguments = abstract_calls(engine, params_on(engine), [])["generate"]
    state = engine.abstract_state()
    pools = (state.k_pool, state.v_pool)
    num_bytes = sum(math.prod(pool.shape) * pool.dtype.itemsize for pool in pools)
    pool_bytes = num_bytes / engine.mesh.size
    memory = program.lower(*arguments).compile().memory_analysis()
    assert memory.temp_size_in_bytes < pool_bytes / 4
    assert memory.alias_size_in_bytes > pool_bytes


# -- pages ----------------------------------------------------------------------------------------


def test_a_group_holds_the_full_pages_of_its_prompt_once() -> None:
    engine = make(page_size=4)
    length, limit = 18, 26
    full_pages, pages_in_all = 18 // 4, math.ceil(26 / 4)
    placements = [place_sample(slot, length, limit, "a", slot, slot) for slot in range(8)]
    page_copies = [engine.place(placement) for placement in placements]
    # The first sample writes the prompt, the others write its last page.
    assert [len(copies) for copies in page_copies] == [5] + 7 * [1]
    table = engine.page_allocators[0].table[: engine.slots_per_shard]
    assert pages_in_use(engine) == full_pages + 8 * (pages_in_all - full_pages)
    assert (table[:, :full_pages] == table[0, :full_pages]).all()
    assert len(set(table[:, full_pages].tolist())) == 8
    for slot in range(8):
        engine.free_resource(slot)
    assert_empty(engine)


def test_a_group_that_decodes_holds_the_full_pages_of_its_prompt_once() -> None:
    engine = make()
    scheduler = Scheduler(engine, params_on(engine), text_of)
    used = []  # before every call

    def count_pages() -> Groups:
        used.append(pages_in_use(engine))
        return []

    groups = make_groups(PROMPTS[:1], 8, 8)
    list(scheduler.run(groups, 8, TEMPERATURE, seed_on(engine), admit_more=count_pages))
    assert max(used) == 1 + 8


def test_a_group_larger_than_the_slots_is_no_special_case() -> None:
    want, _ = complete(make(), PROMPTS[:1], group=8)
    assert_same(complete(make(**ARRANGEMENTS["2 slots"]), PROMPTS[:1], group=8)[0], want)
    assert len({tuple(sequence.new_tokens) for sequence in want.values()}) == 8


def test_a_pool_too_small_for_one_sequence_is_refused() -> None:
    message = r"rollout.num_pages=9 is too small: one sequence of 40 tokens takes 10 pages of 4"
    with pytest.raises(ValueError, match=message):
        new_engine(page_size=4, num_pages=9)
    with pytest.raises(ValueError, match=r"rollout.num_pages=18 is too small.*on each of 2"):
        new_engine(page_size=4, num_pages=18, shape=(2, 1))
    new_engine(page_size=4, num_pages=10)


def test_generate_takes_the_pages_of_its_call_or_none_runs() -> None:
    engine = make(**ARRANGEMENTS["preempted"])
    params, seed = params_on(engine), seed_on(engine)
    state = engine.init_decode_state()
    for slot in range(2):
        engine.place(place_sample(slot, 20, TOTAL, group=slot, request=slot))
    for held in (6, 7):  # 24 tokens, then 28, in pages of 4
        state, _ = engine.generate(params, state, seed)
        pages = engine.page_allocators[0].pages_of_slot[:2]
        assert [len(pages_of_slot) for pages_of_slot in pages] == [held, held]
    with pytest.raises(OutOfPages):  # 16 pages of 14
        engine.generate(params, state, seed)
    for slot in range(2):
        engine.free_resource(slot)
    assert_empty(engine)


def test_out_of_pages_takes_nothing() -> None:
    engine = make(**ARRANGEMENTS["preempted"])
    engine.place(place_sample(0, 20, TOTAL, "a"))
    engine.place(place_sample(1, 20, TOTAL, "a", sample_index=1, request=1))
    assert pages_in_use(engine) == 7  # 5 of the 6 pages are shared
    engine.place(place_sample(2, 20, TOTAL, "b", request=2))
    with pytest.raises(OutOfPages):
        engine.place(place_sample(3, 20, TOTAL, "c", request=3))
    assert pages_in_use(engine) == 13 and 3 not in engine.placements
    for slot in range(3):
        engine.free_resource(slot)
    assert_empty(engine)


# -- how sequences end ----------------------------------------------------------------------------


def test_stop_ids_end_a_sequence_and_stay_in_it() -> None:
    finish_reasons = set()
    for sequence in base().values():
        *before, last = sequence.new_tokens
        finish_reasons.add(sequence.finish_reason)
        assert not set(before) & set(STOP_IDS) and sequence.num_new == len(sequence.new_logps)
        assert sequence.finish_reason == ("stop" if last in STOP_IDS else "length")
        assert last in STOP_IDS or sequence.num_new == MAX_NEW
        # The token that ended the turn is trained on, and no part of its text.
        response = before if last in STOP_IDS else sequence.new_tokens
        assert sequence.turn_text == text_of(response)
    assert finish_reasons == {"stop", "length"}


def test_without_stop_ids_every_sequence_runs_to_its_limit() -> None:
    engine = make(stop_ids=(), top_k=1)
    got, _ = complete(engine, group=1)
    for (prompt, _), sequence in got.items():
        greedy = base(temperature=0.0)[prompt, 0].new_tokens
        assert sequence.new_tokens[: len(greedy)] == greedy and sequence.num_new == MAX_NEW


@pytest.mark.parametrize("max_new", [1, 2, 9, 10])
def test_a_limit_ends_sequences_and_changes_nothing_before(max_new) -> None:
    got, _ = complete(make(), max_new=max_new)
    for key, sequence in got.items():
        assert sequence.new_tokens == base()[key].new_tokens[:max_new]
        is_stopped = sequence.new_tokens[-1] in STOP_IDS
        assert sequence.finish_reason == ("stop" if is_stopped else "length")


def longest() -> tuple[int, int]:
    """The key of the longest completion."""
    return max(base(), key=lambda key: base()[key].num_new)


@pytest.mark.parametrize("keep", [True, False])
# Calls end after 1, 9 and 17 tokens.
@pytest.mark.parametrize("begin, end", [(0, 1), (3, 5), (7, 10), (MAX_NEW - 2, MAX_NEW)])
def test_stop_strings_end_a_sequence_at_the_token_that_completes_them(begin, end, keep) -> None:
    stop = text_of(base()[longest()].new_tokens[begin:end])
    got, _ = complete(make(), stop=(stop, "never"), keep_stop=keep)
    assert got[longest()].new_tokens == base()[longest()].new_tokens[:end]
    for key, sequence in got.items():
        want = base()[key]
        found_at = text_of(want.new_tokens).find(stop)
        is_found = found_at >= 0
        num_kept = found_at + len(stop) if is_found else len(want.new_tokens)
        assert (
            sequence.new_tokens == want.new_tokens[:num_kept]
            and len(sequence.new_logps) == num_kept
        )
        assert sequence.finish_reason == ("stop" if is_found else want.finish_reason)
        text_end = found_at if is_found and not keep else num_kept
        assert sequence.turn_text == want.turn_text[:text_end]


def test_a_stop_string_of_many_bytes_may_span_as_many_tokens() -> None:
    ids = base()[longest()].new_tokens[6:10]  # a call ends after token 9
    byte_of_token = dict(zip(ids, "éé".encode(), strict=True))
    assert len(byte_of_token) == 4

    def decode(tokens: list[int]) -> str:
        return bytes(byte_of_token.get(token, ord("x")) for token in tokens).decode(
            errors="replace"
        )

    got, _ = complete(make(), decode=decode, stop=("éé",))
    assert got[longest()].new_tokens == base()[longest()].new_tokens[:10]
    assert got[longest()].turn_text.endswith("éé")


def test_stop_strings_and_preemption() -> None:
    stop = {sequence.turn_text[8:10] for sequence in base().values() if sequence.num_new > 12}
    want, _ = complete(make(), stop=tuple(stop))
    got, scheduler = complete(make(**ARRANGEMENTS["preempted"]), stop=tuple(stop))
    assert_same(got, want)
    assert scheduler.counters.preempted > 0
    assert any(want[key].num_new < base()[key].num_new for key in want)


# -- the life of a scheduler ----------------------------------------------------------------------


@pytest.mark.parametrize("arrangement", ["2 slots", "preempted"])
def test_cancel_frees_everything_and_the_engine_serves_the_next(arrangement) -> None:
    engine = make(**ARRANGEMENTS[arrangement])
    scheduler = Scheduler(engine, params_on(engine), text_of)
    for num_finished in range(1, len(PROMPTS) * GROUP, 2):
        run = scheduler.run(fresh_groups(), GROUP, TEMPERATURE, seed_on(engine))
        first = [next(run) for _ in range(num_finished)]
        scheduler.cancel()
        assert_empty(engine)
        assert list(run) == []  # tokens of calls in flight are dropped
        assert_same(by_key(first), base())
    same_scheduler = list(scheduler.run(fresh_groups(), GROUP, TEMPERATURE, seed_on(engine)))
    assert_same(by_key(same_scheduler), base())
    another_scheduler, _ = complete(engine)
    assert_same(another_scheduler, base())


@pytest.mark.parametrize("arrangement", ["2 slots", "preempted"])
def test_a_drained_run_ends_the_turns_that_have_begun_and_begins_no_other(arrangement) -> None:
    """A sequence that is preempted within its turn returns, and ends it."""
    engine = make(**ARRANGEMENTS[arrangement])
    scheduler = Scheduler(engine, params_on(engine), text_of)
    groups = fresh_groups()
    num_calls = 0

    def drain() -> bool:
        nonlocal num_calls
        num_calls += 1
        return num_calls > 2

    ended = list(scheduler.run(groups, GROUP, TEMPERATURE, seed_on(engine), drain=drain))
    scheduler.cancel()
    assert_empty(engine)
    sequences = [sequence for group in groups for sequence in group]
    assert 0 < len(ended) < len(sequences)
    assert [s.num_new for s in sequences if not s.is_finished] == [0] * (
        len(sequences) - len(ended)
    )
    want = base()
    assert_same(by_key(ended), {key: want[key] for key in by_key(ended)})


def test_an_abandoned_run_must_be_cancelled() -> None:
    engine = make()
    scheduler = Scheduler(engine, params_on(engine), text_of)
    next(scheduler.run(fresh_groups(), GROUP, TEMPERATURE, seed_on(engine)))
    other_scheduler = Scheduler(engine, params_on(engine), text_of)
    with pytest.raises(AssertionError, match="not cancelled"):
        next(other_scheduler.run(fresh_groups(), GROUP, TEMPERATURE, seed_on(engine)))
    scheduler.cancel()
    assert_same(complete(engine)[0], base())


def test_prompts_that_do_not_fit_are_refused() -> None:
    engine = make()
    scheduler = Scheduler(engine, params_on(engine), text_of)
    groups = make_groups([np.zeros(21, np.int32)], 1, MAX_NEW)
    with pytest.raises(AssertionError, match="longest=41"):
        next(scheduler.run(groups, 1, TEMPERATURE, seed_on(engine)))


# -- JetStream's methods --------------------------------------------------------------------------

METHODS = """load_params init_decode_state prefill prefill_multisampling insert bulk_insert generate
free_resource max_concurrent_decodes samples_per_slot max_prefill_length mesh
get_prefix_destination_sharding colocated_cpus"""


def test_the_engine_has_jetstreams_methods() -> None:
    engine = make()
    assert all(hasattr(engine, name) for name in METHODS.split())
    assert engine.max_concurrent_decodes == 8
    assert engine.samples_per_slot == 1
    assert engine.max_prefill_length == 48


def test_load_params_gives_the_decoders_layout_and_dtype() -> None:
    engine = make()
    shardings = param_shardings(engine.model, engine.mesh)
    params = engine.load_params(host_params("qwen2"), shardings)
    assert jax.tree.map(lambda x: x.sharding, params) == shardings
    bfloat16 = new_engine(dtype="bfloat16", kv_dtype="bfloat16").load_params(params, shardings)
    assert {x.dtype for x in jax.tree.leaves(bfloat16)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize(
    "arrangement, slot",
    [
        ("2 slots", 1),
        ("2 shards x tensor 2", 6),
        ("3 slots, 1-token calls", 2),
        ("4 shards", 6),
    ],
)
def test_prefill_insert_generate_by_hand(arrangement, slot) -> None:
    """One request as JetStream's orchestrator drives it, on a slot of the last shard."""
    engine = make(**ARRANGEMENTS[arrangement])
    params, seed, prompt = params_on(engine), seed_on(engine), PROMPTS[3]
    length = len(prompt)
    prefix = engine.prefill(
        params=params,
        padded_tokens=np.pad(prompt, (0, 32 - length)),
        true_length=length,
        request=6,
        temperature=TEMPERATURE,
        seed=seed,
    )
    sharding = engine.get_prefix_destination_sharding().k
    assert prefix.k.sharding.is_equivalent_to(sharding, prefix.k.ndim)

    placement = place_sample(slot, length, length + MAX_NEW, "request", request=6)
    state = engine.insert(prefix, engine.init_decode_state(), placement, TEMPERATURE)
    tokens, logps = [int(prefix.tracks["ids"][0, 0])], [float(prefix.tracks["logps"][0, 0])]
    for _ in range(MAX_NEW):
        state, result = engine.generate(params, state, seed)
        result = jax.device_get(result)
        count = result.counts[slot]
        tokens += result.tracks["ids"][slot, :count].tolist()
        logps += result.tracks["logps"][slot, :count].tolist()
        assert result.counts.sum() == count
    engine.free_resource(slot)

    assert_empty(engine)
    want = base(name_of(engine))[3, 0]  # its request is 3 * GROUP + 0
    assert tokens == want.new_tokens
    np.testing.assert_allclose(logps, want.new_logps, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1), (1, 2)], ids=["tensor 1", "tensor 2"])
def test_a_backend_may_do_all_of_a_step_s_attention(shape: tuple[int, int]) -> None:
    """It rotates queries and keys itself, writes the new token and attends."""

    def decode(q, k, v, cos, sin, k_pool, v_pool, table, lengths, first_page, shared, owners):
        def rotated(x):
            return x * cos[:, None] + jnp.roll(x, x.shape[-1] // 2, axis=-1) * sin[:, None]

        place = lengths - 1
        pages = jnp.take_along_axis(table, place[:, None] // page_size, axis=1)[:, 0]
        where = (first_page + pages, place % page_size)
        k_pool = attention.write(k_pool, rotated(k), *where)
        v_pool = attention.write(v_pool, v, *where)
        # xla.paged would read shared pages by the first slot of a block, not by its owner.
        nothing_shared = jnp.zeros_like(shared)
        pools = k_pool, v_pool
        out = xla.paged(rotated(q), *pools, first_page + table, lengths, nothing_shared)
        return out, *pools

    page_size = SMALL["page_size"]
    backend = attention.Backend(xla.packed, xla.paged, xla.pool_rows, attention.write, decode)
    engine = new_engine(shape=shape)
    engine.program_settings = replace(engine.program_settings, attention=backend)
    assert_same(complete(engine)[0], base())
