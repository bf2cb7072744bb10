"""From the grades of rollouts to advantages and token weights, on the host in NumPy.

    rollouts -> training_sequences -> token_weights       how much every token counts in the loss
    rollouts -> compute_credit                            advantages, and targets of the critic
    rollouts -> can_have_gradient                         which sequences the update has to compute

Everything is computed over all rollouts of a step, before they are packed. The row, the microbatch
and the device that a token comes to lie on cannot change its advantage or its weight.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jzero import algorithms
from jzero.algorithms import Episodes
from jzero.config import Config
from jzero.types import Rollout, grade_of


def training_sequences(
    rollouts: Sequence[Rollout], config: Config
) -> tuple[list[Rollout], list[int]]:
    """Returns the sequences that are trained on, and the index of the rollout each is taken from.

    The sequences are the rollouts. With train.sequence_per_turn they are the turns: each sequence
    then holds everything up to the end of one turn, and only that turn counts as sampled.
    """
    if not config.train.sequence_per_turn:
        return list(rollouts), list(range(len(rollouts)))

    sequences = []
    sources = []
    for source, rollout in enumerate(rollouts):
        for number, turn in enumerate(rollout.turns):
            in_turn = np.arange(turn.end) >= turn.start
            sequence = replace(
                rollout,
                tokens=rollout.tokens[: turn.end],
                sampled=rollout.sampled[: turn.end] & in_turn,
                logps=rollout.logps[: turn.end],
                versions=rollout.versions[: turn.end],
                kept=None if rollout.kept is None else rollout.kept[: turn.end],
                routes=None if rollout.routes is None else rollout.routes[: turn.end],
                turns=rollout.turns[: number + 1],
                grade=replace(grade_of(turn), failed=grade_of(rollout).failed),
            )
            sequences.append(sequence)
            sources.append(source)
    return sequences, sources


def token_weights(
    sequences: Sequence[Rollout],
    chosen: Sequence[int],
    weight: str,
    config: Config,
    only_correct: bool = False,
) -> dict[int, np.ndarray]:
    """Returns the weight of every token in the loss of one optimizer step.

    `chosen` are the indices of the sequences of that optimizer step; `sequences` are those of the
    whole RL step, which some weights divide by. `weight` is a key of algorithms.WEIGHTS. With
    `only_correct` no token of a sequence that is not correct is trained.

    Returns f32[T] for each chosen index: the weight of tokens that are trained, 0 elsewhere.
    """
    algorithm = config.algorithm
    trained = [trained_tokens(sequence, algorithm) for sequence in sequences]
    if only_correct:
        for mask, sequence in zip(trained, sequences, strict=True):
            mask &= grade_of(sequence).correct
    counts = np.array([mask.sum() for mask in trained], np.float64)

    # The longest response there can be, for the weight that divides by a constant (Dr. GRPO).
    turns = 1 if config.train.sequence_per_turn else config.rollout.max_turns
    longest = algorithm.length_norm or turns * config.rollout.max_new_tokens

    chosen_counts = counts[list(chosen)]
    weights = algorithms.WEIGHTS[weight](chosen_counts, counts, longest) * (chosen_counts > 0)
    return {
        index: (trained[index] * token_weight).astype(np.float32)
        for index, token_weight in zip(chosen, weights, strict=True)
    }


def environment_weights(
    sequences: Sequence[Rollout], chosen: Sequence[int], config: Config
) -> dict[int, np.ndarray]:
    """Returns the weight of every token in the cross-entropy on the environment's replies.

    `chosen` are the indices of the sequences of one optimizer step. Returns f32[T] for each of
    them: 1 over the number of reply tokens of the optimizer step, and 0 for all other tokens.
    """
    replies = {index: environment_tokens(sequences[index], config) for index in chosen}
    num_tokens = sum(int(mask.sum()) for mask in replies.values())
    return {
        index: (mask / max(num_tokens, 1)).astype(np.float32) for index, mask in replies.items()
    }


def environment_tokens(sequence: Rollout, config: Config) -> np.ndarray:
    """Returns bool[T]: the tokens after the prompt that the policy did not sample.

    They are the environment's replies, with the text of the template around them. With
    train.sequence_per_turn only the reply before the last turn counts, because those before it
    count in sequences of their own. A sequence whose grading failed has none.
    """
    start = sequence.prompt_length
    if config.train.sequence_per_turn and len(sequence.turns) > 1:
        start = sequence.turns[-2].end
    is_reply = ~sequence.sampled & (np.arange(len(sequence.tokens)) >= start)
    return is_reply & (not grade_of(sequence).failed)


def trained_tokens(sequence: Rollout, algorithm: algorithms.Algorithm) -> np.ndarray:
    """Returns bool[T]: the sampled tokens, without truncated turns if they are not trained on.

    A sequence whose grading failed has no score, and none of its tokens is trained.
    """
    trained = sequence.sampled.copy()
    if grade_of(sequence).failed:
        trained[:] = False
    if algorithm.truncated in ("mask", "ignore"):
        for turn in sequence.turns:
            if turn.finish_reason == "length":
                trained[turn.start : turn.end] = False
    return trained


def turn_rewards(rollout: Rollout, config: Config) -> list[float]:
    """Returns the reward of each turn of `rollout`: the grader's score, shaped by the algorithm.

    `algorithms.shape_score` applies the penalties for length and truncation.
    """
    rewards = []
    for turn in rollout.turns:
        score = grade_of(turn).score
        length = int(rollout.sampled[turn.start : turn.end].sum())
        is_truncated = turn.finish_reason == "length"
        reward = algorithms.shape_score(
            score, length, is_truncated, config.algorithm, config.rollout.max_new_tokens
        )
        rewards.append(reward)
    return rewards


def reward_weights(config: Config) -> dict[str, float]:
    """Returns the weight of each of `task.reward.functions`."""
    settings = config.task.reward
    weights = settings.weights or (1.0,) * len(settings.functions)
    return dict(zip(settings.functions, weights, strict=True))


def turn_parts(rollout: Rollout, config: Config) -> list[list[float]]:
    """Returns the named rewards of each turn, one for each of `task.reward.functions`.

    A reward is NaN where its function does not apply to the turn. The task's grader alone is the
    reward `accuracy`. Where the algorithm gives a truncated turn a fixed score, each of the turn's
    rewards is that score.
    """
    algorithm = config.algorithm
    names = reward_weights(config)
    parts = []
    for turn in rollout.turns:
        grade = grade_of(turn)
        known = {"accuracy": grade.score} | grade.parts
        rewards = [known.get(name, np.nan) for name in names]
        if turn.finish_reason == "length" and algorithm.truncated in ("fixed", "ignore"):
            rewards = [algorithm.truncated_score] * len(rewards)
        parts.append(rewards)
    return parts


def can_have_gradient(
    rollouts: Sequence[Rollout],
    sequences: Sequence[Rollout],
    sources: Sequence[int],
    config: Config,
) -> np.ndarray:
    """Returns bool[S]: whether the update has to compute each of the S sequences.

    `sequences` and `sources` are those of `training_sequences`. A sequence that need not be
    computed adds exactly 0 to the gradient of its optimizer step:

      - None of its tokens is trained: its grading failed, or all its turns are truncated and the
        algorithm does not train on those. Or:
      - The advantages of all its trained tokens are exactly 0, as in a group whose scores are all
        equal, the surrogate scales with the advantage, and the loss has no other term: none of
        `kl_coef`, `ce_coef`, `entropy_coef` and `ratio_penalty`.

    With `environment_coef` a sequence that has a reply of the environment is always computed.

    Where the advantages read scores (`credit_reads_scores`), they are not known before the rows are
    packed and scored, and scores of tokens that are not trained may still be read. There, only
    sequences whose grading failed need not be computed, because no advantage reads theirs. A critic
    is trained whatever the advantages are, and is among these cases.

    The answer follows from rollouts and settings alone, so all hosts come to the same one.
    """
    algorithm = config.algorithm
    if credit_reads_scores(algorithm):
        return np.array([not grade_of(sequence).failed for sequence in sequences])

    trained = [trained_tokens(sequence, algorithm) for sequence in sequences]
    has_reply = np.zeros(len(sequences), bool)
    if algorithm.environment_coef:
        has_reply[:] = [environment_tokens(sequence, config).any() for sequence in sequences]
    scales_with_advantage = algorithms.SURROGATES[algorithm.surrogate].scales_with_advantage
    has_other_term = (
        algorithm.kl_coef or algorithm.ce_coef or algorithm.entropy_coef or algorithm.ratio_penalty
    )
    if has_other_term or not scales_with_advantage:
        return np.array([mask.any() for mask in trained]) | has_reply

    zeros = zeros_like_tokens(rollouts)
    advantages, _ = compute_credit(rollouts, config, penalties=zeros, values=zeros)
    has_advantage = np.array(
        [
            advantages[source][: len(mask)][mask].any()
            for mask, source in zip(trained, sources, strict=True)
        ]
    )
    return has_advantage | has_reply


def credit_reads_scores(algorithm: algorithms.Algorithm) -> bool:
    """Returns whether advantages depend on log-probs or values that models compute."""
    reads_policies = bool(algorithm.kl_reward) or algorithms.needs_teacher(algorithm)
    return reads_policies or algorithms.needs_critic(algorithm)


def compute_credit(
    rollouts: Sequence[Rollout],
    config: Config,
    penalties: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the advantages and the critic's targets of all rollouts.

    Both are f32[T] for each rollout, 0 where the token was not sampled. `penalties` and `values`
    are those of `make_episodes`.
    """
    episodes = make_episodes(rollouts, config, penalties, values)
    is_graded = np.array([not grade_of(rollout).failed for rollout in rollouts])
    advantages_NT, targets_NT = advantages_of_graded(episodes, is_graded, config.algorithm)
    return spread_over_tokens(advantages_NT, rollouts), spread_over_tokens(targets_NT, rollouts)


def zeros_like_tokens(rollouts: Sequence[Rollout]) -> list[np.ndarray]:
    """Returns f32[T] zeros for each rollout."""
    return [np.zeros(len(rollout.tokens), np.float32) for rollout in rollouts]


def make_episodes(
    rollouts: Sequence[Rollout],
    config: Config,
    penalties: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
) -> Episodes:
    """Returns the rewards and values of rollouts over their sampled tokens.

    The reward of a turn is put on the turn's last token. `penalties` (f32[T] for each rollout) are
    subtracted from the reward of every sampled token, and `values` (f32[T] for each rollout) are
    the critic's. Both are read at sampled tokens only.
    """
    counts = np.array([rollout.sampled.sum() for rollout in rollouts])
    mask = np.arange(counts.max()) < counts[:, None]
    rewards_NT = np.zeros(mask.shape)
    values_NT = np.zeros(mask.shape)
    turns_NT = np.zeros(mask.shape, np.int64)

    for i, rollout in enumerate(rollouts):
        rewards_NT[i, : counts[i]] = -penalties[i][rollout.sampled]
        values_NT[i, : counts[i]] = values[i][rollout.sampled]

        # Number of sampled tokens up to the end of each turn.
        ends = [int(rollout.sampled[: turn.end].sum()) for turn in rollout.turns]
        for end, reward in zip(ends, turn_rewards(rollout, config), strict=True):
            rewards_NT[i, end - 1] += reward
        # Tokens after the last turn are padding and keep its number.
        for number, end in enumerate(ends[:-1], start=1):
            turns_NT[i, end:] = number

    episodes = Episodes(
        rewards=rewards_NT,
        values=values_NT,
        mask=mask,
        group=np.arange(len(rollouts)) // config.rollout.group_size,
        turn=turns_NT if turns_NT.any() else None,
        turn_discount=config.task.turn_discount,
    )
    if algorithms.needs_parts(config.algorithm):
        return with_parts(episodes, rollouts, config)
    return episodes


def with_parts(episodes: Episodes, rollouts: Sequence[Rollout], config: Config) -> Episodes:
    """Returns the episodes with the named rewards of each turn, on the turn's last token.

    A reward is NaN where its function does not apply to the turn.
    """
    weights = reward_weights(config)
    parts_NTK = np.zeros((*episodes.mask.shape, len(weights)))
    for i, rollout in enumerate(rollouts):
        for turn, parts in zip(rollout.turns, turn_parts(rollout, config), strict=True):
            end = int(rollout.sampled[: turn.end].sum())
            parts_NTK[i, end - 1] = parts
    return episodes._replace(parts=parts_NTK, part_weights=tuple(weights.values()))


def advantages_of_graded(
    episodes: Episodes, is_graded: np.ndarray, algorithm: algorithms.Algorithm
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what `algorithms.compute_advantages` does, from the episodes that have a score.

    `is_graded` is bool[N]. An episode that is not graded is no member of its group: the baseline of
    the others is as if it had not been sampled. Its own rows are 0.
    """
    if is_graded.all():
        return algorithms.compute_advantages(episodes, algorithm)
    advantages_NT = np.zeros(episodes.mask.shape)
    targets_NT = np.zeros(episodes.mask.shape)
    if is_graded.any():
        _, group = np.unique(episodes.group[is_graded], return_inverse=True)
        graded = episodes._replace(
            rewards=episodes.rewards[is_graded],
            values=episodes.values[is_graded],
            mask=episodes.mask[is_graded],
            group=group,
            turn=None if episodes.turn is None else episodes.turn[is_graded],
            parts=None if episodes.parts is None else episodes.parts[is_graded],
        )
        advantages_NT[is_graded], targets_NT[is_graded] = algorithms.compute_advantages(
            graded, algorithm
        )
    return advantages_NT, targets_NT


def spread_over_tokens(values_NT: np.ndarray, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
    """Does the reverse of the layout of Episodes: [N, T] over sampled tokens -> over all tokens.

    Returns f32[T] for each rollout, 0 where the token was not sampled.
    """
    spread = []
    for row, rollout in zip(values_NT, rollouts, strict=True):
        values = np.zeros(len(rollout.tokens), np.float32)
        values[rollout.sampled] = row[: rollout.sampled.sum()]
        spread.append(values)
    return spread
