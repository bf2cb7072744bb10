"""Log-probs, gradients and optimizer steps against one sequence at a time, in float64."""

import re
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

import jax
import numpy as np
import optax
import pytest
import slow
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jzero import train
from jzero.algorithms import ADVANTAGES
from jzero.batch import layouts, pack
from jzero.config import Optimizer
from jzero.model import qwen
from jzero.sharding import train_mesh
from jzero.update import Policy, learning_rate, optimizer, with_logps

GROUP = 4
ROLLOUTS = slow.random_rollouts(0, 4, GROUP)
PARAMS = slow.random_params()
FAR = 2.0**40  # a step so long that the parameters it starts from are lost in rounding: the gradient is -step / FAR


@cache
def make(packing: str, sizes: tuple[int, int, int] = (1, 1, 1)) -> Policy:
    """A policy whose optimizer hands the gradient on; its programs stay compiled from test to test."""
    config = slow.settings(train=PACKINGS.get(packing, {"row_slots": 2, "tokens": 240}))
    policy = Policy(slow.MODEL, config, train_mesh(*sizes, jax.devices()[: np.prod(sizes)]))
    policy.optimizer = optax.identity()
    return policy


def packed_of(policy, order=None):
    """Layouts and packed batches of ROLLOUTS, as a step makes them; `order` permutes the groups and each of them."""
    config = policy.settings
    scores = np.array([train.score_of(r, config.algorithm) for r in ROLLOUTS], np.float32).reshape(-1, GROUP)
    advantages = ADVANTAGES[config.algorithm.advantage].compute(scores, config.algorithm)
    groups = [ROLLOUTS[i : i + GROUP] for i in range(0, len(ROLLOUTS), GROUP)]
    items = train.items(groups, advantages, config)
    if order is not None:
        items = [[items[p][g] for g in np.roll(range(GROUP), p)] for p in order]
    rollout = config.rollout
    shapes = layouts(rollout.max_prompt, rollout.max_new, config.train.buckets, config.train.row_slots)
    rows = [train.microbatch_rows(config, policy.mesh, layout) for layout in shapes]
    return shapes, pack(items, shapes, rows, [1] * len(shapes))


def gradient_of(policy, order=None, change=lambda batches: batches):
    """(gradient, stats) of one update, through the state it leaves."""
    shapes, packed = packed_of(policy, order)
    batches, counts = policy.put(packed)
    state, stats = policy.update(policy.start(slow.placed(policy, PARAMS)), change(batches), counts, shapes, FAR)
    return jax.tree.map(lambda x: -np.asarray(x) / FAR, state.params), jax.device_get(stats)


def read_back(packed, values):
    """Packed values f32[M, B, T] of every layout -> one array a rollout, of its last inputs."""
    out = [np.zeros(0)] * len(ROLLOUTS)
    for p, x in zip(packed, values, strict=True):
        rows = np.asarray(x).reshape(-1, x.shape[-1])
        for index, row, column, inputs in p.where:
            out[index] = rows[row, column : column + inputs]
    return out


ON_POLICY: dict = {}


def slow_step(config):
    """Loss and gradient of one on-policy optimizer step on ROLLOUTS at PARAMS; the same for every packing and mesh."""
    if not ON_POLICY:
        now, _ = slow.naive(PARAMS, ROLLOUTS, config.rollout.temperature)
        loss, slopes = slow.policy_loss(ROLLOUTS, now, now, now, config.algorithm, GROUP, config.rollout.max_new)
        ON_POLICY["step"] = loss, slow.naive_gradient(PARAMS, ROLLOUTS, slopes, config.rollout.temperature)
    return ON_POLICY["step"]


PACKINGS = {
    "own slot": {"row_slots": 1, "tokens": 512},
    "eight slots, two buckets, small microbatches": {"row_slots": 8, "tokens": 102, "buckets": 2},
    "plain, small microbatches": {"row_slots": 0, "tokens": 36},
}


@pytest.mark.parametrize("packing", PACKINGS)
def test_gradient_does_not_depend_on_packing(packing):
    policy = make(packing)
    loss, want = slow_step(policy.settings)
    for order in (None, [2, 0, 3, 1]):
        gradient, stats = gradient_of(policy, order)
        assert slow.difference(gradient, want) < 1e-6
        np.testing.assert_allclose(stats["loss"], loss, atol=1e-7)
    _, packed = packed_of(policy)
    assert "small" not in packing or packed[0].count > 2
    assert all(p.count for p in packed)


def test_score_is_the_log_prob_of_each_sequence_alone():
    policy = make("eight slots, two buckets, small microbatches")
    shapes, packed = packed_of(policy)
    got = read_back(packed, policy.score(slow.placed(policy, PARAMS), *policy.put(packed), shapes))
    logps, _ = slow.naive(PARAMS, ROLLOUTS, policy.settings.rollout.temperature)
    for mine, theirs in zip(got, logps, strict=True):
        np.testing.assert_allclose(mine, theirs[-len(mine) :], atol=1e-5, rtol=0)


MESHES = [(8, 1, 1), (2, 2, 2), (1, 8, 1)]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_gradient_and_score_do_not_depend_on_the_mesh(sizes):
    policy = make("two slots", sizes)
    gradient, stats = gradient_of(policy)
    loss, want = slow_step(policy.settings)
    assert slow.difference(gradient, want) < 1e-6
    np.testing.assert_allclose(stats["loss"], loss, atol=1e-7)
    if sizes == (1, 8, 1):
        return  # the scores of the others are enough
    shapes, packed = packed_of(policy)
    params, (batches, counts) = slow.placed(policy, PARAMS), policy.put(packed)
    values = policy.score(params, batches, counts, shapes)
    logps, _ = slow.naive(PARAMS, ROLLOUTS, policy.settings.rollout.temperature)
    for mine, theirs in zip(read_back(packed, values), logps, strict=True):
        np.testing.assert_allclose(mine, theirs[-len(mine) :], atol=1e-5, rtol=0)
    policy.score(params, with_logps(batches, "old_logps", values), counts, shapes)
    assert next(iter(policy._scores.values()))._cache_size() == 1  # log-probs come back where they are wanted


def test_fsdp_gathers_weights_and_does_not_sum_activations():
    """Inside the layers; left to itself XLA does the opposite."""
    policy = make("two slots", (1, 8, 1))
    _, packed = packed_of(policy)
    [program] = policy._updates.values()
    batches, counts = policy.put(packed)
    rate = jax.device_put(np.float32(0), NamedSharding(policy.mesh, P()))
    text = program.lower(policy.start(slow.placed(policy, PARAMS)), batches, counts, rate).compile().as_text()
    tokens = packed[0].batch.tokens[0].size
    assert len(re.findall(r" all-gather\(", text)) >= 7  # q k v o gate up down
    assert not re.findall(rf"f32\[{tokens},\d+\]\S* all-reduce\(", text)


# Programs of "own slot" again: nothing below compiles until the last tests.


def test_on_policy_the_old_log_probs_do_not_matter_and_nothing_is_clipped():
    policy = make("own slot")
    gradient, stats = gradient_of(policy)
    wild = lambda batches: tuple(replace(b, old_logps=b.old_logps + 3.0, ref_logps=b.ref_logps - 1) for b in batches)
    again, wild_stats = gradient_of(policy, change=wild)
    assert jax.tree.all(jax.tree.map(np.array_equal, gradient, again))
    assert stats["clip_fraction"] == 0 == wild_stats["clip_fraction"]


def test_what_is_not_trained_has_no_influence():
    """Of tokens that the policy did not sample, and of padding: bit for bit."""
    policy = make("own slot")

    def change(batches):
        rng = np.random.default_rng(0)

        def one(b):
            trained, padding = np.asarray(b.weights) > 0, np.asarray(b.segments) == 0
            noise = rng.normal(0, 100, trained.shape).astype(np.float32)
            other = rng.integers(0, slow.VOCAB, trained.shape).astype(np.int32)
            values = {name: np.where(trained, getattr(b, name), noise) for name in ("advantages", "sampler_logps")}
            values |= {"targets": np.where(trained, b.targets, other), "tokens": np.where(padding, other, b.tokens)}
            return replace(b, **{name: jax.device_put(x, b.tokens.sharding) for name, x in values.items()})

        return tuple(map(one, batches))

    (gradient, stats), (again, changed) = gradient_of(policy), gradient_of(policy, change=change)
    assert jax.tree.all(jax.tree.map(np.array_equal, gradient, again))
    assert jax.tree.map(float, stats) == jax.tree.map(float, changed)


def test_stats_are_sums_over_trained_tokens():
    policy = make("own slot")
    _, stats = gradient_of(policy)
    logps, entropy = slow.naive(PARAMS, ROLLOUTS, policy.settings.rollout.temperature)
    sums = lambda values: sum(x[r.sampled].sum() for x, r in zip(values, ROLLOUTS, strict=True))
    assert stats["tokens"] == sum(r.sampled.sum() for r in ROLLOUTS)
    np.testing.assert_allclose(stats["entropy"], sums(entropy), rtol=1e-5)
    np.testing.assert_allclose(stats["nll"], -sums(logps), rtol=1e-5)
    gaps = [np.abs(x - r.logps) for x, r in zip(logps, ROLLOUTS, strict=True)]
    np.testing.assert_allclose(stats["mismatch"], sums(gaps), rtol=1e-5)
    _, gradient = slow_step(policy.settings)
    norm = np.sqrt(sum((x**2).sum() for x in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(stats["grad_norm"], norm, rtol=1e-6)


def test_state_is_donated_and_keeps_its_place():
    policy = make("own slot")
    shapes, packed = packed_of(policy)
    state = policy.start(slow.placed(policy, PARAMS))
    new, _ = policy.update(state, *policy.put(packed), shapes, 1e-3)
    assert all(x.is_deleted() for x in jax.tree.leaves((state.params, state.opt_state, state.step)))
    assert int(new.step) == 1
    jax.tree.map(lambda x, s: x.sharding == s or pytest.fail(f"{x.sharding}"), new, policy.state_shardings())


# -- several optimizer steps a step ----------------------------------------------------------------------------------


def test_minibatches_and_epochs_with_a_reference_policy():
    """`train.optimize` against a slow loop: old log-probs once, at the start; then clipped steps of AdamW."""
    config = slow.settings(
        train={"minibatches": 2, "epochs": 2, "row_slots": 1, "tokens": 512, "seed": 7},
        algorithm={"kl_coef": 0.1, "clip_high": 0.25, "weight": "token_mean"},
        optimizer={"lr": 0.05, "clip_norm": 0.3, "weight_decay": 0.1, "eps": 1e-3, "warmup_steps": 10},
    )
    policy = Policy(slow.MODEL, config, train_mesh(1, 1, 1, jax.devices()[:1]))
    assert not policy.on_policy
    other = jax.tree.map(lambda x: x + 0.01 * np.sin(np.arange(x.size)).reshape(x.shape).astype(np.float32), PARAMS)
    shapes, _ = packed_of(policy)
    run = train.Run(config, policy, None, None, shapes, [4], [2], None, {}, slow.placed(policy, other))
    state, values, _ = train.optimize(run, policy.start(slow.placed(policy, PARAMS)), ROLLOUTS, step=3)

    naive = lambda params: slow.naive(params, ROLLOUTS, config.rollout.temperature)[0]
    halves = np.split(np.random.default_rng((7, 3)).permutation(4), 2)
    first, fixed, seen = naive(PARAMS), naive(other), []

    def gradient(params, half):
        chosen = [p * GROUP + g for p in half for g in range(GROUP)]
        of = lambda values: [values[i] for i in chosen]
        now, rest = naive(params), (config.algorithm, GROUP, config.rollout.max_new)
        loss, mine = slow.policy_loss(of(ROLLOUTS), of(now), of(first), of(fixed), *rest)
        slopes = [np.zeros(len(r.tokens)) for r in ROLLOUTS]
        for i, slope in zip(chosen, mine, strict=True):
            slopes[i] = slope
        seen.append((loss, [np.exp(now[i] - first[i])[ROLLOUTS[i].sampled] for i in chosen]))
        return slow.naive_gradient(params, ROLLOUTS, slopes, config.rollout.temperature)

    rate = 0.05 * 3 / 10
    gradients = [partial(gradient, half=half) for half in halves * 2]
    want = slow.adamw(PARAMS, gradients, config.optimizer, [rate] * 4)
    moved = jax.tree.map(lambda x, start: np.asarray(x) - start, state.params, PARAMS)
    assert slow.difference(moved, jax.tree.map(np.subtract, want, PARAMS)) < 1e-4
    np.testing.assert_allclose(values["optimizer/loss"], np.mean([loss for loss, _ in seen]), rtol=1e-4)
    assert values["optimizer/lr"] == pytest.approx(rate)
    programs = [*policy._updates.values(), *policy._scores.values()]
    assert [program._cache_size() for program in programs] == [1, 1]  # compiled once each
    assert 0 < values["policy/clip_fraction"] < 0.5 and values["policy/kl"] > 0
    assert all(abs(x - 1).max() < 1e-5 for x in seen[0][1])  # the first minibatch is on policy


# -- the optimizer alone -----------------------------------------------------------------------------------------------


def test_learning_rate():
    rate = lambda step, steps=100, **fields: learning_rate(Optimizer(lr=2.0, **fields), step, steps)
    assert [rate(s) for s in (0, 50, 99)] == [2.0] * 3
    assert [rate(s, warmup_steps=4) for s in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    for schedule, middle in (("linear", 0.55), ("cosine", 0.55)):
        fields = {"schedule": schedule, "min_lr_ratio": 0.1, "warmup_steps": 10}
        rates = [rate(step, **fields) for step in range(100)]
        assert rates[10] == 2.0 and rates[55] == pytest.approx(2 * middle)
        assert all(a > b for a, b in pairwise(rates[10:]))
        assert rates[99] > 0.2 and rate(100, **fields) == pytest.approx(0.2) == rate(1000, **fields)
    assert rate(0, steps=1) == 2.0 and np.isfinite(rate(0, steps=0, warmup_steps=3, schedule="cosine"))


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_only_matrices_decay(model_type):
    model = replace(slow.MODEL, model_type=model_type, tie_word_embeddings=False)
    params = jax.tree.map(lambda _: np.ones((2, 2), np.float32), qwen.abstract(model))  # by name, whatever the shape
    rule = optimizer(Optimizer(weight_decay=0.5))
    step, _ = rule.update(jax.tree.map(np.zeros_like, params), rule.init(params), params)
    decayed = {path[-1].key for path, x in jax.tree.leaves_with_path(step) if np.any(x)}
    assert decayed == {"embed", "lm_head", "q", "k", "v", "o", "gate", "up", "down"}


def test_no_clipping_when_off():
    params = {"q": np.ones(4, np.float32)}
    gradient = {"q": np.full(4, 1e6, np.float32)}
    for clip_norm, largest in ((0.0, 1e6), (1.0, 0.5)):
        rule = optimizer(Optimizer(clip_norm=clip_norm, b1=0.0, eps=1e30))  # eps makes Adam linear
        step, _ = rule.update(gradient, rule.init(params), params)
        np.testing.assert_allclose(np.asarray(step["q"]) * 1e30, largest, rtol=1e-5)


def test_with_logps_sets_one_field():
    policy = make("own slot")
    _, packed = packed_of(policy)
    batches, _ = policy.put(packed)
    [changed] = with_logps(batches, "ref_logps", [batches[0].weights])
    assert changed.ref_logps is batches[0].weights and changed.old_logps is batches[0].old_logps
