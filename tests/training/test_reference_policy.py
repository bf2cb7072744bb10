"""The reference policy on disk: which parameters it has, and how long they are kept."""

from pathlib import Path

import jax
import numpy as np
import pytest
import reference
from reference import reference_of

from jzero import setup
from jzero.model import qwen

pytestmark = pytest.mark.usefixtures("quick_compilation")


def shifted(params: qwen.Params, shift: int) -> qwen.Params:
    return jax.tree.map(lambda x: x + shift, params)


def test_the_reference_is_the_first_policy_whenever_the_run_was_killed(tmp_path: Path) -> None:
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    settings = reference.settings(mesh=mesh, algorithm={"kl_coef": 0.1})
    run = setup.build(setup.resolve(settings), None)
    policy = run.trainer.policy
    algorithm = run.config.algorithm
    params = reference.placed(policy, reference.random_params(policy.model))
    later_params = shifted(params, 1)

    first = reference_of(policy, tmp_path, algorithm, 0, policy.start(params), 0)
    resumed_later = reference_of(policy, tmp_path, algorithm, 3, policy.start(later_params), 0)
    resumed_at_0 = reference_of(policy, tmp_path, algorithm, 0, policy.start(later_params), 0)

    jax.tree.map(np.testing.assert_array_equal, first, params)
    jax.tree.map(np.testing.assert_array_equal, resumed_later, params)
    jax.tree.map(np.testing.assert_array_equal, resumed_at_0, params)
    assert jax.tree.map(lambda x: x.sharding, first) == policy.shardings


def test_the_reference_is_refreshed_and_kept_as_long_as_a_checkpoint_may_need_it(
    tmp_path: Path,
) -> None:
    config = reference.settings(
        algorithm={"kl_coef": 0.1, "reference_every": 2}, train={"microbatch_tokens": 240}
    )
    policy = setup.build(setup.resolve(config), None).trainer.policy
    first_params = reference.random_params(policy.model)

    def step_of_reference(step: int, oldest_checkpoint: int) -> int:
        """Returns the step whose parameters are the reference after RL step `step`."""
        # Every RL step adds 1 to all parameters.
        params = reference.placed(policy, shifted(first_params, step))
        state = policy.start(params)
        loaded = reference_of(policy, tmp_path, config.algorithm, step, state, oldest_checkpoint)
        return round(float(loaded["norm"][0] - first_params["norm"][0]))

    def saved_steps() -> list[int]:
        return sorted(int(path.name) for path in (tmp_path / "reference").iterdir())

    assert step_of_reference(0, oldest_checkpoint=0) == 0
    assert step_of_reference(2, oldest_checkpoint=0) == 2
    assert step_of_reference(4, oldest_checkpoint=0) == 4
    assert saved_steps() == [0, 2, 4]

    # Resumed from the checkpoint of step 3.
    assert step_of_reference(3, oldest_checkpoint=0) == 2
    # The checkpoint of step 3 is the oldest that is left, and its reference is that of step 2.
    assert step_of_reference(5, oldest_checkpoint=3) == 4
    assert saved_steps() == [2, 4]
