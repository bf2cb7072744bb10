"""Environments and rewards that do everything wrong, for `hostile_episodes.py` next to this file.

An episode's row names its kind: `row["kind"]` is a key of KINDS. `Hostile` is for grader processes,
and `AsyncHostile` for the event loop. A kind is a function of the environment, which `step` calls.
"""

import asyncio
import ctypes
import gc
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

OBSERVATION = "begin"
FINE = ("go on", 0.5, False)
BIG = 50_000_000
Result = Any
Kind = Callable[["Base"], Result]


class Endless(Mapping[str, float]):
    def __getitem__(self, key: str) -> float:
        return 1.0

    def __iter__(self) -> Iterator[str]:
        number = 0
        while True:
            number += 1
            yield str(number)

    def __len__(self) -> int:
        return 1


class Liar:
    def __float__(self) -> float:
        raise OSError("no number\nhere")

    def __repr__(self) -> str:
        raise SystemExit("no text")


class Mute(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class Own(BaseException):
    pass


class Text(str):
    def __str__(self) -> str:
        raise ValueError("no text")


def fail(error: BaseException) -> NoReturn:
    raise error


def numbers() -> Iterator[Result]:
    yield FINE


def recursive_list() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


def many_within_each_other() -> list[Any]:
    """A list with 10^9 items, of which 90 exist."""
    items: list[Any] = ["x"]
    for _ in range(9):
        items = [items] * 10
    return items


def deep(depth: int) -> list[Any]:
    items: list[Any] = []
    for _ in range(depth):
        items = [items]
    return items


def message(**more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "x", **more}]


def reply(value: Any) -> Kind:
    return lambda environment: (value(), 0.5, False)


def reward(value: Any) -> Kind:
    return lambda environment: ("go on", value(), False)


def raising(make: Callable[[], BaseException]) -> Kind:
    return lambda environment: fail(make())


def returning(make: Callable[[], Any]) -> Kind:
    return lambda environment: make()


def sockets() -> list[int]:
    """Returns the open files of this process that are sockets."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket"):
                found.append(int(name))
        except OSError:
            continue
    return found


def write_to_sockets(data: bytes) -> None:
    for number in sockets():
        try:
            os.set_blocking(number, True)
            os.write(number, data)
        except OSError:
            continue


def with_length(text: str) -> bytes:
    return struct.pack("!Q", len(text)) + text.encode()


def forge_pipe(text: str) -> Kind:
    def step(environment: "Base") -> Result:
        write_to_sockets(with_length(text))
        return FINE

    return step


def promise_bytes(environment: "Base") -> Result:
    write_to_sockets(struct.pack("!Q", 60 << 20) + b"x")
    time.sleep(1000)


def promise_terabytes(environment: "Base") -> Result:
    write_to_sockets(struct.pack("!Q", 1 << 40))
    time.sleep(1000)


def flood_pipe(environment: "Base") -> Result:
    stage = with_length(json.dumps(["stage", True, "", 1000.0, 0.0, False]))
    while True:
        write_to_sockets(stage * 100)


def read_pipe(environment: "Base") -> Result:
    for number in sockets():
        threading.Thread(target=drain, args=(number,), daemon=True).start()
    return FINE


def drain(number: int) -> None:
    while True:
        socket.socket(fileno=os.dup(number)).recv(1)


def close_files(environment: "Base") -> Result:
    os.closerange(3, 256)
    return FINE


def leave_child(environment: "Base") -> Result:
    if os.fork() == 0:
        time.sleep(1000)
        os._exit(0)
    return FINE


def leave_daemon(environment: "Base") -> Result:
    """Leaves a process of a session of its own, whose parent has ended."""
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        os._exit(0)
    os.waitpid(child, 0)
    return FINE


def leave_program(environment: "Base") -> Result:
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return FINE


def leave_shell(environment: "Base") -> Result:
    subprocess.run(["sh", "-c", "setsid sleep 1000 & setsid sleep 1000 &"], check=True)
    return FINE


def fork_without_end(environment: "Base") -> Result:
    """Forks processes that wait: at most 500, for the sake of the machine."""
    for _ in range(500):
        if os.fork() == 0:
            time.sleep(100)
            os._exit(0)
    time.sleep(1000)


def fork_and_take_memory(environment: "Base") -> Result:
    for _ in range(4):
        if os.fork() == 0:
            block = bytearray(400 << 20)
            block[:: 1 << 12] = b"x" * len(block[:: 1 << 12])
            time.sleep(100)
            os._exit(len(block) % 2)
    time.sleep(1000)


def take_memory(environment: "Base") -> Result:
    environment.kept = [bytes(1 << 26) for _ in range(200)]
    return FINE


def leave_thread(environment: "Base") -> Result:
    threading.Thread(target=time.sleep, args=(1000,)).start()
    return FINE


def leave_busy_thread(environment: "Base") -> Result:
    def spin() -> None:
        end = time.monotonic() + 5
        while time.monotonic() < end:
            pass

    threading.Thread(target=spin, daemon=True).start()
    return FINE


def leave_many_threads(environment: "Base") -> Result:
    for _ in range(300):
        threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
    return FINE


def sleep(environment: "Base") -> Result:
    time.sleep(1000)


def spin(environment: "Base") -> Result:
    while True:
        pass


def nest(environment: "Base") -> Result:
    return nest(environment)


def overflow_stack(environment: "Base") -> Result:
    sys.setrecursionlimit(1 << 30)
    items = deep(2_000_000)
    return repr(items)


def send(pid: Callable[[], int], number: int) -> Kind:
    def step(environment: "Base") -> Result:
        os.kill(pid(), number)
        time.sleep(0.5)
        return FINE

    return step


def print_much(environment: "Base") -> Result:
    print("y" * 30_000_000)
    print("z" * 30_000_000, file=sys.stderr)
    return FINE


def write_much(number: int) -> Kind:
    def step(environment: "Base") -> Result:
        for _ in range(30):
            os.write(number, b"y" * 1_000_000)
        return FINE

    return step


def close_streams(environment: "Base") -> Result:
    sys.stdout.close()
    sys.stdout = None  # type: ignore[assignment]
    sys.stderr = None  # type: ignore[assignment]
    return FINE


def patch_json(environment: "Base") -> Result:
    json.dumps = json.loads = None  # type: ignore[assignment]
    return FINE


def patch_builtins(environment: "Base") -> Result:
    import builtins

    builtins.isinstance = builtins.len = None  # type: ignore[assignment]
    return FINE


def ignore_timers(environment: "Base") -> Result:
    signal.signal(signal.SIGPROF, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_PROF, 0)
    return FINE


def take_away_limits(environment: "Base") -> Result:
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    return FINE


def clear_environment(environment: "Base") -> Result:
    os.environ.clear()
    sys.path.clear()
    gc.disable()
    return FINE


def lose_folder(environment: "Base") -> Result:
    import tempfile

    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)
    return FINE


def crash(environment: "Base") -> Result:
    ctypes.string_at(0)


def change_reply_later(environment: "Base") -> Result:
    messages = message()
    environment.kept = messages
    return messages, 0.5, False


def change_row(environment: "Base") -> Result:
    environment.row.clear()
    return FINE


def change_own_tasks(environment: "Base") -> Result:
    """Cancels all tasks of the event loop, if there is one."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise asyncio.CancelledError from None
    for task in asyncio.all_tasks(loop):
        task.cancel()
    return FINE


def stop_loop(environment: "Base") -> Result:
    try:
        asyncio.get_running_loop().stop()
    except RuntimeError:
        raise StopAsyncIteration from None
    return FINE


def leave_failing_task(environment: "Base") -> Result:
    async def fail_later() -> None:
        raise SystemExit(3)

    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise SystemExit(3) from None
    environment.kept = loop.create_task(fail_later())
    return FINE


def named_anew(environment: "Base") -> Result:
    kind = type("Error" + "x" * 100_000 + "\n", (Exception,), {})
    raise kind("new")


class Case:
    """A kind, and what has to become of it: the beginning of a reason, or "" if it is played."""

    def __init__(self, step: Kind, reason: str = "error:", ends_process: bool = False) -> None:
        self.step = step
        self.reason = reason
        self.ends_process = ends_process  # of the run, in asyncio mode


def _cases() -> dict[str, Case]:
    played = ""
    values = {
        # Replies.
        "reply of 50 MB": Case(reply(lambda: "x" * BIG)),
        "reply of 1 byte too many": Case(reply(lambda: "x" * 262_145)),
        "reply too long in UTF-8 only": Case(reply(lambda: "é" * 200_000)),
        "longest reply": Case(reply(lambda: "x" * 262_144), played),
        "reply in bytes": Case(reply(lambda: b"x")),
        "reply of a number": Case(reply(lambda: 5)),
        "no reply": Case(reply(lambda: None)),
        "generator as reply": Case(reply(numbers)),
        "pair of surrogates": Case(reply(lambda: "\ud800\udfff"), played),
        "lone surrogate": Case(reply(lambda: "\ud800"), played),
        "control characters": Case(reply(lambda: "\0\x1b[31m\r\n\u2028"), played),
        "subclass of str": Case(reply(lambda: Text("x")), played),
        "no messages": Case(reply(list)),
        "message without content": Case(reply(lambda: [{"role": "user"}])),
        "message with a number": Case(reply(lambda: [{"role": "user", "content": 1}])),
        "unknown role": Case(reply(lambda: [{"role": "evil", "content": "x"}]), played),
        "list in itself": Case(reply(recursive_list)),
        "message with a list in itself": Case(reply(lambda: message(more=recursive_list()))),
        "deep message": Case(reply(lambda: message(more=deep(900)))),
        "very deep message": Case(reply(lambda: message(more=deep(200_000)))),
        "a billion items of 90": Case(reply(lambda: message(more=many_within_each_other()))),
        "message with NaN": Case(reply(lambda: message(more=float("nan")))),
        "message with a long integer": Case(reply(lambda: message(more=10**5000))),
        "message with an object": Case(reply(lambda: message(more=Liar()))),
        "message with a number as key": Case(reply(lambda: [{"role": "u", "content": "", 1: 2}])),
        "a million messages": Case(reply(lambda: message() * 1_000_000)),
        "message of 50 MB": Case(reply(lambda: [{"role": "user", "content": "x" * BIG}])),
        # Rewards.
        "NaN": Case(reward(lambda: float("nan"))),
        "inf": Case(reward(lambda: float("inf"))),
        "minus inf": Case(reward(lambda: float("-inf"))),
        "minus 1e308": Case(reward(lambda: -1e308)),
        "1e30": Case(reward(lambda: 1e30)),
        "1e9": Case(reward(lambda: 1e9), played),
        "400 digits": Case(reward(lambda: 10**400)),
        "True": Case(reward(lambda: True), played),
        "text as reward": Case(reward(lambda: "1.0")),
        "bytearray as reward": Case(reward(lambda: bytearray(b"1.0"))),
        "None as reward": Case(reward(lambda: None)),
        "complex": Case(reward(lambda: 1j)),
        "object as reward": Case(reward(Liar)),
        "list as reward": Case(reward(lambda: [1.0])),
        "no parts": Case(reward(dict)),
        "part NaN": Case(reward(lambda: {"x": float("nan")})),
        "parts that overflow together": Case(reward(lambda: {"x": 1e9, "y": 1e9})),
        "part with a line break": Case(reward(lambda: {"x/y\n": 2.0})),
        "part without a name": Case(reward(lambda: {"": 2.0})),
        "part with a long name": Case(reward(lambda: {"a" * 10_000: 2.0})),
        "part with a surrogate": Case(reward(lambda: {"\ud800": 2.0})),
        "part with an escape": Case(reward(lambda: {"\x1b[31m": 2.0})),
        "1000 parts": Case(reward(lambda: {str(i): 0.0 for i in range(1000)})),
        "endless parts": Case(reward(Endless)),
        "the same part twice": Case(reward(lambda: {1: 1.0, "1": 1.0})),
        "parts in parts": Case(reward(lambda: {"x": {"y": 1.0}})),
        # Results.
        "nothing": Case(returning(lambda: None)),
        "two values": Case(returning(lambda: ("x", 1.0))),
        "four values": Case(returning(lambda: ("x", 1.0, True, {}))),
        "generator": Case(returning(numbers)),
        "dict": Case(returning(lambda: {"reply": "x"})),
        "three letters": Case(returning(lambda: "abc")),
        "1 as done": Case(returning(lambda: ("x", 1.0, 1))),
        "text as done": Case(returning(lambda: ("x", 1.0, "no"))),
        "list as result": Case(returning(lambda: list(FINE)), played),
        "reply of 50 MB after the end": Case(returning(lambda: ("x" * BIG, 1.0, True)), played),
        # What it raises.
        "RuntimeError": Case(raising(lambda: RuntimeError("boom"))),
        "error of 20 MB": Case(raising(lambda: RuntimeError("b" * 20_000_000))),
        "error of many lines": Case(raising(lambda: RuntimeError("a\nb\r\n\0c" * 1000))),
        "error without text": Case(raising(Mute)),
        "SystemExit": Case(raising(lambda: SystemExit(3))),
        "KeyboardInterrupt": Case(raising(KeyboardInterrupt)),
        "GeneratorExit": Case(raising(GeneratorExit)),
        "CancelledError": Case(raising(asyncio.CancelledError)),
        "StopIteration": Case(raising(StopIteration)),
        "StopAsyncIteration": Case(raising(StopAsyncIteration)),
        "BaseException": Case(raising(Own)),
        "ExceptionGroup": Case(raising(lambda: BaseExceptionGroup("g", [SystemExit()]))),
        "MemoryError": Case(raising(MemoryError)),
        "TimeoutError": Case(raising(TimeoutError)),
        "error of a new type": Case(named_anew),
        "endless recursion": Case(nest),
        # What it changes.
        "changed row": Case(change_row, played),
        "reply changed later": Case(change_reply_later, played),
        "all tasks cancelled": Case(change_own_tasks, "killed:|error:", True),
        "event loop stopped": Case(stop_loop, "|error:"),
        "SystemExit in a task": Case(leave_failing_task, "|error:"),
        "thread left": Case(leave_thread, played),
        "busy thread left": Case(leave_busy_thread, played),
        "300 threads left": Case(leave_many_threads, "|error:"),
        # What it leaves behind.
        "child": Case(leave_child, played),
        "daemon": Case(leave_daemon, played),
        "program": Case(leave_program, played),
        "programs of a shell": Case(leave_shell, played),
    }
    # These end the run where they are in its own process.
    violent = {
        "12 GB of memory": Case(take_memory, "error:|killed:", True),
        # A child that lacks memory may raise before its process is killed.
        "memory of children": Case(
            fork_and_take_memory, "killed:|timeout:|error: .*MemoryError", True
        ),
        "500 children": Case(fork_without_end, "killed:|timeout:", True),
        "os._exit": Case(lambda environment: os._exit(0), "killed:", True),
        "SIGKILL": Case(send(os.getpid, signal.SIGKILL), "killed:", True),
        "SIGTERM": Case(send(os.getpid, signal.SIGTERM), "killed:", True),
        "SIGSTOP": Case(send(os.getpid, signal.SIGSTOP), "timeout:", True),
        "abort": Case(lambda environment: os.abort(), "killed:", True),
        "crash": Case(crash, "killed:", True),
        "stack overflow": Case(overflow_stack, "killed:|error:|timeout:", True),
        "SIGTERM to the parent": Case(send(os.getppid, signal.SIGTERM), "killed:", True),
        "SIGKILL to the parent": Case(send(os.getppid, signal.SIGKILL), "killed:", True),
        "SIGINT to the parent": Case(send(os.getppid, signal.SIGINT), played, True),
        "SIGSTOP to the parent": Case(send(os.getppid, signal.SIGSTOP), "|killed:|timeout:", True),
        "closed files": Case(close_files, "killed:", True),
        "closed streams": Case(close_streams, "|error:", True),
        "text on the pipe": Case(forge_pipe("[1"), "killed:", True),
        "number on the pipe": Case(forge_pipe("7"), "killed:", True),
        "other answer on the pipe": Case(forge_pipe('["answer", -7, {}]'), "killed:", True),
        "deep text on the pipe": Case(forge_pipe("[" * 100_000), "killed:", True),
        "60 MB announced on the pipe": Case(promise_bytes, "killed:|timeout:", True),
        "1 TB announced on the pipe": Case(promise_terabytes, "killed:", True),
        "flooded pipe": Case(flood_pipe, "killed", True),
        "read pipe": Case(read_pipe, "|killed:|timeout:", True),
        "sleep": Case(sleep, "timeout:", True),
        "endless loop": Case(spin, "timeout:", True),
        "30 MB printed": Case(print_much, played, True),
        "30 MB on file 1": Case(write_much(1), played, True),
        "30 MB on file 2": Case(write_much(2), played, True),
        "patched json": Case(patch_json, "killed:|error:", True),
        "patched builtins": Case(patch_builtins, "killed:|error:", True),
        "ignored timers": Case(ignore_timers, played, True),
        "no files": Case(take_away_limits, "|error:|killed:", True),
        "no environment": Case(clear_environment, "|error:|killed:", True),
        "no folder": Case(lose_folder, "|error:|killed:", True),
    }
    return values | violent


KINDS = _cases()
# Kinds whose parent would be the program that starts the attack, kinds without a pipe to attack,
# a process that stops itself, and changes of the interpreter that the run itself needs.
NOT_IN_LOOP = (
    *(name for name in KINDS if "parent" in name or "pipe" in name),
    "SIGSTOP",
    "patched json",
    "patched builtins",
    "closed streams",
)
# A reward may be None, which is no reward, and these leave their reward as it is.
NOT_AS_REWARD = ("None as reward", "all tasks cancelled", "event loop stopped")


class Base:
    kept: Any = None
    row: dict[str, Any]

    def begin(self, row: dict[str, Any]) -> str:
        self.row = row
        return OBSERVATION

    def play(self) -> Result:
        kind = self.row.get("kind", "")
        return KINDS[kind].step(self) if kind in KINDS else FINE


class Hostile(Base):
    def reset(self, row: dict[str, Any], seed: int) -> str:
        return self.begin(row)

    def step(self, response: str) -> Result:
        return self.play()


class AsyncHostile(Base):
    async def reset(self, row: dict[str, Any], seed: int) -> str:
        return self.begin(row)

    async def step(self, response: str) -> Result:
        await asyncio.sleep(0)
        return self.play()


# The same as a reward function, and where an environment is reset.


def hostile_reward(row: dict[str, Any]) -> Any:
    environment = Base()
    environment.row = row
    result = environment.play()
    return result[1] if isinstance(result, tuple) and len(result) == 3 else result


class Quiet(Base):
    def reset(self, row: dict[str, Any], seed: int) -> str:
        return self.begin(row)

    def step(self, response: str) -> Result:
        return FINE


class HostileReset(Base):
    def reset(self, row: dict[str, Any], seed: int) -> Any:
        self.begin(row)
        return self.play()[0]

    def step(self, response: str) -> Result:
        return FINE


# Whole runs: a kind by the seed of the episode.

RUN_KINDS = (
    "",
    "reply of 50 MB",
    "unknown role",
    "minus 1e308",
    "part with a line break",
    "pair of surrogates",
    "KeyboardInterrupt",
    "daemon",
    "child",
    "1e9",
)


class InRun(Hostile):
    """Plays kinds of RUN_KINDS, and leaves a mark of each in the folder RUN_KINDS_SEEN."""

    def reset(self, row: dict[str, Any], seed: int) -> str:
        self.begin({"kind": RUN_KINDS[seed % len(RUN_KINDS)]})
        if folder := os.environ.get("RUN_KINDS_SEEN"):
            Path(folder, str(seed % len(RUN_KINDS))).touch()
        return "1-7\n"


class Replies(Base):
    """Every third episode has replies of 50 MB, or of one letter if SMALL_REPLIES is set."""

    def reset(self, row: dict[str, Any], seed: int) -> str:
        self.num_steps = 0
        self.is_big = seed % 3 == 0 and not os.environ.get("SMALL_REPLIES")
        return "1-7\n"

    def step(self, response: str) -> Result:
        self.num_steps += 1
        return "1234567 " * (BIG // 8) if self.is_big else "x", 0.1, self.num_steps > 1
