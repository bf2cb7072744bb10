"""Log-probs, gradients and optimizer steps against one sequence at a time, in float64."""

import re
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

import jax
import numpy as np
import optax
import pytest
import reference
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.config import OptimizerConfig
from jzero.distributed.mesh import train_mesh
from jzero.model import qwen
from jzero.training.credit import token_weights
from jzero.training.optimizer import learning_rate, optimizer
from jzero.training.packing import TrainingSequence, pack
from jzero.training.step import (
    Minibatch,
    make_minibatches,
    score_and_credit,
    update_on_rollouts,
)
from jzero.training.trainer import Trainer, make_trainer

pytestmark = pytest.mark.usefixtures("quick_compilation")

GROUP = 4
ROLLOUTS = reference.random_rollouts(0, 4, GROUP)
PARAMS = reference.random_params()
FAR = (
    2.0**40
)  # a step so long that the parameters it starts from are lost in rounding: the gradient is -step / FAR


@cache
def make(packing: str, sizes: tuple[int, int, int] = (1, 1, 1)) -> Trainer:
    """A trainer whose optimizer hands the gradient on; its programs stay compiled from test to test."""
    config = reference.settings(
        train=PACKINGS.get(packing, {"packs_per_row": 2, "microbatch_tokens": 240})
    )
    trainer = make_trainer(
        config, reference.MODEL, None, train_mesh(*sizes, jax.devices()[: np.prod(sizes)])
    )
    trainer.policy.optimizer = optax.identity()
    return trainer


def packed_of(trainer: Trainer, order=None) -> Minibatch:
    """ROLLOUTS packed, with weights and advantages; `order` permutes the groups and each of them."""
    [part] = make_minibatches(trainer, ROLLOUTS, 1)
    if order is not None:
        chosen = [p * GROUP + g for p in order for g in np.roll(range(GROUP), p)]
        weights = token_weights(ROLLOUTS, chosen, trainer.config.algorithm.weight, trainer.config)
        items = [
            TrainingSequence(
                ROLLOUTS[i].tokens, ROLLOUTS[i].prompt_length, weights[i], ROLLOUTS[i].logps
            )
            for i in chosen
        ]
        groups = [items[i : i + GROUP] for i in range(0, len(items), GROUP)]
        packed = pack(groups, trainer.layouts, trainer.rows, trainer.microbatches)
        part = Minibatch(chosen, packed, *trainer.policy.put(packed))
    score_and_credit(
        trainer, trainer.policy.abstract_state(), [part], ROLLOUTS
    )  # on policy it needs no parameters
    return part


def gradient_of(trainer: Trainer, order=None, change=lambda batches: batches):
    """(gradient, stats) of one update, through the state it leaves."""
    part, policy = packed_of(trainer, order), trainer.policy
    state = policy.start(reference.placed(policy, PARAMS))
    state, stats = policy.update(state, change(part.batches), part.counts, trainer.layouts, FAR)
    return jax.tree.map(lambda x: -np.asarray(x) / FAR, state.params), jax.device_get(stats)


def scores_of(trainer: Trainer) -> tuple[Minibatch, list[jax.Array], list[np.ndarray]]:
    """A part, its scores at PARAMS, and those as one array a rollout, over its tokens."""
    part, policy = packed_of(trainer), trainer.policy
    values = policy.score(
        reference.placed(policy, PARAMS), part.batches, part.counts, trainer.layouts
    )
    out = [np.zeros(len(r.tokens), np.float32) for r in ROLLOUTS]
    for p, x in zip(part.packed, values, strict=True):
        p.from_rows(np.asarray(x), out)
    return part, values, out


ON_POLICY: dict = {}


def slow_step(config):
    """Loss and gradient of one on-policy optimizer step on ROLLOUTS at PARAMS; the same for every packing and mesh."""
    if not ON_POLICY:
        now, _ = reference.naive(PARAMS, ROLLOUTS, config.rollout.temperature)
        loss, slopes = reference.policy_loss(
            ROLLOUTS, now, now, now, config.algorithm, GROUP, config.rollout.max_new_tokens
        )
        ON_POLICY["step"] = (
            loss,
            reference.naive_gradient(PARAMS, ROLLOUTS, slopes, config.rollout.temperature),
        )
    return ON_POLICY["step"]


PACKINGS = {
    "own slot": {"packs_per_row": 1, "microbatch_tokens": 512},
    "eight slots, two buckets, small microbatches": {
        "packs_per_row": 8,
        "microbatch_tokens": 102,
        "pack_buckets": 2,
    },
    "plain, small microbatches": {"packs_per_row": 0, "microbatch_tokens": 36},
}


@pytest.mark.parametrize("packing", PACKINGS)
def test_gradient_does_not_depend_on_packing(packing):
    trainer = make(packing)
    loss, want = slow_step(trainer.config)
    for order in (None, [2, 0, 3, 1]):
        gradient, stats = gradient_of(trainer, order)
        assert reference.difference(gradient, want) < 1e-6
        np.testing.assert_allclose(stats["loss"], loss, atol=1e-7)
    packed = packed_of(trainer).packed
    assert "small" not in packing or packed[0].num_microbatches > 2
    assert all(p.num_microbatches for p in packed)


def assert_scores(got: list[np.ndarray]) -> None:
    logps, _ = reference.naive(PARAMS, ROLLOUTS, reference.settings().rollout.temperature)
    for mine, theirs, rollout in zip(got, logps, ROLLOUTS, strict=True):
        np.testing.assert_allclose(
            mine[rollout.prompt_length :], theirs[rollout.prompt_length :], atol=1e-5, rtol=0
        )


def test_score_is_the_log_prob_of_each_sequence_alone():
    assert_scores(scores_of(make("eight slots, two buckets, small microbatches"))[2])


MESHES = [(8, 1, 1), (2, 2, 2), (1, 8, 1)]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_gradient_and_score_do_not_depend_on_the_mesh(sizes):
    trainer = make("two slots", sizes)
    gradient, stats = gradient_of(trainer)
    loss, want = slow_step(trainer.config)
    assert reference.difference(gradient, want) < 1e-6
    np.testing.assert_allclose(stats["loss"], loss, atol=1e-7)
    if sizes == (1, 8, 1):
        return  # the scores of the others are enough
    part, values, scores = scores_of(trainer)
    assert_scores(scores)
    part.set_rows("old_logps", values)
    policy = trainer.policy
    policy.score(reference.placed(policy, PARAMS), part.batches, part.counts, trainer.layouts)
    assert policy.score_program._cache_size() == 1  # whatever else the batches hold


@pytest.mark.parametrize("tied", [True, False])
def test_head_split_by_vocabulary_is_the_same_head(tied):
    """61 words cannot be split; 64 can. In chunks."""
    model = replace(reference.MODEL, vocab_size=64, tie_word_embeddings=tied)
    params = reference.random_params(model)
    config = reference.settings(
        train={"packs_per_row": 2, "microbatch_tokens": 240}, model={"logit_chunk": 16}
    )

    def gradient(*sizes):
        trainer = make_trainer(
            config, model, None, train_mesh(*sizes, jax.devices()[: np.prod(sizes)])
        )
        trainer.policy.optimizer = optax.identity()
        part, policy = packed_of(trainer), trainer.policy
        state = policy.start(reference.placed(policy, params))
        state, _ = policy.update(state, part.batches, part.counts, trainer.layouts, FAR)
        return jax.tree.map(lambda x: -np.asarray(x) / FAR, state.params)

    assert reference.difference(gradient(2, 2, 2), gradient(1, 1, 1)) < 1e-6


def test_fsdp_gathers_weights_and_does_not_sum_activations():
    """Inside the layers; left to itself XLA does the opposite."""
    trainer = make("two slots", (1, 8, 1))
    policy, part = trainer.policy, packed_of(trainer)
    numbers = [
        jax.device_put(x, NamedSharding(policy.mesh, P())) for x in (np.float32(0), np.bool_(True))
    ]
    state = policy.start(reference.placed(policy, PARAMS))
    arguments = state, part.batches, part.counts, *numbers, tuple(trainer.layouts)
    text = policy.update_program.lower(*arguments).compile().as_text()
    tokens = part.packed[0].batch.tokens[0].size
    assert len(re.findall(r" all-gather\(", text)) >= 7  # q k v o gate up down
    assert not re.findall(rf"f32\[{tokens},\d+\]\S* all-reduce\(", text)


# Programs of "own slot" again: nothing below compiles until the last tests.


def test_the_first_optimizer_step_is_on_policy_whatever_the_old_log_probs():
    """And its ratio is exactly 1. A later one's is not."""
    trainer = make("own slot")
    gradient, stats = gradient_of(trainer)
    wild = lambda batches: tuple(
        replace(b, old_logps=b.sampler_logps + 3.0, ref_logps=b.weights) for b in batches
    )
    again, wild_stats = gradient_of(trainer, change=wild)
    assert jax.tree.all(jax.tree.map(np.array_equal, gradient, again))
    for name in ("clip_fraction", "ratio_shift"):
        assert stats[name] == 0 == wild_stats[name]
    part, policy = packed_of(trainer), trainer.policy
    state = policy.start(reference.placed(policy, PARAMS))
    _, late = policy.update(
        state, wild(part.batches), part.counts, trainer.layouts, 0.0, fresh=False
    )
    assert late["clip_fraction"] > 0 and late["ratio_shift"] > 0.5


def test_what_is_not_trained_has_no_influence():
    """Of tokens that the policy did not sample, and of padding: bit for bit."""
    trainer = make("own slot")

    def change(batches):
        rng = np.random.default_rng(0)

        def one(b):
            trained, padding = np.asarray(b.weights) > 0, np.asarray(b.segments) == 0
            noise = rng.normal(0, 100, trained.shape).astype(np.float32)
            other = rng.integers(0, reference.VOCAB, trained.shape).astype(np.int32)
            values = {
                name: np.where(trained, getattr(b, name), noise)
                for name in ("advantages", "sampler_logps")
            }
            values |= {
                "targets": np.where(trained, b.targets, other),
                "tokens": np.where(padding, other, b.tokens),
            }
            return replace(
                b, **{name: jax.device_put(x, b.tokens.sharding) for name, x in values.items()}
            )

        return tuple(map(one, batches))

    (gradient, stats), (again, changed) = gradient_of(trainer), gradient_of(trainer, change=change)
    assert jax.tree.all(jax.tree.map(np.array_equal, gradient, again))
    assert jax.tree.map(float, stats) == jax.tree.map(float, changed)


def test_stats_are_sums_over_trained_tokens():
    trainer = make("own slot")
    _, stats = gradient_of(trainer)
    logps, entropy = reference.naive(PARAMS, ROLLOUTS, trainer.config.rollout.temperature)
    sums = lambda values: sum(x[r.sampled].sum() for x, r in zip(values, ROLLOUTS, strict=True))
    assert stats["tokens"] == sum(r.sampled.sum() for r in ROLLOUTS)
    np.testing.assert_allclose(stats["entropy"], sums(entropy), rtol=1e-5)
    np.testing.assert_allclose(stats["nll"], -sums(logps), rtol=1e-5)
    gaps = [np.abs(x - r.logps) for x, r in zip(logps, ROLLOUTS, strict=True)]
    np.testing.assert_allclose(stats["mismatch"], sums(gaps), rtol=1e-5)
    _, gradient = slow_step(trainer.config)
    norm = np.sqrt(sum((x**2).sum() for x in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(stats["grad_norm"], norm, rtol=1e-6)


def test_state_is_donated_and_keeps_its_place():
    trainer = make("own slot")
    policy, part = trainer.policy, packed_of(trainer)
    state = policy.start(reference.placed(policy, PARAMS))
    new, _ = policy.update(state, part.batches, part.counts, trainer.layouts, 1e-3)
    assert all(x.is_deleted() for x in jax.tree.leaves((state.params, state.opt_state, state.step)))
    assert int(new.step) == 1
    jax.tree.map(
        lambda x, s: x.sharding == s or pytest.fail(f"{x.sharding}"), new, policy.state_shardings
    )


# -- several optimizer steps a step ----------------------------------------------------------------------------------


def test_minibatches_and_epochs_with_a_reference_policy():
    """`update_on_rollouts` against a slow loop: old log-probs once, at the start; then clipped steps of AdamW."""
    config = reference.settings(
        train={
            "minibatches": 2,
            "epochs": 2,
            "packs_per_row": 1,
            "microbatch_tokens": 512,
            "seed": 7,
        },
        algorithm={"kl_coef": 0.1, "clip_high": 0.25, "weight": "token_mean"},
        optimizer={
            "lr": 0.05,
            "clip_norm": 0.3,
            "weight_decay": 0.1,
            "eps": 1e-3,
            "warmup_steps": 10,
        },
    )
    trainer = make_trainer(config, reference.MODEL, None, train_mesh(1, 1, 1, jax.devices()[:1]))
    policy = trainer.policy
    other = jax.tree.map(
        lambda x: x + 0.01 * np.sin(np.arange(x.size)).reshape(x.shape).astype(np.float32), PARAMS
    )
    reference_params = reference.placed(policy, other)
    start = policy.start(reference.placed(policy, PARAMS))
    result = update_on_rollouts(trainer, start, ROLLOUTS, 1, reference_params)
    state, values, scored = result.state, result.metrics, result.rollouts

    groups = [
        [r.grade.score for r in ROLLOUTS[i : i + GROUP]] for i in range(0, len(ROLLOUTS), GROUP)
    ]
    advantages = [
        (score - np.mean(group)) / (np.std(group, ddof=1) + 1e-6)
        for group in groups
        for score in group
    ]
    np.testing.assert_allclose([r.advantage for r in scored], advantages, atol=1e-6)
    naive = lambda params: reference.naive(params, ROLLOUTS, config.rollout.temperature)[0]
    halves = np.split(np.random.default_rng((7, 1)).permutation(4), 2)
    first, fixed, seen = naive(PARAMS), naive(other), []

    def gradient(params, half):
        chosen = [p * GROUP + g for p in half for g in range(GROUP)]
        of = lambda values: [values[i] for i in chosen]
        now, rest = naive(params), (config.algorithm, GROUP, config.rollout.max_new_tokens)
        loss, mine = reference.policy_loss(of(ROLLOUTS), of(now), of(first), of(fixed), *rest)
        slopes = [np.zeros(len(r.tokens)) for r in ROLLOUTS]
        for i, slope in zip(chosen, mine, strict=True):
            slopes[i] = slope
        seen.append((loss, [np.exp(now[i] - first[i])[ROLLOUTS[i].sampled] for i in chosen]))
        return reference.naive_gradient(params, ROLLOUTS, slopes, config.rollout.temperature)

    rates = [0.05 * n / 10 for n in (1, 2, 3, 4)]  # warm-up, by optimizer steps
    gradients = [partial(gradient, half=half) for half in halves * 2]
    want = reference.adamw(PARAMS, gradients, config.optimizer, rates)
    moved = jax.tree.map(lambda x, start: np.asarray(x) - start, state.params, PARAMS)
    assert reference.difference(moved, jax.tree.map(np.subtract, want, PARAMS)) < 1e-4
    np.testing.assert_allclose(
        values["optimizer/loss"], np.mean([loss for loss, _ in seen]), rtol=1e-4
    )
    assert values["optimizer/lr"] == pytest.approx(rates[-1])
    programs = [policy.update_program, policy.score_program]
    assert [program._cache_size() for program in programs] == [1, 1]  # compiled once each
    assert 0 < values["policy/clip_fraction"] < 0.5 and values["policy/kl"] > 0
    assert all(abs(x - 1).max() < 1e-5 for x in seen[0][1])  # the first minibatch is on policy


# -- the critic --------------------------------------------------------------------------------------------------------


def test_values_and_their_loss_are_those_of_each_sequence_alone():
    """Value t is of the state before token t. One optimizer step of `update_on_rollouts` against float64."""
    config = reference.settings(
        train={"packs_per_row": 2, "microbatch_tokens": 240},
        algorithm={
            "advantage": "gae",
            "weight": "token_mean",
            "lam": 0.9,
            "gamma": 0.95,
            "value_coef": 0.7,
        },
    )
    model = replace(reference.MODEL, value_head=True)
    trainer = make_trainer(config, reference.MODEL, model, train_mesh(2, 2, 2))
    trainer.policy.optimizer = trainer.critic.optimizer = optax.identity()
    config.critic.optimizer.lr, config.optimizer.lr = FAR, 0.0
    params = reference.random_params(model)
    state = trainer.policy.start(reference.placed(trainer.policy, PARAMS))
    state = replace(state, critic=trainer.critic.start(reference.placed(trainer.critic, params)))
    result = update_on_rollouts(trainer, state, ROLLOUTS, 1)
    state, values, scored = result.state, result.metrics, result.rollouts
    got = jax.tree.map(lambda x: -np.asarray(x) / FAR, state.critic.params)

    tokens, count = (
        reference.padded([r.tokens for r in ROLLOUTS]),
        sum(r.sampled.sum() for r in ROLLOUTS),
    )
    before = lambda p: (
        reference.hidden(model, p, tokens)[:, :-1] @ p["value"]
    )  # [N, T - 1], of tokens 1, 2, ...
    with jax.enable_x64(True):
        slopes, now = (
            np.zeros_like(tokens[:, 1:], np.float64),
            np.asarray(before(reference.doubles(params))),
        )
        loss, of_rollout = 0.0, np.zeros(len(ROLLOUTS))
        for i, rollout in enumerate(ROLLOUTS):
            at = np.flatnonzero(rollout.sampled) - 1
            after, advantage = 0.0, 0.0
            for k, t in reversed(list(enumerate(at))):
                reward = rollout.grade.score if k == len(at) - 1 else 0.0
                advantage = reward + 0.95 * after - now[i, t] + 0.95 * 0.9 * advantage
                of_rollout[i] += advantage / len(at)
                slopes[i, t], after = (
                    -0.7 * advantage / count,
                    now[i, t],
                )  # the target is V + A, so V - target is -A
                loss += 0.5 * advantage**2 / count
        want = jax.grad(lambda p: (before(p) * slopes).sum())(reference.doubles(params))
    assert reference.difference(got, want) < 2e-6
    np.testing.assert_allclose(values["critic/loss"], loss, rtol=1e-5)
    np.testing.assert_allclose([rollout.advantage for rollout in scored], of_rollout, atol=1e-5)


# -- the optimizer alone -----------------------------------------------------------------------------------------------


def test_learning_rate():
    rate = lambda step, steps=100, **fields: learning_rate(
        OptimizerConfig(lr=2.0, **fields), step, steps
    )
    assert [rate(s) for s in (0, 50, 99)] == [2.0] * 3
    assert [rate(s, warmup_steps=4) for s in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert [rate(s, warmup_ratio=0.04) for s in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    for schedule, middle in (("linear", 0.55), ("cosine", 0.55), ("polynomial", 0.325)):
        fields = {"schedule": schedule, "min_lr_ratio": 0.1, "warmup_steps": 10}
        rates = [rate(step, **fields) for step in range(100)]
        assert rates[10] == 2.0 and rates[55] == pytest.approx(2 * middle)
        assert all(a > b for a, b in pairwise(rates[10:]))
        assert rates[99] > 0.2 and rate(100, **fields) == pytest.approx(0.2) == rate(1000, **fields)
    assert rate(0, steps=1) == 2.0 and np.isfinite(
        rate(0, steps=0, warmup_steps=3, schedule="cosine")
    )


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_only_matrices_decay(model_type):
    model = replace(reference.MODEL, model_type=model_type, tie_word_embeddings=False)
    params = jax.tree.map(
        lambda _: np.ones((2, 2), np.float32), qwen.abstract(model)
    )  # by name, whatever the shape
    rule = optimizer(OptimizerConfig(weight_decay=0.5))
    step, _ = rule.update(jax.tree.map(np.zeros_like, params), rule.init(params), params)
    decayed = {path[-1].key for path, x in jax.tree.leaves_with_path(step) if np.any(x)}
    assert decayed == {"embed", "lm_head", "q", "k", "v", "o", "gate", "up", "down"}


def test_a_gradient_above_skip_norm_changes_nothing():
    config = reference.settings(
        train={"packs_per_row": 2, "microbatch_tokens": 240}, optimizer={"skip_norm": 1e-6}
    )
    trainer = make_trainer(config, reference.MODEL, None, train_mesh(1, 1, 1, jax.devices()[:1]))
    policy, part = trainer.policy, packed_of(trainer)
    new, stats = policy.update(
        policy.start(reference.placed(policy, PARAMS)),
        part.batches,
        part.counts,
        trainer.layouts,
        1.0,
    )
    start = policy.start(reference.placed(policy, PARAMS))
    jax.tree.map(np.testing.assert_array_equal, new, start)
    assert stats["skipped"] == 1 and stats["grad_norm"] > 1e-6


def test_no_clipping_when_off():
    params = {"q": np.ones(4, np.float32)}
    gradient = {"q": np.full(4, 1e6, np.float32)}
    for clip_norm, largest in ((0.0, 1e6), (1.0, 0.5)):
        rule = optimizer(
            OptimizerConfig(clip_norm=clip_norm, b1=0.0, eps=1e30)
        )  # eps makes Adam linear
        step, _ = rule.update(gradient, rule.init(params), params)
        np.testing.assert_allclose(np.asarray(step["q"]) * 1e30, largest, rtol=1e-5)


def test_a_first_moment_of_16_bits_is_half_as_large_and_nearly_the_same():
    whole, half = (
        optimizer(OptimizerConfig(mu_dtype=dtype, clip_norm=0)) for dtype in ("float32", "bfloat16")
    )
    states = [each.init(PARAMS) for each in (whole, half)]
    bytes_of = lambda state: sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert bytes_of(states[1]) == pytest.approx(3 / 4 * bytes_of(states[0]), rel=1e-3)
    for seed in range(3):
        gradient = reference.random_params(scale=0.1 * (seed - 0.7))
        (a, states[0]), (b, states[1]) = (
            whole.update(gradient, states[0], PARAMS),
            half.update(gradient, states[1], PARAMS),
        )
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(y, x, rtol=0.02, atol=0.02)
