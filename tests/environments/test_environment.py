"""Environments with state: an instance for each episode, in a process that can be replaced."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import ROOT

from jzero.config import RewardConfig, TaskConfig, turns
from jzero.errors import UserError
from jzero.rollout.turns import make_request
from jzero.tasks import find_task
from jzero.tasks.task import check_task_settings
from jzero.types import Grade, Problem
from jzero.workers.pool import Pool

SOURCE = '''
import asyncio
import os
import time
from pathlib import Path


class Walk:
    """Starts at a place and says where it is after each step; a step to 0 is the goal."""

    def reset(self, row, seed):
        self.place = row.get("start", seed % 10)
        self.path = []
        return f"You are at {self.place}."

    def step(self, response):
        if response == "die":
            os._exit(3)
        if response == "hang":
            time.sleep(1000)
        if response == "pid":
            return str(os.getpid()), 0.0, False
        self.place += int(response)
        self.path.append(int(response))
        rewards = {"near": 1 / (1 + abs(self.place)), "tidy": 0.5, "correct": self.place == 0}
        return f"You are at {self.place} by {self.path}.", rewards, self.place == 0


class Waiting(Walk):
    async def reset(self, row, seed):
        await asyncio.sleep(0)
        self.lock = asyncio.Lock()
        return [{"role": "user", "content": super().reset(row, seed)}]

    async def step(self, response):
        async with self.lock:
            return super().step(response)


class OwnLoop(Walk):
    """Is not async, and has an event loop of its own, as clients of servers may have."""

    def step(self, response):
        return asyncio.run(self.step_later(response))

    async def step_later(self, response):
        await asyncio.sleep(0)
        return super().step(response)


class Closing(Walk):
    def close(self):
        with Path(os.environ["CLOSED"]).open("a") as file:
            file.write(f"{self.path}")


class Fickle(Walk):
    def reset(self, row, seed):
        return super().reset(row, seed) + str(time.perf_counter_ns())


class Raising(Walk):
    def reset(self, row, seed):
        raise RuntimeError("no board")


class Shapeless(Walk):
    def step(self, response):
        return "only a reply"


class Stepless:
    def reset(self, row, seed):
        return ""
'''

Episode = list[tuple[str, Grade]]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("mine") / "walks.py"
    path.write_text(SOURCE, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2) as pool:
        yield pool


def settings(file: str, which: str = "Walk", **changes: Any) -> TaskConfig:
    defaults = {"name": "environment", "template": "plain", "turn_reward": turns.Score()}
    return TaskConfig(environment=f"{file}:{which}", grade_workers=1, **defaults | changes)


def problem_at(start: int, id: str = "1") -> Problem:
    gold = {"row": {"start": start}, "seed": 0, "observation": f"You are at {start}."}
    return Problem(id, "environment", gold["observation"], gold)


def play(
    pool: Pool, task: TaskConfig, problem: Problem, episodes: list[Episode], responses: list[str]
) -> list[Grade]:
    """Steps every episode of a group with its response, all at once; returns the grades."""
    for sample, response in enumerate(responses):
        request = make_request(problem, sample, response, episodes[sample], task, is_last=False)
        pool.step(sample, request)
    grades = dict(pool.drain())
    for sample, response in enumerate(responses):
        episodes[sample].append((response, grades[sample]))
    return [grades[sample] for sample in range(len(responses))]


@pytest.mark.parametrize("name", ["Walk", "Waiting", "OwnLoop"])
def test_every_episode_has_a_state_of_its_own(pool: Pool, file: str, name: str) -> None:
    task = settings(file, name)
    problem = problem_at(3, name)
    if name == "Waiting":
        message = {"role": "user", "content": problem.gold["observation"]}
        problem.gold["observation"] = [message]
    episodes: list[Episode] = [[] for _ in range(6)]

    play(pool, task, problem, episodes, ["-1", "0", "1", "2", "3", "4"])
    grades = play(pool, task, problem, episodes, ["-1"] * 6)
    last = play(pool, task, problem, episodes[:1], ["-1"])

    for sample, grade in enumerate(grades):
        place = 3 + sample - 1 - 1
        assert grade.reply == f"You are at {place} by {[sample - 1, -1]}."
        assert grade.score == pytest.approx(1 / (1 + place) + 0.5)
        assert grade.parts["environment.tidy"] == 0.5
        assert not grade.correct and not grade.failed
    assert last[0].reply is None and last[0].correct and last[0].score == 1.5


def test_an_episode_stays_with_its_process(pool: Pool, file: str) -> None:
    task = settings(file)
    episodes: list[Episode] = [[] for _ in range(8)]
    rounds = [play(pool, task, problem_at(3, "pids"), episodes, ["pid"] * 8) for _ in range(4)]
    processes = [[grade.reply for grade in grades] for grades in rounds]
    assert processes == [processes[0]] * 4


def test_an_episode_is_built_again_where_its_process_ended(file: str) -> None:
    task = settings(file)
    episodes: list[Episode] = [[], []]
    with Pool(1) as pool:
        play(pool, task, problem_at(5), episodes, ["-1", "1"])
        [worker] = pool._workers
        assert worker is not None
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
        grades = play(pool, task, problem_at(5), episodes, ["-2", "2"])
    assert [grade.reply for grade in grades] == [
        "You are at 2 by [-1, -2].",
        "You are at 8 by [1, 2].",
    ]


@pytest.mark.parametrize(
    "name, response, reason",
    [
        ("Walk", "north", "ValueError: invalid literal for int()"),
        ("Walk", "die", "killed: "),
        ("Walk", "hang", "took more than task.reward.seconds=0.5"),
        ("Shapeless", "1", "it has to be (reply, reward, done)"),
        ("Fickle", "1", "reset has to be a function of row and seed"),
        ("Raising", "1", "RuntimeError: no board"),
    ],
)
def test_an_environment_that_fails_is_no_score(
    pool: Pool, file: str, name: str, response: str, reason: str
) -> None:
    seconds = 0.5 if response == "hang" else 60.0
    task = settings(file, name, reward=RewardConfig(seconds=seconds))
    [grade] = play(pool, task, problem_at(3, name + response), [[]], [response])
    assert grade.failed and grade.known_score is None and grade.reply is None
    assert reason in grade.reason and f"walks.py:{name}" in grade.reason


def test_an_environment_is_closed_at_the_end_of_its_episode(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOSED", str(tmp_path / "closed"))
    task = settings(file, "Closing")
    episodes: list[Episode] = [[], []]
    with Pool(1) as pool:
        play(pool, task, problem_at(2), episodes, ["-1", "1"])
        play(pool, task, problem_at(2), episodes, ["-1", "1"])
    assert (tmp_path / "closed").read_text() == "[-1, -1]"


def test_prompts_are_what_reset_says_to_each_row(file: str, tmp_path: Path) -> None:
    data = tmp_path / "walks.jsonl"
    rows = [{"start": place, "name": str(place)} for place in range(20, 24)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = settings(file, data=str(data))
    found = find_task("environment")

    problems = found.train_problems(task, 1, 0, 4)

    assert found.num_train_problems(task) == 4
    assert sorted(problem.row["start"] for problem in problems if problem.row) == [20, 21, 22, 23]
    for problem in problems:
        assert problem.prompt == f"You are at {problem.gold['row']['start']}."
        assert problem == found.train_problems(task, 1, 0, 4)[problems.index(problem)]


def test_problems_without_data_differ_in_their_seeds(file: str) -> None:
    found = find_task("environment")
    task = settings(file, template="chat", system_prompt="Walk.")

    problems = found.train_problems(task, 1, 0, 4)
    held_out = found.eval_problems(task, 4)

    assert len({problem.gold["seed"] for problem in problems + held_out}) == 8
    assert problems[0].prompt == [
        {"role": "system", "content": "Walk."},
        {"role": "user", "content": problems[0].gold["observation"]},
    ]


def test_a_reset_that_fails_is_named(file: str) -> None:
    with pytest.raises(UserError, match="RuntimeError: no board"):
        find_task("environment").train_problems(settings(file, "Raising"), 1, 0, 1)


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("Walk", {"turn_reward": turns.Success()}, "set task.turn_reward=score"),
        ("Absent", {}, "is not a module:Class or FILE.py:Class"),
        ("Stepless", {}, "has no method step"),
        ("Walk", {"name": "guess"}, "is not used by task.name=guess"),
        ("Walk", {"template": "r1"}, "task.template"),
    ],
)
def test_impossible_environments_are_refused(
    file: str, name: str, changes: dict[str, str], message: str
) -> None:
    task = settings(file, name, **changes)
    with pytest.raises(UserError, match=message):
        check_task_settings(task, max_turns=3)


def test_an_environment_needs_its_class() -> None:
    with pytest.raises(UserError, match="needs task.environment"):
        check_task_settings(TaskConfig(name="environment", template="plain"), max_turns=1)


def test_the_command_of_the_page_trains(environment: dict[str, str], tmp_path: Path) -> None:
    page = (ROOT / "docs/environments.md").read_text(encoding="utf-8")
    [source] = re.findall(r"<!-- file: halving.py -->\n```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "halving.py").write_text(source, encoding="utf-8")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    [command] = re.findall(r"```sh\npython (.* --workdir runs/halving .*)\n```", page)
    small = [f"--config.{flag}" for flag in ("train.steps=2", "eval.every=2")]

    done = subprocess.run(
        [sys.executable, *command.split(), *small],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    lines = (tmp_path / "runs/halving/metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    assert any(row.get("turns/mean", 0) > 1 for row in metrics)
    assert all(row.get("reward/failed", 0) == 0 for row in metrics)
