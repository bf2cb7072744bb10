"""From graded rollouts to the weights of tokens and the rewards of turns."""

from dataclasses import replace

import numpy as np
import pytest
import reference

from jzero.training.credit import token_weights, turn_rewards
from jzero.types import Grade, Rollout

ROLLOUTS = reference.random_rollouts(1, 4, 4)


@pytest.mark.parametrize("truncated", ["grade", "fixed", "mask"])
@pytest.mark.parametrize("weight", ["sequence_mean", "token_mean", "constant"])
def test_token_weights_are_those_of_the_definition(weight: str, truncated: str) -> None:
    config = reference.settings(algorithm={"weight": weight, "truncated": truncated})
    chosen = list(range(16))

    weights = token_weights(ROLLOUTS, chosen, weight, config)

    max_new_tokens = config.rollout.max_new_tokens
    expected = reference.token_weights(ROLLOUTS, config.algorithm, max_new_tokens)
    for i in chosen:
        np.testing.assert_allclose(weights[i], expected[i], rtol=1e-6)


def rollout_with(finish_reason: str, grade: Grade | None) -> Rollout:
    """Returns a rollout whose only turn ends like this."""
    [turn] = ROLLOUTS[0].turns
    turn = replace(turn, finish_reason=finish_reason, grade=grade)
    return replace(ROLLOUTS[0], turns=(turn,))


GRADE = Grade(0.7, False, "")
TRUNCATED = rollout_with("length", GRADE)
FINISHED = rollout_with("stop", GRADE)


@pytest.mark.parametrize(("truncated", "score"), [("grade", 0.7), ("mask", 0.7), ("fixed", -0.5)])
def test_only_a_truncated_turn_gets_the_score_of_truncated_turns(
    truncated: str, score: float
) -> None:
    config = reference.settings(algorithm={"truncated": truncated, "truncated_score": -0.5})

    assert turn_rewards(TRUNCATED, config) == [score]
    assert turn_rewards(FINISHED, config) == [0.7]


def test_only_a_truncated_turn_gets_the_penalty() -> None:
    config = reference.settings(algorithm={"truncated_penalty": 0.5})

    assert turn_rewards(TRUNCATED, config) == pytest.approx([0.2])
    assert turn_rewards(FINISHED, config) == [0.7]


def test_a_turn_without_a_grade_has_no_reward() -> None:
    config = reference.settings(algorithm={"truncated_penalty": 0.5})

    with pytest.raises(AssertionError, match="was not graded"):
        turn_rewards(rollout_with("stop", grade=None), config)
