"""The grader pool: right answers, bounded cost of hostile ones, nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jzero import config
from jzero.grading.pool import Pool
from jzero.tasks import countdown

HOSTILE = """
import ctypes, os, sys, time
def right(response, gold, task):
    from jzero.types import Grade
    print("noise on stdout", file=sys.stdout, flush=True)
    return Grade(float(response), response == gold, "x" * 10000)
def hang(*_): time.sleep(1000)
def spin(*_):
    while True: pass
def leave(*_): os._exit(0)
def crash(*_): ctypes.string_at(0)
def grow(*_):
    blocks = []
    while True: blocks.append(bytes(1 << 28))
def fail(*_): raise KeyError("no such thing")
def once(response, gold, task):  # dies at the first attempt only
    if not os.path.exists(response):
        open(response, "w").close()
        os._exit(1)
    return right("1", "1", task)
def sleep(response, gold, task):
    time.sleep(float(response))
    return right("1", "1", task)
"""
TASK = config.TaskConfig(grade_seconds=5.0)
BRIEF = config.TaskConfig(grade_seconds=0.5)


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    (tmp_path / "hostile.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(tmp_path)


def responses(count):
    gold = {"numbers": [3, 7, 12], "target": 16}
    answers = ["12+7-3", "12+7+3", "12", "12+", "16", "(7-3)+12"]
    return [
        (i, f"thought {i}\n<answer>{answers[i % len(answers)]}</answer>" + " " * (i % 700), gold)
        for i in range(count)
    ]


def submit_all(pool, items):
    for key, response, gold in items:
        pool.submit(key, "countdown", response, gold, TASK)


def test_pool_grades_as_a_direct_call_does():
    items = responses(2000)
    with Pool(2) as pool:
        submit_all(pool, items[:1])
        assert len(pool.drain()) == 1  # the workers are up
        start = time.monotonic()
        submit_all(pool, items)
        grades = dict(pool.drain())
        assert time.monotonic() - start < 10  # 0.1 s on an idle machine
        assert {name: count for name, count in pool.counters.items() if count} == {"graded": 2001}
        assert pool.drain() == pool.poll() == []
        submit_all(pool, reversed(items[:100]))
        again = dict(pool.drain())
    for key, response, gold in items:
        direct = countdown.grade(response, gold, TASK)
        for found in [grades[key], again.get(key, grades[key])]:
            assert (found.score, found.correct, found.reason) == (
                direct.score,
                direct.correct,
                direct.reason,
            )


def test_poll_does_not_wait(hostile):
    with Pool(1) as pool:
        pool.submit("slow", "hostile:sleep", "0.3", None, TASK)
        start = time.monotonic()
        assert pool.poll() == []
        assert time.monotonic() - start < 0.2
        found = []
        while not found:
            found = pool.poll()
            time.sleep(0.01)
        assert found[0][0] == "slow" and found[0][1].correct and found[0][1].seconds >= 0.3
        assert len(found[0][1].reason) < 1000


@pytest.mark.parametrize(
    "function, reason",
    [("hang", "timeout"), ("spin", "timeout"), ("leave", "killed"), ("crash", "killed")],
)
def test_a_hostile_item_costs_its_own_score_and_a_bounded_time(hostile, function, reason):
    items = responses(200)
    with Pool(2) as pool:
        submit_all(pool, items[:100])
        pool.submit("hostile", f"hostile:{function}", "", None, BRIEF)
        submit_all(pool, items[100:])
        start = time.monotonic()
        grades = dict(pool.drain())
        assert time.monotonic() - start < 20
        assert pool.counters["timeouts" if reason == "timeout" else "killed"] == 2
        assert pool.counters["restarted"] == 2 and pool.counters["graded"] == 201
    found = grades.pop("hostile")
    assert (found.score, found.correct, found.reason) == (0.0, False, reason)
    assert len(grades) == 200 and all(
        grades[k].score == countdown.grade(r, g, TASK).score for k, r, g in items
    )


def test_memory_is_bounded(hostile):
    with Pool(1) as pool:
        pool.submit("grow", "hostile:grow", "", None, config.TaskConfig(grade_seconds=30.0))
        [(_, found)] = pool.drain()
    assert (found.score, found.reason) == (0.0, "killed")


def test_an_item_that_dies_by_chance_is_tried_again(hostile, tmp_path):
    with Pool(1) as pool:
        pool.submit("once", "hostile:once", str(tmp_path / "seen"), None, TASK)
        [(_, found)] = pool.drain()
        assert found.score == 1.0 and pool.counters["killed"] == pool.counters["restarted"] == 1


def test_a_grader_that_raises_scores_zero_and_is_counted(hostile):
    with Pool(1) as pool:
        for name in ("hostile:fail", "hostile:absent", "absent"):
            pool.submit(name, name, "", None, TASK)
        grades = dict(pool.drain())
        assert pool.counters["errors"] == 3 and pool.counters["restarted"] == 0
    assert grades["hostile:fail"].reason == "error: KeyError: 'no such thing'"
    assert all(
        grade.score == 0.0 and grade.reason.startswith("error: ") for grade in grades.values()
    )


def test_time_in_the_queue_does_not_count(hostile):
    with Pool(1) as pool:
        for i in range(8):
            pool.submit(i, "hostile:sleep", "0.2", None, config.TaskConfig(grade_seconds=1.0))
        assert all(grade.correct for _, grade in pool.drain())
        assert pool.counters["timeouts"] == 0


def test_closing_does_not_wait_for_a_hanging_item(hostile):
    pool = Pool(2)
    pool.submit("hang", "hostile:hang", "", None, config.TaskConfig(grade_seconds=1000.0))
    pool.submit("fine", *("countdown", *responses(1)[0][1:]), TASK)
    while not pool.poll():
        time.sleep(0.01)
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 5 and not children_of(os.getpid())


def children_of(pid: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(status.parent.name))
    return found


def test_no_worker_outlives_its_parent(hostile, tmp_path):
    code = f"""
import sys, time
sys.path.insert(0, {str(tmp_path)!r})
from types import SimpleNamespace
from jzero.grading.pool import Pool
task = SimpleNamespace(grade_seconds=1000.0)
pool = Pool(3)
pool.submit("hang", "hostile:hang", "", None, task)
pool.submit("spin", "hostile:spin", "", None, task)
for i in range(3):
    pool.submit(i, "hostile:right", "1", "1", task)
time.sleep(1000)
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 30
    while len(workers := children_of(parent.pid)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.0)  # some are inside the hostile items by now
    os.killpg(os.getpgid(workers[0]), signal.SIGINT)  # Ctrl-C is not theirs
    time.sleep(0.2)
    assert sorted(children_of(parent.pid)) == sorted(workers) and len(workers) == 3
    parent.kill()
    parent.wait()
    while any(map(running, workers)) and time.monotonic() < deadline + 10:
        time.sleep(0.05)
    assert not any(map(running, workers))


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
