"""The grader pool: the grades of a direct call, and nothing left behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jzero import config
from jzero.config import RewardConfig, TaskConfig
from jzero.tasks import countdown
from jzero.workers.pipe import Pipe, TurnRequest
from jzero.workers.pool import CallError, Pool

TASK = config.TaskConfig(grade_seconds=5.0)
BRIEF = config.TaskConfig(grade_seconds=0.2)
GOLD = {"numbers": [3, 7, 12], "target": 16}

Response = tuple[int, str, dict]  # key, response, gold


@pytest.fixture(scope="module")
def one_worker():
    with Pool(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def two_workers():
    with Pool(2) as pool:
        yield pool


def responses(count: int) -> list[Response]:
    """Returns right, wrong and malformed answers to one problem of countdown."""
    answers = ["12+7-3", "12+7+3", "12", "12+", "16", "(7-3)+12"]
    result = []
    for index in range(count):
        answer = answers[index % len(answers)]
        padding = " " * (index % 700)
        text = f"thought {index}\n<answer>{answer}</answer>{padding}"
        result.append((index, text, GOLD))
    return result


def submit_all(pool: Pool, items: list[Response]) -> None:
    for key, response, gold in items:
        pool.step(key, TurnRequest("countdown", response, gold, TASK))


def changes(pool: Pool, before: dict[str, int]) -> dict[str, int]:
    """Returns how far the counters have moved, without those that have not."""
    differences = {name: count - before[name] for name, count in pool.counters.items()}
    return {name: count for name, count in differences.items() if count}


def test_pool_grades_as_a_direct_call_does() -> None:
    items = responses(400)
    with Pool(2) as pool:
        submit_all(pool, items[:1])
        assert len(pool.drain()) == 1  # the workers are up
        start = time.monotonic()
        submit_all(pool, items)
        grades = dict(pool.drain())
        assert time.monotonic() - start < 60  # 0.1 s on an idle machine
        assert changes(pool, dict.fromkeys(pool.counters, 0)) == {"graded": 401}
        assert pool.drain() == []
        assert pool.poll() == []
        submit_all(pool, items[99::-1])
        again = dict(pool.drain())

    for key, response, gold in items:
        direct = countdown.grade(response, gold, TASK)
        for grade in (grades[key], again.get(key, grades[key])):
            assert grade.score == direct.score
            assert grade.correct == direct.correct
            assert grade.reason == direct.reason


def test_poll_does_not_wait(one_worker) -> None:
    one_worker.step("slow", TurnRequest("hostile_graders:sleep", "1", None, TASK))
    assert one_worker.poll() == []  # had it waited, it would have the grade

    [(key, grade)] = one_worker.poll(wait=True)

    assert key == "slow"
    assert grade.correct
    assert grade.seconds >= 1
    assert len(grade.reason) < 1000  # a long reason is cut off


@pytest.mark.parametrize(
    "function, reason",
    [
        ("leave", "killed"),
        # These are in the default test of several attacks at once, too.
        ("crash", "killed"),
        ("hang", "timeout"),
        ("spin", "timeout"),
    ],
)
def test_a_hostile_item_costs_its_own_score_and_a_bounded_time(
    two_workers, function, reason
) -> None:
    items = responses(200)
    before = dict(two_workers.counters)

    submit_all(two_workers, items[:100])
    two_workers.step("hostile", TurnRequest(f"hostile_graders:{function}", "", None, BRIEF))
    submit_all(two_workers, items[100:])
    start = time.monotonic()
    grades = dict(two_workers.drain())

    assert time.monotonic() - start < 60
    kind = "timeouts" if reason == "timeout" else "killed"
    assert changes(two_workers, before) == {"graded": 201, "restarted": 2, kind: 2}
    hostile = grades.pop("hostile")
    assert (hostile.score, hostile.correct, hostile.reason) == (0.0, False, reason)
    assert len(grades) == 200
    for key, response, gold in items:
        assert grades[key].score == countdown.grade(response, gold, TASK).score


def test_memory_is_bounded(one_worker) -> None:
    much_time = config.TaskConfig(grade_seconds=30.0)
    one_worker.step("grow", TurnRequest("hostile_graders:grow", "", None, much_time))
    [(_, grade)] = one_worker.drain()
    assert (grade.score, grade.reason) == (0.0, "killed")


def test_a_call_returns_what_the_function_returns_as_json(one_worker: Pool) -> None:
    before = dict(one_worker.counters)
    returned = one_worker.call("hostile_graders:twice", "a", {"b": [1.5, None]}, task=TASK)
    assert returned == [TASK.name, ["a", "a"], {"b": [1.5, None]}]
    assert one_worker.counters == before  # calls are not graded responses


@pytest.mark.parametrize(
    ("function", "arguments", "user_code", "reason"),
    [
        ("twice", ["a"], "", "error: TypeError: twice() missing 1 required positional argument"),
        ("twice", ["a"], "mine:f", "error: mine:f: TypeError: twice() missing"),
        ("make_set", [], "", "error: TypeError: Object of type set is not JSON serializable"),
        ("exit_in_call", [], "", "killed"),
        ("exit_in_call", [], "mine:f", "killed: mine:f"),
        ("sleep_in_call", [], "mine:f", "timeout: mine:f took more than task.reward.seconds=0.2"),
    ],
)
def test_a_call_that_fails_raises_its_reason(
    one_worker: Pool, function: str, arguments: list[str], user_code: str, reason: str
) -> None:
    task = TaskConfig(reward=RewardConfig(seconds=0.2)) if "sleep" in function else TASK
    with pytest.raises(CallError, match=re.escape(reason)):
        one_worker.call(f"hostile_graders:{function}", *arguments, task=task, user_code=user_code)


def test_an_item_that_dies_by_chance_is_tried_again(one_worker, tmp_path: Path) -> None:
    before = dict(one_worker.counters)
    one_worker.step(
        "once", TurnRequest("hostile_graders:die_once", str(tmp_path / "seen"), None, TASK)
    )
    [(_, grade)] = one_worker.drain()
    assert grade.score == 1.0
    assert changes(one_worker, before) == {"graded": 1, "killed": 1, "restarted": 1}


def test_a_grader_that_raises_scores_zero_and_is_counted(one_worker) -> None:
    before = dict(one_worker.counters)
    for name in ("hostile_graders:fail", "hostile_graders:absent", "absent"):
        one_worker.step(name, TurnRequest(name, "", None, TASK))
    grades = dict(one_worker.drain())

    assert changes(one_worker, before) == {"graded": 3, "errors": 3}
    assert grades["hostile_graders:fail"].reason == "error: KeyError: 'no such thing'"
    for grade in grades.values():
        assert grade.score == 0.0
        assert grade.reason.startswith("error: ")


def test_time_in_the_queue_does_not_count(one_worker) -> None:
    settings = config.TaskConfig(grade_seconds=0.4)  # the wall limit is 5 times that
    before = dict(one_worker.counters)
    for index in range(6):
        one_worker.step(index, TurnRequest("hostile_graders:sleep", "0.4", None, settings))
    grades = dict(one_worker.drain())
    assert all(grade.correct for grade in grades.values())
    assert changes(one_worker, before) == {"graded": 6}


def test_closing_does_not_wait_for_a_hanging_item() -> None:
    endless = config.TaskConfig(grade_seconds=1000.0)
    _, response, gold = responses(1)[0]
    others = children_of(os.getpid())  # workers of other pools
    pool = Pool(2)
    pool.step("hang", TurnRequest("hostile_graders:hang", "", None, endless))
    pool.step("fine", TurnRequest("countdown", response, gold, TASK))
    pool.poll(wait=True)

    start = time.monotonic()
    pool.close()

    assert time.monotonic() - start < 60  # the item has 1,000 seconds
    assert children_of(os.getpid()) == others


def state_and_parent(status: Path) -> tuple[str, int] | None:
    """Reads /proc/PID/stat: the state, Z for a zombie, and the parent; None for no process."""
    try:
        fields = status.read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[1])


def is_running(pid: int) -> bool:
    found = state_and_parent(Path(f"/proc/{pid}/stat"))
    return found is not None and found[0] != "Z"


def children_of(pid: int) -> set[int]:
    children = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        found = state_and_parent(status)
        if found is not None and found[0] != "Z" and found[1] == pid:
            children.add(int(status.parent.name))
    return children


PARENT = """
import sys, time
sys.path.insert(0, sys.argv[1])
from jzero.config import TaskConfig
from jzero.workers.pipe import TurnRequest
from jzero.workers.pool import Pool
task = TaskConfig(grade_seconds=1000.0)
pool = Pool(2)
pool.step("hang", TurnRequest("hostile_graders:hang", "", None, task))
pool.step("spin", TurnRequest("hostile_graders:spin", "", None, task))
for i in range(3):
    pool.step(i, TurnRequest("hostile_graders:right", "1", "1", task))
time.sleep(1000)
"""


def test_no_worker_outlives_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(Path(__file__).parent)])
    deadline = time.monotonic() + 30
    while len(workers := children_of(parent.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(workers) == 2
    time.sleep(1.0)  # some are inside the hostile items by now

    # Ctrl-C is not for the workers.
    os.killpg(os.getpgid(min(workers)), signal.SIGINT)
    time.sleep(0.2)
    assert children_of(parent.pid) == workers

    parent.kill()
    parent.wait()
    while any(map(is_running, workers)) and time.monotonic() < deadline + 10:
        time.sleep(0.05)
    assert not any(map(is_running, workers))


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_worker_whose_pool_has_ended_ends_without_a_word(is_ready: bool) -> None:
    """A run that is stopped while its workers start ends with one line of its own."""
    ours, theirs = socket.socketpair()
    arguments = f"{theirs.fileno()}, {os.getpid()}"
    start = f"from jzero.workers import keeper; keeper.keep({arguments})"
    process = subprocess.Popen(
        [sys.executable, "-c", start], pass_fds=[theirs.fileno()], stderr=subprocess.PIPE
    )
    theirs.close()
    pipe = Pipe(ours)
    if is_ready:
        assert b"ready" in pipe.receive(60)
    pipe.close()

    _, errors = process.communicate(timeout=60)

    assert errors == b""
    assert process.returncode == 0
