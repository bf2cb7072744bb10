"""Grades of samplers that the trainer, or a replay, gives again."""

from dataclasses import replace
from pathlib import Path

import pytest
from lying_samplers import Lie, Trainer, changed_grade, changed_turn, receiving_stream

from jzero import replay
from jzero.jobs.regrading import Regrader, obstacle
from jzero.rollout.turns import request_of_turn
from jzero.types import Grade, Rollout, grade_of

RANDOM = """
import random

def reward(response):
    return random.random()
"""
BROKEN = """
def reward(response):
    raise ValueError("broken")
"""


def file_of_grade(trainer: Trainer, **fields: object) -> Lie:
    """Returns the file of a result in which one grade is another one."""
    result = changed_grade(trainer.honest(), 1, **fields)
    return Lie("", result.name, result.to_bytes())


def test_a_forged_grade_is_refused_by_name(tmp_path: Path, capsys) -> None:
    with receiving_stream(tmp_path) as trainer:
        counters = dict(trainer.stream.sampler.pool.counters)
        assert trainer.receive(trainer.honest_file())
        assert trainer.stream.sampler.pool.counters == counters
        assert not trainer.receive(file_of_grade(trainer, score=0.5))
    out = capsys.readouterr().out
    assert "refused a result of liar-1: rollout 1: graded again, the score was 0.5" in out


def test_a_share_of_the_rollouts_is_graded_and_a_restart_repeats_it(tmp_path: Path) -> None:
    with receiving_stream(tmp_path) as trainer:
        sampler = trainer.stream.sampler
        rollouts = [graded(item) for item in trainer.honest().rollouts] * 250
    chosen = Regrader(sampler, 1 / 16, "key")._chosen("digest", rollouts)
    assert chosen == Regrader(sampler, 1 / 16, "key")._chosen("digest", rollouts)
    assert 30 < len(chosen) < 100
    # A sampler knows neither the key nor, before it is done, the digest.
    assert chosen != Regrader(sampler, 1 / 16, "other")._chosen("digest", rollouts)
    assert chosen != Regrader(sampler, 1 / 16, "key")._chosen("other", rollouts)
    assert Regrader(sampler, 0.0, "key")._chosen("digest", rollouts) == []


def graded(rollout: Rollout) -> Rollout:
    return replace(rollout, grade=rollout.turns[-1].grade)


def test_no_sampler_is_blamed_for_a_reward_that_is_random(tmp_path: Path, capsys) -> None:
    path = tmp_path / "random_reward.py"
    path.write_text(RANDOM)
    name = f"{path}:reward"
    with receiving_stream(tmp_path, functions=("accuracy", name)) as trainer:
        assert trainer.receive(file_of_grade(trainer, parts={name: 0.25}))
        assert trainer.receive(file_of_grade(trainer, parts={name: 0.75}))
    out = capsys.readouterr().out
    assert out.count("a response has got different grades in the trainer") == 1


def test_a_failed_grading_is_repeated(tmp_path: Path, capsys) -> None:
    """It would keep the rollout from training, whatever the share is."""
    with receiving_stream(tmp_path, regrade_share=1e-9) as trainer:
        failed = {"reason": "timeout", "failed": True}
        assert not trainer.receive(file_of_grade(trainer, **failed))
        # A busy machine may have caused it: its sampler goes on.
        assert not trainer.store.names("refused")
        assert trainer.receive(trainer.honest_file())
    assert "failed was True, and is False now" in capsys.readouterr().out


def test_a_function_that_fails_in_the_trainer_too_is_believed(tmp_path: Path) -> None:
    path = tmp_path / "broken_reward.py"
    path.write_text(BROKEN)
    name = f"{path}:reward"
    with receiving_stream(tmp_path, functions=("accuracy", name)) as trainer:
        assert trainer.receive(
            file_of_grade(trainer, reason="error", failed=True, failed_function=name)
        )


def test_what_is_not_a_function_is_named(tmp_path: Path) -> None:
    with receiving_stream(tmp_path) as trainer:
        sampler, problem = trainer.stream.sampler, trainer.request.problems[0]
    request = request_of_turn(problem, 0, "", (), sampler.task, 1)
    assert obstacle(request) == ""
    assert "state" in obstacle(replace(request, episode="p/0"))
    reward = replace(sampler.task.reward, functions=("judge",))
    task = replace(sampler.task, reward=reward)
    assert "model" in obstacle(replace(request, task=task))


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"text": "forged"}, "text of turn 0 was forged, and is "),
        ({"finish_reason": "length"}, "finish_reason of turn 0 was length, and is stop now"),
        ({"grade": Grade(1.0, True, "correct")}, "turn 0: correct was True, and is False now"),
        ({"grade": Grade(0.2, False, "wrong value")}, "turn 0: the score was 0.2, and is 0.1"),
        (
            {"grade": Grade(0.1, False, "wrong value", parts={"a": 1.0})},
            "turn 0: the names of its rewards differ",
        ),
    ],
)
def test_a_replay_finds_forged_texts_and_grades(tmp_path: Path, fields: dict, found: str) -> None:
    with receiving_stream(tmp_path) as trainer:
        honest = trainer.honest()
    forged = changed_turn(honest, 0, **fields).rollouts[0]
    assert replay.difference(honest.rollouts[0], honest.rollouts[0]) == ""
    assert replay.difference(forged, honest.rollouts[0]).startswith(found)
    # Neither the time of a grading nor the load of a machine is a difference.
    slow = replace(grade_of(honest.rollouts[0].turns[0]), seconds=5.0)
    late = replace(slow, reason="timeout", score=0.0)
    for grade in (slow, late):
        other = changed_turn(honest, 0, grade=grade).rollouts[0]
        assert replay.difference(other, honest.rollouts[0]) == ""
    if "grade" in fields:
        assert replay.difference(forged, honest.rollouts[0], "the grader is a model") == ""
