"""Advantages, weights, surrogate and KL against loops in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slow
from hypothesis import given, settings
from hypothesis import strategies as st

from jzero import algorithms
from jzero.algorithms import ADVANTAGES, PRESETS, WEIGHTS, Algorithm
from jzero.batch import pack
from jzero.train import items
from jzero.types import Layout


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("scale", [1.0, 1e-6])  # where std_eps matters, too
def test_advantages(name, scale):
    rng = np.random.default_rng(0)
    scores = (scale * rng.choice([0.0, 0.1, 1.0, -0.5], (50, 8))).astype(np.float32)
    scores[3], scores[4], scores[5] = 0.1, 1 / 3, 0.0
    got = ADVANTAGES[name].compute(scores, Algorithm())
    want = [slow.advantages(row.tolist(), name, 1e-6) for row in scores]
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7 * scale)
    assert not got[3:6].any()


@pytest.mark.parametrize("name", ADVANTAGES)
@given(st.integers(2, 64), st.floats(-100, 100, width=32))
@settings(deadline=None)
def test_a_uniform_group_has_no_advantage(name, group, score):
    scores = np.full((2, group), score, np.float32)
    scores[1, 0] += 1
    got = ADVANTAGES[name].compute(scores, Algorithm())
    assert not got[0].any() and got[1, 0] > 0


def test_group_mean_std_is_invariant_to_scale_and_shift_and_sums_to_zero():
    scores = np.random.default_rng(1).normal(size=(5, 6)).astype(np.float32)
    compute = lambda x: ADVANTAGES["group_mean_std"].compute(x, Algorithm(std_eps=0))
    np.testing.assert_allclose(compute(scores), compute(4 * scores + 2), atol=2e-6)
    np.testing.assert_allclose(compute(scores).sum(1), 0, atol=2e-6)
    np.testing.assert_allclose((compute(scores) ** 2).sum(1), 5, rtol=1e-5)  # Bessel: G - 1


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights(name):
    rollouts = slow.random_rollouts(0, 4, 4)
    algorithm = Algorithm(weight=name)
    counts = np.array([r.sampled.sum() for r in rollouts], np.float64)
    got = WEIGHTS[name](counts, 12)
    want = slow.token_weights(rollouts, algorithm, 12)
    np.testing.assert_allclose(got, [max(tokens) for tokens in want], rtol=1e-12)


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_masked_rollouts_are_finite(name):
    for counts in ([0, 3, 0, 5], [0, 0]):
        weights = WEIGHTS[name](np.array(counts, np.float64), 8)
        assert np.isfinite(weights).all() and (weights > 0).all()


GRID = [
    (logp, old, ref, advantage)
    for logp in (-3.0, -0.01)
    for old in (-4.5, -3.15, -3.0, -2.85, -0.3, -0.01)
    for ref in (-5.0, -3.0, -0.5)
    for advantage in (-1.5, 0.0, 0.7)
]


@pytest.mark.parametrize("algorithm", [Algorithm(), Algorithm(clip_low=0.1, clip_high=0.3), Algorithm(kl_coef=0.05)])
def test_loss_terms_and_their_gradient(algorithm):
    logps, old, ref, advantages = (jnp.array(column, jnp.float32) for column in zip(*GRID, strict=True))
    loss = lambda x: algorithms.loss_terms(x, old, ref, advantages, algorithm)
    (terms, stats), gradient = loss(logps), jax.grad(lambda x: loss(x)[0].sum())(logps)
    want = np.array([slow.token_loss(*point, algorithm) for point in GRID])
    np.testing.assert_allclose(terms, want[:, 0], rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(gradient, want[:, 1], rtol=2e-6, atol=1e-6)
    cut = replace(algorithm, kl_coef=0.0)
    dead = [advantage != 0 and slow.token_loss(*rest, advantage, cut)[1] == 0 for *rest, advantage in GRID]
    assert stats["clip_fraction"].tolist() == dead and any(dead)
    assert ("kl" in stats) == bool(algorithm.kl_coef)


def test_k3_stays_finite():
    logps = jnp.array([0.0, -1000.0, 0.0])
    value, gradient = jax.value_and_grad(lambda x: algorithms.k3(x, jnp.array([-1000.0, 0.0, -0.0])).sum())(logps)
    assert np.isfinite(value) and np.isfinite(gradient).all() and gradient[2] == 0


def test_on_policy_ratio_is_one_and_its_gradient_is_the_policy_gradient():
    logps, advantages = jnp.array([-3.0, -1e-7, -80.0]), jnp.array([0.3, -2.0, 1.0])

    def loss(x):
        terms, stats = algorithms.loss_terms(x, jax.lax.stop_gradient(x), x * 0, advantages, Algorithm())
        return terms.sum(), (terms, stats)

    gradient, (terms, stats) = jax.grad(loss, has_aux=True)(logps)
    assert (gradient == -advantages).all() and (terms == -advantages).all()
    assert not stats["clip_fraction"].any()


CHANGES = {
    "as it is": {},
    "kl": {"kl_coef": 0.1},
    "asymmetric": {"clip_high": 0.28},
    "masked": {"truncated": "mask"},
    "truncated score 0": {"truncated": "zero"},
    "token mean": {"weight": "token_mean"},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_over_packed_batches(preset, change):
    """The loss and its gradient by every token's log-prob, through packing and back, against one loop over rollouts."""
    algorithm = PRESETS[preset](**CHANGES[change])
    group = 4
    config = slow.settings(rollout={"group": group})
    config.algorithm = algorithm
    for seed in range(3):
        rollouts = slow.random_rollouts(seed, 4, group)
        rng = np.random.default_rng(seed)
        old, ref, now = ([r.logps + rng.normal(0, 0.2, len(r.logps)) for r in rollouts] for _ in range(3))
        want, slopes = slow.policy_loss(rollouts, now, old, ref, algorithm, group, config.rollout.max_new)

        groups = [rollouts[i : i + group] for i in range(0, len(rollouts), group)]
        zero = algorithm.truncated == "zero"
        scores = [[0.0 if zero and r.finish == "length" else r.grade.score for r in rollouts] for rollouts in groups]
        advantages = ADVANTAGES[algorithm.advantage].compute(np.array(scores, np.float32), algorithm)
        [packed] = pack(items(groups, advantages, config), [Layout(6, 2, 24)], [3], [1])
        fields = {"now": now, "old": old, "ref": ref}
        placed = {name: np.zeros(packed.batch.tokens.shape, np.float32) for name in fields}
        cells = {name: x.reshape(-1, x.shape[-1]) for name, x in placed.items()}
        for index, row, column, inputs in packed.where:
            for name, values in fields.items():
                cells[name][row, column : column + inputs] = values[index][-inputs:]

        def loss(x, batch=packed.batch, placed=placed):
            terms, _ = algorithms.loss_terms(x, placed["old"], placed["ref"], batch.advantages, algorithm)
            return jnp.where(batch.weights > 0, batch.weights * terms, 0).sum()

        got, gradient = jax.value_and_grad(loss)(jnp.asarray(placed["now"]))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        gradient = np.array(gradient).reshape(-1, gradient.shape[-1])
        for index, row, column, inputs in packed.where:
            np.testing.assert_allclose(
                gradient[row, column : column + inputs], slopes[index][-inputs:], rtol=1e-4, atol=1e-8
            )
            gradient[row, column : column + inputs] = 0
        assert not gradient.any()  # padding and prefixes
        moved = any(slopes[i].any() for i in range(group))  # the uniform group
        assert change == "truncated score 0" or moved == (change == "kl")
        masked = [i for i, r in enumerate(rollouts) if r.finish == "length"]
        assert algorithm.truncated != "mask" or not any(slopes[i].any() for i in masked)


def test_presets_are_what_they_are_named_after():
    grpo, dr_grpo = PRESETS["grpo"](), PRESETS["dr_grpo"]()
    assert (grpo.advantage, grpo.weight, grpo.clip_low, grpo.clip_high) == ("group_mean_std", "sequence_mean", 0.2, 0.2)
    assert (dr_grpo.advantage, dr_grpo.weight, dr_grpo.kl_coef) == ("group_mean", "constant", 0.0)
    assert PRESETS["grpo"](clip_high=0.28).clip_high == 0.28
