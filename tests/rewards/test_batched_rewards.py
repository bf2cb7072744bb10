"""Reward functions that are called once for all responses of a step."""

from collections.abc import Iterator

import pytest

from jzero.config import RewardConfig, TaskConfig
from jzero.environments import batched_rewards
from jzero.errors import UserError
from jzero.rewards import rewards
from jzero.types import Grade, Problem
from jzero.workers.pool import Pool

SOURCE = '''
import asyncio
import os
import time


def rank(responses, golds):
    """The longest response of the step has rank 0."""
    longest_first = sorted(responses, key=len, reverse=True)
    return [gold - longest_first.index(text) for text, gold in zip(responses, golds)]


async def parts(rows, prompts):
    await asyncio.sleep(0)
    return [{"hard": row["level"], "long": len(prompt)} for row, prompt in zip(rows, prompts)]


def episode(episodes, conversations, task):
    for turns, messages in zip(episodes, conversations):
        assert messages[-1]["content"] == turns[-1][0] and turns[-1][1].reason == "read"
    return [len(turns) if len(turns) > 1 else None for turns in episodes]


def short(responses):
    return [1.0]


def scalar(responses):
    return 1.0


def uneven(responses):
    return [1.0, float("nan"), "good"][: len(responses)]


def broken(responses):
    return [response.lenght for response in responses]


def hang(responses):
    time.sleep(1000)


def die(responses):
    os._exit(3)


def mixed(responses, row):
    return []
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("mine") / "batched.py"
    path.write_text(SOURCE, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(1) as pool:
        yield pool


EPISODES = [
    [("a", "lower"), ("bbb", None)],
    [("cc", None)],
]


def graded(pool: Pool, name: str, seconds: float = 60.0) -> list[Grade]:
    """Returns the grades of the three turns of EPISODES, with the rewards of one function."""
    task = TaskConfig(reward=RewardConfig(functions=("accuracy", name), seconds=seconds))
    episodes: list[batched_rewards.Episode] = []
    for number, turns in enumerate(EPISODES):
        problem = Problem(str(number), "guess", "p" * number, 10, {"level": number})
        read = [(text, Grade(0.5, True, "read", reply=reply)) for text, reply in turns]
        episodes.append(batched_rewards.Episode(problem, read))
    grades = [grade for episode in episodes for _, grade in episode.turns]
    [results] = batched_rewards.call_all(pool, task, [episodes])
    grades = batched_rewards.add(grades, results)
    return rewards.add_batch_rewards(grades, [1, 1, 1], [1, 1, 1], task.reward)


def test_a_function_of_lists_sees_every_turn_of_the_step(pool: Pool, file: str) -> None:
    name = f"{file}:rank"
    grades = graded(pool, name)
    assert [grade.parts[name] for grade in grades] == [8, 10, 9]
    assert [grade.score for grade in grades] == [8.5, 10.5, 9.5]
    assert not any(grade.failed for grade in grades)


def test_it_may_be_async_and_name_parts(pool: Pool, file: str) -> None:
    name = f"{file}:parts"
    grades = graded(pool, name)
    assert [grade.parts[f"{name}.hard"] for grade in grades] == [0, 0, 1]
    assert [grade.parts[name] for grade in grades] == [0, 0, 2]


def test_it_gets_whole_episodes_and_may_leave_responses_out(pool: Pool, file: str) -> None:
    name = f"{file}:episode"
    grades = graded(pool, name)
    assert [grade.parts.get(name) for grade in grades] == [None, 2, None]
    assert [grade.score for grade in grades] == [0.5, 2.5, 0.5]


@pytest.mark.parametrize(
    "function, reason",
    [
        ("short", "TypeError: returned 1 rewards for 3 responses"),
        ("scalar", "TypeError: returned 1.0: it has to return a list with 3 rewards"),
        ("broken", "AttributeError: 'str' object has no attribute 'lenght'"),
        ("hang", "took more than task.reward.seconds=0.3"),
        ("die", "killed: "),
    ],
)
def test_a_function_that_fails_leaves_no_score(
    pool: Pool, file: str, function: str, reason: str
) -> None:
    grades = graded(pool, f"{file}:{function}", seconds=0.3 if function == "hang" else 60.0)
    for grade in grades:
        assert grade.failed and grade.known_score is None and grade.correct
        assert reason in grade.reason and f"batched.py:{function}" in grade.reason


def test_a_reward_that_is_no_number_fails_its_response_alone(pool: Pool, file: str) -> None:
    grades = graded(pool, f"{file}:uneven")
    assert [grade.failed for grade in grades] == [False, True, True]
    assert "entry 1 returned nan" in grades[1].reason
    assert "entry 2 returned 'good'" in grades[2].reason


def test_graders_of_single_responses_pass_it_over(file: str) -> None:
    """A response is graded before the step is complete: then the function is not called yet."""
    task = TaskConfig(reward=RewardConfig(functions=("accuracy", f"{file}:rank")))
    grade = rewards.add_response_rewards(Grade(1.0, True, "correct"), "x", 3, task)
    assert grade.parts == {} and not grade.failed
    assert rewards.need_columns(RewardConfig(functions=(f"{file}:parts",)))
    assert not rewards.need_columns(RewardConfig(functions=(f"{file}:rank",)))


def test_lists_and_single_values_are_not_mixed(file: str) -> None:
    with pytest.raises(UserError, match="parameter row of one response beside lists of all"):
        rewards.check_rewards(RewardConfig(functions=(f"{file}:mixed",)))
