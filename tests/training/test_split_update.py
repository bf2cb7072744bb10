"""An update in two programs, `gradient` and `step`, has the bits of the update in one.

These programs are compiled as in a run: without XLA's optimizations the two round differently.
"""

import jax
import numpy as np
import pytest
import reference

from jzero.sharding.mesh import train_mesh
from jzero.training.step import make_minibatches, score_and_credit
from jzero.training.trainer import make_trainer


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), (1, 2, 1)])
def test_a_gradient_and_a_step_have_the_bits_of_an_update(sizes: tuple[int, int, int]) -> None:
    settings = reference.settings(train={"packs_per_row": 2, "microbatch_tokens": 240})
    mesh = train_mesh(*sizes, jax.devices()[: int(np.prod(sizes))])
    trainer = make_trainer(settings, reference.MODEL, None, mesh)
    policy, params = trainer.policy, reference.random_params()
    rollouts = reference.random_rollouts(0, 4, 4)
    state = policy.start(reference.placed(policy, params))
    [minibatch] = make_minibatches(trainer, rollouts, 1)
    score_and_credit(trainer, state, [minibatch], rollouts)
    data = minibatch.batches, minibatch.counts, trainer.layouts

    gradient, _ = policy.gradient(state, *data)
    stepped, _ = policy.step(state, gradient, 1e-3)
    updated, _ = policy.update(policy.start(reference.placed(policy, params)), *data, 1e-3)

    reference.assert_equal(stepped.params, updated.params)
    pairs = zip(jax.tree.leaves(updated.params), jax.tree.leaves(params), strict=True)
    assert all(np.any(np.asarray(after) != before) for after, before in pairs)
