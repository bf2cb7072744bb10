"""Episodes with tools in grader processes: calls and answers, limits, state, and TRL's classes."""

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

from jzero.config import Local, Remote, RewardConfig, TaskConfig, ToolsConfig, turns
from jzero.environments import batched_rewards
from jzero.environments.tools import episodes as tool_episodes
from jzero.errors import UserError
from jzero.files import JsonObject
from jzero.rollout.turns import make_request
from jzero.sandbox import levels
from jzero.tasks import find_task
from jzero.tasks.task import check_task_settings
from jzero.types import Grade, Problem
from jzero.workers.pool import Pool

SOURCE = '''
import asyncio
import os
import time


def greet(name: str, times: int = 1) -> str:
    """Greets.

    Args:
        name: Who.
        times: How often.
    """
    if name == "nobody":
        raise KeyError("nobody is here")
    if name == "slow":
        time.sleep(60)
    if name == "die":
        os._exit(3)
    return "hello " * times + name


async def later(value: dict[str, int]) -> dict:
    """Waits.

    Args:
        value: What comes back.
    """
    await asyncio.sleep(60 if "slow" in value else 0.001)
    return value


class Counter:
    """One of TRL's: no arguments, no step."""

    def reset(self, **row) -> str | None:
        self.count = row["start"]
        self.closed_in = row.get("closed_in")
        self.reward = 0.0
        return row.get("said")

    def add(self, step: int) -> int:
        """Adds to the counter.

        Args:
            step: How much.

        Returns:
            The counter.
        """
        if step > 100:
            raise ValueError("Game over.")
        if step == 99:
            os._exit(3)
        self.count += step
        self.reward = float(self.count)
        return self.count

    def _hidden(self) -> None:
        pass

    def close(self):
        if self.closed_in is not None:
            with open(self.closed_in, "a") as file:
                file.write(f"{self.count}\\n")


class Memory:
    def __init__(self):
        self.notes = []

    def remember(self, note: str) -> str:
        """Remembers.

        Args:
            note: What.
        """
        self.notes.append(note)
        return ", ".join(self.notes)


def reward(environments, **kwargs) -> list[float]:
    return [environment.reward for environment in environments]


def length(completions, start, prompts=None, **kwargs):
    return [len(completion) + value / 10 for completion, value in zip(completions, start)]


def undocumented(x: int) -> int:
    return x
'''

Episode = list[tuple[str, Grade]]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("mine") / "tools.py"
    path.write_text(SOURCE, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(1) as pool:
        yield pool


def settings(*names: str, **changes: Any) -> TaskConfig:
    tools = ToolsConfig(names=names, **changes.pop("tools", {}))
    defaults = {"name": "gsm8k", "template": "chat", "turn_reward": turns.Score()}
    return TaskConfig(tools=tools, **defaults | changes)


def call(tool: str, /, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def respond(
    pool: Pool,
    task: TaskConfig,
    episode: Episode,
    response: str,
    gold: object = None,
    is_last: bool = False,
    id: str = "1",
) -> Grade:
    """Grades one response of an episode, and adds it to the episode."""
    problem = Problem(id, task.name, [], gold or {"answer": "42", "question": ""})
    if task.name == "environment":
        gold = problem.gold
        problem = Problem(id, task.name, gold["observation"], gold, gold["row"])
    pool.step(
        0, make_request(problem, 0, response, episode, task, is_last=is_last, with_tools=True)
    )
    [(_, grade)] = pool.drain()
    episode.append((response, grade))
    return grade


def contents(grade: Grade) -> list[str]:
    assert isinstance(grade.reply, list)
    assert all(message["role"] == "tool" for message in grade.reply)
    return [message["content"] for message in grade.reply]


def test_calls_are_answered_in_order_and_the_answer_is_graded(pool: Pool, file: str) -> None:
    task = settings("calculator", f"{file}:greet", f"{file}:later")
    episode: Episode = []
    response = "\n".join(
        [
            call("calculator", expression="6*7"),
            call("greet", name="you", times=2),
            call("later", value={"a": 1}),
            call("greet", name="nobody"),
            call("greet"),
            "<tool_call>\nno\n</tool_call>",
        ]
    )

    called = respond(pool, task, episode, response)
    answered = respond(pool, task, episode, "#### 42")

    said = contents(called)
    assert said[:3] == ["42", "hello hello you", '{"a": 1}']
    assert said[3] == "Error: KeyError: 'nobody is here'"
    assert said[4].startswith("Error: the argument name is missing")
    assert said[5].startswith("Error: the call is not JSON")
    assert (called.tool_calls, called.failed_tool_calls) == (6, 3)
    assert called.score == 0 and not called.correct and not called.failed and not called.parts
    assert answered.correct and answered.reply is None and answered.tool_calls == 0


def test_the_other_syntax_is_chosen_by_its_name(pool: Pool) -> None:
    task = settings("calculator", tools={"syntax": "xml"})
    text = "<tool_call>\n<function=calculator>\n<parameter=expression>\n6*7\n</parameter>\n"
    assert contents(respond(pool, task, [], f"{text}</function>\n</tool_call>")) == ["42"]


def test_calls_and_output_have_limits(pool: Pool, file: str) -> None:
    task = settings("calculator", f"{file}:greet", tools={"max_calls": 3, "max_output": 20})
    episode: Episode = []
    two = "\n".join([call("calculator", expression="1")] * 2)
    assert contents(respond(pool, task, episode, two)) == ["1", "1"]
    again = contents(respond(pool, task, episode, two))
    assert again[0] == "1" and "all 3 calls" not in again[0]
    assert again[1] == "Error: all 3\n[" or again[1].startswith("Error: all")

    long = contents(respond(pool, task, [], call("greet", name="x" * 1000), id="long"))[0]
    assert long == "hello xxxx\n[986 characters left out]\nxxxxxxxxxx"


def test_a_slow_tool_is_an_error_of_its_call_alone(pool: Pool, file: str) -> None:
    task = settings(f"{file}:greet", f"{file}:later", tools={"seconds": 0.3})
    calls = [call("greet", name="slow"), call("later", value={"slow": 1})]
    calls += [call("greet", name="quick"), call("later", value={})]
    grade = respond(pool, task, [], "".join(calls))
    assert contents(grade) == [
        "Error: greet took more than 0.3 seconds",
        "Error: later took more than 0.3 seconds",
        "hello quick",
        "{}",
    ]
    assert 0.3 <= grade.tool_seconds < 30 and not grade.failed


def test_a_tool_that_ends_its_process_fails_the_episode(file: str) -> None:
    task = settings(f"{file}:greet")
    with Pool(1) as pool:
        grade = respond(pool, task, [], call("greet", name="die"))
        fine = respond(pool, task, [], call("greet", name="you"))
    assert grade.failed and grade.reason.startswith("killed: the tools")
    assert contents(fine) == ["hello you"]


def test_the_last_turn_is_no_answer_if_it_calls(pool: Pool) -> None:
    task = settings("calculator", reward=RewardConfig(functions=("accuracy",)))
    grade = respond(pool, task, [], call("calculator", expression="42") + " #### 42", is_last=True)
    assert grade.reply is None and not grade.correct and grade.score == 0
    assert grade.reason == "called tools"


def test_a_class_has_an_instance_for_each_episode(pool: Pool, file: str) -> None:
    task = settings(f"{file}:Memory")
    first: Episode = []
    second: Episode = []
    respond(pool, task, first, call("remember", note="a"), id="a")
    respond(pool, task, second, call("remember", note="b"), id="b")
    assert contents(respond(pool, task, first, call("remember", note="c"), id="a")) == ["a, c"]
    assert contents(respond(pool, task, second, call("remember", note="d"), id="b")) == ["b, d"]


def test_an_episode_is_built_again_where_its_process_ended(file: str) -> None:
    task = settings(f"{file}:Memory")
    episode: Episode = []
    with Pool(1) as pool:
        respond(pool, task, episode, call("remember", note="a"))
        [worker] = pool._workers
        assert worker is not None
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
        assert contents(respond(pool, task, episode, call("remember", note="b"))) == ["a, b"]


def test_python_keeps_its_variables_and_ends_with_its_episode() -> None:
    level = next((name for name in levels.AUTO_LEVELS if not levels.failure(name)), "none")
    sandbox = Local(level=level)
    task = settings("python", sandbox=sandbox, tools={"seconds": 1.0})
    episode: Episode = []
    with Pool(1) as pool:
        response = call("python", code="x = 6") + call("python", code="print(x)\nx * 7")
        assert contents(respond(pool, task, episode, response)) == ["", "6\n42\n"]
        slow = respond(pool, task, episode, call("python", code="while True: pass"))
        assert "took more than 1 seconds, and all variables are gone" in contents(slow)[0]
        gone = contents(respond(pool, task, episode, call("python", code="x")))
        assert "NameError" in gone[0]
        [worker] = pool._workers
        assert worker is not None
        assert interpreters(worker.process.pid) > 2
        respond(pool, task, episode, "#### 42")
        # The watcher sees the end of its socket. Nothing announces when it has ended.
        while interpreters(worker.process.pid) > 3:
            pass


def interpreters(pid: int) -> int:
    """Returns the number of processes below a keeper, with the grader, that have not ended."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        states = [Path(f"/proc/{child}/stat").read_text().split()[2] for child in text.split()]
    except OSError:  # one has just been collected
        return 1 << 20
    below = sum(interpreters(int(child)) for child in text.split())
    return below + sum(state != "Z" for state in states)


PAGE = Path(__file__).parents[2] / "docs/environments.md"


def write_page_files(directory: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    [source] = re.findall(r"<!-- file: units.py -->\n```python\n(.*?)```", text, re.DOTALL)
    (directory / "units.py").write_text(source, encoding="utf-8")


def test_the_tool_of_the_page_works(pool: Pool, tmp_path: Path) -> None:
    write_page_files(tmp_path)
    task = settings(f"{tmp_path}/units.py:convert")
    response = call("convert", value=2, unit="foot") + call("convert", value=2, unit="yard")
    said = contents(respond(pool, task, [], response))
    assert said[0] == "0.6096 m"
    assert said[1].startswith("Error: the argument unit is wrong")


def test_the_command_of_the_page_trains(environment: dict[str, str], tmp_path: Path) -> None:
    write_page_files(tmp_path)
    (tmp_path / "configs").symlink_to(PAGE.parents[1] / "configs")
    text = PAGE.read_text(encoding="utf-8")
    [command] = re.findall(r"```sh\npython (.*configs/calculator.*\n.*)\n```", text)
    changes = ("train.steps=1", "warm_start.steps=40", "rollout.num_prompts=8", "eval.every=0")
    small = [f"--config.{change}" for change in changes]

    done = subprocess.run(
        [sys.executable, *command.replace("\\\n", " ").split(), *small],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(PAGE.parents[1])},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    rows = (tmp_path / "runs/tools/metrics.jsonl").read_text().splitlines()
    assert all(json.loads(row).get("reward/failed", 0) == 0 for row in rows)


# TRL's environment classes.


def counter(file: str, **changes: Any) -> TaskConfig:
    reward = RewardConfig(functions=(f"{file}:reward", f"{file}:length"))
    changes = {"name": "environment", "environment": f"{file}:Counter", "reward": reward} | changes
    return settings(**changes)


def test_a_class_of_trl_plays_an_episode(file: str, tmp_path: Path) -> None:
    closed_in = tmp_path / "closed"
    data = tmp_path / "rows.jsonl"
    prompt = [{"role": "user", "content": "Count."}]
    rows: list[JsonObject] = [{"start": 5}, {"start": 7, "said": " Go."}]
    rows = [row | {"prompt": prompt, "closed_in": str(closed_in)} for row in rows]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = counter(file, data=str(data), grade_workers=1)
    problems = find_task("environment").train_problems(task, 0, 0, 2)
    by_start = {problem.gold["row"]["start"]: problem for problem in problems}
    assert by_start[5].prompt == prompt
    assert by_start[7].prompt == [{"role": "user", "content": "Count. Go."}]
    assert [schema["function"]["name"] for schema in tool_episodes.schemas(task)] == ["add"]

    episode: Episode = []
    gold = by_start[7].gold
    with Pool(1) as pool:
        both = call("add", step=2) + call("add", step=3)
        assert contents(respond(pool, task, episode, both, gold)) == ["9", "12"]
        over = respond(pool, task, episode, call("add", step=101), gold)
        assert contents(over) == ["Error: ValueError: Game over."]
        end = respond(pool, task, episode, "Done.", gold)
        # Where the episode is played, only the function that asks for `environments` is called.
        assert end.parts == {f"{file}:reward": 12.0} and end.correct
        whole = batched_rewards.Episode(by_start[7], episode)
        [results] = batched_rewards.call_all(pool, task, [[whole]])
        *_, last = batched_rewards.add([grade for _, grade in episode], results)
    # Two answers of tools, one of them of an error, and three responses.
    assert last.parts == {f"{file}:reward": 12.0, f"{file}:length": 6 + 0.7}
    assert last.correct and not last.failed and last.reply is None
    # Two were closed after they had said how their prompt goes on.
    assert sorted(closed_in.read_text().split(), key=int) == ["5", "7", "12"]


def test_an_episode_of_trl_is_built_again_where_its_process_ended(file: str) -> None:
    task = counter(file)
    gold = {"row": {"start": 1, "prompt": "?"}, "seed": 0, "observation": "?"}
    episode: Episode = []
    with Pool(1) as pool:
        respond(pool, task, episode, call("add", step=2), gold)
        [worker] = pool._workers
        assert worker is not None
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
        assert contents(respond(pool, task, episode, call("add", step=3), gold)) == ["6"]


@pytest.mark.parametrize(
    "names, changes, max_turns, message",
    [
        (["calculator"], {}, 1, "needs a turn after each call: set rollout.max_turns"),
        (["calculator"], {"turn_reward": turns.Success()}, 2, "set task.turn_reward=score"),
        (["calculator"], {"template": "qwen_math"}, 2, "set task.template=chat"),
        (["abacus"], {}, 2, "task.tools.names=abacus is not one of calculator, python, search"),
        (["FILE:undocumented"], {}, 2, "the tool undocumented has no docstring"),
        (["FILE:greet", "FILE:greet"], {}, 2, "two tools are called greet"),
        (["search"], {}, 2, "task.tools.(corpus|names)"),
        (
            ["python"],
            {"sandbox": Remote(url="http://x")},
            2,
            "task.tools.names=python does not run with task.sandbox=remote",
        ),
    ],
)
def test_impossible_tools_are_refused(
    file: str, names: list[str], changes: dict[str, Any], max_turns: int, message: str
) -> None:
    task = settings(*[name.replace("FILE", file) for name in names], **changes)
    with pytest.raises(UserError, match=message):
        check_task_settings(task, max_turns)


def test_possible_tools_are_accepted(file: str) -> None:
    check_task_settings(settings("calculator", f"{file}:greet", f"{file}:Memory"), 2)
    check_task_settings(counter(file), 2)


def test_a_run_says_which_tools_there_are(file: str) -> None:
    [line] = tool_episodes.notes(settings("calculator", f"{file}:Memory"))
    assert line == "tools: calculator, remember (at most 16 calls of an episode)"
    assert tool_episodes.notes(settings()) == [] and tool_episodes.metrics(settings()) == {}
    task = settings("python", sandbox=Local(level="none"))
    assert tool_episodes.notes(task)[1].startswith("sandbox: level none")
    assert tool_episodes.metrics(task) == {"sandbox/level": 0.0}
