"""GDPO: every function of `task.reward.functions` is normalized by itself, before the sum."""

from dataclasses import replace

import numpy as np
import pytest
import reference
from packed_losses import (
    GROUP_SIZE,
    MAX_NEW_TOKENS,
    PACKINGS,
    ModelOutputs,
    assert_same_loss,
    loss_and_slopes,
    packed_minibatches,
    random_outputs,
    small_trainer,
)

from jzero.algorithms import PRESETS, Algorithm, EachGroupMeanStd, Episodes, compute_advantages
from jzero.training.credit import make_episodes
from jzero.training.trainer import credit_settings
from jzero.types import Rollout, grade_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

FUNCTIONS = ("accuracy", "format", "tag_count")
WEIGHTS = (1.0, 0.5, 2.0)


def with_parts(rollout: Rollout, parts: dict[str, float]) -> Rollout:
    """Returns the rollout with these named rewards, and their weighted sum as its score."""
    weights = dict(zip(FUNCTIONS, WEIGHTS, strict=True))
    score = sum(weights[name] * part for name, part in parts.items())
    grade = replace(grade_of(rollout), parts=parts, score=score)
    [turn] = rollout.turns
    return replace(rollout, grade=grade, turns=(replace(turn, grade=grade),))


def outputs_with_parts(seed: int) -> tuple[ModelOutputs, reference.Parts]:
    """Returns random rollouts with named rewards, of which some do not apply to all rollouts."""
    outputs = random_outputs(seed)
    rng = np.random.default_rng(seed)
    accuracy = [grade_of(rollout).score for rollout in outputs.rollouts]
    form = rng.choice([0.0, 1.0], len(accuracy)).tolist()
    tags = [None if rng.random() < 0.2 else float(x) for x in rng.choice([0.25, 1.0], len(form))]
    rollouts = []
    for rollout, *rewards in zip(outputs.rollouts, accuracy, form, tags, strict=True):
        named = zip(FUNCTIONS, rewards, strict=True)
        rollouts.append(with_parts(rollout, {name: x for name, x in named if x is not None}))
    parts = list(zip(WEIGHTS, [accuracy, form, tags], strict=True))
    return replace(outputs, rollouts=rollouts), parts


@pytest.mark.parametrize("packing", PACKINGS)
def test_loss_and_slopes_are_those_of_the_definition(packing: str) -> None:
    algorithm = PRESETS["gdpo"]()
    trainer = small_trainer(algorithm, packing, rows=2)
    credit = replace(trainer.credit, reward_weights=dict(zip(FUNCTIONS, WEIGHTS, strict=True)))
    trainer = replace(trainer, credit=credit)
    outputs, parts = outputs_with_parts(0)
    [minibatch] = packed_minibatches(trainer, outputs)

    loss, slopes = loss_and_slopes(
        trainer, trainer.policy, minibatch, outputs.logps, outputs.entropy
    )

    expected_loss, expected_slopes = reference.policy_loss(
        outputs.rollouts,
        outputs.logps,
        outputs.old_logps,
        outputs.ref_logps,
        algorithm,
        GROUP_SIZE,
        MAX_NEW_TOKENS,
        minibatch.members,
        parts=parts,
    )
    expected = [expected_slopes[i] for i in minibatch.chosen]
    assert_same_loss(loss, slopes, expected_loss, expected)


def test_a_reward_of_large_numbers_weighs_no_more_than_one_of_small_numbers() -> None:
    """That is what sets it apart from GRPO of the weighted sum."""
    rollouts = random_outputs(0).rollouts[:4]
    rewards = [(0.0, 100.0), (1.0, 0.0), (0.0, 0.0), (1.0, 100.0)]
    group = [
        with_parts(rollout, {"accuracy": right, "format": form})
        for rollout, (right, form) in zip(rollouts, rewards, strict=True)
    ]

    def advantages(name: str) -> np.ndarray:
        settings = reference.settings(
            task={"reward": replace(reference.settings().task.reward, functions=FUNCTIONS[:2])},
            algorithm={"advantage": name, "std_eps": 0.0},
        )
        zeros = [np.zeros(len(rollout.tokens)) for rollout in group]
        episodes = make_episodes(group, credit_settings(settings), zeros, zeros)
        return compute_advantages(episodes, settings.algorithm)[0][:, 0]

    # The second reward is 0.5 of 100 in the sum, and hides the first.
    of_sum = advantages("group_mean_std")
    assert of_sum[0] == pytest.approx(-of_sum[1], rel=0.05)
    # By itself each reward is +-c, and rollouts 0 and 1 have one of the two.
    np.testing.assert_allclose(
        advantages("each_group_mean_std"), [0.0, 0.0, -1.2247449, 1.2247449], atol=1e-6
    )


def test_a_turn_that_a_function_does_not_apply_to_is_no_peer_of_the_others() -> None:
    """The function does not apply to the first turn of rollout 0."""
    episodes = three_episodes()

    advantages, _ = compute_advantages(episodes, Algorithm(advantage=EachGroupMeanStd(1e-12)))

    # First turns: only rollouts 1 and 2 have the reward, with returns 1 + 0.5 * 1 and 0 + 0.5 * 3.
    assert advantages[0, 0] == 0
    assert advantages[1, 0] == advantages[2, 0] == 0  # the same return
    # Second turns: 2, 1 and 3.
    assert advantages[:, 1].tolist() == pytest.approx([0.0, -1.5811388, 1.5811388])


def three_episodes() -> Episodes:
    """Returns three rollouts of two turns with a token each, and one named reward."""
    part = np.array([[np.nan, 2.0], [1.0, 1.0], [0.0, 3.0]])
    return Episodes(
        rewards=np.nan_to_num(part),
        values=np.zeros((3, 2)),
        mask=np.ones((3, 2), bool),
        group=np.zeros(3, np.int64),
        turn=np.array([[0, 1]] * 3),
        turn_discount=0.5,
        parts=part[..., None],
        part_weights=(1.0,),
    )
