"""The loss against TRL's own, on the same rewards, masks and log-probs.

A GRPOTrainer without a model computes its advantages, corrections and loss in float64. Where the
conventions of TRL differ, they are translated here:

- TRL adds 1e-4 to the standard deviation.
- TRL's cispo bounds the ratio at epsilon_high, not at 1 + epsilon_high, and not from below.
- TRL's bnpo is a mean over the tokens of a microbatch. With one microbatch that is token_mean.
- TRL's entropy bonus is a mean over tokens, whatever the loss is.
- TRL's vespo multiplies the ratio to its old policy by that of the old policy to the sampler. This
  is `old_policy=sampler`. Without vLLM TRL has no other sampler, which is `old_policy=trainer`.
- TRL's off-policy mask and its entropy mask are over a microbatch, and without vLLM the first one
  compares with the old policy. The cases of the masks have one microbatch and the sampler of vLLM.
- TRL's entropy mask also restricts its entropy bonus. The case of that mask has no bonus.
- TRL multiplies its KL by the ratio since 1.16 (use_bias_correction_kl), which is off here.
- TRL's dapo divides by the tokens of all optimizer steps, and since TRL 1.16 also multiplies by the
  number of steps. That is the same in an RL step of one optimizer step.
"""

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import TypeVar

import numpy as np
import pytest
from descriptions import change, describe
from packed_losses import (
    GROUP_SIZE,
    MAX_NEW_TOKENS,
    NUM_PROMPTS,
    ModelOutputs,
    loss_and_slopes,
    packed_minibatches,
    random_outputs,
    small_trainer,
)

from jzero.algorithms import PRESETS
from jzero.types import grade_of

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("quick_compilation")]

Value = TypeVar("Value")

EOS, PAD = 1, 0
REWARD_WEIGHTS = (1.0, 0.5)  # of the named rewards of a rollout
EPS = {"std_eps": 1e-4}
VLLM = {"use_vllm": True, "loss_type": "dapo", "vllm_importance_sampling_clip_max": 1.3}
DAPO = EPS | {"weight": "batch_token_mean", "correction_high": 1.3}
MASK = {"vllm_importance_sampling_clip_min": 0.7}

# Name -> TRL's options; jzero's preset and its changes; microbatches of TRL's step.
CASES: dict[str, tuple[dict, str, dict, int]] = {
    "grpo": ({"loss_type": "grpo"}, "grpo", EPS, 2),
    "grpo, beta": ({"loss_type": "grpo", "beta": 0.04}, "deepseek_grpo", EPS, 2),
    "bnpo": ({"loss_type": "bnpo"}, "trl_018", {"kl_coef": 0.0}, 1),
    "bnpo, beta": ({"loss_type": "bnpo", "beta": 0.04}, "trl_018", {}, 1),
    "dr_grpo": ({"loss_type": "dr_grpo", "scale_rewards": "none"}, "dr_grpo", {}, 2),
    "dapo": (
        {"loss_type": "dapo", "epsilon_high": 0.28},
        "dapo",
        EPS | {"weight": "batch_token_mean", "overlong_share": 0.0},
        2,
    ),
    "dapo, token mean": ({"loss_type": "dapo"}, "grpo", EPS | {"weight": "token_mean"}, 2),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 5.0}, "cispo", EPS, 2),
    "cispo, clipped": (
        {"loss_type": "cispo", "epsilon_high": 1.1},
        "cispo",
        EPS | {"clip_high": 0.1},
        2,
    ),
    "gspo": (
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 3e-4,
            "epsilon_high": 4e-4,
        },
        "gspo",
        EPS,
        2,
    ),
    "gspo, beta": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.04},
        "gspo",
        EPS | {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.04},
        2,
    ),
    "delta": ({"loss_type": "grpo", "delta": 1.5}, "grpo", EPS | {"dual_clip": 1.5}, 2),
    "std of the batch": (
        {"loss_type": "grpo", "scale_rewards": "batch"},
        "grpo",
        EPS | {"advantage": "group_mean_batch_std"},
        2,
    ),
    "masked": (
        {"loss_type": "grpo", "mask_truncated_completions": True},
        "grpo",
        EPS | {"truncated": "mask"},
        2,
    ),
    "masked, dapo": (
        {"loss_type": "dapo", "mask_truncated_completions": True},
        "grpo",
        EPS | {"truncated": "mask", "weight": "batch_token_mean"},
        2,
    ),
    "entropy": (
        {"loss_type": "bnpo", "entropy_coef": 0.01},
        "grpo",
        EPS | {"weight": "token_mean", "entropy_coef": 0.01},
        1,
    ),
    "trl_head": (VLLM | {"vllm_importance_sampling_clip_max": 3.0}, "trl_head", {}, 2),
    "sequence_mask": (
        VLLM | MASK,
        "grpo",
        DAPO | {"correction": "sequence_mask", "correction_low": 0.7},
        2,
    ),
    "sequence_truncate": (VLLM, "grpo", DAPO | {"correction": "sequence_truncate"}, 2),
    "token_mask": (
        VLLM | MASK,
        "grpo",
        DAPO | {"correction": "token_mask", "correction_low": 0.7},
        2,
    ),
    "icepop": (
        VLLM
        | {
            "loss_type": "grpo",
            "vllm_importance_sampling_clip_min": 0.5,
            "vllm_importance_sampling_clip_max": 5.0,
        },
        "icepop",
        EPS,
        2,
    ),
    "sapo": ({"loss_type": "sapo"}, "sapo", EPS, 2),
    "sapo, narrow, beta": (
        {
            "loss_type": "sapo",
            "sapo_temperature_pos": 2.0,
            "sapo_temperature_neg": 3.0,
            "beta": 0.04,
        },
        "sapo",
        EPS | {"sapo_tau_positive": 2.0, "sapo_tau_negative": 3.0, "kl_coef": 0.04},
        2,
    ),
    "luspo": (
        {
            "loss_type": "luspo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 2e-3,
            "epsilon_high": 2.5e-3,
        },
        "luspo",
        EPS,
        2,
    ),
    "luspo, masked": (
        {
            "loss_type": "luspo",
            "importance_sampling_level": "sequence",
            "mask_truncated_completions": True,
        },
        "luspo",
        EPS | {"clip_low": 0.2, "clip_high": 0.2, "truncated": "mask"},
        2,
    ),
    "vespo": ({"loss_type": "vespo"}, "vespo", EPS | {"old_policy": "trainer"}, 2),
    "vespo, other powers": (
        {
            "loss_type": "vespo",
            "vespo_k_pos": 0.5,
            "vespo_lambda_pos": 1.0,
            "vespo_k_neg": 0.0,
            "vespo_lambda_neg": 4.0,
        },
        "vespo",
        EPS
        | {
            "old_policy": "trainer",
            "vespo_k_positive": 0.5,
            "vespo_lambda_positive": 1.0,
            "vespo_k_negative": 0.0,
            "vespo_lambda_negative": 4.0,
        },
        2,
    ),
    "vespo, sampler": (
        VLLM
        | {
            "loss_type": "vespo",
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": 1e6,
        },
        "vespo",
        EPS,
        2,
    ),
    "off-policy mask": (
        VLLM
        | {
            "loss_type": "grpo",
            "off_policy_mask_threshold": 0.05,
            "vllm_importance_sampling_correction": False,
        },
        "grpo",
        EPS | {"off_policy_bound": 0.05},
        1,
    ),
    "top entropy": (
        {"loss_type": "dapo", "top_entropy_quantile": 0.2},
        "grpo",
        EPS | {"weight": "batch_token_mean", "top_entropy": 0.2},
        1,
    ),
    "token_truncate": (VLLM, "grpo", DAPO | {"correction": "token_truncate"}, 2),
}


GDPO = (
    {"loss_type": "grpo", "multi_objective_aggregation": "normalize_then_sum"},
    "gdpo",
    EPS,
    2,
)


def unchanged(x: Value, **_: object) -> Value:
    """What gathering and reducing do on a single process."""
    return x


def make_trl_trainer(options: dict[str, object], correction: str, microbatches: int):
    """Returns a GRPOTrainer that has what its scoring and its loss read, and no model.

    It runs on one process, in a second iteration over its rollouts, so that it wants the old
    log-probs. `options` are attributes of the trainer.
    """
    from trl import GRPOTrainer

    trainer = object.__new__(GRPOTrainer)
    vars(trainer).update(
        accelerator=SimpleNamespace(
            device="cpu",
            num_processes=1,
            process_index=0,
            sync_gradients=True,
            gather=unchanged,
            reduce=unchanged,
            gather_for_metrics=unchanged,
            pad_across_processes=unchanged,
        ),
        args=SimpleNamespace(
            steps_per_generation=microbatches,
            gradient_accumulation_steps=microbatches,
            per_device_train_batch_size=NUM_PROMPTS * GROUP_SIZE // microbatches,
            gradient_checkpointing_kwargs=None,
            delta=options.get("delta"),
            use_bias_correction_kl=False,
            sapo_temperature_pos=options.get("sapo_temperature_pos", 1.0),
            sapo_temperature_neg=options.get("sapo_temperature_neg", 1.05),
            vespo_k_pos=options.get("vespo_k_pos", 2.0),
            vespo_lambda_pos=options.get("vespo_lambda_pos", 3.0),
            vespo_k_neg=options.get("vespo_k_neg", 3.0),
            vespo_lambda_neg=options.get("vespo_lambda_neg", 2.0),
        ),
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        ref_model="ref",
        _tokenizer=SimpleNamespace(pad_token_id=PAD),
        _metrics={"train": defaultdict(list)},
        _logs=defaultdict(list, rewards=defaultdict(list)),
        _pending_extra_logs={},
        _pending_metrics={},
        _is_vlm=False,
        _entropy_bonus_enabled="entropy_coef" in options,
        reward_funcs=[None],
        reward_func_names=["score"],
        current_gradient_accumulation_steps=microbatches,
        num_generations=GROUP_SIZE,
        num_iterations=2,
        max_completion_length=MAX_NEW_TOKENS,
        eos_token_ids=[EOS],
        pad_to_multiple_of=None,
        environment_factories=None,
        environments=None,
        tools=[],
        log_multimodal=False,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        vllm_importance_sampling_mode=correction,
    )
    # Options that the cases change, as they are without a change.
    vars(trainer).update(
        loss_type="grpo",
        importance_sampling_level="token",
        beta=0.0,
        epsilon_low=0.2,
        epsilon_high=0.2,
        entropy_coef=0.0,
        top_entropy_quantile=1.0,
        scale_rewards="group",
        multi_objective_aggregation="sum_then_normalize",
        mask_truncated_completions=False,
        use_vllm=False,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_clip_max=3.0,
        vllm_importance_sampling_clip_min=None,
    )
    vars(trainer).update(options)
    return trainer


def trl_loss_and_slopes(
    trainer, outputs: ModelOutputs, microbatches: int
) -> tuple[float, list[np.ndarray]]:
    """Returns TRL's loss of all rollouts and its derivative by every log-prob, in float64.

    The loss is summed over microbatches. The slopes are an array for each rollout, over its tokens.
    """
    import torch

    rollouts = outputs.rollouts
    width = max(rollout.response_length for rollout in rollouts)

    def responses(arrays: list[np.ndarray]) -> list[np.ndarray]:
        pairs = zip(arrays, rollouts, strict=True)
        return [array[rollout.prompt_length :] for array, rollout in pairs]

    def padded(arrays: list[np.ndarray]):
        rows = [np.pad(row.astype(np.float64), (0, width - len(row))) for row in responses(arrays)]
        return torch.tensor(np.stack(rows))

    def lists(arrays: list[np.ndarray]) -> list[list[float]]:
        return [row.tolist() for row in responses(arrays)]

    # The outputs of the models. TRL asks for them with the name "now" (in its loss), with its
    # reference model, and with its own model (for the old log-probs).
    logps = {
        "now": padded(outputs.logps),
        "old": padded(outputs.old_logps),
        "ref": padded(outputs.ref_logps),
    }
    logps["now"].requires_grad_()
    entropy = padded(outputs.entropy)
    rows = slice(None)  # of the microbatch that is asked for

    def model_outputs(model: object, *_: object, **__: object):
        name = model if isinstance(model, str) else "old"
        return logps[name][rows], entropy[rows], None

    trainer._get_per_token_logps_and_entropies = model_outputs

    # The rollouts, and their scores. TRL knows a truncated response by its last token.
    tokens = [np.maximum(rollout.tokens.ids, EOS + 1) for rollout in rollouts]
    for array, rollout in zip(tokens, rollouts, strict=True):
        array[-1] = EOS if rollout.finish_reason == "stop" else EOS + 1
    generated = (
        [[EOS + 1] * rollout.prompt_length for rollout in rollouts],
        lists(tokens),
        lists([rollout.tokens.sampled.astype(int) for rollout in rollouts]),
        lists(tokens),
        lists([rollout.tokens.logps for rollout in rollouts]),
        {},
        None,
        [],
    )
    grades = [grade_of(rollout) for rollout in rollouts]
    rewards = [list(grade.parts.values()) or [grade.score] for grade in grades]
    scores = torch.tensor(rewards, dtype=torch.float64)
    trainer._generate = lambda _: generated
    trainer._calculate_rewards = lambda *_: scores
    trainer.reward_weights = torch.tensor(REWARD_WEIGHTS[: scores.shape[1]], dtype=torch.float64)
    trainer.reward_funcs = [None] * scores.shape[1]
    trainer.reward_func_names = [f"reward {k}" for k in range(scores.shape[1])]
    inputs = trainer._generate_and_score_completions([{"prompt": ""} for _ in rollouts])

    total_loss = 0.0
    size = len(rollouts) // microbatches
    for start in range(0, len(rollouts), size):
        rows = slice(start, start + size)
        microbatch = {name: x[rows] if x.dim() else x for name, x in inputs.items()}
        loss = trainer._compute_loss("now", microbatch)
        loss.backward()
        total_loss += loss.item()

    slopes = [np.zeros(len(rollout.tokens)) for rollout in rollouts]
    gradient = logps["now"].grad.numpy()
    for slope, row, rollout in zip(slopes, gradient, rollouts, strict=True):
        slope[rollout.prompt_length :] = row[: rollout.response_length]
    return total_loss, slopes


def with_two_rewards(outputs: ModelOutputs) -> ModelOutputs:
    """Returns the outputs with rollouts that have two named rewards, the score and another one."""
    rng = np.random.default_rng(0)
    rollouts = []
    for rollout in outputs.rollouts:
        grade = grade_of(rollout)
        parts = {"accuracy": grade.score, "format": float(rng.choice([0.0, 10.0]))}
        grade = replace(grade, parts=parts)
        turns = tuple(replace(turn, grade=grade) for turn in rollout.turns)
        rollouts.append(replace(rollout, grade=grade, turns=turns))
    return replace(outputs, rollouts=rollouts)


@pytest.mark.parametrize("case", [*CASES, "gdpo"])
def test_loss_and_slopes_are_those_of_trl(case) -> None:
    pytest.importorskip("trl")
    options, preset, changes, microbatches = CASES.get(case, GDPO)
    algorithm = change(PRESETS[preset](), **changes)
    trainer = small_trainer(algorithm, "four packs", rows=2)
    for seed in range(2):
        outputs = random_outputs(seed)
        if case == "gdpo":
            outputs = with_two_rewards(outputs)
            weights = dict(zip(("accuracy", "format"), REWARD_WEIGHTS, strict=True))
            trainer = replace(trainer, credit=replace(trainer.credit, reward_weights=weights))
        trl_trainer = make_trl_trainer(options, describe(algorithm).correction, microbatches)
        expected_loss, expected_slopes = trl_loss_and_slopes(trl_trainer, outputs, microbatches)
        [minibatch] = packed_minibatches(trainer, outputs)

        loss, slopes = loss_and_slopes(
            trainer, trainer.policy, minibatch, outputs.logps, outputs.entropy
        )

        largest = max(np.abs(slope).max() for slope in expected_slopes)
        for i, slope in zip(minibatch.chosen, slopes, strict=True):
            np.testing.assert_allclose(slope, expected_slopes[i], rtol=1e-5, atol=1e-5 * largest)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5, atol=1e-6)
