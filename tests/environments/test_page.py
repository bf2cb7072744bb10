"""docs/environments.md: the files and the run of an environment with a tool and a judge."""

import json
import re
import shlex
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from runs import Stand
from test_asyncio_environments import Episode

from jzero.config import JudgeServer, RewardConfig, TaskConfig, ToolsConfig, turns
from jzero.rollout.turns import make_request
from jzero.types import Grade, Problem
from jzero.workers.pool import Pool

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/environments.md"
CALL = '<tool_call>{"name": "convert", "arguments": {"value": 4, "unit": "foot"}}</tool_call>'


class Judge(Stand):
    """A judge that finds short responses good. `asked` are the messages that it was sent."""

    def __init__(self) -> None:
        asked: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                [message] = request["messages"]
                asked.append(message["content"])
                [said] = re.findall(r"The shop said: (.*)", message["content"])
                words = f"I see.\nScore: {10 if len(said) < 10 else 4}"
                answer = {"choices": [{"message": {"role": "assistant", "content": words}}]}
                content = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.asked = asked
        super().__init__(Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Writes the files of the page into a directory."""
    text = PAGE.read_text(encoding="utf-8")
    for name, source in re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", text, re.DOTALL):
        (tmp_path / name).write_text(source, encoding="utf-8")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    return tmp_path


def test_a_turn_is_answered_by_the_tool_or_read_by_environment_and_judge(files: Path) -> None:
    with Judge() as judge:
        asked = JudgeServer(url=judge.url, model="wise", template=str(files / "rubric.txt"))
        task = TaskConfig(
            name="environment",
            environment=f"{files}/rope.py:Rope",
            template="plain",
            turn_reward=turns.Score(),
            tools=ToolsConfig(names=(f"{files}/units.py:convert",)),
            reward=RewardConfig(("accuracy", "judge"), weights=(1.0, 0.1), judge=asked),
            grade_workers=1,
        )
        question = "4 feet of rope, 3 a meter?\n"
        gold = {"row": {}, "seed": 2, "observation": question}
        problem = Problem("1", "environment", question, gold)
        episode: Episode = []
        with Pool(1) as pool:
            for response in (CALL, "about three or four", "3.66"):
                take_turn(pool, task, problem, episode, response)
    called, wrong, right = [grade for _, grade in episode]
    assert called.reply == [{"role": "tool", "name": "convert", "content": "1.2192 m"}]
    assert (wrong.reply, wrong.parts["judge"]) == ("How much?", 0.4)
    assert (right.reply, right.score, right.parts["judge"]) == (None, 1.0, 1.0)
    assert right.parts["environment.price"] == 1.0
    assert question.strip() in judge.asked[-1] and "The shop said: 3.66" in judge.asked[-1]
    assert len(judge.asked) == 2


def take_turn(
    pool: Pool, task: TaskConfig, problem: Problem, episode: Episode, response: str
) -> Grade:
    """Grades the next response of an episode, and appends it."""
    pool.step(0, make_request(problem, 0, response, episode, task, is_last=False, with_tools=True))
    [(_, grade)] = pool.drain()
    episode.append((response, grade))
    return grade


def test_the_command_of_the_page_trains(environment: dict[str, str], files: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    [command] = re.findall(r"```sh\n(python [^`]*--workdir runs/rope [^`]*)```", text)
    small = ("train.steps=1", "rollout.num_prompts=4", "eval.every=0", "eval.problems=4")
    with Judge() as judge:
        command = command.replace("\\\n", " ").replace("http://localhost:8000/v1", judge.url)
        _, *arguments = shlex.split(command)
        arguments += [f"--config.{change}" for change in small]

        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=files,
            env=environment | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )

    assert done.returncode == 0, done.stderr[-3000:]
    lines = (files / "runs/rope/metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "reward/judge" in row]
    assert rows and all(row.get("reward/failed", 0) == 0 for row in rows)
    assert all("feet of rope, 3 a meter?" in message for message in judge.asked)
    assert judge.asked
