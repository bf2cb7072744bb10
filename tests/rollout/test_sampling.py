"""Sampling against NumPy's sorts and sums."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jzero.config import RolloutConfig as Settings
from jzero.rollout import sampling

V = 300  # the third block of 128 is mostly padding


class Filter(NamedTuple):
    """Of config.Rollout, what restricts; hashable."""

    top_k: int = Settings.top_k
    top_p: float = Settings.top_p
    min_p: float = Settings.min_p


ALL = Filter()
uniforms = jax.jit(sampling.uniforms, static_argnums=3)
restrict = jax.jit(sampling.restrict, static_argnums=1)


@functools.partial(jax.jit, static_argnums=(3, 4))
def sample(logits, u, temperature, filter=ALL, width=0):
    """Of logits that are there, in parts of `width`."""
    size, width = logits.shape[1], width or logits.shape[1]
    parts = [slice(at, min(at + width, size)) for at in range(0, size, width)]
    return sampling.sample(lambda x, part: x[:, part], parts, logits, u, temperature, filter)


def random_logits(rows: int, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal((rows, V))).astype(np.float32)


def softmax(logits) -> np.ndarray:
    exp = np.exp(logits - logits.max(-1, keepdims=True), dtype=np.float64)
    return exp / exp.sum(-1, keepdims=True)


def draw(
    logits, temperature: float, filter: Filter = ALL, count: int = 20_000, width: int = V
) -> np.ndarray:
    """`count` tokens of one distribution, each under a request of its own."""
    u = uniforms(jax.random.key(1), jnp.arange(count), jnp.full(count, 5), -(-V // width))
    rows = jnp.broadcast_to(jnp.asarray(logits), (count, V))
    return np.asarray(sample(rows, u, jnp.full(count, temperature), filter, width)[0])


@pytest.mark.parametrize("width", [V, 128, 90])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tokens_follow_the_softmax(temperature, width):
    logits = random_logits(1)[0]
    counts = np.bincount(draw(logits, temperature, width=width), minlength=V)
    want = softmax(logits / temperature) * counts.sum()
    rare = want < 5  # one cell, as chi-square needs
    fold = lambda x: np.append(x[~rare], x[rare].sum())
    assert counts.size == V and stats.chisquare(fold(counts), fold(want)).pvalue > 0.01


def test_logps_are_at_the_sampling_temperature_over_the_full_vocabulary():
    logits = random_logits(64)
    temperature = np.where(np.arange(64) % 2, 0.7, 0.0).astype(np.float32)
    for filter, width in (
        (ALL, V),
        (ALL, 70),
        (ALL, 256),
        (Filter(top_k=5, top_p=0.9, min_p=0.1), V),
    ):
        u = uniforms(jax.random.key(0), jnp.arange(64), jnp.arange(64), -(-V // width))
        tokens, logps = sample(logits, u, temperature, filter, width)
        want = np.log(softmax(logits / np.where(temperature == 0, 1, temperature)[:, None]))
        np.testing.assert_allclose(logps, want[np.arange(64), tokens], atol=1e-5)
        assert (
            np.asarray(tokens)[::2] == logits[::2].argmax(-1)
        ).all()  # greedy at 0, whatever the noise


@pytest.mark.parametrize("width", [V, 100])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_low_temperature_and_extreme_logits_stay_finite(scale, width):
    logits = random_logits(16, scale=scale)
    tokens, logps = sample(
        logits, jnp.full((16, -(-V // width)), 0.999), jnp.full(16, 1e-4), ALL, width
    )
    assert np.isfinite(logps).all() and (np.asarray(logps) <= 0).all()
    if scale >= 1:
        assert (np.asarray(tokens) == logits.argmax(-1)).all()


def naive_top_k(probs, k):
    return probs >= np.sort(probs)[-k] if k else np.ones(V, bool)


def naive_top_p(probs, p):
    """The shortest run of the sorted tokens that holds p of the mass: at least one."""
    order = np.argsort(-probs, kind="stable")
    before = np.cumsum(probs[order]) - probs[order]
    kept = np.zeros(V, bool)
    kept[order[before < p * probs.sum()]] = True
    return kept


def naive_mask(probs, filter: Filter):
    """top-k, then top-p of what is left, then min-p against the largest."""
    kept = naive_top_k(probs, filter.top_k)
    if filter.top_p < 1:
        kept &= naive_top_p(np.where(kept, probs, 0), filter.top_p)
    return kept & (probs >= filter.min_p * probs.max())


FILTERS = [
    ALL,
    Filter(top_k=1),
    Filter(top_k=7),
    Filter(top_k=V + 1),
    Filter(top_p=0.9),
    Filter(top_p=0.5),
    Filter(top_p=1e-6),
    Filter(min_p=0.05),
    Filter(min_p=1.0),
    Filter(top_k=20, top_p=0.8, min_p=0.02),
]


@pytest.mark.parametrize("filter", FILTERS, ids=str)
def test_restrict_equals_sorting(filter):
    logits = np.concatenate(
        [random_logits(40, seed=s, scale=scale) for s, scale in enumerate((0.1, 1.0, 4.0))]
    )
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    got = np.asarray(restrict(probs, filter))
    want = np.stack(
        [naive_mask(row.astype(np.float64), filter if filter.top_k <= V else ALL) for row in probs]
    )
    np.testing.assert_array_equal(got, np.where(want, probs, 0))


def test_filtered_tokens_stay_inside_the_mask_and_keep_their_proportions():
    logits, filter = random_logits(1)[0], Filter(top_k=20, top_p=0.8)
    counts = np.bincount(draw(logits, 1.0, filter), minlength=V)
    probs = softmax(logits)
    kept = naive_mask(probs, filter)
    assert counts[~kept].sum() == 0 and kept.sum() > 3
    assert (
        stats.chisquare(counts[kept], (probs[kept] / probs[kept].sum()) * counts.sum()).pvalue
        > 0.01
    )


@pytest.mark.parametrize("width", [1, 5, 128, 129, V])
def test_a_token_without_mass_is_never_drawn(width):
    rng = np.random.default_rng(width)
    probs = np.where(rng.random((400, width)) < 0.9, 0, rng.random((400, width))).astype(np.float32)
    probs[np.arange(400), rng.integers(0, width, 400)] = 1.0
    probs[0] = 0
    probs[0, -1] = 1e-30
    logits = np.log(probs, where=probs > 0, out=np.full_like(probs, -np.inf))
    for u in (0.0, 0.5, 1 - 2**-24):
        tokens = np.asarray(sample(logits, jnp.full((400, 1), u), np.ones(400, np.float32))[0])
        assert (probs[np.arange(400), tokens] > 0).all()
        if u == 0.0:
            assert (tokens == (probs > 0).argmax(-1)).all()


def test_a_token_is_the_inverse_of_the_cumulative_distribution():
    logits = random_logits(200)
    probs = np.exp(logits).astype(np.float64)
    u = np.random.default_rng(3).random(200, np.float32)
    tokens = np.asarray(sample(logits, u[:, None], np.ones(200, np.float32))[0])
    upto = np.cumsum(probs, axis=-1) / probs.sum(-1, keepdims=True)
    first = (upto > u[:, None]).argmax(-1)
    margin = np.abs(upto - u[:, None]).min(
        -1
    )  # sums in fp32 may differ where the noise falls on a token's edge
    np.testing.assert_array_equal(tokens[margin > 1e-6], first[margin > 1e-6])
    assert (margin > 1e-6).mean() > 0.98 and (np.abs(tokens - first) <= 1).all()


def test_uniforms_depend_on_seed_request_and_position_only():
    requests, positions = jnp.arange(6) // 2 + 7, jnp.arange(6) % 2 + 3
    u = np.asarray(uniforms(jax.random.key(0), requests, positions))[:, 0]
    assert ((u >= 0) & (u < 1)).all() and len(set(u.tolist())) == 6
    order = np.array([4, 2, 5, 0, 3, 1, 0, 0])
    np.testing.assert_array_equal(
        uniforms(jax.random.key(0), requests[order], positions[order])[:, 0], u[order]
    )
    assert not set(u.tolist()) & set(
        np.asarray(uniforms(jax.random.key(1), requests, positions)).ravel().tolist()
    )
    swapped = np.asarray(uniforms(jax.random.key(0), positions, requests)).ravel()
    assert not set(u.tolist()) & set(swapped.tolist())
