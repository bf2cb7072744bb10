"""Runs that are healthy by construction get no remark: recipes x algorithms x rewards.

The metrics of a run are computed from simulated verdicts, as the settings of the run use them. If
all responses are wrong, the algorithm's own advantages decide whether something is learned.
"""

import json
import runpy
import zlib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from jzero import algorithms
from jzero.algorithms import Episodes, compute_advantages
from jzero.config import Config, RolloutConfig, flatten, to_json, turns
from jzero.run.doctor import Doctor

RECIPES = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.py"))
P, G, STEPS = 16, 4, 12
# task.reward.functions of a run, and what a response with this verdict and length is paid.
REWARDS = {
    "verdict": ("accuracy",),
    "verdict and cosine": ("accuracy", "cosine(length=64)"),
    "own": ("rewards.py:own",),
    "own, not paid": ("accuracy", "rewards.py:own"),
}
RULES = {"success": turns.Success(), "score": turns.Score()}
# Three settings of turns: none, AReaL's rule, and the grader's score.
TURNS = ((1, "success"), (3, "success"), (3, "score"))


@dataclass(frozen=True)
class Simulated:
    """The turns of a step, [P, G, T]; a turn after the end of an episode does not exist."""

    exists: np.ndarray
    correct: np.ndarray
    has_answer: np.ndarray
    scores: np.ndarray  # paid for the turn, 0 where there is none
    parts: np.ndarray  # [P, G, T, K]


def simulate(settings: Config, accuracy: float, answered: float, seed: int) -> Simulated:
    """Returns the turns of a step in which a share `accuracy` of all turns are right."""
    rng = np.random.default_rng(seed)
    num_turns = settings.rollout.max_turns
    shape = (P, G, num_turns)
    correct = rng.random(shape) < accuracy
    earlier = np.cumsum(correct, axis=2) - correct
    exists = earlier == 0
    has_answer = correct | (rng.random(shape) < answered)
    lengths = rng.integers(8, 60, shape)
    part_of = {
        "accuracy": correct.astype(float),
        "cosine(length=64)": np.where(correct, 1.0, -1.0) * (1 + np.cos(np.pi * lengths / 64)) / 2,
        "rewards.py:own": lengths / 60,
    }
    parts = np.stack([part_of[name] for name in settings.task.reward.functions], axis=3)
    weights = settings.task.reward.weights or (1.0,) * parts.shape[3]
    scores = parts @ np.array(weights)
    if num_turns > 1 and isinstance(settings.task.turn_reward, turns.Success):
        scores = (correct - 0.5) * 2
    return Simulated(
        exists, correct & exists, has_answer & exists, scores * exists, parts * exists[..., None]
    )


def metrics_of(step: int, sim: Simulated, settings: Config) -> dict[str, float]:
    returns = sim.scores.sum(axis=2)
    is_uniform = np.ptp(returns, axis=1) == 0
    num_graded = sim.exists.sum()
    # The first step of a stream grades the episodes of the steps that may be in flight, too.
    ahead = settings.rollout.max_staleness if step == 1 else 0
    values = {
        "reward/mean": float(returns.mean()),
        "reward/accuracy": float(sim.correct.any(axis=2).mean()),
        "reward/zero_variance_groups": float(is_uniform.mean()),
        "reward/failed": 0.0,
        "rollout/length": 100.0,
        "rollout/truncated": 0.02,
        "rollout/slot_utilization": 0.8,
        "rollout/preempted": 0.0,
        "grade/no_answer": float((1 + ahead) * (num_graded - sim.has_answer.sum())),
        "policy/entropy": 0.6,
        "policy/mismatch": 1e-4,
        "optimizer/grad_norm": 0.3,
        "optimizer/skipped": 0.0,
        "update/left_out": float(is_uniform.mean()),
        "update/padding": 0.3,
        "time/step": 10.0,
        "time/sample": 6.0,
        "time/update": 3.0,
        "time/grade": 0.1,
    }
    if settings.rollout.max_turns > 1:
        values["turns/mean"] = float(sim.exists.sum(axis=2).mean())
        values["turns/first_try"] = float(sim.correct[:, :, 0].mean())
    # reward/accuracy is the verdict, with the function and without it.
    for name in set(settings.task.reward.functions) - {"accuracy"}:
        values[f"reward/{name.replace(':', '.')}"] = 0.3
    return values


def learns(sim: Simulated, settings: Config) -> bool:
    """Returns whether the loss has a gradient: an advantage, or another of its terms."""
    algorithm = settings.algorithm
    num_rollouts, num_turns = P * G, sim.scores.shape[2]
    is_turn = sim.exists.reshape(num_rollouts, num_turns)
    rng = np.random.default_rng(0)
    episodes = Episodes(
        rewards=sim.scores.reshape(num_rollouts, num_turns).astype(float),
        values=rng.random((num_rollouts, num_turns)) * is_turn,
        mask=is_turn,
        group=np.repeat(np.arange(P), G),
        turn=np.tile(np.arange(num_turns), (num_rollouts, 1)) if num_turns > 1 else None,
        parts=sim.parts.reshape(num_rollouts, num_turns, -1).astype(float),
        part_weights=settings.task.reward.weights or (1.0,) * sim.parts.shape[3],
    )
    advantages, _ = compute_advantages(episodes, algorithm)
    terms = (
        algorithm.kl.coef,
        algorithm.kl_reward,
        algorithm.entropy_coef,
        algorithm.ratio_penalty,
        algorithm.cross_entropy.coef,
        algorithm.distillation.coef,
        algorithm.environment_coef,
        algorithm.truncated_penalty,
        algorithm.overlong_share,
    )
    return bool(np.abs(advantages).max() > 0 or any(terms))


@cache
def tiny(recipe: Path) -> Config:
    return runpy.run_path(str(recipe))["get_config"]("tiny")


def settings_of_runs(algorithm: str) -> list[Config]:
    """Returns the runs of an algorithm: each recipe, with each kind of reward and of turns."""
    runs = []
    for recipe in RECIPES:
        base = tiny(recipe)
        if base.sft is not None:
            continue
        for functions in REWARDS.values():
            for max_turns, rule in TURNS:
                rollout = replace(
                    base.rollout,
                    num_prompts=P,
                    group_size=G,
                    max_turns=max_turns,
                    max_new_tokens=64,
                )
                reward = replace(base.task.reward, functions=functions, weights=())
                if functions == REWARDS["own, not paid"]:
                    reward = replace(reward, weights=(1.0, 0.0))
                task = replace(base.task, reward=reward, turn_reward=RULES[rule])
                run = replace(base, rollout=rollout, task=task)
                run.algorithm = algorithms.PRESETS[algorithm]()
                # An advantage of single rewards is refused with a rule that ignores them.
                is_refused = max_turns > 1 and rule == "success"
                if not (is_refused and algorithms.needs_parts(run.algorithm)):
                    runs.append(run)
    return runs


def remarks_of(settings: Config, accuracies: list[float], answered: float) -> list[str]:
    checked = Doctor(flatten(json.loads(to_json(settings))))
    seed = zlib.crc32(settings.name.encode())
    for step, accuracy in enumerate(accuracies, start=1):
        sim = simulate(settings, accuracy, answered, seed + step)
        checked.check(step, metrics_of(step, sim, settings))
    return [finding.name for finding in checked.findings]


@pytest.mark.parametrize("algorithm", algorithms.PRESETS)
def test_runs_that_learn_get_no_remark(algorithm: str) -> None:
    """A fifth of the turns is right at first, and a third of the wrong ones have no answer."""
    for settings in settings_of_runs(algorithm):
        rising = list(np.linspace(0.2, 0.6, STEPS))
        assert remarks_of(settings, rising, answered=0.67) == [], settings


@pytest.mark.parametrize("algorithm", algorithms.PRESETS)
def test_runs_in_which_nothing_is_right_get_a_remark_only_if_nothing_is_learned(
    algorithm: str,
) -> None:
    for settings in settings_of_runs(algorithm):
        remarks = remarks_of(settings, [0.0] * STEPS, answered=0.8)
        sim = simulate(settings, 0.0, 0.8, 1)
        # Without a baseline of the group, rewards of 0 are the remark nothing_trained.
        is_uniform = bool((np.ptp(sim.scores.sum(axis=2), axis=1) == 0).all())
        advantage = algorithms.ADVANTAGES[type(settings.algorithm.advantage)]
        is_fault = is_uniform and advantage.has_group_baseline and not learns(sim, settings)
        assert remarks == (["one_score"] if is_fault else []), settings


@pytest.mark.parametrize("max_turns", [1, 3, 5])
def test_turns_without_an_answer_are_compared_with_turns(max_turns: int) -> None:
    base = settings_of_runs("ppo")[0]
    settings = replace(base, rollout=replace(base.rollout, max_turns=max_turns))
    # A third of the turns of five is more than all episodes.
    assert remarks_of(settings, [0.2] * 3, answered=0.6) == []
    assert remarks_of(settings, [0.0] * 3, answered=0.01) == ["no_answer"]


@pytest.mark.parametrize("group_size", [1, 2])
def test_a_critic_needs_no_groups(group_size: int) -> None:
    rollout = RolloutConfig(num_prompts=P, group_size=group_size)
    settings = flatten(
        json.loads(to_json(Config(rollout=rollout, algorithm=algorithms.PRESETS["ppo"]())))
    )
    checked = Doctor(settings)
    for step in range(1, 11):
        row = {"reward/mean": 0.5, "reward/accuracy": 0.5, "reward/zero_variance_groups": 1.0}
        checked.check(step, row | {"optimizer/grad_norm": 0.4})
    assert checked.findings == []
