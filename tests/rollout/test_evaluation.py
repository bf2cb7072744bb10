"""Evaluations: the distribution they sample from, and the average over suites."""

from dataclasses import replace

import pytest
from tiny import make_untrained_sampler, tiny_settings, trained_player

from jzero.config import EvalConfig
from jzero.rollout.evaluation import Evaluated, evaluate, evaluation_kinds, evaluation_metrics
from jzero.rollout.sampler import Sampling
from jzero.tasks import guess
from jzero.tokens import Tokens
from jzero.types import Grade, Problem, Rollout, Turn
from jzero.workers.pool import Pool

pytestmark = pytest.mark.usefixtures("quick_runs")


def rollout(correct: bool) -> Rollout:
    turn = Turn(1, 2, "7", "stop", Grade(float(correct), correct, ""))
    problem = Problem("p", "math", "q", "1")
    return Rollout(problem, 0, Tokens([0, 0]), (turn,), grade=turn.grade)


def suite(name: str, kind: str, *correct: bool) -> Evaluated:
    return Evaluated(name, kind, 1, [rollout(item) for item in correct], [])


def test_the_average_gives_every_suite_the_same_weight() -> None:
    metrics = evaluation_metrics(
        [
            suite("", "eval_greedy", True),  # the task's own problems are no suite
            suite("aime24", "eval_greedy", False),
            suite("math500", "eval_greedy", True, True, False, True),
            suite("math500", "eval", True),
        ]
    )

    assert metrics["eval_greedy/average"] == pytest.approx((0 + 3 / 4) / 2)
    assert "eval/average" not in metrics  # of a single suite there is none


def test_an_evaluation_may_have_a_temperature_of_its_own() -> None:
    assert evaluation_kinds(EvalConfig(samples=2, greedy=False), 1.2) == {"eval": (2, 1.2)}
    settings = EvalConfig(samples=16, greedy=False, temperature=0.35)
    assert evaluation_kinds(settings, 1.2) == {"eval": (16, 0.35)}


def test_an_evaluation_may_have_a_top_p_of_its_own() -> None:
    """With next to no mass left the samples are greedy ones; rollouts stay as they were."""
    params = trained_player().params
    settings = replace(tiny_settings().rollout, max_turns=1)
    with Pool(1) as pool:
        sampler = make_untrained_sampler(replace(tiny_settings(), rollout=settings), pool)
        problems = {"": sampler.encode_problems(guess.eval_problems(sampler.task, 2))}

        def texts(settings: EvalConfig) -> list[str]:
            [evaluated] = evaluate(Sampling(sampler, params), problems, settings, temperature=5.0)
            return [rollout.text for rollout in evaluated.rollouts]

        plain = EvalConfig(samples=8, greedy=False)
        before = texts(plain)
        narrow = texts(replace(plain, top_p=1e-6))
        greedy = texts(EvalConfig(samples=0))
        after = texts(plain)

    assert len(set(before)) > 2
    assert narrow == [text for text in greedy for _ in range(8)]
    assert after == before


def test_an_evaluation_may_have_longer_responses_than_rollouts() -> None:
    """At a high temperature hardly any response ends before the limit."""
    settings = tiny_settings(rollout={"max_turns": 1}, eval={"max_new_tokens": 9})
    rollouts_alone = make_untrained_sampler(tiny_settings(rollout={"max_turns": 1}))
    with Pool(1) as pool:
        sampler = make_untrained_sampler(settings, pool)
        params = trained_player().params
        problems = sampler.encode_problems(guess.eval_problems(settings.task, 4))

        def longest(max_new_tokens: int) -> int:
            evaluation = EvalConfig(
                samples=8, temperature=5.0, greedy=False, max_new_tokens=max_new_tokens
            )
            [evaluated] = evaluate(Sampling(sampler, params), {"": problems}, evaluation, 1.0)
            return max(rollout.response_length for rollout in evaluated.rollouts)

        assert [longest(0), longest(9), longest(1), longest(0)] == [2, 9, 1, 2]
    # The pool of pages is that of the rollouts.
    assert sampler.engine.pages_per_shard == rollouts_alone.engine.pages_per_shard
