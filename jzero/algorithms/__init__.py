"""RL algorithms as values: there is one loss, and an `Algorithm` has its parts.

    loss = sum_t   w_t [ rl_coef c_t m_t surrogate(rho_t, A_t) - entropy_coef H_t
                         + ratio_penalty log^2 rho_t ]
                 + u_t cross_entropy.coef (-log pi_t)
                 + v_t kl.coef KL_t
         + sum_e   u_e environment_coef (-log pi_e)

| symbol | part | file | computed |
|---|---|---|---|
| A_t | advantage | advantages.py | on the host, in float64, over the rollouts of an RL step |
| w_t, u_t, v_t | weights of the terms | weights.py | on the host, over an optimizer step |
| rho_t | ratio pi(a_t) / pi_old(a_t) | ratios.py | in the jitted update |
| surrogate | objective of ratio and advantage | surrogates.py | in the jitted update |
| c_t | correction f(pi_old(a_t) / pi_sampler(a_t)) | corrections.py | in the jitted update |
| m_t | off-policy sequence mask: 0 or 1 | losses.py | in the jitted update |
| KL_t | estimate of the KL to the reference policy | kl.py | in the jitted update |

The first sum is over the sampled tokens t that an optimizer step trains. The second sum is over the
tokens e of an environment's replies, with weights u_e that make it a mean. Each token has its own
weight, so packing, microbatches and sharding cannot change the objective. `distillation.py` has
the term that a teacher adds to A_t. `presets.py` has the published algorithms by name;
docs/algorithms.md explains them.

To add a part, write a dataclass with its numbers in algorithm.py, a function, and a line in the
table of the function's file. Shapes: N rollouts and T tokens on the host; packed rows [B, T] in the
update.

This package has the names and numbers of algorithms, and the functions that run on the host. It
loads no jax, because settings name algorithms and grader processes read settings. The functions of
the jitted update are imported from the modules in the last rows of the table.
"""

from jzero.algorithms.advantages import (
    ADVANTAGES,
    Advantage,
    Episodes,
    compute_advantages,
    needs_critic,
    needs_parts,
)
from jzero.algorithms.algorithm import (
    CISPO,
    GAE,
    IPO,
    KL,
    SAPO,
    VESPO,
    Algorithm,
    Auto,
    BatchTokenMean,
    Clip,
    Constant,
    CrossEntropy,
    Distillation,
    DppoKL,
    DppoTV,
    EachGroupMeanStd,
    Fixed,
    Geometric,
    Grade,
    GroupMean,
    GroupMeanBatchStd,
    GroupMeanOverMean,
    GroupMeanStd,
    Ignore,
    LeaveOneOut,
    Mask,
    Reinforce,
    ReturnToGo,
    SequenceMask,
    SequenceMean,
    SequenceSum,
    SequenceTruncate,
    TokenMask,
    TokenMean,
    TokenTruncate,
    Weight,
    Zero,
    needs_reference,
    resolve_correction,
    shape_score,
)
from jzero.algorithms.distillation import needs_teacher, supervised, teacher_advantages
from jzero.algorithms.presets import PRESETS, dr_grpo, grpo
from jzero.algorithms.weights import WEIGHTS
