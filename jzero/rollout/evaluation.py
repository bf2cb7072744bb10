"""Accuracy on held-out problems, in training and in `jzero evaluate`: avg@k, pass@k, maj@k.

Rewards and scores (`eval.rewards`) and accuracies by further verifiers (`eval.verifiers`) are
reported as well.

Every problem gets k samples at the sampling temperature and, if eval.greedy is set, one greedy
sample. P problems with k samples each are P * k rollouts, with the samples of a problem adjacent.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple, cast

import jax
import numpy as np
from jaxtyping import Bool, Float

from jzero import config, terminal
from jzero.config.data_sources import split_sources
from jzero.decoder.engine import Samples
from jzero.errors import UserError
from jzero.hosts import collectives, interrupt, processes
from jzero.rewards.trl_rewards import TrainerState
from jzero.rollout.failed_gradings import check_gradings
from jzero.rollout.rollout_metrics import by_row_task, named_rewards
from jzero.rollout.sampler import EncodedProblem, Sampler, Sampling
from jzero.tasks import evaluated_task, suites
from jzero.tasks.votes import votes_of_all
from jzero.types import Problem, Rollout, grade_of
from jzero.workers.pipe import TurnRequest

_NOT_TRAINING = TrainerState()
# Averages over suites: the metric of a suite, and the name of its mean.
AVERAGES = {"accuracy": "average", "score": "average/score", "length": "average/length"}


def pass_at_k(
    correct: Bool[np.ndarray, "problems samples"] | Float[np.ndarray, "problems samples"],
    k: int,
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

    `answers` are votes of `tasks.votes`: equal texts are the same answer. If m answers are equally
    frequent, each wins with probability 1 / m, so the order of answers decides no tie. All
    responses that are graded correct vote for the same answer. A response without an answer ("")
    has no vote.
    """
    # Correct responses may spell the answer differently, so they share one entry.
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


def standard_error(values: Float[np.ndarray, " problems"]) -> float | None:
    """Returns the standard error of a mean, or None for fewer than two values."""
    if len(values) < 2:
        return None
    return float(values.std(ddof=1) / np.sqrt(len(values)))


def accuracy_metrics(
    rollouts: list[Rollout],
    num_samples: int,
    votes: Sequence[str] = (),
) -> dict[str, float]:
    """Returns the metrics of `num_samples` graded rollouts of each problem.

    `votes` are the votes of the rollouts (`tasks.votes`), if there are several samples.

        problems     number of problems
        accuracy     avg@num_samples: the share of correct samples
        stderr       standard error of the accuracy over problems; absent for one problem
        length       mean response tokens
        truncated    share of responses that reached the token limit
        pass@k       for k = 2, 4, 8, ... and num_samples, if there are several samples
        maj@k        for k = num_samples, if there are several samples
    """
    correct = np.array([grade_of(rollout).correct for rollout in rollouts], np.float64)
    # [problems * samples] -> [problems, samples]
    correct = correct.reshape(-1, num_samples)
    metrics = {
        "problems": float(len(correct)),
        "accuracy": float(correct.mean()),
        "length": float(np.mean([rollout.response_length for rollout in rollouts])),
        "truncated": float(np.mean([rollout.finish_reason == "length" for rollout in rollouts])),
    }
    # Over problems and not over samples: samples of one problem are not independent.
    error = standard_error(correct.mean(axis=1))
    if error is not None:
        metrics["stderr"] = error
    # pass@k and maj@k need several samples.
    if num_samples == 1:
        return metrics

    k = 2
    while k < num_samples:
        metrics[f"pass@{k}"] = pass_at_k(correct, k)
        k *= 2
    metrics[f"pass@{num_samples}"] = pass_at_k(correct, num_samples)

    chances = []
    for i, problem_correct in enumerate(correct.astype(bool).tolist()):
        answers = votes[i * num_samples : (i + 1) * num_samples]
        chances.append(majority_vote(answers, problem_correct))
    metrics[f"maj@{num_samples}"] = float(np.mean(chances))
    return metrics


def score_metrics(rollouts: Sequence[Rollout], *, has_all_rewards: bool) -> dict[str, float]:
    """Returns the means of the rewards, and of the scores if all reward functions were called.

    score             mean over the responses with a score
    reward/<function> mean of one function of task.reward.functions
    failed            share of responses on which a user-defined function failed, if above 0
    """
    grades = [grade_of(rollout) for rollout in rollouts]
    metrics = named_rewards(grades)
    scores = [grade.score for grade in grades if not grade.failed]
    if scores and has_all_rewards:
        metrics["score"] = float(np.mean(scores))
    if len(scores) < len(grades):
        metrics["failed"] = 1 - len(scores) / len(grades)
    return metrics


def evaluation_kinds(
    settings: config.EvalConfig,
    temperature: float,
) -> dict[str, tuple[int, float]]:
    """Returns the kinds of evaluation by name: (samples for each problem, temperature).

    `temperature` is the rollout temperature, which eval.temperature=0 selects.
    """
    kinds: dict[str, tuple[int, float]] = {}
    # 0 disables a kind of evaluation.
    if settings.samples:
        kinds["eval"] = settings.samples, settings.temperature or temperature
    if settings.greedy:
        kinds["eval_greedy"] = 1, 0.0
    return kinds


class Evaluated(NamedTuple):
    """The graded responses to one problem set, of one kind of evaluation."""

    name: str  # of the problem set; "" for the task's default set
    kind: str  # "eval" or "eval_greedy"
    num_samples: int  # of each problem, adjacent in `rollouts`
    rollouts: list[Rollout]
    votes: list[str]  # of the rollouts, for maj@k; empty if `num_samples` is 1
    has_all_rewards: bool = True  # whether all of task.reward.functions were called
    # By name of a further verifier: its verdict on each rollout.
    verdicts: Mapping[str, Sequence[bool]] = MappingProxyType({})

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of all responses, and some of them for each task that rows name."""
        metrics = accuracy_metrics(self.rollouts, self.num_samples, self.votes)
        metrics |= score_metrics(self.rollouts, has_all_rewards=self.has_all_rewards)
        for verifier, correct in self.verdicts.items():
            metrics[f"accuracy_by/{verifier}"] = float(np.mean(correct))
        for name, task_rollouts in by_row_task(self.rollouts).items():
            # Only means over responses are reported, for which the number of samples does not
            # matter.
            task_metrics = accuracy_metrics(task_rollouts, 1)
            for metric in ("accuracy", "length", "truncated"):
                metrics[f"{metric}/{name}"] = task_metrics[metric]
        return metrics

    @property
    def label(self) -> str:
        """The name of the kind in files and tables: "greedy" or, with K samples, "avg@K"."""
        return "greedy" if self.kind == "eval_greedy" else f"avg@{self.num_samples}"


def encode_suites(
    sampler: Sampler,
    task: config.TaskConfig,
    settings: config.EvalConfig,
    seed: int,
) -> dict[str, list[EncodedProblem]]:
    """Returns the problems of eval.suites with short enough prompts, by name of the suite.

    Prints how many problems of a suite were dropped. Raises UserError if all of them were.
    """
    problems: dict[str, list[EncodedProblem]] = {}
    for spec in split_sources(*settings.suites):
        name, suite_problems = suites.load_suite(spec, task, settings.limit, seed)
        if settings.rewards:
            print_left_out(name, suite_problems, task)
        problems[name] = sampler.encode_problems(suite_problems, name)
        if not problems[name]:
            longest = sampler.engine.settings.max_prompt_tokens
            raise UserError(
                f"rollout.max_prompt_tokens={longest}: all prompts of suite {name} are longer; "
                "raise it, or take the suite out of eval.suites"
            )
    return problems


def print_left_out(name: str, problems: Sequence[Problem], task: config.TaskConfig) -> None:
    """Prints which reward functions are not called for a problem set, and the reasons."""
    for function, reason in evaluated_task.left_out(task, problems).items():
        processes.print_once(f"{name}: {function} is not called in evaluations, {reason}")


def evaluate(
    policy: Sampling,
    problem_sets: dict[str, list[EncodedProblem]],
    settings: config.EvalConfig,
    temperature: float,
    check_stop: interrupt.StopCheck = interrupt.never_stop,
    key: tuple[int, int] = (0, 0),
    state: TrainerState = _NOT_TRAINING,
) -> list[Evaluated]:
    """Samples the answers of a policy to every problem set, in every kind of evaluation.

    The noise is a function of `key`, so two evaluations in training with the same key differ only
    by their weights. `state` is passed to reward functions in TRL's form.
    """
    evaluated = []
    trained_task = policy.sampler.task
    for name, problems in problem_sets.items():
        set_problems = [item.problem for item in problems]
        task = evaluated_task.settings_for(trained_task, settings, set_problems)
        sampler = replace(policy.sampler, task=task)
        functions = sampler.task.reward.functions
        for kind, (num_samples, kind_temperature) in evaluation_kinds(
            settings, temperature
        ).items():
            with terminal.phase(f"{name} greedy".strip() if kind == "eval_greedy" else name):
                rollouts = replace(policy, sampler=sampler).rollouts_of(
                    problems,
                    key,
                    num_samples,
                    kind_temperature,
                    check_stop=check_stop,
                    samples=Samples(
                        top_p=settings.top_p if kind == "eval" else 0.0,
                        max_new_tokens=settings.max_new_tokens,
                        is_trained=False,
                    ),
                    state=state,
                )
            # From here on all hosts have the same rollouts.
            check_gradings(
                f"{kind} {name}".rstrip(), rollouts, sampler.task.max_failed_share, functions
            )
            votes = count_votes(sampler, rollouts, num_samples) if num_samples > 1 else []
            has_all_rewards = functions == trained_task.reward.functions
            verdicts = {
                verifier: ask_verifier(sampler, rollouts, verifier)
                for verifier in evaluated_task.further_verifiers(settings, set_problems)
            }
            evaluated.append(
                Evaluated(name, kind, num_samples, rollouts, votes, has_all_rewards, verdicts)
            )
    return evaluated


def ask_verifier(sampler: Sampler, rollouts: list[Rollout], verifier: str) -> list[bool]:
    """Returns whether a verifier accepts any turn of each rollout.

    A collective: all hosts have the same rollouts, and every host grades its share of them.
    """
    task = evaluated_task.graded_by(sampler.task, verifier)
    share = range(jax.process_index(), len(rollouts), jax.process_count())
    for i in share:
        problem = rollouts[i].problem
        for number, turn in enumerate(rollouts[i].turns):
            request = TurnRequest(problem.task, turn.text, problem.gold, task)
            sampler.pool.step((i, number), request)
    correct = dict.fromkeys(share, False)
    failures = []
    for key, grade in sampler.pool.drain():
        i, _ = cast(tuple[int, int], key)
        # One correct turn is enough, as in the episode's grade.
        correct[i] |= grade.correct
        if grade.failed:
            failures.append(grade.reason)
    # An accuracy without the failed gradings would not be comparable with others.
    if failures:
        raise UserError(
            f"eval.verifiers={verifier}: {len(failures)} gradings failed: {failures[0]}"
        )
    correct_by_index: dict[int, bool] = {}
    for pairs in collectives.gather_json(list(correct.items())):
        correct_by_index |= dict(pairs)
    return [correct_by_index[i] for i in range(len(rollouts))]


def count_votes(sampler: Sampler, rollouts: list[Rollout], num_samples: int) -> list[str]:
    """Returns the vote of every rollout.

    A collective: all hosts have the same rollouts, every host compares the answers of its share of
    the problems, and all hosts get the same votes.
    """
    problems = [rollouts[i : i + num_samples] for i in range(0, len(rollouts), num_samples)]
    share = range(jax.process_index(), len(problems), jax.process_count())
    counted = votes_of_all([problems[i] for i in share], sampler.pool, sampler.task)
    votes_by_problem: dict[int, list[str]] = {}
    for pairs in collectives.gather_json(list(zip(share, counted, strict=True))):
        votes_by_problem |= dict(pairs)
    return [vote for i in range(len(problems)) for vote in votes_by_problem[i]]


def evaluation_metrics(evaluated: Sequence[Evaluated]) -> dict[str, float]:
    """Returns the metrics of evaluations by name.

    Names are "eval/math500/accuracy" or, for the problem set named "", "eval/accuracy"; likewise
    "eval_greedy/...". With two or more suites, "eval/average" is the mean accuracy with equal
    weight for every suite, as in published tables. "eval/average/score" and "eval/average/length"
    are the means of these metrics, if all suites have them.
    """
    values: dict[str, float] = {}
    metrics_by_kind: dict[str, list[dict[str, float]]] = {}
    for evaluation in evaluated:
        name, kind = evaluation.name, evaluation.kind
        prefix = f"{kind}/{name}" if name else kind
        metrics = evaluation.metrics
        for metric, value in metrics.items():
            values[f"{prefix}/{metric}"] = value
        if name:
            metrics_by_kind.setdefault(kind, []).append(metrics)
    for kind, suite_metrics in metrics_by_kind.items():
        for metric, average in AVERAGES.items():
            # A mean over some of the suites would not be comparable, so every suite must have the
            # metric.
            if len(suite_metrics) > 1 and all(metric in metrics for metrics in suite_metrics):
                values[f"{kind}/{average}"] = float(
                    np.mean([item[metric] for item in suite_metrics])
                )
    return values
