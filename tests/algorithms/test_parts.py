"""The parts that run in the jitted update, by themselves: closed forms, and far-away inputs."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero.algorithms import CORRECTIONS, KL_ESTIMATORS, RATIOS, Algorithm, k2, k3

FAR = np.array([[-1e4, -100.0, 0.0, 100.0, 1e4]], np.float32)


def itself(x: jax.Array) -> jax.Array:
    """The sum over a sequence of one token."""
    return x


def test_far_from_the_old_policy_ratios_and_their_slopes_are_finite():
    for ratio in RATIOS.values():
        value, slope = jax.value_and_grad(lambda x, f=ratio: f(x, itself).sum())(FAR)

        assert np.isfinite(value)
        assert np.isfinite(slope).all()


def test_far_from_the_sampler_corrections_are_finite():
    for correction in CORRECTIONS.values():
        assert np.isfinite(correction(jnp.asarray(FAR), itself, Algorithm())).all()


def test_far_from_the_reference_policy_the_kl_and_its_slope_are_finite():
    for estimator in KL_ESTIMATORS.values():
        values = estimator(jnp.asarray(FAR), jnp.zeros(FAR.shape))
        slopes = jax.grad(lambda x, f=estimator: f(x, jnp.zeros(x.shape)).sum())(FAR)

        assert np.isfinite(values).all()
        assert np.isfinite(slopes).all()
        assert values[FAR == 0] == slopes[FAR == 0] == 0


def test_kl_estimators_have_the_value_or_the_slope_of_the_kl():
    """E[k1] = E[k3] = KL, and the expected gradient of k2 is the gradient of the KL."""
    with jax.enable_x64(True):
        logits, ref_logits = np.random.default_rng(0).normal(size=(2, 1, 50))
        ref_logps = jax.nn.log_softmax(ref_logits)

        def closed_form(logits: jax.Array) -> jax.Array:
            logps = jax.nn.log_softmax(logits)
            return (jnp.exp(logps) * (logps - ref_logps)).sum()

        def expectation(logits: jax.Array, estimator) -> jax.Array:
            logps = jax.nn.log_softmax(logits)
            return (lax.stop_gradient(jnp.exp(logps)) * estimator(logps, ref_logps)).sum()

        def k1(logps: jax.Array, ref_logps: jax.Array) -> jax.Array:
            return logps - ref_logps

        kl = closed_form(logits)
        slope = jax.grad(closed_form)(logits)
        np.testing.assert_allclose(expectation(logits, k3), kl, rtol=1e-12)
        np.testing.assert_allclose(expectation(logits, k1), kl, rtol=1e-12)
        k2_slope = jax.grad(expectation)(logits, k2)
        np.testing.assert_allclose(k2_slope, slope, rtol=1e-9, atol=1e-12)

        logps = jax.nn.log_softmax(logits)
        np.testing.assert_allclose(k2(logps, ref_logps), (logps - ref_logps) ** 2 / 2, rtol=1e-12)
        d = ref_logps - logps
        np.testing.assert_allclose(k3(logps, ref_logps), np.exp(d) - d - 1, rtol=1e-9)
