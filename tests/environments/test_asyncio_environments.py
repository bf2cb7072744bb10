"""Environments in the event loop of the run: all at once, with limits, and nothing is lost."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jzero.config import RewardConfig, TaskConfig, turns
from jzero.environments.environment import TookTooLong, limited
from jzero.errors import UserError
from jzero.rewards.user_functions import find_function
from jzero.rollout.turns import make_request
from jzero.tasks import find_task
from jzero.tasks.task import check_task_settings
from jzero.types import Grade, Problem
from jzero.workers.pool import Pool

SOURCE = '''
import asyncio
import os
import random
import time
from pathlib import Path

LIVE = set()
ARRIVED = []
CLOSED = []
LOST = []
FULL = None


class Walk:
    """Starts at a place and says where it is after each step; a step to 0 is the goal."""

    async def reset(self, row, seed):
        await asyncio.sleep(0)
        LIVE.add(self)
        self.place = row["start"]
        self.path = []
        return f"You are at {self.place}."

    async def step(self, response):
        await asyncio.sleep(0)
        if response == "wait":
            await asyncio.sleep(1000)
        if response == "lose once" and not LOST:
            LOST.append(self)
            raise ConnectionResetError("gone")
        if response == "lose":
            raise ConnectionResetError("gone")
        if response == "block":
            time.sleep(4)
        if response.startswith("meet"):
            await self.meet(int(response.split()[1]))
            return "met", 0.0, False
        if response.startswith("lose"):
            return "found", 0.0, False
        self.place += int(response)
        self.path.append(int(response))
        rewards = {"near": 1 / (1 + abs(self.place)), "correct": self.place == 0}
        return f"You are at {self.place} by {self.path}.", rewards, self.place == 0

    async def meet(self, count):
        """Returns when as many as `count` are here at the same time."""
        global FULL
        if not ARRIVED:
            FULL = asyncio.Event()
        ARRIVED.append(self)
        if len(ARRIVED) == count:
            FULL.set()
        await FULL.wait()

    async def close(self):
        await asyncio.sleep(0)
        LIVE.discard(self)
        CLOSED.append(self.path)


class Fickle(Walk):
    async def reset(self, row, seed):
        return await super().reset(row, seed) + str(time.perf_counter_ns())


class Shapeless(Walk):
    async def step(self, response):
        return "only a reply"


class Exiting(Walk):
    """Returns an object that exits when it is written into an error message."""

    async def step(self, response):
        return self

    def __repr__(self):
        raise SystemExit("no name")


class Rough(Walk):
    """Answers late, and loses its connection in one of ten steps, once."""

    async def step(self, response):
        await asyncio.sleep(random.random() / 50)
        if random.random() < 0.1 and (id(self), response) not in LOST:
            LOST.append((id(self), response))
            raise ConnectionResetError("gone")
        return await super().step(response)


class Half(Walk):
    def step(self, response):
        return "", 0.0, True


class Slow:
    """The same in a process."""

    def reset(self, row, seed):
        self.place = row["start"]
        return f"You are at {self.place}."

    def step(self, response):
        self.place += int(response)
        return "on", 0.0, self.place == 0


def place(environment, response):
    return float(environment.place)


async def place_later(environment):
    await asyncio.sleep(0)
    return {"place": environment.place, "open": float(environment in LIVE)}


def process(response):
    return float(os.getpid())
'''

Episode = list[tuple[str, Grade]]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("mine") / "async_walks.py"
    path.write_text(SOURCE, encoding="utf-8")
    return str(path)


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool(0) as pool:
        yield pool


def module_of(file: str) -> Any:
    """Returns the module of `file`, as the environments of this process see it."""
    return vars(sys.modules[find_function(f"{file}:Walk").__module__])


def settings(file: str, which: str = "Walk", **changes: Any) -> TaskConfig:
    defaults = {"name": "environment", "template": "plain", "turn_reward": turns.Score()}
    defaults["environment_mode"] = "asyncio"
    return TaskConfig(environment=f"{file}:{which}", grade_workers=1, **defaults | changes)


def problem_at(start: int, id: str = "1") -> Problem:
    gold = {"row": {"start": start}, "seed": 0, "observation": f"You are at {start}."}
    return Problem(id, "environment", gold["observation"], gold)


def play(
    pool: Pool,
    task: TaskConfig,
    problem: Problem,
    episodes: list[Episode],
    responses: list[str],
    is_last: bool = False,
) -> list[Grade]:
    """Steps every episode of a group with its response, all at once; returns the grades."""
    for sample, response in enumerate(responses):
        earlier = episodes[sample]
        request = make_request(problem, sample, response, earlier, task, is_last=is_last)
        pool.step(sample, request)
    grades = dict(pool.drain())
    for sample, response in enumerate(responses):
        episodes[sample].append((response, grades[sample]))
    return [grades[sample] for sample in range(len(responses))]


def test_every_episode_has_a_state_of_its_own_without_a_process(pool: Pool, file: str) -> None:
    task = settings(file)
    episodes: list[Episode] = [[] for _ in range(6)]

    play(pool, task, problem_at(3), episodes, ["-1", "0", "1", "2", "3", "4"])
    grades = play(pool, task, problem_at(3), episodes, ["-1"] * 6)
    [last] = play(pool, task, problem_at(3), episodes[:1], ["-1"])

    for sample, grade in enumerate(grades):
        place = 3 + sample - 1 - 1
        assert grade.reply == f"You are at {place} by {[sample - 1, -1]}."
        assert grade.score == pytest.approx(1 / (1 + place))
        assert grade.parts == {"environment.near": pytest.approx(1 / (1 + place))}
    assert last.reply is None and last.correct and not last.failed
    module = module_of(file)
    assert [-1, -1, -1] in module["CLOSED"] and len(module["LIVE"]) == 5
    pool.close()
    assert not module["LIVE"]  # what was still open was closed with the pool


def test_a_thousand_steps_wait_at_the_same_time(pool: Pool, file: str) -> None:
    """No step returns before all are there: fewer at once would never end."""
    count = 1000
    module_of(file)["ARRIVED"].clear()
    episodes: list[Episode] = [[] for _ in range(count)]
    grades = play(pool, settings(file), problem_at(3), episodes, [f"meet {count}"] * count)
    assert {grade.reply for grade in grades} == {"met"}


@pytest.mark.parametrize(
    "name, response, reason, counters",
    [
        ("Walk", "north", "ValueError: invalid literal for int()", {"errors": 1}),
        ("Walk", "wait", "took more than task.reward.seconds=0.2", {"timeouts": 2}),
        ("Walk", "lose", "killed: ", {"killed": 2}),
        ("Shapeless", "1", "it has to be (reply, reward, done)", {"errors": 1}),
        ("Fickle", "1", "reset has to be a function of row and seed", {"errors": 1}),
        ("Exiting", "1", "SystemExit: no name", {"errors": 1}),
    ],
)
def test_an_environment_that_fails_is_no_score_and_no_other_episode_fails(
    pool: Pool, file: str, name: str, response: str, reason: str, counters: dict[str, int]
) -> None:
    seconds = 0.2 if response == "wait" else 60.0
    task = settings(file, name, reward=RewardConfig(seconds=seconds))
    grade, other = play(pool, task, problem_at(3), [[], []], [response, "-1"])
    assert grade.failed and grade.known_score is None and grade.reply is None
    assert reason in grade.reason and f"async_walks.py:{name}" in grade.reason
    if name == "Walk":
        assert other.reply == "You are at 2 by [-1]." and not other.failed
        assert {name: pool.counters[name] for name in counters} == counters
    pool.close()
    assert not module_of(file)["LIVE"]


def test_an_episode_whose_connection_was_lost_is_built_again(pool: Pool, file: str) -> None:
    module_of(file)["LOST"].clear()
    episodes: list[Episode] = [[]]
    play(pool, settings(file), problem_at(5), episodes, ["-1"])
    [found] = play(pool, settings(file), problem_at(5), episodes, ["lose once"])
    [last] = play(pool, settings(file), problem_at(5), episodes, ["-2"])
    assert found.reply == "found" and not found.failed
    assert last.reply == "You are at 2 by [-1, -2]."
    assert pool.counters["killed"] == 1


def test_nothing_is_lost_of_many_episodes_that_are_late_and_crash(pool: Pool, file: str) -> None:
    """256 episodes of six turns. Those that crash twice in a turn say so; the others are right."""
    count, start = 256, 1000
    episodes: list[Episode] = [[] for _ in range(count)]
    for turn in range(6):
        going = [episode for episode in episodes if not any(g.failed for _, g in episode)]
        play(pool, settings(file, "Rough"), problem_at(start), going, [str(turn + 1)] * len(going))
    num_failed = 0
    for episode in episodes:
        if episode[-1][1].failed:
            num_failed += 1
            assert episode[-1][1].reason.startswith("killed: ")
            continue
        path = [turn + 1 for turn in range(6)]
        assert episode[-1][1].reply == f"You are at {start + sum(path)} by {path}."
    assert num_failed < count / 2
    assert pool.counters["killed"] > 0
    assert pool.counters["graded"] == sum(map(len, episodes))


def test_an_instance_that_is_gone_is_built_again(file: str) -> None:
    """As it is where a run resumes: another pool goes on with the episode."""
    episodes: list[Episode] = [[], []]
    with Pool(0) as first:
        play(first, settings(file), problem_at(5), episodes, ["-1", "1"])
    with Pool(0) as second:
        grades = play(second, settings(file), problem_at(5), episodes, ["-2", "2"])
    assert [grade.reply for grade in grades] == [
        "You are at 2 by [-1, -2].",
        "You are at 8 by [1, 2].",
    ]


def test_what_waits_is_cancelled_at_the_end(file: str) -> None:
    with Pool(0) as pool:
        task = settings(file)
        problem = problem_at(3)
        for sample in range(20):
            pool.step(sample, make_request(problem, sample, "wait", [], task, is_last=False))
        live = module_of(file)["LIVE"]
        deadline = time.monotonic() + 60
        while len(live) < 20 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(live) == 20
        assert pool.poll() == []
    assert not live


def test_an_environment_that_blocks_all_others_ends_the_run(file: str) -> None:
    task = settings(file, reward=RewardConfig(seconds=1.0))
    with Pool(0) as pool, pytest.raises(UserError, match=r"blocked all .* in step time.sleep"):
        play(pool, task, problem_at(3), [[]], ["block"])


@pytest.mark.parametrize("mode", ["asyncio", "processes"])
def test_rewards_get_the_instance_also_of_an_episode_that_is_over(file: str, mode: str) -> None:
    name = "Walk" if mode == "asyncio" else "Slow"
    functions = ("accuracy", f"{file}:place")
    if mode == "asyncio":
        functions = (*functions, f"{file}:place_later", f"{file}:process")
    task = settings(file, name, environment_mode=mode, reward=RewardConfig(functions=functions))
    episodes: list[Episode] = [[], []]
    with Pool(1) as pool:
        first = play(pool, task, problem_at(2), episodes, ["-1", "-2"])
        [last] = play(pool, task, problem_at(2), episodes[:1], ["3"], is_last=True)
    assert [grade.parts[f"{file}:place"] for grade in (*first, last)] == [1.0, 0.0, 4.0]
    assert not any(grade.failed for grade in (*first, last))
    if mode == "asyncio":
        assert last.parts[f"{file}:place_later.place"] == 4.0
        assert last.parts[f"{file}:place_later.open"] == 1.0  # it is closed afterwards
        # What does not ask for the environment runs where it can be killed.
        assert last.parts[f"{file}:process"] != os.getpid()


def test_prompts_are_what_reset_says(file: str, tmp_path: Path) -> None:
    data = tmp_path / "walks.jsonl"
    data.write_text("".join(f'{{"start": {place}}}\n' for place in range(20, 24)))
    problems = find_task("environment").train_problems(settings(file, data=str(data)), 1, 0, 4)
    assert sorted(problem.prompt for problem in problems) == [
        f"You are at {place}." for place in range(20, 24)
    ]


def test_methods_that_would_hold_up_others_are_refused(file: str) -> None:
    with pytest.raises(UserError, match="method step that would hold up all other episodes"):
        check_task_settings(settings(file, "Half"), max_turns=3)
    check_task_settings(settings(file, "Half", environment_mode="processes"), max_turns=3)
    check_task_settings(settings(file), max_turns=3)


def test_the_time_limit_ends_what_ignores_its_cancellation() -> None:
    """Nobody waits for a coroutine that has been cancelled."""

    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(0.5)
            except asyncio.CancelledError:
                await asyncio.sleep(0.5)
                return

    async def await_it() -> float:
        start = asyncio.get_running_loop().time()
        with pytest.raises(TookTooLong):
            await limited(0.05, stubborn)
        return asyncio.get_running_loop().time() - start

    assert asyncio.run(await_it()) < 0.5


def test_a_loop_whose_files_were_closed_is_closed_without_a_traceback() -> None:
    code = (
        "import asyncio, os, threading\n"
        "from jzero.workers.event_loop import EventLoop\n"
        "loops, are_closed = [], threading.Event()\n"
        "async def close_files():\n"
        "    loops.append(asyncio.get_running_loop())\n"
        "    os.closerange(3, 256)\n"
        "    are_closed.set()\n"
        "loop = EventLoop(60.0, print)\n"
        "loop.start(close_files())\n"
        "are_closed.wait(30)\n"
        "loop.close()\n"
        "print(loops[0].is_closed())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stdout == "True\n"
    assert "Traceback" not in ended.stderr
