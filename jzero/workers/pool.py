"""Grading in worker processes: a hostile response costs a bounded time and only its own score.

    pool.step(key, request)                      queues a turn; `poll` and `drain` return its grade
    pool.call("module:function", *arguments)     returns what the function returns, as JSON

The pool runs one thread per worker process (`worker.work`, a child of a `keeper`). The thread sends
its worker a batch of items and reads one answer per item.

The pool replaces a worker that ends, that stays silent for too long, or that sends anything but
answers (user-defined code may have written to its pipe). The item that the worker was grading is to
blame. That item gets a second try, because a machine may also kill a worker by chance. After the
second try the item scores 0 or, if user-defined code was running, its grade is marked as failed.
The other items of the batch go back to the queue.

An episode in an environment stays with the worker that holds the environment's state. An
environment that only waits needs no worker: the pool awaits its steps in an event loop
(`event_loop`, STEPPER) and treats their grades like the grades of a worker.

If `task.reward.functions` contains `judge`, a graded response then goes to a thread that asks the
judge, and the grade is returned with the judge's reward added.

Trainers import this module, but it imports no jax: the workers hold no device.
"""

import contextlib
import importlib
import json
import math
import os
import queue
import re
import signal
import socket
import sys
import threading
import traceback
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import NamedTuple, Protocol, TypeVar, cast

from jzero import terminal
from jzero.config import TaskConfig
from jzero.errors import UserError
from jzero.json_values import from_fields
from jzero.types import Grade, JsonValue
from jzero.workers import keeper
from jzero.workers.event_loop import EventLoop
from jzero.workers.judge import JUDGE, Judge, JudgeError, fill_rubric
from jzero.workers.pipe import (
    MAX_MESSAGE,
    BadMessageError,
    CallRequest,
    Pipe,
    TurnRequest,
    write_request,
)

T = TypeVar("T")

# Its function `step` awaits a turn in the event loop. Imported by name, as `keeper.WORKER` is: the
# pool itself knows no tasks and no environments.
STEPPER = "jzero.environments.asyncio_environments"
MAX_BATCH = 32  # items in one message
# The wall limit of an item is this many times its CPU limit, because the machine may be busy.
WALL_SECONDS_PER_CPU_SECOND = 5.0
START_SECONDS = 120.0  # for a worker to import its modules on a busy machine
MAX_STARTS = 3  # consecutive processes of one worker that end before they are ready
SEND_SECONDS = 120.0  # for a worker to read a batch
END_SECONDS = 15.0  # for a worker and all processes that it started to end
MAX_MESSAGES = 1000  # from a worker for one item, including the answer
MAX_ERRORS = 16_000  # bytes shown of one worker's stderr
MAX_NOTE = 4000  # characters
MAX_NOTES = 20  # per function

# The counter of each reason. The reason of "error: KeyError" is the part before the colon.
COUNTER_OF_REASON = {
    "no answer": "no_answer",
    "unparsed": "unparsed",
    "echo": "echo",
    "error": "errors",
}
COUNTERS = (
    *COUNTER_OF_REASON.values(),
    "graded",
    "timeouts",
    "killed",
    "restarted",
)


class Stepped(NamedTuple):
    """The result of a step that was awaited in the event loop."""

    grade: Grade
    needs_worker: bool  # whether a worker still has to call reward functions
    called: tuple[str, ...] = ()  # reward functions that were already called


class CallError(Exception):
    """A function that `Pool.call` has called failed; the message is the reason, in one line."""


class _Returned(NamedTuple):
    """The answer to a call."""

    value: JsonValue
    reason: str  # why the call failed; "" if it has returned the value


class _JudgeRequest(NamedTuple):
    """A request to the judge, sent once an item is graded."""

    message: str
    judge: Judge


class _Item(NamedTuple):
    """A turn that waits for its grade, or a call that waits for its result."""

    number: int  # unique in the pool; the answer must contain it
    key: Hashable  # chosen by the caller, returned with the grade
    seconds: float  # limit of CPU time
    message: str  # the request as JSON
    has_ended_worker: bool
    episode: str = ""  # the episode, if a worker holds its environment; "" for a stateless grader
    worker: int | None = None  # index of the only worker that may take the item; None: any worker
    judge_request: "_JudgeRequest | None" = None  # None: the item has no reward `judge`
    result: "Future[JsonValue] | None" = None  # of a call; None: `poll` returns the grade


class _Stage(NamedTuple):
    """The code that a worker is running: see the message `stage` in `worker`."""

    is_user_code: bool  # whether the running code is user-defined
    function: str  # a user-defined reward function; "" for the grader
    seconds: float | None  # wall-clock limit of the function; None for the grader
    score: float  # score and `correct` are the grader's verdict, once it exists
    correct: bool


_CHECKING = _Stage(is_user_code=False, function="", seconds=None, score=0.0, correct=False)

ShowNote = Callable[[str, str, str], None]  # function, kind, text


class _NotStarted(RuntimeError):
    """A grader process ended before it was ready."""


class _Worker:
    """A grader process (a child of its keeper), and the pool's end of the pipe to it."""

    def __init__(self, max_processes: int) -> None:
        self.stage = _CHECKING
        self._mark = uuid.uuid4().hex
        pool_end, worker_end = socket.socketpair()
        self.pipe = Pipe(pool_end, MAX_MESSAGE)
        with worker_end:  # closed in this process, so that the pipe ends with the worker
            descriptor = worker_end.fileno()
            arguments = f"{descriptor}, {os.getpid()}, {max_processes}"
            environment = {
                "PYTHONPATH": os.pathsep.join(sys.path),  # the worker imports the same graders
                "OMP_NUM_THREADS": "1",  # the workers share the cores
                keeper.MARK: self._mark,
            }
            self.process = Popen(
                [
                    sys.executable,
                    "-c",
                    f"from jzero.workers import keeper; keeper.keep({arguments})",
                ],
                stdin=DEVNULL,
                stdout=DEVNULL,  # prints of graders arrive as notes; stderr explains failures
                stderr=PIPE,
                env=os.environ | environment,
                pass_fds=[descriptor],
                start_new_session=True,  # Ctrl-C in the terminal is for the parent
            )
        # A thread reads stderr, because a process that writes to a full pipe blocks.
        self._stderr_thread = threading.Thread(target=self._copy_stderr, daemon=True)
        self._stderr_thread.start()

    def send(self, batch: deque[_Item]) -> None:
        self.stage = _CHECKING
        messages = ",".join(item.message for item in batch)
        self.pipe.send(f"[{messages}]".encode(), SEND_SECONDS)

    def receive(self, seconds: float) -> bytes:
        """Returns the next message.

        Raises:
            TimeoutError: No message arrived within `seconds`.
            OSError, EOFError: The process has ended.
            BadMessageError: The message is too long.
        """
        return self.pipe.receive(seconds)

    def receive_answer(self, item: _Item, show_note: ShowNote) -> Grade | _Returned:
        """Returns the answer to `item`, which must be the item that the worker is working on.

        Raises the errors of `receive`, and BadMessageError for a message that no worker sends.
        """
        self.stage = _CHECKING
        for _ in range(MAX_MESSAGES):
            seconds = self.stage.seconds
            if seconds is None:
                seconds = item.seconds * WALL_SECONDS_PER_CPU_SECOND
            message = self.receive(seconds)
            try:
                kind, *content = json.loads(message)
                if kind == "answer" and item.result is None:
                    number, fields = content
                    if number == item.number:
                        return _read_grade(fields)
                elif kind == "returned" and item.result is not None:
                    number, value, reason = content
                    if number == item.number:
                        return _Returned(value, str(reason))
                elif kind == "stage":
                    # The next message is due within the limit of the new stage.
                    self.stage = _read_stage(*content)
                    continue
                elif kind == "note":
                    function, name, text = content
                    show_note(str(function), str(name), str(text))
                    continue
            except (ValueError, TypeError, RecursionError) as error:
                raise BadMessageError(type(error).__name__) from None
            raise BadMessageError("a message for another item, or of an unknown kind")
        # Without this bound a function that writes notes in a loop would keep its item alive: each
        # message starts a new wait.
        raise BadMessageError("too many messages for one item")

    def request_end(self) -> None:
        """Asks the keeper to end the process, and returns at once."""
        with contextlib.suppress(ProcessLookupError):  # the process ended between the two calls
            if self.process.poll() is None:
                self.process.terminate()
                # A stopped keeper handles SIGTERM only after it continues.
                self.process.send_signal(signal.SIGCONT)

    def end(self) -> int:
        """Ends the process if it still runs, with all processes that it has started.

        Returns its exit status, negative for a signal.
        """
        self.request_end()
        try:
            status = self.process.wait(END_SECONDS)
        except TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        if status == -signal.SIGKILL:  # a keeper that was killed leaves its children running
            keeper.end_marked(self._mark)
        self._stderr_thread.join(1.0)  # the pipe stays open if a process could not be ended
        return status

    def wait(self) -> int:
        """Returns the exit status after the pipe has ended; ends the process if it still runs."""
        # The keeper exits after the processes that it has to kill.
        with contextlib.suppress(TimeoutExpired):
            self.process.wait(1.0)
        return self.end()

    def _copy_stderr(self) -> None:
        """Copies the first MAX_ERRORS bytes of the process's stderr to this process's stderr."""
        assert self.process.stderr is not None
        count = 0
        with self.process.stderr as errors, contextlib.suppress(OSError, ValueError):
            while text := os.read(errors.fileno(), 1 << 16):
                shown = text[: max(MAX_ERRORS - count, 0)]
                count += len(text)
                if shown:
                    terminal.write(shown.decode("utf-8", "replace"), sys.stderr, end="")
                    if count > MAX_ERRORS:
                        note = "\n(further errors of this grader process are left out)"
                        terminal.write(note, sys.stderr)


def _read_stage(
    is_user_code: object,
    function: object,
    seconds: object,
    score: object,
    correct: object,
) -> _Stage:
    limit = None if seconds is None else _read_float(seconds)
    return _Stage(bool(is_user_code), str(function), limit, _read_float(score), bool(correct))


class _Result(Protocol):
    """A future of any type: `Future[A]` is no `Future[B]`."""

    def set_exception(self, exception: BaseException | None) -> None: ...


def _read_grade(fields: JsonValue) -> Grade:
    """Returns the grade of an answer, after checking the types of its fields.

    Raises:
        TypeError, ValueError: a field has the wrong type.
    """
    grade = from_fields(Grade, fields)
    # User-defined code may have written the message, so every type is checked.
    kinds = {
        "correct": bool,
        "reason": str,
        "parts": dict,
        "reply": str | list | None,
        "failed": bool,
        "failed_function": str,
        "tool_calls": int,
        "failed_tool_calls": int,
    }
    for name, kind in kinds.items():
        if not isinstance(getattr(grade, name), kind):
            raise TypeError(name)
    for name in ("score", "seconds", "tool_seconds"):
        _read_float(getattr(grade, name))
    return grade


def _read_float(value: object) -> float:
    # json also reads NaN and Infinity.
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError
    return value


class Pool(contextlib.AbstractContextManager["Pool"]):
    """Grader processes. Any thread may submit; one thread may poll, drain and close.

    `counters` counts graded responses, some of their reasons, and the ends of workers.
    """

    def __init__(
        self,
        workers: int,
        judge_cache: Path | None = None,
        max_processes: int = keeper.MAX_PROCESSES,
    ) -> None:
        """Starts the workers.

        Args:
            workers: number of workers; 0 if all items are stepped in the event loop.
            judge_cache: a file for the judge's answers; None keeps them in memory only.
            max_processes: that a worker may have running at a time.
        """
        self._max_processes = max_processes
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._items: deque[_Item] = deque()
        # A thread that fails puts its exception here.
        self._grades: queue.SimpleQueue[tuple[Hashable, Grade] | Exception] = queue.SimpleQueue()
        self._num_submitted = 0
        self._num_returned = 0
        self._changed = threading.Condition()  # guards the items and the counters
        self._closed = False
        self._notes: set[tuple[str, str]] = set()  # (function, kind) of the notes already shown
        self._workers: list[_Worker | None] = [None] * workers
        self._worker_of_episode: dict[str, int] = {}
        self._judge_cache = judge_cache
        self._judge: Judge | None = None
        self._judge_threads: ThreadPoolExecutor | None = None
        self._event_loop: EventLoop | None = None
        self._waiting: set[_Result] = set()  # missing results of `call` and `gather`
        self._threads = []
        for index in range(workers):
            # A daemon thread: a main thread that fails does not wait for a hanging grader.
            thread = threading.Thread(target=self._run, args=(index,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def step(self, key: Hashable, request: TurnRequest) -> None:
        """Queues a turn, whose grade `poll` and `drain` return with the key."""
        assert not self._closed
        judge_request = self._judge_request(request)
        with self._changed:
            number = self._num_submitted
            self._num_submitted += 1
            item = _Item(
                number,
                key,
                request.task.grade_seconds,
                "",
                has_ended_worker=False,
                judge_request=judge_request,
            )
            if not request.in_event_loop:
                self._enqueue(self._with_worker(item, request), request)
                return
            self._loop(request.task.reward.seconds).start(self._step(item, request))

    def poll(self, wait: bool = False) -> list[tuple[Hashable, Grade]]:
        """Returns the keys and grades that are ready, in no particular order.

        If `wait` is true, blocks until at least one grade is ready; needs a response without a
        grade.
        """
        # Only this thread takes grades, so as many as the queue holds now can be taken without
        # waiting.
        num_ready = self._grades.qsize()
        if wait:
            num_ready = max(num_ready, 1)
        return [self._take() for _ in range(num_ready)]

    def drain(self) -> list[tuple[Hashable, Grade]]:
        """Waits until everything is graded, and returns the keys and grades not yet returned."""
        return [self._take() for _ in range(self._num_submitted - self._num_returned)]

    def call(
        self,
        path: str,
        *arguments: JsonValue,
        task: TaskConfig,
        user_code: str = "",
    ) -> JsonValue:
        """Calls `function(task, *arguments)` in a worker, and waits for its result.

        Any thread may call this, also while another thread polls.

        Args:
            path: "module:function", a function of jzero that returns JSON.
            arguments: JSON values.
            task: the settings, with the limits.
            user_code: the name of the user-defined code that the function runs, "" if it runs none.

        Raises:
            CallError: the function failed, took too long, or ended its process.
        """
        result: Future[JsonValue] = Future()
        request = CallRequest(path, list(arguments), task, user_code)
        with self._changed:
            assert not self._closed
            self._waiting.add(result)
            # No item of `step` has this number.
            item = _Item(-1, None, task.grade_seconds, "", has_ended_worker=False, result=result)
            self._enqueue(item, request)
        return result.result()

    def gather(
        self,
        functions: Sequence[Callable[[], Awaitable[T]]],
        blocked_seconds: float,
    ) -> list[T]:
        """Awaits all functions at once in the event loop of the pool, and returns their results.

        Raises:
            UserError: user-defined code has ended the loop, or blocked it for `blocked_seconds`.
            Exception: any exception of the functions.
        """
        results: list[Future[T]] = [Future() for _ in functions]
        with self._changed:
            self._waiting.update(results)
            loop = self._loop(blocked_seconds)
        for function, result in zip(functions, results, strict=True):
            loop.start(self._await(function, result))
        return [result.result() for result in results]

    def count(self, counter: str) -> None:
        """Adds one to a counter of COUNTERS. Any thread may call this."""
        with self._changed:
            self.counters[counter] += 1

    def show_note(self, function: str, kind: str, text: str) -> None:
        """Prints the output or error of a function: each kind once, at most MAX_NOTES in all."""
        with self._changed:
            num_notes = sum(noted == function for noted, _ in self._notes)
            if (function, kind) in self._notes or num_notes >= MAX_NOTES:
                return
            self._notes.add((function, kind))
        lines = text[-MAX_NOTE:].rstrip("\n")
        terminal.write(f"{function} {kind} (shown once):\n{lines}", sys.stderr)

    def start(
        self, coroutine: Coroutine[None, None, None], blocked_seconds: float | None = None
    ) -> None:
        """Runs a coroutine, which must handle its own errors, in the event loop of the pool.

        blocked_seconds: after which code that blocks the loop ends the run. None: the loop runs
            already.
        """
        if blocked_seconds is not None:
            with self._changed:
                self._loop(blocked_seconds)
        assert self._event_loop is not None, "it starts with the first item that is stepped"
        self._event_loop.start(coroutine)

    @property
    def is_closed(self) -> bool:
        """Whether the pool has been closed, so that environments are only closed."""
        return self._closed

    def at_end(self, function: Callable[[], Awaitable[None]]) -> None:
        """Registers a function to await in the event loop when the pool is closed."""
        assert self._event_loop is not None, "what runs in the event loop calls this"
        self._event_loop.at_end(function)

    def close(self, *_: object) -> None:
        """Kills the workers and cancels awaited steps. Responses without a grade stay ungraded."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            workers = [worker for worker in self._workers if worker is not None]
        for worker in workers:
            # The keepers end their workers in parallel: asks all of them before waiting for any.
            worker.request_end()
        for worker in workers:
            worker.end()
        if self._event_loop is not None:
            self._event_loop.close()
        if self._judge is not None and self._judge_threads is not None:
            self._judge.end()
            self._judge_threads.shutdown(wait=False, cancel_futures=True)
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

    def _with_worker(self, item: _Item, request: TurnRequest) -> _Item:
        """Returns the item with the worker that holds the environment of its episode."""
        if not request.episode:
            return item
        # Any worker may start an episode; later turns go to the same worker.
        worker = self._worker_of_episode.get(request.episode) if request.earlier else None
        return item._replace(episode=request.episode, worker=worker)

    def _enqueue(self, item: _Item, request: TurnRequest | CallRequest) -> None:
        """Queues an item for the workers."""
        message = write_request(item.number, request)
        with self._changed:
            self._items.append(item._replace(message=message))
            self._changed.notify_all()

    def _loop(self, blocked_seconds: float) -> EventLoop:
        """Returns the event loop. It starts when it is first used: most runs need none."""
        if self._event_loop is None:
            self._event_loop = EventLoop(
                blocked_seconds,
                self._report_blocked,
                self._report_ended_loop,
                self._show_error_of_task,
            )
        return self._event_loop

    async def _step(self, item: _Item, request: TurnRequest) -> None:
        """Awaits a step; passes its grade to a worker if reward functions remain to be called."""
        try:
            stepped: Stepped = await importlib.import_module(STEPPER).step(self, request)
            if stepped.grade.failed or not stepped.needs_worker:
                self._finish(item, stepped.grade)
                return
            self._enqueue(item, replace(request, step=stepped.grade, called=stepped.called))
        except Exception as error:  # a bug in jzero must not leave the run waiting
            self._grades.put(error)
        except BaseException as error:  # user-defined code may cancel all tasks of the loop
            if not self._closed:
                reason = f"killed: {type(error).__name__} in the event loop"
                self._finish(item, Grade(0.0, False, reason, failed=True))
            raise

    async def _await(self, function: Callable[[], Awaitable[T]], result: "Future[T]") -> None:
        """Awaits a function of `gather`."""
        error: Exception | None = None
        returned: T | None = None
        try:
            returned = await function()
        except Exception as raised:  # a bug in jzero must not leave the caller waiting
            error = raised
        except BaseException as raised:  # user-defined code may cancel all tasks of the loop
            error = UserError(f"killed: {type(raised).__name__} in the event loop")
            raise
        finally:
            with self._changed:
                if result in self._waiting:
                    self._waiting.remove(result)
                    if error is not None:
                        result.set_exception(error)
                    else:
                        result.set_result(cast(T, returned))

    def _report_ended_loop(self, error: BaseException | None) -> None:
        self._fail(
            UserError(
                "an environment has ended the event loop that awaits all of them "
                f"({type(error).__name__}): fix the environment, "
                "or set task.environment_mode=processes"
            )
        )

    def _show_error_of_task(self, message: str, error: BaseException | None) -> None:
        text = message
        with contextlib.suppress(BaseException):  # the printing of a hostile error may fail, too
            text = "".join(traceback.format_exception(error)) if error is not None else message
        self.show_note("a task of an environment", f"raised {type(error).__name__}", text)

    def _report_blocked(self, seconds: float, where: str) -> None:
        self._fail(
            UserError(
                f"an environment has blocked all others for {seconds:g} seconds at {where}: await "
                "slow operations, or set task.environment_mode=processes"
            )
        )

    # The judge

    def _judge_request(self, request: TurnRequest) -> _JudgeRequest | None:
        """Returns the request to the judge, None if no judge reward is configured."""
        rewards = request.task.reward
        if JUDGE not in rewards.functions:
            return None
        assert rewards.judge is not None, "check_rewards has found it"
        with self._changed:
            if self._judge is None:
                self._judge = Judge(rewards.judge, rewards.seconds, self._judge_cache)
                self._judge_threads = ThreadPoolExecutor(rewards.judge.concurrency)
            assert self._judge.settings == rewards.judge, "one pool has one judge"
        message = fill_rubric(rewards.judge, request.response, request.gold, request.values)
        return _JudgeRequest(message, self._judge)

    def _finish(self, item: _Item, grade: Grade) -> None:
        """Delivers a grade, after the judge has added its reward if the item asks for one."""
        # The judge does not score a turn that calls tools and continues.
        calls_tools = grade.tool_calls > 0 and grade.reply is not None
        if item.judge_request is None or grade.failed or calls_tools:
            self._deliver(item, grade)
            return
        with self._changed:
            if self._closed:
                return
            assert self._judge_threads is not None, "set where the item was submitted"
            self._judge_threads.submit(self._ask_judge, item, item.judge_request, grade)

    def _ask_judge(self, item: _Item, judge_request: _JudgeRequest, grade: Grade) -> None:
        try:
            score = judge_request.judge.score(judge_request.message)
        except JudgeError as error:
            self.show_note(JUDGE, "failed", str(error))
            reason = f"error: {JUDGE}: {error}"
            # A failed episode has no score, so it needs no reply.
            failed = replace(grade, reason=reason, failed=True, failed_function=JUDGE, reply=None)
            self._deliver(item, failed)
        except Exception as error:  # a bug in jzero must not leave the run waiting
            self._grades.put(error)
        else:
            self._deliver(item, replace(grade, parts=grade.parts | {JUDGE: score}))

    # The threads of the workers

    def _run(self, index: int) -> None:
        """Runs the workers of one thread, one at a time.

        A worker that ends before it is ready may have been killed by chance, so another one is
        started. After MAX_STARTS such ends in a row the thread fails.
        """
        failed_starts = 0
        try:
            while not self._closed:
                worker = self._workers[index] = _Worker(self._max_processes)
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
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Makes `poll`, and everything that waits for a result, raise an error.

        After `close` the grades are never read, so that the end of a worker that `close` caused is
        no error.
        """
        self._grades.put(error)
        with self._changed:
            for result in self._waiting:
                result.set_exception(error)
            self._waiting.clear()

    def _serve(self, worker: _Worker, index: int) -> None:
        """Sends batches to a worker, until the pool is closed or the worker ends.

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
                    # The worker started this item when it answered the previous one, so the wait
                    # measures only this item's time.
                    answer = worker.receive_answer(batch[0], self.show_note)
                    item = batch.popleft()
                    if isinstance(answer, _Returned):
                        self._return(item, answer)
                        continue
                    self._keep_episode(item, index, answer)
                    self._finish(item, answer)
        except BadMessageError as error:
            worker.end()
            if not is_ready:
                raise _NotStarted("a grader process sent no message: see its stderr") from None
            detail = f"its process wrote to the pipe for grades ({error})"
            self._blame_first(batch, "killed", worker.stage, detail)
        except (OSError, EOFError) as error:  # the worker ended, or timed out (also an OSError)
            is_silent = isinstance(error, TimeoutError)
            status = worker.end() if is_silent else worker.wait()
            if not is_ready:
                message = "a grader process did not start: see its stderr"
                raise _NotStarted(message) from None
            # SIGPROF is the worker's own CPU timer (`worker._grade`).
            is_late = is_silent or status == -signal.SIGPROF
            detail = self._describe_end(status)
            self._blame_first(batch, "timeout" if is_late else "killed", worker.stage, detail)
        finally:
            worker.end()
            worker.pipe.close()

    def _describe_end(self, status: int) -> str:
        """Returns why a worker had to end, if its exit status tells."""
        if status == keeper.OUT_OF_MEMORY:
            return "took more than task.reward.memory_gib"
        if status == keeper.TOO_MANY_PROCESSES:
            return f"started more than {self._max_processes} processes"
        return ""

    def _keep_episode(self, item: _Item, index: int, grade: Grade) -> None:
        """Remembers the worker that holds the environment of an episode, until the episode ends."""
        if item.episode:
            with self._changed:
                self._worker_of_episode[item.episode] = index
                if grade.reply is None:
                    del self._worker_of_episode[item.episode]

    def _next_batch(self, index: int) -> deque[_Item]:
        """Waits for items that worker `index` may take, and takes a share of them.

        Returns an empty batch once the pool is closed.

        A share is about half of a worker's part of the queue, so that all workers finish together.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_item_for(index))
            if self._closed:
                return deque()
            share = min(MAX_BATCH, 1 + len(self._items) // (2 * len(self._workers)))
            batch: deque[_Item] = deque()
            skipped: deque[_Item] = deque()
            while self._items and len(batch) < share:
                item = self._items.popleft()
                (batch if item.worker in (None, index) else skipped).append(item)
            # Items of other workers return to the front, in their order.
            self._items.extendleft(reversed(skipped))
            return batch

    def _has_item_for(self, index: int) -> bool:
        return any(item.worker in (None, index) for item in self._items)

    def _blame_first(
        self,
        batch: deque[_Item],
        reason: str,
        stage: _Stage,
        detail: str = "",
    ) -> None:
        """Requeues a batch after its first item ended its worker.

        The first item goes to the end of the queue. If this was its second try, it scores 0 or, if
        user-defined code was running, its grade has failed. `detail` adds to the reason of the
        failure.
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
            # A reward function has its own limit; the grader has the limit of the item.
            limit = stage.seconds or first.seconds
            seconds = limit if reason == "timeout" else 0.0
            if stage.function:
                reason = f"{reason}: {stage.function}"
            if reason.startswith("timeout") and stage.seconds:
                reason += f" took more than task.reward.seconds={stage.seconds:g}"
            elif stage.function and detail:
                reason += f": {detail}"
            if first.result is not None:
                self._return(first, _Returned(None, reason))
                return
            grade = Grade(
                stage.score,
                stage.correct,
                reason,
                seconds,
                failed=stage.is_user_code,
                failed_function=stage.function,
            )
            self._deliver(first, grade)

    def _return(self, item: _Item, answer: _Returned) -> None:
        """Hands the answer to a call to its caller. Calls are not counted."""
        assert item.result is not None, f"{item.number=}"
        with self._changed:
            # Missing if a thread failed: the call then has an exception as its result.
            if item.result not in self._waiting:
                return
            self._waiting.remove(item.result)
            if answer.reason:
                item.result.set_exception(CallError(answer.reason))
            else:
                item.result.set_result(answer.value)

    def _deliver(self, item: _Item, grade: Grade) -> None:
        reason = re.split("[:;]", grade.reason)[0]
        with self._changed:
            self.counters["graded"] += 1
            if reason in COUNTER_OF_REASON:
                self.counters[COUNTER_OF_REASON[reason]] += 1
        self._grades.put((item.key, grade))
