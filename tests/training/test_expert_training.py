"""Training with experts on meshes, and how evenly the tokens are spread over them."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from test_learner import PACKINGS, gradient_of, packed_minibatch, trainer_on

from jzero.errors import UserError
from jzero.model import qwen
from jzero.model.architecture import ATTENTION, DELTA_NET, DeltaNetConfig, QwenConfig
from jzero.model.new_model import check_experts
from jzero.planning.roofline import matmul_flops_per_token
from jzero.run.metrics import find_metric
from jzero.sharding.mesh import decode_mesh
from jzero.sharding.publish import publisher
from jzero.training.heads import expert_metrics
from jzero.training.learner import Stats

pytestmark = pytest.mark.usefixtures("quick_compilation")

MOE = replace(
    reference.MODEL,
    model_type="qwen3_moe",
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    norm_topk_prob=True,
)
# The same experts, and an MLP beside them, in a gated delta net and an attention.
HYBRID_MOE = replace(
    MOE,
    model_type="qwen3_5_moe_text",
    layer_types=(DELTA_NET, ATTENTION),
    delta_net=DeltaNetConfig(
        num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=8, kernel_size=4
    ),
    partial_rotary_factor=0.5,
    shared_expert_intermediate_size=8,
)
PARAMS = reference.random_params(MOE)


@cache
def step_on(sizes: tuple[int, ...], model: QwenConfig = MOE) -> tuple[qwen.Params, Stats, int]:
    """Returns the gradient and the stats on a mesh, and the tokens that the model read."""
    trainer = trainer_on(reference.settings(train=PACKINGS["two slots"]), sizes, model)
    trainer.policy.optimizer = optax.identity()
    minibatch = packed_minibatch(trainer)
    num_tokens = 0
    for batch, count in zip(minibatch.batches, minibatch.counts, strict=True):
        segments = np.asarray(batch.segments)[: int(count)]
        num_tokens += int((segments > 0).sum())
    params = PARAMS if model is MOE else reference.random_params(model)
    gradient, stats = gradient_of(trainer, minibatch, params)
    return gradient, stats, num_tokens


def test_padding_counts_in_no_load() -> None:
    _, stats, num_tokens = step_on((1, 1, 1))

    assert stats["expert_load"].shape == (2, 8)
    assert stats["expert_load"].sum(axis=1).tolist() == [2 * num_tokens, 2 * num_tokens]


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 1, 8), (1, 2, 2, 2)], ids=str)
def test_gradient_and_load_do_not_depend_on_the_mesh(sizes: tuple[int, ...]) -> None:
    gradient, stats, _ = step_on(sizes)
    expected, expected_stats, _ = step_on((1, 1, 1))

    reference.assert_same_gradient(gradient, expected, 5e-6)
    np.testing.assert_array_equal(stats["expert_load"], expected_stats["expert_load"])
    reference.assert_same_loss(stats["loss"], expected_stats["loss"])
    for name in ("router", "experts_gate", "experts_up", "experts_down"):
        assert np.abs(gradient["layers"][name]).max() > 0, name


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 2, 2, 2)], ids=str)
def test_experts_in_a_hybrid_do_not_depend_on_the_mesh(sizes: tuple[int, ...]) -> None:
    gradient, stats, num_tokens = step_on(sizes, HYBRID_MOE)
    expected, expected_stats, _ = step_on((1, 1, 1), HYBRID_MOE)

    reference.assert_same_gradient(gradient, expected, 2e-5)
    np.testing.assert_array_equal(stats["expert_load"], expected_stats["expert_load"])
    assert stats["expert_load"].sum(axis=1).tolist() == [2 * num_tokens, 2 * num_tokens]
    for name in ("router", "experts_gate", "shared_up", "shared_router", "delta_qkv"):
        assert np.abs(gradient["layers"][name]).max() > 0, name


def test_whole_experts_are_published_to_the_decoder() -> None:
    trainer = trainer_on(reference.settings(), (2, 2, 2), MOE)
    mesh = trainer.policy.mesh
    params = reference.placed(trainer.policy, PARAMS)
    assert params["layers"]["experts_up"].sharding.spec == jax.P(None, "tensor", "fsdp", None)

    weights = publisher(MOE, mesh, decode_mesh(mesh), jnp.float32)(params)

    experts = weights["layers"]["experts_up"]
    np.testing.assert_array_equal(experts, PARAMS["layers"]["experts_up"])
    assert {shard.data.shape for shard in experts.addressable_shards} == {(2, 4, 16, 8)}


# -- metrics ---------------------------------------------------------------------------------------


def test_the_violation_is_the_largest_load_over_the_mean_minus_one() -> None:
    first, second = np.array([[3, 1, 0, 0], [1, 1, 1, 1]]), np.array([[3, 1, 0, 0], [1, 1, 1, 1]])

    metrics = expert_metrics([{"expert_load": first}, {"expert_load": second}])

    assert metrics == {
        "experts/violation": 1.0,  # of 2 and 0
        "experts/violation_max": 2.0,
        "experts/largest_load": 0.75,
        "experts/unused": 0.25,
    }
    assert all(find_metric(name) for name in metrics)


def test_a_dense_model_and_an_empty_step_have_no_metrics_of_experts() -> None:
    assert expert_metrics([{"loss": np.float32(1)}]) == {}
    assert expert_metrics([{"expert_load": np.zeros((2, 4))}]) == {}
    assert expert_metrics([]) == {}


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (replace(MOE, num_experts=0), "model_type=qwen3_moe has experts: set"),
        (replace(MOE, model_type="qwen3"), "model_type=qwen3 has no experts"),
    ],
)
def test_what_does_not_go_together_is_refused(model: qwen.QwenConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_experts(model)
    check_experts(MOE)
    check_experts(reference.MODEL)


def test_only_the_experts_of_a_token_count_as_work() -> None:
    of_all = replace(MOE, num_experts_per_tok=8)
    idle = 2 * 6 * 3 * 16 * 8  # layers, experts, matrices, hidden size, width

    assert matmul_flops_per_token(of_all) - matmul_flops_per_token(MOE) == 2 * idle
