"""The metrics of a loss: what each of them means, and how it becomes one number of a step.

A loss returns a value for each token of a packed row, by name (`losses.py`). The table here defines
the metrics, and is all that a new one needs besides its value: the update reduces the values, the
run writes the number, and docs/reference/metrics.md prints the definition. A name that the table
does not have is a metric if it has a group, such as `mine/margin` of a user-defined loss: a mean
over the trained tokens. Without a group, such as `nll`, it is only summed for the caller.

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

    name: str  # as the run writes it; "" for values that are only summed
    meaning: str  # a sentence
    unit: str = ""  # "" for a number without a unit
    reduction: Literal["mean", "sum", "max", "effective_share"] = "mean"
    # The tokens that count: those that the loss trains, or those of the environment's replies.
    tokens: Literal["trained", "environment"] = "trained"
    # The optimizer steps of an RL step whose tokens count.
    steps: Literal["all", "first"] = "all"


# By the names under which a loss returns the values.
LOSS_METRICS: dict[str, LossMetric] = {
    # -- The policy.
    "entropy": LossMetric(
        "policy/entropy",
        "Mean entropy of the policy's next-token distribution, at the sampling temperature.",
        "nats",
    ),
    "clip_fraction": LossMetric(
        "policy/clip_fraction", "Share of tokens whose ratio the surrogate clips.", "share"
    ),
    "clip_above": LossMetric(
        "policy/clip_above",
        "Share of tokens that the surrogate clips or masks with a ratio above 1.",
        "share",
    ),
    "clip_below": LossMetric(
        "policy/clip_below",
        "Share of tokens that the surrogate clips or masks with a ratio below 1.",
        "share",
    ),
    # Sampler and trainer are compared at the same weights: the first optimizer step changes the
    # trainer's.
    "mismatch": LossMetric(
        "policy/mismatch",
        "Mean absolute difference between the trainer's and the sampler's log-probability of a "
        "token, before the first optimizer step.",
        "nats",
        steps="first",
    ),
    "mismatch_k1": LossMetric(
        "policy/mismatch_k1",
        "Mean of log mu - log pi over the same tokens, with the sampler's probability mu and the "
        "trainer's pi: the estimate k1 of KL(mu || pi).",
        "nats",
        steps="first",
    ),
    "mismatch_k3": LossMetric(
        "policy/mismatch_k3",
        "Mean of pi / mu - 1 - log(pi / mu) over the same tokens: the estimate k3 of "
        "KL(mu || pi), which is never negative.",
        "nats",
        steps="first",
    ),
    "mismatch_max": LossMetric(
        "policy/mismatch_max",
        "Largest absolute difference of the same tokens.",
        "nats",
        "max",
        steps="first",
    ),
    "mismatch_tokens": LossMetric(
        "policy/mismatch_tokens",
        "How many of the same tokens have not exactly the same log-probability in sampler and "
        "trainer.",
        "tokens",
        "sum",
        steps="first",
    ),
    "importance": LossMetric(
        "policy/effective_samples",
        "Effective sample size of the importance ratios r = pi / mu, as a share of the n tokens of "
        "all optimizer steps: (sum r)^2 / (n sum r^2). 1 where all ratios are equal.",
        "share",
        "effective_share",
    ),
    "ratio_shift": LossMetric(
        "policy/ratio_shift", "Mean of |ratio - 1|, the distance of the ratio from 1."
    ),
    "off_policy": LossMetric(
        "policy/off_policy",
        "Share of tokens that have no policy gradient because the policy has left their sequence "
        "(`algorithm.off_policy_bound`).",
        "share",
    ),
    "correction": LossMetric(
        "policy/correction", "Mean weight that `algorithm.correction` gives a token."
    ),
    "correction_above": LossMetric(
        "policy/correction_above",
        "Share of tokens that `algorithm.correction` truncates or drops because their ratio is "
        "above `algorithm.correction.high`.",
        "share",
    ),
    "correction_below": LossMetric(
        "policy/correction_below",
        "Share of tokens that `algorithm.correction` drops because their ratio is below "
        "`algorithm.correction.low`.",
        "share",
    ),
    "environment_nll": LossMetric(
        "policy/environment_nll",
        "Mean negative log-likelihood of the environment's replies "
        "(`algorithm.environment_coef` > 0).",
        "nats",
        tokens="environment",
    ),
    "kl": LossMetric(
        "policy/kl",
        "Mean estimate of the KL divergence from the reference policy (`algorithm.kl.estimator`).",
        "nats",
    ),
    # -- The critic.
    "value_loss": LossMetric(
        "critic/loss", "Mean squared error of the values, halved and not clipped."
    ),
    "value_clip_fraction": LossMetric(
        "critic/clip_fraction", "Share of tokens whose value the loss clips.", "share"
    ),
}


def metrics_of_the_loss() -> dict[str, LossMetric]:
    """Returns the definitions by the names of the metrics."""
    return {metric.name: metric for metric in LOSS_METRICS.values()}


def loss_metric(name: str) -> LossMetric:
    """Returns how a value of this name is reduced, and the metric that it is, if any."""
    is_metric = "/" in name
    return LOSS_METRICS.get(name, LossMetric(name if is_metric else "", ""))
