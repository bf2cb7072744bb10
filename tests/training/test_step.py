"""Metrics of an RL step, and the shapes of its batches."""

from collections.abc import Mapping

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from jzero.algorithms.metrics import LOSS_METRICS, LossMetric
from jzero.sharding.mesh import train_mesh
from jzero.tokens import Tokens
from jzero.training.packing import TrainingSequence, pack
from jzero.training.step import update_metrics
from jzero.training.trainer import make_trainer, microbatch_rows
from jzero.types import RowLayout

# -- metrics ---------------------------------------------------------------------------------------

FIRST_STATS = {
    "tokens": 10.0,
    "entropy": 20.0,
    "clip_fraction": 1.0,
    "mismatch": 0.5,
    "mismatch_max": 0.25,
    "mismatch_k1": -0.2,
    "mismatch_k3": 0.1,
    "mismatch_tokens": 7.0,
    "importance": 10.0,
    "importance_squared": 20.0,
    "loss": 0.3,
    "grad_norm": 2.0,
    "skipped": 0.0,
}
SECOND_STATS = {
    "tokens": 30.0,
    "entropy": 30.0,
    "clip_fraction": 5.0,
    "mismatch": 9.0,
    "mismatch_max": 3.0,
    "mismatch_k1": 4.0,
    "mismatch_k3": 5.0,
    "mismatch_tokens": 30.0,
    "importance": 20.0,
    "importance_squared": 70.0,
    "loss": 0.1,
    "grad_norm": 4.0,
    "skipped": 1.0,
}


def policy_metrics(*stats: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of optimizer steps that only the policy made."""
    return update_metrics(stats, [])


def test_diagnostics_are_means_over_the_tokens_of_all_optimizer_steps() -> None:
    metrics = policy_metrics(FIRST_STATS, SECOND_STATS)

    assert metrics["policy/entropy"] == 50 / 40
    assert metrics["policy/clip_fraction"] == 6 / 40


def test_losses_and_norms_are_means_over_optimizer_steps() -> None:
    metrics = policy_metrics(FIRST_STATS, SECOND_STATS)

    assert metrics["optimizer/loss"] == pytest.approx(0.2)
    assert metrics["optimizer/grad_norm"] == 3.0
    assert metrics["optimizer/skipped"] == 0.5


def test_the_mismatch_is_that_before_the_first_optimizer_step() -> None:
    metrics = policy_metrics(FIRST_STATS, SECOND_STATS)

    assert metrics["policy/mismatch"] == 0.05
    assert metrics["policy/mismatch_max"] == 0.25
    assert metrics["policy/mismatch_k1"] == -0.02
    assert metrics["policy/mismatch_k3"] == 0.01
    assert metrics["policy/mismatch_tokens"] == 7


def test_the_effective_sample_size_is_of_the_tokens_of_all_optimizer_steps() -> None:
    metrics = policy_metrics(FIRST_STATS, SECOND_STATS)

    assert metrics["policy/effective_samples"] == pytest.approx(30**2 / (40 * 90))


def test_the_kl_is_a_metric_only_where_there_is_a_reference_policy() -> None:
    without_reference = policy_metrics(FIRST_STATS)
    with_reference = policy_metrics(FIRST_STATS | {"kl": 4.0})

    assert "policy/kl" not in without_reference
    assert with_reference["policy/kl"] == 0.4


def test_a_metric_of_a_user_defined_loss_is_a_mean_over_the_trained_tokens() -> None:
    first = FIRST_STATS | {"mine/margin": 5.0, "only_summed": 3.0}
    second = SECOND_STATS | {"mine/margin": 15.0, "only_summed": 3.0}

    metrics = policy_metrics(first, second)

    assert metrics["mine/margin"] == 20 / 40
    assert "only_summed" not in metrics


def test_an_entry_of_the_table_decides_how_a_metric_is_reduced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    largest = LossMetric("mine/largest", "The largest margin.", reduction="max")
    monkeypatch.setitem(LOSS_METRICS, "margin", largest)

    metrics = policy_metrics(FIRST_STATS | {"margin": 5.0}, SECOND_STATS | {"margin": 15.0})

    assert metrics["mine/largest"] == 15


def test_means_over_tokens_are_no_metrics_where_nothing_was_trained() -> None:
    """A mean of 0 would be taken for an entropy of 0."""
    nothing = dict.fromkeys(FIRST_STATS, 0.0)

    metrics = policy_metrics(nothing)

    assert all(np.isfinite(value) for value in metrics.values())
    assert set(metrics) == {"optimizer/grad_norm", "optimizer/skipped", "optimizer/loss"}


def test_an_optimizer_step_on_nothing_changes_no_mean_over_tokens() -> None:
    nothing = dict.fromkeys(FIRST_STATS, 0.0)

    metrics = policy_metrics(nothing, FIRST_STATS)

    assert metrics["policy/entropy"] == policy_metrics(FIRST_STATS)["policy/entropy"]
    assert "policy/mismatch" not in metrics  # the first optimizer step computed no log-probs


# -- shapes ----------------------------------------------------------------------------------------

LAYOUT = RowLayout(6, 2, 12)  # 30 tokens


@pytest.mark.parametrize(("microbatch_tokens", "rows"), [(120, 4), (239, 4), (240, 8), (1000, 32)])
def test_a_microbatch_has_as_many_rows_as_hold_its_tokens_on_every_data_shard(
    microbatch_tokens: int, rows: int
) -> None:
    train = reference.settings(train={"microbatch_tokens": microbatch_tokens}).train

    assert microbatch_rows(train, train_mesh(2, 2, 2), LAYOUT, 10**6) == rows


def test_a_microbatch_smaller_than_a_row_on_every_data_shard_is_refused() -> None:
    train = reference.settings(train={"microbatch_tokens": 119}).train

    message = r"train.microbatch_tokens=119 .* set it to at least 120, or lower train.packs_per_row"
    with pytest.raises(ValueError, match=message):
        microbatch_rows(train, train_mesh(2, 2, 2), LAYOUT, 10**6)


def random_sequence(rng: np.random.Generator) -> TrainingSequence:
    """Returns a prompt of 6 tokens with a response of up to 12, often of exactly 12."""
    length = 6 + int(rng.choice([12, rng.integers(1, 13)]))
    zeros = np.zeros(length, np.float32)
    return TrainingSequence(Tokens(np.ones(length)), 6, zeros)


@given(
    group_size=st.integers(2, 9),
    slots_per_row=st.integers(0, 9),
    packs=st.sampled_from(["longest", "auto", "12,6,3"]),
    minibatches=st.sampled_from([1, 2]),
    microbatch_tokens=st.integers(1000, 4000),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=40)
def test_a_run_never_needs_more_microbatches_than_it_compiled(
    group_size: int,
    slots_per_row: int,
    packs: str,
    minibatches: int,
    microbatch_tokens: int,
    seed: int,
) -> None:
    """More would be another shape, and another compilation in the middle of a run."""
    config = reference.settings(
        rollout={"group_size": group_size},
        train={
            "packs_per_row": slots_per_row,
            "pack": packs,
            "minibatches": minibatches,
            "microbatch_tokens": microbatch_tokens,
        },
    )
    trainer = make_trainer(config, reference.MODEL, None, train_mesh(-1, 1, 1))
    rng = np.random.default_rng(seed)
    num_groups = 4 // minibatches
    groups = [[random_sequence(rng) for _ in range(group_size)] for _ in range(num_groups)]

    packed = pack(groups, trainer.layouts, trainer.rows, trainer.microbatches)

    for batch, compiled_microbatches in zip(packed, trainer.microbatches, strict=True):
        assert batch.batch.tokens.shape[0] == max(1, compiled_microbatches)
