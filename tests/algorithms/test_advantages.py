"""Advantages against tests/reference.py, and their exact properties."""

from dataclasses import replace

import numpy as np
import pytest
import reference
from descriptions import algorithm_of, change_advantage
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_losses import GROUP_SIZE, NUM_PROMPTS, random_outputs, small_trainer

from jzero.algorithms import ADVANTAGES, PRESETS, Episodes, compute_advantages
from jzero.fields import part_name
from jzero.tokens import Tokens
from jzero.training.credit import make_episodes, spread_over_tokens
from jzero.training.trainer import credit_settings
from jzero.types import Rollout

WITH_GROUP_BASELINE = [
    part_name(part) for part, advantage in ADVANTAGES.items() if advantage.has_group_baseline
]


def random_episodes(seed: int) -> Episodes:
    """Returns groups of 1 to 7 in random order.

    The returns of groups 6 and 7 are all equal; those of group 6 are 0.1, which has no exact mean.
    """
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.repeat(np.arange(8), [1, 1, 2, 3, 5, 7, 6, 3]))
    mask = np.arange(9) < rng.integers(1, 10, len(group))[:, None]
    is_last_token = mask & ~np.pad(mask[:, 1:], ((0, 0), (0, 1)))
    scores = rng.choice([0.0, 0.1, 1.0], len(group))
    scores[group == 6] = 0.1
    scores[group == 7] = 1.0
    return Episodes(
        rewards=is_last_token * scores[:, None],
        values=rng.normal(size=mask.shape) * mask,
        mask=mask,
        group=group,
    )


def ragged(x: np.ndarray, mask: np.ndarray) -> list[list[float]]:
    """Returns the elements of each row where the mask is True."""
    return [row[real].tolist() for row, real in zip(x, mask, strict=True)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("has_reward_for_every_token", [False, True])
@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("name", list(map(part_name, ADVANTAGES)))
def test_advantages_are_those_of_the_definition(
    name: str, whiten: bool, has_reward_for_every_token: bool, seed: int
) -> None:
    algorithm = change_advantage(algorithm_of(advantage=name, whiten=whiten), gamma=0.95, lam=0.8)
    episodes = random_episodes(seed)
    mask = episodes.mask
    if has_reward_for_every_token:
        noise = np.random.default_rng(seed).normal(size=mask.shape) * mask
        episodes = episodes._replace(rewards=episodes.rewards + noise)

    advantages_and_targets = compute_advantages(episodes, algorithm)

    expected = reference.advantages(
        ragged(episodes.rewards, mask),
        ragged(episodes.values, mask),
        episodes.group.tolist(),
        algorithm,
    )
    for array, rows in zip(advantages_and_targets, expected, strict=True):
        assert array.dtype == np.float64
        assert not array[~mask].any()
        np.testing.assert_allclose(array[mask], np.concatenate(rows), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", WITH_GROUP_BASELINE)
def test_groups_without_a_difference_get_exactly_zero_and_others_sum_to_zero(
    name: str, seed: int
) -> None:
    episodes = random_episodes(seed)
    group = episodes.group

    advantages, _ = compute_advantages(episodes, algorithm_of(advantage=name))

    is_alone = np.bincount(group)[group] == 1
    is_uniform = group >= 6
    assert not advantages[is_alone | is_uniform].any()
    for number in range(8):
        np.testing.assert_allclose(advantages[group == number, 0].sum(), 0, atol=1e-12)


@pytest.mark.parametrize("name", WITH_GROUP_BASELINE)
@given(group_size=st.integers(2, 64), score=st.floats(-100, 100))
@settings(deadline=None)
def test_a_uniform_group_has_no_advantage_beside_one_that_is_not(
    name: str, group_size: int, score: float
) -> None:
    if name == "group_mean_over_mean":
        score = abs(score)  # an advantage over a mean that is not positive is 0
    rewards = np.full((2 * group_size, 1), score)
    rewards[group_size] += 1
    episodes = Episodes(
        rewards=rewards,
        values=np.zeros_like(rewards),
        mask=np.ones_like(rewards, bool),
        group=np.repeat([0, 1], group_size),
    )

    advantages, _ = compute_advantages(episodes, algorithm_of(advantage=name))

    assert not advantages[:group_size].any()
    assert advantages[group_size] > 0


def insert_environment_tokens(
    rollout: Rollout, rng: np.random.Generator
) -> tuple[Rollout, np.ndarray]:
    """Returns the rollout with up to 4 environment tokens after some tokens, and a mask of the old.

    The first token of the response stays the first: an environment token before it would belong to
    the prompt.
    """
    places = np.arange(rollout.prompt_length + 1, len(rollout.tokens) + 1)
    inserted_at = np.repeat(places, rng.integers(0, 5, len(places)))
    is_old = ~np.insert(np.zeros(len(rollout.tokens), bool), inserted_at, True)
    tokens = Tokens(
        np.insert(rollout.tokens.ids, inserted_at, 7),
        sampled=np.insert(rollout.tokens.sampled, inserted_at, False),
        logps=np.insert(rollout.tokens.logps, inserted_at, 0.0),
        versions=np.insert(rollout.tokens.versions, inserted_at, -1),
    )
    longer = replace(
        rollout,
        tokens=tokens,
        turns=(replace(rollout.turns[0], end=len(is_old)),),
    )
    return longer, is_old


@pytest.mark.parametrize("preset", PRESETS)
def test_environment_tokens_leave_advantages_unchanged_to_the_bit(preset: str) -> None:
    rng = np.random.default_rng(5)
    algorithm = change_advantage(PRESETS[preset](kl_reward=0.1), gamma=0.9, lam=0.8)
    config = reference.settings(rollout={"num_prompts": NUM_PROMPTS, "group_size": GROUP_SIZE})
    config.algorithm = algorithm
    outputs = random_outputs(5)
    pairs = [insert_environment_tokens(rollout, rng) for rollout in outputs.rollouts]
    longer_rollouts = [rollout for rollout, _ in pairs]
    tokens_before = sum(len(rollout.tokens) for rollout in outputs.rollouts)
    assert sum(len(rollout.tokens) for rollout in longer_rollouts) > 1.3 * tokens_before

    def with_noise_between(arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Returns the arrays over the longer rollouts, with noise at environment tokens."""
        wide_arrays = []
        for (rollout, is_old), array in zip(pairs, arrays, strict=True):
            wide = rng.normal(size=len(rollout.tokens)).astype(np.float32)
            wide[is_old] = array
            wide_arrays.append(wide)
        return wide_arrays

    def advantages_and_targets(
        rollouts: list[Rollout], penalties: list[np.ndarray], values: list[np.ndarray]
    ) -> list[list[np.ndarray]]:
        """Returns both, for each rollout an array over its tokens."""
        episodes = make_episodes(rollouts, credit_settings(config), penalties, values)
        return [spread_over_tokens(x, rollouts) for x in compute_advantages(episodes, algorithm)]

    penalties = [
        0.1 * (old - ref) for old, ref in zip(outputs.old_logps, outputs.ref_logps, strict=True)
    ]
    short = advantages_and_targets(outputs.rollouts, penalties, outputs.old_values)
    long = advantages_and_targets(
        longer_rollouts, with_noise_between(penalties), with_noise_between(outputs.old_values)
    )

    for short_arrays, long_arrays in zip(short, long, strict=True):
        for array, wide, (_, is_old) in zip(short_arrays, long_arrays, pairs, strict=True):
            np.testing.assert_array_equal(array, wide[is_old])
            assert not wide[~is_old].any()


def test_the_penalty_in_the_reward_is_k1_of_every_sampled_token() -> None:
    trainer = small_trainer(PRESETS["reinforce_pp"](kl_reward=0.5))
    outputs = random_outputs(1)
    penalties = [
        0.5 * (old - ref) for old, ref in zip(outputs.old_logps, outputs.ref_logps, strict=True)
    ]

    episodes = make_episodes(outputs.rollouts, trainer.credit, penalties, outputs.old_values)

    for i, rollout in enumerate(outputs.rollouts):
        k1 = (outputs.old_logps[i] - outputs.ref_logps[i])[rollout.tokens.sampled]
        expected = -0.5 * k1.astype(np.float64)
        assert rollout.grade is not None
        expected[-1] += rollout.grade.score
        np.testing.assert_allclose(episodes.rewards[i][episodes.mask[i]], expected, rtol=1e-6)
