"""Algorithms by name: each preset is a function that returns an `Algorithm`.

Arguments change single parts: `dapo(surrogate=Clip(high=0.3))`. A preset sets only the
fields in which it differs from the defaults of `Algorithm`, which are GRPO. The KL to a reference
policy is off, as is common for reasoning, except in presets that reproduce a published run.
Learning rates, minibatches and lengths do not belong to an algorithm: they are in the recipes.

To add a preset, write a function and add a line to PRESETS.
"""

from collections.abc import Callable
from dataclasses import replace

from jzero.algorithms.algorithm import (
    CISPO,
    GAE,
    IPO,
    KL,
    SAPO,
    VESPO,
    Algorithm,
    BatchTokenMean,
    Clip,
    Constant,
    CrossEntropy,
    Distillation,
    DppoKL,
    DppoTV,
    EachGroupMeanStd,
    Fixed,
    Geometric,
    GroupMean,
    GroupMeanOverMean,
    GroupMeanStd,
    LeaveOneOut,
    Reinforce,
    ReturnToGo,
    SequenceMask,
    SequenceSum,
    TokenMask,
    TokenMean,
    TokenTruncate,
    Zero,
)

Preset = Callable[..., Algorithm]

# Algorithms as their papers describe them.


def grpo(**changes: object) -> Algorithm:
    """GRPO, DeepSeekMath (arXiv:2402.03300 eq. 3)."""
    return replace(Algorithm(name="grpo"), **changes)


def dr_grpo(**changes: object) -> Algorithm:
    """Dr. GRPO (arXiv:2503.20783): no division by the standard deviation or the length."""
    # Without the division by the standard deviation gradients are larger, and the learning rate
    # has to be lower: see lab/log.md, 2026-11-20.
    algorithm = Algorithm(name="dr_grpo", advantage=GroupMean(), weight=Constant())
    return replace(algorithm, **changes)


def grpo_no_std(**changes: object) -> Algorithm:
    """GRPO with the first of Dr. GRPO's two changes: no division by the standard deviation."""
    return replace(Algorithm(name="grpo_no_std", advantage=GroupMean()), **changes)


def grpo_no_length(**changes: object) -> Algorithm:
    """GRPO with the second of Dr. GRPO's two changes: no division by a response's length."""
    return replace(Algorithm(name="grpo_no_length", weight=Constant()), **changes)


def dapo(**changes: object) -> Algorithm:
    """DAPO (arXiv:2503.14476): clip-higher, token mean, overlong penalty, dynamic sampling."""
    algorithm = Algorithm(
        name="dapo",
        weight=TokenMean(),
        surrogate=Clip(high=0.28),
        # The paper allows 20,480 tokens and penalizes the last 4,096.
        overlong_share=0.2,
        # The paper samples until the batch is full.
        dynamic_sampling_rounds=3,
    )
    return replace(algorithm, **changes)


def rloo(**changes: object) -> Algorithm:
    """REINFORCE leave-one-out (arXiv:2402.14740)."""
    algorithm = Algorithm(
        name="rloo",
        advantage=LeaveOneOut(),
        # The paper treats a response as one action: the log-probs of its tokens add up.
        weight=SequenceSum(),
        surrogate=Reinforce(),
    )
    return replace(algorithm, **changes)


def reinforce_pp(**changes: object) -> Algorithm:
    """REINFORCE++ (arXiv:2501.03262)."""
    algorithm = Algorithm(
        name="reinforce_pp",
        advantage=ReturnToGo(),
        whiten=True,
        weight=TokenMean(),
    )
    return replace(algorithm, **changes)


def reinforce_pp_baseline(**changes: object) -> Algorithm:
    """REINFORCE++ with the group's mean as baseline (arXiv:2501.03262 §3)."""
    algorithm = Algorithm(
        name="reinforce_pp_baseline",
        advantage=GroupMean(),
        whiten=True,
        weight=TokenMean(),
        # The estimator counts once a run sets kl.coef.
        kl=KL(estimator="k2"),
    )
    return replace(algorithm, **changes)


def gspo(**changes: object) -> Algorithm:
    """GSPO (arXiv:2507.18071): a sequence-level ratio with a narrow clip."""
    # The bounds of section 5.1: a mean over a sequence varies much less than the ratio of a
    # token.
    algorithm = Algorithm(name="gspo", ratio="sequence", surrogate=Clip(3e-4, 4e-4))
    return replace(algorithm, **changes)


def cispo(**changes: object) -> Algorithm:
    """CISPO, MiniMax-M1 (arXiv:2506.13585).

    low = 1 disables the lower bound, because ratios are positive. The upper bound is 5.
    """
    algorithm = Algorithm(
        name="cispo",
        weight=TokenMean(),
        surrogate=CISPO(low=1.0, high=4.0),
    )
    return replace(algorithm, **changes)


def ppo(**changes: object) -> Algorithm:
    """PPO (arXiv:1707.06347) as used for reasoning: gamma = lambda = 1, whitened advantages."""
    algorithm = Algorithm(name="ppo", advantage=GAE(), whiten=True, weight=TokenMean())
    return replace(algorithm, **changes)


def decoupled_ppo(**changes: object) -> Algorithm:
    """AReaL's decoupled PPO (arXiv:2505.24298 eq. 5), for rollouts of older policies.

    The ratio compares with the policy before the update. A correction covers the gap between this
    policy and the policy that sampled.
    """
    algorithm = Algorithm(
        name="decoupled_ppo",
        advantage=ReturnToGo(),
        whiten=True,
        weight=TokenMean(),
        correction=TokenMask(high=5.0),
    )
    return replace(algorithm, **changes)


def dppo_tv(**changes: object) -> Algorithm:
    """DPPO (arXiv:2602.04879): a mask by the total variation replaces the clipped ratio.

    The old policy is the sampler's. The bound is prime-rl's; verl's is 0.15.
    """
    algorithm = Algorithm(
        name="dppo_tv",
        advantage=GroupMean(),
        weight=TokenMean(),
        old_policy="sampler",
        surrogate=DppoTV(0.2, 0.2),
    )
    return replace(algorithm, **changes)


def dppo_kl(**changes: object) -> Algorithm:
    """DPPO (arXiv:2602.04879) with the KL divergence instead of the total variation."""
    algorithm = Algorithm(
        name="dppo_kl",
        advantage=GroupMean(),
        weight=TokenMean(),
        old_policy="sampler",
        surrogate=DppoKL(0.05, 0.05),
    )
    return replace(algorithm, **changes)


def ipo(**changes: object) -> Algorithm:
    """IPO (prime-rl, docs/algorithms.md): DPPO's mask on both sides, and a log^2 ratio penalty.

    Later versions of prime-rl bound the change of a probability at 0.3.
    """
    algorithm = Algorithm(
        name="ipo",
        advantage=GroupMean(),
        weight=TokenMean(),
        old_policy="sampler",
        surrogate=IPO(0.1, 0.1),
        ratio_penalty=1e-3,
    )
    return replace(algorithm, **changes)


def icepop(**changes: object) -> Algorithm:
    """IcePop (Ring-1T, arXiv:2510.18855): GRPO without tokens of a large sampler-trainer mismatch.

    c = pi_old / pi_sampler if it is in [0.5, 5], else 0.
    """
    algorithm = Algorithm(
        name="icepop",
        correction=TokenMask(0.5, 5.0),
    )
    return replace(algorithm, **changes)


def geometric_rejection(**changes: object) -> Algorithm:
    """GRPO with rejection of sequences by the geometric mean of pi_old / pi_sampler.

    Sequences with a mean outside [0.999, 1.001] are rejected. Source: verl,
    docs/algo/rollout_corr_math.md, rejection sampling by the geometric mean.
    """
    algorithm = Algorithm(
        name="geometric_rejection",
        correction=Geometric(0.999, 1.001),
    )
    return replace(algorithm, **changes)


def sapo(**changes: object) -> Algorithm:
    """SAPO (arXiv:2511.20347): a soft gate on the token's ratio replaces the clip."""
    return replace(Algorithm(name="sapo", surrogate=SAPO()), **changes)


def luspo(**changes: object) -> Algorithm:
    """LUSPO (arXiv:2602.05261): GSPO with every sequence's loss multiplied by its length.

    The bounds are from section 5.1 of the paper.
    """
    algorithm = Algorithm(
        name="luspo",
        weight=SequenceSum(),
        ratio="sequence",
        surrogate=Clip(2e-3, 2.5e-3),
    )
    return replace(algorithm, **changes)


def vespo(**changes: object) -> Algorithm:
    """VESPO (arXiv:2602.10693): a smooth weight from the sequence's ratio to the sampler."""
    algorithm = Algorithm(
        name="vespo",
        weight=TokenMean(),
        old_policy="sampler",
        ratio="product",
        surrogate=VESPO(),
    )
    return replace(algorithm, **changes)


def top_entropy(**changes: object) -> Algorithm:
    """DAPO on only the 20 % of the tokens with the highest entropy (arXiv:2506.01939)."""
    return replace(dapo(name="top_entropy", top_entropy=0.2), **changes)


def maxrl(**changes: object) -> Algorithm:
    """MaxRL (arXiv:2602.02710): GRPO with division by the group's mean instead of its std."""
    return replace(Algorithm(name="maxrl", advantage=GroupMeanOverMean()), **changes)


def gdpo(**changes: object) -> Algorithm:
    """GDPO (arXiv:2601.05242): every reward function is normalized before the sum."""
    algorithm = Algorithm(name="gdpo", advantage=EachGroupMeanStd(1e-4))
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
        advantage=ReturnToGo(),
        whiten=True,
        weight=TokenMean(),
        surrogate=Reinforce(),
        kl_reward=0.01,
    )
    return replace(algorithm, **changes)


# Published runs. docs/algorithms.md lists the additional settings of their recipes.


def deepseek_grpo(**changes: object) -> Algorithm:
    """DeepSeekMath 7B RL (arXiv:2402.03300 §4.2): GRPO with the k3 estimate of the KL."""
    return replace(Algorithm(name="deepseek_grpo", kl=KL(coef=0.04)), **changes)


def drgrpo_paper(**changes: object) -> Algorithm:
    """Oat-Zero as in its paper: Dr. GRPO with L_max 3,000. A truncated response scores 0.

    oat divides by the longest response since commit 7619b79 (March 23, 2025). The code that was
    released two days earlier is `drgrpo_release`.
    """
    algorithm = Algorithm(
        name="drgrpo_paper",
        advantage=GroupMean(),
        weight=Constant(length=3000),
        truncated=Fixed(0.0),
    )
    return replace(algorithm, **changes)


def drgrpo_release(**changes: object) -> Algorithm:
    """Oat-Zero as in its released code, oat 59eb01b: the sum over tokens is divided by 1.

    The gradient is 3,000 times the gradient of `drgrpo_paper`. Nearly every step is thus clipped to
    the maximum norm, so Adam gets gradients of equal norm.
    """
    return replace(drgrpo_paper(name="drgrpo_release", weight=Constant(length=1)), **changes)


def oat_head(**changes: object) -> Algorithm:
    """The default of oat 0.2.3: Dr. GRPO with truncated importance sampling at 2."""
    algorithm = Algorithm(
        name="oat_head",
        advantage=GroupMean(),
        weight=Constant(),
        truncated=Fixed(0.0),
        correction=TokenTruncate(high=2.0),
    )
    return replace(algorithm, **changes)


def oat_v006(**changes: object) -> Algorithm:
    """oat 0.0.6, the version of oat's Countdown curve.

    The ratio compares with the sampler, advantages are whitened, and the KL is summed over tokens.
    """
    algorithm = Algorithm(
        name="oat_v006",
        advantage=GroupMeanStd(1e-4),
        whiten=True,
        old_policy="sampler",
        kl=KL(coef=1e-3, bound=10.0, weight=SequenceSum()),
    )
    return replace(algorithm, **changes)


def oat_ppo(**changes: object) -> Algorithm:
    """oat of January 2025, the version of its GSM8K curve: PPO with `oat_v006`'s ratio and KL."""
    algorithm = Algorithm(
        name="oat_ppo",
        advantage=GAE(),
        whiten=True,
        old_policy="sampler",
        kl=KL(coef=1e-4, bound=10.0, weight=SequenceSum()),
    )
    return replace(algorithm, **changes)


def trl_018(**changes: object) -> Algorithm:
    """The default of TRL 0.18 (bnpo)."""
    algorithm = Algorithm(
        name="trl_018", advantage=GroupMeanStd(1e-4), weight=TokenMean(), kl=KL(coef=0.04)
    )
    return replace(algorithm, **changes)


def trl_head(**changes: object) -> Algorithm:
    """The default of TRL 1.10 to 1.16 (dapo) with its correction for vLLM."""
    algorithm = Algorithm(
        name="trl_head",
        advantage=GroupMeanStd(1e-4),
        weight=BatchTokenMean(),
        correction=SequenceMask(high=3.0),
    )
    return replace(algorithm, **changes)


def distill(**changes: object) -> Algorithm:
    """Only on-policy distillation: rewards are measured but have no effect."""
    algorithm = Algorithm(
        name="distill",
        advantage=Zero(),
        distillation=Distillation(coef=1.0),
        weight=TokenMean(),
    )
    return replace(algorithm, **changes)


def distill_grpo(**changes: object) -> Algorithm:
    """GRPO's advantage from the rewards plus a tenth of the teacher's term."""
    return replace(Algorithm(name="distill_grpo", distillation=Distillation(coef=0.1)), **changes)


def supervised(**changes: object) -> Algorithm:
    """Supervised fine-tuning: the cross-entropy is the only term of the loss."""
    # Not in PRESETS: RL samples its responses from the policy.
    algorithm = Algorithm(
        name="sft", rl_coef=0.0, cross_entropy=CrossEntropy(coef=1.0), weight=TokenMean()
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
