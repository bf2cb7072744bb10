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

import importlib
from typing import TYPE_CHECKING

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
    needs_teacher,
    resolve_correction,
    shape_score,
)
from jzero.algorithms.presets import PRESETS, dr_grpo, grpo, supervised

if TYPE_CHECKING:
    from jzero.algorithms.advantages import (
        ADVANTAGES,
        Advantage,
        Episodes,
        compute_advantages,
        needs_critic,
        needs_parts,
    )
    from jzero.algorithms.distillation import teacher_advantages
    from jzero.algorithms.weights import WEIGHTS

# The functions that run on the host need numpy, and are imported when they are first used: the
# settings name algorithms, and a mistake in a flag is reported before.
_FUNCTIONS = {
    "ADVANTAGES": "advantages",
    "Advantage": "advantages",
    "Episodes": "advantages",
    "compute_advantages": "advantages",
    "needs_critic": "advantages",
    "needs_parts": "advantages",
    "teacher_advantages": "distillation",
    "WEIGHTS": "weights",
}


def __getattr__(name: str) -> object:
    if name not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_FUNCTIONS[name]}"), name)
