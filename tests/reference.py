"""Tiny values to test on, and slow definitions to compare with.

The definitions are Python loops over single tokens, and a model over one sequence a row, all in
float64. They are written from the papers' formulas and read
nothing of jzero but settings and records.

In a test: `settings` makes a config of tiny shapes, `random_rollouts` makes rollouts, `policy_loss`
is the loss of an optimizer step with its derivative by every log-prob, and `naive_gradient` turns
that derivative into a gradient of the parameters.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from pathlib import Path

import descriptions
import jax
import jax.numpy as jnp
import numpy as np
from descriptions import Description

from jzero import config
from jzero.algorithms import Algorithm
from jzero.blueprint import Blueprint, Models, Spec
from jzero.fields import is_part
from jzero.model import qwen
from jzero.service.weights import load_reference
from jzero.tokens import Tokens
from jzero.training.examples import Example
from jzero.training.learner import Learner
from jzero.training.step import Minibatch
from jzero.training.teacher import TeacherScores
from jzero.types import Grade, Params, Problem, Rollout, State, Turn

VOCAB = 61
MODEL = qwen.QwenConfig("qwen2", VOCAB, 16, 24, 2, 4, 2, 8, True, 10000.0, 1e-6)
MOE = replace(
    MODEL,
    model_type="qwen3_moe",
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
)

TokenArrays = Sequence[np.ndarray]  # for each rollout one number for each of its tokens
Lists = list[list[float]]  # the same for sampled tokens only


# Tiny values.


def settings(**sections: dict[str, object]) -> config.Config:
    """Returns a config of float32 and tiny shapes: settings(train={"steps": 2}) changes a field."""
    values = config.Config()
    defaults: dict[str, dict[str, object]] = {
        "model": {"dtype": "float32", "remat": "none", "logit_chunk": 10**6},
        "rollout": {
            "num_prompts": 4,
            "group_size": 4,
            "max_prompt_tokens": 6,
            "max_new_tokens": 12,
            "temperature": 0.7,
        },
        "task": {"grade_workers": 1},  # each takes a third of a second to start
        "train": {"microbatch_tokens": 128, "pack": "longest", "packs_per_row": 2},
        "mesh": {"data": -1, "fsdp": 1},
    }
    for name, fields in [*defaults.items(), *sections.items()]:
        if name == "algorithm":
            values.algorithm = descriptions.change(values.algorithm, **fields)
            continue
        if "kind" in fields:  # a part in JSON, such as a teacher
            setattr(values, name, fields)
            continue
        for field, value in fields.items():
            if is_dataclass(value) and not is_part(value):  # a whole section
                setattr(getattr(values, name), field, value)
            else:
                config.put_value(values, f"{name}.{field}", value)
    allow_replies(values)
    name_teacher(values)
    config.validate(values)
    return values


def allow_replies(values: config.Config) -> None:
    """Gives an algorithm that trains on replies episodes of two turns, as long as one was."""
    rollout = values.rollout
    if values.algorithm.environment_coef and rollout.max_turns == 1:
        rollout.max_turns = 2
        rollout.max_episode_tokens = rollout.max_prompt_tokens + rollout.max_new_tokens


def name_teacher(settings: config.Config) -> None:
    """Names some teacher for an algorithm that needs one, where the settings name none."""
    if settings.algorithm.distillation.coef and settings.teacher is None:
        settings.teacher = config.teachers.Model(path="a/teacher")


@dataclass(frozen=True)
class GivenTeacher:
    """A teacher whose log-probs are given: for each sequence f32 over its tokens."""

    logps: TokenArrays

    def score(
        self,
        state: State,
        reference: qwen.Params | None,
        minibatches: Sequence[Minibatch],
        sequences: Sequence[Rollout],
    ) -> TeacherScores:
        """Returns what was given."""
        return TeacherScores(list(self.logps), np.ones(len(sequences), bool))


def random_params(model: qwen.QwenConfig = MODEL, scale: float = 0.15) -> qwen.Params:
    """Returns random parameters, norms around 1: predictions are far from uniform."""
    rng = np.random.default_rng(0)

    def random_leaf(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        mean = 1.0 if "norm" in path[-1].key else 0.0
        return jnp.asarray(mean + scale * rng.standard_normal(leaf.shape), jnp.float32)

    return jax.tree.map_with_path(random_leaf, qwen.abstract(model))


def placed(policy: Learner, params: qwen.Params) -> qwen.Params:
    """Returns a copy of the parameters on the policy's mesh, which the policy may donate."""
    return jax.tree.map(lambda x, s: jax.device_put(np.asarray(x), s), params, policy.shardings)


def blueprint_of(policy: Learner) -> Blueprint[Learner]:
    """Returns the blueprint of a learner that was made without one."""
    spec = Spec(policy.compute, config.MeshConfig(), None, lambda models, mesh: policy)
    return Blueprint(spec, Models(policy.model), policy.mesh, policy.mesh, 1, None, policy)


def reference_of(
    policy: Learner,
    workdir: Path,
    algorithm: Algorithm,
    step: int,
    state: State,
    oldest_checkpoint: int,
) -> qwen.Params:
    """Returns what `load_reference` does for a learner that was made without a blueprint."""
    return load_reference(
        blueprint_of(policy), policy, workdir, algorithm, step, state, oldest_checkpoint
    )


def random_rollouts(
    seed: int,
    prompts: int,
    group: int,
    max_prompt: int = 6,
    max_new: int = 12,
) -> list[Rollout]:
    """Returns ragged rollouts with log-probs near what a policy might have given.

    Every other response holds tokens of an environment (sampled=False), some responses are
    truncated at `max_new`, the first group scores 0.1 throughout, and the last group is short.
    """
    rng = np.random.default_rng(seed)
    rollouts = []
    for p in range(prompts):
        prompt = rng.integers(0, VOCAB, rng.integers(1, max_prompt + 1))
        longest = max_new if p < prompts - 1 else max_new // 2
        for g in range(group):
            num_new = int(rng.integers(1, longest + 1))
            finish_reason = "length" if num_new == max_new else "stop"
            sampled = np.arange(len(prompt) + num_new) >= len(prompt)
            if g % 2:
                # The environment never speaks first: that would lengthen the prompt.
                sampled[len(prompt) + 1 :] &= rng.random(num_new - 1) < 0.6
            response = rng.integers(0, VOCAB, num_new)
            tokens = np.concatenate([prompt, response]).astype(np.int32)
            score = 0.1 if p == 0 else float(rng.choice([0.0, 0.1, 1.0]))
            grade = Grade(score, score == 1.0, "")
            logps = np.where(sampled, rng.normal(-4, 0.3, len(tokens)), 0).astype(np.float32)
            rollout = Rollout(
                problem=Problem(f"slow/{p}", "countdown", "", {}),
                sample_index=g,
                tokens=Tokens(
                    tokens, sampled=sampled, logps=logps, versions=np.where(sampled, 0, -1)
                ),
                turns=(Turn(len(prompt), len(tokens), "", finish_reason, grade),),
                grade=grade,
            )
            rollouts.append(rollout)
    return rollouts


# Algorithms: one token at a time. Of jzero.algorithms they read nothing but an Algorithm's fields.


def score(rollout: Rollout, algorithm: Algorithm | Description, max_new: int) -> float:
    """Returns the score of a rollout after penalties for truncation and length."""
    algorithm = descriptions.describe(algorithm)
    assert rollout.grade is not None
    value = rollout.grade.score
    if rollout.finish_reason == "length":
        if algorithm.truncated in ("fixed", "ignore"):
            value = algorithm.truncated_score
        value -= algorithm.truncated_penalty
    # DAPO eq. 13: the buffer is L_cache.
    buffer = algorithm.overlong_share * max_new
    length = sum(rollout.tokens.sampled.tolist())
    if buffer and length > max_new:
        value -= 1.0
    elif buffer and length > max_new - buffer:
        value += ((max_new - buffer) - length) / buffer
    return value


def gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = sum_l (gamma lam)^l (r_{t+l} + gamma V_{t+l+1} - V_{t+l}).

    V is 0 after the last token.
    """
    advantages = []
    for t in range(len(rewards)):
        total = 0.0
        for s in range(t, len(rewards)):
            next_value = values[s + 1] if s + 1 < len(rewards) else 0.0
            total += (gamma * lam) ** (s - t) * (rewards[s] + gamma * next_value - values[s])
        advantages.append(total)
    return advantages


def return_to_go(rewards: list[float], gamma: float) -> list[float]:
    """A_t = sum_l gamma^l r_{t+l}."""
    n = len(rewards)
    return [math.fsum(gamma ** (s - t) * rewards[s] for s in range(t, n)) for t in range(n)]


def group_advantage(
    returns: list[float], i: int, group: list[int], algorithm: Algorithm | Description
) -> float:
    """Returns the advantage of rollout i, with the rollouts of its group as baseline."""
    algorithm = descriptions.describe(algorithm)
    members = [j for j in range(len(returns)) if group[j] == group[i]]
    peers = [returns[j] for j in members]
    if len(set(peers)) == 1 or algorithm.advantage == "zero":
        return 0.0
    if algorithm.advantage == "leave_one_out":
        return returns[i] - statistics.fmean(returns[j] for j in members if j != i)
    centered = returns[i] - statistics.fmean(peers)
    if algorithm.advantage == "group_mean":
        return centered
    if algorithm.advantage == "group_mean_std":
        return centered / (statistics.stdev(peers) + algorithm.std_eps)
    if algorithm.advantage == "group_mean_over_mean":
        mean = statistics.fmean(peers)
        return centered / mean if mean > 0 else 0.0
    assert algorithm.advantage == "group_mean_batch_std", algorithm.advantage
    return centered / (statistics.stdev(returns) + algorithm.std_eps)


# For each named reward its weight, and its value for each rollout, None where it does not apply.
Parts = list[tuple[float, list[float | None]]]


def advantages_of_parts(
    parts: Parts, group: list[int], algorithm: Algorithm | Description
) -> list[float]:
    """Returns the advantage of every rollout by GDPO: each reward is normalized before the sum."""
    algorithm = descriptions.describe(algorithm)
    sums = [0.0] * len(group)
    for weight, rewards in parts:
        for i, reward in enumerate(rewards):
            members = [j for j in range(len(group)) if group[j] == group[i]]
            peers = [rewards[j] for j in members if rewards[j] is not None]
            if reward is not None and len(set(peers)) > 1:
                centered = reward - statistics.fmean(peers)
                sums[i] += weight * centered / (statistics.stdev(peers) + algorithm.std_eps)
    return [x / (statistics.stdev(sums) + algorithm.std_eps) for x in sums]


def advantages(
    rewards: Lists,
    values: Lists,
    group: list[int],
    algorithm: Algorithm | Description,
    parts: Parts | None = None,
) -> tuple[Lists, Lists]:
    """Returns the advantages and the critic's targets of every sampled token of every rollout.

    Rewards and values are lists over the sampled tokens of each rollout; `group` holds the number
    of each rollout's prompt. `parts` are the named rewards that the rewards are sums of, None if
    there is one.
    """
    algorithm = descriptions.describe(algorithm)
    result = []
    returns = [math.fsum(row) for row in rewards]
    of_parts: list[float] = []
    if algorithm.advantage == "each_group_mean_std":
        of_parts = advantages_of_parts(parts or [(1.0, [*returns])], group, algorithm)
    for i, row in enumerate(rewards):
        if of_parts:
            result.append([of_parts[i]] * len(row))
        elif algorithm.advantage == "return_to_go":
            result.append(return_to_go(row, algorithm.gamma))
        elif algorithm.advantage == "gae":
            result.append(gae(row, values[i], algorithm.gamma, algorithm.lam))
        else:
            result.append([group_advantage(returns, i, group, algorithm)] * len(row))
    targets = []
    for row, value_row in zip(result, values, strict=True):
        targets.append([a + v for a, v in zip(row, value_row, strict=True)])
    if algorithm.whiten:
        all_tokens = [a for row in result for a in row]
        mean = statistics.fmean(all_tokens)
        scale = math.sqrt(statistics.variance(all_tokens) + 1e-8)
        result = [[(a - mean) / scale for a in row] for row in result]
    return result, targets


def advantages_of(
    rollouts: list[Rollout],
    old: TokenArrays,
    ref: TokenArrays,
    algorithm: Algorithm | Description,
    group: int,
    max_new: int,
    values: TokenArrays | None = None,
    parts: Parts | None = None,
    teacher: TokenArrays | None = None,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns `advantages` of rollouts over all their tokens, 0 where a token was not sampled.

    `group` is the size of a group. The k1 of every token is subtracted from the token's reward, and
    the score comes with the last token. A teacher adds to the advantage of every sampled token.
    """
    algorithm = descriptions.describe(algorithm)
    values = values or [np.zeros(len(rollout.tokens)) for rollout in rollouts]
    rewards: Lists = []
    sampled_values: Lists = []
    for i, rollout in enumerate(rollouts):
        places = np.flatnonzero(rollout.tokens.sampled)
        row = [-algorithm.kl_reward * (float(old[i][t]) - float(ref[i][t])) for t in places]
        row[-1] += score(rollout, algorithm, max_new)
        rewards.append(row)
        sampled_values.append([float(values[i][t]) for t in places])
    numbers = [i // group for i in range(len(rollouts))]
    over_sampled, targets_over_sampled = advantages(
        rewards, sampled_values, numbers, algorithm, parts
    )
    A = over_all_tokens(over_sampled, rollouts)
    if algorithm.teacher_coef:
        assert teacher is not None
        for i, rollout in enumerate(rollouts):
            for t in np.flatnonzero(rollout.tokens.sampled):
                gap = float(teacher[i][t]) - float(old[i][t])
                part = algorithm.teacher_coef * gap
                if algorithm.teacher_max:
                    part = min(max(part, -algorithm.teacher_max), algorithm.teacher_max)
                A[i][t] += part
    return A, over_all_tokens(targets_over_sampled, rollouts)


def over_all_tokens(rows: Lists, rollouts: list[Rollout]) -> list[np.ndarray]:
    """Returns numbers of sampled tokens as arrays over all tokens, 0 where not sampled."""
    arrays = []
    for row, rollout in zip(rows, rollouts, strict=True):
        array = np.zeros(len(rollout.tokens))
        array[rollout.tokens.sampled] = row
        arrays.append(array)
    return arrays


def token_weights(
    rollouts: list[Rollout],
    algorithm: Algorithm | Description,
    max_new: int,
    chosen: Sequence[int] | None = None,
    name: str = "",
    only_correct: bool = False,
) -> Lists:
    """Returns the weight of every token of every rollout, 0 where the token is not trained.

    `chosen` are the rollouts of the optimizer step; None means all. `name` is a weight in place of
    the algorithm's. With `only_correct` tokens of correct rollouts alone count.
    """
    algorithm = descriptions.describe(algorithm)
    chosen = range(len(rollouts)) if chosen is None else chosen
    is_trained = []
    for rollout in rollouts:
        is_masked = algorithm.truncated in ("mask", "ignore") and rollout.finish_reason == "length"
        assert rollout.grade is not None
        is_masked = is_masked or (only_correct and not rollout.grade.correct)
        is_trained.append(
            [sampled and not is_masked for sampled in rollout.tokens.sampled.tolist()]
        )
    counts = [sum(row) for row in is_trained]

    def weight_of(i: int) -> float:
        kind = name or algorithm.weight
        if kind == "sequence_mean":
            return 1 / len(chosen) / counts[i]
        if kind == "sequence_sum":
            return 1 / len(chosen)
        if kind == "token_mean":
            return 1 / max(sum(counts[j] for j in chosen), 1)
        if kind == "batch_token_mean":
            return len(counts) / len(chosen) / sum(counts)
        assert kind == "constant", kind
        return 1 / len(chosen) / (algorithm.length_norm or max_new)

    weights = []
    for i, row in enumerate(is_trained):
        weight = weight_of(i) if counts[i] and i in chosen else 0.0
        weights.append([weight if trained else 0.0 for trained in row])
    return weights


def is_masked(ratio: float, logp: float, A: float, algorithm: Algorithm | Description) -> bool:
    """Returns whether DPPO or IPO drops a token, whose ratio is pi / mu."""
    algorithm = descriptions.describe(algorithm)
    pi = math.exp(logp)
    mu = pi / ratio
    low, high = algorithm.clip_low, algorithm.clip_high
    if algorithm.surrogate == "ipo":
        return not -low <= pi - mu <= high
    bound = high if A > 0 else low
    moves_along = pi > mu if A > 0 else pi < mu
    if algorithm.surrogate == "dppo_tv":
        distance = abs(pi - mu)
    else:
        distance = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
    return moves_along and distance > bound


def surrogate(
    ratio: float, logp: float, A: float, algorithm: Algorithm | Description
) -> tuple[float, float, float]:
    """Returns the loss of a token and two derivatives.

    The first is by the ratio; the second is by logp where it does not go through the ratio.
    """
    algorithm = descriptions.describe(algorithm)
    clipped = min(max(ratio, 1 - algorithm.clip_low), 1 + algorithm.clip_high)
    if algorithm.surrogate in ("dppo_tv", "dppo_kl", "ipo"):
        return (0.0, 0.0, 0.0) if is_masked(ratio, logp, A, algorithm) else (-ratio * A, -A, 0.0)
    if algorithm.surrogate == "reinforce":
        return -A * logp, 0.0, -A
    if algorithm.surrogate == "sapo":
        tau = algorithm.sapo_tau_positive if A > 0 else algorithm.sapo_tau_negative
        sigmoid = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return -4 / tau * sigmoid * A, -4 * sigmoid * (1 - sigmoid) * A, 0.0
    if algorithm.surrogate == "vespo":
        k, rate = algorithm.vespo_k_positive, algorithm.vespo_lambda_positive
        if A < 0:
            k, rate = algorithm.vespo_k_negative, algorithm.vespo_lambda_negative
        phi = ratio**k * math.exp(rate * (1 - ratio))
        return -phi * A * logp, 0.0, -phi * A
    if algorithm.surrogate == "cispo":
        return -clipped * A * logp, 0.0, -clipped * A
    if algorithm.dual_clip and A < 0 and ratio > algorithm.dual_clip:
        return -algorithm.dual_clip * A, 0.0, 0.0
    if clipped * A < ratio * A:
        return -clipped * A, 0.0, 0.0
    return -ratio * A, -A, 0.0


def correction(gaps: list[float], t: int, algorithm: Algorithm | Description) -> float:
    """Returns the correction of the t-th trained token of a sequence.

    `gaps` are log pi_old - log pi_sampler of the sequence's trained tokens.
    """
    algorithm = descriptions.describe(algorithm)
    low, high, name = algorithm.correction_low, algorithm.correction_high, algorithm.correction
    if name == "":
        return 1.0
    if name == "geometric":
        return float(low <= math.exp(statistics.fmean(gaps)) <= high)
    if name.startswith("sequence"):
        ratio = math.prod(math.exp(gap) for gap in gaps)
    else:
        ratio = math.exp(gaps[t])
    if name.endswith("truncate"):
        return min(ratio, high)
    return ratio if low <= ratio <= high else 0.0


def kl(logp: float, ref: float, algorithm: Algorithm | Description) -> tuple[float, float]:
    """Returns the estimate of a token's KL to the reference policy, and its derivative by logp."""
    algorithm = descriptions.describe(algorithm)
    d = ref - logp
    if algorithm.kl_estimator == "k2":
        value, slope = d * d / 2, -d
    else:
        value, slope = math.exp(d) - d - 1, 1 - math.exp(d)
    if algorithm.kl_max and value > algorithm.kl_max:
        return algorithm.kl_max, 0.0
    return value, slope


def sequence_loss(
    weights: list[float],
    kl_weights: list[float],
    ce_weights: list[float],
    logps: list[float],
    old: list[float],
    ref: list[float],
    sampler: list[float],
    entropy: list[float],
    A: list[float],
    algorithm: Algorithm | Description,
) -> tuple[float, list[float]]:
    """Returns the loss of one sequence and its derivative by the sequence's log-probs.

    Every argument is a list over the trained tokens of the sequence.
    """
    algorithm = descriptions.describe(algorithm)
    n = len(weights)
    shifts = [logps[t] - old[t] for t in range(n)]
    gaps = [old[t] - sampler[t] for t in range(n)]
    of_sequence = algorithm.ratio in ("sequence", "product")
    root = n if algorithm.ratio == "sequence" else 1
    left = [sampler[t] - logps[t] for t in range(n)]
    has_left = False
    if algorithm.off_policy_bound and n:
        has_left = statistics.fmean(left) > algorithm.off_policy_bound
    loss = 0.0
    slopes = [0.0] * n
    for t in range(n):
        ratio = math.exp(sum(shifts) / root if of_sequence else shifts[t])
        term, by_ratio, direct = surrogate(ratio, logps[t], A[t], algorithm)
        c = correction(gaps, t, algorithm)
        if has_left and A[t] < 0:
            c = 0.0
        divergence, by_logp = kl(logps[t], ref[t], algorithm)
        c *= algorithm.rl_coef
        loss += weights[t] * (c * term - algorithm.entropy_coef * entropy[t])
        loss += weights[t] * algorithm.ratio_penalty * shifts[t] ** 2
        slopes[t] += weights[t] * algorithm.ratio_penalty * 2 * shifts[t]
        loss += kl_weights[t] * algorithm.kl_coef * divergence
        loss -= ce_weights[t] * algorithm.ce_coef * logps[t]

        slopes[t] += weights[t] * c * direct + kl_weights[t] * algorithm.kl_coef * by_logp
        slopes[t] -= ce_weights[t] * algorithm.ce_coef
        # d ratio / d logp_s is ratio / root for every token s of the sequence, or ratio for t only.
        through_ratio = weights[t] * c * by_ratio * ratio
        if of_sequence:
            for s in range(n):
                slopes[s] += through_ratio / root
        else:
            slopes[t] += through_ratio
    return loss, slopes


def policy_loss(
    rollouts: list[Rollout],
    logps: TokenArrays,
    old: TokenArrays,
    ref: TokenArrays,
    algorithm: Algorithm | Description,
    group: int,
    max_new: int,
    chosen: Sequence[int] | None = None,
    sampler: TokenArrays | None = None,
    entropy: TokenArrays | None = None,
    values: TokenArrays | None = None,
    parts: Parts | None = None,
    teacher: TokenArrays | None = None,
) -> tuple[float, list[np.ndarray]]:
    """Returns the loss of an optimizer step and its derivative by the log-prob of every token.

    The step trains on the `chosen` rollouts (None: all) among the rollouts of an RL step. Every
    array of `logps`, `old`, `ref` and so on is over the tokens of one rollout. `parts` are those of
    `advantages`.
    """
    algorithm = descriptions.describe(algorithm)
    zeros = [np.zeros(len(rollout.tokens)) for rollout in rollouts]
    sampler = sampler or [rollout.tokens.logps for rollout in rollouts]
    entropy = entropy or zeros
    if algorithm.old_policy == "sampler":
        old = sampler
    A, _ = advantages_of(rollouts, old, ref, algorithm, group, max_new, values, parts, teacher)
    weights = token_weights(rollouts, algorithm, max_new, chosen)
    if algorithm.top_entropy < 1:
        mask_low_entropy(A, weights, entropy, algorithm.top_entropy)
    kl_weights = token_weights(rollouts, algorithm, max_new, chosen, algorithm.kl_weight)
    only_correct = algorithm.ce_tokens == "correct"
    ce_weights = token_weights(
        rollouts, algorithm, max_new, chosen, algorithm.ce_weight, only_correct
    )

    loss = 0.0
    slopes = []
    for i, rollout in enumerate(rollouts):
        places = [t for t in range(len(rollout.tokens)) if weights[i][t]]
        sequence_term, sequence_slopes = sequence_loss(
            numbers_at(weights[i], places),
            numbers_at(kl_weights[i], places),
            numbers_at(ce_weights[i], places),
            numbers_at(logps[i], places),
            numbers_at(old[i], places),
            numbers_at(ref[i], places),
            numbers_at(sampler[i], places),
            numbers_at(entropy[i], places),
            numbers_at(A[i], places),
            algorithm,
        )
        loss += sequence_term
        row = np.zeros(len(rollout.tokens))
        row[places] = sequence_slopes
        slopes.append(row)
    return add_environment_loss(loss, slopes, rollouts, logps, algorithm, chosen)


def mask_low_entropy(
    A: list[np.ndarray], weights: Lists, entropy: TokenArrays, share: float
) -> None:
    """Sets the advantages to 0 of trained tokens whose entropy is below the quantile 1 - share.

    The quantile lies between two of the sorted entropies, in proportion.
    """
    numbers = sorted(
        float(entropy[i][t]) for i, row in enumerate(weights) for t, w in enumerate(row) if w
    )
    place = (1 - share) * (len(numbers) - 1)
    below = math.floor(place)
    above = min(below + 1, len(numbers) - 1)
    bound = numbers[below] + (place - below) * (numbers[above] - numbers[below])
    for i, row in enumerate(weights):
        for t, weight in enumerate(row):
            if weight and float(entropy[i][t]) < bound:
                A[i][t] = 0.0


def add_environment_loss(
    loss: float,
    slopes: list[np.ndarray],
    rollouts: list[Rollout],
    logps: TokenArrays,
    algorithm: Algorithm | Description,
    chosen: Sequence[int] | None,
) -> tuple[float, list[np.ndarray]]:
    """Adds the mean cross-entropy of the tokens that an environment replied, times its factor."""
    algorithm = descriptions.describe(algorithm)
    chosen = range(len(rollouts)) if chosen is None else chosen
    replies = [
        (i, t)
        for i in chosen
        for t in range(rollouts[i].prompt_length, len(rollouts[i].tokens))
        if not rollouts[i].tokens.sampled[t]
    ]
    for i, t in replies:
        loss -= algorithm.environment_coef * float(logps[i][t]) / len(replies)
        slopes[i][t] -= algorithm.environment_coef / len(replies)
    return loss, slopes


def numbers_at(array: Sequence[float] | np.ndarray, places: list[int]) -> list[float]:
    """Returns the elements of the array at the places."""
    return [float(array[t]) for t in places]


def value_loss(
    value: float, old: float, target: float, algorithm: Algorithm | Description
) -> tuple[float, float]:
    """Returns the value loss of one token, and its derivative by the value."""
    algorithm = descriptions.describe(algorithm)
    clipped = value
    if algorithm.value_clip:
        clipped = min(max(value, old - algorithm.value_clip), old + algorithm.value_clip)
    half = 0.5 * algorithm.value_coef
    if (clipped - target) ** 2 > (value - target) ** 2:
        return half * (clipped - target) ** 2, 0.0
    return half * (value - target) ** 2, 2 * half * (value - target)


# The model: Qwen2 again, one sequence a row.


def hidden(model: qwen.QwenConfig, params: qwen.Params, tokens: np.ndarray) -> jax.Array:
    """Returns the hidden states after the final norm, [N, T, E], for tokens i32[N, T].

    The precision is that of the parameters.
    """
    num_tokens = tokens.shape[1]
    half = model.head_dim // 2
    frequencies = model.rope_theta ** (-np.arange(half) / half)
    angles = np.arange(num_tokens)[:, None] * frequencies
    is_visible = np.tri(num_tokens, dtype=bool)
    heads_per_kv_head = model.num_attention_heads // model.num_key_value_heads

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        variance = (x * x).mean(-1, keepdims=True)
        return x / jnp.sqrt(variance + model.rms_norm_eps) * scale

    def rotate(x: jax.Array) -> jax.Array:
        """Rotates the pairs (a, b) of x [N, H, T, D] by the angles of their positions."""
        a, b = x[..., :half], x[..., half:]
        first = a * np.cos(angles) - b * np.sin(angles)
        second = b * np.cos(angles) + a * np.sin(angles)
        return jnp.concatenate([first, second], -1)

    def heads(x: jax.Array, layer: qwen.Params, name: str) -> jax.Array:
        """Projects x [N, T, E] to [N, H, T, D]."""
        return jnp.einsum("nte,ehd->nhtd", x, layer[name]) + layer[f"{name}_bias"][:, None]

    def repeat_kv(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, heads_per_kv_head, axis=1)

    x = params["embed"][tokens]
    for i in range(model.num_hidden_layers):
        layer = {name: leaf[i] for name, leaf in params["layers"].items()}
        h = norm(x, layer["attn_norm"])
        q = rotate(heads(h, layer, "q"))
        k = repeat_kv(rotate(heads(h, layer, "k")))
        v = repeat_kv(heads(h, layer, "v"))
        scores = q @ k.swapaxes(2, 3) / math.sqrt(model.head_dim)
        probabilities = jax.nn.softmax(jnp.where(is_visible, scores, -jnp.inf))
        x = x + jnp.einsum("nhtd,hde->nte", probabilities @ v, layer["o"])
        h = norm(x, layer["mlp_norm"])
        x = x + (jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]
    return norm(x, params["norm"])


def forward(model: qwen.QwenConfig, params: qwen.Params, tokens: np.ndarray) -> jax.Array:
    """Returns the logits [N, T, V] of a model whose embeddings are tied."""
    return hidden(model, params, tokens) @ params["embed"].T


@partial(jax.jit, static_argnums=0)
def rows_logps(
    model: qwen.QwenConfig, params: qwen.Params, tokens: np.ndarray, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """Returns the log-prob of every token and the entropy of the distribution it was drawn from.

    tokens i32[N, T] hold one sequence a row, padded at the end. Both results are [N, T], and 0 for
    the first token.
    """
    logps = jax.nn.log_softmax(forward(model, params, tokens)[:, :-1] / temperature)
    chosen = jnp.take_along_axis(logps, tokens[:, 1:, None], axis=-1)[..., 0]
    entropy = -(jnp.exp(logps) * logps).sum(-1)
    before_first = ((0, 0), (1, 0))
    return jnp.pad(chosen, before_first), jnp.pad(entropy, before_first)


def padded(arrays: TokenArrays) -> np.ndarray:
    """Returns the arrays as rows. There are few widths, since every width compiles anew."""
    longest = max(len(array) for array in arrays)
    width = math.ceil(longest / 18) * 18
    return np.stack([np.pad(array, (0, width - len(array))) for array in arrays])


def doubles(params: qwen.Params) -> qwen.Params:
    """Returns the parameters as float64 NumPy arrays."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


def ids_of(sequence: Rollout | Example) -> np.ndarray:
    """Returns the token ids of a rollout, or of an example of supervised training."""
    tokens = sequence.tokens
    return tokens.ids if isinstance(tokens, Tokens) else np.array(tokens, np.int32)


def naive(
    params: qwen.Params,
    rollouts: Sequence[Rollout] | Sequence[Example],
    temperature: float,
    model: qwen.QwenConfig = MODEL,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns log-probs and entropies, for each rollout f64 over its tokens."""
    tokens = padded([ids_of(rollout) for rollout in rollouts])
    with jax.enable_x64(True):
        logps, entropy = rows_logps(model, doubles(params), tokens, temperature)

    def without_padding(rows: jax.Array) -> list[np.ndarray]:
        pairs = zip(np.asarray(rows), rollouts, strict=True)
        return [row[: len(rollout.tokens)] for row, rollout in pairs]

    return without_padding(logps), without_padding(entropy)


def naive_gradient(
    params: qwen.Params,
    rollouts: Sequence[Rollout] | Sequence[Example],
    slopes: TokenArrays,
    temperature: float,
    model: qwen.QwenConfig = MODEL,
) -> qwen.Params:
    """Returns sum_t slope_t grad logp_t over every token of every rollout, in float64."""
    tokens = padded([ids_of(rollout) for rollout in rollouts])
    with jax.enable_x64(True):
        gradient = gradient_of_logps(model, doubles(params), tokens, padded(slopes), temperature)
        return jax.device_get(gradient)


@partial(jax.jit, static_argnums=0)
def gradient_of_logps(
    model: qwen.QwenConfig,
    params: qwen.Params,
    tokens: np.ndarray,
    slopes: np.ndarray,
    temperature: float,
) -> qwen.Params:
    """Returns sum_t slope_t grad logp_t for rows of tokens [N, T] and slopes [N, T]."""

    def weighted_sum(params: qwen.Params) -> jax.Array:
        logps, _ = rows_logps(model, params, tokens, temperature)
        return (logps * slopes).sum()

    return jax.grad(weighted_sum)(params)


# The optimizer.


def adamw(
    params: qwen.Params,
    gradients: Sequence[Callable[[qwen.Params], qwen.Params]],
    settings: config.OptimizerConfig,
    rates: Sequence[float],
) -> qwen.Params:
    """Returns the parameters after one AdamW step for each gradient function, in float64.

    Norms and biases do not decay. The gradient is clipped by its global norm.
    """
    leaves, tree = jax.tree.flatten(doubles(params))
    names = [path[-1].key for path, _ in jax.tree.leaves_with_path(params)]
    m, v = [0.0] * len(leaves), [0.0] * len(leaves)
    for t, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        g = jax.tree.leaves(gradient(jax.tree.unflatten(tree, leaves)))
        global_norm = np.sqrt(sum((x**2).sum() for x in g))
        g = [x * min(1.0, settings.clip_norm / global_norm) for x in g]
        for i, name in enumerate(names):
            m[i] = settings.b1 * m[i] + (1 - settings.b1) * g[i]
            v[i] = settings.b2 * v[i] + (1 - settings.b2) * g[i] ** 2
            unbiased_m = m[i] / (1 - settings.b1**t)
            unbiased_v = v[i] / (1 - settings.b2**t)
            step = unbiased_m / (np.sqrt(unbiased_v) + settings.eps)
            decay = 0.0 if "norm" in name or "bias" in name else settings.weight_decay
            leaves[i] = leaves[i] - rate * (step + decay * leaves[i])
    return jax.tree.unflatten(tree, leaves)


# The largest relative norm of the difference between two gradients in fp32 whose sums run in
# another order. Rounding depends on the processor: a test of the whole model found 0.93e-6 with
# AVX2 and 1.07e-6 with SSE 4.2 (XLA_FLAGS=--xla_cpu_max_isa=SSE4_2).
ROUNDING = 4e-6


def difference(got: qwen.Params, want: qwen.Params) -> float:
    """Returns the largest relative norm of the difference between two leaves of the trees."""

    def relative_norm(a: np.ndarray, b: np.ndarray) -> float:
        b = np.asarray(b)
        return float(np.linalg.norm(np.asarray(a) - b) / np.linalg.norm(b))

    return max(jax.tree.leaves(jax.tree.map(relative_norm, got, want)))


def assert_same_gradient(got: qwen.Params, want: qwen.Params, bound: float = ROUNDING) -> None:
    """Asserts that two gradients in fp32 differ by no more than rounding.

    bound: of `difference`; larger for experts, delta nets, adapters and split rows.
    """
    assert difference(got, want) < bound


def assert_same_loss(got: np.ndarray | float, want: np.ndarray | float) -> None:
    """Asserts that two losses in fp32, whose terms may cancel, differ by no more than rounding."""
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


def assert_equal(found: Params, expected: Params) -> None:
    """Asserts that two trees have the same structure and the same bits in every leaf."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
