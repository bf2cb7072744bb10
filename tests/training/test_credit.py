"""From graded rollouts to the weights of tokens and the rewards of turns."""

from dataclasses import replace

import numpy as np
import pytest
import reference
from descriptions import algorithm_of

from jzero import algorithms
from jzero.algorithms import Episodes
from jzero.fields import part_name
from jzero.training.credit import (
    advantages_of_graded,
    can_have_gradient,
    make_episodes,
    token_weights,
    training_sequences,
    turn_rewards,
)
from jzero.training.trainer import credit_settings
from jzero.types import Grade, Rollout

ROLLOUTS = reference.random_rollouts(1, 4, 4)


@pytest.mark.parametrize("truncated", ["grade", "fixed", "mask", "ignore"])
@pytest.mark.parametrize("weight", ["sequence_mean", "token_mean", "constant"])
def test_token_weights_are_those_of_the_definition(weight: str, truncated: str) -> None:
    config = reference.settings(algorithm={"weight": weight, "truncated": truncated})
    chosen = list(range(16))

    weights = token_weights(ROLLOUTS, chosen, config.algorithm.weight, credit_settings(config))

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


@pytest.mark.parametrize(
    ("truncated", "score"), [("grade", 0.7), ("mask", 0.7), ("fixed", -0.5), ("ignore", -0.5)]
)
def test_only_a_truncated_turn_gets_the_score_of_truncated_turns(
    truncated: str, score: float
) -> None:
    rules = {"fixed": algorithms.Fixed(-0.5), "ignore": algorithms.Ignore(-0.5)}
    config = reference.settings(algorithm={"truncated": rules.get(truncated, truncated)})

    assert turn_rewards(TRUNCATED, credit_settings(config)) == [score]
    assert turn_rewards(FINISHED, credit_settings(config)) == [0.7]


def test_an_ignored_response_scores_0_in_its_group_and_is_not_trained_on() -> None:
    config = reference.settings(algorithm={"truncated": "ignore", "advantage": "group_mean"})
    # Four responses to a prompt. All are right, and the first was cut before it could end.
    right = Grade(1.0, True, "correct")
    group = [rollout_with("length", right), *[rollout_with("stop", right)] * 3]
    nothing = [np.zeros(len(rollout.tokens)) for rollout in group]

    episodes = make_episodes(group, credit_settings(config), nothing, nothing)
    advantages, _ = algorithms.compute_advantages(episodes, config.algorithm)
    weights = token_weights(group, range(4), algorithms.SequenceMean(), credit_settings(config))

    # The 0 counts: the group's mean is 3 / 4.
    np.testing.assert_allclose(advantages[:, 0], [-0.75, 0.25, 0.25, 0.25])
    assert not weights[0].any()
    for i in (1, 2, 3):
        # And so does the response itself: the mean is over four of them.
        assert weights[i].sum() == pytest.approx(1 / 4)


def test_only_a_truncated_turn_gets_the_penalty() -> None:
    config = reference.settings(algorithm={"truncated_penalty": 0.5})

    assert turn_rewards(TRUNCATED, credit_settings(config)) == pytest.approx([0.2])
    assert turn_rewards(FINISHED, credit_settings(config)) == [0.7]


def test_a_turn_without_a_grade_has_no_reward() -> None:
    config = reference.settings(algorithm={"truncated_penalty": 0.5})

    with pytest.raises(AssertionError, match="was not graded"):
        turn_rewards(rollout_with("stop", grade=None), credit_settings(config))


def test_no_token_of_a_failed_rollout_is_trained() -> None:
    config = reference.settings(algorithm={"weight": "token_mean"})
    failed = replace(ROLLOUTS[0], grade=Grade(0.0, False, "", failed=True))

    weights = token_weights(
        [failed, *ROLLOUTS[1:]], [0, 1], algorithms.TokenMean(), credit_settings(config)
    )

    assert not weights[0].any()
    # The mean is over the tokens that are trained.
    assert weights[1].sum() == pytest.approx(1.0)


@pytest.mark.parametrize("sequence_per_turn", [False, True])
@pytest.mark.parametrize("is_graded", [False, True])
def test_no_sequence_of_a_failed_episode_is_trained(
    sequence_per_turn: bool, is_graded: bool
) -> None:
    """The grading of an episode can fail after the grades of its earlier turns have arrived."""
    whole = next(one for one in ROLLOUTS if one.response_length > 1)
    [turn] = whole.turns
    middle = (turn.start + turn.end) // 2
    turns = (
        replace(turn, end=middle, grade=Grade(1.0, True, "")),
        replace(turn, start=middle, grade=Grade(0.0, False, "")),
    )
    failed_or_wrong = Grade(0.0, False, "", failed=not is_graded)
    episode = replace(whole, turns=turns, grade=failed_or_wrong)
    config = reference.settings(rollout={"max_turns": 2})
    settings = replace(credit_settings(config), sequence_per_turn=sequence_per_turn)

    sequences, sources = training_sequences([episode], sequence_per_turn)
    weights = token_weights(sequences, range(len(sequences)), algorithms.TokenMean(), settings)
    computed = can_have_gradient([episode], sequences, sources, settings)

    assert len(sequences) == (2 if sequence_per_turn else 1)
    for number in range(len(sequences)):
        assert weights[number].any() == is_graded
    if not is_graded:
        assert not computed.any()


@pytest.mark.parametrize("advantage", sorted(map(part_name, algorithms.ADVANTAGES)))
def test_a_failed_rollout_is_no_member_of_its_group(advantage: str) -> None:
    """The others get what they would get if the failed ones had not been sampled."""
    returns = np.array([1.0, 0.0, 9.0, 1.0, 9.0, 9.0, 9.0, 9.0, 0.0, 1.0, 0.5, 0.0])
    group = np.repeat([0, 1, 2], 4)
    is_graded = returns < 9  # of the second group none is
    settings = algorithm_of(advantage=advantage, whiten=True)

    def episodes(chosen: np.ndarray, group: np.ndarray) -> Episodes:
        rewards = returns[chosen][:, None]
        return Episodes(rewards, np.full_like(rewards, 0.25), np.ones_like(rewards, bool), group)

    everything = episodes(np.ones(12, bool), group)
    advantages, targets = advantages_of_graded(everything, is_graded, settings)

    rest = episodes(is_graded, np.array([0, 0, 0, 1, 1, 1, 1]))
    expected = algorithms.compute_advantages(rest, settings)
    np.testing.assert_array_equal(advantages[is_graded], expected[0])
    np.testing.assert_array_equal(targets[is_graded], expected[1])
    assert not advantages[~is_graded].any()
    none, _ = advantages_of_graded(everything, np.zeros(12, bool), settings)
    assert not none.any()
