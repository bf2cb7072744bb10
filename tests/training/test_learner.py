"""Gradients, scores and optimizer steps of the learner, on all packings and meshes.

They are compared with a model that sees one sequence at a time, in float64 (tests/reference.py).
The trainers of most tests hand the gradient on in place of Adam's step, and take a step of FAR.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import jax
import numpy as np
import optax
import pytest
import reference
from descriptions import describe

from jzero.algorithms import Algorithm
from jzero.config import Config, schedules
from jzero.model import qwen
from jzero.sharding.mesh import train_mesh
from jzero.training import step
from jzero.training.heads import Stats
from jzero.training.learner import Batches, Learner
from jzero.training.step import (
    Minibatch,
    divide_groups,
    make_minibatch,
    make_minibatches,
    score_and_credit,
    update_on_rollouts,
)
from jzero.training.trainer import Trainer, make_trainer
from jzero.types import Batch, Rollout, State

pytestmark = pytest.mark.usefixtures("quick_compilation")

GROUP_SIZE = 4
ROLLOUTS = reference.random_rollouts(0, 4, GROUP_SIZE)
PARAMS = reference.random_params()

# A step so long that the parameters before it are lost in rounding: what is left is the gradient.
FAR = 2.0**40

ONE_DEVICE = (1, 1, 1)
# The default suite has meshes that split the rows and the weights.
DATA_ALONE = pytest.param((8, 1, 1), id="(8, 1, 1)")
PACKINGS: dict[str, dict[str, object]] = {
    "own slot": {"packs_per_row": 1, "microbatch_tokens": 512},
    "two slots": {"packs_per_row": 2, "microbatch_tokens": 240},
    "eight slots, two buckets": {
        "packs_per_row": 8,
        "microbatch_tokens": 102,
        "pack": "auto",
    },
    "plain": {"packs_per_row": 0, "microbatch_tokens": 36},
}


def trainer_on(
    config: Config,
    sizes: tuple[int, ...],
    model: qwen.QwenConfig = reference.MODEL,
    critic_model: qwen.QwenConfig | None = None,
) -> Trainer:
    """Returns a trainer on the first devices, on a mesh of the sizes (data, fsdp, tensor).

    A fourth number is the devices that share the tokens of a row (`mesh.context`).
    """
    data, fsdp, tensor, *context = sizes
    mesh = train_mesh(data, fsdp, tensor, jax.devices()[: np.prod(sizes)], *context)
    return make_trainer(config, model, critic_model, mesh)


@cache
def gradient_trainer(packing: str, sizes: tuple[int, ...] = ONE_DEVICE) -> Trainer:
    """Returns a trainer without Adam. Its programs stay compiled from test to test."""
    trainer = trainer_on(reference.settings(train=PACKINGS[packing]), sizes)
    trainer.policy.optimizer = optax.identity()
    return trainer


def members_of(groups: Sequence[int]) -> list[int]:
    """Returns the indices of the groups' rollouts in ROLLOUTS."""
    indices: list[int] = []
    for group in groups:
        indices += range(group * GROUP_SIZE, (group + 1) * GROUP_SIZE)
    return indices


def packed_minibatch(trainer: Trainer, groups: list[list[int]] | None = None) -> Minibatch:
    """Returns ROLLOUTS as one minibatch, with weights and advantages. None is left out.

    `groups` are the indices of the rollouts, in another order than that of ROLLOUTS.
    """
    if groups is None:
        [groups] = divide_groups(
            trainer.updates, trainer.credit.group_size, range(len(ROLLOUTS)), 1
        )
    minibatch = make_minibatch(trainer, ROLLOUTS, groups)
    # Nothing is scored, because the first optimizer step is on policy. So no parameters are read.
    score_and_credit(trainer, trainer.policy.abstract_state(), [minibatch], ROLLOUTS)
    return minibatch


def gradient_in(params: qwen.Params) -> qwen.Params:
    """Returns the gradient that a step of FAR has left in the parameters."""
    return jax.tree.map(lambda x: -np.asarray(x) / FAR, params)


def gradient_of(
    trainer: Trainer, minibatch: Minibatch, params: qwen.Params = PARAMS
) -> tuple[qwen.Params, Stats]:
    """Returns the gradient and the stats of one update, by way of the state that it leaves."""
    policy = trainer.policy
    state = policy.start(reference.placed(policy, params))
    state, stats = policy.update(state, minibatch.batches, minibatch.counts, trainer.layouts, FAR)
    return gradient_in(state.params), jax.device_get(stats)


def score(trainer: Trainer, minibatch: Minibatch) -> list[jax.Array]:
    """Returns the log-probs of the minibatch's targets at PARAMS, as they lie on the mesh."""
    params = reference.placed(trainer.policy, PARAMS)
    return trainer.policy.score(params, minibatch.batches, minibatch.counts, trainer.layouts)


def scores_of_rollouts(trainer: Trainer) -> list[np.ndarray]:
    """Returns the log-probs of ROLLOUTS at PARAMS, for each rollout f32 over its tokens."""
    minibatch = packed_minibatch(trainer)
    scores = [np.zeros(len(rollout.tokens), np.float32) for rollout in ROLLOUTS]
    for packed, rows in zip(minibatch.packed, score(trainer, minibatch), strict=True):
        packed.from_rows(np.asarray(rows), scores)
    return scores


@cache
def slow_step() -> tuple[float, qwen.Params]:
    """Returns the loss and the gradient of one on-policy optimizer step on ROLLOUTS at PARAMS.

    No packing and no mesh changes them.
    """
    config = reference.settings()
    temperature = config.rollout.temperature
    logps, _ = reference.naive(PARAMS, ROLLOUTS, temperature)
    loss, slopes = reference.policy_loss(
        ROLLOUTS, logps, logps, logps, config.algorithm, GROUP_SIZE, config.rollout.max_new_tokens
    )
    return loss, reference.naive_gradient(PARAMS, ROLLOUTS, slopes, temperature)


def sum_over_sampled(values: Sequence[np.ndarray]) -> float:
    """Sums values of all tokens of ROLLOUTS over the sampled tokens."""
    return sum(
        array[rollout.tokens.sampled].sum() for array, rollout in zip(values, ROLLOUTS, strict=True)
    )


def largest_mismatch() -> float:
    """Returns the largest |log pi - log pi_sampler| of the sampled tokens of ROLLOUTS at PARAMS."""
    logps, _ = reference.naive(PARAMS, ROLLOUTS, reference.settings().rollout.temperature)
    return max(
        np.abs(x - rollout.tokens.logps)[rollout.tokens.sampled].max()
        for x, rollout in zip(logps, ROLLOUTS, strict=True)
    )


def assert_same_bits(got: qwen.Params, want: qwen.Params) -> None:
    assert jax.tree.all(jax.tree.map(np.array_equal, got, want))


def assert_scores_are_those_of_each_sequence_alone(scores: list[np.ndarray]) -> None:
    logps, _ = reference.naive(PARAMS, ROLLOUTS, reference.settings().rollout.temperature)
    for got, want, rollout in zip(scores, logps, ROLLOUTS, strict=True):
        response = slice(rollout.prompt_length, None)
        np.testing.assert_allclose(got[response], want[response], atol=1e-5, rtol=0)


# -- packings --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_permuted", [False, True])
@pytest.mark.parametrize("packing", ["own slot", "eight slots, two buckets", "plain"])
def test_gradient_does_not_depend_on_packing(packing: str, is_permuted: bool) -> None:
    trainer = gradient_trainer(packing)
    groups = None
    if is_permuted:
        # The groups are in another order, and each group starts with another of its rollouts.
        groups = [np.roll(members_of([group]), group).tolist() for group in (2, 0, 3, 1)]
    minibatch = packed_minibatch(trainer, groups)

    gradient, stats = gradient_of(trainer, minibatch)

    slow_loss, slow_gradient = slow_step()
    reference.assert_same_gradient(gradient, slow_gradient)
    reference.assert_same_loss(stats["loss"], slow_loss)


@pytest.mark.parametrize("packing", ["eight slots, two buckets", "plain"])
def test_the_small_packings_have_several_microbatches_in_every_layout(packing: str) -> None:
    """Otherwise the test above would not see how microbatches are summed."""
    packed = packed_minibatch(gradient_trainer(packing)).packed

    assert packed[0].num_microbatches > 2
    assert all(batch.num_microbatches > 0 for batch in packed)


def test_score_is_the_log_prob_of_each_sequence_alone() -> None:
    scores = scores_of_rollouts(gradient_trainer("eight slots, two buckets"))

    assert_scores_are_those_of_each_sequence_alone(scores)


def test_only_tokens_of_high_entropy_have_a_gradient() -> None:
    """The entropies are the model's own, and their quantile is over all sequences of the step."""
    settings = reference.settings(train=PACKINGS["two slots"], algorithm={"top_entropy": 0.3})
    trainer = trainer_on(settings, ONE_DEVICE)
    trainer.policy.optimizer = optax.identity()
    state = trainer.policy.start(reference.placed(trainer.policy, PARAMS))
    [minibatch] = make_minibatches(trainer, ROLLOUTS, 1)

    score_and_credit(trainer, state, [minibatch], ROLLOUTS)
    data = minibatch.batches, minibatch.counts, trainer.layouts
    state, _ = trainer.policy.update(state, *data, FAR)

    temperature = settings.rollout.temperature
    logps, entropies = reference.naive(PARAMS, ROLLOUTS, temperature)
    _, slopes = reference.policy_loss(
        ROLLOUTS,
        logps,
        logps,
        logps,
        settings.algorithm,
        GROUP_SIZE,
        settings.rollout.max_new_tokens,
        entropy=entropies,
    )
    num_sampled = sum(rollout.tokens.sampled.sum() for rollout in ROLLOUTS)
    assert 0 < sum(np.count_nonzero(slope) for slope in slopes) < 0.31 * num_sampled
    expected = reference.naive_gradient(PARAMS, ROLLOUTS, slopes, temperature)
    reference.assert_same_gradient(gradient_in(state.params), expected)


# -- meshes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [DATA_ALONE, (2, 2, 2), (1, 8, 1), (1, 2, 4)], ids=str)
def test_gradient_does_not_depend_on_the_mesh(sizes: tuple[int, int, int]) -> None:
    trainer = gradient_trainer("two slots", sizes)

    gradient, stats = gradient_of(trainer, packed_minibatch(trainer))

    slow_loss, slow_gradient = slow_step()
    reference.assert_same_gradient(gradient, slow_gradient)
    reference.assert_same_loss(stats["loss"], slow_loss)
    np.testing.assert_allclose(stats["mismatch_max"], largest_mismatch(), rtol=1e-4)


@pytest.mark.parametrize("sizes", [DATA_ALONE, (2, 2, 2)], ids=str)
def test_score_does_not_depend_on_the_mesh(sizes: tuple[int, int, int]) -> None:
    scores = scores_of_rollouts(gradient_trainer("two slots", sizes))

    assert_scores_are_those_of_each_sequence_alone(scores)


@pytest.mark.parametrize("sizes", [DATA_ALONE, (2, 2, 2)], ids=str)
def test_scoring_batches_with_more_fields_does_not_compile_again(
    sizes: tuple[int, int, int],
) -> None:
    trainer = gradient_trainer("two slots", sizes)
    minibatch = packed_minibatch(trainer)

    minibatch.set_rows("old_logps", score(trainer, minibatch))
    score(trainer, minibatch)

    assert trainer.policy.score_program._cache_size() == 1


@pytest.mark.parametrize("is_tied", [True, False])
def test_head_that_is_split_by_vocabulary_has_the_same_gradient(is_tied: bool) -> None:
    # The 61 tokens of reference.MODEL cannot be split over two devices. 64 can, in chunks of 16.
    model = replace(reference.MODEL, vocab_size=64, tie_word_embeddings=is_tied)
    params = reference.random_params(model)
    config = reference.settings(train=PACKINGS["two slots"], model={"logit_chunk": 16})

    def gradient_on(sizes: tuple[int, int, int]) -> qwen.Params:
        trainer = trainer_on(config, sizes, model)
        trainer.policy.optimizer = optax.identity()
        gradient, _ = gradient_of(trainer, packed_minibatch(trainer), params)
        return gradient

    on_split_head = gradient_on((2, 2, 2))
    on_one_device = gradient_on(ONE_DEVICE)

    # log Z, from which the backward pass computes probabilities, is rounded to 32 bits.
    reference.assert_same_gradient(on_split_head, on_one_device)


def test_fsdp_gathers_weights_and_does_not_sum_activations() -> None:
    """Inside the layers. Left to itself, XLA does the opposite."""
    trainer = gradient_trainer("two slots", (1, 8, 1))
    minibatch = packed_minibatch(trainer)
    programs = trainer.policy.programs(minibatch.batches, trainer.layouts)
    update, arguments = programs["update"]

    hlo = update.lower(*arguments).compile().as_text()

    num_weights = len(("q", "k", "v", "o", "gate", "up", "down"))
    assert len(re.findall(r" all-gather\(", hlo)) >= num_weights
    num_tokens = minibatch.packed[0].batch.tokens[0].size
    assert not re.findall(rf"f32\[{num_tokens},\d+\]\S* all-reduce\(", hlo)


# -- what one step reads and returns ---------------------------------------------------------------
# These tests use the programs of "own slot" again, so they compile nothing.


def with_far_log_probs(batches: Batches) -> Batches:
    """Returns the batches with log-probs of pi_old and of the reference that are far off."""
    return tuple(
        replace(batch, old_logps=batch.sampler_logps + 3.0, ref_logps=batch.weights)
        for batch in batches
    )


def test_the_first_optimizer_step_is_on_policy_whatever_the_old_log_probs() -> None:
    trainer = gradient_trainer("own slot")
    minibatch = packed_minibatch(trainer)
    gradient, stats = gradient_of(trainer, minibatch)

    minibatch.batches = with_far_log_probs(minibatch.batches)
    far_gradient, far_stats = gradient_of(trainer, minibatch)

    assert_same_bits(far_gradient, gradient)
    for name in ("clip_fraction", "ratio_shift"):
        assert stats[name] == 0
        assert far_stats[name] == 0


def test_a_later_optimizer_step_reads_the_old_log_probs() -> None:
    trainer = gradient_trainer("own slot")
    minibatch = packed_minibatch(trainer)
    batches = with_far_log_probs(minibatch.batches)
    policy = trainer.policy
    state = policy.start(reference.placed(policy, PARAMS))

    _, stats = policy.update(
        state, batches, minibatch.counts, trainer.layouts, lr=0.0, is_on_policy=False
    )

    assert stats["clip_fraction"] > 0
    assert stats["ratio_shift"] > 0.5


def with_noise_where_nothing_is_trained(batch: Batch) -> Batch:
    """Returns the batch with other values for targets that are not trained, and for padding."""
    rng = np.random.default_rng(0)
    is_trained = np.asarray(batch.weights) > 0
    is_padding = np.asarray(batch.segments) == 0
    noise = rng.normal(0, 100, is_trained.shape).astype(np.float32)
    other_tokens = rng.integers(0, reference.VOCAB, is_trained.shape).astype(np.int32)
    fields = {
        "advantages": np.where(is_trained, batch.advantages, noise),
        "sampler_logps": np.where(is_trained, batch.sampler_logps, noise),
        "targets": np.where(is_trained, batch.targets, other_tokens),
        "tokens": np.where(is_padding, other_tokens, batch.tokens),
    }
    return replace(batch, **jax.device_put(fields, batch.tokens.sharding))


def test_tokens_that_are_not_trained_and_padding_change_no_bit() -> None:
    """Tokens that the policy did not sample are not trained."""
    trainer = gradient_trainer("own slot")
    minibatch = packed_minibatch(trainer)
    gradient, stats = gradient_of(trainer, minibatch)

    minibatch.batches = tuple(map(with_noise_where_nothing_is_trained, minibatch.batches))
    noisy_gradient, noisy_stats = gradient_of(trainer, minibatch)

    assert_same_bits(noisy_gradient, gradient)
    assert jax.tree.map(float, noisy_stats) == jax.tree.map(float, stats)


def test_negative_weights_train_in_the_other_direction() -> None:
    trainer = gradient_trainer("own slot")
    minibatch = packed_minibatch(trainer)
    gradient, stats = gradient_of(trainer, minibatch)

    batches = []
    for batch in minibatch.batches:
        weights = jax.device_put(-np.asarray(batch.weights), batch.weights.sharding)
        batches.append(replace(batch, weights=weights))
    minibatch.batches = tuple(batches)
    negated, negated_stats = gradient_of(trainer, minibatch)

    assert float(stats["tokens"]) > 0
    assert float(negated_stats["tokens"]) == float(stats["tokens"])
    reference.assert_same_gradient(negated, jax.tree.map(np.negative, gradient))


def test_stats_are_sums_over_trained_tokens() -> None:
    trainer = gradient_trainer("own slot")

    _, stats = gradient_of(trainer, packed_minibatch(trainer))

    logps, entropy = reference.naive(PARAMS, ROLLOUTS, trainer.objective.temperature)
    mismatch = [
        np.abs(x - rollout.tokens.logps) for x, rollout in zip(logps, ROLLOUTS, strict=True)
    ]
    assert stats["tokens"] == sum(rollout.tokens.sampled.sum() for rollout in ROLLOUTS)
    np.testing.assert_allclose(stats["entropy"], sum_over_sampled(entropy), rtol=1e-5)
    np.testing.assert_allclose(stats["nll"], -sum_over_sampled(logps), rtol=1e-5)
    np.testing.assert_allclose(stats["mismatch"], sum_over_sampled(mismatch), rtol=1e-5)
    assert stats["mismatch_tokens"] == stats["tokens"]  # random log-probs are never the same
    np.testing.assert_allclose(stats["mismatch_max"], largest_mismatch(), rtol=1e-4)
    d = [x - rollout.tokens.logps for x, rollout in zip(logps, ROLLOUTS, strict=True)]
    k3 = [np.exp(x) - x - 1 for x in d]
    np.testing.assert_allclose(stats["mismatch_k1"], -sum_over_sampled(d), rtol=1e-5)
    np.testing.assert_allclose(stats["mismatch_k3"], sum_over_sampled(k3), rtol=1e-4)
    ratios = [np.exp(x) for x in d]
    squares = [np.exp(2 * x) for x in d]
    np.testing.assert_allclose(stats["importance"], sum_over_sampled(ratios), rtol=1e-5)
    np.testing.assert_allclose(stats["importance_squared"], sum_over_sampled(squares), rtol=1e-5)


def test_grad_norm_is_the_norm_of_the_whole_gradient() -> None:
    trainer = gradient_trainer("own slot")

    _, stats = gradient_of(trainer, packed_minibatch(trainer))

    _, slow_gradient = slow_step()
    squares = [(leaf**2).sum() for leaf in jax.tree.leaves(slow_gradient)]
    np.testing.assert_allclose(stats["grad_norm"], np.sqrt(sum(squares)), rtol=1e-6)


def test_state_is_donated_and_keeps_its_place() -> None:
    trainer = gradient_trainer("own slot")
    minibatch = packed_minibatch(trainer)
    policy = trainer.policy
    state = policy.start(reference.placed(policy, PARAMS))

    next_state, _ = policy.update(
        state, minibatch.batches, minibatch.counts, trainer.layouts, lr=1e-3
    )

    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert int(next_state.step) == 1
    assert jax.tree.map(lambda x: x.sharding, next_state) == policy.state_shardings


# -- the optimizer inside the update ---------------------------------------------------------------


def test_a_gradient_above_skip_norm_changes_nothing() -> None:
    config = reference.settings(train=PACKINGS["two slots"], optimizer={"skip_norm": 1e-6})
    trainer = trainer_on(config, ONE_DEVICE)
    minibatch = packed_minibatch(trainer)
    policy = trainer.policy
    state = policy.start(reference.placed(policy, PARAMS))

    next_state, stats = policy.update(
        state, minibatch.batches, minibatch.counts, trainer.layouts, lr=1.0
    )

    state_before = policy.start(reference.placed(policy, PARAMS))
    jax.tree.map(np.testing.assert_array_equal, next_state, state_before)
    assert stats["skipped"] == 1
    assert stats["grad_norm"] > 1e-6


# -- several optimizer steps an RL step ------------------------------------------------------------


def standardized_scores(rollouts: list[Rollout]) -> list[float]:
    """Returns (score - mean) / std of every rollout within its group."""
    advantages = []
    for start in range(0, len(rollouts), GROUP_SIZE):
        group = rollouts[start : start + GROUP_SIZE]
        scores = np.array([rollout.grade.score for rollout in group])
        deviation = np.std(scores, ddof=1) + 1e-6
        advantages += ((scores - np.mean(scores)) / deviation).tolist()
    return advantages


class SlowGradient:
    """The gradient of some groups of ROLLOUTS in float64, against log-probs of an earlier policy.

    It keeps the loss and the ratios of every call.
    """

    def __init__(
        self, config: Config, old_params: qwen.Params, reference_params: qwen.Params
    ) -> None:
        self.config = config
        self.old_logps = self.logps_at(old_params)
        self.ref_logps = self.logps_at(reference_params)
        self.losses: list[float] = []
        self.ratios: list[list[np.ndarray]] = []

    def logps_at(self, params: qwen.Params) -> list[np.ndarray]:
        logps, _ = reference.naive(params, ROLLOUTS, self.config.rollout.temperature)
        return logps

    def at(self, params: qwen.Params, groups: Sequence[int]) -> qwen.Params:
        """Returns the gradient at `params` of the loss of the groups."""
        chosen = members_of(groups)
        logps = self.logps_at(params)
        loss, slopes_of_chosen = reference.policy_loss(
            [ROLLOUTS[i] for i in chosen],
            [logps[i] for i in chosen],
            [self.old_logps[i] for i in chosen],
            [self.ref_logps[i] for i in chosen],
            self.config.algorithm,
            GROUP_SIZE,
            self.config.rollout.max_new_tokens,
        )
        self.losses.append(loss)
        ratios = [np.exp(logps[i] - self.old_logps[i])[ROLLOUTS[i].tokens.sampled] for i in chosen]
        self.ratios.append(ratios)

        slopes = [np.zeros(len(rollout.tokens)) for rollout in ROLLOUTS]
        for i, slope in zip(chosen, slopes_of_chosen, strict=True):
            slopes[i] = slope
        temperature = self.config.rollout.temperature
        return reference.naive_gradient(params, ROLLOUTS, slopes, temperature)


def test_minibatches_and_epochs_are_clipped_steps_of_adamw() -> None:
    """The log-probs of pi_old are those before the first optimizer step, for all steps."""
    config = reference.settings(
        train={
            "minibatches": 2,
            "epochs": 2,
            "packs_per_row": 1,
            "microbatch_tokens": 512,
            "seed": 7,
        },
        algorithm={"kl_coef": 0.1, "clip_high": 0.25, "weight": "token_mean"},
        optimizer={
            "lr": 0.05,
            "clip_norm": 0.3,
            "weight_decay": 0.1,
            "eps": 1e-3,
            "warmup": schedules.Steps(10),
        },
    )
    trainer = trainer_on(config, ONE_DEVICE)
    policy = trainer.policy

    def shift(x: jax.Array) -> np.ndarray:
        wave = np.sin(np.arange(x.size)).reshape(x.shape)
        return x + 0.01 * wave.astype(np.float32)

    reference_params = jax.tree.map(shift, PARAMS)

    state = policy.start(reference.placed(policy, PARAMS))
    reference_on_mesh = reference.placed(policy, reference_params)

    with jax.transfer_guard("disallow"):  # of implicit transfers
        result = update_on_rollouts(trainer, state, ROLLOUTS, 1, reference_on_mesh)

    # The same four optimizer steps: two passes over the two halves of the groups.
    slow = SlowGradient(config, PARAMS, reference_params)
    halves = np.split(np.random.default_rng((7, 1)).permutation(4), 2)
    rates = [0.05 * n / 10 for n in (1, 2, 3, 4)]  # the warm-up counts optimizer steps
    gradients = [partial(slow.at, groups=half) for half in halves * 2]
    expected = reference.adamw(PARAMS, gradients, config.optimizer, rates)
    # The differences to the start are compared: the parameters themselves hardly move.
    expected_change = jax.tree.map(np.subtract, expected, PARAMS)
    change = jax.tree.map(lambda x, start: np.asarray(x) - start, result.state.params, PARAMS)
    assert reference.difference(change, expected_change) < 1e-4

    advantages = [rollout.advantage for rollout in result.rollouts]
    np.testing.assert_allclose(advantages, standardized_scores(ROLLOUTS), atol=1e-6)
    metrics = result.metrics
    np.testing.assert_allclose(metrics["optimizer/loss"], np.mean(slow.losses), rtol=1e-4)
    assert metrics["optimizer/lr"] == pytest.approx(rates[-1])
    assert 0 < metrics["policy/clip_fraction"] < 0.5
    assert metrics["policy/kl"] > 0

    # The first minibatch is on policy.
    assert all(abs(ratios - 1).max() < 1e-5 for ratios in slow.ratios[0])
    assert policy.update_program._cache_size() == 1
    assert policy.score_program._cache_size() == 1


# -- the critic ------------------------------------------------------------------------------------


@partial(jax.jit, static_argnums=0)
def values_before(model: qwen.QwenConfig, params: qwen.Params, tokens: np.ndarray) -> jax.Array:
    """Returns the values [N, T - 1] of the states before the tokens 1, 2, ... of each row."""
    return reference.hidden(model, params, tokens)[:, :-1] @ params["value"]


def slow_critic_step(
    model: qwen.QwenConfig, params: qwen.Params, algorithm: Algorithm
) -> tuple[float, qwen.Params, list[float]]:
    """Computes one optimizer step of the critic on ROLLOUTS in float64, a token at a time.

    Returns the loss per token, its gradient, and the mean advantage of every rollout.
    """
    numbers = describe(algorithm)
    tokens = reference.padded([rollout.tokens.ids for rollout in ROLLOUTS])
    num_sampled = sum(rollout.tokens.sampled.sum() for rollout in ROLLOUTS)
    loss = 0.0
    mean_advantages = []
    with jax.enable_x64(True):
        doubles = reference.doubles(params)
        values = np.asarray(values_before(model, doubles, tokens))
        slopes = np.zeros_like(values)
        for i, rollout in enumerate(ROLLOUTS):
            # The value in column t is that of the state before token t + 1.
            columns = np.flatnonzero(rollout.tokens.sampled) - 1
            reward = rollout.grade.score  # comes with the last token
            next_value = 0.0
            advantage = 0.0
            total = 0.0
            for t in columns[::-1]:
                delta = reward + numbers.gamma * next_value - values[i, t]
                advantage = delta + numbers.gamma * numbers.lam * advantage
                total += advantage
                # The target of the critic is V + A, so V - target is -A.
                slopes[i, t] = -numbers.value_coef * advantage / num_sampled
                loss += 0.5 * advantage**2 / num_sampled
                next_value = values[i, t]
                reward = 0.0
            mean_advantages.append(total / len(columns))

        @jax.jit
        @jax.grad
        def gradient_at(params: qwen.Params) -> jax.Array:
            return (values_before(model, params, tokens) * slopes).sum()

        gradient = jax.device_get(gradient_at(doubles))
    return loss, gradient, mean_advantages


def test_values_and_their_loss_are_those_of_each_sequence_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = reference.settings(
        train=PACKINGS["two slots"],
        algorithm={
            "advantage": "gae",
            "weight": "token_mean",
            "lam": 0.9,
            "gamma": 0.95,
            "value_coef": 0.7,
        },
        # The policy waits during the first RL step, so only programs of the critic are compiled.
        critic={"warmup_steps": 1},
    )
    model = replace(reference.MODEL, value_head=True)
    trainer = trainer_on(config, (2, 2, 2), critic_model=model)
    assert trainer.critic is not None
    trainer.critic.optimizer = optax.identity()
    monkeypatch.setattr(step, "learning_rate", lambda *_: FAR)  # optimizer.lr has a bound

    def start(learner: Learner, params: qwen.Params) -> State:
        return learner.start(reference.placed(learner, params))

    critic_params = reference.random_params(model)
    critic_state = start(trainer.critic, critic_params)
    state = replace(start(trainer.policy, PARAMS), critic=critic_state)

    with jax.transfer_guard("disallow"):  # of implicit transfers
        result = update_on_rollouts(trainer, state, ROLLOUTS, 1)

    loss, gradient, advantages = slow_critic_step(model, critic_params, config.algorithm)
    assert result.state.critic is not None
    reference.assert_same_gradient(gradient_in(result.state.critic.params), gradient)
    np.testing.assert_allclose(result.metrics["critic/loss"], loss, rtol=1e-5)
    got_advantages = [rollout.advantage for rollout in result.rollouts]
    np.testing.assert_allclose(got_advantages, advantages, atol=1e-5)


# -- a loss as an argument, and the two halves of an update ----------------------------------------


def mean_logp_loss(
    outputs: tuple[jax.Array, ...],
    batch: Batch[jax.Array],
    sequence_sum: object,
    is_on_policy: jax.Array,
) -> tuple[jax.Array, Stats]:
    """The loss of supervised fine-tuning."""
    return batch.weights * -outputs[0], {"nll": -outputs[0]}


@pytest.mark.parametrize("packing", ["two slots"])
def test_a_given_loss_has_its_own_gradient_and_is_compiled_once(packing: str) -> None:
    trainer = gradient_trainer(packing)
    policy, minibatch = trainer.policy, packed_minibatch(trainer)
    data = minibatch.batches, minibatch.counts, trainer.layouts
    state = policy.start(reference.placed(policy, PARAMS))
    before = policy.gradient_program._cache_size()

    own, own_stats = policy.gradient(state, *data)
    given, given_stats = policy.gradient(state, *data, mean_logp_loss)
    policy.gradient(state, *data, mean_logp_loss)

    weights = [np.zeros(len(rollout.tokens)) for rollout in ROLLOUTS]
    for part in minibatch.packed:
        part.from_rows(part.batch.weights, [weights[index] for index in minibatch.chosen])
    expected = reference.naive_gradient(PARAMS, ROLLOUTS, [-row for row in weights], 0.7)
    reference.assert_same_gradient(jax.device_get(given), expected, 1e-5)
    assert set(given_stats) == {"nll", "tokens", "loss"}
    # The program of the update, without the step.
    update_gradient, update_stats = gradient_of(trainer, minibatch)
    reference.assert_same_gradient(jax.device_get(own), update_gradient, 1e-6)
    assert set(own_stats) == set(update_stats) - {"grad_norm", "skipped"}
    assert policy.gradient_program._cache_size() == before + 2


def test_gradients_are_added_and_a_step_is_that_of_an_update() -> None:
    """Two halves of a batch, whose weights are normalized over both."""
    trainer = trainer_on(
        reference.settings(train=PACKINGS["two slots"], optimizer={"lr": 1e-2, "eps": 1e-3}),
        ONE_DEVICE,
    )
    policy = trainer.policy
    whole = packed_minibatch(trainer)
    data = whole.batches, whole.counts, trainer.layouts
    state, stats = policy.update(policy.start(reference.placed(policy, PARAMS)), *data, 1e-2)

    # The weights of the last tokens of half of the answers are 0, and then those of the others.
    total = None
    begun = policy.start(reference.placed(policy, PARAMS))
    for half in (0, 1):
        masks = [
            np.full(len(rollout.tokens), number % 2 == half, np.float32)
            for number, rollout in enumerate(ROLLOUTS)
        ]
        chosen = [masks[index] for index in whole.chosen]
        batches = tuple(
            replace(batch, weights=batch.weights * part.to_rows(chosen))
            for batch, part in zip(whole.batches, whole.packed, strict=True)
        )
        total, _ = policy.gradient(begun, batches, whole.counts, trainer.layouts, into=total)
    assert total is not None
    stepped, step_stats = policy.step(begun, total, 1e-2)

    def change(state: State) -> qwen.Params:
        return jax.tree.map(lambda x, start: np.asarray(x) - start, state.params, PARAMS)

    assert reference.difference(change(stepped), change(state)) < 1e-4
    np.testing.assert_allclose(step_stats["grad_norm"], stats["grad_norm"], rtol=1e-5)
    assert int(stepped.step) == 1
