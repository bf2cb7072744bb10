"""Grading in worker processes, so that a hostile response costs a bounded time and its own score only. One thread a
worker hands it batches and reads an answer an item. A worker ends itself when an item takes more CPU time than it may,
and is killed after WALL times that; its items go back to the queue, the one in front once. Imports no jax."""

import contextlib
import ctypes
import functools
import json
import os
import pkgutil
import queue
import re
import resource
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import replace
from multiprocessing import connection
from subprocess import DEVNULL, Popen
from types import SimpleNamespace
from typing import Any, NamedTuple

from jzero.types import Grade

BATCH = 32  # items a message, at most
WALL = 5.0  # a machine may be this busy: an item's wall limit in its CPU limits
MEMORY = 2 << 30  # bytes of address space of a worker
START_SECONDS = 120.0  # for a worker to import what it needs on a busy machine
REASON = 200  # characters kept of a reason
COUNTED = {
    "no answer": "no_answer",
    "unparsed": "unparsed",
    "echo": "echo",
    "error": "errors",
}  # reasons: counters


class _Item(NamedTuple):
    number: int  # unique in the pool; an answer must carry it
    key: Hashable
    seconds: float  # CPU limit
    message: str  # JSON [number, task, response, gold, JSON of config.Task, earlier turns or null]
    failed: bool  # it cost a worker already


class _Worker:
    """A grader process and the pipe to it. Ctrl-C in the terminal is for the parent: it has a session of its own."""

    def __init__(self):
        self.pipe, theirs = connection.Pipe()
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        with theirs:
            fd = theirs.fileno()
            command = [sys.executable, "-c", f"from jzero.grading import pool; pool.work({fd})"]
            self.process = Popen(
                command,
                stdin=DEVNULL,
                stdout=DEVNULL,
                env=env,
                pass_fds=[fd],
                start_new_session=True,
            )

    def read(self, seconds: float) -> Any:
        """The next message."""
        if not self.pipe.poll(seconds):
            raise TimeoutError
        return json.loads(self.pipe.recv_bytes())

    def end(self) -> int:
        """Its exit status: the signal that ended it, negative."""
        with contextlib.suppress(ProcessLookupError):  # it ended just now
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


class Pool(contextlib.AbstractContextManager["Pool"]):
    """`workers` grader processes. Any thread submits; one thread polls or drains."""

    def __init__(self, workers: int):
        self.counters = dict.fromkeys(
            (*COUNTED.values(), "disagreed", "graded", "timeouts", "killed", "restarted"), 0
        )
        self._items: deque[_Item] = deque()
        self._grades: queue.SimpleQueue[tuple[Hashable, Grade] | BaseException] = (
            queue.SimpleQueue()
        )
        self._submitted = self._returned = 0
        self._changed = threading.Condition()  # guards the items and the counters
        self._closed = False
        self._workers: list[_Worker | None] = [None] * workers
        self._threads = [
            threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        key: Hashable,
        task_name: str,
        response: str,
        gold: Any,
        task: Any,
        earlier: Any = None,
    ) -> None:
        """Queue a response to a task, or "module:function"; with `earlier`, turns so far, for a reply too."""
        assert not self._closed
        with self._changed:
            settings = json.dumps(vars(task), default=vars)
            message = json.dumps(
                [self._submitted, task_name, response, gold, settings, earlier], default=vars
            )
            self._items.append(
                _Item(self._submitted, key, task.grade_seconds, message, failed=False)
            )
            self._submitted += 1
            self._changed.notify()

    def poll(self, wait: bool = False) -> list[tuple[Hashable, Grade]]:
        """What is graded by now, in no particular order; or, if that is to wait for, at least one."""
        return [self._take() for _ in range(self._grades.qsize() or wait)]

    def drain(self) -> list[tuple[Hashable, Grade]]:
        """Wait for everything submitted, and return what no earlier call did."""
        return [self._take() for _ in range(self._submitted - self._returned)]

    def close(self, *_) -> None:
        """Kill the workers; what is not graded yet never will be."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for worker in filter(None, self._workers):
                worker.end()
        for thread in self._threads:
            thread.join()

    __exit__ = close

    def _take(self) -> tuple[Hashable, Grade]:
        answer = self._grades.get()
        if isinstance(answer, BaseException):
            raise answer
        self._returned += 1
        return answer

    def _batch(self) -> deque[_Item]:
        """Wait for an item and take a share of what queues; empty once the pool is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closed)
            share = min(BATCH, 1 + len(self._items) // (2 * len(self._workers)))
            return deque(() if self._closed else (self._items.popleft() for _ in range(share)))

    def _run(self, index: int) -> None:
        """The thread of one worker and of those that replace it."""
        try:
            while not self._closed:
                worker = self._workers[index] = _Worker()
                self._serve(worker)
        except Exception as error:
            self._grades.put(error)  # raised by whoever polls, if the pool is not closed

    def _serve(self, worker: _Worker) -> None:
        """Until the pool is closed or the worker ends, which is the fault of the first of its batch."""
        batch: deque[_Item] = deque()
        try:
            worker.read(START_SECONDS)
            while batch := self._batch():
                worker.pipe.send_bytes(f"[{','.join(item.message for item in batch)}]".encode())
                while batch:
                    number, *fields = worker.read(
                        batch[0].seconds * WALL
                    )  # the last answer started this item
                    assert number == batch[0].number, f"{number=} {batch[0].number=}"
                    self._answer(batch.popleft(), Grade(*fields))
        except (OSError, EOFError) as error:
            late = worker.end() == -signal.SIGPROF or isinstance(error, TimeoutError)
            if not batch:
                raise RuntimeError("a grader process did not start; its stderr says why") from None
            first = batch.popleft()
            with self._changed:
                self.counters["restarted"] += 1
                self.counters["timeouts" if late else "killed"] += 1
                self._items.extend(batch if first.failed else [*batch, first._replace(failed=True)])
                self._changed.notify_all()
            if first.failed:
                self._answer(
                    first,
                    Grade(0.0, False, "timeout", first.seconds)
                    if late
                    else Grade(0.0, False, "killed"),
                )
        worker.end()

    def _answer(self, item: _Item, grade: Grade) -> None:
        with self._changed:
            self.counters["graded"] += 1
            self.counters["disagreed"] += grade.reason.endswith("disagrees")
            if name := COUNTED.get(re.split("[:;]", grade.reason)[0]):
                self.counters[name] += 1
        self._grades.put((item.key, grade))


def work(descriptor: int) -> None:
    """Main of a worker: for every message of items, one message a grade."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: with its parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from jzero.tasks import (
        TASKS,  # here: a grader process is the one place where grade knows of tasks
        rewards,  # here: a grader process is the one place where grade knows of tasks
    )

    of_task = lambda name: (TASKS[name].grade, TASKS[name].reply)
    grader = functools.cache(
        lambda name: (pkgutil.resolve_name(name), None) if ":" in name else of_task(name)
    )
    for kind, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_AS, MEMORY),
    ):
        resource.setrlimit(kind, (limit, limit))
    pipe = connection.Connection(descriptor)
    pipe.send_bytes(b'"ready"')
    while True:
        for number, name, response, gold, settings, earlier in json.loads(pipe.recv_bytes()):
            task = json.loads(
                settings, object_hook=lambda values: SimpleNamespace(**values)
            )  # config would import jax
            signal.setitimer(signal.ITIMER_PROF, task.grade_seconds)  # its signal ends the process
            start = time.perf_counter()
            try:
                function, ask = grader(name)
                grade = rewards.of_response(response, gold, task, function(response, gold, task))
                if earlier is not None and ask:
                    turns = [
                        *((text, Grade(**fields)) for text, fields in earlier),
                        (response, grade),
                    ]
                    grade = replace(grade, reply=ask(gold, turns, task))
            except MemoryError:
                os._exit(1)  # a fresh worker has a clean heap
            except Exception as error:
                grade = Grade(0.0, False, f"error: {type(error).__name__}: {error}")
            signal.setitimer(signal.ITIMER_PROF, 0)
            values = [number, float(grade.score), bool(grade.correct), grade.reason[:REASON]]
            pipe.send_bytes(
                json.dumps(
                    [*values, time.perf_counter() - start, grade.parts, grade.reply]
                ).encode()
            )
