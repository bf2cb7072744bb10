"""Moved from jzero.learn."""

from dataclasses import replace

import numpy as np

from jzero import algorithms, config
from jzero.algorithms import Episodes
from jzero.types import Rollout, grade_of


def training_sequences(
    rollouts: list[Rollout], config: config.Config
) -> tuple[list[Rollout], list[int]]:
    """What is trained on, and which rollout each is of: the rollouts or, if train.sequence_per_turn, all of their turns."""
    if not config.train.sequence_per_turn:
        return rollouts, list(range(len(rollouts)))
    rows, source = [], []
    for i, rollout in enumerate(rollouts):
        for t, turn in enumerate(rollout.turns):
            tokens, logps, versions = (
                x[: turn.end] for x in (rollout.tokens, rollout.logps, rollout.versions)
            )
            sampled = rollout.sampled[: turn.end] & (np.arange(turn.end) >= turn.start)
            fields = {"tokens": tokens, "logps": logps, "versions": versions, "sampled": sampled}
            rows.append(replace(rollout, **fields, turns=rollout.turns[: t + 1], grade=turn.grade))
            source.append(i)
    return rows, source


def token_weights(
    rollouts: list[Rollout], chosen: list[int], weight: str, config: config.Config
) -> dict[int, np.ndarray]:
    """For each chosen rollout (of one optimizer step), f32[T]: the weight of its trained tokens, 0 elsewhere."""
    algorithm = config.algorithm
    trained = [rollout.sampled.copy() for rollout in rollouts]
    for mask, rollout in zip(trained, rollouts, strict=True):
        for turn in rollout.turns if algorithm.truncated == "mask" else ():
            mask[turn.start : turn.end] &= turn.finish_reason != "length"
    every = np.array([mask.sum() for mask in trained], np.float64)
    turns = 1 if config.train.sequence_per_turn else config.rollout.max_turns
    longest = algorithm.length_norm or turns * config.rollout.max_new_tokens
    weights = algorithms.WEIGHTS[weight](every[chosen], every, longest) * (every[chosen] > 0)
    return {i: (trained[i] * w).astype(np.float32) for i, w in zip(chosen, weights, strict=True)}


def make_episodes(rollouts: list[Rollout], config: config.Config, penalties, values) -> Episodes:
    """Rewards over sampled tokens: minus the penalty of each, f32[T] a rollout, and every turn's at its last."""
    counts = np.array([rollout.sampled.sum() for rollout in rollouts])
    mask = np.arange(counts.max()) < counts[:, None]
    group = np.arange(len(rollouts)) // config.rollout.group_size
    turn = np.zeros(mask.shape, np.int64)
    out = Episodes(
        np.zeros(mask.shape), np.zeros(mask.shape), mask, group, turn, config.task.turn_discount
    )
    for i, rollout in enumerate(rollouts):
        out.rewards[i, : counts[i]] = -penalties[i][rollout.sampled]
        out.values[i, : counts[i]] = values[i][rollout.sampled]
        ends = [int(rollout.sampled[: each.end].sum()) for each in rollout.turns]
        for t, (end, reward) in enumerate(zip(ends, turn_rewards(rollout, config), strict=True)):
            out.rewards[i, end - 1] += reward
            turn[i, end:] = t + 1 if t + 1 < len(ends) else t
    return out if turn.any() else out._replace(turn=None)


def spread_over_tokens(x: np.ndarray, rollouts: list[Rollout]) -> list[np.ndarray]:
    """x [N, T] over sampled tokens -> f32 over all tokens of each rollout, 0 where not sampled."""
    out = [np.zeros(len(rollout.tokens), np.float32) for rollout in rollouts]
    for row, mine, rollout in zip(x, out, rollouts, strict=True):
        mine[rollout.sampled] = row[: rollout.sampled.sum()]
    return out


def turn_rewards(rollout: Rollout, config: config.Config) -> list[float]:
    """Of its turns: their grades' scores, as the algorithm shapes them."""
    length = lambda turn: int(rollout.sampled[turn.start : turn.end].sum())
    settings = config.algorithm, config.rollout.max_new_tokens
    return [
        algorithms.shape_score(grade_of(t).score, length(t), t.finish_reason == "length", *settings)
        for t in rollout.turns
    ]
