"""Weights of tokens; tests/algorithms/test_losses.py compares them with their definitions."""

from dataclasses import replace

import numpy as np
import pytest
import reference

from jzero.algorithms import WEIGHTS
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
