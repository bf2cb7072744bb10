"""Algorithms are values: there is one loss, and an `Algorithm` names the parts that it is made of.

    loss = sum_t   w_t [ rl_coef c_t surrogate(rho_t, A_t) - entropy_coef H_t
                         + ratio_penalty log^2 rho_t ]
                 + u_t ce_coef (-log pi_t)
                 + v_t kl_coef KL_t
         + sum_e   u_e environment_coef (-log pi_e)

| symbol | part | made in | where |
|---|---|---|---|
| A_t | advantage | advantages.py | on the host, in float64, over the rollouts of an RL step |
| w_t, u_t, v_t | weights of the parts | weights.py | on the host, over an optimizer step |
| rho_t | ratio pi(a_t) / pi_old(a_t) | ratios.py | in the jitted update |
| surrogate | what is made of ratio and advantage | surrogates.py | in the jitted update |
| c_t | correction f(pi_old(a_t) / pi_sampler(a_t)) | corrections.py | in the jitted update |
| KL_t | estimate of the KL to the reference policy | kl.py | in the jitted update |

The first sum goes over the tokens t that the policy sampled and that one optimizer step trains on,
the second over the tokens e of an environment's replies, whose weights u_e make a mean. Since the
weights are numbers for single tokens, packing, microbatches and sharding cannot change the
objective. `distillation.py` has what a teacher adds to A_t. `presets.py` has the published
algorithms by name; docs/algorithms.md explains them.

A new part is a function and a line in the table of its file. Shapes: N rollouts and T tokens on the
host; packed rows [B, T] in the update.
"""

from jzero.algorithms.advantages import (
    ADVANTAGES,
    Advantage,
    Episodes,
    compute_advantages,
    needs_critic,
    needs_parts,
)
from jzero.algorithms.algorithm import Algorithm, needs_reference, shape_score
from jzero.algorithms.corrections import CORRECTIONS, resolve_correction
from jzero.algorithms.distillation import needs_teacher, supervised, teacher_advantages
from jzero.algorithms.kl import KL_ESTIMATORS, k2, k3
from jzero.algorithms.losses import environment_loss, policy_loss, value_loss
from jzero.algorithms.presets import PRESETS, dr_grpo, grpo
from jzero.algorithms.ratios import MAX_LOG_RATIO, RATIOS, SequenceSum
from jzero.algorithms.surrogates import SURROGATES, Surrogate
from jzero.algorithms.tables import TABLES
from jzero.algorithms.weights import WEIGHTS
