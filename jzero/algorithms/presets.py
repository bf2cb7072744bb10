"""Algorithms by name: each preset is a function that returns an `Algorithm`.

Arguments change single fields: `dapo(clip_high=0.3)`. A preset sets only the fields in which it
differs from the defaults of `Algorithm`, which are GRPO. The KL to a reference policy is off, as is
common for reasoning, except in presets that reproduce a published run. Learning rates, minibatches
and lengths do not belong to an algorithm: they are in the recipes.

To add a preset, write a function and add a line to PRESETS.
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
    """Dr. GRPO (arXiv:2503.20783): no division by the standard deviation or the length."""
    algorithm = Algorithm(name="dr_grpo", advantage="group_mean", weight="constant")
    return replace(algorithm, **changes)


def grpo_no_std(**changes: object) -> Algorithm:
    """GRPO with the first of Dr. GRPO's two changes: no division by the standard deviation."""
    return replace(Algorithm(name="grpo_no_std", advantage="group_mean"), **changes)


def grpo_no_length(**changes: object) -> Algorithm:
    """GRPO with the second of Dr. GRPO's two changes: no division by a response's length."""
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
    """GSPO (arXiv:2507.18071): a sequence-level ratio with a narrow clip."""
    algorithm = Algorithm(name="gspo", ratio="sequence", clip_low=3e-4, clip_high=4e-4)
    return replace(algorithm, **changes)


def cispo(**changes: object) -> Algorithm:
    """CISPO, MiniMax-M1 (arXiv:2506.13585).

    clip_low = 1 disables the lower bound, because ratios are positive. The upper bound is 5.
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
    """PPO (arXiv:1707.06347) as used for reasoning: gamma = lambda = 1, whitened advantages."""
    algorithm = Algorithm(name="ppo", advantage="gae", whiten=True, weight="token_mean")
    return replace(algorithm, **changes)


def decoupled_ppo(**changes: object) -> Algorithm:
    """AReaL's decoupled PPO (arXiv:2505.24298 eq. 5), for rollouts of older policies.

    The ratio compares with the policy before the update. A correction covers the gap between this
    policy and the policy that sampled.
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


def dppo_tv(**changes: object) -> Algorithm:
    """DPPO (arXiv:2602.04879): a mask by the total variation replaces the clipped ratio.

    The old policy is the sampler's. The bound is prime-rl's; verl's is 0.15.
    """
    algorithm = Algorithm(
        name="dppo_tv",
        advantage="group_mean",
        weight="token_mean",
        old_policy="sampler",
        surrogate="dppo_tv",
        clip_low=0.2,
        clip_high=0.2,
    )
    return replace(algorithm, **changes)


def dppo_kl(**changes: object) -> Algorithm:
    """DPPO (arXiv:2602.04879) with the KL divergence instead of the total variation."""
    algorithm = Algorithm(
        name="dppo_kl",
        advantage="group_mean",
        weight="token_mean",
        old_policy="sampler",
        surrogate="dppo_kl",
        clip_low=0.05,
        clip_high=0.05,
    )
    return replace(algorithm, **changes)


def ipo(**changes: object) -> Algorithm:
    """IPO (prime-rl, docs/algorithms.md): DPPO's mask on both sides, and a log^2 ratio penalty.

    Later versions of prime-rl bound the change of a probability at 0.3.
    """
    algorithm = Algorithm(
        name="ipo",
        advantage="group_mean",
        weight="token_mean",
        old_policy="sampler",
        surrogate="ipo",
        clip_low=0.1,
        clip_high=0.1,
        ratio_penalty=1e-3,
    )
    return replace(algorithm, **changes)


def icepop(**changes: object) -> Algorithm:
    """IcePop (Ring-1T, arXiv:2510.18855): GRPO without tokens of a large sampler-trainer mismatch.

    c = pi_old / pi_sampler if it is in [0.5, 5], else 0.
    """
    algorithm = Algorithm(
        name="icepop",
        correction="token_mask",
        correction_low=0.5,
        correction_high=5.0,
    )
    return replace(algorithm, **changes)


def geometric_rejection(**changes: object) -> Algorithm:
    """GRPO with rejection of sequences by the geometric mean of pi_old / pi_sampler.

    Sequences with a mean outside [0.999, 1.001] are rejected. Source: verl,
    docs/algo/rollout_corr_math.md, rejection sampling by the geometric mean.
    """
    algorithm = Algorithm(
        name="geometric_rejection",
        correction="geometric",
        correction_low=0.999,
        correction_high=1.001,
    )
    return replace(algorithm, **changes)


def sapo(**changes: object) -> Algorithm:
    """SAPO (arXiv:2511.20347): a soft gate on the token's ratio replaces the clip."""
    return replace(Algorithm(name="sapo", surrogate="sapo"), **changes)


def luspo(**changes: object) -> Algorithm:
    """LUSPO (arXiv:2602.05261): GSPO with every sequence's loss multiplied by its length.

    The bounds are from section 5.1 of the paper.
    """
    algorithm = Algorithm(
        name="luspo",
        weight="sequence_sum",
        ratio="sequence",
        clip_low=2e-3,
        clip_high=2.5e-3,
    )
    return replace(algorithm, **changes)


def vespo(**changes: object) -> Algorithm:
    """VESPO (arXiv:2602.10693): a smooth weight from the sequence's ratio to the sampler."""
    algorithm = Algorithm(
        name="vespo",
        weight="token_mean",
        old_policy="sampler",
        ratio="product",
        surrogate="vespo",
    )
    return replace(algorithm, **changes)


def top_entropy(**changes: object) -> Algorithm:
    """DAPO on only the 20 % of the tokens with the highest entropy (arXiv:2506.01939)."""
    return replace(dapo(name="top_entropy", top_entropy=0.2), **changes)


def maxrl(**changes: object) -> Algorithm:
    """MaxRL (arXiv:2602.02710): GRPO with division by the group's mean instead of its std."""
    return replace(Algorithm(name="maxrl", advantage="group_mean_over_mean"), **changes)


def gdpo(**changes: object) -> Algorithm:
    """GDPO (arXiv:2601.05242): every reward function is normalized before the sum."""
    algorithm = Algorithm(name="gdpo", advantage="each_group_mean_std", std_eps=1e-4)
    return replace(algorithm, **changes)


def echo(**changes: object) -> Algorithm:
    """ECHO (arXiv:2605.24517): GRPO plus cross-entropy on the environment's replies."""
    return replace(Algorithm(name="echo", environment_coef=0.1), **changes)


def reinforce_global(**changes: object) -> Algorithm:
    """REINFORCE with a baseline over the whole batch, and the KL in the reward (k1).

    The returns-to-go are whitened over all tokens of the RL step, as REINFORCE++ does
    (arXiv:2501.03262), and the loss is -A log pi, without a ratio.
    """
    algorithm = Algorithm(
        name="reinforce_global",
        advantage="return_to_go",
        whiten=True,
        weight="token_mean",
        surrogate="reinforce",
        kl_reward=0.01,
    )
    return replace(algorithm, **changes)


# Published runs. docs/algorithms.md lists the additional settings of their recipes.


def deepseek_grpo(**changes: object) -> Algorithm:
    """DeepSeekMath 7B RL (arXiv:2402.03300 §4.2): GRPO with the k3 estimate of the KL."""
    return replace(Algorithm(name="deepseek_grpo", kl_coef=0.04), **changes)


def drgrpo_paper(**changes: object) -> Algorithm:
    """Oat-Zero as in its paper: Dr. GRPO with L_max 3,000. A truncated response scores 0.

    oat divides by the longest response since commit 7619b79 (March 23, 2025). The code that was
    released two days earlier is `drgrpo_release`.
    """
    algorithm = Algorithm(
        name="drgrpo_paper",
        advantage="group_mean",
        weight="constant",
        length_norm=3000,
        truncated="fixed",
    )
    return replace(algorithm, **changes)


def drgrpo_release(**changes: object) -> Algorithm:
    """Oat-Zero as in its released code, oat 59eb01b: the sum over tokens is divided by 1.

    The gradient is 3,000 times the gradient of `drgrpo_paper`. Nearly every step is thus clipped to
    the maximum norm, so Adam gets gradients of equal norm.
    """
    return replace(drgrpo_paper(name="drgrpo_release", length_norm=1), **changes)


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
    """oat 0.0.6, the version of oat's Countdown curve.

    The ratio compares with the sampler, advantages are whitened, and the KL is summed over tokens.
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
    """oat of January 2025, the version of its GSM8K curve: PPO with `oat_v006`'s ratio and KL."""
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
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "ipo": ipo,
    "icepop": icepop,
    "geometric_rejection": geometric_rejection,
    "sapo": sapo,
    "luspo": luspo,
    "vespo": vespo,
    "top_entropy": top_entropy,
    "maxrl": maxrl,
    "gdpo": gdpo,
    "echo": echo,
    "reinforce_global": reinforce_global,
    "deepseek_grpo": deepseek_grpo,
    "drgrpo_paper": drgrpo_paper,
    "drgrpo_release": drgrpo_release,
    "oat_head": oat_head,
    "oat_v006": oat_v006,
    "oat_ppo": oat_ppo,
    "trl_018": trl_018,
    "trl_head": trl_head,
    "distill": distill,
    "distill_grpo": distill_grpo,
}
