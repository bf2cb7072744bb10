"""The loss against TRL's own: GRPOTrainer's advantages, corrections and loss, on the same rewards, masks and log-probs.

Conventions that differ, and are translated here: TRL adds 1e-4 to the standard deviation; its cispo bounds the ratio at
epsilon_high, not 1 + epsilon_high, and not from below; its bnpo is a mean over the tokens of a microbatch, which is
token_mean where the step has one; its entropy bonus is a mean over tokens whatever the loss is; its dapo divides by
the tokens of all optimizer steps, TRL 1.16's also multiplies by their number: the same where there is one."""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import reference
from test_algorithms import (
    GROUP,
    MAX_NEW,
    PROMPTS,
    Given,
    differentiate,
    given_of,
    small_trainer,
    scored_parts,
)

from jzero.algorithms import PRESETS

pytestmark = pytest.mark.peer

EOS, PAD = 1, 0
EPS = {"std_eps": 1e-4}
VLLM = {"use_vllm": True, "loss_type": "dapo", "vllm_importance_sampling_clip_max": 1.3}
DAPO = EPS | {"weight": "batch_token_mean", "correction_high": 1.3}
MASK = {"vllm_importance_sampling_clip_min": 0.7}
# name -> TRL's options; preset and its changes; microbatches of TRL's step
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
    "token_truncate": (VLLM, "grpo", DAPO | {"correction": "token_truncate"}, 2),
}


def make_trl(options: dict, correction: str, microbatches: int):
    """A GRPOTrainer with what its scoring and its loss read, and no model; on one process, in a second iteration, so
    that it wants the old log-probs."""
    from trl import GRPOTrainer

    same = lambda x, **_: x
    process = {"device": "cpu", "num_processes": 1, "process_index": 0, "sync_gradients": True}
    args = {"steps_per_generation": microbatches, "gradient_accumulation_steps": microbatches}
    args |= {
        "per_device_train_batch_size": PROMPTS * GROUP // microbatches,
        "gradient_checkpointing_kwargs": None,
    }
    args |= {"delta": options.get("delta"), "use_bias_correction_kl": False}
    fields = {
        "accelerator": SimpleNamespace(
            gather=same, reduce=same, gather_for_metrics=same, **process
        ),
        "args": SimpleNamespace(**args),
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "ref_model": "ref",
        "_tokenizer": SimpleNamespace(pad_token_id=PAD),
        "_metrics": {"train": defaultdict(list)},
        "_logs": defaultdict(list, rewards=defaultdict(list)),
        **{
            "reward_funcs": [None],
            "reward_func_names": ["score"],
            "_pending_extra_logs": {},
            "_pending_metrics": {},
        },
        **{
            "current_gradient_accumulation_steps": microbatches,
            "num_generations": GROUP,
            "num_iterations": 2,
        },
        **{
            "max_completion_length": MAX_NEW,
            "eos_token_ids": [EOS],
            "pad_to_multiple_of": None,
            "_is_vlm": False,
        },
        **{
            "environment_factories": None,
            "environments": None,
            "tools": [],
            "log_multimodal": False,
        },
        **{
            "off_policy_mask_threshold": None,
            "aux_loss_enabled": False,
            "use_adaptive_entropy": False,
        },
        # options, as they are by default here
        **{
            "loss_type": "grpo",
            "importance_sampling_level": "token",
            "beta": 0.0,
            "epsilon_low": 0.2,
        },
        **{
            "epsilon_high": 0.2,
            "entropy_coef": 0.0,
            "top_entropy_quantile": 1.0,
            "scale_rewards": "group",
        },
        **{
            "multi_objective_aggregation": "sum_then_normalize",
            "mask_truncated_completions": False,
        },
        **{
            "use_vllm": False,
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_mode": correction,
        },
        **{"vllm_importance_sampling_clip_max": 3.0, "vllm_importance_sampling_clip_min": None},
        "_entropy_bonus_enabled": "entropy_coef" in options,
    }
    trainer = object.__new__(GRPOTrainer)
    vars(trainer).update(fields | options)
    return trainer


def trl_loss(trainer, data: Given, microbatches: int) -> tuple[float, list[np.ndarray]]:
    """TRL's loss of a generation batch, summed over its microbatches, and its derivative by every log-prob, float64."""
    import torch

    rollouts = data.rollouts
    response = lambda arrays: [x[r.prompt_length :] for x, r in zip(arrays, rollouts, strict=True)]
    width = max(r.response_length for r in rollouts)
    rows = lambda arrays: np.stack(
        [np.pad(x.astype(np.float64), (0, width - len(x))) for x in response(arrays)]
    )
    lists = lambda arrays: [x.tolist() for x in response(arrays)]
    names = {"now": data.now, "old": data.old, "ref": data.ref}
    logps, entropy = (
        {name: torch.tensor(rows(x)) for name, x in names.items()},
        torch.tensor(rows(data.entropy)),
    )
    logps["now"].requires_grad_()
    part = slice(None)
    says = lambda model, *_, **options: (
        logps[model if isinstance(model, str) else "old"][part],
        entropy[part],
        None,
    )
    trainer._get_per_token_logps_and_entropies = says

    tokens = [np.maximum(r.tokens, EOS + 1) for r in rollouts]
    for mine, r in zip(tokens, rollouts, strict=True):
        mine[-1] = EOS if r.finish_reason == "stop" else EOS + 1
    prompts = [[EOS + 1] * r.prompt_length for r in rollouts]
    own = lists([r.sampled.astype(int) for r in rollouts])
    generated = (
        prompts,
        lists(tokens),
        own,
        lists(tokens),
        lists([r.logps for r in rollouts]),
        {},
        None,
        [],
    )
    scores = torch.tensor([[r.grade.score] for r in rollouts], dtype=torch.float64)
    trainer._generate, trainer._calculate_rewards = lambda _: generated, lambda *_: scores
    trainer.reward_weights = torch.ones(1)
    inputs = trainer._generate_and_score_completions([{"prompt": ""} for _ in rollouts])

    loss, size = 0.0, len(rollouts) // microbatches
    for at in range(0, len(rollouts), size):
        part = slice(at, at + size)
        mine = trainer._compute_loss(
            "now", {name: x[part] if x.dim() else x for name, x in inputs.items()}
        )
        mine.backward()
        loss += mine.item()
    slopes = [np.zeros(len(r.tokens)) for r in rollouts]
    for slope, row, r in zip(slopes, logps["now"].grad.numpy(), rollouts, strict=True):
        slope[r.prompt_length :] = row[: r.response_length]
    return loss, slopes


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_trl(case):
    pytest.importorskip("trl")
    options, preset, changes, microbatches = CASES[case]
    algorithm = PRESETS[preset](**changes)
    for seed in range(2):
        data = given_of(reference.random_rollouts(seed, PROMPTS, GROUP, max_new=MAX_NEW), seed)
        want_loss, want = trl_loss(
            make_trl(options, algorithm.correction, microbatches), data, microbatches
        )
        trainer = small_trainer(algorithm, "four slots", 2)
        [part] = scored_parts(trainer, data)
        loss, slopes = differentiate(trainer, trainer.policy, part, data.now, data.entropy)
        largest = max(np.abs(x).max() for x in want)
        for i, slope in zip(part.chosen, slopes, strict=True):
            np.testing.assert_allclose(slope, want[i], rtol=1e-5, atol=1e-5 * largest)
        np.testing.assert_allclose(loss, want_loss, rtol=1e-5, atol=1e-6)
