"""Distributes the problems over servers, and handles refusals, failures and unavailable servers.

Each server has threads that take the next request as soon as the last one is answered, so a fast
server answers more of them. The caller's thread grades the responses and writes the rows.

Handling of a request without an answer:

- The server refuses the prompt (400, 413, 422, ...): its row gets an error. If no request has been
  answered yet, the prompt is probably not the cause. After `max_refused` such refusals the command
  ends instead.
- No answer after all tries, or only invalid replies: the request is held until it is clear whether
  the request or its server is the cause. If the server answers a request that was sent later, the
  row of the held request gets an error. If the server does not list its models either, or
  MOST_FAILURES requests fail that were sent one after the other, the server is unavailable. Its
  requests are sent to other servers.
- The server refuses all requests (401, 403, 404, ...): it is unavailable immediately.

An unavailable server is retried after a while, with one request at a time. The command ends when
all servers are unavailable. Every request has a deadline, so each of these decisions comes in time.
"""

import contextlib
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

from jzero import http, terminal
from jzero.blueprint import DEFAULT_SLOTS
from jzero.config import Config
from jzero.environments import batched_rewards
from jzero.errors import UserError
from jzero.files import JsonObject
from jzero.generation import rows
from jzero.generation.progress import SECONDS_BETWEEN_LINES, Progress
from jzero.generation.rows import Response, RowFile
from jzero.generation.servers import Server, is_about_prompt
from jzero.rewards import rewards
from jzero.rollout.turns import make_request
from jzero.types import Grade, JsonValue, Problem, Turn, grade_of
from jzero.workers.pool import Pool

MOST_FAILURES = 3  # of consecutive requests to a server, without an answer between them
FIRST_REST = 30.0  # seconds until an unavailable server is retried; each rest is twice as long
LONGEST_REST = 600.0
POLL_SECONDS = 0.05  # polling interval for grades while no reply arrives
SYNC_SECONDS = 5.0  # interval between flushes to the disk
OPEN_PER_THREAD = 2  # maximum number of requests per thread that are in flight or being graded


@dataclass(eq=False)
class Unit:
    """Problems with rows that are written together, because rewards or a row need all responses."""

    numbers: range  # indices of the problems
    missing: set[rows.Key]  # samples without a response yet
    responses: dict[rows.Key, Response] = field(default_factory=dict)
    kept_rows: list[JsonObject] = field(default_factory=list)  # earlier rows of the other samples


class Request(NamedTuple):
    """A request for one response."""

    unit: Unit
    key: rows.Key  # index of the problem, and of the sample


class Outcome(NamedTuple):
    """The result of a request: a response or an exception."""

    server: Server
    request: Request
    result: tuple[Turn, str | None] | BaseException
    sent: float  # time of the request, by time.monotonic


class Failure(NamedTuple):
    """A request without an answer. Its cause, the request or the server, is not decided yet."""

    server: Server
    request: Request
    error: http.RemoteError
    failed: float  # time of the failure, by time.monotonic


@dataclass(frozen=True)
class Plan:
    """The responses to make."""

    problems: Sequence[Problem]
    num_samples: int
    model_name: str  # in rows
    max_refused: int  # before the first answer; 0 for no limit
    retry_errors: bool  # whether samples with an error are requested again


class Generation:
    """Requests all responses that are missing in a file."""

    def __init__(
        self,
        plan: Plan,
        settings: Config,
        pool: Pool,
        servers: Sequence[Server],
        file: RowFile,
    ) -> None:
        self._plan = plan
        self._settings = settings
        self._task = settings.task
        self._pool = pool
        self._servers = servers
        self._file = file
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._is_comparing = rewards.compare_responses(settings.task.reward)
        # Without a response in the file or from a server, refusals may be caused by the command.
        self._is_ever_answered = len(file.places) > 0 and file.num_errors < self._num_responses
        self._failures: list[Failure] = []
        self._refusals: list[Failure] = []
        self._units_by_key: dict[rows.Key, Unit] = {}  # of responses that are being graded
        total = len(plan.problems) * plan.num_samples
        self._num_missing = sum(len(unit.missing) for unit in self._units())
        done = total - self._num_missing
        self._progress = Progress("responses", total, done, SECONDS_BETWEEN_LINES)

        # The threads of the servers share the following fields under this lock.
        self._changed = threading.Condition()
        self._requests = self._make_requests()
        self._returned: deque[Request] = deque()
        self._num_open = 0  # requests that are in flight or being graded
        self._is_exhausted = False
        self._is_stopped = False
        num_threads = (settings.rollout.num_slots or DEFAULT_SLOTS) * len(servers)
        self._most_open = OPEN_PER_THREAD * num_threads

    @property
    def _num_responses(self) -> int:
        """Number of responses and errors in the file."""
        per_row = self._plan.num_samples if self._file.is_grouped else 1
        return len(self._file.places) * per_row

    def run(self) -> None:
        """Returns when all rows are in the file.

        Raises UserError if all servers are unavailable, or if they refuse every request.
        """
        if not self._num_missing:
            return
        num_threads = self._settings.rollout.num_slots or DEFAULT_SLOTS
        threads = ThreadPoolExecutor(num_threads * len(self._servers))
        for server in self._servers:
            for _ in range(num_threads):
                threads.submit(self._ask_on, server)
        try:
            self._collect()
        finally:
            with self._changed:
                self._is_stopped = True
                self._changed.notify_all()
            for server in self._servers:
                server.close()
            threads.shutdown(cancel_futures=True)

    # -- Requests ----------------------------------------------------------------------------------

    def _units(self) -> Iterator[Unit]:
        """Yields the units with samples that are missing in the file."""
        # Rewards that compare responses need rollout.num_prompts problems together, as in training.
        size = self._settings.rollout.num_prompts if self._is_comparing else 1
        samples = range(self._plan.num_samples)
        for first in range(0, len(self._plan.problems), size):
            numbers = range(first, min(first + size, len(self._plan.problems)))
            if self._is_comparing or self._file.is_grouped:
                unit = self._joint_unit(numbers)
                if unit.missing:
                    yield unit
                continue
            for sample_index in samples:
                key = (first, sample_index)
                if self._is_missing(key):
                    yield Unit(numbers, {key})

    def _joint_unit(self, numbers: range) -> Unit:
        """Returns a unit whose samples are written together."""
        samples = range(self._plan.num_samples)
        keys = set(itertools.product(numbers, samples))
        missing = {key for key in keys if self._is_missing(key)}
        if not missing:
            return Unit(numbers, set())
        if self._is_comparing:  # scores depend on all responses, so request all of them again
            return Unit(numbers, keys)
        unit = Unit(numbers, missing)
        row_key = (numbers.start, 0)
        if row_key in self._file.places:
            flat_rows = rows.ungroup(self._file.read(row_key))
            unit.kept_rows = [
                row for row in flat_rows if (numbers.start, row["sample"]) not in missing
            ]
        return unit

    def _is_missing(self, key: rows.Key) -> bool:
        number, sample_index = key
        place = self._file.places.get((number, 0) if self._file.is_grouped else key)
        if place is None:
            return True
        return self._plan.retry_errors and sample_index in place.failed

    def _make_requests(self) -> Iterator[Request]:
        for unit in self._units():
            for key in sorted(unit.missing):
                yield Request(unit, key)

    # -- The threads of the servers ----------------------------------------------------------------

    def _ask_on(self, server: Server) -> None:
        """Sends requests to one server, one after the other. Runs in a thread."""
        while (request := self._take(server)) is not None:
            number, sample_index = request.key
            sent = time.monotonic()
            try:
                result = server.ask(self._plan.problems[number], sample_index)
            # Re-raised in the caller's thread unless it is a RemoteError
            except BaseException as error:
                result = error
            self._outcomes.put(Outcome(server, request, result, sent))

    def _take(self, server: Server) -> Request | None:
        """Waits for the next request to a server, and returns None at the end."""
        with self._changed:
            while not self._is_stopped:
                # After a rest, a server gets one request at a time until it answers.
                is_tried_again = server.rests > 0 and server.num_asked > 0
                may_ask = not server.is_resting and not is_tried_again
                if may_ask and self._num_open < self._most_open:
                    request = self._next_request()
                    if request is not None:
                        self._num_open += 1
                        server.num_asked += 1
                        return request
                self._changed.wait(1.0)
        return None

    def _next_request(self) -> Request | None:
        # Requests returned from other servers come first, because the rows of their units wait for
        # them.
        if self._returned:
            return self._returned.popleft()
        request = next(self._requests, None)
        self._is_exhausted |= request is None
        return request

    # -- The thread of the caller ------------------------------------------------------------------

    def _collect(self) -> None:
        """Writes rows until none is missing."""
        last_sync = time.monotonic()
        try:
            while not self._is_over():
                with contextlib.suppress(queue.Empty):
                    self._handle(self._outcomes.get(timeout=POLL_SECONDS))
                self._take_grades(self._pool.poll())
                if time.monotonic() - last_sync > SYNC_SECONDS:
                    self._file.sync()
                    last_sync = time.monotonic()
        except UserError:
            # The command ends with an error, but finished responses are not lost.
            self._keep_answers()
            raise
        finally:
            self._file.sync()

    def _keep_answers(self) -> None:
        """Writes the rows of all responses that have arrived."""
        with contextlib.suppress(queue.Empty):
            while True:
                outcome = self._outcomes.get_nowait()
                if isinstance(outcome.result, tuple):
                    self._handle(outcome)
        self._take_grades(self._pool.drain())

    def _is_over(self) -> bool:
        """Returns whether no request is left, and decides on the failures of the last requests."""
        with self._changed:
            if self._num_open or self._returned or not self._is_exhausted:
                return False
        for server in {failure.server for failure in self._failures}:
            if not self._is_ever_answered or not server.is_alive():
                self._rest(server)
        if self._returned:
            return False
        self._fail([*self._refusals, *self._failures])
        return True

    def _handle(self, outcome: Outcome) -> None:
        server, request, result, sent = outcome
        with self._changed:
            server.num_asked -= 1
        if isinstance(result, tuple):
            self._count_answer(server, sent)
            turn, reasoning = result
            request.unit.responses[request.key] = Response(turn, reasoning)
            self._submit(request, turn)
            return
        self._close_request()
        # Any other exception is a bug in jzero, and ends the command.
        if not isinstance(result, http.RemoteError):
            raise result
        failure = Failure(server, request, result, time.monotonic())
        if isinstance(result, http.Refused) and is_about_prompt(result):
            self._handle_refusal(failure)
        elif server.is_resting:
            # The server is already known to be unavailable, so the request is not at fault.
            self._give_back([failure])
        elif isinstance(result, http.Refused):
            # A refusal that is not about the prompt concerns every request to this server.
            self._failures.append(failure)
            self._rest(server)
        else:
            self._failures.append(failure)
            # Requests that were in flight together fail together: count them once.
            if sent >= server.last_failure:
                server.last_failure = failure.failed
                server.failures += 1
                is_gone = server.failures >= MOST_FAILURES or server.rests > 0
                if is_gone or not server.is_alive():
                    self._rest(server)

    def _count_answer(self, server: Server, sent: float) -> None:
        """Records an answer of a server, so that earlier failures count against their requests."""
        self._is_ever_answered = True
        with self._changed:
            server.failures = 0
            server.rests = 0
            server.rests_until = 0.0
            self._changed.notify_all()
        # The server answered a request that was sent after these failures: it works, so the failed
        # requests themselves are the cause.
        decided = [
            failure
            for failure in self._failures
            if failure.server is server and failure.failed < sent
        ]
        self._fail([*self._refusals, *decided])

    def _handle_refusal(self, failure: Failure) -> None:
        self._refusals.append(failure)
        limit = self._plan.max_refused
        if self._is_ever_answered:
            self._fail([failure])
        elif 0 < limit <= len(self._refusals):
            raise UserError(
                f"the first {limit} requests were refused, and nothing was answered: "
                f"{failure.error}. If the prompts are at fault, raise --max-refused"
            )

    def _rest(self, server: Server) -> None:
        """Stops requests to a server for a while. Raises UserError if all servers are resting."""
        with self._changed:
            seconds = min(FIRST_REST * 2.0**server.rests, LONGEST_REST)
            server.rests += 1
            server.failures = 0
            server.rests_until = time.monotonic() + seconds
        failures = [failure for failure in self._failures if failure.server is server]
        # No server is left that could take over the requests.
        if all(other.is_resting for other in self._servers):
            raise self._no_server_left(failures[-1].error)
        self._give_back(failures)
        error = failures[-1].error
        terminal.say(f"{error}: other servers take its requests for {seconds:.0f} s")

    def _no_server_left(self, error: http.RemoteError) -> UserError:
        retries = self._servers[0].options.retries
        return UserError(
            f"{error} (a request is repeated --retries={retries} times); the same "
            "command continues from here"
        )

    def _give_back(self, failures: Sequence[Failure]) -> None:
        """Returns failed requests to the queue, for other servers."""
        self._failures = [failure for failure in self._failures if failure not in failures]
        with self._changed:
            self._returned.extend(failure.request for failure in failures)
            self._changed.notify_all()

    def _fail(self, failures: Sequence[Failure]) -> None:
        """Writes errors instead of responses."""
        self._failures = [failure for failure in self._failures if failure not in failures]
        self._refusals = [failure for failure in self._refusals if failure not in failures]
        for failure in failures:
            # Rows do not contain the server's address.
            error = str(failure.error).replace(failure.server.label, "the server")
            self._complete(failure.request, Response(error=error))

    def _close_request(self) -> None:
        """Records that a request is neither in flight nor being graded."""
        with self._changed:
            self._num_open -= 1
            self._changed.notify_all()

    # -- Grades and rows ---------------------------------------------------------------------------

    def _submit(self, request: Request, turn: Turn) -> None:
        """Submits a response for grading."""
        number, sample_index = request.key
        problem, task = self._plan.problems[number], self._task
        self._pool.step(
            request.key, make_request(problem, sample_index, turn.text, (), task, is_last=True)
        )
        self._units_by_key[request.key] = request.unit

    def _take_grades(self, grades: Sequence[tuple[Hashable, Grade]]) -> None:
        for key, grade in grades:
            key = cast(rows.Key, key)
            unit = self._units_by_key.pop(key)
            response = unit.responses[key]
            assert response.turn is not None, f"{key=}"
            graded = replace(response, turn=replace(response.turn, grade=grade))
            self._complete(Request(unit, key), graded)
            self._close_request()

    def _complete(self, request: Request, response: Response) -> None:
        """Stores a graded response or an error, and writes the rows of a complete unit."""
        unit, key = request
        unit.responses[key] = response
        unit.missing.remove(key)
        if not unit.missing:
            self._write(unit)
        tokens = response.turn.end if response.turn else 0
        self._progress.add(1, tokens, errors=int(response.error is not None))

    def _write(self, unit: Unit) -> None:
        self._add_batch_rewards(unit)
        # Samples of earlier commands are part of the grouped row, too.
        flat_rows = [*unit.kept_rows]
        for (number, sample_index), response in unit.responses.items():
            problem = self._plan.problems[number]
            row = rows.make_row(problem, sample_index, response, self._plan.model_name)
            flat_rows.append(row)
        flat_rows.sort(key=lambda row: row["sample"])
        if self._file.is_grouped:
            by_id: dict[str, list[JsonObject]] = {}
            for row in flat_rows:
                by_id.setdefault(row["id"], []).append(row)
            flat_rows = [rows.group(problem_rows) for problem_rows in by_id.values()]
        self._file.append(flat_rows)

    def _add_batch_rewards(self, unit: Unit) -> None:
        """Adds the rewards that compare the responses of a batch, and sums up all rewards.

        As in training, a batch is a unit, or with task.reward.batch=group the responses to one
        problem.
        """
        batches: dict[int, dict[rows.Key, Turn]] = {}
        for key, response in sorted(unit.responses.items()):
            if response.turn:
                number, _ = key
                batch = number if self._task.reward.batch == "group" else 0
                batches.setdefault(batch, {})[key] = response.turn
        results: list[dict[str, JsonValue]] = [{} for _ in batches]
        if batches and rewards.batched(self._task.reward):
            episodes = [
                [
                    batched_rewards.Episode(
                        self._plan.problems[number], [(turn.text, grade_of(turn))]
                    )
                    for (number, _), turn in batch.items()
                ]
                for batch in batches.values()
            ]
            results = batched_rewards.call_all(self._pool, self._task, episodes)
        for batch, values in zip(batches.values(), results, strict=True):
            turns = list(batch.values())
            grades = rewards.add_batch_rewards(
                batched_rewards.add([grade_of(turn) for turn in turns], values),
                [len(turn.text) for turn in turns],
                [turn.end for turn in turns],
                self._task.reward,
            )
            for (key, turn), grade in zip(batch.items(), grades, strict=True):
                graded = replace(turn, grade=grade)
                unit.responses[key] = replace(unit.responses[key], turn=graded)
