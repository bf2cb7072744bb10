"""Hostile servers against every client of jzero: teacher, judge, sandbox, OpenEnv, generate.

    python tests/attacks/hostile_servers.py            # limits of 2 s, longer floods
    python tests/attacks/hostile_servers.py --quick    # limits of 0.5 s, as the test has them

A server on 127.0.0.1 answers each client in every hostile way that this file knows: bytes that
drip, redirects, cut, endless, compressed and malformed replies, statuses, wrong types at every
place of a right reply, hostile numbers, and, over OpenEnv's WebSocket, floods, pings and broken
frames. The clients are the real ones, with an API key where they have one.

It prints a table of kinds x clients, and the counts of cases that ended in each of these ways:

    traceback   an exception that is no one-line error of the client
    hang        no end within the deadline of all tries and one second
    accepted    a wrong reply was taken for a right one, or a right one was refused
    leaked      the API key arrived at another server, in an error message, or in the log
    followed    a request arrived at the target of a redirect

It exits with 1 if one of the counts is not 0, or if OpenEnv's event loop computed for half a second
without a pause, while which all other episodes would stand still. This time is processor time, so
that other programs of the machine do not count.
"""

import argparse
import asyncio
import contextlib
import io
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from hostile_http import (
    ANSWERED,
    HARMLESS,
    HTTP_KINDS,
    KEY,
    REFUSED,
    RIGHT,
    SESSION,
    Handler,
    Server,
    mutants,
    text,
)
from hostile_websocket import HANDSHAKES, MESSAGE, over_websocket, websocket_kinds, ws_step

from jzero import config, http, websocket
from jzero.config import JudgeServer, teachers
from jzero.distillation.server import ScoringClient
from jzero.environments import openenv
from jzero.errors import UserError
from jzero.generation import servers as generation_servers
from jzero.sandbox.client import Limits, Program, SandboxError
from jzero.sandbox.remote import RemoteSandbox
from jzero.types import Problem
from jzero.workers.judge import Judge, JudgeError

KEY_VARIABLE = "JZERO_ATTACKED_KEY"
LONGEST_PAUSE = 0.05  # seconds between two tries; a run waits for up to a minute
MOST_STANDSTILL = 0.5  # seconds for which OpenEnv's event loop may compute without a pause
PATIENCE = 20.0  # seconds of an exchange that the server ends
WAITING_THREADS, THREADS = 64, 8  # for clients that wait, and for those that compute
SESSIONS = 24  # of OpenEnv at the same time
HELD = "ok"

# Kinds that only the client's deadline ends.
WAITING = {kind for kind in HTTP_KINDS if kind.startswith("drip") or kind == "silence"} | {
    "ws bytes that drip",
    "ws silence",
    "ws handshake silence",
    "ws handshake drip",
}

# -- The clients -----------------------------------------------------------------------------------

Call = Callable[[str, float], object]  # address, seconds of an exchange -> the value that is read


def ask_teacher(url: str, seconds: float) -> object:
    settings = teachers.Server(
        url=url, model="m", seconds=seconds, retries=1, key_variable=KEY_VARIABLE
    )
    return ScoringClient(settings).score([1, 2, 3, 4]).logps.tolist()


def ask_judge(url: str, seconds: float) -> object:
    settings = JudgeServer(url=url, model="m", retries=1, key_variable=KEY_VARIABLE)
    return Judge(settings, seconds).score("How good is 4?")


def ask_sandbox(url: str, seconds: float) -> object:
    half = seconds / 2
    outcome = RemoteSandbox(url, "piston", half).run(Program("print(1)"), Limits(wall_seconds=half))
    return outcome.end, outcome.status, outcome.stdout, outcome.stderr


def ask_openenv(url: str, seconds: float) -> object:
    return openenv.text_field(openenv.action_schema(url, seconds))


def ask_generate(url: str, seconds: float) -> object:
    server = generation_servers.Server(
        url, generation_servers.ServerOptions("m", seconds, retries=1), config.Config()
    )
    with contextlib.closing(server):
        try:
            return server.ask(Problem("1", "math", "2 + 2?", {"answer": "4"}), 0)
        except http.RemoteError as error:  # the command writes it into a row, or ends with it
            raise UserError(str(error)) from None


CLIENTS: dict[str, Call] = {
    "teacher": ask_teacher,
    "judge": ask_judge,
    "sandbox": ask_sandbox,
    "openenv": ask_openenv,
    "generate": ask_generate,
}
WITH_KEY = ("teacher", "judge", "generate")
TRIES = {"sandbox": 3, "openenv": 3}  # of the others 2
ONE_LINE_ERRORS = (UserError, JudgeError, SandboxError)

# -- Cases and outcomes ----------------------------------------------------------------------------


async def play_session(url: str, seconds: float) -> object:
    """Resets, takes a step and closes, with the limits of `environments.asyncio_environments`."""
    environment = openenv.OpenEnv(url)
    try:
        observation = await asyncio.wait_for(environment.reset({}, 1), seconds)
        return observation, await asyncio.wait_for(environment.step("x"), seconds)
    finally:
        await environment.close()


@dataclass(frozen=True)
class Case:
    """One client against one kind of server."""

    kind: str
    client: str
    url: str
    expected: str
    seconds: float  # of one exchange
    slack: float  # seconds for which a busy machine may keep the client from ending in time

    @property
    def is_waiting(self) -> bool:
        """Whether only the client's deadline ends the exchange."""
        return self.kind in WAITING

    @property
    def deadline(self) -> float:
        """Seconds after which the client has to be done with all of its tries."""
        if self.client == SESSION:  # reset, step and close
            return 2 * self.seconds + websocket.CLOSE_SECONDS + self.slack
        return TRIES.get(self.client, 2) * (self.seconds + LONGEST_PAUSE) + self.slack


@dataclass
class Result:
    """How many cases ended in each way, and the lines that tell about those that failed."""

    counts: Counter[str] = field(default_factory=Counter)
    cells: dict[tuple[str, str], list[str]] = field(default_factory=dict)  # by kind and client
    failures: list[str] = field(default_factory=list)
    standstill: float = 0.0  # processor seconds between two turns of the event loop
    seconds: float = 0.0

    def add(self, case: Case, outcome: str, words: str) -> None:
        self.counts[outcome] += 1
        kind = case.kind.split(": ")[0]
        self.cells.setdefault((kind, case.client), []).append(outcome)
        if outcome != HELD:
            self.failures.append(f"{outcome}: {case.client}, {case.kind}: {words}")

    @property
    def has_held(self) -> bool:
        return not self.failures and self.standstill <= MOST_STANDSTILL


def judge_end(case: Case, value: object, right: object, seconds: float) -> tuple[str, str]:
    """Returns the outcome of a case, and words about it. `value` may be an exception."""
    words = f"{type(value).__name__}: {value}"
    if KEY in words and case.client in WITH_KEY:
        return "leaked", words.replace(KEY, "(the key)")
    if seconds > case.deadline:
        return "hang", f"{seconds:.1f} s of {case.deadline:.1f} s, {words}"
    is_refusal = isinstance(value, ONE_LINE_ERRORS)
    if case.client == SESSION:
        # Those of the environment's own, and those that its pool tries again.
        refusals = (openenv.OpenEnvError, ConnectionError, TimeoutError, UserError)
        is_refusal = isinstance(value, refusals)
    if isinstance(value, BaseException) and not is_refusal:
        return "traceback", words
    if is_refusal and "\n" in str(value):
        return "traceback", f"several lines: {words}"
    if is_refusal:
        return (HELD, words) if case.expected != ANSWERED else ("accepted", f"refused: {words}")
    if case.expected == ANSWERED:
        return HELD, words
    # A value that stands where nothing is read may be anything.
    is_harmless = case.expected != REFUSED and value == right
    return (HELD if is_harmless else "accepted"), words


def all_cases(server: Server, seconds: float, slack: float, times: int, stride: int) -> list[Case]:
    """Returns the cases of HTTP and of OpenEnv's sessions; the arguments are those of `attack`."""
    cases = []

    def add(kind: str, client: str, handler: Handler, expected: str) -> None:
        url = server.add(client, handler)
        limit = seconds if kind in WAITING else PATIENCE
        cases.append(Case(kind, client, url, expected, limit, slack))

    for client in CLIENTS:
        for kind, (handler, expected) in HTTP_KINDS.items():
            add(kind, client, handler, expected)
        for name, reply in list(mutants(client, RIGHT[client]))[::stride]:
            add(f"wrong types and numbers: {name}", client, text(reply.encode()), HARMLESS)
    for kind, (handler, expected) in websocket_kinds(times).items():
        add(kind, SESSION, over_websocket(handler), expected)
    for kind, (handler, expected) in HANDSHAKES.items():
        add(kind, SESSION, over_websocket(handler, shakes_hands=False), expected)
    for name, reply in list(mutants(SESSION, MESSAGE))[::stride]:
        handler = over_websocket(ws_step(reply.encode()))
        add(f"ws wrong types and numbers: {name}", SESSION, handler, HARMLESS)
    return cases


def run_http(cases: list[Case], result: Result) -> None:
    """Runs the cases of HTTP, many at the same time."""
    right = {}
    for case in cases:
        if case.kind == "right":
            right[case.client] = CLIENTS[case.client](case.url, case.seconds)

    def run(case: Case) -> tuple[object, float]:
        start = time.monotonic()
        try:
            value = CLIENTS[case.client](case.url, case.seconds)
        except Exception as error:  # whatever it is, it is counted
            value = error
        return value, time.monotonic() - start

    waiting = [case for case in cases if case.is_waiting]
    others = [case for case in cases if not case.is_waiting]
    for some, count in ((waiting, WAITING_THREADS), (others, THREADS)):
        with ThreadPoolExecutor(count) as threads:
            for case, (value, seconds) in zip(some, threads.map(run, some), strict=True):
                result.add(case, *judge_end(case, value, right.get(case.client), seconds))


async def run_sessions(cases: list[Case], result: Result) -> None:
    """Plays the sessions of OpenEnv, all in one event loop, whose standstill is measured."""

    async def measure() -> None:
        while True:
            start = time.thread_time()
            await asyncio.sleep(0.01)
            result.standstill = max(result.standstill, time.thread_time() - start)

    playing = asyncio.Semaphore(SESSIONS)

    async def run(case: Case) -> tuple[object, float]:
        async with contextlib.AsyncExitStack() as stack:
            if not case.is_waiting:
                await stack.enter_async_context(playing)
            await asyncio.to_thread(openenv.action_schema, case.url)
            start = time.monotonic()
            try:
                value: object = await play_session(case.url, case.seconds)
            except Exception as error:  # whatever it is, it is counted
                value = error
            return value, time.monotonic() - start

    [first] = [case for case in cases if case.kind == "ws right"]
    right, _ = await run(first)
    measuring = asyncio.ensure_future(measure())
    for is_waiting in (True, False):
        some = [case for case in cases if case.is_waiting == is_waiting]
        ends = await asyncio.gather(*(run(case) for case in some))
        for case, (value, seconds) in zip(some, ends, strict=True):
            result.add(case, *judge_end(case, value, right, seconds))
    measuring.cancel()


def attack(seconds: float, slack: float, times: int, stride: int = 1) -> Result:
    """Runs all cases, and of the replies with one wrong value every `stride`-th.

    Args:
        seconds: Limit of an exchange that only the client's deadline ends.
        slack: Seconds that a busy machine may add to the deadline of all tries.
        times: How much longer floods are than their shortest form.
        stride: 1 for all wrong values.
    """
    result = Result()
    start = time.monotonic()
    thief = Server()
    server = Server(thief.port)
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger().addHandler(handler)
    pause, http.LONGEST_PAUSE = http.LONGEST_PAUSE, LONGEST_PAUSE
    os.environ[KEY_VARIABLE] = os.environ["OPENAI_API_KEY"] = KEY
    try:
        with contextlib.redirect_stderr(log):
            cases = all_cases(server, seconds, slack, times, stride)
            run_http([case for case in cases if case.client != SESSION], result)
            sessions = [case for case in cases if case.client == SESSION]
            asyncio.run(run_sessions(sessions, result))
    finally:
        http.LONGEST_PAUSE = pause
        del os.environ[KEY_VARIABLE], os.environ["OPENAI_API_KEY"]
        logging.getLogger().removeHandler(handler)
        server.close()
        thief.close()
    for head in thief.seen:
        is_leak = KEY.encode() in b"".join(
            line for line in head.split(b"\r\n") if line.lower().startswith(b"authorization")
        )
        result.failures.append(f"{'leaked' if is_leak else 'followed'}: {head[:80]!r}")
        result.counts["leaked" if is_leak else "followed"] += 1
    for outcome, sign in (("leaked", KEY), ("traceback", "Traceback (most recent call last)")):
        if sign in log.getvalue():
            place = log.getvalue().index(sign)
            result.counts[outcome] += 1
            result.failures.append(f"{outcome} in the log: {log.getvalue()[place : place + 2000]}")
    result.seconds = time.monotonic() - start
    return result


def table(result: Result) -> str:
    """Returns a Markdown table of kinds x clients."""
    clients = [*CLIENTS, SESSION]
    lines = [f"| kind | {' | '.join(clients)} |", f"|---|{'---|' * len(clients)}"]
    for kind in dict.fromkeys(kind for kind, _ in result.cells):
        cells = []
        for client in clients:
            ends = result.cells.get((kind, client), [])
            bad = Counter(end for end in ends if end != HELD)
            held = HELD if len(ends) == 1 else f"{len(ends)} {HELD}"
            words = ", ".join(f"{count} {end}" for end, count in bad.items())
            cells.append((words or held) if ends else "")
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short limits, as the test has them")
    quick = parser.parse_args().quick
    result = attack(0.5, 5.0, 1) if quick else attack(2.0, 1.0, 5)
    print(table(result))
    for failure in result.failures:
        print(failure[:1000])
    ways = ("traceback", "hang", "accepted", "leaked", "followed")
    counts = ", ".join(f"{way} {result.counts[way]}" for way in ways)
    print(f"{sum(map(len, result.cells.values()))} cases in {result.seconds:.1f} s: {counts}")
    print(f"OpenEnv's event loop computed for at most {result.standstill:.2f} s without a pause")
    sys.exit(not result.has_held)


if __name__ == "__main__":
    main()
