"""Rollouts from problems, and accuracy on held-out problems: the same engine, grader and templates as in training."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jzero import config, tokenizer
from jzero.grade.pool import Pool
from jzero.rollout.engine import Engine
from jzero.rollout.sample import Counters, Driver, Sequence
from jzero.types import Grade, Problem, Rollout


@dataclass
class Sampler:
    """What turns problems into graded rollouts: the engine, the text on both sides of it, and the graders."""

    engine: Engine
    tokenizer: tokenizer.PreTrainedTokenizerFast
    pool: Pool
    task: config.Task
    on_finish: Callable[[], None] = lambda: None  # called for every finished sequence: progress, interruption

    def rollouts(
        self, params, problems: list[Problem], group: int, temperature: float, key: tuple[int, int], version: int
    ) -> tuple[list[Rollout], Counters]:
        """`group` rollouts of every problem, in order, not graded yet: each was given to the pool as it finished.
        The noise is a function of key (two integers), the problem's place and the token's position."""
        prompts = [np.array(tokenizer.encode(self.tokenizer, problem.prompt), np.int32) for problem in problems]
        driver = Driver(self.engine, params, lambda ids: tokenizer.decode(self.tokenizer, ids))
        done: dict[tuple[int, int], Rollout] = {}
        seed = make_seed(self.engine, key)
        try:
            for sequence in driver.run(prompts, group, temperature, seed, self.engine.settings.max_new):
                rollout = to_rollout(problems[sequence.prompt], sequence, version)
                place = (sequence.prompt, sequence.sample)
                done[place] = rollout
                self.pool.submit(place, rollout.problem.task, rollout.text, rollout.problem.gold, self.task)
                self.on_finish()
        finally:
            driver.cancel()  # an interruption leaves the engine free
        return [done[i, j] for i in range(len(problems)) for j in range(group)], driver.counters

    def graded(self, rollouts: list[Rollout], group: int) -> list[Rollout]:
        """Wait for the grades of what `rollouts` submitted."""
        grades: dict = dict(self.pool.drain())
        return [rollout.graded(grades[i // group, i % group]) for i, rollout in enumerate(rollouts)]


@jax.jit
def fold(words: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.key(words[0]), words[1])


def make_seed(engine: Engine, key: tuple[int, int]) -> jax.Array:
    return fold(jax.device_put(np.array(key, np.uint32), NamedSharding(engine.mesh, P())))


def to_rollout(problem: Problem, sequence: Sequence, version: int) -> Rollout:
    prompt, response = len(sequence.context), len(sequence.tokens)
    sampled = np.arange(prompt + response) >= prompt
    return Rollout(
        problem=problem,
        sample=sequence.sample,
        tokens=sequence.full(),
        sampled=sampled,
        logps=np.concatenate([np.zeros(prompt, np.float32), np.array(sequence.logps, np.float32)]),
        versions=np.where(sampled, version, -1).astype(np.int32),
        text=sequence.text,
        finish=sequence.finish,
    )


def fitting(problems: list[Problem], tok: tokenizer.PreTrainedTokenizerFast, max_prompt: int) -> list[Problem]:
    """Problems whose prompt fits; longer ones are dropped, never cut."""
    return [problem for problem in problems if len(tokenizer.encode(tok, problem.prompt)) <= max_prompt]


def grade_of(rollout: Rollout) -> Grade:
    assert rollout.grade is not None, f"{rollout.problem.id} was not graded"
    return rollout.grade


def accuracy(sampler: Sampler, params, problems: list[Problem], samples: int, temperature: float) -> dict[str, float]:
    """avg@samples accuracy with its standard error over problems, and mean response length."""
    rollouts, _ = sampler.rollouts(params, problems, samples, temperature, key=(0, 0), version=0)
    rollouts = sampler.graded(rollouts, samples)
    correct = np.array([grade_of(rollout).correct for rollout in rollouts], np.float64).reshape(-1, samples)
    return {
        "accuracy": float(correct.mean()),
        "stderr": float(correct.mean(axis=1).std() / np.sqrt(len(problems))),
        "length": float(np.mean([rollout.response_length for rollout in rollouts])),
    }


def evaluate(sampler: Sampler, params, problems: list[Problem], settings: config.Eval, temperature: float):
    """Flat metrics of one evaluation: avg@k at the sampling temperature and, beside it, greedy."""
    sampled = accuracy(sampler, params, problems, settings.samples, temperature)
    values = {f"eval/{name}": value for name, value in sampled.items()}
    if settings.greedy:
        values |= {f"eval_greedy/{name}": v for name, v in accuracy(sampler, params, problems, 1, 0.0).items()}
    return values
