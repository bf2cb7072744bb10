"""Agents: programs that speak OpenAI's API and end with a reward, as the environments of a policy.

    task.name=agent task.agent=module:function       or FILE.py:function, or command:PROGRAM

    agent(problem, base_url, api_key, model) -> reward

An agent is an episode. It gets a problem, and requests as many responses as it likes from the chat
endpoint (`chat_endpoint`). Its API key names its `Session`. A coroutine runs in the event loop of
the pool; a plain function and a command run in a process of their own, with these environment
variables:

    OPENAI_BASE_URL, OPENAI_API_KEY   where OpenAI's clients look for them
    JZERO_MODEL                       the name of the model
    JZERO_PROBLEM_FILE                a file with the problem in JSON
    JZERO_REWARD_FILE                 a file for the reward in JSON

An agent may also send its reward to BASE_URL/reward. An agent that raises an exception, takes more
than `task.agent_seconds` or ends without a reward fails: its episode has no score.

What a session requests arrives in an `Inbox` as a `Call`, and its end as an `Ended`: the decoding
thread takes both (`rollout.agents`). Imports no jax.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import queue
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

from jzero import http
from jzero.environments.asyncio_environments import show_traceback
from jzero.environments.chat_endpoint import MODEL, Answer, ChatEndpoint, Request, RequestError
from jzero.environments.environment import CORRECT, RaisedExit, TookTooLong, limited
from jzero.errors import UserError, quoted
from jzero.problems import bounds
from jzero.problems.bounds import Reward
from jzero.rewards.user_functions import find_function, reason_of_import
from jzero.types import JsonValue
from jzero.workers.pool import Pool

if TYPE_CHECKING:
    from jzero.config import TaskConfig

NAME = "agent"  # the task's name
COMMAND = "command:"  # prefix of a program in any language
COMPLETIONS = "completions"  # part of a reward: the rewards of single completions, by their ids
PROGRAM = "jzero.environments.agent_program"
MAX_PENDING = 64  # requests of a session that wait at the same time
MAX_REWARD_BYTES = 1 << 18  # of the file with a reward
MAX_ERROR_BYTES = 4000  # shown of what a program writes to stderr
END_SECONDS = 5.0  # for a killed program to end

AsyncAgent = Callable[[dict[str, JsonValue], str, str, str], object]


class Outcome(NamedTuple):
    """The end of an agent."""

    reward: Reward = Reward(0.0, {})
    is_correct: bool = False
    completions: dict[str, float] = {}  # noqa: RUF012 (never changed) rewards by completion
    failure: str = ""  # why the episode has no score; "" if it has one
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class Call:
    """A request of a session that waits for its answer."""

    session: Session
    request: Request
    answer: Future[Answer]

    def refuse(self, error: RequestError) -> None:
        """Answers the request with an error."""
        with contextlib.suppress(InvalidStateError):  # the session has ended
            self.answer.set_exception(error)

    def finish(self, answer: Answer) -> bool:
        """Answers the request. Returns whether the session could take the answer."""
        try:
            self.answer.set_result(answer)
        except InvalidStateError:
            return False
        return True


class Ended(NamedTuple):
    """An agent that has ended."""

    session: Session
    outcome: Outcome


Event: TypeAlias = Call | Ended
Inbox: TypeAlias = "queue.SimpleQueue[Event]"


@dataclass(eq=False)
class Session:
    """The requests of one agent. The threads of endpoint, agent and decoder use it."""

    problem: dict[str, JsonValue]
    inbox: Inbox
    max_requests: int
    key: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    num_requested: int = 0  # responses
    num_refused: int = 0  # requests that were answered with an error
    reward: JsonValue = None  # that the agent has sent to the endpoint
    is_closed: bool = False
    task: asyncio.Task[object] | None = None  # that runs the agent
    loop: asyncio.AbstractEventLoop | None = None  # of the task
    _pending: set[Future[Answer]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def respond(self, request: Request) -> Future[Answer]:
        """See `Responder.respond`."""
        with self._lock:
            if self.is_closed:
                raise RequestError("the session has ended", 401)
            self._pending = {answer for answer in self._pending if not answer.done()}
            error = self._reason_to_refuse(request)
            if error is not None:
                self.num_refused += 1
                raise error
            self.num_requested += request.num_choices
            answer: Future[Answer] = Future()
            self._pending.add(answer)
            # Within the lock, so that no call follows the end of its session.
            self.inbox.put(Call(self, request, answer))
        return answer

    def _reason_to_refuse(self, request: Request) -> RequestError | None:
        if self.num_requested + request.num_choices > self.max_requests:
            return RequestError(
                f"task.agent_requests={self.max_requests}: the agent has requested as many "
                "responses; raise it, or end the episode earlier",
                403,
            )
        if len(self._pending) >= MAX_PENDING:
            return RequestError(f"{MAX_PENDING} requests of the session wait already", 429)
        return None

    def take_reward(self, reward: JsonValue) -> None:
        """See `Responder.take_reward`."""
        with self._lock:
            self.reward = reward

    def close(self) -> None:
        """Ends the session: its key is no longer valid, and requests that wait get an error."""
        with self._lock:
            self.is_closed = True
            pending = self._pending
        for answer in pending:
            with contextlib.suppress(InvalidStateError):
                answer.set_exception(RequestError("the session has ended", 503))

    def cancel(self) -> None:
        """Ends the session and its agent, without waiting for the agent."""
        self.close()
        if self.task is not None and self.loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self.loop.call_soon_threadsafe(self.task.cancel)


# What an agent is.


@dataclass(frozen=True)
class Agent:
    """An agent by its name, task.agent."""

    name: str
    function: AsyncAgent | None  # a coroutine function; None: a process
    arguments: tuple[str, ...] = ()  # of the process


def find_agent(name: str) -> Agent:
    """Returns the agent of `task.agent=name`.

    Raises:
        UserError: there is no such function or program.
    """
    what = f"task.agent={name}"
    if name.startswith(COMMAND):
        try:
            arguments = shlex.split(name.removeprefix(COMMAND))
        except ValueError as error:
            raise UserError(f"{what} cannot be split into words ({error}): mend it") from None
        if not arguments or shutil.which(arguments[0]) is None:
            raise UserError(f"{what}: there is no such program: install it, or give its path")
        return Agent(name, None, tuple(arguments))
    try:
        function = find_function(name)
    except Exception as error:  # the module is the user's: its import may raise anything
        raise UserError(
            f"{what} is not a module:function or FILE.py:function ({reason_of_import(name, error)})"
        ) from None
    call = getattr(function, "__call__", None)  # noqa: B004 (an instance with an async __call__)
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call):
        return Agent(name, cast(AsyncAgent, function))
    return Agent(name, None, (sys.executable, "-m", PROGRAM, name))


def read_outcome(returned: object) -> Outcome:
    """Returns the outcome of what an agent has returned, or sent.

    Raises:
        TypeError, ValueError: it is not a reward.
    """
    if returned is None:
        raise TypeError(
            "the agent has ended without a reward: return a number or a dict, write it to "
            "JZERO_REWARD_FILE, or send it to BASE_URL/reward"
        )
    is_correct: bool | None = None
    completions: dict[str, float] = {}
    if isinstance(returned, dict):
        parts = dict(returned)
        by_completion = parts.pop(COMPLETIONS, None)
        if by_completion is not None:
            if not isinstance(by_completion, dict):
                raise TypeError(f"{COMPLETIONS} is {quoted(by_completion)}: it has to be a dict")
            completions = {str(id): bounds.read_number(r) for id, r in by_completion.items()}
        if CORRECT in parts:
            is_correct = bool(parts.pop(CORRECT))
        returned = parts or 0.0
    reward = bounds.read_reward(returned)
    return Outcome(reward, reward.value > 0 if is_correct is None else is_correct, completions)


# The agents of a pool.


class Host:
    """The endpoint and the running agents of a pool."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.endpoint = ChatEndpoint()
        self._ready: asyncio.Semaphore | None = None  # of processes, in the event loop
        self._has_end = False  # whether the pool closes the endpoint

    def start(self, session: Session, agent: Agent, task: TaskConfig) -> None:
        """Starts an agent. Its end arrives in the inbox of its session."""
        self.endpoint.responders[session.key] = session
        self.pool.start(self._run(session, agent, task), task.reward.seconds)
        if not self._has_end:
            self._has_end = True
            self.pool.at_end(self._close)

    async def _close(self) -> None:
        _HOSTS.pop(self.pool, None)
        self.endpoint.close()

    async def _run(self, session: Session, agent: Agent, task: TaskConfig) -> None:
        """Runs an agent to its end, whatever that is."""
        start = time.monotonic()
        session.loop, session.task = asyncio.get_running_loop(), asyncio.current_task()
        outcome = Outcome(failure=f"killed: {agent.name}: the event loop has ended")
        try:
            if not session.is_closed:
                outcome = await self._outcome(session, agent, task)
        finally:
            session.close()
            self.endpoint.responders.pop(session.key, None)
            seconds = time.monotonic() - start
            session.inbox.put(Ended(session, outcome._replace(seconds=seconds)))

    async def _outcome(self, session: Session, agent: Agent, task: TaskConfig) -> Outcome:
        seconds, name = task.agent_seconds, agent.name
        try:
            if agent.function is not None:
                arguments = (dict(session.problem), self.endpoint.url, session.key, MODEL)
                returned = await limited(seconds, agent.function, *arguments)
            else:
                if self._ready is None:
                    self._ready = asyncio.Semaphore(task.agent_processes)
                async with self._ready:
                    returned = await self._run_process(session, agent.arguments, seconds)
            return read_outcome(session.reward if returned is None else returned)
        except TookTooLong:
            self.pool.count("timeouts")
            reason = f"timeout: {name} took more than task.agent_seconds={seconds:g}"
        except ProgramError as error:
            self.pool.count("killed")
            self.pool.show_note(name, "failed", str(error))
            reason = f"killed: {name}: {error}"
        except Exception as error:  # user-defined code may raise anything
            self.pool.count("errors")
            show_traceback(self.pool, name, error)
            shown = error if not isinstance(error, RaisedExit) else (error.__cause__ or error)
            reason = f"error: {name}: {bounds.describe(shown)}"
        return Outcome(failure=bounds.one_line(reason))

    async def _run_process(
        self, session: Session, arguments: Sequence[str], seconds: float
    ) -> object:
        """Runs a program, and returns its reward; None if it has written none.

        Raises:
            TookTooLong: the program has run for `seconds`.
            ProgramError: the program has failed.
        """
        with tempfile.TemporaryDirectory(prefix="jzero-agent-") as folder:
            problem, reward = Path(folder, "problem.json"), Path(folder, "reward.json")
            problem.write_text(json.dumps(session.problem), encoding="utf-8")
            environment = {
                "OPENAI_BASE_URL": self.endpoint.url,
                "OPENAI_API_KEY": session.key,
                "JZERO_MODEL": MODEL,
                "JZERO_PROBLEM_FILE": str(problem),
                "JZERO_REWARD_FILE": str(reward),
                "PYTHONPATH": os.pathsep.join(sys.path),  # the program imports the same modules
            }
            process = await asyncio.create_subprocess_exec(
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env=os.environ | environment,
                start_new_session=True,  # so that its children end with it
            )
            try:
                error_text = await limited(seconds, _read_errors, process)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                waiting = asyncio.ensure_future(process.wait())
                await asyncio.wait([waiting], timeout=END_SECONDS)
                waiting.cancel()
            if process.returncode != 0:
                raise ProgramError(f"its status was {process.returncode}: {error_text}")
            return _read_reward_file(reward)


class ProgramError(RuntimeError):
    """A program that failed."""


async def _read_errors(process: asyncio.subprocess.Process) -> str:
    """Returns the end of what a program writes to stderr, once the program has ended."""
    assert process.stderr is not None
    ended = asyncio.ensure_future(process.wait())
    text = b""
    try:
        while not ended.done() or not process.stderr.at_eof():
            reading = asyncio.ensure_future(process.stderr.read(1 << 16))
            await asyncio.wait([reading, ended], return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                # A child of the program may hold its stderr open.
                await asyncio.wait([reading], timeout=0.1)
                reading.cancel()
                if not reading.done():
                    break
            if not reading.cancelled() and (part := reading.result()):
                text = (text + part)[-MAX_ERROR_BYTES:]
    finally:
        ended.cancel()
    return text.decode(errors="replace").strip()


def _read_reward_file(path: Path) -> JsonValue:
    """Returns the reward that a program has written, None if it has written none.

    Raises:
        ValueError: the file is too long, or not JSON.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_REWARD_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(data) > MAX_REWARD_BYTES:
        raise ValueError(f"JZERO_REWARD_FILE has more than {MAX_REWARD_BYTES} bytes")
    return http.parse_json(data)


# One endpoint for all steps and evaluations of a run.
_HOSTS: weakref.WeakKeyDictionary[Pool, Host] = weakref.WeakKeyDictionary()


def host_of(pool: Pool) -> Host:
    """Returns the host of a pool, which ends with the pool."""
    if pool not in _HOSTS:
        _HOSTS[pool] = Host(pool)
    return _HOSTS[pool]
