"""The metrics of a loss: what each of them means, and how it becomes one number of a step.

A loss returns its metrics by name, with a value for each token of a packed row (`losses.py`). The
table here defines them, and is all that a new metric needs besides its value: the update reduces
the values, the run writes the number, and docs/reference/metrics.md prints the definition. A name
with a group that the table does not have, such as `mine/margin` of a user-defined loss, is a mean
over the trained tokens. A name without a group, such as `nll`, is only summed for the caller.

Pages that show a run read the table, so this module loads no jax.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LossMetric:
    """The meaning of a metric of the loss, and the reduction of its values f32[B, T].

    reduction:
        mean             over the tokens
        sum              over the tokens
        max              over the tokens
        effective_share  effective sample size of values r, as a share of the n tokens:
                         (sum r)^2 / (n sum r^2) (Kong 1992)
    """

    meaning: str  # a sentence
    unit: str = ""  # "" for a number without a unit
    reduction: Literal["mean", "sum", "max", "effective_share"] = "mean"
    # The tokens that count: those that the loss trains, or those of the environment's replies.
    tokens: Literal["trained", "environment"] = "trained"
    # The optimizer steps of an RL step whose tokens count.
    steps: Literal["all", "first"] = "all"


LOSS_METRICS: dict[str, LossMetric] = {
    # -- The policy.
    "policy/entropy": LossMetric(
        "Mean entropy of the policy's next-token distribution, at the sampling temperature.",
        "nats",
    ),
    "policy/clip_fraction": LossMetric("Share of tokens whose ratio the surrogate clips.", "share"),
    "policy/clip_above": LossMetric(
        "Share of tokens that the surrogate clips or masks with a ratio above 1.", "share"
    ),
    "policy/clip_below": LossMetric(
        "Share of tokens that the surrogate clips or masks with a ratio below 1.", "share"
    ),
    # Sampler and trainer are compared at the same weights: the first optimizer step changes the
    # trainer's.
    "policy/mismatch": LossMetric(
        "Mean absolute difference between the trainer's and the sampler's log-probability of a "
        "token, before the first optimizer step.",
        "nats",
        steps="first",
    ),
    "policy/mismatch_k1": LossMetric(
        "Mean of log mu - log pi over the same tokens, with the sampler's probability mu and the "
        "trainer's pi: the estimate k1 of KL(mu || pi).",
        "nats",
        steps="first",
    ),
    "policy/mismatch_k3": LossMetric(
        "Mean of pi / mu - 1 - log(pi / mu) over the same tokens: the estimate k3 of "
        "KL(mu || pi), which is never negative.",
        "nats",
        steps="first",
    ),
    "policy/mismatch_max": LossMetric(
        "Largest absolute difference of the same tokens.", "nats", "max", steps="first"
    ),
    "policy/mismatch_tokens": LossMetric(
        "How many of the same tokens have not exactly the same log-probability in sampler and "
        "trainer.",
        "tokens",
        "sum",
        steps="first",
    ),
    "policy/effective_samples": LossMetric(
        "Effective sample size of the importance ratios r = pi / mu, as a share of the n tokens of "
        "all optimizer steps: (sum r)^2 / (n sum r^2). 1 where all ratios are equal.",
        "share",
        "effective_share",
    ),
    "policy/ratio_shift": LossMetric("Mean of |ratio - 1|, the distance of the ratio from 1."),
    "policy/off_policy": LossMetric(
        "Share of tokens that have no policy gradient because the policy has left their sequence "
        "(`algorithm.off_policy_bound`).",
        "share",
    ),
    "policy/correction": LossMetric("Mean weight that `algorithm.correction` gives a token."),
    "policy/correction_above": LossMetric(
        "Share of tokens that `algorithm.correction` truncates or drops because their ratio is "
        "above `algorithm.correction.high`.",
        "share",
    ),
    "policy/correction_below": LossMetric(
        "Share of tokens that `algorithm.correction` drops because their ratio is below "
        "`algorithm.correction.low`.",
        "share",
    ),
    "policy/environment_nll": LossMetric(
        "Mean negative log-likelihood of the environment's replies "
        "(`algorithm.environment_coef` > 0).",
        "nats",
        tokens="environment",
    ),
    "policy/kl": LossMetric(
        "Mean estimate of the KL divergence from the reference policy (`algorithm.kl.estimator`).",
        "nats",
    ),
    # -- The critic.
    "critic/loss": LossMetric("Mean squared error of the values, halved and not clipped."),
    "critic/clip_fraction": LossMetric("Share of tokens whose value the loss clips.", "share"),
}


def loss_metric(name: str) -> LossMetric:
    """Returns the definition of a metric of the loss. An unknown one is a mean."""
    return LOSS_METRICS.get(name, LossMetric(""))


def is_metric(name: str) -> bool:
    """Returns whether a run writes what a loss returns under this name: it has a group."""
    return "/" in name
