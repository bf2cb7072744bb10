"""Dr. GRPO's divisors against oat's formula, written as loops over responses and tokens."""

import numpy as np
import pytest
from packed_losses import (
    GROUP_SIZE,
    loss_and_slopes,
    packed_minibatches,
    random_outputs,
    small_trainer,
)

from jzero.algorithms import PRESETS
from jzero.types import Rollout, grade_of

DIVISORS = {"drgrpo_paper": 3000, "drgrpo_release": 1}


def score(rollout: Rollout) -> float:
    return 0.0 if rollout.finish_reason == "length" else grade_of(rollout).score


@pytest.mark.parametrize("preset", DIVISORS)
def test_the_loss_is_the_mean_over_responses_of_sums_over_the_divisor(preset: str) -> None:
    outputs = random_outputs(seed=3)
    trainer = small_trainer(PRESETS[preset]())
    [minibatch] = packed_minibatches(trainer, outputs)

    losses = []
    for place, rollout in enumerate(outputs.rollouts):
        first = place - place % GROUP_SIZE
        group = outputs.rollouts[first : first + GROUP_SIZE]
        advantage = score(rollout) - float(np.mean([score(r) for r in group]))
        loss_of_response = 0.0
        for position in np.flatnonzero(rollout.tokens.sampled):
            log_ratio = outputs.logps[place][position] - outputs.old_logps[place][position]
            ratio = float(np.exp(log_ratio))
            clipped = min(max(ratio, 0.8), 1.2)
            loss_of_response += max(-advantage * ratio, -advantage * clipped)
        losses.append(loss_of_response / DIVISORS[preset])

    loss, _ = loss_and_slopes(trainer, trainer.policy, minibatch, outputs.logps, outputs.entropy)
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-5)
    assert abs(loss) > 0
