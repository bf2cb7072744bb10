"""Async environments: thousands of I/O-bound episodes at once, in the event loop of the pool.

    task.environment_mode=asyncio

A grader process takes one environment step at a time and can be killed. An environment that waits
for a server, a database or a browser needs no process: its methods are async, and the event loop of
the pool (`workers.event_loop`) awaits them, with a limit of task.reward.seconds on each call. The
rules of `environment` also apply here. The pool imports `step` by name.

A call that times out or loses its connection is retried once with a new instance, like a step that
loses its grader process. Any other exception fails the episode at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import traceback
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from jzero.environments import environment
from jzero.environments.environment import (
    Episodes,
    Observation,
    RaisedExit,
    TookTooLong,
    UserEnvironment,
    limited,
)
from jzero.errors import UserError
from jzero.http import RemoteError
from jzero.problems import bounds
from jzero.rewards import rewards, user_functions
from jzero.types import Grade, JsonValue, Problem
from jzero.workers.pipe import TurnRequest
from jzero.workers.pool import Pool, Stepped

if TYPE_CHECKING:
    from jzero.config import TaskConfig

T = TypeVar("T")

# Per pool. The oldest instances are closed, and rebuilt if their episodes continue.
MAX_INSTANCES = 65536
TRIES = 2
CLOSE_SECONDS = 1.0  # limit for closing one instance at the end of a run

_NO_GRADE = Grade(0.0, False, "")


# The instances of each pool. They are closed when the pool is closed.
_INSTANCES: weakref.WeakKeyDictionary[Pool, Episodes[UserEnvironment]] = weakref.WeakKeyDictionary()


async def step(pool: Pool, request: TurnRequest) -> Stepped:
    """Returns the grade of a turn, with the rewards that take the environment as an argument."""
    start = time.perf_counter()
    task = request.task
    instances = _instances_of(pool)
    grade = await _grade_of(
        pool, task, functools.partial(environment.take_step, instances, request, _call(pool, task))
    )
    # Rewards that take the environment run here, because its instance lives in this event loop.
    # A grader process computes other rewards (`rewards.need_worker`).
    called: list[str] = []
    needs_worker = False
    if not grade.failed:
        # The default reward calls no function.
        if tuple(task.reward.functions) != rewards.DEFAULT:
            instance = instances.get(request.episode)
            assert instance is not None, f"{request.episode=}"
            values = {
                **request.values,
                "response": request.response,
                "gold": request.gold,
                "task": task,
                "turns": [*request.earlier, (request.response, grade)],
                user_functions.ENVIRONMENT: instance.instance,
            }
            for name in rewards.asking_for_environment(task.reward):
                called.append(name)
                grade = await _add_reward(pool, task, name, grade, values)
                if grade.failed:
                    break
            needs_worker = rewards.need_worker(task.reward, called)
        grade = await _end(pool, request, grade)
    grade = replace(grade, seconds=time.perf_counter() - start)
    return Stepped(grade, needs_worker, tuple(called))


async def reset(
    pool: Pool,
    task: TaskConfig,
    row: dict[str, JsonValue],
    seed: int,
) -> Observation | str:
    """Resets an environment to obtain a prompt; returns the reason if it fails."""

    async def reset_once() -> Observation:
        return await environment.reset_once(task, row, seed, _call(pool, task))

    return await _result_of(pool, task, reset_once)


def forget(pool: Pool, problem: Problem, sample_index: int, task: TaskConfig) -> None:
    """Closes the instance of an episode that ends before its environment reports the end."""
    if problem.task == environment.NAME and environment.mode(task) == "asyncio":
        pool.start(_forget(pool, f"{problem.id}/{sample_index}"))


async def _forget(pool: Pool, episode: str) -> None:
    with contextlib.suppress(Exception):  # the episode already has its score
        await _instances_of(pool).end(episode)


async def _end(pool: Pool, request: TurnRequest, grade: Grade) -> Grade:
    """Closes the instance if the episode is over or has failed."""
    instances = _instances_of(pool)

    async def end_once() -> Grade:
        if grade.failed:
            await instances.end(request.episode)
        else:
            await environment.end_step(instances, request.episode)
        return grade

    return await _grade_of(pool, request.task, end_once, grade)


async def _add_reward(
    pool: Pool,
    task: TaskConfig,
    name: str,
    grade: Grade,
    values: Mapping[str, object],
) -> Grade:
    """Returns the grade with the reward of a user-defined function."""

    async def add() -> Grade:
        returned = await limited(task.reward.seconds, user_functions.invoke, name, values)
        # The function does not apply to this response, so it adds no part.
        if returned is None:
            return grade
        reward = bounds.read_reward(returned)
        parts = {f"{name}.{part}": value for part, value in reward.parts.items()}
        return replace(grade, parts=grade.parts | {name: reward.value} | parts)

    return await _grade_of(pool, task, add, grade, name)


async def _grade_of(
    pool: Pool,
    task: TaskConfig,
    attempt: Callable[[], Awaitable[Grade]],
    before: Grade = _NO_GRADE,
    function: str = "",
) -> Grade:
    """Returns the grade of an attempt, or `before` marked as failed."""
    result = await _result_of(pool, task, attempt, function)
    if isinstance(result, str):
        return replace(before, reason=result, failed=True, reply=None)
    return result


async def _result_of(
    pool: Pool,
    task: TaskConfig,
    attempt: Callable[[], Awaitable[T]],
    function: str = "",
) -> T | str:
    """Returns the result of an attempt to run user-defined code, or the reason why it failed.

    `function` names the user-defined code in messages; empty means the environment.
    """
    function = function or task.environment
    reason = ""
    for _ in range(TRIES):
        try:
            # A step that failed has removed its instance, so the second try replays the episode in
            # a new instance.
            return await attempt()
        except TookTooLong:
            pool.count("timeouts")
            limit = f"task.reward.seconds={task.reward.seconds:g}"
            reason = f"timeout: {function} took more than {limit}"
        # Counted like a killed grader process: the state of the episode is lost, and a new instance
        # may succeed.
        except (ConnectionError, EOFError) as error:
            pool.count("killed")
            reason = f"killed: {function}: {bounds.describe(error)}"
        except (RemoteError, UserError) as error:  # a remote failure: a traceback would not help
            pool.show_note(function, "failed", str(error))
            reason = f"error: {function}: {bounds.describe(error)}"
            break
        except Exception as error:  # user-defined code may raise anything
            show_traceback(pool, function, error)
            reason = f"error: {function}: {bounds.describe(error)}"
            break
        except BaseException as error:  # of a returned object, for example in its __repr__
            current = asyncio.current_task()
            is_cancelled = current is not None and current.cancelling() > 0
            if is_cancelled or isinstance(error, GeneratorExit):
                raise
            raised = RaisedExit(bounds.describe(error))
            raised.__cause__ = error
            show_traceback(pool, function, raised)
            reason = f"error: {function}: {bounds.describe(raised)}"
            break
    return bounds.one_line(reason)


def show_traceback(pool: Pool, function: str, error: Exception) -> None:
    """Prints the traceback of user-defined code, each kind of error once."""
    cause = error.__cause__ if isinstance(error, RaisedExit) else None
    text = ""
    with contextlib.suppress(BaseException):  # formatting a hostile exception may itself fail
        text = "".join(traceback.format_exception(cause or error))
    pool.show_note(function, f"raised {bounds.type_name(cause or error)}", text)


def _call(pool: Pool, task: TaskConfig) -> environment.Call:
    """Returns the function that calls the methods of instances, each with its time limit."""

    async def call(function: Callable[..., object], *arguments: object) -> object:
        # Once the run has ended, instances are only closed.
        seconds = CLOSE_SECONDS if pool.is_closed else task.reward.seconds
        return await limited(seconds, function, *arguments)

    return call


def _instances_of(pool: Pool) -> Episodes[UserEnvironment]:
    """Returns the instances of a pool. They are closed when the pool is closed."""
    if pool not in _INSTANCES:
        _INSTANCES[pool] = Episodes(MAX_INSTANCES)
        pool.at_end(_INSTANCES[pool].close)
    return _INSTANCES[pool]
