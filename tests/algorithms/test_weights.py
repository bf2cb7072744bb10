"""Weights of tokens; tests/algorithms/test_losses.py compares them with their definitions."""

from dataclasses import replace

import numpy as np
import pytest
import reference

from jzero.algorithms import WEIGHTS, BatchTokenMean
from jzero.training.credit import token_weights
from jzero.training.trainer import credit_settings


@pytest.mark.parametrize("part", WEIGHTS)
def test_a_step_of_masked_rollouts_alone_has_no_weight(part) -> None:
    rollouts = [
        replace(rollout, turns=(replace(rollout.turns[0], finish_reason="length"),))
        for rollout in reference.random_rollouts(0, 8, 4)
    ]
    settings = reference.settings(algorithm={"truncated": "mask"})

    weights = token_weights(rollouts, list(range(len(rollouts))), part(), credit_settings(settings))

    for weight in weights.values():
        assert np.isfinite(weight).all()
        assert not weight.any()


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_batch_token_mean_divides_as_trl_does(num_steps: int) -> None:
    """TRL 1.16: tokens of the generation batch * gradient accumulation / steps per generation."""
    rollouts = reference.random_rollouts(0, 8, 4)
    accumulation, size = 3, len(rollouts) // num_steps
    tokens_of_generation = sum(int(rollout.tokens.sampled.sum()) for rollout in rollouts)
    normalizer = tokens_of_generation * accumulation / (accumulation * num_steps)
    settings = credit_settings(reference.settings())

    last_step = list(range(len(rollouts) - size, len(rollouts)))
    weights = token_weights(rollouts, last_step, BatchTokenMean(), settings)

    assert len(weights) == size
    for weight in weights.values():
        np.testing.assert_allclose(weight[weight != 0], 1 / normalizer, rtol=1e-6)
