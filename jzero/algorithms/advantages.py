"""Advantages: from the rewards of an RL step's rollouts to a number for every sampled token.

Everything here runs on the host in NumPy and float64, over all rollouts of the RL step at once, so
that minibatches, packing and sharding cannot change an advantage. `Episodes` has only sampled
tokens, without the environment's replies.

An advantage function takes `Episodes` and its part of the `Algorithm`. It returns f64[N, T], or
f64[N, 1] if all tokens of a rollout have the same advantage.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

from jzero.algorithms.algorithm import (
    GAE,
    Algorithm,
    EachGroupMeanStd,
    GroupMean,
    GroupMeanBatchStd,
    GroupMeanOverMean,
    GroupMeanStd,
    LeaveOneOut,
    ReturnToGo,
    Zero,
)

PerToken: TypeAlias = Float[np.ndarray, "rollouts tokens"]
PerRollout: TypeAlias = Float[np.ndarray, " rollouts"]
Advantages: TypeAlias = Float[np.ndarray, "rollouts tokens_or_1"]
Groups: TypeAlias = Int[np.ndarray, " rollouts"]


class Episodes(NamedTuple):
    """The rewards of rollouts, left-aligned over their sampled tokens.

    `group` numbers the prompts from 0: rollouts of the same prompt share a number. `values` are the
    critic's values of the state before each token, 0 without a critic. `turn` numbers the turns of
    an episode from 0, and is None if all episodes have a single turn.

    `parts` are the K named rewards; `rewards` is their weighted sum. They are None unless the
    advantage reads them (`Advantage.needs_parts`). A named reward is on the last token of its turn,
    and is NaN there if the reward function does not apply to the turn. It is 0 on other tokens.

    `tracks` are the values of the entries of `tokens.TRACKS` that measure the sampler's logits.
    """

    rewards: PerToken
    values: PerToken
    mask: Bool[np.ndarray, "rollouts tokens"]
    group: Groups
    turn: Int[np.ndarray, "rollouts tokens"] | None = None
    turn_discount: float = 1.0  # factor of the next turn's return in the return of a turn
    parts: Float[np.ndarray, "rollouts tokens parts"] | None = None
    part_weights: tuple[float, ...] = ()  # weight of each of the K parts in the reward
    tracks: Mapping[str, Shaped[np.ndarray, "rollouts tokens ..."]] = MappingProxyType({})

    @property
    def returns(self) -> PerRollout:
        """The undiscounted sum of each rollout's rewards."""
        return self.rewards.sum(axis=1)


# Statistics of groups.


def group_means(x: PerRollout, group: Groups) -> PerRollout:
    """Returns the mean of x over the group of each rollout."""
    return (np.bincount(group, x) / np.bincount(group))[group]


def bessel_correction(group: Groups) -> PerRollout:
    """Returns G / (G - 1) for every rollout in a group of G, and 1 in a group of one."""
    sizes = np.bincount(group)[group]
    return sizes / np.maximum(sizes - 1, 1)


def is_in_uniform_group(x: PerRollout, group: Groups) -> Bool[np.ndarray, " rollouts"]:
    """Returns for each rollout whether all rollouts of its group have the same x."""
    # Compare values instead of deviations from the mean: the mean of equal values such as 0.1 is
    # inexact, and the tiny deviations, divided by their standard deviation, would be large.
    _, first_of_group = np.unique(group, return_index=True)
    first = x[first_of_group][group]
    differences = np.bincount(group, x != first)
    return (differences == 0)[group]


# Advantages with a baseline from the group.


def centered_returns(episodes: Episodes) -> Advantages:
    """Returns R - mean(R) over the group. A group with equal returns gets exactly 0."""
    returns = episodes.returns
    # With equal returns `centered` can be a rounding error instead of 0.
    centered = returns - group_means(returns, episodes.group)
    return np.where(is_in_uniform_group(returns, episodes.group), 0.0, centered)[:, None]


def group_mean(episodes: Episodes, part: GroupMean) -> Advantages:
    """A = R - mean(R) over the group (Dr. GRPO, arXiv:2503.20783 eq. 3)."""
    return centered_returns(episodes)


def group_mean_std(episodes: Episodes, part: GroupMeanStd) -> Advantages:
    """A = (R - mean(R)) / (std(R) + eps) over the group (GRPO, arXiv:2402.03300 §4.1.2).

    The standard deviation has G - 1 in its denominator.
    """
    centered = centered_returns(episodes)
    # G - 1 as in torch.std, which TRL and oat call.
    mean_square = group_means(centered[:, 0] ** 2, episodes.group)
    variance = mean_square * bessel_correction(episodes.group)
    return centered / (np.sqrt(variance) + part.eps)[:, None]


def group_mean_batch_std(episodes: Episodes, part: GroupMeanBatchStd) -> Advantages:
    """A = (R - mean(R) over the group) / (std(R) over all rollouts + eps).

    Source: arXiv:2508.08221; TRL's scale_rewards="batch".
    """
    returns = episodes.returns
    std = returns.std(ddof=1) if len(returns) > 1 else 0.0
    return centered_returns(episodes) / (std + part.eps)


def group_mean_over_mean(episodes: Episodes, part: GroupMeanOverMean) -> Advantages:
    """A = (R - mean(R)) / mean(R) over the group, and 0 if mean(R) is not positive.

    With scores of 0 and 1 the expected gradient is the gradient of the log-likelihood of a correct
    answer, up to an order given by the group size. Source: MaxRL, arXiv:2602.02710.
    """
    means = group_means(episodes.returns, episodes.group)[:, None]
    centered = centered_returns(episodes)
    # The inner `where` only avoids NumPy's warning about a division by zero.
    return np.where(means > 0, centered / np.where(means > 0, means, 1.0), 0.0)


def each_group_mean_std(episodes: Episodes, part: EachGroupMeanStd) -> Advantages:
    """A = B / (std(B) + eps), with B = sum_k weight_k (R_k - mean(R_k)) / (std(R_k) + eps).

    Means and standard deviations of the named reward R_k are over the rollouts of the group that it
    applies to. The standard deviation of B is over all rollouts. B has mean 0, because each of its
    terms has mean 0. A reward that is equal for all rollouts of a group adds exactly 0. If episodes
    have no named rewards, their total reward is the only R_k.

    Source: GDPO, arXiv:2601.05242; TRL's multi_objective_aggregation="normalize_then_sum".
    """
    returns_NK = episodes.returns[:, None]
    weights: tuple[float, ...] = (1.0,)
    if episodes.parts is not None:
        returns_NK = episodes.parts.sum(axis=1)
        weights = episodes.part_weights
    total = np.zeros(len(returns_NK))
    for weight, returns in zip(weights, returns_NK.T, strict=True):
        applies = ~np.isnan(returns)
        if applies.any():
            # Renumber the groups, because `group_means` divides by the size of each number.
            _, group = np.unique(episodes.group[applies], return_inverse=True)
            part_episodes = one_reward_each(returns[applies], group)
            normalized = group_mean_std(part_episodes, GroupMeanStd(part.eps))
            total[applies] += weight * normalized[:, 0]
    std = total.std(ddof=1) if len(total) > 1 else 0.0
    return (total / (std + part.eps))[:, None]


def one_reward_each(returns: PerRollout, group: Groups) -> Episodes:
    """Returns episodes of one token with the given returns as rewards."""
    rewards = returns[:, None]
    return Episodes(
        rewards=rewards,
        values=np.zeros_like(rewards),
        mask=np.ones_like(rewards, bool),
        group=group,
    )


def leave_one_out(episodes: Episodes, part: LeaveOneOut) -> Advantages:
    """A = R - mean of the group's other R (RLOO, arXiv:2402.14740 eq. 8)."""
    # This equals the deviation from the mean of the whole group, times G / (G - 1).
    return centered_returns(episodes) * bessel_correction(episodes.group)[:, None]


# Advantages for each token.


def generalized_advantages(episodes: Episodes, gamma: float, lam: float) -> PerToken:
    """Computes generalized advantage estimates (GAE, arXiv:1506.02438 eq. 16).

        A_t = delta_t + gamma lam A_{t+1}
        delta_t = r_t + gamma V_{t+1} - V_t

    Rewards and values are zero after a rollout's last token. Between two turns gamma is multiplied
    by `turn_discount`.
    """
    rewards = episodes.rewards
    values = episodes.values * episodes.mask
    discount = np.full(rewards.shape, gamma)
    if episodes.turn is not None:
        # The last token of each turn except the last turn.
        is_last_of_turn = np.diff(episodes.turn, axis=1) != 0
        discount[:, :-1] *= np.where(is_last_of_turn, episodes.turn_discount, 1.0)

    advantages = np.zeros_like(rewards)
    next_value = np.zeros(len(rewards))
    next_advantage = np.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + discount[:, t] * next_value - values[:, t]
        advantage = delta + discount[:, t] * lam * next_advantage
        # Padding follows a rollout's tokens. It must not contribute to the last token.
        next_advantage = np.where(episodes.mask[:, t], advantage, 0.0)
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages


def discounted_returns(episodes: Episodes, gamma: float) -> PerToken:
    """Computes G_t = r_t + gamma G_{t+1}: GAE with lambda 1 and without a critic."""
    without_critic = episodes._replace(values=np.zeros_like(episodes.values))
    return generalized_advantages(without_critic, gamma, lam=1.0)


def gae(episodes: Episodes, part: GAE) -> PerToken:
    """A_t = sum_l (gamma lam)^l delta_{t+l} with a critic (PPO, arXiv:1707.06347 eq. 11)."""
    return generalized_advantages(episodes, part.gamma, part.lam)


def return_to_go(episodes: Episodes, part: ReturnToGo) -> PerToken:
    """A_t = r_t + gamma A_{t+1} (REINFORCE++, arXiv:2501.03262, which also whitens A)."""
    return discounted_returns(episodes, part.gamma)


# For algorithms that learn only from a teacher.


def zero(episodes: Episodes, part: Zero) -> Advantages:
    """A = 0: rewards have no effect. The teacher's term is added later (`distillation.py`)."""
    return np.zeros((len(episodes.rewards), 1))


# The table, and the steps that all advantages share.


class Advantage(NamedTuple):
    """An advantage function and its requirements."""

    compute: Callable[..., Advantages]  # of `Episodes` and the part
    min_group_size: int  # smallest group for which the advantage is defined
    needs_critic: bool = False
    needs_parts: bool = False  # reads the named rewards instead of their sum

    @property
    def has_group_baseline(self) -> bool:
        """Whether the baseline comes from other rollouts of the same prompt."""
        return self.min_group_size > 1


ADVANTAGES: dict[type, Advantage] = {
    GroupMean: Advantage(group_mean, min_group_size=2),
    GroupMeanStd: Advantage(group_mean_std, min_group_size=2),
    GroupMeanBatchStd: Advantage(group_mean_batch_std, min_group_size=2),
    GroupMeanOverMean: Advantage(group_mean_over_mean, min_group_size=2),
    EachGroupMeanStd: Advantage(each_group_mean_std, min_group_size=2, needs_parts=True),
    LeaveOneOut: Advantage(leave_one_out, min_group_size=2),
    ReturnToGo: Advantage(return_to_go, min_group_size=1),
    GAE: Advantage(gae, min_group_size=1, needs_critic=True),
    Zero: Advantage(zero, min_group_size=1),
}


def compute_advantages(episodes: Episodes, algorithm: Algorithm) -> tuple[PerToken, PerToken]:
    """Computes the advantages of all sampled tokens and the targets of the critic.

    Both are f64[N, T], 0 where `episodes.mask` is False. The targets are A + V before whitening.
    Whitening scales the advantages to mean 0 and variance 1 over all sampled tokens.
    """
    advantage = ADVANTAGES[type(algorithm.advantage)]
    # With several turns, a turn is compared with the same turn of the group's other rollouts.
    if episodes.turn is not None and advantage.has_group_baseline:
        turns, row_of_token = turns_as_episodes(episodes)
        advantages = advantage.compute(turns, algorithm.advantage)[row_of_token, 0]
    else:
        advantages = advantage.compute(episodes, algorithm.advantage)
    advantages = advantages * episodes.mask
    # Whitening changes the scale of advantages, so the critic's targets are computed first.
    targets = (advantages + episodes.values) * episodes.mask
    if algorithm.whiten:
        advantages = whitened(advantages, episodes.mask)
    return advantages, targets


def turns_as_episodes(
    episodes: Episodes,
) -> tuple[Episodes, Int[np.ndarray, "rollouts tokens"]]:
    """Converts every turn to an episode of one token; also returns the row of each token's turn.

    The reward of a turn's row is the turn's return G_t = r_t + turn_discount G_{t+1}. Turns with
    the same number in the rollouts of one prompt form a group, so that the baseline does not depend
    on the content of the turn. A turn that no other rollout reached forms a group of one and gets
    exactly 0. The value of a track is its mean over the turn.
    """
    turn = episodes.turn
    assert turn is not None, "the episodes have one turn only"
    # Turns are numbered from 0, so that the prepended -1 makes the first token the start of a
    # turn.
    is_first_of_turn = episodes.mask & (np.diff(turn, axis=1, prepend=-1) != 0)
    # Within a turn there is no discount; between turns `turn_discount` applies.
    returns = discounted_returns(episodes, gamma=1.0)[is_first_of_turn]
    # A unique number for each pair of a prompt and a turn.
    group_and_turn = episodes.group[:, None] * (turn.max() + 1) + turn
    _, group = np.unique(group_and_turn[is_first_of_turn], return_inverse=True)
    rows = one_reward_each(returns, group)
    # Boolean indexing and cumsum both run through the array row by row, so that the indices
    # match. Padding gets the row of an earlier turn, and the mask removes it.
    row_of_token = np.cumsum(is_first_of_turn).reshape(turn.shape) - 1
    if episodes.parts is not None:
        parts = part_returns(episodes, episodes.parts, is_first_of_turn, row_of_token)
        rows = rows._replace(parts=parts[:, None], part_weights=episodes.part_weights)
    tracks = {
        name: turn_means(values[episodes.mask], row_of_token[episodes.mask])[:, None]
        for name, values in episodes.tracks.items()
    }
    return rows._replace(tracks=tracks), row_of_token


def turn_means(
    values: Shaped[np.ndarray, "sampled ..."],
    turns: Int[np.ndarray, " sampled"],
) -> Float[np.ndarray, "turns ..."]:
    """Returns the mean over each turn. `turns` has the number of the turn of each value."""
    sums = np.zeros((turns.max() + 1, *values.shape[1:]))
    # `sums[turns] += values` would add only one value to each turn.
    np.add.at(sums, turns, values)
    counts = np.bincount(turns)
    trailing = [1] * (values.ndim - 1)
    return sums / counts.reshape(-1, *trailing)


def part_returns(
    episodes: Episodes,
    parts: Float[np.ndarray, "rollouts tokens parts"],
    is_first_of_turn: Bool[np.ndarray, "rollouts tokens"],
    row_of_token: Int[np.ndarray, "rollouts tokens"],
) -> Float[np.ndarray, "turns parts"]:
    """Returns the return of every named reward of every turn.

    The return is NaN if the reward function does not apply to the turn itself. If it does not apply
    to a later turn, this turn adds 0 to the returns of earlier turns.
    """
    columns = []
    for part in np.moveaxis(parts, -1, 0):
        # NaN would spread to earlier turns, so it counts as 0 there and is set on its turn below.
        rewards = episodes._replace(rewards=np.nan_to_num(part, nan=0.0))
        returns = discounted_returns(rewards, gamma=1.0)[is_first_of_turn]
        returns[row_of_token[np.isnan(part)]] = np.nan
        columns.append(returns)
    return np.stack(columns, axis=-1)


def whitened(advantages: PerToken, mask: Bool[np.ndarray, "rollouts tokens"]) -> PerToken:
    """Returns the advantages with mean 0 and variance 1 over the mask, and 0 elsewhere."""
    sampled = advantages[mask]
    variance = sampled.var(ddof=1) if len(sampled) > 1 else 0.0
    # 1e-8 below the root, and G - 1 above, as in `masked_whiten` of TRL.
    return (advantages - sampled.mean()) / np.sqrt(variance + 1e-8) * mask


def needs_parts(algorithm: Algorithm) -> bool:
    """Returns whether the algorithm's advantage reads the named rewards instead of their sum."""
    return ADVANTAGES[type(algorithm.advantage)].needs_parts


def needs_critic(algorithm: Algorithm) -> bool:
    """Returns whether the algorithm's advantage reads values of a critic."""
    return ADVANTAGES[type(algorithm.advantage)].needs_critic
