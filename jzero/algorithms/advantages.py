"""Moved from jzero.algorithms."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jzero.algorithms.algorithm import Algorithm


class Episodes(NamedTuple):
    """Rewards of rollouts, left-aligned over their sampled tokens alone."""

    rewards: np.ndarray  # f64[N, T]
    values: np.ndarray  # f64[N, T] the critic's, of the state before each token; 0 without one
    mask: np.ndarray  # bool[N, T]
    group: np.ndarray  # i[N] rollouts of one prompt share a number from 0 on
    turn: np.ndarray | None = None  # i[N, T] the token's turn, from 0 on; None: they have but one
    discount: float = 1.0  # of a turn's reward, in the return of the turn before it

    @property
    def returns(self) -> np.ndarray:  # f64[N]
        return self.rewards.sum(axis=1)


def group_means(x: np.ndarray, group: np.ndarray) -> np.ndarray:
    """f64[N]: the mean over its group, for every rollout."""
    return (np.bincount(group, x) / np.bincount(group))[group]


def bessel(group: np.ndarray) -> np.ndarray:
    """f64[N]: G / (G - 1) for every rollout; 1 in a group of one."""
    sizes = np.bincount(group)[group]
    return sizes / np.maximum(sizes - 1, 1)


def uniform(scores: np.ndarray, group: np.ndarray) -> np.ndarray:
    """bool[N]: in a group without any difference in score; by equality, not by an epsilon."""
    first = scores[np.unique(group, return_index=True)[1]][group]
    return (np.bincount(group, scores != first) == 0)[group]


def group_mean(episodes: Episodes, algorithm: Algorithm) -> np.ndarray:
    """A = R - mean(R) (Dr. GRPO, arXiv:2503.20783 eq. 3). A group of equal returns gives exactly 0."""
    R, group = episodes.returns, episodes.group
    return np.where(uniform(R, group), 0.0, R - group_means(R, group))[:, None]


def group_mean_std(episodes: Episodes, algorithm: Algorithm) -> np.ndarray:
    """A = (R - mean(R)) / (std(R) + eps), std with G - 1 (GRPO, arXiv:2402.03300 §4.1.2)."""
    centred, group = group_mean(episodes, algorithm), episodes.group
    std = np.sqrt(group_means(centred[:, 0] ** 2, group) * bessel(group))
    return centred / (std + algorithm.std_eps)[:, None]


def gae(episodes: Episodes, algorithm: Algorithm) -> np.ndarray:
    """A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t; 0 after the end (arXiv:1506.02438). At
    the end of a turn that another follows, gamma is multiplied by their discount."""
    rewards, values = episodes.rewards, episodes.values * episodes.mask
    gamma = np.full(rewards.shape, algorithm.gamma)
    if episodes.turn is not None:
        gamma[:, :-1] *= np.where(np.diff(episodes.turn, axis=1), episodes.discount, 1.0)
    out = np.zeros_like(rewards)
    after_value = after = np.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma[:, t] * after_value - values[:, t]
        after = np.where(episodes.mask[:, t], delta + gamma[:, t] * algorithm.lam * after, 0.0)
        out[:, t], after_value = after, values[:, t]
    return out


def to_go(episodes: Episodes, gamma: float) -> np.ndarray:
    """G_t = r_t + gamma G_{t+1}, and the discount between turns: GAE without a critic."""
    return gae(episodes._replace(values=0 * episodes.values), Algorithm(gamma=gamma, lam=1.0))


def by_turn(episodes: Episodes) -> tuple[Episodes, np.ndarray]:
    """Turns as episodes of one token, of reward G_t = r_t + discount G_{t+1}; and i[N, T], which of those rows a token
    is of. Turns of one number of a prompt's rollouts are a group; alone one has an advantage of 0."""
    turn = np.asarray(episodes.turn)
    first = episodes.mask & (np.diff(turn, axis=1, prepend=-1) != 0)
    G = to_go(episodes, 1.0)[first][:, None]
    numbers = episodes.group[:, None] * (turn.max() + 1) + turn
    group = np.unique(numbers[first], return_inverse=True)[1]
    return Episodes(G, np.zeros_like(G), np.ones_like(G, bool), group), np.cumsum(first).reshape(
        first.shape
    ) - 1


class Advantage(NamedTuple):
    compute: Callable[
        [Episodes, Algorithm], np.ndarray
    ]  # f64[N, T], or [N, 1]: the same for every token of a turn
    group_min: int  # smallest group it is defined for
    critic: bool = False


ADVANTAGES = {
    "group_mean": Advantage(group_mean, 2),
    "group_mean_std": Advantage(group_mean_std, 2),
    # A = (R - mean of the group) / (std of the batch + eps) (arXiv:2508.08221; TRL's scale_rewards="batch")
    "group_mean_batch_std": Advantage(
        lambda e, a: group_mean(e, a) / (e.returns.std(ddof=1) + a.std_eps), 2
    ),
    # A = R - mean of the group's other R (RLOO, arXiv:2402.14740 eq. 8)
    "leave_one_out": Advantage(lambda e, a: group_mean(e, a) * bessel(e.group)[:, None], 2),
    # A_t = r_t + gamma A_{t+1} (REINFORCE++, arXiv:2501.03262; normalised by `whiten`)
    "return_to_go": Advantage(lambda e, a: to_go(e, a.gamma), 1),
    "gae": Advantage(gae, 1, critic=True),
}


def advantages(episodes: Episodes, algorithm: Algorithm) -> tuple[np.ndarray, np.ndarray]:
    """-> advantages f64[N, T], and what the critic should have said, A + V before whitening."""
    found = ADVANTAGES[algorithm.advantage]
    rows, row = (
        by_turn(episodes) if episodes.turn is not None and found.group_min > 1 else (episodes, None)
    )
    A = found.compute(rows, algorithm)
    A = (A if row is None else A[row, 0]) * episodes.mask
    targets = (A + episodes.values) * episodes.mask
    if algorithm.whiten:
        every = A[episodes.mask]
        variance = every.var(ddof=1) if len(every) > 1 else 0.0
        A = (A - every.mean()) / np.sqrt(variance + 1e-8) * episodes.mask
    return A, targets


def needs_critic(algorithm: Algorithm) -> bool:
    return ADVANTAGES[algorithm.advantage].critic
