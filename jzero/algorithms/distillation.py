"""On-policy distillation: the teacher's term of the advantages.

The student samples, and the teacher scores the probability of every sampled token:

    A_t = A_t(rewards) + coef (log pi_teacher(a_t) - log pi_old(a_t))

There is no discount and no baseline. The second term is minus the integrand of the reverse KL from
the student to the teacher, and its expected policy gradient is the gradient of this KL at one token
(Lu, "On-Policy Distillation", Thinking Machines 2025; Agarwal et al., arXiv:2306.13649).

Like the other advantages, this term is computed on the host, over all rollouts of an RL step.
"""

import numpy as np
from jaxtyping import Float

from jzero.algorithms.algorithm import Distillation


def teacher_advantages(
    old_logps: Float[np.ndarray, " tokens"],
    teacher_logps: Float[np.ndarray, " tokens"],
    part: Distillation,
) -> Float[np.ndarray, " tokens"]:
    """Returns coef (log pi_teacher - log pi_old), clipped to +-`bound` if it is not 0.

    If both log-probs are equal the result is exactly 0.
    """
    advantages = part.coef * (teacher_logps - old_logps)
    if part.bound:
        return np.clip(advantages, -part.bound, part.bound)
    return advantages
