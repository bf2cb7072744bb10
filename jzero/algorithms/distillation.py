"""On-policy distillation: what a teacher adds to the advantages, and its presets.

The student samples, and the teacher says of every sampled token how likely it finds the token:

    A_t = A_t(rewards) + teacher_coef (log pi_teacher(a_t) - log pi_old(a_t))

There is no discount and no baseline: the second term is minus the integrand of the reverse KL from
the student to the teacher, whose expected policy gradient is the gradient of that KL at one token
(Lu, "On-Policy Distillation", Thinking Machines 2025; Agarwal et al., arXiv:2306.13649).

Like the other advantages, this one is computed on the host, over all rollouts of an RL step.
"""

from dataclasses import replace

import numpy as np
from jaxtyping import Float

from jzero.algorithms.algorithm import Algorithm


def teacher_advantages(
    old_logps: Float[np.ndarray, " tokens"],
    teacher_logps: Float[np.ndarray, " tokens"],
    algorithm: Algorithm,
) -> Float[np.ndarray, " tokens"]:
    """Returns teacher_coef (log pi_teacher - log pi_old), at most `teacher_max` in size.

    Where both log-probs are the same number the result is exactly 0.
    """
    advantages = algorithm.teacher_coef * (teacher_logps - old_logps)
    if algorithm.teacher_max:
        return np.clip(advantages, -algorithm.teacher_max, algorithm.teacher_max)
    return advantages


def needs_teacher(algorithm: Algorithm) -> bool:
    """Returns whether the algorithm's advantages read log-probs of a teacher."""
    return algorithm.teacher_coef > 0


def distill(**changes: object) -> Algorithm:
    """On-policy distillation alone: rewards are measured and do not count."""
    algorithm = Algorithm(name="distill", advantage="zero", teacher_coef=1.0, weight="token_mean")
    return replace(algorithm, **changes)


def distill_grpo(**changes: object) -> Algorithm:
    """GRPO's advantage from the rewards, and a tenth of the teacher's beside it."""
    return replace(Algorithm(name="distill_grpo", teacher_coef=0.1), **changes)


def supervised(**changes: object) -> Algorithm:
    """Supervised fine-tuning: the cross-entropy is the only part of the loss.

    It is no preset of RL, whose responses are the policy's own.
    """
    algorithm = Algorithm(name="sft", rl_coef=0.0, ce_coef=1.0, weight="token_mean")
    return replace(algorithm, **changes)
