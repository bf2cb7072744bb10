"""Async environments: thousands of I/O-bound episodes at once, in the event loop of the pool.

    task.environment_mode=asyncio

A grader process takes one environment step at a time and can be killed. An environment that waits
for a server, a database or a browser needs no process: its methods are async, and the event loop of
the pool (`workers.event_loop`) awaits them, with a limit of task.reward.seconds on each call. The
rules for instances of `environment.Environment` also apply here.

A call that times out or loses its connection is retried once with a new instance, like a step that
loses its grader process. Any other exception fails the episode at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import time
import traceback
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from jzero.environments import environment
from jzero.environments.environment import Instance
from jzero.environments.episodes import Calls, Episodes
from jzero.errors import UserError
from jzero.http import RemoteError
from jzero.problems import bounds
from jzero.rewards import rewards, user_functions
from jzero.types import Grade, JsonValue, Problem, Turns
from jzero.workers.pool import Pool, Stepped, Stepping

if TYPE_CHECKING:
    from jzero.config import TaskConfig

T = TypeVar("T")

# Per pool. The oldest instances are closed, and rebuilt if their episodes continue.
MAX_INSTANCES = 65536
TRIES = 2
CLOSE_SECONDS = 1.0  # limit for closing one instance at the end of a run

_NO_GRADE = Grade(0.0, False, "")
_EVERYTHING = frozenset(user_functions.FROM_EPISODE)


class TookTooLong(Exception):
    """A call exceeded task.reward.seconds."""


class RaisedExit(Exception):
    """User-defined code raised SystemExit or the like, which would end the event loop or the run.

    The message describes the original exception.
    """


# The instances of each pool. They are closed when the pool is closed.
_INSTANCES: weakref.WeakKeyDictionary[Pool, Episodes[Instance]] = weakref.WeakKeyDictionary()


def stepping(
    pool: Pool,
    problem: Problem,
    sample_index: int,
    response: str,
    earlier: Turns,
    task: TaskConfig,
    *,
    is_last: bool,
) -> Stepping | None:
    """Returns the coroutine function that `Pool.submit` awaits for a turn.

    Returns None if the environment runs in grader processes. `earlier` holds the earlier turns, and
    the episode ends after this turn if `is_last`.
    """
    if problem.task != environment.NAME or environment.mode(task) != "asyncio":
        return None
    episode = f"{problem.id}/{sample_index}"
    return functools.partial(_step, pool, problem, episode, response, earlier, task, is_last)


def forget(pool: Pool, problem: Problem, sample_index: int, task: TaskConfig) -> None:
    """Closes the instance of an episode that ends before its environment reports the end."""
    if problem.task == environment.NAME and environment.mode(task) == "asyncio":
        pool.start(_forget(pool, f"{problem.id}/{sample_index}", task.reward.seconds))


async def _forget(pool: Pool, episode: str, seconds: float) -> None:
    with contextlib.suppress(Exception):  # the episode already has its score
        await await_calls(_instances_of(pool).end(episode), seconds)


def resetting(pool: Pool, gold: JsonValue, task: TaskConfig) -> Stepping:
    """Returns the coroutine function that `Pool.submit` awaits for a prompt.

    The function resets an instance and closes it.
    """

    async def reset() -> Stepped:
        def reset_once() -> Calls[Grade]:
            return environment.reset_calls(task.environment, gold, bounds.reply_bytes(task))

        grade = await _grade_of_calls(pool, task, reset_once)
        return Stepped(grade, needs_worker=False)

    return reset


async def _step(
    pool: Pool,
    problem: Problem,
    episode: str,
    response: str,
    earlier: Turns,
    task: TaskConfig,
    is_last: bool,
) -> Stepped:
    """Returns the grade of a turn, with the rewards that take the environment as an argument."""
    start = time.perf_counter()
    instances = _instances_of(pool)

    def step_once() -> Calls[Grade]:
        result = yield from environment.step_calls(
            task.environment,
            instances,
            episode,
            problem.gold,
            earlier,
            response,
            is_last,
            bounds.reply_bytes(task),
        )
        return environment.to_grade(result)

    grade = await _grade_of_calls(pool, task, step_once)
    # Rewards that take the environment run here, because its instance lives in this event loop.
    # A grader process computes other rewards (`rewards.need_worker`).
    called: list[str] = []
    if not grade.failed:
        values = user_functions.episode_values(problem, response, earlier, _EVERYTHING)
        values["turns"] = [*earlier, (response, grade)]
        values |= {"response": response, "gold": problem.gold, "task": task}
        instance = instances.get(episode)
        assert instance is not None, f"{episode=}"
        values[user_functions.ENVIRONMENT] = instance.environment
        for name in rewards.asking_for_environment(task.reward):
            called.append(name)
            grade = await _add_reward(pool, task, name, grade, values)
            if grade.failed:
                break
        grade = await _end(pool, task, episode, grade)
    grade = replace(grade, seconds=time.perf_counter() - start)
    return Stepped(grade, rewards.need_worker(task.reward, called), tuple(called))


async def _end(pool: Pool, task: TaskConfig, episode: str, grade: Grade) -> Grade:
    """Closes the instance if the episode is over or has failed."""
    instances = _instances_of(pool)

    def end_once() -> Calls[Grade]:
        if grade.failed:
            yield from instances.end(episode)
        else:
            yield from environment.end_calls(instances, episode)
        return grade

    return await _grade_of_calls(pool, task, end_once, grade)


async def _add_reward(
    pool: Pool, task: TaskConfig, name: str, grade: Grade, values: Mapping[str, object]
) -> Grade:
    """Returns the grade with the reward of a user-defined function."""

    def call() -> Calls[Grade]:
        returned = yield user_functions.invoke(name, values)
        if returned is None:
            return grade
        reward = user_functions.read_result(returned)
        parts = {f"{name}.{part}": value for part, value in reward.parts.items()}
        return replace(grade, parts=grade.parts | {name: reward.value} | parts)

    return await _grade_of_calls(pool, task, call, grade, name)


async def _grade_of_calls(
    pool: Pool,
    task: TaskConfig,
    make_calls: Callable[[], Calls[Grade]],
    before: Grade = _NO_GRADE,
    function: str = "",
) -> Grade:
    """Runs user-defined calls and returns their grade, or `before` marked as failed.

    `function` names the user-defined code in messages; empty means the environment.
    """
    function = function or task.environment
    reason = ""
    for _ in range(TRIES):
        try:
            # A step that failed has removed its instance, so the second try replays the episode in
            # a new instance.
            return await await_calls(make_calls(), task.reward.seconds)
        except TookTooLong:
            pool.count("timeouts")
            limit = f"task.reward.seconds={task.reward.seconds:g}"
            reason = f"timeout: {function} took more than {limit}"
        except (ConnectionError, EOFError) as error:
            pool.count("killed")
            reason = f"killed: {function}: {bounds.describe(error)}"
        except (RemoteError, UserError) as error:  # a remote failure: a traceback would not help
            pool.show_note(function, "failed", str(error))
            reason = f"error: {function}: {bounds.describe(error)}"
            break
        except Exception as error:  # user-defined code may raise anything
            _show_traceback(pool, function, error)
            reason = f"error: {function}: {bounds.describe(error)}"
            break
    return replace(before, reason=bounds.one_line(reason), failed=True, reply=None)


def _show_traceback(pool: Pool, function: str, error: Exception) -> None:
    cause = error.__cause__ if isinstance(error, RaisedExit) else None
    text = ""
    with contextlib.suppress(BaseException):  # formatting a hostile exception may itself fail
        text = "".join(traceback.format_exception(cause or error))
    pool.show_note(function, f"raised {bounds.type_name(cause or error)}", text)


async def await_calls(calls: Calls[T], seconds: float) -> T:
    """Runs calls one after the other and awaits each for at most `seconds`.

    Raises:
        TookTooLong: an awaitable took longer. It is cancelled.
        RaisedExit: a call raised a BaseException that is not an Exception.
        Exception: any exception that the calls raise.
    """
    try:
        returned = _advance(functools.partial(next, calls))
        while True:
            try:
                value = await _await_for(returned, seconds)
            except Exception as error:
                # The calls may clean up after the error, as `closed_on_error` does.
                returned = _advance(functools.partial(calls.throw, error))
            else:
                returned = _advance(functools.partial(calls.send, value))
    except StopIteration as end:
        return end.value
    except asyncio.CancelledError:  # the run has ended: close the instance in the middle of a step
        await _abandon(calls)
        raise


def _advance(advance: Callable[[], object]) -> object:
    # Synchronous user-defined code runs here too, so BaseException is contained as in `_contain`.
    try:
        return advance()
    except Exception:
        raise
    except BaseException as error:
        raise RaisedExit(bounds.describe(error)) from error


async def _contain(returned: Awaitable[object]) -> object:
    """Awaits an awaitable from user-defined code and turns exits into RaisedExit.

    SystemExit in a task would end the event loop.
    """
    try:
        return await returned
    except (Exception, GeneratorExit):
        raise
    except asyncio.CancelledError:
        # Distinguish a real cancellation from a CancelledError that user-defined code raised.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RaisedExit("CancelledError") from None
    except BaseException as error:
        raise RaisedExit(bounds.describe(error)) from error


async def _abandon(calls: Calls[T]) -> None:
    """Raises an error inside the calls, so that their cleanup runs."""
    with contextlib.suppress(Exception):
        returned = calls.throw(ConnectionAbortedError("the run has ended"))
        while True:
            returned = calls.send(await _await_for(returned, CLOSE_SECONDS))


async def _await_for(returned: object, seconds: float) -> object:
    """Awaits `returned` if it is awaitable, for at most `seconds`."""
    if not inspect.isawaitable(returned):
        return returned
    # asyncio.wait_for would wait until a cancelled task ends, and a hostile task may never end.
    task = asyncio.ensure_future(_contain(returned))
    try:
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            raise TookTooLong(f"took more than {seconds:g} seconds")
    finally:
        task.cancel()  # no effect on a finished task
    if task.cancelled():
        raise RaisedExit("CancelledError: the task cancelled itself")
    error = task.exception()
    if isinstance(error, GeneratorExit):  # user-defined code raised it
        raise RaisedExit(bounds.describe(error)) from error
    return task.result()


def _instances_of(pool: Pool) -> Episodes[Instance]:
    """Returns the instances of a pool. They are closed when the pool is closed."""
    if pool not in _INSTANCES:
        instances: Episodes[Instance] = Episodes(MAX_INSTANCES)
        _INSTANCES[pool] = instances

        async def close() -> None:
            await await_calls(instances.close(), CLOSE_SECONDS)

        pool.at_end(close)
    return _INSTANCES[pool]
