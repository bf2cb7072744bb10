"""Reward functions and a grader of a user's that fail in every way, for tests of the pool.

Tests name them "users_functions:raises"; see hostile_graders.py for how workers find them.
"""

import contextlib
import os
import socket
import struct
import sys
import time
from pathlib import Path

from jzero.types import Grade


def one(response, gold, task):
    return 1


def count_in_settings(response, gold, task):
    task.max_reply_bytes += 1
    return task.max_reply_bytes


def misspelt(response, gold, task):
    return len(respons)  # noqa: F821


def text(response, gold, task):
    return "1.0"


def table(response, gold, task):
    return {"score": "high"}


def nan(response, gold, task):
    return float("nan")


def refused(response, gold, task):
    """Asks a judge at a port where nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    socket.create_connection(("127.0.0.1", port), timeout=5)


def hang(response, gold, task):
    time.sleep(1000)


def leave(response, gold, task):
    sys.exit(3)


def die(response, gold, task):
    os._exit(3)


def grow(response, gold, task):
    return len(bytes(3 << 30))


def write(response, gold, task):
    """Writes to the file that the environment names."""
    Path(os.environ["USERS_FILE"]).write_text(response, encoding="utf-8")
    return 1.0


def talk(response, gold, task):
    print("a line for the user")
    print("a warning", file=sys.stderr)
    return 1.0


def sleep_and_compute(response, gold, task):
    """Takes longer than task.grade_seconds, and less than task.reward.seconds."""
    end = time.process_time() + 0.5
    while time.process_time() < end:
        pass
    return 0.5


def judge(response, gold, task):
    """A grader that returns a bare score."""
    return 1.0


def nan_judge(response, gold, task):
    return Grade(float("nan"), True, "")


# What starts processes, or attacks the pipe.


def start_many(response):
    """Starts processes until it is killed: at most 200, for the sake of the machine."""
    for _ in range(200):
        if os.fork() == 0:
            time.sleep(100)
            os._exit(0)
    time.sleep(100)


def grow_in_children(response):
    for _ in range(3):
        if os.fork() == 0:
            block = bytearray(500 << 20)
            block[::4096] = b"x" * len(block[::4096])
            time.sleep(100)
            os._exit(0)
    time.sleep(100)


def leave_child(response):
    """Leaves a process of its session behind, and returns its number."""
    child = os.fork()
    if child == 0:
        time.sleep(1000)
        os._exit(0)
    return float(child)


def _write_to_sockets(data):
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket"):
                os.write(int(name), data)


def forge(response):
    text = b'["answer", 0, {"score": 1.0, "correct": true, "reason": 7}]'
    _write_to_sockets(struct.pack("!Q", len(text)) + text)
    return 1.0


def announce(response):
    _write_to_sockets(struct.pack("!Q", 1 << 40))
    time.sleep(100)


def write_much(response):
    os.write(2, b"y" * 1_000_000)
    return 1.0
