"""Algorithms by name: each preset is a function that returns an `Algorithm`.

Arguments change single fields: `dapo(clip_high=0.3)`. A preset names only the fields in which it
differs from the defaults of `Algorithm`, which are GRPO's. The KL to a reference policy is off, as
reasoning runs leave it, except in presets that reproduce a published run. Learning rates,
minibatches and lengths do not belong to an algorithm: they are in the recipes.

A new preset is a function and a line in PRESETS.
"""

from collections.abc import Callable
from dataclasses import replace

from jzero.algorithms.algorithm import Algorithm
from jzero.algorithms.distillation import distill, distill_grpo

Preset = Callable[..., Algorithm]

# Algorithms as their papers describe them.


def grpo(**changes: object) -> Algorithm:
    """GRPO, DeepSeekMath (arXiv:2402.03300 eq. 3)."""
    return replace(Algorithm(name="grpo"), **changes)


def dr_grpo(**changes: object) -> Algorithm:
    """Dr. GRPO (arXiv:2503.20783): neither the standard deviation nor the length divides."""
    algorithm = Algorithm(name="dr_grpo", advantage="group_mean", weight="constant")
    return replace(algorithm, **changes)


def grpo_no_std(**changes: object) -> Algorithm:
    """GRPO with one of Dr. GRPO's two changes: no division by the standard deviation."""
    return replace(Algorithm(name="grpo_no_std", advantage="group_mean"), **changes)


def grpo_no_length(**changes: object) -> Algorithm:
    """GRPO with the other of Dr. GRPO's two changes: no division by a response's length."""
    return replace(Algorithm(name="grpo_no_length", weight="constant"), **changes)


def dapo(**changes: object) -> Algorithm:
    """DAPO (arXiv:2503.14476): clip-higher, token mean, overlong penalty, dynamic sampling."""
    algorithm = Algorithm(
        name="dapo",
        weight="token_mean",
        clip_high=0.28,
        overlong_share=0.2,
        dynamic_sampling_rounds=3,
    )
    return replace(algorithm, **changes)


def rloo(**changes: object) -> Algorithm:
    """REINFORCE leave-one-out (arXiv:2402.14740)."""
    algorithm = Algorithm(
        name="rloo",
        advantage="leave_one_out",
        weight="sequence_sum",
        surrogate="reinforce",
    )
    return replace(algorithm, **changes)


def reinforce_pp(**changes: object) -> Algorithm:
    """REINFORCE++ (arXiv:2501.03262)."""
    algorithm = Algorithm(
        name="reinforce_pp",
        advantage="return_to_go",
        whiten=True,
        weight="token_mean",
    )
    return replace(algorithm, **changes)


def reinforce_pp_baseline(**changes: object) -> Algorithm:
    """REINFORCE++ with the group's mean as baseline (arXiv:2501.03262 §3)."""
    algorithm = Algorithm(
        name="reinforce_pp_baseline",
        advantage="group_mean",
        whiten=True,
        weight="token_mean",
        kl_estimator="k2",
    )
    return replace(algorithm, **changes)


def gspo(**changes: object) -> Algorithm:
    """GSPO (arXiv:2507.18071): the ratio of a whole sequence, with a narrow clip."""
    algorithm = Algorithm(name="gspo", ratio="sequence", clip_low=3e-4, clip_high=4e-4)
    return replace(algorithm, **changes)


def cispo(**changes: object) -> Algorithm:
    """CISPO, MiniMax-M1 (arXiv:2506.13585).

    A clip_low of 1 is no lower bound, since a ratio is positive. The upper bound is 5.
    """
    algorithm = Algorithm(
        name="cispo",
        weight="token_mean",
        surrogate="cispo",
        clip_low=1.0,
        clip_high=4.0,
    )
    return replace(algorithm, **changes)


def ppo(**changes: object) -> Algorithm:
    """PPO (arXiv:1707.06347) as reasoning runs use it: gamma = lambda = 1, whitened advantages."""
    algorithm = Algorithm(name="ppo", advantage="gae", whiten=True, weight="token_mean")
    return replace(algorithm, **changes)


def decoupled_ppo(**changes: object) -> Algorithm:
    """AReaL's decoupled PPO (arXiv:2505.24298 eq. 5), for rollouts of older policies.

    The ratio is to the policy before the update. The gap from there to the policy that sampled is
    a correction.
    """
    algorithm = Algorithm(
        name="decoupled_ppo",
        advantage="return_to_go",
        whiten=True,
        weight="token_mean",
        correction="token_mask",
        correction_high=5.0,
    )
    return replace(algorithm, **changes)


# Runs as they were published. docs/algorithms.md says what their recipes add.


def deepseek_grpo(**changes: object) -> Algorithm:
    """DeepSeekMath 7B RL (arXiv:2402.03300 §4.2): GRPO with the k3 estimate of the KL."""
    return replace(Algorithm(name="deepseek_grpo", kl_coef=0.04), **changes)


def drgrpo_paper(**changes: object) -> Algorithm:
    """Oat-Zero, March 2025: Dr. GRPO with L_max 3,000. A truncated response scores 0."""
    algorithm = Algorithm(
        name="drgrpo_paper",
        advantage="group_mean",
        weight="constant",
        length_norm=3000,
        truncated="fixed",
    )
    return replace(algorithm, **changes)


def oat_head(**changes: object) -> Algorithm:
    """The default of oat 0.2.3: Dr. GRPO with truncated importance sampling at 2."""
    algorithm = Algorithm(
        name="oat_head",
        advantage="group_mean",
        weight="constant",
        truncated="fixed",
        correction="token_truncate",
    )
    return replace(algorithm, **changes)


def oat_v006(**changes: object) -> Algorithm:
    """oat 0.0.6, which made its Countdown curve.

    The ratio is to the sampler, advantages are whitened, and the KL is summed over tokens.
    """
    algorithm = Algorithm(
        name="oat_v006",
        std_eps=1e-4,
        whiten=True,
        old_policy="sampler",
        kl_coef=1e-3,
        kl_max=10.0,
        kl_weight="sequence_sum",
    )
    return replace(algorithm, **changes)


def oat_ppo(**changes: object) -> Algorithm:
    """oat of January 2025, which made its GSM8K curve: PPO with the ratio and KL of `oat_v006`."""
    algorithm = Algorithm(
        name="oat_ppo",
        advantage="gae",
        whiten=True,
        old_policy="sampler",
        kl_coef=1e-4,
        kl_max=10.0,
        kl_weight="sequence_sum",
    )
    return replace(algorithm, **changes)


def trl_018(**changes: object) -> Algorithm:
    """The default of TRL 0.18 (bnpo)."""
    algorithm = Algorithm(name="trl_018", std_eps=1e-4, weight="token_mean", kl_coef=0.04)
    return replace(algorithm, **changes)


def trl_head(**changes: object) -> Algorithm:
    """The default of TRL 1.10 (dapo) with its correction for vLLM."""
    algorithm = Algorithm(
        name="trl_head",
        std_eps=1e-4,
        weight="batch_token_mean",
        correction="sequence_mask",
        correction_high=3.0,
    )
    return replace(algorithm, **changes)


PRESETS: dict[str, Preset] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "grpo_no_std": grpo_no_std,
    "grpo_no_length": grpo_no_length,
    "dapo": dapo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "gspo": gspo,
    "cispo": cispo,
    "ppo": ppo,
    "decoupled_ppo": decoupled_ppo,
    "deepseek_grpo": deepseek_grpo,
    "drgrpo_paper": drgrpo_paper,
    "oat_head": oat_head,
    "oat_v006": oat_v006,
    "oat_ppo": oat_ppo,
    "trl_018": trl_018,
    "trl_head": trl_head,
    "distill": distill,
    "distill_grpo": distill_grpo,
}
