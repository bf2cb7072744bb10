"""Algorithms are values: one loss, and presets that name an advantage, a weight, a ratio, a surrogate and a correction.

    loss = sum_t w_t [ c_t surrogate(rho_t, A_t) - entropy_coef H_t ] + v_t kl_coef KL_t
    rho_t = pi(a_t) / pi_old(a_t)    c_t = f(pi_old(a_t) / pi_sampler(a_t)), a constant

The sum is over the tokens that the policy sampled, of one optimizer step. Advantages A and weights w, v are made on the
host (float64) over the whole step. N rollouts, T tokens; in jit, packed rows [B, T]. See docs/algorithms.md."""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LOG_RATIO = 20.0  # log-ratios are clamped to this, so that exp stays finite


@dataclass
class Algorithm:
    """Numbers that are 0 and names that are "" are off."""

    name: str = "grpo"
    # score: what a rollout that was cut at max_new gets
    truncated: str = "grade"  # its grade | fixed: truncated_score | mask: its grade, but it is not trained
    truncated_score: float = 0.0
    truncated_penalty: float = 0.0  # subtracted from its score
    overlong: float = 0.0  # share of max_new, at its end, over which the score falls by up to 1 (DAPO eq. 13)
    dynamic_rounds: int = 0  # times that groups without any difference in score are replaced by new problems
    kl_reward: float = 0.0  # k1 to the reference policy, subtracted from the reward of every token
    # advantage
    advantage: str = "group_mean_std"  # key of ADVANTAGES
    std_eps: float = 1e-6  # added to the standard deviation
    gamma: float = 1.0  # discount of a token's reward, for return_to_go and gae
    lam: float = 1.0  # of gae
    whiten: bool = False  # then to mean 0 and variance 1 over all tokens of the rollouts
    # weight
    weight: str = "sequence_mean"  # key of WEIGHTS
    length_norm: int = 0  # L_max of the constant weight; 0 = rollout.max_new, of every turn
    # ratio, surrogate, correction
    old: str = "trainer"  # pi_old: trainer (recomputed before the first optimizer step) | sampler (as it was sampled)
    ratio: str = "token"  # key of RATIOS
    surrogate: str = "clip"  # key of SURROGATES
    clip_low: float = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    dual_clip: float = 0.0  # bound of the ratio where the advantage is negative
    correction: str = ""  # key of CORRECTIONS | none; "" = none, but token_truncate where rollout.eta > 0
    correction_low: float = 0.0
    correction_high: float = 2.0
    # regularisation
    kl_coef: float = 0.0  # KL to the reference policy, in the loss
    kl: str = "k3"  # key of KLS
    kl_max: float = 0.0  # bound of a token's KL
    kl_weight: str = ""  # key of WEIGHTS; "" = weight
    reference_every: int = 0  # RL steps after which the policy becomes the reference; 0 = it stays the first
    entropy_coef: float = 0.0
    # critic, of an advantage that needs one
    value_clip: float = 0.2
    value_coef: float = 1.0


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


def shaped(score: float, length: int, cut: bool, algorithm: Algorithm, max_new: int) -> float:
    """The score of a rollout of `length` sampled tokens, `cut` at max_new or not."""
    score = algorithm.truncated_score if cut and algorithm.truncated == "fixed" else score
    score -= algorithm.truncated_penalty * cut
    if algorithm.overlong:
        last = algorithm.overlong * max_new
        score -= min(1.0, max(0.0, (length - max_new + last) / last))
    return score


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
    return Episodes(G, np.zeros_like(G), np.ones_like(G, bool), group), np.cumsum(first).reshape(first.shape) - 1


class Advantage(NamedTuple):
    compute: Callable[[Episodes, Algorithm], np.ndarray]  # f64[N, T], or [N, 1]: the same for every token of a turn
    group_min: int  # smallest group it is defined for
    critic: bool = False


ADVANTAGES = {
    "group_mean": Advantage(group_mean, 2),
    "group_mean_std": Advantage(group_mean_std, 2),
    # A = (R - mean of the group) / (std of the batch + eps) (arXiv:2508.08221; TRL's scale_rewards="batch")
    "group_mean_batch_std": Advantage(lambda e, a: group_mean(e, a) / (e.returns.std(ddof=1) + a.std_eps), 2),
    # A = R - mean of the group's other R (RLOO, arXiv:2402.14740 eq. 8)
    "leave_one_out": Advantage(lambda e, a: group_mean(e, a) * bessel(e.group)[:, None], 2),
    # A_t = r_t + gamma A_{t+1} (REINFORCE++, arXiv:2501.03262; normalised by `whiten`)
    "return_to_go": Advantage(lambda e, a: to_go(e, a.gamma), 1),
    "gae": Advantage(gae, 1, critic=True),
}


def advantages(episodes: Episodes, algorithm: Algorithm) -> tuple[np.ndarray, np.ndarray]:
    """-> advantages f64[N, T], and what the critic should have said, A + V before whitening."""
    found = ADVANTAGES[algorithm.advantage]
    rows, row = by_turn(episodes) if episodes.turn is not None and found.group_min > 1 else (episodes, None)
    A = found.compute(rows, algorithm)
    A = (A if row is None else A[row, 0]) * episodes.mask
    targets = (A + episodes.values) * episodes.mask
    if algorithm.whiten:
        every = A[episodes.mask]
        variance = every.var(ddof=1) if len(every) > 1 else 0.0
        A = (A - every.mean()) / np.sqrt(variance + 1e-8) * episodes.mask
    return A, targets


# (n: tokens of each rollout of this optimizer step, f64[n]; N: of all rollouts, f64[N]; L_max) -> of each of its
# tokens, f64[n] or one number. A rollout that is not trained has 0 tokens and still counts among the n.

WEIGHTS: dict[str, Callable[[np.ndarray, np.ndarray, int], Any]] = {
    # 1 / (n |o|): the mean over rollouts of their token means (GRPO eq. 3)
    "sequence_mean": lambda n, N, longest: 1.0 / (len(n) * np.maximum(n, 1.0)),
    # 1 / n: the mean over rollouts of their token sums (REINFORCE; oat in March 2025)
    "sequence_sum": lambda n, N, longest: 1.0 / len(n),
    # 1 / sum |o|: the mean over all tokens of the optimizer step (DAPO, arXiv:2503.14476 eq. 8)
    "token_mean": lambda n, N, longest: 1.0 / max(n.sum(), 1.0),
    # 1 / sum |o| over the rollouts of all optimizer steps of the RL step (dapo in TRL 1.10)
    "batch_token_mean": lambda n, N, longest: 1.0 / max(N.sum(), 1.0),
    # 1 / (n L_max), L_max the configured response length (Dr. GRPO, appendix A)
    "constant": lambda n, N, longest: 1.0 / (len(n) * longest),
}


Total = Callable[[jax.Array], jax.Array]  # the sum over the trained tokens of each token's own sequence


def bounded_exp(log_ratio: jax.Array) -> jax.Array:
    return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO, LOG_RATIO))


def sequence_ratio(log_ratio: jax.Array, total: Total) -> jax.Array:
    """The geometric mean of a sequence's token ratios, for each of its tokens (GSPO, arXiv:2507.18071 eq. 7)."""
    return bounded_exp(total(log_ratio) / jnp.maximum(total(jnp.ones_like(log_ratio)), 1.0))


RATIOS = {"token": lambda log_ratio, total: bounded_exp(log_ratio), "sequence": sequence_ratio}


def clip(logps: jax.Array, ratio: jax.Array, A: jax.Array, algorithm: Algorithm) -> tuple[jax.Array, jax.Array]:
    """PPO's -min(rho A, clip(rho) A) (arXiv:1707.06347 eq. 7), with dual clip -max(., c A) where A < 0
    (arXiv:1912.09729 eq. 5); and where the gradient is cut."""
    clipped = jnp.clip(ratio, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
    gain, cut = jnp.minimum(ratio * A, clipped * A), clipped * A < ratio * A
    if algorithm.dual_clip:
        bound = jnp.where(A < 0, algorithm.dual_clip * A, -jnp.inf)
        gain, cut = jnp.maximum(gain, bound), cut | (gain < bound)
    return -gain, cut


def reinforce(logps: jax.Array, ratio: jax.Array, A: jax.Array, algorithm: Algorithm) -> tuple[jax.Array, jax.Array]:
    """-A log pi, no ratio (Williams 1992)."""
    return -A * logps, jnp.zeros(ratio.shape, bool)


def cispo(logps: jax.Array, ratio: jax.Array, A: jax.Array, algorithm: Algorithm) -> tuple[jax.Array, jax.Array]:
    """-stop_gradient(clip(rho)) A log pi (MiniMax-M1, arXiv:2506.13585 eq. 4): no token loses its gradient."""
    clipped = jnp.clip(ratio, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
    return -jax.lax.stop_gradient(clipped) * A * logps, clipped != ratio


SURROGATES = {"clip": clip, "reinforce": reinforce, "cispo": cispo}


# Corrections for sampler and trainer disagreeing: d = log pi_old - log pi_sampler -> c. Low and high bound the ratio.
# 0 drops a token; the weights' denominators stay as they are.


def within(ratio: jax.Array, algorithm: Algorithm) -> jax.Array:
    """The ratio where it is in [low, high], else 0."""
    return jnp.where((ratio >= algorithm.correction_low) & (ratio <= algorithm.correction_high), ratio, 0.0)


CORRECTIONS: dict[str, Callable[[jax.Array, Total, Algorithm], jax.Array]] = {
    # min(exp(d), high): truncated importance sampling (TIS, Yao et al. 2025)
    "token_truncate": lambda d, total, a: jnp.minimum(bounded_exp(d), a.correction_high),
    # exp(d) within [low, high], else 0 (masked importance sampling; AReaL, arXiv:2505.24298)
    "token_mask": lambda d, total, a: within(bounded_exp(d), a),
    # of prod exp(d) of the sequence, for each of its tokens; the mask is TRL's default
    "sequence_truncate": lambda d, total, a: jnp.minimum(bounded_exp(total(d)), a.correction_high),
    "sequence_mask": lambda d, total, a: within(bounded_exp(total(d)), a),
    # 1 for sequences whose geometric mean of exp(d) is within [low, high], else 0
    "geometric": lambda d, total, a: jnp.sign(within(sequence_ratio(d, total), a)),
}


def k3(logps: jax.Array, ref_logps: jax.Array) -> jax.Array:
    """exp(d) - d - 1 with d = log ref - log pi (Schulman 2020; GRPO eq. 4); d is clamped so that exp stays finite."""
    d = jnp.clip(ref_logps - logps, -40.0, 40.0)
    return jnp.expm1(d) - d


# The gradient of k2 is the KL's (Schulman 2020).
KLS = {"k2": lambda logps, ref_logps: 0.5 * (logps - ref_logps) ** 2, "k3": k3}


def policy_loss(logps, entropy, batch: Any, total: Total, algorithm: Algorithm) -> tuple[jax.Array, dict[str, Any]]:
    """Every token's weighted term, and its diagnostics. batch: types.Batch [B, T], with ref_logps where a KL is on."""
    ratio = RATIOS[algorithm.ratio](logps - batch.old_logps, total)
    term, clipped = SURROGATES[algorithm.surrogate](logps, ratio, batch.advantages, algorithm)
    stats = {"clip_fraction": clipped.astype(jnp.float32), "ratio_shift": jnp.abs(ratio - 1)}
    if algorithm.correction:
        d = jax.lax.stop_gradient(batch.old_logps - batch.sampler_logps)
        stats["correction"] = CORRECTIONS[algorithm.correction](d, total, algorithm)
        term = stats["correction"] * term
    if algorithm.entropy_coef:
        term = term - algorithm.entropy_coef * entropy
    loss = batch.weights * term
    if algorithm.kl_coef:
        kl = KLS[algorithm.kl](logps, batch.ref_logps)
        kl = jnp.minimum(kl, algorithm.kl_max) if algorithm.kl_max else kl
        weights = batch.weights if batch.kl_weights is None else batch.kl_weights
        loss, stats["kl"] = loss + algorithm.kl_coef * weights * kl, kl
    return loss, stats


def value_loss(values, batch: Any, algorithm: Algorithm) -> tuple[jax.Array, dict[str, Any]]:
    """1/2 max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2) (PPO's reference code; R is the target)."""
    moved = jnp.clip(values - batch.old_values, -algorithm.value_clip, algorithm.value_clip)
    clipped = batch.old_values + moved if algorithm.value_clip else values
    free, bound = (values - batch.returns) ** 2, (clipped - batch.returns) ** 2
    loss = 0.5 * algorithm.value_coef * batch.weights * jnp.maximum(free, bound)
    return loss, {"value_loss": 0.5 * free, "value_clip_fraction": (bound > free).astype(jnp.float32)}


CHOICES = {  # field of Algorithm -> what it may be
    "truncated": ("grade", "fixed", "mask"),
    "advantage": tuple(ADVANTAGES),
    "weight": tuple(WEIGHTS),
    "old": ("trainer", "sampler"),
    "ratio": tuple(RATIOS),
    "surrogate": tuple(SURROGATES),
    "correction": ("", "none", *CORRECTIONS),
    "kl": tuple(KLS),
    "kl_weight": ("", *WEIGHTS),
}


def resolved(algorithm: Algorithm, eta: int) -> Algorithm:
    """With eta > 0 decoupled PPO (arXiv:2505.24298 eq. 5), unless a correction is named."""
    name = algorithm.correction or ("token_truncate" if eta and algorithm.old == "trainer" else "none")
    return replace(algorithm, correction="" if name == "none" else name)


def needs_reference(algorithm: Algorithm) -> bool:
    return bool(algorithm.kl_coef or algorithm.kl_reward)


def needs_critic(algorithm: Algorithm) -> bool:
    return ADVANTAGES[algorithm.advantage].critic


PRESETS: dict[str, Callable[..., Algorithm]] = {
    name: partial(Algorithm, name=name, **values)
    for name, values in tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8")).items()
}
grpo, dr_grpo = PRESETS["grpo"], PRESETS["dr_grpo"]
