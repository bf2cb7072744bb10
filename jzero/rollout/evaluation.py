"""Moved from jzero.evaluate."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from jzero import config
from jzero.rollout.sampler import Sampler
from jzero.tasks import suites
from jzero.types import Problem, Rollout, grade_of


def pass_at_k(correct: np.ndarray, k: int) -> float:
    """Chance that one of k of n samples is right, correct [P, n]: mean 1 - C(n - c, k) / C(n, k) (arXiv:2107.03374)."""
    n, wrong = correct.shape[1], correct.shape[1] - correct.sum(axis=1)
    return float(np.mean([1 - np.prod([max(w - i, 0) / (n - i) for i in range(k)]) for w in wrong]))


def majority_vote(answers: Sequence[str], correct: Sequence[bool]) -> float:
    """Chance that a most frequent answer is right, ties broken evenly; right ones are one, and none has no vote."""
    votes = Counter(
        "" if right else answer
        for answer, right in zip(answers, correct, strict=True)
        if right or answer
    )
    top = [answer for answer, count in votes.items() if count == max(votes.values())]
    return ("" in top) / len(top) if top else 0.0


def accuracy_metrics(rollouts: list[Rollout], samples: int) -> dict[str, float]:
    """avg@samples accuracy with its standard error over problems, response length, and what several samples allow."""
    correct = np.array([grade_of(rollout).correct for rollout in rollouts], np.float64).reshape(
        -1, samples
    )
    values = {
        "accuracy": float(correct.mean()),
        "stderr": float(correct.mean(axis=1).std() / np.sqrt(len(correct))),
        "length": float(np.mean([rollout.response_length for rollout in rollouts])),
        "truncated": float(np.mean([rollout.finish_reason == "length" for rollout in rollouts])),
    }
    if samples > 1:
        ks = [2**i for i in range(1, samples.bit_length()) if 2**i < samples] + [samples]
        values |= {f"pass@{k}": pass_at_k(correct, k) for k in ks}
        answers = np.array([suites.answer(rollout.text) for rollout in rollouts], object).reshape(
            -1, samples
        )
        votes = [
            majority_vote(*pair)
            for pair in zip(answers.tolist(), correct.astype(bool).tolist(), strict=True)
        ]
        values[f"maj@{samples}"] = float(np.mean(votes))
    return values


def evaluation_kinds(
    settings: config.EvalConfig, temperature: float
) -> dict[str, tuple[int, float]]:
    """Samples a problem and their temperature, of each kind of evaluation."""
    every = {"eval": (settings.samples, temperature), "eval_greedy": (int(settings.greedy), 0.0)}
    return {kind: value for kind, value in every.items() if value[0]}


def evaluate(
    sampler: Sampler,
    params,
    every: dict[str, list[Problem]],
    settings: config.EvalConfig,
    temperature: float,
) -> dict[str, float]:
    """Flat metrics of problems by name, "eval/math500/accuracy" or, of those of name "", "eval/accuracy"."""
    values = {}
    for name, problems in every.items():
        for kind, (samples, heat) in evaluation_kinds(settings, temperature).items():
            rollouts, _ = sampler.rollouts(params, problems, samples, heat, key=(0, 0), version=0)
            found = accuracy_metrics(sampler.gathered(rollouts), samples)
            values |= {
                f"{kind}/{name}/{metric}" if name else f"{kind}/{metric}": v
                for metric, v in found.items()
            }
    return values
