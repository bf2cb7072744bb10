"""The parts that run in the jitted update, by themselves: closed forms, and far-away inputs."""

import math
from collections.abc import Callable, Iterator

import descriptions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax import lax

from jzero.algorithms import IPO, SAPO, VESPO, Algorithm, DppoKL, DppoTV
from jzero.algorithms.corrections import CORRECTIONS
from jzero.algorithms.kl import KL_ESTIMATORS, k2, k3
from jzero.algorithms.losses import policy_loss
from jzero.algorithms.ratios import RATIOS
from jzero.algorithms.surrogates import SURROGATES
from jzero.fields import part_name
from jzero.types import Batch

KLEstimator = Callable[[jax.Array, jax.Array], jax.Array]

# -- far-away inputs -------------------------------------------------------------------------------

FAR = np.array([[-1e4, -100.0, 0.0, 100.0, 1e4]], np.float32)


def sum_over_one_token(x: jax.Array) -> jax.Array:
    """Returns the sum over each sequence, where every sequence has one token."""
    return x


@pytest.mark.parametrize("name", RATIOS)
def test_far_from_the_old_policy_a_ratio_and_its_slope_are_finite(name: str) -> None:
    def sum_of_ratios(log_ratios: jax.Array) -> jax.Array:
        return RATIOS[name](log_ratios, sum_over_one_token).sum()

    value, slope = jax.value_and_grad(sum_of_ratios)(FAR)

    assert np.isfinite(value)
    assert np.isfinite(slope).all()


@pytest.mark.parametrize("part", CORRECTIONS)
def test_far_from_the_sampler_a_correction_is_finite(part: type) -> None:
    correction = CORRECTIONS[part]

    ratio = correction.ratio(jnp.asarray(FAR), sum_over_one_token)
    factor = correction.factor(ratio, 0.0, 2.0)

    assert np.isfinite(ratio).all()
    assert np.isfinite(factor).all()


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_far_from_the_reference_policy_the_kl_and_its_slope_are_finite(name: str) -> None:
    def estimate(logps: jax.Array) -> jax.Array:
        return KL_ESTIMATORS[name](logps, jnp.zeros(logps.shape))

    def sum_of_estimates(logps: jax.Array) -> jax.Array:
        return estimate(logps).sum()

    values = estimate(jnp.asarray(FAR))
    slopes = jax.grad(sum_of_estimates)(FAR)

    assert np.isfinite(values).all()
    assert np.isfinite(slopes).all()
    assert values[FAR == 0] == 0
    assert slopes[FAR == 0] == 0


# -- estimators of the KL against closed forms -----------------------------------------------------


LOGITS, REF_LOGITS = np.random.default_rng(0).normal(size=(2, 1, 50))


@pytest.fixture
def float64() -> Iterator[None]:
    """Lets a test compute in float64."""
    with jax.enable_x64(True):
        yield


def kl_divergence(logits: jax.Array) -> jax.Array:
    """Returns the KL to the reference in closed form."""
    logps = jax.nn.log_softmax(logits)
    ref_logps = jax.nn.log_softmax(REF_LOGITS)
    return (jnp.exp(logps) * (logps - ref_logps)).sum()


def expectation(logits: jax.Array, estimator: KLEstimator) -> jax.Array:
    """Returns the expected estimate of tokens that are sampled before a gradient is taken."""
    logps = jax.nn.log_softmax(logits)
    probs = lax.stop_gradient(jnp.exp(logps))
    return (probs * estimator(logps, jax.nn.log_softmax(REF_LOGITS))).sum()


def k1(logps: jax.Array, ref_logps: jax.Array) -> jax.Array:
    return logps - ref_logps


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("estimator", [k1, k3])
def test_k1_and_k3_have_the_value_of_the_kl(estimator: KLEstimator) -> None:
    expected_estimate = expectation(LOGITS, estimator)

    np.testing.assert_allclose(expected_estimate, kl_divergence(LOGITS), rtol=1e-12)


@pytest.mark.usefixtures("float64")
def test_k2_has_the_slope_of_the_kl() -> None:
    slope = jax.grad(expectation)(LOGITS, k2)

    slope_of_kl = jax.grad(kl_divergence)(LOGITS)
    np.testing.assert_allclose(slope, slope_of_kl, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("float64")
def test_k2_and_k3_are_their_formulas() -> None:
    logps = jax.nn.log_softmax(LOGITS)
    ref_logps = jax.nn.log_softmax(REF_LOGITS)
    d = ref_logps - logps

    np.testing.assert_allclose(k2(logps, ref_logps), (logps - ref_logps) ** 2 / 2, rtol=1e-12)
    np.testing.assert_allclose(k3(logps, ref_logps), np.exp(d) - d - 1, rtol=1e-9)


# -- what DPPO and IPO mask ------------------------------------------------------------------------

# Probabilities mu and pi of a token, its advantage, and which surrogates mask it. Bounds are 0.2,
# but 0.05 for the KL: KL(0.3 || 0.6) = 0.19, KL(0.02 || 0.1) = 0.05, KL(0.5 || 0.6) = 0.02,
# KL(0.001 || 0.01) = 0.007.
MASKED: list[tuple[float, float, float, set[str]]] = [
    (0.3, 0.6, 1.0, {"dppo_tv", "dppo_kl", "ipo"}),
    (0.3, 0.6, -1.0, {"ipo"}),  # it goes back on its own
    (0.6, 0.3, -1.0, {"dppo_tv", "dppo_kl", "ipo"}),
    (0.6, 0.3, 1.0, {"ipo"}),
    (0.5, 0.6, 1.0, set()),
    (0.001, 0.01, 1.0, set()),  # PPO would clip a ratio of 10
    (0.02, 0.15, 1.0, {"dppo_kl"}),
]


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl", "ipo"])
@pytest.mark.parametrize(("before", "now", "advantage", "masked_by"), MASKED)
def test_a_token_is_masked_by_how_far_its_probability_moved(
    name: str, before: float, now: float, advantage: float, masked_by: set[str]
) -> None:
    bound = 0.05 if name == "dppo_kl" else 0.2
    part = {"dppo_tv": DppoTV, "dppo_kl": DppoKL, "ipo": IPO}[name](bound, bound)

    def loss(logp: jax.Array) -> tuple[jax.Array, jax.Array]:
        ratio = jnp.exp(logp) / before
        terms, is_masked = SURROGATES[type(part)].compute(
            logp[None, None], ratio[None, None], jnp.full((1, 1), advantage), part
        )
        return terms[0, 0], is_masked[0, 0]

    (value, is_masked), slope = jax.value_and_grad(loss, has_aux=True)(jnp.log(jnp.float32(now)))

    assert is_masked == (name in masked_by)
    expected = 0.0 if name in masked_by else -now / before * advantage
    assert value == pytest.approx(expected, rel=1e-5)
    assert slope == pytest.approx(expected, rel=1e-5)


# -- all surrogates against their formulas ---------------------------------------------------------

# Every pair of the old and the new probability of a token, with both signs of the advantage.
PROBS = np.array([0.01, 0.05, 0.2, 0.3, 0.5, 0.7, 0.9])
OLD, NEW, ADVANTAGES = (grid.reshape(1, -1) for grid in np.meshgrid(PROBS, PROBS, [1.5, -0.5]))
# Bounds that differ, and that some of the pairs exceed and others do not.
BOUNDED: list[dict[str, object]] = [
    {"surrogate": name, "clip_low": low, "clip_high": high}
    for name in ("clip", "cispo", "dppo_tv", "dppo_kl", "ipo")
    for low, high in [(0.1, 0.25), (0.3, 0.05), (0.2, 0.29)]
]
UNBOUNDED: list[dict[str, object]] = [
    {"surrogate": name} for name in ("reinforce", "sapo", "vespo")
]


def test_every_surrogate_has_a_case() -> None:
    names = {case["surrogate"] for case in BOUNDED + UNBOUNDED}
    assert names == {part_name(part) for part in SURROGATES}


@pytest.mark.parametrize("case", BOUNDED + UNBOUNDED, ids=str)
def test_a_surrogate_is_its_formula_for_every_change_of_a_probability(
    case: dict[str, object],
) -> None:
    algorithm = descriptions.change(Algorithm(), **case)
    part = algorithm.surrogate
    expected = [
        reference.surrogate(new / old, math.log(new), advantage, algorithm)
        for old, new, advantage in zip(OLD[0], NEW[0], ADVANTAGES[0], strict=True)
    ]
    losses, by_ratio, by_logp = np.array(expected).T[:, None]

    def loss(logps: jax.Array) -> tuple[jax.Array, jax.Array]:
        ratios = jnp.exp(logps) / OLD
        terms, _ = SURROGATES[type(part)].compute(logps, ratios, jnp.asarray(ADVANTAGES), part)
        return terms.sum(), terms

    with jax.enable_x64(True):
        slopes, terms = jax.grad(loss, has_aux=True)(jnp.log(jnp.asarray(NEW)))

    np.testing.assert_allclose(terms, losses, rtol=1e-5, atol=1e-12)
    # The ratio is exp(log pi) / mu, so its derivative by log pi is the ratio itself.
    np.testing.assert_allclose(slopes, by_ratio * NEW / OLD + by_logp, rtol=1e-5, atol=1e-12)


# -- soft gates and the off-policy mask ------------------------------------------------------------


def loss_and_slope(part: SAPO | VESPO, ratio: float, advantage: float):
    """Returns the loss of a token at log pi = -1 and its slope by log pi."""

    def loss(logp: jax.Array) -> jax.Array:
        terms, _ = SURROGATES[type(part)].compute(
            logp[None, None],
            ratio * jnp.exp(logp + 1)[None, None],
            jnp.full((1, 1), advantage),
            part,
        )
        return terms[0, 0]

    return jax.value_and_grad(loss)(jnp.float32(-1.0))


@pytest.mark.parametrize("part", [SAPO(), VESPO()])
@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_a_soft_gate_has_the_policy_gradient_on_policy_and_fades_away_from_it(
    part: SAPO | VESPO, advantage: float
) -> None:
    _, on_policy = loss_and_slope(part, 1.0, advantage)
    far = [loss_and_slope(part, ratio, advantage)[1] for ratio in (20.0, 1e-3)]

    assert on_policy == pytest.approx(-advantage, rel=1e-5)
    np.testing.assert_allclose(far, 0, atol=2e-3)


def test_the_weight_of_vespo_is_finite_for_every_ratio_within_the_bounds_of_its_settings() -> None:
    for k in (0.0, 10.0):
        for rate in (0.1, 50.0):
            part = VESPO(k_positive=k, lambda_positive=rate)
            for ratio in (np.exp(-20), 0.2, 1.0, 100.0, np.exp(20)):
                loss, slope = loss_and_slope(part, float(ratio), 1.0)
                assert np.isfinite(loss)
                assert np.isfinite(slope)


# Mean of log pi_sampler - log pi over a sequence of two tokens, its advantage, and whether a bound
# of 0.5 masks it (DeepSeek-V3.2, eq. 9).
LEFT = [
    ((0.9, 0.3), -1.0, True),
    ((0.9, 0.0), -1.0, False),
    ((0.9, 0.3), 1.0, False),
    ((0.9, 0.3), 0.0, False),
    ((-0.9, -0.3), -1.0, False),
]


@pytest.mark.parametrize(("gaps", "advantage", "is_masked"), LEFT)
def test_the_off_policy_mask_drops_sequences_that_got_worse_and_are_less_likely_now(
    gaps: tuple[float, float], advantage: float, is_masked: bool
) -> None:
    row = jnp.zeros((1, 2))
    batch = Batch(
        *[row] * 4,
        weights=row + 0.5,
        sampler_logps=jnp.asarray([gaps]) - 2,
        old_logps=row - 2,
        advantages=row + advantage,
    )

    def loss(logps: jax.Array, algorithm: Algorithm) -> jax.Array:
        terms, _ = policy_loss(logps, row, batch, sum_over_row, algorithm)
        return terms.sum()

    slopes = jax.grad(loss)(
        jnp.full((1, 2), -2.0), Algorithm(off_policy_bound=0.5, correction=None)
    )

    expected = 0.0 if is_masked else -0.5 * advantage
    np.testing.assert_allclose(slopes, np.full((1, 2), expected), rtol=1e-6)


def sum_over_row(x: jax.Array) -> jax.Array:
    """Returns the sum over each sequence, where every row is one sequence."""
    return jnp.broadcast_to(x.sum(1, keepdims=True), x.shape)
