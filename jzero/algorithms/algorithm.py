"""Algorithms are values: one loss, and presets that name an advantage, a weight, a ratio, a surrogate and a correction.

    loss = sum_t w_t [ c_t surrogate(rho_t, A_t) - entropy_coef H_t ] + v_t kl_coef KL_t
    rho_t = pi(a_t) / pi_old(a_t)    c_t = f(pi_old(a_t) / pi_sampler(a_t)), a constant

The sum is over the tokens that the policy sampled, of one optimizer step. Advantages A and weights w, v are made on the
host (float64) over the whole step. N rollouts, T tokens; in jit, packed rows [B, T]. See docs/algorithms.md."""

from dataclasses import dataclass


@dataclass
class Algorithm:
    """Numbers that are 0 and names that are "" are off."""

    name: str = "grpo"
    # score: what a rollout that was cut at max_new gets
    truncated: str = (
        "grade"  # its grade | fixed: truncated_score | mask: its grade, but it is not trained
    )
    truncated_score: float = 0.0
    truncated_penalty: float = 0.0  # subtracted from its score
    overlong_share: float = (
        0.0  # share of max_new, at its end, over which the score falls by up to 1 (DAPO eq. 13)
    )
    dynamic_sampling_rounds: int = (
        0  # times that groups without any difference in score are replaced by new problems
    )
    kl_reward: float = 0.0  # k1 to the reference policy, subtracted from the reward of every token
    # advantage
    advantage: str = "group_mean_std"  # key of ADVANTAGES
    std_eps: float = 1e-6  # added to the standard deviation
    gamma: float = 1.0  # discount of a token's reward, for return_to_go and gae
    lam: float = 1.0  # of gae
    whiten: bool = False  # then to mean 0 and variance 1 over all tokens of the rollouts
    # weight
    weight: str = "sequence_mean"  # key of WEIGHTS
    length_norm: int = 0  # L_max of the constant weight; 0 = rollout.max_new_tokens, of every turn
    # ratio, surrogate, correction
    old_policy: str = "trainer"  # pi_old: trainer (recomputed before the first optimizer step) | sampler (as it was sampled)
    ratio: str = "token"  # key of RATIOS
    surrogate: str = "clip"  # key of SURROGATES
    clip_low: float = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    dual_clip: float = 0.0  # bound of the ratio where the advantage is negative
    correction: str = ""  # key of CORRECTIONS | none; "" = none, but token_truncate where rollout.max_staleness > 0
    correction_low: float = 0.0
    correction_high: float = 2.0
    # regularisation
    kl_coef: float = 0.0  # KL to the reference policy, in the loss
    kl_estimator: str = "k3"  # key of KLS
    kl_max: float = 0.0  # bound of a token's KL
    kl_weight: str = ""  # key of WEIGHTS; "" = weight
    reference_every: int = (
        0  # RL steps after which the policy becomes the reference; 0 = it stays the first
    )
    entropy_coef: float = 0.0
    # critic, of an advantage that needs one
    value_clip: float = 0.2
    value_coef: float = 1.0


def shaped(score: float, length: int, cut: bool, algorithm: Algorithm, max_new: int) -> float:
    """The score of a rollout of `length` sampled tokens, `cut` at max_new or not."""
    score = algorithm.truncated_score if cut and algorithm.truncated == "fixed" else score
    score -= algorithm.truncated_penalty * cut
    if algorithm.overlong_share:
        last = algorithm.overlong_share * max_new
        score -= min(1.0, max(0.0, (length - max_new + last) / last))
    return score


def needs_reference(algorithm: Algorithm) -> bool:
    return bool(algorithm.kl_coef or algorithm.kl_reward)
