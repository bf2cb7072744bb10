"""Weights of the tokens in the loss of an optimizer step.

A weight function takes

    lengths      f64[n]  trained tokens of each rollout of this optimizer step (|o_i|)
    all_lengths  f64[N]  the same for the rollouts of all optimizer steps of the RL step
    max_length   the configured length of a response (L_max)

and returns f64[n], the weight of every token of each rollout. An untrained rollout (truncated, with
`algorithm.truncated` Mask or Ignore) has length 0, but still counts in n.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from jaxtyping import Float

from jzero.algorithms.algorithm import (
    BatchTokenMean,
    Constant,
    SequenceMean,
    SequenceSum,
    TokenMean,
)

Lengths: TypeAlias = Float[np.ndarray, " rollouts"]
AllLengths: TypeAlias = Float[np.ndarray, " all_rollouts"]
WeightFunction: TypeAlias = Callable[[Lengths, AllLengths, int], Lengths]


def sequence_mean(lengths: Lengths, all_lengths: AllLengths, max_length: int) -> Lengths:
    """w = 1 / (n |o_i|): the mean over rollouts of their token means.

    Source: GRPO, arXiv:2402.03300 eq. 3.
    """
    # Untrained rollouts have length 0.
    return 1.0 / (len(lengths) * np.maximum(lengths, 1.0))


def sequence_sum(lengths: Lengths, all_lengths: AllLengths, max_length: int) -> Lengths:
    """w = 1 / n: the mean over rollouts of their token sums (REINFORCE; oat in March 2025)."""
    return np.full(len(lengths), 1.0 / len(lengths))


def token_mean(lengths: Lengths, all_lengths: AllLengths, max_length: int) -> Lengths:
    """w = 1 / sum_i |o_i|: the mean over all tokens of the optimizer step.

    Source: DAPO, arXiv:2503.14476 eq. 8.
    """
    # If no rollout is trained the weights have no effect, but must be finite.
    return np.full(len(lengths), 1.0 / max(lengths.sum(), 1.0))


def batch_token_mean(lengths: Lengths, all_lengths: AllLengths, max_length: int) -> Lengths:
    """w = K / sum_i |o_i|, with the sum over all K optimizer steps of the RL step.

    K is the number of all rollouts divided by the rollouts of this optimizer step. If all responses
    are equally long this is `token_mean`; else steps with longer responses have a larger loss.

    Source: loss_type="dapo" of TRL 1.10 to 1.16, which divides a loss by the tokens of the
    generation batch * gradient_accumulation_steps / steps_per_generation.
    """
    num_steps = len(all_lengths) / max(len(lengths), 1)
    return np.full(len(lengths), num_steps / max(all_lengths.sum(), 1.0))


def constant(lengths: Lengths, all_lengths: AllLengths, max_length: int) -> Lengths:
    """w = 1 / (n L_max), independent of lengths (Dr. GRPO, arXiv:2503.20783 appendix A)."""
    return np.full(len(lengths), 1.0 / (len(lengths) * max_length))


WEIGHTS: dict[type, WeightFunction] = {
    SequenceMean: sequence_mean,
    SequenceSum: sequence_sum,
    TokenMean: token_mean,
    BatchTokenMean: batch_token_mean,
    Constant: constant,
}
