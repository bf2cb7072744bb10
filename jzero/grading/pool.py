"""Grading in worker processes: a hostile response costs a bounded time and its own score only.

`Pool.submit` queues a response, `Pool.poll` and `Pool.drain` return the grades. Behind them stands
one thread for every worker process (`worker.work`). The thread hands its worker a batch of items,
and reads one answer for each.

A worker that ends, or that is silent for too long, is replaced. The item that it was grading is to
blame. That item gets a second try, because a machine may also kill a worker by chance, and then
scores 0 or, where it was code of the user's that ran, has failed. The other items of the batch go
back to the queue.

An episode in an environment stays with the worker that holds the environment's state. An
environment that only waits needs no worker: its steps are awaited in an event loop (`event_loop`),
and their grades go on as those of a worker do.

If `task.reward.functions` names `judge`, a graded response then goes to a thread that asks the
judge, and its grade comes back with the judge's reward.

Trainers import this module, but it imports no jax: the workers hold no device.
"""

import contextlib
import json
import os
import queue
import re
import signal
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import connection
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import NamedTuple, Protocol

from jzero.errors import UserError
from jzero.grading.event_loop import EventLoop
from jzero.grading.judge import JUDGE, Judge, JudgeError, fill_rubric
from jzero.types import Grade, JsonValue

MAX_BATCH = 32  # items in one message
# The wall limit of an item is this many times its CPU limit: the machine may be busy.
WALL_SECONDS_PER_CPU_SECOND = 5.0
START_SECONDS = 120.0  # for a worker to import what it needs on a busy machine
MAX_STARTS = 3  # processes of one worker that end, one after the other, before they are ready

# The counter of a reason; of "error: KeyError" the part before the colon is the reason.
COUNTER_OF_REASON = {
    "no answer": "no_answer",
    "unparsed": "unparsed",
    "echo": "echo",
    "error": "errors",
}
COUNTERS = (
    *COUNTER_OF_REASON.values(),
    "disagreed",
    "graded",
    "timeouts",
    "killed",
    "restarted",
)


class GraderSettings(Protocol):
    """What the pool itself reads of `config.TaskConfig`; a grader gets all of its fields."""

    @property
    def grade_seconds(self) -> float: ...


class Stepped(NamedTuple):
    """What came of a step that was awaited in the event loop."""

    grade: Grade
    needs_worker: bool  # whether reward functions are left, which a worker calls
    called: tuple[str, ...] = ()  # the reward functions that are not left


Stepping = Callable[[], Awaitable[Stepped]]


class _Judging(NamedTuple):
    """What a judge is to be asked once an item is graded."""

    message: str
    judge: Judge


class _Item(NamedTuple):
    """A response that waits for its grade."""

    number: int  # unique in the pool; the answer must carry it
    key: Hashable  # the caller's
    seconds: float  # of CPU time, at most
    message: str  # the item in JSON, as `worker` describes it
    has_ended_worker: bool
    episode: str = ""  # whose environment a worker holds; "" for a grader without state
    worker: int | None = None  # the only one that may take the item
    judging: "_Judging | None" = None  # None: the reward `judge` is not asked for
    result: "Future[Grade] | None" = None  # of a `call`; None: the grade is polled


def _call_seconds(settings: GraderSettings) -> float:
    """Returns the limit of a call of the user's code."""
    rewards = getattr(settings, "reward", None)
    return rewards.seconds if rewards is not None else settings.grade_seconds


class _Stage(NamedTuple):
    """What a worker is at: see the message `stage` in `worker`."""

    is_users: bool  # whether the code is the user's
    function: str  # a reward function of the user's; "" for the grader
    seconds: float | None  # wall-clock limit of the function; None for the grader
    score: float  # the grader's verdict, once there is one
    correct: bool


_CHECKING = _Stage(is_users=False, function="", seconds=None, score=0.0, correct=False)

ShowNote = Callable[[str, str, str], None]  # function, kind, text


class _NotStarted(RuntimeError):
    """A grader process ended before it was ready."""


class _Worker:
    """A grader process and our end of the pipe to it."""

    def __init__(self) -> None:
        self.stage = _CHECKING
        self.pipe, its_end = connection.Pipe()
        with its_end:  # closed here, so that the pipe ends with the process
            descriptor = its_end.fileno()
            start = f"from jzero.grading import worker; worker.work({descriptor})"
            environment = {
                "PYTHONPATH": os.pathsep.join(sys.path),  # finds the graders that we would find
                "OMP_NUM_THREADS": "1",  # the workers share the cores
            }
            self.process = Popen(
                [sys.executable, "-c", start],
                stdin=DEVNULL,
                stdout=DEVNULL,  # what graders print comes as notes; stderr says why a worker fails
                env=os.environ | environment,
                pass_fds=[descriptor],
                # Ctrl-C in the terminal is for the parent. And a worker can be killed with all
                # processes that a grader has started.
                start_new_session=True,
            )

    def send(self, batch: deque[_Item]) -> None:
        messages = ",".join(item.message for item in batch)
        self.pipe.send_bytes(f"[{messages}]".encode())

    def receive(self, seconds: float) -> bytes:
        """Returns the next message.

        Raises:
            TimeoutError: There was none for `seconds`.
            OSError, EOFError: The process has ended.
        """
        if not self.pipe.poll(seconds):
            raise TimeoutError
        return self.pipe.recv_bytes()

    def receive_grade(self, item: _Item, show_note: ShowNote) -> Grade:
        """Returns the grade of `item`, which must be the one that the worker is at."""
        self.stage = _CHECKING
        while True:
            seconds = self.stage.seconds
            if seconds is None:
                seconds = item.seconds * WALL_SECONDS_PER_CPU_SECOND
            kind, *content = json.loads(self.receive(seconds))
            if kind == "answer":
                number, fields = content
                assert number == item.number, f"{number=} {item.number=}"
                return Grade(**fields)
            if kind == "stage":
                self.stage = _Stage(*content)
            else:
                assert kind == "note", f"{kind=}"
                show_note(*content)

    def end(self) -> int:
        """Kills the process if it still runs. Returns its exit status, negative for a signal."""
        with contextlib.suppress(ProcessLookupError):  # it ended between the two calls
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


class Pool(contextlib.AbstractContextManager["Pool"]):
    """Grader processes. Any thread may submit; one thread may poll, drain and close.

    `counters` counts the graded responses, some of their reasons, and what became of the workers.
    """

    def __init__(self, workers: int, judge_cache: Path | None = None) -> None:
        """`judge_cache` is a file with what the judge has said; None keeps it in memory alone."""
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._items: deque[_Item] = deque()
        # Of a thread that failed, its exception.
        self._grades: queue.SimpleQueue[tuple[Hashable, Grade] | Exception] = queue.SimpleQueue()
        self._num_submitted = 0
        self._num_returned = 0
        self._changed = threading.Condition()  # guards the items and the counters
        self._closed = False
        self._notes: set[tuple[str, str]] = set()  # that were shown: function, kind
        self._workers: list[_Worker | None] = [None] * workers
        self._worker_of_episode: dict[str, int] = {}
        self._judge_cache = judge_cache
        self._judge: Judge | None = None
        self._judging_threads: ThreadPoolExecutor | None = None
        self._event_loop: EventLoop | None = None
        self._calls: list[Future[Grade]] = []  # that wait
        self._threads = []
        for index in range(workers):
            # A daemon, so that a main thread that fails does not wait for a hanging grader.
            thread = threading.Thread(target=self._run, args=(index,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def submit(
        self,
        key: Hashable,
        grader: str,
        response: str,
        gold: object,
        settings: GraderSettings,
        earlier: list[tuple[str, Grade | None]] | None = None,
        episode: Mapping[str, JsonValue] | None = None,
        stepping: Stepping | None = None,
    ) -> None:
        """Queues a response.

        `key` comes back with the grade. `grader` is a key of `tasks.TASKS`, or "module:function".
        `gold` and the fields of `settings` must be JSON values. `earlier` are the texts and grades
        of the episode's turns before; if they are given, the task is asked for a reply, too.
        `episode` are values that reward functions ask for (`tasks.rewards.episode_values`).
        `stepping` is awaited in the event loop of this process, and makes the grade to which the
        rewards are added.
        """
        assert not self._closed
        fields = json.dumps(vars(settings), default=vars)
        judging = self._plan_judging(response, gold, settings, episode or {})
        with self._changed:
            number = self._num_submitted
            self._num_submitted += 1
            content = [number, grader, response, gold, fields, earlier, dict(episode or {})]
            seconds = settings.grade_seconds
            item = _Item(number, key, seconds, "", has_ended_worker=False, judging=judging)
            if stepping is None:
                self._enqueue(self._with_worker(item, episode or {}), content)
                return
            if self._event_loop is None:
                self._event_loop = EventLoop(_call_seconds(settings), self._report_blocked)
            self._event_loop.start(self._step(item, content, stepping))

    def poll(self, wait: bool = False) -> list[tuple[Hashable, Grade]]:
        """Returns the keys and grades that are ready, in no particular order.

        If `wait` is true, blocks until there is at least one; a response must be submitted then.
        """
        num_ready = self._grades.qsize()
        if wait:
            num_ready = max(num_ready, 1)
        return [self._take() for _ in range(num_ready)]

    def drain(self) -> list[tuple[Hashable, Grade]]:
        """Waits until all is graded, and returns the keys and grades that no earlier call did."""
        return [self._take() for _ in range(self._num_submitted - self._num_returned)]

    def call(self, grader: str, gold: JsonValue, settings: GraderSettings) -> Grade:
        """Returns the grade of something that is no response, and waits for it.

        Any thread may call this beside the one that polls.
        """
        result: Future[Grade] = Future()
        fields = json.dumps(vars(settings), default=vars)
        with self._changed:
            assert not self._closed
            self._calls.append(result)
            content = [-1, grader, "", gold, fields, None, {}]
            item = _Item(-1, None, settings.grade_seconds, "", has_ended_worker=False)
            self._enqueue(item._replace(result=result), content)
        return result.result()

    def count(self, counter: str) -> None:
        """Adds one to a counter of COUNTERS. Any thread may call this."""
        with self._changed:
            self.counters[counter] += 1

    def show_note(self, function: str, kind: str, text: str) -> None:
        """Prints what a function printed or raised, if nobody has said the same before."""
        with self._changed:
            if (function, kind) in self._notes:
                return
            self._notes.add((function, kind))
        lines = text.rstrip("\n")
        print(f"{function} {kind} (shown once):\n{lines}", file=sys.stderr, flush=True)

    def start(self, coroutine: Coroutine[None, None, None]) -> None:
        """Runs a coroutine, which has to handle its own errors, in the event loop of the pool."""
        assert self._event_loop is not None, "it starts with the first item that is stepped"
        self._event_loop.start(coroutine)

    def at_end(self, function: Callable[[], Awaitable[None]]) -> None:
        """Has a function awaited in the event loop when the pool is closed."""
        assert self._event_loop is not None, "what runs in the event loop calls this"
        self._event_loop.at_end(function)

    def close(self, *_: object) -> None:
        """Kills the workers, and cancels what is awaited. What is not graded yet never will be."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for worker in self._workers:
                if worker is not None:
                    worker.end()
        if self._event_loop is not None:
            self._event_loop.close()
        if self._judge is not None and self._judging_threads is not None:
            self._judge.end()
            self._judging_threads.shutdown(wait=False, cancel_futures=True)
        for thread in self._threads:
            thread.join()

    __exit__ = close

    def _take(self) -> tuple[Hashable, Grade]:
        result = self._grades.get()
        if isinstance(result, Exception):
            raise result
        self._num_returned += 1
        return result

    # The queue and the event loop

    def _with_worker(self, item: _Item, episode: Mapping[str, JsonValue]) -> _Item:
        """Returns the item with the worker that holds the environment of its episode."""
        name = episode.get("episode")
        if not name:
            return item
        # An episode begins with any worker, and stays with it.
        is_first = not episode.get("turns")
        worker = None if is_first else self._worker_of_episode.get(name)
        return item._replace(episode=name, worker=worker)

    def _enqueue(self, item: _Item, content: list[object]) -> None:
        """Queues an item for the workers; `content` is its message."""
        message = json.dumps(content, default=vars)
        with self._changed:
            self._items.append(item._replace(message=message))
            self._changed.notify_all()

    async def _step(self, item: _Item, content: list[JsonValue], stepping: Stepping) -> None:
        """Awaits a step, and hands its grade to a worker if reward functions are left."""
        try:
            stepped = await stepping()
            if stepped.grade.failed or not stepped.needs_worker:
                self._finish(item, stepped.grade)
                return
            content[-1] |= {"graded": vars(stepped.grade), "called": stepped.called}
            self._enqueue(item, content)
        except Exception as error:  # a fault of ours must not leave the run waiting
            self._grades.put(error)

    def _report_blocked(self, seconds: float, where: str) -> None:
        self._grades.put(
            UserError(
                f"an environment has blocked all others for {seconds:g} seconds at {where}: await "
                "what takes long, or set task.environment_mode=processes"
            )
        )

    # The judge

    def _plan_judging(
        self,
        response: str,
        gold: JsonValue,
        settings: GraderSettings,
        episode: Mapping[str, JsonValue],
    ) -> _Judging | None:
        """Returns what the judge is to be asked of a response, None where nobody wants to know."""
        # `python -m jzero.grade` has settings without rewards.
        rewards = getattr(settings, "reward", None)
        if rewards is None or JUDGE not in rewards.functions:
            return None
        with self._changed:
            if self._judge is None:
                self._judge = Judge(rewards.judge, rewards.seconds, self._judge_cache)
                self._judging_threads = ThreadPoolExecutor(rewards.judge.concurrency)
            assert self._judge.settings == rewards.judge, "one pool has one judge"
        message = fill_rubric(rewards.judge, response, gold, episode)
        return _Judging(message, self._judge)

    def _finish(self, item: _Item, grade: Grade) -> None:
        """Delivers a grade, after the judge has added its reward if the item asks for that."""
        calls_tools = grade.tool_calls > 0 and grade.reply is not None
        if item.judging is None or grade.failed or calls_tools:
            self._deliver(item, grade)
            return
        with self._changed:
            if self._closed:
                return
            assert self._judging_threads is not None, "set where the item was submitted"
            self._judging_threads.submit(self._ask_judge, item, item.judging, grade)

    def _ask_judge(self, item: _Item, judging: _Judging, grade: Grade) -> None:
        try:
            score = judging.judge.score(judging.message)
        except JudgeError as error:
            self.show_note(JUDGE, "failed", str(error))
            reason = f"error: {JUDGE}: {error}"
            # The episode has no score any more, so that nobody needs a reply.
            self._deliver(item, replace(grade, reason=reason, failed=True, reply=None))
        except Exception as error:  # a fault of ours must not leave the run waiting
            self._grades.put(error)
        else:
            self._deliver(item, replace(grade, parts=grade.parts | {JUDGE: score}))

    # What the threads run

    def _run(self, index: int) -> None:
        """Runs the workers of one thread, each after the end of the one before.

        A worker that ends before it was ready may have been killed by chance, and another one is
        started. After MAX_STARTS such ends in a row the fault is not chance.
        """
        failed_starts = 0
        try:
            while not self._closed:
                worker = self._workers[index] = _Worker()
                try:
                    self._serve(worker, index)
                    failed_starts = 0
                except _NotStarted:
                    failed_starts += 1
                    with self._changed:
                        self.counters["restarted"] += 1
                    if failed_starts == MAX_STARTS:
                        raise
        except Exception as error:
            # For whoever polls. After `close` nobody does, and then a worker's end is no error.
            self._grades.put(error)
            with self._changed:
                for call in self._calls:
                    call.set_exception(error)
                self._calls.clear()

    def _serve(self, worker: _Worker, index: int) -> None:
        """Hands batches to a worker, until the pool is closed or the worker ends.

        Raises:
            _NotStarted: The worker ended before it was ready.
        """
        batch: deque[_Item] = deque()
        is_ready = False
        try:
            worker.receive(START_SECONDS)  # "ready"
            is_ready = True
            while batch := self._next_batch(index):
                worker.send(batch)
                while batch:
                    # The worker began with this item when it answered the last, so that the wait
                    # is this item's time alone.
                    grade = worker.receive_grade(batch[0], self.show_note)
                    item = batch.popleft()
                    self._keep_episode(item, index, grade)
                    self._finish(item, grade)
        except (OSError, EOFError) as error:  # it ended, or a TimeoutError, which is an OSError
            status = worker.end()
            if not is_ready:
                message = "a grader process did not start; its stderr says why"
                raise _NotStarted(message) from None
            is_late = isinstance(error, TimeoutError) or status == -signal.SIGPROF
            self._blame_first(batch, "timeout" if is_late else "killed", worker.stage)
        worker.end()

    def _keep_episode(self, item: _Item, index: int, grade: Grade) -> None:
        """Remembers the worker that holds the environment of an episode, as long as it goes on."""
        if item.episode:
            with self._changed:
                self._worker_of_episode[item.episode] = index
                if grade.reply is None:
                    del self._worker_of_episode[item.episode]

    def _next_batch(self, index: int) -> deque[_Item]:
        """Waits for items that worker `index` may take, and takes a share of them.

        Returns none once the pool is closed.

        A share is about half of a worker's part of the queue, so that all workers end together.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_item_for(index))
            if self._closed:
                return deque()
            share = min(MAX_BATCH, 1 + len(self._items) // (2 * len(self._workers)))
            batch: deque[_Item] = deque()
            of_others: deque[_Item] = deque()
            while self._items and len(batch) < share:
                item = self._items.popleft()
                (batch if item.worker in (None, index) else of_others).append(item)
            self._items.extendleft(reversed(of_others))
            return batch

    def _has_item_for(self, index: int) -> bool:
        return any(item.worker in (None, index) for item in self._items)

    def _blame_first(self, batch: deque[_Item], reason: str, stage: _Stage) -> None:
        """Queues a batch again whose first item ended its worker.

        The first item is queued at the end or, if this was its second try, scores 0 or, where code
        of the user's ran, has failed.
        """
        first = batch.popleft()
        is_second_try = first.has_ended_worker
        with self._changed:
            self.counters["restarted"] += 1
            self.counters["timeouts" if reason == "timeout" else "killed"] += 1
            self._items.extend(batch)
            if not is_second_try:
                self._items.append(first._replace(has_ended_worker=True))
            self._changed.notify_all()
        if is_second_try:
            limit = stage.seconds or first.seconds
            seconds = limit if reason == "timeout" else 0.0
            if stage.function:
                reason = f"{reason}: {stage.function}"
            if reason.startswith("timeout") and stage.seconds:
                reason += f" took more than task.reward.seconds={stage.seconds:g}"
            grade = Grade(stage.score, stage.correct, reason, seconds, failed=stage.is_users)
            self._deliver(first, grade)

    def _deliver(self, item: _Item, grade: Grade) -> None:
        if item.result is not None:
            with self._changed:
                if item.result in self._calls:
                    self._calls.remove(item.result)
                    item.result.set_result(grade)
            return
        reason = re.split("[:;]", grade.reason)[0]
        with self._changed:
            self.counters["graded"] += 1
            self.counters["disagreed"] += grade.reason.endswith("disagrees")
            if reason in COUNTER_OF_REASON:
                self.counters[COUNTER_OF_REASON[reason]] += 1
        self._grades.put((item.key, grade))
