"""The settings of an algorithm, and the shaping of a response's score."""

from dataclasses import dataclass, replace

from jzero.setting import setting


@dataclass
class Algorithm:
    """The names and coefficients of an algorithm's parts. The defaults are GRPO.

    A number of 0 or a name of "" disables its part.
    """

    name: str = setting("grpo", "Name of the algorithm in logs.")

    # The score. A response is truncated if it reaches max_new_tokens without an end of sequence.
    truncated: str = setting(
        "grade",
        "Score of a truncated response. grade: its grade. fixed: truncated_score. mask: its "
        "grade; the response counts in its group, but is not trained. ignore: truncated_score; "
        "the response counts in its group, but is not trained (oat's ignore_no_eos).",
        choices=("grade", "fixed", "mask", "ignore"),
    )
    truncated_score: float = setting(
        0.0, "Score of a truncated response if truncated is fixed or ignore.", at_least=None
    )
    truncated_penalty: float = setting(
        0.0, "Subtracted from the score of a truncated response. 0: no penalty.", at_least=None
    )
    overlong_share: float = setting(
        0.0,
        "Last share of max_new_tokens in which the score decreases linearly by up to 1 (DAPO "
        "eq. 13). 0: no penalty.",
    )
    dynamic_sampling_rounds: int = setting(
        0,
        "Maximum rounds in which groups with equal scores are replaced by groups of new "
        "problems. 0: no dynamic sampling.",
        at_most=1000,
    )
    kl_reward: float = setting(
        0.0, "Factor of the KL to the reference policy (k1) in the reward of every token. 0: no KL."
    )

    # The advantage.
    advantage: str = setting("group_mean_std", "Advantage estimator.")
    std_eps: float = setting(1e-6, "Added to the standard deviation that an advantage divides by.")
    gamma: float = setting(1.0, "Discount from token to token in return_to_go and gae.", at_most=1)
    lam: float = setting(1.0, "Lambda of gae.", at_most=1)
    whiten: bool = setting(
        False, "Scales advantages to mean 0 and variance 1 over all sampled tokens."
    )

    # The weight.
    weight: str = setting("sequence_mean", "Weight of a token in the loss.")
    length_norm: int = setting(
        0, "L_max of the weight constant. 0: rollout.max_new_tokens of every turn."
    )

    # Ratio, surrogate and correction.
    old_policy: str = setting(
        "trainer",
        "Log-probs of the old policy: recomputed before the first optimizer step (trainer), or "
        "the sampler's log-probs (sampler).",
        choices=("trainer", "sampler"),
    )
    ratio: str = setting("token", "Ratio of the policy to the old policy.")
    surrogate: str = setting("clip", "Surrogate objective.")
    clip_low: float = setting(
        0.2,
        "The ratio is clipped at 1 - clip_low from below. For dppo_tv, dppo_kl and ipo: the "
        "largest divergence of a token whose probability fell.",
    )
    clip_high: float = setting(
        0.2,
        "The ratio is clipped at 1 + clip_high from above. For dppo_tv, dppo_kl and ipo: the "
        "largest divergence of a token whose probability rose.",
    )
    dual_clip: float = setting(
        0.0,
        "For the surrogate clip: bound of the ratio at negative advantages (dual-clip PPO). 0: "
        "no bound.",
    )
    sapo_tau_positive: float = setting(
        1.0,
        "For the surrogate sapo: tau of its gate where the advantage is positive.",
        at_least=0.01,
        at_most=100,
    )
    sapo_tau_negative: float = setting(
        1.05,
        "For the surrogate sapo: tau of its gate where the advantage is not positive.",
        at_least=0.01,
        at_most=100,
    )
    # With these bounds vespo's weight is finite for every ratio.
    vespo_k_positive: float = setting(
        2.0,
        "For the surrogate vespo: power of the ratio where the advantage is not negative.",
        at_most=10,
    )
    vespo_lambda_positive: float = setting(
        3.0,
        "For the surrogate vespo: rate of the exponential where the advantage is not negative.",
        at_least=0.1,
        at_most=50,
    )
    vespo_k_negative: float = setting(
        3.0,
        "For the surrogate vespo: power of the ratio where the advantage is negative.",
        at_most=10,
    )
    vespo_lambda_negative: float = setting(
        2.0,
        "For the surrogate vespo: rate of the exponential where the advantage is negative.",
        at_least=0.1,
        at_most=50,
    )
    off_policy_bound: float = setting(
        0.0,
        "Sequences with a negative advantage have no policy gradient if the mean of "
        "log pi_sampler - log pi over their tokens is above this bound. 0: no bound.",
    )
    top_entropy: float = setting(
        1.0,
        "Share of an optimizer step's trained tokens that have a policy gradient, by highest "
        "entropy. 1: all.",
        above=0,
        at_most=1,
    )
    correction: str = setting(
        "",
        "Correction for the gap between sampler and trainer. none: no correction. Empty: "
        "token_truncate if rollout.max_staleness is above 0 and old_policy=trainer, else none.",
        choices=("", "none"),
    )
    correction_low: float = setting(0.0, "Lower bound of the correction's ratio.")
    correction_high: float = setting(2.0, "Upper bound of the correction's ratio.")

    # Regularization.
    kl_coef: float = setting(0.0, "Factor of the KL to the reference policy in the loss. 0: no KL.")
    kl_estimator: str = setting("k3", "Estimator of the KL in the loss.")
    kl_max: float = setting(0.0, "Bound of a token's KL in the loss. 0: no bound.")
    kl_weight: str = setting("", "Weight of a token's KL. Empty: as weight.", choices=("",))
    reference_every: int = setting(
        0, "RL steps after which the policy becomes the reference. 0: always the first policy."
    )
    entropy_coef: float = setting(0.0, "Factor of the entropy bonus. 0: no bonus.", at_least=None)
    ratio_penalty: float = setting(
        0.0, "Factor of the squared logarithm of a token's ratio in the loss. 0: no penalty."
    )
    environment_coef: float = setting(
        0.0,
        "Factor of the cross-entropy on the tokens of the environment's replies, as a mean over "
        "these tokens (rollout.max_turns above 1). 0: replies are not trained.",
    )

    # The other terms of the loss: the surrogate and the cross-entropy.
    rl_coef: float = setting(
        1.0, "Factor of the surrogate in the loss. 0: the loss has no policy gradient."
    )
    ce_coef: float = setting(
        0.0,
        "Factor of the cross-entropy -log pi of the trained tokens in the loss. 0: no "
        "cross-entropy.",
    )
    ce_weight: str = setting(
        "", "Weight of a token's cross-entropy. Empty: as weight.", choices=("",)
    )
    ce_tokens: str = setting(
        "trained",
        "Tokens of the cross-entropy: all trained tokens, or only the tokens of correct responses "
        "(VAPO's loss on positive examples).",
        choices=("trained", "correct"),
    )

    # On-policy distillation from the teacher in the config's section teacher.
    teacher_coef: float = setting(
        0.0,
        "Factor of log pi_teacher - log pi_old of a token in the token's advantage (on-policy "
        "distillation). 0: no teacher.",
    )
    teacher_max: float = setting(
        0.0, "Bound of the absolute value of the teacher's term in an advantage. 0: no bound."
    )

    # The critic, for an advantage that needs one.
    value_clip: float = setting(
        0.2, "Maximum change of a value before its loss is clipped. 0: no clipping."
    )
    value_coef: float = setting(1.0, "Factor of the value loss.")


def shape_score(
    score: float,
    length: int,
    is_truncated: bool,
    algorithm: Algorithm,
    max_new_tokens: int,
) -> float:
    """Returns the score of a response after the algorithm's length and truncation penalties.

    `score` is the grader's, `length` counts the sampled tokens. The overlong penalty falls linearly
    from 0 to -1 over the last `overlong_share` of `max_new_tokens` (DAPO, arXiv:2503.14476 eq. 13).
    """
    # "grade" and "mask" keep the grade.
    if is_truncated and algorithm.truncated in ("fixed", "ignore"):
        score = algorithm.truncated_score
    if is_truncated:
        score -= algorithm.truncated_penalty
    if algorithm.overlong_share:
        buffer = algorithm.overlong_share * max_new_tokens
        excess = length - max_new_tokens + buffer
        score -= min(1.0, max(0.0, excess / buffer))
    return score


def needs_reference(algorithm: Algorithm) -> bool:
    """Returns whether the algorithm compares the policy with a reference policy."""
    return bool(algorithm.kl_coef or algorithm.kl_reward)


def resolve_correction(algorithm: Algorithm, max_staleness: int) -> Algorithm:
    """Returns the algorithm with the correction that it has in a run, "" for none.

    A run whose rollouts may be stale is decoupled PPO (AReaL, arXiv:2505.24298 eq. 5) unless it
    names a correction or uses the sampler's log-probs as the old policy's.
    """
    if algorithm.correction == "none":
        return replace(algorithm, correction="")
    if not algorithm.correction and max_staleness and algorithm.old_policy == "trainer":
        return replace(algorithm, correction="token_truncate")
    return replace(algorithm)
