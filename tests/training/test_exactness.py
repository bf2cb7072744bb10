"""A run with `model.exact`: the trainer's log-probabilities have the bits of the sampler's.

Each test samples rollouts with the engine and makes an optimizer step on them, with the weights
that the engine had. The model is small, but its products are wide enough for XLA:CPU to compute a
row of few rows otherwise than a row of many.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jzero import algorithms
from jzero.attention import Backend, exact
from jzero.attention.pools import write
from jzero.config import (
    AdapterConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
)
from jzero.config.drafts import Group
from jzero.decoder.engine import Engine
from jzero.decoder.program_settings import ProgramSettings
from jzero.decoder.scheduler import Scheduler
from jzero.decoder.scoring import Scoring, score_all
from jzero.decoder.sequence import Reply, Sequence, make_groups
from jzero.errors import UserError
from jzero.model import qwen
from jzero.model.architecture import ATTENTION, DELTA_NET, SLIDING, DeltaNetConfig
from jzero.model.arithmetic import EXACT, TPU_PRODUCTS, exact_with
from jzero.model.families import FAMILIES
from jzero.rollout.sampler import to_rollout, with_turn_grades
from jzero.sharding.mesh import decode_mesh, train_mesh
from jzero.sharding.publish import publisher
from jzero.tokens import Tokens
from jzero.training import exactness
from jzero.training.exactness import InexactError, check_exact
from jzero.training.packing import TrainingSequence, pack
from jzero.training.step import UpdateResult, update_on_rollouts
from jzero.training.trainer import Trainer, make_trainer
from jzero.types import Grade, Problem, Rollout, RowLayout, State, Turn

# Programs are compiled as in runs, with all optimizations: these may change the order of sums.
MODEL = qwen.QwenConfig("qwen2", 100, 128, 256, 2, 4, 2, 32, True, 10000.0, 1e-6)
WIDE = replace(MODEL, head_dim=64)  # the pool keeps both KV heads in a row
QWEN3 = qwen.QwenConfig("qwen3", 100, 128, 256, 2, 4, 1, 32, False, 10000.0, 1e-6)
MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=96,
    norm_topk_prob=True,
)
# Gated delta nets whose key and value heads differ in number, an attention with partial RoPE.
HYBRID = replace(
    QWEN3,
    model_type="qwen3_5_text",
    layer_types=(DELTA_NET, ATTENTION),
    delta_net=DeltaNetConfig(
        num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=24, kernel_size=4
    ),
    partial_rotary_factor=0.5,
)
# A window that is shorter than a block of keys, in one of two layers.
GEMMA = replace(
    QWEN3,
    model_type="gemma3_text",
    tie_word_embeddings=True,
    layer_types=(SLIDING, ATTENTION),
    sliding_window=24,
    local_rope_theta=100.0,
    query_scale=48,
)
# Bounds that change all scores and logits.
GEMMA2 = replace(
    GEMMA,
    model_type="gemma2",
    local_rope_theta=0.0,
    attn_logit_softcapping=0.5,
    final_logit_softcapping=1.5,
)
HYBRID_MOE = replace(
    HYBRID,
    model_type="qwen3_5_moe_text",
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=96,
    shared_expert_intermediate_size=64,
    norm_topk_prob=True,
)


def exact_hybrid(model: qwen.QwenConfig) -> ParameterSet:
    """Returns a model with gated delta nets as a case, where the mode takes them."""
    is_refused = jax.__version_info__[:2] >= exactness.NO_EXACT_DELTA_NETS
    reason = "gated delta nets are exact with JAX before 0.12"
    return pytest.param(model, marks=pytest.mark.skipif(is_refused, reason=reason))


GROUP = 4
# Blocks of keys have 64 tokens: sequences end before, behind and at the end of the first one.
PROMPT_LENGTHS = (20, 62, 33, 5)
ROLLOUT = {
    "num_prompts": len(PROMPT_LENGTHS),
    "group_size": GROUP,
    "max_prompt_tokens": 64,
    "max_new_tokens": 40,
    "temperature": 0.7,
    "num_slots": 8,
    "page_size": 16,
    "decode_steps": 8,
}
TRAIN = {"minibatches": 2, "microbatch_tokens": 512, "packs_per_row": 2, "pack": "longest"}
ONE_DEVICE = (1, 1, 1)


def settings(dtype: str = "float32", **changes: dict[str, object]) -> Config:
    """Returns a config; `changes` are those of sections, by name."""
    return Config(
        model=ModelConfig(
            dtype=dtype, logit_chunk=128, **({"exact": True} | changes.get("model", {}))
        ),
        rollout=RolloutConfig(**(ROLLOUT | {"kv_dtype": dtype} | changes.get("rollout", {}))),
        algorithm=algorithms.grpo(),
        # The second of two minibatches then has the policy of the first.
        optimizer=OptimizerConfig(lr=0.0),
        train=TrainConfig(**(TRAIN | changes.get("train", {}))),
    )


def random_params(model: qwen.QwenConfig) -> qwen.Params:
    """Every leaf is random, norms around 1, so that each of them matters."""
    rng = np.random.default_rng(1)

    def random_leaf(path: tuple, x: jax.ShapeDtypeStruct) -> np.ndarray:
        center = 1.0 if "norm" in path[-1].key else 0.0
        return (center + 0.12 * rng.standard_normal(x.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(random_leaf, qwen.abstract(model))


def text_of(tokens: list[int]) -> str:
    return "".join(chr(ord("!") + token) for token in tokens)


def graded(sequence: Sequence) -> Rollout:
    """Returns a rollout whose score depends on its place in its group."""
    problem = Problem(f"p{sequence.prompt_id}", "countdown", "", None)
    rollout = to_rollout(problem, sequence)
    score = float(sequence.sample_index % 2)
    return with_turn_grades(rollout, [Grade(score, bool(score), "") for _ in rollout.turns])


class Sampled:
    """A trainer with its first state, and rollouts of an engine that has the state's weights."""

    def __init__(
        self,
        config: Config,
        sizes: tuple[int, int, int] = ONE_DEVICE,
        model: qwen.QwenConfig = MODEL,
        change_programs: Callable[[ProgramSettings], ProgramSettings] | None = None,
        poll_replies: Callable[[Scheduler], Callable[[bool], list[Reply]]] | None = None,
    ) -> None:
        self.trainer: Trainer = make_trainer(
            config, model, None, train_mesh(*sizes, jax.devices()[: np.prod(sizes)])
        )
        policy = self.trainer.policy
        params = jax.device_put(random_params(model), policy.model_shardings)
        self.state: State = policy.start_on(policy.freeze(params), 0)
        if config.model.adapter.rank:
            # A new adapter adds nothing: B is 0.
            self.state = replace(
                self.state, params=jax.tree.map(lambda x: x + 0.05, self.state.params)
            )

        mesh = decode_mesh(policy.mesh)
        engine = Engine(
            model,
            config.rollout,
            mesh,
            (3,),
            config.model.dtype,
            attention_name=config.model.attention,
            exact=config.model.exact,
        )
        if change_programs is not None:
            engine.program_settings = change_programs(engine.program_settings)
        publish = publisher(model, policy.mesh, mesh, config.model.dtype, config.model.adapter)
        self.engine = engine
        self.weights = publish(policy.weights(self.state))
        self.scheduler = Scheduler(engine, self.weights, text_of)
        rng = np.random.default_rng(2)
        prompts = [
            rng.integers(4, model.vocab_size, length).astype(np.int32) for length in PROMPT_LENGTHS
        ]
        groups = make_groups(prompts, GROUP, config.rollout.max_new_tokens)
        seed = jax.device_put(jax.random.key(0), NamedSharding(mesh, P()))
        poll = poll_replies(self.scheduler) if poll_replies else None
        for _ in self.scheduler.run(
            groups, GROUP, config.rollout.temperature, seed, poll_replies=poll
        ):
            pass
        self.rollouts = [graded(sequence) for group in groups for sequence in group]

    def update(self) -> UpdateResult:
        return update_on_rollouts(self.trainer, self.state, self.rollouts, 1)


def assert_exact(sampled: Sampled) -> None:
    """The update compares all tokens and finds no difference; it computes no old log-probs."""
    metrics = sampled.update().metrics
    assert metrics["policy/mismatch"] == 0
    assert metrics["policy/ratio_shift"] == 0
    assert metrics["policy/exact_tokens"] > 100
    assert sampled.trainer.policy.score_program._cache_size() == 0


@cache
def sampled_plainly(model: qwen.QwenConfig, dtype: str) -> Sampled:
    """Returns rollouts on one device with the usual settings, which several tests compare with."""
    return Sampled(settings(dtype), model=model)


# Hybrids with experts are compared in plain rows below.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "model",
    [MODEL, WIDE, QWEN3, GEMMA, GEMMA2, MOE, exact_hybrid(HYBRID), exact_hybrid(HYBRID_MOE)],
    ids=[
        "qwen2",
        "two heads a row",
        "qwen3",
        "gemma3",
        "gemma2",
        "experts",
        "hybrid",
        "hybrid with experts",
    ],
)
def test_no_bit_differs_between_slots_and_packed_rows(model: qwen.QwenConfig, dtype: str) -> None:
    """Prompts are shared by pages in the decoder, and by rows in the trainer."""
    assert_exact(sampled_plainly(model, dtype))


@pytest.mark.parametrize(
    "model",
    [QWEN3, GEMMA, exact_hybrid(HYBRID_MOE)],
    ids=["dense", "windows", "hybrid with experts"],
)
def test_preempted_sequences_are_exact_in_plain_rows(model: qwen.QwenConfig) -> None:
    # A smaller pool has no rings, whose pages the windows are in otherwise.
    rollout = {"num_pages": 40 if model.sliding_window else 20, "page_size": 8}
    sampled = Sampled(settings(rollout=rollout, train={"packs_per_row": 0}), model=model)
    assert sampled.scheduler.counters.preempted > 0
    assert sampled.engine.has_rings == (model.sliding_window > 0)
    assert_exact(sampled)


@pytest.mark.parametrize("model", [QWEN3, GEMMA], ids=["dense", "windows"])
def test_scores_of_given_tokens_have_the_bits_of_the_sampler(model: qwen.QwenConfig) -> None:
    sampled = sampled_plainly(model, "bfloat16")
    sampled.engine.score_tokens = 32  # a sequence is scored in several chunks
    scorings = [
        Scoring(rollout.tokens.ids, rollout.prompt_length, temperature=ROLLOUT["temperature"])
        for rollout in sampled.rollouts
    ]
    score_all(sampled.engine, sampled.weights, scorings)
    for rollout, scoring in zip(sampled.rollouts, scorings, strict=True):
        logps = rollout.tokens.logps[rollout.prompt_length :]
        np.testing.assert_array_equal(scoring.scores.logps, logps.astype(np.float32))


# Every model and every mesh, also those of the next test, but not each with each.
@pytest.mark.parametrize(
    "model",
    [MODEL, GEMMA, MOE, exact_hybrid(HYBRID)],
    ids=["dense", "windows", "experts", "hybrid"],
)
@pytest.mark.parametrize("sizes", [(8, 1, 1), (4, 1, 2)], ids=["data 8", "data 4, tensor 2"])
def test_devices_change_no_bit(sizes: tuple[int, int, int], model: qwen.QwenConfig) -> None:
    assert_exact(Sampled(settings(train={"microbatch_tokens": 2048}), sizes, model))


@pytest.mark.parametrize(
    "model",
    [MODEL, GEMMA, MOE, exact_hybrid(HYBRID)],
    ids=["dense", "windows", "experts", "hybrid"],
)
def test_two_devices_round_alike(model: qwen.QwenConfig) -> None:
    """XLA left out roundings to bfloat16 in programs that sent the numbers to other devices."""
    changed = settings("bfloat16", train={"microbatch_tokens": 2048})
    assert_exact(Sampled(changed, (4, 1, 2), model))


@pytest.mark.parametrize("model", [MODEL, GEMMA, MOE], ids=["dense", "windows", "experts"])
def test_an_adapter_is_exact(model: qwen.QwenConfig) -> None:
    changes = {"adapter": AdapterConfig(rank=4)}
    assert_exact(Sampled(settings("bfloat16", model=changes), model=model))


@pytest.mark.parametrize("model", [MODEL, GEMMA], ids=["dense", "windows"])
def test_turns_that_go_on_after_a_reply_are_exact(model: qwen.QwenConfig) -> None:
    def reply_once(scheduler: Scheduler) -> Callable[[bool], list[Reply]]:
        def poll(wait: bool) -> list[Reply]:
            waiting = list(scheduler.waiting.values())
            return [(item, [7, 8, 9] if len(item.turns) == 1 else None) for item in waiting]

        return poll

    rollout = {"max_turns": 2, "max_new_tokens": 20, "max_reply_tokens": 8}
    sampled = Sampled(settings(rollout=rollout), model=model, poll_replies=reply_once)
    assert all(len(item.turns) == 2 for item in sampled.rollouts)
    assert_exact(sampled)


def with_small_blocks(programs: ProgramSettings) -> ProgramSettings:
    """Breaks the rule of attention: the sampler reads keys in other blocks than the trainer."""
    paged = partial(exact.paged, key_block=16)
    backend = Backend(exact.packed, paged, exact.pool_rows, write)
    return replace(programs, attention=backend)


@pytest.mark.parametrize("broken", [with_small_blocks])
def test_a_broken_rule_in_the_sampler_fails_by_name(
    broken: Callable[[ProgramSettings], ProgramSettings],
) -> None:
    sampled = Sampled(settings(), change_programs=broken)
    with pytest.raises(
        InexactError,
        match=r"step 1, sequence \d+ \(sample \d of problem p\d\), token \d+: the sampler's "
        r"log-probability is -[\d.]+, the trainer's -[\d.]+; \d+ of \d+ differ",
    ):
        sampled.update()


# -- the forward pass ------------------------------------------------------------------------------


def test_tokens_beside_a_row_and_a_gradient_change_no_bit_of_its_logits() -> None:
    model = replace(QWEN3, num_hidden_layers=1)
    params = random_params(model)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (3, 40))

    def logits(params: qwen.Params, tokens: jax.Array) -> jax.Array:
        layout = RowLayout(0, 1, tokens.shape[1])
        segments = jnp.ones(tokens.shape, jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, carry: object
        ) -> tuple[jax.Array, object]:
            return exact.packed(q, k, v, segments, layout), carry

        hidden, _ = qwen.forward(
            model, params, tokens, positions, attend, dtype=jnp.float32, arithmetic=EXACT
        )
        return qwen.head(model, params, hidden, jnp.float32, arithmetic=EXACT)

    def loss(params: qwen.Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        of_tokens = logits(params, tokens)
        return jnp.sin(of_tokens).sum(), of_tokens

    alone = jax.jit(logits)(params, tokens[:1])
    (_, together), _ = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, tokens)

    np.testing.assert_array_equal(alone, together[:1])


def in_bfloat16(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return x.update(dtype=jnp.bfloat16)


def test_every_product_for_a_tpu_has_the_preset_whose_rows_do_not_depend_on_their_number() -> None:
    """The forward pass is lowered for a TPU; nothing is compiled."""
    model = replace(QWEN3, num_hidden_layers=1)
    layout = RowLayout(0, 1, 8)
    arithmetic = exact_with(precision=TPU_PRODUCTS)
    params = jax.tree.map(in_bfloat16, qwen.abstract(model))

    def logits(params: qwen.Params, tokens: jax.Array) -> jax.Array:
        segments = jnp.ones(tokens.shape, jnp.int32)

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, carry: object
        ) -> tuple[jax.Array, object]:
            return exact.packed(q, k, v, segments, layout), carry

        hidden, _ = qwen.forward(
            model, params, tokens, segments, attend, dtype=jnp.bfloat16, arithmetic=arithmetic
        )
        return qwen.head(model, params, hidden, jnp.bfloat16, arithmetic=arithmetic)

    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    text = jax.jit(logits).trace(params, tokens).lower(lowering_platforms=("tpu",)).as_text()

    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    # q, k, v, o, three of the MLP, two of attention, and the head.
    assert len(products) == 10
    assert all("lhs_precision_type = bf16" in line for line in products)


# -- the comparison --------------------------------------------------------------------------------


def hand_made(logps: list[float], versions: list[int]) -> Rollout:
    """Returns a rollout: a prompt of two tokens, then tokens of these versions, -1 for a reply."""
    all_versions = np.array([-1, -1, *versions], np.int32)
    return Rollout(
        problem=Problem("p", "countdown", "", None),
        sample_index=3,
        tokens=Tokens(
            np.arange(len(all_versions)),
            sampled=all_versions >= 0,
            logps=[0, 0, *logps],
            versions=all_versions,
        ),
        turns=(Turn(2, len(all_versions), "", "stop"),),
    )


def compare(rollout: Rollout, trained: list[float], step: int) -> int:
    """Compares one packed rollout with the trainer's log-probs of its tokens after the prompt."""
    sequence = TrainingSequence(rollout.tokens, 2, np.ones(len(rollout.tokens)))
    packed = pack([[sequence]], [RowLayout(4, 1, 8)], [1], [1])
    rows = packed[0].to_rows([np.array([0, 0, *trained], np.float32)])
    return check_exact(packed, [rows], [0], [rollout], step)


def test_one_bit_is_a_difference() -> None:
    near = float(np.nextafter(np.float32(-0.5), np.float32(0)))
    rollout = hand_made([-0.25, -0.5, -1.0], [4, 4, 4])
    assert compare(rollout, [-0.25, -0.5, -1.0], step=5) == 3
    with pytest.raises(InexactError, match=r"step 5, sequence 0 \(sample 3 .*token 3: .*1 of 3"):
        compare(rollout, [-0.25, near, -1.0], step=5)


def test_tokens_of_older_policies_and_of_replies_are_not_compared() -> None:
    rollout = hand_made([-0.25, 0.0, -1.0], [3, -1, 4])
    assert compare(rollout, [-9.0, -9.0, -1.0], step=5) == 1


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((1, 2, 1), "mesh.fsdp=2: with model.exact every device has whole weights"),
        ((1, 1, 4), "mesh.tensor=4: the order of a sum over more than two devices"),
    ],
)
def test_meshes_whose_sums_have_no_order_are_refused(
    sizes: tuple[int, int, int], message: str
) -> None:
    mesh = train_mesh(*sizes, jax.devices()[: int(np.prod(sizes))])
    with pytest.raises(UserError, match=message):
        make_trainer(settings(), MODEL, None, mesh)


def test_delta_nets_are_refused_where_the_compiler_rounds_them_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exactness, "NO_EXACT_DELTA_NETS", (0, 1))
    mesh = train_mesh(*ONE_DEVICE, jax.devices()[:1])
    with pytest.raises(
        UserError, match="gated delta nets are not exact with JAX .*constraints.txt"
    ):
        make_trainer(settings(), HYBRID, None, mesh)


def test_a_family_whose_layers_are_not_exact_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "other", replace(FAMILIES["qwen2"], is_exact=False))
    mesh = train_mesh(*ONE_DEVICE, jax.devices()[:1])
    with pytest.raises(UserError, match="model_type=other: the layers of this family are not"):
        make_trainer(settings(), replace(MODEL, model_type="other"), None, mesh)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "model",
    [MODEL, QWEN3, GEMMA, GEMMA2, MOE, exact_hybrid(HYBRID), exact_hybrid(HYBRID_MOE)],
    ids=["qwen2", "qwen3", "gemma3", "gemma2", "experts", "hybrid", "hybrid with experts"],
)
def test_no_bit_differs_with_drafts(model: qwen.QwenConfig, dtype: str) -> None:
    """Tokens and log-probabilities are those of decoding one token after the other."""
    plain = sampled_plainly(model, dtype)
    # The group's other responses and the short vocabulary give drafts, some of which are accepted.
    draft = Group(tokens=3, match=1, reach=256, cost=1.0)
    drafted = Sampled(settings(dtype, rollout={"draft": draft}), model=model)

    assert drafted.scheduler.counters.accepted_tokens > 0
    for got, want in zip(drafted.rollouts, plain.rollouts, strict=True):
        np.testing.assert_array_equal(got.tokens.ids, want.tokens.ids)
        np.testing.assert_array_equal(got.tokens.logps, want.tokens.logps)
    assert_exact(drafted)
