"""Accuracy on held-out problems, in training and in `jzero.evaluate`: avg@k, pass@k, maj@k.

Every problem gets k samples at the sampling temperature and, if eval.greedy is set, one greedy
sample. P problems with k samples each are P * k rollouts, the samples of a problem next to each
other.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from jzero import config
from jzero.distributed import interrupt
from jzero.errors import UserError
from jzero.model import qwen
from jzero.rollout.failed_gradings import check_gradings
from jzero.rollout.sampler import EncodedProblem, Sampler
from jzero.tasks import suites
from jzero.types import Rollout, grade_of


def pass_at_k(
    correct: Bool[np.ndarray, "problems samples"] | Float[np.ndarray, "problems samples"], k: int
) -> float:
    """Estimates pass@k, the chance that one of k samples is correct (arXiv:2107.03374, eq. 1).

    Averages the unbiased estimator 1 - C(n - c, k) / C(n, k) over problems, where c of a problem's
    n samples are correct.
    """
    n = correct.shape[1]
    num_wrong = n - correct.sum(axis=1)
    estimates = []
    for wrong in num_wrong:
        # C(n - c, k) / C(n, k) as a product: binomials of large n would overflow.
        all_wrong = np.prod([max(wrong - i, 0) / (n - i) for i in range(k)])
        estimates.append(1 - all_wrong)
    return float(np.mean(estimates))


def majority_vote(answers: Sequence[str], correct: Sequence[bool]) -> float:
    """Returns the chance that the most frequent answer is correct: maj@k of one problem.

    Ties are broken evenly. All correct answers count as one answer, however they are written. A
    response without an answer ("") has no vote.
    """
    votes: Counter[str | None] = Counter()  # None stands for the correct answer
    for answer, is_correct in zip(answers, correct, strict=True):
        if is_correct:
            votes[None] += 1
        elif answer:
            votes[answer] += 1
    if not votes:
        return 0.0
    most_votes = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most_votes]
    return (None in winners) / len(winners)


def accuracy_metrics(rollouts: list[Rollout], num_samples: int) -> dict[str, float]:
    """Returns the metrics of `num_samples` graded rollouts of each problem.

    accuracy     avg@num_samples: the share of correct samples
    stderr       standard error of the accuracy over problems
    length       mean response tokens
    truncated    share of responses that reached the token limit
    pass@k       for k = 2, 4, 8, ... and num_samples, if there are several samples
    maj@k        for k = num_samples, if there are several samples
    """
    correct = np.array([grade_of(rollout).correct for rollout in rollouts], np.float64)
    correct = correct.reshape(-1, num_samples)
    metrics = {
        "accuracy": float(correct.mean()),
        "stderr": float(correct.mean(axis=1).std() / np.sqrt(len(correct))),
        "length": float(np.mean([rollout.response_length for rollout in rollouts])),
        "truncated": float(np.mean([rollout.finish_reason == "length" for rollout in rollouts])),
    }
    if num_samples == 1:
        return metrics

    k = 2
    while k < num_samples:
        metrics[f"pass@{k}"] = pass_at_k(correct, k)
        k *= 2
    metrics[f"pass@{num_samples}"] = pass_at_k(correct, num_samples)

    votes = []
    for i, problem_correct in enumerate(correct.astype(bool).tolist()):
        samples = rollouts[i * num_samples : (i + 1) * num_samples]
        answers = [suites.vote(rollout.text) for rollout in samples]
        votes.append(majority_vote(answers, problem_correct))
    metrics[f"maj@{num_samples}"] = float(np.mean(votes))
    return metrics


def evaluation_kinds(
    settings: config.EvalConfig, temperature: float
) -> dict[str, tuple[int, float]]:
    """Returns the kinds of evaluation by name: (samples for each problem, temperature).

    `temperature` is that of the rollouts, which eval.temperature=0 takes over.
    """
    kinds: dict[str, tuple[int, float]] = {}
    if settings.samples:
        kinds["eval"] = settings.samples, settings.temperature or temperature
    if settings.greedy:
        kinds["eval_greedy"] = 1, 0.0
    return kinds


class Evaluated(NamedTuple):
    """The graded responses to one problem set, of one kind of evaluation."""

    name: str  # of the problem set; "" for the task's own
    kind: str  # "eval" or "eval_greedy"
    num_samples: int  # of each problem, next to each other in `rollouts`
    rollouts: list[Rollout]

    @property
    def label(self) -> str:
        """What files and tables call the kind: "greedy" or, with K samples, "avg@K"."""
        return "greedy" if self.kind == "eval_greedy" else f"avg@{self.num_samples}"


def encode_suites(sampler: Sampler, settings: config.Config) -> dict[str, list[EncodedProblem]]:
    """Returns the problems of eval.suites whose prompts are short enough, by the suite's name.

    Prints how many problems of a suite were dropped. Raises UserError if all of them were.
    """
    problems: dict[str, list[EncodedProblem]] = {}
    for spec in suites.split_commas(*settings.eval.suites):
        name, found = suites.load_suite(
            spec, settings.task, settings.eval.limit, settings.train.seed
        )
        problems[name] = sampler.encode_problems(found, name)
        if not problems[name]:
            raise UserError(
                f"rollout.max_prompt_tokens={settings.rollout.max_prompt_tokens}: all prompts of "
                f"suite {name} are longer; raise it, or take the suite out of eval.suites"
            )
    return problems


def evaluate(
    sampler: Sampler,
    params: qwen.Params,
    problem_sets: dict[str, list[EncodedProblem]],
    settings: config.EvalConfig,
    temperature: float,
    check_stop: interrupt.StopCheck = interrupt.never_stop,
    key: tuple[int, int] = (0, 0),
) -> list[Evaluated]:
    """Samples the answers of `params` to every problem set, in every kind of evaluation.

    The noise is the same at every call with the same key, so two evaluations in training differ by
    their weights alone.
    """
    evaluated = []
    for name, problems in problem_sets.items():
        for kind, (num_samples, kind_temperature) in evaluation_kinds(
            settings, temperature
        ).items():
            rollouts, _ = sampler.sample_rollouts(
                params,
                problems,
                num_samples,
                kind_temperature,
                key=key,
                version=0,
                check_stop=check_stop,
                top_p=settings.top_p if kind == "eval" else 0.0,
                max_new_tokens=settings.max_new_tokens,
                is_trained=False,
            )
            rollouts = sampler.gather_rollouts(rollouts)
            check_gradings(f"{kind} {name}".rstrip(), rollouts, sampler.task.max_failed_share)
            evaluated.append(Evaluated(name, kind, num_samples, rollouts))
    return evaluated


def evaluation_metrics(evaluated: Sequence[Evaluated]) -> dict[str, float]:
    """Returns the metrics of evaluations by name.

    Names are "eval/math500/accuracy" or, for the problem set named "", "eval/accuracy"; likewise
    "eval_greedy/...". Of two or more suites "eval/average" is the mean accuracy, in which every
    suite has the same weight, as in published tables.
    """
    values: dict[str, float] = {}
    accuracies: dict[str, list[float]] = {}
    for name, kind, num_samples, rollouts in evaluated:
        prefix = f"{kind}/{name}" if name else kind
        for metric, value in accuracy_metrics(rollouts, num_samples).items():
            values[f"{prefix}/{metric}"] = value
        if name:
            accuracies.setdefault(kind, []).append(values[f"{prefix}/accuracy"])
    for kind, of_suites in accuracies.items():
        if len(of_suites) > 1:
            values[f"{kind}/average"] = float(np.mean(of_suites))
    return values
