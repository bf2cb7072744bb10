"""Credit assignment on the host in NumPy: from graded rollouts to advantages and token weights.

    rollouts -> training_sequences -> token_weights       weight of every token in the loss
    rollouts -> compute_credit                            advantages, and targets of the critic
    rollouts -> can_have_gradient                         sequences that the update has to compute

Everything is computed over all rollouts of a step, before packing. Therefore a token's row,
microbatch and device cannot change its advantage or its weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from jzero import algorithms
from jzero.algorithms import Episodes
from jzero.algorithms.surrogates import SURROGATES
from jzero.tokens import TRACKS
from jzero.types import Rollout, grade_of


@dataclass(frozen=True)
class CreditSettings:
    """The settings that turn graded rollouts into advantages and token weights."""

    algorithm: algorithms.Algorithm
    group_size: int
    max_turns: int
    max_new_tokens: int  # the longest response of a turn
    sequence_per_turn: bool = False  # a training sequence for every turn of a rollout
    # What an advantage belongs to: a turn, with the return of the turn and those after it, or all
    # turns of an episode (task.agent_credit=tree and last), or a sequence of the episode (branch).
    unit: Literal["turn", "episode", "branch"] = "turn"
    turn_discount: float = 1.0
    reward_weights: dict[str, float] = field(default_factory=dict)  # of every named reward


class Source(NamedTuple):
    """The place of a training sequence: tokens of a rollout, from `start` on."""

    rollout: int  # index among the rollouts of the step
    start: int = 0

    def part(self, values: Sequence[np.ndarray], length: int) -> np.ndarray:
        """Returns the values of a sequence of `length` tokens, of one array for each rollout."""
        return values[self.rollout][self.start : self.start + length]


def training_sequences(
    rollouts: Sequence[Rollout],
    sequence_per_turn: bool,
) -> tuple[list[Rollout], list[Source]]:
    """Returns the sequences to train on, and the place from which each is taken.

    By default the sequences are the rollouts, or all sequences of the trees of agents. With
    train.sequence_per_turn there is one sequence for each turn: the rollout up to the end of the
    turn, in which only this turn counts as sampled.
    """
    if not sequence_per_turn:
        parts = [
            (part, Source(index, start))
            for index, rollout in enumerate(rollouts)
            for part, start in zip(branches_of(rollout), rollout.branch_starts, strict=True)
        ]
        return [part for part, _ in parts], [source for _, source in parts]

    sequences = []
    sources = []
    for source, rollout in enumerate(rollouts):
        for number, turn in enumerate(rollout.turns):
            tokens = rollout.tokens.first(turn.end)
            in_turn = np.arange(turn.end) >= turn.start
            sequence = replace(
                rollout,
                tokens=tokens.replaced(sampled=tokens.sampled & in_turn),
                turns=rollout.turns[: number + 1],
                # A failed grading of the rollout applies to all its turns.
                grade=replace(grade_of(turn), failed=grade_of(rollout).failed),
            )
            sequences.append(sequence)
            sources.append(Source(source))
    return sequences, sources


def branches_of(rollout: Rollout) -> list[Rollout]:
    """Returns each sequence of an episode as a rollout, with the grade of the episode."""
    if len(rollout.branch_starts) == 1:
        return [rollout]
    parts = []
    for branch in rollout.branches:
        turns = [
            replace(turn, start=turn.start - branch.start, end=turn.end - branch.start)
            for turn in rollout.turns
            if branch.start <= turn.start < branch.stop
        ]
        tokens = rollout.tokens.part(branch.start, branch.stop)
        parts.append(replace(rollout, tokens=tokens, turns=tuple(turns), branch_starts=(0,)))
    return parts


def token_weights(
    sequences: Sequence[Rollout],
    chosen: Sequence[int],
    weight: algorithms.Weight,
    settings: CreditSettings,
    only_correct: bool = False,
) -> dict[int, np.ndarray]:
    """Returns the weight of every token in the loss of one optimizer step.

    `chosen` has the indices of the sequences of this optimizer step; `sequences` has all sequences
    of the RL step, because some weights are normalized over the RL step. `weight` is a part of the
    algorithm. With `only_correct` only tokens of correct sequences are trained.

    Returns f32[T] for each chosen index: the weights of trained tokens, 0 elsewhere.
    """
    algorithm = settings.algorithm
    trained = [trained_tokens(sequence, algorithm) for sequence in sequences]
    if only_correct:
        for mask, sequence in zip(trained, sequences, strict=True):
            mask &= grade_of(sequence).correct
    counts = np.array([mask.sum() for mask in trained], np.float64)

    # The maximum response length, for the weight that divides by a constant (Dr. GRPO).
    turns = 1 if settings.sequence_per_turn else settings.max_turns
    longest = turns * settings.max_new_tokens
    if isinstance(weight, algorithms.Constant) and weight.length:
        longest = weight.length

    # Sequences without a trained token get the weight 0.
    chosen_counts = counts[list(chosen)]
    weights = algorithms.WEIGHTS[type(weight)](chosen_counts, counts, longest) * (chosen_counts > 0)
    return {
        index: (trained[index] * token_weight).astype(np.float32)
        for index, token_weight in zip(chosen, weights, strict=True)
    }


def has_top_entropy(
    sequences: Sequence[Rollout],
    chosen: Sequence[int],
    entropies: Sequence[np.ndarray],
    algorithm: algorithms.Algorithm,
) -> dict[int, np.ndarray]:
    """Returns a mask of the trained tokens with the highest entropy in an optimizer step.

    `chosen` has the indices of the sequences of this optimizer step. `entropies` has f32[T] for
    each sequence: the entropy of the policy before the first optimizer step. Tokens are selected if
    their entropy is at least the quantile 1 - algorithm.top_entropy over the trained tokens.
    Returns bool[T] for each chosen index.

    Source: "Beyond the 80/20 Rule", arXiv:2506.01939.
    """
    trained = {index: trained_tokens(sequences[index], algorithm) for index in chosen}
    all_entropies = np.concatenate([entropies[index][mask] for index, mask in trained.items()])
    # Without a trained token there is no quantile.
    if not len(all_entropies):
        return trained
    bound = np.quantile(all_entropies, 1 - algorithm.top_entropy)
    return {index: mask & (entropies[index] >= bound) for index, mask in trained.items()}


def environment_weights(
    sequences: Sequence[Rollout],
    chosen: Sequence[int],
    sequence_per_turn: bool,
) -> dict[int, np.ndarray]:
    """Returns the weight of every token in the cross-entropy on the environment's replies.

    `chosen` has the indices of the sequences of one optimizer step. Returns f32[T] for each chosen
    index: 1 / (reply tokens of the optimizer step) for tokens of replies, 0 for other tokens.
    """
    replies = {index: environment_tokens(sequences[index], sequence_per_turn) for index in chosen}
    num_tokens = sum(int(mask.sum()) for mask in replies.values())
    return {
        index: (mask / max(num_tokens, 1)).astype(np.float32) for index, mask in replies.items()
    }


def environment_tokens(sequence: Rollout, sequence_per_turn: bool) -> np.ndarray:
    """Returns bool[T]: the tokens after the prompt that the policy did not sample.

    These are the environment's replies, including the chat template's text around them. If the
    grading of the sequence failed, the mask is all False.
    """
    start = sequence.prompt_length
    # With train.sequence_per_turn only the reply before the last turn counts: earlier replies count
    # in the sequences of earlier turns.
    if sequence_per_turn and len(sequence.turns) > 1:
        start = sequence.turns[-2].end
    is_reply = ~sequence.tokens.sampled & (np.arange(len(sequence.tokens)) >= start)
    return is_reply & (not grade_of(sequence).failed)


def trained_tokens(sequence: Rollout, algorithm: algorithms.Algorithm) -> np.ndarray:
    """Returns bool[T]: the sampled tokens, without truncated turns if the algorithm masks them.

    If the grading of the sequence failed, the mask is all False.
    """
    trained = sequence.tokens.sampled.copy()
    # Without a grade there is no score, so no token is trained.
    if grade_of(sequence).failed:
        trained[:] = False
    if isinstance(algorithm.truncated, algorithms.Mask | algorithms.Ignore):
        for turn in sequence.turns:
            if turn.finish_reason == "length":
                trained[turn.start : turn.end] = False
    return trained


def turn_rewards(rollout: Rollout, settings: CreditSettings) -> list[float]:
    """Returns the reward of each turn of `rollout`: the grader's score, shaped by the algorithm.

    `algorithms.shape_score` applies the penalties for length and truncation.
    """
    rewards = []
    for turn in rollout.turns:
        score = grade_of(turn).score
        length = int(rollout.tokens.sampled[turn.start : turn.end].sum())
        is_truncated = turn.finish_reason == "length"
        reward = algorithms.shape_score(
            score, length, is_truncated, settings.algorithm, settings.max_new_tokens
        )
        rewards.append(reward)
    return rewards


def turn_parts(rollout: Rollout, settings: CreditSettings) -> list[list[float]]:
    """Returns the named rewards of each turn, one for each of `task.reward.functions`.

    A reward is NaN if its function does not apply to the turn. The reward `accuracy` is the score
    of the task's grader. If the algorithm gives truncated turns a fixed score, all rewards of a
    truncated turn are this score.
    """
    rule = settings.algorithm.truncated
    names = settings.reward_weights
    parts = []
    for turn in rollout.turns:
        grade = grade_of(turn)
        rewards_by_name = {"accuracy": grade.score} | grade.parts
        rewards = [rewards_by_name.get(name, np.nan) for name in names]
        has_fixed_score = isinstance(rule, algorithms.Fixed | algorithms.Ignore)
        if turn.finish_reason == "length" and has_fixed_score:
            rewards = [rule.score] * len(rewards)
        parts.append(rewards)
    return parts


def can_have_gradient(
    rollouts: Sequence[Rollout],
    sequences: Sequence[Rollout],
    sources: Sequence[Source],
    settings: CreditSettings,
) -> np.ndarray:
    """Returns bool[S]: whether the update has to compute each of the S sequences.

    `sequences` and `sources` are the return values of `training_sequences`. A sequence can be left
    out if it adds exactly 0 to the gradient of its optimizer step:

      - None of its tokens is trained: its grading failed, or all its turns are truncated and the
        algorithm does not train on truncated turns. Or:
      - The advantages of all its trained tokens are exactly 0 (for example in a group with equal
        scores), the surrogate scales with the advantage, and the loss has no other term: none of
        `kl.coef`, `cross_entropy.coef`, `entropy_coef` and `ratio_penalty`. With `top_entropy` the
        sequence has to be computed, because its entropies decide which tokens of others are
        trained.

    With `environment_coef` a sequence that has a reply of the environment is always computed.

    The result depends only on rollouts and settings, so all hosts compute the same result.
    """
    algorithm = settings.algorithm
    # If advantages depend on scores, they are unknown before the rows are packed and scored, and
    # they can also read scores of untrained tokens. Only sequences with failed grading can be left
    # out, because no advantage reads their scores. This case includes algorithms with a critic,
    # which is trained on sequences with any advantage.
    if credit_reads_scores(algorithm):
        return np.array([not grade_of(sequence).failed for sequence in sequences])

    trained = [trained_tokens(sequence, algorithm) for sequence in sequences]
    has_reply = np.zeros(len(sequences), bool)
    if algorithm.environment_coef:
        has_reply[:] = [
            environment_tokens(sequence, settings.sequence_per_turn).any() for sequence in sequences
        ]
    scales_with_advantage = SURROGATES[type(algorithm.surrogate)].scales_with_advantage
    has_other_term = (
        algorithm.kl.coef
        or algorithm.cross_entropy.coef
        or algorithm.entropy_coef
        or algorithm.ratio_penalty
    )
    ranks_entropies = algorithm.top_entropy < 1
    if has_other_term or ranks_entropies or not scales_with_advantage:
        return np.array([mask.any() for mask in trained]) | has_reply

    # Here advantages depend on no penalty and no value, so zeros serve for both.
    zeros = zeros_like_tokens(rollouts)
    advantages, _ = compute_credit(rollouts, settings, penalties=zeros, values=zeros)
    has_advantage = np.array(
        [
            source.part(advantages, len(mask))[mask].any()
            for mask, source in zip(trained, sources, strict=True)
        ]
    )
    return has_advantage | has_reply


def credit_reads_scores(algorithm: algorithms.Algorithm) -> bool:
    """Returns whether advantages depend on log-probs or values from scoring."""
    reads_policies = bool(algorithm.kl_reward) or algorithms.needs_teacher(algorithm)
    return reads_policies or algorithms.needs_critic(algorithm)


def compute_credit(
    rollouts: Sequence[Rollout],
    settings: CreditSettings,
    penalties: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the advantages and the critic's targets of all rollouts.

    Both are f32[T] for each rollout, 0 for tokens that were not sampled. `make_episodes` describes
    `penalties` and `values`.
    """
    episodes = make_episodes(rollouts, settings, penalties, values)
    is_graded = np.array([not grade_of(rollout).failed for rollout in rollouts])
    advantages_NT, targets_NT = advantages_of_graded(episodes, is_graded, settings.algorithm)
    return spread_over_tokens(advantages_NT, rollouts), spread_over_tokens(targets_NT, rollouts)


def zeros_like_tokens(rollouts: Sequence[Rollout]) -> list[np.ndarray]:
    """Returns f32[T] zeros for each rollout."""
    return [np.zeros(len(rollout.tokens), np.float32) for rollout in rollouts]


def make_episodes(
    rollouts: Sequence[Rollout],
    settings: CreditSettings,
    penalties: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
) -> Episodes:
    """Returns the rewards and values of rollouts over their sampled tokens.

    The reward of a turn is on the turn's last token. `penalties` (f32[T] for each rollout) are
    subtracted from the reward of every sampled token, and `values` (f32[T] for each rollout) are
    the critic's values. Both are read only at sampled tokens.
    """
    counts = np.array([rollout.tokens.sampled.sum() for rollout in rollouts])
    # [T] < [N, 1] -> bool[N, T], where T counts only sampled tokens.
    mask = np.arange(counts.max()) < counts[:, None]
    rewards_NT = np.zeros(mask.shape)
    values_NT = np.zeros(mask.shape)
    turns_NT = np.zeros(mask.shape, np.int64)

    for i, rollout in enumerate(rollouts):
        # The KL penalty is part of every token's reward.
        rewards_NT[i, : counts[i]] = -penalties[i][rollout.tokens.sampled]
        values_NT[i, : counts[i]] = values[i][rollout.tokens.sampled]

        # Number of sampled tokens up to the end of each turn.
        ends = [int(rollout.tokens.sampled[: turn.end].sum()) for turn in rollout.turns]
        for end, reward in zip(ends, turn_rewards(rollout, settings), strict=True):
            # An agent that has failed without a response has no token.
            if end:
                # Added and not set, because the KL penalty of this token is there already.
                rewards_NT[i, end - 1] += reward
        if settings.unit == "episode":
            continue
        if settings.unit == "branch":
            branches = rollout.branches[:-1]
            ends = [int(rollout.tokens.sampled[: branch.stop].sum()) for branch in branches]
        else:
            ends = ends[:-1]
        # Tokens after the last turn are padding and keep its number.
        for number, end in enumerate(ends, start=1):
            turns_NT[i, end:] = number

    episodes = Episodes(
        rewards=rewards_NT,
        values=values_NT,
        mask=mask,
        group=np.arange(len(rollouts)) // settings.group_size,
        turn=turns_NT if turns_NT.any() else None,
        # A sequence of an agent has only its own reward.
        turn_discount=0.0 if settings.unit == "branch" else settings.turn_discount,
        tracks=measured_tracks(rollouts, mask),
    )
    if algorithms.needs_parts(settings.algorithm):
        return with_parts(episodes, rollouts, settings)
    return episodes


def measured_tracks(rollouts: Sequence[Rollout], mask: np.ndarray) -> dict[str, np.ndarray]:
    """Returns [N, T, *shape] over sampled tokens of every track that measures the logits.

    mask: bool[N, T] where a rollout has a token. Tracks that a rollout lacks are left out.
    """
    tracks: dict[str, np.ndarray] = {}
    for name in (name for name, track in TRACKS.items() if track.measure is not None):
        if all(rollout.tokens.get(name) is not None for rollout in rollouts):
            sampled = [rollout.tokens[name][rollout.tokens.sampled] for rollout in rollouts]
            values = np.zeros((*mask.shape, *sampled[0].shape[1:]), sampled[0].dtype)
            values[mask] = np.concatenate(sampled)
            tracks[name] = values
    return tracks


def with_parts(
    episodes: Episodes,
    rollouts: Sequence[Rollout],
    settings: CreditSettings,
) -> Episodes:
    """Adds the named rewards of each turn to the episodes, on the turn's last token.

    A reward is NaN if its function does not apply to the turn.
    """
    weights = settings.reward_weights
    parts_NTK = np.zeros((*episodes.mask.shape, len(weights)))
    for i, rollout in enumerate(rollouts):
        for turn, parts in zip(rollout.turns, turn_parts(rollout, settings), strict=True):
            end = int(rollout.tokens.sampled[: turn.end].sum())
            parts_NTK[i, end - 1] = parts
    return episodes._replace(parts=parts_NTK, part_weights=tuple(weights.values()))


def advantages_of_graded(
    episodes: Episodes,
    is_graded: np.ndarray,
    algorithm: algorithms.Algorithm,
) -> tuple[np.ndarray, np.ndarray]:
    """Computes `algorithms.compute_advantages` over only the graded episodes.

    `is_graded` is bool[N]. An episode without a grade does not count in the baseline of its group,
    as if it had not been sampled. Its rows of the result are 0.
    """
    if is_graded.all():
        return algorithms.compute_advantages(episodes, algorithm)
    advantages_NT = np.zeros(episodes.mask.shape)
    targets_NT = np.zeros(episodes.mask.shape)
    if is_graded.any():
        # Renumber the groups, because a group can have lost all its episodes.
        _, group = np.unique(episodes.group[is_graded], return_inverse=True)
        graded = episodes._replace(
            rewards=episodes.rewards[is_graded],
            values=episodes.values[is_graded],
            mask=episodes.mask[is_graded],
            group=group,
            turn=None if episodes.turn is None else episodes.turn[is_graded],
            parts=None if episodes.parts is None else episodes.parts[is_graded],
            tracks={name: values[is_graded] for name, values in episodes.tracks.items()},
        )
        advantages_NT[is_graded], targets_NT[is_graded] = algorithms.compute_advantages(
            graded, algorithm
        )
    return advantages_NT, targets_NT


def spread_over_tokens(values_NT: np.ndarray, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
    """Converts [N, T] over sampled tokens, the layout of Episodes, to values over all tokens.

    Returns f32[T] for each rollout, 0 for tokens that were not sampled.
    """
    spread = []
    for row, rollout in zip(values_NT, rollouts, strict=True):
        values = np.zeros(len(rollout.tokens), np.float32)
        values[rollout.tokens.sampled] = row[: rollout.tokens.sampled.sum()]
        spread.append(values)
    return spread
