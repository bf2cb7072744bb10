"""Sessions of an OpenEnv server: its protocol, its errors, and the package's own server."""

import asyncio
import os
import re
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openenv_server import OpenEnvServer, frame, read_frame, shake_hands
from runs import ROOT
from test_asyncio_environments import Episode, play
from websockets.asyncio.server import ServerConnection, serve

from jzero import websocket
from jzero.config import TaskConfig, turns
from jzero.environments import openenv
from jzero.errors import UserError
from jzero.tasks import find_task
from jzero.tasks.task import check_task_settings
from jzero.types import Problem
from jzero.workers.pool import Pool


@pytest.fixture
def server() -> Iterator[OpenEnvServer]:
    server = OpenEnvServer()
    yield server
    server.close()


def settings(url: str, **changes: Any) -> TaskConfig:
    defaults = {"name": "environment", "template": "plain", "turn_reward": turns.Score()}
    return TaskConfig(environment=url, grade_workers=1, **defaults | changes)


def game(number: int, text: str = "guess a number") -> Problem:
    gold = {"row": {"start": number}, "seed": 5, "observation": text}
    return Problem("1", "environment", text, gold)


def test_an_episode_is_a_session_of_the_server(server: OpenEnvServer) -> None:
    task = settings(f"openenv:{server.url}")
    check_task_settings(task, max_turns=3)
    episodes: list[Episode] = [[] for _ in range(40)]
    with Pool(0) as pool:
        first = play(pool, task, game(7), episodes, [str(number % 10) for number in range(40)])
        open_sessions = server.sessions
        second = play(pool, task, game(7), episodes[:7], ["7"] * 7)
    for number, grade in enumerate(first):
        guess = number % 10
        is_right = guess == 7
        assert grade.correct and not grade.failed  # any reward above 0 counts as right
        assert grade.score == (1.0 if is_right else 0.25)
        assert grade.reply == (None if is_right else "higher" if guess < 7 else "lower")
    assert open_sessions == 36  # those that are over have ended
    assert [grade.reply for grade in second] == [None] * 7
    assert server.seen[0] == {"type": "reset", "data": {"seed": 5, "start": 7}}


def test_prompts_are_the_observations_of_reset(server: OpenEnvServer) -> None:
    task = settings(f"openenv:{server.url}")
    problems = find_task("environment").train_problems(task, 0, 0, 3)
    assert {problem.prompt for problem in problems} == {"guess a number"}
    resets = [message["data"] for message in server.seen if message["type"] == "reset"]
    assert sorted(reset["seed"] for reset in resets) == sorted(p.gold["seed"] for p in problems)


def test_a_lost_session_is_played_again_and_nothing_is_lost(server: OpenEnvServer) -> None:
    task = settings(f"openenv:{server.url}")
    episodes: list[Episode] = [[], []]
    with Pool(0) as pool:
        play(pool, task, game(7), episodes, ["3", "9"])
        server.drop = 1
        grades = play(pool, task, game(7), episodes, ["5", "8"])
        assert pool.counters["killed"] == 1
        server.drop = 2
        [lost] = play(pool, task, game(7), episodes[:1], ["6"])
    assert [grade.reply for grade in grades] == ["higher", "lower"]
    assert lost.failed and lost.reason.startswith(f"killed: openenv:{server.url}: WebSocketError")


def test_an_error_of_the_server_is_named(server: OpenEnvServer) -> None:
    with Pool(0) as pool:
        [grade] = play(pool, settings(f"openenv:{server.url}"), game(7), [[]], ["crash"])
    assert grade.failed and "OpenEnvError: division by zero (EXECUTION_ERROR)" in grade.reason


def test_a_response_that_is_no_action_gets_an_error_to_read(tmp_path: Path) -> None:
    """Actions of several fields are JSON, which a policy may write wrongly."""
    fields = {"message": {"type": "string"}, "times": {"type": "integer"}}
    server = OpenEnvServer({"properties": fields, "required": ["message", "times"]})
    task = settings(f"openenv:{server.url}")
    episodes: list[Episode] = [[], [], []]
    with Pool(0) as pool:
        responses = ["7", '{"times": 3}', '{"message": "7"}']
        grades = play(pool, task, game(7), episodes, responses)
    server.close()
    assert grades[0].reply == "error: the action has to be a JSON object, with message, times"
    assert grades[1].reply == "error: message: Field required"
    assert grades[2].reply is None and grades[2].score == 1.0
    assert not any(grade.failed for grade in grades)


def test_a_subclass_says_what_actions_and_observations_are(
    server: OpenEnvServer, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from jzero.environments.openenv import OpenEnv\n"
        "class Mine(OpenEnv):\n"
        f"    url = {server.url!r}\n"
        "    def action(self, response):\n"
        "        return {'message': response.split()[-1]}\n"
        "    def text(self, observation):\n"
        "        return observation['echoed'].upper()\n"
    )
    task = settings(f"{file}:Mine", environment_mode="asyncio")
    check_task_settings(task, max_turns=3)
    with Pool(0) as pool:
        [grade] = play(pool, task, game(7, "GUESS A NUMBER"), [[]], ["it is 3"])
    assert grade.reply == "HIGHER"


@pytest.mark.parametrize("url", ["openenv:", "openenv:localhost:8000", "openenv:http://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="is not a server address: use http://HOST:PORT"):
        check_task_settings(settings(url), max_turns=3)


def test_a_server_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="start the server, or mend the address"):
        check_task_settings(settings("openenv:http://127.0.0.1:9"), max_turns=3)
    with pytest.raises(UserError, match="set task.environment_mode=auto"):
        check_task_settings(settings("openenv:http://x", environment_mode="processes"), max_turns=3)


@pytest.mark.parametrize("length", [0, 125, 126, 65535, 65536, 200_001])
def test_messages_of_every_length_go_both_ways(length: int) -> None:
    text = "é" * (length // 2) + "x" * (length % 2)

    async def converse() -> object:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await shake_hands(reader, writer)
            _, payload = await read_frame(reader)
            writer.write(frame(0x81, payload))
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            session = await websocket.Session.open(f"ws://127.0.0.1:{port}/ws")
            answer = await session.ask(text)
            with pytest.raises(websocket.WebSocketError, match="the connection has ended"):
                await session.ask(text)
            await session.close()
            return answer

    assert asyncio.run(converse()) == text


def test_the_certificate_of_a_server_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """self_signed.pem is of 127.0.0.1, with its key."""
    certificate = str(ROOT / "tests" / "self_signed.pem")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate)

    async def echo(connection: ServerConnection) -> None:
        async for message in connection:
            await connection.send(message)

    async def converse() -> object:
        async with serve(echo, "127.0.0.1", 0, ssl=tls) as server:
            url = f"wss://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}/ws"
            with pytest.raises(OSError, match="certificate verify failed"):
                await websocket.Session.open(url)
            monkeypatch.setenv("SSL_CERT_FILE", certificate)
            session = await websocket.Session.open(url)
            answer = await session.ask({"x": 7})
            await session.close()
            return answer

    assert asyncio.run(converse()) == {"x": 7}


def test_a_server_without_sessions_is_named(server: OpenEnvServer) -> None:
    async def open_elsewhere() -> None:
        await websocket.Session.open(f"{server.url.replace('http', 'ws')}/elsewhere")

    with pytest.raises(websocket.WebSocketError, match="HTTP 404"):
        asyncio.run(open_elsewhere())


PACKAGE_SERVER = """
import socket, sys, uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Say(Action):
    message: str

class Heard(Observation):
    heard: str = ""

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def __init__(self):
        super().__init__()
        self.said = []
    def reset(self, seed=None, episode_id=None, **kwargs):
        self.said = []
        return Heard(heard=f"speak {kwargs.get('start')}", done=False, reward=0.0)
    def step(self, action, timeout_s=None, **kwargs):
        self.said.append(action.message)
        count = len(self.said)
        return Heard(heard=" ".join(self.said), done=count == 3, reward=float(count))
    @property
    def state(self):
        return State(step_count=len(self.said))

app = create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=64)
listening = socket.socket()
listening.bind(("127.0.0.1", 0))
print("port", listening.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])
"""


@pytest.mark.skipif(
    "OPENENV_PYTHON" not in os.environ,
    reason="OPENENV_PYTHON is not set: a Python with openenv-core 0.3",
)
def test_the_server_of_the_package_is_played(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [os.environ["OPENENV_PYTHON"], "-c", PACKAGE_SERVER], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        found = re.fullmatch(r"port (\d+)\n", process.stdout.readline())
        assert found is not None
        url = f"http://127.0.0.1:{found[1]}"
        task = settings(f"openenv:{url}")
        check_task_settings(task, max_turns=3)
        episodes: list[Episode] = [[] for _ in range(20)]
        with Pool(0) as pool:
            responses = [str(number) for number in range(20)]
            for turn in range(3):
                grades = play(pool, task, game(7, "speak 7"), episodes, responses)
                assert {grade.score for grade in grades} == {turn + 1.0}
                for number, grade in enumerate(grades):
                    said = " ".join([str(number)] * (turn + 1))
                    assert grade.reply == (said if turn < 2 else None)
    finally:
        process.kill()
        process.wait()


def test_the_one_text_of_an_action_is_found() -> None:
    text, number = {"type": "string"}, {"type": "integer"}
    assert openenv.text_field({"properties": {"code": text, "metadata": {}}}) == "code"
    both = {"code": text, "comment": text}
    assert openenv.text_field({"properties": both, "required": ["code"]}) == "code"
    assert openenv.text_field({"properties": both}) is None
    assert openenv.text_field({"properties": {"action_id": number}}) is None
