"""No process that user-defined code has started outlives the run, however the run ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from jzero.config import RewardConfig, TaskConfig
from jzero.types import Grade
from jzero.workers import keeper
from jzero.workers.pipe import Pipe, TurnRequest, write_request
from jzero.workers.pool import Pool

TOKEN = "JZERO_TEST_OF_KEEPER"  # a variable that all processes of a test inherit
linux = pytest.mark.skipif(not keeper.IS_LINUX, reason="only Linux finds them")

# A run whose environment leaves a child, a daemon of a session of its own, and a program behind.
RUN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test in the background ignores it
from jzero.config import RewardConfig, TaskConfig, turns
from jzero.workers.pool import Pool
from jzero.rollout.turns import make_request
from jzero.types import Problem

mode, end, file = sys.argv[1:]
task = TaskConfig(
    name="environment", template="plain", turn_reward=turns.Score(), environment_mode=mode,
    environment=file, reward=RewardConfig(seconds=20.0),
)
gold = {"row": {}, "seed": 0, "observation": "begin"}
problem = Problem("1", "environment", "begin", gold)
pool = Pool(1 if mode == "processes" else 0)
pool.step(0, make_request(problem, 0, "x", [], task, is_last=False))
[(_, grade)] = pool.poll(wait=True)
assert not grade.failed, grade
time.sleep(1.0)
print("played", flush=True)
if end == "close":
    pool.close()
if end == "exception":
    raise SystemExit("an exception")
while end != "close":
    time.sleep(1)
"""
ENVIRONMENT = """
import os, signal, subprocess, time

def leave():
    if os.fork() == 0:
        time.sleep(1000)
        os._exit(0)
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        os._exit(0)
    os.waitpid(child, 0)
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return "on", 0.5, False

class Leaving:
    def reset(self, row, seed):
        return "begin"
    def step(self, response):
        return leave()

class LeavingAsync:
    async def reset(self, row, seed):
        return "begin"
    async def step(self, response):
        return leave()
"""


def processes_of(token: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            state = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except OSError:
            continue
        if f"{TOKEN}={token}".encode() in environment and state != "Z":
            found.append(int(folder.name))
    return found


def wait_until_none(token: str, seconds: float = 30.0) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := processes_of(token)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


ENDS = ["close", "exception", "INT", "TERM", "KILL"]


@linux
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("mode", ["processes", "asyncio"])
def test_no_child_of_an_environment_outlives_the_run(tmp_path: Path, mode: str, end: str) -> None:
    file = tmp_path / "leaving.py"
    file.write_text(ENVIRONMENT)
    name = "Leaving" if mode == "processes" else "LeavingAsync"
    token = uuid.uuid4().hex
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, mode, end, f"{file}:{name}"],
        env=os.environ | {TOKEN: token, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None
    assert run.stdout.readline() == "played\n"
    if end in ("INT", "TERM", "KILL"):
        assert len(processes_of(token)) >= 4  # the run, and the three that were left
        run.send_signal(getattr(signal, f"SIG{end}"))
    run.communicate(timeout=60)

    assert wait_until_none(token) == []


# Bounds of a grader process.


def graded(function: str, max_processes: int = 100) -> Grade:
    """Returns the grade with a reward function of users_functions.py."""
    name = f"users_functions:{function}"
    rewards = RewardConfig(functions=("accuracy", name), seconds=10.0, memory_gib=1.0)
    gold = {"numbers": [3, 7, 12], "target": 16}
    with Pool(1, max_processes=max_processes) as pool:
        task = TaskConfig(reward=rewards)
        pool.step(0, TurnRequest("countdown", "<answer>12+7-3</answer>", gold, task))
        [(_, grade)] = pool.drain()
    return grade


@linux
def test_the_processes_of_a_function_are_bounded() -> None:
    grade = graded("start_many", max_processes=40)
    assert grade.failed
    assert grade.reason == "killed: users_functions:start_many: started more than 40 processes"


@linux
def test_the_memory_of_all_processes_of_a_function_is_bounded() -> None:
    grade = graded("grow_in_children")
    assert grade.failed
    assert grade.reason == (
        "killed: users_functions:grow_in_children: took more than task.reward.memory_gib"
    )


@pytest.mark.parametrize("function", ["forge", "announce"])
def test_what_a_function_writes_to_the_pipe_is_no_grade(function: str) -> None:
    grade = graded(function)
    assert grade.failed
    assert grade.reason.startswith(f"killed: users_functions:{function}: its process wrote")


def test_what_a_process_writes_to_stderr_is_cut(capfd: pytest.CaptureFixture[str]) -> None:
    assert not graded("write_much").failed
    shown = capfd.readouterr().err
    assert "further errors of this grader process are left out" in shown
    assert len(shown) < 20_000


@linux
def test_descendants_are_those_of_all_threads() -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        deadline = time.monotonic() + 30
        while len(keeper.descendants(process.pid)) < 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        [child] = keeper.descendants(process.pid)
        assert child != process.pid
        assert process.pid in keeper.descendants(os.getpid())


def is_running(process: int) -> bool:
    """Returns whether a process runs; one that has ended may stay in the table for a while."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_other_systems_end_the_session_of_a_grader() -> None:
    """A system that adopts no orphans ends the processes of the session."""
    ours, theirs = socket.socketpair()
    start = (
        "from jzero.workers import keeper; keeper.IS_LINUX = False; "
        f"keeper.keep({theirs.fileno()}, {os.getpid()})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", start],
        pass_fds=[theirs.fileno()],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    theirs.close()
    pipe = Pipe(ours)
    assert b"ready" in pipe.receive(60)
    task = TaskConfig(reward=RewardConfig(functions=("users_functions:leave_child",)))
    request = TurnRequest("countdown", "12", {"numbers": [3, 7, 12], "target": 16}, task)
    pipe.send(f"[{write_request(0, request)}]".encode())
    while True:
        kind, *content = json.loads(pipe.receive(60))
        if kind == "answer":
            break
    child = int(content[1]["parts"]["users_functions:leave_child"])
    assert is_running(child)

    process.terminate()
    process.wait(60)
    pipe.close()

    deadline = time.monotonic() + 20
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)
