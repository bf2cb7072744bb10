"""Replies that once broke a client of jzero, and the kinds that they belong to.

tests/attacks/hostile_servers.py runs many more kinds against every client. Here each test asks one
client through its public functions.
"""

import asyncio
import functools
import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest
from openenv_server import OpenEnvServer, frame, read_frame
from runs import Stand

from jzero.config import JudgeServer, TaskConfig, teachers
from jzero.distillation.server import ScoringClient
from jzero.environments import asyncio_environments, openenv
from jzero.environments.environment import Observation
from jzero.errors import UserError
from jzero.types import JsonValue
from jzero.workers.judge import Judge, JudgeError, read_score
from jzero.workers.pool import Pool

IDS = [3, 1, 4, 1, 5]
KEY = "sk-0123456789"


@pytest.fixture(autouse=True)
def early_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the wait for the closing handshake, which most of these servers never answer."""
    monkeypatch.setattr("jzero.websocket.CLOSE_SECONDS", 0.1)


class Hostile(Stand):
    """A server whose replies are bytes: those of `replies` in their order, the last for ever."""

    def __init__(self, *replies: bytes, drips: bytes = b"") -> None:
        hostile = self
        self.replies = list(replies)
        self.keys: list[str | None] = []

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments: object) -> None:
                """Prints nothing."""

            def do_GET(self) -> None:
                hostile.keys.append(self.headers["Authorization"])
                left = hostile.replies
                self.wfile.write(left.pop(0) if len(left) > 1 else left[0])
                for byte in drips:
                    time.sleep(0.25)
                    self.wfile.write(bytes([byte]))

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.do_GET()

        super().__init__(Handler)

    def handle_error(self, request, client_address) -> None:
        """Prints nothing: clients give up on this server."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


def reply(content: str) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content.encode())


def logprobs(*values: str) -> bytes:
    numbers = ", ".join(["null", *values])
    return reply(f'{{"choices": [{{"logprobs": {{"token_logprobs": [{numbers}]}}}}]}}')


def words(text: str) -> bytes:
    return reply(json.dumps({"choices": [{"message": {"content": text}}]}))


def ask_teacher(server: Hostile, **changes: object) -> list[float]:
    settings = teachers.Server(url=server.url, model="m", **changes)
    return ScoringClient(settings).score(IDS).logps.tolist()


def ask_judge(server: Hostile, seconds: float = 30.0, **changes: object) -> float:
    return Judge(JudgeServer(url=server.url, model="m", **changes), seconds).score("good?")


CLIENTS = {
    "teacher": (ask_teacher, UserError, logprobs(*["-1"] * 4), [0, -1, -1, -1, -1]),
    "judge": (ask_judge, JudgeError, words("Score: 7"), 0.7),
}

# -- Teacher and judge -----------------------------------------------------------------------------


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    "begin", [b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: "]
)
def test_a_server_that_drips_is_given_up(client: str, begin: bytes) -> None:
    ask, refusal, _, _ = CLIENTS[client]
    with Hostile(begin, drips=b" " * 40) as server:
        start = time.monotonic()
        with pytest.raises(refusal, match="timed out"):
            ask(server, seconds=0.5, retries=0)
        assert time.monotonic() - start < 5  # it drips for 10 s


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_takes_no_key_to_another_server(
    client: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, refusal, right, _ = CLIENTS[client]
    monkeypatch.setenv("A_KEY", KEY)
    with Hostile(right) as thief:
        head = f"HTTP/1.1 {status} X\r\nLocation: {thief.url}/{KEY}\r\nContent-Length: 0\r\n\r\n"
        with Hostile(head.encode()) as server, pytest.raises(refusal, match="redirect") as raised:
            ask(server, key_variable="A_KEY", retries=0)
        assert thief.keys == []
    assert server.keys == [f"Bearer {KEY}"]
    assert KEY not in str(raised.value)


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    "cut",
    [
        b'HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n{"choices": [{"logpr',
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n20\r\n{",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"",
    ],
)
def test_a_reply_that_was_cut_is_asked_for_again(client: str, cut: bytes) -> None:
    ask, _, right, value = CLIENTS[client]
    with Hostile(cut, right) as server:
        assert ask(server, retries=1) == value


BAD_LOGPS = ["1" * 400, "-" + "1" * 400, "-" + "1" * 5000, "NaN", "Infinity", "-Infinity", "1e999"]
BAD_LOGPS += ["-1e999", "-1e39", "-1e308", "-1e30", "-10001", "0.5", "true", '"-1"', "null", "[-1]"]


@pytest.mark.parametrize("value", BAD_LOGPS, ids=lambda value: value[:9])
def test_a_log_prob_that_is_none_is_refused_in_one_line(value: str) -> None:
    """-1e39 is -inf in float32, and at -1e30 the sum of squares is."""
    with (
        Hostile(logprobs("-1", value, "-1", "-1")) as server,
        pytest.raises(UserError, match=r"^teacher\.url=http.*") as raised,
    ):
        ask_teacher(server, retries=0)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 600


def test_log_probs_within_float32_are_read() -> None:
    with Hostile(logprobs("-9999.0", "0", "-1e-30", "1e-4")) as server:
        logps = ask_teacher(server, retries=0)
    assert logps == pytest.approx([0, -9999, 0, -1e-30, 1e-4])


# The judge's words, and its score out of 10; None: a refusal.
SCORES = {
    "Score: 7": 7,
    "Score: -1": None,
    "Score: −1": None,
    "Score: +7": 7,
    "Score - 7": 7,
    "score-7": 7,
    "Score:\n- 7": 7,
    "Score: **7**": 7,
    "Score: 7.": 7,
    "Score: 7.5.": 7.5,
    "Score: .5": 0.5,
    "Score: 1e400": None,
    "Score: 1e1": 10,
    "Score: 1e2": None,
    "Score: 1e-1": 0.1,
    "Score: 11": None,
    "Score: 10.1": None,
    "Score: 7,5": None,
    "Score: 1,000": None,
    "Score: 7.5.2": None,
    "Score: 10/10": 10,
    "Score: 7 / 10 points": 7,
    "Score: 7 out of 10": 7,
    "Score: 9/100": None,
    "Score: 9 out of 100": None,
    "Score: 7%": None,
    "Score: 3-4": None,
    "Score (0-10)": None,
    "Score: 0x9": None,
    "Score: 7½": None,
    "Score: ٩": None,
    "Score: ９": None,
    "Score: nan": None,
    "Score: 2\nScore: 9": 9,
    "Score: 7\n\n2 remarks follow.": 7,
    "Score: " + "9" * 5000: None,
    "Score: 0." + "9" * 5000: 1,
}


@pytest.mark.parametrize("text", SCORES, ids=lambda text: repr(text)[:20])
def test_the_number_of_a_judge_is_read_whole(text: str) -> None:
    with Hostile(words(text)) as server:
        if SCORES[text] is None:
            with pytest.raises(JudgeError, match="score"):
                ask_judge(server)
        else:
            assert ask_judge(server) == pytest.approx(SCORES[text] / 10)


@pytest.mark.parametrize("pattern", [r"(\d)", r"(\d+)$", r"= *(-?\d+)", r"(?i)score\W*(\d+)"])
def test_no_pattern_cuts_a_number(pattern: str) -> None:
    """Every number is read as the standard library reads it, or refused."""
    settings = JudgeServer(pattern=pattern)
    numbers = [
        "-3",
        "0",
        "3",
        "10",
        "11",
        "42",
        "137",
        "3.25",
        "-0.5",
        "9.99",
        "10.5",
        "2e3",
        "1e-2",
    ]
    for number in numbers:
        text = f"score = {number}"
        try:
            score = read_score(text, settings)
        except JudgeError:
            continue
        assert score == float(number) / 10 and 0 <= score <= 1, number
    assert read_score("score = 7", settings) == 0.7


# -- OpenEnv ---------------------------------------------------------------------------------------

SCHEMAS = {
    "action is text": '{"action": "x"}',
    "action is null": '{"action": null}',
    "action is a list": '{"action": [1]}',
    "action is missing": "{}",
    "properties are a list": '{"action": {"properties": ["a"]}}',
    "a property is text": '{"action": {"properties": {"m": "string"}}}',
    "a property is null": '{"action": {"properties": {"m": null}}}',
    "required is a number": '{"action": {"properties": {"m": {}}, "required": 5}}',
    "required is a list of lists": '{"action": {"properties": {"m": {}}, "required": [[]]}}',
    "required names nothing": '{"action": {"properties": {"m": {}}, "required": ["zz"]}}',
    "a list": "[]",
    "empty": "",
    "HTML": "<html>",
    "deep": "[" * 100_000,
    "null": "null",
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_malformed_schema_is_one_line(schema: str) -> None:
    with (
        Hostile(reply(SCHEMAS[schema])) as server,
        pytest.raises(UserError, match="gives no schema of actions") as raised,
    ):
        url = server.url.removesuffix("/v1")
        openenv.check_url(url)
        openenv.text_field(openenv.action_schema(url))
        openenv.fields_of(url)
    assert "\n" not in str(raised.value)


@pytest.fixture
def no_schemas() -> Iterator[None]:
    yield
    openenv._SCHEMAS.clear()


class Answers(OpenEnvServer):
    """An OpenEnv server that answers the messages of a session with bytes of a test's own."""

    def __init__(self, *answers: bytes, then: bytes = b"") -> None:
        self.answers = answers
        self.then = then  # is sent every few milliseconds
        super().__init__()

    async def _play(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in self.answers:
            await read_frame(reader)
            writer.write(answer)
            await writer.drain()
        for _ in range(1000):
            writer.write(self.then)
            await writer.drain()
            await asyncio.sleep(0.02)


def message(value: JsonValue) -> bytes:
    return frame(0x81, json.dumps(value).encode())


def observed(**changes: JsonValue) -> bytes:
    data = {"observation": {"text": "hello"}, "reward": 0.5, "done": False} | changes
    return message({"type": "observation", "data": data})


ODD_REPLIES = {
    "no JSON": frame(0x81, b"hello"),
    "invalid UTF-8": frame(0x81, b"\xff\xfe"),
    "a list": message([]),
    "data is null": message({"type": "observation", "data": None}),
    "data is missing": message({"type": "observation"}),
    "no observation": message({"type": "observation", "data": {}}),
    "observation is text": observed(observation="x"),
    "observation is a list": observed(observation=[1]),
    "an error without data": message({"type": "error"}),
    "an error of numbers": message({"type": "error", "data": {"code": 5, "errors": [1, 2]}}),
    "an error of lines": message({"type": "error", "data": {"code": "A\nB", "message": "x\ny"}}),
    "another type": message({"type": "state", "data": {}}),
    "deep": frame(0x81, b"[" * 200_000),
    "binary": frame(0x82, b"{}"),
    "masked": b"\x81\x85abcdhello",
    "reserved opcode": frame(0x85, b"x"),
    "continuation first": frame(0x80, b"x"),
    "a length of 2^62": b"\x81\x7f" + (2**62).to_bytes(8, "big"),
    "20 MB": frame(0x81, b" " * 20_000_000),
    "60,000 empty frames": frame(0x01, b"{") + frame(0x00, b"") * 60_000,
    "60,000 pings": frame(0x89, b"") * 60_000,
}


def reset(url: str, seconds: float) -> Observation | str:
    """Returns the result of a reset in an event loop, as a run gets prompts."""
    task = TaskConfig(name="environment", environment=f"openenv:{url}", grade_workers=1)
    task.reward.seconds = seconds
    with Pool(0) as pool:
        reset_it = functools.partial(asyncio_environments.reset, pool, task, {}, 1)
        [result] = pool.gather([reset_it], seconds)
    return result


@pytest.mark.usefixtures("no_schemas")
@pytest.mark.parametrize("odd", ODD_REPLIES)
def test_an_odd_reply_fails_its_episode_in_one_line(
    odd: str, capfd: pytest.CaptureFixture[str]
) -> None:
    server = Answers(ODD_REPLIES[odd])
    reason = reset(server.url, seconds=30.0)
    server.close()
    assert isinstance(reason, str)
    assert "\n" not in reason and "openenv:http" in reason
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.usefixtures("no_schemas")
@pytest.mark.parametrize("reward", ['"0.5"', "[1]", "{}", "1" * 400, "-1e39", "1e308", "NaN"])
def test_a_reward_that_is_no_float32_is_refused(reward: str) -> None:
    step = observed(reward="@").replace(b'"@"', reward.encode())
    step = frame(0x81, step[step.index(b"{") :])

    async def play(url: str) -> None:
        env = openenv.OpenEnv(url)
        assert await env.reset({}, 1) == "hello"
        try:
            await env.step("x")
        finally:
            await env.close()

    server = Answers(observed(), step)
    with pytest.raises(openenv.OpenEnvError) as raised:
        asyncio.run(play(server.url))
    server.close()
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 600


@pytest.mark.usefixtures("no_schemas")
@pytest.mark.parametrize("reward, value", [(True, 1.0), (None, 0.0), (-7, -7.0), (1e30, 1e30)])
def test_a_reward_of_openenv_is_read(reward: JsonValue, value: float) -> None:
    async def play(url: str) -> tuple[str, float, bool]:
        env = openenv.OpenEnv(url)
        await env.reset({}, 1)
        try:
            return await env.step("x")
        finally:
            await env.close()

    server = Answers(observed(), observed(reward=reward))
    assert asyncio.run(play(server.url)) == ("hello", value, False)
    server.close()


FLOODS = {
    "empty frames": frame(0x01, b"{") + frame(0x00, b"") * 60_000,
    "pings": frame(0x89, b"") * 60_000,
    "pongs": frame(0x8A, b"") * 60_000,
    "messages": frame(0x81, b"{}") * 60_000,
}


@pytest.mark.parametrize("flood", FLOODS)
def test_other_episodes_go_on_while_a_server_floods_its_own(flood: str) -> None:
    longest = 0.0  # processor seconds between two turns of the event loop

    async def tick() -> None:
        nonlocal longest
        while True:
            start = time.thread_time()
            await asyncio.sleep(0.01)
            longest = max(longest, time.thread_time() - start)

    async def play(url: str) -> None:
        env = openenv.OpenEnv(url)
        ticking = asyncio.ensure_future(tick())
        try:
            await asyncio.wait_for(env.reset({}, 1), 5)
        finally:
            await env.close()
            ticking.cancel()

    server = Answers(FLOODS[flood])
    with pytest.raises((ConnectionError, openenv.OpenEnvError)):
        asyncio.run(play(server.url))
    server.close()
    assert longest < 0.5


@pytest.mark.parametrize("then", ["nothing", "pings", "messages", "close without an end"])
def test_close_ends_whatever_the_server_does(then: str) -> None:
    sent = {"pings": frame(0x89, b"x" * 99), "messages": observed() * 9}.get(then, b"")
    if then == "close without an end":
        sent = frame(0x88, b"\x03\xe8")

    async def play(url: str) -> float:
        env = openenv.OpenEnv(url)
        await env.reset({}, 1)
        start = time.monotonic()
        await env.close()
        return time.monotonic() - start

    server = Answers(observed(), then=sent)
    seconds = asyncio.run(play(server.url))
    server.close()
    assert seconds < 4  # of CLOSE_SECONDS, on a busy machine
