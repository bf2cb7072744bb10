"""Grading in worker processes, so that a hostile response costs a bounded time and its own score only.

One thread a worker hands it batches from a shared queue and reads one answer an item, in order. A worker
ends itself when an item takes more CPU time than it may, and is killed after WALL times that; its items go back to the
queue, the one in front only once, then it scores 0. Both directions are lines of JSON. Imports no jax: workers hold no
device."""

import importlib
import json
import os
import queue
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from jzero.types import Grade

BATCH = 32  # items a message, at most
WALL = 5.0  # a machine may be this busy: an item's wall limit in its CPU limits
MEMORY = 2 << 30  # bytes of address space of a worker
START_SECONDS = 120.0  # for a worker to import what it needs on a busy machine
REASON = 200  # characters kept of a reason
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
COUNTED = {"no answer": "no_answer", "unparsed": "unparsed", "echo": "echo", "error": "errors"}  # reasons: counters


class _Item(NamedTuple):
    number: int  # unique in the pool; an answer must carry it
    key: Hashable
    seconds: float  # CPU limit
    message: str  # JSON [number, task, response, gold, config.Task as a dict]
    failed: bool  # it cost a worker already


class _Worker:
    """A grader process and the pipes to it."""

    def __init__(self):
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        start = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from jzero.grade import pool; pool.work()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", start, json.dumps(sys.path)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C in the terminal is the parent's to handle
        )
        assert self.process.stdin and self.process.stdout
        self.questions, self.answers = self.process.stdin, self.process.stdout
        self.readable = select.poll()
        self.readable.register(self.answers, select.POLLIN)
        self.unread = b""
        self.ready = False

    def wait_ready(self) -> None:
        if not self.ready and self.read(START_SECONDS) != "ready":
            raise RuntimeError("a grader process did not start; its stderr says why")
        self.ready = True

    def send(self, items: Iterable[_Item]) -> None:
        unsent = memoryview(f"[{','.join(item.message for item in items)}]\n".encode())
        try:
            while unsent:
                unsent = unsent[self.questions.write(unsent) :]
        except BrokenPipeError:
            pass  # it died: the next read says so

    def read(self, seconds: float) -> Any:
        """The next line's value; "timeout" after so many seconds without one, "killed" at the worker's end."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self.unread:
            if not self.readable.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return "timeout"
            data = self.answers.read(1 << 16)
            if not data:
                return "killed"
            self.unread += data
        line, _, self.unread = self.unread.partition(b"\n")
        return json.loads(line)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def discard(self) -> None:
        self.kill()
        self.process.wait()
        self.questions.close()
        self.answers.close()


class Pool:
    """`workers` grader processes. Any thread submits; one thread polls or drains."""

    def __init__(self, workers: int):
        self.counters = dict.fromkeys((*COUNTED.values(), "disagreed", "graded", "timeouts", "killed", "restarted"), 0)
        self._items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._grades: queue.SimpleQueue[tuple[Hashable, Grade] | BaseException] = queue.SimpleQueue()
        self._submitted = self._returned = 0
        self._lock = threading.Lock()
        self._closed = False
        self._workers: list[_Worker | None] = [None] * workers
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(workers)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def submit(self, key: Hashable, task_name: str, response: str, gold: Any, task: Any) -> None:
        """Queue one response; `task_name` is a key of tasks.TASKS or "module:function", `task` is config.Task."""
        assert not self._closed
        with self._lock:
            number = self._submitted
            self._submitted += 1
        message = json.dumps([number, task_name, response, gold, vars(task)], default=vars)
        self._items.put(_Item(number, key, task.grade_seconds, message, failed=False))

    def poll(self) -> list[tuple[Hashable, Grade]]:
        """What is graded by now, in no particular order."""
        return [self._take() for _ in range(self._grades.qsize())]

    def drain(self) -> list[tuple[Hashable, Grade]]:
        """Wait for everything submitted, and return what no earlier call did."""
        return [self._take() for _ in range(self._submitted - self._returned)]

    def close(self) -> None:
        """Kill the workers; what is not graded yet never will be."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                if worker:
                    worker.kill()
        self._items.put(None)
        for thread in self._threads:
            thread.join()

    def _take(self) -> tuple[Hashable, Grade]:
        answer = self._grades.get()
        if isinstance(answer, BaseException):
            raise answer
        self._returned += 1
        return answer

    def _count(self, name: str) -> None:
        with self._lock:
            self.counters[name] += 1

    def _run(self, index: int) -> None:
        """The thread of one worker."""
        try:
            self._start(index)
            while not self._closed and (batch := self._batch()):
                self._grade(index, batch)
        except Exception as error:
            self._grades.put(error)  # raised by whoever polls
        finally:
            if worker := self._workers[index]:
                worker.discard()

    def _batch(self) -> deque[_Item]:
        """Wait for an item and take a share of what queues behind it; empty once the pool is closed."""
        batch: deque[_Item] = deque()
        size = 1
        while len(batch) < size:
            try:
                item = self._items.get(block=not batch)
            except queue.Empty:
                break
            if item is None:
                self._items.put(None)  # for the other threads
                return deque()
            if not batch:
                size = min(BATCH, 1 + self._items.qsize() // (2 * len(self._threads)))
            batch.append(item)
        return batch

    def _start(self, index: int) -> None:
        with self._lock:
            if not self._closed:
                self._workers[index] = _Worker()

    def _grade(self, index: int, batch: deque[_Item]) -> None:
        worker = self._workers[index]
        assert worker
        worker.wait_ready()
        worker.send(batch)
        while batch:
            answer = worker.read(batch[0].seconds * WALL)  # the worker started this item when it answered the last one
            if isinstance(answer, str):
                return self._replace(index, worker, batch, answer)
            number, *fields = answer
            assert number == batch[0].number, f"{number=} {batch[0].number=}"
            self._answer(batch.popleft(), Grade(*fields))

    def _replace(self, index: int, worker: _Worker, batch: deque[_Item], why: str) -> None:
        """Start another worker for one that hung or died on the first item of what it was given."""
        worker.discard()
        why = "timeout" if worker.process.returncode == -signal.SIGPROF else why
        self._start(index)
        self._count("timeouts" if why == "timeout" else "killed")
        self._count("restarted")
        first = batch.popleft()
        if first.failed:
            self._answer(first, Grade(0.0, False, why, first.seconds if why == "timeout" else 0.0))
        else:
            batch.append(first._replace(failed=True))
        for item in batch:
            self._items.put(item)

    def _answer(self, item: _Item, grade: Grade) -> None:
        self._count("graded")
        if name := COUNTED.get(re.split("[:;]", grade.reason)[0]):
            self._count(name)
        if grade.reason.endswith("disagrees"):
            self._count("disagreed")
        self._grades.put((item.key, grade))


# The worker's side


class _Settings:
    """config.Task as the worker sees it; jzero.config itself would import jax."""

    def __init__(self, values: dict[str, Any]):
        self.__dict__.update({k: _Settings(v) if isinstance(v, dict) else v for k, v in values.items()})


def work() -> None:
    """Main of a worker: for every line of items on stdin, one line a grade."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from jzero.tasks import TASKS  # here: a grader process is the one place where grade knows of tasks

    graders = {name: task.grade for name, task in TASKS.items()}
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    answers = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a grader prints is not an answer
    os.write(answers, b'"ready"\n')
    for line in sys.stdin.buffer:
        for number, name, response, gold, settings in json.loads(line):
            signal.setitimer(signal.ITIMER_PROF, settings["grade_seconds"])  # its signal ends the process
            grade = _grade_one(graders, name, response, gold, _Settings(settings))
            signal.setitimer(signal.ITIMER_PROF, 0)
            values = [number, float(grade.score), bool(grade.correct), grade.reason[:REASON], grade.seconds]
            os.write(answers, json.dumps([*values, grade.parts]).encode() + b"\n")


def _grade_one(graders: dict[str, Any], name: str, response: str, gold: Any, task: Any) -> Grade:
    start = time.perf_counter()
    try:
        if name not in graders:
            module, _, function = name.partition(":")
            graders[name] = getattr(importlib.import_module(module), function)
        from jzero.tasks import rewards

        grade = rewards.of_response(response, gold, task, graders[name](response, gold, task))
    except MemoryError:
        os._exit(1)  # a fresh worker has a clean heap
    except Exception as error:
        grade = Grade(0.0, False, f"error: {type(error).__name__}: {error}")
    return replace(grade, seconds=time.perf_counter() - start)
