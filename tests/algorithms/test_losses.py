"""Every algorithm's loss and per-token gradient against tests/reference.py: float64 loops."""

import itertools

import jax
import numpy as np
import pytest
import reference
from descriptions import change, describe
from packed_losses import (
    GROUP_SIZE,
    MAX_NEW_TOKENS,
    PACKINGS,
    assert_same_loss,
    loss_and_slopes,
    packed_minibatches,
    random_outputs,
    small_trainer,
)

from jzero.algorithms import PRESETS, WEIGHTS
from jzero.fields import part_name
from jzero.training.step import make_minibatches

pytestmark = pytest.mark.usefixtures("quick_compilation")

HIGH = {"correction_high": 1.25}
BOUNDS = {"correction_low": 0.8, "correction_high": 1.25}
NARROW_BOUNDS = {"correction_low": 0.95, "correction_high": 1.05}

TRUNCATIONS = ("token_truncate", "sequence_truncate")
MASKS = ("token_mask", "sequence_mask", "geometric")

# Name -> preset, and the fields that the case changes.
CASES: dict[str, tuple[str, dict[str, object]]] = {
    **{name: (name, {}) for name in PRESETS},
    **{f"weight: {name}": ("grpo", {"weight": name}) for name in map(part_name, WEIGHTS)},
    **{f"correction: {name}": ("grpo", {"correction": name, **HIGH}) for name in TRUNCATIONS},
    **{f"correction: {name}": ("grpo", {"correction": name, **BOUNDS}) for name in MASKS},
    "correction: geometric": ("grpo", {"correction": "geometric", **NARROW_BOUNDS}),
    "k1 in the reward, leave one out": ("rloo", {"kl_reward": 0.05}),
    "k1 in the reward, return to go": ("reinforce_pp", {"kl_reward": 0.05}),
    "k2": ("reinforce_pp_baseline", {"kl_coef": 0.05}),
    "k2 with a bound and its own weight": (
        "grpo",
        {"kl_estimator": "k2", "kl_coef": 0.1, "kl_max": 0.02, "kl_weight": "sequence_sum"},
    ),
    "k3 with a bound": ("dr_grpo", {"kl_coef": 0.1, "kl_max": 0.02}),
    "dual clip": ("grpo", {"dual_clip": 1.5}),
    "dual clip of sequences": ("gspo", {"dual_clip": 1.2}),
    "entropy": ("dapo", {"entropy_coef": 0.01}),
    "truncated: fixed": ("grpo", {"truncated": "fixed", "truncated_score": -0.5}),
    "truncated: ignore": ("grpo", {"truncated": "ignore", "truncated_score": -0.5}),
    "truncated: mask": ("grpo", {"truncated": "mask"}),
    "truncated: mask, sequences": (
        "gspo",
        {"truncated": "mask", "kl_coef": 0.01, "correction": "geometric", **BOUNDS},
    ),
    "truncated: mask, KL with its own weight": (
        "grpo",
        {"truncated": "mask", "kl_coef": 0.1, "kl_weight": "sequence_sum"},
    ),
    "truncated: mask, token mean": ("cispo", {"truncated": "mask"}),
    "truncated: penalty": ("dr_grpo", {"truncated_penalty": 0.3, "overlong_share": 0.5}),
    "length_norm": ("dr_grpo", {"length_norm": 5}),
    "std of the batch": ("grpo", {"advantage": "group_mean_batch_std", "std_eps": 1e-4}),
    "gamma and lambda": ("ppo", {"gamma": 0.9, "lam": 0.7, "whiten": False}),
    "gamma": ("reinforce_pp", {"gamma": 0.9}),
    "clipped sequences of cispo": (
        "cispo",
        {"ratio": "sequence", "clip_low": 0.02, "clip_high": 0.02},
    ),
    "penalty of the ratio": ("grpo", {"ratio_penalty": 0.05}),
    "dppo_tv to the trainer's policy": ("dppo_tv", {"old_policy": "trainer", "clip_high": 0.005}),
    "dppo_kl with narrow bounds": ("dppo_kl", {"clip_low": 1e-4, "clip_high": 2e-4}),
    "ipo with narrow bounds": ("ipo", {"clip_low": 0.002, "clip_high": 0.004}),
    "sapo with narrow gates": ("sapo", {"sapo_tau_positive": 2.0, "sapo_tau_negative": 3.0}),
    "sapo of sequences": ("sapo", {"ratio": "sequence"}),
    "luspo, masked": ("luspo", {"truncated": "mask", "kl_coef": 0.01}),
    "vespo to the trainer's policy": ("vespo", {"old_policy": "trainer"}),
    "vespo with other powers": (
        "vespo",
        {"vespo_k_positive": 0.5, "vespo_lambda_positive": 1.0, "vespo_k_negative": 0.0},
    ),
    "clipped products": ("grpo", {"ratio": "product", "clip_low": 0.5, "clip_high": 1.0}),
    "off-policy sequences": ("grpo", {"off_policy_bound": 0.05}),
    "off-policy sequences of dppo": ("dppo_tv", {"off_policy_bound": 0.01, "truncated": "mask"}),
    "tokens of high entropy": ("grpo", {"top_entropy": 0.2, "entropy_coef": 0.01}),
    "tokens of high entropy, masked": ("gspo", {"top_entropy": 0.5, "truncated": "mask"}),
    "wide geometric rejection": ("geometric_rejection", NARROW_BOUNDS),
    "replies beside truncated responses": ("echo", {"truncated": "mask", "kl_coef": 0.01}),
    "teacher with a bound": ("distill", {"teacher_coef": 2.0, "teacher_max": 0.5}),
    "teacher beside whitened rewards": ("reinforce_pp", {"teacher_coef": 0.3}),
    "teacher and the sampler's log-probs": ("distill", {"old_policy": "sampler"}),
    "cross-entropy alone": ("grpo", {"rl_coef": 0.0, "ce_coef": 1.0, "weight": "token_mean"}),
    "cross-entropy of correct responses": (
        "grpo",
        {"ce_coef": 0.1, "ce_tokens": "correct", "ce_weight": "token_mean"},
    ),
    "three parts with their own weights": (
        "dr_grpo",
        {
            "rl_coef": 0.5,
            "ce_coef": 0.2,
            "ce_weight": "sequence_mean",
            "kl_coef": 0.1,
            "kl_weight": "token_mean",
        },
    ),
    "no surrogate, entropy and KL": ("grpo", {"rl_coef": 0.0, "entropy_coef": 0.1, "kl_coef": 1.0}),
    "alone: reinforce_pp": ("reinforce_pp", {"kl_reward": 0.01}),
    "alone: distill": ("distill", {}),
    "alone: ppo": ("ppo", {"kl_reward": 0.01}),
    "alone: decoupled_ppo": ("decoupled_ppo", {"kl_reward": 0.01}),
}

# Packing, rows of a microbatch on each device, and devices.
PLACEMENTS = list(itertools.product(PACKINGS, (1, 2, 4), (1, 8)))


def placed_cases() -> list[object]:
    """Returns (case, packing, rows, devices, pack) for every case.

    The presets grpo, gspo and ppo have all placements, the other presets have one for each packing,
    and the other cases have one, with two pack lengths.
    """
    parameters = []
    for number, case in enumerate(CASES):
        # 7 has no factor in common with the 18 placements: neighbors differ in all respects.
        one = {PLACEMENTS[7 * number % len(PLACEMENTS)]}
        one_of_each_packing = {PLACEMENTS[6 * i + (number + i) % 6] for i in range(len(PACKINGS))}
        if case in ("grpo", "gspo", "ppo"):
            placements = set(PLACEMENTS)
        elif case in PRESETS:
            placements = one | one_of_each_packing
        else:
            placements = one
            [placement] = one
            parameters.append((case, *placement, "longest"))
        for placement in PLACEMENTS:
            if placement in placements:
                parameters.append((case, *placement, "auto"))
    return parameters


@pytest.mark.parametrize(("case", "packing", "rows", "devices", "pack"), placed_cases())
def test_policy_loss_and_slopes_are_those_of_the_definition(
    case, packing, rows, devices, pack
) -> None:
    preset, changes = CASES[case]
    algorithm = change(PRESETS[preset](), **changes)
    group_size = 1 if case.startswith("alone") else GROUP_SIZE
    num_minibatches = 2 if case.startswith("weight") else 1
    trainer = small_trainer(algorithm, packing, rows, devices, num_minibatches, group_size, pack)
    num_truncated = 0

    for seed in range(2):
        outputs = random_outputs(seed)
        minibatches = packed_minibatches(trainer, outputs)
        assert len(minibatches) == num_minibatches
        if rows * devices == 1:  # then there must be several microbatches to sum over
            for minibatch in minibatches:
                assert max(packed.num_microbatches for packed in minibatch.packed) > 2

        for minibatch in minibatches:
            loss, slopes = loss_and_slopes(
                trainer, trainer.policy, minibatch, outputs.logps, outputs.entropy
            )

            expected_loss, expected_slopes = reference.policy_loss(
                outputs.rollouts,
                outputs.logps,
                outputs.old_logps,
                outputs.ref_logps,
                algorithm,
                group_size,
                MAX_NEW_TOKENS,
                minibatch.members,
                entropy=outputs.entropy,
                values=outputs.old_values,
                teacher=outputs.teacher_logps,
            )
            for i in set(minibatch.members) - set(minibatch.chosen):
                assert not expected_slopes[i].any()  # it was left out: nothing was lost
            expected = [expected_slopes[i] for i in minibatch.chosen]
            assert_same_loss(loss, slopes, expected_loss, expected)
            rollouts = [outputs.rollouts[i] for i in minibatch.chosen]
            for slope, rollout in zip(slopes, rollouts, strict=True):
                has_loss = rollout.tokens.sampled.copy()
                if algorithm.environment_coef:
                    has_loss[rollout.prompt_length :] = True
                assert not slope[~has_loss].any()
            num_truncated += sum(
                outputs.rollouts[i].finish_reason == "length" for i in minibatch.members
            )
    assert num_truncated > 3


CHANGED_VALUE_LOSS = {"value_clip": 0.0, "value_coef": 0.5, "gamma": 0.9}


@pytest.mark.parametrize(
    ("packing", "rows", "devices", "changes"),
    [
        ("plain", 2, 8, {}),
        ("four packs", 1, 8, CHANGED_VALUE_LOSS),
        ("one pack", 4, 1, {}),
        ("four packs", 1, 8, {}),
        ("plain", 2, 8, CHANGED_VALUE_LOSS),
        ("one pack", 4, 1, CHANGED_VALUE_LOSS),
    ],
)
def test_value_loss_and_slopes_are_those_of_the_definition(packing, rows, devices, changes) -> None:
    algorithm = change(PRESETS["ppo"](), **changes)
    trainer = small_trainer(algorithm, packing, rows, devices)
    assert trainer.critic is not None
    outputs = random_outputs(3)
    [minibatch] = packed_minibatches(trainer, outputs)

    loss, slopes = loss_and_slopes(trainer, trainer.critic, minibatch, outputs.values)

    weights = reference.token_weights(outputs.rollouts, algorithm, MAX_NEW_TOKENS)
    _, targets = reference.advantages_of(
        outputs.rollouts,
        outputs.old_logps,
        outputs.ref_logps,
        algorithm,
        GROUP_SIZE,
        MAX_NEW_TOKENS,
        outputs.old_values,
    )
    expected_loss = 0.0
    expected_slopes = [np.zeros(len(values)) for values in outputs.values]
    for i, weight in enumerate(weights):
        for t in np.flatnonzero(weight):
            term, slope = reference.value_loss(
                float(outputs.values[i][t]),
                float(outputs.old_values[i][t]),
                float(targets[i][t]),
                algorithm,
            )
            expected_loss += weight[t] * term
            expected_slopes[i][t] = weight[t] * slope
    expected = [expected_slopes[i] for i in minibatch.chosen]
    assert_same_loss(loss, slopes, expected_loss, expected)

    num_clipped = 0
    for i, slope in zip(minibatch.chosen, slopes, strict=True):
        num_clipped += int((slope[outputs.rollouts[i].tokens.sampled] == 0).sum())
    assert (num_clipped > 0) == (describe(algorithm).value_clip > 0)


@pytest.mark.parametrize("preset", ["grpo", "gspo"])
def test_the_first_optimizer_step_has_a_ratio_of_exactly_one(preset) -> None:
    """The old log-probs do not matter, bit for bit, in the first step; they do in the next."""
    trainer = small_trainer(PRESETS[preset](), "four packs", rows=2, pack="longest")
    policy, params = trainer.policy, reference.random_params()
    rollouts = random_outputs(0).rollouts
    [minibatch] = make_minibatches(trainer, rollouts, 1)
    rng = np.random.default_rng(0)

    def noise(scale: float) -> list[np.ndarray]:
        return [rng.normal(0, scale, len(r.tokens)).astype(np.float32) for r in rollouts]

    minibatch.set_values(policy, "advantages", noise(1.0))

    def update(is_first: bool):
        """Returns parameters and stats of an update with other old log-probs in each call."""
        minibatch.set_values(policy, "old_logps", noise(100.0))
        state, stats = policy.update(
            policy.start(reference.placed(policy, params)),
            minibatch.batches,
            minibatch.counts,
            trainer.layouts,
            1e-2,
            is_first,
        )
        return jax.device_get((state.params, stats))

    first_params, first_stats = update(True)
    again_params, _ = update(True)
    _, later_stats = update(False)

    assert first_stats["ratio_shift"] == 0
    assert first_stats["clip_fraction"] == 0
    assert first_stats["grad_norm"] > 0
    assert jax.tree.all(jax.tree.map(np.array_equal, first_params, again_params))
    assert later_stats["ratio_shift"] > 0
    assert later_stats["clip_fraction"] > 0
