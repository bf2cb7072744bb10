"""The part `serve` of soak.py: attacks on the HTTP server of a tiny model with random weights.

An attack holds if the server's memory stays within MOST_GROWTH of what it was at the start, /health
is answered within MOST_HEALTH_SECONDS all the while, the attacker gets the answer that it should
get, and an honest request is answered afterwards.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
from soak_health import HealthRecord
from soak_outcomes import MEBIBYTE, Outcome

from jzero.model import huggingface, qwen, tokenizer

ROOT = Path(__file__).resolve().parents[1]
MOST_GROWTH = 1024 * MEBIBYTE
MOST_HEALTH_SECONDS = 10.0
SETTLE_SECONDS = 120.0  # within which an honest request is answered after an attack
HOST = "127.0.0.1"
SETTINGS = [
    "--config.model.dtype=float32",
    "--config.rollout.max_prompt_tokens=256",
    "--config.rollout.max_new_tokens=256",
    "--config.rollout.num_slots=16",
    "--config.rollout.kv_dtype=float32",
]
LAST_CHUNK = b"0\r\n\r\n"  # of an answer whose length was not announced
REFUSALS = (400, 413, 429, 503)


@dataclass(frozen=True)
class Target:
    """The server under attack."""

    process: subprocess.Popen
    port: int
    model: str
    health: HealthRecord

    def memory(self) -> int:
        """Returns the resident bytes of the server."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def body(self, **fields: object) -> bytes:
        """Returns the body of a request."""
        return json.dumps({"model": self.model, **fields}).encode()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(HOST, self.port)

    async def ask(self, body: bytes, leave_after: float | None = None) -> int:
        """Posts a completion. Returns the status, or 0 if there was none.

        With `leave_after` the client leaves after so many seconds, whatever has come.
        """
        reader, writer = await self.connect()
        try:
            with contextlib.suppress(ConnectionError, EOFError, TimeoutError):
                async with asyncio.timeout(leave_after or SETTLE_SECONDS):
                    writer.write(post(len(body)) + body)
                    await writer.drain()
                    return await read_answer(reader)
            if leave_after is not None:
                return 0
            # A server that refuses a body may close the connection while the body is being sent.
            with contextlib.suppress(ConnectionError, EOFError, TimeoutError):
                async with asyncio.timeout(1):
                    return await read_answer(reader)
            return 0
        finally:
            writer.transport.abort()


def post(num_bytes: int) -> bytes:
    """Returns the head of a request for a completion."""
    return (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {num_bytes}\r\n\r\n"
    ).encode()


async def read_answer(reader: asyncio.StreamReader) -> int:
    """Reads an answer. Returns its status, or 0 if the server closed the connection without one."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = await reader.readline()
        if not line:
            return 0
        head += line
    length = re.search(rb"content-length: (\d+)", head.lower())
    if length:
        await reader.readexactly(int(length[1]))
    else:
        end = b""
        while not end.endswith(LAST_CHUNK):
            piece = await reader.read(1 << 16)
            if not piece:
                return 0  # the server broke the answer off
            end = (end + piece)[-len(LAST_CHUNK) :]
    return int(head.split()[1])


def unexpected(statuses: list[int], expected: tuple[int, ...]) -> str:
    """Returns what is wrong with the statuses of answers."""
    wrong = sorted({status for status in statuses if status not in expected})
    return f"answers had the status {wrong}, not {list(expected)}" if wrong else ""


# -- the attacks ----------------------------------------------------------------------------------


async def too_many_sequences(target: Target) -> str:
    body = target.body(prompt=["abcde"] * 5000, n=16, max_tokens=200, stream=True)
    left = [target.ask(body, leave_after=1.6) for _ in range(3)]
    await asyncio.gather(*left)
    return unexpected([await target.ask(body)], (400,))


async def most_sequences_and_leave(target: Target) -> str:
    """As many sequences as a request may have, of clients that leave: nothing stays behind."""
    body = target.body(prompt=["abcde"] * 16, n=16, max_tokens=200, stream=True)
    await asyncio.gather(*(target.ask(body, leave_after=0.2 + 0.05 * i) for i in range(40)))
    return ""


async def long_prompts(target: Target) -> str:
    statuses = [
        await target.ask(target.body(prompt="3 + 4 = " * (megabytes * 125_000)))
        for megabytes in (20, 60)
    ]
    return unexpected(statuses, (413,))


async def long_prompts_that_leave(target: Target) -> str:
    body = target.body(prompt="3 + 4 = " * 2_500_000)
    await asyncio.gather(*(target.ask(body, leave_after=0.3) for _ in range(4)))
    return ""


async def largest_bodies(target: Target) -> str:
    """Bodies just below the limit: long texts, many texts, and elements that are all wrong."""
    prompts: list[object] = [
        "3 + 4 = " * 125_000,
        ["3 + 4 = " * 480] * 250,
        [1.5] * 200_000,
        [[1.5] * 90] * 2000,
    ]
    bodies = [target.body(prompt=prompt) for prompt in prompts] * 8
    return unexpected(await asyncio.gather(*map(target.ask, bodies)), REFUSALS)


async def slow_sockets(target: Target) -> str:
    """300 connections that send nothing, half a head, or half a body; all are closed in time."""
    begun = [b"", post(100)[:40], post(100) + b"abc"]
    connections = [await target.connect() for _ in range(300)]
    for i, (_, writer) in enumerate(connections):
        writer.write(begun[i % len(begun)])
    failure = unexpected([await target.ask(target.body(prompt="a"))], (200,))
    try:
        async with asyncio.timeout(60):
            await asyncio.gather(*(ignore_reset(reader) for reader, _ in connections))
    except TimeoutError:
        failure = failure or "slow connections were open after a minute"
    for _, writer in connections:
        writer.transport.abort()
    return failure


async def ignore_reset(reader: asyncio.StreamReader) -> None:
    """Reads until the server closes the connection, in whatever way."""
    with contextlib.suppress(ConnectionError):
        await reader.read()


async def a_thousand_at_once(target: Target) -> str:
    bodies = [target.body(prompt="a", max_tokens=8, stream=i % 2 == 0) for i in range(1000)]
    return unexpected(await asyncio.gather(*map(target.ask, bodies)), (200,))


async def leaving_clients(target: Target) -> str:
    body = target.body(prompt="a", max_tokens=200, stream=True)
    await asyncio.gather(*(target.ask(body, leave_after=0.01 * (i % 100)) for i in range(300)))
    return ""


async def clients_that_do_not_read(target: Target) -> str:
    body = target.body(prompt=["a"] * 2, max_tokens=200, stream=True, logprobs=0)
    opened = []
    for _ in range(50):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((HOST, target.port))
        client.sendall(post(len(body)) + body)
        opened.append(client)
    failure = unexpected([await target.ask(target.body(prompt="a"))], (200,))
    for client in opened:
        client.close()
    return failure


async def a_second_server(target: Target) -> str:
    """On the same port, and on one that does not exist: one line and status 2."""
    failures = []
    for port in (target.port, 99999):
        done = await asyncio.to_thread(run_server, target.model, port)
        if done is None or done.returncode != 2 or done.stderr.count("\n") != 1:
            found = "nothing" if done is None else f"status {done.returncode}"
            failures.append(f"a second server on port {port} ended with {found}")
    return "; ".join(failures)


def run_server(model: str, port: int) -> subprocess.CompletedProcess | None:
    """Runs a server that should end at once. Returns None if it does not."""
    try:
        return subprocess.run(
            server_command(model, port), cwd=ROOT, capture_output=True, text=True, timeout=120
        )
    except subprocess.TimeoutExpired:
        return None


ATTACKS: dict[str, Callable[[Target], Awaitable[str]]] = {
    "5,000 prompts x n=16, clients leave": too_many_sequences,
    "40 requests of 256 sequences, clients leave": most_sequences_and_leave,
    "a 20 MB and a 60 MB prompt": long_prompts,
    "20 MB prompts, clients leave": long_prompts_that_leave,
    "32 bodies of almost 1 MiB": largest_bodies,
    "300 slow sockets": slow_sockets,
    "1,000 concurrent": a_thousand_at_once,
    "300 leaving clients": leaving_clients,
    "50 clients that do not read": clients_that_do_not_read,
    "a taken port, port 99999": a_second_server,
}


# -- the part -------------------------------------------------------------------------------------


def attack(directory: Path, deadline: float) -> Iterator[Outcome]:
    """Repeats the attacks on one server until the deadline, and ends the server by TERM at last."""
    with running_server(directory) as target:
        settle(target)
        memory_at_start = target.memory()
        while True:
            for name in ATTACKS:
                yield attack_once(target, name, memory_at_start)
                if target.process.poll() is not None:
                    return
            if time.monotonic() > deadline:
                break
        yield end_by_term(target)


def attack_once(target: Target, name: str, memory_at_start: int) -> Outcome:
    """Makes one attack, and judges it."""
    before = target.memory()
    start = time.monotonic()
    with watched_memory(target) as most:
        failures = [asyncio.run(run_attack(ATTACKS[name], target)), settle(target)]
        worst = target.health.worst(start)
    if worst > MOST_HEALTH_SECONDS:
        failures.append(f"/health took {worst:.1f} s")
    if most[0] - memory_at_start > MOST_GROWTH:
        failures.append(f"the memory grew to {most[0] / MEBIBYTE:,.0f} MiB")
    failure = "; ".join(filter(None, failures))
    return Outcome(name, before, current_memory(target), worst, failure)


async def run_attack(attack_target: Callable[[Target], Awaitable[str]], target: Target) -> str:
    """Returns what is wrong with the answers that an attacker got."""
    try:
        return await attack_target(target)
    except OSError as error:
        return f"the attacker met {type(error).__name__}: {error}"


def settle(target: Target) -> str:
    """Waits until an honest request is answered. Returns what is wrong if it is not."""
    body = target.body(prompt="3 + 4 = ", max_tokens=8)
    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if asyncio.run(target.ask(body)) == 200:
                return ""
        if target.process.poll() is not None:
            return f"the server ended with status {target.process.returncode}"
        time.sleep(0.5)
    return "no honest request was answered afterwards"


def end_by_term(target: Target) -> Outcome:
    """Sends TERM while a stream runs. The stream has to finish, and the server to end."""

    async def stream_and_stop() -> str:
        reader, writer = await target.connect()
        body = target.body(prompt="a", n=16, max_tokens=200, stream=True)
        writer.write(post(len(body)) + body)
        await reader.readuntil(b"data: ")
        target.process.send_signal(signal.SIGTERM)
        text = await reader.read()
        writer.close()
        return "" if b"data: [DONE]" in text else "TERM cut a stream"

    before = current_memory(target)
    failure = asyncio.run(run_attack(lambda _: stream_and_stop(), target))
    try:
        target.process.wait(60)
    except subprocess.TimeoutExpired:
        failure = failure or "the server did not end"
    return Outcome("TERM while a stream runs", before, None, None, failure)


def current_memory(target: Target) -> int | None:
    """Returns the resident bytes of the server, or None if it has ended."""
    return target.memory() if target.process.poll() is None else None


@contextlib.contextmanager
def watched_memory(target: Target) -> Iterator[list[int]]:
    """Yields a list whose only element is the most memory that the server has had meanwhile."""
    most = [0]
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.1):
            with contextlib.suppress(OSError, IndexError):
                most[0] = max(most[0], target.memory())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        is_over.set()
        thread.join()


@contextlib.contextmanager
def running_server(directory: Path) -> Iterator[Target]:
    """Starts a server of a tiny model, and the process that asks for its /health."""
    model = save_tiny_model(directory / "model")
    port = free_port()
    record = HealthRecord(directory / "health.txt")
    asker = str(Path(__file__).with_name("soak_health.py"))
    with (
        (directory / "server.log").open("w") as log,
        subprocess.Popen(server_command(model, port), cwd=ROOT, stdout=log, stderr=log) as server,
    ):
        try:
            wait_until_open(server, port)
            with subprocess.Popen(
                [sys.executable, asker, HOST, str(port), str(record.path)]
            ) as health:
                try:
                    yield Target(server, port, model, record)
                finally:
                    health.kill()
        finally:
            server.kill()


def server_command(model: str, port: int) -> list[str]:
    """Returns the command that serves a model."""
    return [sys.executable, "-m", "jzero.serve", "--model", model, "--port", str(port), *SETTINGS]


def wait_until_open(server: subprocess.Popen, port: int) -> None:
    """Waits until the server accepts connections."""
    while server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
            return
        time.sleep(0.2)
    raise RuntimeError(
        f"the server ended with status {server.returncode} before it accepted connections"
    )


def free_port() -> int:
    """Returns a port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        return taken.getsockname()[1]


def save_tiny_model(path: Path) -> str:
    """Writes a model with random weights and the countdown tokenizer. Returns its directory."""
    text_tokenizer = tokenizer.countdown()
    model = qwen.QwenConfig("qwen2", len(text_tokenizer), 32, 64, 2, 2, 1, 16, True, 10000.0, 1e-6)
    params = qwen.init(model, jax.random.key(0))
    huggingface.save(path, model, params, dtype="float32", hf_config_extra={})
    text_tokenizer.save_pretrained(path)
    return str(path)
