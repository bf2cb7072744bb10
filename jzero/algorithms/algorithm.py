"""The description of an algorithm, names and numbers only, and the shaping of a response's score.

An `Algorithm` has a value for each of its parts, such as `surrogate=Clip(high=0.28)`. A part is a
frozen dataclass with the numbers that only it reads, so that a wrong combination cannot be written
(`jzero.setting`). The functions that compute the parts are in the tables of the other modules.
"""

from dataclasses import dataclass, replace

from jzero.setting import setting

# -- The score of a truncated response -------------------------------------------------------------


@dataclass(frozen=True)
class Grade:
    """A truncated response has its grade."""


@dataclass(frozen=True)
class Fixed:
    """A truncated response has a fixed score."""

    score: float = setting(0.0, "Score of a truncated response.", at_least=None)


@dataclass(frozen=True)
class Mask:
    """A truncated response has its grade and counts in its group, but is not trained."""


@dataclass(frozen=True)
class Ignore:
    """A fixed score that counts in its group; the response is not trained (oat's ignore_no_eos)."""

    score: float = setting(0.0, "Score of a truncated response.", at_least=None)


# -- Advantages ------------------------------------------------------------------------------------

STD_EPS = "Added to the standard deviation that the advantage divides by."
GAMMA = "Discount from token to token."


@dataclass(frozen=True)
class GroupMean:
    """Reward minus the mean of its group (Dr. GRPO)."""


@dataclass(frozen=True)
class GroupMeanStd:
    """Reward minus the mean of its group, divided by the group's standard deviation (GRPO)."""

    eps: float = setting(1e-6, STD_EPS)


@dataclass(frozen=True)
class GroupMeanBatchStd:
    """Reward minus the mean of its group, divided by the standard deviation of the step."""

    eps: float = setting(1e-6, STD_EPS)


@dataclass(frozen=True)
class GroupMeanOverMean:
    """Reward minus the mean of its group, divided by this mean (MaxRL)."""


@dataclass(frozen=True)
class EachGroupMeanStd:
    """The sum of group_mean_std of each reward function, divided by its standard deviation."""

    eps: float = setting(1e-6, "Added to the standard deviations that the advantage divides by.")


@dataclass(frozen=True)
class LeaveOneOut:
    """Reward minus the mean of the other rewards of its group (RLOO)."""


@dataclass(frozen=True)
class ReturnToGo:
    """The discounted sum of a token's and all later rewards (REINFORCE++)."""

    gamma: float = setting(1.0, GAMMA, at_most=1)


@dataclass(frozen=True)
class GAE:
    """Generalized advantage estimates, with a critic (PPO)."""

    gamma: float = setting(1.0, GAMMA, at_most=1)
    lam: float = setting(1.0, "Lambda of the estimates.", at_most=1)
    value_clip: float = setting(
        0.2, "Maximum change of a value before the critic's loss is clipped. 0: no clipping."
    )
    value_coef: float = setting(1.0, "Factor of the critic's loss.")


@dataclass(frozen=True)
class Zero:
    """0: rewards have no effect, and the teacher's term is the whole advantage."""


# -- Weights of a token in the loss ----------------------------------------------------------------


@dataclass(frozen=True)
class SequenceMean:
    """The mean over responses of their token means (GRPO)."""


@dataclass(frozen=True)
class SequenceSum:
    """The mean over responses of their token sums (REINFORCE)."""


@dataclass(frozen=True)
class TokenMean:
    """The mean over all tokens of the optimizer step (DAPO)."""


@dataclass(frozen=True)
class BatchTokenMean:
    """A sum over tokens, divided by the mean number of tokens of the RL step's optimizer steps."""


@dataclass(frozen=True)
class Constant:
    """A sum over tokens, divided by the number of responses and by a constant length (Dr. GRPO)."""

    length: int = setting(0, "The constant length. 0: rollout.max_new_tokens of every turn.")


Weight = SequenceMean | SequenceSum | TokenMean | BatchTokenMean | Constant

# -- Surrogates ------------------------------------------------------------------------------------

CLIP_LOW = "The ratio is clipped at 1 - low from below."
CLIP_HIGH = "The ratio is clipped at 1 + high from above."
MASK_LOW = "Largest divergence of a token whose probability fell."
MASK_HIGH = "Largest divergence of a token whose probability rose."
TAU_POSITIVE = "Tau of the gate where the advantage is positive."
TAU_NEGATIVE = "Tau of the gate where the advantage is not positive."


@dataclass(frozen=True)
class Clip:
    """The clipped ratio of PPO."""

    # The bound of PPO's paper.
    low: float = setting(0.2, CLIP_LOW)
    high: float = setting(0.2, CLIP_HIGH)
    dual: float = setting(
        0.0,
        "Bound of the ratio at negative advantages (dual-clip PPO), above 1 + high. 0: no bound.",
    )


@dataclass(frozen=True)
class Reinforce:
    """The log-probability, without a ratio."""


@dataclass(frozen=True)
class CISPO:
    """The clipped ratio as a constant weight of the log-probability (MiniMax-M1)."""

    low: float = setting(1.0, f"{CLIP_LOW} 1: no lower bound.")
    high: float = setting(4.0, CLIP_HIGH)


@dataclass(frozen=True)
class DppoTV:
    """The ratio, masked by the total variation of the token's probability (DPPO)."""

    low: float = setting(0.2, MASK_LOW)
    high: float = setting(0.2, MASK_HIGH)


@dataclass(frozen=True)
class DppoKL:
    """The ratio, masked by the KL divergence of the token's probability (DPPO)."""

    low: float = setting(0.05, MASK_LOW)
    high: float = setting(0.05, MASK_HIGH)


@dataclass(frozen=True)
class IPO:
    """The ratio, masked by the change of the token's probability in both directions (prime-rl)."""

    low: float = setting(0.1, MASK_LOW)
    high: float = setting(0.1, MASK_HIGH)


@dataclass(frozen=True)
class SAPO:
    """A soft gate of the ratio instead of a clip."""

    # The numbers of the paper. Its gate closes faster for negative advantages, because their
    # gradient raises the logits of all other tokens.
    tau_positive: float = setting(1.0, TAU_POSITIVE, at_least=0.01, at_most=100)
    tau_negative: float = setting(1.05, TAU_NEGATIVE, at_least=0.01, at_most=100)


@dataclass(frozen=True)
class VESPO:
    """A smooth weight of the log-probability, rho^k exp(lambda (1 - rho))."""

    # With these bounds the weight is finite for every ratio.
    k_positive: float = setting(2.0, "k where the advantage is not negative.", at_most=10)
    lambda_positive: float = setting(
        3.0, "Lambda where the advantage is not negative.", at_least=0.1, at_most=50
    )
    k_negative: float = setting(3.0, "k where the advantage is negative.", at_most=10)
    lambda_negative: float = setting(
        2.0, "Lambda where the advantage is negative.", at_least=0.1, at_most=50
    )


# -- Corrections for the gap between sampler and trainer -------------------------------------------

CORRECTION_LOW = "Tokens with a smaller ratio are dropped."
CORRECTION_HIGH = "Tokens with a larger ratio are dropped."


@dataclass(frozen=True)
class Auto:
    """token_truncate with old_policy=trainer and staleness in rollout.placement, else none."""

    high: float = setting(2.0, "Upper bound of the ratio.")


@dataclass(frozen=True)
class TokenTruncate:
    """The token's ratio of trainer and sampler, truncated (TIS)."""

    high: float = setting(2.0, "Upper bound of the ratio.")


@dataclass(frozen=True)
class TokenMask:
    """The token's ratio, and 0 outside of its bounds (AReaL, IcePop)."""

    low: float = setting(0.0, CORRECTION_LOW)
    high: float = setting(2.0, CORRECTION_HIGH)


@dataclass(frozen=True)
class SequenceTruncate:
    """The product of the ratios of a sequence, truncated."""

    high: float = setting(2.0, "Upper bound of the ratio.")


@dataclass(frozen=True)
class SequenceMask:
    """The product of the ratios of a sequence, and 0 outside of its bounds (TRL)."""

    low: float = setting(0.0, CORRECTION_LOW)
    high: float = setting(2.0, CORRECTION_HIGH)


@dataclass(frozen=True)
class Geometric:
    """1, and 0 if the geometric mean of the ratios of a sequence is outside of its bounds."""

    low: float = setting(0.999, CORRECTION_LOW)
    high: float = setting(1.001, CORRECTION_HIGH)


# -- Further terms of the loss ---------------------------------------------------------------------


@dataclass(frozen=True)
class KL:
    """The KL to the reference policy in the loss."""

    coef: float = setting(0.0, "Factor of the KL. 0: no KL.")
    estimator: str = setting("k3", "Estimator of the KL.", choices=("k2", "k3"))
    bound: float = setting(0.0, "Bound of a token's KL. 0: no bound.")
    weight: Weight | None = setting(None, "Weight of a token's KL. none: as algorithm.weight.")


@dataclass(frozen=True)
class CrossEntropy:
    """The cross-entropy -log pi of trained tokens in the loss."""

    coef: float = setting(0.0, "Factor of the cross-entropy. 0: no cross-entropy.")
    weight: Weight | None = setting(
        None, "Weight of a token's cross-entropy. none: as algorithm.weight."
    )
    tokens: str = setting(
        "trained",
        "Tokens of the cross-entropy: all trained tokens, or only the tokens of correct responses "
        "(VAPO's loss on positive examples).",
        choices=("trained", "correct"),
    )


@dataclass(frozen=True)
class Distillation:
    """On-policy distillation from the teacher in the config's section teacher."""

    coef: float = setting(
        0.0,
        "Factor of log pi_teacher - log pi_old of a token in the token's advantage. 0: no teacher.",
    )
    bound: float = setting(
        0.0, "Bound of the absolute value of the teacher's term in an advantage. 0: no bound."
    )


# -- The algorithm ---------------------------------------------------------------------------------


@dataclass
class Algorithm:
    """The parts of an algorithm, with their numbers. The defaults are GRPO.

    A number of 0 disables its term.
    """

    name: str = setting("grpo", "Name of the algorithm in logs.")

    # The score. A response is truncated if it reaches max_new_tokens without an end of sequence.
    truncated: Grade | Fixed | Mask | Ignore = setting(Grade(), "Treatment of truncated responses.")
    truncated_penalty: float = setting(
        0.0, "Subtracted from the score of a truncated response. 0: no penalty.", at_least=None
    )
    overlong_share: float = setting(
        0.0,
        "Last share of max_new_tokens in which the score decreases linearly by up to 1 (DAPO "
        "eq. 13). 0: no penalty.",
        at_most=1,
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

    # The advantage and the weight of a token.
    advantage: (
        GroupMean
        | GroupMeanStd
        | GroupMeanBatchStd
        | GroupMeanOverMean
        | EachGroupMeanStd
        | LeaveOneOut
        | ReturnToGo
        | GAE
        | Zero
    ) = setting(GroupMeanStd(), "Advantage estimator.")
    whiten: bool = setting(
        False, "Scales advantages to mean 0 and variance 1 over all sampled tokens."
    )
    weight: Weight = setting(SequenceMean(), "Weight of a token in the loss.")

    # Ratio, surrogate and correction.
    old_policy: str = setting(
        "trainer",
        "Log-probs of the old policy: recomputed before the first optimizer step (trainer), or "
        "the sampler's log-probs (sampler).",
        choices=("trainer", "sampler"),
    )
    ratio: str = setting(
        "token",
        "Ratio of the policy to the old policy: of a token, the geometric mean of its sequence, or "
        "the product.",
        choices=("token", "sequence", "product"),
    )
    surrogate: Clip | Reinforce | CISPO | DppoTV | DppoKL | IPO | SAPO | VESPO = setting(
        Clip(), "Surrogate objective."
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
    correction: (
        Auto | TokenTruncate | TokenMask | SequenceTruncate | SequenceMask | Geometric | None
    ) = setting(Auto(), "Correction for the gap between sampler and trainer.")

    # Further terms of the loss.
    kl: KL = setting(KL(), "KL to the reference policy in the loss.")
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
    rl_coef: float = setting(
        1.0, "Factor of the surrogate in the loss. 0: the loss has no policy gradient."
    )
    cross_entropy: CrossEntropy = setting(CrossEntropy(), "Cross-entropy of trained tokens.")
    distillation: Distillation = setting(
        Distillation(), "On-policy distillation from a teacher (the setting teacher)."
    )


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
    # Before the penalties, so that they also apply to a fixed score. The other rules keep the
    # grade.
    if is_truncated and isinstance(algorithm.truncated, Fixed | Ignore):
        score = algorithm.truncated.score
    if is_truncated:
        score -= algorithm.truncated_penalty
    if algorithm.overlong_share:
        buffer = algorithm.overlong_share * max_new_tokens
        excess = length - max_new_tokens + buffer
        score -= min(1.0, max(0.0, excess / buffer))
    return score


def needs_reference(algorithm: Algorithm) -> bool:
    """Returns whether the algorithm compares the policy with a reference policy."""
    return bool(algorithm.kl.coef or algorithm.kl_reward)


def resolve_correction(algorithm: Algorithm, max_staleness: int) -> Algorithm:
    """Returns the algorithm with the correction that it has in a run, None for none.

    A run whose rollouts may be stale is decoupled PPO (AReaL, arXiv:2505.24298 eq. 5) unless it
    names a correction or uses the sampler's log-probs as the old policy's.
    """
    correction = algorithm.correction
    if not isinstance(correction, Auto):
        return replace(algorithm)
    if max_staleness and algorithm.old_policy == "trainer":
        return replace(algorithm, correction=TokenTruncate(correction.high))
    return replace(algorithm, correction=None)
