"""The losses of the Tinker API: their names, their defaults, and those that are refused.

`algorithms.token_losses` has the formulas. A loss is the sum of its terms over all tokens. Nothing
is divided by the number of tokens or sequences. All log-probabilities have temperature 1.

dro has a penalty where the advantage is 0, too. Clients send the tokens of a prompt with
`advantages` and `logprobs` of 0, and have no other mask for them: such positions have no loss.
"""

from collections.abc import Mapping

import numpy as np
from jax.tree_util import Partial

from jzero.algorithms.token_losses import KINDS, token_loss

# Losses of the API that are refused, and why.
REFUSED: Mapping[str, str] = {
    "stable_reinforce": "its formula is not published: set loss_fn=importance_sampling",
    "gspo": "its sequence_ratio_mask is not served: set loss_fn=ppo or importance_sampling",
}

DEFAULT_LOW, DEFAULT_HIGH = 0.8, 1.2  # bounds of the ratio
DEFAULT_BETA = 0.05


def loss_of(kind: int, beta: float) -> Partial:
    """Returns a loss for `Learner.gradient`. `kind` is an index of KINDS; both are data."""
    assert 0 <= kind < len(KINDS), f"{kind=}"
    return Partial(token_loss, np.int32(kind), np.float32(beta))
