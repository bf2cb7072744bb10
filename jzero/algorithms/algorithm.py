"""The description of an algorithm, names and numbers only, and the shaping of a response's score.

An `Algorithm` has a value for each of its parts, such as `surrogate=Clip(high=0.28)`. A part is a
frozen dataclass with the numbers that only it reads, so that a wrong combination cannot be written
(`jzero.fields`). The functions that compute the parts are in the tables of the other modules.
"""

from dataclasses import replace
from typing import Literal

from jzero.fields import (
    LARGEST_FLOAT,
    Field,
    part,
    section,
)

# -- The score of a truncated response -------------------------------------------------------------


@part
class Grade:
    """A truncated response has its grade."""


@part
class Fixed:
    """A truncated response has a fixed score."""

    score: float = Field(default=0.0, ge=-LARGEST_FLOAT)
    """Score of a truncated response."""


@part
class Mask:
    """A truncated response has its grade and counts in its group, but is not trained."""


@part
class Ignore:
    """A fixed score that counts in its group; the response is not trained (oat's ignore_no_eos)."""

    score: float = Field(default=0.0, ge=-LARGEST_FLOAT)
    """Score of a truncated response."""


# -- Advantages ------------------------------------------------------------------------------------

STD_EPS = "Added to the standard deviation that the advantage divides by."
GAMMA = "Discount from token to token."


@part
class GroupMean:
    """Reward minus the mean of its group (Dr. GRPO)."""


@part
class GroupMeanStd:
    """Reward minus the mean of its group, divided by the group's standard deviation (GRPO)."""

    eps: float = 1e-6
    """Added to the standard deviation that the advantage divides by."""


@part
class GroupMeanBatchStd:
    """Reward minus the mean of its group, divided by the standard deviation of the step."""

    eps: float = 1e-6
    """Added to the standard deviation that the advantage divides by."""


@part
class GroupMeanOverMean:
    """Reward minus the mean of its group, divided by this mean (MaxRL)."""


@part
class EachGroupMeanStd:
    """The sum of group_mean_std of each reward function, divided by its standard deviation."""

    eps: float = 1e-6
    """Added to the standard deviations that the advantage divides by."""


@part
class LeaveOneOut:
    """Reward minus the mean of the other rewards of its group (RLOO)."""


@part
class ReturnToGo:
    """The discounted sum of a token's and all later rewards (REINFORCE++)."""

    gamma: float = Field(default=1.0, le=1)
    """Discount from token to token."""


@part
class GAE:
    """Generalized advantage estimates, with a critic (PPO)."""

    gamma: float = Field(default=1.0, le=1)
    """Discount from token to token."""
    lam: float = Field(default=1.0, le=1)
    """Lambda of the estimates."""
    value_clip: float = 0.2
    """Maximum change of a value before the critic's loss is clipped. 0: no clipping."""
    value_coef: float = 1.0
    """Factor of the critic's loss."""


@part
class Zero:
    """0: rewards have no effect, and the teacher's term is the whole advantage."""


# -- Weights of a token in the loss ----------------------------------------------------------------


@part
class SequenceMean:
    """The mean over responses of their token means (GRPO)."""


@part
class SequenceSum:
    """The mean over responses of their token sums (REINFORCE)."""


@part
class TokenMean:
    """The mean over all tokens of the optimizer step (DAPO)."""


@part
class BatchTokenMean:
    """A sum over tokens, divided by the mean number of tokens of the RL step's optimizer steps."""


@part
class Constant:
    """A sum over tokens, divided by the number of responses and by a constant length (Dr. GRPO)."""

    length: int = 0
    """The constant length. 0: rollout.max_new_tokens of every turn."""


Weight = SequenceMean | SequenceSum | TokenMean | BatchTokenMean | Constant

# -- Surrogates ------------------------------------------------------------------------------------

CLIP_LOW = "The ratio is clipped at 1 - low from below."
CLIP_HIGH = "The ratio is clipped at 1 + high from above."
MASK_LOW = "Largest divergence of a token whose probability fell."
MASK_HIGH = "Largest divergence of a token whose probability rose."
TAU_POSITIVE = "Tau of the gate where the advantage is positive."
TAU_NEGATIVE = "Tau of the gate where the advantage is not positive."


@part
class Clip:
    """The clipped ratio of PPO."""

    # The bound of PPO's paper.
    low: float = 0.2
    """The ratio is clipped at 1 - low from below."""
    high: float = 0.2
    """The ratio is clipped at 1 + high from above."""
    dual: float = 0.0
    """Bound of the ratio at negative advantages (dual-clip PPO), above 1 + high. 0: no bound."""


@part
class Reinforce:
    """The log-probability, without a ratio."""


@part
class CISPO:
    """The clipped ratio as a constant weight of the log-probability (MiniMax-M1)."""

    low: float = 1.0
    """The ratio is clipped at 1 - low from below. 1: no lower bound."""
    high: float = 4.0
    """The ratio is clipped at 1 + high from above."""


@part
class DppoTV:
    """The ratio, masked by the total variation of the token's probability (DPPO)."""

    low: float = 0.2
    """Largest divergence of a token whose probability fell."""
    high: float = 0.2
    """Largest divergence of a token whose probability rose."""


@part
class DppoKL:
    """The ratio, masked by the KL divergence of the token's probability (DPPO)."""

    low: float = 0.05
    """Largest divergence of a token whose probability fell."""
    high: float = 0.05
    """Largest divergence of a token whose probability rose."""


@part
class IPO:
    """The ratio, masked by the change of the token's probability in both directions (prime-rl)."""

    low: float = 0.1
    """Largest divergence of a token whose probability fell."""
    high: float = 0.1
    """Largest divergence of a token whose probability rose."""


@part
class SAPO:
    """A soft gate of the ratio instead of a clip."""

    # The numbers of the paper. Its gate closes faster for negative advantages, because their
    # gradient raises the logits of all other tokens.
    tau_positive: float = Field(default=1.0, ge=0.01, le=100)
    """Tau of the gate where the advantage is positive."""
    tau_negative: float = Field(default=1.05, ge=0.01, le=100)
    """Tau of the gate where the advantage is not positive."""


@part
class VESPO:
    """A smooth weight of the log-probability, rho^k exp(lambda (1 - rho))."""

    # With these bounds the weight is finite for every ratio.
    k_positive: float = Field(default=2.0, le=10)
    """Exponent k where the advantage is not negative."""
    lambda_positive: float = Field(default=3.0, ge=0.1, le=50)
    """Lambda where the advantage is not negative."""
    k_negative: float = Field(default=3.0, le=10)
    """Exponent k where the advantage is negative."""
    lambda_negative: float = Field(default=2.0, ge=0.1, le=50)
    """Lambda where the advantage is negative."""


# -- Corrections for the gap between sampler and trainer -------------------------------------------

CORRECTION_LOW = "Tokens with a smaller ratio are dropped."
CORRECTION_HIGH = "Tokens with a larger ratio are dropped."


@part
class Auto:
    """token_truncate with old_policy=trainer and staleness in rollout.placement, else none."""

    high: float = 2.0
    """Upper bound of the ratio."""


@part
class TokenTruncate:
    """The token's ratio of trainer and sampler, truncated (TIS)."""

    high: float = 2.0
    """Upper bound of the ratio."""


@part
class TokenMask:
    """The token's ratio, and 0 outside of its bounds (AReaL, IcePop)."""

    low: float = 0.0
    """Tokens with a smaller ratio are dropped."""
    high: float = 2.0
    """Tokens with a larger ratio are dropped."""


@part
class SequenceTruncate:
    """The product of the ratios of a sequence, truncated."""

    high: float = 2.0
    """Upper bound of the ratio."""


@part
class SequenceMask:
    """The product of the ratios of a sequence, and 0 outside of its bounds (TRL)."""

    low: float = 0.0
    """Tokens with a smaller ratio are dropped."""
    high: float = 2.0
    """Tokens with a larger ratio are dropped."""


@part
class Geometric:
    """1, and 0 if the geometric mean of the ratios of a sequence is outside of its bounds."""

    low: float = 0.999
    """Tokens with a smaller ratio are dropped."""
    high: float = 1.001
    """Tokens with a larger ratio are dropped."""


# -- Further terms of the loss ---------------------------------------------------------------------


@part
class KL:
    """The KL to the reference policy in the loss."""

    coef: float = 0.0
    """Factor of the KL. 0: no KL."""
    estimator: Literal["k2", "k3"] = "k3"
    """Estimator of the KL."""
    bound: float = 0.0
    """Bound of a token's KL. 0: no bound."""
    weight: Weight | None = None
    """Weight of a token's KL. none: as algorithm.weight."""


@part
class CrossEntropy:
    """The cross-entropy -log pi of trained tokens in the loss."""

    coef: float = 0.0
    """Factor of the cross-entropy. 0: no cross-entropy."""
    weight: Weight | None = None
    """Weight of a token's cross-entropy. none: as algorithm.weight."""
    tokens: Literal["trained", "correct"] = "trained"
    """Tokens of the cross-entropy: all trained tokens, or only the tokens of correct responses
    (VAPO's loss on positive examples)."""


@part
class Distillation:
    """On-policy distillation from the teacher in the config's section teacher."""

    coef: float = 0.0
    """Factor of log pi_teacher - log pi_old of a token in the token's advantage. 0: no teacher."""
    bound: float = 0.0
    """Bound of the absolute value of the teacher's term in an advantage. 0: no bound."""


# -- The algorithm ---------------------------------------------------------------------------------


@section
class Algorithm:
    """The parts of an algorithm, with their numbers. The defaults are GRPO.

    A number of 0 disables its term.
    """

    name: str = "grpo"
    """Name of the algorithm in logs."""

    # The score. A response is truncated if it reaches max_new_tokens without an end of sequence.
    truncated: Grade | Fixed | Mask | Ignore = Grade()
    """Treatment of truncated responses."""
    truncated_penalty: float = Field(default=0.0, ge=-LARGEST_FLOAT)
    """Subtracted from the score of a truncated response. 0: no penalty."""
    overlong_share: float = Field(default=0.0, le=1)
    """Last share of max_new_tokens in which the score decreases linearly by up to 1 (DAPO eq. 13).
    0: no penalty."""
    dynamic_sampling_rounds: int = Field(default=0, le=1000)
    """Maximum rounds in which groups with equal scores are replaced by groups of new problems. 0:
    no dynamic sampling."""
    kl_reward: float = 0.0
    """Factor of the KL to the reference policy (k1) in the reward of every token. 0: no KL."""

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
    ) = GroupMeanStd()
    """Advantage estimator."""
    whiten: bool = False
    """Scales advantages to mean 0 and variance 1 over all sampled tokens."""
    weight: Weight = SequenceMean()
    """Weight of a token in the loss."""

    # Ratio, surrogate and correction.
    old_policy: Literal["trainer", "sampler"] = "trainer"
    """Log-probs of the old policy: recomputed before the first optimizer step (trainer), or the
    sampler's log-probs (sampler)."""
    ratio: Literal["token", "sequence", "product"] = "token"
    """Ratio of the policy to the old policy: of a token, the geometric mean of its sequence, or the
    product."""
    surrogate: Clip | Reinforce | CISPO | DppoTV | DppoKL | IPO | SAPO | VESPO = Clip()
    """Surrogate objective."""
    off_policy_bound: float = 0.0
    """Sequences with a negative advantage have no policy gradient if the mean of log pi_sampler -
    log pi over their tokens is above this bound. 0: no bound."""
    top_entropy: float = Field(default=1.0, gt=0, le=1)
    """Share of an optimizer step's trained tokens that have a policy gradient, by highest entropy.
    1: all."""
    correction: (
        Auto | TokenTruncate | TokenMask | SequenceTruncate | SequenceMask | Geometric | None
    ) = Auto()
    """Correction for the gap between sampler and trainer."""

    # Further terms of the loss.
    kl: KL = KL()
    """KL to the reference policy in the loss."""
    reference_every: int = 0
    """RL steps after which the policy becomes the reference. 0: always the first policy."""
    entropy_coef: float = Field(default=0.0, ge=-LARGEST_FLOAT)
    """Factor of the entropy bonus. 0: no bonus."""
    ratio_penalty: float = 0.0
    """Factor of the squared logarithm of a token's ratio in the loss. 0: no penalty."""
    environment_coef: float = 0.0
    """Factor of the cross-entropy on the tokens of the environment's replies, as a mean over these
    tokens (rollout.max_turns above 1). 0: replies are not trained."""
    rl_coef: float = 1.0
    """Factor of the surrogate in the loss. 0: the loss has no policy gradient."""
    cross_entropy: CrossEntropy = CrossEntropy()
    """Cross-entropy of trained tokens."""
    distillation: Distillation = Distillation()
    """On-policy distillation from a teacher (the setting teacher)."""


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


def needs_teacher(algorithm: Algorithm) -> bool:
    """Returns whether the algorithm's advantages read log-probs of a teacher."""
    return algorithm.distillation.coef > 0
