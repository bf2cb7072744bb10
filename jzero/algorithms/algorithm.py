"""The settings of an algorithm, and the score that a rollout gets from its grade."""

from dataclasses import dataclass

from jzero.setting import setting


@dataclass
class Algorithm:
    """The names of an algorithm's parts, and their numbers. The defaults are GRPO's.

    A number that is 0 and a name that is "" turn their part off.
    """

    name: str = setting("grpo", "Name of the algorithm, for the log.")

    # The score. A response is truncated when it reaches max_new_tokens without an end.
    truncated: str = setting(
        "grade",
        "Score of a truncated response: its grade, or truncated_score (fixed). With mask the "
        "response keeps its grade, and counts in its group, but is not trained on. With ignore it "
        "scores truncated_score, counts in its group, and is not trained on (oat's ignore_no_eos).",
        choices=("grade", "fixed", "mask", "ignore"),
    )
    truncated_score: float = setting(
        0.0, "Score of a truncated response if truncated is fixed or ignore.", at_least=None
    )
    truncated_penalty: float = setting(
        0.0, "Subtracted from the score of a truncated response.", at_least=None
    )
    overlong_share: float = setting(
        0.0,
        "Share of max_new_tokens, at its end, over which the score falls by up to 1 (DAPO eq. 13).",
    )
    dynamic_sampling_rounds: int = setting(
        0, "How often groups whose scores are all equal are replaced by new problems."
    )
    kl_reward: float = setting(
        0.0, "Factor of the KL to the reference policy (k1) in the reward of every token."
    )

    # The advantage.
    advantage: str = setting("group_mean_std", "Advantage.")
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
        "as they were sampled (sampler).",
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
        0.0, "Bound of the ratio where the advantage is negative, for the surrogate clip."
    )
    correction: str = setting(
        "",
        "Correction for the gap between sampler and trainer. Empty: token_truncate if "
        "rollout.max_staleness is above 0 and old_policy=trainer, else none.",
        choices=("", "none"),
    )
    correction_low: float = setting(0.0, "Lower bound of the correction's ratio.")
    correction_high: float = setting(2.0, "Upper bound of the correction's ratio.")

    # Regularization.
    kl_coef: float = setting(0.0, "Factor of the KL to the reference policy in the loss.")
    kl_estimator: str = setting("k3", "Estimator of the KL in the loss.")
    kl_max: float = setting(0.0, "Bound of a token's KL in the loss. 0: no bound.")
    kl_weight: str = setting("", "Weight of a token's KL. Empty: that of its loss.", choices=("",))
    reference_every: int = setting(
        0, "RL steps after which the policy becomes the reference. 0: the first policy stays it."
    )
    entropy_coef: float = setting(0.0, "Factor of the entropy bonus.", at_least=None)
    ratio_penalty: float = setting(
        0.0, "Factor of the squared logarithm of a token's ratio in the loss."
    )
    environment_coef: float = setting(
        0.0,
        "Factor of the cross-entropy on the tokens of the environment's replies, as a mean over "
        "these tokens (rollout.max_turns above 1).",
    )

    # The parts of the loss beside the KL: the surrogate and the cross-entropy.
    rl_coef: float = setting(
        1.0, "Factor of the surrogate in the loss. 0: the loss has no policy gradient."
    )
    ce_coef: float = setting(
        0.0, "Factor of the cross-entropy -log pi of the trained tokens in the loss."
    )
    ce_weight: str = setting(
        "", "Weight of a token's cross-entropy. Empty: that of its loss.", choices=("",)
    )
    ce_tokens: str = setting(
        "trained",
        "Tokens of the cross-entropy: all trained ones, or those of correct responses alone "
        "(VAPO's loss on positive examples).",
        choices=("trained", "correct"),
    )

    # The teacher of on-policy distillation, which the section teacher of the config names.
    teacher_coef: float = setting(
        0.0,
        "Factor of log pi_teacher - log pi_old of a token in the token's advantage (on-policy "
        "distillation).",
    )
    teacher_max: float = setting(
        0.0, "Most that the teacher may add to or take from an advantage. 0: no bound."
    )

    # The critic, for an advantage that needs one.
    value_clip: float = setting(
        0.2, "Most that a value may move from the old one before its loss is clipped. 0: off."
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
