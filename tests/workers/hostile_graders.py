"""Graders that hang, crash, or take all memory, for tests of the pool.

Tests name them "hostile_graders:hang". Workers find this module because they search the path of
their parent, and pytest puts the folder of a test on its path.
"""

import ctypes
import os
import sys
import time
from typing import Never

from jzero.types import Grade


def right(response, gold, task):
    print("noise on stdout", file=sys.stdout, flush=True)
    return Grade(float(response), response == gold, "x" * 10000)


def hang(*_) -> None:
    time.sleep(1000)


def spin(*_) -> None:
    while True:
        pass


def leave(*_) -> None:
    os._exit(0)


def crash(*_) -> None:
    ctypes.string_at(0)


def grow(*_) -> None:
    blocks = []
    while True:
        blocks.append(bytes(1 << 28))


def nest(*_):
    return nest()


def fill(*_) -> None:
    path = f"/tmp/filled-by-{os.getpid()}"
    try:
        with open(path, "w") as file:
            file.write("x" * 10000)
    finally:
        os.remove(path)


def fail(*_) -> Never:
    raise KeyError("no such thing")


def die_once(response, gold, task):
    """Ends the worker at the first attempt only; `response` is a path that remembers it."""
    if not os.path.exists(response):
        os.mkdir(response)  # the worker may write no files
        os._exit(1)
    return right("1", "1", task)


def sleep(response, gold, task):
    time.sleep(float(response))
    return right("1", "1", task)


# Functions that a pool calls.


def twice(task, first, second):
    return [task.name, [first, first], second]


def make_set(task):
    return {1}


def exit_in_call(task):
    os._exit(3)


def sleep_in_call(task):
    time.sleep(1000)
